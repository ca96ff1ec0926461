"""Collectives of sparse tensors: all_reduce adds them, every other one refuses them at the call.

The functions that begin with `rank_` run on every rank.
"""

import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

SIZE = 2
DEVICE = "openreg:1"  # not the one that is current at the start
LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(SIZE, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def on_cpu(rank, dtype=torch.float32, dense=(), nnz=3):
    """Uncoalesced, of another count on each rank, at places that the ranks share in part."""
    count = nnz + 2 * rank if nnz else 0
    indices = torch.stack([torch.arange(count) % 4, (torch.arange(count) * 3 + rank) % 5])
    numbers = torch.arange(count * torch.Size(dense).numel()).reshape(count, *dense)
    values = (numbers % 7 + rank + 1).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (4, 5, *dense), check_invariants=True)


def total(part):
    """Over the ranks, dense and on the CPU."""
    return sum(part(r).to_dense() for r in range(1, SIZE)) + part(0).to_dense()


# ---- all_reduce ---------------------------------------------------------------------------------


def rank_adds(rank, dtype, dense):
    for nnz in (3, 0):

        def part(r, nnz=nnz):
            return on_cpu(r, dtype, dense, nnz)

        x = part(rank).to(DEVICE)
        for count in (1, SIZE):  # what came out goes in again
            assert dist.all_reduce(x) is None
            assert x.layout == torch.sparse_coo and x.device == torch.device(DEVICE)
            assert x.dtype == dtype and x.shape == (4, 5, *dense)
            got, expected = x.cpu().to_dense(), total(part) * count
            assert torch.equal(got, expected.to(dtype)), (got, expected)
    # Coalesced, as Gloo leaves it on the CPU.
    on_host = on_cpu(rank, dtype, dense)
    dist.all_reduce(on_host)
    x = on_cpu(rank, dtype, dense).to(DEVICE)
    dist.all_reduce(x)
    assert x.is_coalesced() == on_host.is_coalesced()
    assert torch.equal(x._indices().cpu(), on_host._indices())
    assert torch.equal(x._values().cpu(), on_host._values())


@pytest.mark.parametrize("dense", [(), (3, 2)], ids=["scalars", "rows"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64], ids=str
)
def test_all_reduce_adds_sparse_tensors(ranks, dtype, dense):
    ranks.run(rank_adds, dtype, dense)


def rank_average(rank):
    x = on_cpu(rank).to(DEVICE)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert torch.equal(x.cpu().to_dense(), total(on_cpu) / SIZE)
    numbers = on_cpu(rank, torch.int64).to(DEVICE)
    dist.all_reduce(numbers, dist.ReduceOp.AVG)
    expected = total(lambda r: on_cpu(r, torch.int64)).div(SIZE, rounding_mode="trunc")
    assert torch.equal(numbers.cpu().to_dense(), expected)


def test_sparse_average_divides_the_sum(ranks):
    ranks.run(rank_average)


def rank_views(rank):
    """Parts that lie across their storage, as those of a transposed tensor do."""
    x = on_cpu(rank).to(DEVICE).t()
    dist.all_reduce(x)
    assert torch.equal(x.cpu().to_dense(), total(on_cpu).t())


def test_sparse_parts_need_not_be_contiguous(ranks):
    ranks.run(rank_views)


def rank_ordered(rank):
    """The call follows what is queued and does not hold the host; wait() does, for a size."""
    values = torch.ones(3, device=DEVICE)
    indices = torch.tensor([[0, 1, 2], [0, 1, 2]], device=DEVICE)
    x = torch.sparse_coo_tensor(indices, values, (4, 4), check_invariants=False)
    torch.openreg.synchronize(1)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        values.add_(rank)
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        future = work.get_future()
        assert not future.done()  # its value has a size that nobody knows yet
        waiter = threading.Thread(target=work.wait)
        waiter.start()
        waiter.join(0.1)
        assert waiter.is_alive()
        gate.open()
    waiter.join()
    work.wait()
    assert work.is_completed() and work.result()[0] is x
    assert future.wait()[0] is x and future.done()
    assert torch.equal(x.to_dense().cpu(), torch.diag(torch.tensor([3.0, 3.0, 3.0, 0.0])))


def test_sparse_sum_wait_waits_for_its_size(ranks):
    ranks.run(rank_ordered)


def rank_reuse(rank):
    """What came out belongs to who waited: dropped while a kernel still reads it, it is not given
    to another one before that has run."""
    x = on_cpu(rank, dense=(64,)).to(DEVICE)
    dist.all_reduce(x)
    expected = x.cpu().to_dense()
    torch.openreg.synchronize(1)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        y = x._values() * 1
        indices = x._indices() * 1
        del x
        others = []
        for _ in range(3):  # on the backend's own streams, which wait for nothing
            other = on_cpu(rank, dense=(64,)).neg()
            side = torch.openreg.Stream(1)
            with side:
                other = other.to(DEVICE)
                dist.all_reduce(other)
            others.append(other)
        gate.open()
    got = torch.sparse_coo_tensor(indices, y, expected.shape, check_invariants=False)
    assert torch.equal(got.cpu().to_dense(), expected)


def test_sparse_sum_memory_is_used_on_the_stream_that_waited(ranks):
    ranks.run(rank_reuse)


def rank_ddp(rank):
    torch.openreg.set_device(1)
    try:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(300, 20, sparse=True), nn.Linear(20, 3)).to(DEVICE)
        one = nn.Sequential(nn.Embedding(300, 20, sparse=True), nn.Linear(20, 3))
        one.load_state_dict({k: v.cpu() for k, v in module.state_dict().items()})
        ddp = nn.parallel.DistributedDataParallel(module)
        for step in range(5):
            tokens = [torch.arange(r * 50 + step, r * 50 + step + 100) for r in range(SIZE)]
            for model in (ddp, one):
                model.zero_grad()
            ddp(tokens[rank].to(DEVICE)).square().sum().backward()
            (sum(one(t).square().sum() for t in tokens) / SIZE).backward()
            for ours, theirs in zip(ddp.parameters(), one.parameters(), strict=True):
                assert ours.grad.layout == theirs.grad.layout
                got, expected = ours.grad.cpu(), theirs.grad
                if got.is_sparse:
                    got, expected = got.to_dense(), expected.to_dense()
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    finally:
        torch.openreg.set_device(0)


@pytest.mark.slow
def test_ddp_averages_sparse_gradients(ranks):
    ranks.run(rank_ddp)


def rank_what_gloo_cannot_add(rank):
    x = on_cpu(rank).to(DEVICE)
    for name in ("MAX", "MIN", "PRODUCT"):
        op = getattr(dist.ReduceOp, name)
        with pytest.raises(ValueError, match=f"ReduceOp.SUM or ReduceOp.AVG, got ReduceOp.{name}"):
            dist.all_reduce(x, op)
    for dtype, name in ((torch.int16, "Short"), (torch.half, "Half"), (torch.bool, "Bool")):
        with pytest.raises(NotImplementedError, match=f"sparse tensor: {name} is not supported"):
            dist.all_reduce(on_cpu(rank, dtype).to(DEVICE))
    with pytest.raises(ValueError, match="at most 4 sparse and 4 dense dimensions, got 5 and 0"):
        dist.all_reduce(torch.ones(2, 2, 2, 2, 2).to_sparse().to(DEVICE))
    dist.all_reduce(x)
    assert torch.equal(x.cpu().to_dense(), total(on_cpu))


def test_other_reductions_of_sparse_tensors_are_refused_at_the_call(ranks):
    ranks.run(rank_what_gloo_cannot_add)


# ---- All others ---------------------------------------------------------------------------------


def coalesced(function, *arguments):
    with dist._coalescing_manager(device=torch.device(DEVICE)):
        function(*arguments)


def batched(function, tensor, peer):
    for work in dist.batch_isend_irecv([dist.P2POp(function, tensor, peer)]):
        work.wait()


def functional(name, *arguments):
    from torch.distributed import _functional_collectives as functions

    return functions.wait_tensor(getattr(functions, name)(*arguments))


def refused(rank, sparse):
    """Every call with a sparse tensor, in each of its places."""
    dense = torch.zeros(4, 4, device=DEVICE)
    both, wide = [dense, dense.clone()], torch.zeros(8, 4, device=DEVICE)
    other, group = 1 - rank, dist.group.WORLD
    yield "broadcast", dist.broadcast, sparse, 0
    yield "reduce", dist.reduce, sparse, 0
    yield "all_gather, in", dist.all_gather, both, sparse
    yield "all_gather, out", dist.all_gather, [dense, sparse], dense
    yield "all_gather_single, in", dist.all_gather_single, wide, sparse
    yield "all_gather_single, out", dist.all_gather_single, sparse, dense[:2]
    yield "all_gather_coalesced, in", dist.all_gather_coalesced, [[dense], [dense]], [sparse]
    yield "all_gather_coalesced, out", dist.all_gather_coalesced, [[sparse], [dense]], [dense]
    yield "all_reduce_coalesced", dist.all_reduce_coalesced, [sparse, sparse]
    outputs = both if rank == 0 else None
    yield "gather, in", dist.gather, sparse, outputs, 0
    yield "scatter, out", dist.scatter, sparse, outputs, 0
    if rank == 0:
        yield "gather, out", dist.gather, dense, [sparse, dense], 0
        yield "scatter, in", dist.scatter, dense, [dense, sparse], 0
    yield "reduce_scatter, in", dist.reduce_scatter, dense, [dense, sparse]
    yield "reduce_scatter, out", dist.reduce_scatter, sparse, both
    yield "reduce_scatter_single, in", dist.reduce_scatter_single, dense[:2], sparse
    yield "reduce_scatter_single, out", dist.reduce_scatter_single, sparse, wide
    yield "all_to_all, in", dist.all_to_all, both, [dense, sparse]
    yield "all_to_all, out", dist.all_to_all, [sparse, dense], both
    yield "all_to_all_single, in", dist.all_to_all_single, dense, sparse
    yield "all_to_all_single, out", dist.all_to_all_single, sparse, dense
    yield "all_to_all_single, splits", dist.all_to_all_single, sparse, dense, [2, 2], [2, 2]
    yield "send", dist.send, sparse, other
    yield "recv", dist.recv, sparse, other
    yield "recv from anybody", dist.recv, sparse
    yield "isend", dist.isend, sparse, other
    yield "irecv", dist.irecv, sparse, other
    yield "batched send", batched, dist.isend, sparse, other
    yield "batched receive", batched, dist.irecv, sparse, other
    yield "coalesced all_reduce", coalesced, dist.all_reduce, sparse
    yield "coalesced all_gather", coalesced, dist.all_gather_single, wide, sparse
    yield "coalesced reduce_scatter", coalesced, dist.reduce_scatter_single, dense[:2], sparse
    yield "functional broadcast", functional, "broadcast", sparse, 0, group
    yield "functional all_gather", functional, "all_gather_tensor", sparse, 0, group
    yield "functional reduce_scatter", functional, "reduce_scatter_tensor", sparse, "sum", 0, group
    yield "functional all_to_all", functional, "all_to_all_single", sparse, None, None, group
    if sparse.layout != torch.sparse_coo:
        yield "all_reduce", dist.all_reduce, sparse


def rank_refusals(rank, layout):
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    sparse = torch.eye(4).to_sparse(layout=layout, **blocks).to(DEVICE)
    taken = []
    for what, function, *arguments in refused(rank, sparse):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that are old
            try:
                function(*arguments)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                # Those that are made of others may meet an operator first that has no such kernel.
                if "functional" not in what and "layout Sparse" not in str(error):
                    taken.append(f"{what}: {error}")
            else:
                taken.append(f"{what}: taken")
    assert not taken, "\n".join(taken)
    # Nothing of it has reached the peers, or has left the group in the midst of anything.
    x = torch.ones(4, device=DEVICE)
    dist.all_reduce(x)
    assert x.tolist() == [SIZE] * 4
    assert torch.equal(sparse.cpu().to_dense(), torch.eye(4))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_other_collectives_refuse_sparse_tensors_at_the_call(ranks, layout):
    ranks.run(rank_refusals, layout)
