"""The device allocator: statistics, reuse in stream order, out of memory, deleters anywhere."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import torch_openreg  # noqa: F401

DEVICE = "openreg:0"
MIB = 1 << 20


def run_child(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", "import torch, torch_openreg\n" + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def in_child(code, **environment):
    child = run_child(code, **environment)
    assert child.returncode == 0 and child.stderr == "", child.stdout + child.stderr
    return child.stdout


def test_statistics():
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    x = torch.empty(3 * MIB, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.memory_allocated(0) - before == 3 * MIB
    y = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    del x
    assert torch.accelerator.memory_allocated(0) - before == MIB
    assert torch.accelerator.max_memory_allocated(0) - before == 4 * MIB
    assert torch.accelerator.memory_reserved(0) >= torch.accelerator.memory_allocated(0)
    del y
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated(0) == before
    stats = torch.accelerator.memory_stats(0)
    for pool in ("all", "small_pool", "large_pool"):
        assert f"allocated_bytes.{pool}.peak" in stats


def test_results_of_kernels_are_counted_and_given_back():
    x = torch.rand(MIB, device=DEVICE)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated(0)
    values, order = x.sort()
    assert torch.accelerator.memory_allocated(0) - before >= (4 + 8) * MIB
    del values, order
    assert torch.accelerator.memory_allocated(0) == before


def test_a_freed_block_is_reused_on_its_stream():
    x = torch.empty(MIB, device=DEVICE)
    address = x.data_ptr()
    del x
    assert torch.empty(MIB, device=DEVICE).data_ptr() == address


@pytest.mark.parametrize(
    "view",
    [lambda t: t, lambda t: t[5:], lambda t: t.view(2, -1).t()[3:]],
    ids=["whole", "slice", "view"],
)
def test_record_stream_keeps_a_block(view):
    side = torch.Stream(DEVICE)
    x = torch.ones(MIB, device=DEVICE)
    address = x.data_ptr()
    torch.accelerator.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait(side)
        view(x).record_stream(side)
        del x
        assert torch.empty(MIB, device=DEVICE).data_ptr() != address
    side.synchronize()


def test_without_record_stream_a_block_is_reused():
    side = torch.Stream(DEVICE)
    x = torch.ones(MIB, device=DEVICE)
    address = x.data_ptr()
    torch.accelerator.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait(side)
        del x
        assert torch.empty(MIB, device=DEVICE).data_ptr() == address
    side.synchronize()


def test_record_stream_of_nothing():
    torch.empty(0, device=DEVICE).record_stream(torch.Stream(DEVICE))


def test_out_of_memory_names_the_figures():
    out = in_child(
        """
        kept = torch.empty(16 << 20, dtype=torch.uint8, device="openreg")
        try:
            torch.empty(100 << 20, dtype=torch.uint8, device="openreg")
        except torch.OutOfMemoryError as error:
            print(error)
        print(torch.ones(4, device="openreg").sum().item())
        """,
        OPENREG_DEVICE_MEMORY="64M",
    )
    text, last = out.strip().splitlines()
    for part in (
        "100.00 MiB",
        "64.00 MiB",
        "openreg:0",
        "16.00 MiB",
        "free",
        "reserved",
        "capacity",
    ):
        assert part in text, text
    assert last == "4.0"


def test_out_of_memory_inside_a_kernel():
    out = in_child(
        """
        x = torch.rand(8 << 20, device="openreg")
        try:
            x.sort()
        except torch.OutOfMemoryError as error:
            print(error)
        print(x.sum().item() > 0, torch.accelerator.memory_allocated(0) == 32 << 20)
        """,
        OPENREG_DEVICE_MEMORY="64M",
    )
    assert "Tried to allocate" in out and out.strip().endswith("True True"), out


def test_the_cache_is_given_back_before_out_of_memory():
    in_child(
        """
        for megabytes in (40, 50, 30, 60):
            x = torch.empty(megabytes << 20, dtype=torch.uint8, device="openreg")
            del x
        """,
        OPENREG_DEVICE_MEMORY="64M",
    )


def test_mem_get_info():
    free, total = torch.openreg.mem_get_info(0)
    assert 0 < free <= total


@pytest.mark.parametrize("call", ["memory_allocated", "memory_stats", "reset_peak_memory_stats"])
def test_a_bad_index_is_named(call):
    count = torch.openreg.device_count()
    with pytest.raises(Exception, match=str(count + 3)):
        getattr(torch.accelerator, call)(count + 3)


def test_the_last_reference_may_die_anywhere():
    box = [torch.ones(1024, device=DEVICE)]
    box[0].mul_(2)
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert not box


def test_cpu_memory_is_ordinary_before_first_use_and_in_children():
    in_child(
        """
        import os
        x = torch.ones(1000)
        device = torch.ones(1000, device="openreg").sort()[0]
        made_before = torch.ones(1000)
        pid = os.fork()
        if pid == 0:
            del device, x, made_before
            total = sum(torch.rand(5000).sort()[0].sum().item() for _ in range(20))
            os._exit(0 if total > 0 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert device.sum().item() == 1000
        """,
    )
