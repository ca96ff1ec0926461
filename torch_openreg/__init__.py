"""An accelerator simulated on the CPU, as the PyTorch device ``openreg``.

``import torch`` is enough where the package is installed: PyTorch loads it by its entry point.
Importing ``torch_openreg`` itself does the same in either order. The import starts nothing; the
devices are created at their first use.
"""

import os
import sys
from pathlib import Path

try:
    from ._build_info import TORCH_VERSION as _BUILT_FOR
    from ._build_info import VERSION as __version__
except ImportError as error:
    raise ImportError(
        f"{Path(__file__).resolve().parent.parent} is the source of torch_openreg,\n"
        "  which is not built there, and Python takes it before an installed package\n"
        "  help: run 'make build' in it, or start Python in another folder"
    ) from error

_PACKAGE_DIR = Path(__file__).resolve().parent


def _minor(version):
    return ".".join(version.split(".")[:2])


def _source():
    """What pip rebuilds the package from: its folder, or its name in an index."""
    import shlex

    folder = _PACKAGE_DIR.parent
    if (folder / "setup.py").exists():
        return f"-e {shlex.quote(str(folder))}"
    import importlib.metadata
    import json

    try:
        origin = importlib.metadata.distribution("torch_openreg").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    origin = json.loads(origin) if origin else {}
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return shlex.quote(f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}")
    if "dir_info" in origin or origin.get("url", "").endswith(".tar.gz"):
        return shlex.quote(origin["url"])
    # From source: a wheel that names its PyTorch in its version is for the previous one.
    return f"--no-binary torch_openreg torch_openreg=={__version__.partition('+')[0]}"


def _check_torch_version(torch_version):
    if _minor(torch_version) != _minor(_BUILT_FOR):
        import shlex

        # Without the cache, in which pip keeps the wheel that was built for the other PyTorch.
        pip = f"{shlex.quote(sys.executable)} -m pip install --no-build-isolation --no-cache-dir"
        raise ImportError(
            f"torch_openreg {__version__} was built for PyTorch {_minor(_BUILT_FOR)} "
            f"({_BUILT_FOR})\n"
            f"  and cannot be used with PyTorch {torch_version}; this builds it again:\n"
            f"  {pip} --force-reinstall --no-deps {_source()}"
        )


def _autoload():
    """Registers the device with PyTorch, once. ``import torch`` calls it as an entry point."""
    from . import _packages

    if _packages.own is None and not _packages.load():
        register_device("openreg", __name__)


def register_device(name, package, driver=""):
    """Gives this process's device its name and its driver; ``torch.NAME`` is its module. A package
    that ``python -m torch_openreg new-device`` has written calls it when it is imported.

    Args:
        name: of the device: lower-case letters, with underscores between them.
        package: the package's ``__name__``.
        driver: the path of the driver, a plugin for the type "openreg", which is loaded at the
            first use of a device. OPENREG_PLUGIN takes precedence; if it is empty, the devices are
            simulated, as they are without a driver.

    Raises ImportError if the process has the device of another package, and ValueError for a name
    that PyTorch cannot give to a device.
    """
    import torch

    from . import _packages

    if _packages.is_registered(name, package):
        return
    _check_torch_version(torch.__version__)
    from . import _device_name, _registration

    refusal = name != "openreg" and _device_name.refusal(name)
    if refusal:
        raise ValueError(f"register_device: {refusal}")
    _registration.register(name, driver)
    _packages.own = name, package
    if os.environ.get("OPENREG_AS_CUDA", "0") != "0":
        from . import _as_cuda

        _as_cuda.install_if_set()


def as_cuda(force=False):
    """Makes "cuda" mean the device openreg, in this process and those that it starts from then on:
    ``torch.cuda``, device strings, ``.cuda()``, ``x.device.type``, "nccl" groups and the other
    names that programs written for CUDA use. docs/cuda.md has the tables.

    Call it before importing modules other than torch, in a ``conftest.py`` for example, because
    these may check at their import whether there is a GPU. It lasts until the process ends; a
    second call does nothing.

    Args:
        force: do it even on a machine that seems to have a GPU, which then cannot be used.

    Raises RuntimeError on such a machine without ``force``, if the process has used CUDA already,
    and if PyTorch is built so that the name cannot be exchanged. Nothing has changed then.
    """
    from . import _as_cuda

    _as_cuda.install(force)


def triton():
    """Makes Triton launch its kernels on this device, for programs that say "openreg"; under
    ``--as-cuda`` it does so by itself. docs/triton.md has what works.

    Raises ImportError without Triton, and RuntimeError for a version that is not tested.
    """
    from . import _triton

    _triton.activate()


def get_include():
    """The folder of the headers: ``openreg.h`` and ``torch_openreg/*.h``."""
    return str(_PACKAGE_DIR / "include")


def get_library_dir():
    """The folder of the runtime: ``libopenreg.so.0``, and ``libopenreg.so`` for the linker."""
    return str(_PACKAGE_DIR / "lib")


# PyTorch may call _autoload in the middle of this import, or this import may be part of PyTorch's.
# Either way everything above is defined by then.
import torch as _torch  # noqa: E402, F401

_autoload()
