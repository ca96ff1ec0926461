"""What a host thread that waits runs itself, in the midst of anything: it is as if a lane had."""

import threading
import time

import pytest
import torch
from profiled import metadata
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import torch_openreg

SMALL, LARGE = 1000, 1 << 16  # elements: for one thread, and for lanes


def lanes_of(call, name):
    """The lanes that the kernels `name` of a call ran on; None stands for a host thread."""
    config = torch.profiler._ExperimentalConfig(expose_kineto_event_metadata=True)
    with profile(activities=[ProfilerActivity.PrivateUse1], experimental_config=config) as p:
        call()
    events = [e for e in p.events() if e.device_type == DeviceType.PrivateUse1 and e.name == name]
    assert events
    return [("lane" in metadata(e)) or None for e in events]


def ones(count, **options):
    made = torch.ones(count, device="openreg", **options)
    torch.accelerator.synchronize()
    return made


@pytest.fixture
def runs_on_the_host(eventually):
    """A lane that has just run something may still have the stream, and takes the task then."""

    def runs_on_the_host(call, name):
        eventually(lambda: lanes_of(call, name) == [None])

    return runs_on_the_host


@pytest.mark.simulated_device("its tasks run on waiting host threads")
def test_small_call_that_waits_runs_on_the_host(runs_on_the_host):
    runs_on_the_host(ones(SMALL).nonzero, "aten::nonzero")


def test_large_call_that_waits_runs_on_a_lane():
    assert lanes_of(ones(LARGE).nonzero, "aten::nonzero") == [True]


@pytest.mark.simulated_device("its tasks run on waiting host threads")
def test_blocking_copies_run_on_the_host(runs_on_the_host):
    large = ones(1 << 20, dtype=torch.double)
    runs_on_the_host(large.cpu, "Memcpy DtoH")
    half = torch.empty(1 << 20, dtype=torch.half)
    runs_on_the_host(lambda: half.copy_(large), "aten::copy_")
    assert torch.equal(half, torch.ones(1 << 20, dtype=torch.half))
    runs_on_the_host(lambda: large.copy_(half), "aten::copy_")
    assert torch.equal(large.cpu(), half.double())


def held(call):
    """The same call, on a lane: the stream is held until the call has queued its task."""
    with torch.openreg.testing.gate() as gate:
        gate.wait()

        def open_then():
            while torch_openreg._C._worker_info()["queued"] < 2:
                time.sleep(0.001)
            gate.open()

        opener = threading.Thread(target=open_then)
        opener.start()
        try:
            return call()
        finally:
            opener.join()


def test_call_behind_a_gate_runs_on_a_lane():
    x = ones(SMALL)
    assert lanes_of(lambda: held(x.nonzero), "aten::nonzero") == [True]


def test_profile_leaves_out_what_a_kernel_on_the_host_calls():
    x = ones(SMALL)
    torch.unique(x)

    def names(call):
        torch.accelerator.synchronize()
        with profile(activities=[ProfilerActivity.CPU]) as p:
            call()
        return {e.name for e in p.events() if e.name.startswith("aten::")}

    assert names(lambda: torch.unique(x)) == names(lambda: held(lambda: torch.unique(x)))


def test_results_of_a_kernel_on_the_host_have_the_callers_mode():
    x = ones(SMALL)
    with torch.inference_mode():
        assert x.nonzero().is_inference()
        assert torch.is_inference_mode_enabled()
    assert not x.nonzero().is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("openreg"):
        counts = torch.unique(x, return_counts=True)[1]
        assert counts.tolist() == [SMALL]
        assert torch.is_autocast_enabled("cpu")
    y = x.clone().requires_grad_()
    y[y > 0].sum().backward()
    assert torch.equal(y.grad, x)
    assert torch.is_grad_enabled()


def test_kernel_on_the_host_keeps_the_callers_threads_and_denormals():
    x = ones(SMALL)
    threads = torch.get_num_threads()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        x.nonzero()
        assert torch.get_num_threads() == threads
        assert (torch.tensor([1e-310], dtype=torch.double) + 0).item() == 0
    finally:
        torch.set_flush_denormal(False)


def test_error_of_a_kernel_on_the_host_is_raised_by_the_call():
    x = ones(SMALL)
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        torch.repeat_interleave(-ones(3, dtype=torch.long))
    assert x.nonzero().numel() == SMALL


def test_host_that_runs_a_kernel_releases_the_gil():
    """The host lets go of the GIL, so that a thread which holds it back in Python goes on."""
    x = ones(SMALL)
    seen, stop = [], threading.Event()

    def count():
        while not stop.is_set():
            seen.append(None)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(200):
            assert x.nonzero().numel() == SMALL
    finally:
        stop.set()
        thread.join()
    assert seen


def test_threads_that_share_a_stream_get_their_own_results():
    """Each waits for its own: what one runs, the others' tasks stay behind."""
    x, failed = ones(SMALL), []

    def work(seed):
        for i in range(200):
            value = seed * 1000 + i
            y = x * value
            if y.unique().tolist() != [value] or y.cpu()[0].item() != value:
                failed.append(value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
