"""C++ of a Triton kernel: what a task of a stream calls, and what tells its addresses alone."""

import platform
from dataclasses import dataclass
from pathlib import Path

from . import collectives, control, elementwise, memory, views
from .borrowed import Borrowed
from .emitter import Emitter
from .expressions import Scalar
from .facts import ACCESSES, Facts
from .operations import OPERATIONS
from .ttir import Module
from .types import c_type, is_float

# -fno-tree-loop-distribute-patterns: g++ 12 makes a wrong store of a masked load in a branch.
# -ffp-contract=off: a product is rounded before it is added, as in eager PyTorch.
# -fwrapv: integers wrap. Tensors may have the memory of others of another type.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-march=native",
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-tree-loop-distribute-patterns",
    "-w",
    "-I",
    str(Path(__file__).parent),
]

assert collectives and control and elementwise and memory and views  # they fill OPERATIONS


@dataclass(frozen=True)
class Argument:
    """An argument of the kernel. A pointer's element is that of what it points to."""

    kind: str  # "pointer", "float" or "integer"
    reads: bool
    writes: bool
    element: str
    name: str


@dataclass(frozen=True)
class Source:
    """`sites`: the file, line and column of each access, by the number that the trace tells.
    `reached`: the positions of the arguments that it may access, and whether it reads and writes
    there.
    `data_dependent`: those whose address, mask or control depends on loaded data -> the sites of
    the loads."""

    name: str
    run: str
    trace: str
    arguments: list
    sites: list
    reached: list
    data_dependent: dict

    @property
    def asserts(self):
        """Whether a launch may fail."""
        return "failure->" in self.run or "follow(" in self.run


def generate(text):
    """The C++ of the TTIR of one kernel. Raises NotImplementedError for what has none."""
    module = Module(text)
    facts = Facts(module)
    kernel = module.kernel
    arguments = []
    for position, argument in enumerate(kernel.regions[0][0].arguments):
        element, name = argument.type.element, argument.name.removeprefix("%")
        if element.startswith("*"):
            arguments.append(Argument("pointer", *facts.uses_of(position), element[1:], name))
        else:
            kind = "float" if is_float(element) else "integer"
            arguments.append(Argument(kind, False, False, element, name))
    run = _Writer(module, facts, arguments, trace=False)
    trace = _Writer(module, facts, arguments, trace=True)
    return Source(
        kernel.text,
        run.source(),
        trace.source(),
        arguments,
        [op.location for op in facts.accesses],
        [(facts.reached(op), *facts.does(op)) for op in facts.accesses],
        {
            site: frozenset(map(facts.accesses.index, facts.dependent[op]))
            for site, op in enumerate(facts.accesses)
            if op in facts.dependent
        },
    )


_RUN = """#include "kernel.h"

static void run(void *const *pointers, const int64_t *numbers, char *__restrict scratch,
                const int32_t *program, const int32_t *programs, Failure *failure) {{
{body}
}}

extern "C" void openreg_entry(void *const *pointers, const int64_t *numbers) {{
  const int64_t *grid = numbers + {n};
  const int32_t sizes[3] = {{(int32_t)grid[0], (int32_t)grid[1], (int32_t)grid[2]}};
  const int64_t count = (int64_t)sizes[0] * sizes[1] * sizes[2];
  const Order order(count, grid[3]);
  Failure failure;
{parallel}  {{
    char *memory = scratch({scratch});
{loop}    for (int64_t at = 0; at < count; ++at) {{
      const int64_t i = order[at];
      const int32_t program[3] = {{(int32_t)(i % sizes[0]), (int32_t)(i / sizes[0] % sizes[1]),
                                  (int32_t)(i / sizes[0] / sizes[1])}};
      run(pointers, numbers, memory, program, sizes, &failure);
    }}
  }}
  if (failure.text != nullptr) std::__throw_runtime_error(failure.text);
}}
"""

_TRACE = """#include "trace.h"

static void run(void *const *pointers, const int64_t *numbers, char *__restrict scratch,
                const int32_t *program, const int32_t *programs, Record *record) {{
{body}
}}

extern "C" void openreg_trace(void *const *pointers, const int64_t *numbers, Record *record) {{
  const int64_t *grid = numbers + {n};
  const int32_t sizes[3] = {{(int32_t)grid[0], (int32_t)grid[1], (int32_t)grid[2]}};
  const int64_t count = (int64_t)sizes[0] * sizes[1] * sizes[2];
  char *memory = scratch({scratch});
  for (record->program = 0; record->program < count && !record->stop; ++record->program) {{
    const int64_t i = record->program;
    const int32_t program[3] = {{(int32_t)(i % sizes[0]), (int32_t)(i / sizes[0] % sizes[1]),
                                (int32_t)(i / sizes[0] / sizes[1])}};
    run(pointers, numbers, memory, program, sizes, record);
  }}
}}
"""


class _Writer(Emitter):
    def __init__(self, module, facts, arguments, trace):
        super().__init__(trace)
        self.functions, self._facts, self._kernel = module.functions, facts, module.kernel
        self._arguments = arguments
        self.needed, self.is_widened = facts.needed, facts.is_widened
        self.labels, self.borrowed = {}, None
        self.serial = False  # whether one thread runs all programs: the task's own

    def source(self):
        try:
            numbers = self._parameters()
        except NotImplementedError as error:
            raise _located(self._kernel, self._kernel, error) from None
        self.function(self._kernel)
        body = "\n".join(["  " + line for line in self.declarations] + self.lines)
        parallel = loop = ""
        if not self.serial:
            parallel = "#pragma omp parallel if (count > 1 && grid[3] == 0)\n"
            loop = "#pragma omp for schedule(static)\n"
        form = _TRACE if self.trace else _RUN
        return form.format(
            body=body, n=numbers, scratch=self.scratch + 64, parallel=parallel, loop=loop
        )

    def _parameters(self):
        pointers = numbers = 0
        for value, argument in zip(
            self._kernel.regions[0][0].arguments, self._arguments, strict=False
        ):
            element = value.type.element
            if argument.kind == "pointer":
                text = f"({c_type(element)})pointers[{pointers}]"
                pointers += 1
            else:
                text = f"numbers[{numbers}]"
                text = f"bits<double>({text})" if argument.kind == "float" else text
                text = f"({c_type(element)}){text}"
                numbers += 1
            self.values[value] = self.scalar(element, text)
        return numbers

    def function(self, function):
        """Writes the blocks of the kernel."""
        for block in self._labelled(function.regions[0]):
            if block.terminator.name == "tt.return":
                self.line("return;")

    def called(self, op, arguments, targets):
        """Writes a region here that is called with arguments. A return assigns to the targets."""
        region, end = op.regions[0], self.fresh("end")
        self.values.update(zip(region[0].arguments, arguments, strict=False))
        inner, self._inner = self._inner, 0  # jumps must not cross definitions
        for block in self._labelled(region):
            last = block.terminator
            if last.name.endswith("return"):
                values = [self.values.get(operand) for operand in last.operands]
                control.assign(self, targets, values, [operand.type for operand in last.operands])
                self.line(f"goto {end};")
        self._inner = inner
        self.line(f"{end}:;")

    def _labelled(self, region):
        """Writes blocks with their labels, and yields each before what follows it."""
        outer, self.labels = self.labels, {}
        for block in region[1:]:
            variables = [control.variable(self, argument) for argument in block.arguments]
            kinds = [argument.type for argument in block.arguments]
            self.values.update(zip(block.arguments, variables, strict=False))
            self.labels[block.label] = self.fresh("block"), variables, kinds
        for at, block in enumerate(region):
            if at:
                self.line(f"{self.labels[block.label][0]}:;")
            self.block(block)
            yield block
        self.labels = outer

    def wanted(self, value):
        return not self.trace or value in self.needed

    def block(self, block):
        outer, self.borrowed = self.borrowed, Borrowed(self, block)
        for number, op in enumerate(block.operations):
            if self._skipped(op):
                continue
            self.borrowed.begin(number)
            try:
                handler = OPERATIONS.get(op.name)
                if handler is None:
                    raise NotImplementedError(f"operation {op.name}")
                handler(self, op)
            except NotImplementedError as error:
                raise _located(self._kernel, op, error) from None
        self.borrowed = outer

    def _skipped(self, op):
        """In a trace, what no address needs and what tells none."""
        if not self.trace or op.regions or op.name in ACCESSES or op.name.startswith("cf."):
            return (
                self.trace
                and op.name in ("tt.reduce", "tt.scan", "tt.map_elementwise")
                and not (set(op.results) & self.needed)
            )
        return op.name != "tt.call" and not set(op.results) & self.needed

    def inline(self, block, names):
        """The operations of a region on scalars; gives the texts of its results."""
        for argument, name in zip(block.arguments, names, strict=False):
            self.values[argument] = Scalar(argument.type.element, name)
        self._inner += 1
        self.block(block)
        self._inner -= 1
        return [self.text(self.values[operand]) for operand in block.terminator.operands]

    def site(self, op):
        return self._facts.accesses.index(op)

    def loads_of(self, op):
        """The sites of the loads that an access depends on."""
        return sorted(map(self.site, self._facts.dependent.get(op, ())))

    @property
    def pointers(self):
        """How many arguments are pointers."""
        return sum(argument.kind == "pointer" for argument in self._arguments)

    def writes(self, number):
        """Whether the kernel writes its pointer argument of that number; all may be number -1."""
        pointers = [argument for argument in self._arguments if argument.kind == "pointer"]
        given = pointers if number < 0 else pointers[number : number + 1]
        return any(argument.writes for argument in given)

    def argument_of(self, pointer):
        """The number, among pointers, of the argument that the pointer comes from, or -1."""
        position = self._facts.root(pointer)
        if position is None:
            return -1
        return sum(argument.kind == "pointer" for argument in self._arguments[:position])


def _located(kernel, op, error):
    """The error with the kernel's name and the operation's place, once."""
    if str(error).startswith(f"{kernel.text} ("):
        return error
    return NotImplementedError(f"{kernel.text} ({op.location[0]}:{op.location[1]}): {error}")
