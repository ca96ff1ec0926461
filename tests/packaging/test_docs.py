"""Every Python example in README.md and docs/*.md runs, in a process of its own; so does the recipe
for continuous integration."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from torch.utils._triton import has_triton_package

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
# Only `make integration` has the libraries for these.
HEAVY = ("import lightning\n", "import accelerate\n", "import transformers\n")
LATER = () if os.environ.get("OPENREG_INTEGRATION") else HEAVY
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# What examples say that race on purpose and do not look at the sanitizer themselves.
RACY = re.compile(r"# (side\.wait_stream\(.* is missing|read too early|an atomic_add is missing)")
WITH_TRITON = pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed")


def examples():
    for page in PAGES:
        text = page.read_text()
        for match in EXAMPLE.finditer(text):
            if match.group(1).startswith(LATER):
                continue
            line = text.count("\n", 0, match.start()) + 2
            # The blank lines let a traceback show the page's line numbers.
            code = "\n" * (line - 1) + match.group(1)
            marks = [pytest.mark.racy] if RACY.search(code) else []
            marks += [pytest.mark.slow] * (page.name != "README.md")
            marks += [WITH_TRITON] if "import triton\n" in code else []
            yield pytest.param(code, id=f"{page.relative_to(ROOT)}:{line}", marks=marks)


@pytest.mark.parametrize("code", list(examples()))
def test_example_of_a_page_runs(code, run, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(code)
    done = run("", arguments=[path])
    assert (done.code, done.err) == (0, ""), f"{done.out}\n{done.err}"


def test_pages_have_examples():
    assert {page.name for page in PAGES} >= {"README.md", "memory.md", "streams.md"}
    assert len(list(examples())) >= 8


# ---- links ----

LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
LINKING += [*ROOT.glob("docs/**/README.md"), *ROOT.glob("docs/vendor/*.md")]


def anchors(page):
    """Of the headings, as Git hosts make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_without_the_site(page):
    for link in LINK.findall(page.read_text()):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.is_file(), link
            assert not anchor or anchor in anchors(target), link


def test_site_build_finds_links_that_lead_nowhere(tmp_path):
    link = '<a href="{}">x</a>'.format
    (tmp_path / "docs").mkdir()
    good = [link("docs/b.html#there"), link("#here"), link("docs/b.html"), link("https://x.org/y")]
    bad = ["docs/b.html#here", "#there", "docs/c.html"]
    (tmp_path / "a.html").write_text('<p id="here">' + "".join([*good, *map(link, bad)]))
    (tmp_path / "docs/b.html").write_text('<p id="there">' + link("../a.html#here"))
    broken = runpy.run_path(str(ROOT / "docs/conf.py"))["broken_links"](tmp_path)
    assert [(str(page), target) for page, target in broken] == [("a.html", name) for name in bad]


# ---- docs/ci.md ----

CI = (ROOT / "docs/ci.md").read_text()
LIBRARY = {
    "pyproject.toml": """
[project]
name = "scale"
version = "1"

[tool.setuptools]
py-modules = ["scale"]
""",
    "scale.py": """
import torch


def scale(x, by):
    side = torch.Stream(device=x.device)
    with side:  # side.wait_stream(torch.accelerator.current_stream()) is missing
        return x.mul_(by)
""",
    "tests/test_scale.py": """
import pytest
import torch
from scale import scale


@pytest.mark.openreg
def test_scale(openreg_device):
    x = torch.zeros(100, device=openreg_device)
    assert scale(x, 5).sum().item() == 0


@pytest.mark.openreg
def test_copy(openreg_device):
    host = torch.zeros(100).pin_memory()
    host.copy_(torch.ones(100, device=openreg_device), non_blocking=True)
    copied = torch.openreg.current_stream().record_event()
    assert copied.query()  # asked too early: nothing has waited for the copy
""",
}


@pytest.mark.slow
def test_ci_recipe_finds_what_its_page_shows(tmp_path):
    for name, text in LIBRARY.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.lstrip("\n"))
    (command,) = re.findall(r"^ +- run: (pytest .*)$", CI, re.MULTILINE)
    drop = ("OPENREG_", "GITHUB_", "PYTEST_", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = str(tmp_path)  # in place of `pip install -e .`
    env.update(re.findall(r"^  (OPENREG_\w+): (\w+)", CI, re.MULTILINE))
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("::error ")]
    shown = re.findall(r"^::error .*", CI, re.MULTILINE)
    assert len(said) == len(shown) == 2, done.stdout
    for line, on_page in zip(said, shown, strict=True):
        on_page = re.sub(r"under [\d, ]+%0A|seed=\d+", "...", on_page)
        pattern = ".*".join(map(re.escape, on_page.split("...")))
        assert re.fullmatch(pattern, line), f"{line}\n{on_page}"
    tests = ElementTree.parse(tmp_path / "report.xml").iter("testcase")
    seeds = [
        p.get("value") for t in tests if "test_copy" in t.get("name") for p in t.iter("property")
    ]
    assert f"seed={seeds[0]} " in said[1] and f"under {', '.join(seeds)}%0A" in said[1]


def test_ci_recipes_name_the_versions_of_the_build():
    """README's job and the example library's workflow too."""
    pinned = (ROOT / ".ci/build.txt").read_text() + (ROOT / "pyproject.toml").read_text()
    pins = set(re.findall(r"\b(?:setuptools|torch|ninja|pytest)==[\d.]+", pinned))
    library = ROOT / "docs/examples/library/.github/workflows/accelerator.yml"
    for text in (CI, README.read_text(), library.read_text()):
        named = re.findall(r"\b(?:setuptools|torch|ninja|pytest)==[\d.]+", text)
        assert "torch==" in str(named) and set(named) <= pins


# ---- README.md ----


@WITH_TRITON
def test_report_of_readmes_kernel_is_the_one_it_shows(tmp_path):
    (code,) = (code for code in EXAMPLE.findall(README.read_text()) if "import triton\n" in code)
    (tmp_path / "total.py").write_text(code)
    command = "python -m torch_openreg run --sanitize total.py"
    shown = README.read_text().partition(f"$ {command}\n")[2].partition("```")[0]
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=tmp_path, capture_output=True, text=True
    )
    assert shown and shown in done.stderr


def settings_in_the_code():
    """Rows of the core's table, and whatever else a file reads from the environment."""
    read = re.compile(
        r"\{\"(OPENREG_[A-Z_]+)\", |(?:getenv\(|environ\b\W+(?:get\()?)\"(OPENREG_[A-Z_]+)\""
    )
    sources = [
        *ROOT.glob("csrc/**/*.[ch]*"),
        *ROOT.glob("torch_openreg/**/*.py"),
        ROOT / "pytest_openreg.py",
    ]
    return {a or b for path in sources for a, b in read.findall(path.read_text())}


def test_settings_are_all_in_readmes_table():
    table = re.findall(r"^\| `(OPENREG_[A-Z_]+)` \|", README.read_text(), re.MULTILINE)
    assert sorted(table) == sorted(settings_in_the_code()) and len(table) > 10


def test_readmes_job_is_short():
    (job,) = re.findall(r"^```yaml\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(job.splitlines()) <= 12


def test_readmes_public_reports_have_programs_that_the_sanitizer_reports():
    fixes = re.findall(r"^\| \[[^|]*/pull/\d+\) \| .* \| `(\w+)` \|$", README.read_text(), re.M)
    row = r"^\| `{}` \| [^|]* \| [^|]* \| yes \|"
    catalogue = (ROOT / "docs/catalogue.md").read_text()
    assert [name for name in fixes if not re.search(row.format(name), catalogue, re.M)] == []
    assert len(fixes) >= 10
