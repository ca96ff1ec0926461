"""`PrivateUse1TestBase`: PyTorch's generic device tests, instantiated for this device."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "support/device_types.py"


def test_pytorchs_generic_device_tests_pass(run):
    done = run("", arguments=["-m", "pytest", "-q", "-p", "no:cacheprovider", str(PAGE)])
    assert done.code == 0, done.out + done.err
    # Skipped: another device's test, and one that skips this device.
    assert re.search(r"^5\d passed, 2 skipped", done.out, re.MULTILINE), done.out
