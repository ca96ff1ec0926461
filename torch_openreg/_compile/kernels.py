"""Adapts the C++ source of Inductor's CPU kernels to a worker, and compiles it."""

import ctypes
import itertools
import re
from typing import ClassVar

from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache, LambdaFuture

from .. import _C

_ENTRY = "openreg_entry"


def roles(source, kinds):
    """The kernel's use of each argument, for _C._CompiledKernel."""
    declared = source[source.index("(", source.index('extern "C"')) + 1 :].partition(")")[0]
    names = [definition.split()[-1] for definition in declared.split(",")]

    def role(name, kind):
        if not kind.endswith("*"):
            return "f" if "float" in kind or "double" in kind else "n"
        if kind.startswith("const "):
            return "r"
        return "b" if "in_out_ptr" in name else "w"

    return "".join(map(role, names, kinds))


def with_entry(source, kinds, roles):
    """The source of a kernel, whose arguments have the C++ types `kinds` and these roles, with an
    additional function through which every kernel is called."""
    pointers, numbers = itertools.count(), itertools.count()

    def value(role):
        if role == "n":
            return f"numbers[{next(numbers)}]"
        if role == "f":
            return f"c10::bit_cast<double>(numbers[{next(numbers)}])"
        return f"pointers[{next(pointers)}]"

    given = ", ".join(f"static_cast<{k}>({value(r)})" for k, r in zip(kinds, roles, strict=True))
    return (
        f'{source}\nextern "C" void {_ENTRY}(void *const *pointers, const int64_t *numbers) {{\n'
        f"    kernel({given});\n}}\n"
    )


# For loops, whose work OpenMP divides; a template's is divided by the number.
_THREADS = re.compile(r"num_threads\((\d+)\)(?=\s*\{\s*int tid = omp_get_thread_num)")
# What threads share: the body of loops, some of them collapsed, or one block.
_SHARED = re.compile(
    r"^[ \t]*#pragma omp (?:single|(?:parallel )?for(?:[^\n]*collapse\((\d+)\))?)[^\n]*\n", re.M
)
_LOOP = re.compile(r"\s*\{?\s*for *\([^\n]*\)\s*(?=\{)")
_DIVIDES = re.compile(r"\b(?:floor_divide_integral|remainder_integral|mod)\(")
# A division by zero is stored where this variable points, one for the whole process, although
# kernels run concurrently. It stays null, so that the division throws as other checks do.
_DIVISIONS = re.compile(r"^.*inductor_cpu_(?:integer_div_error|throw_if_integer).*\n", re.M)


def _end_of_block(source, start):
    depth = 0
    for match in re.finditer(r"[{}]", source[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start + match.end()
    raise AssertionError("a block without its end")


def _body_of(source, shared):
    """The start of the block that one thread runs at a time, after its loops."""
    at = shared.end()
    if shared[0].rstrip().endswith("single"):
        return source.index("{", at)
    for _ in range(int(shared[1] or 1)):
        at = _LOOP.match(source, at).end()
    return at


def catch_in_parallel(source):
    """An exception that leaves what OpenMP shares ends the process. So the first one that a check
    throws there is kept, and the kernel throws it."""
    throws = "TORCH_CHECK" in source or _DIVIDES.search(source)
    if not (throws and _SHARED.search(source)):
        return source
    begin = source.index("{", source.index('extern "C"')) + 1
    out, at = [source[:begin], "\nstd::mutex failing; std::exception_ptr failure;\n"], begin
    for shared in _SHARED.finditer(source, begin):
        if shared.start() < at:
            continue
        start = _body_of(source, shared)
        end = _end_of_block(source, start)
        out += [
            source[at:start],
            "{ try ",
            source[start:end],
            " catch (...) { std::lock_guard<std::mutex> one(failing);"
            " if (!failure) failure = std::current_exception(); } }",
        ]
        at = end
    end = _end_of_block(source, begin - 1) - 1
    out += [source[at:end], "if (failure) std::rethrow_exception(failure);\n", source[end:]]
    return "#include <exception>\n#include <mutex>\n" + "".join(out)


class _Libraries(CppCodeCache):
    """Compiled as the CPU's kernels are, with their header compiled once."""

    cache: ClassVar = {}
    cpp_compile_command_flags: ClassVar = CppPythonBindingsCodeCache.cpp_compile_command_flags
    _get_uncompiled_header = CppPythonBindingsCodeCache._get_uncompiled_header


_loaded = []  # libraries, which are never unloaded: tasks may be queued that call them


# By OpenMP, and in templates by PyTorch's pool.
_PARALLEL = re.compile(r"#\s*pragma omp parallel|\bparallel_for\(")


def load(name, threads, kinds, source):
    """Returns the kernel of that source, which is made for that number of threads and whose
    arguments have the C++ types `kinds`. Inductor's processes compile it, if there are any."""
    does, most = roles(source, kinds), threads if _PARALLEL.search(source) else 1
    source = _THREADS.sub(r"num_threads(std::min<int>(\1, omp_get_max_threads()))", source)
    source = with_entry(catch_in_parallel(_DIVISIONS.sub("", source)), kinds, does)
    # Otherwise Inductor waits for no future, and `submit` would wait for the lock that load_async
    # holds.
    beside = get_compile_threads() > 1
    own = ("-fno-gnu-unique",) if _DIVIDES.search(source) else ()  # not the CPU kernels' variable
    get = _Libraries.load_async(
        source, submit_fn=AsyncCompile.submit if beside else None, extra_flags=own
    )

    def made():
        library = get()
        _loaded.append(library)
        entry = ctypes.cast(getattr(library, _ENTRY), ctypes.c_void_p).value
        return _C._CompiledKernel(entry, name, does, most)

    return LambdaFuture(made) if beside else made()
