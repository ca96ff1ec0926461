"""What the package replaces in PyTorch is what torch_openreg/_patches lists.

`python tests/packaging/test_patches.py` writes docs/patches.md from the list.
"""

import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path

import pytest
import torch

from torch_openreg import _patches
from torch_openreg._patches import PATCHES

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs/patches.md"
HEAD = """\
# What is replaced in PyTorch

PyTorch has registration functions for most of what a device needs. Where it has none, this package
replaces an attribute of a module or class of PyTorch, or an entry of a table. This is the whole
list. `torch_openreg/_patches` has it and applies it, and
`tests/packaging/test_patches.py` compares PyTorch's attributes with those of a process without this
package.
"""
PATCHED = [patch for patches in PATCHES.values() for patch in patches]
BY_CUDA = "By `torch_openreg.as_cuda()`"
# What PyTorch's own functions register and generate for a device, and what its modules made of that
# when they were imported.
REGISTERED = (
    "*.openreg",
    "*.is_openreg",
    "*.OPENREG",
    "*.PrivateUse1",
    "torch._*.callback_handler",
    "torch._C._autograd.DeviceType.*",
    "torch._C._profiler.ProfilerActivity.*",
    "torch._dynamo.device_interface.device_interfaces",
    "torch._dynamo.variables.base.VariableTrackerMeta.all_subclasses",
    "torch._dynamo.variables.ctx_manager._device_context_manager_map",
    "torch._dynamo.variables.streams._stream_fn_to_variable_cls",
    "torch._dynamo.variables.tensor.all_tensor_attrs",
    "torch._dynamo.variables.torch.constant_fold_functions*",
    "torch._higher_order_ops.flex_attention",
    "torch._higher_order_ops.flex_attention.flex_attention",
    "torch._inductor.*.custom_backend_passes",
    "torch._inductor.codegen.common.device_*",
    "torch._inductor.test_operators._test_lib_impl",
    "torch.distributed.fsdp._fully_shard.*.lib",
    "torch.nn.attention.flex_attention.flex_attention_hop",
    "torch.testing._internal.common_*",
)
FOUND_BY_CUDA = (
    "torch._dynamo.variables.torch.supported_ctx_manager_classes",
    "torch._inductor.cudagraph_trees.*",
    "torch.utils.cpp_extension.CUDA_HOME",
)


def page():
    lines = [HEAD]
    for when, patches in PATCHES.items():
        lines += [f"## {when}\n", "| what | effect | needless when | test |", "| --- " * 4 + "|"]
        for patch in patches:
            names = "<br>".join(f"`{name}`" for name in patch.names.split())
            lines.append(f"| {names} | {patch.effect} | {patch.until} | `{patch.test}` |")
        lines.append("")
    return "\n".join(lines)


def test_patches_page_is_written_from_the_list():
    assert PAGE.read_text() == page(), "python tests/packaging/test_patches.py writes it"


def test_patches_have_a_test_each():
    for patch in PATCHED:
        file, _, name = patch.test.partition("::")
        texts = [path.read_text() for path in TESTS.rglob(file)]
        assert any(re.search(rf"^def {name}\(", text, re.MULTILINE) for text in texts), patch.test


def test_replace_refuses_what_is_not_listed():
    with pytest.raises(LookupError, match=r"torch\.nn\.Linear\.forward is replaced, and"):
        _patches.replace("torch.nn.Linear.forward", None)
    assert torch.nn.Linear.forward


def snapshot(path, autoload, *arguments):
    """What support/attributes.py writes in a process with the package or without."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENREG_")}
    environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": str(autoload), "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, TESTS / "support/attributes.py", path, *arguments]
    subprocess.run(command, env=environment, check=True)
    return json.loads(path.read_text())


def canonical(name):
    """By the class that has it, as a snapshot names it."""
    owner, _, last = name.rpartition(".")
    module, inner = owner, []
    while module and module not in sys.modules:
        module, _, part = module.rpartition(".")
        inner.insert(0, part)
    try:
        found = reduce(getattr, inner, sys.modules[module])
    except (AttributeError, KeyError):
        return name
    return f"{found.__module__}.{found.__qualname__}.{last}" if isinstance(found, type) else name


def matches(name, patterns):
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def differences(folder, *steps):
    """{attribute: (without the package, with it)} after these steps."""
    ours = snapshot(folder / "ours", 1, "-", *steps)
    theirs = snapshot(folder / "theirs", 0, folder / "ours", *steps)
    assert len({*ours["modules"]} & {*theirs["modules"]}) > 500
    before, after = theirs["attributes"], ours["attributes"]
    names = {**before, **after}
    return {n: (before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)}


def is_gone(patch):
    """Whether this PyTorch is a version that makes it needless."""
    needless = re.match(r"PyTorch (\d+)\.(\d+) ", patch.until)
    here = tuple(map(int, torch.__version__.split(".")[:2]))
    return needless is not None and here >= tuple(map(int, needless.groups()))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(), ("use",), ("use", "as_cuda")], ids="-".join)
def test_patches_are_the_differences_from_a_plain_process(tmp_path, steps):
    found = differences(tmp_path, *steps)
    sections = list(PATCHES) if steps else list(PATCHES)[:1]
    listed = {canonical(n): p for s in sections for p in PATCHES[s] for n in p.names.split()}
    listed |= {f"{name}.*": patch for name, patch in listed.items()}  # of a class that is another
    # Modules that have imported what is replaced have it by names of their own.
    copies = {pair[1] for name, pair in found.items() if matches(name, listed)} - {None, "module"}
    patterns = [*listed, *REGISTERED, *(FOUND_BY_CUDA if "as_cuda" in steps else ())]
    unlisted = {
        name: pair
        for name, pair in found.items()
        if not matches(name, patterns)
        and pair[1] not in copies
        and not ("as_cuda" in steps and re.search(r"torch[./]cuda[./]", str(pair[0])))
    }
    assert unlisted == {}
    sections = [BY_CUDA] if "as_cuda" in steps else [s for s in sections if s != BY_CUDA]
    stale = [
        name
        for section in sections
        for patch in PATCHES[section]
        for name in patch.names.split()
        if not patch.hidden
        and not is_gone(patch)
        and not any(fnmatchcase(other, canonical(name)) for other in found)
    ]
    assert stale == []


if __name__ == "__main__":
    PAGE.write_text(page())
