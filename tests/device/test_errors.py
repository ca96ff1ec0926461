"""Bad input: an exception that names the value and the range, and a device that stays usable."""

import pickle

import pytest
import torch

RANGE = "out of range: it must be from 0 to 1"


@pytest.fixture(autouse=True)
def still_usable():
    yield
    assert torch.ones(2, device="openreg:1").sum().item() == 2
    assert torch.openreg.current_stream().query() in (True, False)


def _enter(context):
    with context:
        pass


BY_INDEX = {
    "empty": lambda i: torch.empty(3, device=f"openreg:{i}"),
    "zeros": lambda i: torch.zeros(3, device=i),
    "tensor": lambda i: torch.tensor([1.0], device=f"openreg:{i}"),
    "rand": lambda i: torch.rand(3, device=f"openreg:{i}"),
    "arange": lambda i: torch.arange(3, device=f"openreg:{i}"),
    "empty_no_elements": lambda i: torch.empty(0, device=f"openreg:{i}"),
    "to": lambda i: torch.ones(3).to(f"openreg:{i}"),
    "to_from_device": lambda i: torch.ones(3, device="openreg").to(f"openreg:{i}"),
    "module_to": lambda i: torch.nn.Linear(2, 2).to(f"openreg:{i}"),
    "set_device_index": lambda i: torch.accelerator.set_device_index(i),
    "device_index": lambda i: _enter(torch.accelerator.device_index(i)),
    "accelerator_synchronize": lambda i: torch.accelerator.synchronize(i),
    "accelerator_current_stream": lambda i: torch.accelerator.current_stream(i),
    "accelerator_capability": lambda i: torch.accelerator.get_device_capability(i),
    "memory_stats": lambda i: torch.accelerator.memory_stats(i),
    "Stream": lambda i: torch.Stream(device=f"openreg:{i}"),
    "Event": lambda i: torch.Event(device=f"openreg:{i}"),
    "Event_keyword_device": lambda i: torch.Event(device=torch.device("openreg", i)),
    "Event_positional": lambda i: torch.Event(f"openreg:{i}"),
    "Generator": lambda i: torch.Generator(device=f"openreg:{i}"),
    "set_device": lambda i: torch.openreg.set_device(i),
    "device": lambda i: _enter(torch.openreg.device(i)),
    "synchronize": lambda i: torch.openreg.synchronize(i),
    "current_stream": lambda i: torch.openreg.current_stream(i),
    "default_stream": lambda i: torch.openreg.default_stream(i),
    "openreg_Stream": lambda i: torch.openreg.Stream(i),
    "openreg_Event": lambda i: torch.openreg.Event(device=i),
    "ExternalStream": lambda i: torch.openreg.ExternalStream(0, i),
    "get_device_properties": lambda i: torch.openreg.get_device_properties(i),
    "get_device_name": lambda i: torch.openreg.get_device_name(f"openreg:{i}"),
    "get_device_capability": lambda i: torch.openreg.get_device_capability(i),
    "mem_get_info": lambda i: torch.openreg.mem_get_info(i),
    "memory_allocated": lambda i: torch.openreg.memory_allocated(i),
    "get_rng_state": lambda i: torch.openreg.get_rng_state(i),
    "can_device_access_peer": lambda i: torch.openreg.can_device_access_peer(0, i),
    "reset": lambda i: torch.openreg.reset(i),
    "gate": lambda i: torch.openreg.testing.gate(i),
}


@pytest.mark.parametrize("index", [2, 7, 127])
@pytest.mark.parametrize("name", BY_INDEX)
def test_index_out_of_range_is_named(name, index):
    with pytest.raises(
        RuntimeError, match=rf"index {index} is out of range: it must be (from )?0 to 1"
    ):
        BY_INDEX[name](index)
    assert torch.openreg.current_device() == 0


# PyTorch itself refuses a negative index in a device ("must not be negative", "Invalid device
# string") and documents a no-op in set_device and torch.openreg.device.
NEGATIVE = [
    "device_index",
    "accelerator_synchronize",
    "accelerator_current_stream",
    "synchronize",
    "current_stream",
    "default_stream",
    "openreg_Stream",
    "openreg_Event",
    "ExternalStream",
    "get_device_properties",
    "get_device_capability",
    "mem_get_info",
    "memory_allocated",
    "memory_stats",
    "get_rng_state",
    "can_device_access_peer",
    "reset",
    "gate",
]


@pytest.mark.parametrize("index", [-1, -5])
@pytest.mark.parametrize("name", NEGATIVE)
def test_negative_index_is_named(name, index):
    with pytest.raises(
        RuntimeError, match=rf"index {index} is out of range: it must be (from )?0 to 1"
    ):
        BY_INDEX[name](index)


@pytest.mark.parametrize("name", ["empty", "zeros", "to", "Stream", "Event", "Generator"])
def test_negative_index_in_a_device_is_refused(name):
    with pytest.raises(RuntimeError, match=r"negative|Invalid device string"):
        BY_INDEX[name](-1)


def test_index_out_of_range_is_refused_before_first_use(run_ok):
    out = run_ok(
        """
        import torch
        for call in (torch.accelerator.synchronize, torch.openreg.synchronize,
                     torch.accelerator.current_stream, torch.accelerator.set_device_index):
            try:
                call(7)
            except RuntimeError as error:
                print(error)
        print(torch.openreg.is_initialized())
        """
    )
    assert out.count("index 7 is " + RANGE) == 4
    assert out.splitlines()[-1] == "False"


def test_object_of_another_type_is_named():
    with pytest.raises(ValueError, match=r"expected an openreg device, got 'cpu'"):
        torch.openreg.synchronize("cpu")
    with pytest.raises(TypeError, match=r"got 1\.5 of type float"):
        torch.openreg.set_device(1.5)
    with pytest.raises(TypeError, match=r"expected a torch\.Stream, got int"):
        torch.openreg.set_stream(3)


def _never_handed_out(_):
    return 12345, 1, "12345 on openreg:1 does not name a live stream"


def _of_another_device(_):
    stream_id = torch.openreg.Stream(0).stream_id
    return stream_id, 1, f"{stream_id} is a stream of openreg:0, not of openreg:1"


def _destroyed(c_stream):
    handle, core = c_stream(1)
    stream = torch.openreg.ExternalStream(handle, 1)
    stream.synchronize()
    assert core.orStreamDestroy(stream) == 0
    return stream.stream_id, 1, f"{stream.stream_id} on openreg:1 does not name a live stream"


USES = {
    "query": lambda s: s.query(),
    "synchronize": lambda s: s.synchronize(),
    "wait_stream": lambda s: s.wait_stream(torch.openreg.default_stream(1)),
    "waited_for": lambda s: torch.openreg.default_stream(1).wait_stream(s),
    "wait_event": lambda s: s.wait_event(torch.openreg.default_stream(1).record_event()),
    "event_record_again": lambda s: torch.openreg.default_stream(1).record_event().record(s),
    "gate": lambda s: torch.openreg.testing.gate(1).wait(s),
    "record_event": lambda s: s.record_event(),
    "event_record": lambda s: torch.openreg.Event().record(s),
    "event_wait": lambda s: torch.openreg.default_stream(0).record_event().wait(s),
    "with": _enter,
    "set_stream": lambda s: torch.accelerator.set_stream(s),
    "openreg_set_stream": lambda s: torch.openreg.set_stream(s),
    "openreg_stream": lambda s: torch.openreg.stream(s),
    "record_stream": lambda s: torch.ones(3, device="openreg:1").record_stream(s),
    "is_capturing": lambda s: s.is_capturing(),
    "native_handle": lambda s: s.native_handle,
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("make", [_never_handed_out, _of_another_device, _destroyed])
@pytest.mark.parametrize("kind", [torch.Stream, torch.openreg.Stream])
def test_bad_stream_id_is_named_at_first_use(kind, make, name, c_stream):
    stream_id, index, text = make(c_stream)
    device_type = torch.openreg.current_stream().device_type
    stream = kind(stream_id=stream_id, device_index=index, device_type=device_type)
    before = torch.openreg.current_stream(1)
    with pytest.raises(RuntimeError, match=text):
        USES[name](stream)
    assert torch.openreg.current_stream(1) == before
    if name != "set_stream":  # PyTorch's own makes the stream's device current first
        assert torch.openreg.current_device() == 0
    torch.openreg.set_device(0)


@pytest.mark.parametrize("stream_id", [-1, 1, 2**63 - 1, -(2**63), 1 << 62])
def test_stream_id_that_is_no_handle_is_refused(stream_id):
    kind = torch.openreg.current_stream().device_type
    stream = torch.Stream(stream_id=stream_id, device_index=0, device_type=kind)
    with pytest.raises(RuntimeError, match=str(stream_id)):
        stream.query()
    nowhere = torch.Stream(stream_id=0, device_index=9, device_type=kind)
    with pytest.raises(RuntimeError, match="index 9 is " + RANGE):
        nowhere.query()


def test_mixed_devices_are_both_named():
    a, b = torch.ones(2, device="openreg:0"), torch.ones(2, device="openreg:1")
    with pytest.raises(RuntimeError, match=r"(?s)openreg:0.*openreg:1|openreg:1.*openreg:0"):
        a + b
    with pytest.raises(RuntimeError, match=r"(?s)openreg:0.*cpu|cpu.*openreg:0"):
        a + torch.ones(2)
    assert (a + torch.tensor(2.0)).tolist() == [3, 3]
    assert (torch.tensor(2.0) * a).tolist() == [2, 2]


def test_numpy_of_a_device_tensor_is_a_type_error():
    with pytest.raises(TypeError, match="openreg"):
        torch.ones(2, device="openreg").numpy()


def test_out_of_memory_names_the_device():
    with pytest.raises(torch.OutOfMemoryError, match="openreg:1"):
        torch.empty(2**50, dtype=torch.uint8, device="openreg:1")


def test_generator_refuses_a_bad_state():
    generator = torch.Generator(device="openreg:0")
    with pytest.raises(ValueError, match="16 bytes, got 3"):
        generator.set_state(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(TypeError, match="uint8"):
        generator.set_state(torch.zeros(16))


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_manual_seed_refuses_a_bad_seed(seed):
    with pytest.raises(ValueError, match=str(seed)):
        torch.openreg.manual_seed_all(seed)


def test_sleep_refuses_a_bad_duration():
    with pytest.raises(ValueError, match="-5"):
        torch.openreg._sleep(-5)
    for bad in ("a", None, 1.5):
        with pytest.raises(TypeError, match=f"an integer, got {bad!r}"):
            torch.openreg._sleep(bad)


def test_pickle_keeps_a_tensors_device_and_values():
    tensor = torch.arange(3.0, device="openreg:1")
    again = pickle.loads(pickle.dumps(tensor))
    assert again.device == tensor.device and again.tolist() == [0, 1, 2]
