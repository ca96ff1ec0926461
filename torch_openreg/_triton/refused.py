"""Which versions of Triton are tested, and its driver where the version is another."""

import sys

from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend as Compiler

__all__ = ["REFUSED", "Compiler", "Driver"]
TESTED = ("3.8", "3.9")


def _refusal(version):
    """The sentence for a version that is not tested; None: it is."""
    if version.rpartition(".")[0] in TESTED:
        return None
    tested = " and ".join(f"{minor}.*" for minor in TESTED)
    return (
        f"torch_openreg runs kernels of Triton {tested}, which its tests cover, and this is "
        f"Triton {version}: pip install 'triton=={TESTED[-1]}.*'"
    )


REFUSED = _refusal(sys.modules["triton"].__version__)


class Driver(DriverBase):
    """Refuses to be made, which Triton does at the first launch."""

    def __init__(self):
        raise RuntimeError(REFUSED)

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        raise RuntimeError(REFUSED)

    get_current_target = get_active_torch_device = get_benchmarker = None
