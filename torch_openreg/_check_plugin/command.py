"""Starts the checks of a plugin, each in a process of its own, and writes the report."""

import contextlib
import dataclasses
import fnmatch
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time

from . import checks, operators, torchcts  # noqa: F401 (which register their checks)
from .c_api import function_of

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIMIT = 30  # seconds
GDB = "gdb -ex 'set follow-fork-mode child' -ex run -ex bt --args"
RESTARTS = 4  # of a check that goes on behind what has ended its process


@dataclasses.dataclass
class Row:
    """What came out of a check."""

    name: str
    about: str
    result: str = "ok"  # or "FAIL", "skipped", "declared"
    found: str = ""  # why it failed or was skipped; a note
    function: str = ""  # of the plugin's table, which is to be mended
    contract: str = ""  # the sentence that is broken
    seconds: float = 0.0


def _environment(check, library, limit, behind):
    """That of the caller, with other settings of the library."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OPENREG_")}
    path = os.path.dirname(PACKAGE) if check.torch else PACKAGE
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")])),
        "OPENREG_PLUGIN": os.path.abspath(library),
        **({"OPENREG_DEVICE_COUNT": str(check.devices)} if check.devices else {}),
        "OPENREG_WATCHDOG_S": str(max(1, int(limit / 4))),
        "CHECK_PLUGIN_LIMIT": str(limit),
        "CHECK_PLUGIN_BEHIND": str(behind),
    }


def _run_process(check, library, limit, behind):
    """Returns the status of the process (None: it did not end), its report, and its output."""
    package = "torch_openreg._check_plugin" if check.torch else "_check_plugin"
    with tempfile.NamedTemporaryFile("r") as report, tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", package, check.name, report.name],
            env=_environment(check, library, limit, behind),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        out.seek(0)
        said = out.buffer.read().decode(errors="replace")
        return status, [json.loads(line) for line in report.read().splitlines()], said


def _end(process):
    """Ends the process and the children that it has left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _how(status):
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"


def _hang(said, limit):
    """What did not end, and the function that it is about."""
    stuck = re.search(r"(copy|fill|kernel) (\S.*): started, waits for the device to finish", said)
    if stuck:
        text = f"{stuck[2]} returned orErrorNotReady, and did not signal `done` within {limit:g} s"
        return text, function_of(f"{stuck[1]} {stuck[2]}")
    return f"it did not end within {limit:g} s", None


def _misuse(said):
    """What the library prints of a plugin that uses `done` wrongly, and the function."""
    found = re.search(
        r'openreg: (device factory "[^"]*" \w.*? on openreg:\d+, .*?\(`done` \w+\))',
        " ".join(said.split()),
    )
    return (found[1], function_of(found[1])) if found else (None, None)


def _judge(check, status, report, said, limit):
    """The result, what was found, the function, and the sentence of the contract."""
    steps = [line for line in report if line[0] == "step"]
    end = next((line for line in report if line[0] not in ("step", "begin", "wrong")), None)
    function, doing = (steps[-1][1], steps[-1][2]) if steps else (check.function, "starting")
    misuse, blamed = _misuse(said)
    if misuse:
        unnamed = function if check.name == "completion.done" else "copy, set, compute or run"
        return "FAIL", misuse, blamed or unnamed, checks.DONE
    if status is None and end:
        found = f"the process did not end within {limit:g} s after the check, at its exit"
        return "FAIL", found, "shutdown", checks.SHUTDOWN
    if status is None:
        found, blamed = _hang(said, limit)
        last = "" if blamed else f"; last: {doing}"
        waits = not blamed and function in ("alloc", "free")
        contract = checks.INDEPENDENT if waits else checks.END
        return "FAIL", found + last, blamed or function, contract
    if end and end[0] == "broken":
        blamed = end[2] or check.function
        return "FAIL", end[1], blamed, end[3] or _contract(check, blamed, checks.FAILURE)
    if status or not end:
        when = "after the check, at its exit" if end else f"while {doing}"
        contract = checks.SHUTDOWN if end else _contract(check, function, checks.END)
        found = f"the process {_how(status)} {when}{_last_words(said)}"
        return "FAIL", found, "shutdown" if end else function, contract
    return end[0], end[1], "", ""


def _contract(check, function, otherwise):
    """The sentence for a function that need not be the check's own."""
    if function == check.function:
        return check.contract
    return checks.ADDRESSES if function == "alloc" else otherwise


def _last_words(said):
    """The plugin's last line. The check's own stack, which Python prints after it, is left out."""
    lines = [line for line in said.partition("Fatal Python error:")[0].splitlines() if line.strip()]
    return f": {lines[-1].strip()[:200]}" if lines else ""


def run_check(check, library, limit):
    """Runs a check in its process. One that reports faults as it goes on (`wrong`) is started again
    behind what has ended its process."""
    began, wrong, behind = time.monotonic(), [], -1
    for _ in range(RESTARTS):
        status, report, said = _run_process(check, library, limit, behind)
        wrong += [line[1] for line in report if line[0] == "wrong"]
        result, found, function, contract = _judge(check, status, report, said, limit)
        begun = [line[1] for line in report if line[0] == "begin"]
        if result != "FAIL" or not begun or begun[-1] <= behind:
            break
        wrong.append(found)
        behind = begun[-1]
    if wrong:
        result, function, contract = "FAIL", function or check.function, contract or check.contract
        found = "\n".join(dict.fromkeys(wrong))
    return Row(check.name, check.about, result, found, function, contract, time.monotonic() - began)


def chosen(only):
    """The checks whose names match one of the patterns."""
    patterns = only or ["*"]
    found = [
        check
        for check in checks.CHECKS.values()
        if any(fnmatch.fnmatch(check.name, pattern) for pattern in patterns)
    ]
    if not found:
        names = ", ".join(checks.CHECKS)
        raise SystemExit(f"check-plugin: no check is named {' or '.join(only)}; there are {names}")
    return found


def declared(exceptions):
    """{name: reason} of "name=reason"."""
    pairs = [text.partition("=")[::2] for text in exceptions]
    for name, reason in pairs:
        if name not in checks.CHECKS or not reason.strip():
            raise SystemExit(
                f"check-plugin: --except {name}={reason}: a check's name and a reason are needed; "
                f"checks are {', '.join(checks.CHECKS)}"
            )
    return dict(pairs)


def _declare(row, reason):
    """What a declared exception makes of a row: one that no longer fails is a fault too."""
    if row.result == "FAIL":
        return dataclasses.replace(row, result="declared", found=reason)
    if row.result == "ok":
        text = f"it passes, but is declared as failing ({reason})"
        return dataclasses.replace(row, result="FAIL", found=text)
    return row


def run(library, only=(), exceptions=None, limit=LIMIT, tell=lambda row: None):
    """Runs the checks and returns their rows. Without devices there is only the first."""
    rows = []
    for check in chosen(only):
        row = run_check(check, library, limit * (20 if check.torch else 1))
        if check.name in (exceptions or {}):
            row = _declare(row, exceptions[check.name])
        rows.append(row)
        tell(row)
        if check.name == "load.factory" and row.result == "FAIL":
            break
    return rows


# ---- the report ----


def _print_row(row):
    from ..openreg import _messages

    blamed = f"{row.function}: " if row.result == "FAIL" else ""
    text = f"{row.name:18}  {row.result:8}  {blamed}{row.found.partition(chr(10))[0]}"
    print("\n".join(_messages.wrap(text.rstrip(), "", " " * 30)), flush=True)


def _first(library, row):
    """The paragraph about the first thing to mend."""
    from ..openreg import _messages

    again = f"python -m torch_openreg check-plugin {shlex.quote(library)} --only {row.name}"
    title = f"The first thing to mend: `{row.function}` ({row.name}: {row.about})"
    yield "\n" + "\n".join(_messages.wrap(title, "", "  "))
    lines = [("found", row.found), ("contract", row.contract), ("again", again)]
    if "died of SIG" in row.found:
        lines.append(("debug", f"{GDB} {again} --limit 3600"))
    for title, text in lines:
        for number, line in enumerate(text.splitlines()):
            yield from _messages.wrap(f"{'' if number else title:9} {line}", "  ", " " * 12)


def main(options):
    """``python -m torch_openreg check-plugin``."""
    if not os.path.exists(options.library):
        raise SystemExit(f"check-plugin: there is no file {options.library}")
    tell = (lambda row: None) if options.json else _print_row
    exceptions = declared(options.exceptions)
    rows = run(options.library, options.only, exceptions, options.limit, tell)
    failed = [row for row in rows if row.result == "FAIL"]
    if options.json:
        rows_as = [dataclasses.asdict(row) for row in rows]
        first = failed[0].name if failed else None
        print(json.dumps({"plugin": options.library, "first": first, "checks": rows_as}, indent=2))
        return 1 if failed else 0
    if failed:
        print("\n".join(_first(options.library, failed[0])))
    counts = {kind: sum(r.result == kind for r in rows) for kind in ("ok", "skipped", "declared")}
    numbers = [f"{len(failed)} failed", *(f"{n} {kind}" for kind, n in counts.items())]
    print(f"\n{len(rows)} checks: {', '.join(numbers)}")
    return 1 if failed else 0
