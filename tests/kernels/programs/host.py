"""Asserts, other devices, the host, autotuning and graphs"""

import torch
import triton
import triton.language as tl

from ._pairs import DEVICE, SIZE, empty, here, numbers, pair, zeros

BLOCK = 256


@triton.jit(debug=True)
def offset_kernel(x_ptr, y_ptr, stride, CHECKED: tl.constexpr, B: tl.constexpr):
    row, offsets = tl.program_id(0), tl.arange(0, B)
    place = row * stride  # int32, though the stride may be large
    x = tl.load(x_ptr + row * B + offsets)
    if CHECKED:
        tl.device_assert(x >= 0, "negative")
    tl.store(y_ptr + row * B + offsets, x + (place % 7))


@pair("error", "place = row * stride")
def offset_past_int32(right):
    """Large tensors: a row times its stride does not fit into 32 bits."""
    x, y = numbers(4, 16), empty(4, 16)
    stride = 1000 if right else 2**30
    offset_kernel[(4,)](x, y, stride, CHECKED=False, B=16)
    return y, x + (torch.arange(4, device=DEVICE)[:, None] * stride) % 7


@pair("error", 'tl.device_assert(x >= 0, "negative")')
def assertion_fails(right):
    """Checked kernels: an input breaks what the kernel asserts."""
    x, y = numbers(4, 16), empty(4, 16)
    if not right:
        x[2, 3] = -1
    offset_kernel[(4,)](x, y, 3, CHECKED=True, B=16)
    return y, x + (torch.arange(4, device=DEVICE)[:, None] * 3) % 7


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, x * 2, mask=offsets < n)


def scale(x, y):
    scale_kernel[(triton.cdiv(SIZE, BLOCK),)](x, y, SIZE, B=BLOCK)


@pair("device", "scale(x, y)")
def tensor_of_another_device(right):
    """Several devices: the kernel is launched on the current device, and its input is on
    another."""
    x, y = numbers(SIZE, device=f"{DEVICE}:{0 if right else 1}"), zeros(SIZE)
    scale(x, y)
    return y, x * 2


@pair("device", "scale(x, y)")
def device_not_made_current(right):
    """Several devices: both tensors are on a device that is not the current one."""
    x, y = (numbers(SIZE, device=f"{DEVICE}:1") for _ in range(2))
    with torch.openreg.device(1 if right else 0):
        scale(x, y)
    return y, x * 2


@pair("race", "host.sum()")
def host_reads_too_early(right):
    """Metrics: the host reads pinned memory into which a copy of the kernel's result is queued."""
    x, y, host = numbers(SIZE), empty(SIZE), torch.empty(SIZE, pin_memory=True)
    scale(x, y)
    host.copy_(y, non_blocking=True)
    if right:
        here().synchronize()
    total = host.sum()
    return total, (x * 2).sum().cpu()


@pair("race", "host.fill_(0)")
def host_writes_too_early(right):
    """Staging buffers: the host refills pinned memory that a copy for the kernel still reads."""
    host, x, y = torch.ones(SIZE).pin_memory(), empty(SIZE), empty(SIZE)
    x.copy_(host, non_blocking=True)
    scale(x, y)
    if right:
        here().synchronize()
    host.fill_(0)
    return y, torch.full_like(y, 2)


@triton.jit
def double_kernel(x_ptr, n, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(x_ptr + offsets, x * 2, mask=offsets < n)


def tuned(**more):
    return triton.autotune([triton.Config({"B": b}) for b in (256, 512)], key=["n"], **more)


careless_double = tuned()(double_kernel)
careful_double = tuned(restore_value=["x_ptr"])(double_kernel)


@pair("autotune", "@triton.jit")
def tuned_in_place(right):
    """Autotuning: the trials of a kernel that works in place change its input."""
    x = numbers(SIZE)
    expected = x * 2
    kernel = careful_double if right else careless_double
    kernel[lambda meta: (triton.cdiv(SIZE, meta["B"]),)](x, SIZE)
    return x, expected


@pair("graph", "scale(x, y)")
def input_of_a_graph_replaced(right):
    """Graphs: the captured kernel reads the input of the capture, which is freed and replaced by
    another tensor."""
    x, y = numbers(SIZE), zeros(SIZE)
    scale(x, y)  # compiled before the capture
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        scale(x, y)
    batch = numbers(SIZE) + 1
    if right:
        x.copy_(batch)
    else:
        x = batch
    graph.replay()
    return y, batch * 2
