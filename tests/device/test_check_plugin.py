"""``python -m torch_openreg check-plugin``: right plugins pass, and each fault fails its check."""

import json
import os
import re
import subprocess

import pytest

import torch_openreg
from torch_openreg._check_plugin import checks, command, operators, torchcts

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
C_CHECKS = [name for name, check in checks.CHECKS.items() if not check.torch]


@pytest.fixture(scope="module")
def bad_plugin(tmp_path_factory):
    """tests/c/plugins/badplugin.c, built."""
    library = tmp_path_factory.mktemp("bad") / "libbadplugin.so"
    include, where = torch_openreg.get_include(), torch_openreg.get_library_dir()
    source = os.path.join(ROOT, "tests", "c", "plugins", "badplugin.c")
    flags = ["-std=c11", "-O1", "-fPIC", "-pthread", "-D_GNU_SOURCE", "-fvisibility=hidden"]
    link = [f"-I{include}", f"-L{where}", "-lopenreg", f"-Wl,-rpath,{where}"]
    subprocess.run(["cc", "-shared", *flags, source, "-o", library, *link], check=True)
    return str(library)


def shown(rows):
    return [(row.name, row.function, row.found) for row in rows if row.result == "FAIL"]


@pytest.mark.parametrize(
    "variant", [pytest.param("libvendor.so", marks=pytest.mark.slow), "libvendor_nomap.so"]
)
def test_example_passes(plugins, variant):
    rows = command.run(str(plugins / variant), C_CHECKS, limit=100)
    assert shown(rows) == []
    (streams,) = (row for row in rows if row.name == "completion.streams")
    assert streams.found == "one queue: a copy waits for those of other streams"
    skipped = [row.name for row in rows if row.result == "skipped"]
    assert skipped == (["kernels.map"] if "nomap" in variant else [])


# What is wrong; the check that fails; the function to mend; what the report has to name. The most
# different ones are in the fast tier.
FAULTS = """
without copy | load.factory | orPluginInit | must have copy
create error 1 | load.factory | create_devices | cannot make 2 devices .*DEVICE_COUNT sets
count gives 65 | load.count | count_devices | 'bad plugin' counts 65 devices: 0 to 64 are allowed
properties error 2 | load.devices | properties | properties of .*: invalid argument
alloc unaligned | memory.addresses | alloc | 0 past a multiple of 16
alloc same | memory.addresses | alloc | which overlaps memory that is allocated
free leaks | memory.free | free | bytes were allocated and freed 4 times, then
copy wrong | copies.sizes | copy | 1 of 3 bytes are wrong, the first at 2
copy early | order.stream | copy | step \\d+ of one stream: \\d+ of 3000 bytes are wrong
copy twice | completion.done | copy | signalled .* on openreg:0, which is over \\(`done` 0x
copy destroys | completion.done | copy | destroyed the event of .*, which is only signalled
copy crashes | copies.sizes | copy | died of SIGSEGV while copying 1 bytes from \\w+ to \\w+$
copy asserts | copies.sizes | copy | died of SIGABRT .*: .*Assertion .* failed\\.$
set wrong | copies.set | set | set to 0: 1 of 1048586 bytes are wrong
compute hides | kernels.errors | compute | and no error was reported
map wrong | kernels.map | map | what a kernel reads at offset 0
reset breaks | faults.reset | copy | a kernel failed
shutdown forgets | exit.idle | shutdown | died of SIGSEGV after the check, at its exit
"""
MORE_FAULTS = """
without name | load.factory | orPluginInit | has no name
version | load.factory | orPluginInit | ABI version 999, this library has 2
nothing | load.factory | orPluginInit | registered no device factory
type | load.factory | orPluginInit | none serves 'openreg'
count gives -1 | load.count | count_devices | counts -1 devices
count error 1 | load.count | count_devices | cannot count its devices: invalid argument
count code 1 | load.count | count_devices | returned 999 .*not among its results
create code 1 | load.factory | create_devices | cannot make 2 devices .* 999
create forgets | load.devices | create_devices | memory_limit of device 0 is 0 bytes
properties text | load.devices | properties | model of device 0 is
alloc null | memory.addresses | alloc | alloc of .* returned \\(nil\\) for 1 bytes
alloc error 5 | memory.addresses | alloc | alloc of .* "bad plugin": invalid argument
alloc code 1 | memory.addresses | alloc | returned 999 .*not among its results
create alone | load.alone | alloc | alloc of .* "bad plugin": invalid argument
alloc races | memory.threads | alloc | alloc of .* "bad plugin": invalid argument
alloc other | memory.short | alloc | the operating system refused a request
create promises | memory.limit | alloc | bytes were allocated, and then: Memcpy HtoD .* failed
free error 3 | memory.addresses | free | free of .* "bad plugin": invalid argument
alloc_host null | memory.pinned | alloc_host | alloc_host of .* returned \\(nil\\)
alloc_host unaligned | memory.pinned | alloc_host | 0 past a multiple of 16
copy error 1 | copies.sizes | copy | Memcpy HtoD on openreg:0 failed: invalid argument
copy code 2 | copies.sizes | copy | Memcpy DtoH .*failed: it returned 999, which is no orError_t
copy too much | copies.bounds | copy | 1 bytes to offset 1: 1 of 5000 bytes are wrong
copy forwards | copies.overlap | copy | from offset 0 to 1: \\d+ of \\d+ bytes are wrong
copy peers | copies.peers | copy | bytes between devices: 1 of 1 bytes are wrong
copy fails late | copies.sizes | copy | Memcpy HtoD on openreg:0 failed: the link is down
copy signals 999 | copies.sizes | copy | it returned 999, which is no orError_t
copy early | order.events | copy | step \\d+ of streams of devices 0 and 0
copy early | order.devices | copy | step \\d+ of streams of devices 0 and 1
copy early | order.streams | copy | step \\d+ of many streams
copy twice, late | completion.done | copy | signalled .* on openreg:0, which is over \\(`done` 0x
set error 2 | copies.set | set | Memset on openreg:1 failed: invalid argument
set too much | copies.set | set | set to 0: 1 of 1048586 bytes are wrong
set twice | completion.done | set | signalled Memset on openreg:0, which is over
compute error 1 | order.kernels | compute | check kernel on openreg:0 failed: invalid argument
compute skips | order.kernels | compute | the kernel has run 0 times
compute twice, late | completion.done | compute | signalled .* on openreg:0, which is over
compute crashes | completion.done | compute | died of SIGSEGV while
map null | kernels.map | map | map of .* returned \\(nil\\)
map unaligned | kernels.map | map | 0 past a multiple of 16
map error 2 | kernels.map | map | map of .* "bad plugin": invalid argument
reset error 1 | faults.lost | reset | reset of .* "bad plugin": invalid argument
shutdown forgets | exit.busy | shutdown | died of SIGSEGV after the check, at its exit
"""
# Those that are found when time is up.
HANGS = """
copy never | copies.sizes | copy | Memcpy HtoD returned orErrorNotReady, and did not signal `done`
set never | copies.set | set | Memset returned orErrorNotReady, and did not signal `done`
compute never | order.kernels | compute | returned orErrorNotReady, and did not signal `done`
lost forgets | faults.lost | copy | Memcpy HtoD returned orErrorNotReady
reset forgets | faults.reset | copy | Memcpy HtoD returned orErrorNotReady
shutdown hangs | exit.idle | shutdown | the process did not end within 8 s after the check
alloc waits | completion.host | alloc | allocating 3000 bytes .*waited for the kernel
copy serial | completion.streams | compute | waited for the kernel of the first
create starts | fork.before | create_devices | did not end within
fork waits | fork.after | create_devices | did not end within
"""
WITH_TORCH = """
operators | operators.names | operators | PyTorch has no operator aten::reluu
run wrong | operators.values | run | relu in float32: .* are not close
run crashes | operators.values | run | died of SIGSEGV
run mapped wrong | operators.values | run | relu in float32: .* are not close
run wrong | training.loop | run | the losses are
"""
WITH_TORCHCTS = """
copy wrong | torchcts.device | copy, set, compute or run | \\.py::test_.*: AssertionError
"""


def cases(text, limit, *marks):
    rows = [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines() if line]
    return [pytest.param(*row, limit, id=row[0], marks=marks) for row in rows]


CASES = [
    *cases(FAULTS, 100),
    *cases(MORE_FAULTS, 100, pytest.mark.slow),
    *cases(HANGS, 8, pytest.mark.slow),
    *cases(WITH_TORCH, 100, pytest.mark.slow),
    *cases(
        WITH_TORCHCTS,
        100,
        pytest.mark.slow,
        pytest.mark.skipif(torchcts.suite() is None, reason="`make judges` installs it"),
    ),
]


@pytest.mark.parametrize(("fault", "name", "function", "text", "limit"), CASES)
def test_fault_fails_its_check(bad_plugin, monkeypatch, fault, name, function, text, limit):
    monkeypatch.setenv("BAD_PLUGIN", fault)
    (row,) = command.run(bad_plugin, [name], limit=limit)
    assert (row.result, row.function) == ("FAIL", function), row
    assert re.search(text, " ".join(row.found.split())), row.found
    assert row.contract, row


def test_own_kernels_are_used_beside_map(bad_plugin, run_ok):
    """What they refuse takes the CPU's kernel, on the device's memory."""
    program = """
        import torch
        from torch_openreg import _C

        x = torch.randn(4, 5, device="openreg")
        assert torch.equal(x.relu().cpu(), x.cpu().relu())
        print(_C._own_kernels())
        for refused in (x.t(), x.double()):
            assert torch.equal(refused.relu().cpu(), refused.cpu().relu())
        graph = torch.openreg.Graph()
        with torch.openreg.graph(graph):
            y = x.relu()
        graph.replay()
        assert torch.equal(y.cpu(), x.cpu().relu())
        ways = torch.openreg.fallback_stats()["aten::relu"]
        print({name: way["count"] for name, way in ways.items()})
    """
    out = run_ok(program, {"OPENREG_PLUGIN": bad_plugin, "BAD_PLUGIN": "run mapped"}, fresh=True)
    assert out == "{'aten::relu'}\n{'asynchronous': 4, 'waited': 0, 'copying': 0}\n"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["run refuses", "run mapped refuses"])
def test_kernels_that_never_run_are_not_ok(bad_plugin, monkeypatch, variant):
    monkeypatch.setenv("BAD_PLUGIN", variant)
    (row,) = command.run(bad_plugin, ["operators.values"], limit=100)
    assert row.result == "skipped" and "and `accepts` of 1 kernels took none" in row.found, row


def test_copies_side_by_side_are_not_called_one_queue(bad_plugin, monkeypatch):
    """With this setting the plugin copies on the threads that run the streams."""
    monkeypatch.setenv("BAD_PLUGIN", "copy here")
    (row,) = command.run(bad_plugin, ["completion.streams"], limit=100)
    assert (row.result, row.found) == ("ok", ""), row


@pytest.mark.slow
def test_samples_have_each_set_of_keywords():
    """A kernel that ignores `alpha` is right for every other sample."""
    (add,) = (op for op in operators._database() if op.name == "add")
    assert {"alpha"} in [set(sample.kwargs) for sample in operators._samples(add, "float32")]


def test_summary_shows_the_model(bad_plugin, run):
    environment = {"BAD_PLUGIN": "right", "OPENREG_PLUGIN": bad_plugin}
    done = run("", environment, arguments=["-m", "torch_openreg"])
    assert "made by 'bad plugin'\n    model      bad 0.0\n" in done.out, done.out + done.err


def test_every_check_fails_for_some_fault():
    """A check that nothing fails would be an all-clear for everything."""
    found = {case.values[1] for case in CASES}
    assert set(checks.CHECKS) - found == set()


def test_contract_is_quoted_from_the_documentation():
    files = ("csrc/openreg/include/openreg.h", "csrc/openreg/include/openreg_operator.h")
    text = ""
    for name in (*files, "docs/vendor/check.md"):
        with open(os.path.join(ROOT, name)) as file:
            text += " ".join(re.sub(r"^\s*\*", "", file.read(), flags=re.M).split()) + "\n"
    for check in checks.CHECKS.values():
        assert check.contract and check.contract in text, check.name


@pytest.mark.slow
def test_declared_exception_is_no_failure(plugins):
    """And one that no longer fails is a failure."""
    library = str(plugins / "libvendor.so")
    (row,) = command.run(library, ["copies.set"], {"copies.set": "because"}, limit=100)
    assert (row.result, row.found) == ("FAIL", "it passes, but is declared as failing (because)")
    failed = command.Row("copies.set", "", "FAIL", "wrong", "set", "contract")
    assert command._declare(failed, "because").result == "declared"


@pytest.mark.slow
def test_command_prints_the_first_thing_to_mend(bad_plugin, run):
    options = ["-m", "torch_openreg", "check-plugin", bad_plugin, "--only", "copies.s*"]
    done = run("", {"BAD_PLUGIN": "set wrong"}, arguments=options)
    assert done.code == 1
    assert re.search(r"^copies.sizes +ok$", done.out, re.M), done.out + done.err
    assert "The first thing to mend: `set` (copies.set: " in done.out
    assert f"check-plugin {bad_plugin} --only copies.set" in " ".join(done.out.split())
    assert "\n2 checks: 1 failed, 1 ok, 0 skipped, 0 declared" in done.out
    dead = command.Row(
        "copies.sizes", "", "FAIL", "the process died of SIGABRT", "copy", "contract"
    )
    (*_, debug) = command._first(bad_plugin, dead)
    assert "--limit 3600" in debug and "gdb" in " ".join(command._first(bad_plugin, dead))
    as_json = json.loads(run("", {"BAD_PLUGIN": "set wrong"}, arguments=[*options, "--json"]).out)
    assert as_json["first"] == "copies.set" and len(as_json["checks"]) == 2
