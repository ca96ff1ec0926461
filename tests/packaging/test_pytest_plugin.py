"""The pytest plugin, in suites of its own."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]

RACY = """
import pytest
import torch


@pytest.mark.openreg
def test_right(openreg_device):
    assert torch.ones(3, device=openreg_device).sum().item() == 3


@pytest.mark.openreg
def test_racy(openreg_device):
    x = torch.zeros(4, device=openreg_device)
    side = torch.openreg.Stream()
    x.add_(1)
    with side:
        y = x * 5
    side.synchronize()
    assert y[0].item() == 5


def test_without_mark():
    pass
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """Runs a file of tests with the plugin, in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("OPENREG_SANITIZER", raising=False)

    def suite(text, *arguments):
        if text:
            pytester.makepyfile(test_it=text)
        plugin = ("-p", "pytest_openreg", "-p", "no:cacheprovider")
        return pytester.runpytest_subprocess(*plugin, *arguments)

    return suite


def replays(done):
    """The printed commands: their words behind the settings, and behind pytest's name."""
    lines = [line for line in done.outlines if line.startswith("  replay: ")]
    return [shlex.split(line.partition(" pytest ")[2]) for line in lines]


@pytest.mark.slow
def test_schedules_show_a_race_and_how_to_replay_it(suite):
    done = suite(RACY, "--openreg-schedules=24")
    outcomes = done.parseoutcomes()
    failed = outcomes["failed"]
    assert 1 <= failed < 24 and outcomes["passed"] == 2 * 25 + 1 - failed
    lines = done.outlines
    (name,) = [line for line in lines if line.startswith("test_it.py::test_racy fails under ")]
    seeds = name.rpartition("under ")[2].split(", ")
    assert len(seeds) == failed and "early" not in seeds
    (words,) = replays(done)
    assert words[-2:] == [f"--openreg-seed={seeds[0]}", "test_it.py::test_racy"]
    assert not annotations(done)
    again = suite("", *words[-2:])
    again.assert_outcomes(passed=1, failed=1)
    again.stdout.fnmatch_lines([f"*::test_racy fails under {seeds[0]}"])
    assert replays(again) == [words]


UNMARKED = """
import torch

class TestIt:
    def test_unmarked(self):
        x = torch.zeros(4, device="cuda")
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        x.add_(1)
        with torch.cuda.stream(side):
            y = x * 5
        side.synchronize()
        assert y[0].item() == 5
"""


@pytest.mark.slow
def test_replay_command_repeats_a_failure_in_a_fresh_shell(suite, pytester, monkeypatch):
    """From another folder than the root, with the settings, whatever the project's addopts say."""
    pytester.makeini("[pytest]\naddopts = --openreg-schedules=24 --openreg-schedules-all -q")
    folder = pytester.mkdir("tests")
    (folder / "test_it.py").write_text(UNMARKED)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OPENREG_AS_CUDA", "1")
    monkeypatch.setenv("OPENREG_POISON", "1")
    done = suite("", "-k", "unmarked", "-v", "test_it.py")
    done.stdout.fnmatch_lines(["tests/test_it.py::TestIt::test_unmarked fails under *"])
    seed = done.stdout.str().partition("test_unmarked fails under ")[2].split()[0].strip(",")
    (command,) = (line for line in done.outlines if line.startswith("  replay: "))
    assert command == (
        "  replay: OPENREG_AS_CUDA=1 OPENREG_POISON=1 python -m pytest -p pytest_openreg "
        f"-p no:cacheprovider --openreg-seed={seed} test_it.py::TestIt::test_unmarked"
    )
    command = command.removeprefix("  replay: ").replace("python", sys.executable, 1)
    fresh = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")}
    again = subprocess.run(
        command, shell=True, env=fresh, capture_output=True, text=True, check=False
    )
    assert "1 failed, 1 passed" in again.stdout, again.stdout


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--openreg-schedules=2", "OPENREG_LAUNCH_BLOCKING"),
        ("--openreg-seed=1", "CUDA_LAUNCH_BLOCKING"),
        ("--openreg-preemptions=1", "OPENREG_LAUNCH_BLOCKING"),
    ],
)
def test_schedules_are_refused_where_launches_block(suite, monkeypatch, option, name):
    monkeypatch.setenv("OPENREG_AS_CUDA", "1")
    monkeypatch.setenv(name, "1")
    done = suite(RACY, option)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"ERROR: {name}: each launch waits*"])


def test_schedules_fail_a_test_whose_module_lets_launches_block(suite):
    blocks = "import os\nos.environ['OPENREG_LAUNCH_BLOCKING'] = '1'\n"
    done = suite(blocks + RACY, "--openreg-schedules=1", "-k", "right")
    done.assert_outcomes(failed=2, deselected=3)
    done.stdout.fnmatch_lines(["*under a schedule cannot compare schedules: each launch waits*"])


@pytest.mark.slow
def test_replay_command_names_one_parameter_of_a_test(suite):
    text = RACY.replace(
        "def test_racy(openreg_device)",
        '@pytest.mark.parametrize("size", [4, 5])\ndef test_racy(openreg_device, size)',
    )
    done = suite(text.replace("zeros(4", "zeros(size"), "--openreg-seed=late", "-k", "racy")
    done.assert_outcomes(passed=2, failed=2, deselected=3)
    first, second = replays(done)
    assert first[-3:] == [
        "--openreg-seed=late",
        "test_it.py::test_racy[4-openreg-early]",
        "test_it.py::test_racy[4-openreg-late]",
    ]
    suite("", *second[-3:]).assert_outcomes(passed=1, failed=1)


@pytest.mark.slow
def test_search_shows_a_race_and_how_to_replay_it(suite):
    done = suite(RACY, "--openreg-preemptions=1")
    done.assert_outcomes(passed=4, failed=1)
    done.stdout.re_match_lines(
        [
            r">\s+assert y\[0\].item\(\) == 5",
            r"test_it.py::test_right: all \d+ schedules .* of \d+ tasks on 1 stream agree",
            r"test_it.py::test_racy: all \d+ schedules .* of \d+ tasks on 2 streams, \d+ results",
            r"test_it.py::test_racy fails under tape:[\d:,]+",
        ]
    )
    (replay,) = replays(done)
    again = suite("", *replay[-2:])
    again.assert_outcomes(passed=1, failed=1)
    assert replays(again) == [replay]


@pytest.mark.slow
def test_search_replays_a_test_with_parameters(suite):
    text = RACY.replace(
        "def test_racy(openreg_device)",
        '@pytest.mark.parametrize("size", [4])\ndef test_racy(openreg_device, size)',
    )
    done = suite(text, "--openreg-preemptions=0", "--openreg-limit=50", "-k", "racy")
    done.assert_outcomes(passed=1, failed=1, deselected=3)
    (replay,) = replays(done)
    suite("", *replay[-3:]).assert_outcomes(passed=1, failed=1)


SKIPS = """
import unittest

import pytest
import torch

WAYS = [pytest.skip.Exception, unittest.SkipTest, pytest.xfail.Exception]


def is_done():
    torch.ones(3, device="openreg")
    return torch.openreg.current_stream().query()


@pytest.mark.openreg
@pytest.mark.parametrize("way", WAYS)
def test_skips_at_times(way):
    if not is_done():
        raise way("nothing there")


@pytest.mark.openreg
def test_part(subtests):
    with subtests.test("a"):
        assert is_done()


@pytest.mark.openreg
def test_part_skips(subtests):
    with subtests.test("a"):
        if not is_done():
            pytest.skip("nothing there")


@pytest.mark.openreg
@pytest.mark.parametrize("way", WAYS)
def test_always_skips(way):
    is_done()
    raise way("nothing there")
"""


@pytest.mark.slow
def test_search_compares_skips_and_subtests(suite):
    done = suite(SKIPS, "--openreg-preemptions=1", "-rA")
    fails = [line for line in done.outlines if " fails under tape:" in line]
    names = [re.match(r"test_it.py::(\w+)", line)[1] for line in fails]
    assert names == [*["test_skips_at_times"] * 3, "test_part", "test_part_skips"]
    outcomes = done.parseoutcomes()
    assert (outcomes["skipped"], outcomes["xfailed"]) == (2 * 2, 1 * 2), outcomes
    searched = [line for line in done.outlines if line.startswith("test_it.py::test_part: all ")]
    assert len(searched) == 1
    done.stdout.fnmatch_lines(
        [
            "*raises AssertionError: 1 subtest failed",
            "finished: 5 runs under 1 schedule, 5 searches",
        ]
    )


ASYNC = """
import pytest
import torch


@pytest.mark.openreg
async def test_right():
    assert torch.ones(3, device="openreg").sum() == 3


@pytest.mark.openreg
async def test_wrong():
    assert torch.ones(3, device="openreg").sum() == 4
"""
RUNS_ASYNC = """
import asyncio
import inspect


def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        asyncio.run(pyfuncitem.obj())
        return True
"""


@pytest.mark.slow
def test_search_runs_async_tests_as_their_plugin_does(suite, pytester):
    pytester.makeconftest(RUNS_ASYNC)
    suite(ASYNC, "--openreg-preemptions=0").assert_outcomes(passed=2, failed=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--openreg-preemptions=-1",),
        ("--openreg-preemptions=1", "--openreg-schedules=2"),
        ("--openreg-preemptions=1", "--openreg-limit=0"),
        ("--openreg-seed=tape:1,",),
    ],
)
def test_search_refuses_bad_options(suite, arguments):
    assert suite(RACY, *arguments).ret == pytest.ExitCode.USAGE_ERROR


def test_plugin_without_options_changes_nothing(suite):
    text = "import sys\n\n\ndef test_it():\n    assert 'torch' not in sys.modules\n"
    suite(text, "--strict-markers").assert_outcomes(passed=1)
    suite(RACY, "--strict-markers", "-k", "right or without").assert_outcomes(
        passed=2, deselected=1
    )


@pytest.mark.slow
def test_schedules_keep_fixtures_classes_and_marks(suite):
    """Each run is a test of its own, whatever else pytest makes of it."""
    text = """
import pytest
import torch
from torch_openreg import _C


@pytest.fixture(scope="module")
def shared():
    return torch.ones(4, device="openreg")


@pytest.fixture(scope="session", params=[1, 2])
def made(request):
    return request.param


@pytest.fixture
def unscheduled():
    assert _C._schedule_get() == (0, 0)
    yield
    assert _C._schedule_get() == (0, 0)


@pytest.fixture
def fails():
    raise LookupError("fixture")


@pytest.mark.openreg
class TestAll:
    def test_shared(self, shared, unscheduled):
        assert shared.sum().item() == 4 and _C._schedule_get() != (0, 0)

    @pytest.mark.parametrize("n", [1, 2])
    def test_parameters(self, n, made, openreg_device):
        assert n * made

    @pytest.mark.skip
    def test_skipped(self):
        pass

    @pytest.mark.xfail(strict=True)
    def test_expected(self):
        with torch.openreg.testing.schedule("late"):
            assert 0

    def test_fixture(self, fails):
        pass
"""
    done = suite(text, "--openreg-schedules=2")
    done.assert_outcomes(passed=3 + 3 * 4, skipped=3, xfailed=3, errors=3)
    done.stdout.fnmatch_lines(["test_it.py::TestAll::test_fixture fails under early, 0, 1"])


@pytest.mark.slow
def test_schedules_skip_tests_without_the_mark_unless_all(suite):
    text = """
import unittest


def test_plain():
    pass


class TestUnit(unittest.TestCase):
    def test_method(self):
        pass
"""
    suite(text, "--openreg-schedules=2").assert_outcomes(passed=2)
    done = suite(text, "--openreg-schedules=2", "--openreg-schedules-all")
    done.assert_outcomes(passed=4)
    said = "without schedules, taking no parameters, as methods of unittest.TestCase: "
    done.stdout.fnmatch_lines([said + "1"])
    doctest = '''def f():
    """
    >>> 1 + 1
    2
    """
'''
    done = suite(doctest, "--openreg-schedules=2", "--openreg-schedules-all", "--doctest-modules")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines([said + "1"])


@pytest.mark.slow
def test_schedules_start_from_the_same_random_state(suite):
    text = """
import pytest
import torch

seen = set()


@pytest.mark.openreg
def test_random():
    seen.add(torch.rand(1, device="openreg").item())
    assert len(seen) == 1
"""
    suite(text, "--openreg-schedules=4").assert_outcomes(passed=5)


def test_error_that_surfaces_late_is_the_tests_own(suite):
    text = """
import torch


def test_fails(openreg_device):
    torch.zeros(3, device=openreg_device)[torch.tensor([7], device=openreg_device)]


def test_follows(openreg_device):
    torch.ones(1, device=openreg_device)
"""
    done = suite(text)
    done.assert_outcomes(passed=2, errors=1)
    done.stdout.fnmatch_lines(["*ERROR at teardown of test_fails*"])


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--openreg-sanitizer", "--openreg-seed=late"])
def test_sync_debug_mode_of_a_test_does_not_apply_to_the_plugin(suite, option):
    text = """
import pytest
import torch


@pytest.mark.openreg
def test_it(openreg_device):
    torch.openreg.set_sync_debug_mode("error")
    torch.ones(4, device=openreg_device)
    torch.openreg._sleep(1000)
"""
    done = suite(text, option)
    assert done.ret == 0, done.stdout


def test_missing_device_is_an_error_not_a_skip(suite, monkeypatch):
    monkeypatch.setenv("OPENREG_DEVICE_COUNT", "0")
    done = suite("def test_it(openreg_device):\n    pass\n")
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*openreg_device: there is no openreg device*"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--openreg-seed=x"], "*2[*][*]64 - 1, late, early or a tape, not 'x'*"),
        (["--openreg-seed=-1"], "*not '-1'*"),
        (["--openreg-schedules=-1"], "*must not be negative*"),
        (["--openreg-schedules=2", "--openreg-preemptions=1"], "*takes the place of*"),
    ],
)
def test_plugin_refuses_bad_options(suite, arguments, message):
    done = suite("def test_it():\n    pass\n", *arguments)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([message])


SANITIZED = """
import threading

import pytest
import torch


def race():
    a, side = torch.ones(1000, device="openreg"), torch.openreg.Stream()
    with side:
        a.mul_(5)
    torch.openreg.current_stream().wait_stream(side)


def test_raises():
    race()


def test_swallows():
    try:
        race()
    except RuntimeError:
        pass


def test_in_a_thread():
    thread = threading.Thread(target=race)
    thread.start()
    thread.join()


def test_host():
    host = torch.zeros(1000).pin_memory()
    host.copy_(torch.ones(1000, device="openreg"), non_blocking=True)
    torch.ops.aten.add.Tensor(host, 1)


def test_skips():
    test_swallows()
    pytest.skip("no data set here")


@pytest.mark.racy
def test_marked_skips():
    test_swallows()
    pytest.skip("no data set here")


@pytest.mark.xfail
def test_fails_otherwise():
    test_swallows()
    raise AssertionError


@pytest.mark.xfail(raises=RuntimeError)
def test_fails_by_its_race():
    race()


def test_undecided():
    a, side = torch.ones(9, device="openreg"), torch.openreg.Stream()
    gate = torch.openreg.testing.gate()
    side.wait_stream(torch.openreg.current_stream())
    gate.wait(side)
    with side:
        a.mul_(5)
    a.record_stream(side)
    a.add_(1)
    threading.Timer(0.2, gate.open).start()


@pytest.fixture
def late():
    yield
    with pytest.raises(RuntimeError):
        race()


def test_teardown(late):
    pass


@pytest.mark.racy
def test_marked():
    with pytest.raises(torch.openreg.sanitizer.DataRaceError):
        race()


@pytest.mark.racy
def test_marked_without_reason():
    pass


def test_that_uses_it_itself():
    with torch.openreg.sanitizer.enable("warn"):
        pass
    torch.openreg.sanitizer.disable()


def test_good():
    a = torch.zeros(1000, device="openreg")
    assert a.add_(1).sum().item() == 1000


def test_again():
    race()


test_swallows()
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by", ["option", pytest.param("setting", marks=pytest.mark.slow)])
def test_race_fails_its_own_test(suite, monkeypatch, by):
    if by == "setting":
        monkeypatch.setenv("OPENREG_SANITIZER", "1")
    done = suite(SANITIZED, *(["--openreg-sanitizer"] if by == "option" else []), "-rA", "-v")
    failed = ["raises", "swallows", "in_a_thread", "host", "skips", "fails_otherwise", "undecided"]
    failed.append("again")
    for name in failed:
        done.stdout.fnmatch_lines([f"FAILED *::test_{name}*"])
    done.stdout.fnmatch_lines(["ERROR *::test_teardown*", "FAILED *::test_marked_without_reason*"])
    outcomes = done.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"], outcomes["errors"]) == (4, len(failed) + 1, 1)
    assert (outcomes["skipped"], outcomes["xfailed"]) == (1, 1)
    done.stdout.fnmatch_lines(["*openreg sanitizer: outside of tests*", "*: data race *"])
    assert done.stdout.str().count("Nothing orders the second after the first") == 3
    done.stdout.fnmatch_lines(
        [
            "*- 3 mistakes found -*",
            "1: *test_it.py:10: *; in test_it.py::test_raises and 7 more)",
            "2: *; in test_it.py::test_host)",
            "3: *; in test_it.py::test_undecided)",
        ]
    )


TWICE = """
import pytest
import torch


def use(x):
    raise ValueError("any failure")


def race(wait=False):
    x, side = torch.zeros(4000, device="openreg"), torch.openreg.Stream()
    torch.accelerator.synchronize()
    with side:
        x.add_(1)
    if not wait:
        x.mul_(2)
    return x


def test_one():
    race()


@pytest.mark.parametrize("n", [1, 2])
def test_two(n):
    with pytest.raises(RuntimeError):
        race()


def test_prints():
    use(race(wait=True))


def test_prints_in_an_assertion():
    x = race(wait=True)
    assert x is None


def test_host():
    pinned = torch.zeros(1000, pin_memory=True)
    x = torch.empty(1000, device="openreg")
    torch.openreg._sleep(5_000_000)
    x.copy_(pinned, non_blocking=True)
    pinned.copy_(torch.ones(1000))
"""


# With CI set, pytest's summary has whole messages.
@pytest.mark.parametrize("ci", ["", pytest.param("true", marks=pytest.mark.slow)])
def test_mistake_is_shown_once_without_frames_of_the_tool(suite, pytester, monkeypatch, ci):
    monkeypatch.setenv("CI", ci)
    more = ["-n2"] if ci else []
    more += ["--junitxml=junit.xml", "--openreg-report=pages"]
    done = suite(TWICE, "--openreg-sanitizer", *more)
    done.assert_outcomes(failed=6)
    shown = done.stdout.str()
    assert shown.count("Nothing orders the second after the first") == 2
    assert not re.search(
        r"raised in repr|pytest_openreg\.py|torch_openreg/|sanitizer/__init__", shown
    )
    done.stdout.fnmatch_lines(
        [
            "E  *data race *",
            "__* test_it.py::test_* and 2 more __*",
            "*2 mistakes found*",
            "*test_it.py:15 *(3 reports, by mul_, add_; in test_it.py::test_* and 2 more)",
        ]
    )
    pages = sorted(path.name for path in (pytester.path / "pages").iterdir())
    assert len(pages) == 7 and pages[0] == "index.html"
    assert all(page in (pytester.path / "pages" / pages[0]).read_text() for page in pages[1:])
    assert "data race" in (pytester.path / "pages" / "test-it-py-test-host.html").read_text()
    texts = [dict(found).get("openreg_report", "") for found in properties(pytester).values()]
    assert sum("nothing orders it with" in text and "called from" in text for text in texts) == 4


@pytest.mark.slow
def test_race_outside_of_tests_fails_the_run(suite):
    done = suite(SANITIZED, "--openreg-sanitizer", "-k", "test_good", "-n1")
    done.assert_outcomes(passed=1, deselected=done.parseoutcomes().get("deselected", 0))
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(["*openreg sanitizer: outside of tests*", "*: data race *"])


WIDER = (
    SANITIZED[: SANITIZED.index("def test_raises")]
    + """
def swallowed():
    with pytest.raises(RuntimeError):
        race()


@pytest.fixture(scope="module")
def begins():
    swallowed()


@pytest.fixture(scope="class")
def ends():
    yield
    swallowed()


@pytest.fixture
def own():
    swallowed()
    yield
    swallowed()


@pytest.mark.racy
def test_without_reason(begins):
    pass


class TestMarked:
    @pytest.mark.racy
    def test_marked(self, ends, own):
        pass


class TestExpected:
    @pytest.mark.xfail(raises=RuntimeError)
    def test_expected(self, ends, own):
        race()


@pytest.fixture(scope="session")
def narrower(request):
    pass


def test_own(own, request):
    request.getfixturevalue("narrower")
"""
)


def test_races_of_wider_fixtures_fail_the_run(suite):
    done = suite(WIDER, "--openreg-sanitizer", "-rA")
    done.assert_outcomes(passed=1, xfailed=1, failed=2, errors=1)
    done.stdout.fnmatch_lines(["ERROR *::test_own*", "FAILED *::test_without_reason*"])
    places = [line.partition(":")[0] for line in done.outlines if line.startswith("in the ")]
    assert places == ["in the module fixture begins", *["in the class fixture ends"] * 2]


LOST = """

def swallowed():
    with pytest.raises(RuntimeError):
        race()


@pytest.fixture(scope="session", autouse=True)
def session():
    yield
    swallowed()


def test_repeated(request):
    if request.node.stash.setdefault(ATTEMPTS, 0) == 0:
        request.node.stash[ATTEMPTS] = 1
        swallowed()


def test_that_leaves_a_thread(pytestconfig):
    def work():
        pytestconfig.ends.wait()
        swallowed()

    threading.Thread(target=work).start()


def test_that_ends_the_run():
    swallowed()
    pytest.exit("done", returncode=0)


ATTEMPTS = pytest.StashKey()
"""
REPEATS = """
import threading

import pytest
from _pytest.runner import runtestprotocol


def pytest_configure(config):
    config.ends = threading.Event()


@pytest.hookimpl(trylast=True)
def pytest_fixture_post_finalizer(fixturedef, request):
    if fixturedef.argname == "session":
        request.config.ends.set()


def pytest_runtest_protocol(item, nextitem):
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if any(report.failed for report in reports):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


def test_races_that_no_report_shows_fail_the_run(suite, pytester):
    pytester.makeconftest(REPEATS)
    text = SANITIZED[: SANITIZED.index("def test_raises")] + LOST
    done = suite(text, "--openreg-sanitizer")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    places = [line for line in done.outlines if re.match("in .*: data race ", line)]
    assert sorted(line.partition(": data race ")[0] for line in places) == [
        "in an attempt of test_it.py::test_repeated, which was repeated",
        "in code outside of tests",
        "in test_it.py::test_that_ends_the_run, which ended the run",
        "in the session fixture session",
    ]


def test_sanitizer_option_passes_a_suite_without_the_device(suite):
    suite("def test_it():\n    pass\n", "--openreg-sanitizer").assert_outcomes(passed=1)


def annotations(done):
    return [line for line in done.outlines if line.startswith("::error ")]


RACY_LINE, FAILED_LINE = 15, 18  # of RACY: the line to change, and the assertion


def test_annotations_name_a_test_that_fails_under_a_schedule(suite):
    done = suite(RACY, "--openreg-seed=late", "--openreg-annotations", "-k", "racy")
    (replay,) = (line.strip() for line in done.outlines if line.startswith("  replay: "))
    place = f"file=test_it.py,line={FAILED_LINE},title=fails under a schedule"
    said = "test_it.py::test_racy fails under late"
    assert annotations(done) == [f"::error {place}::{said}%0A{replay}"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_annotations_name_each_race_once(suite, pytester, monkeypatch, processes):
    """One for a race, however often it is reported; paths are from the root of the repository."""
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path.parent))
    arguments = ["--openreg-sanitizer", "--openreg-schedules=2", "--openreg-annotations"]
    if processes:
        arguments += ["-n", str(processes), "--dist=loadfile"]
    done = suite(RACY, *arguments)
    done.assert_outcomes(failed=3, passed=4)
    (line,) = annotations(done)
    file = f"{pytester.path.name}/test_it.py"
    command, _, message = line.partition("title=data race ")
    assert command == f"::error file={file},line={RACY_LINE},"
    assert "test_it.py:14" in message and "wait_stream" in message and "%0A" not in message


def test_annotations_of_a_race_without_a_frame_name_the_test(suite, pytester):
    """Here in a fixture's end, without stacks: that of the test."""
    text = """
import pytest
import torch


@pytest.fixture
def late():
    yield
    with torch.openreg.sanitizer.enable("warn", stacks=False):
        a, side = torch.ones(9, device="openreg"), torch.openreg.Stream()
        with side:
            a.mul_(5)
        side.synchronize()


@pytest.mark.filterwarnings("ignore")
def test_it(late):
    pass
"""
    done = suite(text, "--openreg-sanitizer", "--openreg-annotations")
    done.assert_outcomes(passed=1, errors=1)
    (line,) = annotations(done)
    assert line.startswith("::error file=test_it.py,line=15,title=data race ")


def properties(pytester):
    tests = ElementTree.parse(pytester.path / "junit.xml").iter("testcase")
    return {
        test.get("name"): [(p.get("name"), p.get("value")) for p in test.iter("property")]
        for test in tests
    }


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_junit_names_the_seed_that_failed(suite, pytester, processes):
    arguments = ["--openreg-seed=late", "--junitxml=junit.xml"]
    if processes:
        arguments += ["-n", str(processes), "--dist=loadfile"]
    suite(RACY, *arguments).assert_outcomes(passed=4, failed=1)
    found = properties(pytester)
    assert found.pop("test_racy[openreg-late]") == [("openreg_seed", "late")]
    assert len(found) == 4 and not any(found.values())


CUDA_ONLY = """
import unittest
import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA not available")


@needs_cuda
def test_pytest():
    torch.ones(3, device="cuda")


class TestUnit(unittest.TestCase):
    @unittest.skipUnless(torch.cuda.is_available(), "requires a GPU")
    def test_unittest(self):
        pass


@pytest.mark.skip(reason="takes long")
def test_other():
    pass
"""


@pytest.mark.slow
def test_plugin_names_the_setting_for_tests_that_skip_without_cuda(suite, monkeypatch):
    monkeypatch.delenv("OPENREG_AS_CUDA", raising=False)
    done = suite(CUDA_ONLY, "--openreg-schedules=1")
    done.assert_outcomes(skipped=3)
    done.stdout.fnmatch_lines(
        [
            "2 tests skipped for want of CUDA: with OPENREG_AS_CUDA=1 *",
            "no test has run under a schedule; those marked openreg do, all with *",
        ]
    )
    monkeypatch.setenv("OPENREG_AS_CUDA", "1")
    done = suite(CUDA_ONLY)
    done.assert_outcomes(passed=2, skipped=1)
    assert "want of CUDA" not in done.stdout.str()


def test_plugin_import_loads_nothing_else(run_ok):
    run_ok(
        fresh=True,
        code=f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        import pytest_openreg
        assert not {{"torch", "torch_openreg"}} & set(sys.modules)
        """,
    )


FREES = """
import pytest
import torch


@pytest.fixture
def side():
    stream = torch.openreg.Stream()
    yield stream
    torch.openreg.current_stream().wait_stream(stream)


def lend(side):
    x = torch.zeros(1000, device="openreg")
    side.wait_stream(torch.openreg.current_stream())
    with side:
        x.add_(1)
    return x


def test_never_waits():
    lend(torch.openreg.Stream())


def test_records():
    side = torch.openreg.Stream()
    lend(side).record_stream(side)


def test_waits_in_its_teardown(side):
    lend(side)


@pytest.mark.racy
def test_expects():
    lend(torch.openreg.Stream())


def test_stops():
    lend(torch.openreg.Stream())
    raise ValueError("before it waits")


def test_follows():
    assert torch.zeros(1000, device="openreg").sum() == 0
"""


def test_free_in_use_fails_its_test_at_the_end(suite):
    done = suite(FREES, "--openreg-sanitizer")
    done.assert_outcomes(passed=5, failed=1, errors=1)
    done.stdout.fnmatch_lines(["*ERROR at teardown of test_never_waits*"])
    assert " ".join(done.outlines).count(" is freed by the second, while ") == 1
