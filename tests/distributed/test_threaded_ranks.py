"""run_ranks of torch.openreg.testing: what other files run in processes, in threads of this one."""

import copy
import datetime
import re
import threading

import pytest
import test_distributed
import test_distributed_agreement
import test_distributed_sparse
import test_distributed_training
import torch
import torch.distributed as dist

from torch_openreg import _C
from torch_openreg.openreg.testing import run_ranks

# Each rank's current device, which is its own: not those that name another rank's device.
AS_IN_PROCESSES = {
    test_distributed: [
        ("rank_cpu",),
        ("rank_subgroups",),
        ("rank_movements", torch.bfloat16),
        ("rank_movements", torch.complex64),
        ("rank_movements", torch.bool),
        ("rank_averages",),
        ("rank_factors",),
        ("rank_uneven",),
        ("rank_bools",),
        ("rank_coalesced",),
        ("rank_several_dtypes",),
        ("rank_empty",),
        ("rank_point_to_point",),
        ("rank_odd_shapes",),
    ],
    test_distributed_sparse: [
        ("rank_average",),
    ],
    test_distributed_training: [
        ("rank_ddp_trains", False),
        ("rank_ddp_runs_ahead",),
        ("rank_fsdp", False),
    ],
}
CASES = [(module, *case) for module, cases in AS_IN_PROCESSES.items() for case in cases]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case[1:])))
def test_threads_do_what_processes_do(case, monkeypatch):
    module, name, *arguments = case
    monkeypatch.setattr(module, "DEVICE", "openreg", raising=False)
    model = test_distributed_training.make_model()  # here: the ranks share the CPU's generator
    monkeypatch.setattr(test_distributed_training, "make_model", lambda: copy.deepcopy(model))
    run_ranks(getattr(module, name), 2, *arguments)
    assert not dist.is_initialized()
    assert torch.nn.parallel.DistributedDataParallel._active_ddp_module is None


@pytest.mark.parametrize("name", test_distributed.OPS)
def test_threads_reduce_as_processes_do(name, monkeypatch):
    monkeypatch.setattr(test_distributed, "DEVICE", "openreg")
    dtypes = [torch.float16, torch.int32] if name[0] != "B" else [torch.uint8]

    def both(rank):
        for dtype in dtypes:
            test_distributed.rank_reductions(rank, dtype, name)

    run_ranks(both, 2)


def test_each_rank_has_a_thread_a_device_and_a_result():
    def rank_own(rank, text):
        x = torch.ones(3, device="openreg")
        return f"{text}{rank}", x.device.index, dist.get_rank(), threading.current_thread().name

    assert run_ranks(rank_own, 2, "r") == [
        ("r0", 0, 0, "openreg-rank-0"),
        ("r1", 1, 1, "openreg-rank-1"),
    ]
    assert torch.openreg.current_device() == 0


def test_ranks_that_disagree_are_told_what_each_calls(monkeypatch):
    monkeypatch.setattr(test_distributed_agreement, "DEVICE", "openreg")
    names = ("sizes", "kinds", "dtypes", "all_gather")
    run_ranks(test_distributed_agreement.rank_disagrees, 2, names)


def test_failure_of_a_rank_ends_what_waits_for_it():
    """In a collective, in a message, and before its group is complete."""

    def fails(rank, before):
        if rank == 1:
            raise KeyError("rank 1 has no key")
        before()
        torch.openreg.synchronize()

    x = torch.ones(4)
    waits = [
        lambda: dist.all_reduce(x.to("openreg")),
        lambda: dist.recv(x.to("openreg"), 1),
        lambda: dist.send(x.to("openreg"), 1),
        lambda: dist.recv(x.to("openreg")),
    ]
    for wait in waits:
        with pytest.raises(KeyError, match="rank 1 has no key") as raised:
            run_ranks(fails, 2, wait)
        if hasattr(raised.value, "__notes__"):
            assert raised.value.__notes__ == ["on rank 1 of 2, and afterwards on rank 0"]
    assert run_ranks(lambda rank: rank, 2) == [0, 1]


def test_failure_of_a_run_is_not_reported_by_the_next():
    def abandons(rank):
        if rank == 0:
            dist.all_reduce(torch.ones(4, device="openreg"), async_op=True)
            sent.set()
        sent.wait(60)
        raise KeyError(f"rank {rank} has no key")

    sent = threading.Event()
    with pytest.raises(KeyError, match="has no key"):
        run_ranks(abandons, 2)
    assert run_ranks(lambda rank: torch.ones(3, device="openreg").sum().item(), 2) == [3, 3]


def test_rank_that_has_ended_does_not_keep_others_from_joining(monkeypatch):
    first, create = threading.Event(), _C._make_thread_transport

    def later(store, rank, *arguments):
        if rank == 1:
            assert first.wait(60)
        made = create(store, rank, *arguments)
        if rank == 0:
            del made
            first.set()
            raise KeyError("rank 0 leaves")
        return made

    monkeypatch.setattr(_C, "_make_thread_transport", later)
    with pytest.raises(KeyError, match="rank 0 leaves") as raised:
        run_ranks(lambda rank: rank, 2)
    if hasattr(raised.value, "__notes__"):
        assert raised.value.__notes__ == ["on rank 0 of 2"]


def test_rank_that_does_not_come_is_named_after_the_time_out():
    opened = threading.Event()

    def late(rank, group):
        group = dist.new_group([0, 1]) if group else None
        if rank == 1:
            opened.wait(60)
            return None
        with pytest.raises(dist.DistBackendError) as raised:
            x = torch.ones(4, device="openreg")
            work = dist.all_reduce(x, group=group, async_op=True)
            work.wait(datetime.timedelta(seconds=60))
        opened.set()
        return str(raised.value)

    for group in (False, True):
        opened.clear()
        text = run_ranks(late, 2, group, timeout=0.3)[0]
        assert re.fullmatch(
            r"all_reduce of group \S+ \(\S+\) failed on rank 0 of 2: timed out after 300 ms "
            r"\(peer: rank 1\)",
            text,
        )


def test_tensor_on_the_device_of_another_rank_is_refused():
    calls = {
        "all_reduce": dist.all_reduce,
        "barrier": lambda x: dist.barrier(device_ids=[0]),
        "send": lambda x: dist.send(x, 0),
        "recv": lambda x: dist.recv(x, 0),
        "all_gather": lambda x: dist.all_gather([x, x], x),
    }
    text = "expected the device of rank 1, openreg:1, got openreg:0, the device of rank 0"
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name}.*: {text}"):
            run_ranks(lambda rank, f: rank and f(torch.ones(4, device="openreg:0")), 2, call)
    assert run_ranks(lambda rank: dist.get_rank(), 1) == [0]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="size must be from 1 to 2, the number of devices, got 3"):
        run_ranks(print, 3)
    with pytest.raises(ValueError, match="got 0"):
        run_ranks(print, 0)
    with pytest.raises(TypeError, match="size must be a whole number, got True"):
        run_ranks(print, True)
    with pytest.raises(TypeError, match="function must be callable, got 7"):
        run_ranks(7, 2)
    for timeout in (0, 2000000000, float("inf"), float("nan")):
        text = f"timeout must be more than 0 seconds and at most 1e9, got {timeout}"
        with pytest.raises(ValueError, match=text):
            run_ranks(print, 2, timeout=timeout)
    for timeout in ("1", True):
        with pytest.raises(TypeError, match=f"a number of seconds, got {timeout!r}"):
            run_ranks(print, 2, timeout=timeout)
    with pytest.raises(RuntimeError, match="was called by a rank"):
        run_ranks(lambda rank: run_ranks(print, 2), 2)


def test_what_needs_a_process_is_refused_by_name():
    from torch.distributed import rpc

    before = rpc.init_rpc

    def compiles(rank):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2, device="openreg"))

    with pytest.raises(Exception, match=r"torch\.compile is not supported in a rank of"):
        run_ranks(compiles, 2)
    torch._dynamo.reset()  # which forgets who is called before it compiles
    with pytest.raises(Exception, match=r"torch\.compile is not supported in a rank of"):
        run_ranks(compiles, 2)
    with pytest.raises(NotImplementedError, match=r"torch\.distributed\.rpc is not supported"):
        run_ranks(lambda rank: rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2), 2)
    assert rpc.init_rpc is before


PROGRAM = """
import os, resource, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

SIZE, WIDTH = torch.openreg.device_count(), 8
sanitizer = torch.openreg.sanitizer


def reference(layers, x):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
    )
    model(x).square().mean().backward()
    return model


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


x = torch.linspace(-1, 1, 2 * SIZE * WIDTH).reshape(2 * SIZE, WIDTH)
one, deep = reference(2, x), reference(SIZE, x)
models = {rank: (reference(2, x), reference(SIZE, x)) for rank in range(SIZE)}


def data_parallel(rank, sharded):
    model = models[rank][0].to("openreg")
    model.zero_grad()
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    part = x.chunk(SIZE)[rank].to("openreg")
    model(part).square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    if sharded:
        gradients = [g.full_tensor() for g in gradients]
    same([g.cpu() for g in gradients], [p.grad for p in one.parameters()])


def pipeline(rank):
    layer = models[rank][1][rank].to("openreg")
    layer.zero_grad()
    stage = PipelineStage(layer, rank, SIZE, torch.device("openreg", rank))
    schedule = Schedule1F1B(stage, 2 * SIZE, loss_fn=lambda y, target: y.square().mean())
    if rank == 0:
        schedule.step(x.to("openreg"))
    elif rank == SIZE - 1:
        schedule.step(target=torch.zeros(2 * SIZE, WIDTH, device="openreg"))
    else:
        schedule.step()
    same([p.grad.cpu() for p in layer.parameters()], [p.grad for p in deep[rank].parameters()])


def mesh(rank):
    # Two dimensions, and a group for each row and column.
    grid = dist.init_device_mesh("openreg", (SIZE // 4, 4), mesh_dim_names=("rows", "columns"))
    y = torch.ones(3, device="openreg") * rank
    dist.all_reduce(y, group=grid.get_group("columns"))
    first = rank // 4 * 4
    assert y.tolist() == [4.0 * first + 6] * 3


with sanitizer.enable():
    for name, function, *arguments in (
        ("mesh", mesh), ("DDP", data_parallel, False), ("FSDP2", data_parallel, True),
        ("1F1B", pipeline),
    ):
        start = time.monotonic()
        torch.openreg.testing.run_ranks(function, SIZE, *arguments)
        print(f"{name}: {time.monotonic() - start:.1f} s")
    # The order of the ranks is watched too: a gradient that is read too early is a race.
    def early(rank):
        y = torch.ones(1 << 16, device="openreg")
        work = dist.all_reduce(y, async_op=True)
        if rank == SIZE - 1:
            y + 1
        work.wait()

    try:
        torch.openreg.testing.run_ranks(early, SIZE)
    except sanitizer.DataRaceError as error:
        assert f"openreg:{SIZE - 1}" in str(error), error
    else:
        raise AssertionError("no race was found")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(f"{peak} MiB, {len(os.listdir('/proc/self/fd'))} files")
"""


def test_eight_ranks_train_under_the_sanitizer(run_ok):
    print(run_ok(PROGRAM, {"OPENREG_DEVICE_COUNT": "8"}))


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64])
def test_many_ranks_train_under_the_sanitizer(run_ok, size):
    print(run_ok(PROGRAM, {"OPENREG_DEVICE_COUNT": str(size)}))
