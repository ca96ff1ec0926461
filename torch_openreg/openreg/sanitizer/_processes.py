"""The sanitizer in the processes that a watched program starts.

A tool that sums up races (``run --sanitize``, the pytest plugin) has a Watch. The processes that it
starts inherit OPENREG_SANITIZER and, in OPENREG_SANITIZER_REPORTS, the name of a file of the Watch,
and pass both on to theirs. A process appends each report to the file in one write when it is made,
because it may be killed. A process with a Watch of its own sends nothing: the innermost tool
reports.

Nothing here takes a Python lock, because the sanitizer treats a lock as order between its threads.
"""

import base64
import contextlib
import functools
import multiprocessing.process
import os
import pickle
import shutil
import sys
import tempfile
from multiprocessing import util
from typing import NamedTuple

from ... import _C
from .._lazy import _lazy_call
from .._utils import OWN_NAME
from ._findings import make_report

MODE = "OPENREG_SANITIZER"
INITCHECK = "OPENREG_INITCHECK"
REPORTS = "OPENREG_SANITIZER_REPORTS"
_SETTINGS = {"error": "1", "warn": "warn"}

# multiprocessing's fork server has the environment of its own start. So the file's name is also
# passed with each process, in the data that multiprocessing hands to a process at its start.
_CONFIG = "openreg_sanitizer_reports"

# Audit events of a started process: where the command is, and its environment.
_STARTS = {
    "subprocess.Popen": (1, 3),
    "os.posix_spawn": (1, 2),
    "os.exec": (1, 2),
    "os.system": (0, None),
}
_COMMAND_LENGTH = 60

_OF_CORE = b"C:"  # a record of the core, from a process without PyTorch

# Taken at the import: a test may replace them while it runs.
_open, _list_folder = open, os.listdir

_watches = []  # of this process, the innermost last
_inherited = None  # the file of the home that this process was started under
_is_following = False
_sent = 0  # the number of the newest report that has been sent
_has_told_of_graphs = False  # to the home, by note_graph()


class Process(NamedTuple):
    """A process that was watched."""

    pid: int
    start: str | None  # its start time, because process numbers are reused
    name: str

    @classmethod
    def current(cls):
        name = multiprocessing.process.current_process().name
        if name == "MainProcess":
            name = _program()
        return cls(os.getpid(), _start_of(os.getpid()), name)

    @property
    def identity(self):
        return self.pid, self.start

    def is_running(self):
        return self.start is not None and _start_of(self.pid) == self.start

    def __str__(self):
        return f"process {self.pid} ({self.name})"


def _program():
    folder, name = os.path.split(sys.argv[0] if getattr(sys, "argv", None) else "")
    return (os.path.basename(folder) if name == "__main__.py" else name) or "python"


def _start_of(pid):
    """In the system's ticks; None: the process has ended."""
    try:
        with _open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


# ---- in a process that a watched program has started ----


def _home():
    """The file for this process's records, or None."""
    if _watches or not _is_following:
        return None
    config = getattr(multiprocessing.process.current_process(), "_config", {})
    return config.get(_CONFIG) or _inherited


def has_home():
    """Whether this process sends its reports to another one."""
    return bool(_home())


def send(kind, content=None):
    """Appends a record to the home's file: used, graph, report, cleared, unwatched or ended."""
    path = _home()
    if not path:
        return
    record = base64.b64encode(pickle.dumps((kind, Process.current(), used_devices(), content)))
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, b"\n%b\n" % record)  # on its own line, whatever was cut off before it
        finally:
            os.close(file)
    except OSError as error:  # the home has ended, or cannot be reached from here
        if kind == "report":
            print(f"torch_openreg: a report was not sent to {path}: {error}", file=sys.stderr)


def note_graph():
    """A graph of the program's has been captured while the sanitizer was on."""
    global _has_told_of_graphs
    for watch in _watches:
        watch.graphs = True
    if not _watches and not _has_told_of_graphs:
        _has_told_of_graphs = True
        send("graph")


def send_reports():
    """Sends each report once."""
    global _sent
    if not has_home() or _C._in_forked_child():
        return
    for given in _C._sanitizer_reports(_sent + 1):
        if given["number"] > _sent:  # another thread may have sent it meanwhile
            _sent = given["number"]
            send("report", make_report(given))


def forget_sent():
    """From here on reports are numbered from 1 again."""
    global _sent
    _sent = 0


def send_end():
    send_reports()
    send("ended")


def used_devices():
    """Their names."""
    if _C._in_forked_child():
        return []
    return [f"{OWN_NAME}:{i}" for i in range(_C._device_count()) if _C._is_active(i)]


def _finish_with_multiprocessing(_=None):
    """multiprocessing ends its processes without running atexit's functions."""
    util.Finalize(None, send_end, exitpriority=-1)


def start():
    """Called at the import where OPENREG_SANITIZER has switched the sanitizer on."""
    global _inherited
    _inherited = os.environ.get(REPORTS)
    if _inherited:
        _follow()


def _follow():
    global _is_following
    if _is_following:
        return
    _is_following = True
    _lazy_call(lambda: send("used"))
    _finish_with_multiprocessing()
    util.register_after_fork(sys.modules[__name__], _finish_with_multiprocessing)
    sys.addaudithook(_on_audit_event)
    util.spawnv_passfds = functools.partial(_spawn_of_multiprocessing, util.spawnv_passfds)


def _in_forked_child():
    global _inherited
    if _watches:
        _inherited = os.environ.get(REPORTS)
        _watches.clear()


os.register_at_fork(after_in_child=_in_forked_child)


# ---- processes that cannot be watched ----


def _on_audit_event(event, arguments):
    if event in _STARTS and (_watches or has_home()):
        with contextlib.suppress(Exception):  # the call itself raises it
            _look_at_start(arguments, *_STARTS[event])


def _spawn_of_multiprocessing(spawn, path, args, passfds):
    """Called for functions that start processes without an audit event."""
    if _watches or has_home():
        _look_at_start((args,), 0, None)
    return spawn(path, args, passfds)


def _look_at_start(arguments, command, environment):
    given = None if environment is None else arguments[environment]
    given = os.environ if given is None else given
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
    if REPORTS in variables or variables.get(MODE) == "0":  # watched, or excluded on purpose
        return
    if _watches:
        _watches[-1].unwatched[_text_of(arguments[command])] = None
    else:
        send("unwatched", _text_of(arguments[command]))


def _text_of(command):
    words = [command] if isinstance(command, str | bytes | os.PathLike) else list(command)
    text = " ".join([os.path.basename(os.fsdecode(words[0])), *map(os.fsdecode, words[1:])])
    return text if len(text) <= _COMMAND_LENGTH else f"{text[: _COMMAND_LENGTH - 4]} ..."


# ---- home ----

_OF_GRAPHS = (
    "of graphs: freed and replaced inputs, reads before the first replay,",
    "  outputs of graphed functions, captured first calls",
    "not watched: an output of a program's own graph that is kept over a replay",
)


class Watched(NamedTuple):
    """What the processes of a Watch did, for its summary."""

    processes: int = 0  # that have used a device
    devices: tuple = ()
    unwatched: tuple = ()  # commands
    elsewhere: tuple = ()  # processes whose reports are on their stderr
    running: tuple = ()  # processes
    unreadable: int = 0  # records
    graphs: bool = False  # whether one was captured

    def __add__(self, other):
        return Watched(
            self.processes + other.processes,
            tuple(dict.fromkeys((*self.devices, *other.devices))),
            tuple(dict.fromkeys((*self.unwatched, *other.unwatched))),
            (*self.elsewhere, *other.elsewhere),
            (*self.running, *other.running),
            self.unreadable + other.unreadable,
            self.graphs or other.graphs,
        )

    def __str__(self):
        if not self.processes:
            return "no process used a device"
        checks = "the order of accesses"
        if os.environ.get(INITCHECK) == "1":
            checks += " and reads of unwritten memory"
        text = f"{checks} of {self.processes} process{'es' * (self.processes != 1)}"
        return f"{text} on {', '.join(self.devices)}" if self.devices else text

    def gaps(self):
        """Lines about graphs, and about what was not watched."""
        if self.graphs:
            yield from _OF_GRAPHS
        if self.unwatched:
            yield f"not watched, as {REPORTS} is not in their environment: {_list(self.unwatched)}"
        if self.elsewhere:
            yield f"used a device without PyTorch, reported on stderr: {_list(self.elsewhere)}"
        if self.running:
            yield f"still running, not watched from here on: {_list(self.running)}"
        if self.unreadable:
            yield f"records of processes that could not be read: {self.unreadable}"


def _list(texts, most=5):
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


class Watch:
    """Collects the reports of the processes that this one starts, until it is closed.

    Args:
        mode: the sanitizer's there, ``"error"`` or ``"warn"``.
    """

    def __init__(self, mode):
        self._pid = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="openreg-sanitizer-")
        self._starters = []  # by the names of the files, which are indices here
        self._read = {}  # of each file, how many bytes
        self._reports = {}  # not taken yet, by process and number: (starter, Report)
        self._processes = {}  # that have used a device, by identity
        self._ended = set()
        self._devices = set()
        self.unwatched = {}  # commands
        self._elsewhere = {}  # processes that use a device without PyTorch (sanitizer.c)
        self._unreadable = 0
        self.graphs = False  # whether one of these processes has captured one
        self._config = multiprocessing.process.current_process()._config
        self._before = [
            (where, name, where.get(name))
            for where, name in ((os.environ, MODE), (os.environ, REPORTS), (self._config, _CONFIG))
        ]
        os.environ[MODE] = _SETTINGS[mode]
        _watches.append(self)
        _follow()
        self.begin(None)

    def is_here(self):
        """Whether this is its own process, not a fork of it."""
        return os.getpid() == self._pid

    def begin(self, starter):
        """Processes that are started from now on belong to `starter`."""
        if self.is_here():
            path = os.path.join(self._folder, str(len(self._starters)))
            self._starters.append(starter)
            os.environ[REPORTS] = self._config[_CONFIG] = path

    def take(self):
        """Returns the reports since the last call: (starter, Report) each."""
        self._read_files()
        taken = list(self._reports.values())
        self._reports.clear()
        return taken

    def discard(self):
        """Deletes the reports of processes of the newest starter."""
        self._read_files()
        newest = self._starters[-1]
        self._reports = {k: pair for k, pair in self._reports.items() if pair[0] is not newest}

    def watched(self):
        """Returns a Watched that includes this process."""
        own = used_devices()
        running = [
            str(process)
            for identity, process in self._processes.items()
            if identity not in self._ended and process.is_running()
        ]
        return Watched(
            len(self._processes) + bool(own),
            tuple(sorted(self._devices.union(own))),
            tuple(self.unwatched),
            tuple(self._elsewhere),
            tuple(running),
            self._unreadable,
            self.graphs,
        )

    def close(self):
        """Stops collecting, and restores the environment."""
        if not self.is_here():
            return
        _watches.remove(self)
        for where, name, value in self._before:
            if value is None:
                where.pop(name, None)
            else:
                where[name] = value
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_files(self):
        if not self.is_here():
            return
        for name in sorted(_list_folder(self._folder), key=int):
            for line in self._new_lines(name):
                self._add(self._starters[int(name)], line)

    def _new_lines(self, name):
        with _open(os.path.join(self._folder, name), "rb") as file:
            file.seek(self._read.get(name, 0))
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # the rest is still being written
        self._read[name] = self._read.get(name, 0) + len(whole)
        return filter(None, whole.split(b"\n"))

    def _add(self, starter, line):
        if line.startswith(_OF_CORE):
            self._elsewhere[os.fsdecode(line.removeprefix(_OF_CORE))] = None
            return
        try:
            kind, process, devices, content = pickle.loads(base64.b64decode(line))
        except Exception:  # cut off when its process was killed, or from another version
            self._unreadable += 1
            return
        if kind == "unwatched":
            self.unwatched[content] = None
        elif kind == "cleared":
            for key in [key for key in self._reports if key[0] == process.identity]:
                del self._reports[key]
        elif kind == "ended":
            self._ended.add(process.identity)
        else:
            self.graphs |= kind == "graph"
            self._processes[process.identity] = process
        if process.identity in self._processes:  # unless it belongs to an inner tool
            self._devices.update(devices)
        if kind == "report":
            report = content._replace(process=str(process))
            self._reports[process.identity, report.number] = starter, report


def discard():
    """Deletes the processes' reports so far, because the program expects them."""
    if _watches:
        _watches[-1].discard()
