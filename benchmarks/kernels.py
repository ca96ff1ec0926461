"""Kernels written in Triton: the host's time of a launch, and a task's time against the same
operators of eager PyTorch on the CPU, with one thread each."""

import functools
import json
import sys
import time

import torch
from torch.utils._triton import has_triton_package

if not has_triton_package():
    sys.exit()

import triton
import triton.language as tl

import torch_openreg

torch_openreg.triton()
DEVICE = "openreg"
LAUNCH_US = 8


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at, mask=at < n), tl.load(y_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x + y, mask=at < n)


@triton.jit
def softmax(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    x = tl.load(x_ptr + row + at, mask=at < columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row + at, e / tl.sum(e, axis=0), mask=at < columns)


@triton.jit
def layer_norm(x_ptr, w_ptr, b_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row, mask = tl.program_id(0) * columns, at < columns
    x = tl.load(x_ptr + row + at, mask=mask, other=0.0)
    x = tl.where(mask, x - tl.sum(x, axis=0) / columns, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / columns + 1e-5)
    w, b = tl.load(w_ptr + at, mask=mask), tl.load(b_ptr + at, mask=mask)
    tl.store(out_ptr + row + at, y * w + b, mask=mask)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, N, K, M: tl.constexpr, BLOCK_K: tl.constexpr):
    i = tl.program_id(0) * M + tl.arange(0, M)
    j = tl.program_id(1) * M + tl.arange(0, M)
    k = tl.arange(0, BLOCK_K)
    a, b = a_ptr + i[:, None] * K + k[None, :], b_ptr + k[:, None] * N + j[None, :]
    c = tl.zeros((M, M), tl.float32)
    for _ in range(0, K, BLOCK_K):
        c = tl.dot(tl.load(a), tl.load(b), c)
        a, b = a + BLOCK_K, b + BLOCK_K * N
    tl.store(c_ptr + i[:, None] * N + j[None, :], c.to(c_ptr.dtype.element_ty))


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, out_ptr, scale, N, B: tl.constexpr, D: tl.constexpr):
    first, head = tl.program_id(0) * B, tl.program_id(1) * N * D
    i, d = first + tl.arange(0, B), tl.arange(0, D)
    q = tl.load(q_ptr + head + i[:, None] * D + d[None, :])
    best, total = tl.full((B,), -float("inf"), tl.float32), tl.zeros((B,), tl.float32)
    out = tl.zeros((B, D), tl.float32)
    for start in range(0, first + B, B):
        j = start + tl.arange(0, B)
        k = tl.load(k_ptr + head + j[:, None] * D + d[None, :])
        s = tl.where(i[:, None] >= j[None, :], tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        top = tl.maximum(best, tl.max(s, axis=1))
        p, shrunk = tl.exp(s - top[:, None]), tl.exp(best - top)
        v = tl.load(v_ptr + head + j[:, None] * D + d[None, :])
        out = tl.dot(p.to(v.dtype), v, out * shrunk[:, None])
        best, total = top, total * shrunk + tl.sum(p, axis=1)
    out = out / total[:, None]
    tl.store(out_ptr + head + i[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty))


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def attended(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def attentions(dtype):
    q, k, v = normal(3, 1, 4, 512, 64, dtype=dtype)

    def launch(*given):
        attention[(8, 4)](*given, 0.125, 512, B=64, D=64)

    return (q, k, v), torch.empty_like(q), launch, lambda out: attended(q, k, v)


def programs():
    """Name, (inputs, output, launch), the same eagerly, and how much longer the launch may take."""
    x, y, w = normal(1 << 20), normal(1 << 20), normal(1024)
    a, b = normal(512, 512), normal(512, 512)
    m = x.view(1024, 1024)
    norm = torch.nn.functional.layer_norm
    yield (
        "add of 1 Mi float32",
        ((x, y), torch.empty_like(x), lambda *t: add[(1024,)](*t, 1 << 20, BLOCK=1024)),
        lambda out: torch.add(x, y, out=out),
        2,
    )
    yield (
        "softmax 1024 x 1024",
        ((m,), torch.empty_like(m), lambda *t: softmax[(1024,)](*t, 1024, BLOCK=1024)),
        lambda out: torch.softmax(m, 1, out=out),
        1.5,
    )
    yield (
        "layer norm 1024 x 1024",
        ((m, w, w), torch.empty_like(m), lambda *t: layer_norm[(1024,)](*t, 1024, BLOCK=1024)),
        lambda out: norm(m, (1024,), w, w),
        1.5,
    )
    yield (
        "matmul 512 float32",
        ((a, b), torch.empty_like(a), lambda *t: matmul[(8, 8)](*t, 512, 512, M=64, BLOCK_K=32)),
        lambda out: torch.mm(a, b, out=out),
        2,
    )
    for dtype in (torch.float32, torch.float16):
        *launch, eager = attentions(dtype)
        yield f"attention 4 x 512 x 64 {str(dtype)[6:]}", launch, eager, 1


def seconds(*runs, rounds=15, least=0.02):
    """The least time of a step of each run, which are taken in turns. A run is a step, and what
    waits for all steps before it."""

    def timed(step, synchronize, count):
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        return (time.perf_counter() - start) / count

    counts = [int(least / min(timed(*run, 1), timed(*run, 1))) + 1 for run in runs]
    times = [[] for _ in runs]
    for _ in range(rounds):
        for run, count, found in zip(runs, counts, times, strict=True):
            found.append(timed(*run, count))
    return [min(found) for found in times]


def launch_us(step, count=400):
    with torch.openreg.testing.gate() as held:
        held.wait()
        start = time.thread_time()
        for _ in range(count):
            step()
        taken = time.thread_time() - start
    torch.openreg.synchronize()
    return taken / count * 1e6


def launches():
    x = torch.ones(64, device=DEVICE)

    def step():
        add[(1,)](x, x, x, 64, BLOCK=64)

    step()
    kernel = add.warmup(x, x, x, 64, BLOCK=64, grid=(1,))
    ours, nothing = kernel.run, lambda *arguments: None
    times = {ours: [], nothing: []}
    for _ in range(9):
        for run, measured in times.items():
            kernel._run = run
            measured.append(launch_us(step))
    return [min(measured) for measured in times.values()]


def main():
    torch.set_num_threads(1)
    value, floor = launches()
    name = "host time of a launch of a Triton kernel (floor: Triton's own part)"
    row = {"name": name, "value": value, "unit": "us", "limit": LAUNCH_US, "floor": floor}
    print(json.dumps(row), flush=True)
    for name, (inputs, out, launch), eager, limit in programs():
        given, result = [t.to(DEVICE) for t in inputs], out.to(DEVICE)
        ours, theirs = seconds(
            (functools.partial(launch, *given, result), torch.openreg.synchronize),
            (functools.partial(eager, out), lambda: None),
        )
        row = {"name": f"Triton's {name} / eager", "value": ours / theirs, "unit": "x"}
        print(json.dumps({**row, "limit": limit}), flush=True)


if __name__ == "__main__":
    main()
