"""Flex attention: CUDA's rules for its call, and the CPU's for its compilation. Imported after
torch.nn.attention.flex_attention."""

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._higher_order_ops.flex_attention import _flex_attention_autocast_impl
from torch._higher_order_ops.flex_attention import flex_attention as operator

from .._patches import wrap
from ..openreg._utils import is_ours, type_name


def _check(check, query, key, value):
    if not is_ours(query.device):
        check(query, key, value)
    elif torch.compiler.is_dynamo_compiling() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        raise NotImplementedError(
            f"FlexAttention does not support backward on {type_name()} devices,\n"
            "  as on the CPU, whose kernels they run\n"
            "  help: set requires_grad of its inputs to False, or do not compile it"
        )


def _no_sums(options_of, query, key, value, return_lse, kernel_options, return_aux=None):
    """Unless it is requested, the CPU's template returns no log-sum-exp, which a backward needs."""
    options = options_of(query, key, value, return_lse, kernel_options, return_aux)
    asked = return_lse if return_aux is None else return_aux.lse
    if is_ours(query.device) and torch.compiler.is_dynamo_compiling() and not asked:
        options["OUTPUT_LOGSUMEXP"] = False
    return options


@operator.py_impl(DispatchKey.AutocastPrivateUse1)
def _autocast(*arguments):
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastPrivateUse1)):
        return _flex_attention_autocast_impl(*arguments)


wrap("torch.nn.attention.flex_attention._validate_device", _check)
wrap("torch.nn.attention.flex_attention._apply_kernel_options", _no_sums)
