"""``debug_dump``: a graph as DOT, and as a picture."""

import re
import warnings
from xml.etree import ElementTree

import pytest
import torch

SVG = "{http://www.w3.org/2000/svg}"
NODE = re.compile(r'n(\d+) \[label="\d+ (.*?)\\n(.*?)"')
EDGE = re.compile(r"n(\d+) -> n(\d+);")


def fork_and_join(graph):
    """Four nodes of the program's, two of them beside each other."""
    x = torch.ones(4, 4, device="openreg")
    side, captures = torch.openreg.Stream(), torch.openreg.Stream()
    torch.mm(x, x), torch.exp(x), torch.zeros_like(x)
    with torch.openreg.graph(graph, stream=captures):
        current = torch.openreg.current_stream()
        y = torch.mm(x, x)
        side.wait_stream(current)
        with torch.openreg.stream(side):
            z = torch.exp(y)
        w = torch.sin(y)
        current.wait_stream(side)
        torch.add(z, w)
    return graph


def debugged(kind):
    graph = kind()
    graph.enable_debug_mode()
    return graph


@pytest.mark.parametrize("kind", [torch.openreg.Graph, torch.accelerator.Graph])
def test_nodes_streams_and_edges(tmp_path, kind):
    graph = debugged(kind)
    if kind is torch.accelerator.Graph:
        x = torch.ones(4, 4, device="openreg")
        with torch.openreg.stream(torch.openreg.Stream()), graph:
            torch.mm(x, x).exp()
        wanted = {("openreg::graph_begin", "aten::mm"), ("aten::mm", "aten::exp")}
    else:
        fork_and_join(graph)
        wanted = {
            ("openreg::graph_begin", "aten::mm"),
            ("aten::mm", "aten::exp"),
            ("aten::mm", "aten::sin"),
            ("aten::exp", "aten::add"),
            ("aten::sin", "aten::add"),
        }
    graph.debug_dump(str(tmp_path / "step.dot"))
    dot = (tmp_path / "step.dot").read_text()
    names = {i: name.partition(".")[0] for i, name, _ in NODE.findall(dot)}
    assert {(names[a], names[b]) for a, b in EDGE.findall(dot)} == wanted
    assert dot.count("subgraph") == 1 + (kind is torch.openreg.Graph)
    picture = ElementTree.parse(tmp_path / "step.svg").getroot()
    titles = [title.text for title in picture.iter(f"{SVG}title")]
    assert {re.sub(r"[.,].*", "", title) for title in titles} == {
        f"{i} {name}" for i, name in names.items()
    }
    assert len(list(picture.iter(f"{SVG}path"))) == len(wanted)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step.dot", "step.svg"]


def test_the_graph_replays_afterwards(tmp_path):
    graph = debugged(torch.openreg.Graph)
    x = torch.ones(2, device="openreg")
    with torch.openreg.graph(graph):
        y = x + 1
    graph.debug_dump(str(tmp_path / "a.dot"))
    graph.replay()
    graph.debug_dump(str(tmp_path / "b.dot"))
    assert y.tolist() == [2, 2]
    for suffix in "dot", "svg":
        assert (tmp_path / f"a.{suffix}").read_text() == (tmp_path / f"b.{suffix}").read_text()


def test_it_wants_the_debug_mode_or_the_graph_kept(tmp_path):
    path = tmp_path / "step.dot"
    with pytest.warns(UserWarning, match=r"step\.dot.*enable_debug_mode"):
        fork_and_join(torch.openreg.Graph()).debug_dump(str(path))
    assert list(tmp_path.iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fork_and_join(torch.openreg.Graph(keep_graph=True)).debug_dump(str(path))
    assert path.exists()


def test_what_is_wrong_with_a_path_is_said(tmp_path):
    graph = debugged(torch.openreg.Graph)
    with pytest.raises(RuntimeError, match="has been captured"):
        graph.debug_dump(str(tmp_path / "step.dot"))
    fork_and_join(graph)
    missing = tmp_path / "no such place" / "step.dot"
    with pytest.raises(RuntimeError, match=f"{re.escape(str(missing))}.*No such file or directory"):
        graph.debug_dump(str(missing))
    with pytest.raises(RuntimeError, match=r"step\.svg.*name the DOT file"):
        graph.debug_dump(str(tmp_path / "step.svg"))
    assert list(tmp_path.iterdir()) == []
