"""Several devices in one process: torch.openreg.comm, and torch.nn.DataParallel over it."""

import copy
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import data_parallel, gather, parallel_apply, replicate, scatter

comm = torch.openreg.comm
WHERE = ("cpu", "openreg:0", "openreg:1")


@pytest.fixture
def held():
    """Runs a function in a thread while the current streams of all devices are held back, and
    fails if it waits for one. What it returns is read once they go on."""

    def held(function, *more_streams):
        outcome = []

        def call():
            try:
                outcome.append(function())
            except BaseException as error:  # raised below, in the test's own thread
                outcome.append(error)

        streams = [torch.openreg.current_stream(i) for i in range(2)]
        with torch.openreg.testing.gate() as gate:
            for stream in (*streams, *more_streams):
                gate.wait(stream)
            thread = threading.Thread(target=call)
            thread.start()
            thread.join(20)
            waited, pending = thread.is_alive(), not any(s.query() for s in streams)
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        assert not waited, "the call waited for a device"
        assert pending, "nothing was held back: the test shows nothing"
        return outcome[0]

    return held


def devices_of(tensors):
    return [str(t.device) for t in tensors]


# ---- comm ----


@pytest.mark.parametrize("source", WHERE)
@pytest.mark.parametrize("dtype", [torch.float, torch.int8, torch.cfloat])
def test_broadcast_copies_to_each_device(source, dtype):
    x = torch.arange(6, device=source).to(dtype).view(2, 3).t()
    copies = comm.broadcast(x, ["openreg:0", 1, torch.device("openreg", 0)])
    assert devices_of(copies) == ["openreg:0", "openreg:1", "openreg:0"]
    for there in copies:
        values = torch.view_as_complex(there) if dtype.is_complex else there
        assert values.tolist() == x.tolist()
        if there.device == x.device and not dtype.is_complex:
            assert there is x
    out = [torch.empty(3, 2, device=f"openreg:{i}", dtype=dtype) for i in (1, 0)]
    if not dtype.is_complex:
        assert all(a is b for a, b in zip(comm.broadcast(x, out=out), out, strict=True))
        assert all(there.tolist() == x.tolist() for there in out)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("buffer_size", [1, 40, 10485760])
def test_broadcast_coalesced_and_reduce_add_give_sums(sparse, buffer_size):
    def make(size, dtype):
        x = torch.arange(size, device="openreg:0").remainder(3).to(dtype)
        return x.to_sparse() if sparse and size % 2 else x

    sizes, dtypes = (5, 4, 0, 7, 8, 3), itertools.cycle((torch.float, torch.double))
    tensors = [make(size, dtype) for size, dtype in zip(sizes, dtypes, strict=False)]
    first, second = comm.broadcast_coalesced(tensors, (0, 1), buffer_size)
    for x, here, there in zip(tensors, first, second, strict=True):
        assert here is x and there.device == torch.device("openreg:1")
        assert (there.dtype, there.layout, there.size()) == (x.dtype, x.layout, x.size())
        assert there.to_dense().tolist() == x.to_dense().tolist()
        if sparse and x.is_sparse:
            assert there.is_coalesced()
    # Views of one buffer, each with a version of its own.
    if buffer_size > 1000 and not sparse:
        assert second[0].untyped_storage().data_ptr() == second[4].untyped_storage().data_ptr()
    versions = [there._version for there in second]
    second[0].zero_()
    assert [there._version for there in second[1:]] == versions[1:]
    second[0].copy_(tensors[0])
    for destination in (0, 1):
        sums = comm.reduce_add_coalesced((first, second), destination, buffer_size)
        for x, total in zip(tensors, sums, strict=True):
            assert total.device.index == destination and total.layout is x.layout
            assert total.to_dense().tolist() == (2 * x.to_dense()).tolist()


def test_reduce_add_sums_on_the_destination(recwarn):
    x, y = torch.ones(2, 3, device="openreg:0"), torch.full((2, 3), 2.0, device="openreg:1")
    for destination, device in ((None, 0), (0, 0), (1, 1)):
        total = comm.reduce_add((x, y), destination)
        assert total.device.index == device and total.tolist() == [[3] * 3] * 2
    assert x.tolist() == [[1] * 3] * 2 and y.tolist() == [[2] * 3] * 2
    assert not recwarn.list  # that there is no NCCL
    with pytest.raises(ValueError, match="input 1 has invalid size: got 2, but expected 2x3"):
        comm.reduce_add((x, y[:, 0]))
    with pytest.raises(AssertionError, match="input 1 is on CPU"):
        comm.reduce_add((x, y.cpu()))


@pytest.mark.parametrize("source", WHERE)
@pytest.mark.parametrize(("dim", "sizes"), [(0, None), (1, None), (-1, (4, 1)), (0, (1, 3))])
def test_scatter_and_gather_divide_and_join(source, dim, sizes):
    x = torch.arange(20.0, device=source).view(4, 5)
    chunks = comm.scatter(x, (0, 1), sizes, dim)
    assert isinstance(chunks, tuple) and devices_of(chunks) == ["openreg:0", "openreg:1"]
    expected = x.chunk(2, dim) if sizes is None else x.split(sizes, dim)
    for chunk, same in zip(chunks, expected, strict=True):
        assert chunk.tolist() == same.tolist()
        if chunk.device == x.device:
            assert chunk.data_ptr() == same.data_ptr()
    out = [torch.empty_like(chunk) for chunk in chunks]
    assert all(a is b for a, b in zip(comm.scatter(x, out=out, dim=dim), out, strict=True))
    assert all(a.equal(b) for a, b in zip(chunks, out, strict=True))
    for destination in (None, "cpu", 0, 1, "openreg:1"):
        whole = comm.gather(chunks, dim, destination)
        assert whole.tolist() == x.tolist()
        assert str(whole.device) == {None: "openreg:0", 0: "openreg:0", "cpu": "cpu"}.get(
            destination, "openreg:1"
        )
        out = torch.empty(4, 5, device=whole.device)
        assert comm.gather(chunks, dim, out=out) is out and out.tolist() == x.tolist()


def test_gather_keeps_a_format_that_all_have():
    x = torch.rand(2, 3, 4, 5, device="openreg:1").to(memory_format=torch.channels_last)
    assert comm.gather((x, x)).is_contiguous(memory_format=torch.channels_last)
    assert comm.gather((x, x.contiguous())).is_contiguous()


X = torch.ones(4, 5)
THERE = (X[:2].to("openreg:0"), X[2:].to("openreg:1"))
MISTAKES = {
    "both": (lambda: comm.broadcast(X, (0, 1), out=THERE), "Exactly one of"),
    "negative": (lambda: comm.broadcast(X, (0, -1)), "non-negative device index, but got -1"),
    "range": (lambda: comm.broadcast(X, (0, 7)), "index 7 is out of range"),
    "other type": (lambda: comm.broadcast(THERE[0], out=[X[:2]]), "0 has device 'cpu'"),
    "shape": (
        lambda: comm.broadcast(X, out=THERE),
        r"source tensor \[4, 5\], but output tensor at index 0 has shape \[2, 5\]",
    ),
    "not on the first": (
        lambda: comm.broadcast_coalesced(THERE, (0, 1)),
        r"All tensors must be on devices\[0\]: 0",
    ),
    "nowhere": (lambda: comm.scatter(X, ()), "at least one device to scatter to"),
    "sizes": (lambda: comm.scatter(X, (0, 1), (4,)), r"len\(devices\) = 2 and .* = 1"),
    "sum": (lambda: comm.scatter(X, (0, 1), (3, 3)), "sum exactly to 4"),
    "negative chunk": (lambda: comm.scatter(THERE[0], (0, -1)), "non-negative .* but got -1"),
    "stream": (
        lambda: comm.scatter(X, (0, 1), streams=(torch.openreg.Stream(0),) * 2),
        r"at index 1 \(was 0\) to match .* \(expected 1\)",
    ),
    "no outputs": (lambda: comm.scatter(X, out=()), "at least one output tensor"),
    "output's type": (lambda: comm.scatter(X, out=[X]), "index 0 has device 'cpu'"),
    "output's shape": (
        lambda: comm.scatter(X, out=THERE, dim=1),
        r"index 0 has incorrect shape: \[2, 5\]. Expected .* dim 1 as the source .* \[4, 5\]",
    ),
    "total": (
        lambda: comm.scatter(X, out=(*THERE, THERE[0])),
        "dim 0 does not match .* at dim 0. Expected 4, but got total size 6",
    ),
    "dim": (lambda: comm.scatter(X, out=THERE, dim=2), r"range of \[-2, 1\], but got 2"),
    "nothing": (lambda: comm.gather(()), "at least one tensor to gather from"),
    "input's type": (lambda: comm.gather((THERE[0], X)), "at index 1 has device 'cpu'"),
    "dims": (
        lambda: comm.gather((THERE[0], THERE[1][0])),
        r"index 1 has 1 dimensions, \(expected 2\)",
    ),
    "input's shape": (
        lambda: comm.gather((THERE[0], THERE[1][:, :2])),
        r"index 1 has invalid shape \[2, 2\], but expected \[2, 5\]",
    ),
    "gathered": (
        lambda: comm.gather(THERE, out=torch.empty(5, 5)),
        r"to have shape \[4, 5\], but got \[5, 5\]",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_comm_functions_name_a_mistake(name):
    call, text = MISTAKES[name]
    with pytest.raises((RuntimeError, IndexError), match=text):
        call()
    assert torch.openreg.current_device() == 0


def test_comm_functions_wait_for_no_device(held):
    x = torch.ones(4, 5, device="openreg:0")
    y = torch.full((4, 5), 2.0, device="openreg:1")
    pinned = torch.full((4, 5), 3.0).pin_memory()

    def call():
        doubled = x * 2
        return (
            *comm.broadcast(doubled, (0, 1)),
            comm.reduce_add((doubled, y), 1),
            *comm.broadcast_coalesced((doubled, doubled), (0, 1))[1],
            *comm.reduce_add_coalesced(((doubled,), (y,))),
            comm.gather(comm.scatter(doubled, (1, 0))),
            comm.gather(comm.scatter(pinned, (0, 1)), 0, 1),
        )

    values = [there.unique().tolist() for there in held(call)]
    assert values == [[2], [2], [4], [2], [2], [4], [2], [3]]


def test_scatter_copies_on_the_streams_it_is_given():
    side = torch.openreg.Stream(1)
    pinned = torch.arange(4.0).pin_memory()
    with torch.openreg.testing.gate() as gate:
        gate.wait(side)
        first, second = comm.scatter(pinned, (0, 1), streams=(None, side))
        assert first.tolist() == [0, 1]
        torch.openreg.synchronize(0)
        assert torch.openreg.current_stream(1).query() and not side.query()
        assert torch.openreg.current_device() == 0
        assert torch.openreg.current_stream(1) == torch.openreg.default_stream(1)
    side.synchronize()
    assert second.tolist() == [2, 3]


def test_comm_leaves_cpu_tensors_to_cuda_where_there_is_cuda(monkeypatch):
    from torch_openreg._patches import data_parallel

    called = data_parallel._ours_or(lambda *_: "theirs", lambda *_: "ours")
    assert called(X, (0, 1)) == called((X, X), 0) == called((), 0) == "ours"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert called(X, (0, 1)) == called((X, X), 0) == called((), 0) == "theirs"
    assert called(THERE, 0) == called(X, THERE) == called(THERE[0], (0, 1)) == "ours"


# ---- DataParallel ----


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4 * 16, 5)

    def forward(self, x):
        return self.last(self.norm(self.conv(x)).relu().flatten(1))


def mlp():
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5, bias=False))


NETS = {"mlp": (mlp, (10, 12)), "conv": (lambda: Conv().eval(), (10, 3, 6, 6))}


def step(net, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("source", WHERE)
def test_data_parallel_trains_as_one_device(name, source):
    make, size = NETS[name]
    torch.manual_seed(0)
    alone = make().to("openreg:0")
    spread = nn.DataParallel(copy.deepcopy(alone))
    assert spread.device_ids == [0, 1] and spread.output_device == 0
    there, y = torch.rand(size, device=source), torch.randint(5, size[:1], device="openreg")
    here = there.to("openreg:0")
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, 0.9) for net in (alone, spread)]
    before = nn.functional.cross_entropy(alone(here), y)
    for _ in range(6):
        out = spread(there)
        assert out.device == torch.device("openreg:0")
        torch.testing.assert_close(out, alone(here))
        losses = step(alone, optimizers[0], here, y), step(spread, optimizers[1], there, y)
        torch.testing.assert_close(*losses)
        for one, other in zip(alone.parameters(), spread.module.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
            torch.testing.assert_close(one, other)
    assert losses[1] < before


def test_data_parallel_divides_an_uneven_batch_over_three_devices(run_ok):
    out = run_ok(
        """
        import copy, torch
        torch.manual_seed(0)
        alone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        alone.to("openreg:2")
        spread = torch.nn.DataParallel(copy.deepcopy(alone), [2, 0, 1], output_device=1)
        for batch in (7, 3, 2, 1):
            x = torch.rand(batch, 4, device="openreg:2")
            there, here = spread(x), alone(x)
            print(there.device, there.shape[0])
            torch.testing.assert_close(there.to("openreg:2"), here)
            there.square().sum().backward(), here.square().sum().backward()
        for one, other in zip(alone.parameters(), spread.parameters()):
            torch.testing.assert_close(one.grad, other.grad)
        """,
        env={"OPENREG_DEVICE_COUNT": "3"},
    )
    assert out.splitlines() == [f"openreg:1 {batch}" for batch in (7, 3, 2, 1)]


def test_data_parallel_keeps_statistics_of_the_first_device():
    torch.manual_seed(0)
    alone = Conv().to("openreg:0")
    spread = nn.DataParallel(copy.deepcopy(alone))
    x = torch.rand(10, 3, 6, 6, device="openreg:0")
    spread(x)
    alone(x[:5])
    torch.testing.assert_close(spread.module.norm.running_mean, alone.norm.running_mean)
    torch.testing.assert_close(spread.module.norm.running_var, alone.norm.running_var)


def test_data_parallel_returns_gradients_to_the_inputs_device():
    net = nn.DataParallel(nn.Linear(3, 2, bias=False).to("openreg:0"))
    for source in ("openreg:0", "openreg:1"):
        x = torch.rand(4, 3, device=source, requires_grad=True)
        net(x).sum().backward()
        assert x.grad.device == x.device
        expected = net.module.weight.detach().sum(0).expand(4, 3)
        torch.testing.assert_close(x.grad.cpu(), expected.cpu())
    x = torch.rand(4, 3, requires_grad=True)
    with pytest.warns(FutureWarning, match="-1 to represent CPU"):  # by PyTorch, with CUDA too
        net(x).sum().backward()
    torch.testing.assert_close(x.grad, expected.cpu())


def test_data_parallel_step_waits_for_no_device(held):
    make, size = NETS["conv"]
    net = nn.DataParallel(make().to("openreg:0"))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.rand(size, device="openreg:0")
    y = torch.randint(5, size[:1], device="openreg:0")
    step(net, optimizer, x, y)
    before = copy.deepcopy(net.module)
    loss = held(lambda: step(net, optimizer, x, y))
    expected = step(before, torch.optim.SGD(before.parameters(), 0.1), x, y)
    torch.testing.assert_close(loss, expected)
    for one, other in zip(net.module.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_data_parallel_takes_and_gives_nested_values():
    class Model(nn.Module):
        def forward(self, x, scale=1, *, names):
            assert x["a"].device == x["b"][0].device
            return {"sum": x["a"] + x["b"][0] * scale, "all": (x["a"].sum(), names)}

    x = {"a": torch.ones(4, 2), "b": [torch.arange(8.0).view(4, 2)]}
    net = nn.DataParallel(Model())
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        out = net(x, 2, names=torch.tensor([1, 2]))
    assert out["sum"].tolist() == (x["a"] + 2 * x["b"][0]).tolist()
    assert out["all"][0].tolist() == [4, 4] and out["all"][1].tolist() == [1, 2]


def test_data_parallel_trains_complex_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3, dtype=torch.cfloat))

        def forward(self, x):
            return x * self.weight

    net = nn.DataParallel(Model().to("openreg:0"))
    x = torch.rand(4, 3, dtype=torch.cfloat)
    out = net(x)
    torch.testing.assert_close(out.cpu(), x * net.module.weight.cpu())
    out.abs().sum().backward()
    assert net.module.weight.grad.is_complex()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x):
        return self.lstm(self.embedding(x))[0][:, -1]


def test_data_parallel_adds_sparse_gradients():
    alone = Words().to("openreg:0")
    spread = nn.DataParallel(copy.deepcopy(alone))
    x = torch.randint(10, (6, 3))
    out, expected = spread(x), alone(x.to("openreg:0"))
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    expected.sum().backward()
    assert spread.module.embedding.weight.grad.is_sparse
    for one, other in zip(alone.parameters(), spread.module.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense())


def test_data_parallel_parts_work_by_themselves():
    net = mlp().to("openreg:0")
    x = torch.rand(10, 12, device="openreg:0")
    expected = net(x)
    torch.testing.assert_close(data_parallel(net, x), expected)
    assert data_parallel(net, x, (0, 1), output_device=1).device.index == 1
    devices = [torch.device("openreg", 0), "openreg:1"]
    replicas = replicate(net, devices)
    inputs = scatter(x, devices)
    assert devices_of(inputs) == ["openreg:0", "openreg:1"]
    assert devices_of(r[0].weight for r in replicas) == ["openreg:0", "openreg:1"]
    for where in (devices, (0, 1)):
        outputs = parallel_apply(replicas, inputs, devices=where)
        assert devices_of(outputs) == ["openreg:0", "openreg:1"]
        torch.testing.assert_close(gather(outputs, 0), expected)


def test_data_parallel_error_names_the_replica():
    class Model(nn.Module):
        def forward(self, x):
            if x.device.index == 1:
                raise KeyError("no")
            return x

    with pytest.raises(KeyError, match="in replica 1 on device 1"):
        nn.DataParallel(Model())(torch.ones(4, 3))
    net = nn.DataParallel(nn.Linear(3, 2).to("openreg:1"))
    with pytest.raises(RuntimeError, match=r"openreg:0 .* on device: openreg:1"):
        net(torch.ones(4, 3))


def test_data_parallel_replicas_inherit_autocast_and_no_grad():
    net = nn.DataParallel(nn.Linear(3, 2).to("openreg:0"))
    with torch.no_grad(), torch.autocast("openreg"):
        out = net(torch.ones(4, 3))
    assert out.dtype is torch.half and not out.requires_grad
    assert net(torch.ones(4, 3)).dtype is torch.float


def test_data_parallel_replicas_run_on_current_streams(held):
    sides = [torch.openreg.Stream(i) for i in range(2)]
    net = nn.DataParallel(nn.Linear(3, 2).to("openreg:0"))
    x = torch.rand(4, 3, device="openreg:0")
    net(x)
    with torch.openreg.stream(sides[1]), torch.openreg.stream(sides[0]):
        out = held(lambda: net(x), *sides)
    for side in sides:
        side.synchronize()
    torch.testing.assert_close(out, net.module(x))
