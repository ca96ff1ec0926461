"""OPENREG_POISON=1: what is read before it is written, or after it is freed, is NaN."""

import pytest

POISON = {"OPENREG_POISON": "1"}


def test_poison_fills_fresh_and_freed_memory_with_nan(run_ok):
    run_ok(
        """
        import torch
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for size in (7, 100_000, 3_000_000):
                x = torch.empty(size, dtype=dtype, device="openreg")
                assert x.isnan().all().item(), ("fresh", dtype, size)
                x.fill_(1)
                address = x.data_ptr()
                del x
                x = torch.empty(size, dtype=dtype, device="openreg")
                assert x.data_ptr() == address, (dtype, size)
                assert x.isnan().all().item(), ("freed", dtype, size)
                del x
        """,
        env=POISON,
    )


def test_memory_without_poison_keeps_its_bytes(run_ok):
    run_ok(
        """
        import torch
        x = torch.ones(1000, device="openreg")
        del x
        assert (torch.empty(1000, device="openreg") == 1).all().item()
        """
    )


def test_poison_shows_a_use_after_free_on_another_stream(run_ok):
    """The side stream reads when the block has been freed: a missing record_stream."""
    program = """
        import torch
        side = torch.Stream("openreg")
        x = torch.ones(1000, device="openreg")
        seen = torch.zeros(1000).pin_memory()
        torch.openreg.synchronize()
        with torch.openreg.testing.gate() as gate:
            gate.wait(side)
            with side:
                seen.copy_(x, non_blocking=True)
            {record}
            del x
            torch.openreg.default_stream().synchronize()
        torch.openreg.synchronize()
        assert seen.isnan().all() if {poisoned} else (seen == 1).all(), seen
        """
    run_ok(program.format(record="pass", poisoned=True), env=POISON)
    run_ok(program.format(record="x.record_stream(side)", poisoned=False), env=POISON)


def test_poison_never_changes_memory_of_queued_work(run_ok):
    run_ok(
        """
        import torch
        source = torch.arange(200.0).repeat_interleave(1000).view(200, 1000).pin_memory()
        result = torch.zeros(200, 1000).pin_memory()
        with torch.openreg.testing.gate() as gate:
            gate.wait()
            for i in range(200):
                x = torch.empty(1000, device="openreg")
                x.copy_(source[i], non_blocking=True)
                result[i].copy_(x, non_blocking=True)
                del x
        torch.openreg.synchronize()
        assert torch.equal(result, source)
        y = torch.randn(64, 64)
        z = y.to("openreg")
        for _ in range(20):
            z = (z @ z).tanh() + y.to("openreg")
            y_ = (y @ y) if _ == 0 else (w @ w)
            w = y_.tanh() + y
        assert torch.allclose(z.cpu(), w, atol=1e-4)
        """,
        env=POISON,
    )


@pytest.mark.parametrize("env", [{}, POISON], ids=["plain", "poison"])
def test_forked_child_that_drops_a_tensor_changes_nothing(run_ok, env):
    run_ok(
        """
        import gc, os, torch
        torch.openreg.memory._record_memory_history(stacks="python")
        x = torch.arange(100_000, dtype=torch.float32, device="openreg")
        side = torch.Stream("openreg")
        x.record_stream(side)
        before = torch.openreg.memory_stats()
        torch.openreg.synchronize()
        pid = os.fork()
        if pid == 0:
            del x
            gc.collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert torch.openreg.memory_stats() == before
        assert torch.equal(x.cpu(), torch.arange(100_000, dtype=torch.float32))
        del x
        assert torch.openreg.memory_allocated() == 0
        """,
        env=env,
    )


def test_poison_shows_an_input_freed_before_a_replay(run_ok):
    """What the capture itself frees is not filled: each replay makes it again."""
    code = """
import torch
x, kept = (torch.ones(4, device="openreg") for _ in range(2))
graph = torch.openreg.Graph()
with torch.openreg.graph(graph):
    y = x * 2
    z = (kept + 1) * 3  # frees what lies between
for _ in range(2):
    graph.replay()
    print(y.tolist(), z.tolist())
    x = None
"""
    nan, right = ["nan"] * 4, [6.0] * 4
    assert run_ok(code, env=POISON).splitlines() == [
        f"{[2.0] * 4} {right}",
        f"{nan} {right}".replace("'", ""),
    ]
