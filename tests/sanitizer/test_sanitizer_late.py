"""Operators with indices are judged by the bytes that these select, whenever their tasks run."""

import os
import subprocess
import sys

import pytest
import torch
from race_pairs import DEVICE, openreg, sanitizer, stream_pair
from torch.openreg.testing import gate, inject, schedule

pytestmark = [pytest.mark.usefixtures("watching"), pytest.mark.filterwarnings("ignore")]


def wide(index):
    return index[:, None].expand(-1, 4).contiguous()


READS = {
    "index_select": lambda table, index: table.index_select(0, index),
    "gather": lambda table, index: table.gather(0, wide(index)),
    "embedding": lambda table, index: torch.nn.functional.embedding(index, table),
    "index": lambda table, index: table[index],
    "columns": lambda table, index: table.t().index_select(1, index),
    "take": lambda table, index: table.take(index * 4),
    "embedding_bag": lambda table, index: torch.nn.functional.embedding_bag(index[None], table),
    "max_norm": lambda table, index: torch.nn.functional.embedding(index, table, max_norm=1.0),
}
WRITES = {
    "index_copy_": lambda table, index: table.index_copy_(0, index, table.new_ones(2, 4)),
    "index_put_": lambda table, index: table.index_put_((index,), table.new_ones(2, 4)),
    "index_add_": lambda table, index: table.index_add_(0, index, table.new_ones(2, 4)),
    "index_fill_": lambda table, index: table.index_fill_(0, index, 1),
    "scatter_": lambda table, index: table.scatter_(0, wide(index), 1.0),
    "scatter_add_": lambda table, index: table.scatter_add_(0, wide(index), table.new_ones(2, 4)),
    "put_": lambda table, index: table.put_(index * 4, table.new_ones(2)),
}
DELAYS = ("neither", "first", "second", "both")


def unknown(*rows):
    """Indices that the host does not have."""
    return torch.tensor(rows, device=DEVICE).add_(0)


def delay(stream):
    with stream:
        openreg._sleep(2_000_000)


def run(read, write, rows, delayed="neither"):
    """The kinds of the reports of a read of rows 0 and 5, and of a write of `rows` beside it."""
    here, side = stream_pair()
    table = torch.zeros(8, 4, device=DEVICE)
    index, other = unknown(0, 5), unknown(*rows)
    side.wait_stream(here)
    if delayed in ("first", "both"):
        delay(here)
    if delayed in ("second", "both"):
        delay(side)
    read(table, index)
    with side:
        write(table, other)
    openreg.synchronize()
    kinds = {report.kind for report in sanitizer.reports()}
    sanitizer.clear()
    return list(kinds)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
def test_indices_decide_whether_accesses_race(read, write):
    delayed = DELAYS[(list(READS).index(read) + list(WRITES).index(write)) % 4]
    assert run(READS[read], WRITES[write], (3, 7), delayed) == []
    assert run(READS[read], WRITES[write], (5, 7), delayed) == ["race"]


@pytest.mark.parametrize("delayed", DELAYS)
def test_verdict_does_not_depend_on_which_task_runs_first(delayed):
    for _ in range(10):
        assert run(READS["index"], WRITES["index_add_"], (1, 2), delayed) == []
        assert run(READS["index"], WRITES["index_add_"], (2, 5), delayed) == ["race"]


def test_elements_of_one_row_are_told_apart():
    def columns(first, second):
        def read(table, index):
            torch.gather(table, 1, torch.full_like(index[:1, None], first))

        def write(table, index):
            table.scatter_(1, torch.full_like(index[:1, None], second), 1.0)

        return run(read, write, (0, 0))

    assert columns(1, 2) == []
    assert columns(2, 2) == ["race"]

    def pairs(first, second):
        def read(table, index):
            table[index[:1], torch.full_like(index[:1], first)]

        def write(table, index):
            table[index[:1], torch.full_like(index[:1], second)] = 1

        return run(read, write, (0, 0))

    assert pairs(1, 2) == []
    assert pairs(2, 2) == ["race"]


def test_many_columns_are_told_apart():
    """More pairs of them than are compared one by one."""

    def kinds(odd):
        here, side = stream_pair()
        table = torch.zeros(8, 8192, device=DEVICE)
        first = torch.arange(600, device=DEVICE).mul_(2)
        second = torch.arange(600, device=DEVICE).mul_(2).add_(odd)
        side.wait_stream(here)
        table.index_select(1, first)
        with side:
            table.index_fill_(1, second, 1)
        openreg.synchronize()
        found = [report.kind for report in sanitizer.reports()]
        sanitizer.clear()
        return found

    assert kinds(1) == []
    assert kinds(0) == ["race"]


def test_more_indices_than_are_read_stay_a_possible_race():
    def read(table, index):
        table.index_select(0, index.repeat(3000))

    assert run(read, WRITES["index_fill_"], (3, 7)) == ["possible race"]


def test_late_race_is_raised_by_a_later_call_with_both_lines():
    sanitizer.enable("error")
    here, side = stream_pair()
    table = torch.zeros(8, 4, device=DEVICE)
    index, other = unknown(0, 5), unknown(5, 6)
    side.wait_stream(here)
    delay(here)
    table.index_select(0, index)
    with side:
        table.index_fill_(0, other, 1)
    with pytest.raises(sanitizer.DataRaceError, match="index_fill_") as raised:
        openreg.synchronize()
        openreg.synchronize()
    assert "table.index_select(0, index)" in str(raised.value)
    assert "table.index_fill_(0, other, 1)" in str(raised.value)
    openreg.synchronize()
    (report,) = sanitizer.reports()
    assert not report.earlier.some and not report.later.some
    sanitizer.clear()


def race_twice():
    here, side = stream_pair()
    other = openreg.Stream()
    first, second = (torch.zeros(8, 4, device=DEVICE) for _ in range(2))
    index = unknown(0, 5)
    for stream in (side, other):
        stream.wait_stream(here)
    with gate() as opens:
        opens.wait()
        first.index_select(0, index)
        second.take(index)
        with side:
            first.fill_(1)
        with other:
            second.mul_(2)


@pytest.mark.filterwarnings("default")
def test_late_races_decided_together_are_each_warned_of():
    with pytest.warns(UserWarning, match="data race") as warned:
        race_twice()
        for _ in range(4):
            openreg.synchronize()
    texts = [str(warning.message) for warning in warned]
    assert len(texts) == 2 and "first.fill_(1)" in texts[0] and "second.mul_(2)" in texts[1]


def test_late_races_decided_together_are_each_raised():
    sanitizer.enable("error")
    raised = 0
    for call in (race_twice, *[openreg.synchronize] * 6):
        try:
            call()
        except sanitizer.DataRaceError:
            raised += 1
    assert raised == 2


def test_many_late_reads_of_a_stream_drop_no_other_streams():
    here, side = stream_pair()
    table, index = torch.zeros(8, 4, device=DEVICE), unknown(0, 5)
    side.wait_stream(here)
    with side:
        table.index_select(0, index)
    for _ in range(1100):
        table.index_select(0, index)
    table.fill_(1)
    openreg.synchronize()
    assert [report.kind for report in sanitizer.reports()] == ["race"]


def test_late_conflict_is_decided_by_disable_under_a_schedule():
    with schedule(3):
        for rows, kinds in (((4, 5), []), ((0, 5), ["race"])):
            here, side = stream_pair()
            table, index, other = torch.zeros(8, 4, device=DEVICE), unknown(0, 1), unknown(*rows)
            side.wait_stream(here)
            table.index_select(0, index)
            with side:
                table.index_fill_(0, other, 1)
            sanitizer.disable()
            assert [report.kind for report in sanitizer.reports()] == kinds
            sanitizer.clear()
            sanitizer.enable("warn")


def test_late_race_is_reported_without_a_later_call():
    here, side = stream_pair()
    table = torch.zeros(8, 4, device=DEVICE)
    index = unknown(0, 5)
    side.wait_stream(here)
    delay(here)
    table.index_select(0, index)
    with side:
        table.fill_(1)
    sanitizer.disable()
    assert [report.kind for report in sanitizer.reports()] == ["race"]
    sanitizer.enable("warn")


def test_captured_indices_are_those_of_each_replay():
    table = torch.zeros(8, 4, device=DEVICE)
    index = torch.tensor([0, 1], device=DEVICE)
    graph = openreg.Graph()
    side = openreg.Stream()
    openreg.synchronize()
    with openreg.graph(graph):
        table.index_fill_(0, index, 1)
    with inject("kernel_error"), pytest.raises(RuntimeError, match="injected"):
        graph.replay()  # touches nothing, and the next replays have indices of their own
        openreg.synchronize()
    kinds = []
    for row in (0, 4, 0):
        index.fill_(row)
        side.wait_stream(openreg.current_stream())
        delay(openreg.current_stream())
        graph.replay()
        with side:
            table[4].sum()
        openreg.synchronize()
        kinds.append([report.kind for report in sanitizer.reports()])
        sanitizer.clear()
    assert kinds == [[], ["race"], []]


PROGRAM = """
import sys, torch
table = torch.zeros(8, 4, device="cuda")
index = torch.tensor([0, 5], device="cuda") + 0
other = torch.tensor([int(sys.argv[1]), 6], device="cuda") + 0
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
torch.cuda._sleep(2_000_000)
table.index_select(0, index)
with torch.cuda.stream(side):
    table[other] = 1
"""


@pytest.mark.parametrize("row, status", [(5, 1), (3, 0)])
def test_late_race_of_a_program_is_found_at_its_end(tmp_path, row, status):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [*f"{sys.executable} -m torch_openreg run --as-cuda --sanitize program.py {row}".split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert ("program.py:11" in done.stderr) == bool(status), done.stderr
