"""A missing record_stream is reported whether or not the block is handed out again."""

import os
import subprocess
import sys
import traceback

import pytest
import torch
from race_pairs import DEVICE, found, openreg, sanitizer, stream_pair

pytestmark = pytest.mark.usefixtures("watching")

RECORDED = {
    "nothing": lambda x, here, side: None,
    "record_stream": lambda x, here, side: x.record_stream(side),
    "wait_stream": lambda x, here, side: here.wait_stream(side),
    "wait_event": lambda x, here, side: here.wait_event(side.record_event()),
    "stream": lambda x, here, side: side.synchronize(),
    "event": lambda x, here, side: side.record_event().synchronize(),
    "device": lambda x, here, side: openreg.synchronize(),
    "item": lambda x, here, side: here.wait_stream(side) or x[0].item(),
}


def lend(order="nothing", numel=1000):
    """A tensor that the side stream uses. The caller's last reference frees it."""
    here, side = stream_pair()
    x = torch.ones(numel, device=DEVICE)
    side.wait_stream(here)
    with side:
        x.add_(1)
    RECORDED[order](x, here, side)
    return x, here, side


def at_the_end(function, *arguments):
    def program():
        function(*arguments)
        sanitizer._judge_frees()

    return found(program)


def free(order):
    x, *_ = lend(order)
    del x


@pytest.mark.parametrize("order", RECORDED)
def test_free_in_use_is_possible_race_at_the_end(order):
    reports = at_the_end(free, order)
    if order != "nothing":
        assert not reports
        return
    (report,) = sanitizer.reports()
    assert reports == ["free / aten::add_.Tensor"] and report.kind == "possible race"
    assert report.memory == "openreg:0, freed without record_stream"
    assert report.later.line.line == free.__code__.co_firstlineno + 2
    assert "record_stream" in report.advice and "frees" in str(report)
    assert not at_the_end(lambda: None)


def allocate(order, waits, numel):
    """A smaller block is free, and the allocator prefers it."""
    openreg.synchronize()
    smaller, gap = (torch.empty(100, device=DEVICE) for _ in range(2))
    x, here, side = lend(order)
    fence = torch.empty(100, device=DEVICE)
    address = x.data_ptr()
    del x, smaller
    if waits:
        here.wait_stream(side)
    y = torch.zeros(numel, device=DEVICE)
    assert y.data_ptr() != address
    return y, gap, fence


def test_free_in_use_is_judged_by_an_allocation_that_gets_another_block():
    (report,) = found(allocate, "nothing", False, 100)
    assert report == "aten::zero_ / aten::add_.Tensor"
    assert sanitizer.reports()[0].memory == "openreg:0, reused without record_stream"
    assert not at_the_end(lambda: None)
    assert not found(allocate, "record_stream", False, 100)
    assert not found(allocate, "nothing", True, 100)
    assert not found(allocate, "nothing", False, 2**20)  # which the block could not have served


# ---- What says nothing about the program ----


class Stop(Exception):
    pass


def raises():
    x, *_ = lend()
    raise Stop(x.shape)


def caught():
    try:
        raises()
    except Stop as error:
        assert error.args


def cleared():
    try:
        raises()
    except Stop as error:
        traceback.clear_frames(error.__traceback__)


def passes_on(x):
    raise Stop


def temporary():
    with pytest.raises(Stop):
        passes_on(lend()[0])


def waits_afterwards():
    x, here, side = lend()
    del x
    here.wait_stream(side)


@pytest.mark.parametrize("program", [caught, cleared, temporary, waits_afterwards])
def test_free_by_an_exception_is_not_judged(program):
    assert not at_the_end(program)
    assert at_the_end(free, "nothing")  # a later free of the thread is


def test_tools_own_wait_does_not_acquit():
    def program():
        free("nothing")
        with sanitizer._without_order():
            openreg.synchronize()

    assert at_the_end(program)


PROGRAM = """
import sys
import torch

def lend():
    x = torch.ones(1000, device="openreg")
    side = torch.openreg.Stream()
    side.wait_stream(torch.openreg.current_stream())
    with side:
        x.add_(1)
    return x

x = lend()
if "frees" in sys.argv:
    del x
"""


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize("tool", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_end_of_program_judges_what_it_has_freed(tmp_path, tool, frees):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = ("-m", "torch_openreg", "run", "--sanitize") if tool else ()
    command = [sys.executable, *run, str(program), *["frees"] * frees]
    environment = {**os.environ, "OPENREG_SANITIZER": "0" if tool else "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == frees, ended.stderr
    assert ("x.record_stream(side)" in ended.stderr) == frees
