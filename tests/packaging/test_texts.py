"""Every text that the package shows, but for races: no line is too long, no number is an address or
a handle, no word is of the inside, and it has the value and what was allowed. Where a line of the
program is known it is shown, and a help where there is something to do."""

import os
import re
import sys
import types

import pytest
import torch

import pytest_openreg
import torch_openreg
from torch_openreg.openreg import _messages, _texts

DEVICE = "openreg"
INSIDE = re.compile(
    r"0x[0-9a-f]|aten::|\bor(Stream|Event|Device|Launch|Graph|Mem|Cache)[A-Z]?\w*\("
)
HERE = r"test_texts.py:\d+ "
graphs, memory, testing = torch.openreg.graphs, torch.openreg.memory, torch.openreg.testing


def check(text, *parts):
    for line in text.splitlines():
        assert len(line) <= _messages.WIDTH, f"{len(line)}: {line}\n{text}"
        assert not INSIDE.search(line), text
    for part in parts:
        assert re.search(part, text), f"{part} is missing:\n{text}"


def raised(kind, function, *arguments, **options):
    """The error as a traceback shows it."""
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    torch.openreg.synchronize()
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"torch.{kind.__name__}"
    return f"{name}: {caught.value}"


def ones(count=4):
    return torch.ones(count, device=DEVICE)


# ---- hang reports and schedules ----


def test_hang_report_has_lines_and_names(eventually):
    side = torch.openreg.Stream()
    x = ones()
    torch.openreg.synchronize()
    with testing.gate() as gate:
        gate.wait(side)
        with side:
            x.add_(1)
        eventually(lambda: "the gate made at" in torch.openreg.hang_report())
        report = torch.openreg.hang_report()
    side.synchronize()
    check(
        report,
        r"stream side of openreg:0, made at \S*\.py:\d+: ",
        r"the gate made at \S*\.py:\d+, ",
    )


def two_streams():
    x = torch.zeros(2000, device=DEVICE)
    side = torch.Stream(device=DEVICE)
    x += 1
    with side:
        x *= 5
    torch.accelerator.synchronize()
    return x


def fails_at_times():
    if two_streams()[0].item() != 5:
        raise RuntimeError("the loss is not a number, " * 12)


@pytest.mark.parametrize("options", [{"schedules": 30}, {"preemptions": 1}], ids=str)
@pytest.mark.parametrize("function", [two_streams, fails_at_times])
def test_exploration_shows_results_race_and_command(function, options):
    found = testing.explore(function, **options)
    check(str(found), "[2-4] results", HERE, "help: ", r"to replay: .*explore\(fn, schedules=")


# ---- errors: by name, a call, what its error is, and the parts of its text ----


def failing_kernel():
    x = ones()
    with testing.inject("kernel_error"):
        x.add_(1)
    torch.openreg.synchronize()


def failing_copy():
    with testing.inject("copy_error"):
        torch.ones(4).pin_memory().to(DEVICE, non_blocking=True)
    torch.openreg.synchronize()


def failing_allocation():
    with testing.inject("out_of_memory"):
        return ones()


def losing_device():
    x = ones()
    try:
        with testing.inject("device_lost"):
            x.add_(1)
        torch.openreg.synchronize()
    finally:
        torch.openreg.reset(0)


def fault_twice():
    with testing.inject("kernel_error"), testing.inject("kernel_error"):
        pass


def index_out_of_bounds():
    table, index = ones(10), torch.tensor([1, 12], device=DEVICE)
    picked = table[index]
    return (picked * 2).sum().item()


def target_out_of_bounds():
    scores = torch.zeros(4, 3, device=DEVICE)
    targets = torch.tensor([0, 1, 2, 7], device=DEVICE)
    torch.nn.functional.cross_entropy(scores, targets)
    torch.openreg.synchronize()


def captured(do):
    side = torch.openreg.Stream()
    x = ones()
    torch.openreg.synchronize()

    def run():
        graph = torch.openreg.Graph()
        with torch.openreg.graph(graph, stream=side):
            do(x)

    return run


def waiting_for_other_work(x):
    event = torch.openreg.default_stream().record_event()
    torch.openreg.current_stream().wait_event(event)


def unjoined_stream(x):
    current = torch.openreg.current_stream()
    unjoined = torch.openreg.Stream()
    if unjoined == current:  # the pool gives each of its streams in turn
        unjoined = torch.openreg.Stream()
    unjoined.wait_stream(current)
    with unjoined:
        x.add_(1)


def capture_on_default_stream():
    torch.openreg.Graph().capture_begin()


def wrong_version():
    torch_openreg._check_torch_version("1.13.0")


def foreign_device():
    shared = torch.ones(4, device="openreg:1")
    function, args = torch.multiprocessing.reductions.reduce_tensor(shared)
    function(*args[:6], 0, *args[7:])


def negative_to_dlpack():
    torch.utils.dlpack.to_dlpack(torch.conj(torch.ones(2, dtype=torch.cfloat, device=DEVICE)).imag)


IN_QUEUE = "with OPENREG_LAUNCH_BLOCKING=1 in the"
ERRORS = {
    failing_kernel: (
        RuntimeError,
        "add_ on openreg:0",
        'fault "kernel_error"\n',
        rf"{HERE}  x.add_\(1\)\n",
        "the fault was injected here",
    ),
    failing_copy: (RuntimeError, "Memcpy HtoD on openreg:0", 'fault "copy_error"', f"{HERE}  "),
    failing_allocation: (
        torch.OutOfMemoryError,
        "^torch.OutOfMemoryError: openreg out of memory. Tried to allocate 16 bytes on openreg:0",
        'injected fault "out_of_memory"',
    ),
    losing_device: (
        torch.AcceleratorError,
        "add_ failed",
        r"help: torch.openreg.reset\(0\)",
        rf"{HERE}  x.add_\(1\)\n",
    ),
    fault_twice: (RuntimeError, '"kernel_error" is armed on openreg:0 already'),
    index_out_of_bounds: (
        IndexError,
        "^IndexError: index 12 is out of bounds for dimension 0 with size 10\n",
        rf"{HERE}  picked = table\[index\]\n",
        "raised by index on openreg:0, which was queued here",
    ),
    target_out_of_bounds: (
        IndexError,
        "Target 7 is out of bounds",
        rf"{HERE}  torch.nn.functional.cross_entropy\(scores, targets\)\n",
    ),
    captured(lambda x: x.sum().item()): (RuntimeError, "stream side", "the capture is invalidated"),
    captured(lambda x: torch.openreg.synchronize()): (
        RuntimeError,
        "stream side",
        "do it before the capture",
    ),
    captured(waiting_for_other_work): (RuntimeError, "stream side", "before the capture begins"),
    captured(unjoined_stream): (RuntimeError, "stream unjoined has work", "have the origin stream"),
    capture_on_default_stream: (RuntimeError, "the default stream of", "make another stream"),
    lambda: testing.inject("kernel"): (ValueError, "'kernel'", "kernel_error, device_lost"),
    lambda: testing.inject("kernel_error", after=-1): (ValueError, "0 to .*, got -1"),
    lambda: testing.schedule("soon"): (ValueError, "'soon'", "from 0 to", "'late' or 'early'"),
    lambda: testing.explore(two_streams, schedules=0): (ValueError, "at least 1, not 0"),
    lambda: testing.explore(lambda: sys.stdout): (TypeError, "TextIO|EncodedFile", "help: return"),
    lambda: torch.ones(1, device="openreg:7"): (RuntimeError, "index 7 .* 0 to 1"),
    lambda: torch.openreg.synchronize("cpu"): (ValueError, "an openreg device, got 'cpu'"),
    lambda: torch.openreg.memory_usage(): (NotImplementedError, "mem_get_info"),
    lambda: ones().untyped_storage().byteswap(torch.float): (NotImplementedError, "help: swap a"),
    lambda: torch.openreg.Event(external=True): (NotImplementedError, "cannot be external"),
    wrong_version: (ImportError, "1.13.0", "built for PyTorch", "--force-reinstall"),
    foreign_device: (ValueError, "device of shared openreg memory is", "got 0"),
}


@pytest.mark.parametrize("call", ERRORS, ids=lambda call: call.__qualname__)
def test_error_has_value_allowed_place_and_help(call):
    kind, *parts = ERRORS[call]
    text = raised(kind, call)
    if call is not wrong_version:  # with a command to paste
        check(text, *parts)
    torch.openreg.synchronize()


# ---- out of memory ----


def allocate_too_much():
    held = [torch.empty(1 << 18, device=DEVICE) for _ in range(3)]
    other = torch.empty(2 << 18, device=DEVICE)
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
    finally:
        del held, other


def test_out_of_memory_names_the_variables_that_hold_most():
    text = raised(torch.OutOfMemoryError, allocate_too_much)
    check(
        text,
        "^torch.OutOfMemoryError: openreg out of memory. Tried to allocate 1048576.00 GiB on ",
        "\n  other holds 2 MiB\n(  .*\n)*  held\\[0\\] holds 1 MiB\n",
        "help: .*\n +torch.openreg.memory._record_memory_history()",
    )


@pytest.mark.parametrize("tool", ["history", "sanitizer"])
def test_out_of_memory_has_the_lines_that_hold_most(tool):
    if tool == "history":
        memory._record_memory_history()
    else:
        torch.openreg.sanitizer.enable()
    try:
        text = raised(torch.OutOfMemoryError, allocate_too_much)
    finally:
        memory._record_memory_history(None)
        torch.openreg.sanitizer.disable()
    check(text)
    # Memory that earlier tests left may be listed, too, and a long path of it wraps these lines.
    held, other = "held = .* holds 3 MiB in 3 blocks", "other = .* holds 2 MiB in 1 block"
    assert re.search(f"{HERE}{held} .*{HERE}{other}", " ".join(text.split())), text


# ---- programs ----


@pytest.mark.simulated_device("a plugin's path in the table is longer than a line")
def test_program_names_its_settings_within_a_line(run):
    done = run("", arguments=("-m", "torch_openreg"))
    folders = (torch_openreg.get_include(), torch_openreg.get_library_dir())
    check(
        "\n".join(line for line in done.out.splitlines() if not line.endswith(folders)),
        "Devices: 2",
    )


REFUSED = {
    "OPENREG_DEVICE_COUNT": ("many", "number from 0 to"),
    "OPENREG_DEVICE_MEMORY": ("large", "such as"),
    "OPENREG_SCHEDULE_SEED": ("soon", "late"),
    "OPENREG_SCHEDULE_TAPE": ("x", "separated by commas"),
    "OPENREG_WATCHDOG_S": ("soon", "seconds"),
    "OPENREG_WATCHDOG_SIGNAL": ("KILL", "USR1"),
    "OPENREG_SANITIZER": ("loud", "warn"),
}


def test_refused_settings_are_named_with_what_is_allowed(run):
    done = run(
        "import torch; torch.openreg.device_count()",
        {name: value for name, (value, _) in REFUSED.items()},
    )
    told = " ".join(done.err.split())
    for name, (value, allowed) in REFUSED.items():
        assert re.search(f"{name}='{value}' is not [^=]*{allowed}", told), done.err


def test_plugin_that_cannot_be_loaded_is_named(run):
    done = run("import torch; torch.ones(1, device='openreg')", {"OPENREG_PLUGIN": "/no/such.so"})
    check("\n".join(done.err.splitlines()[-2:]), "plugin '/no/such.so' cannot be loaded")


def test_child_of_a_fork_is_refused(run_ok):
    out = run_ok(
        """
        import os, torch
        x = torch.ones(1, device="openreg")
        if not os.fork():
            for use in (lambda: x + 1, torch.openreg.synchronize, torch.openreg.init):
                try:
                    use()
                except RuntimeError as error:
                    print(f"RuntimeError: {error}", flush=True)
            os._exit(0)
        os.wait()
        """
    )
    check(out, "subprocess")
    assert out.count("'spawn'") == 3, out


def test_plugin_paints_reports_as_pytest_does():
    report = "error: data race\n\n  a.py:7   x += 1\n           ^^^^^^"
    painted = (
        "\033[1;31merror: \033[0m\033[1mdata race\033[0m\n\n  \033[36ma.py:7\033[0m   x += 1\n"
        "           \033[1;31m^^^^^^\033[0m"
    )
    for marked in (True, False):
        reporter = types.SimpleNamespace(_tw=types.SimpleNamespace(hasmarkup=marked))
        assert pytest_openreg._painted(reporter, report) == (painted if marked else report)


def test_sentence_ends_a_line_at_a_clause():
    text = "x" * 60 + ": " + "y " * 30 + "; " + "z" * 120
    assert [len(line) for line in _messages.sentence(text, 24).splitlines()] == [61, 63, 122]
    assert _texts.error("aten::add_.Tensor on openreg:0") == "add_ on openreg:0"
    assert os.linesep == "\n"
