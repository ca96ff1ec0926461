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


def _device_of(original):
    def __dlpack_device__(self):
        if has_torch_function_unary(self) or not is_ours(self.device):
            return original(self)
        return (DLDeviceType.kDLExtDev, self.device.index)

    return __dlpack_device__


def _export(original):
    def __dlpack__(self, *, stream=-1, **options):
        if is_ours(self.device) and self.is_neg():
            # PyTorch exports the memory as it is, so the sign would be lost.
            raise BufferError(
                "Can't export tensors with the negative bit set, use tensor.resolve_neg()"
            )
        if is_ours(self.device):  # raises if the storage was freed or shrunk
            self.detach().as_strided(self.size(), self.stride())
        capsule = original(self, stream=stream, **options)
        # PyTorch itself waits where the device is called cuda.
        if stream not in (None, -1) and is_ours(self.device) and self.device.type != "cuda":
            _wait_for_producer(stream, self.device.index)
        return capsule

    return __dlpack__


def install():
    wrap("torch.Tensor.__dlpack_device__", _device_of)
    wrap("torch.Tensor.__dlpack__", _export)
