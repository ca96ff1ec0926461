"""Copies between devices with and without peer access: the same tests run with both."""

import os

import pytest
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
FILES = [os.path.join(HERE, name) for name in ("test_copy.py", "test_copy_order.py")]
two_devices = pytest.mark.skipif("torch.openreg.device_count() < 2")


@two_devices
def test_every_copy_without_peer_access(run):
    done = run(
        "",
        {"OPENREG_PEER_ACCESS": "0"},
        arguments=["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FILES],
        timeout=600,
    )
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert " passed" in done.out


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
def test_can_device_access_peer():
    wanted = os.environ.get("OPENREG_PEER_ACCESS", "1") == "1"
    assert torch.openreg.can_device_access_peer(0, 1) == wanted
    assert not torch.openreg.can_device_access_peer(0, 0)
