"""Copies: dtypes and layouts there and back, between devices, pinned and in stream order."""

import ctypes
import itertools
import warnings

import numpy as np
import pytest
import torch

import torch_openreg  # noqa: F401

DEVICE = "openreg:0"
OTHER = "openreg:1"
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
ALL_DTYPES = [
    *DTYPES,
    torch.int8,
    torch.int32,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "gaps": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda t: torch.cat([t[:1], t])[1:],
    "expanded": lambda t: t[:1].expand_as(t),
}
LAYOUT_PAIRS = [pair for pair in itertools.product(LAYOUTS, LAYOUTS) if pair[0] != "expanded"]
two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")


def sample(dtype=torch.float32):
    values = torch.arange(2 * 3 * 4 * 5) % 100
    if dtype.is_complex:
        values = torch.complex(values.float(), -values.float())
    return values.to(dtype).view(2, 3, 4, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_to_the_device_and_back_keeps_values_and_strides(dtype, layout):
    host = LAYOUTS[layout](sample(dtype))
    device = host.to(DEVICE)
    assert torch.equal(device.cpu(), host)
    assert device.stride() == host.to("cpu", copy=True).stride()
    assert torch.equal(LAYOUTS[layout](sample(dtype).to(DEVICE)).cpu(), host)


ROUND_TRIPS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[1:, ::2],
    "empty": lambda t: t[:0],
    "0-dim": lambda t: t[1, 2],
}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ROUND_TRIPS)
def test_round_trip_over_both_devices_keeps_values(dtype, layout):
    values = torch.arange(48).view(6, 8) % 15
    host = (
        values.to(dtype)
        if not dtype.is_complex
        else torch.complex(values.float(), -values.float()).to(dtype)
    )
    view = ROUND_TRIPS[layout]
    for x in (view(host).to(DEVICE), view(host.to(DEVICE))):
        there = x.to(OTHER if torch.openreg.device_count() > 1 else DEVICE)
        back = there.cpu()
        assert (back.dtype, back.shape) == (dtype, view(host).shape)
        assert torch.equal(bits(back), bits(view(host)))


def plain(tensor):
    return tensor


def transposed(tensor):
    return torch.empty_like(tensor.transpose(0, 2).contiguous()).transpose(0, 2)


def gaps(tensor):
    return torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)[..., 1]


PLACES = ["cpu", DEVICE, OTHER]
MATRIX_DTYPES = [torch.float32, torch.float64, torch.int32, torch.complex64, torch.bfloat16]


@two_devices
@pytest.mark.parametrize("to,source", list(itertools.product(PLACES, PLACES)), ids=str)
@pytest.mark.parametrize("dtype", MATRIX_DTYPES, ids=str)
@pytest.mark.parametrize("other", MATRIX_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_copy_between_every_pair_of_places_has_the_cpus_values(to, source, dtype, other):
    host = sample(dtype).permute(2, 0, 3, 1)[1:, :, ::2]
    there = sample(dtype).to(source).permute(2, 0, 3, 1)[1:, :, ::2]
    row = sample(dtype).to(source)[0, 0, 0, :3]  # to be broadcast
    for layout, non_blocking in itertools.product((plain, transposed, gaps), (False, True)):
        dst = layout(torch.zeros(host.shape, dtype=other, device=to))
        expected = torch.zeros(host.shape, dtype=other).copy_(host)
        assert torch.equal(dst.copy_(there, non_blocking=non_blocking).cpu(), expected)
        expected = torch.zeros(host.shape, dtype=other).copy_(sample(dtype)[0, 0, 0, :3])
        assert torch.equal(dst.copy_(row, non_blocking=non_blocking).cpu(), expected)


@pytest.mark.parametrize("to,source", LAYOUT_PAIRS)
@pytest.mark.parametrize("where", [(DEVICE, "cpu"), ("cpu", DEVICE), (DEVICE, DEVICE)], ids=str)
def test_copy_into_any_layout_keeps_values(to, source, where):
    dst = LAYOUTS[to](torch.zeros(2, 3, 4, 5).to(where[0]))
    src = LAYOUTS[source](sample().to(where[1]))
    dst.copy_(src)
    assert torch.equal(dst.cpu(), src.cpu())


@pytest.mark.parametrize("to,source", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_copy_casts_as_the_cpu_does(to, source):
    host = sample(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = host.to(to)
        assert torch.equal(host.to(DEVICE).to(to).cpu(), expected)
        assert torch.equal(
            torch.empty(host.shape, dtype=to, device=DEVICE).copy_(host).cpu(), expected
        )
        assert torch.equal(torch.empty(host.shape, dtype=to).copy_(host.to(DEVICE)), expected)


@pytest.mark.parametrize("place", [DEVICE, "cpu"])
def test_copy_resolves_conj_and_neg_bits(place):
    host = sample(torch.complex64)
    for view in (
        torch.conj,
        torch._neg_view,
        lambda t: torch._neg_view(t.conj()),
        lambda t: t.conj().imag,
    ):
        source = view(host.to(DEVICE))
        expected = view(host).resolve_conj().resolve_neg()
        assert torch.equal(source.cpu().resolve_conj().resolve_neg(), expected)
        dst = torch.empty(expected.shape, dtype=expected.dtype, device=place)
        assert torch.equal(dst.copy_(source).cpu(), expected)
        assert torch.equal(source.clone().cpu().resolve_conj().resolve_neg(), expected)
    dst = torch.zeros_like(host, device=DEVICE).conj()
    dst.copy_(host)
    assert torch.equal(dst.cpu().resolve_conj(), host)


def test_copy_broadcasts_and_refuses_overlap():
    x = torch.zeros(3, 4, device=DEVICE)
    x.copy_(torch.arange(4.0))
    assert x.tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3
    x.copy_(x)
    with pytest.raises(RuntimeError, match="single memory location"):
        x.view(-1)[1:].copy_(x.view(-1)[:-1])
    with pytest.raises(RuntimeError, match="expand"):
        x.copy_(torch.ones(5))
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.zeros(1, device=DEVICE).expand(4).copy_(torch.arange(4.0, device=DEVICE))


@pytest.mark.parametrize("place", ["cpu", DEVICE])
def test_copy_source_inside_of_its_destination_is_refused(place):
    x = torch.arange(12.0, device=place).view(3, 4)
    for source in (x[0], x[-1:], x[1, 2]):
        with pytest.raises(RuntimeError, match="single memory location"):
            x.copy_(source)
    assert x.flatten().tolist() == list(range(12))
    x[:] = x[1]  # indexing expands the source
    assert x.tolist() == [[4.0, 5.0, 6.0, 7.0]] * 3


@two_devices
@pytest.mark.parametrize("to,source", list(itertools.product(PLACES, PLACES)), ids=str)
def test_copy_respects_conj_and_neg_bits_of_both_sides(to, source):
    host = sample(torch.complex64)
    views = (plain, torch.conj, torch._neg_view, lambda t: torch._neg_view(t.conj()))
    for left, right in itertools.product(views, views):
        for dtype in (torch.complex64, torch.complex128):
            dst = torch.zeros(host.shape, dtype=dtype, device=to)
            left(dst).copy_(right(host.to(source)))
            expected = torch.zeros(host.shape, dtype=dtype)
            left(expected).copy_(right(host))
            assert torch.equal(dst.cpu(), expected)


@two_devices
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.complex32], ids=str)
@pytest.mark.parametrize("to,source", list(itertools.product(PLACES, PLACES)), ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_copy_of_equal_bits_needs_no_kernel_of_the_dtype(to, source, dtype):
    def turned(x):
        return torch._neg_view(x.conj()).t()

    there = turned(torch.ones(3, 2).to(dtype).to(source))
    dst = torch.zeros(2, 3).to(dtype).to(to)
    torch._neg_view(dst.conj()).copy_(there)
    assert dst.cpu().to(torch.complex64).tolist() == [[1.0] * 3] * 2


# ---- What is refused ----


def test_copy_from_a_meta_tensor_is_refused():
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(NotImplementedError, match="meta"):
        x.copy_(torch.ones(2, device="meta"))
    with pytest.raises((RuntimeError, NotImplementedError), match=r"[Mm]eta"):
        torch.ops.aten._copy_from(torch.ones(2, device="meta"), x)
    with pytest.raises(NotImplementedError, match="meta"):
        torch.ones(2, device="meta").to(DEVICE)
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize(
    "other,name",
    [
        (lambda: torch.eye(2).to_sparse(), "dense and sparse"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse compressed"),
        (lambda: torch.eye(2).to_mkldnn(), "[mM]kldnn"),
    ],
    ids=["sparse", "csr", "mkldnn"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore")
def test_copy_of_another_layout_is_refused_by_name(other, name):
    x = torch.ones(2, 2, device=DEVICE)
    with pytest.raises((RuntimeError, NotImplementedError), match=name):
        x.copy_(other())
    with pytest.raises((RuntimeError, NotImplementedError), match=name):
        other().copy_(x)
    assert x.tolist() == [[1, 1], [1, 1]]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("size", [5, 1 << 18])
def test_copy_of_a_read_only_or_misaligned_numpy_array_is_right(size):
    values = np.arange(size, dtype=np.float32)
    array = np.frombuffer(b"x" + values.tobytes(), dtype=np.float32, offset=1)
    assert array.ctypes.data % 4 and not array.flags.writeable
    host = torch.from_numpy(array)
    for dtype in (torch.float32, torch.float64):
        assert np.array_equal(host.to(DEVICE, dtype).cpu().numpy(), values)
    out = np.frombuffer(bytearray(size * 4 + 1), dtype=np.float32, offset=1)
    torch.from_numpy(out).copy_(torch.from_numpy(values).to(DEVICE).double())
    assert np.array_equal(out, values)


def enlarge(storage, bytes):
    """Corrupts the size that a storage says it has."""
    words = (ctypes.c_uint64 * 12).from_address(storage._cdata)
    (at,) = (i for i, word in enumerate(words) if word == storage.nbytes())
    words[at] = bytes
    assert storage.nbytes() == bytes


@pytest.mark.parametrize("place", ["cpu", DEVICE, OTHER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [256, 1 << 19, 25 << 18])  # cut from a segment, or a segment
@two_devices
def test_copy_past_the_end_moves_nothing(place, dtype, size):
    small = torch.ones(size, device=DEVICE)
    storage = small.untyped_storage()
    enlarge(storage, 16 * size)
    try:
        for offset in (0, size - 10):
            large = torch.empty(0, device=DEVICE).set_(storage, offset, (2 * size,))
            other = torch.zeros(large.shape, dtype=dtype, device=place)
            for to, source in ((large, other), (other, large)):
                with pytest.raises(RuntimeError, match=r"past its\s+(device )?allocation"):
                    to.copy_(source)
            assert not other.cpu().any()
            assert small.cpu().eq(1).all()
            del to, source, large
    finally:
        enlarge(storage, 4 * size)
    assert small.add_(1)[-1].item() == 2


def test_complex_to_real_copy_warns_whoever_waits():
    x = torch.ones(4, dtype=torch.complex64, device=DEVICE)
    torch.set_warn_always(True)  # else it comes once a process
    try:
        with pytest.warns(UserWarning, match="imaginary"):
            torch.empty(4, device=DEVICE).copy_(x)
            torch.openreg.synchronize()
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("size", [4, 1 << 18])  # whole, and of a size that is split
@pytest.mark.parametrize("to", ["cpu", DEVICE, OTHER])
@two_devices
def test_complex_to_real_copy_warns_at_the_call(to, size, request):
    x = torch.ones(size, dtype=torch.complex64, device=DEVICE)
    y = torch.empty(size, device=to)
    torch.set_warn_always(True)
    request.addfinalizer(lambda: torch.set_warn_always(False))
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y.copy_(x)
            at_the_call = [str(w.message) for w in caught]
            torch.openreg.synchronize(DEVICE)
            torch.openreg.synchronize(OTHER)
        assert len(at_the_call) == len(caught) == 1 and "imaginary part" in at_the_call[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="imaginary part"):
                y.copy_(x)
            torch.openreg.synchronize(DEVICE)
            torch.openreg.synchronize(OTHER)


def with_bits(device, source, conj, neg):
    """Signed zeros and ones, with these bits."""
    x = torch.tensor([1.0, -1.0, 0.0, -0.0], dtype=source, device=device)
    if conj and source.is_complex:
        x = x.conj()
    return torch._neg_view(x) if neg else x


def bytes_of(x):
    return x.resolve_conj().resolve_neg().view(torch.uint8).tolist()


BITS = [(conj, neg) for conj in (False, True) for neg in (False, True)]
# Not float16: with a float32 source PyTorch's CPU forgets the destination's neg bit.
KINDS = [
    getattr(torch, n) for n in ["int64", "uint32", "bfloat16", "float64", "complex64", "complex128"]
]


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("to", ["cpu", DEVICE, OTHER])
@pytest.mark.parametrize("source", [torch.int64, torch.float32, torch.complex64], ids=str)
@two_devices
def test_conj_and_neg_bits_are_resolved_as_on_the_cpu(to, source):
    """The same bytes, signs of zeros included, and the same refusals, by the call."""

    def result(device, place):
        y = torch.zeros(4, dtype=dtype, device=place)
        view = torch._neg_view(y.conj() if from_bits[0] else y) if to_bits else y
        try:
            view.copy_(with_bits(device, source, *from_bits))
        except RuntimeError as error:
            torch.openreg.synchronize(DEVICE)
            torch.openreg.synchronize(OTHER)
            return str(error)
        return bytes_of(y.cpu())

    for dtype, from_bits, to_bits in itertools.product([*KINDS, torch.bool], BITS, (False, True)):
        assert result(DEVICE, to) == result("cpu", "cpu"), (dtype, from_bits, to_bits)


@pytest.mark.parametrize("to", ["cpu", DEVICE, OTHER])
@two_devices
def test_copy_of_a_refused_dtype_is_refused_at_the_call(to):
    for dtype in (torch.bits8, torch.uint4, torch.float4_e2m1fn_x2):
        for one, other in ((dtype, torch.float32), (torch.complex64, dtype)):
            y = torch.empty(4, dtype=one, device=to)
            with pytest.raises(NotImplementedError, match=r"copy_.* not implemented for"):
                y.copy_(torch.empty(4, dtype=other, device=DEVICE))
    torch.openreg.synchronize(DEVICE)
    torch.openreg.synchronize(OTHER)
    assert torch.ones(2, device=DEVICE).to(to).tolist() == [1, 1]


def test_gradients_flow_through_copies():
    x = torch.ones(3, requires_grad=True)
    (x.to(DEVICE).double() * 2).cpu().sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


# ---- Two devices ----


@two_devices
@pytest.mark.parametrize("to,source", LAYOUT_PAIRS)
def test_copy_between_devices_keeps_values_in_any_layout(to, source):
    dst = LAYOUTS[to](torch.zeros(2, 3, 4, 5, dtype=torch.float64, device=OTHER))
    src = LAYOUTS[source](sample().to(DEVICE))
    dst.copy_(src)
    assert torch.equal(dst.cpu().float(), src.cpu())
    assert torch.equal(src.to(OTHER).cpu(), src.cpu())


@two_devices
def test_peer_copy_waits_for_both_streams_and_not_for_the_host():
    src = torch.ones(1024, device=DEVICE)
    dst = torch.zeros(1024, device=OTHER)
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    with torch.openreg.testing.gate(0) as first, torch.openreg.testing.gate(1) as second:
        first.wait()
        second.wait()
        dst.copy_(src)
        assert not torch.accelerator.current_stream(0).query()
        first.open()
        # The source's stream waits for the destination's, which is still held.
        assert not torch.accelerator.current_stream(0).query()
        second.open()
        torch.accelerator.current_stream(1).synchronize()
    assert dst.cpu().sum().item() == 1024


# ---- Pinned memory and streams ----


def test_pinned_copies_return_behind_a_gate():
    source = torch.arange(1 << 16).float().pin_memory()
    result = torch.zeros(1 << 16).pin_memory()
    device = torch.zeros(1 << 16, device=DEVICE)
    torch.accelerator.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        device.copy_(source, non_blocking=True)
        result.copy_(device, non_blocking=True)
        assert result.sum().item() == 0
        assert not torch.openreg.current_stream().query()
    torch.accelerator.synchronize()
    assert torch.equal(result, source)


def test_pinned_block_is_not_reused_under_an_unfinished_copy():
    device = torch.zeros(1 << 12, device=DEVICE)
    torch.accelerator.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        source = torch.ones(1 << 13).pin_memory()
        address = source.data_ptr()
        # The event belongs to the storage: a slice counts.
        device.copy_(source[1 << 12 :], non_blocking=True)
        del source
        other = torch.zeros(1 << 13).pin_memory()
        assert other.data_ptr() != address
    torch.accelerator.synchronize()
    assert device.cpu().sum().item() == 1 << 12


def test_blocking_copies_wait_for_the_current_stream():
    stream = torch.Stream(DEVICE)
    pinned = torch.zeros(1024).pin_memory()
    with stream:
        x = torch.ones(1024, device=DEVICE)
        torch.openreg._sleep(20_000_000)
        x.mul_(3)
        pinned.copy_(x)
        assert pinned.sum().item() == 3 * 1024
        torch.openreg._sleep(20_000_000)
        x.mul_(3)
        assert x.cpu().sum().item() == 9 * 1024
        torch.openreg._sleep(20_000_000)
        assert x[0].item() == 9


@pytest.mark.parametrize("size", [1, 1 << 12, 1 << 18])
def test_pageable_source_may_be_overwritten_after_the_call(size):
    source = torch.ones(size)
    device = torch.zeros(size, device=DEVICE)
    torch.openreg._sleep(20_000_000)
    device.copy_(source, non_blocking=True)
    source.zero_()
    assert device.cpu().sum().item() == size


def test_pinned_copies_with_strides_and_casts_keep_values():
    source = torch.arange(64.0).view(8, 8).pin_memory()
    device = torch.zeros(8, 8, dtype=torch.float64, device=DEVICE)
    device.copy_(source.t(), non_blocking=True)
    result = torch.zeros(8, 8).pin_memory()
    result.copy_(device.t(), non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(result, source)


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_strided_copies_count_one_write_each_and_work_in_inference_mode(mode, pin):
    there = torch.arange(2048.0).view(2, 1024).to(DEVICE)
    with mode():
        host = torch.zeros(2, 1024, dtype=torch.float64, pin_memory=pin)
        host[:, ::2].copy_(there[:, ::2])
        back = torch.zeros(2, 1024, device=DEVICE)
        back[:, ::2].copy_(host[:, ::2])
        assert back[:, ::2].sum() == there[:, ::2].sum() and back[:, 1::2].sum() == 0
        if mode is torch.no_grad:
            assert (host._version, back._version) == (1, 1)
