"""torch.compile(mode="reduce-overhead"): compiled graphs, captured and replayed."""

import contextlib
import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import forks
import pytest
import torch
from torch import nn
from torch.openreg import sanitizer, testing

DEVICE = "openreg"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def replays(monkeypatch):
    """The graphs that were replayed, once for each time."""
    replayed, replay = [], torch.openreg.Graph.replay

    def counted(graph):
        replayed.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.openreg.Graph, "replay", counted)
    return replayed


def pool_ids():
    """Of the private pools that have memory."""
    return {s["segment_pool_id"] for s in torch.openreg.memory_snapshot()} - {(0, 0)}


@pytest.fixture
def pools():
    """Those that the test has made."""
    torch.openreg.synchronize()
    before = pool_ids()
    return lambda: pool_ids() - before


def compiled(function, **options):
    return torch.compile(function, mode="reduce-overhead", **options)


def train(function, model):
    """The losses of ten steps, each with a batch at another address."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(4, 3, 8, 8, device=DEVICE) for _ in range(10)]
    losses = []
    for batch in batches:
        loss = function(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [buffer.cpu() for buffer in model.buffers()]


@pytest.mark.slow
def test_replayed_training_has_the_values_of_compiled_training(replays):
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.3), nn.Flatten(), nn.Linear(288, 4)
    ours = nn.Sequential(*layers).to(DEVICE)
    theirs = copy.deepcopy(ours)
    expected = train(torch.compile(theirs), theirs)
    torch._dynamo.reset()
    torch.testing.assert_close(train(compiled(ours), ours), expected, rtol=0, atol=0)
    assert len(replays) >= 16  # ten forward and ten backward passes, but the first


def test_replay_output_keeps_its_values(replays):
    double = compiled(lambda x: x * 2)
    made = [double(torch.full((4,), float(i), device=DEVICE)) for i in range(5)]
    assert [m[0].item() for m in made] == [0, 2, 4, 6, 8]
    assert len(replays) == 4


def test_replay_returns_the_callers_tensor_written_in_place(replays):
    @compiled
    def add(total, x):
        total.add_(x)
        return total, total[:2], x * 2

    total, one = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
    for _ in range(4):
        same, part, _ = add(total, one)
    assert total.tolist() == [4.0] * 4
    assert same.data_ptr() == part.data_ptr() == total.data_ptr()
    assert len(replays) == 3
    other = torch.zeros(4, device=DEVICE)
    add(other, one)  # at another address: a graph would write the one of before
    assert (other[0].item(), total[0].item(), len(replays)) == (1.0, 4.0, 3)


@pytest.mark.slow
def test_replay_has_a_graph_for_each_size(replays):
    total = compiled(lambda x: x.sin().sum(), dynamic=True)
    for n in (3, 3, 3, 5, 5, 5, 3, 5):
        assert total(torch.zeros(n, device=DEVICE) + n).item() == pytest.approx(
            n * torch.tensor(float(n)).sin().item(), rel=1e-5
        )
    assert (len(replays), len(set(replays))) == (6, 2)


@pytest.mark.slow
def test_replay_has_a_graph_for_each_stream(replays):
    double, x = compiled(lambda x: x * 2), torch.ones(4, device=DEVICE)
    side = torch.openreg.Stream()
    for stream in (torch.openreg.current_stream(), side):
        with stream:
            for _ in range(3):
                double(x)
    side.synchronize()
    assert (len(replays), len(set(replays))) == (4, 2)


@pytest.mark.slow
def test_replay_works_on_another_device_than_the_current_one(replays):
    double, x = compiled(lambda x: x * 2), torch.ones(4, device="openreg:1")
    assert [double(x + i)[0].item() for i in range(4)] == [2, 4, 6, 8]
    assert len(replays) == 3
    assert torch.openreg.current_device() == 0


@pytest.mark.slow
def test_replay_reads_cpu_numbers_at_each_call(replays):
    scale = compiled(lambda x, s: x * s)
    x = torch.ones(4, device=DEVICE)
    assert [scale(x, torch.tensor(float(i)))[0].item() for i in range(4)] == [0, 1, 2, 3]
    assert replays == []


@pytest.mark.slow
def test_function_that_cannot_be_captured_runs_each_time(replays):
    calls = []

    @torch.library.custom_op("openreg_tests::waits", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.sum().item())
        return x.clone()

    waits.register_fake(torch.empty_like)
    function, x = compiled(lambda x: waits(x) * 2), torch.ones(4, device=DEVICE)
    before = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert [function(x + i)[0].item() for i in range(4)] == [2, 4, 6, 8]
    assert (replays, calls) == ([], [4, 8, 12, 16])
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] > before


@pytest.mark.slow
def test_compiled_call_in_a_callers_capture_is_part_of_its_graph(replays):
    double, x = compiled(lambda x: x * 2), torch.ones(4, device=DEVICE)
    double(x), double(x)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        made = double(x)
    x.fill_(3)
    graph.replay()
    assert made.tolist() == [6.0] * 4
    assert len(replays) == 2


@pytest.mark.slow
def test_replay_draws_new_random_numbers(replays):
    noise, x = compiled(lambda x: x + torch.rand_like(x)), torch.zeros(8, device=DEVICE)
    torch.manual_seed(0)
    drawn = [noise(x) for _ in range(4)]
    torch.manual_seed(0)
    assert len({tuple(d.tolist()) for d in drawn}) == 4
    assert all(torch.equal(noise(x), d) for d in drawn)
    assert len(replays) == 7


@pytest.mark.racy
def test_missing_wait_before_a_replay_is_reported(replays):
    double = compiled(lambda x: x * 2)
    with sanitizer.enable():
        x, side = torch.ones(4, device=DEVICE), torch.openreg.Stream()
        side.wait_stream(torch.openreg.current_stream())
        with torch.openreg.stream(side):
            for _ in range(3):
                double(x)
        torch.openreg.synchronize()
        x.add_(1)
        with (
            torch.openreg.stream(side),
            pytest.raises(sanitizer.DataRaceError, match=r"test_compile_replay\.py"),
        ):
            double(x)
        torch.openreg.synchronize()
    assert len(replays) == 3


@pytest.mark.slow
@pytest.mark.racy
def test_sanitizer_sees_replays_captured_without_it(replays):
    double, side = compiled(lambda x: x * 2), torch.openreg.Stream()
    for _ in range(3):
        double(torch.ones(4, device=DEVICE))
    with sanitizer.enable():
        x = torch.ones(4, device=DEVICE)
        for _ in range(3):
            double(x)
        torch.openreg.synchronize()
        with torch.openreg.stream(side):
            x.add_(1)
        with pytest.raises(sanitizer.DataRaceError, match=r"test_compile_replay\.py"):
            double(x)
        torch.openreg.synchronize()
    double(x)
    assert len(replays) == 6


@pytest.mark.slow
def test_replay_output_can_be_written_in_place(replays):
    layer = nn.Linear(4, 4).to(DEVICE)
    function = compiled(layer)
    for _ in range(4):
        nn.functional.relu_(function(torch.randn(2, 4, device=DEVICE))).sum().backward()
    assert len(replays) == 6


@pytest.mark.slow
def test_replay_outputs_that_share_memory_share_it_in_each_call(replays):
    @compiled
    def parts(x):
        made = x * 2
        return made, made[1:], made.t(), made

    for _ in range(4):
        made, below, turned, same = parts(torch.randn(3, 3, device=DEVICE))
        made.add_(1)
        assert same is made
        assert torch.equal(below, made[1:])
        assert torch.equal(turned, made.t())
    assert len(replays) == 3


@pytest.mark.slow
def test_replay_keeps_conjugated_outputs(replays):
    def views(x):
        y = x * 2
        return y.conj(), x.conj(), y.conj().imag

    f = compiled(views)
    for _ in range(4):
        x = torch.randn(4, dtype=torch.complex64).to(DEVICE)
        for made, right in zip(f(x), views(x), strict=True):
            assert made.is_conj() == right.is_conj()
            torch.testing.assert_close(made.cpu(), right.cpu())
    assert replays


@pytest.mark.filterwarnings("error:this graph is empty")
def test_function_without_kernels_gives_views(replays):
    views = compiled(lambda x: (torch.view_as_complex(x), x[1:], torch.empty_like(x)))
    x = torch.arange(4.0, device=DEVICE).view(2, 2)
    for _ in range(3):
        numbers, rest, empty = views(x)
        assert (numbers.tolist(), rest.tolist()) == ([1j, 2 + 3j], [[2, 3]])
        assert empty.shape == (2, 2)
    assert not replays


def test_graph_regions_inside_of_a_graph_replay(replays):
    """A region of a graph is replayed with it; for a choice that data make the host waits."""

    @torch.compiler.nested_compile_region
    def region(x):
        return x.sin() + 1

    def choose(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    x = torch.ones(3, device=DEVICE)
    twice, chosen = compiled(lambda x: region(region(x))), compiled(choose)
    for i in range(4):
        x.fill_(i + 1)
        torch.testing.assert_close(twice(x), (x.sin() + 1).sin() + 1)
    assert len(replays) == 3
    for i in range(-2, 3):
        x.fill_(i)
        assert chosen(x).tolist() == [i + 1 if i > 0 else i - 1] * 3
    assert len(replays) == 3


@pytest.mark.slow
def test_replay_returns_an_input_as_another_type(replays):
    def length(weight):
        return torch.view_as_real(weight) * torch.view_as_real(weight).sin()

    function = compiled(length)
    for _ in range(4):
        ours = torch.randn(4, dtype=torch.complex64, device=DEVICE, requires_grad=True)
        theirs = ours.detach().cpu().requires_grad_()
        function(ours).sum().backward()
        length(theirs).sum().backward()
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
    assert len(replays) == 6


@pytest.mark.slow
def test_replay_returns_a_saved_tensor_as_a_gradient(replays):
    """The backward pass writes what the forward one saved, and gives it back."""

    def residual(x, weight, skip):
        return (x @ weight + skip).sin()

    function, kept = compiled(residual), []
    for _ in range(4):
        ours = [torch.randn(8, 8, device=DEVICE, requires_grad=True) for _ in range(3)]
        theirs = [t.detach().cpu().requires_grad_() for t in ours]
        made = function(*ours)
        kept += [torch.empty(8, 8, device=DEVICE), made]  # so that the next one lies elsewhere
        made.square().sum().backward()
        residual(*theirs).square().sum().backward()
        for mine, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad.cpu(), its.grad)
    assert len(replays) == 6


@pytest.mark.slow
def test_error_of_an_earlier_call_reaches_the_caller(replays):
    double = compiled(lambda x, i: x[i] * 2)
    x, beyond = torch.arange(4.0, device=DEVICE), torch.tensor([0, 9], device=DEVICE)
    double(x, beyond)
    with pytest.raises(RuntimeError, match="index out of bounds"):
        double(x, beyond * 0)
    assert [double(x, beyond * 0).tolist() for _ in range(2)] == [[0, 0]] * 2
    assert len(replays) == 2  # and is no refusal


@pytest.mark.slow
def test_replay_computes_on_the_cpu_at_each_call(replays):
    noise, x = compiled(lambda x: (x * torch.rand(()), torch.rand(3))), torch.ones(4, device=DEVICE)
    drawn = [noise(x) for _ in range(4)]
    assert len({scaled[0].item() for scaled, _ in drawn}) == 4
    assert len({beside[0].item() for _, beside in drawn}) == 4
    assert replays == []


@pytest.mark.slow
def test_captures_of_two_threads_do_not_end_each_other(replays):
    captures, both = [], threading.Barrier(2)

    @torch.library.custom_op("openreg_tests::slow", mutates_args=())
    def slow(x: torch.Tensor) -> torch.Tensor:
        if torch.openreg.is_current_stream_capturing():
            captures.append(threading.get_ident())
            time.sleep(0.2)
        return x.clone()

    slow.register_fake(torch.empty_like)
    function, x = compiled(lambda x: slow(x) * 2), torch.ones(4, device=DEVICE)
    function(x)

    def calls():
        function(x)
        both.wait(20)
        return [function(x)[0].item() for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(calls) for _ in range(2)]
        assert [d.result(60) for d in done] == [[2, 2]] * 2
    assert len(set(captures)) == 2
    assert len(replays) == 4


@pytest.mark.slow
def test_compiler_reset_drops_the_graphs(replays, pools):
    function = compiled(lambda x: x @ x)
    for _ in range(3):
        function(torch.randn(64, 64, device=DEVICE))
    assert (len(replays), len(pools())) == (2, 1)
    for _ in range(2):
        replays.clear()
        torch.compiler.reset()
        torch.openreg.synchronize()
        assert not pools()
        function(torch.randn(64, 64, device=DEVICE))
        assert replays == []
        function(torch.randn(64, 64, device=DEVICE))
        assert len(pools()) == 1


# ---- Streams and events in a graph ----

QUICK = {"events of the program", "a stream inside a stream", "no join"}
FORKS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in forks.made(DEVICE)
]


@pytest.mark.parametrize("name", FORKS)
def test_forks_are_replayed_or_refused(name, replays):
    forks.check(compiled, forks.made(DEVICE)[name], DEVICE)
    assert len(replays) == (0 if name in forks.REFUSED else 8)


@pytest.mark.slow
def test_forks_are_replayed_by_cudas_name(run_ok):
    run_ok(
        """
        import logging
        import torch, torch_openreg
        torch_openreg.as_cuda()
        import forks
        logging.disable()  # graphs that are refused
        replays, replay = [], torch.cuda.CUDAGraph.replay
        torch.cuda.CUDAGraph.replay = lambda graph: (replays.append(graph), replay(graph))
        for name, function in forks.made("cuda").items():
            replays.clear()
            compiled = lambda f: torch.compile(f, mode="reduce-overhead")
            forks.check(compiled, function, "cuda")
            assert len(replays) == (0 if name in forks.REFUSED else 8), name
        """
    )


def test_replay_follows_the_programs_streams_and_events(replays):
    side, third = torch.openreg.Stream(), torch.openreg.Stream()
    given, made = torch.openreg.Event(), torch.openreg.Event()

    @compiled
    def forked(x, y):
        main = torch.accelerator.current_stream()
        side.wait_stream(main)
        with side:
            twice = x * 2
        main.wait_stream(side)
        given.wait()
        total = twice + y
        made.record()
        return total, twice

    x, y = (torch.zeros(4, device=DEVICE) for _ in range(2))
    torch.openreg.synchronize()
    for i in range(4):
        with testing.gate() as gate:
            gate.wait(side)
            with side:
                x.fill_(i)
            gate.wait(third)
            with third:
                y.fill_(10 * i)
                given.record()
            if i == 1:
                gate.open()  # a capture waits for the device
            total, twice = forked(x, y)
            assert i == 1 or not made.query()
            with side:
                four_times = twice * 2
            third.wait_event(made)
            with third:
                more = total + 1
        torch.openreg.synchronize()
        assert [t[0].item() for t in (total, twice, four_times, more)] == [
            12 * i,
            2 * i,
            4 * i,
            12 * i + 1,
        ]
    assert len(replays) == 3


# ---- Memory ----

MIB = 1 << 20


def close(made, expected):
    """Fused kernels round in another order."""
    torch.testing.assert_close([t.cpu() for t in made], list(expected), rtol=1e-4, atol=1e-3)


def chain(x):
    y = x.sin()
    return (y @ y.t()) @ y, y.sum()


@pytest.fixture
def limited():
    """Sets how much more of the device's memory may be held than is now."""

    def limit(mebibytes):
        torch.openreg.synchronize()
        torch.openreg.empty_cache()
        total = torch.openreg.get_device_properties(0).total_memory
        allowed = torch.openreg.memory_reserved() + mebibytes * MIB
        torch.openreg.set_per_process_memory_fraction(allowed / total)

    yield limit
    torch.openreg.set_per_process_memory_fraction(1.0)


def test_graphs_of_a_function_share_a_pool(replays, pools):
    """With the values of each: inputs that move, outputs that are kept, sizes in turn."""
    function = compiled(chain, dynamic=True)
    kept = []
    for _ in range(3):
        for rows in range(8, 16):
            x = torch.randn(rows, 1024)
            given = x.to(DEVICE)
            kept.append((chain(x), function(given), given))  # so that every input moves
    for expected, made, _ in kept:
        close(made, expected)
    assert (len(replays), len(set(replays))) == (16, 8)
    assert len(pools()) == 1


@pytest.mark.slow
def test_graphs_that_nothing_orders_share_no_pool(replays, pools):
    """Those of other functions, streams and threads."""
    first, second = compiled(lambda x: x * 2), compiled(lambda x: x * 3)
    x, side = torch.ones(4, device=DEVICE), torch.openreg.Stream()
    torch.openreg.synchronize()

    def three_times(function):
        return [function(x)[0].item() for _ in range(3)]

    assert three_times(first) == [2.0] * 3
    assert three_times(second) == [3.0] * 3
    with torch.openreg.stream(side):
        assert three_times(first) == [2.0] * 3
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(three_times, first).result(60) == [2.0] * 3
        assert len(pools()) == 4
    assert len(set(replays)) == 4


def test_graphs_give_way_where_memory_is_short(replays, limited, pools):
    """Those of this mode alone, to be captured again; the program's own stay."""
    limited(100)
    refused = torch.openreg.memory_stats()["num_ooms"]
    first, second = compiled(chain), compiled(lambda x: chain(x * 2))
    own, x = torch.openreg.Graph(), torch.randn(8, 2048).to(DEVICE)
    with torch.openreg.graph(own):
        tripled = x * 3
    expected = chain(x.cpu()), chain(x.cpu() * 2)

    def check():
        for _ in range(3):
            for function, right in zip((first, second), expected, strict=True):
                close(function(x), right)

    check()
    assert len(replays) == 4
    graphs = set(replays)
    assert len(pools()) == 3
    large = torch.empty(50 * MIB, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(50 * MIB, dtype=torch.uint8, device=DEVICE)
    assert len(pools()) == 1  # the program's
    del large
    check()
    assert len(set(replays) - graphs) == 2
    own.replay()
    torch.testing.assert_close(tripled, x * 3)
    # Of two that are not in use, the one that has not been for longer gives way first.
    replays.clear()
    first(x)
    large = torch.empty(50 * MIB, dtype=torch.uint8, device=DEVICE)
    first(x)
    assert len(set(replays)) == 1
    assert torch.openreg.memory_stats()["num_ooms"] == refused + 1
    del large


@pytest.mark.slow
def test_step_that_fits_only_without_its_graphs_runs(replays, limited):
    """The copies of its outputs do not fit beside the pool. What it writes in place is written
    once for each call."""

    @compiled
    def step(total, x):
        total.add_(1)
        return x.expand(40 * MIB).clone(), total * 2

    limited(100)
    total, x = torch.zeros(4, device=DEVICE), torch.ones(1, dtype=torch.uint8, device=DEVICE)
    for i in range(1, 6):
        large, twice = step(total, x)
        assert (large[-1].item(), total[0].item(), twice[0].item()) == (1, i, 2 * i)
        del large
        if i == 3:
            hold = torch.empty(30 * MIB, dtype=torch.uint8, device=DEVICE)
    assert len(replays) == 2
    del hold


def test_replay_is_right_while_another_thread_is_short_of_memory(replays, limited):
    """While the owner of the graphs replays them, again and again."""
    limited(100)
    function, x = compiled(chain, dynamic=True), torch.randn(8, 2048).to(DEVICE)
    expected = chain(x.cpu())
    stop = threading.Event()

    def takes():
        while not stop.wait(0.001):
            with contextlib.suppress(torch.OutOfMemoryError):  # the pool is in use
                torch.empty(85 * MIB, dtype=torch.uint8, device=DEVICE)

    with ThreadPoolExecutor(1) as executor:
        taken = executor.submit(takes)
        try:
            for _ in range(60):
                try:
                    made = function(x)
                except torch.OutOfMemoryError:  # the other one has it all
                    continue
                close(made, expected)
        finally:
            stop.set()
        taken.result(60)
    assert replays


@pytest.mark.slow
def test_memory_that_a_captured_call_keeps_is_not_shared(replays):
    """A custom operator keeps what it has made in a capture."""
    kept = []

    @torch.library.custom_op("openreg_tests::keeps", mutates_args=())
    def keeps(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x + kept[-1]

    keeps.register_fake(torch.empty_like)
    function = compiled(lambda x: keeps(x) + 1, dynamic=True)
    for _ in range(3):
        for size in (5, 7, 9):
            x = torch.full((size,), float(size), device=DEVICE)
            assert function(x).tolist() == [size * 3.0 + 1] * size
    assert replays
    captures = [k for k in kept if k.numel() == 5]
    torch.openreg.synchronize()
    assert captures[-1].tolist() == [10.0] * 5


@pytest.mark.slow
def test_compiled_call_inside_of_a_replay_runs(replays, monkeypatch):
    """As a finalizer's may, between the replay and the copies of its outputs."""
    function, x = compiled(lambda x: x + 1), torch.zeros(4, device=DEVICE)
    other = torch.ones(4, device=DEVICE)
    for _ in range(3):
        function(x)
    replay, inner = torch.openreg.Graph.replay, []

    def nested(graph):
        replay(graph)
        if not inner:
            inner.append(None)
            inner.append(function(other))

    monkeypatch.setattr(torch.openreg.Graph, "replay", nested)
    assert function(x).tolist() == [1.0] * 4
    assert inner[1].tolist() == [2.0] * 4
