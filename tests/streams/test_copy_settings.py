"""The tests of copies again: without peer access, and on the devices of a plugin."""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")


def repeat(run, settings, *names):
    files = [str(HERE / name) for name in names]
    arguments = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    done = run("", settings, arguments=arguments, timeout=900)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert " passed" in done.out


@pytest.mark.slow
@two_devices
def test_copy_tests_pass_without_peer_access(run):
    repeat(run, {"OPENREG_PEER_ACCESS": "0"}, "test_copy.py", "test_copy_order.py")


@pytest.mark.slow
@pytest.mark.parametrize("library", ["libvendor.so", "libvendor_nomap.so"])
def test_copy_tests_pass_on_a_plugins_devices(run, plugins, library):
    repeat(run, {"OPENREG_PLUGIN": str(plugins / library)}, "test_copy.py")


@two_devices
def test_kernels_reach_peers_only_with_access(run_ok):
    code = """
    import torch
    # A cast between devices: one kernel with access; a cast, a copy of half the bytes, without.
    x = torch.ones(1 << 10, dtype=torch.float64, device="openreg:0")
    y = torch.zeros(1 << 10, device="openreg:1")
    torch.openreg.reset_peak_memory_stats(0)
    before = torch.openreg.memory_allocated(0)
    y.copy_(x)
    print(y.sum().item(), torch.openreg.max_memory_allocated(0) - before)
    """
    assert run_ok(code, {"OPENREG_PEER_ACCESS": "1"}).split() == ["1024.0", "0"]
    assert run_ok(code, {"OPENREG_PEER_ACCESS": "0"}).split() == ["1024.0", "4096"]


@two_devices
def test_can_device_access_peer_follows_the_setting():
    wanted = os.environ.get("OPENREG_PEER_ACCESS", "1") == "1"
    assert torch.openreg.can_device_access_peer(0, 1) == wanted
    assert not torch.openreg.can_device_access_peer(0, 0)
