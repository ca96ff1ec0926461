"""scaled_dot_product_attention of DTensors: divided as CUDA's is, with the CPU's values.

The functions that begin with `rank_` run on every rank.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

SIZE = 2
MASKS = {
    "none": None,
    "causal": None,
    "for all": (8, 8),
    "for each sequence": (2, 1, 8, 8),
    "for each head": (1, 4, 8, 8),
    "bools": (2, 4, 8, 8),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(SIZE, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def divided(rank, tensors, placement):
    from torch.distributed.tensor import distribute_tensor

    mesh = dist.init_device_mesh("openreg", (SIZE,))
    return [distribute_tensor(t.to(f"openreg:{rank}"), mesh, [placement]) for t in tensors]


def whole(dtensor):
    return dtensor.full_tensor().cpu()


def rank_attends(rank, name, mask_divided):
    from torch.distributed.tensor import Replicate, Shard

    torch.openreg.set_device(rank)
    try:
        torch.manual_seed(0)
        inputs = [torch.randn(2, 4, 8, 16) for _ in range(3)]
        shape = MASKS[name]
        mask = None if shape is None else torch.randn(shape)
        if name == "bools":
            mask = mask > -1
        options = {"is_causal": name == "causal"}
        plain = [t.clone().requires_grad_() for t in inputs]
        expected = F.scaled_dot_product_attention(*plain, mask, **options)
        expected.square().sum().backward()
        for placement in (Shard(1), Shard(0), Replicate(), Shard(2)):
            parts = [t.requires_grad_() for t in divided(rank, inputs, placement)]
            ours = mask
            if mask is not None:
                (ours,) = divided(rank, [mask], Shard(0) if mask_divided else Replicate())
            got = F.scaled_dot_product_attention(*parts, ours, **options)
            got.square().sum().backward()
            torch.testing.assert_close(whole(got), expected.detach(), rtol=1e-4, atol=1e-5)
            for part, one in zip(parts, plain, strict=True):
                torch.testing.assert_close(whole(part.grad), one.grad, rtol=1e-4, atol=1e-5)
            if mask is None and placement != Shard(2):
                assert got.placements == parts[0].grad.placements == (placement,)
    finally:
        torch.openreg.set_device(0)


@pytest.mark.parametrize("mask_divided", [False, True], ids=["", "mask divided"])
@pytest.mark.parametrize("name", MASKS)
def test_attention_of_dtensors_has_the_cpus_values(ranks, name, mask_divided):
    ranks.run(rank_attends, name, mask_divided)


def rank_chooses(rank):
    from torch.distributed.tensor import Shard

    torch.openreg.set_device(rank)
    try:
        inputs = divided(rank, [torch.randn(2, 4, 8, 16) for _ in range(3)], Shard(1))
        (mask,) = divided(rank, [torch.randn(2, 4, 8, 8)], Shard(1))
        with sdpa_kernel(SDPBackend.MATH):
            expected = whole(F.scaled_dot_product_attention(*inputs))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            got = whole(F.scaled_dot_product_attention(*inputs))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            with pytest.raises(RuntimeError, match="No viable backend"):
                F.scaled_dot_product_attention(*inputs, mask)
    finally:
        torch.openreg.set_device(0)


def test_attention_of_dtensors_chooses_a_kernel_as_cuda(ranks):
    ranks.run(rank_chooses)
