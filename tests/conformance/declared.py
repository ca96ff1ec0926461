"""The declared exceptions: where the device differs from the CPU, and why that is accepted.

An entry holds for an operator, the dtypes named ("*": all that it has; "errors": its bad inputs),
and one kind of difference. Each of them has to occur: one that does not is stale, and fails.
"""

import os
from dataclasses import dataclass

from jobs import ERRORS, Job


@dataclass(frozen=True)
class Declared:
    op: str
    dtypes: str
    kind: str
    reason: str
    compiled: bool = False

    def covers(self, job):
        if (self.op, self.compiled) != (job.op, job.compiled):
            return False
        return job.dtype in self.dtypes.split() or (self.dtypes == "*" and job.dtype != ERRORS)


POLICY = (
    "PyTorch chooses how exactly to accumulate by the device's name; others get the least exact"
)

DECLARED = (
    Declared("tensor_split", "*", "error", "the indices have to be on the CPU, on CUDA too"),
    *(
        Declared(
            f"nn_functional_linear_cross_entropy_chunked{form}", "bfloat16 float16", kind, POLICY
        )
        for form in ("", "_none")
        for kind in ("values", "gradient's values")
    ),
    Declared(
        "nn_functional_conv2d",
        "float16",
        "gradient's strides",
        "on the CPU Inductor has the channels last in these, where eager has not; here as eager",
        compiled=True,
    ),
)
FORMULA = "attention takes the formula of its operators, not the CPU's kernel"
ROUNDS = (
    "the driver's kernels round halves elsewhere in a chain that cancels or has several of them"
)
OPENCL = (
    Declared(
        "nn_functional_scaled_dot_product_attention",
        "float32 float64 bfloat16 float16",
        "gradient's strides",
        FORMULA,
    ),
    *(
        Declared("nn_functional_scaled_dot_product_attention", "bfloat16 float16", kind, FORMULA)
        for kind in ("values", "gradient's values")
    ),
    *(
        Declared(op, dtypes, "gradient's values", ROUNDS)
        for op, dtypes in {
            "cov": "bfloat16",
            "linalg_vector_norm": "float16",
            "masked_softmax": "bfloat16",
            "nn_functional_linear_cross_entropy": "bfloat16 float16",
            "nn_functional_normalize": "bfloat16",
            "nn_functional_soft_margin_loss": "float16",
            "softmax": "bfloat16",
        }.items()
    ),
    Declared("nn_functional_linear_cross_entropy", "float16", "values", ROUNDS),
)
NOMAP = (
    Declared(
        "as_strided_scatter",
        "bfloat16 float16",
        "message",
        "a copy requires no gradient, and an assertion of the CPU's kernel is about one that does",
    ),
)
DRIVERS = {"libopencl.so": OPENCL, "libvendor_nomap.so": NOMAP}
DECLARED += DRIVERS.get(os.path.basename(os.environ.get("OPENREG_PLUGIN", "")), ())


def declared(job):
    return [entry for entry in DECLARED if entry.covers(job)]


def job_for(op, dtype, samples):
    """Only all samples can show that an exception is stale."""
    job = Job(op, dtype, samples)
    return Job(op, dtype) if declared(job) else job


def judge(job, result):
    """What is wrong with a result, as sentences: differences that nobody declared, and declarations
    that no longer hold."""
    entries = declared(job)
    kinds = {entry.kind for entry in entries}
    wrong = [f"{kind}: {text}" for kind, text in result["failures"].items() if kind not in kinds]
    stale = [entry for entry in entries if entry.kind not in result["failures"]]
    return wrong + [
        f"declared in declared.py, but does not occur: {entry.kind} ({entry.reason})"
        for entry in stale
    ]
