"""Other libraries' own tests for CUDA, run under --as-cuda: `make libraries`. See
docs/libraries.md."""

import argparse
import fcntl
import os
import subprocess
import sys

from . import declared, results, sources


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", default="", help="one of them; all without")
    parser.add_argument("--source", default="", help="its source tree")
    parser.add_argument("--sanitizer", action="store_true", help="watch each test for races")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=600, help="seconds for a test")
    parser.add_argument("--page", default="", help="where the table is written")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest; nothing is judged")
    options = parser.parse_args()
    names = [library.name for library in sources.LIBRARIES]
    if options.library and options.library not in names:
        parser.error(f"LIBRARY={options.library}: it is one of {', '.join(names)}")
    if options.source and not options.library:
        parser.error("SOURCE is a tree of one library: name it with LIBRARY")
    return options


def environment():
    """Hugging Face's hub is out of reach on every machine alike."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("OPENREG_")}
    variables.pop("PYTHONPATH", None)  # it has the folder of this project's tests
    path = os.pathsep.join([os.path.dirname(sys.executable), variables.get("PATH", "")])
    return {
        **variables,
        "PATH": path,
        "OPENREG_AS_CUDA": "1",
        "OMP_NUM_THREADS": "1",  # the processes are as many as the cores
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def run_pytest(options, library, tree, files, report):
    """Returns pytest's exit status. A process that crashes, or is at one test for longer than the
    limit, fails that test."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"),
        *("--rootdir", tree),
        *("-n", str(options.jobs), "--dist", "load"),
        *("-o", f"faulthandler_timeout={options.limit}", "-o", "faulthandler_exit_on_timeout=true"),
        f"--junitxml={report}",
        *(["--openreg-sanitizer"] if options.sanitizer else []),
        *library.options,
        *options.pytest,
        *files,
    ]
    return subprocess.run(command, cwd=tree, env=environment(), check=False).returncode


def run(options, library, tree):
    """Returns what is wrong, as sentences."""
    files = list(library.paths(tree))
    report = os.path.join(sources.BUILD, f"{library.name}.xml")
    if os.path.exists(report):
        os.remove(report)
    code = run_pytest(options, library, tree, files, report)
    if options.pytest:
        return [f"pytest ended with status {code}"] if code else []
    if not os.path.exists(report):
        return [f"pytest ended with status {code} and wrote no report"]
    rows = results.read(report, files)
    expected = declared.DECLARED.get(library.name, ())
    if options.sanitizer:
        expected += declared.RACES.get(library.name, ())
    wrong, known = results.judge(rows, files, expected)
    failed = any(row.outcome == "failed" for row in rows.values())
    if code not in (0, 1) or (code == 1 and not failed):
        wrong.append(f"pytest ended with status {code}")
    if options.page:
        counts = results.numbers(rows, known)
        results.write(options.page, library, options.sanitizer, counts)
    return wrong


def main():
    options = arguments()
    os.makedirs(sources.BUILD, exist_ok=True)
    # Open, and so locked, until the process ends.
    lock = open(os.path.join(sources.BUILD, "lock"), "w")  # noqa: SIM115
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(f"{sources.BUILD} is in use by another run")
    wrong, missing = [], []
    for library in sources.LIBRARIES:
        if options.library not in ("", library.name):
            continue
        tree = sources.find_tree(library, options.source)
        if tree is None:
            missing.append(sources.how_to_get(library))
            continue
        print(f"== {library.name} {library.version}, {tree}", flush=True)
        wrong += [f"{library.name}: {line}" for line in run(options, library, tree)]
    for line in wrong + missing:
        print(line)
    return int(bool(wrong) or bool(missing and options.library))


if __name__ == "__main__":
    sys.exit(main())
