"""Backward runs on the streams of forward, and needs no synchronisation by the user."""

import threading

import pytest
import torch

gate = torch.openreg.testing.gate


class _Double(torch.autograd.Function):
    """Doubles, and notes the streams that are current on both devices in each direction."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        seen.append(("forward", *_current()))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(("backward", *_current(), threading.get_ident()))
        torch.openreg._sleep(20_000_000)  # whoever does not wait for this stream reads too early
        return grad * 2, None


def _current():
    return torch.accelerator.current_device_index(), torch.accelerator.current_stream()


@pytest.mark.parametrize("device", [0, 1])
def test_backward_node_runs_on_its_forward_stream(device):
    seen = []
    first, second = (torch.Stream(device=f"openreg:{device}") for _ in range(2))
    x = torch.ones(1000, device=f"openreg:{device}", requires_grad=True)
    first.wait_stream(torch.accelerator.current_stream(device))
    with first:
        y = _Double.apply(x, seen)
    second.wait_stream(first)
    with second:
        z = _Double.apply(y, seen).sum()
        z.backward()
        assert x.grad.tolist() == [4.0] * 1000
    assert [step[:3] for step in seen] == [
        ("forward", device, first),
        ("forward", device, second),
        ("backward", device, second),
        ("backward", device, first),
    ]
    assert seen[-1][3] != threading.get_ident()


def test_gradient_is_right_on_the_stream_that_called_backward():
    """Forward ran on a side stream. Its backward is still held there when backward() has returned;
    the caller's stream waits for it, and the host need not."""
    x = torch.ones(1000, device="openreg", requires_grad=True)
    torch.openreg.synchronize()
    side, here = torch.Stream(device="openreg"), torch.accelerator.current_stream()
    # Before the gate closes, the ways of all operators are known: none waits to learn its result.
    for _ in range(2):
        x.grad = None
        with side:
            y = _Double.apply(x, []).sum()
        y.backward()
        here.synchronize()
    x.grad = None
    with gate() as held:
        held.wait(side)
        with side:
            y = _Double.apply(x, []).sum()
        y.backward()
        twice = x.grad * 2  # queued on the caller's stream
        assert not side.query() and not here.query()
    assert twice.tolist() == [4.0] * 1000
    assert x.grad.tolist() == [2.0] * 1000


def test_net_over_two_devices_and_three_streams_has_the_cpus_gradients():
    first, second = torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)
    inputs = torch.randn(16, 32)
    second(first(inputs).relu()).square().mean().backward()
    expected = [p.grad.clone() for p in (*first.parameters(), *second.parameters())]
    for module, device in ((first, "openreg:0"), (second, "openreg:1")):
        module.zero_grad()
        module.to(device)
    torch.openreg.synchronize(0)
    torch.openreg.synchronize(1)
    streams = [torch.Stream(device=f"openreg:{i}") for i in (0, 0, 1)]
    for _ in range(20):
        first.zero_grad()
        second.zero_grad()
        with streams[0] as stream:
            torch.openreg._sleep(1_000_000)
            hidden = first(inputs.to(stream.device))
        streams[1].wait_stream(streams[0])
        with streams[1]:
            hidden = hidden.relu()
        with streams[1], streams[2] as stream:
            loss = second(hidden.to(stream.device)).square().mean()
        loss.backward()
        # On the default streams, which backward() was called on; the host has waited for nothing.
        got = [p.grad.cpu() for p in (*first.parameters(), *second.parameters())]
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        for stream in streams:
            stream.wait_stream(torch.accelerator.current_stream(stream.device_index))
