"""Sparse tensors: indices and values on the device, which the CPU's kernels see in place."""

import io
import pickle

import pytest
import torch
from torch import nn

DEVICE = "openreg:1"

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)", "ignore:.*Sparse")

COMPRESSED = ["csr", "csc", "bsr", "bsc"]


def matrix(device="cpu", dtype=torch.float32):
    """4 x 6, a third of it not zero."""
    values = torch.arange(24).reshape(4, 6)
    return torch.where(values % 3 == 1, values - 10, 0).to(device, dtype)


def coo(device="cpu", dtype=torch.float32):
    """Uncoalesced: (0, 2) is there twice."""
    indices = torch.tensor([[3, 0, 1, 0, 2], [0, 2, 4, 2, 5]], device=device)
    values = torch.tensor([1, 2, 3, 4, 5], device=device, dtype=dtype)
    return torch.sparse_coo_tensor(indices, values, (4, 6), device=device)


def compressed(name, device="cpu", dtype=torch.float32):
    blocks = ((2, 2),) if name.startswith("b") else ()
    return getattr(matrix(device, dtype), f"to_sparse_{name}")(*blocks)


def parts(tensor):
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def check(result, expected):
    """Alike part by part, and on the device."""
    assert result.device == torch.device(DEVICE)
    assert (result.layout, result.shape, result.dtype) == (
        expected.layout,
        expected.shape,
        expected.dtype,
    )
    if result.layout == torch.sparse_coo:
        assert result.is_coalesced() == expected.is_coalesced()
        assert result.sparse_dim() == expected.sparse_dim()
    for a, b in zip(parts(result), parts(expected), strict=True):
        assert a.device == result.device
        torch.testing.assert_close(a.cpu(), b)


def same(function, *makers):
    """`function` of tensors that each maker makes on the device and on the CPU."""
    arguments = [maker(DEVICE) for maker in makers]
    check(function(*arguments), function(*(maker("cpu") for maker in makers)))


def dense(device):
    return torch.arange(12.0).reshape(6, 2).to(device)


# ---- Making, looking at, moving ----


def test_sparse_tensor_is_on_the_device_of_its_parts():
    indices = torch.tensor([[0, 1], [2, 0]])
    values = torch.tensor([3.0, 4.0])
    x = torch.sparse_coo_tensor(indices, values, (2, 3), device=DEVICE)
    assert x.device == torch.device(DEVICE)
    assert x.is_sparse
    assert x._indices().device == x._values().device == x.device
    assert (x._nnz(), x.sparse_dim(), x.dense_dim()) == (2, 2, 0)
    assert x.to_dense().tolist() == [[0, 0, 3], [4, 0, 0]]


def test_sparse_tensor_shares_memory_with_its_parts():
    x = coo(DEVICE)
    x._values().mul_(2)
    assert x._values().tolist() == [2, 4, 6, 8, 10]
    y = compressed("csr", DEVICE)
    y.values().zero_()
    assert y.to_dense().count_nonzero() == 0


@pytest.mark.parametrize("device", ["openreg:0", DEVICE])
def test_sparse_tensor_without_parts_is_made_on_the_given_device(device):
    for layout in (torch.sparse_coo, torch.sparse_csr):
        x = torch.zeros(3, 4, layout=layout, device=device)
        assert x.device == torch.device(device)
        assert {part.device for part in parts(x)} == {x.device}
        assert x.to_dense().tolist() == [[0] * 4] * 3


@pytest.mark.parametrize("name", COMPRESSED)
def test_sparse_compressed_tensors_are_made_of_parts(name):
    expected = compressed(name)
    make = getattr(torch, f"sparse_{name}_tensor")
    check(make(*parts(expected), expected.shape, device=DEVICE), expected)
    on_device = [part.to(DEVICE) for part in parts(expected)]
    check(make(*on_device, expected.shape), expected)


@pytest.mark.parametrize("invariants", [True, False])
def test_sparse_indices_that_are_bad_are_refused_when_checked(invariants):
    indices = torch.tensor([[0, 7]], device=DEVICE)
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        torch.sparse_coo_tensor(indices, torch.ones(2, device=DEVICE), (3,), check_invariants=True)
    assert coo(DEVICE).sum().item() == 15


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_sparse_claim_to_be_coalesced_is_checked(dims):
    def make(*columns):
        indices = torch.tensor(columns, device=DEVICE)[:, None].expand(-1, dims).t()
        values = torch.ones(len(columns), device=DEVICE)
        return torch.sparse_coo_tensor(
            indices, values, (4,) * dims, is_coalesced=True, check_invariants=True
        )

    assert make(0, 1, 3).is_coalesced() and make(0, 1, 3).to_dense().sum().item() == 3
    for columns in ((0, 1, 1), (1, 0, 2)):
        with pytest.raises(RuntimeError, match="is_coalesced"):
            make(*columns)


@pytest.mark.parametrize(
    "make", [coo, *(lambda d="cpu", n=n: compressed(n, d) for n in COMPRESSED)]
)
def test_sparse_copies_between_devices_and_the_cpu_keep_values(make):
    host = make()
    moved = host.to(DEVICE)
    check(moved, host)
    torch.testing.assert_close(parts(moved.cpu()), parts(host))
    other = moved.to("openreg:0")
    assert {part.device for part in parts(other)} == {torch.device("openreg:0")}
    check(other.to(DEVICE), host)
    check(moved.clone(), host)
    check(moved.double(), host.double())
    check(torch.zeros_like(moved), torch.zeros_like(host))
    check(moved.clone().zero_(), host.clone().zero_())
    check(torch.empty_like(moved).copy_(host), host)


@pytest.mark.parametrize(
    "make", [coo, lambda d="cpu": coo(d).coalesce(), lambda d="cpu": compressed("csr", d)]
)
def test_sparse_tensor_is_saved_and_pickled(make):
    x = make(DEVICE)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    check(torch.load(file), make())
    file.seek(0)
    host = torch.load(file, map_location="cpu")
    assert host.device.type == "cpu"
    check(pickle.loads(pickle.dumps(x)), make())


def test_sparse_tensor_is_loaded_to_another_device():
    file = io.BytesIO()
    torch.save([coo(), compressed("csr")], file)
    file.seek(0)
    for result, host in zip(
        torch.load(file, map_location=DEVICE), [coo(), compressed("csr")], strict=True
    ):
        check(result, host)


def test_sparse_record_stream_keeps_memory():
    side = torch.Stream(device=DEVICE)
    x = coo(DEVICE)
    address = x._values().data_ptr()
    with torch.openreg.testing.gate() as gate:
        gate.wait(side)
        x.record_stream(side)
        del x
        again = [torch.ones(5, device=DEVICE) for _ in range(50)]
        assert address not in [y.data_ptr() for y in again]


def test_sparse_tensor_is_printed_with_device_and_layout():
    assert "device='openreg:1'" in repr(coo(DEVICE))
    assert "layout=torch.sparse_coo" in repr(coo(DEVICE))
    assert "crow_indices=tensor([" in repr(compressed("csr", DEVICE))


# ---- Operators, against the CPU ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64])
def test_sparse_conversions_are_the_cpus(dtype):
    same(lambda x: x.to_sparse(), lambda d: matrix(d, dtype))
    same(lambda x: x.to_sparse(1), lambda d: matrix(d, dtype))
    same(lambda x: x.to_dense(), lambda d: coo(d, dtype))
    same(lambda x: x.coalesce(), lambda d: coo(d, dtype))
    for name in COMPRESSED:
        same(lambda x: x, lambda d, n=name: compressed(n, d, dtype))
        same(lambda x: x.to_dense(), lambda d, n=name: compressed(n, d, dtype))
        same(lambda x: x.to_sparse(), lambda d, n=name: compressed(n, d, dtype))
    same(lambda x: x.to_sparse_csr(), lambda d: coo(d, dtype).coalesce())


OPERATORS = {
    "+": lambda x: x + x,
    "-": lambda x: x - x * 2,
    "times a number": lambda x: x * 2.5,
    "times": lambda x: x * x,
    "over a number": lambda x: x / 4,
    "neg": lambda x: -x,
    "sin": lambda x: x.sin(),
    "relu": lambda x: x.relu(),
    "abs": lambda x: x.abs(),
    "sum": lambda x: x.sum(),
    "t": lambda x: x.t(),
    "to": lambda x: x.to(torch.float64),
    "+ dense": lambda x: matrix(x.device) + x,
    "@ dense": lambda x: x @ dense(x.device),
    "@ vector": lambda x: x @ torch.ones(6, device=x.device),
    "@ itself": lambda x: x @ x.t(),
    "addmm": lambda x: torch.addmm(torch.ones(4, 2, device=x.device), x, dense(x.device)),
    "a mask": lambda x: matrix(x.device).sparse_mask(x.coalesce() if x.is_sparse else x),
}
COO_ALONE = {
    "sum of rows": lambda x: torch.sparse.sum(x, dim=1),
    "sum of rows, dense": lambda x: torch.sparse.sum(x, dim=[0, 1]),
    "dense @": lambda x: torch.ones(2, 4, device=x.device) @ x,
    "cat": lambda x: torch.cat([x, x]),
    "index_select": lambda x: x.index_select(0, torch.tensor([2, 0], device=x.device)),
    "softmax": lambda x: torch.sparse.softmax(x, dim=1),
    "log_softmax": lambda x: torch.sparse.log_softmax(x, dim=0),
    "norm": lambda x: x.norm(),
    "a row": lambda x: x[0],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "permute": lambda x: x.permute(1, 0),
    "sparse.mm": lambda x: torch.sparse.mm(x, dense(x.device)),
    "sparse.addmm": lambda x: torch.sparse.addmm(
        torch.ones(4, 2, device=x.device), x, dense(x.device)
    ),
    "hspmm": lambda x: torch.hspmm(x, dense(x.device)),
    "bmm": lambda x: torch.bmm(torch.stack([x, x]), torch.ones(2, 6, 2, device=x.device)),
    "isnan": lambda x: x.isnan(),
    "resized": lambda x: x.coalesce().sparse_resize_((8, 9), 2, 0),
}


@pytest.mark.parametrize("name", [*OPERATORS, *COO_ALONE])
@pytest.mark.parametrize("coalesced", [True, False], ids=["coalesced", "uncoalesced"])
def test_sparse_coo_operator_has_the_cpus_result(name, coalesced):
    function = {**OPERATORS, **COO_ALONE}[name]
    same(function, lambda d: coo(d).coalesce() if coalesced else coo(d))


@pytest.mark.parametrize("name", OPERATORS)
def test_sparse_csr_operator_has_the_cpus_result_or_error(name):
    function = OPERATORS[name]
    try:
        expected = function(compressed("csr"))
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            function(compressed("csr", DEVICE))
        assert compressed("csr", DEVICE).sum().item() == expected_sum()
        return
    check(function(compressed("csr", DEVICE)), expected)


def expected_sum():
    return matrix().sum().item()


def test_sparse_in_place_and_out_operators_are_the_cpus():
    def changed(function, make=coo):
        def run(x):
            function(x)
            return x

        same(run, make)

    changed(lambda x: x.add_(x.clone().coalesce()))
    changed(lambda x: x.mul_(3))
    changed(lambda x: x.neg_(), lambda d: coo(d).coalesce())
    changed(lambda x: x.add_(coo(x.device)), matrix)
    changed(lambda x: x.sub_(coo(x.device), alpha=2), matrix)
    changed(lambda x: x.mul_(2), lambda d: compressed("csr", d))
    changed(
        lambda x: torch.add(coo(x.device), coo(x.device), out=x),
        lambda d: torch.zeros(4, 6, layout=torch.sparse_coo, device=d),
    )
    changed(
        lambda x: torch.mm(coo(x.device), dense(x.device), out=x),
        lambda d: torch.empty(0, device=d),
    )
    x = coo(DEVICE)
    assert x.mul_(2) is x


def test_sparse_hybrid_tensors_have_the_cpus_results():
    def hybrid(device):
        indices = torch.tensor([[1, 0, 1]], device=device)
        values = torch.arange(6.0, device=device).reshape(3, 2)
        return torch.sparse_coo_tensor(indices, values, (3, 2), device=device)

    for function in (
        lambda x: x.coalesce(),
        lambda x: x.to_dense(),
        lambda x: x + x,
        lambda x: x * 2,
        lambda x: torch.sparse.sum(x, dim=0),
    ):
        same(function, hybrid)


def test_sparse_tensor_without_values_has_the_cpus_results():
    def nothing(device):
        return torch.zeros(3, 4, device=device).to_sparse()

    for function in (
        lambda x: x,
        lambda x: x.coalesce(),
        lambda x: x + x,
        lambda x: x.to_dense(),
        lambda x: x @ torch.ones(4, 2, device=x.device),
        lambda x: x.sum(),
    ):
        same(function, nothing)


def test_sparse_operators_refuse_other_devices_and_the_cpu():
    with pytest.raises(RuntimeError, match=r"found at least two devices, .*openreg"):
        coo(DEVICE) @ dense("openreg:0")
    with pytest.raises(RuntimeError, match=r"found at least two devices, .*cpu"):
        coo(DEVICE) @ dense("cpu")
    assert coo(DEVICE).sum().item() == 15


# ---- Gradients ----


def gradients(function, *arguments):
    arguments = [x.detach().requires_grad_() for x in arguments]
    result = function(*arguments)
    result = result.to_dense() if result.layout != torch.strided else result
    (
        result * torch.arange(1.0, 1 + result.numel(), device=result.device).view_as(result)
    ).sum().backward()
    return [x.grad for x in arguments]


GRADIENTS = {
    "there and back": (lambda x: x.to_sparse().to_dense(), matrix),
    "there and back, csr": (lambda x: x.to_sparse_csr().to_dense(), matrix),
    "coalesce": (lambda x: x.coalesce().to_dense(), coo),
    "values": (lambda x: x.coalesce().values(), lambda d: coo(d).coalesce()),
    "+": (lambda x, y: (x + y).to_dense(), coo, coo),
    "times a number": (lambda x: (x * 3).to_dense(), coo),
    "sum": (lambda x: x.sum(), coo),
    "sum of rows": (lambda x: torch.sparse.sum(x, dim=1), lambda d: coo(d).coalesce()),
    "sparse.mm": (torch.sparse.mm, lambda d: coo(d).coalesce(), dense),
    "@": (lambda x, y: x @ y, coo, dense),
    "softmax": (lambda x: torch.sparse.softmax(x, 1), lambda d: coo(d).coalesce()),
    "a tensor of values": (
        lambda v: torch.sparse_coo_tensor(
            torch.tensor([[0, 1, 0]], device=v.device), v, (2,), device=v.device
        ).to_dense(),
        lambda d: torch.tensor([1.0, 2.0, 3.0], device=d),
    ),
    "csr @": (lambda x, y: x @ y, lambda d: compressed("csr", d), dense),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_sparse_operator_has_the_cpus_gradients(name):
    function, *makers = GRADIENTS[name]
    expected = gradients(function, *(maker("cpu") for maker in makers))
    for result, grad in zip(
        gradients(function, *(maker(DEVICE) for maker in makers)), expected, strict=True
    ):
        check(result, grad)


def test_sparse_mm_passes_masked_gradcheck():
    x = coo(DEVICE, torch.float64).coalesce().requires_grad_()
    y = dense(DEVICE).double().requires_grad_()
    assert torch.autograd.gradcheck(torch.sparse.mm, (x, y), masked=True)


def test_sparse_gradients_accumulate():
    def run(device):
        x = matrix(device).requires_grad_()
        (x.to_sparse().to_dense() * 2).sum().backward()
        torch.sparse.sum(x.to_sparse() * 3).backward()
        return x.grad

    check(run(DEVICE), run("cpu"))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_embedding_trains(name):
    def run(device):
        torch.manual_seed(0)
        table = nn.Embedding(7, 3, sparse=True).to(device)
        optimizer = OPTIMIZERS[name](list(table.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            rows = torch.tensor([1, 4, step, 1], device=device)
            (table(rows).square() * (step + 1)).sum().backward()
            grad = table.weight.grad
            assert grad.is_sparse
            optimizer.step()
        return grad, table.weight.detach()

    for result, expected in zip(run(DEVICE), run("cpu"), strict=True):
        check(result, expected)


def test_sparse_and_dense_gradients_of_one_table_add_up():
    def run(device):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True).to(device)
        (table(torch.tensor([1, 2, 1], device=device)) @ table.weight.t()).sum().backward()
        return table.weight.grad

    check(run(DEVICE), run("cpu"))


# ---- What waits ----


def test_sparse_calls_that_only_read_parts_do_not_wait():
    x = coo(DEVICE)
    values = torch.ones(5, device=DEVICE)
    y = compressed("csr", DEVICE)
    torch.openreg.synchronize()
    with torch.openreg.testing.gate(device=DEVICE) as gate:
        gate.wait(torch.accelerator.current_stream(DEVICE))
        z = torch.sparse_coo_tensor(x._indices(), values * 2, (4, 6), check_invariants=False)
        assert (z._nnz(), z.is_coalesced(), z.device) == (5, False, torch.device(DEVICE))
        copy = z.clone()
        copy._values().add_(1)
        assert y.clone().values().shape == y.values().shape
        torch.zeros(3, 3, layout=torch.sparse_coo, device=DEVICE)
        assert not torch.accelerator.current_stream(DEVICE).query()
    assert copy._values().tolist() == [3] * 5


def test_sparse_kernels_wait_and_warn():
    x = coo(DEVICE)
    torch.openreg.fallback_stats(reset=True)
    y = x.coalesce()
    y @ dense(DEVICE)
    torch.openreg.synchronize(1)
    stats = torch.openreg.fallback_stats()
    for name, way in (("aten::_coalesce", "waited"), ("aten::addmm.out", "asynchronous")):
        counts = {"asynchronous": 0, "waited": 0, "copying": 0, way: 1}
        assert {way: f["count"] for way, f in stats[name].items()} == counts


def test_sparse_kernels_run_after_queued_work():
    x = coo(DEVICE)
    y = torch.ones(6, 2, device=DEVICE)
    torch.openreg._sleep(20_000_000)
    y.mul_(3)
    x._values().mul_(2)
    assert (x @ y).tolist() == (coo() * 2 @ (torch.ones(6, 2) * 3)).tolist()


# Of a sparse matrix, a dense one for its right side, a vector, and one of its own shape.
PRODUCTS = {
    "mm": lambda x, d, v, m: x @ d,
    "mv": lambda x, d, v, m: x @ v,
    "addmm": lambda x, d, v, m: torch.addmm(v[:2], x, d, beta=2),
    "addmm_": lambda x, d, v, m: m[:, :2].clone().addmm_(x, d, alpha=3),
    "out": lambda x, d, v, m: torch.mm(x, d, out=m[:, :2].clone()),
    "dense +": lambda x, d, v, m: m + x,
    "dense": lambda x, d, v, m: x.to_dense(),
    "pointwise": lambda x, d, v, m: (x * 2).sin().values(),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    "make", [lambda d="cpu": coo(d).coalesce(), lambda d="cpu": compressed("csr", d)]
)
def test_sparse_product_of_known_size_does_not_wait(name, make, runs_ahead):
    torch.openreg.set_device(1)

    def arguments(device):
        return make(device), dense(device), torch.arange(6.0, device=device), matrix(device)

    there = arguments(DEVICE)
    PRODUCTS[name](*there)  # what it calls of dense tensors may wait at its first call
    torch.openreg.synchronize()
    check(runs_ahead(lambda: PRODUCTS[name](*there)), PRODUCTS[name](*arguments("cpu")))


def test_sparse_bad_arguments_are_refused_at_the_call():
    for make in (lambda d: coo(d).coalesce(), lambda d: compressed("csr", d)):
        for bad in (
            lambda x: x @ torch.ones(5, 2, device=x.device),
            lambda x: x @ torch.ones(5, device=x.device),
            lambda x: torch.addmm(torch.ones(3, 3, device=x.device), x, dense(x.device)),
            lambda x: x @ dense(x.device).double(),
        ):
            with pytest.raises(RuntimeError) as expected:
                bad(make("cpu"))
            with pytest.raises(type(expected.value)):
                bad(make(DEVICE))
    assert coo(DEVICE).sum().item() == 15


# ---- What is not there ----


@pytest.mark.parametrize("function", [lambda x: x.cumsum(0), lambda x: x.sort(), lambda x: x[:1]])
def test_sparse_operator_without_a_kernel_is_named(function):
    with pytest.raises(NotImplementedError, match="Could not run 'aten::") as host:
        function(coo())
    name = str(host.value).split("'")[1]
    with pytest.raises(NotImplementedError, match=f"Could not run {name} on openreg.*SparseCPU"):
        function(coo(DEVICE))
    assert coo(DEVICE).sum().item() == 15


@pytest.mark.slow
def test_sparse_works_on_a_device_that_kernels_cannot_reach(plugins, run_ok):
    """Everything is copied to the CPU and back."""
    program = """
        import torch
        torch.library.define("made::up", "(Tensor x) -> Tensor")
        x = torch.tensor([[0.0, 2.0], [3.0, 0.0]], device="openreg").to_sparse()
        print(x.device, (x @ torch.ones(2, 1, device="openreg")).tolist())
        values = x._values()
        print((x + x).to_dense().tolist(), x.mul_(2).is_coalesced(), values.tolist())
        print(x.add_(torch.eye(2, device="openreg").to_sparse())._nnz())
        y = x.to_dense().to_sparse_csr()
        print((y @ y).device, y.mul_(2).values().tolist())
        q = torch.quantize_per_tensor(values, 0.5, 0, torch.qint8)
        print(q.device, q.int_repr().tolist(), (q.relu_() if q.is_quantized else 0).dequantize())
        print(q.resize_(1).int_repr().tolist(), q.resize_(0).resize_(2, 3).fill_(1).dequantize()[1])
        for function in (lambda: x.cumsum(0), lambda: torch.ops.made.up(values)):
            try:
                function()
            except NotImplementedError as error:
                print(str(error).split(" on ")[0])
        stats = torch.openreg.fallback_stats()
        print({way: f["count"] for way, f in stats["aten::addmm"].items()})
    """
    env = {"OPENREG_PLUGIN": str(plugins / "libvendor_nomap.so"), "PYTHONWARNINGS": "ignore"}
    assert run_ok(program, env).splitlines() == [
        "openreg:0 [[2.0], [3.0]]",
        "[[0.0, 4.0], [6.0, 0.0]] False [2.0, 3.0]",  # the CPU's
        "4",
        "openreg:0 [2.0, 8.0, 12.0, 2.0]",
        "openreg:0 [4, 6] tensor([2., 3.], device='openreg:0')",
        "[4] tensor([1., 1., 1.], device='openreg:0')",
        "Could not run aten::cumsum",
        "Could not run made::up",
        "{'asynchronous': 0, 'waited': 0, 'copying': 2}",
    ]


def test_sparse_python_cpu_kernel_does_not_serve_the_device():
    with torch.library._scoped_library("sparse_test", "FRAGMENT") as library:
        library.define("one(Tensor x) -> Tensor")
        library.impl("one", lambda x: x.to_dense(), "SparseCPU")
        assert torch.ops.sparse_test.one(coo()).shape == (4, 6)
        with pytest.raises(NotImplementedError, match="Could not run sparse_test::one on openreg"):
            torch.ops.sparse_test.one(coo(DEVICE))


@pytest.mark.parametrize("move", [lambda x: x.to_mkldnn(), lambda x: x.to_mkldnn(torch.bfloat16)])
def test_opaque_tensors_are_refused_by_name(move):
    with pytest.raises(NotImplementedError, match="to_mkldnn"):
        move(torch.ones(2, 2, device=DEVICE))
    assert torch.ones(2, 2).to_mkldnn().is_mkldnn
