"""Pinned host memory."""

import pytest
import torch

gate = torch.openreg.testing.gate


def test_pinned_block_is_not_reused_while_a_copy_reads_it():
    torch.accelerator.empty_host_cache()
    size = 3 << 20
    source = torch.full((size,), 7, dtype=torch.uint8).pin_memory()
    address = source.data_ptr()
    stream = torch.openreg.Stream()
    with gate() as held, torch.openreg.stream(stream):
        held.wait(stream)
        there = source[5:].to("openreg", non_blocking=True)
        del source
        other = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        assert other.data_ptr() != address
        other.zero_()
    stream.synchronize()
    assert bool((there == 7).all().item())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_pinned_block_is_not_reused_while_a_kernel_reads_it(dtype):
    torch.accelerator.empty_host_cache()
    size = 3 << 20
    source = torch.full((size,), 7, dtype=torch.uint8).pin_memory()
    address = source.data_ptr()
    there = torch.zeros(3, (size >> 2), dtype=dtype, device="openreg")
    torch.openreg.synchronize()
    with gate() as held:
        held.wait()
        # With strides, and from a slice: the event belongs to the storage.
        there.copy_(source.view(-1, 4)[:, 1:].t(), non_blocking=True)
        del source
        other = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        assert other.data_ptr() != address
        other.zero_()
    assert bool((there == 7).all().item())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_pinned_block_is_not_reused_while_a_copy_writes_it(dtype):
    torch.accelerator.empty_host_cache()
    size = 3 << 20
    there = torch.ones(size, dtype=dtype, device="openreg")
    to = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    address = to.data_ptr()
    torch.openreg.synchronize()
    with gate() as held:
        held.wait()
        to.copy_(there, non_blocking=True)
        del to
        other = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        assert other.data_ptr() != address
    torch.openreg.synchronize()
    assert not other.any()


def test_pinned_block_is_reused_when_the_copy_is_done():
    torch.accelerator.empty_host_cache()
    source = torch.ones(5 << 20, dtype=torch.uint8).pin_memory()
    address = source.data_ptr()
    source.to("openreg", non_blocking=True)
    del source  # its event is recorded here
    torch.openreg.synchronize()
    again = torch.empty(5 << 20, dtype=torch.uint8, pin_memory=True)
    assert again.data_ptr() == address


def test_empty_host_cache_gives_blocks_back():
    block = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    address = block.data_ptr()
    assert _is_mapped(address)
    del block
    assert _is_mapped(address)
    torch.accelerator.empty_host_cache()
    assert not _is_mapped(address)


def _is_mapped(address):
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_is_pinned_holds_for_views_and_storages():
    pinned = torch.arange(100).pin_memory()
    assert pinned.is_pinned() and pinned[50:].is_pinned()
    assert pinned.view(10, 10).t().is_pinned()
    assert pinned.untyped_storage().is_pinned()
    assert torch.arange(4).untyped_storage().pin_memory().is_pinned()
    assert pinned.pin_memory().data_ptr() == pinned.data_ptr()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.zeros(3, 4, pin_memory=True)[1:].is_pinned()
    assert not pinned.clone().is_pinned()
    assert not pinned.clone().untyped_storage().is_pinned()
    assert pinned.sum().item() == 4950
    assert not torch.ones(3, device="openreg").is_pinned()
    with pytest.raises(RuntimeError, match=r"cannot pin|[Oo]nly dense CPU"):
        torch.ones(3, device="openreg").pin_memory()


@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_loader_gives_pinned_batches(workers):
    data = torch.utils.data.TensorDataset(torch.arange(32.0))
    loader = torch.utils.data.DataLoader(data, 8, pin_memory=True, num_workers=workers)
    total = torch.zeros((), device="openreg:1")
    for _ in range(2):
        for (batch,) in loader:
            assert batch.is_pinned()
            total += batch.to("openreg:1", non_blocking=True).sum()
    assert total.item() == 2 * 31 * 16


@pytest.mark.usefixtures("nothing_left")
def test_host_memory_statistics_follow_a_pinned_block():
    torch.accelerator.empty_host_cache()
    torch.openreg.reset_peak_host_memory_stats()
    before = torch.openreg.host_memory_stats()
    block = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    during = torch.openreg.host_memory_stats()
    del block
    torch.accelerator.empty_host_cache()
    after = torch.openreg.host_memory_stats()
    name = "allocated_bytes.current"
    assert during[name] - before[name] == 1 << 20
    assert after[name] == before[name]
    assert after["allocated_bytes.peak"] >= during[name]
    assert after["num_host_free"] > before["num_host_free"]
