"""Copies and time: what waits for what, what the host waits for, what may be overwritten."""

import itertools

import pytest
import torch

DEVICE = "openreg:0"
OTHER = "openreg:1"
SIZES = [1, 1 << 12, 1 << 18]  # below and above what is staged
gate = torch.openreg.testing.gate
two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")

# From a (64, 64) float32 source, by memcpy, with strides, and with a cast.
KINDS = {
    "contiguous": (torch.float32, lambda t: t),
    "strided": (torch.float32, lambda t: t.t()),
    "casting": (torch.float64, lambda t: t),
    "both": (torch.bfloat16, lambda t: t.t()),
    "neg": (torch.float32, torch._neg_view),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def values():
    return torch.arange(64 * 64, dtype=torch.float32).view(64, 64)


def expected(kind):
    dtype, view = KINDS[kind]
    return view(values()).to(dtype)


def sides(kind, source, destination):
    dtype, view = KINDS[kind]
    return view(values().to(source)), torch.zeros(64, 64, dtype=dtype, device=destination)


def synchronize():
    for index in range(torch.openreg.device_count()):
        torch.openreg.synchronize(index)


# ---- Two devices ----


@two_devices
@kinds
def test_peer_copy_takes_what_the_source_held_in_its_stream(kind, runs_ahead):
    dtype, view = KINDS[kind]
    source = torch.ones(64, 64, device=DEVICE)
    to = torch.zeros(64, 64, dtype=dtype, device=OTHER)
    synchronize()

    def copy():
        source.fill_(4)
        to.copy_(view(source))
        source.fill_(8)
        return to + 1  # on the destination's stream, which waits

    after = runs_ahead(copy)
    sign = -1 if kind == "neg" else 1
    assert after.cpu().unique().tolist() == [4 * sign + 1]
    assert to.cpu().unique().tolist() == [4 * sign]
    assert source.cpu().unique().tolist() == [8]


@two_devices
@kinds
def test_peer_copy_waits_for_work_of_the_destination(kind):
    source, to = sides(kind, DEVICE, OTHER)
    synchronize()
    with gate(1) as held:
        held.wait()
        before = to + 0
        to.copy_(source)
        # The source's stream waits for the destination's.
        assert not torch.accelerator.current_stream(0).query()
    synchronize()
    assert not before.cpu().any()
    assert torch.equal(to.cpu(), expected(kind))


@two_devices
@kinds
def test_peer_copy_uses_the_current_streams(kind):
    source, to = sides(kind, DEVICE, OTHER)
    here, there = torch.Stream(DEVICE), torch.Stream(OTHER)
    synchronize()
    with gate(0) as first, gate(1) as second:
        first.wait()
        second.wait()  # the default streams, which have no part in this
        torch.openreg.set_stream(there)
        torch.openreg.set_stream(here)
        to.copy_(source)
        there.synchronize()
        assert torch.equal(to.cpu(), expected(kind))


# ---- Host and device ----


@kinds
@pytest.mark.parametrize("to_device", [True, False])
def test_pinned_copies_return_at_once_and_happen_later(kind, to_device, runs_ahead):
    source, to = sides(kind, "cpu" if to_device else DEVICE, DEVICE if to_device else "cpu")
    if to_device:
        pinned = values().pin_memory()
        source = KINDS[kind][1](pinned)
    else:
        to = to.pin_memory()
    synchronize()

    def copy():
        to.copy_(source, non_blocking=True)
        assert to_device or not to.any()

    runs_ahead(copy)
    torch.openreg.synchronize()
    assert torch.equal(to.cpu(), expected(kind))


@pytest.mark.parametrize("non_blocking", [False, True])
@kinds
def test_pinned_source_is_read_after_what_writes_it(kind, non_blocking):
    dtype, view = KINDS[kind]
    source, work = values().to(DEVICE), torch.zeros(1 << 20, device=DEVICE)
    host = torch.zeros(64, 64).pin_memory()
    to = torch.zeros(64, 128, dtype=dtype, device=DEVICE)[:, ::2]
    synchronize()
    for _ in range(20):
        work.add_(1)
    host.copy_(source, non_blocking=True)
    to.copy_(view(host), non_blocking=non_blocking)
    assert torch.equal(to.cpu(), expected(kind))


def test_pinned_copy_behind_a_kernel_has_not_happened_yet():
    x = torch.ones(1 << 10, device=DEVICE)
    host = torch.zeros(1 << 10).pin_memory()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        host.copy_(x.mul_(3), non_blocking=True)
        assert not torch.openreg.current_stream().query() and not host.any()
    torch.openreg.synchronize()
    assert host.unique().tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_non_blocking_copy_to_cpu_returns_pinned_memory_at_once(dtype, runs_ahead):
    x = torch.ones(1 << 10, device=DEVICE)
    host = runs_ahead(lambda: x.mul_(5).to("cpu", dtype, non_blocking=True))
    torch.openreg.synchronize()
    assert host.is_pinned() and host.unique().tolist() == [5]


@kinds
@pytest.mark.parametrize("non_blocking", [False, True])
def test_pageable_destination_is_complete_when_the_copy_returns(kind, non_blocking):
    source, to = sides(kind, DEVICE, "cpu")
    torch.openreg._sleep(20_000_000)
    to.copy_(source, non_blocking=non_blocking)
    assert torch.equal(to, expected(kind))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("non_blocking", [False, True])
@kinds
def test_pageable_source_may_be_overwritten_after_the_call(kind, non_blocking, size):
    dtype, view = KINDS[kind]
    source = torch.ones(2, size)
    device = torch.zeros(view(source).shape, dtype=dtype, device=DEVICE)
    torch.openreg._sleep(20_000_000)
    device.copy_(view(source), non_blocking=non_blocking)
    source.zero_()
    assert device.abs().cpu().unique().tolist() == [1]


@kinds
def test_copy_of_a_small_pageable_source_does_not_wait(kind, runs_ahead):
    source, to = sides(kind, "cpu", DEVICE)
    synchronize()
    runs_ahead(lambda: to.copy_(source, non_blocking=True))
    assert torch.equal(to.cpu(), expected(kind))


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("to_device", [True, False])
@kinds
def test_blocking_copy_synchronizes_its_stream_and_no_other(kind, to_device, pinned):
    source, to = sides(kind, *(("cpu", DEVICE) if to_device else (DEVICE, "cpu")))
    if pinned and to_device:
        source = KINDS[kind][1](values().pin_memory())
    elif pinned:
        to = to.pin_memory()
    side = torch.Stream(DEVICE)
    synchronize()
    with gate() as held:
        held.wait()  # the default stream
        with side:
            torch.openreg._sleep(5_000_000)
            to.copy_(source)
        assert side.query()
    assert torch.equal(to.cpu(), expected(kind))


def test_expanded_source_counts_as_small_as_its_memory(runs_ahead):
    to = torch.zeros(1 << 10, 1 << 10, device=DEVICE)
    row = torch.arange(1 << 10, dtype=torch.float64)
    runs_ahead(lambda: to.copy_(row, non_blocking=True))
    assert torch.equal(to.cpu(), row.float().expand_as(to))


@pytest.mark.parametrize("non_blocking", [False, True])
@kinds
def test_copy_is_ordered_on_the_current_stream(kind, non_blocking):
    source, to = sides(kind, DEVICE, DEVICE)
    back = torch.zeros(to.shape, dtype=to.dtype)
    side = torch.Stream(DEVICE)
    synchronize()
    with gate() as held:
        held.wait()  # the default stream, which has no part in this
        with side:
            torch.openreg._sleep(20_000_000)
            to.copy_(source, non_blocking=non_blocking)
            to.add_(1)
            back.copy_(to, non_blocking=non_blocking)
    assert torch.equal(back, expected(kind) + 1)


def test_large_copy_runs_beside_a_kernel():
    source = torch.ones(1 << 24).pin_memory()
    device = torch.zeros(1 << 24, device=DEVICE)
    side = torch.Stream(DEVICE)
    synchronize()
    torch.openreg._sleep(1_000_000_000)
    with side:
        device.copy_(source, non_blocking=True)
    side.synchronize()
    assert not torch.openreg.default_stream().query()


# ---- Pieces: large copies are shared between lanes and the host ----


LARGE = {
    "flat": lambda t: t,
    "rows with gaps": lambda t: t[:, 1:-1],
    "permuted": lambda t: t.view(64, -1, 32).permute(2, 0, 1),
    "short rows": lambda t: t.view(-1, 4)[:, :3],
    "one long row": lambda t: t.view(2, -1),
    "expanded": lambda t: t[:1].expand(700, -1),
}


@pytest.mark.parametrize("layout", LARGE)
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.int64, torch.bfloat16)])
@pytest.mark.parametrize("where", list(itertools.product(["cpu", DEVICE], repeat=2)), ids=str)
def test_large_copy_keeps_values_in_any_layout(where, dtypes, layout):
    base = torch.arange(512 * 1024).view(512, 1024) % 5000
    source = LARGE[layout](base.to(dtypes[0]))
    there = LARGE[layout](base.to(where[0], dtypes[0]))
    for to in (
        torch.zeros(source.shape, dtype=dtypes[1], device=where[1]),
        torch.zeros(source.shape[::-1], dtype=dtypes[1], device=where[1]).permute(
            *reversed(range(source.dim()))
        ),
    ):
        to.copy_(there)
        assert torch.equal(to.cpu(), source.to(dtypes[1]))


def test_large_copies_keep_conj_and_neg():
    base = torch.complex(torch.arange(1 << 18).double(), torch.arange(1 << 18).double() + 1)
    for view in (torch.conj, torch._neg_view, lambda t: torch._neg_view(t.conj())):
        source, wanted = view(base.to(DEVICE)), view(base).resolve_conj().resolve_neg()
        assert torch.equal(torch.zeros_like(base, device=DEVICE).copy_(source).cpu(), wanted)
        single = torch.zeros(base.shape, dtype=torch.complex64)
        assert torch.equal(single.copy_(source), wanted.to(torch.complex64))
        to = torch.zeros(base.shape, dtype=torch.complex64, device=DEVICE)
        view(to).copy_(base)
        assert torch.equal(to.cpu(), wanted.to(torch.complex64))


def test_large_copies_flush_denormals_where_the_caller_does():
    tiny = torch.full((1 << 18,), 1e-40, dtype=torch.float64)
    assert torch.set_flush_denormal(True)
    try:
        flushed = torch.empty(tiny.shape, dtype=torch.float32, device=DEVICE).copy_(tiny).cpu()
    finally:
        torch.set_flush_denormal(False)
    kept = torch.empty(tiny.shape, dtype=torch.float32, device=DEVICE).copy_(tiny).cpu()
    assert torch.equal(kept, tiny.float()) and kept.all()
    assert not flushed.any()


def test_large_copies_show_a_dispatch_mode_nothing_of_their_pieces():
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    source = torch.ones(1 << 20, dtype=torch.float64)
    to = torch.zeros(1 << 20, device=DEVICE)
    with Mode():
        to.copy_(source)
    assert seen == [torch.ops.aten.copy_.default]
