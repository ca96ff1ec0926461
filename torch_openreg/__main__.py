"""``python -m torch_openreg``: devices, memory, workers, versions, settings; demo; run;
check-plugin; new-device."""

import argparse
import os
import sys

import torch

from . import _C, __version__, get_include, get_library_dir, openreg
from .openreg import _messages
from .openreg._utils import OWN_NAME

_DEMO = "ten seconds: a race in a training loop is found, and the loop is mended"
_NEW_DEVICE = "writes a package for a device of your own name, with a driver in C to begin with"
_RUN = "runs a program as it is, and sums up what it found"
_SANITIZE = "report accesses to the same memory that nothing orders"
_AS_CUDA = "let cuda mean the device: docs/cuda.md"
_FORCE = "--as-cuda on a machine with a GPU, too"
_SEEDS = "then run it under N schedules, and compare how it ends and what it prints"
_JOBS = "N schedules at once, for a program that may run beside itself (1)"
# Options that are settings of the environment, with the name of a value, or None for a switch.
_SETTINGS = {
    "OPENREG_INITCHECK": (None, "with --sanitize, report reads of memory that nothing has written"),
    "OPENREG_POISON": (None, "fill fresh and freed device memory with NaN patterns"),
    "OPENREG_LAUNCH_BLOCKING": (None, "wait for each launch, which raises its own errors"),
    "OPENREG_DEVICE_COUNT": ("N", "how many devices there are (2)"),
    "OPENREG_DEVICE_MEMORY": ("SIZE", "the capacity of each simulated device, such as 64M"),
    "OPENREG_WATCHDOG_S": ("S", "print the hang report after S seconds without progress"),
}
_REPORT = "write what --sanitize and --seeds find as HTML: a file.html, or a folder"
_CHECK = "checks that a plugin keeps the contract of a device factory"
_ONLY = "only checks with this name, such as 'copies.*'; may be repeated"
_EXCEPT = "a check that fails, and why that is accepted; may be repeated"
_LIMIT = "seconds for a check (30; twenty times that for one that needs PyTorch)"
_PROGRAM = "a script, or with -m a module, and its arguments"


def _versions():
    yield "Versions"
    yield f"  torch_openreg  {__version__}"
    yield f"  libopenreg     {_C._core_version} (plugin ABI {_C._abi_version})"
    yield f"  torch          {torch.__version__}"
    yield f"  headers        {get_include()}"
    yield f"  library        {get_library_dir()}"


def _devices():
    try:
        count = _C._checked_device_count()
    except RuntimeError as error:
        yield f"Devices: none ({error})"
        return
    yield f"Devices: {count}"
    for index in range(count):
        properties = openreg.get_device_properties(index)
        free, total = openreg.mem_get_info(index)
        peers = [
            str(other)
            for other in range(count)
            if other != index and openreg.can_device_access_peer(index, other)
        ]
        yield f"  {OWN_NAME}:{index}  {properties.name}, made by {properties.factory!r}"
        if properties.model:
            yield f"    model      {properties.model} {properties.major}.{properties.minor}"
        yield f"    memory     {_messages.size(free)} free of {_messages.size(total)}"
        yield f"    peers      {', '.join(peers) or 'none'}"
        yield f"    locality   {'unknown' if properties.numa_node < 0 else properties.numa_node}"


def _workers():
    info = _C._worker_info()
    yield "Workers (threads that run tasks, over all devices)"
    yield f"  {info['started']} started, at most {info['limit']}; {info['queued']} tasks queued"


def _factories():
    yield "Device factories"
    for factory in openreg.device_factories():
        devices = ", ".join(factory["devices"]) or "no device"
        serves = f"serves, makes {devices}" if factory["serves"] else "does not serve"
        plugin = f", plugin {factory['plugin']}" if factory["plugin"] else ""
        yield (
            f"  {factory['type']}: {factory['name']}, priority {factory['priority']}, "
            f"{serves}{plugin}"
        )


def _settings():
    yield "Settings"
    for name, value, origin, description in _C._settings():
        yield f"  {name} = {value or '(not set)'}  ({origin})"
        yield from _messages.wrap(description, "    ")
    as_cuda = os.environ.get("OPENREG_AS_CUDA")
    yield f"  OPENREG_AS_CUDA = {as_cuda or 0}  ({'default' if as_cuda is None else 'environment'})"
    yield "    1: cuda means the device, in Python; force: on a machine with a GPU, too"


def _show(_):
    for section in (_versions, _devices, _workers, _factories, _settings):
        try:
            print("\n".join(section()))
        except RuntimeError as error:
            print(f"{section.__name__.strip('_').capitalize()}: {error}")
        print()
    return 0


def _demo(_):
    from . import _demo

    return _demo.main()


def _run(options):
    from . import _run

    settings = {name: getattr(options, name) for name in _SETTINGS if getattr(options, name)}
    _run.prepare(options, settings)
    if options.seeds:
        from ._run_seeds import run_schedules

        return run_schedules(options)
    return _run.run_once(options)


def _check_plugin(options):
    from ._check_plugin import command

    return command.main(options)


def _new_device(options):
    from ._write_device import main

    return main(options.name, options.folder)


def main():
    parser = argparse.ArgumentParser(prog="python -m torch_openreg", description=__doc__)
    parser.set_defaults(main=_show)
    commands = parser.add_subparsers(
        title="commands", metavar="demo | run | check-plugin | new-device"
    )
    demo = commands.add_parser("demo", help=_DEMO, description=_DEMO)
    demo.set_defaults(main=_demo)
    run = commands.add_parser("run", help=_RUN, description=_RUN)
    run.set_defaults(main=_run, error=run.error)
    run.add_argument("--sanitize", action="store_true", help=_SANITIZE)
    run.add_argument("--seeds", type=int, metavar="N", help=_SEEDS)
    run.add_argument("--jobs", type=int, metavar="N", help=_JOBS)
    run.add_argument("--report", metavar="FILE", help=_REPORT)
    for name, (value, text) in _SETTINGS.items():
        how = {"metavar": value} if value else {"action": "store_const", "const": "1"}
        flag = "--" + name.removeprefix("OPENREG_").lower().replace("_", "-")
        run.add_argument(flag, dest=name, help=f"{text} ({name})", **how)
    run.add_argument("--ending", metavar="FILE", help=argparse.SUPPRESS)
    run.add_argument("--as-cuda", action="store_true", help=_AS_CUDA)
    run.add_argument("--force", action="store_true", help=_FORCE)
    run.add_argument("-m", dest="module", action="store_true", help="a module, not a file")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="program ...", help=_PROGRAM)
    check = commands.add_parser("check-plugin", help=_CHECK, description=_CHECK)
    check.set_defaults(main=_check_plugin)
    check.add_argument("library", help="the plugin, such as ./libvendor.so")
    check.add_argument("--only", action="append", default=[], metavar="NAME", help=_ONLY)
    check.add_argument(
        "--except", action="append", default=[], dest="exceptions", metavar="NAME=WHY", help=_EXCEPT
    )
    check.add_argument("--limit", type=float, default=30, metavar="S", help=_LIMIT)
    check.add_argument("--json", action="store_true", help="the rows as JSON")
    device = commands.add_parser("new-device", help=_NEW_DEVICE, description=_NEW_DEVICE)
    device.set_defaults(main=_new_device)
    device.add_argument(
        "name", metavar="NAME", help="of the device: torch.NAME, package torch_NAME"
    )
    device.add_argument("folder", help="a new or empty one")
    options = parser.parse_args()
    sys.exit(options.main(options))


if __name__ == "__main__":
    main()
