"""Devices of another name: what `python -m torch_openreg new-device` writes, and packages beside
each other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_openreg import _write_device

ROOT = Path(__file__).resolve().parents[2]
PLAIN = "import torch_openreg\ntorch_openreg.register_device({0!r}, __name__)\n"


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("Acme", "lower-case letters"),
        ("acme2", "lower-case letters, with underscores between them"),
        ("acme_", "underscores between them"),
        ("a" * 24, "at most 23 characters"),
        ("lambda", "word of Python"),
        ("xpu", "device of PyTorch"),
        ("openreg", "device of torch_openreg"),
        ("linalg", "torch.linalg exists"),
        ("item", "torch.Tensor.item exists"),
        ("pinned", "torch.Tensor.is_pinned exists"),
        ("train", "torch.nn.Module.train exists"),
        ("gloo", "backend of torch.distributed"),
    ],
)
def test_bad_names_are_refused_with_what_is_allowed(tmp_path, name, allowed, capsys):
    assert _write_device.main(name, str(tmp_path / "package")) == 2
    assert allowed in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_folder_with_files_is_refused(tmp_path):
    (tmp_path / "kept").write_text("")
    with pytest.raises(ValueError, match="not an empty folder"):
        _write_device.write("acme", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_package_has_the_name_everywhere(tmp_path):
    _write_device.write("n_pu", tmp_path / "package")
    files = {str(p.relative_to(tmp_path)): p for p in tmp_path.rglob("*") if p.is_file()}
    assert {f"package/{name}" for name in (
        "driver.c", "setup.py", "pyproject.toml", "README.md", "src/torch_n_pu/__init__.py",
        "tests/test_device.py", "tests/test_pytorch.py", ".github/workflows/tests.yml",
        ".gitignore")} == set(files)  # fmt: skip
    for path in files.values():
        assert not re.search("acme|example vendor|TORCH --|vVERSION", path.read_text(), re.I)


# ---- packages beside each other ----


@pytest.fixture
def packages(tmp_path):
    """Installed packages, as pip leaves them: each has a device, which is simulated."""

    def packages(*names):
        for name in names:
            (tmp_path / f"torch_{name}").mkdir()
            (tmp_path / f"torch_{name}/__init__.py").write_text(PLAIN.format(name))
            info = tmp_path / f"torch_{name}-1.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_{name}\nVersion: 1")
            entry = f"[torch_openreg.devices]\n{name} = torch_{name}\n"
            (info / "entry_points.txt").write_text(entry)
        # Installed packages come first, as torch_openreg's entry point is found by its folder.
        path = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH"), str(ROOT)])
        return {"PYTHONPATH": os.pathsep.join(path)}

    return packages


def test_second_package_is_refused_with_both_names(run_ok, packages):
    out = run_ok(
        """
import torch
print((torch.ones(3, device="acme:1") * 2).tolist(), torch.ones(1).acme().is_acme)
try:
    torch.device("openreg")
except RuntimeError:
    print("none of torch_openreg")
try:
    import torch_beta
except ImportError as error:
    print(error)
""",
        packages("beta", "acme"),
        fresh=True,
    )
    assert out == (
        "[2.0, 2.0, 2.0] True\nnone of torch_openreg\n"
        "torch_beta offers the device 'beta', but this process has 'acme' of torch_acme:\n"
        "  PyTorch has one such device in a process\n"
        "  help: uninstall one of them, or import torch_beta before torch\n"
    )


def test_package_whose_device_cannot_have_its_name_is_refused(run, packages):
    done = run("import torch", packages("acme2"), fresh=True)
    assert done.code and "register_device: a device's name has lower-case letters" in done.err


# What a user of a device reads and writes, under its name.
NAMES = """
import io, pickle, re, sys, tempfile, warnings
import torch
import torch.distributed as dist

def said(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__module__}: {error}"
    raise AssertionError("no error")

x = torch.ones(1000, device="acme")
texts = [
    repr(torch.acme.Stream()), repr(torch.acme.Event()), x.type(), repr(torch.acme.FloatTensor),
    torch.acme.get_device_name(1), torch.acme.memory_summary(), torch.acme.hang_report(),
    said(torch.empty, 2**60, device="acme"), said(torch.acme.synchronize, 9),
    said(torch.acme.synchronize, "cpu"), said(torch.acme.change_current_allocator, None),
]
assert all("acme" in text for text in texts[:6] + texts[7:]), texts
with torch.autocast("acme"):
    assert (torch.ones(2, 2, device="acme") @ torch.ones(2, 2, device="acme")).dtype == torch.half
file = io.BytesIO()
torch.save(x, file)
file.seek(0)
assert torch.load(file).device == x.device
graph = torch.acme.Graph()
with torch.acme.graph(graph):
    y = x + 1
graph.replay()
with torch.acme.testing.inject("device_lost"):
    texts.append(said(lambda: (x + 1).sum().item()))
torch.acme.reset()
x = torch.ones(1000, device="acme")
with torch.profiler.profile() as profile:
    x.sum().item()
with tempfile.NamedTemporaryFile() as trace:
    profile.export_chrome_trace(trace.name)
    rows = re.findall(r'"(?:name|labels)": "(?:acme|openreg):.*"', open(trace.name).read())
    texts.append("".join(rows))
torch.acme.set_sync_debug_mode("warn")
with warnings.catch_warnings(record=True) as warned:
    torch.acme.synchronize()
torch.acme.set_sync_debug_mode("default")
texts.append(str(warned[0].message))
torch.acme.sanitizer.enable()
x = torch.ones(1000, device="acme")
with torch.acme.Stream():
    texts.append(said(x.add_, 1))
torch.acme.sanitizer.disable()
with tempfile.NamedTemporaryFile() as store:
    dist.init_process_group("acme", init_method=f"file://{store.name}x", rank=0, world_size=1)
    dist.all_reduce(x)
    texts.append(dist.get_backend())
    dist.destroy_process_group()
texts.append(torch.get_device_module("acme").__name__ and str(torch.acme is torch.openreg))
for text in texts:
    print(text)
"""


@pytest.mark.slow
def test_texts_have_the_name_of_the_package(run, packages):
    done = run(NAMES, packages("acme"), fresh=True)
    assert done.code == 0, done.out + done.err
    assert "openreg" not in done.out.replace("openreg: hang report", ""), done.out
    assert done.out.count("acme:0") >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "device"),
    [
        ("import torch_openreg, torch", "acme"),
        ("import torch_beta, torch", "beta"),
        ("import torch_acme, torch", "acme"),
    ],
)
@pytest.mark.parametrize("autoload", ["0", "1"])
def test_package_that_is_imported_first_has_the_device(run_ok, packages, program, device, autoload):
    end = "\nprint(torch.ones(2, device=torch.accelerator.current_accelerator()).device)"
    environment = packages("acme", "beta") | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    assert run_ok(program + end, environment, fresh=True) == f"{device}:0\n"


@pytest.mark.slow
def test_package_that_is_not_installed_is_refused(run_ok, packages, tmp_path):
    environment = packages("acme")
    (tmp_path / "torch_acme-1.dist-info/entry_points.txt").unlink()
    program = "try:\n    import torch_acme\nexcept ImportError as error:\n    print(error)"
    out = run_ok(program, environment, fresh=True)
    assert out.startswith("torch_acme offers the device 'acme', but this process has 'openreg'")
    assert "install torch_acme with pip" in out


# ---- the whole way ----


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of a Python with the package that new-device writes, and its folder."""
    folder = tmp_path_factory.mktemp("device")
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENREG_")}
    command = [sys.executable, "-m", "torch_openreg", "new-device", "acme", folder / "source"]
    subprocess.run(command, check=True, env=env)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--no-build-isolation", "--target", folder / "site", folder / "source"]
    subprocess.run(pip, check=True, env=env)
    path = [str(folder / "site"), env.get("PYTHONPATH", str(ROOT))]
    return folder / "source", env | {"PYTHONPATH": os.pathsep.join(path)}


def outcome(command, environment, folder):
    done = subprocess.run(
        list(map(str, command)),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_new_device_passes_its_own_tests(installed):
    """On its driver, and on simulated devices."""
    source, environment = installed
    command = [sys.executable, "-m", "pytest", "-q", "--openreg-sanitizer"]
    for plugin in ({}, {"OPENREG_PLUGIN": ""}):
        code, text = outcome(command, environment | plugin, source)
        assert code == 0 and " passed" in text, text


@pytest.mark.slow
def test_new_device_trains_the_digits(installed):
    source, environment = installed
    command = [sys.executable, ROOT / "docs/examples/digits.py", "--device", "acme:0"]
    code, text = outcome(command, environment, source)
    assert code == 0 and "acme:0" in text, text
    code, text = outcome([sys.executable, "-m", "torch_openreg"], environment, source)
    assert "acme:0  /acme:0, made by 'acme'" in text, text
