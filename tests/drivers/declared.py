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

# {the library's name, without `lib` and `.so`: entries}
DECLARED = {
    "vendor": (NO_SHARING,),
    # Of the next two, the tests of streams alone were run on `opencl`.
    "vendor_nomap": (NO_SHARING, *COPIES),
    "opencl": (NO_SHARING, *COPIES, *OPENCL),
}


def declared(library):
    """The entries for the driver at this path."""
    name = os.path.basename(library).removeprefix("lib").removesuffix(".so")
    return DECLARED.get(name.removesuffix("_openreg"), ())
