"""What results of our operators look like, where PyTorch asks the kind of device."""

import torch
from torch._subclasses import fake_impls
from torch.utils import _pytree as pytree

_CONVOLUTIONS = (
    torch.ops.aten.convolution.default,
    torch.ops.aten._convolution.default,
    torch.ops.aten._convolution.deprecated,
    torch.ops.aten.convolution_backward.default,
)


def _like(tensor, device):
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _as_of_cpu(theirs):
    """The kernels are the CPU's, and the strides of their results too."""
    ours = torch._C._get_privateuse1_backend_name()

    def convolution(fake_mode, func, *args, **kwargs):
        tensors = [t for t in pytree.arg_tree_leaves(*args, **kwargs) if torch.is_tensor(t)]
        device = tensors[0].fake_device
        if device.type != ours:
            return theirs(fake_mode, func, *args, **kwargs)
        with fake_mode:
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: _like(t, "cpu"), (args, kwargs)
            )
            results = func(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, lambda t: _like(t, device), results)

    return convolution


def register():
    implementations = fake_impls.op_implementations_dict
    for operator in _CONVOLUTIONS:
        implementations[operator] = _as_of_cpu(implementations[operator])


register()
