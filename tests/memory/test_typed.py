"""Tensor and storage classes of one dtype: torch.openreg.FloatTensor."""

import io
import pickle

import pytest
import torch

TENSORS = [name for name in torch.openreg.__all__ if name.endswith("Tensor")]
STORAGES = [name for name in torch.openreg.__all__ if name.endswith("Storage")]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_typed_classes_are_those_that_cuda_has():
    for module, ours in ((torch.cuda, torch.openreg), (torch.cuda.sparse, torch.openreg.sparse)):
        for kind in ("Tensor", "Storage"):
            names = {name for name in vars(module) if name.endswith(kind)}
            names -= {"Tensor", "UntypedStorage", "_LegacyStorage", "_CudaLegacyStorage"}
            assert names <= set(vars(ours))
            dtypes = [(getattr(m, n) for n in names) for m in (module, ours)]
            assert all(a.dtype is b.dtype for a, b in zip(*dtypes, strict=True))
    assert len(TENSORS) > 9 and len(STORAGES) > 11


@pytest.mark.parametrize("name", TENSORS)
def test_typed_constructor_takes_the_arguments_of_the_cpus(name):
    cpu, ours = getattr(torch, name), getattr(torch.openreg, name)
    data = [[True, False, True]] if ours.dtype is torch.bool else [[1, 2, 3]]
    for arguments in ((data,), (tuple(data[0]),), ([],), (), (2, 3), (torch.Size([3]),)):
        there, here = ours(*arguments), cpu(*arguments)
        assert there.device == torch.device("openreg:0") and there.dtype is here.dtype
        assert there.shape == here.shape and there.layout is here.layout
        if arguments and not isinstance(arguments[0], int | torch.Size):
            assert there.tolist() == here.tolist()
        assert there.type() == f"torch.openreg.{name}"
        assert isinstance(there, ours) and not isinstance(here, ours)
        assert sum(isinstance(there, getattr(torch.openreg, other)) for other in TENSORS) == 1
    assert isinstance(torch.nn.Parameter(there, requires_grad=False), ours)
    # Of a tensor it is another view, as everywhere in PyTorch.
    alias = ours(there)
    assert alias is not there and alias.data_ptr() == there.data_ptr()


def test_typed_constructor_uses_the_current_or_given_device():
    kind = torch.openreg.FloatTensor
    with torch.openreg.device(1):
        assert kind(2).device.index == 1 and kind([1]).device.index == 1
        assert kind(2, device="openreg:0").device.index == 0
    for wrong, text in (
        (lambda: kind(2, device="cpu"), "expects device type: openreg but device type: cpu"),
        (lambda: kind(torch.ones(2)), "device=cpu"),
        (lambda: kind(torch.ones(2, dtype=torch.half, device="openreg")), "expected TensorOptions"),
        (lambda: kind("two"), "invalid data type 'str'"),
    ):
        with pytest.raises((RuntimeError, TypeError, AttributeError), match=text):
            wrong()


def test_typed_constructor_does_not_wait(runs_ahead):
    torch.openreg.FloatTensor(3)
    there = runs_ahead(lambda: torch.openreg.FloatTensor(2, 3).fill_(1))
    assert there.tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_type_casts_by_class_and_by_name(name):
    kind = getattr(torch.openreg, name)
    for there in (
        torch.ones(3).type(kind),
        torch.ones(3).type(f"torch.openreg.{name}"),
        torch.ones(3, device="openreg").type(kind),
    ):
        assert isinstance(there, kind) and there.tolist() == [1, 1, 1]
    with torch.openreg.device(1):
        assert torch.ones(3).type(kind).device.index == 1


def test_typed_class_has_its_own_name_dtype_and_layout():
    kind = torch.openreg.FloatTensor
    assert (kind.__name__, kind.__qualname__, kind.__module__) == (
        *("FloatTensor", "FloatTensor", "torch.openreg"),
    )
    assert repr(kind) == "<class 'torch.openreg.FloatTensor'>"
    assert (kind.dtype, kind.layout, kind.is_sparse) == (torch.float, torch.strided, False)
    assert torch.openreg.sparse.FloatTensor.is_sparse
    assert kind.add(kind([1]), kind([2])).tolist() == [3]
    assert not hasattr(kind, "__array__") and not hasattr(kind, "no_such_method")
    assert pickle.loads(pickle.dumps(kind)) is kind
    file = io.BytesIO()
    torch.save({"kind": kind}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["kind"] is kind


def test_typed_sparse_class_makes_and_recognizes_tensors():
    indices, values = torch.tensor([[0, 2]], device="openreg"), torch.ones(2, device="openreg")
    x = torch.openreg.sparse.FloatTensor(indices, values, torch.Size([3]))
    assert x.to_dense().tolist() == [1, 0, 1]
    assert x.type() == "torch.openreg.sparse.FloatTensor"
    assert isinstance(x, torch.openreg.sparse.FloatTensor)
    assert not isinstance(x, torch.openreg.FloatTensor)
    assert not isinstance(x, torch.openreg.sparse.DoubleTensor)
    empty = torch.openreg.sparse.LongTensor(2, 3)
    assert (empty.shape, empty._nnz(), empty.dtype) == ((2, 3), 0, torch.long)


def test_default_tensor_type_sets_device_and_dtype(run_ok):
    out = run_ok(
        """
        import torch, warnings
        warnings.simplefilter("ignore")

        def choose(kind):
            torch.set_default_tensor_type(kind)
            print(torch.ones(2).device, torch.get_default_dtype())

        choose(torch.openreg.DoubleTensor)
        choose("torch.openreg.FloatTensor")
        for bad in (torch.openreg.LongTensor, torch.openreg.sparse.FloatTensor):
            try:
                choose(bad)
            except TypeError as error:
                print(error)
        choose(torch.DoubleTensor)
        torch.set_default_device("openreg:1")
        choose("torch.FloatTensor")  # says nothing of a device that was chosen otherwise
        """
    )
    refusal = "only floating-point types are supported as the default type, and {} is not one"
    assert out.splitlines() == [
        "openreg:0 torch.float64",
        "openreg:0 torch.float32",
        refusal.format("torch.openreg.LongTensor"),
        refusal.format("torch.openreg.sparse.FloatTensor"),
        "cpu torch.float64",
        "openreg:1 torch.float32",
    ]


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_typed_storage_is_made_on_the_current_device(name):
    cpu, ours = getattr(torch, name), getattr(torch.openreg, name)
    with torch.openreg.device(1):
        there = ours(3)
    assert there.device == torch.device("openreg:1") and there.dtype is cpu.dtype
    assert there.type() == f"torch.openreg.{name}" and len(there) == 3
    assert isinstance(there, ours) and not isinstance(cpu(3), ours)
    assert not isinstance(there, cpu) and there.fill_(1).tolist() == [1, 1, 1]
    assert ours([1, 0]).tolist() == cpu([1, 0]).tolist()
    assert isinstance(torch.empty(3, dtype=ours.dtype, device="openreg").storage(), ours)
    with pytest.raises(RuntimeError, match="from_buffer: Not available for openreg storage"):
        ours.from_buffer(b"abc")
