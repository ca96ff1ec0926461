"""Tests of this project that fail on another driver, each with its reason. A test of the simulated
device is not listed here: it has the mark `simulated_device`.

An entry names tests as pytest does, from the folder `tests` on; `*` stands for anything. One with a
pattern that matches no test that fails is stale, and an error.
"""

import os

from support.declarations import Declared

NO_SHARING = Declared(
    "*",
    "has no memory that processes can share",
    error="only simulated devices share memory",
)
WAITS = Declared(
    "*",
    "an operator that the driver has no kernel for works on copies in host memory, and waits",
    error="a call waited for its stream, behind a gate",
)

COPIES = (
    WAITS,
    Declared(
        "*",
        "an operator that the driver has no kernel for waits, which a capture refuses",
        error="orErrorStreamCapture(Unsupported|Invalidated)",
    ),
    Declared(
        "memory/test_host.py::test_large_call_that_waits_runs_on_a_lane "
        "memory/test_host.py::test_call_behind_a_gate_runs_on_a_lane",
        "an operator that the driver has no kernel for runs on the calling thread",
        error=r"assert \[\]",
    ),
    Declared(
        "memory/test_memory.py::test_result_larger_than_the_device_is_out_of_memory*",
        "an operator that the driver has no kernel for makes its result in host memory first",
        error="DefaultCPUAllocator: can't allocate memory",
    ),
    Declared(
        "graphs/test_graphs.py::test_kernel_of_a_graph_warns_once",
        "a tensor whose elements share memory cannot be written from a copy",
        error="more than one element of the written-to tensor refers to a single memory location",
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
OPENCL = (
    Declared(
        "*",
        "the driver's kernel would draw the same numbers at each replay, so a capture refuses it",
        error="draws random numbers and cannot be captured",
    ),
    Declared(
        "graphs/test_graphs.py::test_profile_of_a_replay_names_its_kernels",
        "a task has the name of the driver's kernel, which may be another form of the operator",
        error="aten::mul.out",
    ),
    Declared(
        "graphs/test_graphs.py::test_replay_reports_a_kernels_error_and_can_be_repeated",
        "the error of a driver's kernel has a text, and no type of Python's",
        error="orErrorLaunchFailure: index_select on openreg:0 failed: index 9 is out of bounds",
    ),
    Declared(
        "streams/test_async.py::test_large_matmul_* streams/test_streams.py::test_large_matmul_*",
        "the driver's kernel adds up products in another order than the CPU's",
        error="Tensor-likes are not close",
    ),
    Declared(
        "streams/test_copy_order.py::test_large_copies_flush_denormals_*",
        "a device keeps denormal numbers, whatever the host's thread does",
    ),
    Declared(
        "streams/test_copy_settings.py::test_kernels_reach_peers_only_with_access",
        "a kernel of the driver's does not reach another device",
        error=r"\['1024.0', '4096'\] == \['1024.0', '0'\]",
    ),
)

NO_KERNELS = (
    Declared(
        "graphs/test_graph_mistakes.py::test_graph_mistake_is_shown*",
        "the driver has kernels for no operator, so a capture is refused before the mistake",
    ),
)

# {the library's name, without `lib` and `.so`: entries}
DECLARED = {
    "vendor": (NO_SHARING,),
    "vendor_nomap": (NO_SHARING, *COPIES, *NO_KERNELS),
    "opencl": (NO_SHARING, *COPIES, *OPENCL),
}


def declared(library):
    """The entries for the driver at this path."""
    name = os.path.basename(library).removeprefix("lib").removesuffix(".so")
    return DECLARED.get(name.removesuffix("_openreg"), ())
