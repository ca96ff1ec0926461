import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

gate = torch.openreg.testing.gate


def test_the_default_stream():
    default = torch.openreg.default_stream(1)
    assert isinstance(default, torch.Stream) and isinstance(default, torch.openreg.Stream)
    assert default.stream_id == 0 and default.device == torch.device("openreg", 1)
    assert torch.openreg.current_stream(1) == default == torch.accelerator.current_stream(1)
    assert default != torch.openreg.default_stream(0)


def test_pool_streams_come_in_turn():
    streams = [torch.Stream(device="openreg:1") for _ in range(64)]
    ids = [s.stream_id for s in streams]
    assert 0 not in ids
    assert len(set(ids)) == 32
    assert ids[:32] == ids[32:]
    assert all(s.device == torch.device("openreg", 1) for s in streams)


def test_a_stream_without_an_index_is_of_the_current_device():
    with torch.accelerator.device_index(1):
        assert torch.Stream(device="openreg").device.index == 1
        assert torch.Stream().device.index == 1
        assert torch.openreg.Stream().device.index == 1


@pytest.mark.parametrize(("asked", "given"), [(5, 0), (0, 0), (-1, -1), (-3, -3), (-99, -3)])
def test_priorities_are_clamped(asked, given):
    assert torch.openreg.Stream(priority=asked).priority == given
    plain = torch.Stream(device="openreg:1", priority=asked)
    as_ours = torch.openreg.Stream(
        stream_id=plain.stream_id, device_index=1, device_type=plain.device_type
    )
    assert as_ours == plain and as_ours.priority == given


def test_contexts_restore_the_stream():
    outer, inner = torch.Stream(device="openreg:0"), torch.openreg.Stream(1)
    with outer:
        assert torch.openreg.current_stream() == outer
        with torch.openreg.stream(inner):
            assert torch.openreg.current_stream() == inner
            assert torch.openreg.current_device() == 1
            assert torch.openreg.current_stream(0) == outer
        assert torch.openreg.current_stream() == outer
        assert torch.openreg.current_stream(1) == torch.openreg.default_stream(1)
    assert torch.openreg.current_stream() == torch.openreg.default_stream()
    with pytest.raises(ZeroDivisionError), torch.openreg.stream(inner):
        raise ZeroDivisionError
    assert torch.openreg.current_stream(1) == torch.openreg.default_stream(1)


def test_the_current_stream_belongs_to_the_thread():
    stream = torch.openreg.Stream()
    torch.openreg.set_stream(stream)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(torch.openreg.current_stream).result()
    assert there == torch.openreg.default_stream()
    assert torch.openreg.current_stream() == stream


def test_set_stream_makes_its_device_current():
    torch.openreg.set_stream(torch.openreg.Stream(1))
    assert torch.openreg.current_device() == 1


def test_work_is_asynchronous_and_query_says_when_it_is_done(eventually):
    stream = torch.openreg.Stream()
    assert stream.query()
    with gate() as held:
        held.wait(stream)
        with stream:
            ones = torch.ones(4).pin_memory().to("openreg", non_blocking=True)
        assert not stream.query()
        assert torch.openreg.default_stream().query()
    eventually(stream.query)
    assert ones.tolist() == [1] * 4


def test_streams_are_independent_and_wait_stream_orders_them(eventually):
    first, second = torch.openreg.Stream(), torch.openreg.Stream()
    with gate() as held:
        held.wait(first)
        second.synchronize()
        second.wait_stream(first)
        assert not second.query()
    second.synchronize()
    eventually(first.query)


def test_sleep_runs_on_the_current_stream():
    stream = torch.openreg.Stream()
    with gate() as held:
        held.wait(stream)
        with stream:
            torch.openreg._sleep(100_000_000)
        assert torch.openreg.default_stream().query()
        assert not stream.query()
        opened = time.monotonic()
    stream.synchronize()
    assert time.monotonic() - opened >= 0.1


def test_synchronize_is_of_one_device():
    with gate(1) as held:
        held.wait(torch.openreg.Stream(1))
        torch.openreg.synchronize(0)
        torch.accelerator.synchronize(0)
        assert not held.is_open


def test_streams_wait_across_devices():
    with gate(0) as held:
        held.wait(torch.openreg.default_stream(0))
        torch.openreg.default_stream(1).wait_stream(torch.openreg.default_stream(0))
        assert not torch.openreg.default_stream(1).query()
    torch.openreg.synchronize(1)


def test_64_gated_streams_do_not_stop_another():
    streams = [
        torch.openreg.Stream(d, priority=p) for d in (0, 1) for p in (0, -1) for _ in range(16)
    ]
    assert len({(s.device_index, s.stream_id) for s in streams}) == 64
    free = torch.openreg.Stream(0, priority=-2)
    with gate() as held:
        for stream in streams:
            held.wait(stream)
            with stream:
                torch.openreg._sleep(1000)
        with free:
            ones = torch.full((8,), 3.0, device="openreg:0")
            assert ones.sum().item() == 24
        free.synchronize()
        assert not any(s.query() for s in streams)
    for stream in streams:
        stream.synchronize()


def test_an_external_stream_keeps_its_device():
    mine = torch.openreg.Stream(1, priority=-1)
    handle = mine.openreg_stream
    external = torch.openreg.ExternalStream(handle, device=1)
    assert isinstance(external, torch.Stream)
    assert external == mine
    assert external.openreg_stream == handle
    assert torch.openreg.get_stream_from_external(handle, "openreg:1") == mine
    with pytest.raises(RuntimeError, match=f"{mine.stream_id} is a stream of openreg:1"):
        torch.openreg.ExternalStream(handle, device=0)
    default = torch.openreg.default_stream(1)
    assert torch.openreg.ExternalStream(default.openreg_stream, 1) == default


def test_a_stream_of_the_c_api(tmp_path):
    import ctypes

    import torch_openreg

    core = ctypes.CDLL(torch_openreg.get_library_dir() + "/libopenreg.so")
    handle = ctypes.c_uint64()
    with torch.openreg.device(1):
        assert core.orStreamCreate(ctypes.byref(handle)) == 0
    stream = torch.openreg.ExternalStream(handle.value, 1)
    with torch.openreg.stream(stream):
        assert torch.ones(4, device="openreg:1").sum().item() == 4
    assert core.orStreamDestroy(handle) == 0
    for use in (stream.query, stream.synchronize, stream.record_event, stream.__enter__):
        with pytest.raises(RuntimeError, match=f"stream id {stream.stream_id} on openreg:1"):
            use()


def _open_soon(held, log):
    def open_it():
        time.sleep(0.2)
        log.append("opened")
        held.open()

    return threading.Thread(target=open_it)


@pytest.mark.parametrize("call", ["sleep", "record", "wait_event", "query", "wait_stream"])
def test_a_full_ring_does_not_keep_the_gil(call):
    """A second Python thread has to open the gate behind which the queue fills up."""
    stream, other = torch.openreg.Stream(), torch.openreg.Stream()
    event, pending = torch.openreg.Event(), torch.openreg.Event()
    held, log = gate(), []
    held.wait(stream)
    held.wait(other)
    pending.record(other)
    opener = _open_soon(held, log)
    opener.start()
    fill = {
        "sleep": lambda: torch.openreg._sleep(0),
        "record": lambda: (torch.openreg._sleep(0), event.record(stream)),
        "wait_event": lambda: (torch.openreg._sleep(0), stream.wait_event(pending)),
        "query": lambda: (torch.openreg._sleep(0), stream.query()),
        "wait_stream": lambda: (torch.openreg._sleep(0), stream.wait_stream(other)),
    }[call]
    with stream:
        for _ in range(5_000):
            fill()
    assert log == ["opened"], "the queue never was full"
    opener.join(60)
    stream.synchronize()


def test_synchronize_does_not_keep_the_gil():
    for wait in (
        torch.openreg.synchronize,
        torch.accelerator.synchronize,
        lambda: torch.openreg.current_stream().synchronize(),
        lambda: torch.openreg.current_stream().record_event().synchronize(),
    ):
        held, log = gate(), []
        held.wait()
        opener = _open_soon(held, log)
        opener.start()
        wait()
        opener.join(60)
        assert log == ["opened"]


def test_a_dropped_gate_opens():
    stream = torch.openreg.Stream()
    held = gate()
    held.wait(stream)
    del held
    gc.collect()
    stream.synchronize()


def test_a_gate_holds_streams_of_every_device_and_opens_once():
    held = gate(0)
    streams = [torch.openreg.Stream(0), torch.openreg.Stream(1)]
    for stream in streams:
        held.wait(stream)
    assert not held.is_open and not any(s.query() for s in streams)
    held.open()
    held.open()
    assert held.is_open
    for stream in streams:
        stream.synchronize()
    held.wait()
    torch.openreg.current_stream().synchronize()


def test_pool_streams_are_made_by_many_threads_at_once():
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: torch.openreg.Stream(1, -3).stream_id, range(256)))
    assert len(set(made)) == 32


def test_record_stream_is_callable():
    tensor = torch.ones(4, device="openreg")
    stream = torch.openreg.Stream()
    with gate() as held:
        held.wait(stream)
        tensor.record_stream(stream)
        del tensor
    stream.synchronize()


def test_graphs_never_capture():
    assert not torch.openreg.is_current_stream_capturing()
    assert not torch.openreg.current_stream().is_capturing()
