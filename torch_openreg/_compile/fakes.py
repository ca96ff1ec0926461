"""The metadata of our operators' results, where PyTorch's code branches on the kind of device."""

from functools import partial

import torch
import torch._meta_registrations
from torch._decomp import decomposition_table, meta_table
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_impls
from torch.utils import _pytree as pytree

from .._patches import wrap
from ..openreg._utils import is_ours

_ATEN = torch.ops.aten
# They choose a library by the device.
_OF_CPU = (
    _ATEN.convolution.default,
    _ATEN._convolution.default,
    _ATEN._convolution.deprecated,
    _ATEN.convolution_backward.default,
)
# Their decompositions, which a fake tensor prefers, branch on the device.
_DECOMPOSED = (
    _ATEN.native_batch_norm.default,
    _ATEN._native_batch_norm_legit.default,
    _ATEN.log_sigmoid_forward.default,
    _ATEN.upsample_bilinear2d.default,
    _ATEN.upsample_trilinear3d.default,
)
# They keep the memory format of the argument with that index; their meta functions do not.
_KEEPING = {
    _ATEN.channel_shuffle.default: 0,
    _ATEN.max_unpool2d.default: 0,
    _ATEN.replication_pad2d_backward.default: 1,
}


def _like(tensor, device):
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _none(*_, **__):
    return NotImplemented  # what the operator says of itself, by its meta kernel


def _as_of_cpu(theirs, fake_mode, func, *args, **kwargs):
    """The kernels are the CPU's, so their results have the CPU's strides."""
    tensors = [t for t in pytree.arg_tree_leaves(*args, **kwargs) if torch.is_tensor(t)]
    device = tensors[0].fake_device
    if not is_ours(device):
        return theirs(fake_mode, func, *args, **kwargs)
    with fake_mode:
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _like(t, "cpu"), (args, kwargs))
        results = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: _like(t, device), results)


def _keeping(theirs, index, /, fake_mode, func, *args, **kwargs):
    device = args[index].fake_device
    if not is_ours(device):
        return theirs(fake_mode, func, *args, **kwargs)
    with fake_mode:
        metas = pytree.tree_map_only(torch.Tensor, lambda t: _like(t, "meta"), (args, kwargs))
        result = func(*metas[0], **metas[1])
        layout = suggest_memory_format(args[index])
        return torch.empty(result.size(), dtype=result.dtype, device=device, memory_format=layout)


def _decomposed(fake_mode, func, *args, **kwargs):
    with fake_mode:
        return decomposition_table[func](*args, **kwargs)


def _after_ours(operator):
    """Runs what a fake tensor of another device does; it would decompose the operator at once."""
    if operator not in decomposition_table:
        return _none
    meta_table[operator] = decomposition_table[operator]
    return _decomposed


def _add_product(self, batch1, batch2, out_dtype, *, beta=1, alpha=1):
    """PyTorch's function takes no `out_dtype`."""
    product = alpha * torch.bmm(batch1, batch2, out_dtype=out_dtype)
    return product if beta == 0 else product + beta * self.to(out_dtype)


def _hint_of_cpu(hint, tensor):
    """For meta functions that choose by the library that computes."""
    device = getattr(tensor, "fake_device", None)
    return "cpu" if device is not None and is_ours(device) else hint(tensor)


def register():
    wrap("torch._meta_registrations.device_hint", _hint_of_cpu)
    implementations = fake_impls.op_implementations_dict
    decomposition_table[_ATEN.baddbmm.dtype] = _add_product
    implementations[_ATEN.baddbmm.dtype] = _decomposed
    for operator in _OF_CPU:
        implementations[operator] = partial(_as_of_cpu, implementations.get(operator, _none))
    for operator in _DECOMPOSED:
        implementations[operator] = partial(_as_of_cpu, _after_ours(operator))
    for operator, index in _KEEPING.items():
        implementations[operator] = partial(_keeping, _after_ours(operator), index)


register()
