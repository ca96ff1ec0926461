"""What results of our operators look like, where PyTorch asks the kind of device."""

import torch
from torch._decomp import decomposition_table
from torch._subclasses import fake_impls
from torch.utils import _pytree as pytree

from ..openreg._utils import is_ours

_OF_CPU = (
    torch.ops.aten.convolution.default,
    torch.ops.aten._convolution.default,
    torch.ops.aten._convolution.deprecated,
    torch.ops.aten.convolution_backward.default,
    torch.ops.aten.nonzero_static.default,
    torch.ops.aten.pixel_shuffle.default,
)


def _like(tensor, device):
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _none(*_, **__):
    return NotImplemented  # what the operator says of itself, by its meta kernel


def _as_of_cpu(theirs):
    """The kernels are the CPU's, and the strides of their results too."""

    def of_cpu(fake_mode, func, *args, **kwargs):
        tensors = [t for t in pytree.arg_tree_leaves(*args, **kwargs) if torch.is_tensor(t)]
        device = tensors[0].fake_device
        if not is_ours(device):
            return theirs(fake_mode, func, *args, **kwargs)
        with fake_mode:
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: _like(t, "cpu"), (args, kwargs)
            )
            results = func(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, lambda t: _like(t, device), results)

    return of_cpu


def _add_product(self, batch1, batch2, out_dtype, *, beta=1, alpha=1):
    """PyTorch's takes no `out_dtype`."""
    product = alpha * torch.bmm(batch1, batch2, out_dtype=out_dtype)
    return product if beta == 0 else product + beta * self.to(out_dtype)


def _fake_add_product(fake_mode, func, *args, **kwargs):
    with fake_mode:
        return _add_product(*args, **kwargs)


def register():
    wide = torch.ops.aten.baddbmm.dtype
    decomposition_table[wide] = _add_product
    fake_impls.op_implementations_dict[wide] = _fake_add_product
    implementations = fake_impls.op_implementations_dict
    for operator in _OF_CPU:
        implementations[operator] = _as_of_cpu(implementations.get(operator, _none))


register()
