"""``python -m torch_openreg run``: a script as it is, watched, and under many schedules."""

import concurrent.futures
import os
import runpy
import shlex
import subprocess
import sys
import traceback

from . import as_cuda
from .openreg import sanitizer
from .openreg._schedules import _synchronize


def _say(text):
    print(f"torch_openreg: {text}", file=sys.stderr, flush=True)


# ---- one run, in this process ----


def _execute(options):
    sys.argv = [options.program, *options.arguments]
    if options.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(options.program))
        runpy.run_path(options.program, run_name="__main__")
    _synchronize()  # raises the error of a kernel that nothing has waited for


def _status(error):
    """As the interpreter's: prints what ended the program."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _line(access):
    return f"{access.line.filename}:{access.line.line}" if access.line else "a line not recorded"


def _sum_up_races(reports):
    _say(f"sanitizer: {len(reports) or 'no'} data race{'s' * (len(reports) != 1)}")
    for report in reports:
        later, earlier = report.later, report.earlier
        _say(
            f"  {report.number}: {later.operator} ({_line(later)}) and {earlier.operator} "
            f"({_line(earlier)}); missing: {report.advice}"
        )


def _run_once(options):
    """The program's exit status, and how many races there were."""
    if options.sanitize:
        sanitizer.enable("warn")
    status = 0
    try:
        _execute(options)
    except BaseException as error:
        status = _status(error)
    reports = sanitizer.reports()
    if options.sanitize:
        _sum_up_races(reports)
    return status, len(reports)


# ---- many runs, each in a process of its own ----


def _command(options):
    named = [*["--as-cuda"] * options.as_cuda, *["--force"] * options.force]
    return ["-m", "torch_openreg", "run", *named, *["-m"] * options.module, *options.command]


def _run_under(options, seed):
    """(exit status, what it printed on stdout, the last line on stderr)"""
    done = subprocess.run(
        [sys.executable, *_command(options)],
        env={**os.environ, "OPENREG_SCHEDULE_SEED": str(seed)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
    return done.returncode, done.stdout, last[0]


def _outcome(first, run):
    """What a run did otherwise than the first, in a line; None: nothing."""
    if run[0] != first[0]:
        return f"exit status {run[0]} instead of {first[0]}: {run[2]}"
    lines, others = first[1].splitlines(), run[1].splitlines()
    for number, (line, other) in enumerate(zip(lines, others, strict=False), 1):
        if line != other:
            return f"prints {other!r} instead of {line!r} (line {number})"
    if len(lines) != len(others):
        return f"prints {len(others)} lines instead of {len(lines)}"
    return None


def _show_progress(done, total):
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rtorch_openreg: {done} of {total} schedules", end=end, file=sys.stderr, flush=True)


def _run_schedules(options):
    """Whether all ended as the first does, by exit status and by what they print on stdout."""
    outcomes = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        seeds = ["early", *range(options.seeds)]
        runs = pool.map(lambda seed: _run_under(options, seed), seeds)
        first = next(runs)
        for seed, run in enumerate(runs):
            _show_progress(seed + 1, options.seeds)
            outcomes.setdefault(_outcome(first, run), []).append(seed)
    same = len(outcomes.pop(None, []))
    _say(f"schedules: {same} of {options.seeds} do as 'early' does")
    for outcome, different in outcomes.items():
        _say(f"  {', '.join(map(str, different))}: {outcome}")
    if outcomes:
        seed = next(iter(outcomes.values()))[0]
        command = shlex.join(["python", *_command(options)])
        _say(f"to replay: OPENREG_SCHEDULE_SEED={seed} {command}")
    return not outcomes


def main(options):
    """The exit status: the program's, or 1 if it is 0 and something was found."""
    if not options.command:
        options.error("which program? python -m torch_openreg run script.py")
    if options.force and not options.as_cuda:
        options.error("--force belongs to --as-cuda")
    if options.seeds is not None and options.seeds < 1:
        options.error(f"--seeds: a number of schedules, at least 1, not {options.seeds}")
    options.program, *options.arguments = options.command
    if not options.module and not os.path.exists(options.program):
        options.error(f"there is no file {options.program!r}; -m runs a module")
    if options.as_cuda:
        try:
            as_cuda(options.force)
        except RuntimeError as error:
            options.error(str(error))
    status, races = _run_once(options)
    agree = _run_schedules(options) if options.seeds else True
    return status or int(races > 0 or not agree)
