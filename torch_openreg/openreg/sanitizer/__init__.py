"""The sanitizer: accesses to the same memory that nothing orders.

::

    torch.openreg.sanitizer.enable()

    side = torch.openreg.Stream()
    a = torch.rand(4, 4, device="openreg")
    with side:
        torch.mul(a, 5, out=a)  # DataRaceError: side.wait_stream(...) is missing

It follows the order that the program asks for (streams, events, waits, synchronisation), in the
order of its calls, not the one in which tasks happen to run: what is wrong is reported each time.
docs/sanitizer.md has examples, and what is not seen.
"""

import collections
import contextlib
import itertools
import os
import sys
import threading
import warnings

from ... import _C
from .._utils import OWN_MODULE
from ..device import internal_waits
from . import _mistakes, _processes
from ._advice import Help
from ._findings import make_report
from ._frames import Frame
from ._reports import Access, Report

__all__ = [
    "Access",
    "DataRaceError",
    "Frame",
    "Help",
    "Report",
    "clear",
    "disable",
    "enable",
    "is_enabled",
    "reports",
    "save_reports",
]

_MODES = ("error", "warn")
_WARN, _QUIET = 1, 2  # modes of the core's part; the second one only reports

# Held to switch it on or off, which several threads may do at once: the patches that follow threads
# are added and removed with the core's part. Re-entrant, because a signal handler or a finalizer
# may run on the thread that holds it.
_switch = threading.RLock()
os.register_at_fork(after_in_child=_switch._at_fork_reinit)

# (text, report) of the newest. C++ raises the text, possibly on another thread: autograd's errors
# become Python's on the thread that called backward().
_raised = collections.deque(maxlen=100)
_warned = set()  # the mistakes that mode "warn" has warned of


def _report_of(text):
    """The newest report of a text; None if there is none."""
    return next((report for known, report in reversed(_raised.copy()) if known == text), None)


class DataRaceError(RuntimeError):
    """Two accesses to the same memory that nothing orders, of which one writes; or a read of
    uninitialized memory. `text` is its message."""

    __module__ = f"{OWN_MODULE}.sanitizer"

    def __init__(self, text=""):
        super().__init__(text)
        self.report = _report_of(text)
        """The Report; None if this was not made for one."""


@contextlib.contextmanager
def _without_order():
    """What this thread does inside is a tool's own: its waits order nothing, and what it reads is
    not watched."""
    before = _C._sanitizer_ignore(True)
    try:
        yield
    finally:
        _C._sanitizer_ignore(before)


def _text(given):
    """Returns the text of a new report; an empty one if there has been a warning of its mistake."""
    with _without_order():  # the program's variables are searched
        report = make_report(given, is_alive=True)
        for other in _C._sanitizer_reports(given["number"] + 1):  # of the same call
            make_report(other, is_alive=True)
    text = report.text(kind="")  # Python writes the error's type before it
    _raised.append((text, report))
    _processes.send_reports()
    if _C._sanitizer_mode()[0] == _WARN:
        mistake = _mistakes.key(report)
        if mistake in _warned:
            return ""
        _warned.add(mistake)
    return text


def _warn(text, report=None):
    """Warns of a report, or of that with the text, in the line of its later access; a function that
    this line called may have made that."""
    line = (report or _report_of(text)).later.line
    if line is None:
        warnings.warn(text, stacklevel=1)
    else:
        warnings.warn_explicit(text, UserWarning, line.filename, line.line)


# Errors that an operator of the host could not raise (csrc/torch/sanitizer.cpp): _Unraised, oldest
# first.
_unraised = []
_serial = itertools.count(1)


class _Unraised:
    """Raises itself as a filter of warnings, or is taken.

    PyTorch issues an operator's warnings when it returns to Python, and an exception from a filter
    becomes the operator's.
    """

    def __init__(self, text):
        self.error = DataRaceError(text)
        self.thread = threading.get_ident()
        self.warning = f"data race of the host, {next(_serial)}: its error comes at a later call"
        self.filter = ("error", self, Warning, None, 0)
        _unraised.append(self)
        warnings.filters.insert(0, self.filter)

    def match(self, text):
        __tracebackhide__ = True
        if not text.startswith(self.warning):
            return False
        self.take()
        raise self.error

    def take(self):
        for taken, kept in ((self, _unraised), (self.filter, warnings.filters)):
            with contextlib.suppress(ValueError):
                kept.remove(taken)
        return str(self.error)


def _take_unraised():
    mine = threading.get_ident()
    texts = [unraised.take() for unraised in list(_unraised) if unraised.thread == mine]
    return "\n\n".join(texts) or None


def _take_all():
    return [unraised.take() for unraised in list(_unraised)]


def _take_left():
    """Includes accesses that threads have made without a call, and that have not been raised."""
    return _take_all() + _C._sanitizer_left()


_C._sanitizer_bind(
    DataRaceError,
    _text,
    lambda text: _Unraised(text).warning,
    _take_unraised,
    _warn,
)


def _judge_frees():
    """The program or a test is over: reports blocks that were freed without record_stream, that no
    allocation could have got since, and whose use nothing has waited for. Returns the reports."""
    if not _C._sanitizer_active() or _C._in_forked_child():
        return []
    found = [make_report(given) for given in _C._sanitizer_reports(_C._sanitizer_judge_frees())]
    if found:
        _processes.send_reports()
    return found


def _at_exit():
    texts = _take_left()
    for report in _judge_frees():
        if _C._sanitizer_mode()[0] == _MODES.index("error"):
            texts.append(str(report))
        else:
            _warn(report.text(kind=""), report)
    if texts:
        print("DataRaceError, which nothing has raised:", *texts, sep="\n", file=sys.stderr)
        _C._sanitizer_fail_exit()
    _processes.send_end()


os.register_at_fork(after_in_child=_take_all)  # they are the parent's


class _Enabled:
    """Restores the previous state at the end."""

    def __init__(self, outer):
        self._outer = outer

    def __enter__(self):
        return self

    def __exit__(self, error_type, *rest):
        if _C._in_forked_child():  # no device works there
            return False
        if self._outer is not None:
            _switch_on(*self._outer)
            return False
        try:
            disable()
        except DataRaceError as error:
            if error_type is None:
                raise
            warnings.warn(str(error), stacklevel=2)  # an exception is already on its way
        return False


def _switch_on(*settings):
    """Returns the previous settings; None: it was off."""
    from . import _threads  # off, it costs nothing

    with _switch:
        outer = _C._sanitizer_mode() if _C._sanitizer_active() else None
        _threads.follow()
        if outer is None:
            _processes.forget_sent()
            _warned.clear()
        _C._sanitizer_enable(*settings)
    return outer


def enable(mode="error", stacks=True, initcheck=None, possible=True):
    """Switches the sanitizer on, for the whole process. Does not wait.

    Used as a context manager, it restores the sanitizer's previous state at the end: off, or on in
    its earlier mode.

    Args:
        mode: ``"error"``: each call that makes the later access of a conflict raises DataRaceError,
            before the operator is queued. Copies raise when they are queued. Operators of the host
            on pinned memory raise when they have run; where PyTorch prevents that, the thread's
            next call of the device raises. What the host does to pinned memory by NumPy, ctypes or
            C++ raises right after it in Python's main thread, in others at the thread's next call
            of the device. A conflict that is decided only when an event is signalled, or when a
            task has read its indices, raises at the thread's next call that finds it. ``"warn"``: a
            UserWarning in the same places, once for each mistake. Another mode raises ValueError.
        stacks: whether the Python stack of each access is kept.
        initcheck: whether a read of device memory is also reported if some of its bytes have not
            been written since the caching allocator handed them out, from now on. None: as
            OPENREG_INITCHECK is set.
        possible: whether conflicts of partial accesses are reported: of index operators that touch
            some bytes only, by a mask or by more than 4096 indices.

    Work queued before is not seen. If the sanitizer is on already, these settings change; the
    accesses recorded so far and the reports stay.
    """
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}; allowed are 'error' and 'warn'")
    if initcheck is None:
        initcheck = os.environ.get("OPENREG_INITCHECK") == "1"
    return _Enabled(_switch_on(mode == "warn", bool(stacks), bool(initcheck), bool(possible)))


def disable():
    """Switches the sanitizer off. The reports stay until they are cleared. Waits for tasks whose
    indices still decide a conflict.

    Raises DataRaceError if an error of the host, on any thread, has not been raised yet.
    """
    with _switch:
        if _C._sanitizer_active():
            from . import _threads

            _C._sanitizer_disable()
            _threads.unfollow()
    texts = _take_left()
    if texts:
        raise DataRaceError("\n\n".join(texts))


def is_enabled():
    """Whether the sanitizer is on."""
    return bool(_C._sanitizer_active())


def reports():
    """The conflicts that were found since the sanitizer was enabled or cleared: a list of Report,
    in the order of their discovery. Does not wait, so synchronise first where an event or the
    indices of an operator may still decide.

    A pair of operators on the same streams and address is reported once. At most 1000 reports are
    kept; later conflicts still raise or warn.
    """
    made = map(make_report, _C._sanitizer_reports())
    return [report for report in made if not _is_of_a_tool(report)]


def _call_unwatched(function, *args, **kwargs):
    """Calls what reads memory for a tool, as when pytest prints a tensor: a conflict of such a read
    is neither raised nor reported. One thread at a time calls this."""
    settings = _C._sanitizer_mode()
    if is_enabled():
        _C._sanitizer_enable(_QUIET, *settings[1:])
    try:
        with internal_waits():
            return function(*args, **kwargs)
    finally:
        if is_enabled():
            _C._sanitizer_enable(*settings)


def _is_of_a_tool(report):
    this = _call_unwatched.__code__
    return any(
        frame.name == this.co_name and frame.filename == this.co_filename
        for frame in report.later.stack or ()
    )


def save_reports(path):
    """Writes reports() as HTML, with pictures and source, for a browser. Reports of the same
    mistake share a page.

    Args:
        path: ends in ``.html``: one file with all of them. Else a folder, which is made if it does
            not exist: ``index.html``, and a page for each mistake. Each file can be opened, sent
            and printed without the others, and without a network.
    """
    from . import _page  # jinja2 takes a while

    _page.save_reports(path, reports())


def clear():
    """Deletes the reports and the errors that have not been raised yet. A tool that watches this
    process deletes its copies too, and those of the processes that this one has started."""
    _clear()
    _warned.clear()
    _processes.send("cleared")
    _processes.discard()


def _clear():
    """Deletes those of this process."""
    _take_all()
    _C._sanitizer_clear()
    _processes.forget_sent()
