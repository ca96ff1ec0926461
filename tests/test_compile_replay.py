"""torch.compile(mode="reduce-overhead"): compiled graphs, captured and replayed."""

import copy

import pytest
import torch
from torch import nn
from torch.openreg import sanitizer

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
def test_training_by_replays_has_the_values_of_compiled_training(replays):
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.3), nn.Flatten(), nn.Linear(288, 4)
    ours = nn.Sequential(*layers).to(DEVICE)
    theirs = copy.deepcopy(ours)
    expected = train(torch.compile(theirs), theirs)
    torch._dynamo.reset()
    torch.testing.assert_close(train(compiled(ours), ours), expected, rtol=0, atol=0)
    assert len(replays) >= 16  # ten forward and ten backward passes, but the first


def test_an_output_keeps_its_values(replays):
    double = compiled(lambda x: x * 2)
    made = [double(torch.full((4,), float(i), device=DEVICE)) for i in range(5)]
    assert [m[0].item() for m in made] == [0, 2, 4, 6, 8]
    assert len(replays) == 4


def test_what_is_written_in_place_and_given_back_is_the_callers(replays):
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
def test_each_size_has_a_graph(replays):
    total = compiled(lambda x: x.sin().sum(), dynamic=True)
    for n in (3, 3, 3, 5, 5, 5, 3, 5):
        assert total(torch.zeros(n, device=DEVICE) + n).item() == pytest.approx(
            n * torch.tensor(float(n)).sin().item(), rel=1e-5
        )
    assert (len(replays), len(set(replays))) == (6, 2)


@pytest.mark.slow
def test_each_stream_has_a_graph(replays):
    double, x = compiled(lambda x: x * 2), torch.ones(4, device=DEVICE)
    side = torch.openreg.Stream()
    for stream in (torch.openreg.current_stream(), side):
        with stream:
            for _ in range(3):
                double(x)
    side.synchronize()
    assert (len(replays), len(set(replays))) == (4, 2)


@pytest.mark.slow
def test_a_graph_of_another_device_than_the_current_one(replays):
    double, x = compiled(lambda x: x * 2), torch.ones(4, device="openreg:1")
    assert [double(x + i)[0].item() for i in range(4)] == [2, 4, 6, 8]
    assert len(replays) == 3
    assert torch.openreg.current_device() == 0


@pytest.mark.slow
def test_numbers_of_the_cpu_are_read_at_each_call(replays):
    scale = compiled(lambda x, s: x * s)
    x = torch.ones(4, device=DEVICE)
    assert [scale(x, torch.tensor(float(i)))[0].item() for i in range(4)] == [0, 1, 2, 3]
    assert replays == []


@pytest.mark.slow
def test_what_cannot_be_captured_runs_each_time(replays):
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
def test_a_part_of_a_graph_of_the_callers(replays):
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
def test_random_numbers_go_on(replays):
    noise, x = compiled(lambda x: x + torch.rand_like(x)), torch.zeros(8, device=DEVICE)
    torch.manual_seed(0)
    drawn = [noise(x) for _ in range(4)]
    torch.manual_seed(0)
    assert len({tuple(d.tolist()) for d in drawn}) == 4
    assert all(torch.equal(noise(x), d) for d in drawn)
    assert len(replays) == 7


@pytest.mark.racy
def test_a_missing_wait_before_a_replay_is_reported(replays):
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
