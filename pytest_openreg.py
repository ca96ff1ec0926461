"""pytest plugin: tests under many schedules of the device ``openreg``, and under its sanitizer.

pytest loads it in every suite of an environment where the package is installed. So it is a module
of its own, outside ``torch_openreg``, and imports PyTorch only for a test that asks for it.
"""

import contextlib
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest

PARAMETER = "_openreg_schedule"
PART_OF_ID = re.compile(r"-?openreg-(early|late|seed\d+|tape[\d:,]+|preemptions\d+)(?=\]$)")
A_TAPE = re.compile(r"tape:\d+(:\d+)?(,\d+(:\d+)?)*", re.ASCII)
SEARCH = "preemptions"
SKIPPED = pytest.StashKey[int]()
MODE = pytest.StashKey[str | None]()  # the sanitizer's for the run
RACED = pytest.StashKey[bool]()  # of a test: whether a race of its program was reported
STOPPED = pytest.StashKey[bool]()  # of a test: whether an error ended it before its last wait
SUBTESTS = pytest.StashKey[list]()  # of a test in a search: how this run's subtests have ended
RACES = pytest.StashKey[list]()  # of a test: the races that its next report shows
SHOWN = pytest.StashKey[list]()  # of a test: those shown in its failed reports
HELD = pytest.StashKey[list]()  # of the running test: taken before a wider fixture began or ended
OUTSIDE = pytest.StashKey[list]()  # (where, text or finding) of what belongs to no test
SETTINGS = pytest.StashKey[dict]()  # the environment at the start: tests may change it
WATCH = pytest.StashKey[object]()  # of the tests' processes, if the sanitizer is wanted
WATCHED = pytest.StashKey[object]()  # what the processes were
TEST = pytest.StashKey[pytest.Item | None]()  # the running test
TESTS = pytest.StashKey[int]()  # the number that have run
STDERR = pytest.StashKey[int | None]()  # a file descriptor that is not captured
RACY = "racy: has data races on purpose: under --openreg-sanitizer it fails if none is reported"


def __tracebackhide__(excinfo):
    """pytest asks whether to show the frames of this module; of pytest.fail() it shows none."""
    return not excinfo.errisinstance(pytest.fail.Exception)


def _seed(text):
    if text in ("late", "early") or A_TAPE.fullmatch(text):
        return text
    if text.isascii() and text.isdigit() and int(text) < 2**64:
        return int(text)
    raise pytest.UsageError(
        f"--openreg-seed: a whole number from 0 to 2**64 - 1, late, early or a tape, not {text!r}"
    )


def pytest_addoption(parser):
    group = parser.getgroup("openreg", "the simulated accelerator openreg")
    group.addoption(
        "--openreg-schedules",
        type=int,
        default=0,
        metavar="N",
        help="run each test that is marked 'openreg' under the schedule 'early' and under N seeds",
    )
    group.addoption(
        "--openreg-schedules-all", action="store_true", help="... and the tests without the mark"
    )
    group.addoption(
        "--openreg-seed",
        metavar="SEED",
        help="the same for these, and for each test that is named: under this seed only, a number, "
        "late or a tape, whatever the other options say; it repeats a failure",
    )
    group.addoption(
        "--openreg-preemptions",
        type=int,
        metavar="K",
        help="the same under all schedules with at most K preemptions, in one test of its own",
    )
    group.addoption(
        "--openreg-limit",
        type=int,
        default=1000,
        metavar="N",
        help="how many of those are run at most for each test (1000)",
    )
    group.addoption(
        "--openreg-sanitizer",
        action="store_true",
        help="watch each test with torch.openreg.sanitizer; OPENREG_SANITIZER=1 does the same",
    )
    group.addoption(
        "--openreg-report",
        metavar="DIR",
        help="write a page of HTML for each failed test into this folder, and an index",
    )
    group.addoption(
        "--openreg-annotations",
        action="store_true",
        help="print mistakes and tests that fail under a schedule as annotations of GitHub",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "openreg: uses the device openreg; --openreg-schedules runs it under many orders"
    )
    config.addinivalue_line("markers", RACY)
    config.stash[SETTINGS] = dict(os.environ)
    by_setting = {"1": "error", "warn": "warn"}.get(os.environ.get("OPENREG_SANITIZER"))
    config.stash[MODE] = "error" if config.option.openreg_sanitizer else by_setting
    config.stash[OUTSIDE] = []
    config.stash[HELD] = []
    config.stash[TEST] = None
    config.stash[TESTS] = 0
    config.stash[STDERR] = _copy_of_stderr()
    if config.option.openreg_seed is not None:
        # The others may be among the project's addopts, which a replay cannot take back.
        config.option.openreg_schedules, config.option.openreg_preemptions = 0, None
        _seed(config.option.openreg_seed)
    if config.option.openreg_schedules < 0:
        raise pytest.UsageError("--openreg-schedules: N must not be negative")
    _check_search(config.option)
    if _schedules(config.option):
        _check_launches()


def _check_launches():
    """From the environment. A test that runs under a later change is refused (refuse_blocking)."""
    as_cuda = os.environ.get("OPENREG_AS_CUDA", "0") not in ("", "0")
    cudas = as_cuda and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
    if os.environ.get("OPENREG_LAUNCH_BLOCKING", "1" if cudas else "0") == "1":
        name = "CUDA_LAUNCH_BLOCKING" if cudas else "OPENREG_LAUNCH_BLOCKING"
        raise pytest.UsageError(
            f"{name}: each launch waits, so every schedule is the same; run the tests without it"
        )


def _copy_of_stderr():
    try:
        return os.dup(2)
    except OSError:  # closed
        return None


def _show_host_accesses(config):
    """Before the process dies of touching device memory, writes which operator did. It does not use
    the captured stderr, which would be lost."""
    package, stderr = sys.modules.get("torch_openreg"), config.stash[STDERR]
    if package is None or stderr is None or not hasattr(package, "openreg"):
        return
    config.stash[STDERR] = None  # once
    package._C._host_access_output(stderr)
    package.openreg._lazy._lazy_call(package._C._host_access_operators)


def _check_search(option):
    if option.openreg_limit < 1:
        raise pytest.UsageError("--openreg-limit: N must be at least 1")
    if option.openreg_preemptions is None:
        return
    if option.openreg_preemptions < 0:
        raise pytest.UsageError("--openreg-preemptions: K must not be negative")
    if option.openreg_schedules:
        raise pytest.UsageError("--openreg-preemptions takes the place of --openreg-schedules")


# ---- sanitizer ----


def pytest_sessionstart(session):
    config = session.config
    if config.stash[MODE] is None:
        return
    from torch_openreg.openreg.sanitizer._processes import Watch, Watched

    config.stash[WATCH] = Watch(config.stash[MODE])
    config.stash[WATCHED] = Watched()
    _print_unwatched(config, _watching(config))
    _shorten_in_threads(config, _watching(config))


def pytest_collection_finish(session):
    _keep_outside(session.config)


@pytest.hookimpl(trylast=True)  # after the fixtures that live until the end
def pytest_sessionfinish(session):
    """Races of what ran between tests, or in a test that ended the run, fail the run."""
    config = session.config
    if WATCH in config.stash:
        _wait_for_threads()
        ended_here = config.stash[TEST]  # by pytest.exit(), so it has no report
        if ended_here is not None:
            _move_outside(ended_here, RACES, f"{ended_here.nodeid}, which ended the run")
    _judge_frees(config)
    _keep_outside(config)
    _end_watch(config)
    races = config.stash[OUTSIDE]
    if hasattr(config, "workeroutput"):
        config.workeroutput["openreg_races"] = races
        if WATCHED in config.stash:
            watched = config.stash[TESTS], tuple(config.stash[WATCHED])
            config.workeroutput["openreg_watched"] = watched
    elif races and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Called when a process of pytest-xdist has ended."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[OUTSIDE] += output.get("openreg_races", [])
    if "openreg_watched" in output:
        from torch_openreg.openreg.sanitizer._processes import Watched

        tests, watched = output["openreg_watched"]
        node.config.stash[TESTS] += tests
        node.config.stash[WATCHED] += Watched(*watched)


def _wait_for_threads(seconds=10):
    """Waits for threads, as the interpreter would."""
    end = time.monotonic() + seconds
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(0, end - time.monotonic()))


def _move_outside(item, key, where):
    races, item.stash[key] = item.stash.get(key, []), []
    if not _expects(item):
        item.config.stash[OUTSIDE] += ((where, _finding(race, item.config)) for race in races)


def _end_watch(config):
    watch = config.stash.get(WATCH, None)
    if watch is None:
        return
    config.stash[WATCHED] += watch.watched()
    watch.close()
    del config.stash[WATCH]
    _sanitizer().disable()


def _keep_outside(config, where="code outside of tests"):
    outside = config.stash[OUTSIDE]
    try:
        outside += ((where, _finding(report, config)) for report in _take_reports(config) or ())
    except Exception as error:  # of a kernel that was not waited for
        outside.append((where, f"{type(error).__name__}: {error}"))


_REPORTING = re.compile(r".*_pytest[/\\](_io|_code|assertion[/\\]util\.py$)")


def _is_of_a_report(frame):
    while frame and not _REPORTING.match(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None


def _print_unwatched(config, sanitizer):
    """pytest prints tensors that a failed test has left behind, which the test does not read."""
    from torch import _tensor_str

    text_of = _tensor_str._str

    def text(*args, **kwargs):
        if _is_of_a_report(sys._getframe(1)):
            return sanitizer._call_unwatched(text_of, *args, **kwargs)
        return text_of(*args, **kwargs)

    _tensor_str._str = text
    config.add_cleanup(lambda: setattr(_tensor_str, "_str", text_of))


def _sanitizer():
    return sys.modules["torch_openreg"].openreg.sanitizer


def _watching(config):
    """Returns the sanitizer, switched on, if tests are watched."""
    if WATCH not in config.stash:
        return None
    sanitizer = _sanitizer()
    if not sanitizer.is_enabled():
        sanitizer.enable(config.stash[MODE])
    return sanitizer


def _take_reports(config, synchronize=True):
    """Returns the findings since the last call, in this process and in those that the test has
    started, with no work queued; None if the run is not watched."""
    sanitizer = _watching(config)
    if sanitizer is None:
        return None
    try:
        if synchronize:
            _synchronize_devices(sanitizer)
        held, config.stash[HELD] = config.stash[HELD], []
        return held + sanitizer.reports() + _reports_of_processes(config)
    finally:
        sanitizer._clear()


def _synchronize_devices(sanitizer):
    """An error of the host that has not been raised yet is raised here. Its report is enough."""
    try:
        _synchronize()
    except sanitizer.DataRaceError as error:
        if getattr(error, "__notes__", ()):  # errors of other devices
            raise


def _reports_of_processes(config):
    """A report of a process that an earlier test started is too late for that test, and fails the
    run."""
    mine = []
    for test, report in config.stash[WATCH].take():
        if test is config.stash[TEST]:
            mine.append(report)
        elif test is None or not _expects(test):
            starter = f"{test.nodeid}, which has ended" if test else "no test"
            where = f"a process started by {starter}"
            config.stash[OUTSIDE].append((where, _finding(report, config)))
    return mine


def _expects(item):
    """Whether its races are expected: by the marker racy, or an xfail's exceptions."""
    if item.get_closest_marker("racy"):
        return True
    from _pytest.skipping import xfailed_key

    xfail = item.stash.get(xfailed_key, None)
    errors = getattr(xfail, "raises", None) or ()
    errors = errors if isinstance(errors, tuple) else (errors,)
    sanitizer = _watching(item.config)
    return sanitizer is not None and issubclass(sanitizer.DataRaceError, errors)


def _mistakes():
    from torch_openreg.openreg.sanitizer import _mistakes

    return _mistakes


def _finding(race, config):
    """The race for the summary. Its place is a line of the project, if there is one."""
    frames = [(frame.filename, frame.line) for frame in race.later.stack or ()]
    own = (place for place in (race.place, *frames) if place and _is_of_project(place[0], config))
    return {**_mistakes().finding(race), "place": next(map(tuple, own), None)}


def _titles(races):
    """The races of a failed test in short: their text has a section of its own."""
    return "\n".join(dict.fromkeys(f"{race.title}\n  {race.summary()}" for race in races))


def _fail(item, races):
    _keep(item, races)
    pytest.fail(_titles(races), pytrace=False)


def _keep(item, races):
    item.stash.setdefault(RACES, []).extend(races)


def _is_of_project(file, config):
    """Whether the file is the project's. Its environment, which may be in its folder, is not."""
    path = Path(file)
    return path.is_relative_to(config.rootpath) and "site-packages" not in path.parts


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    _show_host_accesses(item.config)
    _begin_test(item)


def _begin_test(item):
    """Processes that are started from now on belong to the test."""
    config = item.config
    if WATCH in config.stash:
        # Another plugin repeats the test, which withdraws the failed report of the last attempt.
        _move_outside(item, SHOWN, f"an attempt of {item.nodeid}, which was repeated")
        config.stash[TEST] = item
        config.stash[TESTS] += 1
        config.stash[WATCH].begin(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    _show_host_accesses(item.config)  # of a package that a fixture loaded
    try:
        result = yield from _scheduled(item)
    except pytest.skip.Exception:
        item.stash[STOPPED] = True
        _fail_unless_expected(item)
        raise
    except BaseException:
        item.stash[STOPPED] = True
        _keep_with_error(item)
        raise
    if not item.get_closest_marker("racy"):
        _fail_unless_expected(item)
        return result
    _judge_frees(item.config)
    if _take_reports(item.config) == [] and not item.stash.get(RACED, False):
        pytest.fail("the test is marked racy, and the sanitizer reports nothing", pytrace=False)
    return result


def _fail_unless_expected(item):
    races = _take_reports(item.config)
    if races and not _expects(item):
        _fail(item, races)


def _keep_with_error(item):
    """The error fails the test, or is expected (_turn_into_failure)."""
    _keep(item, _take_reports(item.config, synchronize=False) or [])


# A fixture of a class, module, package or session serves many tests: its races fail the run,
# because the marks of a single test do not apply to them.


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    if fixturedef.scope == "function":
        return (yield)
    _hold(request.config)
    try:
        return (yield)
    finally:
        _keep_outside_of_tests(request.config, fixturedef)


def pytest_fixture_post_finalizer(fixturedef, request):
    if fixturedef.scope == "function":
        _hold(request.config)
    else:
        _keep_outside_of_tests(request.config, fixturedef)


def _hold(config):
    """Sets the test's races aside. Later ones are the fixture's."""
    config.stash[HELD] = _take_reports(config) or []


def _keep_outside_of_tests(config, fixturedef):
    held, config.stash[HELD] = config.stash[HELD], []
    _keep_outside(config, f"the {fixturedef.scope} fixture {fixturedef.argname}")
    config.stash[HELD] = held


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    try:
        result = yield
        if not item.stash.get(STOPPED, False):
            _judge_frees(item.config)
        _fail_unless_expected(item)
    finally:
        _end_test(item)
    return result


def _judge_frees(config):
    """The program's order ends here: nothing waits any more for what it has freed in use."""
    sanitizer = _watching(config)
    if sanitizer is not None:
        sanitizer._judge_frees()


def _end_test(item):
    if WATCH in item.config.stash:
        item.config.stash[TEST] = None
        item.config.stash[WATCH].begin(None)
        _synchronize(orders=True)  # the next test is a program of its own


# ---- schedules ----


def _schedules(option):
    """The schedules of each test. The first run meets the shapes that are new to the process:
    operators wait less for known shapes, so a seed has a fixed meaning only after such a run."""
    if option.openreg_seed is not None:
        return list(dict.fromkeys(["early", _seed(option.openreg_seed)]))
    if option.openreg_preemptions is not None:
        return ["early", f"{SEARCH}{option.openreg_preemptions}"]
    return ["early", *range(option.openreg_schedules)] if option.openreg_schedules else []


def _id(schedule):
    if isinstance(schedule, str):
        return f"openreg-{schedule.replace('tape:', 'tape')}"
    return f"openreg-seed{schedule}"


def _is_search(schedule):
    return isinstance(schedule, str) and schedule.startswith(SEARCH)


def _is_chosen(definition):
    option = definition.config.option
    if option.openreg_schedules_all or definition.get_closest_marker("openreg") is not None:
        return True
    return option.openreg_seed is not None and _is_named(definition)


def _is_named(definition):
    """Whether an argument of the command line names the test, or its class."""
    own = definition.nodeid.partition("[")[0].split("::")
    for argument in definition.config.args:
        path, *names = argument.partition("[")[0].split("::")
        same_file = Path(definition.config.invocation_params.dir, path) == definition.path
        if names and same_file and own[1 : len(names) + 1] == names:
            return True
    return False


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    schedules = _schedules(metafunc.config.option)
    if schedules and _is_chosen(metafunc.definition):
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(PARAMETER, schedules, ids=map(_id, schedules))


def _schedule_of(item):
    callspec = getattr(item, "callspec", None)
    return callspec.params.get(PARAMETER) if callspec else None


def pytest_collection_modifyitems(config, items):
    if _schedules(config.option):
        chosen = [item for item in items if _is_chosen(item)]
        config.stash[SKIPPED] = sum(_schedule_of(item) is None for item in chosen)


def _synchronize(orders=False):
    """The tool's own, which makes no program right."""
    from torch_openreg.openreg.device import synchronize_all
    from torch_openreg.openreg.sanitizer import _without_order

    with contextlib.nullcontext() if orders else _without_order():
        synchronize_all()


def _scheduled(item):
    schedule = _schedule_of(item)
    if schedule is None or _is_search(schedule):
        return (yield)
    import gc

    import torch

    from torch_openreg.openreg.testing._schedules import refuse_blocking

    refuse_blocking("a test under a schedule")
    gc.collect()
    torch.manual_seed(0)
    with torch.openreg.testing.schedule(schedule):
        result = yield
        _synchronize()
    return result


class _Run:
    """Calls a test under one schedule. Returns the ends of the test and its subtests, so that
    explore() compares them; a failure is an exception."""

    def __init__(self, item, call_test):
        from unittest import SkipTest

        self.skip_types = (pytest.skip.Exception, SkipTest, pytest.xfail.Exception)
        self._item, self._call_test = item, call_test
        self.skips = False  # whether the last call did

    def __call__(self):
        self.skips, end = False, []
        self._item.stash[SUBTESTS] = subtests = []
        try:
            self._call_test(pyfuncitem=self._item)
        except self.skip_types as error:
            self.skips = True
            reason = re.sub(r"\b0x[0-9a-f]+\b", "0x", str(error))  # as explore() does to errors
            end = [f"{type(error).__name__}: {reason}"]
        except pytest.fail.Exception as error:  # no Exception
            raise AssertionError(str(error)) from None
        finally:
            del self._item.stash[SUBTESTS]
        if "failed" in subtests:
            raise AssertionError(f"{_count(subtests.count('failed'), 'subtest')} failed")
        return subtests + end or None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """The search: a test calls its function many times, between one setup and one teardown."""
    if not _is_search(_schedule_of(pyfuncitem)):
        return None
    import torch

    import torch_openreg  # noqa: F401

    config = pyfuncitem.config
    here = sys.modules[__name__]
    # Called as without a search: an async function by the plugin that runs those.
    call_test = config.pluginmanager.subset_hook_caller("pytest_pyfunc_call", [here])

    torch.manual_seed(0)
    testing = torch.openreg.testing
    option = config.option
    run = _Run(pyfuncitem, call_test)
    found = testing.explore(
        run, preemptions=option.openreg_preemptions, limit=option.openreg_limit, progress=False
    )
    pyfuncitem.user_properties.append(("openreg_search", found._headline()[0]))
    if found.ok and not run.skips:
        return True
    tapes = [seed for seed in found.different if seed != "early"]
    seed = (tapes or ["early"])[0]
    if not found.ok:
        pyfuncitem.user_properties.append(("openreg_seed", seed))
    torch.manual_seed(0)
    may_skip = contextlib.nullcontext() if found.ok else contextlib.suppress(*run.skip_types)
    with testing.schedule(seed), may_skip:  # once more, with its traceback
        call_test(pyfuncitem=pyfuncitem)
        _synchronize()
    if not found.ok:
        pytest.fail(str(found), pytrace=False)  # it fails in some other way, or skips
    return True


@pytest.fixture
def openreg_device():
    """``torch.device("openreg:0")``. After the test all devices are synchronised, so that their
    errors belong to this test."""
    import torch

    from torch_openreg.openreg._utils import OWN_NAME

    if not torch.openreg.device_count():
        pytest.fail(f"openreg_device: there is no {OWN_NAME} device (is OPENREG_DEVICE_COUNT 0?)")
    yield torch.device(OWN_NAME, 0)
    _synchronize()


# ---- report ----


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the one that makes reports of xfail
def pytest_runtest_makereport(item, call):
    races, item.stash[RACES] = item.stash.get(RACES, []), []
    with _shortened(call.excinfo and call.excinfo.value, races):
        report = yield
    if SUBTESTS in item.stash:
        item.stash[SUBTESTS].append(report.outcome)
    if races and report.skipped and not _expects(item):
        _turn_into_failure(report, races)
    if report.failed:
        item.stash.setdefault(SHOWN, []).extend(races)
        if races:
            _shorten_the_summary(report)
        # Goes with the report to the process that prints it.
        report.openreg_races = [_finding(race, item.config) for race in races]
        for found, *_ in _mistakes().by_mistake(report.openreg_races) if races else ():
            _add_property(item, report, "openreg_report", f"{found['text']}\n\n{found['details']}")
        schedule = _schedule_of(item)
        if schedule is not None and not _is_search(schedule):
            _add_property(item, report, "openreg_seed", str(schedule))
        if item.config.option.openreg_report:
            report.openreg_page = _write_page(item.config, report, races)
    return report


def _write_page(config, report, races):
    """Returns its name and its title."""
    import torch_openreg  # noqa: F401
    from torch_openreg.openreg.sanitizer._page import Page, save

    title = report.nodeid if report.when == "call" else f"{report.nodeid}, {report.when}"
    name = f"{re.sub(r'[^A-Za-z0-9]+', '-', title).strip('-')}.html"
    match = PART_OF_ID.search(report.nodeid)
    command = ""
    if match and not _is_search(match[1]):
        command = _replay(config, report.nodeid, match[1].replace("tape", "tape:"))
    folder = config.invocation_params.dir / config.option.openreg_report
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / name, [Page(title, tuple(races), (), command, report.longreprtext)], title)
    return name, title


def _write_index(terminalreporter, config):
    from torch_openreg.openreg.sanitizer._page import Page, save_index

    reports = terminalreporter.getreports("failed") + terminalreporter.getreports("error")
    pages = [report.openreg_page for report in reports if hasattr(report, "openreg_page")]
    folder = config.invocation_params.dir / config.option.openreg_report
    title = f"{_count(len(pages), 'page')} of {config.rootpath.name}"
    save_index(folder, title, [(name, Page(title)) for name, title in pages])
    terminalreporter.line(f"openreg: pages of failed tests: {folder / 'index.html'}")


def _add_property(item, report, name, value):
    """For the JUnit file."""
    for properties in (item.user_properties, report.user_properties):
        if (name, value) not in properties:
            properties.append((name, value))


def _shorten_in_threads(config, sanitizer):
    """pytest warns of an error that ends a thread."""
    hook = threading.excepthook

    def shortened(ended):
        own = getattr(ended.exc_value, "report", None)  # the test may have taken it already
        races = [own] if isinstance(own, sanitizer.Report) else sanitizer.reports()
        with _shortened(ended.exc_value, races):
            hook(ended)

    threading.excepthook = shortened
    config.add_cleanup(lambda: setattr(threading, "excepthook", hook))


@contextlib.contextmanager
def _shortened(error, races):
    """In the block the message of an error that was raised for a race is the race's title: its text
    has a section of its own."""
    changed = []
    while error is not None:
        titles = [race.title for race in races if race.text(kind="") in str(error)]
        if titles:
            changed.append((error, error.args))
            error.args = ("\n".join(titles),)
        error = error.__cause__ or error.__context__
    try:
        yield
    finally:
        for error, arguments in changed:
            error.args = arguments


def pytest_runtest_logreport(report):
    """Under ``python -m torch_openreg run --seeds``, which compares the outcomes of tests."""
    run = sys.modules.get("torch_openreg._run")
    if run is None or (report.passed and report.when != "call"):
        return
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    elif report.failed and report.when != "call":
        outcome = f"failed in its {report.when}"
    run.tests[report.nodeid] = outcome


def _turn_into_failure(report, races):
    """For a test that is expected to fail, but not by a race."""
    report.outcome = "failed"
    report.longrepr = _titles(races)
    if hasattr(report, "wasxfail"):
        del report.wasxfail


def _shorten_the_summary(report):
    """With CI set, pytest's summary has the whole message of an error. A race's report has already
    been shown, so its first line alone names it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash:
        crash.message = crash.message.partition("\n")[0]


# Options of a run that a replay does not repeat: they select tests, or write files.
_NOT_REPEATED = re.compile(
    r"-[xvq]+|-[kmn].+|--(exitfirst|(lf|ff|nf|sw|last-failed|failed-first|new-first|stepwise)"
    r"(-\w+)*|openreg-schedules-all|openreg-annotations)"
)
_NOT_REPEATED_WITH_VALUE = re.compile(
    r"-[kmn]|--(numprocesses|dist|maxfail|junit-?xml|basetemp|deselect|ignore(-glob)?"
    r"|openreg-(schedules|seed|preemptions|limit|report))"
)


def _repeated_options(config):
    has_value, options = False, []
    for word in map(str, config.invocation_params.args):
        if has_value:
            has_value = False
        elif _NOT_REPEATED_WITH_VALUE.fullmatch(word.partition("=")[0]):
            has_value = "=" not in word
        elif not _NOT_REPEATED.fullmatch(word) and word not in config.option.file_or_dir:
            options.append(word)
    return options


def _replay(config, nodeid, schedule):
    """The test alone. Of its other parameters only these are kept, as in both ids."""
    from torch_openreg._commands import command

    path, *names = nodeid.split("::", 1)
    path = os.path.relpath(config.rootpath / path, config.invocation_params.dir)
    nodeid = "::".join([path, *names])
    bare = PART_OF_ID.sub("", nodeid)
    seed = schedule.removeprefix("seed")
    tests = [bare.removesuffix("[]")]
    if not bare.endswith("[]"):
        start = nodeid[: PART_OF_ID.search(nodeid).end(1) - len(PART_OF_ID.search(nodeid)[1])]
        tests = [f"{start}early]", f"{start}{schedule.replace('tape:', 'tape')}]"]
    pytest = ["python", "-m", "pytest"] if sys.argv[0].endswith("__main__.py") else ["pytest"]
    words = [*pytest, *_repeated_options(config), f"--openreg-seed={seed}", *dict.fromkeys(tests)]
    return command(words, config.stash[SETTINGS])


def _failed(terminalreporter):
    """The reports of what failed under a schedule: by test, then by schedule."""
    failed = {}
    for report in terminalreporter.getreports("failed") + terminalreporter.getreports("error"):
        match = PART_OF_ID.search(report.nodeid)
        if match:
            test = PART_OF_ID.sub("", report.nodeid).removesuffix("[]")
            name = match[1].replace("tape", "tape:")
            if _is_search(name):
                seed = dict(report.user_properties).get("openreg_seed")
                if seed is None and report.when == "call":
                    continue  # a subtest, before the search has ended
                name = seed or "early"
            failed.setdefault(test, {})[name] = report
    return failed


def _searches(terminalreporter):
    """The outcome of each search, a line for each."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    lines = []
    for report in reports:
        said = dict(report.user_properties).get("openreg_search")
        if said and report.when == "call":
            lines.append(f"{PART_OF_ID.sub('', report.nodeid).removesuffix('[]')}: {said}")
    return list(dict.fromkeys(lines))  # subtests have reports of their own


def _finished(terminalreporter):
    """How many runs of tests under a schedule, and how many searches, came to an end."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    nodeids = dict.fromkeys(report.nodeid for report in reports if report.when == "call")
    matches = map(PART_OF_ID.search, nodeids)
    names = [match[1] for match in matches if match]
    runs = [name for name in names if not _is_search(name)]
    if not names:
        return (
            "no test has run under a schedule; those marked openreg do, all with "
            "--openreg-schedules-all, and those that are named (file.py::test) with --openreg-seed"
        )
    text = f"finished: {_count(len(runs), 'run')} under {_count(len(set(runs)), 'schedule')}"
    searches = len(names) - len(runs)
    return f"{text}, {searches} search{'es' * (searches != 1)}" if searches else text


def _count(number, noun):
    return f"{number} {noun}{'s' * (number != 1)}"


def _say(config, test, schedules):
    """Two lines: which schedules a test fails under, and how to repeat it."""
    names = ", ".join(name.removeprefix("seed") for name in schedules)
    schedule, report = next(iter(schedules.items()))
    return f"{test} fails under {names}", f"  replay: {_replay(config, report.nodeid, schedule)}"


def _found(terminalreporter, config):
    """((where, finding), ...) for each mistake, the first one first."""
    found = []
    for report in terminalreporter.getreports("failed") + terminalreporter.getreports("error"):
        test = PART_OF_ID.sub("", report.nodeid).removesuffix("[]")
        found += ((test, race) for race in getattr(report, "openreg_races", ()))
    found += ((where, what) for where, what in config.stash[OUTSIDE] if isinstance(what, dict))
    groups = {}
    for where, race in found:
        groups.setdefault(race["mistake"], []).append((where, race))
    return list(groups.values())


def _show_reports(terminalreporter, found):
    """The text of each mistake, once."""
    for number, group in enumerate(found, 1):
        tests = list(dict.fromkeys(where for where, _ in group))
        more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        terminalreporter.write_sep("_", f"{number}: {tests[0]}{more}")
        terminalreporter.line(_painted(terminalreporter, group[0][1]["text"]))


def _painted(terminalreporter, text):
    """By --color, NO_COLOR and FORCE_COLOR, as the rest of the report."""
    from torch_openreg.openreg import _messages

    return _messages.paint(text) if terminalreporter._tw.hasmarkup else text


def _say_watched(terminalreporter, config, found):
    outside = config.stash[OUTSIDE]
    if WATCHED not in config.stash and not outside:
        return
    terminalreporter.section("openreg sanitizer")
    _show_reports(terminalreporter, found)
    if found:
        terminalreporter.write_sep("-", f"{_count(len(found), 'mistake')} found")
    for number, group in enumerate(found, 1):
        tests = dict.fromkeys(where for where, _ in group)
        line = _mistakes().line([race for _, race in group], tests)
        terminalreporter.line(f"{number}: {line}")
    if WATCHED in config.stash:
        tests, watched = config.stash[TESTS], config.stash[WATCHED]
        terminalreporter.line(f"watched: {_count(tests, 'test')}; {watched}")
        for gap in watched.gaps():
            terminalreporter.line(gap)
    if outside:
        terminalreporter.section("openreg sanitizer: outside of tests, which fails the run")
        for where, what in outside:
            what = what["title"] if isinstance(what, dict) else what
            terminalreporter.line(f"in {where}: {what}")


_WANTS_CUDA = re.compile(r"cuda|\bgpus?\b", re.IGNORECASE)


def _say_skipped_without_cuda(terminalreporter, config):
    """Whether PyTorch has CUDA is known where tests have run, if it has been imported at all."""
    torch = sys.modules.get("torch")
    elsewhere = config.pluginmanager.hasplugin("dsession")  # in processes of pytest-xdist
    if "OPENREG_AS_CUDA" in os.environ or not (torch.cuda if torch else elsewhere):
        return
    if torch and torch.cuda.is_available():
        return
    reports = terminalreporter.getreports("skipped")
    reasons = (report.longrepr[-1] for report in reports if isinstance(report.longrepr, tuple))
    skipped = sum(bool(_WANTS_CUDA.search(reason)) for reason in reasons)
    if skipped:
        terminalreporter.section("openreg")
        terminalreporter.line(
            f"{_count(skipped, 'test')} skipped for want of CUDA: with OPENREG_AS_CUDA=1 in the\n"
            "environment, cuda is the simulated device, and they run"
        )


def pytest_terminal_summary(terminalreporter, config):
    found = _found(terminalreporter, config)
    _say_watched(terminalreporter, config, found)
    _say_skipped_without_cuda(terminalreporter, config)
    failed = _failed(terminalreporter)
    searches = _searches(terminalreporter)
    skipped = config.stash.get(SKIPPED, 0)
    if _schedules(config.option):
        terminalreporter.section("openreg schedules")
        terminalreporter.line(_finished(terminalreporter))
        for line in searches:
            terminalreporter.line(line)
        for test, schedules in failed.items():
            for line in _say(config, test, schedules):
                terminalreporter.line(line)
        if skipped:
            why = "taking no parameters, as methods of unittest.TestCase"
            terminalreporter.line(f"without schedules, {why}: {skipped}")
    if config.option.openreg_report:
        _write_index(terminalreporter, config)
    if config.option.openreg_annotations:
        for place, title, message in _annotations(terminalreporter, config, found, failed):
            terminalreporter.line(_command(place, title, message, config))


# ---- GitHub's annotations ----


def _path(file, config):
    """GitHub finds the file by its path from the root of the repository."""
    root = Path(os.environ.get("GITHUB_WORKSPACE") or config.rootpath)
    path = config.rootpath / file
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _escaped(text, also=""):
    for character in "%\r\n" + also:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _command(place, title, message, config):
    properties = {"file": _path(place[0], config), "line": str(place[1]), "title": title}
    text = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::error {text}::{_escaped(message)}"


def _place(report, config):
    """Where a test failed, if that is in the project, else where it begins."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash and _is_of_project(crash.path, config):
        return crash.path, crash.lineno
    file, line, _ = report.location
    return file, (line or 0) + 1


def _annotations(terminalreporter, config, found, failed):
    """((file, line), title, message) of each mistake, on the line to change, and of each test that
    fails under a schedule without one."""
    reports = terminalreporter.getreports("failed") + terminalreporter.getreports("error")
    starts = {PART_OF_ID.sub("", r.nodeid).removesuffix("[]"): _place(r, config) for r in reports}
    for group in found:
        where, race = group[0]
        place = race["place"] or starts.get(where)
        if place:
            yield place, race["title"], race["summary"].replace(f"{config.rootpath}/", "")
    for test, schedules in failed.items():
        plain = [r for r in schedules.values() if not getattr(r, "openreg_races", ())]
        if plain:
            message = "\n".join(line.strip() for line in _say(config, test, schedules))
            yield _place(plain[0], config), "fails under a schedule", message
