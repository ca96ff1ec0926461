"""What goes wrong around a capture or a replay, and what it leaves behind."""

import gc
import threading
import warnings

import pytest
import torch
from torch.openreg import testing

DEVICE = "openreg"


@pytest.mark.parametrize("anew", [False, True])
def test_replay_that_waits_for_room_keeps_memory_over_a_reset(eventually, anew):
    side, elements = torch.openreg.Stream(), 1 << 20
    one = torch.zeros(1, device=DEVICE)
    late = torch.openreg.Graph()
    with torch.openreg.graph(late, stream=side):
        made = torch.zeros(elements, device=DEVICE)
        torch.openreg._sleep(300_000_000)
        made.add_(9)
    asks = threading.Event()

    def replay():
        with torch.openreg.stream(side):
            for _ in range(1023):  # with the gate's as many as a stream has room for
                one.add_(1)
            asks.set()
            late.replay()

    thread = threading.Thread(target=replay)
    with testing.gate() as gate:
        gate.wait(side)
        thread.start()
        asks.wait()
        eventually(lambda: "thread 'Thread-" in torch.openreg.hang_report())
        late.reset()
        del made
        if anew:  # and what lets go of the old one's memory must not take it for the new one's
            with torch.openreg.device(1), torch.openreg.graph(late):
                two = torch.ones(2, device="openreg:1") + 1
    thread.join()
    with torch.openreg.stream(torch.openreg.Stream()):
        torch.openreg.empty_cache()
        others = [torch.full((elements,), 7.0, device=DEVICE) for _ in range(4)]
        torch.openreg.synchronize()
        assert all((other == 7).all() for other in others)
    if anew:
        late.replay()
        assert two.tolist() == [2, 2]


@pytest.mark.parametrize("error", [None, ValueError])
def test_capture_that_changes_the_stream_is_not_left_open(error):
    x, graph = torch.ones(4, device=DEVICE), torch.openreg.Graph()
    before = torch.openreg.current_stream()
    captures, other = torch.openreg.Stream(), torch.openreg.Stream()
    with (
        pytest.raises(error or RuntimeError, match="mine" if error else "on which it began"),
        torch.openreg.graph(graph, stream=captures),
    ):
        x + 1
        torch.openreg.set_stream(other)
        if error:
            raise error("mine")
    assert torch.openreg.current_stream() == before
    torch.openreg.synchronize()
    with torch.openreg.graph(graph):
        y = x + 1
    graph.replay()
    assert y.tolist() == [2] * 4


def test_graph_is_of_the_current_device():
    with torch.openreg.graph(torch.openreg.Graph()):
        torch.ones(1, device=DEVICE)
    graph, x = torch.openreg.Graph(), torch.ones(2, device="openreg:1")
    with torch.openreg.device(1), torch.openreg.graph(graph):
        y = x + 1
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5, 5]


def test_captures_of_a_device_share_a_stream():
    def capture_stream(device):
        with torch.openreg.device(device):
            return torch.openreg.graph(torch.openreg.Graph()).capture_stream

    assert capture_stream(0) == capture_stream(0)
    assert capture_stream(1) != capture_stream(0) == capture_stream(0)


def test_graph_without_nodes_is_warned_of():
    x = torch.ones(2, device="openreg:1")
    torch.openreg.synchronize(1)
    with (
        pytest.warns(UserWarning, match="this graph is empty.*openreg:0"),
        torch.openreg.graph(torch.openreg.Graph()),
    ):
        x.add_(1)
    assert x.tolist() == [2, 2]  # it ran at once


@pytest.mark.parametrize("error", [UserWarning, ValueError])
def test_graph_can_be_captured_after_any_exception(error):
    x, graph = torch.ones(2, device=DEVICE), torch.openreg.Graph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error), torch.openreg.graph(graph):
            if error is ValueError:
                raise error
    with torch.openreg.graph(graph):
        y = x + 1
    graph.replay()
    assert y.tolist() == [2, 2]


def test_injected_fault_does_not_hit_the_begin_of_a_graph():
    torch.manual_seed(0)
    right = [torch.rand(2, device=DEVICE).tolist() for _ in range(3)]
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        drawn = torch.rand(2, device=DEVICE)
    torch.manual_seed(0)
    with testing.inject("kernel_error") as fault:
        graph.replay()
        with pytest.raises(RuntimeError, match="injected"):
            torch.openreg.synchronize()
    assert "graph_begin" not in fault.operation
    for numbers in right[1:]:
        graph.replay()
        assert drawn.tolist() == numbers


def test_generator_needs_no_registration_in_a_capture():
    generator = torch.Generator(DEVICE).manual_seed(3)
    right = [torch.rand(2, device=DEVICE, generator=generator).tolist() for _ in range(2)]
    graph = torch.openreg.Graph()
    graph.register_generator_state(generator)
    with torch.openreg.graph(graph):
        drawn = torch.rand(2, device=DEVICE, generator=generator)
    generator.manual_seed(3)
    for numbers in right:
        graph.replay()
        assert drawn.tolist() == numbers


def test_generator_state_from_outside_of_a_capture_is_refused():
    generator = torch.Generator(DEVICE).manual_seed(3)
    torch.rand(2, device=DEVICE, generator=generator)
    ahead = generator.get_state()
    generator.manual_seed(3)
    with (
        pytest.raises(RuntimeError, match="a state that was read in it"),
        torch.openreg.graph(torch.openreg.Graph()),
    ):
        generator.set_state(ahead)


class Canary:
    def __init__(self, ends):
        self.ends = ends

    def __del__(self):
        self.ends.append(threading.get_ident())


def test_pinned_memory_of_a_graph_ends_no_python_object_on_a_lane():
    gc.collect()
    torch.openreg.synchronize()
    torch.accelerator.empty_host_cache()
    before = torch.openreg.host_memory_stats()["active_bytes.current"]  # what other tests keep
    x, graph, ends = torch.zeros(1 << 10, device=DEVICE), torch.openreg.Graph(), []
    source = torch.ones(1 << 10).pin_memory()
    source.untyped_storage().canary = Canary(ends)
    with torch.openreg.graph(graph):
        x.copy_(source, non_blocking=True)
    del source
    with testing.gate() as gate:
        gate.wait()
        graph.replay()
        graph.reset()
    torch.openreg.synchronize()
    assert x.eq(1).all()
    torch.accelerator.empty_host_cache()  # whoever asks for such memory lets go of it
    assert ends == [threading.get_ident()]
    assert torch.openreg.host_memory_stats()["active_bytes.current"] == before
