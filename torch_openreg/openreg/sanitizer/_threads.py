"""How Python's threads order each other, for the sanitizer (docs/sanitizer.md).

The methods of C types of locks and queues are followed in csrc/torch/threads.cpp. This file handles
what exists in Python alone: the begin and end of threads, events that are polled, and asyncio; and
other parts of Python that must be adapted to the sanitizer.
"""

import _ctypes
import _multiprocessing
import _socket
import _thread
import faulthandler
import fcntl
import functools
import io
import os
import queue
import select
import signal
import sys
import threading
import types
from asyncio import base_events
from concurrent.futures import thread

import torch

from ... import _C
from ..._patches import wrapped

# The effects of a method, as in csrc/torch/threads.cpp.
_IF_TRUE, _IF_FALSE, _ACQUIRES, _RELEASES = range(4)
_ACQUIRES_ALL, _ALL_IF_ANY, _ALL_IF_PIPE, _ALL_FIRST = range(4, 8)

_LOCK = type(threading.Lock())
_RLOCK = type(threading.RLock())

_METHODS = (
    (_LOCK, _IF_TRUE, "acquire acquire_lock __enter__"),
    (_LOCK, _IF_FALSE, "locked locked_lock"),
    (_LOCK, _RELEASES, "release release_lock __exit__"),
    (_RLOCK, _IF_TRUE, "acquire __enter__"),
    (_RLOCK, _IF_FALSE, "locked"),
    (_RLOCK, _ACQUIRES, "_acquire_restore"),
    (_RLOCK, _RELEASES, "release __exit__ _release_save"),
    (queue.SimpleQueue, _RELEASES, "put put_nowait"),
    (queue.SimpleQueue, _ACQUIRES, "get get_nowait empty qsize"),
    # Through these a thread may receive from another one in ways that cannot be followed.
    (_multiprocessing.SemLock, _ACQUIRES_ALL, "acquire __enter__"),
    (_socket.socket, _ACQUIRES_ALL, "recv recv_into recvfrom recvfrom_into recvmsg recvmsg_into"),
    (_socket.socket, _ACQUIRES_ALL, "_accept"),
    (os, _ACQUIRES_ALL, "read readv pread eventfd_read"),
    (io.FileIO, _ALL_IF_PIPE, "read readall readinto"),  # buffered files call it too
    (fcntl, _ACQUIRES_ALL, "flock lockf"),
    (signal, _ACQUIRES_ALL, "pause sigwait sigwaitinfo sigtimedwait"),
    (select, _ACQUIRES_ALL, "select"),
    (type(select.poll()), _ALL_IF_ANY, "poll"),
    (select.epoll, _ALL_IF_ANY, "poll"),
    (torch._C.Future, _ACQUIRES_ALL, "wait done value"),
    (torch._C.Future, _ALL_FIRST, "set_result"),  # runs other threads' callbacks
    (torch._C, _ACQUIRES_ALL, "wait"),
)
_STORE = "get wait check add compare_set multi_get num_keys queue_pop queue_len list_keys"

_thread_is_alive = threading.Thread.is_alive


def _methods():
    yield from _METHODS
    if torch.distributed.is_available():
        yield torch.distributed.Store, _ACQUIRES_ALL, _STORE


# `threading` has locks for its own lists of threads. That one thread begins after another has ended
# does not order the two. A thread that reads the lists has checked whether another is over.
_ASK = tuple(f.__code__ for f in (threading.enumerate, threading.active_count))

# Modules that use locks for their own purposes: that two threads import, log or compute a cached
# value does not order them.
_INTERNAL = (
    "functools importlib._bootstrap importlib._bootstrap_external logging tempfile warnings "
    "torch.multiprocessing.reductions torch.utils._functools torch_openreg._sharing "
    "torch_openreg._transit torch_openreg.openreg._lazy torch_openreg.openreg.sanitizer"
)


def _maintenance():
    """The code by which each thread that starts or ends asks which others are over."""
    maintain = getattr(threading, "_maintain_shutdown_locks", None)  # until Python 3.12
    if maintain is None:
        return []
    code = maintain.__code__
    return [code, *(c for c in code.co_consts if isinstance(c, types.CodeType))]


class _Begin:
    """What a thread runs, with its own clock."""

    def __init__(self, run):
        self._run = run
        self._moment = _C._Moment()
        self._end = _C._Moment()
        self._moment.starts()
        owner = getattr(run, "__self__", None)
        self._thread = owner if isinstance(owner, threading.Thread) else None
        if self._thread is not None:
            self._thread._openreg_end = self._end

    def __call__(self, *args, **kwargs):
        self._moment.begins()
        try:
            return self._run(*args, **kwargs)
        finally:
            self._ends()

    def _ends(self):
        self._end.release()
        lock = getattr(self._thread, "_tstate_lock", None)  # before Python 3.13, for its exit
        if lock is not None:
            _C._thread_releases(lock)
        _C._thread_ends()


def _acquire_end(thread):
    end = getattr(thread, "_openreg_end", None)
    if end is not None:
        end.acquire()


def _start(original, function, *args, **kwargs):
    return original(_Begin(function), *args, **kwargs)


def _join(original, thread, timeout=None):
    original(thread, timeout)
    if not _thread_is_alive(thread):
        _acquire_end(thread)


def _is_alive(original, thread):
    alive = original(thread)
    if not alive:
        _acquire_end(thread)
    return alive


def _is_set(original, event):
    found = original(event)
    if found:
        _C._thread_acquires(event._cond._lock)
    return found


def _call_soon_threadsafe(original, loop, callback, *args, context=None):
    moment = _C._Moment()
    moment.release()

    @functools.wraps(callback)
    def called(*args):
        moment.acquire()
        return callback(*args)

    return original(loop, called, *args, context=context)


def _below_guards(original, *args, **kwargs):
    """faulthandler's handler of faults would treat those of guarded memory as fatal: it is enabled
    and disabled below the sanitizer's."""
    was = _C._sanitizer_handler(False)
    try:
        return original(*args, **kwargs)
    finally:
        if was:
            _C._sanitizer_handler(True)


_PATCHES = (
    (_thread, "start_new_thread", _start),
    (_thread, "start_joinable_thread", _start),
    (threading, "_start_new_thread", _start),
    (threading, "_start_joinable_thread", _start),
    (threading.Thread, "join", _join),
    (threading.Thread, "is_alive", _is_alive),
    (threading.Event, "is_set", _is_set),
    (base_events.BaseEventLoop, "call_soon_threadsafe", _call_soon_threadsafe),
    (faulthandler, "enable", _below_guards),
    (faulthandler, "disable", _below_guards),
)
_patched = []


def _foreign():
    """The types whose objects call C functions, and how."""

    def with_subclasses(cls):
        yield cls
        for subclass in cls.__subclasses__():
            yield from with_subclasses(subclass)

    return list(with_subclasses(_ctypes.CFuncPtr)), vars(_ctypes.CFuncPtr)["__call__"]


def follow():
    """Follows threads from now on. Called with the sanitizer, possibly repeatedly."""
    if _patched:
        return
    for owner, order, names in _methods():
        for name in names.split():
            method = getattr(owner, name, None)
            if method is not None:
                _C._threads_follow_method(method, order)
    for followed in (_LOCK, _RLOCK, queue.SimpleQueue):
        _C._threads_follow_type(followed)
    _C._threads_ignore_lock(threading._active_limbo_lock, _ASK)
    if hasattr(threading, "_shutdown_locks_lock"):
        _C._threads_ignore_lock(threading._shutdown_locks_lock, ())
    _C._threads_ignore_lock(thread._global_shutdown_lock, ())
    internal = (sys.modules[name] for name in _INTERNAL.split() if name in sys.modules)
    _C._threads_ignore_callers([threading, *internal], _maintenance())
    _C._threads_follow_calls(*_foreign())
    for owner, name, patch in _PATCHES:
        original = vars(owner).get(name)
        if original is not None:
            patched = wrapped(original, patch)
            _patched.append((owner, name, original, patched))
            setattr(owner, name, patched)


def unfollow():
    """Restores what was there before, except under other programs' patches, which continue to call
    ours: while off, these do nothing."""
    if not _patched:
        return
    _C._threads_unfollow()
    _C._threads_unfollow_calls(*_foreign())
    while _patched:
        owner, name, original, patched = _patched.pop()
        if vars(owner)[name] is patched:
            setattr(owner, name, original)
