"""The report of a host access to device memory, in Python, under `run` and under pytest.

tests/c/test_host_access.c has what needs no PyTorch."""

import dataclasses
import re
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from torch_openreg import _run_seeds
from torch_openreg._run_streams import Input

READ = """
import ctypes, torch
x = torch.arange(1000.0, device="openreg:1")
y = torch.relu(x)
ctypes.string_at(y.data_ptr() + 40, 4)
"""


def program(tmp_path, text, name="reads.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return path


def lines_of(text):
    """Without the line of the allocation, which is known where all programs are sanitized."""
    lines = [line for line in text.splitlines() if line.startswith("openreg: ")]
    return [re.sub(", allocated at .*", "", line) for line in lines]


def test_host_access_report_names_block_dtype_operator_and_remedy(run):
    done = run(READ)
    assert done.code == -signal.SIGSEGV
    first, *more = lines_of(done.err)
    assert first.startswith("openreg: SIGSEGV: the host reads 0x")
    assert "memory of openreg:1" in first
    assert more == [
        "openreg:   byte 40 of a block of 4000 bytes, of torch.float32",
        "openreg:   the thread has queued last: aten::relu",
        "openreg:   copy it to the host first: x.cpu(); in C, orMemcpy",
        "openreg:   for the line of Python: python -X faulthandler, or PYTHONFAULTHANDLER=1",
    ]


@pytest.mark.parametrize(
    "makes, dtype",
    [
        ("torch.empty(4, dtype=torch.int64, device='openreg')", "torch.int64"),
        ("torch.empty_strided((2, 2), (1, 2), dtype=torch.bool, device='openreg')", "torch.bool"),
        ("torch.ones(4, device='openreg').half()", "torch.float16"),
        ("[torch.ones(4, device='openreg') * 2 for _ in range(3)][-1]", "torch.float32"),
    ],
)
def test_host_access_report_has_the_dtype_of_every_kind_of_tensor(run, makes, dtype):
    done = run(f"import ctypes, torch\nx = {makes}\nctypes.string_at(x.data_ptr(), 1)")
    assert f"bytes, of {dtype}" in done.err


def test_host_access_report_calls_freed_memory_free(run):
    done = run(
        """
        import ctypes, torch
        x = torch.ones(4, device="openreg")
        address = x.data_ptr()
        del x
        ctypes.string_at(address, 1)
        """
    )
    assert "openreg:   byte 0 of a block that is free, of " in done.err


def test_host_access_report_of_a_raw_block_has_no_dtype(run):
    done = run(
        """
        import ctypes, torch
        torch.empty(0, dtype=torch.int64, device="openreg")
        block = torch.openreg.memory.caching_allocator_alloc(100)
        ctypes.string_at(block, 1)
        """
    )
    assert "byte 0 of a block of 100 bytes\n" in done.err


@pytest.mark.parametrize(
    "on", ["torch.openreg.memory._record_memory_history()", "torch.openreg.sanitizer.enable()"]
)
def test_host_access_report_has_the_line_of_the_allocation(run, tmp_path, on):
    path = program(
        tmp_path,
        f"""
        import ctypes, torch
        {on}
        x = torch.ones(4, device="openreg")
        model = torch.nn.Linear(2, 2, device="openreg")
        which = dict(x=x, weight=model.weight)
        for line in range(100, 200):  # code objects that go, whose memory the next ones get
            source = "for dtype in (torch.half, torch.int8):"
            source += " y = torch.ones(4, device='openreg', dtype=dtype)"
            code = compile("\\n" * line + source, __file__, "exec")
            exec(code)
            del code
        which["y"] = y
        def read(name):
            ctypes.string_at(which[name].data_ptr(), 1)
        """,
    )
    for name, dtype, line in (("x", "float32", 4), ("weight", "float32", 5), ("y", "int8", 200)):
        done = run(f"import runpy\nrunpy.run_path({str(path)!r})['read']({name!r})")
        assert f"of torch.{dtype}, allocated at {path}:{line}\n" in done.err


@pytest.mark.parametrize(
    "enable", ["import faulthandler; faulthandler.enable()", ""], ids=["before", "after"]
)
def test_host_access_report_is_followed_by_faulthandlers_lines(run, enable):
    after = "" if enable else "import faulthandler; faulthandler.enable()"
    done = run(
        f"""
        {enable}
        import ctypes, torch
        x = torch.ones(4, device="openreg")
        {after}
        def reads_here():
            ctypes.string_at(x.data_ptr(), 1)
        reads_here()
        """
    )
    assert done.code == -signal.SIGSEGV
    assert "in reads_here\n" in done.err
    assert done.err.count("openreg: SIGSEGV: the host reads") == 1
    assert "python -X faulthandler" not in done.err


@pytest.mark.parametrize("where", ["threads", "a child"])
def test_host_access_report_is_written_in_threads_and_forked_children(run, where):
    starts = {
        "threads": "threading.Thread(target=read).start()",
        "a child": "os.fork() or read(); os.wait(); os.kill(os.getpid(), 11)",
    }[where]
    done = run(
        f"""
        import ctypes, os, threading, torch
        x = torch.ones(4, dtype=torch.int32, device="openreg")
        def read():
            ctypes.string_at(x.data_ptr(), 1)
        {starts}
        """
    )
    assert done.code == -signal.SIGSEGV
    assert "byte 0 of a block of 16 bytes, of torch.int32" in done.err


# The device has no kernel for this one: it is named only where operators are observed.
CUSTOM = """
import ctypes, torch
@torch.library.custom_op("reads::first", mutates_args=())
def first(x: torch.Tensor) -> torch.Tensor:
    torch.ones(1, device=x.device)
    ctypes.string_at(x.data_ptr(), 1)
    return x.clone()
first(torch.ones(4, device="openreg"))
"""


def in_python(*arguments, cwd):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_host_access_under_run_names_operator_and_line(run, tmp_path):
    path = program(tmp_path, CUSTOM)
    done = run("", arguments=("-m", "torch_openreg", "run", str(path)))
    assert done.code == -signal.SIGSEGV
    assert "openreg:   in the operation reads::first\n" in done.err
    assert 'reads.py", line 6 in first\n' in done.err


def test_run_works_without_stderr(tmp_path):
    path = program(tmp_path, "print('ran')")
    command = f"exec {sys.executable} -m torch_openreg run {path} 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ran\n")


def options(path):
    return SimpleNamespace(as_cuda=False, force=False, module=False, command=[str(path)])


def test_run_under_a_schedule_gives_host_access_as_the_cause(tmp_path):
    done = _run_seeds._run_under(options(program(tmp_path, READ)), "early", Input())
    assert done.status == 128 + signal.SIGSEGV
    assert str(done).startswith("exit status 139 (SIGSEGV: the host reads 0x")
    again = dataclasses.replace(done, error=done.error.replace("reads 0x", "reads 0x1"))
    assert again.ending == done.ending  # addresses differ from run to run


@pytest.mark.slow
def test_run_under_schedules_prints_the_host_access_of_its_first_run(tmp_path):
    program(tmp_path, READ)
    done = in_python("-m", "torch_openreg", "run", "--seeds=1", "reads.py", cwd=tmp_path)
    assert "openreg:   byte 40 of a block of 4000 bytes, of torch.float32" in done.stderr
    assert (
        "schedules: 1 of 1 end and print as 'early' does; which devices it used is not"
        in done.stderr
    )


def test_pytest_shows_host_access_though_it_captures_stderr(tmp_path):
    program(
        tmp_path,
        """
        import ctypes, torch
        def test_reads():
            x = torch.ones(4, device="openreg")
            ctypes.string_at(x.data_ptr(), 1)
        """,
        "test_reads.py",
    )
    done = in_python("-m", "pytest", "-q", "-p", "pytest_openreg", "test_reads.py", cwd=tmp_path)
    assert done.returncode == -signal.SIGSEGV
    assert "openreg:   byte 0 of a block of 16 bytes, of torch.float32" in done.stderr
    assert "in test_reads\n" in done.stderr
