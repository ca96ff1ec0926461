"""DLPack: capsules, torch.from_dlpack, and the order between producer and consumer."""

import threading

import numpy
import pytest
import torch
from torch.utils.dlpack import DLDeviceType, from_dlpack, to_dlpack

DEVICE = "openreg:1"
gate = torch.openreg.testing.gate


@pytest.fixture
def x():
    return torch.arange(6.0, device=DEVICE)


def test_dlpack_device_names_type_and_index(x):
    assert x.__dlpack_device__() == (DLDeviceType.kDLExtDev, 1)
    assert torch.ones(1, device="openreg").__dlpack_device__() == (DLDeviceType.kDLExtDev, 0)
    assert torch.ones(1).__dlpack_device__() == (DLDeviceType.kDLCPU, 0)


@pytest.mark.parametrize(
    "exchange",
    [
        torch.from_dlpack,
        lambda t: torch.from_dlpack(t, device=DEVICE),
        lambda t: from_dlpack(to_dlpack(t)),
        lambda t: from_dlpack(t.__dlpack__()),
        lambda t: torch.from_dlpack(t.__dlpack__(max_version=(1, 0))),
        lambda t: torch.from_dlpack(t.__dlpack__(stream=None, dl_device=t.__dlpack_device__())),
    ],
)
def test_dlpack_exchange_shares_memory(x, exchange):
    again = exchange(x)
    assert again.device == x.device and again.data_ptr() == x.data_ptr()
    again.add_(1)
    assert x.tolist() == [1, 2, 3, 4, 5, 6]


def test_operator_takes_an_exchanged_tensor_beside_its_base():
    def call(device):
        x = torch.arange(16.0, device=device)
        begin, middle, most = (
            torch.from_dlpack(x[at]) for at in (slice(4), slice(4, 8), slice(12))
        )
        results = [begin.hypot(x[12:]), torch.fmod(x[12:], middle), torch.cat([middle, x, begin])]
        torch._foreach_add_([begin, middle, x, most], 1)
        most[::2].copy_(x[10:].double())
        return [t.tolist() for t in (x, *results)]

    assert call(DEVICE) == call("cpu")


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e5m2],
    ids=str,
)
def test_dlpack_keeps_dtypes_and_strides(dtype):
    x = torch.arange(12, device=DEVICE).to(dtype).view(3, 4).t()[1:]
    again = torch.from_dlpack(x)
    assert (again.dtype, again.shape, again.stride()) == (x.dtype, x.shape, x.stride())
    assert again.to(torch.complex64).tolist() == x.to(torch.complex64).tolist()
    assert torch.from_dlpack(x[:0]).shape == (0, 3)


def test_dlpack_takes_subclasses_and_parameters(x):
    class Mine(torch.Tensor):
        pass

    for kind in (x.as_subclass(Mine), torch.nn.Parameter(x, requires_grad=False)):
        assert kind.__dlpack_device__() == (DLDeviceType.kDLExtDev, 1)
        assert torch.from_dlpack(kind).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("device", ["cpu", "openreg:0"])
def test_dlpack_to_another_device_copies(x, device):
    there = torch.from_dlpack(x, device=device)
    assert there.device == torch.device(device) and there.tolist() == x.tolist()
    with pytest.raises(ValueError, match="without copying"):
        torch.from_dlpack(x, device=device, copy=False)
    with pytest.raises(RuntimeError, match=r"index 7 .*from 0 to 1"):
        torch.from_dlpack(x, device="openreg:7")


def test_dlpack_takes_arrays_of_other_libraries():
    array = numpy.arange(3.0)
    there = torch.from_dlpack(array, device=DEVICE)
    assert there.device == torch.device(DEVICE) and there.tolist() == [0, 1, 2]
    pinned = torch.arange(3.0).pin_memory()
    assert torch.from_dlpack(pinned).data_ptr() == pinned.data_ptr()
    assert numpy.from_dlpack(pinned).tolist() == [0, 1, 2]


def test_dlpack_refuses_a_storage_that_was_freed():
    x = torch.ones(4, device=DEVICE)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        torch.from_dlpack(x)


def test_dlpack_copy_shares_no_memory(x):
    copy = torch.from_dlpack(x, copy=True)
    copy.zero_()
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    assert numpy.from_dlpack(x, device="cpu").tolist() == [0, 1, 2, 3, 4, 5]


# ---- Order ----


def test_dlpack_export_does_not_wait(x, runs_ahead):
    def exchange():
        x.mul_(2)
        return torch.from_dlpack(x).add_(1)

    stream = torch.openreg.current_stream(1)
    with torch.openreg.device(1):
        again = runs_ahead(exchange)
    stream.synchronize()
    assert again.tolist() == [1, 3, 5, 7, 9, 11]


def test_dlpack_consumer_on_the_producers_stream_is_ordered(x):
    side = torch.openreg.Stream(1)
    side.wait_stream(torch.openreg.current_stream(1))
    with gate() as held, side:
        held.wait(side)
        x.fill_(7)
        again = torch.from_dlpack(x)  # the consumer is on the same stream
        total = again.sum()
        assert not side.query()
    side.synchronize()
    assert total.item() == 42


def test_dlpack_copy_to_the_host_is_complete(x):
    side = torch.openreg.Stream(1)
    side.wait_stream(torch.openreg.current_stream(1))
    with side:
        torch.openreg._sleep(20_000_000)
        x.fill_(7)
        assert numpy.from_dlpack(x, device="cpu").tolist() == [7] * 6


@pytest.mark.parametrize("copy", [None, True])
def test_dlpack_consumers_stream_waits_for_the_producer(x, copy):
    producer, consumer = torch.openreg.Stream(1), torch.openreg.Stream(1)
    producer.wait_stream(torch.openreg.current_stream(1))
    with gate() as held:
        with producer:
            held.wait(producer)
            x.fill_(7)
            capsule = x.__dlpack__(stream=consumer.openreg_stream, copy=copy)
        with consumer:
            total = torch.from_dlpack(capsule).sum()
        assert not consumer.query()
    consumer.synchronize()
    assert total.item() == 42


def test_dlpack_consumer_that_asks_for_no_order_does_not_wait(x):
    producer, consumer = torch.openreg.Stream(1), torch.openreg.Stream(1)
    with gate() as held:
        held.wait(producer)
        with producer:
            x.__dlpack__(stream=-1)
            x.__dlpack__(stream=producer.openreg_stream)  # its own: nothing to wait for
        consumer.synchronize()
        assert not producer.query()


def test_dlpack_consumer_in_another_thread_orders_with_an_event(x):
    producer, seen = torch.openreg.Stream(1), []
    producer.wait_stream(torch.openreg.current_stream(1))
    with producer:
        torch.openreg._sleep(20_000_000)
        x.fill_(7)
        ready = producer.record_event()

    def consume():
        torch.openreg.current_stream(1).wait_event(ready)
        seen.append(torch.from_dlpack(x).sum().item())

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join()
    assert seen == [42]


# ---- Life ----


@pytest.mark.usefixtures("nothing_left")
def test_dlpack_capsule_keeps_the_memory():
    before = torch.openreg.memory_allocated(1)
    x = torch.ones(1 << 20, device=DEVICE)
    capsule = x.__dlpack__()
    del x
    assert torch.openreg.memory_allocated(1) - before == 4 << 20
    again = torch.from_dlpack(capsule)
    del capsule
    assert again.sum().item() == 1 << 20
    del again
    assert torch.openreg.memory_allocated(1) == before


def test_dlpack_capsule_dropped_in_another_thread_frees_its_memory():
    before = torch.openreg.memory_allocated(1)
    capsules = [
        torch.ones(1 << 20, device=DEVICE).__dlpack__(max_version=v) for v in (None, (1, 0))
    ]
    thread = threading.Thread(target=capsules.clear)
    thread.start()
    thread.join()
    assert torch.openreg.memory_allocated(1) == before


# ---- What is refused ----


def test_dlpack_refuses_gradients_and_unresolved_bits(x):
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(x.clone().requires_grad_())
    with pytest.raises(BufferError, match="conjugate bit"):
        torch.from_dlpack(torch.complex(x, x).conj())
    with pytest.raises(BufferError, match="negative bit"):
        torch.from_dlpack(torch.complex(x, x).conj().imag)
    with pytest.raises(RuntimeError, match="Unsupported device"):
        numpy.from_dlpack(x)
    capsule = x.__dlpack__()
    torch.from_dlpack(capsule)
    with pytest.raises(RuntimeError, match="consumed"):
        torch.from_dlpack(capsule)
    assert x.sum().item() == 15


def test_dlpack_refuses_a_bad_stream(x):
    with pytest.raises(TypeError, match="stream must be"):
        x.__dlpack__(stream="default")
    with pytest.raises(ValueError, match="-7"):
        x.__dlpack__(stream=-7)
    with pytest.raises(RuntimeError, match=r"stream id 12345 on openreg:1 .*live stream"):
        x.__dlpack__(stream=12345)
    with pytest.raises(RuntimeError, match="is a stream of openreg:0, not of openreg:1"):
        x.__dlpack__(stream=torch.openreg.Stream(0).openreg_stream)
    assert x.sum().item() == 15
