"""torch.distributed on openreg: collectives over two processes, and their order with streams.

The functions that begin with `rank_` run on every rank.
"""

import threading

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Ranks
from torch.distributed import _functional_collectives as funcol

SIZE = 2
DEVICE = "openreg:1"  # not the one that is current at the start
MOVED = [
    torch.float32,
    torch.bfloat16,
    torch.int16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(SIZE, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def on(rank, *shape, dtype=torch.float32):
    """Numbers that say which rank they come from, small enough for every dtype."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 3 + rank).to(dtype).to(DEVICE)


def same(got, expected):
    assert got.device.type == "openreg"
    got, expected = got.cpu(), expected.cpu()
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(got.to(torch.complex128), expected.to(torch.complex128)), (got, expected)


# ---- The group ----------------------------------------------------------------------------------


def rank_group(rank):
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("openreg"))
    return backend.name(), group._get_backend(torch.device("cpu")).name(), backend.rank()


def test_group_needs_no_name_of_a_backend(ranks):
    assert ranks.run(rank_group) == [("openreg", "gloo", 0), ("openreg", "gloo", 1)]
    assert dist.get_default_backend_for_device("openreg") == "openreg"


def rank_cpu(rank):
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x)
    found = [None] * SIZE
    dist.all_gather_object(found, {"rank": rank})
    objects = [torch.arange(3) if rank == 0 else None]
    dist.broadcast_object_list(objects, 0)
    assert x.tolist() == [3.0] * 3 and found == [{"rank": 0}, {"rank": 1}]
    assert objects[0].tolist() == [0, 1, 2]


def test_group_takes_cpu_tensors_and_objects(ranks):
    ranks.run(rank_cpu)


def rank_objects_on_the_device(rank):
    group = dist.new_group(backend="openreg:openreg")
    found = [None] * SIZE
    dist.all_gather_object(found, rank, group=group)
    objects = ["from 1"] if rank == 1 else [None]
    dist.broadcast_object_list(objects, 1, group=group, device=torch.device(DEVICE))
    assert found == [0, 1] and objects == ["from 1"]
    dist.barrier(group=group, device_ids=[1])
    dist.destroy_process_group(group)


def test_objects_travel_through_device_memory(ranks):
    ranks.run(rank_objects_on_the_device)


def rank_subgroups(rank):
    own = dist.new_subgroups(1)[0]
    x = on(rank, 3)
    dist.all_reduce(x, group=own)
    same(x, on(rank, 3))
    pair = dist.new_group([1, 0])
    dist.all_reduce(x, group=pair)
    same(x, on(0, 3) + on(1, 3))


def test_subgroups_communicate_by_themselves(ranks):
    ranks.run(rank_subgroups)


# ---- Collectives --------------------------------------------------------------------------------


def rank_movements(rank, dtype):
    other = 1 - rank
    both = [on(r, 2, 3, dtype=dtype) for r in range(SIZE)]
    mine = both[rank]

    x = mine.clone()
    dist.broadcast(x, 1)
    same(x, both[1])

    out = [torch.empty_like(mine) for _ in range(SIZE)]
    dist.all_gather(out, mine)
    for got, expected in zip(out, both, strict=True):
        same(got, expected)

    whole = torch.empty(4, 3, dtype=dtype, device=DEVICE)
    dist.all_gather_single(whole, mine)
    same(whole[:2], both[0])
    same(whole[2:], both[1])

    out = [torch.empty_like(mine) for _ in range(SIZE)] if rank == 1 else None
    dist.gather(mine, out, dst=1)
    if rank == 1:
        same(out[0], both[0])
        same(out[1], both[1])

    x = torch.empty_like(mine)
    dist.scatter(x, both if rank == 0 else None, src=0)
    same(x, mine)

    x = torch.empty_like(mine)
    dist.all_to_all_single(x, mine)
    same(x[0], both[0][rank])
    same(x[1], both[1][rank])

    x = torch.empty(3 if rank == 0 else 1, 3, dtype=dtype, device=DEVICE)
    # Rank 0 keeps its first row and sends the other; rank 1 sends both to rank 0.
    dist.all_to_all_single(
        x, mine, [1, 2] if rank == 0 else [1, 0], [1, 1] if rank == 0 else [2, 0]
    )
    same(x, torch.cat([both[0][:1], both[1]]) if rank == 0 else both[0][1:])

    out = [torch.empty(SIZE * rank + r + 1, dtype=dtype, device=DEVICE) for r in range(SIZE)]
    dist.all_to_all(out, [on(rank, SIZE * r + rank + 1, dtype=dtype) for r in range(SIZE)])
    for r in range(SIZE):
        same(out[r], on(r, SIZE * rank + r + 1, dtype=dtype))

    x = torch.empty_like(mine)
    if rank == 0:
        dist.send(mine, other)
        assert dist.recv(x, other) == other
    else:
        assert dist.recv(x) == other  # from anybody
        dist.send(mine, other)
    same(x, both[other])


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_collectives_that_move_data_take_every_dtype(ranks, dtype):
    ranks.run(rank_movements, dtype)


REDUCED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]
REDUCED += [torch.uint8, torch.int8]
OPS = {
    "SUM": lambda a, b: a + b,
    "AVG": lambda a, b: ((a + b) / 2).to(a.dtype),
    "PRODUCT": lambda a, b: a * b,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}


def rank_reductions(rank, dtype, name):
    op = getattr(dist.ReduceOp, name)
    mine, other = on(rank, 2, 3, dtype=dtype), on(1 - rank, 2, 3, dtype=dtype)
    expected = OPS[name](mine.cpu(), other.cpu()).to(DEVICE)

    x = mine.clone()
    dist.all_reduce(x, op)
    same(x, expected)

    x = mine.clone()
    dist.reduce(x, 1, op)
    same(x, expected if rank == 1 else mine)

    x = torch.empty(3, dtype=dtype, device=DEVICE)
    dist.reduce_scatter(x, list(mine), op)
    same(x, expected[rank])

    x = torch.empty(1, 3, dtype=dtype, device=DEVICE)
    dist.reduce_scatter_single(x, mine, op)
    same(x[0], expected[rank])


CASES = [(d, op) for d in REDUCED for op in ("SUM", "AVG", "MAX")]
CASES += [(torch.float32, op) for op in ("PRODUCT", "MIN")]
CASES += [(torch.int64, op) for op in ("PRODUCT", "MIN", "BAND", "BOR", "BXOR")]
CASES += [(torch.complex64, op) for op in ("SUM", "AVG")]


@pytest.mark.parametrize("dtype,op", CASES, ids=str)
def test_reduction_gives_the_result_of_its_operation(ranks, dtype, op):
    ranks.run(rank_reductions, dtype, op)


def rank_averages(rank):
    """As NCCL: each rank's part is scaled before they are added."""
    x = torch.full((2, 3), 40000.0, dtype=torch.half, device=DEVICE)
    for average in (
        lambda y: dist.all_reduce(y, dist.ReduceOp.AVG),
        lambda y: dist.reduce(y, 1, dist.ReduceOp.AVG),
    ):
        average(y := x.clone())
        same(y, x)
    part = torch.empty(3, dtype=torch.half, device=DEVICE)
    dist.reduce_scatter(part, list(x), dist.ReduceOp.AVG)
    same(part, x[0])
    whole = x.clone()
    dist.reduce_scatter_single(part, whole.flatten(), dist.ReduceOp.AVG)
    same(part, x[0])
    same(whole, x)


def test_average_of_large_halves_is_no_infinity(ranks):
    ranks.run(rank_averages)


def rank_factors(rank):
    for dtype in (torch.float32, torch.half, torch.complex64):
        mine, other = on(rank, 2, 3, dtype=dtype), on(1 - rank, 2, 3, dtype=dtype)
        for factor in (0.5, torch.tensor(0.5, device=DEVICE)):
            op, expected = dist._make_nccl_premul_sum(factor), (mine + other) / 2
            dist.all_reduce(x := mine.clone(), op)
            same(x, expected)
            dist.reduce(x := mine.clone(), 1, op)
            same(x, expected if rank == 1 else mine)
            part = torch.empty(3, dtype=dtype, device=DEVICE)
            dist.reduce_scatter(part, list(x := mine.clone()), op)
            same(part, expected[rank])
            dist.reduce_scatter_single(part, x.flatten(), op)
            same(part, expected[rank])
            same(x, mine)
    x = torch.full((4,), 40000.0, dtype=torch.half, device=DEVICE)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.25))
    assert x.tolist() == [20000.0] * 4


def test_premultiplied_sum_scales_each_part(ranks):
    ranks.run(rank_factors)


def rank_uneven(rank):
    sizes = (2, 5)
    parts = [torch.zeros(n, device=DEVICE) for n in sizes]
    mine = torch.full((sizes[rank],), rank + 1.0, device=DEVICE)
    dist.all_gather(parts, mine)
    same(torch.cat(parts), torch.tensor([1.0] * 2 + [2.0] * 5, device=DEVICE))
    for op, factor in ((dist.ReduceOp.SUM, 3), (dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 2)):
        parts = [torch.arange(float(n), device=DEVICE) * (rank + 1) for n in sizes]
        before = torch.cat(parts)
        dist.reduce_scatter(mine, parts, op)
        same(mine, torch.arange(float(sizes[rank]), device=DEVICE) * factor)
        same(torch.cat(parts), before)
    parts = [torch.zeros(n, device=DEVICE) for n in (0, 3)]
    dist.all_gather(parts, torch.full((3 * rank,), 4.0, device=DEVICE))
    same(parts[1], torch.full((3,), 4.0, device=DEVICE))
    if rank == 0:
        raises(ValueError, "expected tensors of 3 elements", dist.all_gather, parts, on(rank, 3))


def test_collectives_take_parts_of_several_sizes(ranks):
    ranks.run(rank_uneven)


def rank_bools(rank):
    x = torch.tensor([False, True, rank == 1], device=DEVICE)
    dist.all_reduce(x)
    assert x.cpu().view(torch.uint8).tolist() == [0, 1, 1]


def test_sum_of_bools_is_a_bool(ranks):
    ranks.run(rank_bools)


def rank_coalesced(rank):
    tensors = [on(rank, 3), on(rank, 2, 2)]
    with dist._coalescing_manager(device=torch.device(DEVICE), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        same(tensor, on(0, *tensor.shape) + on(1, *tensor.shape))

    wholes = [torch.empty(6, device=DEVICE), torch.empty(4, device=DEVICE)]
    with dist._coalescing_manager():
        for whole in wholes:
            dist.all_gather_single(whole, on(rank, len(whole) // 2))
    for whole in wholes:
        same(whole, torch.cat([on(0, len(whole) // 2), on(1, len(whole) // 2)]))

    parts = [torch.empty(3, device=DEVICE), torch.empty(2, device=DEVICE)]
    with dist._coalescing_manager():
        for part in parts:
            dist.reduce_scatter_single(part, on(rank, 2 * len(part)), dist.ReduceOp.AVG)
    for part in parts:
        mean = (on(0, 2 * len(part)) + on(1, 2 * len(part))) / 2
        same(part, mean.chunk(2)[rank])


def test_coalesced_collectives_act_as_one(ranks):
    ranks.run(rank_coalesced)


SEVERAL = [torch.float32, torch.bool, torch.half, torch.float32, torch.int64]


def rank_several_dtypes(rank):
    """A sum of bools is an "or", whatever else is in the call; an average divides integers last."""
    ops = dist.ReduceOp

    def total(op, dtype, n):
        whole = on(0, n, dtype=dtype) + on(1, n, dtype=dtype)
        if op == ops.AVG:
            return whole // 2 if dtype == torch.int64 else whole / 2
        return whole

    for op, dtypes in ((ops.SUM, SEVERAL), (ops.AVG, [d for d in SEVERAL if d != torch.bool])):
        mine = [on(rank, 3 + i, dtype=d) for i, d in enumerate(dtypes)]
        expected = [total(op, x.dtype, len(x)) for x in mine]
        with dist._coalescing_manager(async_ops=True) as manager:
            for x in mine:
                dist.all_reduce(x, op)
        manager.wait()
        for x, right in zip(mine, expected, strict=True):
            same(x, right)

        mine = [on(rank, 3 + i, dtype=d) for i, d in enumerate(dtypes)]
        kind = "avg" if op == ops.AVG else "sum"
        made = funcol.all_reduce_coalesced(mine, kind, dist.group.WORLD)
        for x, right in zip(made, expected, strict=True):
            same(x, right)

        parts = [torch.empty(2 + i, dtype=d, device=DEVICE) for i, d in enumerate(dtypes)]
        wholes = [on(rank, 2 * len(part), dtype=part.dtype) for part in parts]
        kept = [w.clone() for w in wholes]
        with dist._coalescing_manager():
            for part, whole in zip(parts, wholes, strict=True):
                dist.reduce_scatter_single(part, whole, op)
        made = funcol.reduce_scatter_tensor_coalesced(
            wholes, kind, [0] * len(wholes), dist.group.WORLD
        )
        for x, part in zip(made, parts, strict=True):
            same(x, part)
        for part, whole, was in zip(parts, wholes, kept, strict=True):
            same(part, total(op, part.dtype, 2 * len(part)).chunk(2)[rank])
            same(whole, was)

    parts = [on(rank, 2 + i, dtype=d) for i, d in enumerate(SEVERAL)]
    wholes = [torch.empty(2 * len(p), dtype=p.dtype, device=DEVICE) for p in parts]
    with dist._coalescing_manager():
        for part, whole in zip(parts, wholes, strict=True):
            dist.all_gather_single(whole, part)
    made = funcol.all_gather_into_tensor_coalesced(parts, dist.group.WORLD)
    for i, (whole, x) in enumerate(zip(wholes, made, strict=True)):
        same(x, whole)
        same(whole, torch.cat([on(r, 2 + i, dtype=whole.dtype) for r in range(SIZE)]))


def test_coalesced_collectives_take_several_dtypes(ranks):
    ranks.run(rank_several_dtypes)


def rank_empty(rank):
    """Collectives of nothing, alone and among others."""
    nothing = torch.empty(0, device=DEVICE)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 1)
    dist.reduce(nothing, 0)
    dist.all_gather([nothing.clone() for _ in range(SIZE)], nothing)
    dist.reduce_scatter(nothing.clone(), [nothing.clone() for _ in range(SIZE)])
    dist.all_gather_single(nothing.clone(), nothing)
    dist.reduce_scatter_single(nothing.clone(), nothing)
    dist.all_to_all_single(nothing.clone(), nothing)
    dist.all_to_all([nothing.clone() for _ in range(SIZE)], [nothing] * SIZE)
    dist.gather(nothing, [nothing.clone() for _ in range(SIZE)] if rank == 0 else None, 0)
    dist.scatter(nothing.clone(), [nothing] * SIZE if rank == 0 else None, 0)
    mine = [on(rank, 3), nothing, on(rank, 2, dtype=torch.int64), nothing.int()]
    with dist._coalescing_manager():
        for x in mine:
            dist.all_reduce(x)
    same(mine[0], on(0, 3) + on(1, 3))
    torch.openreg.synchronize()


def test_collectives_of_empty_tensors_work(ranks):
    ranks.run(rank_empty)


def rank_point_to_point(rank):
    other = 1 - rank
    sent, got = on(rank, 1 << 20), torch.empty(1 << 20, device=DEVICE)
    # Both send first: a send that waited for its receive would hold the receive back.
    works = [dist.isend(sent, other), dist.irecv(got, other)]
    for work in works:
        work.wait()
    same(got, on(other, 1 << 20))

    got.zero_()
    ops = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got, on(other, 1 << 20))

    # In another order than sent: the tag says which is which.
    if rank == 0:
        works = [
            dist.isend(torch.full((5,), float(tag), device=DEVICE), 1, tag=tag) for tag in (7, 8)
        ]
    else:
        first, second = torch.empty(5, device=DEVICE), torch.empty(5, device=DEVICE)
        works = [dist.irecv(first, 0, tag=8), dist.irecv(second, 0, tag=7)]
    for work in works:
        work.wait()
    if rank == 1:
        same(first, torch.full((5,), 8.0))
        same(second, torch.full((5,), 7.0))


def test_point_to_point_messages_arrive(ranks):
    ranks.run(rank_point_to_point)


def rank_refused_messages(rank):
    x = on(rank, 3)
    for call, name in ((dist.isend, "send"), (dist.irecv, "recv")):
        for tag in (-1, 2**30, 2**30 + 1):
            with pytest.raises(ValueError, match=f"{name}: expected a tag .*, got {tag}"):
                call(x, 1 - rank, tag=tag)
        with pytest.raises(ValueError, match=f"{name}: expected another rank than .*, {rank}"):
            call(x, rank)
    same(x, on(rank, 3))
    dist.all_reduce(x)
    same(x, on(0, 3) + on(1, 3))


def test_messages_that_cannot_be_sent_are_refused_by_the_call(ranks):
    ranks.run(rank_refused_messages)


def rank_odd_shapes(rank):
    for shape in ((), (0,), (0, 3)):
        x = on(rank, *shape)
        dist.all_reduce(x)
        same(x, on(0, *shape) + on(1, *shape))
        dist.broadcast(x, 0)
        whole = torch.empty(SIZE * x.numel(), device=DEVICE)
        dist.all_gather_single(whole, x)
    # A view in the middle of a storage, and a dense tensor in another memory order.
    base = on(rank, 4, 3)
    dist.all_reduce(base[1:3])
    same(base[1:3], on(0, 4, 3)[1:3] + on(1, 4, 3)[1:3])
    same(base[:1], on(rank, 4, 3)[:1])
    image = on(rank, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(image)
    same(image, on(0, 2, 3, 4, 5) + on(1, 2, 3, 4, 5))


def test_collectives_take_odd_shapes(ranks):
    ranks.run(rank_odd_shapes)


def rank_functional(rank):
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = functional.all_reduce(on(rank, 3), "sum", dist.group.WORLD)
    same(x + 0, on(0, 3) + on(1, 3))
    torch.openreg.set_device(1)
    mesh = init_device_mesh("openreg", (SIZE,))
    whole = on(0, 4, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    same(sharded.to_local(), whole.chunk(SIZE)[rank])
    same((sharded * 2).redistribute(mesh, [Replicate()]).to_local(), whole * 2)
    torch.openreg.set_device(0)


def test_functional_collectives_and_dtensor_work(ranks):
    ranks.run(rank_functional)


# ---- Order with streams -------------------------------------------------------------------------


def rank_gated(rank):
    stream = torch.accelerator.current_stream(DEVICE)
    x = on(rank, 1000)
    torch.openreg.synchronize(1)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        x.add_(1)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x * 2
        dist.all_reduce(y)
        # The host is here although nothing can have happened.
        assert not work.is_completed() and not stream.query()
    torch.openreg.synchronize(1)
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.get_future_result().wait() == 0
    total = on(0, 1000) + on(1, 1000) + 2
    same(x, total)
    same(y, total * 4)


def test_collective_follows_queued_work_and_the_host_runs_ahead(ranks):
    ranks.run(rank_gated)


def rank_one_sided(rank):
    """Rank 1 comes late. Meanwhile rank 0 computes on every stream that does not wait for it."""
    store = dist.distributed_c10d._get_default_store()
    count = 3 * torch.openreg.device_count() * 8  # more than there are lanes
    stream = torch.accelerator.current_stream(DEVICE)
    received = [torch.zeros(10, device=DEVICE) for _ in range(count)]
    x = on(rank, 10)
    if rank == 0:
        works = [dist.irecv(r, 1, tag=tag) for tag, r in enumerate(received)]
        for work in works:
            side = torch.Stream(DEVICE)
            with side:
                work.wait()
        dist.all_reduce(x)
        other = torch.openreg.Stream(0)
        with other:
            y = torch.ones(10, device="openreg:0") * 3
        other.synchronize()
        assert y.sum().item() == 30
        assert not stream.query() and not any(work.is_completed() for work in works)
        store.set("rank 0 has computed", "")
        for work in works:
            work.wait()
        for tag, r in enumerate(received):
            same(r, torch.full((10,), float(tag)))
    else:
        store.wait(["rank 0 has computed"])
        for tag in range(count):
            dist.send(torch.full((10,), float(tag), device=DEVICE), 0, tag=tag)
        dist.all_reduce(x)
    same(x, on(0, 10) + on(1, 10))


def test_collective_leaves_no_lane_waiting_for_a_peer(ranks):
    ranks.run(rank_one_sided)


def rank_side_stream(rank):
    """Only the stream that waits for the work is held."""
    x = on(rank, 10)
    torch.openreg.synchronize(1)
    side, free = torch.openreg.Stream(1), torch.openreg.Stream(1)
    with torch.openreg.testing.gate(1) as gate:
        with side:
            gate.wait(side)
            work = dist.all_reduce(x, async_op=True)
        with free:
            assert free.query()
            work.wait()
            assert not free.query()
            y = x + 1
        assert torch.accelerator.current_stream(DEVICE).query()
    free.synchronize()
    same(y, on(0, 10) + on(1, 10) + 1)


def test_work_wait_holds_the_current_stream(ranks):
    ranks.run(rank_side_stream)


SYNCHRONIZES = {
    "the device": lambda work: torch.openreg.synchronize(DEVICE),
    "accelerator": lambda work: torch.accelerator.synchronize(DEVICE),
    "a stream that waits": lambda work: (
        work.wait(),
        torch.openreg.current_stream(1).synchronize(),
    ),
    "a stream that does not": lambda work: torch.openreg.current_stream(1).synchronize(),
    "another device": lambda work: torch.openreg.synchronize(0),
}


def rank_synchronizes(rank, what):
    """Whether it holds the host until the peer has come, and the collective is over then."""
    store = dist.distributed_c10d._get_default_store()
    torch.accelerator.set_device_index(1)
    x = on(rank, 4)
    if rank == 1:
        store.wait([what])
        dist.all_reduce(x)
        return x.tolist()
    work = dist.all_reduce(x, async_op=True)
    thread = threading.Thread(target=SYNCHRONIZES[what], args=(work,))
    thread.start()
    thread.join(0.2)
    held = thread.is_alive()
    store.set(what, "")
    thread.join()
    over = work.is_completed()
    work.wait()
    assert x.tolist() == [1, 3, 5, 1]
    return held, held and over


@pytest.mark.parametrize("what", SYNCHRONIZES)
def test_synchronize_waits_for_collectives_as_cudas_does(ranks, what):
    """As on CUDA: the device for all, a stream for those that it has waited for."""
    waits = what in ("the device", "accelerator", "a stream that waits")
    assert ranks.run(rank_synchronizes, what)[0] == (waits, waits)


def rank_memory(rank):
    """The memory of a tensor that nobody holds any more is not given to another one meanwhile."""
    x = on(rank, 4096)
    source = on(rank, 4096)
    torch.openreg.synchronize(1)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        whole = torch.empty(SIZE * 4096, device=DEVICE)
        work = dist.all_gather_single(whole, source, async_op=True)
        del source
        side = torch.openreg.Stream(1)
        with side:
            others = [torch.full((4096,), -1.0, device=DEVICE) for _ in range(8)]
        side.synchronize()
        del others
    work.wait()
    same(whole, torch.cat([on(0, 4096), on(1, 4096)]))
    del x


def test_work_keeps_its_tensors(ranks):
    ranks.run(rank_memory)


def rank_future(rank):
    x = on(rank, 10)
    torch.openreg.synchronize(1)
    with torch.openreg.testing.gate(1) as gate:
        gate.wait()
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        # Complete at once, as on CUDA: it orders streams.
        halved = future.then(lambda done: done.value()[0] / 2)
        assert future.done() and halved.done() and not work.is_completed()
        y = halved.wait() + 1
        assert not torch.accelerator.current_stream(DEVICE).query()
    same(y, (on(0, 10) + on(1, 10)) / 2 + 1)
    assert [t.data_ptr() for t in work.result()] == [x.data_ptr()]


def test_futures_order_streams(ranks):
    ranks.run(rank_future)


def rank_barrier(rank):
    group = dist.new_group(backend="openreg")
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        dist.barrier(group=group, device_ids=[1])
        assert store.check(["rank 1 came"])
    else:
        x = on(0, 10)
        torch.openreg._sleep(50_000_000)
        store.set("rank 1 came", "")
        dist.barrier(group=group, device_ids=[1])
        assert x.sum().item() == 9.0
    dist.destroy_process_group(group)


def test_barrier_holds_the_host(ranks):
    ranks.run(rank_barrier)


def rank_monitored_barrier(rank):
    # From PyTorch 2.14 on, a group that has Gloo beside other backends will do.
    if torch.__version__ < "2.14":
        with pytest.raises(ValueError, match="only implemented for GLOO"):
            dist.monitored_barrier()
    else:
        dist.monitored_barrier()
    dist.monitored_barrier(group=dist.new_group(backend="gloo"))


def test_monitored_barrier_is_gloos_own(ranks):
    ranks.run(rank_monitored_barrier)


# ---- Bad input ----------------------------------------------------------------------------------


def raises(kind, text, function, *arguments, **options):
    with pytest.raises(kind) as raised:
        function(*arguments, **options)
    assert text in str(raised.value), str(raised.value)


def rank_bad_input(rank):
    x, y = on(rank, 4), on(rank, 3)
    out = [torch.empty(4, device=DEVICE), torch.empty(4, device="openreg:0")]
    raises(
        RuntimeError,
        "expected every tensor on openreg:1, got one on openreg:0",
        dist.all_gather,
        out,
        x,
    )
    raises(RuntimeError, "strides [2]; pass tensor.contiguous()", dist.all_reduce, x[::2])
    freed = on(rank, 4)
    freed.untyped_storage().resize_(0)
    raises(
        RuntimeError, "needs 16 bytes, but its storage on openreg:1 has 0", dist.all_reduce, freed
    )
    raises(
        ValueError,
        "expected a tensor of 2 x 3 elements of Float, got one of 4",
        dist.all_gather_single,
        x,
        y,
    )
    raises(
        ValueError, "first dimension that 2 ranks can share, got 3", dist.all_to_all_single, y, y
    )
    raises(
        ValueError,
        "2 split sizes from 0 that add up to 3, got [1, 1]",
        dist.all_to_all_single,
        y,
        y,
        [1, 1],
        [1, 2],
    )
    raises(ValueError, "got [4, -1]", dist.all_to_all_single, y, y, [1, 2], [4, -1])
    image = on(rank, 1, 4, 2, 2)
    last = image.to(memory_format=torch.channels_last)
    for function, arguments in (
        (dist.all_gather, ([image, image], last)),
        (dist.all_gather_single, (torch.cat([image, image]), last)),
        (dist.reduce_scatter, (image, [last, last])),
        (dist.all_to_all, ([image, image], [last, last])),
        (dist.all_to_all_single, (torch.cat([image, image]), torch.cat([last, last]))),
    ):
        raises(ValueError, "expected tensors of one memory format", function, *arguments)
    raises(ValueError, "BAND takes integers, got Float", dist.all_reduce, x, dist.ReduceOp.BAND)
    twice = dist._make_nccl_premul_sum(2.0)
    raises(ValueError, "PREMUL_SUM takes floats, got Int", dist.all_reduce, x.int(), twice)
    raises(TypeError, "got Float and Int", dist.all_gather_single, torch.cat([x, x]), x.int())
    work = dist._coalescing_manager()
    with pytest.raises(NotImplementedError, match="a reduction of Short is not"), work:
        for tensor in (x, x.short()):
            dist.all_reduce(tensor)
    for dtype, name in ((torch.float8_e5m2, "Float8_e5m2"), (torch.int16, "Short")):
        raises(
            NotImplementedError,
            f"all_reduce: a reduction of {name} is not",
            dist.all_reduce,
            on(rank, 4, dtype=dtype),
        )
    # Nothing of it has reached the peers.
    dist.all_reduce(x)
    same(x, on(0, 4) + on(1, 4))


def test_collectives_refuse_bad_input_at_the_call(ranks):
    ranks.run(rank_bad_input)


def rank_fails(rank):
    assert rank == 0, "rank 1 fails"


def test_rank_that_fails_fails_the_test(ranks):
    with pytest.raises(RankError, match="rank 1 fails"):
        ranks.run(rank_fails)


@pytest.mark.parametrize("name", ["openreg", "cuda"])
def test_device_map_of_rpc_is_refused_before_the_agent_starts(name, run_ok):
    out = run_ok(
        """
        import torch
        import torch.distributed.rpc as rpc

        options, name = rpc.TensorPipeRpcBackendOptions, torch.ones(0, device="openreg").device.type
        maps = (
            lambda: options(device_maps={"w1": {f"{name}:0": f"{name}:1"}}),
            lambda: options(device_maps={"w1": {0: 1}}),
            lambda: options().set_device_map("w1", {"cpu": name}),
            lambda: options().set_device_map("w1", {torch.device(name, 1): "cpu"}),
            lambda: options(devices=[f"{name}:1"]),
            lambda: options().set_devices(iter([name])),
        )
        for make in maps:
            try:
                make()
            except NotImplementedError as error:
                assert f"device map of TensorPipe with {name}" in str(error), error
            else:
                raise AssertionError("taken")
        options(device_maps={"w1": {"cpu": "cpu"}}).set_device_map("w2", {"cpu": "cpu"})
        print(name)
        """,
        env={"OPENREG_AS_CUDA": str(int(name == "cuda"))},
    )
    assert out.split() == [name]
