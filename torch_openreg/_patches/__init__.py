"""What this package replaces in PyTorch: the list, and the two functions that replace it.

PyTorch has registration functions for most of what a device needs. Where it has none, `replace` or
`wrap` replace an attribute of its modules or classes; they refuse one that PATCHES does not list.
tests/packaging/test_patches.py compares PyTorch's attributes with those of a process without this
package, in both directions, and docs/patches.md is written from the list.
"""

import functools
import sys
from fnmatch import fnmatchcase
from typing import NamedTuple


class Patch(NamedTuple):
    names: str
    """Attributes of PyTorch, or tables that get entries, separated by spaces. `*`: any."""
    effect: str
    test: str
    """In tests/: it fails when PyTorch changes what is replaced."""
    until: str = "never"
    """What in PyTorch makes it needless."""
    hidden: bool = False
    """Replaced in C++, or not for long: no attribute shows it."""


ASKS_THE_TYPE = "PyTorch asks what the device can do instead of its type"
COMPILED = "test_compile.py::test_pytorchs_callers_use_the_names_that_are_replaced"
FAKES = "test_fakes.py::test_operator_results_are_as_fake_tensors_promise"

PATCHES = {
    "When the package is imported": (
        Patch(
            "torch._C._accelerator_synchronizeDevice torch._C._accelerator_getStream",
            "refuse an index out of range, also before first use",
            "test_errors.py::test_index_out_of_range_is_refused_before_first_use",
            "PyTorch checks the index",
        ),
        Patch(
            "torch._C._accelerator_setDeviceIndex torch._C._accelerator_exchangeDevice",
            "choosing a device under CUDA's name initializes it; an index out of range is refused",
            "test_device.py::test_choosing_a_device_initializes_it",
            "torch.accelerator initializes the device that a program chooses",
        ),
        Patch(
            "torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS",
            "higher-order operators such as torch.cond work under autocast",
            "test_compile.py::test_higher_order_operators_work_under_autocast",
            "the list contains AutocastPrivateUse1",
            hidden=True,
        ),
        Patch(
            "torch._C._broadcast torch._C._broadcast_out torch._C._broadcast_coalesced "
            "torch._C._scatter torch._C._scatter_out torch._C._gather torch._C._gather_out",
            "DataParallel and torch.nn.parallel.comm move tensors of this device; only a build for "
            "CUDA has these functions, for CUDA's tensors",
            "test_data_parallel.py::test_data_parallel_trains_as_one_device",
            "they work for any accelerator",
        ),
        Patch(
            "torch.nn.parallel.parallel_apply torch.nn.parallel.parallel_apply.parallel_apply "
            "torch.nn.parallel.data_parallel.parallel_apply",
            "DataParallel takes a torch.device of this device, and its threads get its autocast",
            "test_data_parallel.py::test_data_parallel_replicas_inherit_autocast_and_no_grad",
            "parallel_apply asks torch.accelerator instead of torch.cuda",
        ),
        Patch(
            "torch.cuda.nccl.is_available",
            "reduce_add does not ask NCCL about this device's tensors, which warns",
            "test_data_parallel.py::test_reduce_add_sums_on_the_destination",
            "reduce_add asks NCCL about CUDA's tensors alone",
        ),
        Patch(
            "torch._C._set_default_tensor_type",
            "torch.set_default_tensor_type takes the classes of torch.openreg",
            "test_typed.py::test_default_tensor_type_sets_device_and_dtype",
            "a device can register classes of one dtype",
        ),
        Patch(
            "torch._tensor_classes torch._storage_classes",
            "the classes of torch.openreg count as classes of tensors and storages",
            "test_typed.py::test_typed_classes_are_those_that_cuda_has",
            "a device can register classes of one dtype",
        ),
        Patch(
            "torch.Tensor.__dlpack_device__ torch.Tensor.__dlpack__",
            "DLPack has the device's type, follows the consumer's stream, and refuses what it "
            "would export wrongly",
            "test_dlpack.py::test_dlpack_device_names_type_and_index",
            "both know a renamed PrivateUse1 device and its streams",
        ),
        Patch(
            "torch.UntypedStorage._share_cuda_ torch.UntypedStorage._new_shared_cuda "
            "torch.UntypedStorage._release_ipc_counter_cuda torch.UntypedStorage.is_shared "
            "torch.multiprocessing.reductions.reduce_tensor "
            "torch.multiprocessing.reductions.reduce_storage",
            "tensors of this device are shared between processes as CUDA's are",
            "test_sharing.py::test_queue_shares_memory_with_a_process",
            "torch.multiprocessing asks the device how its storages are shared",
        ),
        Patch(
            "torch.Stream.__enter__ torch.Stream.__exit__",
            "a context makes the stream's device current, changes nothing for a bad stream, and "
            "may be shared by threads",
            "test_streams.py::test_stream_contexts_restore_the_stream",
            "torch.Stream's own context does the three",
        ),
        Patch(
            "torch.Event.from_ipc_handle",
            "opens an event that another process has shared",
            "test_sharing.py::test_event_orders_work_of_two_processes",
            "torch.Event supports handles",
        ),
        Patch(
            "torch.library.Library.impl",
            "a Python kernel for a CPU key leaves the device with the kernel that it replaces",
            "test_custom_ops.py::test_python_cpu_kernel_is_for_the_cpus_tensors_alone",
            "Library reports a registration, and what it replaces, to a hook",
        ),
        Patch(
            "torch.distributed.distributed_c10d.BackendConfig.__init__",
            "a group without a backend, or with this one or Gloo, serves tensors of the CPU and of "
            "the device; one of PyTorch's fake backend serves the device too",
            "test_distributed_groups.py::test_group_name_decides_which_devices_it_takes",
            "a backend can name the devices that it serves together with another one",
        ),
        Patch(
            "torch.distributed.distributed_c10d._get_pg_default_device "
            "torch.distributed.distributed_c10d._get_object_coll_device",
            "the default device of a group named openreg is this device, as CUDA is NCCL's",
            "test_distributed_groups.py::test_group_named_openreg_sends_objects_by_the_device",
            "PyTorch asks the backend for it",
        ),
        Patch(
            "torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS",
            "PyTorch 2.15's flight recorder has each collective once, by Gloo, which carries it; a "
            "caller need not wait for the recorder's file to learn of a failure",
            "test_distributed_hooks.py::test_flight_recorder_is_attached_by_the_program_alone",
            "a backend can say that it records itself",
            hidden=True,
        ),
        Patch(
            "torch.distributed.rpc.options._to_device_map "
            "torch.distributed.rpc.options._to_device_list",
            "refuse a device map, which would end the process in a thread of TensorPipe's agent",
            "test_distributed.py::test_device_map_of_rpc_is_refused_before_the_agent_starts",
            "RPC refuses devices that it cannot carry",
        ),
    ),
    "While `torch.openreg.testing.run_ranks` runs": (
        Patch(
            "torch.distributed.rpc.init_rpc",
            "refuses a thread that is a rank, because a process has one agent",
            "test_threaded_ranks.py::test_what_needs_a_process_is_refused_by_name",
            "RPC refuses threads of one group",
            hidden=True,
        ),
        Patch(
            "torch.distributed.distributed_c10d._world",
            "each rank's thread has its own groups, by the function of PyTorch's own tests",
            "test_threaded_ranks.py::test_each_rank_has_a_thread_a_device_and_a_result",
            "groups belong to a thread where a program chooses so",
            hidden=True,
        ),
    ),
    "When a device is first used": (
        Patch(
            "torch.UntypedStorage.byteswap",
            "refuses device memory, which the host must not touch",
            "test_tensor.py::test_byteswap_of_device_memory_is_refused",
            "PyTorch refuses it for what is not on the CPU",
        ),
        Patch(
            "torch.empty_quantized",
            "the new tensor is on the other tensor's device",
            "test_quantized.py::test_empty_quantized_is_like_its_prototype",
            "its binding passes on that no device was named",
        ),
        Patch(
            "torch.optim.Optimizer._accelerator_graph_capture_health_check",
            "an optimizer that is not capturable refuses to be captured, as on CUDA",
            "test_graphs.py::test_optimizer_that_is_not_capturable_is_refused_in_a_capture",
            "PyTorch 2.15 checks it",
        ),
    ),
    "When Dynamo is imported": (
        Patch(
            "torch._dynamo.variables.user_defined.UserDefinedClassVariable._in_graph_classes",
            "streams and events of the device are part of a graph",
            COMPILED,
            "a DeviceInterface's Stream and Event are",
            hidden=True,
        ),
        Patch(
            "torch._dynamo.graph_bytecode_inputs.store_user_object_weakrefs",
            "in PyTorch 2.15 a backward pass uses the streams and events of its own graph",
            "test_compile.py::test_training_on_a_side_stream_compiles_by_cudas_name",
            "the list of a graph's objects stays the one that other modules have imported",
            hidden=True,
        ),
        Patch(
            "torch._dynamo.trace_rules.BUILTIN_INLINE_WHEN_CALLED",
            "functions of this package are traced where compiled code calls them",
            COMPILED,
            "a package can register its folder",
            hidden=True,
        ),
        Patch(
            "torch._meta_registrations.device_hint",
            "meta functions promise the layouts of the CPU's kernels",
            FAKES,
            "a device can say whose layouts its kernels give",
        ),
        Patch(
            "torch._subclasses.fake_impls.op_implementations_dict "
            "torch._decomp.decomposition_table",
            "fake tensors have the layouts of the CPU's kernels, for operators that ask for the "
            "device or leave the memory format out",
            FAKES,
            "a device can say whose layouts its kernels give",
        ),
        Patch(
            "torch._prims.rng_prims.run_and_save_rng_state "
            "torch._prims.rng_prims.run_with_rng_state "
            "torch._higher_order_ops.utils.registered_hop_fake_fns",
            "with fallback_random a checkpoint draws again what it drew, also under make_fx",
            "test_compile.py::test_compiled_checkpoint_draws_eagers_random_numbers",
            "they ask the device's module for its generator",
        ),
    ),
    "When Inductor is imported": (
        Patch(
            "torch._inductor.scheduler.BaseSchedulerNode.is_cpu",
            "the loops of kernels are ordered as those of the CPU",
            COMPILED,
            ASKS_THE_TYPE,
        ),
        Patch(
            "torch._inductor.ir.get_device_type torch._inductor.lowering.get_constant_value",
            "argmax of a transposed tensor counts as eager does, and a division stays a division",
            "test_compile.py::test_argmax_counts_in_the_logical_order_of_the_tensor",
            ASKS_THE_TYPE,
        ),
        Patch(
            "torch._inductor.lowering.is_gpu",
            "a kernel of a CPU scalar, which may stand first, and tensors of the device is the "
            "device's",
            "test_compile.py::test_scalar_of_the_cpu_may_stand_first",
            ASKS_THE_TYPE,
        ),
        Patch(
            "torch._inductor.scheduler.Scheduler.compute_dependencies",
            "no kernel is moved or fused across a record of an event or a wait",
            "test_compile.py::test_streams_and_events_compile_in_one_graph",
            "PyTorch 2.15 orders all that stands around one",
        ),
        Patch(
            "torch._inductor.memory.get_freeable_input_buf",
            "leaves out inputs that only a record or a wait depends on, for which the estimate of "
            "memory fails an assertion",
            COMPILED,
            "PyTorch 2.15 lets a pass over the graph remove such dependencies",
        ),
        Patch(
            "torch._inductor.scheduler.ForeachKernelSchedulerNode.combinable_nodes",
            "combo_kernels makes no kernel of Triton's",
            "test_compile.py::test_combo_kernels_are_left_to_triton",
            ASKS_THE_TYPE,
        ),
        Patch(
            "torch._inductor.lowering.lowerings",
            "flex attention takes the CPU's template; mm, bmm, addmm and baddbmm with out_dtype "
            "are called as they are; a program's own Triton kernel is launched as the program "
            "would",
            "test_compile.py::test_flex_attention_is_scaled_dot_product_attention",
            ASKS_THE_TYPE,
        ),
        Patch(
            "torch._inductor.utils.GPU_TYPES",
            "leaves out the device, because kernels for these types are Triton's",
            COMPILED,
            ASKS_THE_TYPE,
            hidden=True,
        ),
        Patch(
            "torch.utils._runtime_estimation.get_device_tflops",
            "a compiled backward pass with a side stream estimates without Triton when to give "
            "memory back",
            "test_compile.py::test_training_on_a_side_stream_compiles",
            "the estimate asks the device's module",
        ),
        Patch(
            "torch.utils._runtime_estimation.get_gpu_dram_gbps",
            "the same",
            "test_compile.py::test_training_on_a_side_stream_compiles",
            "PyTorch 2.15 names it get_device_dram_gbps",
        ),
        Patch(
            "torch.utils._runtime_estimation.get_device_dram_gbps",
            "the same since PyTorch 2.15",
            "test_compile.py::test_training_on_a_side_stream_compiles",
            "the estimate asks the device's module",
            hidden=True,
        ),
        Patch(
            "torch._functorch._aot_autograd.streams.populate_stream_timeline",
            "a compiled backward pass gives memory back after a node with a tensor, not after a "
            "record of an event or a wait, which have no device",
            "test_compile.py::test_training_on_a_side_stream_compiles",
            "it finds the device where a record or a wait is the last on its stream",
        ),
        Patch(
            "torch.nn.attention.flex_attention._validate_device "
            "torch.nn.attention.flex_attention._apply_kernel_options",
            "flex attention is checked as on CUDA, and as on the CPU where it is compiled",
            "test_compile.py::test_flex_attention_works_without_a_compiler",
            ASKS_THE_TYPE,
        ),
    ),
    "By `torch_openreg.as_cuda()`": (
        Patch(
            "torch.cuda.* torch._C._cuda_* torch.backends.cuda.* torch.backends.cudnn.* "
            "torch.utils._triton.has_triton",
            "each name is torch.openreg's, or raises: [cuda.md](cuda.md); what other modules have "
            "imported from torch.cuda is replaced there, too",
            "test_as_cuda.py::test_as_cuda_leaves_no_name_that_asks_for_a_gpu",
        ),
        Patch(
            "torch.utils._triton.has_triton_tensor_descriptor_host_tma",
            "a compiled function launches Triton kernels with tensor descriptors, whatever the "
            "capability",
            "test_launches.py::test_compiled_functions_launch_kernels",
        ),
        Patch(
            "torch._C._get_linalg_preferred_backend torch._C._set_linalg_preferred_backend "
            "torch._C._get_blas_preferred_backend torch._C._set_blas_preferred_backend",
            "keep the preferred library, although there is none of them",
            "test_as_cuda_areas.py::test_linear_algebra_library_choices_are_accepted",
        ),
        Patch(
            "torch.Tensor.cuda torch.Tensor.is_cuda torch.Tensor.openreg torch.Tensor.is_openreg "
            "torch.Tensor.type torch.Tensor.__cuda_array_interface__",
            "are about this device; PyTorch's own are about CUDA's kind of device alone",
            "test_as_cuda.py::test_tensor_types_have_cudas_names",
        ),
        Patch(
            "torch.profiler.ProfilerActivity.CUDA torch.autograd.DeviceType.CUDA "
            "torch.autograd.profiler.profile.__init__ torch.autograd.profiler.emit_nvtx.__enter__ "
            "torch.autograd.profiler.emit_nvtx.__exit__",
            "a profile of CUDA's activity is one of the device's",
            "test_as_cuda_areas.py::test_profiler_shows_cuda_activities",
        ),
        Patch(
            "torch.amp.autocast_mode.autocast.__init__ torch.amp.autocast_mode._cast",
            "take the device's own name, too",
            "test_as_cuda_areas.py::test_autocast_works_by_the_devices_own_name",
        ),
        Patch(
            "torch.library.Library.impl torch.library.Library._destroy "
            "torch._C._ExcludeDispatchKeyGuard",
            "a Python kernel for CUDA's key is the device's",
            "test_as_cuda_areas.py::test_kernel_for_cudas_key_is_the_devices",
        ),
        Patch(
            "torch.distributed.is_nccl_available torch.distributed.*ProcessGroupNCCL* "
            "torch.distributed.distributed_c10d.BackendConfig.__init__",
            'a group named "nccl" is the device\'s',
            "test_as_cuda_distributed.py::test_nccl_group_communicates_and_trains",
        ),
        Patch(
            "torch.utils.cpp_extension.load torch.utils.cpp_extension.load_inline "
            "torch.utils.cpp_extension.CUDAExtension",
            "refuse CUDA sources, for which there is no compiler",
            "test_as_cuda.py::test_refused_functions_of_cuda_name_themselves_and_a_remedy",
        ),
        Patch(
            "torch.compiler.cudagraph_mark_step_begin",
            "does nothing, because a compiled function copies what it replays",
            "test_as_cuda_areas.py::test_nvtx_and_cudagraph_hints_do_nothing",
        ),
        Patch(
            "torch.version.cuda torch.distributed.distributed_c10d.default_pg_nccl_timeout "
            "torch._inductor.config.online_softmax "
            "torch.testing._internal.common_device_type.device_type_test_bases",
            "have values of a build for CUDA, Inductor's softmax is the CPU's, and PyTorch's test "
            "classes are made once for the device",
            "test_as_cuda.py::test_device_properties_answer_what_programs_ask_first",
            hidden=True,
        ),
    ),
    "During a capture, while the sanitizer is on": (
        Patch(
            "torch.nn.parameter.UninitializedTensorMixin.materialize",
            "notes the parameters that a lazy module makes in the capture",
            "test_graph_memory.py::test_lazy_parameters_that_a_capture_makes_may_be_a_mistake",
            "it has a hook",
            hidden=True,
        ),
    ),
    "When a program uses kernels of Triton": (
        Patch(
            "triton.runtime.autotuner.Autotuner._bench",
            "the first configuration that compiles is taken, and none runs before it, because "
            "times of a CPU say nothing about a card",
            "test_launches.py::test_autotune_takes_the_first_that_compiles_and_runs_nothing_else",
            "Triton asks its driver which configuration to take",
            hidden=True,
        ),
    ),
    "Under `python -m torch_openreg run`": (
        Patch(
            "torch._ops.OpOverload._can_enable_pyobj_dispatch",
            "since PyTorch 2.15: a report of a host access names a custom operator whose kernel is "
            "in Python",
            "test_host_access.py::test_host_access_under_run_names_operator_and_line",
            "observers of operators are called for it",
            hidden=True,
        ),
    ),
    "In C++": (
        Patch(
            "torch.Event.__new__",
            "refuses an event of a device that is not there; with `interprocess`, processes "
            "can share the event (`csrc/torch/module.cpp`)",
            "test_events.py::test_object_that_is_no_stream_or_event_is_refused",
            "torch.Event checks the index",
            hidden=True,
        ),
        Patch(
            "torch._C._ImperativeEngine.run_backward",
            "threads of autograd take over the modes of the thread that called backward "
            "(`csrc/torch/backward_caller.cpp`)",
            "test_sanitizer_threads.py::test_backward_is_ordered_after_its_caller",
            "the engine has a hook where a backward pass is called",
            hidden=True,
        ),
        Patch(
            "c10::get_privateuse1_backend c10::Device::Device at::autocast::* "
            "c10::Dispatcher::registerImpl",
            "by as_cuda(): the device's name is cuda, and a kernel in C++ for CUDA's key is the "
            "device's (`csrc/torch/as_cuda.cpp`, `csrc/torch/cuda_registrations.cpp`)",
            "test_as_cuda.py::test_device_is_found_by_every_way_to_name_it",
            hidden=True,
        ),
        Patch(
            "torch._C.Future.* torch._C.wait torch.distributed.Store.*",
            "while the sanitizer is on, they order threads, as Python's locks and queues do "
            "(`csrc/torch/threads.cpp`)",
            "test_sanitizer_threads.py::test_hand_over_between_threads_orders_them",
            hidden=True,
        ),
    ),
}
_names = {name for part in PATCHES.values() for patch in part for name in patch.names.split()}
_patterns = [name for name in _names if "*" in name]


def _find(path):
    """Returns the module or class that has the attribute, and the attribute's name."""
    if path not in _names and not any(fnmatchcase(path, pattern) for pattern in _patterns):
        raise LookupError(f"{path} is replaced, and torch_openreg/_patches does not list it")
    module, _, name = path.rpartition(".")
    inner = []
    while module not in sys.modules:
        module, _, last = module.rpartition(".")
        inner.insert(0, last)
    return functools.reduce(getattr, inner, sys.modules[module]), name


def replace(path, value):
    """Puts `value` in the place of an attribute of PyTorch, whether PyTorch has it or not."""
    setattr(*_find(path), value)


def wrapped(original, function):
    """A function under the name of `original`, which `function` gets as its first argument."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        return function(original, *args, **kwargs)

    return call


def wrap(path, function):
    """Puts `function` in the place of a function of PyTorch: see wrapped()."""
    owner, name = _find(path)
    made = wrapped(getattr(owner, name), function)
    is_static = isinstance(vars(owner).get(name), staticmethod | classmethod)
    setattr(owner, name, staticmethod(made) if is_static else made)
