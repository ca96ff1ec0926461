"""The C tests of the core, each a test of its own here.

The program is build/ctest/debug/run-tests (`make ctest`), or what OPENREG_C_TESTS names.
"""

import os
import subprocess
from pathlib import Path

import pytest

DEFAULT = Path(__file__).resolve().parents[2] / "build" / "ctest" / "debug" / "run-tests"
PROGRAM = Path(os.environ.get("OPENREG_C_TESTS") or DEFAULT)
SKIPPED = 77
pytestmark = pytest.mark.simulated_device("the C tests load drivers of their own")


def names():
    try:
        listed = subprocess.run([PROGRAM, "--list"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        # One test that fails: an absent program must not look like a passed one.
        return [error]
    return listed.stdout.split()


def tiers():
    """The tests; the one of random programs takes minutes, and `make test` runs a part of it."""
    for name in names():
        if name == "stress_random_programs":
            yield pytest.param(name, {"OPENREG_STRESS_PROGRAMS": "300"}, id=f"{name}-some")
            yield pytest.param(
                name, {"OPENREG_STRESS_PROGRAMS": "2000"}, id=name, marks=pytest.mark.slow
            )
        else:
            yield pytest.param(name, {}, id=str(name))


def environment(settings):
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OPENREG_") or name.startswith(("OPENREG_TEST_", "OPENREG_STRESS"))
    }
    kept.setdefault("OPENREG_TEST_VENDOR_DIR", str(PROGRAM.parent))
    return settings | kept


@pytest.mark.parametrize("name, settings", tiers())
def test_core_passes_its_c_test(name, settings):
    if isinstance(name, Exception):
        pytest.fail(f"the C tests cannot be listed: {name}; `make ctest` builds them")
    # The program has a time limit for each test; this one is for a runner that hangs itself.
    done = subprocess.run(
        [PROGRAM, name], capture_output=True, text=True, timeout=1200, env=environment(settings)
    )
    output = done.stdout + done.stderr
    if done.returncode == SKIPPED:
        pytest.skip(output.strip())
    if done.returncode < 0:
        pytest.fail(f"{name} was ended by signal {-done.returncode}\n{output}", pytrace=False)
    if done.returncode:
        pytest.fail(f"{name} failed\n{output}", pytrace=False)
