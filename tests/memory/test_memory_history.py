"""Snapshots, the history of allocations, limits and settings: torch.openreg.memory."""

import pickle
import sys
import threading

import pytest
import torch
from torch.cuda import _memory_viz

import torch_openreg  # noqa: F401

DEVICE = "openreg:0"
MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("nothing_left")
memory = torch.openreg.memory


@pytest.fixture
def record():
    """_record_memory_history, off again after the test."""

    def record(enabled="all", **options):
        memory._record_memory_history(enabled, **{"stacks": "python", **options})

    yield record
    memory._record_memory_history(None)


def block_of(snapshot, tensor):
    blocks = [b for s in snapshot["segments"] for b in s["blocks"]]
    return next(b for b in blocks if b["address"] == tensor.data_ptr())


def actions(trace, address):
    return [e["action"] for e in trace if e.get("addr") == address]


def names(entry):
    return [f["name"] for f in entry["frames"]]


def test_snapshot_lists_segments_and_blocks():
    torch.openreg.empty_cache()
    x = torch.empty(700, dtype=torch.uint8, device=DEVICE)
    y = torch.empty(3 * MIB, dtype=torch.uint8, device="openreg:1")
    segments = torch.openreg.memory_snapshot()
    mine = next(s for s in segments if any(b["address"] == x.data_ptr() for b in s["blocks"]))
    assert (mine["device"], mine["segment_type"], mine["stream"]) == (0, "small", 0)
    assert mine["segment_pool_id"] == (0, 0) and mine["is_expandable"] is False
    block = next(b for b in mine["blocks"] if b["address"] == x.data_ptr())
    assert (block["size"], block["requested_size"]) == (1024, 700)
    assert (block["state"], block["frames"]) == ("active_allocated", [])
    other = next(s for s in segments if any(b["address"] == y.data_ptr() for b in s["blocks"]))
    assert (other["device"], other["segment_type"]) == (1, "large")
    for segment in segments:
        end = segment["address"]
        for b in segment["blocks"]:
            assert b["address"] == end
            end += b["size"]
        assert end == segment["address"] + segment["total_size"]
    for index in (0, 1):
        own = [s for s in segments if s["device"] == index]
        assert sum(s["total_size"] for s in own) == torch.openreg.memory_reserved(index)
        assert sum(s["allocated_size"] for s in own) == torch.openreg.memory_allocated(index)


def test_snapshot_shows_a_block_that_waits_for_a_recorded_stream():
    side = torch.Stream(DEVICE)
    x = torch.ones(MIB, device=DEVICE)
    address = x.data_ptr()
    torch.openreg.synchronize()
    with torch.openreg.testing.gate() as gate:
        gate.wait(side)
        x.record_stream(side)
        del x
        blocks = {b["address"]: b for s in memory.memory_snapshot() for b in s["blocks"]}
        assert blocks[address]["state"] == "active_pending_free"
    side.synchronize()


def test_history_of_a_tensor_has_its_frames(record):
    record()

    def make():
        return torch.empty(5000, dtype=torch.uint8, device=DEVICE)

    x = make()
    address = x.data_ptr()
    snapshot = memory._snapshot()
    assert names(block_of(snapshot, x))[:2] == ["make", "test_history_of_a_tensor_has_its_frames"]
    assert memory._allocation_traceback(address)[0]["name"] == "make"
    assert memory._allocation_traceback(address + 512) is None
    del x
    snapshot = memory._snapshot()
    trace = snapshot["device_traces"][0]
    assert len(snapshot["device_traces"]) == torch.openreg.device_count()
    assert actions(trace, address)[-3:] == ["alloc", "free_requested", "free_completed"]
    alloc, *_, freed = [e for e in trace if e.get("addr") == address and e["size"] == 5000]
    assert names(alloc)[0] == "make"
    assert names(freed)[0] == "test_history_of_a_tensor_has_its_frames"
    assert alloc["frames"][0]["filename"] == __file__ and alloc["frames"][0]["line"] > 0
    assert alloc["stream"] == 0 and alloc["pool_id"] == (0, 0)
    assert alloc["time_us"] <= freed["time_us"]
    assert [e["action"] for e in trace].count("snapshot") >= 1
    assert memory._allocation_traceback(address) is None


def test_history_has_segments_and_out_of_memory(run_ok):
    run_ok(
        """
        import torch
        m = torch.openreg.memory
        m._record_memory_history(stacks="python")
        x = torch.empty(30 << 20, dtype=torch.uint8, device="openreg")
        try:
            torch.empty(50 << 20, dtype=torch.uint8, device="openreg")
        except torch.OutOfMemoryError:
            pass
        del x
        m.empty_cache()
        trace = m._snapshot()["device_traces"][0]
        got = [(e["action"], e["size"] >> 20) for e in trace]
        for_the_text = ("snapshot", 0)
        assert got == [("segment_alloc", 30), ("alloc", 30), ("oom", 50), for_the_text,
                       ("free_requested", 30), ("free_completed", 30), ("segment_free", 30),
                       ("snapshot", 0)], got
        assert trace[2]["device_free"] == 34 << 20 and "addr" not in trace[2]
        """,
        env={"OPENREG_DEVICE_MEMORY": "64M"},
    )


def test_history_keeps_the_stacks_that_its_context_names(record):
    def frames_of(context):
        record(context=context, clear_history=True)
        x = torch.empty(5000, dtype=torch.uint8, device=DEVICE)
        live = bool(block_of(memory._snapshot(), x)["frames"])
        del x
        trace = [e for e in memory._snapshot()["device_traces"][0] if e["size"] == 5000]
        return live, bool(trace[0]["frames"]), bool(trace[1]["frames"])

    assert frames_of(None) == (False, False, False)
    assert frames_of("state") == (True, False, False)
    assert frames_of("alloc") == (True, True, True)
    assert frames_of("all") == (True, True, True)


def test_history_with_all_stacks_has_frames_of_c(record):
    record(stacks="all")
    x = torch.empty(5000, device=DEVICE)
    found = names(block_of(memory._snapshot(), x))
    assert "test_history_with_all_stacks_has_frames_of_c" in found
    assert any("OpenReg" in name or "empty" in name for name in found), found


def test_history_of_state_only_keeps_no_trace(record):
    record("state")
    x = torch.empty(5000, device=DEVICE)
    snapshot = memory._snapshot()
    assert block_of(snapshot, x)["frames"]
    assert snapshot["device_traces"][0] == []


def test_history_keeps_its_latest_entries(record):
    record(max_entries=4, skip_actions=["snapshot"])
    for size in range(1, 11):
        torch.empty(512 * size, dtype=torch.uint8, device=DEVICE)
    trace = memory._snapshot()["device_traces"][0]
    assert [(e["action"], e["size"]) for e in trace] == [
        ("free_completed", 4608),
        ("alloc", 5120),
        ("free_requested", 5120),
        ("free_completed", 5120),
    ]
    record(max_entries=2, skip_actions=["snapshot"])
    assert [e["size"] for e in memory._snapshot()["device_traces"][0]] == [5120, 5120]
    record(clear_history=True)
    assert [e["action"] for e in memory._snapshot()["device_traces"][0]] == ["snapshot"]


def test_history_leaves_out_skipped_actions(record):
    record(skip_actions=["free_requested", "snapshot"])
    torch.empty(5000, device=DEVICE)
    trace = memory._snapshot()["device_traces"][0]
    assert {e["action"] for e in trace} <= {"alloc", "free_completed", "segment_alloc"}


def test_history_turned_off_forgets_frames_and_traces(record):
    record()
    x = torch.empty(5000, device=DEVICE)
    record(None)
    y = torch.empty(5000, device=DEVICE)
    snapshot = memory._snapshot()
    assert block_of(snapshot, x)["frames"] == block_of(snapshot, y)["frames"] == []
    assert snapshot["device_traces"][0] == []


def test_history_entries_have_the_users_metadata(record):
    record()
    memory._set_memory_metadata("epoch 3")
    assert memory._get_memory_metadata() == "epoch 3"
    x = torch.empty(5000, device=DEVICE)
    memory._set_memory_metadata("")
    trace = memory._snapshot()["device_traces"][0]
    mine = [e for e in trace if e.get("addr") == x.data_ptr()]
    assert mine[-1]["user_metadata"] == "epoch 3" and trace[-1]["user_metadata"] == ""
    memory._set_memory_metadata({"epoch": 3})
    assert memory._get_memory_metadata() == '{"epoch":3}'
    memory._set_memory_metadata("")


def test_memory_viewer_reads_a_dump(record, tmp_path):
    record()
    kept = [torch.empty(size, device=DEVICE) for size in (10, 5000, MIB)]
    kept.pop(1)
    side = torch.Stream(DEVICE)
    with side:
        kept.append(torch.empty(10, device=DEVICE))
    path = tmp_path / "dump.pickle"
    memory._dump_snapshot(str(path))
    data = pickle.loads(path.read_bytes())
    for html in (
        _memory_viz.segment_plot(data),
        _memory_viz.trace_plot(data),
        _memory_viz.trace_plot(data, plot_segments=True),
    ):
        assert "add_local_files" in html
    assert "total_allocated" in _memory_viz.segsum(data)
    assert "Device 0" in _memory_viz.trace(data)
    assert "test_memory_history.py" in _memory_viz.memory(data, format_flamegraph=str)
    assert "active_allocated" in _memory_viz.segments(data, format_flamegraph=str)
    assert side.stream_id in {s["stream"] for s in data["segments"]}
    filtered = _memory_viz.filter_alloc_free_pairs(data)["device_traces"][0]
    live = {e["addr"] for e in filtered if e["action"] == "alloc"}
    assert {x.data_ptr() for x in kept} <= live


def test_history_records_threads_completely(record):
    record()

    def work():
        for _ in range(200):
            torch.empty(5000, device=DEVICE)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        memory._snapshot()
    for thread in threads:
        thread.join()
    trace = memory._snapshot()["device_traces"][0]
    assert sum(e["action"] == "alloc" and e["size"] == 20000 for e in trace) == 800
    live = set()
    for entry in trace:  # in an order that can have been
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live.add(entry["addr"])
        elif entry["action"] == "free_completed":
            live.discard(entry["addr"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enabled": "some"}, "'some'"),
        ({"context": "some"}, "'some'"),
        ({"stacks": "c"}, "'c'"),
        ({"skip_actions": ["allocs"]}, "'allocs'"),
        ({"max_entries": -1}, "-1"),
    ],
)
def test_history_names_a_bad_option(options, named):
    with pytest.raises(ValueError, match=named):
        memory._record_memory_history(**options)


@pytest.mark.parametrize("context", [None, "state", "alloc", "all"])
def test_history_context_decides_which_events_have_stacks(record, context):
    torch.openreg.empty_cache()
    record(context=context)

    def allocate():
        return torch.empty(33 * MIB, dtype=torch.uint8, device=DEVICE)

    def free():
        nonlocal x
        del x

    x = allocate()
    assert ("allocate" in names(block_of(memory._snapshot(), x))) == (context is not None)
    free()
    # Of the whole snapshot, the segment that it was alone in too.
    text = str(memory._snapshot())
    assert ("'allocate'" in text) == (context in ("alloc", "all"))
    assert ("'free'" in text) == (context == "all")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_history_has_stacks_of_torchscript(record):
    @torch.jit.script
    def on_another_thread(bytes: int):
        return torch.empty(bytes, dtype=torch.uint8, device="openreg")

    @torch.jit.script
    def scripted(bytes: int):
        future = torch.jit.fork(on_another_thread, bytes)
        here = torch.empty(bytes, dtype=torch.uint8, device="openreg")
        return here, torch.jit.wait(future)

    record("state")
    here, there = scripted(7 * MIB)
    snapshot = memory._snapshot()
    assert names(block_of(snapshot, here))[0] == "scripted"
    assert names(block_of(snapshot, there))[0] == "on_another_thread"


def test_history_has_stacks_of_cpp(record):
    record("state", stacks="all")
    x = torch.rand(311, 411, device=DEVICE)
    assert any("at::native::rand" in name for name in names(block_of(memory._snapshot(), x)))


def test_history_takes_older_arguments(record):
    # enabled, record_context, trace_alloc_max_entries, trace_alloc_record_context
    memory._record_memory_history(True, True, 2, True)
    x = torch.empty(5000, dtype=torch.uint8, device=DEVICE)
    assert names(block_of(memory._snapshot(), x))[0] == "test_history_takes_older_arguments"
    assert len(memory._snapshot()["device_traces"][0]) == 2
    memory._record_memory_history(True, record_context=False, clear_history=True)
    del x
    x = torch.empty(5000, dtype=torch.uint8, device=DEVICE)
    assert names(block_of(memory._snapshot(), x)) == []
    memory._record_memory_history(False)
    assert memory._snapshot()["device_traces"][0] == []


def test_memory_flamegraphs_are_written(run_ok, tmp_path):
    # PyTorch fetches the script that draws, unless it is there.
    script = tmp_path / ".cache" / "flamegraph.pl"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\necho "$@"; cat\n')
    script.chmod(0o755)
    out = run_ok(
        f"""
        import torch
        memory = torch.openreg.memory
        memory._record_memory_history(stacks="python")
        x = torch.empty(5000, dtype=torch.uint8, device="openreg")
        memory._save_memory_usage("{tmp_path}/memory.svg")
        memory._save_segment_usage("{tmp_path}/segments.svg", memory._snapshot())
        """,
        env={"HOME": str(tmp_path)},
    )
    assert out == ""
    for name in ("memory.svg", "segments.svg"):
        text = (tmp_path / name).read_text()
        assert text.startswith("--countname bytes") and "active_allocated" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("memory_cached", "memory_reserved"),
        ("max_memory_cached", "max_memory_reserved"),
        ("reset_max_memory_allocated", "reset_peak_memory_stats"),
        ("reset_max_memory_cached", "reset_peak_memory_stats"),
    ],
)
def test_old_names_of_memory_functions_warn(old, new):
    with pytest.warns(FutureWarning, match=rf"torch\.openreg\.{new}") as caught:
        value = getattr(torch.openreg, old)(0)
    assert caught[0].filename == __file__
    assert value == getattr(torch.openreg, new)(0)


def test_allocator_settings_are_read_by_their_old_name(run_ok):
    out = run_ok(
        """
        import torch, warnings
        with warnings.catch_warnings(record=True) as caught:
            torch.openreg.memory._set_allocator_settings("roundup_power2_divisions:4")
        print(caught[0].category.__name__, "_accelerator_setAllocatorSettings" in str(caught[0]))
        x = torch.empty(1025 << 10, dtype=torch.uint8, device="openreg")
        print(torch.openreg.memory_allocated() >> 10, torch.openreg.get_allocator_backend())
        """
    )
    assert out.splitlines() == ["FutureWarning True", "1280 native"]


def test_annotation_of_a_tensor_stands_between_its_allocation_and_its_end(record):
    x = torch.ones(1000, device=DEVICE)
    memory._annotate_tensor(x, "nothing is recorded")
    record(clear_history=True)
    y = torch.ones(1000, device=DEVICE)
    memory._annotate_tensor(y[10:], "packed")
    where, size = y.data_ptr(), y.untyped_storage().nbytes()
    del y
    trace = memory._snapshot()["device_traces"][0]
    mine = [e for e in trace if e.get("addr") == where]
    assert [e["action"] for e in mine] == ["alloc", "annotate", "free_requested", "free_completed"]
    entry = mine[1]
    assert (entry["user_metadata"], entry["size"]) == ("packed", size)
    assert entry["frames"][0]["name"] == sys._getframe().f_code.co_name
    assert entry.keys() == mine[0].keys()
    assert _memory_viz.trace({"device_traces": [trace], "segments": []})
    with pytest.raises(ValueError, match="expected a tensor on an openreg device, got one on cpu"):
        memory._annotate_tensor(torch.ones(1), "elsewhere")
    record(context="state", max_entries=1)
    for text in ("first", "last"):
        memory._annotate_tensor(x, text)
    found = [e for e in memory._snapshot()["device_traces"][0] if e["action"] == "annotate"]
    assert [(e["user_metadata"], e["frames"]) for e in found] == [("last", [])]


def test_history_of_pinned_memory_has_segments_and_actions(record):
    if torch.__version__ < "2.14":
        with pytest.raises(NotImplementedError, match=r"2\.13.* keeps no history of pinned memory"):
            record(record_pinned_host_memory=True)
        return
    record(record_pinned_host_memory=True, record_cuda=False, max_entries=100)
    x = torch.ones(1000, pin_memory=True)
    on_device, at = torch.ones(1000, device=DEVICE), x.data_ptr()
    snapshot = memory._snapshot()
    (segment,) = (s for s in snapshot["host_segments"] if s["address"] == at)
    (block,) = segment["blocks"]
    assert (block["state"], block["size"]) == ("active_allocated", 4096)
    assert block["frames"][0]["name"] == sys._getframe().f_code.co_name
    assert not any(e.get("addr") == on_device.data_ptr() for e in snapshot["device_traces"][0])
    del x
    torch.accelerator.empty_host_cache()
    trace = memory._snapshot()["host_traces"]
    assert actions(trace, at)[-4:] == ["alloc", "free_requested", "free_completed", "segment_free"]
    assert _memory_viz.trace({"device_traces": [trace], "segments": []})
    assert _memory_viz.segsum({"segments": snapshot["host_segments"]})
    for limit in (3, 2):  # a ring that shrinks
        record(record_pinned_host_memory=True, max_entries=limit)
        for _ in range(5):
            torch.ones(1000, pin_memory=True)
        assert len(memory._snapshot()["host_traces"]) == limit
    record(None)
    y = torch.ones(1000, pin_memory=True)
    assert not actions(memory._snapshot()["host_traces"], y.data_ptr())


def test_memory_features_without_support_are_refused():
    for option in ("compile_context", "global_record_annotations"):
        with pytest.raises(NotImplementedError, match="no compile_context and no global"):
            memory._record_memory_history(**{option: True})
    with pytest.raises(NotImplementedError, match="mem_get_info"):
        torch.openreg.memory_usage()


def test_memory_module_has_the_names_that_cuda_and_xpu_share():
    shared = set(torch.cuda.memory.__all__) & set(dir(torch.xpu.memory))
    assert shared <= set(dir(memory))
    assert {"_snapshot", "_dump_snapshot", "_record_memory_history"} <= set(dir(memory))
    assert set(memory.__all__) <= set(dir(torch.openreg))


def test_memory_summary_has_a_table_of_pools():
    x = torch.empty(3 * MIB, dtype=torch.uint8, device=DEVICE)
    full, short = torch.openreg.memory_summary(), torch.openreg.memory_summary(0, abbreviated=True)
    assert "Allocated memory" in full and "from large pool" in full and "device ID 0" in full
    assert "from large pool" not in short
    assert len({len(line) for line in full.splitlines()}) == 1
    del x


def test_memory_stats_agree_nested_and_flat():
    x = torch.empty(10, device=DEVICE)
    nested, flat = torch.openreg.memory_stats_as_nested_dict(), torch.openreg.memory_stats()
    figures = "allocation segment active inactive_split allocated_bytes reserved_bytes"
    figures += " active_bytes inactive_split_bytes requested_bytes"
    for figure in figures.split():
        for pool in ("all", "small_pool", "large_pool"):
            for metric in ("current", "peak", "allocated", "freed"):
                assert flat[f"{figure}.{pool}.{metric}"] == nested[figure][pool][metric]
    assert list(flat) == sorted(flat)
    private = "reserved_bytes_by_private_pools."  # which torch.accelerator leaves out
    common = {name: count for name, count in flat.items() if not name.startswith(private)}
    assert common == torch.accelerator.memory_stats(0)
    del x


def test_memory_functions_work_before_first_use(run_ok):
    run_ok(
        """
        import threading, torch
        m = torch.openreg
        assert m.memory_stats() == {} and m.memory_snapshot() == [] and m.host_memory_stats() == {}
        assert m.memory_allocated() == m.max_memory_reserved() == 0
        m.empty_cache()
        assert "not been used" in m.memory_summary()
        m.memory._record_memory_history()
        assert m.memory._snapshot()["segments"] == []
        assert m.get_per_process_memory_fraction(1) == 1.0
        assert not m.is_initialized() and threading.active_count() == 1
        """
    )


def test_caching_allocator_alloc_gives_raw_blocks():
    before = torch.openreg.memory_allocated()
    side = torch.Stream(DEVICE)
    for stream in (None, side, side.stream_id, 0):
        address = torch.openreg.caching_allocator_alloc(1000, 0, stream)
        assert torch.openreg.memory_allocated() == before + 1024
        torch.openreg.caching_allocator_delete(address)
    with pytest.raises(RuntimeError, match="freed already"):
        torch.openreg.caching_allocator_delete(address)
    with pytest.raises(ValueError, match="-3"):
        torch.openreg.caching_allocator_alloc(-3)
    with pytest.raises(RuntimeError, match="12345"):
        torch.openreg.caching_allocator_alloc(8, 0, 12345)
    assert torch.openreg.memory_allocated() == before


def test_host_memory_stats_count_and_reset():
    x = torch.ones(1000).pin_memory()
    stats = torch.openreg.host_memory_stats()
    assert stats["active_bytes.current"] >= 4000
    assert stats["num_host_alloc"] >= 1
    torch.openreg.reset_peak_host_memory_stats()
    torch.openreg.reset_accumulated_host_memory_stats()
    assert torch.openreg.host_memory_stats()["active_requests.allocated"] == 0
    del x


# ---- Limits and settings ----


def test_memory_fraction_limits_a_device(run_ok):
    run_ok(
        """
        import torch
        def take(megabytes, device=0):
            return torch.empty(megabytes << 20, dtype=torch.uint8, device=f"openreg:{device}")
        torch.openreg.set_per_process_memory_fraction(0.5)
        assert torch.openreg.get_per_process_memory_fraction() == 0.5
        assert torch.openreg.get_per_process_memory_fraction(1) == 1.0
        x = take(20)
        try:
            take(20)
            raise AssertionError("more than the fraction")
        except torch.OutOfMemoryError as error:
            assert "(32.00 MiB allowed by the memory fraction)" in str(error), error
        del x
        x, y = take(32), take(60, 1)
        torch.openreg.set_per_process_memory_fraction(1.0)
        z = take(32)
        """,
        env={"OPENREG_DEVICE_MEMORY": "64M"},
    )


def test_memory_fraction_refuses_a_bad_value():
    with pytest.raises(ValueError, match=r"1\.5.*0~1"):
        torch.openreg.set_per_process_memory_fraction(1.5)
    with pytest.raises(TypeError, match="1"):
        torch.openreg.set_per_process_memory_fraction(1)
    with pytest.raises(RuntimeError, match="99"):
        torch.openreg.set_per_process_memory_fraction(0.5, 99)


@pytest.mark.slow
def test_allocator_settings_change_splitting(run_ok):
    run_ok(
        """
        import torch
        def take(bytes):
            return torch.empty(bytes, dtype=torch.uint8, device="openreg")
        M = 1 << 20
        x = take(40 * M)
        stats = torch.openreg.memory_stats()
        assert stats["max_split_size"] == 30 * M and stats["oversize_allocations.current"] == 1
        assert stats["oversize_segments.current"] == 1
        before = torch.openreg.memory_allocated()
        y = take(M + M // 8)
        assert torch.openreg.memory_allocated() - before == M + M // 4
        settings = torch.openreg.memory._snapshot()["allocator_settings"]
        assert settings["max_split_size"] == 30 * M
        assert settings["roundup_power2_divisions"]["1"] == 4
        torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:2")
        before = torch.openreg.memory_allocated()
        z = take(M + M // 8)
        assert torch.openreg.memory_allocated() - before == M + M // 2

        # Texts at random: each is refused or in force, and the allocator goes on.
        import random
        dice = random.Random(36)
        keys = ["max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb",
                "garbage_collection_threshold", "roundup_power2_divisions", "expandable_segments"]
        values = ["0", "1", "2", "8", "21", "4294967296", "18446744073709551615", "-1", "0.5",
                  "1.5", "nan", "True", "", "[256:4,512:2,>:1]", "[1:4294967296,>:8]", "[>:2", "x"]
        taken = 0
        for i in range(400):
            text = ",".join(dice.choice(keys) + dice.choice(":::,[] ") + dice.choice(values)
                            for _ in range(dice.choice([1, 1, 1, 2, 5])))
            try:
                torch._C._accelerator_setAllocatorSettings(text)
                taken += 1
            except (ValueError, RuntimeError, IndexError):
                pass
            x = torch.zeros(1 + dice.randrange(1 << 16), device="openreg")
            assert int(x.sum()) == 0, text
        assert 20 < taken < 380, taken
        """,
        env={"PYTORCH_ALLOC_CONF": "max_split_size_mb:30,roundup_power2_divisions:4"},
    )


@pytest.mark.slow
def test_garbage_collection_threshold_returns_idle_segments(run_ok):
    run_ok(
        """
        import torch
        def take(megabytes):
            return torch.empty(megabytes << 20, dtype=torch.uint8, device="openreg")
        kept = [take(20), take(22), take(24)]
        kept.clear()
        x = take(26)
        assert torch.openreg.memory_reserved() < (20 + 22 + 24 + 26) << 20
        assert torch.openreg.memory_stats()["num_alloc_retries"] == 0
        """,
        env={
            "OPENREG_DEVICE_MEMORY": "100M",
            "PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.5",
        },
    )


def test_dump_of_another_process_is_read_without_the_device(run_ok, tmp_path):
    path = tmp_path / "dump.pickle"
    run_ok(
        f"""
        import torch
        torch.openreg.memory._record_memory_history(stacks="python")
        x = torch.empty(5000, device="openreg")
        torch.openreg.memory._dump_snapshot({str(path)!r})
        """
    )
    data = pickle.loads(path.read_bytes())
    assert data["segments"][0]["blocks"][0]["requested_size"] == 20000
    assert sys.getsizeof(data["device_traces"]) > 0
