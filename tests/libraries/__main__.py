"""Other libraries' own tests for CUDA, run under --as-cuda: `make libraries`. See
docs/libraries.md."""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys

from . import declared, results, sources

PLUGIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "plugin")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", default="", help="one of them; all without")
    parser.add_argument("--source", default="", help="its source tree")
    parser.add_argument("--sanitizer", action="store_true", help="watch each test for races")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, help="seconds for a test")
    parser.add_argument(
        "--continue", action="store_true", dest="resume", help="only what has no result yet"
    )
    parser.add_argument("--page", default="", help="where the table is written")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest; nothing is judged")
    options = parser.parse_args()
    names = [library.name for library in sources.LIBRARIES]
    if options.library and options.library not in names:
        parser.error(f"LIBRARY={options.library}: it is one of {', '.join(names)}")
    if options.source and not options.library:
        parser.error("SOURCE is a tree of one library: name it with LIBRARY")
    return options


def environment(library, report):
    """Hugging Face's hub is out of reach on every machine alike."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("OPENREG_")}
    path = os.pathsep.join([os.path.dirname(sys.executable), variables.get("PATH", "")])
    return {
        **variables,
        "PATH": path,
        "PYTHONPATH": PLUGIN,  # without the folder of this project's tests
        "LIBRARIES_RESULTS": report,
        "LIBRARIES_DONE": report + ".done",
        "LIBRARIES_CPU_LIMIT": str(library.cpu_limit),
        "OPENREG_AS_CUDA": "1",
        "OMP_NUM_THREADS": "1",  # the processes are as many as the cores
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **({"OPENREG_DEVICE_MEMORY": str(library.memory)} if library.memory else {}),
    }


def run_pytest(options, library, tree, files, report):
    """Returns pytest's exit status. A process that crashes, or is at one test for longer than the
    limit, fails that test."""
    limit = options.limit or library.limit
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"),
        *("-p", "openreg_record", "--rootdir", tree),
        *("-n", str(options.jobs), "--dist", "load"),
        *("-o", f"faulthandler_timeout={limit}", "-o", "faulthandler_exit_on_timeout=true"),
        *(["--openreg-sanitizer"] if options.sanitizer else []),
        *library.options,
        *options.pytest,
        *files,
    ]
    variables = environment(library, report)
    return subprocess.run(command, cwd=tree, env=variables, check=False).returncode


def results_file(options, library):
    """Has the results with which this run goes on, which are none unless it is a continued one."""
    mode = "-sanitizer" * options.sanitizer + "-part" * bool(options.pytest)
    path = os.path.join(sources.BUILD, f"{library.name}-{library.version}{mode}.jsonl")
    with open(path, "a" if options.resume else "w"):
        pass
    shutil.copy(path, path + ".done")
    return path


def run(options, library, tree):
    """Returns what is wrong, as sentences."""
    files = list(library.paths(tree))
    report = results_file(options, library)
    code = run_pytest(options, library, tree, files, report)
    if options.pytest:
        return [f"pytest ended with status {code}"] if code else []
    rows = results.read(report)
    print(*results.summary(rows), sep="\n")
    expected = declared.DECLARED.get(library.name, ())
    if options.sanitizer:
        expected += declared.RACES.get(library.name, ())
    wrong, known = results.judge(rows, files, expected)
    failed = any(row.outcome == "failed" for row in rows.values())
    nothing_left = code == 5 and options.resume and rows
    if code and not nothing_left and not (code == 1 and failed):
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
