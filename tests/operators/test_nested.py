"""Nested tensors: strided ones, which kernels know, and jagged ones, which are made in Python."""

import io

import pytest
import torch
from torch import nn

DEVICE = "openreg:1"

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:.*[nN]ested")

LAYOUTS = [torch.strided, torch.jagged]


def rows(device="cpu"):
    return [torch.arange(4.0 * n, device=device).reshape(n, 4) / 7 for n in (3, 1, 2)]


def nested(device="cpu", layout=torch.strided, **options):
    return torch.nested.nested_tensor(rows(), layout=layout, device=device, **options)


def check(result, expected):
    assert result.device == torch.device(DEVICE)
    assert (result.is_nested, result.dtype) == (expected.is_nested, expected.dtype)
    if not result.is_nested:
        torch.testing.assert_close(result.cpu(), expected)
        return
    for a, b in zip(result.unbind(), expected.unbind(), strict=True):
        assert a.device == result.device
        torch.testing.assert_close(a.cpu(), b)


OPERATORS = {
    "as it is": lambda x: x,
    "+": lambda x: x + x,
    "times a number": lambda x: x * 2,
    "neg": lambda x: -x,
    "relu": lambda x: (x - 0.5).relu(),
    "gelu": lambda x: nn.functional.gelu(x),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "double": lambda x: x.double(),
    "zeros_like": lambda x: torch.zeros_like(x),
    "padded": lambda x: torch.nested.to_padded_tensor(x, -1.0),
    "softmax": lambda x: x.softmax(-1),
    "transposed": lambda x: x.transpose(1, 2).contiguous(),
    "linear": lambda x: nn.functional.linear(x, torch.ones(2, 4, device=x.device)),
    "layer_norm": lambda x: nn.functional.layer_norm(
        x, (4,), torch.ones(4, device=x.device), torch.ones(4, device=x.device)
    ),
    "sum": lambda x: x.sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["strided", "jagged"])
def test_nested_operator_has_the_cpus_result(name, layout):
    function = OPERATORS[name]
    check(function(nested(DEVICE, layout)), function(nested(layout=layout)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=["strided", "jagged"])
def test_nested_tensors_have_the_cpus_gradients(layout):
    def run(device):
        leaves = [x.requires_grad_() for x in rows(device)]
        x = torch.nested.as_nested_tensor(leaves, layout=layout)
        padded = torch.nested.to_padded_tensor((x * x).relu(), 0.0)
        (padded * torch.arange(12.0, device=device).reshape(3, 4)).sum().backward()
        return [leaf.grad for leaf in leaves]

    for result, expected in zip(run(DEVICE), run("cpu"), strict=True):
        check(result, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["strided", "jagged"])
def test_nested_copies_between_devices_and_the_cpu_keep_values(layout):
    x = nested(DEVICE, layout)
    check(nested(layout=layout).to(DEVICE), nested(layout=layout))
    assert x.cpu().device.type == "cpu"
    assert [a.tolist() for a in x.cpu().unbind()] == [a.tolist() for a in rows()]
    assert {a.device for a in x.to("openreg:0").unbind()} == {torch.device("openreg:0")}
    check(x.to("openreg:0").to(DEVICE), nested(layout=layout))


def test_nested_in_place_operators_have_the_cpus_result():
    x, expected = nested(DEVICE), nested()
    row = x.unbind()[1]
    for tensor in (x, expected):
        tensor.mul_(2)
        tensor.relu_()
    check(x, expected)
    row.zero_()
    assert x.unbind()[1].tolist() == [[0] * 4]
    assert x.zero_() is x


@pytest.mark.parametrize("made", ["cpu", DEVICE])
def test_nested_tensor_is_saved_and_loaded(made):
    file = io.BytesIO()
    torch.save(nested(made), file)
    for place in (made, DEVICE, "cpu"):
        file.seek(0)
        x = torch.load(file, map_location=place, weights_only=False)
        assert x.device == torch.device(place)
        check(x.to(DEVICE), nested())


def test_nested_sizes_stay_on_the_cpu():
    x = nested(DEVICE)
    assert x._nested_tensor_size().device.type == "cpu"
    assert x._nested_tensor_size().tolist() == [[3, 4], [1, 4], [2, 4]]
    assert (x.size(0), x.dim(), x.is_contiguous()) == (3, 3, True)


def test_nested_view_from_buffer_copy_has_the_cpus_result(runs_ahead):
    """What functionalization calls. Sizes, strides and offsets are CPU tensors."""
    shape = (
        torch.tensor([[2, 2], [3, 2]]),
        torch.tensor([[2, 1], [2, 1]]),
        torch.tensor([0, 4]),
    )

    def view(buffer):
        return torch.ops.aten._nested_view_from_buffer(buffer, *shape)

    def copy(buffer):
        return torch.ops.aten._nested_view_from_buffer_copy(buffer, *shape)

    functional = torch.func.functionalize(view, remove="mutations_and_views")
    for function in (copy, functional):
        buffer = torch.arange(10.0)
        there = buffer.to(DEVICE)
        for _ in range(2):
            result = function(there)
            check(result, function(buffer))
    queued = torch.arange(10.0, device=DEVICE)
    result = runs_ahead(lambda: copy(queued))
    queued.zero_()
    check(result, copy(buffer))


def test_nested_transformer_layer_has_the_cpus_result():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with torch.no_grad():
        expected = layer(nested())
        check(layer.to(DEVICE)(nested(DEVICE)), expected)


VIEWS = {
    "transpose": lambda x: x.transpose(-1, -2),
    "detach": lambda x: x.detach(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "select": lambda x: x.select(0, 1),
    "unbind": lambda x: x.unbind()[1],
    "values": lambda x: x.values(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_nested_views_in_inference_mode_are_as_on_the_cpu(name):
    x, expected = nested(DEVICE), nested()
    with torch.inference_mode():
        view, expected_view = VIEWS[name](x), VIEWS[name](expected)
        assert view.is_inference() == expected_view.is_inference()
        inner = nested(DEVICE)
        assert VIEWS[name](inner).is_inference()
    check(view, expected_view)
    x.mul_(2)
    assert view._version == expected_view._version + 1
    check(view, VIEWS[name](nested() * 2))
    check(VIEWS[name](x), VIEWS[name](nested() * 2))


def test_nested_operator_without_a_kernel_is_named():
    with pytest.raises(NotImplementedError, match=r"aten::cumsum.* on openreg.*NestedTensorCPU"):
        nested(DEVICE).cumsum(0)


def test_padded_dense_to_jagged_takes_its_length_from_offsets():
    def dense(device, *length):
        x = torch.arange(24.0, device=device).view(2, 3, 4)
        offsets = torch.tensor([0, 2, 5], device=device)
        return torch.ops.aten._padded_dense_to_jagged_forward(x, [offsets], *length)

    for length in ((), (5,)) * 2:
        assert dense(DEVICE, *length).tolist() == dense("cpu", *length).tolist()


@pytest.mark.parametrize("left", [0, 32, 8])
def test_nested_work_on_a_freed_or_shrunk_storage_is_refused(left):
    for use in (lambda x: x * 2, lambda x: x.sum(-1, keepdim=True), lambda x: x.add_(1)):
        parts = [torch.ones(2, 3, device=DEVICE), torch.ones(1, 3, device=DEVICE)]
        use(torch.nested.nested_tensor(parts, device=DEVICE))  # known
        x = torch.nested.nested_tensor(parts, device=DEVICE)
        x.untyped_storage().resize_(left)
        with pytest.raises(RuntimeError, match=r"needs \d+ bytes.*freed or shrunk"):
            use(x)
