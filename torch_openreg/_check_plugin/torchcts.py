"""The check by TorchCTS, a public conformance suite for backends, where it is installed; and what
`make judges` shares with it, which runs all of the suite."""

import collections
import fnmatch
import functools
import importlib.util
import os
import shutil
import tempfile

from .checks import END, Skipped, check

# Folders about the device rather than its operators; each takes seconds.
FAST = "device_api memory multi_device rng serialization errors stress dtypes strides"
MANIFEST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "manifest.py")
# What fails of them on every device of this library, and why: {reason: patterns of tests}. A
# pattern names tests as pytest does, from the suite's folder on; `*` stands for anything.
DECLARED = {
    "makes named tensors, which PyTorch 2.13 no longer has on any device": (
        "rng/test_generator.py::test_rand_named_factory_metadata",
        "rng/test_generator.py::test_rand_generator_named_factory_metadata",
    ),
    "gives scales and zero points on the CPU for a tensor of the device, which the wrapper that "
    "PyTorch generates for CUDA's kernels refuses in the same words": (
        "dtypes/test_native_quantization.py::test_make_per_channel_quantized_tensor",
        "dtypes/test_native_quantization.py::test_make_quantized_out_and_empty_quantized",
        "dtypes/test_native_quantization.py::test_quantize_out_variants",
        "dtypes/test_native_quantization.py::test_quantize_per_channel",
        "dtypes/test_native_quantization.py::test_quantized_per_channel_qparams_out",
    ),
    "asks for `guard_allocator_enabled()` in the device's module, a function that no device of "
    "PyTorch has": ("memory/test_guard_alloc.py::test_guard_alloc_canary*",),
    "compares the noise that `rrelu` leaves unwritten in evaluation, made by `torch.empty_like`": (
        "rng/test_dropout_rrelu_variants.py::test_rrelu_train_false_variants",
    ),
    "expects a copy to the CPU to have the strides of a view with gaps, which only a CPU tensor, "
    "of which `cpu()` is the tensor itself, has": (
        "strides/test_noncontiguous.py::test_stride_and_storage_offset_metadata",
    ),
}
# Where the CPU does not reach the memory: what has no kernel works on copies, and PyTorch makes
# none of an empty quantized tensor.
UNMAPPED = (
    "dtypes/test_native_quantization.py::test_quantized_batch_norm_out",
    "dtypes/test_native_quantization.py::test_quantized_max_pool_variants",
)
ANY = "copy, set, compute or run"


def suite():
    """The folder of TorchCTS's tests; None: it is not installed."""
    found = importlib.util.find_spec("torchcts")
    return found and os.path.dirname(found.origin)


def prepare(folder):
    """Writes what TorchCTS and pytest read in the working directory."""
    shutil.copy(MANIFEST, folder)
    with open(os.path.join(folder, "pytest.ini"), "w") as file:
        file.write("[pytest]\n")  # or pytest takes the first one above the suite


def _adapt(conftest):
    """Uses the metadata for PyTorch 2.12.1 for later versions, of which TorchCTS has none: it
    leaves out each test that needs it."""
    from torchcts import op_metadata
    from torchcts.core import (
        contract_references,
        dtype_contracts,
        fft_contract,
        pytorch_compat,
        reference_oracles,
    )

    newest = dtype_contracts.load_dtype_contracts()["metadata"]["max_validated_version"]
    number, original = pytorch_compat.parse_torch_version, pytorch_compat.normalize_torch_version

    @functools.cache
    def normalize(version=None):
        return min(original(version), newest, key=number)

    for module in (pytorch_compat, dtype_contracts, op_metadata):
        module.normalize_torch_version = normalize
    # References of its own, where it holds the CPU's kernel to be wrong.
    contract_references.resolve_generated_forward_reference = lambda *_, **__: None
    contract_references.resolve_opinfo_forward_reference = lambda *_, **__: None
    reference_oracles.matmul_family_determinate_reference = _cpu_product
    # It asks for the real view of a tensor that is conjugated lazily, which PyTorch refuses.
    fft_contract._values_finite = lambda tensor: bool(tensor.detach().cpu().isfinite().all())
    # It goes through all operators for each that is asked for: minutes.
    versions = op_metadata._validation_metadata(None)
    op_metadata._validation_metadata = lambda metadata: versions
    # Programs that take half a minute, of which it prints a table.
    conftest._run_declared_diagnostic_probes = lambda *_, **__: None


def _cpu_product(name, args, kwargs=None):
    """Returns the CPU's product, and that each of its numbers is to be compared."""
    import torch
    from torchcts.core import reference_oracles

    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, (args, kwargs))
    product = getattr(torch.ops.aten, reference_oracles._matmul_reference_base(name))
    value = product(*args, **kwargs or {})
    return value, torch.ones_like(torch.view_as_real(value), dtype=torch.bool)


class Recorder:
    """A plugin of pytest's, which calls `select`, `begin` and `end` of a subclass."""

    def __init__(self):
        self.torchcts = None  # its conftest.py
        self._ended = {}  # [outcome, message] of the test that runs

    def pytest_plugin_registered(self, plugin):
        if hasattr(plugin, "_run_declared_diagnostic_probes"):
            self.torchcts = plugin
            _adapt(plugin)

    def pytest_collection_finish(self, session):
        if self.torchcts is not None:
            # It would write all results of the session after each test.
            self.torchcts._ARTIFACT_WRITES_ENABLED = False
        session.items[:] = self.select(session.items)

    def pytest_runtest_logstart(self, nodeid):
        self._ended[nodeid] = ["passed", ""]
        self.begin(nodeid)

    def pytest_runtest_logreport(self, report):
        kept = self._ended[report.nodeid]
        if report.failed and kept[0] != "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            kept[:] = "failed", (crash.message if crash else str(report.longrepr))[:2000]
        elif report.skipped and kept[0] == "passed":
            kept[:] = "skipped", str(report.longrepr)[-300:]

    def pytest_runtest_logfinish(self, nodeid):
        self.end(nodeid, *self._ended.pop(nodeid))


class _Reporter(Recorder):
    """Reports to a check's process which test begins, and each that fails."""

    def __init__(self, c):
        super().__init__()
        self.c, self.index = c, int(os.environ["CHECK_PLUGIN_BEHIND"])
        self.patterns = [pattern for patterns in DECLARED.values() for pattern in patterns]
        self.patterns += UNMAPPED
        self.counts = collections.Counter()

    def select(self, tests):
        return tests[self.index + 1 :]

    def begin(self, test):
        self.index += 1
        self.c.report("begin", self.index)
        self.c.step(ANY, f"running TorchCTS's {test}")

    def end(self, test, outcome, message):
        if outcome == "failed" and any(fnmatch.fnmatch(test, p) for p in self.patterns):
            outcome = "declared"
        elif outcome == "failed":
            self.c.report("wrong", f"{test}: {message.partition(chr(10))[0][:200]}")
        self.counts[outcome] += 1


@check("torchcts.device", ANY, END, torch=True)
def torchcts_device(c):
    """TorchCTS's tests of devices pass, but for those that fail on every device here"""
    folder = suite()
    if folder is None or importlib.util.find_spec("pytest") is None:
        raise Skipped("TorchCTS is not installed (pip install --no-deps torchcts psutil; pytest)")
    import pytest
    import torch

    torch.set_num_threads(1)
    c.device_count()
    reporter = _Reporter(c)
    off = [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "pytest_openreg", "xdist")]
    options = ["-q", "-s", "--rootdir", folder, "--tb=short", "--show-capture=no", *off]
    with tempfile.TemporaryDirectory() as here:
        prepare(here)
        os.chdir(here)
        options += ["-c", os.path.join(here, "pytest.ini")]
        status = pytest.main(options + [os.path.join(folder, n) for n in FAST.split()], [reporter])
    ends = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
    if reporter.index >= 0:  # the test that ended the process before was the last one
        ends.add(pytest.ExitCode.NO_TESTS_COLLECTED)
    if status not in ends:
        c.report("wrong", f"pytest ended with {status!r}, outside of any test")
    kinds = ("passed", "failed", "declared", "skipped")
    return ", ".join(f"{reporter.counts[kind]} {kind}" for kind in kinds)
