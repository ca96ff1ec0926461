"""Pinned host memory."""

import torch

gate = torch.openreg.testing.gate


def test_a_block_is_not_reused_while_a_copy_reads_it():
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


def test_a_block_is_reused_when_the_copy_is_done():
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


def test_what_is_pinned():
    pinned = torch.arange(100).pin_memory()
    assert pinned.is_pinned() and pinned[50:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not pinned.clone().is_pinned()
    assert pinned.sum().item() == 4950
    assert not torch.ones(3, device="openreg").is_pinned()


def test_pinned_loader():
    data = torch.utils.data.TensorDataset(torch.arange(32.0))
    loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True, num_workers=1)
    total = torch.zeros((), device="openreg:1")
    for (batch,) in loader:
        assert batch.is_pinned()
        total += batch.to("openreg:1", non_blocking=True).sum()
    assert total.item() == 31 * 16
