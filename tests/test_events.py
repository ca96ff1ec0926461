import pytest
import torch

gate = torch.openreg.testing.gate


def test_classes():
    event = torch.openreg.Event(enable_timing=True, blocking=True)
    assert isinstance(event, torch.Event)
    assert isinstance(torch.openreg.Stream().record_event(), torch.openreg.Event)


def test_an_event_is_made_by_its_first_record():
    event = torch.openreg.Event()
    assert event.event_id == 0 and event.query()
    event.synchronize()
    event.wait()
    event.record()
    assert event.event_id != 0
    assert event.device == torch.device("openreg", 0)


def test_query_follows_the_work():
    event = torch.Event(device="openreg")
    with gate() as held:
        held.wait()
        event.record()
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_a_stream_waits_for_an_event(eventually):
    event = torch.openreg.Event()
    producer, consumer = torch.openreg.Stream(0), torch.openreg.Stream(1)
    with gate() as held:
        held.wait(producer)
        event.record(producer)
        event.wait(consumer)
        assert not consumer.query()
    consumer.synchronize()
    eventually(producer.query)


def test_recording_again_does_not_move_earlier_waits():
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


def test_a_wait_binds_before_its_own_stream_records_again():
    event = torch.openreg.Event()
    a, b = torch.openreg.Stream(), torch.openreg.Stream()
    event.record(a)
    b.wait_event(event)
    event.record(b)
    b.synchronize()
    assert event.query()


def test_waits_outlive_the_event(eventually):
    waiter, producer = torch.openreg.Stream(), torch.openreg.Stream()
    with gate() as held:
        held.wait(producer)
        event = producer.record_event()
        waiter.wait_event(event)
        del event
        assert not waiter.query()
    waiter.synchronize()
    eventually(producer.query)


def test_elapsed_time():
    for make in (torch.openreg.Event, lambda **kw: torch.Event(device="openreg", **kw)):
        start, end = make(enable_timing=True), make(enable_timing=True)
        start.record()
        torch.openreg._sleep(20_000_000)
        end.record()
        end.synchronize()
        assert 20 <= start.elapsed_time(end) < 5000
        assert end.elapsed_time(start) <= -20


def test_elapsed_time_of_events_that_have_none():
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


def test_an_event_stays_on_the_device_of_its_first_record():
    event = torch.openreg.Event()
    event.record(torch.openreg.Stream(1))
    with pytest.raises(RuntimeError, match=r"belongs to openreg:1 .* stream of openreg:0"):
        event.record(torch.openreg.Stream(0))
    event.record(torch.openreg.Stream(1))
    event.synchronize()
