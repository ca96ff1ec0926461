"""Reads TTIR, the text that Triton's front end makes of a kernel, into operations and values.

The text is read, and not Triton's Python objects, because those hold no location for operations
without results and print no attribute that is not asked for by its name.
"""

import re
from dataclasses import dataclass, field

NAME = r"%[\w.$-]+(?:#\d+)?"
_RESULTS = re.compile(rf"((?:{NAME}(?::\d+)?(?:, )?)+) = ")
_OPENERS, _CLOSERS = "<({[", ">)}]"


@dataclass(frozen=True)
class Type:
    """A scalar's or a tensor's type. A pointer's element begins with a star for each level."""

    element: str
    shape: tuple = None

    @property
    def is_tensor(self):
        return self.shape is not None

    @property
    def size(self):
        size = 1
        for length in self.shape or ():
            size *= length
        return size

    def of(self, element):
        return Type(element, self.shape)

    def pointee(self):
        return Type(self.element[1:], self.shape)


@dataclass(eq=False)
class Value:
    name: str
    type: Type
    operation: "Operation" = None
    index: int = 0
    uses: int = 0


@dataclass(eq=False)
class Operation:
    """One operation. `text` is what stands between its name and its types."""

    name: str
    operands: list
    location: tuple
    text: str = ""
    attributes: dict = field(default_factory=dict)
    results: list = field(default_factory=list)
    regions: list = field(default_factory=list)
    successors: list = field(default_factory=list)
    strings: list = field(default_factory=list)
    operand_types: list = field(default_factory=list)

    def string(self, attribute):
        return self.strings[int(self.attributes[attribute].strip('"'))]

    def walk(self):
        for region in self.regions:
            for block in region:
                for operation in block.operations:
                    yield operation
                    yield from operation.walk()


@dataclass(eq=False)
class Block:
    label: str
    arguments: list = field(default_factory=list)
    operations: list = field(default_factory=list)

    @property
    def terminator(self):
        return self.operations[-1]


def split(text):
    """The parts of a list that commas separate outside all brackets."""
    parts, depth, part = [], 0, ""
    for at, letter in enumerate(text):
        arrow = letter == ">" and text[at - 1 : at] == "-"
        depth += (letter in _OPENERS) - (letter in _CLOSERS and not arrow)
        if letter == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += letter
    return [*parts, part.strip()] if part.strip() else parts


def parse_type(text):
    text = text.strip()
    if text.startswith("tensor<"):
        body, shape = split(text[len("tensor<") : -1])[0], []
        while dimension := re.match(r"(\d+)x", body):
            shape.append(int(dimension[1]))
            body = body[dimension.end() :]
        return Type(parse_type(body).element, tuple(shape))
    if text.startswith("!tt.ptr<"):
        return Type("*" + parse_type(split(text[len("!tt.ptr<") : -1])[0]).element)
    return Type(text)


def parse_types(text):
    text = text.strip()
    inner = text[1:-1] if text.startswith("(") else text
    return [parse_type(part) for part in split(inner)]


_NOWHERE = "", 0, 0


class Locations:
    """The file, line and column of an operation: those of the innermost call that is not in
    Triton's own files."""

    def __init__(self, text):
        self._aliases = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M))

    def resolve(self, location):
        while location in self._aliases:
            location = self._aliases[location]
        if place := re.match(r'"(.*?)":(\d+):(\d+)', location):
            return place[1], int(place[2]), int(place[3]) - 1
        if call := re.match(r"callsite\((.*) at (.*)\)$", location):
            inner = self.resolve(call[1])
            if inner[0] and "/triton/language/" not in inner[0]:
                return inner
            return self.resolve(call[2])
        if named := re.match(r'".*?"\((.*)\)$', location):
            return self.resolve(named[1])
        return _NOWHERE


def _take_locations(line):
    """The line without its locations, and them."""
    rest, locations, at = "", [], 0
    for found in re.finditer(r"(?<=[ (,])loc\(", line):
        if found.start() < at:
            continue
        end, depth = found.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            end += 1
        locations.append(line[found.end() : end - 1])
        rest += line[at : found.start()].rstrip()
        at = end
    return (rest + line[at:]).strip(), locations


def _attributes(text):
    pairs = (re.match(r"([\w.]+)(?: = (.*?))?(?: : [\w<>.!]+)?$", part) for part in split(text))
    return {pair[1]: pair[2] for pair in pairs if pair}


_ENDS = ("cf.", "tt.return", "scf.yield", "scf.condition")
_ENDS += ("tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return", "ub.unreachable")


def _unescaped(found):
    return "\\" if found[1] == "\\" else chr(int(found[1], 16))


class Module:
    """The functions of a module: the kernel, which is public, and those that it calls."""

    def __init__(self, text):
        self._locations = Locations(text)
        self._lines = [
            line.strip() for line in text.splitlines() if line.strip() and line[0] != "#"
        ]
        self._at = 0
        self.functions = {}
        while self._at < len(self._lines):
            line, locations = _take_locations(self._lines[self._at])
            self._at += 1
            if line.startswith("tt.func"):
                function = self._function(line, locations)
                self.functions[function.text] = function
        public = [f for f in self.functions.values() if "private" not in f.attributes]
        self.kernel = public[0]

    def _function(self, line, locations):
        head = re.match(r'tt\.func (public |private )?@([\w$.]+|"[^"]*")\(', line)
        end, depth = head.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            end += 1
        scope, block = {}, Block("entry")
        for argument in split(line[head.end() : end - 1]):
            name, _, kind = argument.partition(": ")
            block.arguments.append(self._define(scope, name, re.sub(r"\s*\{.*", "", kind)))
        attributes = {head[1].strip(): None} if head[1] else {}
        results = re.match(r"\s*-> (.*?)(?: attributes.*)?\{$", line[end:])
        function = Operation("tt.func", [], _NOWHERE, head[2], attributes)
        function.operand_types = parse_types(results[1]) if results else []
        function.location = self._place(locations)
        function.regions = [self._region(scope, [block])]
        return function

    def _place(self, locations):
        return self._locations.resolve(locations[-1]) if locations else _NOWHERE

    def _define(self, scope, name, kind, operation=None, index=0):
        kind = kind if isinstance(kind, Type) else parse_type(kind)
        value = scope[name] = Value(name, kind, operation, index)
        return value

    def _use(self, scope, name):
        value = scope[name]
        value.uses += 1
        return value

    def _region(self, outer, blocks):
        """Reads up to the line that closes the region, and leaves that line to the caller."""
        scope = dict(outer)
        while True:
            line, locations = _take_locations(self._lines[self._at])
            if line.startswith("}"):
                if not blocks:
                    blocks.append(Block(""))
                last = blocks[-1].operations
                if not last or not last[-1].name.startswith(_ENDS):  # an empty yield is not printed
                    last.append(Operation("scf.yield", [], _NOWHERE))
                return blocks
            self._at += 1
            if label := re.match(r"\^(\w+)(?:\((.*)\))?:", line):
                block = Block(label[1])
                for argument in split(label[2] or ""):
                    name, _, kind = argument.partition(":")
                    block.arguments.append(self._define(scope, name.strip(), kind))
                blocks.append(block)
                continue
            if not blocks:
                blocks.append(Block(""))
            blocks[-1].operations.append(self._operation(line, self._place(locations), scope))

    def _operation(self, line, location, scope):
        names = []
        if results := _RESULTS.match(line):
            for name in results[1].split(", "):
                base, _, count = name.partition(":")
                names += [f"{base}#{i}" for i in range(int(count))] if count else [base]
            line = line[results.end() :]
        head = re.match(r'"?([\w.]+)"?\s*', line)
        operation = Operation(head[1], [], location)
        reader = _READERS.get(head[1], Module._plain)
        try:
            types = reader(self, operation, line[head.end() :], scope)
        except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
            raise NotImplementedError(f"TTIR of another form: {line}") from error
        if len(types) == 1:  # tt.split names the type of its two results once
            types = types * len(names)
        if len(types) < len(names):
            raise NotImplementedError(f"TTIR of another form: {line}")
        for index, name in enumerate(names):
            operation.results.append(self._define(scope, name, types[index], operation, index))
        return operation

    def _uses(self, operation, text, scope):
        operation.operands += [self._use(scope, name) for name in re.findall(NAME, text)]

    def _body(self, operation, scope, arguments=()):
        """Reads a region that begins behind the current line, and the line that closes it."""
        inner = dict(scope)
        blocks = []
        if arguments:
            blocks = [Block("", [self._define(inner, *argument) for argument in arguments])]
        operation.regions.append(self._region(inner, blocks))
        line, _ = _take_locations(self._lines[self._at])
        self._at += 1
        return line

    def _scf_for(self, operation, rest, scope):
        head = re.match(
            rf"(unsigned )?({NAME}) = ({NAME}) to ({NAME}) step ({NAME})\s*"
            r"(?:iter_args\((.*?)\) -> \((.*)\))?\s*(?:: (\w+))?\s*\{$",
            rest,
        )
        operation.text = (head[1] or "").strip()
        pairs = [pair.split(" = ") for pair in split(head[6] or "")]
        types = [parse_type(part) for part in split(head[7] or "")]
        self._uses(operation, " ".join(head.group(3, 4, 5)), scope)
        self._uses(operation, " ".join(initial for _, initial in pairs), scope)
        carried = [(name, kind) for (name, _), kind in zip(pairs, types, strict=False)]
        self._body(operation, scope, [(head[2], head[8] or "i32"), *carried])
        return types

    def _scf_if(self, operation, rest, scope):
        head = re.match(rf"({NAME})\s*(?:-> \((.*)\))?\s*\{{$", rest)
        self._uses(operation, head[1], scope)
        if self._body(operation, scope).startswith("} else"):
            self._body(operation, scope)
        return parse_types(head[2] or "")

    def _scf_while(self, operation, rest, scope):
        head = re.match(r"(?:\((.*?)\))?\s*: \((.*?)\) -> (.*?) \{$", rest)
        pairs = [pair.split(" = ") for pair in split(head[1] or "")]
        self._uses(operation, " ".join(initial for _, initial in pairs), scope)
        carried = [
            (name, kind) for (name, _), kind in zip(pairs, parse_types(head[2]), strict=False)
        ]
        self._body(operation, scope, carried)
        self._body(operation, scope)
        return parse_types(head[3])

    def _arith_constant(self, operation, rest, scope):
        rest = re.sub(r"^\{[^{}]*\} ", "", rest)
        operation.text, _, kind = rest.partition(" : ")
        return [parse_type(kind or "i1")]

    def _cf_br(self, operation, rest, scope):
        for label, arguments in re.findall(r"\^(\w+)(?:\((.*?) : [^)]*\))?", rest):
            values = [self._use(scope, name) for name in re.findall(NAME, arguments)]
            operation.successors.append((label, values))
        return []

    def _cf_cond_br(self, operation, rest, scope):
        condition, _, targets = rest.partition(",")
        self._uses(operation, condition, scope)
        return self._cf_br(operation, targets, scope)

    def _plain(self, operation, rest, scope):
        def keep(found):
            operation.strings.append(re.sub(r"\\([0-9A-F]{2}|\\)", _unescaped, found[1]))
            return f'"{len(operation.strings) - 1}"'

        if rest.endswith("{") and not rest.endswith("({"):
            raise NotImplementedError(f"operation {operation.name}")
        rest = re.sub(r'"((?:[^"\\]|\\.)*)"', keep, rest)
        if rest.endswith("({"):  # the generic form of operations with a region
            inputs, _, attributes = rest[:-2].partition("<{")
            operation.attributes = _attributes(attributes.partition("}>")[0])
            self._uses(operation, inputs, scope)
            closing = self._body(operation, scope)
            _closed, locations = _take_locations(self._lines[self._at - 1])
            operation.location = self._place(locations)
            return parse_types(closing.rpartition(" -> ")[2])
        if found := re.search(r"<?\{([^{}]*)\}>?", rest):
            operation.attributes = _attributes(found[1])
            rest = rest[: found.start()] + rest[found.end() :]
        typed = " : " in rest  # an operation without operands may have an arrow alone
        operation.text, _, kinds = rest.rpartition(" : ") if typed else rest.partition(" -> ")
        if rest.startswith(": "):
            operation.text, kinds = "", rest[2:]
        self._uses(operation, operation.text, scope)
        return self._result_types(operation, kinds)

    def _result_types(self, operation, kinds):
        name, operands = operation.name, [operand.type for operand in operation.operands]
        if " -> " in kinds:
            return parse_types(kinds.rpartition(" -> ")[2])
        if " to " in kinds:
            return [parse_type(kinds.rpartition(" to ")[2])]
        if name in ("arith.cmpi", "arith.cmpf"):
            return [operands[0].of("i1")]
        if name in ("tt.load", "tt.atomic_load"):
            return [operands[0].pointee()]
        if name == "arith.select":
            return [operands[1]]
        if not operands:
            return parse_types(kinds) if kinds else []
        if name.endswith("_extended"):
            return [operands[0], operands[0].of("i1") if "ui_" in name else operands[0]]
        return [operands[0]]


_READERS = {
    "scf.for": Module._scf_for,
    "scf.if": Module._scf_if,
    "scf.while": Module._scf_while,
    "arith.constant": Module._arith_constant,
    "cf.br": Module._cf_br,
    "cf.cond_br": Module._cf_cond_br,
}
