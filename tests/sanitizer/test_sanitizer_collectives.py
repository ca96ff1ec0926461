"""A collective is beside its stream: ``torch.openreg.sanitizer`` says who waits for none."""

import datetime
import linecache
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from race_pairs import DEVICE, openreg, sanitizer
from ranks import Ranks


def poll(work):
    while not work.is_completed():
        pass


WAITS = {
    "wait": lambda work: work.wait(),
    "with a time-out": lambda work: work.wait(datetime.timedelta(seconds=60)),
    "poll": poll,
    "future": lambda work: work.get_future().wait(),
    "result": lambda work: work.get_future_result().wait(),
    "of the device": lambda work: openreg.synchronize(),
}
NO_WAITS = {
    "none": lambda work: None,
    "while it ends": lambda work: time.sleep(0.02),  # or does not: it must not matter
    "of the stream": lambda work: openreg.current_stream().synchronize(),
    "of another device": lambda work: openreg.synchronize(1),
}


def rank_collective(rank, wait):
    with warnings.catch_warnings(), sanitizer.enable("warn"):
        warnings.simplefilter("ignore")
        x = torch.ones(100, device=DEVICE)
        for _ in range(2):
            work = dist.all_reduce(x, async_op=True)
            {**WAITS, **NO_WAITS}[wait](work)
            x.add_(1)
            work.wait()
        openreg.synchronize()
        return [(r.later.operator, r.earlier.operator, r.advice) for r in sanitizer.reports()]


def rank_gated_collective(rank):
    """It cannot have begun when the stream goes on."""
    with warnings.catch_warnings(), sanitizer.enable("warn"):
        warnings.simplefilter("ignore")
        x = torch.ones(100, device=DEVICE)
        with openreg.testing.gate() as gate:
            gate.wait()
            work = dist.all_reduce(x, async_op=True)
            x.add_(1)
        work.wait()
        return [(r.later.operator, r.earlier.operator, r.advice) for r in sanitizer.reports()]


def rank_forgotten_collective(rank):
    """Nobody waits, and the memory is used again: it was free when the collective was over."""
    with warnings.catch_warnings(), sanitizer.enable("warn"):
        warnings.simplefilter("ignore")
        for size in range(1, 50):
            dist.all_reduce(torch.ones(size, device=DEVICE), async_op=True)
        dist.barrier()
        return [str(report) for report in sanitizer.reports()]


def rank_collective_error(rank):
    with sanitizer.enable("error"):
        x = torch.ones(100, device=DEVICE)
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(sanitizer.DataRaceError, match="the collective all_reduce writes x"):
            x.add_(1)
        work.wait()
        return x.add_(1).sum().item()


def rank_broadcast(rank, reads):
    """Its source is read alone, so it may be read by others, too."""
    with warnings.catch_warnings(), sanitizer.enable("warn"):
        warnings.simplefilter("ignore")
        x = torch.ones(100, device=DEVICE)
        work = dist.broadcast(x, 0, async_op=True)
        x.sum() if reads else x.add_(1)
        work.wait()
        assert [y is x for y in work.result()] == [True]
        return [(r.later.operator, r.earlier.operator) for r in sanitizer.reports()]


def start(tensors):
    works = []
    for tensor in tensors:
        work = dist.all_reduce(tensor, async_op=True)
        works.append(work)
    return works


def rank_works_of_another_function(rank):
    def finish(works, tensors):
        for work in works:
            for tensor in tensors:
                tensor.add_(1)  # in its loop
            work.wait()

    with warnings.catch_warnings(), sanitizer.enable("warn"):
        warnings.simplefilter("ignore")
        tensors = [torch.ones(100, device=DEVICE)]
        finish(start(tensors), tensors)
        tensors[0].add_(1)
        works = start(tensors)
        tensors[0].mul_(2)  # `works`, not `work`
        works[0].wait()
        return [
            ([(h.where, h.code, linecache.getline(*h[1:3]).strip()) for h in r.help], str(r))
            for r in sanitizer.reports()
        ]


def test_collective_without_a_wait_is_reported(tmp_path):
    ranks = Ranks(1, tmp_path)
    advice = "work.wait() before aten::add_.Tensor, work being what all_reduce returned"
    try:
        for wait in WAITS:
            assert ranks.run(rank_collective, wait) == [[]], wait
        for wait in NO_WAITS:
            (reports,) = ranks.run(rank_collective, wait)
            assert reports == [("aten::add_.Tensor", "all_reduce", advice)], wait
        (reports,) = ranks.run(rank_gated_collective)
        assert reports == [("aten::add_.Tensor", "all_reduce", advice)]
        assert ranks.run(rank_broadcast, True) == [[]]
        assert ranks.run(rank_broadcast, False) == [[("aten::add_.Tensor", "broadcast")]]
        assert ranks.run(rank_forgotten_collective) == [[]]
        assert ranks.run(rank_collective_error) == [200.0]
        ((looped, _), (unnamed, text)) = ranks.run(rank_works_of_another_function)[0]
        assert looped == [("before", "work.wait()", "for tensor in tensors:")]
        assert unnamed == [] and "wait() of what the collective has returned" in text
    finally:
        ranks.close()
