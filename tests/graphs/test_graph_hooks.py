"""Hooks of graphs: their moments, their order, and what their errors do."""

import gc
import warnings
import weakref

import pytest
import torch

graphs = torch.openreg.graphs
MOMENTS = ("capture_start", "capture_end", "instantiate", "replay_start", "replay_end", "destroy")
OWN = ("capture_start", "capture_end", "post_instantiate", "replay_start", "replay_end")


@pytest.fixture
def every():
    """What the hooks of every graph are called with."""
    gc.collect()  # the graphs of other tests, which may be in cycles
    called = []
    handles = [
        getattr(graphs, f"register_graph_{moment}_hook")(
            lambda given, moment=moment: called.append((moment, given))
        )
        for moment in MOMENTS
    ]
    yield called
    for handle in handles:
        handle.remove()


def captured(graph):
    x = torch.ones(4, device="openreg")
    with torch.openreg.graph(graph):
        x + 1
    return graph


@pytest.mark.parametrize("keep", [False, True])
def test_hooks_are_called_at_each_moment_of_a_graph(every, keep):
    graph, own = torch.openreg.Graph(keep_graph=keep), []
    for moment in OWN:
        getattr(graph, f"register_{moment}_hook")(
            lambda given, moment=moment: own.append((moment, given is graph))
        )
    capturing = []
    graph.register_capture_start_hook(
        lambda _: capturing.append(torch.openreg.is_current_stream_capturing())
    )
    captured(graph)
    before = list(MOMENTS[: 2 if keep else 3])
    assert [moment for moment, _ in every] == before and capturing == [True]
    assert all(given is graph for _, given in every)
    graph.replay()
    graph.replay()
    assert [moment for moment, _ in every[:3]] == list(MOMENTS[:3])
    assert [moment for moment, _ in every[3:]] == ["replay_start", "replay_end"] * 2
    assert own == [(moment, True) for moment in [*OWN, "replay_start", "replay_end"]]
    number = graph.exec_id
    graph.reset()
    assert every.pop() == ("destroy", {number}) and graph.exec_id is None
    own.clear()
    captured(graph).replay()
    assert [moment for moment, _ in own] == list(OWN) and graph.exec_id > number
    del every[:]


def test_destroyed_graph_calls_back_and_releases_what_it_kept(every):
    class Kept:
        pass

    kept, called = Kept(), []
    gone = weakref.ref(kept)
    graph = captured(torch.openreg.Graph())
    graph.retain_object(kept)
    removed = graph.retain_object(called)
    removed.remove()
    with torch.openreg.testing.gate() as gate:
        stream = torch.openreg.Stream()
        gate.wait(stream)
        graph.register_destroy_callback(
            lambda: called.append(stream.query()), synchronize_before_release=True
        )
        with torch.openreg.stream(stream):
            graph.replay()
        del kept
        assert gone() is not None and called == []
        gate.open()
    number = graph.exec_id
    del every[:]
    del graph
    gc.collect()
    assert called == [True] and gone() is None and every == [("destroy", {number})]


def test_error_of_an_own_hook_is_the_calls_and_of_another_a_warning():
    def fails(_):
        raise KeyError("hook")

    graph = captured(torch.openreg.Graph())
    ended = []
    own = graph.register_replay_start_hook(fails)
    graph.register_replay_end_hook(lambda _: ended.append(True))
    with pytest.raises(KeyError, match="hook"):
        graph.replay()
    assert ended == []  # nothing was queued
    own.remove()
    handle = graphs.register_graph_replay_start_hook(fails)
    try:
        with pytest.warns(UserWarning, match="a hook of graphs raised KeyError: 'hook'"):
            graph.replay()
    finally:
        handle.remove()
    assert ended == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph.replay()
    torch.openreg.synchronize()


def test_export_dot_writes_the_graph_where_its_capture_ends(tmp_path):
    graph = torch.openreg.Graph()
    graph.register_capture_end_hook(graphs.export_dot(str(tmp_path / "step.dot")))
    captured(graph)
    assert "aten::add" in (tmp_path / "step.dot").read_text()
    assert "aten::add" in (tmp_path / "step.svg").read_text()


def test_cudas_names_are_these(run_ok):
    run_ok(
        """
        import torch
        for name in ("export_dot", "register_graph_replay_start_hook"):
            if hasattr(torch.cuda.graphs, name):
                ours = getattr(torch.openreg.graphs, name)
                assert getattr(torch.cuda.graphs, name) is ours
        called = []
        graph = torch.cuda.CUDAGraph()
        graph.register_capture_end_hook(called.append)
        x = torch.ones(2, device="cuda")
        with torch.cuda.graph(graph):
            x + 1
        assert called == [graph]
        """,
        {"OPENREG_AS_CUDA": "1"},
    )
