"""The hang report: torch.openreg.hang_report, OPENREG_WATCHDOG_S, OPENREG_WATCHDOG_SIGNAL."""

import re

import pytest
import torch

import torch_openreg  # noqa: F401

WAITS = r"waits for the gate made at \S+:\d+, which has not been"

# Streams that wait for a gate; what is said on stderr can be read meanwhile.
STALL = """
    import os, tempfile, threading, time
    import torch

    said = tempfile.TemporaryFile()
    os.dup2(said.fileno(), 2)

    def heard():
        return os.pread(said.fileno(), 1 << 20, 0).decode()

    x = torch.ones(3, device="openreg")
    side = torch.Stream("openreg:1")
    gate = torch.openreg.testing.gate()
    gate.wait()
    event = torch.accelerator.current_stream().record_event()
    side.wait_event(event)

    def open_when_said(text):
        while text not in heard():
            time.sleep(0.01)
        gate.open()
"""
END = """
    torch.openreg.synchronize()
    assert x.tolist() == [1.0] * 3
    side.synchronize()
    print(heard())
"""


@pytest.mark.parametrize("seed", ["none", "7", "late"])
def test_hang_report_names_host_threads_that_wait(run_ok, seed):
    run_ok(
        """
        import os, threading, time
        import torch

        x = torch.ones(3, device="openreg")
        side = torch.openreg.Stream()
        side.wait_stream(torch.openreg.current_stream())
        gate = torch.openreg.testing.gate()
        gate.wait(side)
        with side:
            x.add_(1)
        event = side.record_event()

        def wait(thing):
            thing.synchronize()

        threads = [
            threading.Thread(target=wait, args=[thing], name=f"wait{i}")
            for i, thing in enumerate((side, event))
        ]
        for thread in threads:
            thread.start()
        report = ""
        while report.count("    thread 'wait") < 2 or "the gate made at" not in report:
            report = torch.openreg.hang_report()
            time.sleep(0.001)
        gate.open()
        told = " ".join(report.split()).replace("task 4", "task 3")  # the wait may not be needed
        for name, what in (("wait0", "task 3"), ("wait1", "an event, recorded as task 3")):
            line = f"<string>:15 thread '{name}' waits for {what} of stream side of openreg:0, for "
            assert line in told, report
        assert "which has not been signalled" in report
        seed = os.environ.get("OPENREG_SCHEDULE_SEED")
        named = {None: "", "7": "  schedule: seed 7; ", "late": "  schedule: late; "}[seed]
        assert named in report and ("schedule" in report) == bool(named), report
        for thread in threads:
            thread.join()
        assert x.tolist() == [2.0] * 3
        assert "waits for" not in torch.openreg.hang_report()
        """,
        {"OPENREG_SCHEDULE_SEED": seed} if seed != "none" else {},
    )


def test_hang_report_names_what_streams_wait_for(eventually):
    torch.openreg.synchronize()
    assert "no stream of this process has work" in torch.openreg.hang_report()
    x = torch.ones(3, device="openreg")
    side = torch.openreg.Stream(1)
    torch.openreg.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        x.add_(1)
        event = torch.accelerator.current_stream().record_event()
        side.wait_event(event)
        eventually(lambda: torch.openreg.hang_report().count("waiting, priority 0") == 2)
        text = torch.openreg.hang_report()
    assert text.startswith(
        "openreg: hang report\n\n  the default stream of openreg:0: waiting, priority 0"
    )
    assert re.search(rf"\n    task \d+: {WAITS}\s+signalled\n", text)
    assert re.search(
        r"\n  stream side of openreg:1, made at \S*test_hang.py:\d+: waiting, priority 0, ", text
    )
    assert re.search(
        r"\n    task \d+: waits for an event, recorded as task \d+ of the default stream of "
        r"openreg:0\n",
        text,
    )
    assert "0x" not in text
    side.synchronize()


def test_hang_report_names_the_operator_that_runs(eventually):
    torch.openreg._sleep(200_000_000)
    eventually(lambda: "running" in torch.openreg.hang_report())
    assert ", _sleep: on worker" in torch.openreg.hang_report()


@pytest.mark.parametrize("seed", ["off", "3", "late"])
def test_watchdog_prints_a_stall(run_ok, seed):
    wait = """
    threading.Thread(target=open_when_said, args=["the main thread "]).start()
    """
    settings = {"OPENREG_WATCHDOG_S": "0.3", "OPENREG_SCHEDULE_SEED": seed}
    said = run_ok(STALL + wait + END, settings)
    # The host may begin to wait when the streams have been told of.
    assert 1 <= said.count("openreg: hang report: ") <= 2
    for text in (
        "for 0.3 s (OPENREG_WATCHDOG_S)\n",
        "\n  stream side of openreg:1, made at <string>:12: waiting, priority 0",
        "recorded as task",
        "workers" if seed == "off" else f"  schedule: {'' if seed == 'late' else 'seed '}{seed}; ",
    ):
        assert text in said, said
    assert re.search(WAITS, said)
    assert re.search(
        r"\n  <string>:\d+\n +the main thread waits for task \d+ of the default stream of",
        said,
    )
    assert "0x" not in said


def test_watchdog_prints_while_a_thread_keeps_pythons_lock(run_ok):
    """The core's own text, with handles, as no name can be read."""
    keep = """
    import ctypes
    while "openreg: hang report" not in heard():
        ctypes.PyDLL(None).usleep(100_000)  # with the lock, which is free for a moment between
        if "openreg: hang report" not in heard():
            ctypes.PyDLL(None).usleep(3_000_000)
    gate.open()
    """
    said = run_ok(STALL + keep + END, {"OPENREG_WATCHDOG_S": "0.5"})
    assert "waits for external event 0x" in said, said


def test_hang_report_follows_a_signal_shared_with_faulthandler(run_ok):
    ask = """
    import faulthandler, signal
    faulthandler.register(signal.SIGUSR1, chain=True)
    while "which has not been" not in torch.openreg.hang_report():
        pass
    os.kill(os.getpid(), signal.SIGUSR1)
    open_when_said("  workers: ")
    """
    said = run_ok(STALL + ask + END, {"OPENREG_WATCHDOG_SIGNAL": "USR1"})
    assert "openreg: hang report: asked for by a signal (OPENREG_WATCHDOG_SIGNAL)\n" in said
    assert re.search(WAITS, said)
    assert "(most recent call first)" in said  # Python's stacks


@pytest.mark.parametrize(
    "settings", [{}, {"OPENREG_WATCHDOG_S": "30", "OPENREG_WATCHDOG_SIGNAL": "USR2"}], ids=str
)
def test_watchdog_starts_no_thread_before_there_is_work(run_ok, settings):
    names = run_ok(
        f"""
        import threads, time
        import torch
        assert torch.openreg.device_count() == 2
        assert not [name for name in threads.names() if name.startswith("openreg")]
        torch.ones(3, device="openreg").sum().item()
        limit = time.monotonic() + {60 if settings else 0}
        while "openreg-watch" not in threads.names() and time.monotonic() < limit:
            time.sleep(0.001)  # it has its parent's name until it has set its own
        print("openreg-watch" in threads.names())
        """,
        settings,
    )
    assert names.strip() == str(bool(settings))


def test_watchdog_setting_that_is_refused_is_named(run):
    done = run("import torch; torch.openreg.device_count()", {"OPENREG_WATCHDOG_S": "soon"})
    assert done.err == (
        "openreg: OPENREG_WATCHDOG_S='soon' is not a number of seconds above 0, at most "
        "1000000000; using no\n  watchdog\n"
    )
    done = run("import torch; torch.openreg.device_count()", {"OPENREG_WATCHDOG_SIGNAL": "KILL"})
    assert done.err == (
        "openreg: OPENREG_WATCHDOG_SIGNAL='KILL' is not HUP, QUIT, USR1, USR2 or WINCH; using no "
        "signal\n"
    )
