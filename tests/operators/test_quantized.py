"""Quantized tensors: integers on the device, and what they mean."""

import io

import pytest
import torch

DEVICE = "openreg:1"

pytestmark = pytest.mark.filterwarnings("ignore:.*[qQ]uantize", "ignore:TypedStorage")


def numbers(device="cpu"):
    return torch.linspace(-1, 2, 12).reshape(3, 4).to(device)


def per_tensor(device="cpu", dtype=torch.quint8):
    return torch.quantize_per_tensor(numbers(device), 0.05, 10, dtype)


def per_channel(device="cpu"):
    scales = torch.tensor([0.1, 0.05, 0.02], dtype=torch.float64, device=device)
    return torch.quantize_per_channel(
        numbers(device), scales, torch.tensor([0, 3, 1], device=device), 0, torch.qint8
    )


MAKERS = [per_tensor, per_channel]


def check(result, expected):
    """Of the same integers, with the same meaning, on the device."""
    assert result.device == torch.device(DEVICE)
    assert (result.is_quantized, result.dtype, result.shape, result.stride()) == (
        expected.is_quantized,
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    if not result.is_quantized:
        torch.testing.assert_close(result.cpu(), expected)
        return
    assert result.qscheme() == expected.qscheme()
    assert result.int_repr().device == result.device
    assert torch.equal(result.int_repr().cpu(), expected.int_repr())
    if result.qscheme() == torch.per_tensor_affine:
        assert result.q_scale() == expected.q_scale()
        assert result.q_zero_point() == expected.q_zero_point()
    else:
        assert result.q_per_channel_scales().device == result.device
        assert torch.equal(result.q_per_channel_scales().cpu(), expected.q_per_channel_scales())
        assert result.q_per_channel_zero_points().tolist() == [0, 3, 1]
        assert result.q_per_channel_axis() == expected.q_per_channel_axis()


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32])
def test_quantized_tensor_has_the_cpus_integers_and_numbers(dtype):
    for _ in range(2):  # nothing is remembered of the first
        x, expected = per_tensor(DEVICE, dtype), per_tensor("cpu", dtype)
        check(x, expected)
        check(x.int_repr(), expected.int_repr())
        check(x.dequantize(), expected.dequantize())


def test_quantizing_new_shapes_has_the_cpus_result():
    for size in range(1, 6):
        x = torch.arange(float(size))
        check(
            torch.quantize_per_tensor(x.to(DEVICE), 0.5, 0, torch.qint8),
            torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
        )


def test_quantizing_per_channel_has_the_cpus_result():
    check(per_channel(DEVICE), per_channel())
    check(per_channel(DEVICE).dequantize(), per_channel().dequantize())


def test_quantizing_takes_scales_in_tensors():
    scale, zero_point = torch.tensor(0.1), torch.tensor(3)
    check(
        torch.quantize_per_tensor(
            numbers(DEVICE), scale.to(DEVICE), zero_point.to(DEVICE), torch.qint8
        ),
        torch.quantize_per_tensor(numbers(), scale, zero_point, torch.qint8),
    )


OPERATORS = {
    "clone": lambda x: x.clone(),
    "view": lambda x: x.view(4, 3),
    "transposed": lambda x: x.t(),
    "a row": lambda x: x[1],
    "contiguous": lambda x: x.t().contiguous(),
    "relu": lambda x: x.relu(),
    "cat": lambda x: torch.cat([x, x]),
    "max": lambda x: x.max(),
    "==": lambda x: x == x,
    "empty_like": lambda x: torch.empty_like(x).copy_(x),
    "copy of numbers": lambda x: x.clone().copy_(torch.ones(3, 4, device=x.device)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_quantized_operator_has_the_cpus_result(name):
    check(OPERATORS[name](per_tensor(DEVICE)), OPERATORS[name](per_tensor()))


def test_quantized_destination_quantizes_copied_numbers():
    ones = torch.ones(3, 4)
    expected = per_tensor().copy_(ones)
    for device, source in ((DEVICE, "cpu"), ("cpu", DEVICE)):
        result = per_tensor(device).copy_(ones.to(source))
        assert result.device == torch.device(device)
        assert torch.equal(result.cpu(), expected)


def test_quantized_views_change_in_place():
    x, expected = per_tensor(DEVICE), per_tensor()
    x[1].relu_()
    expected[1].relu_()
    check(x, expected)


@pytest.mark.parametrize("make", MAKERS)
def test_quantized_copies_between_devices_and_the_cpu_keep_values(make):
    x = make(DEVICE)
    check(make().to(DEVICE), make())
    assert x.cpu().device.type == "cpu"
    assert torch.equal(x.cpu(), make())
    assert x.to("openreg:0").int_repr().device == torch.device("openreg:0")
    check(x.to("openreg:0").to(DEVICE), make())


@pytest.mark.parametrize("make", MAKERS)
def test_quantized_tensor_is_pinned(make):
    for x in [make(), *([make().t(), make()[1:]] if make is per_tensor else [])]:
        pinned = x.pin_memory()
        assert not x.is_pinned() and pinned.is_pinned() and pinned.device.type == "cpu"
        assert torch.equal(pinned, x) and pinned.stride() == x.stride()
        assert pinned.pin_memory().data_ptr() == pinned.data_ptr()
        assert torch.equal(pinned.to(DEVICE, non_blocking=True).cpu(), x)
    parts = [pinned.q_per_channel_scales()] if make is per_channel else []
    assert all(part.is_pinned() for part in parts)


def test_quantized_copies_of_pinned_memory_do_not_hold_the_host():
    source, to = per_tensor().pin_memory(), per_tensor().pin_memory()
    there = torch.empty_like(per_tensor(DEVICE))
    torch.openreg.synchronize(DEVICE)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        there.copy_(source, non_blocking=True)
        to.fill_(0)
        to.copy_(there, non_blocking=True)
        assert not to.dequantize().any()
        assert not torch.accelerator.current_stream(DEVICE).query()
    torch.openreg.synchronize(DEVICE)
    assert torch.equal(to, per_tensor())


def test_quantized_sample_is_pinned_by_a_loader():
    # Without workers: on its way from one, PyTorch loses what a tensor's integers mean.
    (sample,) = torch.utils.data.DataLoader([per_tensor()], batch_size=None, pin_memory=True)
    assert sample.is_pinned()
    check(sample.to(DEVICE, non_blocking=True), per_tensor())


@pytest.mark.parametrize("make", MAKERS)
def test_empty_quantized_is_like_its_prototype(make):
    for _ in range(2):
        check(torch.empty_quantized((3, 4), make(DEVICE)).copy_(make(DEVICE)), make())
    for device in ("cpu", "openreg:0"):
        empty = torch.empty_quantized((3, 4), make(DEVICE), device=device)
        assert empty.device == torch.device(device)


@pytest.mark.parametrize("make", MAKERS)
def test_quantized_tensor_is_saved_and_loaded(make):
    file = io.BytesIO()
    torch.save(make(DEVICE), file)
    file.seek(0)
    check(torch.load(file), make())
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu"), make())


def test_quantized_tensor_is_printed_with_its_device():
    assert "device='openreg:1'" in repr(per_tensor(DEVICE))
    assert "quantization_scheme=torch.per_tensor_affine" in repr(per_tensor(DEVICE))


def test_quantized_source_is_refused_by_a_plain_destination():
    for device in ("cpu", DEVICE):
        with pytest.raises(RuntimeError, match="quantized"):
            numbers(DEVICE).copy_(per_tensor(device))
    with pytest.raises(RuntimeError, match="quantized"):
        numbers().copy_(per_tensor(DEVICE))
    with pytest.raises(RuntimeError, match="same scheme and dtype"):
        per_tensor(DEVICE).copy_(per_channel(DEVICE))
    check(per_tensor(DEVICE), per_tensor())


def test_quantized_operator_without_a_kernel_is_named():
    with pytest.raises(NotImplementedError, match=r"aten::cos.* on openreg.*QuantizedCPU"):
        per_tensor(DEVICE).cos()


def test_fake_quantize_begins_its_ranges_with_the_first_batch():
    """The kernel asks whether it has seen one by the sizes of what it writes."""
    x = torch.stack([numbers(), numbers() * 3])
    ranges = {}
    for device in "cpu", DEVICE:
        make = torch.ao.quantization.default_fused_per_channel_wt_fake_quant
        quantize = make().to(device)
        seen = [quantize(x[i].to(device)).tolist() for i in (0, 1)]
        ranges[device] = seen, quantize.activation_post_process.min_val.tolist()
    assert ranges[DEVICE] == ranges["cpu"]


# ---- Weights of four bits ----


def four_bits(rows, columns, group, dtype):
    """A matrix, weights as numbers from 0 to 15, and for each group a scale and a zero."""
    torch.manual_seed(0)
    numbers = torch.randint(16, (rows, columns), dtype=torch.int32)
    scales = torch.rand(columns // group, rows, 2).to(dtype)
    return torch.randn(5, columns).to(dtype), numbers, scales


@pytest.mark.parametrize("tiles", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_four_bit_weights_give_the_cpus_product(tiles, group, dtype, runs_ahead):
    x, numbers, scales = four_bits(32, 256, group, dtype)
    on_cpu = torch._convert_weight_to_int4pack_for_cpu(numbers, tiles)
    expected = torch._weight_int4pack_mm_for_cpu(x, on_cpu, group, scales)
    halves = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8).to(DEVICE)
    packed = torch._convert_weight_to_int4pack(halves, tiles)
    assert packed.dtype == torch.int32
    assert packed.shape == (32 // 8, 256 // (tiles * 16), 32, tiles // 2)
    x, scales = x.to(DEVICE), scales.to(DEVICE)
    for _ in range(2):
        got = torch._weight_int4pack_mm(x, packed, group, scales)
        assert got.dtype == dtype and got.device == packed.device
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=10 * tolerance)
    runs_ahead(lambda: torch._weight_int4pack_mm(x, packed, group, scales))


def test_four_bit_weights_give_a_compiled_product():
    x, numbers, scales = (t.to(DEVICE) for t in four_bits(8, 64, 32, torch.bfloat16))
    halves = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)

    def product(x, halves, scales):
        packed = torch._convert_weight_to_int4pack(halves, 2)
        return torch._weight_int4pack_mm(x, packed, 32, scales)

    compiled = torch.compile(product, backend="aot_eager")
    assert torch.equal(compiled(x, halves, scales), product(x, halves, scales))
    dense = (numbers.float() - 8) * scales[..., 0].float().repeat_interleave(32, 0).t()
    dense += scales[..., 1].float().repeat_interleave(32, 0).t()
    expected = (x.float() @ dense.t()).bfloat16()
    torch.testing.assert_close(product(x, halves, scales), expected)


def test_four_bit_weights_that_do_not_fit_are_refused():
    x, numbers, scales = (t.to(DEVICE) for t in four_bits(8, 64, 32, torch.bfloat16))
    halves = numbers[:, ::2].to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(halves, 2)
    for call, text in (
        (lambda: torch._convert_weight_to_int4pack(numbers, 2), "dtype uint8"),
        (lambda: torch._convert_weight_to_int4pack(halves, 3), "2, 4 or 8, got 3"),
        (lambda: torch._convert_weight_to_int4pack(halves[:7], 2), "multiple of 8 rows"),
        (lambda: torch._convert_weight_to_int4pack(halves, 8), "of 128 numbers"),
        (lambda: torch._weight_int4pack_mm(x, halves, 32, scales), "dtype int32"),
        (lambda: torch._weight_int4pack_mm(x[:, :32], packed, 32, scales), "rows of 32 numbers"),
        (lambda: torch._weight_int4pack_mm(x, packed, 16, scales), "32, 64, 128 or 256, got 16"),
        (lambda: torch._weight_int4pack_mm(x, packed, 64, scales), r"sizes \[64 / 64, 8, 2\]"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()
