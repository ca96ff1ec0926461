"""torch.profiler: what the device did, on which stream, and which call launched it."""

import collections
import itertools
import json
import os
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from profiled import metadata
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

CPU, DEVICE = ProfilerActivity.CPU, ProfilerActivity.PrivateUse1
BOTH = [CPU, DEVICE]
QUIET = {"KINETO_LOG_LEVEL": "99"}  # or it says on stderr when a profile starts and stops
MILLISECOND = 1_000_000  # ns, as _sleep takes


def on_device(profiler, name=None):
    """What ran on the device, in order."""
    events = [e for e in profiler.events() if e.device_type == DeviceType.PrivateUse1]
    events = [e for e in events if name in (None, e.name) and not e.is_user_annotation]
    return sorted(events, key=lambda e: e.time_range.start)


def on_host(profiler, name):
    events = [e for e in profiler.events() if e.device_type == DeviceType.CPU and e.name == name]
    return sorted(events, key=lambda e: e.time_range.start)


def detailed():
    """A profile whose events have what metadata() tells."""
    config = torch.profiler._ExperimentalConfig(expose_kineto_event_metadata=True)
    return profile(activities=BOTH, experimental_config=config)


def stream_ids(events):
    return {int(metadata(e)["stream_id"]) for e in events}


def export(profiler, path):
    """The Chrome trace: its rows by (pid, tid), the slices and the arrows."""
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    names = collections.defaultdict(dict)
    for e in events:
        if e["ph"] == "M":
            names[e["name"]][(e["pid"], e["tid"])] = next(iter(e["args"].values()))
    return SimpleNamespace(
        processes={pid: name for (pid, _), name in names["process_name"].items()},
        labels=names["process_labels"],
        threads=names["thread_name"],
        slices=[e for e in events if e["ph"] == "X"],
        starts={e["id"]: e for e in events if e["ph"] == "s" and e["cat"] == "ac2g"},
        ends={e["id"]: e for e in events if e["ph"] == "f" and e["cat"] == "ac2g"},
    )


def step(x):
    return torch.relu(x @ x)


@pytest.fixture
def x():
    x = torch.randn(64, 64, device="openreg")
    step(x)
    torch.openreg.synchronize()
    return x


def test_profile_of_three_steps_shows_kernels_after_their_launches(x):
    side = torch.Stream("openreg")
    side.wait_stream(torch.openreg.current_stream())
    with detailed() as p:
        with side:
            for _ in range(3):
                step(x)
        side.synchronize()
    kernels = on_device(p)
    assert [e.name for e in kernels] == ["aten::mm", "aten::relu"] * 3
    assert all(e.time_range.elapsed_us() > 0 for e in kernels)
    assert {e.device_index for e in kernels} == {0}
    assert stream_ids(kernels) == {side.stream_id}
    launches = on_host(p, "orLaunchKernelEx")
    assert len(launches) == 6
    for launch, kernel in zip(launches, kernels, strict=True):
        assert metadata(launch)["correlation"] == metadata(kernel)["correlation"]
        assert launch.flow_id == kernel.flow_id and launch.flow_start and not kernel.flow_start
        assert launch.time_range.start <= kernel.time_range.start
    for earlier, later in itertools.pairwise(kernels):
        assert earlier.time_range.end <= later.time_range.start


def test_profile_links_a_kernel_to_its_operator(x):
    with profile(activities=BOTH) as p:
        step(x)
    (mm,), (relu,) = on_host(p, "aten::mm"), on_host(p, "aten::relu")
    assert [k.name for k in mm.kernels] == ["aten::mm"]
    assert [k.name for k in relu.kernels] == ["aten::relu"]
    (kernel,) = on_device(p, "aten::mm")
    assert mm.device_time == pytest.approx(kernel.time_range.elapsed_us(), abs=0.01)
    (matmul,) = on_host(p, "aten::matmul")
    assert (
        matmul.device_time == pytest.approx(mm.device_time) and matmul.self_device_time_total == 0
    )
    # The call that launched it is within the operator.
    for operator, launch in zip((mm, relu), on_host(p, "orLaunchKernelEx"), strict=True):
        assert launch.thread == operator.thread
        assert launch.cpu_parent is operator


def test_key_averages_has_device_time(x):
    with profile(activities=BOTH) as p:
        for _ in range(3):
            step(x)
    rows = {(e.key, e.device_type): e for e in p.key_averages()}
    operator, kernel = rows["aten::mm", DeviceType.CPU], rows["aten::mm", DeviceType.PrivateUse1]
    assert operator.count == kernel.count == 3
    assert operator.device_time_total == pytest.approx(kernel.self_device_time_total)
    assert kernel.self_device_time_total > 0
    table = p.key_averages().table(sort_by="self_device_time_total")
    assert "Self OPENREG" in table and "OPENREG total" in table


FIRST_CALLS = {
    "mm": lambda x: x @ x,
    "addmm": lambda x: torch.addmm(x, x, x),
    "bmm": lambda x: x[None] @ x[None],
    "add": lambda x: x + x,
    "mul_": lambda x: x.mul_(x),
    "relu": lambda x: x.relu(),
    "sum": lambda x: x.sum(0),
    "softmax": lambda x: torch.softmax(x, 0),
    "cat": lambda x: torch.cat([x, x]),
    "topk": lambda x: x.topk(2),
    "silu": lambda x: torch.nn.functional.silu(x),
    "linear": lambda x: torch.nn.functional.linear(x, x, x[0]),
    "conv1d": lambda x: torch.nn.functional.conv1d(x[None], x[:, :, None]),
    "view_copy": lambda x: torch.view_copy(x, (-1,)),
    "pixel_shuffle": lambda x: torch.pixel_shuffle(x.view(1, 39, 39, 1)[:, :36], 2),
    "mse_loss": lambda x: torch.nn.functional.mse_loss(x, x),
    "foreach": lambda x: torch._foreach_add([x, x], 1.0),
}


@pytest.mark.parametrize("name", FIRST_CALLS)
def test_profile_counts_a_first_call_once(name):
    """The results of the first call with given sizes are found out in another way."""
    x = torch.ones(39, 39, device="openreg")
    seen = []
    for _ in range(2):
        with profile(activities=BOTH, with_flops=True, record_shapes=True) as p:
            FIRST_CALLS[name](x)
        rows = [e for e in p.key_averages() if e.device_type == DeviceType.CPU]
        seen.append({e.key: (e.count, e.flops) for e in rows if e.key.startswith("aten::")})
    assert seen[0] == seen[1]


def test_profile_shows_a_sleeping_kernel_as_long_as_it_sleeps():
    with profile(activities=BOTH) as p:
        for milliseconds in (2, 5):
            torch.openreg._sleep(milliseconds * MILLISECOND)
    short, long = on_device(p, "_sleep")
    assert short.time_range.elapsed_us() >= 2000 and long.time_range.elapsed_us() >= 5000
    assert long.time_range.start >= short.time_range.end


def test_profile_shows_copies_fills_and_synchronisations():
    pinned = torch.ones(1000).pin_memory()
    with detailed() as p:
        x = pinned.to("openreg", non_blocking=True)
        y = x.clone()
        y.cpu()
        event = torch.Event("openreg")
        event.record()
        event.synchronize()
        torch.openreg.current_stream().synchronize()
        torch.openreg.synchronize()
    sizes = {e.name: metadata(e)["bytes"] for e in on_device(p) if e.name.startswith("Memcpy")}
    assert sizes == {"Memcpy HtoD": 4000, "Memcpy DtoD": 4000, "Memcpy DtoH": 4000}
    assert all(e.activity_type == "gpu_memcpy" for e in on_device(p))
    for name in ("orEventSynchronize", "orStreamSynchronize", "orDeviceSynchronize"):
        assert on_host(p, name), name


def test_profile_shows_the_wait_of_an_operator(x):
    torch.nonzero(x)
    with profile(activities=BOTH) as p:
        torch.openreg._sleep(3 * MILLISECOND)
        torch.nonzero(x)
    (operator,) = on_host(p, "aten::nonzero")
    waits = [e for e in operator.cpu_children if e.name == "orStreamSynchronize"]
    (kernel,) = on_device(p, "aten::nonzero")
    assert waits and waits[-1].time_range.end >= kernel.time_range.start


def test_chrome_trace_has_a_row_for_each_device_and_stream(tmp_path):
    streams = [torch.Stream("openreg:0"), torch.Stream("openreg:1")]
    with profile(activities=BOTH) as p:
        for stream in streams:
            with stream:
                torch.openreg._sleep(1000)
        for device in range(2):
            with torch.openreg.device(device):
                torch.openreg._sleep(1000)
            torch.openreg.synchronize(device)
    trace = export(p, tmp_path / "trace.json")
    assert trace.processes.pop(os.getpid()) == "python"
    assert trace.processes == {0: "openreg:0", 1: "openreg:1"} | trace.processes
    assert not any("GPU" in label for label in trace.labels.values())
    rows = {(s["pid"], s["tid"]): s for s in trace.slices if s["name"] == "_sleep"}
    assert len(rows) == 4
    names = collections.defaultdict(set)
    for (pid, tid), s in rows.items():
        name = trace.threads[pid, tid]
        assert re.fullmatch(rf"(default )?stream {tid}", name)
        names[pid].add(name.split()[0])
        is_default = torch.openreg.default_stream(pid).stream_id == int(s["args"]["stream_id"])
        assert is_default == name.startswith("default")
    assert names == {0: {"default", "stream"}, 1: {"default", "stream"}}


def test_chrome_trace_has_an_arrow_from_each_launch(x, tmp_path):
    with profile(activities=BOTH) as p:
        step(x)
        x.cpu()
    trace = export(p, tmp_path / "trace.json")
    assert len(trace.starts) == len(trace.ends) == 3 and trace.starts.keys() == trace.ends.keys()
    slices = {(s["name"], s["pid"], s["tid"], s["ts"]) for s in trace.slices}
    for key, start in trace.starts.items():
        end = trace.ends[key]
        assert start["pid"] == os.getpid() and end["pid"] == 0 and start["ts"] <= end["ts"]
        row = start["pid"], start["tid"], start["ts"]
        assert any(("or" in s[0]) and s[1:] == row for s in slices)


def test_profile_of_device_activities_alone_has_no_operators(x):
    with profile(activities=[DEVICE]) as p:
        step(x)
    assert [e.name for e in on_device(p)] == ["aten::mm", "aten::relu"]
    assert not on_host(p, "aten::mm")
    assert all(e.time_range.elapsed_us() > 0 for e in on_device(p))


def test_profile_without_device_activities_has_no_kernels(x):
    with profile(activities=[CPU]) as p:
        step(x)
    assert on_host(p, "aten::mm") and not on_device(p) and not on_host(p, "orLaunchKernelEx")


def test_profile_links_backward_on_its_own_thread():
    w = torch.randn(32, 32, device="openreg", requires_grad=True)
    step(w).sum().backward()
    torch.openreg.synchronize()
    with profile(activities=BOTH) as p:
        step(w).sum().backward()
    linked = [e.name for e in p.events() if e.device_type == DeviceType.CPU and e.kernels]
    assert "aten::mm" in linked and "aten::threshold_backward" in linked
    main = on_host(p, "aten::relu")[0].thread
    assert any(e.thread != main for e in on_host(p, "orLaunchKernelEx"))
    kernels = on_device(p)
    owned = sum(len(e.kernels) for e in p.events())
    assert owned == len(kernels)


def test_record_function_range_spans_its_kernels_on_the_stream(x):
    with profile(activities=BOTH) as p:
        with record_function("forward"):
            step(x)
        torch.relu(x)
    (span,) = [
        e for e in p.events() if e.is_user_annotation and e.device_type == DeviceType.PrivateUse1
    ]
    mm, relu, outside = on_device(p)
    assert span.name == "forward" and span.device_index == 0
    assert span.time_range.start == mm.time_range.start
    assert span.time_range.end == relu.time_range.end <= outside.time_range.start


def test_profile_schedule_gives_each_cycle_its_own_kernels(x):
    seen = []
    plan = schedule(wait=1, warmup=1, active=2, repeat=2)
    with profile(
        activities=BOTH, schedule=plan, on_trace_ready=lambda p: seen.append(on_device(p))
    ) as p:
        for _ in range(8):
            step(x)
            torch.openreg.synchronize()
            p.step()
    assert [[e.name for e in events] for events in seen] == [["aten::mm", "aten::relu"] * 2] * 2


def test_profiles_in_sequence_have_their_own_kernels(x):
    for count in (1, 2, 3):
        with profile(activities=BOTH) as p:
            for _ in range(count):
                torch.relu(x)
        assert len(on_device(p)) == count
        assert on_host(p, "aten::relu")[0].kernels


def test_profile_has_no_arrow_for_a_kernel_queued_before_it(x):
    stream = torch.openreg.current_stream()
    with torch.openreg.testing.gate() as gate:
        gate.wait(stream)
        torch.relu(x)
        with profile(activities=BOTH) as p:
            gate.open()
            torch.sigmoid(x)
    early, late = on_device(p)
    assert (early.name, late.name) == ("aten::relu", "aten::sigmoid")
    assert not early.flow_id and late.flow_id
    assert [e.name for e in p.events() if e.kernels] == ["aten::sigmoid"]


def test_profile_within_a_profile_leaves_the_next_one_whole(x):
    """PyTorch has one profiler a thread, and says nothing about the second."""
    with profile(activities=BOTH):
        with profile(activities=BOTH):
            torch.relu(x)
    with profile(activities=BOTH) as p:
        torch.relu(x)
    assert [e.name for e in on_device(p)] == ["aten::relu"]
    assert on_host(p, "aten::relu")[0].kernels


def test_profile_may_begin_in_the_middle_of_an_operator(x):
    """Pushes and pops of another profile's operators are no concern of this one."""

    class Starts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            Starts.profile = profile(activities=BOTH)
            Starts.profile.start()
            return y.relu()

    Starts.apply(x)
    Starts.profile.stop()
    assert [k.name for k in on_host(Starts.profile, "aten::relu")[0].kernels] == ["aten::relu"]


def test_profile_shows_kernels_of_other_threads_without_operators(x):
    """Their kernels are there, their operators are not: PyTorch's profiler is the thread's own."""
    stop, ready = threading.Event(), threading.Event()

    def work():
        with torch.Stream("openreg"):
            while not stop.is_set():
                torch.relu(x)
                ready.set()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait()
    for _ in range(5):
        with profile(activities=BOTH) as p:
            torch.openreg._sleep(MILLISECOND)
        (mine,) = on_device(p, "_sleep")
        assert mine.time_range.elapsed_us() >= 1000
    stop.set()
    for thread in threads:
        thread.join()
    torch.openreg.synchronize()


def test_profile_of_all_threads_has_the_programs_operators_alone(x):
    """Kernels call operators, on the lanes."""
    y = torch.rand(1 << 16, device=x.device)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    for _ in range(2):
        with profile(activities=[CPU], experimental_config=config) as profiler:
            torch.nn.functional.binary_cross_entropy(y, y, weight=y)
            torch.openreg.synchronize()
        found = {event.thread for event in profiler.events() if event.name.startswith("aten::")}
        assert len(found) == 1


def test_profile_shows_a_failing_kernel_and_its_error_is_raised(x):
    index = torch.tensor([5], device="openreg")
    p = profile(activities=BOTH)
    p.start()
    with pytest.raises(IndexError):
        torch.nn.functional.embedding(index, x[:2])
        torch.openreg.synchronize()
    p.stop()
    assert "aten::embedding" in {e.name for e in on_device(p)}
    torch.relu(x).cpu()


def test_memory_profile_counts_allocations_of_operators():
    torch.empty(1, device="openreg")
    with profile(activities=BOTH, profile_memory=True) as p:
        x = torch.empty(1000, device="openreg")
        y = x + 1
        del x
    made, added = on_host(p, "aten::empty")[0], on_host(p, "aten::add")[0]
    assert made.device_memory_usage == added.device_memory_usage == 4096
    assert -4096 in [e.device_memory_usage for e in on_host(p, "[memory]")]
    assert y.shape == (1000,)
    with profile(activities=BOTH) as p:
        torch.empty(1000, device="openreg")
    assert "[memory]" not in {e.key for e in p.key_averages()}


@pytest.mark.usefixtures("nothing_left")
def test_memory_profile_is_in_the_chrome_trace(tmp_path):
    before = torch.openreg.memory_allocated()
    with profile(activities=BOTH, profile_memory=True) as p:
        x = torch.empty(1 << 20, device="openreg")
    p.export_chrome_trace(str(tmp_path / "t.json"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    made = [e["args"] for e in events if e["name"] == "[memory]" and e["args"]["Bytes"] == 1 << 22]
    assert [(a["Device Type"], a["Device Id"]) for a in made] == [(20, 0)]
    assert made[0]["Total Allocated"] == before + (1 << 22) == torch.openreg.memory_allocated()
    assert made[0]["Addr"] == x.data_ptr()


def test_out_of_memory_is_in_the_memory_profile():
    _, total = torch.openreg.mem_get_info()
    with profile(activities=BOTH, profile_memory=True) as p:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * total, dtype=torch.uint8, device="openreg")
    assert "[OutOfMemory]" in {e.name for e in p.events()}


def test_legacy_profile_measures_with_events(x):
    with torch.autograd.profiler.profile(use_device="openreg") as p:
        torch.openreg._sleep(1000)
        step(x)
    rows = {e.key: e for e in p.key_averages()}
    assert rows["aten::mm"].device_time_total > 0 and rows["aten::relu"].device_time_total > 0


def test_legacy_profile_with_kineto_is_the_trace(x):
    with torch.autograd.profiler.profile(use_device="openreg", use_kineto=True) as p:
        step(x)
    kernels = [e for e in p.function_events if e.device_type == DeviceType.PrivateUse1]
    assert {e.name for e in kernels} == {"aten::mm", "aten::relu"}


def test_tools_of_other_devices_refuse_and_the_device_goes_on(x):
    with pytest.raises((RuntimeError, AssertionError)):
        with torch.autograd.profiler.emit_nvtx():
            pass
    assert torch.relu(x).cpu().min() >= 0


@pytest.mark.slow
def test_profile_counts_records_that_do_not_fit(run):
    done = run(
        """
        import torch
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile
        x = torch.ones(4, device="openreg")
        for repeat in range(2):
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as p:
                for _ in range(20):
                    x.add_(1)
            kinds = [e.device_type for e in p.events() if e.name == "aten::add_"]
            device = kinds.count(DeviceType.PrivateUse1)
            print(kinds.count(DeviceType.CPU), device <= 10)
        """,
        {"OPENREG_TRACE_RECORDS": "10", **QUIET},
    )
    assert done.code == 0 and done.out == "20 True\n" * 2
    dropped = re.findall(r"no room for (\d+) of (\d+) records .*OPENREG_TRACE_RECORDS=10", done.err)
    assert dropped and all(int(total) - int(lost) == 10 for lost, total in dropped)
    assert int(dropped[0][1]) >= 41  # calls and kernels, and the wait at the end


@pytest.mark.slow
def test_forked_child_ends_without_a_trace_and_the_parents_goes_on(run_ok):
    out = run_ok(
        """
        import os, torch
        from torch.profiler import ProfilerActivity, profile
        x = torch.ones(4, device="openreg").add_(1)
        torch.openreg.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as p:
            x.add_(1)
            child = os.fork()
            if child == 0:
                torch.ones(3).add_(1)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            x.add_(1)
        names = [e.name for e in p.events() if e.device_type.name == "OPENREG"]
        print(names)
        child = os.fork()
        if child == 0:
            with profile(activities=[ProfilerActivity.CPU]) as p:
                torch.ones(3).add_(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
        QUIET,
    )
    assert out == "['aten::add_', 'aten::add_']\n"


def test_profile_in_a_forked_child_warns_why_it_is_empty(run):
    done = run(
        """
        import os, torch
        from torch.profiler import ProfilerActivity, profile
        x = torch.ones(4, device="openreg")
        child = os.fork()
        if child == 0:
            with torch.autograd.profiler.profile(use_device="openreg", use_kineto=True) as p:
                torch.ones(3).add_(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    assert "in forked subprocess" in done.err


@pytest.mark.slow
def test_profile_of_a_program_that_uses_no_device_starts_none(run_ok):
    run_ok(
        """
        import torch, threads
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as p:
            torch.ones(3).add_(1)
        assert not [n for n in threads.names() if n.startswith("openreg")]
        assert not torch.openreg.is_initialized()
        assert all(e.device_type.name == "CPU" for e in p.events())
        """,
        QUIET,
    )
