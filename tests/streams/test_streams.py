import gc
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

gate = torch.openreg.testing.gate


def test_default_stream_has_id_zero_and_is_current():
    default = torch.openreg.default_stream(1)
    assert isinstance(default, torch.Stream) and isinstance(default, torch.openreg.Stream)
    assert default.stream_id == 0 and default.device == torch.device("openreg", 1)
    assert torch.openreg.current_stream(1) == default == torch.accelerator.current_stream(1)
    assert default != torch.openreg.default_stream(0)


def test_pool_streams_are_handed_out_in_turn():
    streams = [torch.Stream(device="openreg:1") for _ in range(64)]
    ids = [s.stream_id for s in streams]
    assert 0 not in ids
    assert len(set(ids)) == 32
    assert ids[:32] == ids[32:]
    assert all(s.device == torch.device("openreg", 1) for s in streams)


def test_stream_without_an_index_is_of_the_current_device():
    with torch.accelerator.device_index(1):
        assert torch.Stream(device="openreg").device.index == 1
        assert torch.Stream().device.index == 1
        assert torch.openreg.Stream().device.index == 1


@pytest.mark.parametrize(("asked", "given"), [(5, 0), (0, 0), (-1, -1), (-3, -3), (-99, -3)])
def test_stream_priorities_are_clamped(asked, given):
    assert torch.openreg.Stream(priority=asked).priority == given
    plain = torch.Stream(device="openreg:1", priority=asked)
    as_ours = torch.openreg.Stream(
        stream_id=plain.stream_id, device_index=1, device_type=plain.device_type
    )
    assert as_ours == plain and as_ours.priority == given


def test_stream_priority_range_has_the_limits_of_clamping():
    least, greatest = torch.openreg.Stream.priority_range()
    assert least == 0 > greatest
    assert torch.openreg.Stream(priority=1000).priority == least
    assert torch.openreg.Stream(priority=-1000).priority == greatest


def test_stream_contexts_restore_the_stream():
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


def _where():
    current = torch.accelerator.current_stream
    return torch.accelerator.current_device_index(), current(0), current(1)


def test_stream_context_of_the_current_stream_changes_nothing():
    first, second = torch.Stream(device="openreg:0"), torch.Stream(device="openreg:1")
    outside = _where()
    with first:
        with second:
            inside = _where()
            assert inside == (1, first, second)
            for again in (first, torch.openreg.stream(first)):
                with again:  # is current on device 0, but device 1 is the current one
                    assert _where() == (0, first, second)
                    with again:
                        assert _where() == (0, first, second)
                assert _where() == inside
        assert _where() == (0, first, outside[2])
    assert _where() == outside
    for default in (torch.openreg.default_stream(1), torch.accelerator.current_stream(1)):
        with default as entered:
            assert entered is default
            assert torch.empty(1, device="openreg").device.index == 1
        assert _where() == outside


def test_stream_context_that_cannot_be_entered_changes_nothing():
    outside = _where()
    bad = torch.Stream(stream_id=12345, device_index=1, device_type=outside[1].device_type)
    for context in (lambda: bad, lambda: torch.openreg.stream(bad)):
        with pytest.raises(RuntimeError, match="12345"), context():
            pass
        assert _where() == outside


def test_stream_context_that_was_not_entered_cannot_be_left():
    stream = torch.Stream(device="openreg:1")
    for context in (stream, torch.openreg.stream(stream)):
        with pytest.raises(RuntimeError, match="no stream's context to leave"):
            context.__exit__(None, None, None)
        with stream, ThreadPoolExecutor(1) as pool:  # by another thread neither
            left = pool.submit(context.__exit__, None, None, None)
            with pytest.raises(RuntimeError, match="no stream's context to leave"):
                left.result()


def test_threads_share_a_stream_but_not_its_contexts():
    stream, all_in = torch.Stream(device="openreg:1"), threading.Barrier(2, timeout=60)

    def use(device):
        torch.openreg.set_device(device)
        outside = _where()
        for first_to_leave in (0, 1):
            with stream:
                assert _where() == (1, outside[1], stream)
                all_in.wait()
                if device != first_to_leave:
                    all_in.wait()
            assert _where() == outside
            if device == first_to_leave:
                all_in.wait()
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(use, (0, 1))) == [True, True]


def test_streams_of_other_device_types_are_left_alone():
    with torch.Stream(device="cpu") as stream:
        assert stream.device.type == "cpu"
    with pytest.raises(ValueError, match="got one of 'cpu'"):
        torch.openreg.set_stream(stream)


def test_stream_is_equal_by_its_three_numbers():
    for stream in (
        torch.Stream(device="openreg:1"),
        torch.Stream(device="openreg:0", priority=-3),
        torch.openreg.Stream(1),
        torch.openreg.default_stream(1),
        torch.accelerator.current_stream(0),
    ):
        numbers = {
            "stream_id": stream.stream_id,
            "device_index": stream.device_index,
            "device_type": stream.device_type,
        }
        for kind in (torch.Stream, torch.openreg.Stream):
            again = kind(**numbers)
            assert again == stream and stream == again and hash(again) == hash(stream)
            assert {stream: 1}[again] == 1
            assert again.device == stream.device and again.native_handle == stream.native_handle
            assert again.query()
            assert "openreg" in repr(again) and str(stream.device_index) in repr(again)
        other = torch.Stream(**{**numbers, "device_index": 1 - stream.device_index})
        assert other != stream


def test_stream_and_event_classes_have_the_members_of_cudas():
    ours_alone = {"cuda_stream", "cuda_event", "__cuda_stream__", "from_ipc_handle"}
    for name in ("Stream", "ExternalStream", "Event"):
        ours, theirs = getattr(torch.openreg, name), getattr(torch.cuda, name)
        assert issubclass(ours, getattr(torch, name.removeprefix("External")))
        missing = {n for n in vars(theirs) if not hasattr(ours, n)} - ours_alone
        assert missing <= {"__module__"}, missing
        given = [p for p in inspect.signature(theirs.__new__).parameters if p != "kwargs"]
        assert list(inspect.signature(ours.__new__).parameters)[: len(given)] == given
    for name in ("stream", "set_stream", "current_stream", "default_stream", "synchronize"):
        ours, theirs = getattr(torch.openreg, name), getattr(torch.cuda, name)
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        )


def test_current_stream_belongs_to_the_thread():
    stream = torch.openreg.Stream()
    torch.openreg.set_stream(stream)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(torch.openreg.current_stream).result()
    assert there == torch.openreg.default_stream()
    assert torch.openreg.current_stream() == stream


def test_set_stream_by_id_sets_stream_and_device():
    stream = torch.openreg.Stream(1)
    torch.openreg._set_stream_by_id(stream.stream_id, stream.device_index, stream.device_type)
    assert torch.openreg.current_stream() == stream and torch.openreg.current_device() == 1


def test_set_stream_makes_its_device_current():
    torch.openreg.set_stream(torch.openreg.Stream(1))
    assert torch.openreg.current_device() == 1


def test_stream_query_is_true_when_asynchronous_work_is_done(eventually):
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


def _external_stream():
    return torch.openreg.ExternalStream(torch.openreg.Stream(1, -2).native_handle, 1)


KINDS = {
    "default": lambda: torch.openreg.default_stream(0),
    "default of the other device": lambda: torch.openreg.default_stream(1),
    "pool": lambda: torch.Stream(device="openreg:1"),
    "most urgent": lambda: torch.openreg.Stream(0, priority=-3),
    "external": _external_stream,
}


@pytest.mark.parametrize("kind", KINDS)
def test_work_on_any_stream_is_asynchronous(kind, runs_ahead):
    stream = KINDS[kind]()

    def work():
        torch.openreg._sleep(1_000_000)
        x = torch.full((64, 64), 2.0, device="openreg")
        return (x @ x).sum()

    with stream:
        total = runs_ahead(work)
        assert total.device == stream.device and total.item() == 64 * 64 * 256


def test_large_matmul_is_queued_not_run(runs_ahead):
    a, b = (torch.rand(1536, 1536, device="openreg") for _ in range(2))
    torch.openreg.synchronize()
    product = runs_ahead(lambda: a @ b)  # returns, though nothing of it can have been computed
    torch.testing.assert_close(product.cpu(), a.cpu() @ b.cpu())


def test_stream_query_is_false_until_the_last_task_has_finished(eventually):
    stream = torch.openreg.Stream()
    with gate() as last, stream:
        with gate() as first:
            first.wait()
            middle = stream.record_event()
            last.wait()
            torch.openreg._sleep(1_000_000)
            assert not stream.query()
        middle.synchronize()
        assert middle.query() and not stream.query()
    eventually(stream.query)


def test_streams_of_a_device_overlap():
    streams = [torch.openreg.Stream(0), torch.openreg.Stream(0)]
    starts = [torch.openreg.Event(enable_timing=True) for _ in streams]
    ends = [torch.openreg.Event(enable_timing=True) for _ in streams]
    with gate() as held:
        for stream, start, end in zip(streams, starts, ends, strict=True):
            held.wait(stream)
            with stream:
                start.record()
                torch.openreg._sleep(400_000_000)
                end.record()
    torch.openreg.synchronize(0)
    assert starts[0].elapsed_time(ends[1]) > 0
    assert starts[1].elapsed_time(ends[0]) > 0


def _lanes_but_one_are_busy(milliseconds):
    """Keeps one lane busy for a moment and the others for longer; the stream of the first."""
    held = []
    for i in range(torch.openreg.get_device_properties(0).lanes):
        stream = torch.openreg.Stream(i % 2, priority=-3)
        with stream:
            running = stream.record_event()
            torch.openreg._sleep(milliseconds * 1_000_000 * (1 if i == 0 else 5))
        running.synchronize()
        held.append(stream)
    return held


def test_urgent_streams_go_first_when_the_lanes_are_busy():
    for milliseconds in (100, 400, 1600):  # longer, should this thread be held up meanwhile
        busy = _lanes_but_one_are_busy(milliseconds)
        done = {}
        for priority in (0, -1, -2):  # the least urgent is queued first
            with torch.openreg.Stream(0, priority):
                torch.openreg._sleep(1_000_000)
                done[priority] = torch.openreg.Event(enable_timing=True)
                done[priority].record()
        all_waited = not busy[0].query()
        for event in done.values():
            event.synchronize()
        one_lane = not any(stream.query() for stream in busy[1:])
        for stream in busy:
            stream.synchronize()
        if all_waited and one_lane:
            break
    assert all_waited and one_lane
    assert done[-2].elapsed_time(done[-1]) > 0
    assert done[-1].elapsed_time(done[0]) > 0


def test_24_streams_blocked_on_one_event_do_not_delay_another():
    producer = torch.openreg.Stream(0)
    blocked = [torch.openreg.Stream(i % 2, priority=-1) for i in range(24)]
    with gate() as held:
        held.wait(producer)
        event = producer.record_event()
        for stream in blocked:
            stream.wait_event(event)
            with stream:
                torch.openreg._sleep(1000)
        with torch.openreg.Stream(0):
            assert torch.full((8,), 3.0, device="openreg:0").sum().item() == 24
        assert not any(stream.query() for stream in blocked)
    for stream in blocked:
        stream.synchronize()


def test_six_threads_on_one_stream_lose_no_kernel():
    stream = torch.openreg.Stream(1)
    with stream:
        count = torch.zeros(4, dtype=torch.int64, device="openreg:1")

    def add():
        with stream:
            for _ in range(2000):
                count.add_(1)

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(add) for _ in range(6)]:
            done.result()
    with stream:
        assert count.tolist() == [12_000] * 4


def test_streams_that_write_between_each_others_elements_lose_nothing():
    count = torch.zeros(64, dtype=torch.int64, device="openreg:1")
    torch.openreg.synchronize(1)

    def add(first):
        mine = count[first::4]
        with torch.openreg.Stream(1):
            for turn in range(20):
                mine.add_(1)
                mine.copy_(torch.full((16,), turn + 1))
            torch.openreg.synchronize(1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert count.tolist() == [20] * 64


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


def test_synchronize_waits_for_one_device_only():
    with gate(1) as held:
        held.wait(torch.openreg.Stream(1))
        torch.openreg.synchronize(0)
        torch.accelerator.synchronize(0)
        assert not held.is_open


def test_wait_stream_orders_streams_across_devices():
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


def test_external_stream_keeps_its_device():
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


def test_stream_of_the_c_api_runs_operators(c_stream):
    handle, core = c_stream(1)
    stream = torch.openreg.ExternalStream(handle, 1)
    assert stream.native_handle == stream.openreg_stream == handle
    with gate() as held, torch.openreg.stream(stream):
        held.wait(stream)
        ones = torch.ones(4, device="openreg:1")
        assert core.orStreamQuery(stream) != 0  # the C API takes the object
    assert core.orStreamSynchronize(stream) == 0
    assert ones.sum().item() == 4


def test_work_on_a_destroyed_current_stream_is_an_error(c_stream):
    """Work on it is an error, and the contexts around it give back what was current before."""
    handle, core = c_stream(1)
    stream = torch.openreg.ExternalStream(handle, 1)
    gone = f"stream id {stream.stream_id} on openreg:1 does not name a live stream"
    outside = _where()
    with torch.openreg.stream(stream):
        kept = torch.ones(4, device="openreg:1")
        with torch.openreg.Stream(0):
            assert core.orStreamDestroy(stream) == 0
        for work in (
            lambda: kept + 1,
            lambda: torch.openreg._sleep(1),
            lambda: torch.openreg.current_stream(1).synchronize(),
        ):
            with pytest.raises(
                RuntimeError, match=gone.partition(" on ")[0] + "|is not a live stream"
            ):
                work()
        assert torch.openreg.current_device() == 1
        inner = torch.openreg.stream(torch.openreg.Stream(1))
        inner.__enter__()
        with pytest.raises(RuntimeError, match=gone):
            inner.__exit__(None, None, None)
        assert torch.openreg.current_device() == 1
    assert _where() == outside
    torch.openreg.synchronize(1)  # nothing else orders what the stream still did
    assert (kept + 1).tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("handle", "error", "text"),
    [
        ("3", TypeError, "a stream's handle, got str"),
        (-1, ValueError, r"from 0 to 2\*\*64 - 1, got -1"),
        (2**64, ValueError, f"got {2**64}"),
        (12345, RuntimeError, "12345 on openreg:0 does not name a live stream"),
    ],
)
def test_external_stream_refuses_a_bad_handle(handle, error, text):
    with pytest.raises(error, match=text):
        torch.openreg.ExternalStream(handle)


def _open_soon(held, log):
    def open_it():
        time.sleep(0.2)
        log.append("opened")
        held.open()

    return threading.Thread(target=open_it)


@pytest.mark.parametrize("call", ["sleep", "record", "wait_event", "query", "wait_stream"])
def test_full_ring_does_not_keep_the_gil(call):
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


def test_dropped_gate_opens():
    stream = torch.openreg.Stream()
    held = gate()
    held.wait(stream)
    del held
    gc.collect()
    stream.synchronize()


def test_gate_holds_streams_of_every_device_and_opens_once():
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


def test_record_stream_is_callable_before_a_tensor_is_dropped():
    tensor = torch.ones(4, device="openreg")
    stream = torch.openreg.Stream()
    with gate() as held:
        held.wait(stream)
        tensor.record_stream(stream)
        del tensor
    stream.synchronize()


def test_stream_outside_of_a_capture_is_not_capturing():
    assert not torch.openreg.is_current_stream_capturing()
    assert not torch.openreg.current_stream().is_capturing()
