"""The pytest plugin of a process that runs a suite's tests: records which begins and how it ends.

A record is a line of JSON in the file JUDGES_LOG. It is written at once, so that the records of a
process that dies end with the test that killed it.
"""

import collections
import faulthandler
import functools
import json
import os

# Open until the process ends, however it ends.
_log = open(os.environ["JUDGES_LOG"], "a")  # noqa: SIM115
# Each has ended, or ended the process before this one.
with open(os.environ["JUDGES_LOG"]) as records:
    _begun = {record.get("test") for record in map(json.loads, records)}
_limit = float(os.environ["JUDGES_LIMIT"])
_stderr = os.dup(2)
_torchcts = None  # its conftest.py
_ended = {}  # [outcome, message] of the test that runs


def _adapt():
    """Use the metadata for PyTorch 2.12.1 for later versions, of which TorchCTS has none: it leaves
    out each test that needs it."""
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


def _cpu_product(name, args, kwargs=None):
    """Return the CPU's product, and that each of its numbers is to be compared."""
    import torch
    from torchcts.core import reference_oracles

    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, (args, kwargs))
    product = getattr(torch.ops.aten, reference_oracles._matmul_reference_base(name))
    value = product(*args, **kwargs or {})
    return value, torch.ones_like(torch.view_as_real(value), dtype=torch.bool)


def _record(what, **fields):
    print(json.dumps({"what": what, **fields}), file=_log, flush=True)


def pytest_plugin_registered(plugin):
    global _torchcts
    if hasattr(plugin, "_run_declared_diagnostic_probes"):
        _torchcts = plugin
        _adapt()
        # Programs that take half a minute, of which it prints a table.
        plugin._run_declared_diagnostic_probes = lambda *_, **__: None


def pytest_collection_finish(session):
    if _torchcts is not None:
        # It would write all results of the session after each test.
        _torchcts._ARTIFACT_WRITES_ENABLED = False
    _record("selected", tests=[item.nodeid for item in session.items])
    session.items[:] = [item for item in session.items if item.nodeid not in _begun]


def pytest_runtest_logstart(nodeid):
    faulthandler.dump_traceback_later(_limit, exit=True, file=_stderr)
    _ended[nodeid] = ["passed", ""]
    _record("begin", test=nodeid)


def pytest_runtest_logreport(report):
    kept = _ended[report.nodeid]
    if report.failed and kept[0] != "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        kept[:] = "failed", (crash.message if crash else str(report.longrepr))[:2000]
    elif report.skipped and kept[0] == "passed":
        kept[:] = "skipped", str(report.longrepr)[-300:]


def pytest_runtest_logfinish(nodeid):
    faulthandler.cancel_dump_traceback_later()
    outcome, message = _ended.pop(nodeid)
    _record("end", test=nodeid, outcome=outcome, message=message)


def pytest_sessionfinish():
    skips = _torchcts._SESSION_SKIPS.values() if _torchcts is not None else ()
    _record("finish", filtered=collections.Counter(skip["skip_reason"] for skip in skips))
