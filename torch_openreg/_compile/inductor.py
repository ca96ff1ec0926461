"""This device for Inductor: CPU kernels, each a task of a stream. Imported after
torch._inductor.compile_fx."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import sympy
import torch
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._inductor import config, ir, lowering, scheduler, utils
from torch._inductor.codegen.common import (
    DeviceOpOverrides,
    register_backend_for_device,
    register_device_op_overrides,
)
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import (
    EnterCudaStreamContextLine,
    ExitDeviceContextManagerLine,
    PythonWrapperCodegen,
    SubgraphPythonWrapperCodegen,
    WrapperLine,
)
from torch._inductor.custom_graph_pass import CustomGraphModulePass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch._inductor.kernel.flex import flex_cpu
from torch._inductor.utils import GPU_TYPES, any_is_symbolic
from torch._inductor.virtualized import V

from .._patches import wrap
from ..openreg._utils import OWN_MODULE, OWN_NAME, type_name
from . import config as own_config

_FLEX = torch.ops.higher_order.flex_attention
_REGION = torch.ops.higher_order.invoke_subgraph
_CPU = torch.device("cpu")
_NAME = type_name()  # "cuda" under --as-cuda
_EMPTY = f"empty_strided_{OWN_NAME}"


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


def _writes(node):
    """Whether the node changes its outputs. The scheduler sees a wait for a stream, or from 2.15 on
    a barrier after it, as a write of what is used later, which keeps its place."""
    return not (_is_of_streams(node) or getattr(node.node, "ordering_only", False))


def _written():
    """The names of what kernels write."""
    real, nodes = V.graph.scheduler.mutation_real_name, V.graph.scheduler.nodes
    outputs = (out for node in nodes if _writes(node) for out in node.get_outputs())
    return {real.get(name, name) for out in outputs for name in out.get_mutations()}


def _drop_unread_inputs(graph):
    """Inductor's estimate of memory asserts that some kernel reads each input. An input that only a
    record or a wait comes after is there before the graph begins, and need not be waited for."""
    for node in graph.find_nodes(op="placeholder"):
        users = [*node.users]
        if all(user.target is control_deps and node not in user.args[2:] for user in users):
            for user in users:
                user.update_arg(0, tuple(other for other in user.args[0] if other is not node))


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
        chunk = own_config.min_chunk_factor * config.cpp.min_chunk_size
        with config.patch({"cpp.min_chunk_size": chunk}), V.graph.set_current_device(_CPU):
            super().codegen_node(node)

    def codegen_template(self, *args):
        with V.graph.set_current_device(_CPU):
            super().codegen_template(*args)


@dataclass
class _EnterDevice(WrapperLine):
    index: int

    def codegen(self, code):
        code.writeline(f"with {OWN_MODULE}._DeviceGuard({self.index}):")
        code.do_indent()


@contextmanager
def _current(wrapper, node):
    """For code of the program's, which may use the current device: it is the node's."""
    wrapper.writeline(_EnterDevice(node.get_device().index))
    yield
    wrapper.writeline(ExitDeviceContextManagerLine())


@dataclass
class _EnterStream(EnterCudaStreamContextLine):
    stream: str
    """What gives it in the generated code."""

    def codegen(self, code):
        code.writeline(f"with {self.stream}:")
        code.do_indent()


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
                f"from torch_openreg._C import _empty_strided as {_EMPTY}",
                "from torch_openreg._compile.kernels import load as openreg_kernel",
            ]
        )

    def generate_fallback_kernel(self, node):
        # The scheduler does this where the operator has a tensor. An operator that waits for the
        # device has none, and would be called before the kernels that stand before it.
        _flush()
        programs = _is_ours(node) and getattr(node.op_overload, "namespace", None) != "aten"
        with _current(self, node) if programs else nullcontext():
            super().generate_fallback_kernel(node)

    # Kernels are called where their stream is current. Their tensors have their device.

    def codegen_cuda_stream_enter(self, stream_idx):
        _flush()
        made = V.graph.scheduler
        index = made.stream_idx_to_user_obj_idx.get(stream_idx)
        stream = f"{OWN_MODULE}.current_stream({made.current_device.index})"
        if index is not None:
            stream = f"get_external_object_by_index({index})"
            self.add_import_once(
                "from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index"
            )
        entered = _EnterStream(stream_idx, stream)
        self.writeline(entered)
        return entered

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

    def _generate_kernel_call_helper(self, kernel_name, call_args, **options):
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
        out = f"{name} = {_EMPTY}({given})"
        return out if asked == code(shape) else f"{out}.as_strided({code(shape)}, {code(stride)})"


class SubgraphWrapper(SubgraphPythonWrapperCodegen, Wrapper):
    """The same for a graph inside a graph, which is replayed with the outer one."""

    def generate_end(self, result):
        PythonWrapperCodegen.generate_end(self, result)


class _NoCppWrapper(Wrapper):
    @staticmethod
    def create(*_):
        raise NotImplementedError(
            f"cpp_wrapper and AOTInductor are not implemented for {type_name()} devices\n"
            "  help: compile with torch.compile, or save the program with torch.export"
        )


class Overrides(DeviceOpOverrides):
    """The code that Inductor writes for calls of the device."""

    def import_get_raw_stream_as(self, name):
        return (
            "from torch_openreg._compile.dynamo import Interface\n"
            f"{name} = Interface.get_raw_stream"
        )

    def synchronize(self):
        return f"{OWN_MODULE}.synchronize()"


def _is_ours(subject):
    """Whether it is the name of this device's type, or a node or layout on the device."""
    device = subject.get_device() if hasattr(subject, "get_device") else subject
    return getattr(device, "type", device) == _NAME


def _if_ours(ours):
    """Calls `ours` where the first argument is ours, and PyTorch's function elsewhere."""

    def choose(theirs, first, *args, **options):
        return (ours if _is_ours(first) else theirs)(first, *args, **options)

    return choose


def _type_or_cpus(type_of, node):
    """What a node is lowered to depends on the backend that makes its kernel."""
    device = type_of(node)
    return "cpu" if device == _NAME else device


def _without_ours(combinable, nodes):
    """What `combo_kernels` combines into one Triton kernel. The CPU has none."""
    return [node for node in combinable(nodes) if not _is_ours(node)]


class _Pass(CustomGraphModulePass):
    """Prepares the graph, and adds to the key by which Inductor keeps generated code: the package's
    version, because another one may generate other code, and the number of threads, which Inductor
    has in the key only where a tensor is the CPU's."""

    def __call__(self, graph_module):
        _run_where_called(graph_module)
        _drop_unread_inputs(graph_module.graph)

    def uuid(self):
        sources = tuple(sorted(map(str, Path(__file__).parent.glob("*.py"))))
        return get_hash_for_files(sources), utils.parallel_num_threads()


def _written_out(value, wrapper):
    if isinstance(value, ir.IRNode):
        return value.codegen_reference()
    return wrapper.codegen_python_sizevar(value)


class _TritonKernel(ir.UserDefinedTritonKernel):
    """A program's own kernel, launched as the program would, by its number in PyTorch's table of
    kernels. The numbers are this process's, so that such graphs are not cached (`register`)."""

    def codegen(self, wrapper):
        _flush()  # the kernels that stand before it
        given = self.kwargs  # the kernel's arguments and options such as `debug`
        code = wrapper.codegen_python_shape_tuple
        in_code = {k: v for k, v in given.items() if isinstance(v, (ir.IRNode, sympy.Expr))}
        constants = {k: v for k, v in given.items() if k not in in_code}
        call = ", ".join(f"{name!r}: {_written_out(v, wrapper)}" for name, v in in_code.items())
        options = getattr(self, "launch_kwargs", ())  # since 2.15
        wrapper.add_import_once(
            "from torch._higher_order_ops.triton_kernel_wrap "
            "import triton_kernel_wrapper_mutation_dense as triton_kernel"
        )
        wrapper.add_import_once("import triton.tools.tensor_descriptor")  # for TMADescriptor
        with _current(wrapper, self):
            wrapper.writeline(
                f"triton_kernel(kernel_idx={self.kernel_idx}, "
                f"constant_args_idx={kernel_side_table.add_constant_args(constants)}, "
                f"grid=[{', '.join(map(code, self.grid))}], "
                f"tma_descriptor_metadata={{}}, kwargs={{{call}}}"
                f"{f', launch_kwargs={options!r}' if options else ''})"
            )


def _lower_triton_kernel(lower, *, kernel_idx, constant_args_idx, kwargs, **options):
    tensors = {name: given for name, given in kwargs.items() if isinstance(given, ir.TensorBox)}
    if not any(map(_is_ours, tensors.values())):
        return lower(
            kernel_idx=kernel_idx, constant_args_idx=constant_args_idx, kwargs=kwargs, **options
        )
    if torch.__version__ >= "2.15":
        options["launch_kwargs"] = options.get("launch_kwargs") or ()
    given = {**kwargs, **kernel_side_table.get_constant_args(constant_args_idx)}
    _TritonKernel(kernel_idx=kernel_idx, kernel_args=given, **options)
    return tensors


_REPLACED = {
    "scheduler.BaseSchedulerNode.is_cpu": _if_ours(lambda node: True),  # for the order of loops
    "scheduler.ForeachKernelSchedulerNode.combinable_nodes": _without_ours,
    "ir.get_device_type": _type_or_cpus,
    # A divisor is not one: kernels of the CPU divide, where others multiply by a reciprocal.
    "lowering.get_constant_value": _if_ours(lambda node: None),
    # A kernel of a CPU scalar, which may stand first, and tensors of the device is the device's.
    "lowering.is_gpu": _if_ours(lambda device: True),
}


def register():
    if _NAME in GPU_TYPES:
        GPU_TYPES.remove(_NAME)  # whose kernels are Triton's
    register_backend_for_device(
        _NAME, Scheduling, Wrapper, _NoCppWrapper, None, _Pass(), own_config
    )
    register_device_op_overrides(_NAME, Overrides())
    for name, function in _REPLACED.items():
        wrap(f"torch._inductor.{name}", function)
    if torch.__version__ < "2.15":
        from . import before_2_15

        before_2_15.install(_is_of_streams)
    for launch in triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation:
        launch._cacheable = False
    lowerings = lowering.lowerings
    mutation = triton_kernel_wrapper_mutation
    lowerings[mutation] = partial(_lower_triton_kernel, lowerings[mutation])
    lowerings[_FLEX] = partial(_if_ours(flex_cpu.lower_cpu), lowerings[_FLEX])
    aten = torch.ops.aten
    for product in aten.mm.dtype, aten.bmm.dtype, aten.addmm.dtype, aten.baddbmm.dtype:
        # The CPU's templates, which are used here, have no `out_dtype`.
        call = lowering.fallback_handler(product, add_to_fallback_set=False)
        lowerings[product] = partial(_if_ours(call), lowerings[product])


register()
