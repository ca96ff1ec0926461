"""Helpers of tests in which the host runs ahead: see the fixtures runs_ahead and queued."""

import torch

DEVICE = "openreg:0"

unseen_sizes = iter(range(11, 10_000))  # no operator of this process has met the next one


def unseen(*leading):
    """A tensor whose last size no operator of this process has met."""
    return torch.rand(*leading, next(unseen_sizes)) + 0.1


def on_device(value):
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, list | tuple):
        return type(value)(on_device(item) for item in value)
    return value


def compare(got, expected):
    if isinstance(expected, torch.Tensor):
        assert got.device == torch.device(DEVICE)
        assert got.is_conj() == expected.is_conj() and got.is_neg() == expected.is_neg()
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        return
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        compare(mine, theirs)
