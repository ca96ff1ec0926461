"""The hooks of a group, which PyTorch has from 2.14 on: who learns that a collective has failed or
completed."""

import threading

import pytest
import torch
import torch.distributed as dist

from torch_openreg.openreg.testing import run_ranks

HOOKS = torch.__version__ >= "2.14"
COMPLETIONS = torch.__version__ >= "2.15"


@pytest.mark.skipif(not HOOKS, reason="hooks of PyTorch 2.14")
def test_abort_hooks_are_called_before_the_caller_learns_of_the_failure():
    told, over = [], threading.Event()

    def rank_alone(rank):
        if rank == 1:
            assert over.wait(60)
            return
        group = dist.group.WORLD._get_backend(torch.device("openreg"))
        assert not COMPLETIONS or group.supports_abort_hooks
        group.register_abort_hook(1, lambda: told.append("removed"))
        group.register_abort_hook(2, lambda: told.append("replaced"))
        group.register_abort_hook(2, lambda: told.append(len(told)))
        group.register_abort_hook(3, lambda: 1 / 0)
        group.unregister_abort_hook(1)
        group.unregister_abort_hook(4)  # nobody's
        x = torch.ones(4, device="openreg")
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(x, async_op=True).wait()
            torch.openreg.synchronize()
        assert told == [0]
        with pytest.raises(ZeroDivisionError):  # a caller; before, it was a warning
            group.abort()
        assert told == [0, 1]
        over.set()

    run_ranks(rank_alone, 2, timeout=0.3)


ATTACHED = """
import os, sys
import torch, torch.distributed as dist
from ranks import flight_recorder as recorded
from torch.openreg import sanitizer, testing

dist.init_process_group("openreg", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(4, device="openreg")
dist.all_reduce(x)
torch.openreg.synchronize()
assert recorded() == []
# The recorder of each group that PyTorch does not attach one to.
recorder = torch._C._distributed_c10d.FlightRecorderHook.attach(dist.group.WORLD, [0])
"""


@pytest.mark.skipif(not COMPLETIONS, reason="hooks of PyTorch 2.15")
def test_flight_recorder_is_attached_by_the_program_alone(run_ok):
    run_ok(
        ATTACHED
        + """
half = x.half()
with testing.gate() as gate:
    gate.wait()
    dist.all_reduce(x)
    dist.all_gather_single(torch.empty_like(x), x)
    with dist._coalescing_manager(device=x.device):
        dist.all_reduce(x)
        dist.all_reduce(half)  # two dtypes: two collectives, one work
    waiting = recorded()
    assert {state for _, state in waiting} == {"scheduled"}, waiting
torch.openreg.synchronize()
done = recorded()
assert [(name, "scheduled") for name, _ in done] == waiting
assert {state for _, state in done} == {"completed"}, done
names = ["all_reduce", "_all_gather_base", "allreduce_coalesced"]
assert [name for name, _ in done] == [f"openreg:{name}" for name in names], done
with testing.gate() as gate:
    gate.wait()
    work = dist.all_reduce(x, async_op=True)
    torch.openreg.reset()  # it never runs
torch.openreg.synchronize()
assert recorded()[len(done):] == [("openreg:all_reduce", "scheduled")]
"""
    )


@pytest.mark.skipif(not COMPLETIONS, reason="hooks of PyTorch 2.15")
def test_flight_recorder_orders_nothing(run_ok):
    out = run_ok(
        ATTACHED
        + """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # so that the collective is often over
sanitizer.enable()
found = 0
for _ in range(50):
    work = dist.all_reduce(x, async_op=True)
    try:
        x.add_(1)
    except sanitizer.DataRaceError:
        found += 1
    while not work.is_completed():
        pass
    x.add_(1)  # the program has asked
    torch.openreg.synchronize()
print(found)
"""
    )
    assert out == "50\n"
