"""A limit for gates, on drivers that have no kernels for some operators: such an operator waits for
its stream, perhaps behind a gate that the same thread opens later."""

import os
import threading

from torch_openreg import _C

WAITED = "a call waited for its stream, behind a gate"


def limit(seconds, late):
    """Calls `late`, from another thread, for a gate that is closed so long after a stream began to
    wait for it, with a function that opens it. `seconds` is a function."""
    wait, signal = _C._external_event_wait, _C._external_event_signal
    opened = set()
    lock = threading.Lock()

    def takes(event):
        """Whether the caller is the one that opens it."""
        with lock:
            first = event not in opened
            opened.add(event)
        return first

    def check(event):
        if takes(event):
            late(lambda: signal(event))

    def wait_with_limit(event, stream):
        wait(event, stream)
        timer = threading.Timer(seconds(), check, [event])
        timer.daemon = True
        timer.start()

    def signal_once(event):
        if takes(event):
            signal(event)

    _C._external_event_wait, _C._external_event_signal = wait_with_limit, signal_once


def end_program(seconds):
    """In a program of a test: it ends with the sentence."""

    def end(_):
        os.write(2, f"{WAITED}\n".encode())
        os._exit(1)

    limit(lambda: seconds, end)
