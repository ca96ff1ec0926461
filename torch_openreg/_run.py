"""``python -m torch_openreg run``: runs an unchanged script, watched, and under many schedules.

With ``--seeds`` each run is a process of its own (_run_seeds.py). Such a child is started with
``--ending FILE`` and writes there how the program ended.
"""

import atexit
import base64
import builtins
import faulthandler
import io
import json
import os
import pickle
import runpy
import subprocess
import sys
import threading
import traceback
import warnings

from . import _C, _commands, as_cuda
from ._patches import replace
from .openreg import _messages, sanitizer
from .openreg.device import synchronize_all
from .openreg.sanitizer import _mistakes, _processes
from .openreg.testing._schedules import launches_block

HOST_ACCESS = ".host-access"
_ended = []  # the program's variables, which live until the interpreter ends, as without this tool
tests = {}  # the outcomes of tests that have run in this process, by name (pytest_openreg.py)
_PACKAGES = tuple(os.path.dirname(sys.modules[name].__file__) for name in ("torch", __package__))


def say(text):
    print(f"torch_openreg: {text}", file=sys.stderr, flush=True)


def _execute(options):
    sys.argv = [options.program, *options.arguments]
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        file = os.path.realpath(options.program)
        sys.path[0] = os.getcwd() if options.module else os.path.dirname(file)
    if options.module:
        ended = runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        ended = runpy.run_path(options.program, run_name="__main__")
    _ended.append(ended)
    if not _C._in_forked_child():
        with sanitizer._without_order():
            synchronize_all()  # raises the error of a kernel that nothing has waited for


def _status(error):
    """Handles it as the interpreter does: sys.excepthook prints the exception that ended the
    program."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except SystemExit as end:
        return _status(end)
    except BaseException as failure:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(failure)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _sum_up(reports, watched):
    """Prints a line for each mistake."""
    mistakes = _mistakes.by_mistake(map(_mistakes.finding, reports))
    if not (mistakes or watched.processes):
        say(f"sanitizer: nothing was watched: {watched}")
    else:
        found = f"{len(mistakes) or 'no'} mistake{'s' * (len(mistakes) != 1)} found"
        say(f"sanitizer: {found} in {watched}")
    for number, group in enumerate(mistakes, 1):
        say(f"  {number}: {_mistakes.line(group)}")
    for gap in watched.gaps():
        say(f"  {gap}")
    if not sanitizer.is_enabled():
        say("  not watched: what came after the program had switched the sanitizer off")


# ---- how a program ended ----


class _RecordedInput(io.RawIOBase):
    """A terminal, which records what the program has read."""

    def __init__(self, raw):
        self._raw = raw
        self.taken = bytearray()

    def readable(self):
        return True

    def fileno(self):
        return self._raw.fileno()

    def isatty(self):
        return self._raw.isatty()

    def readinto(self, buffer):
        count = self._raw.readinto(buffer)
        self.taken += buffer[: count or 0]
        return count


def _record_terminal():
    """Replaces sys.stdin and input(), which does not read through it. Other input is recorded
    outside the process (_run_streams.py)."""
    if sys.stdin is None or not sys.stdin.isatty():
        return _RecordedInput(io.BytesIO())
    recorded, plain_input = _RecordedInput(sys.stdin.buffer.raw), builtins.input
    recorded.stdin = sys.stdin  # which closes the terminal when it goes
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(
        io.BufferedReader(recorded), sys.stdin.encoding, sys.stdin.errors, line_buffering=True
    )

    def recorded_input(prompt=""):
        before = len(recorded.taken)
        line = plain_input(prompt)
        if len(recorded.taken) == before:
            recorded.taken += f"{line}\n".encode(sys.stdin.encoding)
        return line

    builtins.input = recorded_input
    return recorded


def _place(error):
    """The program's position: its innermost line outside PyTorch and this package."""
    lines = traceback.extract_tb(error.__traceback__)
    own = [line for line in lines if not line.filename.startswith((*_PACKAGES, "<frozen"))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def _describe(error):
    if error is None:
        return "", None
    if isinstance(error, SystemExit):
        return ("", None) if isinstance(error.code, int | None) else (str(error.code), None)
    return "".join(traceback.format_exception_only(error)).strip(), _place(error)


def _write_ending(path, error, **ending):
    ending["error"], ending["place"] = _describe(error)
    with open(path, "w") as file:
        json.dump(ending, file)


# ---- one run, in this process ----


def _report_host_accesses(options):
    """Before the process dies of touching device memory, writes which operator did, and Python's
    lines. What another process prints goes into a file beside its ending."""
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)
    _C._host_access_operators()
    # PyTorch 2.15 calls a custom operator's kernel in Python without observers of operators.
    replace("torch._ops.OpOverload._can_enable_pyobj_dispatch", lambda operator: False)
    if options.ending:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        _C._host_access_output(os.open(options.ending + HOST_ACCESS, flags, 0o600))


def _wait_as_the_interpreter_does():
    """Joins threads and processes, and runs atexit's functions: all of these may race."""
    for wait in (threading._shutdown, atexit._run_exitfuncs):
        try:
            wait()
        except BaseException:
            traceback.print_exc()


def _show_reports_without_a_prefix():
    """As they are, not as warnings with a place of their own."""
    plain = warnings.formatwarning

    def formatted(message, *where, **line):
        report = sanitizer._report_of(str(message))
        if report:
            return f"{report.text(_messages.wants_colour(sys.stderr))}\n\n"
        return plain(message, *where, **line)

    warnings.formatwarning = formatted


def _watch():
    _show_reports_without_a_prefix()
    sanitizer.enable("warn")
    return _processes.Watch("warn")


def _end_watch(watch):
    """Prints the summary and returns the reports. A forked child of the program also runs this; it
    prints nothing, because it has sent its reports."""
    _wait_as_the_interpreter_does()
    if not watch.is_here():
        return []
    reports = sanitizer.reports() + [report for _, report in watch.take()]
    _sum_up(reports, watch.watched())
    watch.close()
    return reports


def _reports():
    """The reports; a forked child cannot read them."""
    return [] if _C._in_forked_child() else sanitizer.reports()


def write_pages(options, reports, outcomes=()):
    """Writes what was found as HTML, for --report."""
    from .openreg.sanitizer import _page  # jinja2 takes a while

    pages = [
        _page.Page(first.title, (first, *others), command=options.printed)
        for first, others in _page.Page("", tuple(reports)).mistakes()
    ]
    if outcomes:
        pages.append(_page.Page("Schedules", outcomes=tuple(outcomes), command=options.printed))
    _page.save(options.report, pages, f"{options.program}: {len(pages)} found")
    say(f"report: {options.report}")


def run_once(options):
    """The program's exit status, or 1 if it is 0 and there were races."""
    _report_host_accesses(options)
    process = os.getpid()
    recorded = _record_terminal() if options.ending else None
    watch = _watch() if options.sanitize else None
    status, ended_by = 0, None
    try:
        _execute(options)
    except BaseException as error:
        status, ended_by = _status(error), error
    reports = _end_watch(watch) if watch else _reports()
    code = status or int(bool(reports))
    if options.report and os.getpid() == process:
        write_pages(options, reports)
    if options.ending and os.getpid() == process:  # a child that it has forked comes here, too
        read = recorded.taken.decode("latin-1")
        _write_ending(
            options.ending,
            ended_by,
            status=status,
            code=code,
            read=read,
            tests=tests,
            reports=base64.b64encode(pickle.dumps(reports)).decode(),
            devices=_processes.used_devices(),
            blocked=launches_block(),
        )
    return code


def interpreter_options():
    """The options that this interpreter was started with."""
    return subprocess._args_from_interpreter_flags()


def program(options):
    """The words of a command line that select the program, and how it runs."""
    named = [*["--as-cuda"] * options.as_cuda, *["--force"] * options.force]
    return [*named, *["-m"] * options.module, *options.command]


def run_command(options, all=False):
    """The words of a command that runs the program again, or everything that this run does."""
    again = [*["--sanitize"] * options.sanitize] if all else []
    again += ["--seeds", str(options.seeds)] if all and options.seeds else []
    return [
        "python",
        *interpreter_options(),
        "-m",
        "torch_openreg",
        "run",
        *again,
        *program(options),
    ]


def _check(settings, options):
    """The core prints which value it refuses, and what is allowed."""
    refused = [name for name, _, origin, _ in _C._settings() if "rejected" in origin]
    for name in settings:
        if name in refused:
            options.error(f"{name}={settings[name]!r} is refused")


def prepare(options, settings):
    """Checks the options, and makes cuda mean the device if they request it.

    Args:
        settings: variables of the environment that the options set, with their values.
    """
    if not options.command:
        options.error("which program? python -m torch_openreg run script.py")
    if options.force and not options.as_cuda:
        options.error("--force belongs to --as-cuda")
    for name, what in (("seeds", "schedules"), ("jobs", "schedules at once")):
        number = getattr(options, name)
        if number is not None and number < 1:
            options.error(f"--{name}: a number of {what}, at least 1, not {number}")
    if options.jobs and not options.seeds:
        options.error("--jobs belongs to --seeds")
    if options.report and not (options.sanitize or options.seeds):
        options.error("--report belongs to --sanitize or --seeds")
    if "OPENREG_INITCHECK" in settings and not options.sanitize:
        options.error("--initcheck belongs to --sanitize")
    options.program, *options.arguments = options.command
    os.environ.update(settings)
    options.environment = dict(os.environ)  # as_cuda() adds to it
    options.printed = _commands.command(run_command(options, all=True), options.environment)
    options.report = options.report and os.path.abspath(options.report)  # the program may leave
    if not options.module and not os.path.exists(options.program):
        options.error(f"there is no file {options.program!r}; -m runs a module")
    if options.as_cuda:
        try:
            as_cuda(options.force)
        except RuntimeError as error:
            options.error(str(error))
    if settings:
        _check(settings, options)
