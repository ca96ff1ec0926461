"""How attention on a DTensor is divided.

On this device it is the CPU's operator, for which PyTorch has no strategy; those of CUDA's are the
pattern. Imported after DTensor.
"""

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _acceptable(outputs, inputs, mask):
    """All of it on each rank, or each has a part of the batch, or of the heads."""
    if mask is not None:
        # PyTorch passes it on as it is, wherever the rest goes. Its choice with a mask is MATH.
        raise NotImplementedError(
            f"{_ATTENTION} of a DTensor with attn_mask has no strategy; use SDPBackend.MATH"
        )
    return [
        ([placement] * outputs, [placement] * inputs)
        for placement in (Replicate(), Shard(0), Shard(1))
    ]


@register_sharding(_ATTENTION.default)
def _forward(*arguments, attn_mask=None, **options):
    return _acceptable(2, 3, attn_mask)


@register_sharding(_BACKWARD.default)
def _backward(*arguments, attn_mask=None, **options):
    return _acceptable(3, 6, attn_mask)
