"""A program that the tests run in a fork is what `python -c` or `python FILE` makes of it."""

import os
import signal
import subprocess

import pytest

PROGRAM = """
import sys
print(__name__, sys.argv, "__file__" in globals(), sys.path[0] == "", "torch" in sys.modules)
print(sys.stdin.read() == "", file=sys.stderr)
def fails():
    raise ValueError("on purpose")
fails()
"""


def test_forked_program_is_as_in_a_fresh_interpreter(run):
    forked, fresh = run(PROGRAM), run(PROGRAM, fresh=True)
    assert forked.code == fresh.code == 1
    assert forked.out == "__main__ ['-c'] False True True\n"
    assert fresh.out == "__main__ ['-c'] False True False\n"
    for lines in (forked.err.splitlines(), fresh.err.splitlines()):
        assert lines[:2] == ["True", "Traceback (most recent call last):"]
        assert lines[-1] == "ValueError: on purpose"
        frames = [line for line in lines if line.startswith("  File ")]
        assert frames == [
            '  File "<string>", line 7, in <module>',
            '  File "<string>", line 6, in fails',
        ]


def test_forked_script_has_its_name_folder_and_arguments(run, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(PROGRAM)
    forked, fresh = (run("", arguments=[path, "x"], fresh=fresh) for fresh in (False, True))
    assert forked.out == f"__main__ {[str(path), 'x']} True False True\n"
    assert fresh.out == f"__main__ {[str(path), 'x']} True False False\n"
    assert forked.err == fresh.err
    assert f'File "{path}", line 7, in <module>' in forked.err


def test_forked_module_runs_as_the_interpreter_runs_one(run, tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    forked, fresh = (
        run("", arguments=["-m", "module", "x"], fresh=fresh) for fresh in (False, True)
    )
    said = f"__main__ {[str(tmp_path / 'module.py'), 'x']} True False"
    assert (forked.out, fresh.out) == (f"{said} True\n", f"{said} False\n")
    assert forked.err == fresh.err
    assert "<frozen runpy>" in forked.err and "in fails" in forked.err


def test_forked_program_has_its_settings_and_status_of_a_signal(run):
    code = "import os; print(os.environ['OPENREG_POISON'], flush=True); os.kill(os.getpid(), 9)"
    done = run(code, {"OPENREG_POISON": "1"})
    assert (done.code, done.out, done.err) == (-signal.SIGKILL, "1\n", "")


def test_forked_program_that_hangs_is_killed(run, tmp_path, eventually):
    path = tmp_path / "pid"
    code = f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        run(code, timeout=5)
    pid = int(path.read_text())

    def is_gone():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    eventually(is_gone)
    assert run("print('on')").out == "on\n"  # the server goes on
