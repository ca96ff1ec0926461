"""``debug_dump``: a graph as DOT, and as a picture."""

import itertools
import re
import warnings
from xml.etree import ElementTree

import pytest
import torch

from torch_openreg.openreg import _graph_pictures

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
def test_debug_dump_has_nodes_streams_and_edges(tmp_path, kind):
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
    titles = [title.text for title in picture.iterfind(f"{SVG}g/{SVG}title")]
    assert {re.sub(r"[.,].*", "", title) for title in titles} == {
        f"{i} {name}" for i, name in names.items()
    }
    assert len(list(picture.iter(f"{SVG}path"))) == len(wanted)
    assert picture.get("role") == "img" and picture.find(f"{SVG}desc").text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step.dot", "step.svg"]


def test_graph_replays_after_debug_dump(tmp_path):
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


def test_debug_dump_needs_debug_mode_or_a_kept_graph(tmp_path):
    path = tmp_path / "step.dot"
    with pytest.warns(UserWarning, match=r"step\.dot.*enable_debug_mode"):
        fork_and_join(torch.openreg.Graph()).debug_dump(str(path))
    assert list(tmp_path.iterdir()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fork_and_join(torch.openreg.Graph(keep_graph=True)).debug_dump(str(path))
    assert path.exists()


def test_debug_dump_names_what_is_wrong_with_a_path(tmp_path):
    graph = debugged(torch.openreg.Graph)
    with pytest.raises(RuntimeError, match="has been captured"):
        graph.debug_dump(str(tmp_path / "step.dot"))
    fork_and_join(graph)
    missing = tmp_path / "no such place" / "step.dot"
    with pytest.raises(
        RuntimeError, match=rf"{re.escape(str(missing))}(?s:.*)No such file or directory"
    ):
        graph.debug_dump(str(missing))
    with pytest.raises(RuntimeError, match=r"step\.svg.*name the DOT file"):
        graph.debug_dump(str(tmp_path / "step.svg"))
    assert list(tmp_path.iterdir()) == []


def drawn(tmp_path, nodes, edges):
    """The picture of a graph of nodes (name, stream) in DOT as the core writes it."""
    lines = ["digraph graph_of_openreg {", '  comment="device 1";', "  rankdir=LR;"]
    for stream in range(3):
        lines += [f"  subgraph cluster_{stream} {{", f'    label="stream {stream}";']
        lines += [
            f'    n{i} [label="{i} {name}\\nkernel", fillcolor="#dbe9f6"];'
            for i, (name, on) in enumerate(nodes)
            if on == stream
        ]
        lines.append("  }")
    lines += [f"  n{a} -> n{b};" for a, b in edges]
    path = tmp_path / "made.dot"
    path.write_text("\n".join([*lines, "}", ""]))
    _graph_pictures.draw(str(path))
    root = ElementTree.parse(tmp_path / "made.svg").getroot()
    return root, [text.text for text in root.iter(f"{SVG}text")]


def test_graph_picture_without_nodes_names_the_device(tmp_path):
    _, texts = drawn(tmp_path, [], [])
    assert texts == [
        "graph of device 1: nodes 0, streams 3, of which 0 is the one it is launched on"
    ]


def test_graph_picture_cuts_names_and_keeps_them_in_titles(tmp_path):
    odd, fits, cut = r"a<b>&\"c\\\\x0a", "a_name_that_fills_its_box_to_the_end", "a_name_" * 8
    root, texts = drawn(tmp_path, [(odd, 0), (cut, 0), (fits, 0)], [(0, 1), (1, 2)])
    assert r'a<b>&"c\\x0a' in texts and fits in texts and f"{cut[:33]}..." in texts
    assert f"1 {cut}, kernel" in [title.text for title in root.iter(f"{SVG}title")]


def test_graph_picture_of_a_long_graph_is_drawn_downwards(tmp_path):
    """Its width is that of any long graph; an edge down across others is a text."""
    nodes = [("first", 0), ("on_side", 1), *[("tiny", 0)] * 3000, ("last", 0)]
    chain = [0, *range(2, 3003)]
    edges = [(0, 1), *itertools.pairwise(chain), (1, 3002)]
    root, texts = drawn(tmp_path, nodes, edges)
    assert int(root.get("width")) < 2000 and int(root.get("height")) > 3000
    assert texts.count("after 1") == 1
    assert texts.count("stream 1") == 1 and texts.count("stream 2") == 0
    assert {rect.get("class") for rect in root.iter(f"{SVG}rect")} == {"page", "box kernel"}
    kinds = [path.get("class") for path in root.iter(f"{SVG}path")]
    assert kinds.count("event") == 1 and kinds.count("order") == 3001


@pytest.mark.parametrize(
    ("name", "picture"), [("a.b.dot", "a.b.svg"), ("a", "a.svg"), ("/x.y/.a", "/x.y/.a.svg")]
)
def test_graph_picture_is_beside_the_dot_file(name, picture):
    assert _graph_pictures.picture_path(name) == picture
