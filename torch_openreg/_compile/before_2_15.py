"""What PyTorch 2.13 and 2.14 need more for compilation. With them, this file can be deleted, and
what imports it."""

from functools import partial

from torch._inductor.virtualized import V

from .._patches import wrap


def _in_order(is_of_streams, compute, graph):
    """Work that stands before a record of an event or a wait in the program is queued before it,
    and later work after it. The scheduler orders only some of that, and fuses kernels across."""
    depends, before, last = V.graph.additional_buffer_deps, set(), set()
    for node in graph.nodes:
        depends[node.get_name()].update(last)
        if is_of_streams(node):
            depends[node.get_name()].update(before)
            before, last = set(), node.get_buffer_names()
        else:
            before |= node.get_buffer_names()
    compute(graph)


def _read_by_kernels(inputs_of, nodes, graph_inputs):
    """No kernel frees inputs that only a record or a wait comes after; Inductor's estimate of
    memory asserts that one does."""
    found = inputs_of(nodes, graph_inputs)
    return {name: given for name, given in found.items() if given.mpi_buffer.succ_nodes}


def install(is_of_streams):
    ordered = partial(_in_order, is_of_streams)
    wrap("torch._inductor.scheduler.Scheduler.compute_dependencies", ordered)
    wrap("torch._inductor.memory.get_freeable_input_buf", _read_by_kernels)
