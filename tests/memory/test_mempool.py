"""Private pools of device memory: torch.openreg.MemPool, use_mem_pool, graph_pool_handle."""

import threading

import pytest
import torch

from torch_openreg import _C

DEVICE = "openreg:0"
MIB = 1 << 20
memory = torch.openreg.memory


@pytest.fixture(autouse=True)
def nothing_cached(nothing_left):
    torch.accelerator.empty_cache()


def block(mib=1, device=DEVICE):
    return torch.empty(mib * MIB, dtype=torch.uint8, device=device)


def reserved():
    return torch.openreg.memory_reserved(0)


def by_pools():
    return memory.memory_stats_as_nested_dict(0)["reserved_bytes_by_private_pools"]


def test_pool_ids_are_new_and_name_their_owner():
    handles = [torch.openreg.graph_pool_handle(), torch.openreg.graph_pool_handle()]
    pools = [torch.openreg.MemPool(), torch.openreg.MemPool()]
    ids = handles + [pool.id for pool in pools]
    assert len({*ids}) == 4
    assert all(isinstance(id, tuple) and id[0] == 0 and id[1] > 0 for id in ids)


def test_pool_reuses_its_freed_memory_alone():
    pool = torch.openreg.MemPool()
    assert pool.use_count() == 1
    with torch.openreg.use_mem_pool(pool):
        assert pool.use_count() == 2
        x = block()
        address = x.data_ptr()
        del x
    assert pool.use_count() == 1
    outside = block()
    assert outside.data_ptr() != address
    with torch.openreg.use_mem_pool(pool):
        assert block().data_ptr() == address


def test_pool_holds_memory_of_operators_and_their_results():
    pool = torch.openreg.MemPool()
    a = torch.randn(64, 64, device=DEVICE)
    with torch.openreg.use_mem_pool(pool):
        b = a @ a + 1
    segment = next(s for s in pool.snapshot() if s["address"] <= b.data_ptr())
    assert b.data_ptr() < segment["address"] + segment["total_size"]
    torch.testing.assert_close(b.cpu(), a.cpu() @ a.cpu() + 1)


def test_empty_cache_leaves_a_pool_that_is_held():
    before = reserved()
    pool = torch.openreg.MemPool()
    with torch.openreg.use_mem_pool(pool):
        block(30)
    torch.accelerator.empty_cache()
    assert reserved() - before == 30 * MIB
    del pool  # gives back what is idle
    assert reserved() == before


def test_tensors_outlive_their_pool():
    before = reserved()
    pool = torch.openreg.MemPool()
    with torch.openreg.use_mem_pool(pool):
        kept, dropped = torch.arange(1000, device=DEVICE), block(30)
    del dropped, pool
    assert reserved() - before == 2 * MIB
    assert kept.sum().item() == 499500
    del kept
    torch.accelerator.empty_cache()
    assert reserved() == before


def test_pool_that_ends_waits_for_work_that_uses_it():
    pool = torch.openreg.MemPool()
    with torch.openreg.use_mem_pool(pool):
        x = torch.ones(MIB, device=DEVICE)
        for _ in range(20):
            x = x + 1
    y = x * 2
    del x, pool
    assert y.min().item() == y.max().item() == 42


def test_pool_scopes_nest_and_the_innermost_counts():
    outer, inner = torch.openreg.MemPool(), torch.openreg.MemPool()
    with torch.openreg.use_mem_pool(outer):
        a = block()
        with torch.openreg.use_mem_pool(inner):
            b = block()
            with torch.openreg.use_mem_pool(outer):
                c = block()
        d = block()
    owners = {
        part["address"]: segment["segment_pool_id"]
        for segment in memory.memory_snapshot()
        for part in segment["blocks"]
    }
    assert [owners[x.data_ptr()] for x in (a, b, c, d)] == [
        outer.id,
        inner.id,
        outer.id,
        outer.id,
    ]


def test_pool_scope_ends_with_an_exception():
    pool = torch.openreg.MemPool()
    with pytest.raises(ZeroDivisionError), torch.openreg.use_mem_pool(pool):
        raise ZeroDivisionError
    assert pool.use_count() == 1
    x = block()
    assert x.data_ptr() not in {b["address"] for s in pool.snapshot() for b in s["blocks"]}


def test_pool_of_another_device_holds_that_devices_memory():
    pool = torch.openreg.MemPool()
    with torch.openreg.use_mem_pool(pool, device=1):
        here, there = block(), block(device="openreg:1")
        assert {s["device"] for s in pool.snapshot()} == {1}
    assert pool.use_count() == 1 and pool.snapshot() == []
    del here, there
    with torch.openreg.use_mem_pool(pool, "openreg:1"):
        assert pool.use_count() == 1


def test_pool_scope_concerns_its_own_thread_only():
    pool = torch.openreg.MemPool()
    result = []
    with torch.openreg.use_mem_pool(pool):
        thread = threading.Thread(target=lambda: result.append(block()))
        thread.start()
        thread.join()
    assert pool.snapshot() == []
    assert result[0].data_ptr() in {
        b["address"] for s in memory.memory_snapshot() for b in s["blocks"]
    }


def test_pool_serves_several_threads_at_once():
    pool, start, errors = torch.openreg.MemPool(), threading.Barrier(4), []

    def work(value):
        try:
            start.wait()
            for _ in range(50):
                with torch.openreg.use_mem_pool(pool):
                    x = torch.full((1000,), value, device=DEVICE)
                    y = x + x
                assert y.sum().item() == 2000 * value
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and pool.use_count() == 1
    inside = {s["address"] for s in pool.snapshot()}
    with torch.openreg.use_mem_pool(pool):
        block()
    assert inside <= {s["address"] for s in pool.snapshot()}


def test_memory_stats_have_figures_for_each_pool():
    pool = torch.openreg.MemPool()
    assert by_pools()[pool.id]["all"]["current"] == 0
    with torch.openreg.use_mem_pool(pool):
        x = block(30)
    figures = by_pools()[pool.id]
    assert figures["all"] == figures["large_pool"]
    once = dict.fromkeys(("current", "peak", "allocated"), 30 * MIB)
    assert figures["all"] == {**once, "freed": 0}
    flat = "reserved_bytes_by_private_pools.{}_{}.all.current".format(*pool.id)
    assert torch.openreg.memory_stats(0)[flat] == 30 * MIB
    id = pool.id
    del pool, x
    assert id not in by_pools()


def test_snapshots_and_history_name_the_pool():
    pool = torch.openreg.MemPool()
    memory._record_memory_history(stacks="python")
    try:
        with torch.openreg.use_mem_pool(pool):
            x = block()
        address = x.data_ptr()
        segments = memory._snapshot()["segments"]
        mine = [s for s in segments if s["segment_pool_id"] == pool.id]
        assert [s["address"] for s in mine] == [address]
        assert [s["address"] for s in pool.snapshot(include_traces=False)] == [address]
        assert memory.memory_snapshot((7, 7)) == []
        assert len(memory.memory_snapshot((0, 0))) == len(segments)
        id = pool.id
        del x, pool
        told = {
            entry["action"]: entry["pool_id"]
            for entry in memory._snapshot()["device_traces"][0]
            if entry.get("addr") == address
        }
    finally:
        memory._record_memory_history(None)
    assert told == dict.fromkeys(
        ("segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"), id
    )


def test_pool_id_works_with_the_calls_of_cudas_allocator():
    id = torch.openreg.graph_pool_handle()
    memory._cuda_beginAllocateCurrentThreadToPool(0, id)
    x = block()
    memory._cuda_endAllocateToPool(0, id)
    assert [s["address"] for s in memory.memory_snapshot(id)] == [x.data_ptr()]
    memory._cuda_releasePool(0, id)
    assert memory.memory_snapshot(id) == []
    with pytest.raises(RuntimeError, match=rf"pool \(0, {id[1]}\) of openreg:0 has no holder"):
        memory._cuda_releasePool(0, id)
    with pytest.raises(RuntimeError, match="nothing is allocated to memory pool"):
        memory._cuda_endAllocateToPool(0, id)
    with pytest.raises(ValueError, match=r"\(0, 0\) is the device's own memory"):
        memory._cuda_beginAllocateCurrentThreadToPool(0, (0, 0))


def test_pool_refusals_name_what_they_refuse():
    for name in ("allocator", "use_on_oom", "no_split"):
        with pytest.raises(NotImplementedError, match=name):
            torch.openreg.MemPool(**{name: True})
    with pytest.raises(TypeError, match="MemPool, got None"):
        with torch.openreg.use_mem_pool(None):
            pass
    with pytest.raises(RuntimeError, match="99"):
        with torch.openreg.use_mem_pool(torch.openreg.MemPool(), 99):
            pass


def test_empty_cache_refuses_a_pool_in_use():
    pool = torch.openreg.MemPool()
    with torch.openreg.use_mem_pool(pool):
        block()
        with pytest.raises(RuntimeError, match="in use"):
            torch.openreg.empty_cache(pool.id)
    assert pool.snapshot() != []
    torch.openreg.empty_cache(pool.id)
    assert pool.snapshot() == []
    assert pool.use_count() == 1


def test_ten_thousand_pools_leave_no_memory_behind():
    before, pools = reserved(), len(by_pools())
    for _ in range(10_000):
        pool = torch.openreg.MemPool()
        with torch.openreg.use_mem_pool(pool):
            torch.empty(1, device=DEVICE)
    del pool
    assert reserved() == before and len(by_pools()) == pools


def test_poison_reaches_what_a_pool_frees():
    poisoned = _C._poison(True)
    try:
        pool = torch.openreg.MemPool()
        with torch.openreg.use_mem_pool(pool):
            x = torch.ones(1000, device=DEVICE)
            del x
            assert torch.empty(1000, device=DEVICE).isnan().all()
    finally:
        _C._poison(poisoned)
