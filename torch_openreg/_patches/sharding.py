"""The sharding strategies of attention on a DTensor.

On this device it is the CPU's operator, for which PyTorch has no strategy; CUDA's strategies are
the pattern. Imported after DTensor.
"""

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _acceptable(outputs, inputs, mask):
    """Each rank has all of it, or a part of the batch, or a part of the heads."""
    if mask is not None:
        # PyTorch passes it unchanged, however the rest is placed. Its choice with a mask is MATH.
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
