"""The declared exceptions: where the device differs from the CPU, and why that is accepted.

An entry holds for an operator, the dtypes named ("*": all that it has; "errors": its bad inputs),
and one kind of difference. Each of them has to occur: one that does not is stale, and fails.
"""

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
