"""DLPack: what PyTorch leaves out for a renamed PrivateUse1 device.

Tensor.__dlpack_device__ supports it only under its old name, and torch.from_dlpack(tensor) calls
that first. Tensor.__dlpack__ ignores the consumer's stream for every device but CUDA. PyTorch's own
from_dlpack passes no stream for this device: its result is ordered like the source tensor, on the
calling thread's current stream.
"""

from torch.overrides import has_torch_function_unary
from torch.utils.dlpack import DLDeviceType

from ..openreg._utils import is_ours
from ..openreg.streams import ExternalStream, current_stream
from . import wrap


def _wait_for_producer(stream, index):
    """Makes a consumer's stream (its handle) wait for what the producer has queued so far."""
    consumer, producer = ExternalStream(stream, index), current_stream(index)
    if consumer != producer:
        consumer.wait_stream(producer)


def _device_of(original, tensor):
    if has_torch_function_unary(tensor) or not is_ours(tensor.device):
        return original(tensor)
    return (DLDeviceType.kDLExtDev, tensor.device.index)


def _export(original, tensor, *, stream=-1, **options):
    if is_ours(tensor.device) and tensor.is_neg():
        # PyTorch exports the memory as it is, so the sign would be lost.
        raise BufferError(
            "Can't export tensors with the negative bit set, use tensor.resolve_neg()"
        )
    if is_ours(tensor.device):  # raises if the storage was freed or shrunk
        tensor.detach().as_strided(tensor.size(), tensor.stride())
    capsule = original(tensor, stream=stream, **options)
    # PyTorch itself waits where the device is called cuda.
    if stream not in (None, -1) and is_ours(tensor.device) and tensor.device.type != "cuda":
        _wait_for_producer(stream, tensor.device.index)
    return capsule


def install():
    wrap("torch.Tensor.__dlpack_device__", _device_of)
    wrap("torch.Tensor.__dlpack__", _export)
