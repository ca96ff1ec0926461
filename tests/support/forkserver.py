"""Programs in processes that begin with PyTorch imported: forks of one that has imported it alone.

Importing PyTorch takes a second or two, and the tests run many hundred programs. To a program such
a fork is what `python -c`, `python -m MODULE` or `python FILE` is, except that its `import torch`
has happened. multiprocessing's fork server would be the same but for the end: its children skip the
interpreter's, which is what some programs are about.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys

START = "from forkserver import program; exec(program({!r}))"


# ---- client ----


class ForkServer:
    """Starts the server at the first program, with these variables and with PyTorch alone."""

    def __init__(self, path, environment):
        self.path = path
        self.environment = {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        self.process = None

    def _connect(self):
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START.format(self.path)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            )
            assert self.process.stdout.read(1) == b"\n", "the fork server has not started"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        return connection

    def run(self, code, arguments, environment, out, err, timeout):
        """Its exit status, as of subprocess; out and err are files. TimeoutExpired kills it. With
        arguments, which are a script's file or -m and a module, and what it is given, `code` is
        not used."""
        request = json.dumps(
            {
                "code": code,
                "arguments": arguments,
                "environment": environment,
                "folder": os.getcwd(),
            }
        )
        with self._connect() as connection, connection.makefile("r") as answers:
            socket.send_fds(connection, [b"f"], [out.fileno(), err.fileno()])
            connection.sendall(request.encode())
            connection.shutdown(socket.SHUT_WR)
            pid = int(answers.readline())
            connection.settimeout(timeout)
            try:
                return int(answers.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired("a program of a test", timeout) from None

    def close(self):
        if self.process is not None:
            with self.process:  # whose end waits for it, and closes the pipe
                self.process.kill()


# ---- server ----


def _accept(listener):
    """Returns in the process that is to be the program, with the request and the files."""
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, fds, _, _ = socket.recv_fds(connection, 1, 2)
        with connection.makefile("r") as text:
            request = json.load(text)
        pid = os.fork()
        if pid == 0:
            connection.close()
            return request, fds
        for fd in fds:
            os.close(fd)
        connection.sendall(f"{pid}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # the client killed it, and has gone
            connection.sendall(f"{status}\n".encode())
        os._exit(0)


def program(path):
    """Serves; returns the code of a program, in its process."""
    import torch

    # A collection in a program would write to all of PyTorch's objects and copy their pages. The
    # interpreter's end collects three times.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(8)
        print(flush=True)
        request, fds = _accept(listener)
    for fd, copy in zip(fds, (1, 2), strict=True):
        os.dup2(fd, copy)
        os.close(fd)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = request["arguments"] or ["-c"]
    file, code = "<string>", request["code"]
    if sys.argv[0] == "-m":
        sys.path[0] = os.getcwd()
        file = __file__
        code = f"import runpy; runpy._run_module_as_main({sys.argv.pop(1)!r})"
    elif request["arguments"]:
        file = sys.modules["__main__"].__file__ = sys.argv[0]
        sys.path[0] = os.path.dirname(file)
        with open(file) as script:
            code = script.read()
    sys.excepthook = _show_error
    torch._import_device_backends()
    if "PROGRAM_GATE_LIMIT" in os.environ and "torch_openreg._C" in sys.modules:
        from drivers import gates

        gates.end_program(float(os.environ["PROGRAM_GATE_LIMIT"]))
    return compile(code, file, "exec")


def _show_error(kind, error, trace):
    if trace and trace.tb_frame.f_back is None:  # START
        trace = trace.tb_next
    if trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
