"""How reports come: warnings and errors, of which line and thread, how many, the setting."""

import inspect
import re
import threading
import warnings

import pytest
import torch
from race_pairs import DEVICE, openreg, sanitizer, stream_pair

pytestmark = pytest.mark.usefixtures("watching")


def race():
    here, side = stream_pair()
    a = torch.ones(10, device=DEVICE)
    with side:
        a.add_(1)
    here.wait_stream(side)
    return a


def test_mode_warn_warns_with_the_report():
    with warnings.catch_warnings(record=True) as calls:
        warnings.simplefilter("always")
        race()
    (warning,) = calls
    assert issubclass(warning.category, UserWarning) and warning.filename == __file__
    assert str(warning.message) == sanitizer.reports()[0].text(kind="")


def test_mode_warn_warns_once_of_a_pair():
    side = openreg.Stream()
    a = torch.ones(10, device=DEVICE)
    with warnings.catch_warnings(record=True) as calls:
        warnings.simplefilter("always")
        for _ in range(5):
            a.add_(1)
            with side:
                a.mul_(2)
    assert [report.number for report in sanitizer.reports()] == [1, 2]  # each after the other
    assert len(calls) == 2, calls


def test_mode_error_raises_each_time():
    sanitizer.enable("error")
    side = openreg.Stream()
    a = torch.ones(10, device=DEVICE)
    texts = set()
    for _ in range(3):
        with pytest.raises(sanitizer.DataRaceError, match=r"^data race on") as error, side:
            a.mul_(5)
        texts.add(str(error.value))
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(sanitizer.DataRaceError, match=r"^data race on") as error, side:
        a.mul_(5)
    assert len(texts) == 1 and f"test_sanitizer_modes.py:{line}\n" in str(error.value)
    (report,) = sanitizer.reports()
    assert texts == {report.text(kind="")}
    host = torch.empty(100, pin_memory=True)
    for _ in range(3):
        host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
        with pytest.raises(sanitizer.DataRaceError, match="the host reads"):
            host.sum()
        openreg.synchronize()
    side.wait_stream(openreg.current_stream())
    with side:
        a.mul_(5)
    openreg.synchronize()
    assert a.tolist() == [5.0] * 10 and len(sanitizer.reports()) == 2


def test_mode_error_raises_under_each_seed():
    sanitizer.enable("error")
    side = openreg.Stream()
    results = []

    def scale():
        a = torch.ones(1000, device=DEVICE)
        try:
            with side:
                a.mul_(5)
            results.append(None)
        except sanitizer.DataRaceError as error:
            results.append(type(error))
        return 0

    assert openreg.testing.explore(scale, 3).ok
    assert results == [sanitizer.DataRaceError] * len(results) and len(results) >= 4


def test_refused_operator_leaves_no_access_behind():
    sanitizer.enable("error")
    side = openreg.Stream()
    a = torch.ones(1000, device=DEVICE)
    b = torch.ones(1000, device=DEVICE)
    side.wait_stream(openreg.current_stream())
    a.add_(1)
    with side, pytest.raises(sanitizer.DataRaceError):
        torch.add(b, 1, out=a)
    with side, pytest.raises(sanitizer.DataRaceError):
        torch._foreach_add_([b, a], 1.0)
    a.add_(1)
    b.add_(1)
    del a, b
    torch.zeros(1000, device=DEVICE).add_(1)
    assert len(sanitizer.reports()) == 2


@pytest.mark.slow
def test_reports_beyond_a_thousand_come_and_are_not_kept():
    side = openreg.Stream()
    a = torch.ones(1020, device=DEVICE)
    sanitizer.enable("error", stacks=False)
    a.add_(1)
    for i in range(1010):
        with side, pytest.raises(sanitizer.DataRaceError, match=r"^data race on openreg:0"):
            a[i : i + 1].add_(1)
    assert len(sanitizer.reports()) == 1000
    sanitizer.enable("warn", stacks=False)
    a.add_(1)
    with warnings.catch_warnings(record=True) as calls, side:
        warnings.simplefilter("always")
        for i in range(1010, 1020):  # a pair at one address is reported once
            a[i : i + 1].add_(1)
    assert len(calls) == 10 and str(calls[-1].message).startswith("data race on openreg:0")
    assert len(sanitizer.reports()) == 1000


def test_accesses_of_five_hundred_columns_are_distinguished():
    here, side = stream_pair()
    x = torch.zeros(30, 500, device=DEVICE)
    side.wait_stream(here)
    with side:
        for i in range(499):
            x[:, i].add_(1)
    for column, reported in ((0, 1), (250, 2), (498, 3), (499, 3)):
        x[:, column].mul_(2)
        assert len(sanitizer.reports()) == reported, column
    here.wait_stream(side)


def test_modes_are_switched_and_reports_cleared():
    assert sanitizer.is_enabled()
    race()
    assert [report.number for report in sanitizer.reports()] == [1]
    sanitizer.disable()
    assert not sanitizer.is_enabled() and len(sanitizer.reports()) == 1
    race()
    assert len(sanitizer.reports()) == 1
    sanitizer.clear()
    assert sanitizer.reports() == []
    sanitizer.disable()
    with sanitizer.enable():
        with pytest.raises(sanitizer.DataRaceError):
            race()
    assert not sanitizer.is_enabled()
    with pytest.raises(ValueError, match=r"mode is 'loud'; allowed are 'error' and 'warn'"):
        sanitizer.enable("loud")
    assert issubclass(sanitizer.DataRaceError, RuntimeError)


def test_reports_without_stacks_have_none():
    sanitizer.enable("warn", stacks=False)
    race()
    (report,) = sanitizer.reports()
    assert report.earlier.stack is None and "no Python stack" in report.details()


def test_race_of_another_thread_raises_there():
    sanitizer.enable("error")
    caught = []

    def work():
        try:
            race()
        except sanitizer.DataRaceError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1 and "in work" in caught[0].report.details()
    torch.ones(3, device=DEVICE).sum().item()  # nothing is left for this one


def test_race_in_a_backward_thread_is_raised_by_backward():
    sanitizer.enable("error")
    side = openreg.Stream()

    class Race(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            copy = grad * 1
            with side:
                return copy.mul_(2)

    x = torch.ones(2, device=DEVICE, requires_grad=True)
    with pytest.raises(sanitizer.DataRaceError, match="RaceBackward"):
        Race.apply(x).sum().backward()


def test_sanitizer_setting_decides_for_a_process(run):
    code = """
        import torch
        side = torch.openreg.Stream()
        a = torch.ones(10, device="openreg")
        with side:
            a.add_(1)
        """
    done = run(code, {"OPENREG_SANITIZER": "1"})
    assert done.code == 1 and "torch.openreg.sanitizer.DataRaceError: " in done.err
    assert re.search(r'File "<string>", line \d+, in <module>', done.err)
    done = run(code, {"OPENREG_SANITIZER": "warn"})
    assert done.code == 0 and "UserWarning: data race on openreg:0" in done.err
    done = run(code, {"OPENREG_SANITIZER": "0"})
    assert (done.code, done.err) == (0, "")
    done = run(code, {"OPENREG_SANITIZER": "loud"})
    assert done.code == 0 and len(done.err.splitlines()) == 1 and "loud" in done.err


def test_sanitizer_memory_is_bounded(run_ok):
    """Of a loop that fetches batches on a side stream, and waits for the device now and then."""
    out = run_ok(
        """
        import torch

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        def steps(count):
            for i in range(count):
                host = source[i % 7 :].pin_memory()
                with side:
                    batch = host.to("openreg", non_blocking=True)
                here.wait_stream(side)
                batch.record_stream(here)
                x.mul_(0.5).add_(1)
                y = batch @ x
                result.copy_(y.sum(), non_blocking=True)
                if i % 100 == 0:
                    here.synchronize()
                    result.item()

        with torch.openreg.sanitizer.enable():
            here, side = torch.openreg.current_stream(), torch.openreg.Stream()
            x = torch.ones(16, 16, device="openreg")
            source, result = torch.ones(64, 16), torch.empty((), pin_memory=True)
            steps(2000)
            before = resident()
            steps(10_000)
            print((resident() - before) >> 20)
        """
    )
    assert int(out) < 4


def test_host_access_is_raised_at_the_next_synchronisation():
    sanitizer.enable("error")
    for synchronize in (openreg.synchronize, openreg.current_stream().synchronize):
        host = torch.empty(100, pin_memory=True)
        host.copy_(torch.ones(100, device=DEVICE), non_blocking=True)
        with pytest.raises(sanitizer.DataRaceError, match="the host reads"):
            if host.sum() is not None:
                synchronize()
        openreg.synchronize()
        assert host.sum() == 100


def test_race_that_a_gate_decides_is_raised_when_it_opens():
    sanitizer.enable("error")
    here, side = stream_pair()
    x = torch.ones(10, device=DEVICE)
    gate = openreg.testing.gate()
    side.wait_stream(here)
    with side:
        gate.wait()
        x.add_(1)
    x.mul_(2)
    with pytest.raises(sanitizer.DataRaceError, match=r"\(mul_\)"):
        gate.open()
    openreg.synchronize()
