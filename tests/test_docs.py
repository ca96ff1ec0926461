"""Every Python example in README.md and docs/*.md runs, in a process of its own."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Only `make integration` has the libraries for these.
HEAVY = ("import lightning\n", "import accelerate\n", "import transformers\n")
LATER = () if os.environ.get("OPENREG_INTEGRATION") else HEAVY
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# What examples say that race on purpose and do not look at the sanitizer themselves.
RACY = re.compile(r"# (side\.wait_stream\(.* is missing|read too early)")


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
            yield pytest.param(code, id=f"{page.relative_to(ROOT)}:{line}", marks=marks)


@pytest.mark.parametrize("code", list(examples()))
def test_example(code, run_ok, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(code)
    # Kineto says on stderr when a profile starts and stops.
    run_ok("", {"KINETO_LOG_LEVEL": "99"}, arguments=[str(path)])


def test_the_pages_have_examples():
    assert {page.name for page in PAGES} >= {"README.md", "memory.md", "streams.md"}
    assert len(list(examples())) >= 8
