"""The operators' kernels here, beside those that PyTorch's native_functions.yaml lists for the CPU
and for CUDA. A later PyTorch that adds an operator of a kind that is listed here fails the test."""

import re
import typing
from pathlib import Path

import pytest
import torch
import torchgen
from cpu_reference import DEVICE, Recorder, alike, drawn
from torch.utils._pytree import tree_map_only

import torch_openreg

COMPOSITES = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


def registered(name, *keys):
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", k) for k in keys)


def schemas():
    """By operator, as text."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = path.read_text().split("\n- func: ")[1:]
    return {entry.partition("(")[0]: entry for entry in entries}


def native_functions():
    """The keys that each operator has a kernel for; a structured one has those of its out form."""
    keys, delegates = {}, {}
    for name, entry in schemas().items():
        rows = re.findall(r"^    ([\w, ]+): *\w+", entry, re.MULTILINE)
        keys[name] = {key for row in rows for key in row.split(", ")}
        delegates[name] = re.findall(r"^  structured_delegate: (\S+)", entry, re.MULTILINE)
    for name, delegate in delegates.items():
        keys[name] |= {key for other in delegate for key in keys[other]}
    return keys


@pytest.fixture(scope="module", autouse=True)
def used():
    """The rest of the kernels is registered at the first use of a device."""
    torch.empty(1, device=DEVICE)


# ---- A composite kernel in the place of the CPU's ------------------------------------------------


def pair(device, *sizes, dtype=torch.float32):
    return [drawn(device, *sizes, dtype=dtype, requires_grad=False) for _ in range(2)]


def stacked(device):
    tensors = pair(device, 2, 3)
    out = [torch.empty(0, device=device) for _ in range(3)]
    return [torch.ops.aten._stack.out(tensors, dim, out=o) for dim, o in enumerate(out)]


def bools(operator, out=False):
    def call(device):
        for dtype in (torch.bool, torch.uint8, torch.float32):
            x = (torch.arange(24).view(2, 3, 4) % 5 > 0).to(dtype).to(device)
            for dims in ([0, 1], [-1], [], None):
                for keep in (False, True):
                    kinds = {"out": torch.empty(0, dtype=x.dtype, device=device)} if out else {}
                    if out and dtype == torch.float32:
                        kinds["out"] = kinds["out"].bool()
                    yield operator(x, dims, keep, **kinds)

    return lambda device: list(call(device))


def derivative(operator):
    """In each dtype, near and far from zero."""

    def call(device, dtype):
        gradient, x = pair(device, 1000, dtype=dtype)
        return operator(gradient, x * 20)

    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    return lambda device: [call(device, dtype) for dtype in dtypes]


def normed(operator, *sizes):
    return lambda device: operator(*pair(device, 2, 4, 3)[:1], *pair(device, *sizes[0]), *sizes[1:])


def addr(device, **out):
    m, (a, b) = drawn(device, 3, 3, requires_grad=False), pair(device, 3)
    return torch.addr(m, a, b, beta=0.3, alpha=-2, **out)


# By operator: what it computes.
CASES = {
    "_stack": lambda d: [torch.ops.aten._stack(pair(d, 2, 3), dim) for dim in (0, 1, -1)],
    "_stack.out": stacked,
    "addr": addr,
    "addr.out": lambda d: addr(d, out=torch.empty(0, device=d)),
    "all.dims": bools(torch.ops.aten.all.dims),
    "all.dims_out": bools(torch.ops.aten.all.dims_out, out=True),
    "any.dims": bools(torch.ops.aten.any.dims),
    "any.dims_out": bools(torch.ops.aten.any.dims_out, out=True),
    "linalg__powsum": lambda d: torch.ops.aten.linalg__powsum(*pair(d, 4, 5)[:1], 3.0, [1]),
    "mish_backward": derivative(torch.ops.aten.mish_backward),
    "native_group_norm": normed(torch.native_group_norm, (4,), 2, 4, 3, 2, 1e-5),
    "native_layer_norm": lambda d: torch.native_layer_norm(
        *pair(d, 2, 4, 3)[:1], [3], *pair(d, 3), 1e-5
    ),
    "silu_backward": derivative(torch.ops.aten.silu_backward),
}

# Left to the composite kernel.
LEFT = {"native_channel_shuffle": "CUDA's too: it is differentiated through it"}


def test_cpu_kernels_are_found_before_composite_ones():
    names = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    found = {name for name in names if registered(name, "CPU") and registered(name, *COMPOSITES)}
    assert found == {*CASES, *LEFT}
    assert {name for name in found if not registered(name, "PrivateUse1")} == {*LEFT}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_cpus_kernel_not_the_composite(name):
    alike(CASES[name])


# ---- Factories that take their device from another tensor ----------------------------------------


def like(name, *arguments):
    return lambda x: getattr(torch, f"{name}_like")(x, *arguments)


def new(name, *arguments):
    return lambda x: getattr(x, f"new_{name}")((2,), *arguments)


def sparse(layout):
    def make(x):
        outer, inner = (torch.tensor(i, device=x.device) for i in ([0, 1, 2], [0, 1]))
        values = x.view(2, 1, 1) if layout[0] == "b" else x
        kinds = {"layout": torch.sparse_csr} if layout == "compressed" else {}
        return getattr(torch, f"sparse_{layout}_tensor")(outer, inner, values, **kinds)

    return make


def quantized(x):
    return torch.quantize_per_tensor(x, 0.5, 1, torch.qint8)


# By the operators' names without overloads.
FACTORIES = {
    "_nested_tensor_from_tensor_list": lambda x: torch._nested_tensor_from_tensor_list([x]),
    "empty_quantized": lambda x: torch.empty_quantized((2,), quantized(x)),
    **{f"{name}_like": like(name) for name in ("empty", "ones", "rand", "randn", "zeros")},
    "full_like": like("full", 3.0),
    "randint_like": like("randint", 9),
    **{f"new_{name}": new(name) for name in ("empty", "ones", "zeros")},
    "new_full": new("full", 3.0),
    "new_empty_strided": new("empty_strided", (1,)),
    "sparse_coo_tensor": lambda x: torch.sparse_coo_tensor(x.long()[None], x),
    **{
        f"sparse_{layout}_tensor": sparse(layout)
        for layout in ("csr", "csc", "bsr", "bsc", "compressed")
    },
}

# They have a device of their own: on CUDA, too, that is the default one where none is named.
OTHERS = {"linspace", "logspace", "_empty_per_channel_affine_quantized"}
OTHERS |= {f"_sparse_{kind}_tensor_unsafe" for kind in ("coo", "csr", "csc", "bsr", "bsc")}
OTHERS |= {"_sparse_compressed_tensor_unsafe", "_sparse_coo_tensor_with_dims_and_tensors"}
# They make nothing, or a copy.
OTHERS |= {"_assert_tensor_metadata", "is_pinned", "pin_memory", "_pin_memory", "_to_copy", "to"}


def test_factories_with_a_tensor_are_all_listed():
    found = set()
    for name, schema in schemas().items():
        arguments = schema.partition(") ->")[0]
        if re.search(r"\bTensor\b", arguments) and "Device? device" in arguments:
            found.add(name.partition(".")[0])
    assert found <= {*FACTORIES, *OTHERS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FACTORIES)
def test_factories_take_the_device_of_the_tensor(name):
    x = torch.tensor([0.5, 1.5], device=DEVICE)
    for _ in range(2):
        made = FACTORIES[name](x)
        assert made.device == x.device
        if "rand" not in name and "empty" not in name:
            compared = FACTORIES[name](x.cpu())
            dense = [t.to_dense() if t.layout != torch.strided else t for t in (made, compared)]
            if not made.is_nested:
                assert torch.equal(dense[0].cpu(), dense[1])


# ---- Composite kernels that CUDA uses ------------------------------------------------------------

# By operator: why it has a kernel here all the same. The first two are taken apart before autograd
# and __torch_dispatch__ see them, as on CUDA; both see the others on every device.
READERS = [
    "_grid_sampler_2d_cpu_fallback",
    "_grid_sampler_2d_cpu_fallback_backward",
    "_reshape_from_tensor",
    "_rowwise_prune",
    "_saturate_weight_to_fp16",
    "_sobol_engine_draw",
    "_sobol_engine_ff_",
    "_sobol_engine_initialize_state_",
    "_sobol_engine_scramble_",
    "choose_qparams_optimized",
    "fbgemm_linear_fp16_weight",
    "fbgemm_linear_fp16_weight.out",
    "fbgemm_linear_fp16_weight_fp32_activation",
    "fbgemm_linear_fp16_weight_fp32_activation.out",
    "fbgemm_linear_int8_weight",
    "fbgemm_linear_int8_weight_fp32_activation",
    "fbgemm_linear_quantize_weight",
    "fbgemm_pack_gemm_matrix_fp16",
    "fbgemm_pack_quantized_matrix",
    "fbgemm_pack_quantized_matrix.KN",
    "range.out_",
]
REGISTERED = {
    "max_pool1d": "a result with the CPU's strides",
    "_has_compatible_shallow_copy_type": "PyTorch's takes the devices that it names, as CUDA",
    **dict.fromkeys(("_stack", "_stack.out"), "the CPU has a kernel, with other results"),
    "_lazy_clone": "PyTorch's copies at the first write, which nothing orders after the streams",
    "_batch_norm_no_update": "PyTorch's calls the CPU's kernel with the tensors of the device",
    "_foreach_mm": "a list is one task",
    **dict.fromkeys(
        (
            "convolution",
            "convolution_overrideable",
            "convolution_backward_overrideable",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_fused_attention_overrideable_backward",
        ),
        "PyTorch's asks for a kernel of the device's own",
    ),
    **dict.fromkeys(
        ("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta"),
        "PyTorch's asks for a kernel of the device's own",
    ),
    **dict.fromkeys(("ldexp.Tensor", "ldexp.out", "ldexp_"), "PyTorch's overflows sooner"),
    **dict.fromkeys(("addr_", "embedding"), "one task in place of several"),
    **dict.fromkeys(("conj_physical_", "mode.values"), "PyTorch's refuses other devices"),
    **dict.fromkeys(READERS, "PyTorch's reads memory on the host"),
}
KINDS = ["", "Sparse", "SparseCsr", "Quantized", "NestedTensor"]


def test_composites_that_cuda_uses_have_no_other_kernel_here():
    found = set()
    for name, keys in native_functions().items():
        composite = not keys or keys.intersection(COMPOSITES)
        for kind in KINDS if composite else ():
            ours = (f"{kind}PrivateUse1", *([] if kind else ["AutogradPrivateUse1"]))
            if f"{kind}CUDA" not in keys and registered(name, *ours):
                implicit = not keys or COMPOSITES[0] in keys
                found |= {name} if implicit or not kind else set()
    assert found <= {*REGISTERED}, "what does __torch_dispatch__ see of these on CUDA?"


# ---- Operators that are special by name (csrc/aten/ops) ------------------------------------------

# By operator: what PyTorch's own kernel does, which would run without the entry.
REPLACED = {
    **dict.fromkeys(
        ("_efficientzerotensor", "empty.memory_format", "empty_strided"), "makes host memory"
    ),
    **dict.fromkeys(
        (
            "resize_",
            "set_",
            "set_.source_Storage",
            "set_.source_Storage_storage_offset",
            "set_.source_Tensor",
        ),
        "gives the tensor host memory",
    ),
    **dict.fromkeys(
        (
            "_reshape_alias",
            "as_strided",
            "as_strided_",
            "is_set_to",
            "unfold",
            "view",
            "view_as_complex",
            "view_as_real",
        ),
        "would be a task that its caller waits for, though it reads no memory",
    ),
    "_local_scalar_dense": "reads the memory at once",
    "convolution_backward": "asks for a kernel of the device's own",
    "_nested_view_from_buffer": "refuses sizes that lie on the device",
    "_nested_view_from_buffer_copy": "refuses sizes that lie on the device",
    "_pin_memory": "makes a quantized tensor without a quantizer",
    "_sparse_mm_reduce_impl": "keeps what its derivative reads only where it sees autograd",
    "copy_": "reads and writes quantized tensors outside of any task",
    "native_dropout": "draws from the CPU's generator",
    "repeat_interleave.Tensor": "reads the repeats, for which the caller would wait",
    "to_mkldnn": "makes a layout that no device has",
    **dict.fromkeys(("histc", "histc.out"), "refuses integers"),
    **dict.fromkeys(("_linalg_svd", "_linalg_svd.U", "linalg_lstsq.out"), "refuses CUDA's drivers"),
    **dict.fromkeys(
        (f"_fused_{name}_.tensor_lr" for name in ("adagrad", "adam", "adamw", "sgd")),
        "refuses a learning rate with dimensions",
    ),
    **dict.fromkeys(
        (
            "_batch_norm_with_update",
            "_batch_norm_with_update.out",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit.out",
            "batch_norm_backward",
            "native_batch_norm",
            "native_batch_norm.out",
            "native_batch_norm_backward",
        ),
        "refuses parameters and statistics of different dtypes",
    ),
}


def entries():
    """The operators with a kernel in csrc/aten/ops, and the kinds of tensors it is for."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            dump = torch._C._dispatch_dump(name)
            registrations = r"^(?:Autograd)?(\w*)PrivateUse1: registered at \S*aten/ops/"
            kinds = {*re.findall(registrations, dump, re.MULTILINE)} - {"Autocast"}
            if re.search(r"^QuantizedCPU: registered at \S*aten/ops/", dump, re.MULTILINE):
                kinds.add("")
            if kinds:
                found[name.removeprefix("aten::")] = kinds
    return found


def test_entries_are_of_operators_that_pytorch_has():
    dangling = torch._C._dispatch_find_dangling_impls()
    assert not [entry for entry in dangling if "aten/ops/" in entry]


def test_entries_have_a_reason_that_holds():
    """An entry needs none in these tables as long as PyTorch has no other kernel for it."""
    composites = (*COMPOSITES, "CompositeExplicitAutogradNonFunctional")
    replaces = {
        name
        for name, kinds in entries().items()
        if registered(name, *composites, *(f"{kind}CPU" for kind in kinds))
    }
    assert replaces == {*REPLACED, *({*CASES, *REGISTERED} & {*entries()})}


def test_composites_with_a_kernel_here_are_still_composites():
    """And CUDA still uses it."""
    native = native_functions()
    known = {name for name in REGISTERED if name in native}
    assert {name for name in known if not composite(name, native[name])} == set()


def composite(name, keys):
    return (not keys or bool(keys.intersection(COMPOSITES))) and "CUDA" not in keys


def without(operator, *arguments, **kinds):
    """What the operator gives on a device that has no kernel for it: PyTorch's composite one."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse2)
    return operator.redispatch(keys, *arguments, **kinds)


def refuses(call, error=RuntimeError):
    try:
        call()
    except error:
        return True
    return False


def tasks(call):
    torch_openreg._C._fallback_stats(True)
    call()
    torch.openreg.synchronize(DEVICE)
    return sum(
        entry["asynchronous"]["count"] for entry in torch_openreg._C._fallback_stats(True).values()
    )


def ones(*sizes, device=DEVICE, **kinds):
    return torch.ones(*sizes, device=device, **kinds)


def mixed_batch_norm():
    half, wide = ones(2, 3, device="cpu", dtype=torch.bfloat16), ones(3, device="cpu")
    return torch.native_batch_norm(half, wide.bfloat16(), None, wide, wide, True, 0.1, 1e-5)


def step_with_a_rate_of(sizes):
    tensors = [[ones(2, device="cpu")] for _ in range(3)]
    arguments = {"weight_decay": 0.0, "momentum": 0.0, "lr": torch.ones(sizes), "dampening": 0.0}
    arguments |= {"nesterov": False, "maximize": False, "is_first_step": True}
    torch.ops.aten._fused_sgd_.tensor_lr(*tensors, **arguments)


aten = torch.ops.aten
indices = torch.tensor([1, 0])

# By operator: what is true of PyTorch while its entry is needed.
NEEDED = {
    "_has_compatible_shallow_copy_type": lambda: (
        not without(aten._has_compatible_shallow_copy_type.default, ones(2), ones(2, device="cpu"))
    ),
    "_fused_sgd_.tensor_lr": lambda: refuses(lambda: step_with_a_rate_of([1])),
    "_linalg_svd": lambda: refuses(
        lambda: torch.linalg.svd(ones(2, 2, device="cpu"), driver="gesvd")
    ),
    "_stack": lambda: tasks(lambda: without(aten._stack.default, [ones(2), ones(2)])) != 1,
    "addr_": lambda: tasks(lambda: without(aten.addr_.default, ones(2, 2), ones(2), ones(2))) > 1,
    "conj_physical_": lambda: refuses(
        lambda: without(aten.conj_physical_.default, ones(2, dtype=torch.cfloat))
    ),
    "convolution_overrideable": lambda: refuses(
        lambda: without(
            aten.convolution_overrideable.default,
            *(ones(1, 1, 3, 3), ones(1, 1, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        )
    ),
    "embedding": lambda: (
        tasks(lambda: without(aten.embedding.default, ones(2, 2), indices.to(DEVICE))) > 1
    ),
    "histc": lambda: refuses(lambda: torch.histc(indices)),
    "kaiser_window": lambda: refuses(
        lambda: without(aten.kaiser_window.default, 5, device=torch.device(DEVICE))
    ),
    "ldexp.Tensor": lambda: (
        without(aten.ldexp.Tensor, ones(1) * 1e-30, ones(1) * 130).isinf().item()
    ),
    "mode.values": lambda: refuses(
        lambda: without(aten.mode.values, ones(2, 2), values=ones(2), indices=indices.to(DEVICE))
    ),
    "native_batch_norm": lambda: refuses(mixed_batch_norm),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NEEDED)
def test_entry_is_still_forced_by_pytorch(name):
    assert name in entries()
    assert NEEDED[name]()


class Wrapped(torch.Tensor):
    """A tensor around another one. The names of the operators that it is handed go into `seen`."""

    seen: typing.ClassVar = []

    @staticmethod
    def __new__(cls, inner):
        kept = {"strides": inner.stride(), "dtype": inner.dtype, "device": inner.device}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **kept)

    def __init__(self, inner):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        args, kwargs = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*args, **kwargs))


SEEN = {
    "max_pool1d": lambda x: torch.max_pool1d(x.select(0, 0), 2),
    "native_channel_shuffle": lambda x: torch.native_channel_shuffle(x, 2),
    "mish_backward": torch.ops.aten.mish_backward,
    "silu_backward": torch.ops.aten.silu_backward,
}


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("grad", [False, True])
def test_torch_dispatch_sees_what_it_sees_on_cuda(name, grad):
    """Calls with meta tensors are taken apart as CUDA's, or where CUDA has a kernel the CPU's."""
    control = "cpu" if "backward" in name else "meta"

    def seen(device, wrap):
        x = torch.empty(2, 4, 3, 4, device=device, requires_grad=grad)
        arguments = [x] * (2 if "backward" in name else 1)
        with Recorder() as recorder:
            Wrapped.seen = recorder.names
            SEEN[name](*([Wrapped(a) for a in arguments] if wrap else arguments))
        return recorder.names

    for wrap in (False, True):
        assert seen(DEVICE, wrap) == seen(control, wrap)


def test_torch_dispatch_does_not_see_what_module_to_asks():
    net = torch.nn.Linear(4, 4, bias=False)
    with Recorder() as recorder:
        net.to(DEVICE).to("cpu")
    assert recorder.names and not [name for name in recorder.names if "shallow" in name]


def test_module_to_takes_a_subclass_that_knows_only_cudas_operators():
    class Strict(Wrapped):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            assert function.overloadpacket.__name__ in ("_to_copy", "detach", "t", "clone")
            return super().__torch_dispatch__(function, types, args, kwargs)

    net = torch.nn.Linear(4, 4, bias=False)
    net.weight = torch.nn.Parameter(Strict(torch.ones(4, 4)), requires_grad=False)
    assert net.to(DEVICE).weight.device == torch.device(DEVICE)


def test_channels_are_shuffled_with_a_gradient():
    x = torch.arange(12.0, device=DEVICE).view(2, 6, 1, 1).requires_grad_()
    y = torch.native_channel_shuffle(x, 3)
    assert torch.equal(y.cpu(), torch.native_channel_shuffle(x.detach().cpu(), 3))
    (gradient,) = torch.autograd.grad(y[0].sum() + 3 * y[1, 1].sum(), x)
    assert gradient.flatten().tolist() == [1] * 6 + [0, 0, 3, 0, 0, 0]
