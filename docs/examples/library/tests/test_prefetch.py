import torch
from overlap import Prefetcher


def test_batches_arrive_in_order():
    batches = [torch.full((1000,), float(i)) for i in range(6)]
    sums = [batch.sum() for batch in Prefetcher(batches)]
    assert [x.item() for x in sums] == [1000.0 * i for i in range(6)]


def test_no_batches():
    assert list(Prefetcher([])) == []
