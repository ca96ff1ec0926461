"""Packages that offer a device of their own name, made by their own driver: ``python -m
torch_openreg new-device`` writes one.

PyTorch has one name for this kind of device in a process. It is that of an installed package if
there is one, else "openreg". The packages declare themselves in their metadata, so that the choice
does not depend on the order in which PyTorch loads its extensions.
"""

import sys

GROUP = "torch_openreg.devices"
own = None  # (name, package) of this process's device


def load():
    """Imports the first installed package by name, which then calls register_device(); with more
    than one, a package that the program is importing takes precedence. False: there is none."""
    from importlib.metadata import entry_points

    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    if found and not any(entry.module in sys.modules for entry in found):
        found[0].load()
    return bool(found)


def is_registered(name, package):
    """Whether the process has this device already. ImportError: it has another package's."""
    if own not in (None, (name, package)):
        raise ImportError(_refusal(name, package))
    return own is not None


def _refusal(name, package):
    if own[1] == "torch_openreg":
        help = f"install {package} with pip: PyTorch finds its device by the package's metadata"
    else:
        help = f"uninstall one of them, or import {package} before torch"
    return (
        f"{package} offers the device {name!r}, but this process has {own[0]!r} of {own[1]}:\n"
        f"  PyTorch has one such device in a process\n"
        f"  help: {help}"
    )
