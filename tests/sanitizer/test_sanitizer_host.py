"""What the host does to pinned memory without an operator: by NumPy, ctypes, system calls."""

import ctypes
import errno
import io
import os
import pickle
import signal
import threading
import warnings

import numpy
import pytest
import torch
from race_pairs import DEVICE, both_forms, found, openreg, sanitizer

pytestmark = pytest.mark.usefixtures("watching")

LARGE = 1 << 20  # numbers, of which NumPy adds up 500 or more without the GIL
libc = ctypes.CDLL(None)


def filled(size=1000, non_blocking=True):
    """Host memory that a copy is still writing."""
    return torch.ones(size, device=DEVICE).to("cpu", non_blocking=non_blocking)


def foreign_copy(host):
    """By C, without the GIL."""
    to = ctypes.create_string_buffer(host.nbytes)
    libc.memcpy(to, ctypes.c_void_p(host.data_ptr()), ctypes.c_size_t(host.nbytes))
    return to.raw


READS = {
    "sum": lambda h: h.numpy().sum(),
    "array": lambda h: numpy.array(h.numpy()).sum(),
    "tolist": lambda h: sum(h.numpy().tolist()),
    "bytes": lambda h: len(bytes(memoryview(h.numpy()))),
    "torch.save": lambda h: torch.save(h, io.BytesIO()),
    "pickle": lambda h: len(pickle.dumps(h)),
    "apply_": lambda h: h.apply_(lambda v: v).sum().item(),
    "ctypes": lambda h: len(ctypes.string_at(h.data_ptr(), h.nbytes)),
    "ctypes, without the GIL": lambda h: len(foreign_copy(h)),
    "write": lambda h: h.numpy().fill(3),
    "strides": lambda h: h.numpy()[::7].sum(),
}


@pytest.mark.parametrize("way", READS)
def test_host_read_by_numpy_raises_in_its_own_line(way):
    sanitizer.enable("error")
    read = READS[way]
    host = filled()
    with pytest.raises(sanitizer.DataRaceError, match="the host") as error:
        read(host)
        raise AssertionError("not raised, or later")
    (report,) = sanitizer.reports()
    line = read.__code__.co_firstlineno if way != "ctypes, without the GIL" else None
    frames = [frame.line for frame in report.later.stack if frame.filename == __file__]
    assert frames and (line is None or frames[-2] == line)
    assert "pinned" in report.memory and report.earlier.operator == "aten::copy_"
    assert error.value.report == report
    openreg.synchronize()
    before = READS[way](host)
    assert len(sanitizer.reports()) == 1 and (way != "sum" or before == 1000)


def test_host_read_of_an_element_raises_at_the_next_call():
    sanitizer.enable("error")
    host = filled().numpy()
    with pytest.raises(sanitizer.DataRaceError, match=r"the host reads") as error:
        value = host[5]
        str(value)  # where the interpreter looks around
        raise AssertionError("later")
    (frame, *_) = error.value.report.later.stack
    assert (
        frame.line
        == test_host_read_of_an_element_raises_at_the_next_call.__code__.co_firstlineno + 4
    )


def test_host_write_under_a_copy_that_reads_is_reported():
    def feed(orders):
        host = torch.ones(1000, pin_memory=True)
        host.to(DEVICE, non_blocking=True)
        assert host.numpy().sum() == 1000  # two readers
        if orders:
            openreg.synchronize()
        host.numpy()[:] = 2
        openreg.synchronize()

    both_forms(feed, "memory access / aten::copy_")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1000, LARGE])
def test_host_access_in_mode_warn_goes_on(size, dtype):
    host = torch.zeros(size, dtype=dtype, pin_memory=True)
    with warnings.catch_warnings(record=True) as calls:
        warnings.simplefilter("always")
        host.copy_(torch.ones(size, device=DEVICE), non_blocking=True)  # a cast is a kernel
        host.numpy().sum()
    (warning,) = calls  # of all its pages
    assert warning.filename == __file__ and "the host reads host" in str(warning.message)
    openreg.synchronize()
    assert host.numpy().sum() == size and len(sanitizer.reports()) == 1


@pytest.mark.parametrize("shape", [(1000, 1000), (64, 3)])
def test_kernels_read_and_write_guarded_memory(shape):
    def turn():
        source = torch.arange(float(shape[0] * shape[1])).view(shape).pin_memory()
        there = torch.empty(shape[::-1], dtype=torch.float64, device=DEVICE).t()
        there.copy_(source, non_blocking=True)
        host = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        host.copy_(there.neg(), non_blocking=True)
        host.copy_(there, non_blocking=True)
        openreg.synchronize()
        assert numpy.array_equal(host.numpy(), source.numpy())

    assert found(turn) == []


def test_host_operator_is_reported_once_beside_numpy():
    host = filled(LARGE)
    assert found(lambda: (host + 1, host.numpy().sum())) == ["aten::add.Tensor / aten::copy_"]


def test_host_access_that_is_ordered_is_not_reported():
    def work():
        ring = torch.zeros(8, 1000, pin_memory=True)  # rows that share pages
        side = openreg.Stream()
        copied = []
        for i in range(20):
            row = ring[i % 8].numpy()
            if i >= 8:
                copied[i - 8].synchronize()
            row[:] = i
            with side:
                there = ring[i % 8].to(DEVICE, non_blocking=True)
                copied.append(side.record_event())
                sums.append(there.sum())
        side.synchronize()
        for i in range(8):
            host = filled()
            event = openreg.current_stream().record_event()
            while i % 2 and not event.query():
                pass
            event.synchronize()
            assert host.numpy().sum() == 1000

    sums = []
    assert found(work) == []
    assert [float(s) for s in sums] == [1000.0 * i for i in range(20)]


def test_pinned_block_is_filled_again_when_it_is_handed_out():
    def feed():
        with openreg.Stream():
            for i in range(50):
                batch = torch.empty(1000, pin_memory=True)
                batch.numpy()[:] = i
                sums.append(batch.to(DEVICE, non_blocking=True).sum())
        openreg.synchronize()

    sums = []
    assert found(feed) == []
    assert [float(s) for s in sums] == [1000.0 * i for i in range(50)]


def test_pinning_loader_with_a_thread_is_not_reported():
    def load():
        data = torch.utils.data.TensorDataset(torch.arange(4096.0).view(64, 64))
        loader = torch.utils.data.DataLoader(data, 8, pin_memory=True)
        total = torch.zeros((), device=DEVICE)
        for (batch,) in loader:
            there = batch.to(DEVICE, non_blocking=True)
            assert batch.numpy().shape == (8, 64) and batch.numpy().sum() > 0
            total += there.sum()
        assert total.item() == 4095 * 4096 / 2

    assert found(load) == []


def test_host_access_behind_a_gate_is_reported_when_it_opens():
    sanitizer.enable("error")
    with openreg.testing.gate() as gate:
        gate.wait()
        host = torch.ones(1000, pin_memory=True)
        host.to(DEVICE, non_blocking=True)
        host.numpy()[:] = 2  # the gate opens later
    with pytest.raises(sanitizer.DataRaceError, match="the host writes"):
        host.numpy().fill(3)
    openreg.synchronize()


# ---- Where it comes out --------------------------------------------------------------------------


def in_thread(*steps):
    """What each raises, or returns."""
    results = []

    def work():
        for step in steps:
            try:
                results.append(step())
            except sanitizer.DataRaceError as error:
                results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results


def test_host_access_of_another_thread_raises_at_its_next_call():
    sanitizer.enable("error")
    host = filled().numpy()
    results = in_thread(host.sum, openreg.synchronize, openreg.synchronize)
    assert not isinstance(results[0], Exception) and results[2] is None
    # The line of the access, of which it is not the thread's.
    assert any(frame.name == "work" for frame in results[1].report.later.stack)


def test_host_access_of_an_ended_thread_is_raised_by_disable():
    sanitizer.enable("error")
    in_thread(filled().numpy().sum)
    openreg.synchronize()
    with pytest.raises(sanitizer.DataRaceError, match="the host reads"):
        sanitizer.disable()
    sanitizer.disable()
    sanitizer.enable("warn")
    in_thread(filled().numpy().sum)
    with pytest.warns(UserWarning, match="the host reads"):
        sanitizer.disable()


@pytest.mark.parametrize("where", ["main", "thread"])
def test_host_access_that_was_never_raised_fails_the_process(run, where):
    done = run(
        f"""
        import threading
        import torch
        torch.openreg.sanitizer.enable()

        def f():
            host = torch.ones(1000, device="openreg").to("cpu", non_blocking=True)
            host.numpy().sum()

        if {where == "main"}:
            f()
        thread = threading.Thread(target=f)
        thread.start()
        thread.join()
        print("it ends")
        """
    )
    assert done.code == 1 and done.err.count("the host reads") == 1, done.err
    assert done.out == ("" if where == "main" else "it ends\n")


def test_system_call_on_guarded_memory_fails():
    """Nothing faults, and nobody is told."""
    sanitizer.enable("error")
    read, write = os.pipe()
    for attempt in range(2):
        host = filled()
        if attempt:
            openreg.synchronize()
            assert os.write(write, host.numpy()) == 4000
            continue
        with pytest.raises(OSError, match="Bad address") as error:
            os.write(write, host.numpy())
        assert error.value.errno == errno.EFAULT
    os.close(read), os.close(write)
    assert sanitizer.reports() == []


# ---- Memory that is not guarded ------------------------------------------------------------------


def test_pinned_memory_from_before_has_a_checksum():
    sanitizer.disable()
    torch.accelerator.empty_host_cache()
    host = torch.zeros(1000, pin_memory=True)
    sanitizer.enable("error")
    with openreg.testing.schedule("early"):  # the copy is over at once, and nobody knows
        host.copy_(torch.ones(1000, device=DEVICE), non_blocking=True)
        host.numpy()[3] = 5
        with pytest.raises(sanitizer.DataRaceError, match="the host writes"):
            openreg.synchronize()
    host.copy_(torch.ones(1000, device=DEVICE), non_blocking=True)
    openreg.synchronize()
    host.numpy()[3] = 5
    openreg.synchronize()
    assert len(sanitizer.reports()) == 1


def test_pinned_block_from_before_is_guarded_when_handed_out_again():
    sanitizer.disable()
    torch.accelerator.empty_host_cache()
    address = torch.zeros(3 << 20, dtype=torch.uint8, pin_memory=True).data_ptr()
    sanitizer.enable("error")
    host = torch.zeros(3 << 20, dtype=torch.uint8, pin_memory=True)
    assert host.data_ptr() == address
    host.copy_(torch.ones(3 << 20, dtype=torch.uint8, device=DEVICE), non_blocking=True)
    with pytest.raises(sanitizer.DataRaceError):
        host.numpy().sum()
    openreg.synchronize()


def test_pinned_memory_is_mapped_once_while_the_sanitizer_is_off(run_ok):
    run_ok(
        """
        import torch

        def mirrors():
            with open("/proc/self/maps") as maps:
                return sum("memfd:openreg pinned" in line for line in maps)

        host = torch.ones(1000, pin_memory=True)
        host.to("openreg", non_blocking=True)
        host.numpy()[:] = 2
        assert mirrors() == 0
        torch.openreg.synchronize()
        with torch.openreg.sanitizer.enable():
            other = torch.ones(5 << 20, pin_memory=True)
            assert mirrors() == 2
        """
    )


CHANGES = {
    "enable": (["enable"], True),
    "disable": (["disable"], False),
    "enable, disable": (["enable", "disable"], False),
    "disable, enable": (["disable", "enable"], True),
}


@pytest.mark.racy
@pytest.mark.parametrize("changes, tells", CHANGES.values(), ids=CHANGES)
def test_faulthandler_may_come_and_go_while_memory_is_guarded(run, changes, tells):
    """It hears of no guard's fault, and of all others while it is on; both end the process, too."""
    done = run(
        f"""
        import ctypes, faulthandler, sys, warnings
        import torch
        torch.openreg.sanitizer.enable("warn")
        warnings.simplefilter("ignore")
        if "disable" == {changes[0]!r}:
            faulthandler.enable()
        for n, change in enumerate({changes!r}):
            host = torch.ones(1000, device="openreg").to("cpu", non_blocking=True)
            getattr(faulthandler, change)()
            host.numpy().sum()
            assert len(torch.openreg.sanitizer.reports()) == n + 1
        torch.openreg.synchronize()
        print("guarded", flush=True)
        ctypes.string_at(0)
        """,
        timeout=60,
    )
    assert done.out == "guarded\n" and done.code == -signal.SIGSEGV
    assert ("Fatal Python error: Segmentation fault" in done.err) == tells
