"""``python -m torch_openreg run --seeds N``: a program under many schedules, one process each.

The first process runs the program as it is, with the terminal's standard streams. The others run it
under a schedule, and read on standard input what the first has read (_run_streams.py).
"""

import base64
import concurrent.futures
import json
import os
import pickle
import signal
import sys
import tempfile
from dataclasses import dataclass, field

from . import _commands
from ._run import HOST_ACCESS, interpreter_options, program, run_command, say, write_pages
from ._run_streams import Input
from .openreg._lazy import _lazy_init
from .openreg.sanitizer._processes import REPORTS
from .openreg.testing._exploration import _ADDRESS
from .openreg.testing._schedules import BLOCKED, UNBLOCK, launches_block

_TAPE = "OPENREG_SCHEDULE_TAPE"
_DID_NOT_RUN = "did not run"
_NO_ENDING = "left by os._exit() or exec(), so that more is not known"


@dataclass
class _Run:
    status: int
    error: str = ""  # what ended the program; empty if it finished or exited
    place: str | None = None
    out: bytes = b""
    err: bytes = b""
    read: bytes = b""  # from a terminal
    code: int = 0  # of the process: 1 where the program's is 0 and there were races
    devices: list | None = None  # those that its first process used; None: not known
    blocked: bool = False  # each of its launches waited
    report: str = ""  # of an access to device memory that ended it
    reports: list = field(default_factory=list)
    tests: dict = field(default_factory=dict)  # the outcomes of pytest's tests, by name

    @property
    def ending(self):
        return self.status, _ADDRESS.sub("0x", self.error), self.place

    def __str__(self):
        details = " at ".join(filter(None, (self.error.partition("\n")[0], self.place)))
        return f"exit status {self.status}" + (f" ({details})" if details else "")


def _signal_name(number):
    return signal.Signals(number).name if number in iter(signal.Signals) else f"signal {number}"


def _host_access(file):
    """Reads what was written before the process died of touching device memory."""
    try:
        with open(file + HOST_ACCESS) as text:
            return text.read()
    except FileNotFoundError:
        return ""


def _run(options, start, *more):
    """Runs the program in a child, by `start`, which returns its status."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "ending")
        more = [*more, f"--ending={file}", *program(options)]
        code = start([sys.executable, *interpreter_options(), "-m", "torch_openreg", "run", *more])
        if code < 0:
            report = _host_access(file)
            cause = report.removeprefix("openreg: ") or _signal_name(-code)
            return _Run(128 - code, cause, code=128 - code, report=report)
        if not os.path.exists(file):
            return _Run(code, _NO_ENDING, code=code)
        with open(file) as text:
            ending = json.load(text)
    return _Run(
        ending["status"] if code == ending["code"] else code,
        ending["error"],
        ending["place"],
        read=ending["read"].encode("latin-1"),
        code=code,
        devices=ending["devices"],
        blocked=ending["blocked"],
        tests=ending["tests"],
        reports=pickle.loads(base64.b64decode(ending["reports"])),
    )


def _run_itself(options, given):
    run = _run(options, given.run_first, *["--sanitize"] * options.sanitize)
    print(run.report, end="", file=sys.stderr, flush=True)
    given.read = given.read or run.read
    return run


def _run_under(options, seed, given):
    # The program's own run has reported its races.
    environment = {**os.environ, "OPENREG_SCHEDULE_SEED": str(seed), REPORTS: ""}
    environment.pop(_TAPE, None)  # it takes precedence over a seed
    out = err = b""

    def start(command):
        nonlocal out, err
        code, out, err = given.run_again(command, environment)
        return code

    run = _run(options, start)
    run.out, run.err = out, err
    return run


def _shown(line):
    try:
        return repr(line.decode())
    except UnicodeDecodeError:
        return repr(line)


def _difference(first, run):
    """How the end or the output of `run` differs from `first`, in a line; None if it does not.
    pytest prints durations, so that of tests the outcomes are compared, and no output."""
    if run.tests != first.tests:
        return _difference_of_tests(first.tests, run.tests)
    if run.ending != first.ending:
        return f"{run} instead of {first}"
    if first.tests:
        return None
    lines, others = first.out.splitlines(), run.out.splitlines()
    for number, (line, other) in enumerate(zip(lines, others, strict=False), 1):
        if line != other:
            return f"prints {_shown(other)} instead of {_shown(line)} (line {number})"
    if len(lines) != len(others):
        return f"prints {len(others)} lines instead of {len(lines)}"
    return None if run.out == first.out else "ends a line otherwise"


def _difference_of_tests(first, tests, most=3):
    differ = [
        f"{name} {tests.get(name, _DID_NOT_RUN)} instead of {first.get(name, _DID_NOT_RUN)}"
        for name in {**first, **tests}
        if tests.get(name) != first.get(name)
    ]
    more = f" and {len(differ) - most} more" if len(differ) > most else ""
    return "; ".join(differ[:most]) + more


def _where(early):
    if early.devices is None:
        return "; which devices it used is not known, as it did not come to its end"
    return f" on {', '.join(early.devices)}" if early.devices else "; its process used no device"


def _show_progress(done, total):
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rtorch_openreg: {done} of {total} schedules", end=end, file=sys.stderr, flush=True)


def _compare(options, early, given):
    """Groups the seeds by how they differ from `early`, with those that do not under None. Also
    returns those with other output on stderr, and the first run of each group."""
    outcomes, other_stderr, firsts = {}, [], {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs or 1) as pool:
        runs = pool.map(lambda seed: _run_under(options, seed, given), range(options.seeds))
        for seed, run in enumerate(runs):
            _show_progress(seed + 1, options.seeds)
            difference = _difference(early, run)
            firsts.setdefault(difference, run)
            outcomes.setdefault(difference, []).append(seed)
            if run.err != early.err:
                other_stderr.append(seed)
    return outcomes, other_stderr, firsts


_SAME_AGAIN = (
    "each schedule runs the program again in the same folder, so it must do the same again"
)


def _say_incomparable(why, *lines):
    say(f"schedules: none was compared: {why}:")
    for line in lines:
        say(f"  {line}")
    return False


def _count(tests):
    return f"{len(tests)} test{'s' * (len(tests) != 1)}"


def _named(seeds):
    return ", ".join(map(str, seeds))


def _replay(options, seed):
    return _commands.command(run_command(options), options.environment, seed)


def _pages(options, early, outcomes, firsts):
    """The outcomes for --report: what 'early' does, and what the schedules do that differ."""
    from .openreg.sanitizer._page import Outcome

    yield Outcome("early", str(early), early.out.decode(errors="replace"))
    for difference, seeds in outcomes.items():
        if difference is not None:
            out = firsts[difference].out.decode(errors="replace")
            yield Outcome(_named(seeds), difference, out, _replay(options, seeds[0]))


def _say_outcomes(options, early, outcomes, other_stderr):
    same = len(outcomes.pop(None, []))
    does = "end and print as 'early' does"
    if early.tests:
        does = f"end as 'early' does, by the outcomes of {_count(early.tests)} (no output compared)"
    say(f"schedules: {same} of {options.seeds} {does}{_where(early)}")
    for difference, seeds in outcomes.items():
        say(f"  {_named(seeds)}: {difference}")
    if other_stderr:  # warnings of races, times and addresses differ, too
        say(f"  stderr, which does not count, differs from that of 'early': {_named(other_stderr)}")
    if outcomes:
        seed = next(iter(outcomes.values()))[0]
        say(f"to replay: {_replay(options, seed)}")
    return not outcomes


def _agree(options, own, given, pages):
    """Compares the schedules. Adds their outcomes to `pages` if there is to be a report."""
    if own.error == _NO_ENDING:
        return _say_incomparable("how the program ends by itself is not known", str(own))
    _lazy_init()  # as_cuda() reads CUDA_LAUNCH_BLOCKING then
    if own.blocked or launches_block():
        return _say_incomparable(BLOCKED, UNBLOCK)
    early = _run_under(options, "early", given)
    if early.ending != own.ending:
        return _say_incomparable(
            "under 'early' the program ends otherwise than by itself",
            f"{early} instead of {own}",
            _SAME_AGAIN,
        )
    outcomes, other_stderr, firsts = _compare(options, early, given)
    if set(outcomes) != {None}:
        again = _difference(early, _run_under(options, "early", given))
        if again:
            why = "'early', run twice, does not do the same"
            return _say_incomparable(why, again, _SAME_AGAIN)
    if options.report:
        pages += _pages(options, early, outcomes, firsts)
    return _say_outcomes(options, early, outcomes, other_stderr)


def run_schedules(options):
    """The exit status: the program's, or 1 if it is 0 and a race or a difference was found, or
    nothing could be compared."""
    given = Input()
    own = _run_itself(options, given)
    outcomes = []
    agree = _agree(options, own, given, outcomes)
    if options.report:
        write_pages(options, own.reports, outcomes)
    return own.code or int(not agree)
