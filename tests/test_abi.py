"""Programs that were built against the headers of a release run with this tree's library.

tests/c/abi/VERSION has the headers of each release, as they were. A program is compiled against
them and run with the library of `make ctest`; and what they say of structures, enumerations,
constants and functions is compared with what the headers say now.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILT = Path(os.environ.get("OPENREG_C_TESTS") or ROOT / "build/ctest/debug/run-tests").parent
CURRENT = ROOT / "csrc/openreg/include"
RELEASES = sorted(folder for folder in ROOT.glob("tests/c/abi/*") if folder.is_dir())
COMPILER = shlex.split(os.environ.get("CC", "cc"))

CONSTANTS = r"#define (OPENREG_ABI_VERSION|OPENREG_MAX_\w+|OR_\w*MAX_\w+|OR_STREAM_DEFAULT)\b"


def compiled(folder, text, name, include, *options):
    source = folder / f"{name}.c"
    source.write_text(text)
    command = [*COMPILER, "-std=c11", "-Wall", "-Werror", f"-I{include}", source, *options]
    return subprocess.run(command, capture_output=True, text=True)


def includes(headers):
    return "".join(f"#include <{header.name}>\n" for header in sorted(headers.glob("*.h")))


def member_names(members):
    """Of the text between a structure's braces."""
    for member in filter(None, (part.strip() for part in members.split(";"))):
        function = re.search(r"\(\*(\w+)\)", member)
        declared = [function[1]] if function else re.sub(r"\[.*?\]", "", member).split(",")
        yield from (re.search(r"\w+$", name.strip())[0] for name in declared)


class Headers:
    """What a folder of headers declares, by name."""

    def __init__(self, folder, scratch):
        shown = compiled(scratch, includes(folder), "all", folder, "-E", "-P")
        assert shown.returncode == 0, shown.stderr
        text = " ".join(shown.stdout.split())
        self.structures = {
            name: list(member_names(members))
            for name, members in re.findall(r"typedef struct (or\w+) \{(.*?)\} \1;", text)
        }
        self.constants = [
            name.split("=")[0].strip()
            for items in re.findall(r"\benum (?:or\w+ )?\{(.*?)\}", text)
            for name in items.rstrip(" ,").split(",")
            if re.match(r"\s*(?:or|OR_)", name)
        ]
        for header in folder.glob("*.h"):
            self.constants += re.findall(CONSTANTS, header.read_text())
        exported = r'__attribute__\(\(visibility\("default"\)\)\) ([^;{]*?\b(or\w+) ?\([^;]*\));'
        self.functions = {name: declared for declared, name in re.findall(exported, text)}

    def layout(self, include, scratch):
        """As the headers in `include` lay it out: numbers by name, or the compiler's error."""
        constant = 'printf("constant {0} %lld\\n", (long long){0});'
        lines = [constant.format(name) for name in self.constants]
        for name, members in self.structures.items():
            sized = ", of a size that it tells" if members[0] == "size" else ""
            lines.append(f'printf("bytes of {name}{sized} %zu\\n", sizeof({name}));')
            lines += [
                f'printf("member {name}.{member} %zu %zu\\n", offsetof({name}, {member}), '
                f"sizeof((({name} *)0)->{member}));"
                for member in members
            ]
        body = "\n".join(lines)
        text = f"#include <stdio.h>\n{includes(include)}int main(void) {{\n{body}\n}}\n"
        done = compiled(scratch, text, "layout", include, "-o", scratch / "layout")
        if done.returncode:
            return {"error": done.stderr}
        said = subprocess.run([scratch / "layout"], capture_output=True, text=True, check=True)
        return {
            name: [int(number) for number in numbers.split()]
            for name, numbers in re.findall(r"^(.*?)((?: -?\d+)+)$", said.stdout, re.MULTILINE)
        }


def layout_differences(release, current, scratch):
    """What a program of the release would find elsewhere."""
    headers = Headers(release, scratch)
    then, now = headers.layout(release, scratch), headers.layout(current, scratch)
    if "error" in now:
        return now["error"]
    grown = {name for name in now if name.endswith("tells") and now[name] >= then[name]}
    differ = [name for name in then if then[name] != now[name] and name not in grown]
    return {name: (then[name], now[name]) for name in differ}


def declared_again(release, current, scratch):
    """What the compiler says where the release's functions are declared after today's, and used."""
    functions = Headers(release, scratch).functions
    again = "".join(f"{declared};\n" for declared in functions.values())
    uses = "".join(f"  use((void (*)(void)){name});\n" for name in functions)
    text = (
        f"{includes(current)}{again}static void use(void (*f)(void)) {{ (void)f; }}\n"
        f"int main(void) {{\n{uses}}}\n"
    )
    library = next(BUILT.glob("libopenreg.so.*"))
    return compiled(scratch, text, "again", current, library, "-o", scratch / "again").stderr


@pytest.fixture(params=RELEASES, ids=lambda folder: folder.name)
def release(request):
    return request.param


def test_a_program_of_a_release_runs(release):
    program = BUILT / f"abi-{release.name}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENREG_")}
    done = subprocess.run([program], capture_output=True, text=True, env=kept, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"built with {release.name}.")


def test_the_layout_of_a_release_holds(release, tmp_path):
    headers = Headers(release, tmp_path)
    assert {"orLaunch", "orDeviceFactory", "orCacheStats", "orFault"} <= set(headers.structures)
    assert "queued" in headers.structures["orLaunch"] and "orErrorDeviceLost" in headers.constants
    assert layout_differences(release, CURRENT, tmp_path) == {}


def test_the_functions_of_a_release_are_there(release, tmp_path):
    assert len(Headers(release, tmp_path).functions) > 100
    assert declared_again(release, CURRENT, tmp_path) == ""


@pytest.mark.parametrize(
    "old, new",
    [
        ("size_t args_size;", "uint32_t args_size;"),  # elsewhere
        ("  int index;\n", "  int index;\n  int more;\n"),  # gone
        ('X(orErrorInvalidValue, "invalid argument")', ""),  # another number
        ("#define OR_MAX_ARGS 65536u", "#define OR_MAX_ARGS 65535u"),
        ("  uint64_t start_ns;", "  uint64_t start_ns, more;"),  # another size, which nobody tells
    ],
)
def test_what_does_not_hold_is_found(tmp_path, old, new):
    other = tmp_path / "other"
    other.mkdir()
    for header in CURRENT.glob("*.h"):
        (other / header.name).write_text(header.read_text().replace(old, new))
    assert old in (CURRENT / "openreg.h").read_text()
    assert layout_differences(other, CURRENT, tmp_path) != {}


def test_a_structure_that_tells_its_size_may_grow(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for header in CURRENT.glob("*.h"):
        text = re.sub(r"  int \*queued;.*\n", "", header.read_text())
        (other / header.name).write_text(text)
    assert "queued" not in Headers(other, tmp_path).structures["orLaunch"]
    assert layout_differences(other, CURRENT, tmp_path) == {}


@pytest.mark.parametrize(
    "old, new",
    [
        ("orStreamCreate(orStream_t *stream);", "orStreamCreate(orStream_t *stream, int flags);"),
        ("orStreamCreate(orStream_t *stream);", "orStreamNoLonger(orStream_t *stream);"),
    ],
)
def test_a_function_that_is_another_is_found(tmp_path, old, new):
    other = tmp_path / "other"
    other.mkdir()
    for header in CURRENT.glob("*.h"):
        (other / header.name).write_text(header.read_text().replace(old, new))
    assert declared_again(other, CURRENT, tmp_path) != ""
