"""What each tool says at its end when it has found nothing: what it has seen, or that there was
nothing to see.

Each function gives the summary of a tool, of a program that uses a device or of one that does not.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

pytest_plugins = ["pytester"]
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

USES = {
    True: "import torch\nassert torch.ones(3, device='openreg').sum().item() == 3\n",
    False: "import torch\nassert torch.ones(3).sum().item() == 3\n",
}


def work(uses):
    exec(compile(USES[uses], "<program>", "exec"), {})


def run_summary(run, pytester, uses, *options):
    path = pytester.makepyfile(program=USES[uses])
    done = run("", arguments=("-m", "torch_openreg", "run", *options, path))
    assert done.code == 0, done.err
    return done.err


def run_sanitize(run, pytester, uses):
    return run_summary(run, pytester, uses, "--sanitize")


def run_seeds(run, pytester, uses):
    return run_summary(run, pytester, uses, "--seeds", "1")


def explore_seeds(run, pytester, uses):
    return str(torch.openreg.testing.explore(lambda: work(uses), schedules=2))


def explore_preemptions(run, pytester, uses):
    return str(torch.openreg.testing.explore(lambda: work(uses), preemptions=1))


def hang_report(run, pytester, uses):
    ask = USES[uses] + "from torch_openreg import openreg\nprint(openreg.hang_report())\n"
    return run(ask).out


def fault(run, pytester, uses):
    with torch.openreg.testing.inject("kernel_error", after=99) as fault:
        work(uses)
    return repr(fault)


def suite(pytester, text, *options):
    pytester.makepyfile(test_it=text)
    command = [sys.executable, "-m", "pytest", "-p", "pytest_openreg", "-p", "no:cacheprovider"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENREG_")}
    done = subprocess.run(
        [*command, *options],
        cwd=pytester.path,
        env={**env, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def one_test(uses):
    body = USES[uses].replace("import torch\n", "")
    return f"import pytest\nimport torch\n\n@pytest.mark.openreg\ndef test_it():\n    {body}"


def pytest_sanitizer(run, pytester, uses):
    return suite(pytester, one_test(uses), "--openreg-sanitizer")


def pytest_schedules(run, pytester, uses):
    text = one_test(uses) if uses else one_test(uses).replace("mark.openreg", "mark.racy")
    return suite(pytester, text, "--openreg-schedules=2")


def pytest_preemptions(run, pytester, uses):
    return suite(pytester, one_test(uses), "--openreg-preemptions=1")


# By tool: what it says of the program with a device, and of the one without.
SUMMARIES = {
    run_sanitize: (
        "no mistakes found in the order of accesses of 1 process on openreg:0",
        "nothing was watched: no process",
    ),
    run_seeds: (
        "1 of 1 end and print as 'early' does on openreg:0",
        "as 'early' does; its process used no device",
    ),
    explore_seeds: (r"3 schedules of \d tasks on 1 stream, one result", "3 schedules of no task,"),
    explore_preemptions: (
        r"all \d schedules with at most 1 preemption of \d tasks on 1 stream agree",
        "all 1 schedules with at most 1 preemption of no task agree",
    ),
    hang_report: (
        "no stream of this process has work\n  workers: 1 of",
        "process has work\n  workers: 0 of",
    ),
    fault: ("injected into nothing", "injected into nothing"),
    pytest_sanitizer: (
        "watched: 1 test; the order of accesses of 1 process on openreg:0",
        "watched: 1 test; no process used a device",
    ),
    pytest_schedules: (
        "finished: 3 runs under 3 schedules",
        "no test has run under a schedule; ",
    ),
    pytest_preemptions: (
        r"all \d schedules with at most 1 preemption of \d tasks on 1 stream agree",
        "all 1 schedules with at most 1 preemption of no task agree",
    ),
}


# Of each of these, tests of the tool have one of the two.
SLOW = (run_seeds, pytest_sanitizer, pytest_schedules, pytest_preemptions)
TOOLS = [
    pytest.param(tool, id=tool.__name__, marks=[pytest.mark.slow] * (tool in SLOW))
    for tool in SUMMARIES
]


@pytest.mark.parametrize("uses", [True, False], ids=["device", "none"])
@pytest.mark.parametrize("tool", TOOLS)
def test_summary_reports_what_was_seen(run, pytester, tool, uses):
    expected = SUMMARIES[tool][not uses]
    said = tool(run, pytester, uses)
    assert re.search(expected, said), said


GRAPH = """
import sys
import torch

def test_graph():
    x, graph = torch.ones(4, device="openreg"), torch.openreg.Graph()
    with torch.openreg.graph(graph):
        y = x + 1
    graph.replay()
    assert y.sum().item() == 8

if len(sys.argv) == 1:  # the graph is a child's
    import subprocess
    subprocess.run([sys.executable, __file__, "child"], check=True)
elif sys.argv[1] == "child":
    test_graph()
"""
OF_GRAPHS = """\
of graphs: freed and replaced inputs, reads before the first replay,
  outputs of graphed functions, captured first calls
not watched: an output of a program's own graph that is kept over a replay
"""


@pytest.mark.slow
def test_summary_reports_what_was_watched_of_graphs(run, pytester):
    path = pytester.makepyfile(program=GRAPH)
    done = run("", arguments=("-m", "torch_openreg", "run", "--sanitize", path))
    lines = "".join(f"torch_openreg:   {line}\n" for line in OF_GRAPHS.splitlines())
    assert done.code == 0 and lines in done.err, done.err
    assert OF_GRAPHS in suite(pytester, GRAPH, "--openreg-sanitizer")
    assert "graphs" not in run_sanitize(run, pytester, uses=True)
