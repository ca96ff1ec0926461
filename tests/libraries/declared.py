"""Tests of libraries that fail on this device, and why.

An entry names tests as pytest does (`file::Class::test`, `*` stands for anything) and a pattern of
the error. It covers a failure whose test and error both match; one without any such failure is
stale, and an error.
"""

from support.declarations import Declared

HUB = "reads a model or data from Hugging Face's hub, which is switched off"

ACCELERATE = (
    Declared(
        "tests/test_cli.py::*",
        "reads a file that the source distribution lacks",
        error=r"tests/test_configs/\S+ (does not exist|not found)|no attribute 'original_config'",
    ),
    Declared("tests/test_cli.py::ModelEstimatorTester::*", HUB, error="Repo for model .* is gated"),
    Declared(
        "tests/test_accelerator.py::AcceleratorTester::test_setting_cpu_affinity",
        "asks NVIDIA's driver which cores are near a card",
        error="the `nvidia-ml-py` package must be available",
    ),
)

TORCHAO = (
    Declared(
        "test/sparsity/test_supermask.py::TestSupermask::test_supermask_*",
        "clamps float16 at 9e9: the CPU's kernel refuses a bound that float16 cannot hold, also "
        "without this package; CUDA's compares in float32",
        error="value cannot be converted to type c10::Half without overflow",
    ),
)

OFFLOAD = "*::test_group_offloading_with_disk*False*"
RACE = (
    "a race in diffusers: `ModuleGroup._offload_to_disk` drops weights that the computing stream "
    "still reads, without `record_stream` or a wait, and the next copy overwrites them"
)
DIFFUSERS = (
    Declared(
        "tests/models/unets/test_*.py::*",
        HUB,
        error="does not appear to have a file named config.json",
    ),
    Declared(OFFLOAD, RACE, error="AssertionError", always=False),
)

# Values were compared with float64. The first two kernels give the same bits at -O0 and at -O3.
LIGER = (
    Declared(
        "test/transformers/test_cross_entropy.py::*",
        "compares bfloat16 with PyTorch's own, within 5 %: gradients of the CPU's log_softmax are "
        "up to 5.3 % off, Liger's 0.4 %, which is bfloat16's precision",
        error=r"allclose[^|]*dtype=torch\.bfloat16",
    ),
    Declared(
        "test/transformers/test_layer_norm.py::test_liger_layer_norm*dtype1-*",  # bfloat16
        "compares with PyTorch's own: the CPU's layer_norm sums gradients of weight and bias in "
        "bfloat16, with 4 to 30 times the error of Liger's",
        error="allclose",
    ),
    Declared(
        "test/transformers/test_geglu.py::test_correctness*",
        "compares products of bfloat16 that are some 10,000 within 0.01 + 1 %: both are as far "
        "from float64, and few elements near zero are rounded differently",
        error=r"allclose[^|]*dtype=torch\.bfloat16",
    ),
    Declared(
        "test/transformers/test_tvd.py::test_torch_compile_matches_eager*",
        "expects the same bits of a sum that Inductor's C++ adds up in another order than the "
        "CPU's kernel; what the Triton kernel writes is the same",
        error=r"built-in method equal",
    ),
    Declared(
        "test/ops/test_fused_add_rms_norm.py::test_fused_add_rms_norm_correctness*dtype2-shape2-*",
        "compares a gradient within 0.0001: a program adds up its rows in float32 one after the "
        "other, which are 2,048 with two multiprocessors and 38 with a card's 108. The sums, up to "
        "some 100, are 0.0003 off",
        error="dw: Tensor-likes are not close",
    ),
    Declared(
        "test/ops/test_fused_linear_cross_entropy.py::*test_chunk_storage_released_before*",
        "the first dispatch of a process tries to import CuTe, which needs a card: the errors' "
        "tracebacks hold the arguments until Python collects garbage",
        error="storage is still live",
        always=False,
    ),
    Declared(
        "test/transformers/test_cross_entropy.py::*_with_weight_with_other_params_once*-2-4096-*",
        "needs more than 8 GiB for its copies of 8,192 rows of 32,000 logits",
        error="OutOfMemoryError",
    ),
    Declared(
        "test/transformers/test_monkey_patch.py::*",
        "needs classes of an earlier transformers, which 5.23 no longer has",
        error="cannot import name 'Liger\\w+CausalLMOutputWithPast'",
    ),
    Declared(
        "test/megatron/test_cross_entropy.py::test_tp_vocab_parallel_ce_parity*",
        "deletes a file that the processes' store has deleted, as with PyTorch's own backend Gloo; "
        "the values were compared before",
        error="FileNotFoundError.*/tmp",
    ),
)

# {library: entries}
DECLARED = {
    "accelerate": ACCELERATE,
    "torchao": TORCHAO,
    "diffusers": DIFFUSERS,
    "liger_kernel": LIGER,
}

# What fails under the sanitizer alone.
RACES = {"diffusers": (Declared(OFFLOAD, RACE, error="DataRaceError"),)}
