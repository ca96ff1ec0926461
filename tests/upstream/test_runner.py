"""That the runner tells what happened: a run that passes everything would never be noticed."""

import json
import os
import re
import sys
from types import SimpleNamespace

import pytest

from upstream import sources
from upstream.__main__ import main
from upstream.declared import Declared
from upstream.results import Results, Row, count, functions, judge, unit

# PyTorch's test files are like this one, which notes in a file what runs.
MADE = '''
import os, signal, time, unittest
import torch
from torch.testing._internal.common_cuda import tf32_is_not_fp32  # it moved in PyTorch 2.13
from torch.testing._internal.common_device_type import (
    dtypes, instantiate_device_type_tests, onlyCUDA)
from torch.testing._internal.common_utils import TestCase

HERE = os.path.dirname(os.path.abspath(__file__))
here_alone = lambda device: torch.device(device).type == "openreg"

class TestMade(TestCase):
    def setUp(self):
        super(self.__class__, self).setUp()
        with open(os.path.join(HERE, "ran"), "a") as file:
            print(self.id().split(".")[-1], file=file)

    @dtypes(torch.float32, torch.int64)
    def test_passes(self, device, dtype):
        self.assertEqual(torch.ones(2, device=device, dtype=dtype).sum(), 2)

    @onlyCUDA
    def test_skipped(self, device):
        raise AssertionError

    @unittest.expectedFailure
    def test_expected(self, device):
        raise AssertionError

    @dtypes(torch.float32, torch.int64)
    def test_alone(self, device, dtype):
        self.assertFalse(here_alone(device), "not like the CPU")

    def test_both(self, device):
        raise AssertionError("on all devices")

    def test_late(self, device):
        if here_alone(device):
            torch.zeros(2, device=device)[torch.tensor([7], device=device)]

    def test_crash(self, device):
        if here_alone(device):
            os.write(1, b"last words")
            os.kill(os.getpid(), signal.SIGSEGV)

    def test_hang(self, device):
        while here_alone(device):
            time.sleep(0.01)

    def test_second(self, device):
        """Fails on the device unless it has its process for itself."""
        self.assertFalse(here_alone(device) and company, "not alone")

    def test_second_on_both(self, device):
        """The CPU's, too."""
        self.assertFalse(company, "not alone")

    def test_pass_first(self, device):
        company.append(1)

company = []
only_for = ("cpu", "cuda")
instantiate_device_type_tests(TestMade, globals(), only_for=only_for)
'''

PROGRAM = """
import contextlib, io, json, os, sys
from upstream import __main__, declared, sources
from upstream.declared import Declared
sources.BUILD = {build!r}
declared.DECLARED = ({declared})
done = []
for arguments in {commands!r}:
    sys.argv = ["upstream", "--source", {tree!r}, "--jobs", "2", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = __main__.main()
    ran = []
    if os.path.exists({ran!r}):
        ran = open({ran!r}).read().split()
        os.remove({ran!r})
    done.append([code, out.getvalue(), [name for name in ran if "openreg" in name]])
print(json.dumps(done))
"""


class Made:
    """A tree with a file of tests, and what runs of it say."""

    def __init__(self, run, folder):
        self.launch, self.folder, self.declared = run, folder, ""
        (folder / "test").mkdir()

    def write(self, text, name="test_made.py"):
        (self.folder / "test" / name).write_text(text)

    def run(self, *commands):
        """One after another in a process: status, output, and the device's tests that ran."""
        where = {
            "build": str(self.folder / "build"),
            "tree": str(self.folder),
            "ran": str(self.folder / "test" / "ran"),
        }
        code = PROGRAM.format(**where, declared=self.declared, commands=commands)
        done = self.launch(code)
        assert done.code == 0, done.out + done.err
        return [SimpleNamespace(code=c, out=o, ran=r) for c, o, r in json.loads(done.out)]

    def path(self):
        (path,) = (self.folder / "build").glob("*.jsonl")
        return path

    def results(self):
        rows = [json.loads(line) for line in self.path().read_text().splitlines()]
        return {row["test"].removeprefix("TestMadeOPENREG.test_"): row for row in rows}


def kept(row):
    return row["outcome"], row["control"], row["message"].partition("\n")[0]


@pytest.mark.slow
def test_upstream_run_reports_each_kind_of_result(run, tmp_path):
    made = Made(run, tmp_path)
    made.write(MADE)
    made.write("import nowhere\ninstantiate_device_type_tests(Test, globals())", "test_lost.py")
    page = tmp_path / "page.md"
    (done,) = made.run(["--limit", "10", "--page", str(page)])
    assert done.code == 1
    rows = made.results()
    assert {name: kept(row) for name, row in rows.items()} == {
        "passes_openreg_float32": ("passed", "", ""),
        "passes_openreg_int64": ("passed", "", ""),
        "skipped_openreg": ("skipped", "", "Only runs on cuda"),
        "expected_openreg": ("xfailed", "", ""),
        "alone_openreg_float32": (
            "failed",
            "passed",
            "AssertionError: True is not false : not like the CPU",
        ),
        "alone_openreg_int64": (
            "failed",
            "passed",
            "AssertionError: True is not false : not like the CPU",
        ),
        "both_openreg": ("failed", "failed", "AssertionError: on all devices"),
        "late_openreg": ("failed", "passed", rows["late_openreg"]["message"].splitlines()[0]),
        "crash_openreg": ("crashed", "passed", "SIGSEGV"),
        "hang_openreg": ("hung", "passed", "nothing for 10.0 s"),
        "pass_first_openreg": ("passed", "", ""),
        "second_openreg": ("failed", "passed", "AssertionError: [1] is not false : not alone"),
        "second_on_both_openreg": ("passed", "passed", ""),
    }
    assert re.match(r"after the test: .*index 7 is out of bounds", rows["late_openreg"]["message"])
    assert "last words" in rows["crash_openreg"]["message"]
    assert "in test_hang" in rows["hang_openreg"]["message"], "the stacks"
    assert "not alone" in rows["second_on_both_openreg"]["first"]
    for name in ("alone_openreg_int64 failed", "late_openreg failed", "crash_openreg crashed"):
        assert f"test_made.py TestMadeOPENREG.test_{name} here alone" in done.out
    assert "test_lost.py cannot be run: ModuleNotFoundError: No module named 'nowhere'" in done.out
    assert "7 errors" in done.out
    assert "| test_made.py | 13 | 5 | 1 | 1 | 6 | 0 |" in page.read_text()
    assert "| test_lost.py | cannot be imported: ModuleNotFoundError" in page.read_text()


SHORT = re.sub("def test_(crash|hang|second)", r"def \1", MADE)


@pytest.mark.slow
def test_upstream_run_goes_on_where_it_was_stopped(run, tmp_path):
    made = Made(run, tmp_path)
    made.write(SHORT)
    made.declared = """
        Declared("test_made.py::TestMade::test_alone", "why"),
        Declared("test_made.py::TestMade::test_late", "why"),
        Declared("test_other.py::*", "of a file that was not asked for"),"""
    sample, greater, rest, again = made.run(
        ["--sample", "4", "--seed", "3"], ["--sample", "5", "--seed", "3"], [], []
    )
    assert [done.code for done in (sample, greater, rest, again)] == [0] * 4
    numbers = [re.search(r"^all +(\d+) .* 0$", d.out, re.M)[1] for d in (sample, greater, rest)]
    assert numbers == ["4", "5", "9"], "nothing of what was asked for is left"
    first, second, third = set(sample.ran), set(greater.ran), set(rest.ran)
    assert len(first) == 4 and len(second) == 1 and len(third) == 4
    assert not first & second and not (first | second) & third and not again.ran

    lines = made.path().read_text().splitlines(keepends=True)
    made.path().write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote
    # What was mended is no longer rightly declared.
    made.write(SHORT.replace('here_alone(device), "not', 'False, "not'))
    cut, failed = made.run([], ["--failed"])
    assert set(cut.ran) == {json.loads(lines[-1])["test"].split(".")[1]}
    wanted = {"test_alone_openreg_float32", "test_alone_openreg_int64", "test_late_openreg"}
    assert set(failed.ran) | set(cut.ran) >= wanted
    assert not set(failed.ran) & {
        "test_first_openreg",
        "test_both_openreg",
        "test_passes_openreg_int64",
    }
    assert failed.code == 1 and len(made.results()) == 9
    stale = "stale declaration: test_made.py::TestMade::test_alone: none of them fails (why)"
    assert stale in failed.out


def test_upstream_run_without_a_tree_names_the_remedy(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "ARCHIVE", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["upstream"])
    assert main() == 0
    assert "make upstream PYTORCH_SOURCE=" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no folder `test`"):
        sources.find_tree(str(tmp_path))
    with pytest.raises(SystemExit, match="FILES=test_no: no such file"):
        sources.files_of(str(tmp_path), ["test_no"])


def made_like(*names):
    return {f"TestMadeOPENREG.{name}": re.match(r"test_[a-z]+", name)[0] for name in names}


TESTS = {
    "test_a.py": made_like(
        "test_x_openreg_int64",
        "test_x_openreg_float32",
        "test_op_add_openreg",
        "test_op_mul_openreg",
    ),
    "nn/test_b.py": made_like(*(f"test_t{'abcdefghij'[i]}_openreg" for i in range(10))),
}


def test_unit_names_have_no_dtype():
    assert unit("a.py", "TestXOPENREG.test_f_openreg_int64", "test_f") == "a.py::TestX::test_f"
    name = "TestXOPENREG.test_f_add_one_openreg_int64"
    assert unit("a.py", name, "test_f") == "a.py::TestX::test_f(add_one)"
    assert unit("a.py", "TestXOPENREG.test_f__x_openreg", "test_f") == "a.py::TestX::test_f(_x)"
    assert unit("a.py", name, "wrapper") == "a.py::TestX::test_f_add_one"


def test_sample_is_spread_over_the_files_and_grows():
    small, great = (sources.sample(TESTS, count, 1) for count in (4, 11))
    assert {file: len(names) for file, names in small.items()} == {
        "test_a.py": 2,
        "nn/test_b.py": 2,
    }
    assert {file: len(names) for file, names in great.items()} == {
        "test_a.py": 2,  # its functions, of which one has two tests and one has two operators
        "nn/test_b.py": 9,
    }
    assert all(set(names) <= set(great[file]) for file, names in small.items())
    assert small == sources.sample(TESTS, 4, 1) != sources.sample(TESTS, 4, 2)


def test_sample_takes_each_function_of_a_file_before_any_twice():
    tests = {f"test_many_{i}": "test_many" for i in range(97)}
    tests |= {f"test_{name}": f"test_{name}" for name in "abc"}
    chosen = sources.sample({"test_a.py": tests}, 5, 1)["test_a.py"]
    assert {"test_a", "test_b", "test_c", "test_many"} == set(chosen.values())


def rows_for(**outcomes):
    rows = {}
    for name, outcome in outcomes.items():
        test = f"TestMadeOPENREG.test_{name}"
        control = "passed" if outcome == "failed" else ""
        rows["test_a.py", test] = Row("test_a.py", test, outcome, "Error: no\nwhere", 0.1, control)
    return rows


X = Declared("test_a.py::TestMade::test_x", "why", to_mend=True)
ADD = Declared("test_a.py::TestMade::test_op(add)", "why")


def test_undeclared_and_stale_failures_are_errors():
    rows = rows_for(x_openreg_int64="failed", x_openreg_float32="passed", op_add_openreg="failed")
    wrong, covered = judge(TESTS, rows, (X, ADD))
    assert wrong == [] and {entry: len(found) for entry, found in covered.items()} == {X: 1, ADD: 1}
    (undeclared,) = judge(TESTS, rows, (X,))[0]
    assert (
        undeclared == "test_a.py TestMadeOPENREG.test_op_add_openreg failed here alone: Error: no"
    )

    # As long as a variant of it did not run, nobody knows.
    assert judge(TESTS, rows_for(x_openreg_int64="passed"), (X, ADD))[0] == []
    passed = rows_for(x_openreg_int64="passed", x_openreg_float32="passed", op_mul_openreg="passed")
    (stale,) = judge(TESTS, passed, (X, ADD))[0]
    assert stale == "stale declaration: test_a.py::TestMade::test_x: none of them fails (why)"
    both = Declared(f"{ADD.tests} {X.tests}", "each has to hold")
    (stale,) = judge(TESTS, {**passed, **rows_for(op_add_openreg="failed")}, (both,))[0]
    assert "test_x: none of them fails (each has to hold)" in stale
    gone = Declared("test_a.py::TestMade::test_gone", "why")
    assert judge(TESTS, {}, (gone,))[0] == [
        f"stale declaration: {gone.tests}: there is no such test"
    ]
    assert judge({"nn/test_b.py": {}}, {}, (gone,))[0] == [], "its file was not asked for"


def test_counts_of_a_file_have_each_kind_of_result():
    rows = rows_for(x_openreg_int64="failed", x_openreg_float32="failed", op_add_openreg="skipped")
    rows["test_a.py", "TestMadeOPENREG.test_x_openreg_int64"].control = "failed"
    assert count(TESTS, rows)["test_a.py"] == (3, 0, 1, 1, 1, 1)
    assert functions(rows.values(), TESTS) == 2


def test_results_of_a_test_are_its_last(run, tmp_path):
    path = tmp_path / "results"
    for outcome in ("failed", "passed"):
        kept = Results(path)
        assert len(kept.rows) == (outcome == "passed")
        kept.add(Row("test_a.py", "TestMadeOPENREG.test_x_openreg", outcome))
        kept.file.write('{"file": "test_a.py", "te')
        kept.file.close()
    kept = Results(path)
    assert [row.outcome for row in kept.rows.values()] == ["passed"]
    done = run(f"from upstream.results import Results; Results({os.fspath(path)!r})")
    assert done.code == 1 and "is being written by another run" in done.err


def test_catalogue_of_tests_follows_the_file(tmp_path):
    (tmp_path / "test_a.py").write_text("\ninstantiate_device_type_tests(A)")
    before = sources._digest(os.fspath(tmp_path / "test_a.py"))
    assert sources.files_of(str(tmp_path), []) == ["test_a.py"]
    (tmp_path / "test_a.py").write_text("\ninstantiate_device_type_tests(B)")
    assert sources._digest(os.fspath(tmp_path / "test_a.py")) != before
