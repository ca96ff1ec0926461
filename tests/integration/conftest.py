"""Tests with other libraries. `make integration` installs those and sets the variable."""

import os

collect_ignore_glob = [] if os.environ.get("OPENREG_INTEGRATION") else ["test_*.py"]
