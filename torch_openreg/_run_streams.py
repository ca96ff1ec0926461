"""Standard streams of the programs that ``run --seeds`` runs."""

import contextlib
import fcntl
import os
import select
import stat
import subprocess
import sys
import tempfile
import threading

_PIPE = 1 << 20  # more than a pipe holds


class Input:
    """The input of the program's own run, which each run under a schedule reads again.

    The program has a terminal or a file to itself. Other input comes to it through a pipe of one
    page, which is refilled when the program has read its contents. So nothing waits for input that
    the program did not request, and whichever of its processes reads, the bytes are recorded.
    """

    def __init__(self):
        self.read = b""
        self._start = None
        self._is_closed = sys.stdin is None
        if not self._is_closed and stat.S_ISREG(os.fstat(0).st_mode):
            self._start = os.lseek(0, 0, os.SEEK_CUR)

    def run_first(self, command):
        """Runs the program itself. Returns its status."""
        if self._is_closed or self._start is not None or os.isatty(0):
            return subprocess.run(command, check=False).returncode
        run = _Run(command, source=0)
        self.read = bytes(run.read)
        return run.code

    @contextlib.contextmanager
    def _opened(self):
        if self._start is None:
            with tempfile.TemporaryFile() as file:
                file.write(self.read)
                file.seek(0)
                yield {"source": file.fileno()}
        else:
            with open("/proc/self/fd/0", "rb", buffering=0) as file:
                file.seek(self._start)
                yield {"stdin": file}

    def run_again(self, command, env):
        """Returns the status, the output, and what was written to stderr."""
        with contextlib.nullcontext({}) if self._is_closed else self._opened() as given:
            run = _Run(command, captures=True, env=env, **given)
        return run.code, bytes(run.out), bytes(run.err)


class _Run:
    """Starts a process that reads the contents of the descriptor `source`, and captures its output.
    Nothing waits for the processes that it leaves behind, which may hold its pipes."""

    def __init__(self, command, source=None, captures=False, **settings):
        self.read, self.out, self.err = bytearray(), bytearray(), bytearray()
        self._source, self._feed, self._outputs = source, None, {}
        self._poll = select.poll()
        with contextlib.ExitStack() as self._files:
            if source is not None:
                settings["stdin"], self._feed = self._pipe()
                fcntl.fcntl(self._feed, fcntl.F_SETPIPE_SZ, 1)  # rounded up to a page
                self._poll.register(self._feed, select.POLLOUT)
            if captures:
                settings["stdout"], settings["stderr"] = map(self._output, (self.out, self.err))
            self.code = self._carry_until_the_end(command, settings)
            if source is not None:
                unread = _what_is_in(settings["stdin"])
                del self.read[len(self.read) - len(unread) :]
            for pipe, into in self._outputs.items():
                into += _what_is_in(pipe)

    def _pipe(self):
        read, write = os.pipe()
        return [self._files.enter_context(open(*end, 0)) for end in ((read, "rb"), (write, "wb"))]

    def _output(self, into):
        pipe, end = self._pipe()
        self._outputs[pipe] = into
        self._poll.register(pipe, select.POLLIN)
        return end

    def _carry_until_the_end(self, command, settings):
        ended, end = self._pipe()
        self._poll.register(ended, select.POLLIN)
        process = subprocess.Popen(command, **settings)

        def wait():
            process.wait()
            end.write(b"e")

        waits = threading.Thread(target=wait)
        waits.start()
        try:
            while ended.fileno() not in self._carry():
                pass
        except BaseException:
            process.kill()
            raise
        finally:
            waits.join()
        return process.returncode

    def _carry(self):
        """Reads and writes what is ready. Returns the descriptors that were polled."""
        ready = dict(self._poll.poll())
        for pipe, into in self._outputs.items():
            if pipe.fileno() in ready:
                into += pipe.read(_PIPE)
        if self._source in ready:
            self._poll.unregister(self._source)
            self._feed_a_page()
        elif self._feed and not self._feed.closed and self._feed.fileno() in ready:  # it is empty
            self._poll.unregister(self._feed)
            self._poll.register(self._source, select.POLLIN)
        return ready

    def _feed_a_page(self):
        data = os.read(self._source, select.PIPE_BUF)
        if data:
            self._feed.write(data)
            self.read += data
            self._poll.register(self._feed, select.POLLOUT)
        else:
            self._feed.close()


def _what_is_in(pipe):
    os.set_blocking(pipe.fileno(), False)
    return pipe.read(_PIPE) or b""
