"""The process of one check: its name, and the file for its report."""

import faulthandler
import os
import sys

from . import checks

if __name__ == "__main__":
    faulthandler.enable()
    if __package__ != "_check_plugin":
        from . import operators, torchcts  # noqa: F401 (which register their checks)
    checks.run(sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND))
