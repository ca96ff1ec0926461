"""``torch.openreg``: its names, and how many devices there are."""

import inspect
import pkgutil
import re
import sys
import types
import typing
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import torch_openreg

PAGE = Path(__file__).resolve().parents[2] / "docs" / "module.md"
CUDAS, _, REFERENCES = PAGE.read_text().partition("## PyTorch's reference backend")
OUR_NAMES, CUDA_NAMES = {}, {}
for row in re.findall(r"^\| (`.*)\|$", CUDAS, re.MULTILINE):
    since = re.search(r"from PyTorch (\S+) on", row)
    if since and torch.__version__ < since[1]:
        continue
    first, second, *rest = (cell.strip() for cell in row.split("|"))
    for name in re.findall(r"`([^`]+)`", first):
        (CUDA_NAMES if rest else OUR_NAMES).setdefault(name, []).append(second)

# Of submodules that only exist where they are imported, or whose other names are not listed.
INNER = {name for name in CUDA_NAMES if name.startswith(("graphs.", "graph_annotations."))}
# CUDA's counts cycles, and what PyTorch gives with a deferred call is of no interest.
RENAMED = {"_sleep", "_lazy_call"}
SUBMODULES = {"memory": torch.cuda.memory, "random": torch.cuda.random}


def lookup(name, value=torch.openreg):
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def defined(module):
    """The public names of a module that are its own, with its submodules, imported or not."""
    inner = (m.name for m in pkgutil.iter_modules(getattr(module, "__path__", ())))
    for name in {*dir(module), *inner}:
        value = getattr(module, name, None)
        if isinstance(value, types.ModuleType) and not value.__name__.startswith("torch.cuda."):
            continue
        home = str(getattr(value, "__module__", None)).partition(".")[0]
        imported = home in {*sys.stdlib_module_names, "typing_extensions"}
        helpers = any(getattr(m, name, None) is value for m in (typing, torch._utils))
        if not name.startswith("_") and not imported and not (value is not None and helpers):
            yield name


def used_by_pytorch():
    """Names with an underscore that the rest of PyTorch's Python asks torch.cuda for."""
    root = Path(torch.__file__).parent
    for path in root.rglob("*.py"):
        place = path.relative_to(root).as_posix()
        # Dynamo's is a list of all names; what tests use is in no program.
        if place.startswith(("cuda/", "testing/", "_dynamo/trace_rules.py")):
            continue
        text = path.read_text()
        for module, names in re.findall(r"from torch\.cuda(\.\w+)? import ([\w, ]+)", text):
            yield from (f"{module}.{name.strip()}".lstrip(".") for name in names.split(","))
        yield from re.findall(r"torch\.cuda\.((?:\w+\.)?_[a-z]\w*)", text)


def takes(ours, theirs):
    """Whether the one can be called as the other."""
    try:
        mine = inspect.signature(ours).parameters.values()
        needed = inspect.signature(theirs).parameters.values()
    except ValueError:  # written in C
        return True
    if any(p.kind is p.VAR_POSITIONAL for p in mine):
        return True  # handed on to PyTorch
    by_place = [p.name for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = {p.name for p in needed if p.kind is p.KEYWORD_ONLY}
    return [p.name for p in mine][: len(by_place)] == by_place and by_name <= {p.name for p in mine}


def test_table_has_every_name_of_cuda_once():
    names = {*torch.cuda.__all__, *defined(torch.cuda)}
    for module in SUBMODULES.values():
        names |= {n for n in defined(module) if getattr(torch, n, None) is None}
    names |= {f"amp.{name}" for name in defined(torch.cuda.amp)}
    assert {name for name in CUDA_NAMES if "._" not in f".{name}"} - INNER == names
    assert {name: words for name, words in CUDA_NAMES.items() if len(words) > 1} == {}
    assert {words[0] for words in CUDA_NAMES.values()} == {"have", "will not"}


def test_table_has_every_name_that_pytorch_uses():
    used = {n for n in used_by_pytorch() if "._" in f".{n}" and lookup(n, torch.cuda) is not None}
    assert len(used) > 10 and used - {*CUDA_NAMES} == set()


@pytest.mark.parametrize("name", [name for name, words in CUDA_NAMES.items() if words == ["have"]])
def test_name_that_the_table_has_as_present_exists(name):
    value = lookup(name)
    assert value is not None
    assert "Raises NotImplementedError" not in (getattr(value, "__doc__", None) or "")
    # Under every path under which torch.cuda has it.
    for module, cuda in SUBMODULES.items():
        if name in cuda.__all__:
            assert getattr(getattr(torch.openreg, module), name) is value
    if name in torch.cuda.__all__:
        assert name in torch.openreg.__all__


@pytest.mark.parametrize("name", [name for name, words in CUDA_NAMES.items() if words == ["have"]])
def test_name_that_exists_takes_cudas_arguments(name):
    theirs, ours = lookup(name, torch.cuda), lookup(name)
    if not callable(theirs) or name in RENAMED or name.endswith(("Tensor", "Storage")):
        return
    assert takes(ours, theirs)
    for member, value in vars(theirs).items() if inspect.isclass(theirs) else ():
        if not member.startswith("_"):
            assert hasattr(ours, member), member
            assert not inspect.isfunction(value) or takes(getattr(ours, member), value), member


@pytest.mark.parametrize("name", [name for name, words in CUDA_NAMES.items() if words != ["have"]])
def test_name_that_the_table_has_as_absent_is_missing_or_refuses(name):
    value = lookup(name)
    if value is None:
        assert name not in torch.openreg.__all__
        return
    arguments = (None,) if name == "change_current_allocator" else ()
    with pytest.raises(NotImplementedError, match="openreg"):
        result = value(*arguments)
        with result:
            pass


def test_table_has_our_own_names():
    assert {name for name in OUR_NAMES if "." not in name} == {*torch.openreg.__all__} - {
        *torch.cuda.__all__
    }
    assert all(lookup(name) is not None for name in OUR_NAMES)


def test_names_that_the_reference_shares_exist():
    headers = "".join(path.read_text() for path in Path(torch_openreg.get_include()).rglob("*.h"))
    names = re.findall(r"`([\w.]+)(?:\(\))?`(?=.* \| the same)", REFERENCES)
    for name in names:
        package, _, inner = name.partition(".")
        module = sys.modules.get(package)
        there = lookup(inner, module) if inner else module
        assert there or re.search(rf"\b{name}\b", headers), name
    assert len(names) > 40


def test_module_has_the_names_that_cuda_and_xpu_share():
    shared = {*torch.cuda.__all__} & {*torch.xpu.__all__}
    assert len(shared) > 50
    assert shared - {*torch.openreg.__all__} == set()


def test_module_lists_each_name_once():
    assert len(torch.openreg.__all__) == len(set(torch.openreg.__all__))


def test_submodules_can_be_imported():
    import torch.openreg.amp
    import torch.openreg.memory
    import torch.openreg.random
    import torch.openreg.streams
    import torch.openreg.testing

    assert torch.openreg.memory.memory_allocated is torch.openreg.memory_allocated
    assert torch.get_device_module("openreg") is torch.openreg


# ---- Tensors, modules, storages, packed sequences ----


def test_tensor_openreg_method_moves_like_cuda():
    x = torch.arange(3.0)
    assert not x.is_openreg
    for there, index in (
        (x.openreg(), 0),
        (x.openreg(1), 1),
        (x.openreg("openreg:1"), 1),
        (x.openreg(torch.device("openreg", 1)), 1),
        (x.openreg(1, non_blocking=True), 1),
        (x.view(3, 1).openreg(1, memory_format=torch.contiguous_format), 1),
    ):
        assert there.is_openreg and there.device == torch.device("openreg", index)
        assert there.flatten().tolist() == [0, 1, 2]
    there = x.openreg(1)
    assert there.openreg(1) is there
    with torch.openreg.device(1):
        assert x.openreg().device.index == 1
    assert torch.nn.Parameter(there).is_openreg
    with pytest.raises(RuntimeError, match=r"index 7 .*from 0 to 1"):
        x.openreg(7)
    with pytest.raises(RuntimeError, match="must be openreg device"):
        x.openreg("cpu")
    assert there.type() == "torch.openreg.FloatTensor"
    as_double = x.type("torch.openreg.DoubleTensor")
    assert as_double.is_openreg and as_double.dtype == torch.float64


def test_module_openreg_method_moves_in_place():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert net.openreg(1) is net
    assert {t.device for t in net.state_dict().values()} == {torch.device("openreg:1")}
    with pytest.raises(RuntimeError, match=r"index 7 .*from 0 to 1"):
        net.openreg(7)


def test_parameters_stay_the_same_objects():
    net = torch.nn.Linear(2, 2)
    parameters = list(net.parameters())
    net.openreg(1)
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    assert parameters[0].is_openreg and net(torch.ones(1, 2, device="openreg:1")).is_openreg


def test_storage_openreg_method_moves_and_keeps_values():
    x = torch.arange(3, dtype=torch.uint8)
    storage = x.untyped_storage().openreg(1)
    assert storage.is_openreg and not x.untyped_storage().is_openreg
    assert storage.device == torch.device("openreg:1") and storage.get_device() == 1
    assert storage.tolist() == [0, 1, 2] and storage.cpu().tolist() == [0, 1, 2]
    assert storage.openreg(1) is storage
    assert storage.openreg(0).device == torch.device("openreg:0")
    with pytest.raises(RuntimeError, match=r"index 7 .*from 0 to 1"):
        storage.openreg(7)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_typed_storage_openreg_method_keeps_dtype():
    storage = torch.arange(3.0).storage().openreg(1)
    assert storage.is_openreg and storage.dtype == torch.float32
    assert storage.tolist() == [0, 1, 2]


def test_packed_sequence_moves_to_a_device():
    packed = pack_sequence([torch.ones(3), torch.zeros(2)])
    assert not packed.is_openreg
    there = packed.to("openreg:1")
    assert there.is_openreg and there.data.device == torch.device("openreg:1")
    assert packed.openreg().is_openreg and there.openreg().data.device.index == 1
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(there)
    assert padded.is_openreg and lengths.tolist() == [3, 2]


# ---- What is there only to say no, and small questions ----


@pytest.mark.parametrize("name", ["clock_rate", "power_draw", "temperature", "utilization"])
def test_sensor_functions_refuse_by_name(name):
    with pytest.raises(NotImplementedError, match=rf"has no {name.replace('_', ' ')} to read"):
        getattr(torch.openreg, name)(1)
    with pytest.raises(RuntimeError, match=r"index 7 .*from 0 to 1"):
        getattr(torch.openreg, name)(7)


def test_small_queries_answer_as_a_device_without_them():
    assert torch.openreg.is_tf32_supported() is False
    assert torch.openreg.get_arch_list() == [] and torch.openreg.get_gencode_flags() == ""
    torch.openreg.empty_cache()  # what other tests left would do for `kept`
    before = torch.openreg.device_memory_used(1)
    kept = torch.empty(64 << 20, dtype=torch.uint8, device="openreg:1")
    assert torch.openreg.device_memory_used(1) >= before + kept.nbytes
    free, total = torch.openreg.mem_get_info(1)
    assert torch.openreg.device_memory_used(1) == total - free


# ---- Configuration of counts ----


@pytest.mark.simulated_device("a list of factories without a plugin")
def test_configure_sets_counts_and_names(run_ok):
    out = run_ok(
        """
        import torch
        torch.manual_seed(3)  # a pending value, no use
        torch.openreg.configure({"openreg": 3, "cpu": 2}, name_prefix="/job:here")
        print(torch.openreg.device_count(), torch.openreg.get_device_name(2))
        print([f["devices"] for f in torch.openreg.device_factories()])
        print(torch.ones(3, device="openreg:2").sum().item(), torch.openreg.initial_seed())
        """,
        {"OPENREG_DEVICE_COUNT": "1"},
    )
    assert out.splitlines() == [
        "3 /job:here/openreg:2",
        "[[], ['/job:here/cpu:0', '/job:here/cpu:1'], "
        "['/job:here/openreg:0', '/job:here/openreg:1', '/job:here/openreg:2']]",
        "3.0 3",
    ]


@pytest.mark.parametrize(
    "use", ["torch.accelerator.is_available()", 'torch.openreg.configure({"openreg": 2})']
)
def test_configure_is_refused_after_first_use(run_ok, use):
    out = run_ok(
        f"""
        import torch
        {use}
        try:
            torch.openreg.configure({{"openreg": 3}})
        except RuntimeError as error:
            print(error)
        print(torch.openreg.device_count())
        """
    )
    assert "the devices have been made already: 3 of them" in out  # one is the CPU's
    assert out.splitlines()[-1] == "2"


def test_configure_can_be_called_again_after_a_bad_one(run_ok):
    out = run_ok(
        """
        import torch

        def configure(**arguments):
            try:
                torch.openreg.configure(**arguments)
            except (RuntimeError, TypeError) as error:
                print(type(error).__name__, " ".join(str(error).split()))

        configure(device_count={"openreg": 65})
        configure(device_count={"openreg": -1})
        configure(device_count={"cpu": 1, "CPU": 2})
        configure(device_count={"openreg": 1}, name_prefix="/much" * 10)
        configure(device_count={"tpu": 1})
        configure(device_count={"CPU": 0})
        configure(device_count={"openreg": 1.5})
        configure(device_count={"openreg": True})
        configure(device_count={1: 1})
        torch.openreg.configure({"openreg": 1})
        print(torch.openreg.device_count(), torch.ones(2, device="openreg").sum().item())
        """
    )
    expected = [
        "RuntimeError .*65 devices of type 'openreg' are out of range: 0 to 64",
        "RuntimeError .*-1 devices of type 'openreg' are out of range: 0 to 64",
        "RuntimeError .*type '(cpu|CPU)' has two device counts, (1 and 2|2 and 1)",
        "RuntimeError .*the name prefix has 50 characters, allowed are 27",
        "RuntimeError .*1 devices of type 'tpu' are configured, but no device factory",
        "RuntimeError .*no CPU device was made: one is required, 0 are configured",
        "TypeError expected a device type and a whole number, got 'openreg': 1.5",
        "TypeError expected a device type and a whole number, got 'openreg': True",
        "TypeError expected a device type and a whole number, got 1: 1",
        "1 2.0",
    ]
    for line, pattern in zip(out.splitlines(), expected, strict=True):
        assert re.match(pattern, line), line


def test_configure_can_give_no_device(run_ok):
    out = run_ok(
        """
        import torch
        torch.openreg.configure({"openreg": 0})
        print(torch.openreg.device_count(), torch.accelerator.is_available())
        """
    )
    assert out == "0 False\n"


@pytest.mark.simulated_device("its entry in the list of factories")
def test_device_factories_list_their_devices():
    simulated, *rest = [f for f in torch.openreg.device_factories() if f["type"] == "openreg"]
    assert rest == []
    assert simulated == {
        "type": "openreg",
        "name": "simulated",
        "priority": 0,
        "plugin": "",
        "serves": True,
        "devices": ["/openreg:0", "/openreg:1"],
    }
    host = [f for f in torch.openreg.device_factories() if f["type"] == "CPU"]
    host = sorted((f["priority"], f["serves"], f["devices"]) for f in host)
    assert host == [(0, False, []), (50, True, ["/cpu:0"])]


def test_device_factories_list_a_plugin(run_ok, plugins):
    library = next(iter(sorted(plugins.glob("*.so"))))
    out = run_ok(
        """
        import torch
        torch.openreg.configure({"openreg": 3})
        for f in torch.openreg.device_factories():
            if f["type"] == "openreg":
                print(f["plugin"], f["serves"], f["priority"] > 0, f["devices"])
        """,
        {"OPENREG_PLUGIN": str(library)},
    )
    assert out.splitlines() == [
        " False False []",
        f"{library} True True ['/openreg:0', '/openreg:1', '/openreg:2']",
    ]
