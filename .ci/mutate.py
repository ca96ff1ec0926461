"""Changes the C core in one place at a time and lists the changes that no C test notices.

`make mutate FILES="worker host_wait" SAMPLE=100 SEED=1` runs it. A mutant flips a comparison,
weakens a memory order, exchanges a logical operator, adds 1 to a constant or takes it away, or
skips an early return. Only its object is compiled and the core linked. The tests that enter the
mutated function run, the file's own first, until one fails. Nothing in the source tree is written.

A mutant is one of
  killed    a test failed, or ran for far longer than it should
  survived  every test passed that fits into LIMIT seconds
  unentered no test enters the function
  same      the compiler makes the same code of it (of most weaker orders, on x86)
  invalid   it does not compile

interval_tree.c is compiled into its test as well, where it is not mutated. Headers are not mutated.

Results are lines of JSON in build/mutate/results.jsonl. A mutant that is there is not run again
while its function's text is the same, so a run continues where it was stopped. AGAIN=1 runs those
again that no test killed, for use after tests have been written.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

TOKEN = re.compile(
    r"""(?P<comment>/\*.*?\*/|//[^\n]*)
    |(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<number>\b(?:0[xX][0-9a-fA-F]+|[0-9]+)[uUlL]*\b)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<sign>->|\+\+|--|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\.\.\.|[^\s])""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
LOGICAL = {"&&": "||", "||": "&&", "!": ""}
ORDERS = {
    "memory_order_seq_cst": "memory_order_relaxed",
    "memory_order_acq_rel": "memory_order_relaxed",
    "memory_order_acquire": "memory_order_relaxed",
    "memory_order_release": "memory_order_relaxed",
}
LEAVING = ("return", "break", "continue", "goto")
# A failed assertion reads no result: a mutant inside one shows nothing.
ASSERTIONS = ("OR_ASSERT", "orMutexAssertHeld", "_Static_assert")


class Token:
    def __init__(self, match):
        self.kind, self.text = match.lastgroup, match.group()
        self.start, self.end = match.span()


def tokens_of(source):
    found = (Token(match) for match in TOKEN.finditer(source))
    return [token for token in found if token.kind not in ("comment", "directive")]


def closing(tokens, at):
    """The index of the parenthesis or brace that closes the one at `at`."""
    depth = 0
    for i in range(at, len(tokens)):
        if tokens[i].text in ("(", "{"):
            depth += 1
        elif tokens[i].text in (")", "}"):
            depth -= 1
            if depth == 0:
                return i
    raise ValueError(f"nothing closes {tokens[at].text} at {tokens[at].start}")


def name_of(tokens, begin, brace):
    """The function whose body opens at `brace`, or None where it is no function."""
    i = begin
    while i < brace:
        if tokens[i].text == "__attribute__":
            i = closing(tokens, i + 1)
        elif tokens[i].text == "(":
            return tokens[i - 1].text
        i += 1
    return None


def functions_of(tokens):
    """(name, index of the first token, index after the last) of each definition at the top."""
    begin = i = 0
    while i < len(tokens):
        if tokens[i].text == "(":
            i = closing(tokens, i)
        elif tokens[i].text == "{":
            end = closing(tokens, i)
            is_function = tokens[i - 1].text == ")"
            name = name_of(tokens, begin, i) if is_function else None
            if is_function:
                yield name, begin, end + 1
                begin = end + 1
            i = end
        elif tokens[i].text == ";":
            yield None, begin, i + 1
            begin = i + 1
        i += 1


def numbers(text):
    digits = text.rstrip("uUlL")
    suffix = text[len(digits) :]
    value = int(digits, 16 if digits[:2] in ("0x", "0X") else 10)
    yield "constant", f"{value + 1}{suffix}"
    if value > 0:
        yield "constant", f"{value - 1}{suffix}"


def changes_of(tokens, i):
    """(operator, replacement) of a token, for changes of that token alone."""
    token = tokens[i]
    if token.text in COMPARISONS:
        yield "comparison", COMPARISONS[token.text]
    elif token.text in LOGICAL:
        yield "logical", LOGICAL[token.text]
    elif token.text in ORDERS:
        yield "order", ORDERS[token.text]
    elif token.kind == "number":
        yield from numbers(token.text)
    elif token.text == "OR_TRY":
        yield "return", "(void)"


def mutants_of(path):
    source = path.read_text()
    tokens = tokens_of(source)
    for name, begin, end in functions_of(tokens):
        first = tokens[begin].start
        body = source[first : tokens[end - 1].end]
        place = hashlib.sha1(f"{path.stem}\n{body}".encode()).hexdigest()[:12]
        i = begin
        while i < end:
            token = tokens[i]
            if token.text in ASSERTIONS:
                i = closing(tokens, i + 1) + 1
                continue
            found = [(kind, token.start, token.end, new) for kind, new in changes_of(tokens, i)]
            if token.text == "if":
                close = closing(tokens, i + 1)
                if tokens[close + 1].text in LEAVING:
                    start, stop = tokens[i + 1].start, tokens[close].end
                    found.append(("return", start, stop, f"({source[start:stop]} && 0)"))
            for kind, start, stop, new in found:
                line = source.count("\n", 0, start) + 1
                yield {
                    "id": f"{place}-{start - first}-{new}",
                    "file": path.stem,
                    "function": name,
                    "line": line,
                    "operator": kind,
                    "old": source[start:stop],
                    "new": new,
                    "text": source.splitlines()[line - 1].strip(),
                    "start": start,
                    "stop": stop,
                }
            i += 1


# ---- Building ----


class Build:
    """The core's objects, and one core at a time beside the tests that use it."""

    def __init__(self, options):
        self.options = options
        self.folder = Path("build/mutate")
        self.objects = self.folder / "core"
        self.programs = self.folder / "run"
        for folder in (self.objects, self.programs):
            folder.mkdir(parents=True, exist_ok=True)
        self.environment = dict(os.environ, CCACHE_DISABLE="1")

    def compile(self, source, path, result):
        """False if it does not compile. Objects differ only if the code does."""
        text = f'#line 1 "{path}"\n{source}'
        command = [*shlex.split(self.options.compile), "-x", "c", "-c", "-", "-o", result]
        done = subprocess.run(
            command, input=text.encode(), stderr=subprocess.DEVNULL, env=self.environment
        )
        return done.returncode == 0

    def compile_file(self, path, result, *flags):
        command = [*shlex.split(self.options.compile), *flags, "-c", path, "-o", result]
        subprocess.run(command, check=True, env=self.environment)

    def link(self, objects, result):
        command = [*shlex.split(self.options.link), *objects, "-o", result, "-pthread", "-ldl"]
        subprocess.run(command, check=True, env=self.environment)

    def prepare(self, sources):
        for path in sources:
            if not self.compile(path.read_text(), path, self.objects / f"{path.stem}.o"):
                sys.exit(f"{path} does not compile")
        for path in Path(self.options.tests).iterdir():
            if path.is_file() and os.access(path, os.X_OK) and path.name != self.options.core:
                shutil.copy2(path, self.programs)
        self.install(None, None)

    def install(self, stem, mutant):
        objects = [
            mutant if path.stem == stem else path for path in sorted(self.objects.glob("*.o"))
        ]
        self.link(objects, self.programs / self.options.core)


# ---- Running tests ----


def limit_resources():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_test(build, name, seconds, **environment):
    """What went wrong, or None."""
    process = subprocess.Popen(
        [build.programs / "run-tests", name],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OPENREG_TEST_TIMEOUT_SCALE": "0", **environment},
        start_new_session=True,
        preexec_fn=limit_resources,
    )
    try:
        status = process.wait(timeout=seconds)
        return None if status in (0, 77) else f"status {status}"
    except subprocess.TimeoutExpired:
        return "time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def functions_entered(calls, table):
    data = calls.read_bytes() if calls.exists() else b""
    return {name for at, name in table.items() if at < len(data) and data[at]}


def symbols_of(library, stems):
    """(file, function) of each address in the core."""
    shown = subprocess.run(["nm", library], check=True, capture_output=True, text=True).stdout
    functions = [line.split() for line in shown.splitlines() if re.match(r"\w+ [tT] ", line)]
    lines = subprocess.run(
        ["addr2line", "-e", library],
        input="\n".join(address for address, _, _ in functions),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    found = {}
    for (address, _, name), line in zip(functions, lines, strict=False):
        stem = Path(line.split(":")[0]).stem
        if stem in stems:
            found[int(address, 16)] = f"{stem}:{name.split('.')[0]}"
    return found


def map_tests(build, sources):
    """The tests, with the functions that each enters and its time; kept in tests.json."""
    kept = build.folder / "tests.json"
    mark = hashlib.sha1()
    for path in [*sources, *sorted(Path("tests/c").glob("*.[ch]"))]:
        mark.update(path.read_bytes())
    if kept.exists():
        known = json.loads(kept.read_text())
        if known["mark"] == mark.hexdigest():
            return known["tests"]
    print("mapping the tests to the functions that they enter", flush=True)
    folder = build.folder / "calls"
    folder.mkdir(exist_ok=True)
    objects = []
    for path in [*sources, Path(__file__).with_name("calls.c")]:
        instrument = [] if path.name == "calls.c" else ["-finstrument-functions"]
        objects.append(folder / f"{path.stem}.o")
        build.compile_file(path, objects[-1], "-O0", "-g", *instrument)
    library = build.programs / build.options.core
    build.link(objects, library)
    table = symbols_of(library, {path.stem for path in sources})
    names = subprocess.run(
        [build.programs / "run-tests", "--list"], check=True, capture_output=True, text=True
    ).stdout.split()
    tests = {}
    for name in names:
        calls = folder / "calls"
        calls.unlink(missing_ok=True)
        run_test(build, name, 120, CALLS_FILE=str(calls.resolve()))
        tests[name] = {"enters": sorted(functions_entered(calls, table))}
    build.install(None, None)
    for name in names:
        started = time.monotonic()
        failed = run_test(build, name, 120)
        tests[name]["seconds"] = time.monotonic() - started
        if failed:
            print(f"left out, as it fails without a change: {name} ({failed})")
            del tests[name]
    kept.write_text(json.dumps({"mark": mark.hexdigest(), "tests": tests}))
    return tests


def homes(sources):
    """The file of each test."""
    found = {}
    for path in Path("tests/c").glob("*.c"):
        for name in re.findall(r"^TEST(?:_WITH_LIMIT)?\((\w+)", path.read_text(), re.MULTILINE):
            found[name] = path.stem
    return found


def tests_for(mutant, tests, home):
    """Those of the file's own name and those that killed others first, then the quick ones."""

    def rank(name):
        own = home.get(name, "").startswith(f"test_{mutant['file']}")
        test = tests[name]
        return (test["seconds"] > 0.5, -test.get("kills", 0), not own, test["seconds"])

    function = mutant["function"]
    entered = [
        name
        for name, test in tests.items()
        if not function or f"{mutant['file']}:{function}" in test["enters"]
    ]
    return sorted(entered, key=rank)


def judge(build, mutant, sources, tests, home):
    """The mutant's state, and the test that killed it."""
    path = sources[mutant["file"]]
    source = path.read_text()
    changed = source[: mutant["start"]] + mutant["new"] + source[mutant["stop"] :]
    result = build.folder / "mutant.o"
    if not build.compile(changed, path, result):
        return "invalid", None
    if result.read_bytes() == (build.objects / f"{path.stem}.o").read_bytes():
        return "same", None
    chosen = tests_for(mutant, tests, home)
    if not chosen:
        return "unentered", None
    build.install(path.stem, result)
    spent = 0
    for name in chosen:
        seconds = tests[name]["seconds"]
        if spent + seconds > build.options.limit:
            break
        spent += seconds
        failed = run_test(build, name, 3 + 10 * seconds)
        if failed:
            tests[name]["kills"] = tests[name].get("kills", 0) + 1
            return "killed", f"{name}: {failed}"
    return "survived", None


# ---- The whole ----


def read_results(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["id"]: result for result in map(json.loads, lines)}


def show(results):
    lively = [r for r in results if r["state"] in ("survived", "unentered")]
    for r in sorted(lively, key=lambda r: (r["file"], r["line"])):
        change = f"{r['old']} -> {r['new'] or 'nothing'}"
        print(f"{r['state']:9} {r['file']}.c:{r['line']} {r['operator']} {change}: {r['text']}")
    count = Counter(r["state"] for r in results)
    print(", ".join(f"{number} {state}" for state, number in sorted(count.items())))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", required=True, help="compiler and flags")
    parser.add_argument("--link", required=True, help="compiler and flags of the core")
    parser.add_argument("--core", required=True, help="the library's name")
    parser.add_argument("--tests", required=True, help="folder of the tests' programs")
    parser.add_argument("--files", default="", help="names of files without .c; all by default")
    parser.add_argument("--operators", default="", help="of these alone: comparison logical ...")
    parser.add_argument("--sample", type=int, help="this many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=30, help="seconds of tests for a mutant")
    parser.add_argument("--again", action="store_true", help="run those that survived again")
    return parser.parse_args()


def main():
    options = parse()
    build = Build(options)
    sources = {path.stem: path for path in sorted(Path("csrc/openreg").rglob("*.c"))}
    build.prepare(sources.values())
    tests = map_tests(build, sources.values())
    home = homes(sources)
    files = options.files.split() or list(sources)
    mutants = [mutant for file in files for mutant in mutants_of(sources[file])]
    if options.operators:
        mutants = [mutant for mutant in mutants if mutant["operator"] in options.operators]
    if options.sample:
        random.Random(options.seed).shuffle(mutants)
        mutants = mutants[: options.sample]
    kept = build.folder / "results.jsonl"
    known = read_results(kept)
    results = []
    with kept.open("a") as out:
        for number, mutant in enumerate(mutants):
            result = known.get(mutant["id"])
            repeat = options.again and result and result["state"] in ("survived", "unentered")
            if not result or repeat:
                state, by = judge(build, mutant, sources, tests, home)
                result = {**mutant, "state": state, "by": by}
                print(json.dumps(result), file=out, flush=True)
            results.append({**mutant, "state": result["state"]})
            if number % 50 == 49:
                print(f"{number + 1} of {len(mutants)}", flush=True)
    show(results)


if __name__ == "__main__":
    main()
