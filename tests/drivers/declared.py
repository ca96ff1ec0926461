"""Tests of this project that fail on another driver, each with its reason. A test of the simulated
device is not listed here: it has the mark `simulated_device`.

An entry names tests as pytest does, from the folder `tests` on; `*` stands for anything. One with a
pattern that matches no test that fails is stale, and an error.
"""

import os

from support.declarations import Declared

from .gates import WAITED

NO_SHARING = Declared(
    "*",
    "has no memory that processes can share",
    error="only simulated devices share memory",
)
WAITS = Declared(
    "*",
    "an operator that the driver has no kernel for works on copies in host memory, and waits",
    error=WAITED,
)
FINISHES_LATER = Declared(
    "sanitizer/test_sanitizer_host.py::test_pinned_memory_from_before_has_a_checksum "
    "schedules/test_schedules.py::test_schedule_setting_decides_for_a_process "
    "schedules/test_schedules.py::test_schedules_nest_and_end",
    "an early schedule starts a task at once, and the driver may finish it later",
    error=r"DID NOT RAISE|5.0, 0.0|0.0, 5.0|assert early\(\)",
    always=False,
)

COPIES = (
    WAITS,
    Declared(
        "*",
        "an operator that the driver has no kernel for waits, which a capture refuses",
        error="orErrorStreamCapture(Unsupported|Invalidated)",
    ),
    Declared(
        "memory/test_memory.py::test_result_larger_than_the_device_is_out_of_memory*",
        "an operator that the driver has no kernel for makes its result in host memory first",
        error="DefaultCPUAllocator: can't allocate memory",
    ),
    Declared(
        "operators/test_custom_ops.py::*",
        "a kernel in C++ that maps its memory is refused, because the memory cannot be mapped",
        error="relu2 on openreg:",
    ),
    Declared(
        "operators/test_argument_errors.py::test_refused_list_is_not_counted_as_written",
        "the writes of a list are counted before the kernel of a member refuses it",
        error=r"\[1, 0\] == \[0, 0\]|\[1, 1\] == \[0, 0\]",
    ),
    Declared(
        "device/test_kernel_errors.py::test_failure_text_may_look_like_that_of_a_report "
        "compile/test_compile.py::test_index_out_of_range_is_the_devices_error* "
        "compile/test_compile.py::test_kernel_with_a_long_name_raises_its_own_error "
        "compile/test_compile.py::test_divisions_by_zero_of_two_kernels_are_not_mixed_up*",
        "a kernel that works on copies raises its error at the call",
        error=r"the pool is spent|raised by\s",
    ),
    Declared(
        "device/test_kernel_errors.py::test_launch_blocking_gives_a_kernels_warning_at_the_call*",
        "an operator on copies waits, and its warning is issued by the call",
        error="'1 1', '1 1'",
    ),
    Declared(
        "compile/test_compile_replay.py::*",
        "no graph captures a kernel that works on copies, so a function makes its calls each time",
        error=r"assert 0 == \d|assert \(0, 0\) == |assert \[\]",
    ),
    Declared(
        "distributed/test_distributed_memory.py::*",
        "a collective works on copies, and holds its memory until they are over",
        error=r"\d\] == \[|\] == \[\(|< \(\(4 \+ 4\)",
    ),
    Declared(
        "operators/test_fallback.py::test_fallback_stats_* "
        "operators/test_sparse.py::test_sparse_kernels_wait_and_warn",
        "a call on copies is counted as copying, and one of a driver's kernel before it has run",
        error="'copying': 1|'asynchronous': 0} != |conds': 0.0}}} == {}",
    ),
    Declared(
        "kernels/test_checks.py::test_tensors_of_a_pointer_table* "
        "kernels/test_launches.py::test_addresses_in_memory_are_those_of_the_program",
        "a kernel works on copies, and a pointer that it reads from memory is none of theirs",
        error="a pointer that was read from memory is 0x.*, which no kernel of this device reaches",
    ),
    Declared(
        "kernels/test_checks.py::test_addresses_from_an_index*",
        "a launch waits for its arguments, so that the rows of an index are known",
        error=r"assert \[\] == \['possible race'\]",
    ),
    Declared(
        "kernels/test_launches.py::test_profiler_and_late_errors_name_the_kernel "
        "kernels/test_launches.py::test_compiled_functions_launch_with_the_options_of_the_call",
        "a kernel on copies runs in the launch, which raises its error",
        error="int32 overflow detected|: negative|assert False|: not positive",
    ),
    Declared(
        "streams/test_async.py::test_repeat_interleave_reports_*",
        "an operator that the driver has no kernel for reports its error at the call",
        error="allocated size does not match required size",
    ),
    Declared(
        "streams/test_sync_debug.py::test_call_that_does_not_wait_gives_no_warning*",
        "a call that works on copies waits, and says so",
        error=r"assert \['aten::.*\] == \[\]",
    ),
    Declared(
        "streams/test_order_table.py::test_call_of_the_table_orders_streams_as_listed*",
        "a call that works on copies waits, which orders more than is promised",
        error="assert False == not False",
    ),
)
ASKED = "PoCL starts threads when it is asked for devices, which a forked child does not have"
LATE = "the error of a driver's kernel has a text, and no type of Python's"
FORMULA = "attention takes the formula of its operators, with other strides and more memory"
INDICES = "indices on the device are not read, so an access by them counts as one of all rows"
OPENCL = (
    Declared(
        "operators/test_view_programs.py::test_random_view_programs_are_the_cpus*",
        "the driver's kernels round in another way",
        error="OPENREG_VIEW_PROGRAMS_SEED=",
        always=False,
    ),
    Declared("*", LATE, error=r"orErrorLaunchFailure: \w+ on \w+:\d failed: index \d+ is out of"),
    Declared(
        "distributed/test_distributed_attention.py::*causal*",
        FORMULA + ", which mixes tensors of a kind that PyTorch refuses",
        error="mixed torch.Tensor and DTensor",
    ),
    Declared(
        "operators/test_attention.py::*",
        FORMULA,
        error=r"assert got.stride\(\)|assert len\(got\)|max_memory_allocated",
    ),
    Declared(
        "operators/test_foreach.py::*",
        "PyTorch's kernel for a list calls one operator for each member, and takes numbers on the "
        "CPU, as CUDA's does",
        error=r"Expected scalars to be on CPU|<class 'RuntimeError'> ==|\[3.0, 3.0, 3.0\]",
    ),
    Declared(
        "operators/test_foreach.py::test_foreach_operator_has_the_cpus_values_or_errors[rsqrt*",
        "the driver rounds a root of half precision once, and the CPU twice",
        error="Tensor-likes are not close",
    ),
    Declared(
        "memory/test_memory_poison.py::test_poison_never_changes_memory_of_queued_work",
        "the driver's kernel adds up products in another order than the CPU's, which twenty "
        "products of random numbers in a row enlarge",
        error=r'File "<string>", line 20',
        always=False,
    ),
    Declared(
        "operators/test_device_types.py::test_pytorchs_generic_device_tests_pass",
        "the CPU rounds `alpha` times a number of half precision outside of its vectors, and the "
        "driver's kernel never",
        error="FAILED .*results_add_openreg_float16",
    ),
    Declared(
        "operators/test_modes.py::test_dispatch_mode_sees_what_the_cpu_runs",
        "PyTorch makes other operators of those that the driver has no kernel for",
        error="assert got == expected",
    ),
    Declared(
        "sanitizer/test_sanitizer_late.py::* sanitizer/test_sanitizer_reports.py::*",
        INDICES + ", and an operator on copies waits, which orders it",
        error=r"possible race|They may touch|'race'|Report\(number|not enough values to unpack",
    ),
    Declared(
        "sanitizer/test_sanitizer_modes.py::test_refused_operator_leaves_no_access_behind",
        "PyTorch's kernel for a list has called operators for the members before the refused one",
        error="writes b .add_.",
    ),
    Declared(
        "sanitizer/test_sanitizer_fresh.py::test_initcheck_reports_*",
        "a copy to the host reads a whole tensor, also what is unwritten there and not asked for",
        error=r"'aten::copy_'|assert 0 >= 1",
    ),
    Declared(
        "*",
        "the driver's kernel would draw the same numbers at each replay, so a capture refuses it",
        error="draws random numbers and cannot be captured",
    ),
    Declared(
        "streams/test_async.py::test_large_matmul_* streams/test_streams.py::test_large_matmul_*",
        "the driver's kernel adds up products in another order than the CPU's",
        error="Tensor-likes are not close",
    ),
    Declared(
        "streams/test_copy_order.py::test_large_copies_flush_denormals_* "
        "device/test_thread_state.py::test_denormal_numbers_are_flushed_* "
        "device/test_thread_state.py::test_backward_passes_that_take_turns_keep_their_own_state",
        "a device keeps denormal numbers, whatever the host's thread does",
    ),
    Declared(
        "device/test_device.py::test_choosing_a_device_initializes_it* "
        "device/test_process.py::test_import_and_queries_start_nothing",
        ASKED,
        error="'True', '2', 'openreg:1'|'2 False'",
    ),
    Declared(
        "device/test_fork.py::test_fork_before_first_use_works "
        "device/test_first_step.py::test_first_training_step_runs_ahead*",
        ASKED,
        error="orErrorForked|cannot re-initialize openreg in forked subprocess",
    ),
    Declared(
        "device/test_fork.py::test_forks_of_a_busy_process_do_not_hang*",
        "the parts of a composite operator are called on the program's thread, and a fork copies "
        "the lock of a first call there",
        error="children ended with {0, 14}",
        always=False,
    ),
    Declared(
        "device/test_host_access.py::test_host_access_report_*",
        "PoCL handles SIGSEGV, too, behind or before the report",
        error="PYTHONFAULTHANDLER=1|assert 0 == -<Signals.SIGSEGV",
        always=False,
    ),
    Declared(
        "device/test_thread_state.py::test_host_thread_that_sleeps_keeps_no_team",
        "PoCL's threads are counted",
    ),
    Declared(
        "device/test_thread_state.py::test_thread_count_of_the_*",
        "a kernel of the driver's uses none of PyTorch's threads",
        error="'False'",
    ),
    Declared(
        "device/test_profiler.py::test_profile_counts_a_first_call_once*",
        "PyTorch's kernel for a list reads its numbers, the first time more often",
        error="aten::item",
    ),
    Declared(
        "streams/test_copy_settings.py::test_kernels_reach_peers_only_with_access",
        "a kernel of the driver's does not reach another device",
        error=r"\['1024.0', '4096'\] == \['1024.0', '0'\]",
    ),
)

AT_THE_CALL = "an operator on copies raises its error at the call"
UNORDERED = (
    "a call on copies that wrote the indices orders nothing, so they are read when the task runs"
)
NO_KERNELS = (
    Declared(
        "sanitizer/test_sanitizer_late.py::test_late_race_is_raised_by_a_later_call_with_both_lines",
        "a call on copies has run when it returns, and raises a race of its rows itself",
        error="data race on openreg:0 over table",
    ),
    Declared(
        "sanitizer/test_sanitizer_fresh.py::test_initcheck_reports_*",
        UNORDERED + ", which is too late to report a read of unwritten rows",
        error="assert 0 >= 1",
    ),
    Declared(
        "sanitizer/test_sanitizer_reports.py::test_row_reads_race_only_with_writes_of_their_rows",
        UNORDERED + ", and each such read has a race of its own",
        error=r"\['race', 'race', 'race'\] == \['race'\]",
    ),
    Declared(
        "sanitizer/test_sanitizer_collectives.py::test_collective_without_a_wait_is_reported",
        WAITS.reason,
        error="rank 0 does not answer",
    ),
    Declared(
        "schedules/test_schedules.py::*",
        "an operator on copies waits, so that no schedule shows what has no order",
        error=r"assert \(False\)|assert not True|== \{1.0, 7.0\}|== \{False, True\}",
    ),
    Declared(
        "device/test_kernel_errors.py::* device/test_lost_device.py::test_lost_device_error_*",
        AT_THE_CALL,
        error="index out of range in self|index 7 is out of bounds|Target 7 is out of bounds"
        "|raised at the launch True False",
    ),
    Declared(
        "device/test_faults.py::* device/test_kernel_errors.py::test_*failure_*",
        AT_THE_CALL + ", and its copies are operations that faults count",
        error='injected fault "(kernel_error|device_lost|copy_error)"|add_.* == .2, .aten::mul_.',
    ),
    Declared(
        "device/test_faults.py::test_injected_fault_fires_once_for_threads_that_share_a_device",
        "an operator on copies has no result if its kernel is struck, and says so even if another "
        "thread has got the device's error",
        error=r"\(1, 2\) == \(1, 1\)",
        always=False,
    ),
    Declared(
        "device/test_profiler.py::*",
        "the copies of an operator are rows of a profile",
        error="Memcpy DtoH|Obtained: |7 = len|too many values to unpack",
    ),
    Declared(
        "device/test_host_access.py::test_host_access_report_names_block_dtype_operator_and_remedy",
        "an operator on copies has queued a copy last",
        error="the thread has queued last: Memcpy HtoD",
    ),
    Declared("device/test_first_step.py::*", WAITS.reason, error=WAITED),
    Declared(
        "graphs/test_graphs.py::test_threads_capture_at_once",
        "an operator that the driver has no kernel for is refused in each thread's capture",
        error=r"assert \{\} == \{1: ",
    ),
    Declared(
        "streams/test_sync_debug.py::test_sync_debug_mode_holds_in_backward_threads "
        "streams/test_sync_debug.py::test_sync_debug_mode_does_not_apply_to_tools",
        "an operator on copies waits, so that the mode refuses it before what the test is about",
        error="called a synchronizing openreg operation: aten::fill_|assert .False",
    ),
    Declared(
        "streams/test_async.py::test_large_matmul_runs_ahead_without_a_gate",
        "a call on copies never runs ahead, so the test's queue grows until memory is short",
        error="torch.OutOfMemoryError",
    ),
    Declared(
        "streams/test_copy_order.py::test_large_copies_flush_denormals_where_the_caller_does",
        "values are converted in host memory by several of PyTorch's threads, and only the "
        "caller's flushes",
        error=r"assert not tensor\(True\)",
    ),
    Declared(
        "streams/test_copy_settings.py::test_kernels_reach_peers_only_with_access",
        "no kernel reaches a peer: the copy is made by temporaries",
        error=r"\['1024.0', '4096'\] == \['1024.0', '0'\]",
    ),
    Declared(
        "operators/test_modes.py::test_anomaly_mode_leaves_a_queued_kernels_error",
        "an operator on copies reports its error at the call",
        error="IndexError: index out of range in self",
    ),
    Declared(
        "operators/test_native_functions.py::test_entry_is_still_forced_by_pytorch*",
        "an operator on copies is no task, and the test counts tasks",
        error=r"assert NEEDED\[name\]\(\)",
    ),
    Declared(
        "graphs/test_graph_mistakes.py::test_graph_mistake_is_shown*",
        "the driver has kernels for no operator, so a capture is refused before the mistake",
    ),
)

# {the library's name, without `lib` and `.so`: entries}
DECLARED = {
    "vendor": (NO_SHARING, FINISHES_LATER),
    "vendor_nomap": (NO_SHARING, FINISHES_LATER, *COPIES, *NO_KERNELS),
    "opencl": (NO_SHARING, FINISHES_LATER, *COPIES, *OPENCL),
}


def declared(library):
    """The entries for the driver at this path."""
    name = os.path.basename(library).removeprefix("lib").removesuffix(".so")
    return DECLARED.get(name.removesuffix("_openreg"), ())
