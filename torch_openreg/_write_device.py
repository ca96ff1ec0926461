"""``python -m torch_openreg new-device``: writes a package for a device of another name.

The package is the one in _new_device/, for a device called "acme", with the example driver.
"""

import sys
from pathlib import Path

import torch

from . import __version__
from ._device_name import refusal
from .openreg._utils import OWN_NAME

_TEMPLATE = Path(__file__).with_name("_new_device")
_PLACEHOLDER = "acme"


def _refusal(name):
    if name == "openreg":
        return "'openreg' is a device of torch_openreg"
    return None if name == OWN_NAME else refusal(name)  # OWN_NAME: its package is installed here


def _texts(name):
    """Path in the package -> text."""
    values = {
        _PLACEHOLDER: name,
        "example vendor": name,
        "@vVERSION": f"@v{__version__.partition('+')[0]}",
        "TORCH --": f"{torch.__version__.partition('+')[0]} --",
    }
    for path in sorted(_TEMPLATE.rglob("*")):
        if not path.is_file() or path.suffix in (".pyc", ".so"):
            continue
        text, place = path.read_text(), str(path.relative_to(_TEMPLATE))
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        yield place.replace(_PLACEHOLDER, name), text


def write(name, folder):
    """Writes the package; ValueError if the name or the folder cannot be used."""
    refusal = _refusal(name)
    if refusal:
        raise ValueError(refusal)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder")
    for place, text in _texts(name):
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main(name, folder):
    try:
        write(name, Path(folder))
    except (ValueError, OSError) as error:
        print(f"torch_openreg: new-device: {error}", file=sys.stderr)
        return 2
    print(
        f"{folder} has the package torch_{name}, for the device {name!r}:\n"
        f"  pip install --no-build-isolation {folder}\n"
        f"  pytest {folder}\n"
        "driver.c is where to begin: replace its functions with your hardware's"
    )
    return 0
