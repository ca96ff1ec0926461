"""The device allocator: statistics, reuse in stream order, out of memory, deleters anywhere."""

import threading

import pytest
import torch
import torch.nn.functional as F

import torch_openreg

DEVICE = "openreg:0"
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("nothing_left")


def test_memory_statistics_count_current_and_peak_bytes():
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


def test_freed_block_is_reused_on_its_stream():
    x = torch.empty(MIB, device=DEVICE)
    address = x.data_ptr()
    del x
    assert torch.empty(MIB, device=DEVICE).data_ptr() == address


BIT_VIEWS = {
    "conj": lambda t: torch.view_as_complex(t.view(-1, 2)).conj(),
    "neg": torch._neg_view,
    "both": lambda t: torch._neg_view(torch.view_as_complex(t.view(-1, 2)).conj()),
    "conj_expanded": lambda t: torch.view_as_complex(t.view(-1, 2))[0].conj().expand(4),
    "neg_expanded": lambda t: torch._neg_view(t[0].expand(4)),
}


@pytest.mark.parametrize(
    "view",
    [lambda t: t, lambda t: t[5:], lambda t: t.view(2, -1).t()[3:], *BIT_VIEWS.values()],
    ids=["whole", "slice", "view", *BIT_VIEWS],
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


@pytest.mark.parametrize("view", BIT_VIEWS.values(), ids=BIT_VIEWS)
def test_record_stream_of_a_conj_or_neg_view_queues_nothing(view):
    x = torch.ones(8, device=DEVICE)
    seen = view(x)
    torch.accelerator.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        before = torch_openreg._C._worker_info()["queued"], x._version
        seen.record_stream(torch.Stream(DEVICE))
        assert (torch_openreg._C._worker_info()["queued"], x._version) == before
    assert x.tolist() == [1.0] * 8


def test_record_stream_through_the_guard_keeps_a_block():
    """torch.futures asks the guard, not the operator, to keep what a future holds."""
    side = torch.Stream(DEVICE)
    x = torch.ones(MIB, device=DEVICE)
    address = x.data_ptr()
    future = torch.futures.Future(devices=[DEVICE])
    future.set_result(x)
    with torch.openreg.testing.gate() as gate:
        gate.wait(side)
        with side:
            future.wait()
        del future, x
        assert torch.empty(MIB, device=DEVICE).data_ptr() != address
    side.synchronize()
    assert torch.empty(MIB, device=DEVICE).data_ptr() == address


def test_block_without_record_stream_is_reused_at_once():
    side = torch.Stream(DEVICE)
    x = torch.ones(MIB, device=DEVICE)
    address = x.data_ptr()
    torch.accelerator.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait(side)
        del x
        assert torch.empty(MIB, device=DEVICE).data_ptr() == address
    side.synchronize()


def test_record_stream_of_an_empty_tensor_is_accepted():
    torch.empty(0, device=DEVICE).record_stream(torch.Stream(DEVICE))


def test_capacity_of_64_mib_is_kept_to_on_each_device(run_ok):
    out = run_ok(
        """
        import torch
        def take(megabytes, device=0):
            return torch.empty(megabytes << 20, dtype=torch.uint8, device=f"openreg:{device}")

        kept = [take(16) for _ in range(3)]
        try:
            kept.append(take(16))
            kept.append(take(16))
            print("a fifth fits")
        except torch.OutOfMemoryError:
            print(len(kept))
        other = take(60, 1)
        kept.clear()
        large = take(48)
        print(large.fill_(3)[-1].item() == 3)
        """,
        env={"OPENREG_DEVICE_MEMORY": "64M"},
    )
    count, right = out.split()
    assert count in ("3", "4") and right == "True"


@pytest.mark.parametrize("size", [1 << 50, (1 << 62) - 1])
def test_absurd_sizes_are_out_of_memory(size):
    with pytest.raises(torch.OutOfMemoryError, match="GiB on openreg:0"):
        torch.empty(size, dtype=torch.uint8, device=DEVICE)
    assert torch.ones(3, device=DEVICE).sum().item() == 3


def test_request_larger_than_the_device_returns_idle_memory_without_a_wait(run_ok):
    out = run_ok(
        """
        import torch
        from torch.openreg.testing import gate
        busy = torch.empty(40 << 20, dtype=torch.uint8, device="openreg")
        idle = torch.empty(30 << 20, dtype=torch.uint8, device="openreg")
        with torch.Stream("openreg") as side, gate() as closed:
            closed.wait()
            busy.record_stream(side)
            del busy, idle
            try:
                torch.empty(101 << 20, dtype=torch.uint8, device="openreg")
            except torch.OutOfMemoryError:
                pass
            stats = torch.openreg.memory_stats()
            reserved = torch.openreg.memory_reserved() >> 20
            print(stats["num_alloc_retries"], stats["num_ooms"], reserved)
        """,
        env={"OPENREG_DEVICE_MEMORY": "100M"},
    )
    assert out == "1 1 40\n"


TOO_LARGE = {
    "a sum": lambda t: t[:, None] + t,
    "a distance": lambda t: torch.cdist(t[:, None], t[:, None]),
    "a convolution": lambda t: F.conv2d(t.view(1, 1, 4, -1), t.view(1, 1, 4, -1), padding=1 << 20),
    "rows": lambda t: t.view(1, -1).index_select(0, t.new_zeros(1 << 22, dtype=torch.long)),
    "a list": lambda t: torch._foreach_add([t[:, None]], [t]),
    "a range": lambda t: torch.arange(1 << 43, device=t.device),
    "a matrix": lambda t: torch.eye(1 << 22, device=t.device),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_result_larger_than_the_device_is_out_of_memory(name):
    tensor = torch.zeros(1 << 21, device=DEVICE)
    before = torch.openreg.memory_stats()["num_ooms"]
    for i in (1, 2):
        with pytest.raises(torch.OutOfMemoryError, match="GiB on openreg:0"):
            TOO_LARGE[name](tensor)
        assert torch.openreg.memory_stats()["num_ooms"] == before + i
    assert tensor.count_nonzero() == 0


DRAWS = {
    "rand_like": torch.rand_like,
    "bernoulli": lambda x: torch.bernoulli(x, 0.5),
    "multinomial": lambda x: torch.multinomial(x[:4], x.numel(), replacement=True),
    "what waits": lambda x: torch.binomial(x, x),
    "a mask that there is room for": lambda x: torch.native_dropout(x, 0.5, True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_call_that_is_out_of_memory_draws_no_random_numbers(name):
    x = torch.ones(1, device=DEVICE).expand(1 << 24)
    torch.openreg.empty_cache()
    room = torch.openreg.memory_reserved() + (30 << 20)
    memory = torch.openreg.get_device_properties().total_memory
    torch.openreg.set_per_process_memory_fraction(room / memory)
    try:
        before = torch.openreg.get_rng_state()
        with pytest.raises(torch.OutOfMemoryError):
            DRAWS[name](x)
        assert torch.equal(torch.openreg.get_rng_state(), before)
    finally:
        torch.openreg.set_per_process_memory_fraction(1.0)


def test_temporaries_of_a_kernel_may_be_larger_than_the_device(run_ok):
    # The columns of this convolution take 72 MiB.
    out = run_ok(
        """
        import torch
        x = torch.ones(16, 4, 128, 128, dtype=torch.float64)
        weight = torch.ones(1, 4, 3, 3, dtype=torch.float64)
        there = [x.to("openreg"), weight.to("openreg")]
        for _ in range(2):
            y = torch.nn.functional.conv2d(*there, padding=1)
            print(torch.equal(y.cpu(), torch.nn.functional.conv2d(x, weight, padding=1)))
        """,
        env={"OPENREG_DEVICE_MEMORY": "32M"},
    )
    assert out.split() == ["True", "True"]


def test_empty_refuses_negative_sizes():
    with pytest.raises(RuntimeError, match="negative dimension -1"):
        torch.empty(-1, device=DEVICE)
    with pytest.raises(RuntimeError, match="negative dimension -5"):
        torch.empty_strided((-5,), (1,), device=DEVICE)


@pytest.mark.parametrize("format", [None, torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (0, 3, 4, 5)])
def test_empty_has_the_layout_of_the_cpu(shape, format):
    given = {} if format is None else {"memory_format": format}
    x = torch.empty(shape, dtype=torch.int16, device="openreg:1", **given)
    y = torch.empty(shape, dtype=torch.int16, **given)
    assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    assert x.untyped_storage().nbytes() == y.untyped_storage().nbytes()
    assert x.device == torch.device("openreg:1") and torch.openreg.current_device() == 0


def test_out_of_memory_names_the_figures(run_ok):
    out = run_ok(
        """
        import torch
        kept = torch.empty(16 << 20, dtype=torch.uint8, device="openreg")
        try:
            torch.empty(100 << 20, dtype=torch.uint8, device="openreg")
        except torch.OutOfMemoryError as error:
            print(error)
        print(torch.ones(4, device="openreg").sum().item())
        """,
        env={"OPENREG_DEVICE_MEMORY": "64M"},
    )
    text, last = out.strip().rsplit("\n", 1)
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


@pytest.mark.parametrize("where", ["call", "kernel"])
def test_out_of_memory_calls_its_observers(run_ok, where):
    failing = {"call": "torch.empty(100 << 20, dtype=torch.uint8, device='openreg')"}
    failing["kernel"] = "(x.sort(), torch.openreg.synchronize())"
    out = run_ok(
        f"""
        import torch
        x = torch.rand(8 << 20, device="openreg")
        torch.openreg.synchronize()
        torch.openreg.set_per_process_memory_fraction(0.75)
        seen = []
        torch.openreg.attach_out_of_memory_observer(lambda *figures: seen.append(figures))
        for _ in range(2):
            try:
                {failing[where]}
            except torch.openreg.OutOfMemoryError:
                print(len(seen))
        device, asked, limit, free = seen[0]
        print(device, asked >= 32 << 20, limit >> 20, free < 64 << 20)

        def refuse(*figures):
            raise KeyError("an observer's own")

        torch.openreg.attach_out_of_memory_observer(refuse)
        try:
            {failing[where]}
        except KeyError as error:
            print(error, len(seen))
        print(torch.ones(4, device="openreg").sum().item())
        """,
        env={"OPENREG_DEVICE_MEMORY": "64M"},
    )
    assert out.splitlines() == ["1", "2", "0 True 48 True", '"an observer\'s own" 3', "4.0"]


def test_out_of_memory_observer_must_be_callable():
    with pytest.raises(TypeError, match="must be callable, got 3"):
        torch.openreg.attach_out_of_memory_observer(3)


def test_out_of_memory_inside_a_kernel_leaves_the_device_usable(run_ok):
    out = run_ok(
        """
        import torch
        x = torch.rand(8 << 20, device="openreg")
        try:
            x.sort()
        except torch.OutOfMemoryError as error:
            print(error)
        print(x.sum().item() > 0, torch.accelerator.memory_allocated(0) == 32 << 20)
        """,
        env={"OPENREG_DEVICE_MEMORY": "64M"},
    )
    assert "Tried to allocate" in out and out.strip().endswith("True True"), out


def test_allocator_returns_its_cache_before_out_of_memory(run_ok):
    run_ok(
        """
        import torch
        for megabytes in (40, 50, 30, 60):
            x = torch.empty(megabytes << 20, dtype=torch.uint8, device="openreg")
            del x
        """,
        env={"OPENREG_DEVICE_MEMORY": "64M"},
    )


def test_mem_get_info_is_free_and_total():
    free, total = torch.openreg.mem_get_info(0)
    assert 0 < free <= total


def test_list_gpu_processes_has_this_process_alone(run_ok):
    out = run_ok(
        """
        import os, torch
        print(torch.openreg.list_gpu_processes(1))
        x = torch.empty(3 << 20, dtype=torch.uint8, device="openreg:1")
        first, second = torch.openreg.list_gpu_processes("openreg:1").splitlines()
        _, pid, _, used, *unit = second.split()
        print(first, int(pid) == os.getpid(), float(used) >= 3, *unit)
        """
    )
    assert out.splitlines() == [
        "GPU:1",
        "no processes are running",
        "GPU:1 True True MB GPU memory",
    ]


@pytest.mark.parametrize("call", ["memory_allocated", "memory_stats", "reset_peak_memory_stats"])
def test_memory_function_names_a_bad_index(call):
    count = torch.openreg.device_count()
    with pytest.raises(Exception, match=str(count + 3)):
        getattr(torch.accelerator, call)(count + 3)


def test_last_reference_of_a_tensor_may_be_dropped_in_another_thread():
    box = [torch.ones(1024, device=DEVICE)]
    box[0].mul_(2)
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert not box


def test_cpu_memory_is_ordinary_before_first_use_and_in_children(run_ok):
    run_ok(
        """
        import os, torch
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


def test_tensors_dropped_behind_a_gate_keep_their_values_until_they_are_read():
    """Blocks go round while nothing has run: only the order of the stream keeps them right."""
    source = torch.arange(200.0).repeat_interleave(1000).view(200, 1000).pin_memory()
    result = torch.zeros(200, 1000).pin_memory()
    addresses = set()
    with torch.openreg.testing.gate() as gate:
        gate.wait()
        for i in range(200):
            x = torch.empty(1000, device=DEVICE)
            addresses.add(x.data_ptr())
            x.copy_(source[i], non_blocking=True)
            result[i].copy_(x, non_blocking=True)
            del x
        assert not torch.openreg.current_stream().query()
    torch.openreg.synchronize()
    assert len(addresses) == 1
    assert torch.equal(result, source)


def test_tensors_dropped_behind_a_slow_kernel_keep_results_right():
    torch.openreg._sleep(20_000_000)
    total = torch.zeros(1000, device=DEVICE)
    for i in range(200):
        x = torch.full((1000,), float(i), device=DEVICE)
        total += x * 2
        del x
    assert torch.equal(total.cpu(), torch.full((1000,), 199.0 * 200))


def test_training_does_not_grow_memory(run_ok):
    run_ok(
        """
        import torch
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
        ).to("openreg")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        seen = []
        for step in range(300):
            x = torch.randn(16 + step % 5, 32, device="openreg")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step >= 100:
                seen.append((torch.openreg.memory_allocated(), torch.openreg.memory_reserved()))
        assert max(a for a, _ in seen) <= max(a for a, _ in seen[:5]), seen
        assert {r for _, r in seen} == {seen[0][1]}, seen
        """
    )


def test_threads_on_both_devices_keep_their_values():
    failures = []

    def work(seed):
        random = __import__("random").Random(seed)
        kept = []
        try:
            for i in range(400):
                value = seed * 1000 + i
                device = f"openreg:{random.randrange(2)}"
                size = random.choice((1, 100, 5000, 300_000))
                kept.append((torch.full((size,), value, device=device), value))
                if len(kept) > random.randrange(1, 8):
                    x, value = kept.pop(random.randrange(len(kept)))
                    assert (x.cpu() == value).all(), value
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_memory_accounting_is_exact(run_ok):
    out = run_ok(
        """
        import torch
        m = torch.openreg
        x = torch.empty(1000, device="openreg")
        base = m.memory_allocated()
        y = [torch.empty(n, dtype=torch.uint8, device="openreg") for n in (1, 513, 3 << 20)]
        print(m.memory_allocated() - base == 512 + 1024 + (3 << 20))
        peak = m.memory_allocated()
        del y
        print(m.memory_allocated() == base, m.max_memory_allocated() == peak)
        m.reset_peak_memory_stats()
        print(m.max_memory_allocated() == base)
        y = torch.empty(700, dtype=torch.uint8, device="openreg")
        del y
        print(m.max_memory_allocated() == base + 1024, m.memory_allocated() == base)
        print(m.memory_stats()["requested_bytes.all.current"] == 4000)
        del x
        m.empty_cache()
        print(m.memory_reserved() == 0, m.memory_allocated() == 0)
        """
    )
    assert set(out.split()) == {"True"}, out


def test_empty_cache_keeps_what_a_peers_queued_copy_writes():
    """The block is free for its own stream, and another device's copy is still to come."""
    source = torch.arange(MIB, dtype=torch.float32, device="openreg:1")
    side = torch.Stream("openreg:1")
    result = torch.empty(MIB).pin_memory()
    torch.openreg.synchronize(1)
    x = torch.empty(MIB, device="openreg:0")
    opener = torch.openreg.testing.gate(1)
    opener.wait(side)
    with side:
        x.copy_(source, non_blocking=True)
        result.copy_(x, non_blocking=True)
    x.record_stream(side)
    address = x.data_ptr()
    del x
    timer = threading.Timer(0.05, opener.open)
    timer.start()
    torch.openreg.empty_cache()  # waits for the copy, and gives the block back after it
    timer.join()
    torch.openreg.synchronize(1)
    torch.openreg.synchronize(0)  # whose stream the copy to the host is on
    assert torch.equal(result, torch.arange(MIB, dtype=torch.float32))
    held = {s["address"] for s in torch.openreg.memory_snapshot() if s["device"] == 0}
    assert address not in held
