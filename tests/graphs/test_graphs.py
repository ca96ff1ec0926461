"""Graphs, by way of torch.openreg.graph and torch.accelerator.Graph."""

import contextlib
import gc
import inspect
import re
import threading
import warnings

import pytest
import torch
from torch import nn

DEVICE = "openreg"


def captured(step, warmups=0):
    """The graph of a step, and what that returned. It has run `warmups` times. The stream is none
    that the step's has, as the one that captures share may be."""
    side = torch.openreg.Stream()
    side.wait_stream(torch.openreg.current_stream())
    with torch.openreg.stream(side):
        for _ in range(warmups):
            step()
    torch.openreg.current_stream().wait_stream(side)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph, stream=side):
        result = step()
    return graph, result


def copies(tensors):
    return [t.detach().cpu().clone() for t in tensors]


# ---- Values -------------------------------------------------------------------------------------


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), (8, 16)


def convolutions():
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    return nn.Sequential(*layers), (4, 3, 8, 8)


def transformer():
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True), (2, 6, 16)


class LSTM(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def lstm():
    return LSTM(8, 12, num_layers=2, dropout=0.2, batch_first=True), (3, 5, 8)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, capturable=True)


class Training:
    """A model that is trained on batches, each of which is copied to the same place."""

    def __init__(self, make, optimizer, clip=False):
        torch.manual_seed(0)
        model, shape = make()
        self.model = model.to(DEVICE)
        self.x = torch.zeros(shape, device=DEVICE)
        self.optimizer = optimizer(self.model.parameters())
        self.clip = clip

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.x).square().mean()
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        return loss

    def run(self, count, advance):
        """What each of the steps leaves behind."""
        generator = torch.Generator().manual_seed(3)
        for _ in range(count):
            self.x.copy_(torch.randn(self.x.shape, generator=generator))
            loss = advance()
            yield copies([loss, *self.model.state_dict().values()])


def trained(make, optimizer, clip, graphs, count=100):
    """What each of some steps leaves behind, after three to warm up."""
    training = Training(make, optimizer, clip)
    torch.manual_seed(1)
    if not graphs:
        for _ in range(3):
            training.step()
        return list(training.run(count, training.step))
    graph, loss = captured(training.step, warmups=3)
    return list(training.run(count, lambda: (graph.replay(), loss)[1]))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("make", [mlp, convolutions, transformer, lstm])
def test_graphed_training_step_is_eagers_bit_for_bit(make, optimizer, clip):
    expected, found = (trained(make, optimizer, clip, graphs) for graphs in (False, True))
    for i, (values, wanted) in enumerate(zip(found, expected, strict=True)):
        assert all(map(torch.equal, values, wanted)), f"replay {i} differs"


def scaled(graphs):
    """Forward and backward are captured, the optimizer and the scaler's own steps are not."""
    training = Training(mlp, sgd)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)

    def backward():
        training.optimizer.zero_grad(set_to_none=False)
        with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
            loss = training.model(training.x).square().mean()
        scaler.scale(loss).backward()
        return loss

    for _ in range(3):
        backward()
    graph, loss = captured(backward) if graphs else (None, None)

    def step():
        eager = backward() if graph is None else graph.replay()
        scaler.step(training.optimizer)
        scaler.update()
        return loss if eager is None else eager

    return list(training.run(20, step))


def test_graphed_step_with_a_grad_scaler_is_eagers():
    for values, wanted in zip(scaled(True), scaled(False), strict=True):
        assert all(map(torch.equal, values, wanted))


def test_graph_of_two_side_streams_replays_in_order():
    x = torch.zeros(64, device=DEVICE)
    left, right = torch.openreg.Stream(), torch.openreg.Stream(priority=-1)

    def step():
        main = torch.openreg.current_stream()
        results = []
        for i, side in enumerate((left, right)):
            side.wait_stream(main)
            with torch.openreg.stream(side):
                results.append((x * (i + 2)).cumsum(0))
        for side in left, right:
            main.wait_stream(side)
        return results[0] + results[1]

    graph, y = captured(step)
    for i in range(100):
        x.fill_(i)
        graph.replay()
        assert torch.equal(y.cpu(), step().cpu())


def test_graphs_that_share_a_pool_replay_one_after_the_other():
    x = torch.zeros(1000, device=DEVICE)
    first, a = captured(lambda: (x + 1).square())
    second = torch.openreg.Graph()
    with torch.openreg.graph(second, pool=first.pool()):
        b = (a * 2).sum()
    assert second.pool() == first.pool()
    for i in range(100):
        x.fill_(i)
        first.replay()
        second.replay()
        assert b.item() == 2000 * (i + 1) ** 2


def test_graphed_module_has_forward_and_backward_of_eager():
    def losses(graphed):
        training = Training(transformer, sgd)
        torch.manual_seed(1)
        if graphed:
            sample = torch.zeros_like(training.x)
            training.model = torch.openreg.make_graphed_callables(training.model, (sample,))
        torch.manual_seed(2)
        return list(training.run(10, training.step))

    for values, wanted in zip(losses(True), losses(False), strict=True):
        assert all(map(torch.equal, values, wanted))


FLOATS_OF_INTEGERS = {
    "quotient": lambda i, b: i / 3,
    "scaled": lambda i, b: i * 0.1,
    "exp": lambda i, b: i.exp(),
    "of bools": lambda i, b: b / 7,
    "where": lambda i, b: torch.where(b, i, 0.1),
    "logsumexp": lambda i, b: i.logsumexp(0),
    "list": lambda i, b: torch._foreach_div([i, i], 3)[1],
    "list of both": lambda i, b: torch._foreach_mul([i + 2**24, i], [2, 0.1])[1],
    "out": lambda i, b: torch.div(i, 3, out=torch.empty(5, device=DEVICE)),
    "out, rounded": lambda i, b: torch.div(
        i + 2**24, 0.3, rounding_mode="floor", out=torch.empty(5, device=DEVICE)
    ),
    "compared in place": lambda i, b: (i + 2**24).gt_(2**24 + 0.5).to(torch.get_default_dtype()),
    "member": lambda i, b: torch.isin(i + 2**24, 2**24 + 1.0).to(torch.get_default_dtype()),
    "compared": lambda i, b: torch.gt(i + 2**24, 2**24 + 0.5).to(torch.get_default_dtype()),
}


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
@pytest.mark.parametrize("name", FLOATS_OF_INTEGERS)
def test_graph_keeps_the_default_dtype_of_its_capture(name, dtypes):
    step, (then, now) = FLOATS_OF_INTEGERS[name], dtypes
    i, b = torch.arange(5, device=DEVICE), torch.arange(5, device=DEVICE) > 1
    try:
        torch.set_default_dtype(then)
        expected = step(i, b).cpu()
        graph, y = captured(lambda: step(i, b))
        torch.set_default_dtype(now)
        for _ in range(2):
            graph.replay()
            assert y.dtype == then and torch.equal(y.cpu(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


INTEGERS_INTO_FLOATS = {
    "product": lambda i, out: torch.mul(i, i, out=out),
    "equal": lambda i, out: torch.eq(i, i + 1, out=out),
    "bits": lambda i, out: torch.bitwise_and(i, 2**24 + 1, out=out),
    "maximum": lambda i, out: torch.maximum(i, i - 1, out=out),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", INTEGERS_INTO_FLOATS)
def test_integers_written_into_floats_are_the_cpus_in_a_replay(name, dtype):
    i = torch.tensor([2**30, 2**24 + 1], dtype=torch.int32, device=DEVICE)
    step = INTEGERS_INTO_FLOATS[name]
    expected = step(i.cpu(), torch.zeros(2, dtype=dtype))
    for _ in range(2):
        assert torch.equal(step(i, torch.zeros(2, dtype=dtype, device=DEVICE)).cpu(), expected)
    graph, y = captured(lambda: step(i, torch.zeros(2, dtype=dtype, device=DEVICE)))
    for _ in range(2):
        graph.replay()
        assert torch.equal(y.cpu(), expected)


# ---- Random numbers -----------------------------------------------------------------------------


def test_replay_draws_the_numbers_of_the_calls():
    mine = torch.Generator(DEVICE)

    def step():
        x = torch.empty(4, device=DEVICE)
        return (
            torch.rand(4, device=DEVICE),
            x.normal_(generator=mine),
            torch.randperm(5, device=DEVICE, generator=mine),
        )

    graph, results = captured(step)
    for seed in 1, 2:
        torch.manual_seed(seed)
        mine.manual_seed(seed)
        expected = [copies(step()) for _ in range(3)]
        after = torch.openreg.get_rng_state(), mine.get_state()
        torch.manual_seed(seed)
        mine.manual_seed(seed)
        for wanted in expected:
            graph.replay()
            assert all(map(torch.equal, copies(results), wanted))
        assert torch.equal(torch.openreg.get_rng_state(), after[0])
        assert torch.equal(mine.get_state(), after[1])


def test_capture_draws_no_random_numbers():
    torch.manual_seed(3)
    before = torch.openreg.get_rng_state()
    captured(lambda: torch.rand(4, device=DEVICE))
    assert torch.equal(torch.openreg.get_rng_state(), before)


def test_replays_in_flight_have_random_numbers_of_their_own():
    x, seen = torch.zeros(2, device=DEVICE), torch.zeros(3, 2, device=DEVICE)
    graph, _ = captured(lambda: x.copy_(torch.rand(2, device=DEVICE)))
    torch.manual_seed(4)
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        for i in range(3):
            graph.replay()
            seen[i] = x
    torch.manual_seed(4)
    assert torch.equal(
        seen.cpu(), torch.stack([torch.rand(2, device=DEVICE) for _ in range(3)]).cpu()
    )


def test_graphed_checkpoint_draws_its_numbers_again():
    model, shape = transformer()
    model = model.to(DEVICE)
    x = torch.ones(shape, device=DEVICE)

    def step():
        model.zero_grad(set_to_none=True)
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        y.sum().backward()
        return [y, *(p.grad for p in model.parameters())]

    graph, results = captured(step, warmups=2)
    torch.manual_seed(5)
    expected = [copies(step()) for _ in range(3)]
    torch.manual_seed(5)
    for wanted in expected:
        graph.replay()
        assert all(map(torch.equal, copies(results), wanted))


def test_sparse_operators_run_at_each_replay():
    matrix = torch.eye(3).to_sparse().to(DEVICE)
    x = torch.ones(3, 2, device=DEVICE)
    graph, y = captured(lambda: torch.sparse.mm(matrix, x) + 1, warmups=1)
    for value in 2.0, 3.0, 4.0:
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [[value + 1] * 2] * 3


def test_seed_cannot_be_set_in_a_capture():
    torch.manual_seed(6)
    with pytest.raises(RuntimeError, match="cannot be set to seed 7 and offset 0 in a capture"):
        captured(lambda: torch.manual_seed(7))
    assert torch.openreg.initial_seed() == 6
    assert torch.rand(1, device=DEVICE).cpu() >= 0


def test_seed_refused_in_a_capture_leaves_every_device_unchanged():
    graph = torch.openreg.Graph()
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="cannot be set to seed 7"):
        with torch.openreg.graph(graph):
            torch.manual_seed(7)
    with torch.openreg.device(1):
        assert torch.openreg.initial_seed() == 3


def test_generator_copy_in_a_capture_goes_on_where_it_was_made():
    generator = torch.Generator(DEVICE).manual_seed(5)

    def draw():
        first = torch.rand(4, device=DEVICE, generator=generator)
        copy = generator.clone_state()
        return first, copy, torch.rand(4, device=DEVICE, generator=copy)

    graph, (first, copy, second) = captured(draw)
    graph.replay()
    generator.manual_seed(5)
    expected = draw()
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[2])
    assert copy.get_offset() == expected[1].get_offset()


def test_replay_draws_from_the_states_of_the_capture():
    """A generator that has another's state for a while, as in a compiled checkpoint."""
    mine, other = (torch.Generator(DEVICE).manual_seed(seed) for seed in (5, 6))

    def draw():
        own = mine.graphsafe_get_state()
        mine.graphsafe_set_state(other)
        first = torch.rand(4, device=DEVICE, generator=mine)
        mine.graphsafe_set_state(own)
        return first, torch.rand(4, device=DEVICE, generator=mine)

    graph, results = captured(draw)
    for _ in range(3):
        before = mine.get_state(), other.get_state()
        graph.replay()
        after = mine.get_state(), other.get_state()
        mine.set_state(before[0])
        other.set_state(before[1])
        assert all(map(torch.equal, results, draw()))
        assert torch.equal(mine.get_state(), after[0]) and torch.equal(other.get_state(), after[1])


def test_random_numbers_move_on_when_a_blocking_replay_failed(run_ok):
    """The replay has run: what it drew is not drawn again."""
    out = run_ok(
        """
import torch
x, index = torch.zeros(4, device="openreg"), torch.zeros(1, dtype=torch.long, device="openreg")
generator = torch.openreg.default_generators[0]
graph = torch.openreg.Graph()
with torch.openreg.graph(graph):
    y = torch.rand(4, device="openreg") + x.index_select(0, index)
index.fill_(9)
before = generator.get_offset()
try:
    graph.replay()
except Exception as error:
    print(type(error).__name__)
print(generator.get_offset() - before)
""",
        env={"OPENREG_LAUNCH_BLOCKING": "1"},
    )
    assert out.endswith("\n1\n")


# ---- What cannot be captured --------------------------------------------------------------------

REFUSED = {
    "item": (lambda x: x.sum().item(), "item"),
    "cpu": (lambda x: x.cpu(), "pageable host memory"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "mask": (lambda x: x[x > 0], "nonzero|index"),
    "from the host": (lambda x: torch.ones(2).to(DEVICE), "from pageable host memory"),
    "and not blocking": (
        lambda x: x.copy_(torch.ones(4), non_blocking=True),
        "orMemcpyAsync|copy_",
    ),
    "and cast": (
        lambda x: x.copy_(torch.ones(4).double(), non_blocking=True),
        "pageable host memory",
    ),
    "synchronize": (lambda x: torch.openreg.synchronize(), "torch.openreg.synchronize"),
    "stream": (lambda x: torch.openreg.current_stream().synchronize(), "Stream.synchronize"),
    "query": (lambda x: torch.openreg.current_stream().query(), "orStreamQuery"),
    "event": (lambda x: torch.openreg.current_stream().record_event().query(), "captured|capture"),
    "peer": (lambda x: x.to("openreg:1"), "a graph has one device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_capture_refuses_a_call_by_name(name):
    call, text = REFUSED[name]
    x = torch.zeros(4, device=DEVICE)
    graph = torch.openreg.Graph()
    with pytest.raises(RuntimeError, match=text):
        with torch.openreg.graph(graph):
            call(x)
    assert not torch.openreg.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="needs a graph that has been captured"):
        graph.replay()
    with torch.openreg.graph(graph):  # the same graph and stream
        x += 1
    graph.replay()
    assert x.tolist() == [1] * 4


WAITS_ELSEWHERE = {
    "item": lambda x, side, event: x.sum().item(),
    "copy": lambda x, side, event: x.cpu(),
    "operator": lambda x, side, event: x.nonzero(),
    "device": lambda x, side, event: torch.openreg.synchronize(1),
    "accelerator": lambda x, side, event: torch.accelerator.synchronize(1),
    "stream": lambda x, side, event: side.synchronize(),
    "event": lambda x, side, event: event.synchronize(),
}


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("name", WAITS_ELSEWHERE)
def test_host_may_wait_for_streams_outside_of_the_capture(name, mode):
    x, elsewhere = torch.zeros(4, device=DEVICE), torch.ones(4, device="openreg:1")
    side, captures = torch.openreg.Stream(), torch.openreg.Stream()  # the shared one may be `side`
    event = side.record_event()
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph, stream=captures, capture_error_mode=mode):
        x += 1
        WAITS_ELSEWHERE[name](elsewhere, side, event)
        x += 1
    graph.replay()
    assert x.tolist() == [2] * 4


def test_capture_refuses_a_host_wait_for_its_stream_when_not_current():
    x = torch.zeros(4, device=DEVICE)
    side, captures = torch.openreg.Stream(), torch.openreg.Stream()
    with pytest.raises(
        RuntimeError, match=r"Stream\.synchronize:\s+not permitted while stream .* is capturing"
    ):
        with torch.openreg.graph(torch.openreg.Graph(), stream=captures):
            x += 1
            with torch.openreg.stream(side):
                captures.synchronize()


COLLECTIVES = {
    "all_reduce": "dist.all_reduce(x)",
    "all_reduce later": "dist.all_reduce(x, async_op=True)",
    "broadcast": "dist.broadcast(x, 0)",
    "all_gather": "dist.all_gather([torch.empty_like(x)], x)",
    "barrier": "dist.barrier()",
}


def test_capture_refuses_a_collective_by_name(run_ok):
    calls = "\n".join(f"refused({name!r}, lambda: {call})" for name, call in COLLECTIVES.items())
    out = run_ok(
        f"""
import torch, torch.distributed as dist, warnings
warnings.simplefilter("ignore")
store = dist.HashStore()
dist.init_process_group("openreg", store=store, rank=0, world_size=1)
x = torch.ones(4, device="openreg")

def refused(name, call):
    try:
        with torch.openreg.graph(torch.openreg.Graph()):
            call()
    except RuntimeError as error:
        told = " ".join(str(error).split())
        assert f": {{name.split()[0]}}: not permitted while the stream made at" in told, error
        assert "call it between the replays" in str(error), error
        print(name)

{calls}
dist.all_reduce(x)
print(x.tolist())
dist.destroy_process_group()
"""
    )
    assert out.splitlines() == [*COLLECTIVES, "[1.0, 1.0, 1.0, 1.0]"]


def test_capture_ends_with_an_error_of_the_program():
    graph = torch.openreg.Graph()
    x = torch.zeros(4, device=DEVICE)
    with pytest.raises(ZeroDivisionError):
        with torch.openreg.graph(graph):
            x += 1
            raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="needs a graph that has been captured"):
        graph.replay()
    with torch.openreg.graph(graph):
        x += 2
    graph.replay()
    assert x.tolist() == [2] * 4


def test_capture_on_the_default_stream_is_refused():
    graph = torch.accelerator.Graph()
    with pytest.raises(RuntimeError, match="default stream"):
        graph.capture_begin()
    assert not torch.openreg.is_current_stream_capturing()


def test_capture_within_a_capture_is_refused():
    x = torch.zeros(1, device=DEVICE)
    with pytest.raises(RuntimeError, match="is capturing already"):
        captured(lambda: torch.accelerator.Graph().capture_begin())
    graph, _ = captured(lambda: x.add_(1))
    with pytest.raises(RuntimeError, match="a graph cannot be part of another one"):
        captured(graph.replay)
    graph.replay()
    assert x.item() == 1


def test_capture_with_an_unjoined_branch_is_refused():
    side = torch.openreg.Stream()
    x = torch.zeros(1, device=DEVICE)

    def step():
        side.wait_stream(torch.openreg.current_stream())
        with torch.openreg.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError, match="orErrorStreamCaptureUnjoined"):
        captured(step)


def test_capture_refuses_a_wait_for_work_from_before():
    event = torch.openreg.current_stream().record_event()
    with pytest.raises(RuntimeError, match="orErrorStreamCaptureIsolation"):
        captured(lambda: torch.openreg.current_stream().wait_event(event))


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax])
def test_optimizer_that_is_not_capturable_is_refused_in_a_capture(optimizer):
    training = Training(mlp, lambda parameters: optimizer(parameters, lr=0.1))
    training.step()
    with pytest.raises(RuntimeError, match=f"{optimizer.__name__} but param_groups' capturable"):
        captured(training.step)
    training.step()


def test_optimizer_capture_check_of_pytorch_is_not_repeated():
    torch.openreg.init()
    check = torch.optim.Optimizer._accelerator_graph_capture_health_check
    assert hasattr(check, "__wrapped__") == (torch.__version__ < "2.15")


def test_graph_arguments_by_position_are_those_of_this_pytorch():
    every = inspect.signature(torch.cuda.graph).parameters
    values = {name: parameter.default for name, parameter in every.items()}
    values |= {"cuda_graph": torch.openreg.Graph(), "check_input_liveness": True}
    assert torch.openreg.graph(*values.values()).check_input_liveness is True
    values |= {"enable_annotations": True}
    with pytest.raises(NotImplementedError, match="enable_annotations=True"):
        torch.openreg.graph(*values.values())


@pytest.mark.skipif(torch.__version__ < "2.14", reason="takes neither")
def test_make_graphed_callables_takes_capture_options():
    x = torch.ones(3, device=DEVICE)
    f = torch.openreg.make_graphed_callables(torch.sin, (x,), capture_error_mode="relaxed")
    assert torch.equal(f(torch.zeros_like(x)), torch.zeros_like(x))
    with pytest.raises(NotImplementedError, match="enable_annotations=True"):
        torch.openreg.make_graphed_callables(torch.sin, (x,), enable_annotations=True)


def test_capture_must_end_on_the_stream_of_its_begin():
    graph = torch.openreg.Graph()
    side = torch.openreg.Stream()
    with torch.openreg.stream(side):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="must end on the stream on which it began"):
        graph.capture_end()
    with torch.openreg.stream(side):
        graph.capture_end()
    with pytest.raises(RuntimeError, match="without a capture_begin"):
        graph.capture_end()


def test_graph_that_has_a_capture_refuses_another():
    graph, _ = captured(lambda: torch.zeros(1, device=DEVICE))
    with pytest.raises(RuntimeError, match="captured already"):
        with torch.openreg.graph(graph):
            pass
    assert not torch.openreg.is_current_stream_capturing()


# ---- Memory -------------------------------------------------------------------------------------


def test_memory_freed_in_a_capture_stays_with_its_graph():
    x = torch.ones(1 << 16, device=DEVICE)
    graph, y = captured(lambda: ((x + 1) * 2).sum())
    held = [torch.full((1 << 16,), 7.0, device=DEVICE) for _ in range(16)]
    graph.replay()
    assert y.item() == 4 << 16
    assert all((t == 7).all() for t in held)


@pytest.mark.usefixtures("nothing_left")
def test_capture_reuses_memory_that_it_has_freed():
    x = torch.ones(1 << 20, device=DEVICE)

    def step():
        y = x
        for _ in range(20):
            y = y + 1
        return y

    graph = torch.openreg.Graph()
    before = torch.openreg.memory_reserved()
    with torch.openreg.graph(graph):
        y = step()
    assert torch.openreg.memory_reserved() - before <= 6 * y.nbytes  # of 20
    graph.replay()
    assert y[0].item() == 21


@pytest.mark.usefixtures("nothing_left")
def test_graph_memory_is_returned_with_the_graph():
    torch.openreg.empty_cache()
    before = torch.openreg.memory_reserved()

    def program():
        x = torch.ones(1 << 20, device=DEVICE)
        graph, y = captured(lambda: x + 1)
        graph.replay()
        torch.openreg.synchronize()
        torch.openreg.empty_cache()  # leaves what a graph needs
        x.fill_(2)
        graph.replay()
        assert y.sum().item() == 3 << 20

    program()
    torch.openreg.synchronize()
    torch.openreg.empty_cache()
    assert torch.openreg.memory_reserved() == before


# ---- Tools --------------------------------------------------------------------------------------


@pytest.mark.racy
def test_sanitizer_sees_each_replay():
    x, side = torch.zeros(100, device=DEVICE), torch.openreg.Stream()
    DataRaceError = torch.openreg.sanitizer.DataRaceError
    with torch.openreg.sanitizer.enable():
        graph, _ = captured(lambda: x.mul(2))
        assert not torch.openreg.sanitizer.reports()
        for _ in range(2):
            torch.openreg.synchronize()
            with torch.openreg.stream(side):
                graph.replay()
            with pytest.raises(DataRaceError, match=r"\(mul\)"):
                x.fill_(3)
        side.synchronize()
        x.fill_(3)


def test_profile_of_a_replay_names_its_kernels():
    """By the names of the calls, in the process's first call of a kind as in later ones."""
    activities = torch.profiler.ProfilerActivity.PrivateUse1, torch.profiler.ProfilerActivity.CPU
    for _ in range(2):
        x = torch.zeros(617, device=DEVICE)  # no other test's size
        graph, _ = captured(lambda x=x: x.mul(2).add_(1))
        with torch.profiler.profile(activities=activities) as profile:
            graph.replay()
            graph.replay()
            torch.openreg.synchronize()
        names = [event.name for event in profile.events() if event.name.startswith("aten::")]
        assert names == ["aten::mul", "aten::add_"] * 2


@pytest.mark.racy
def test_node_of_a_replay_is_not_counted_when_it_is_split():
    x = torch.zeros(4, device=DEVICE)
    graph, _ = captured(lambda: x.add_(1))
    torch.openreg.synchronize()
    torch.openreg.fallback_stats(reset=True)
    for seed in range(20):
        with torch.openreg.testing.schedule(seed=seed):
            graph.replay()
            torch.openreg.synchronize()
    assert "aten::add_.Tensor" not in torch.openreg.fallback_stats()
    assert x.tolist() == [20] * 4


def test_kernel_of_a_graph_warns_once(request):
    request.addfinalizer(lambda: torch.set_warn_always(False))
    expanded, index = torch.ones(1, device=DEVICE).expand(3), torch.arange(2, device=DEVICE)
    expanded.index_fill_(0, index, 1)
    torch.openreg.synchronize()
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        graph, _ = captured(lambda: expanded.index_fill_(0, index, 1))
        for _ in range(3):
            graph.replay()
            torch.openreg.synchronize()
    assert ["on expanded tensors is deprecated" in str(w.message) for w in found] == [True]


def test_replay_reports_a_kernels_error_and_can_be_repeated():
    x, index = torch.zeros(4, device=DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE)
    graph, y = captured(lambda: x.index_select(0, index) + 1)
    index.fill_(9)
    graph.replay()
    with pytest.raises(IndexError):
        torch.openreg.synchronize()
    index.fill_(3)
    graph.replay()
    assert y.item() == 1


def test_device_lost_in_a_replay_is_reported():
    x = torch.zeros(4, device=DEVICE)
    graph, y = captured(lambda: torch.rand(4, device=DEVICE))
    with torch.openreg.testing.inject("device_lost", after=1):
        with pytest.raises(torch.AcceleratorError):
            graph.replay()
            graph.replay()  # the device may be lost by now
            torch.openreg.synchronize()
    torch.openreg.reset()
    torch.manual_seed(9)
    graph.replay()
    torch.manual_seed(9)
    assert x.numel() == 4 and torch.equal(y.cpu(), torch.rand(4, device=DEVICE).cpu())


# ---- Life ---------------------------------------------------------------------------------------


def test_is_current_stream_capturing_is_true_in_a_capture_only():
    side = torch.openreg.Stream()
    found = []
    graph, _ = captured(lambda: found.append(torch.openreg.is_current_stream_capturing()))
    with torch.openreg.stream(side):
        graph = torch.openreg.Graph()
        graph.capture_begin()
        assert side.is_capturing() and torch.openreg.is_current_stream_capturing()
        graph.capture_end()
    assert found == [True] and not side.is_capturing()


def test_graph_keeps_pinned_memory_of_its_copies():
    x = torch.zeros(1 << 16, device=DEVICE)
    graph, _ = captured(lambda: x.copy_(torch.ones(1 << 16).pin_memory(), non_blocking=True))
    others = [torch.zeros(1 << 16).pin_memory() for _ in range(4)]
    graph.replay()
    assert x.sum().item() == 1 << 16 and len(others) == 4


def test_replays_in_flight_outlive_the_graph():
    x = torch.zeros(1000, device=DEVICE)
    graph, y = captured(lambda: x.add_(torch.ones(1000, device=DEVICE)))
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        for _ in range(5):
            graph.replay()
        graph.reset()
        del graph, y
        gc.collect()
    assert x.tolist() == [5] * 1000


@contextlib.contextmanager
def begun(graph, **options):
    """A capture that an error of the body ends, so that later tests do not meet it."""
    graph.capture_begin(**options)
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        raise


def test_threads_capture_at_once():
    def program(number, results, barrier):
        side = torch.openreg.Stream()
        graph = torch.openreg.Graph()
        with torch.openreg.stream(side):
            x = torch.zeros(100, device=DEVICE)
            for _ in range(20):
                barrier.wait()
                with begun(graph):
                    barrier.wait()
                    y = x + number
                    x.copy_(y)
                graph.capture_end()
                graph.replay()
                graph.reset()
        side.synchronize()
        results[number] = x.tolist()

    results, barrier = {}, threading.Barrier(2)
    threads = [threading.Thread(target=program, args=(i, results, barrier)) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [20] * 100, 2: [40] * 100}


def test_reset_of_the_device_cancels_its_replays():
    x = torch.zeros(4, device=DEVICE)
    graph, y = captured(lambda: torch.rand(4, device=DEVICE))
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        graph.replay()
        torch.openreg.reset()
    assert x.numel() == 4
    fresh, y = captured(lambda: torch.rand(4, device=DEVICE))
    torch.manual_seed(8)
    fresh.replay()
    torch.manual_seed(8)
    assert torch.equal(y.cpu(), torch.rand(4, device=DEVICE).cpu())


def test_reset_of_another_device_leaves_replays_alone():
    graph, y = captured(lambda: torch.rand(4, device=DEVICE))
    torch.zeros(1, device="openreg:1")
    torch.manual_seed(8)
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        graph.replay()
        torch.openreg.reset(1)
    torch.openreg.synchronize()
    torch.manual_seed(8)
    assert torch.equal(y.cpu(), torch.rand(4, device=DEVICE).cpu())


@pytest.mark.racy
def test_graph_reset_while_other_threads_replay_is_safe():
    x = torch.zeros(4, device=DEVICE)
    unknown = []

    def replay(graph, barrier):
        barrier.wait()
        try:
            while True:
                graph.replay()
        except RuntimeError as error:
            if not re.search("needs a graph that has been|is not a live graph", str(error)):
                unknown.append(error)

    for _ in range(100):
        graph, _ = captured(lambda: x + torch.rand(4, device=DEVICE))
        barrier = threading.Barrier(3)
        threads = [threading.Thread(target=replay, args=(graph, barrier)) for _ in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        graph.reset()
        for thread in threads:
            thread.join()
    assert unknown == []


def test_forked_child_may_drop_graphs_and_end_no_capture(run_ok):
    out = run_ok("""
import os, torch

def end_of(child):
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

x = torch.zeros(4, device="openreg")
graphs = [torch.openreg.Graph()]
with torch.openreg.graph(graphs[0]):
    x += torch.rand(4, device="openreg")
print(end_of(graphs.clear), end_of(graphs[0].reset))
again = torch.openreg.Graph()
context = torch.openreg.graph(again)
context.__enter__()
x += 1

def end_capture():
    try:
        again.capture_end()
    except RuntimeError as error:
        assert "forked subprocess" in str(error), error

print(end_of(again.reset), end_of(end_capture))
context.__exit__(None, None, None)
again.replay()
print(x.tolist())
""")
    assert out == "0 0\n0 0\n[1.0, 1.0, 1.0, 1.0]\n"


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.slow
def test_ten_thousand_captures_leave_no_memory_behind():
    x = torch.zeros(1000, device=DEVICE)

    def capture():
        graph, _ = captured(lambda: (x + 1) * torch.rand(1000, device=DEVICE))
        graph.replay()

    for _ in range(10):
        capture()
    torch.openreg.synchronize()
    torch.openreg.empty_cache()
    before = torch.openreg.memory_stats()
    for _ in range(10_000):
        capture()
    torch.openreg.synchronize()
    torch.openreg.empty_cache()
    after = torch.openreg.memory_stats()
    for name in "allocated_bytes", "reserved_bytes", "active", "segment":
        assert after[f"{name}.all.current"] == before[f"{name}.all.current"], name


def test_pool_of_one_capture_is_not_that_of_the_next():
    handle = torch.openreg.graph_pool_handle()
    graph = torch.openreg.Graph()
    pools = []
    for pool in handle, None:
        with torch.openreg.graph(graph, pool=pool):
            torch.zeros(4, device=DEVICE)
        pools.append(graph.pool())
        graph.reset()
    assert pools[0] == handle and pools[1] != handle


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_another_thread_ends_a_relaxed_capture_alone(mode):
    side, graph, x, errors = torch.openreg.Stream(), torch.openreg.Graph(), [], []

    def end():
        with torch.openreg.stream(side):
            try:
                graph.capture_end()
            except RuntimeError as error:
                errors.append(str(error))

    with torch.openreg.stream(side):
        with begun(graph, capture_error_mode=mode):
            x.append(torch.ones(4, device=DEVICE))
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    if mode != "relaxed":
        assert 'only the mode "relaxed"' in errors.pop()
        with torch.openreg.stream(side):
            graph.capture_end()
    graph.replay()
    assert x[0].tolist() == [1.0] * 4 and not errors
