import random

import pytest
import torch

gate = torch.openreg.testing.gate


def test_event_classes_are_those_of_torch():
    event = torch.openreg.Event(enable_timing=True, blocking=True)
    assert isinstance(event, torch.Event)
    assert isinstance(torch.openreg.Stream().record_event(), torch.openreg.Event)


def test_event_is_made_by_its_first_record():
    event = torch.openreg.Event()
    assert event.event_id == 0 and event.query() and "not recorded" in repr(event)
    event.synchronize()
    event.wait()
    event.record()
    assert event.event_id != 0 and hex(event.event_id) in repr(event)
    assert event.device == torch.device("openreg", 0)


def test_event_query_is_true_after_the_work():
    event = torch.Event(device="openreg")
    with gate() as held:
        held.wait()
        event.record()
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_stream_waits_for_an_event(eventually):
    event = torch.openreg.Event()
    producer, consumer = torch.openreg.Stream(0), torch.openreg.Stream(1)
    with gate() as held:
        held.wait(producer)
        event.record(producer)
        event.wait(consumer)
        assert not consumer.query()
    consumer.synchronize()
    eventually(producer.query)


def test_event_rerecord_does_not_delay_earlier_waits():
    event = torch.openreg.Event()
    a, b, waiter = torch.openreg.Stream(), torch.openreg.Stream(), torch.openreg.Stream()
    with gate() as held:
        event.record(a)
        held.wait(b)
        waiter.wait_event(event)
        event.record(b)
        waiter.synchronize()
        assert not event.query()
    event.synchronize()


def test_event_wait_binds_before_its_own_stream_records_again():
    event = torch.openreg.Event()
    a, b = torch.openreg.Stream(), torch.openreg.Stream()
    event.record(a)
    b.wait_event(event)
    event.record(b)
    b.synchronize()
    assert event.query()


def test_stream_does_not_wait_for_its_own_event():
    event, stream = torch.openreg.Event(), torch.openreg.Stream()
    with gate() as held:
        held.wait(stream)
        event.record(stream)
        stream.wait_event(event)
        event.record(stream)
        stream.wait_event(event)
    stream.synchronize()
    assert event.query()


def test_event_is_not_ready_before_its_newest_record(eventually):
    event = torch.Event(device="openreg")
    a, b = torch.Stream(device="openreg"), torch.Stream(device="openreg")
    event.record(a)
    event.synchronize()
    with gate() as held:
        held.wait(b)
        event.record(b)
        assert not event.query()
        event.record(a)  # done at once, whatever becomes of the record on b
        eventually(event.query)
        assert not b.query()
        event.record(b)
        assert not event.query()
    event.synchronize()


def test_event_waits_of_many_devices_and_kinds_order_work():
    """One event, waited for by plain and own streams of both devices, through every call."""
    producer = torch.openreg.Stream(1)
    by_stream, by_event, by_other = (torch.Stream(device=f"openreg:{i % 2}") for i in range(3))
    waiters = [by_stream, by_event, by_other, torch.accelerator.current_stream(0)]
    with gate() as held:
        held.wait(producer)
        event = producer.record_event()
        by_stream.wait_event(event)
        event.wait(by_event)
        by_other.wait_stream(producer)
        event.wait()
        assert not any(stream.query() for stream in waiters)
    for stream in waiters:
        stream.synchronize()
    assert event.query()


STREAMS, ROUNDS, STEPS = 16, 50, 40


def _expected(steps):
    values = []
    for _stream, needs in steps:
        values.append(1 + sum(values[i] for i in needs) % 1009)
    return values


@pytest.mark.parametrize("plain", [False, True])
def test_random_wait_graph_over_16_streams_and_both_devices_is_ordered(plain):
    """Each step adds up what earlier steps of any stream wrote into pinned memory; nothing but the
    waits orders them. Steps are spread over the streams, and some are slow."""
    draw = random.Random(STREAMS + plain)
    make = (lambda i: torch.Stream(f"openreg:{i}")) if plain else torch.openreg.Stream
    streams = [make(i % 2) for i in range(STREAMS)]
    events = [torch.Event("openreg") if plain else torch.openreg.Event() for _ in streams]
    for _ in range(ROUNDS):
        last, steps, results = {}, [], []
        with gate() as held:
            for stream in draw.sample(streams, STREAMS // 2):
                held.wait(stream)
            for number in range(STEPS):
                which = draw.randrange(STREAMS)
                others = draw.sample(sorted(last), min(len(last), draw.randrange(4)))
                for other in others:
                    streams[which].wait_event(events[other])
                with streams[which] as stream:
                    if draw.random() < 0.2:
                        torch.openreg._sleep(draw.randrange(100_000))
                    total = torch.zeros((), dtype=torch.int64, device="openreg")
                    for other in others:
                        total += results[last[other]].to(stream.device, non_blocking=True)
                    results.append(torch.zeros((), dtype=torch.int64, pin_memory=True))
                    results[number].copy_(total % 1009 + 1, non_blocking=True)
                events[which].record(stream)
                steps.append((which, [last[other] for other in others]))
                last[which] = number
        for event in events:
            event.synchronize()
        assert [int(value) for value in results] == _expected(steps)


def test_stream_wait_outlives_the_event(eventually):
    waiter, producer = torch.openreg.Stream(), torch.openreg.Stream()
    with gate() as held:
        held.wait(producer)
        event = producer.record_event()
        waiter.wait_event(event)
        del event
        assert not waiter.query()
    waiter.synchronize()
    eventually(producer.query)


def test_elapsed_time_measures_the_work_between_events():
    for make in (torch.openreg.Event, lambda **kw: torch.Event(device="openreg", **kw)):
        start, end = make(enable_timing=True), make(enable_timing=True)
        start.record()
        torch.openreg._sleep(20_000_000)
        end.record()
        end.synchronize()
        assert 20 <= start.elapsed_time(end) < 5000
        assert end.elapsed_time(start) <= -20


def test_elapsed_time_of_a_sleep_of_100_ms_is_100_ms():
    """Never less than it slept; more on a busy machine, but not each time."""
    times = []
    while not times or (times[-1] > 200 and len(times) < 10):
        start, end = (torch.openreg.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.openreg._sleep(100_000_000)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
        assert times[-1] >= 95
    assert min(times) <= 200


def test_event_time_is_taken_when_the_stream_reaches_it():
    """Both marks are queued before anything runs, and on streams of their own."""
    first, second = torch.openreg.Stream(), torch.openreg.Stream()
    start, end = (torch.openreg.Event(enable_timing=True) for _ in range(2))
    with gate() as held:
        held.wait(first)
        start.record(first)
        with first:
            torch.openreg._sleep(50_000_000)
        second.wait_stream(first)
        end.record(second)
    end.synchronize()
    assert 50 <= start.elapsed_time(end) < 5000


@pytest.mark.parametrize("make", [torch.openreg.Event, lambda **kw: torch.Event("openreg", **kw)])
def test_elapsed_time_refusals_have_texts_of_their_own(make):
    def timed():
        return make(enable_timing=True)

    good, untimed, late = timed(), make(), timed()
    good.record()
    untimed.record()
    torch.openreg.synchronize()
    texts = []
    with gate() as held:
        held.wait()
        late.record()
        for pair in ((good, untimed), (good, timed()), (good, late)):
            for start, end in (pair, pair[::-1]):
                with pytest.raises((ValueError, RuntimeError)) as refusal:
                    start.elapsed_time(end)
                texts.append(str(refusal.value).splitlines()[0])
    assert texts[::2] == texts[1::2] and len(set(texts)) == 3
    late.synchronize()
    assert good.elapsed_time(late) >= 0


def test_elapsed_time_of_events_without_a_time_is_refused():
    timed, untimed = torch.openreg.Event(enable_timing=True), torch.openreg.Event()
    timed.record()
    untimed.record()
    torch.openreg.synchronize()
    with pytest.raises(ValueError, match="enable_timing=True"):
        timed.elapsed_time(untimed)
    with pytest.raises(ValueError, match="must be recorded"):
        timed.elapsed_time(torch.openreg.Event(enable_timing=True))
    with gate() as held:
        held.wait()
        late = torch.openreg.Event(enable_timing=True)
        late.record()
        with pytest.raises(RuntimeError, match="must be completed"):
            timed.elapsed_time(late)
    elsewhere = torch.openreg.Event(enable_timing=True)
    elsewhere.record(torch.openreg.Stream(1))
    torch.openreg.synchronize(0)
    torch.openreg.synchronize(1)
    with pytest.raises(RuntimeError, match="device 0 and device 1"):
        timed.elapsed_time(elsewhere)


@pytest.mark.parametrize("thing", [3, "stream", None, torch.Event(device="cpu")])
def test_object_that_is_no_stream_or_event_is_refused(thing):
    """PyTorch reads any object as a stream or an event; the classes here look first."""
    event, stream = torch.openreg.Event(), torch.openreg.Stream()
    calls = [stream.wait_stream]
    if thing is not None:
        calls += [event.record, event.wait]
    if not isinstance(thing, torch.Event):
        calls += [stream.wait_event, event.elapsed_time]
        if thing is not None:
            calls += [stream.record_event]
    for call in calls:
        with pytest.raises(TypeError, match=f"got {type(thing).__name__}"):
            call(thing)


def test_external_event_is_refused():
    with pytest.raises(NotImplementedError, match="openreg"):
        torch.openreg.Event(external=True)


def test_c_api_takes_events_of_python(c_stream):
    handle, core = c_stream(0)
    stream, event = torch.openreg.ExternalStream(handle), torch.openreg.Event()
    with gate() as held:
        held.wait(stream)
        event.record(stream)
        assert core.orEventQuery(event) != 0
    assert core.orEventSynchronize(event) == 0
    assert core.orEventQuery(event) == 0
    assert core.orStreamDestroy(stream) == 0


def test_event_stays_on_the_device_of_its_first_record():
    event = torch.openreg.Event()
    event.record(torch.openreg.Stream(1))
    with pytest.raises(RuntimeError, match=r"belongs to openreg:1 .* stream of openreg:0"):
        event.record(torch.openreg.Stream(0))
    event.record(torch.openreg.Stream(1))
    event.synchronize()
