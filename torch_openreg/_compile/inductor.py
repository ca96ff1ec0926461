"""This device for Inductor: CPU kernels, each a task of a stream. Imported after
torch._inductor.compile_fx."""

from functools import partial
from pathlib import Path
from uuid import uuid4

import torch
from torch._inductor import config, ir, lowering, scheduler, utils
from torch._inductor.autotune_process import CPUDeviceBenchmarkMixin
from torch._inductor.codegen.common import (
    DeviceOpOverrides,
    register_backend_for_device,
    register_device_op_overrides,
)
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.custom_graph_pass import CustomGraphModulePass, get_hash_for_files
from torch._inductor.kernel.flex import flex_cpu
from torch._inductor.utils import GPU_TYPES, any_is_symbolic
from torch._inductor.virtualized import V

from .._patches import wrap
from ..openreg._utils import type_name

_FLEX = torch.ops.higher_order.flex_attention
_REGION = torch.ops.higher_order.invoke_subgraph
_CPU = torch.device("cpu")
_NAME = type_name()  # "cuda" under --as-cuda
_SHARE = 4  # of a kernel's work, for each thread, relative to the CPU's


def _queues(node):
    """Whether the node does more than allocate memory or make another view of some."""
    if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
        return False
    called = getattr(node.node, "op_overload", None)
    return not (isinstance(called, torch._ops.OpOverload) and called.is_view)


# Dynamo's operators, and what each argument is the index of: a stream, or an event that is waited
# for or recorded. Operators that are not listed make the host wait.
_STREAM_OPERATORS = {
    "streams::record_event": ("recorded", "streams"),
    "streams::wait_event": ("waited", "streams"),
    "streams::wait_stream": ("streams", "streams"),
    "streams::sync_dealloc": ("waited", "streams"),
    "streams::record_stream": (None, "streams"),
}


def _order():
    """The indices of the streams and events that the graph uses, and whether its call waits."""
    used, waits = {"streams": set(), "waited": set(), "recorded": set()}, False
    graphs = (m.graph for m in V.graph.module.modules() if isinstance(m, torch.fx.GraphModule))
    for node in (node for graph in graphs for node in graph.nodes):
        stream = node.meta.get("custom", {}).get("stream")
        if stream is not None:
            used["streams"].add(stream)
        if getattr(node.target, "namespace", None) != "streams":
            continue
        kinds = _STREAM_OPERATORS.get(node.target.name(), ())
        waits = waits or not kinds
        for kind, index in zip(kinds, node.args, strict=False):
            if kind:
                used[kind].add(index)
    return used, waits


def _is_of_streams(node):
    called = getattr(node.node, "op_overload", None)
    return getattr(called, "namespace", None) == "streams"


def _written():
    """The names of what kernels write. The scheduler sees a wait for a stream as a write of what is
    used after it, which keeps its place."""
    real, nodes = V.graph.scheduler.mutation_real_name, V.graph.scheduler.nodes
    outputs = (out for node in nodes if not _is_of_streams(node) for out in node.get_outputs())
    return {real.get(name, name) for out in outputs for name in out.get_mutations()}


def _in_order(compute):
    """Work that stands before a record of an event or a wait in the program is queued before it,
    and later work after it. The scheduler orders only some of that, and fuses kernels across."""

    def compute_in_order(self):
        depends, before, last = V.graph.additional_buffer_deps, set(), set()
        for node in self.nodes:
            depends[node.get_name()].update(last)
            if _is_of_streams(node):
                depends[node.get_name()].update(before)
                before, last = set(), node.get_buffer_names()
            else:
                before |= node.get_buffer_names()
        compute(self)

    return compute_in_order


def _read_by_kernels(inputs_of):
    """No kernel frees inputs that only a record or a wait depends on; Inductor's estimate of memory
    asserts that one does."""

    def inputs_read_by_kernels(nodes, graph_inputs):
        found = inputs_of(nodes, graph_inputs)
        return {name: given for name, given in found.items() if given.mpi_buffer.succ_nodes}

    return inputs_read_by_kernels


def _run_where_called(graph_module):
    """A region runs on the stream of each of its calls. Its nodes name the stream of the first."""
    calls, regions = graph_module.graph.find_nodes(op="call_function", target=_REGION), {}
    for call in calls:
        regions.setdefault(call.args[0].target, call.meta.get("custom", {}).get("stream"))
    for name, stream in regions.items():
        region = getattr(graph_module, name)
        _run_where_called(region)
        for node in region.graph.nodes:
            custom = node.meta.get("custom", {})
            if custom.get("stream") == stream is not None:
                node.meta["custom"] = {k: v for k, v in custom.items() if k != "stream"}


def _flush():
    """Writes the calls of the kernels so far, which are held back to be compiled as one."""
    for backend in V.graph.scheduler.backends.values():
        backend.flush()


class Scheduling(CppScheduling):
    """Inductor's scheduling for the CPU."""

    def codegen_node(self, node):
        # The host runs on beside the kernel. Where both need its cores, an additional thread must
        # pay for itself.
        chunk = _SHARE * config.cpp.min_chunk_size
        with config.patch({"cpp.min_chunk_size": chunk}), V.graph.set_current_device(_CPU):
            super().codegen_node(node)

    def codegen_template(self, *args):
        with V.graph.set_current_device(_CPU):
            super().codegen_template(*args)


class Wrapper(PythonWrapperCodegen):
    """The module that Inductor generates for a graph."""

    @staticmethod
    def create(is_subgraph, subgraph_name, parent_wrapper, partition_signatures=None):
        if is_subgraph:
            return SubgraphWrapper(subgraph_name, parent_wrapper, partition_signatures)
        return Wrapper()

    def write_header(self):
        super().write_header()
        self.header.writelines(
            [
                "from torch_openreg._C import _empty_strided as empty_strided_openreg",
                "from torch_openreg._compile.kernels import load as openreg_kernel",
            ]
        )

    def generate_fallback_kernel(self, node):
        # The scheduler does this where the operator has a tensor. An operator that waits for the
        # device has none, and would be called before the kernels that stand before it.
        _flush()
        super().generate_fallback_kernel(node)

    # Kernels are called where their stream and their device are current.

    def codegen_device_guard_exit(self):
        _flush()
        super().codegen_device_guard_exit()

    def codegen_cuda_stream_enter(self, stream_idx):
        _flush()
        return super().codegen_cuda_stream_enter(stream_idx)

    def codegen_cuda_stream_exit(self):
        _flush()
        super().codegen_cuda_stream_exit()

    def generate_end(self, result):
        """A backward pass on several streams is joined; mode="reduce-overhead" replays a graph."""
        super().generate_end(result)
        order, waits = _order()
        if V.graph.is_backward and order["streams"]:
            result.writeline("from torch_openreg._compile.backward import Joined")
            result.writeline(f"call = Joined(call, set({[*order['streams']]}))")
        if waits or not config.triton.cudagraphs or len(V.graph.device_idxs) != 1:
            return
        if "cpu" in V.graph.device_types:
            return  # what the CPU computes would be computed once, in the capture
        if not any(map(_queues, V.graph.scheduler.nodes)):
            return
        (device,), dynamic = V.graph.device_idxs, any_is_symbolic(*V.graph.example_inputs)
        names, inputs = V.graph.graph_input_names, V.graph.graph_inputs_original
        written = _written() & V.graph.mutated_inputs
        mutated = {i for i, name in enumerate(names) if name in written}
        donated = {i for i, n in enumerate(names) if isinstance(inputs.get(n), ir.DonatedBuffer)}
        result.writeline("from torch_openreg._compile.replay import Order, Replayed")
        uses = ", ".join(f"{kind}=set({[*indices]})" for kind, indices in order.items())
        given = f"{device}, set({[*mutated]}), set({[*donated]}), {dynamic}, Order({uses})"
        result.writeline(f"call = Replayed(call, {given})")

    def define_kernel(self, kernel_name, kernel_body, *args, **options):
        made = f"openreg_kernel({kernel_name!r}, {utils.parallel_num_threads()}, "
        body = kernel_body.replace("async_compile.cpp_pybinding(", made, 1)
        super().define_kernel(kernel_name, body, *args, **options)

    def _generate_kernel_call_helper(self, kernel_name, call_args, *, triton=True, **options):
        if triton:
            raise NotImplementedError(f"Triton kernels cannot run on {type_name()} devices")
        self.writeline(self.wrap_kernel_call(kernel_name, call_args))

    def make_allocation(
        self, name, device, dtype, shape, stride, allocation_shape=None, is_pinned=False
    ):
        if device.type != _NAME:
            return super().make_allocation(
                name, device, dtype, shape, stride, allocation_shape, is_pinned
            )
        code = self.codegen_python_shape_tuple
        asked = code(shape if allocation_shape is None else allocation_shape)
        given = f"{asked}, {code(stride)}, {dtype}, {device.index}"
        out = f"{name} = empty_strided_openreg({given})"
        return out if asked == code(shape) else f"{out}.as_strided({code(shape)}, {code(stride)})"


class SubgraphWrapper(SubgraphPythonWrapperCodegen, Wrapper):
    """The same for a graph inside a graph, which is replayed with the outer one."""

    def generate_end(self, result):
        PythonWrapperCodegen.generate_end(self, result)


class _NoCppWrapper(Wrapper):
    @staticmethod
    def create(*_):
        raise NotImplementedError(
            f"cpp_wrapper and AOTInductor are not implemented for {type_name()} devices: compile "
            "with torch.compile, or save the program with torch.export"
        )


class Overrides(DeviceOpOverrides):
    """The code that Inductor writes for calls of the device."""

    def import_get_raw_stream_as(self, name):
        return (
            "from torch_openreg._compile.dynamo import Interface\n"
            f"{name} = Interface.get_raw_stream"
        )

    def set_device(self, device_idx):
        return "pass"  # it is written after the guard below, which has done so

    def synchronize(self):
        return "torch.openreg.synchronize()"

    def device_guard(self, device_idx):
        return f"torch.openreg._DeviceGuard({device_idx})"

    def current_stream(self):
        return "torch.openreg.current_stream()"


def _is_cpu(is_cpu):
    """Orders the loops of CPU kernels as on the CPU."""

    def check(self):
        device = self.get_device()
        return is_cpu(self) or (device is not None and device.type == _NAME)

    return check


def _type_or_cpus(type_of):
    """What a node is lowered to depends on the backend that makes its kernel."""

    def check(node):
        device = type_of(node)
        return "cpu" if device == _NAME else device

    return check


def _divisor(constant_of):
    """Not a constant: kernels of the CPU divide, where others multiply by a reciprocal."""

    def check(node):
        device = node.get_device() if isinstance(node, ir.IRNode) else None
        return None if device is not None and device.type == _NAME else constant_of(node)

    return check


def _or_ours(check):
    """Extends a check of a device's type that stands for GPUs to this device."""
    return lambda device: device == _NAME or check(device)


def _lower_flex_attention(lower):
    """Uses the CPU's template."""

    def lower_or_cpus(query, *args, **options):
        ours = query.get_device().type == _NAME
        return (flex_cpu.lower_cpu if ours else lower)(query, *args, **options)

    return lower_or_cpus


def _called(operator, lower):
    """Calls products with an `out_dtype` as they are: the CPU's templates, which are used here,
    have none."""
    call = lowering.fallback_handler(operator, add_to_fallback_set=False)

    def lower_or_call(tensor, *args, **options):
        ours = tensor.get_device().type == _NAME
        return (call if ours else lower)(tensor, *args, **options)

    return lower_or_call


def _takes_templates():
    return config.max_autotune or config.max_autotune_gemm


def _choose_template(choose):
    """Uses those of the CPU."""

    def choose_as_cpus(layout):
        return _takes_templates() if layout.device.type == _NAME else choose(layout)

    return choose_as_cpus


def _chosen_at_once(select):
    """Times them as the CPU's, without what could be fused, which Triton would compile."""

    def select_as_cpus(self, name, choices, input_nodes, layout, *args, **options):
        if layout.device.type == _NAME:
            options["return_multi_template"] = False
            for choice in choices:
                choice.bmreq.do_bench = partial(CPUDeviceBenchmarkMixin.do_bench, choice.bmreq)
        return select(self, name, choices, input_nodes, layout, *args, **options)

    return select_as_cpus


def _tried_on_cpu(make):
    """The inputs for trying choices: their kernels are the CPU's and use its memory."""

    def make_on_cpu(size, stride, device, *args):
        return make(size, stride, _CPU if device.type == _NAME else device, *args)

    return make_on_cpu


def _without_ours(groups_of):
    """What `combo_kernels` combines into one Triton kernel. The CPU has none."""

    def groups_without_ours(scheduler):
        return [nodes for nodes in groups_of(scheduler) if nodes[0].get_device().type != _NAME]

    return groups_without_ours


class _Pass(CustomGraphModulePass):
    """Adds to the key by which Inductor keeps generated code. The package's version, because
    another one may generate other code. The number of threads, which Inductor has in the key only
    where a tensor is the CPU's. Templates for frozen weights pack these: the packed weights would
    be kept with the code, for any weights of those sizes."""

    def __call__(self, graph_module):
        _run_where_called(graph_module)

    def uuid(self):
        if config.freezing and _takes_templates():
            return uuid4().hex  # by which nothing is found again
        sources = tuple(sorted(map(str, Path(__file__).parent.glob("*.py"))))
        return get_hash_for_files(sources), utils.parallel_num_threads()


_REPLACED = {
    "scheduler.BaseSchedulerNode.is_cpu": _is_cpu,
    "scheduler.Scheduler.compute_dependencies": _in_order,
    "scheduler.ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels": _without_ours,
    "scheduler.device_need_guard": _or_ours,
    "memory.get_freeable_input_buf": _read_by_kernels,
    "ir.get_device_type": _type_or_cpus,
    "lowering.get_constant_value": _divisor,
    "lowering.is_gpu": _or_ours,
    "utils._use_template_for_cpu": _choose_template,
    "select_algorithm.AlgorithmSelectorCache.__call__": _chosen_at_once,
    "select_algorithm.AlgorithmSelectorCache.generate_example_value": _tried_on_cpu,
}


def register():
    if _NAME in GPU_TYPES:
        GPU_TYPES.remove(_NAME)  # whose kernels are Triton's
    register_backend_for_device(_NAME, Scheduling, Wrapper, _NoCppWrapper, None, _Pass())
    register_device_op_overrides(_NAME, Overrides())
    for name, make in _REPLACED.items():
        wrap(f"torch._inductor.{name}", make)
    lowerings = lowering.lowerings
    lowerings[_FLEX] = _lower_flex_attention(lowerings[_FLEX])
    aten = torch.ops.aten
    for product in aten.mm.dtype, aten.bmm.dtype, aten.addmm.dtype, aten.baddbmm.dtype:
        lowerings[product] = _called(product, lowerings[product])


register()
