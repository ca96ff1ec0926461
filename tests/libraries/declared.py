"""Tests of libraries that fail on this device, and why.

An entry names tests as pytest does (`file::Class::test`, `*` stands for anything) and a pattern of
the error. It covers a failure whose test and error both match; an entry without any such failure is
stale, and an error.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Declared:
    tests: str  # patterns, separated by spaces
    error: str  # searched for in the error's text
    reason: str
    always: bool = True  # False: a race decides whether they fail; such an entry is never stale

    def covers(self, name, error):
        named = any(fnmatchcase(name, pattern) for pattern in self.tests.split())
        return named and re.search(self.error, error) is not None


HUB = "reads a model or data from Hugging Face's hub, which is switched off"

ACCELERATE = (
    Declared(
        "tests/test_cli.py::*",
        r"tests/test_configs/\S+ (does not exist|not found)|no attribute 'original_config'",
        "reads a file that the source distribution lacks",
    ),
    Declared("tests/test_cli.py::ModelEstimatorTester::*", "Repo for model .* is gated", HUB),
    Declared(
        "tests/test_accelerator.py::AcceleratorTester::test_setting_cpu_affinity",
        "the `nvidia-ml-py` package must be available",
        "asks NVIDIA's driver which cores are near a card",
    ),
)

TORCHAO = (
    Declared(
        "test/sparsity/test_supermask.py::TestSupermask::test_supermask_*",
        "value cannot be converted to type c10::Half without overflow",
        "clamps float16 at 9e9: the CPU's kernel refuses a bound that float16 cannot hold, also "
        "without this package; CUDA's compares in float32",
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
        "does not appear to have a file named config.json",
        HUB,
    ),
    Declared(OFFLOAD, "AssertionError", RACE, always=False),
)

# {library: entries}
DECLARED = {
    "accelerate": ACCELERATE,
    "torchao": TORCHAO,
    "diffusers": DIFFUSERS,
}

# What fails under the sanitizer alone.
RACES = {"diffusers": (Declared(OFFLOAD, "DataRaceError", RACE),)}
