"""Sphinx directives: ``c-header``, a page's part from a C header, and ``pytest-options``.

The headers are written in one manner, which is all that is understood here. A comment belongs to
the declarations that follow it, up to an empty line or the next comment; one with an empty line
behind it is a paragraph; ``---- title ----`` begins a section. Names in comments become links, and
one that no header declares fails the build.
"""

import re
from pathlib import Path

from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

INCLUDE = Path(__file__).resolve().parent.parent / "csrc/openreg/include"
PIECE = re.compile(
    r"/\*(?P<comment>.*?)\*/"
    r"|^#define (?P<macro>(?:\\\n|[^\n])*)"
    r"|^#[^\n]*"
    r"|^(?P<declaration>(?!#|/\*|\}|extern|__)\w(?:/\*.*?\*/|\{(?:/\*.*?\*/|[^{}])*\}|[^;{}])*;)"
    r"|(?P<empty>\n(?=\n))",
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"^static inline ([^;{]*?) \{.*?^\}", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"-{3,} (.*?) -+$")
NAME = re.compile(r"`([^`]+)`|\b(or[A-Z]\w*|(?:OR|OPENREG)_[A-Z]\w*)|([*_|<])")


def text_of(comment):
    """A comment's text without its stars, as paragraphs of lines."""
    lines = [re.sub(r"^ *\* ?", "", line.rstrip()) for line in comment.split("\n")]
    return "\n".join(lines).strip("\n")


def linked(text):
    """Text as reStructuredText."""

    def link(match):
        code, name, mark = match.groups()
        if mark:
            return "\\" + mark
        if code:
            return f"``{code}``"
        return (f"``{name}``" if name.startswith("OPENREG_") else f":c:expr:`{name}`") + "\\ "

    return NAME.sub(link, text)


def paragraphs(comment):
    for paragraph in re.split(r"\n\s*\n", text_of(comment).strip()):
        if re.search(r"^  \w+   ", paragraph, re.MULTILINE):  # a list of words
            yield from ["::", "", *(f"   {line}" for line in paragraph.split("\n")), ""]
        else:
            yield from [linked(" ".join(line.strip() for line in paragraph.split("\n"))), ""]


def without_comments(text):
    return " ".join(re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).split())


def enumerators(body, lists):
    """(name, comment) of each; those of an X macro have its text."""
    for name in re.findall(r"(\w+)\(OR_X\)", body):
        yield from lists[name]
    body = re.sub(r"^#.*|^ *\w+\(OR_X\)", "", body, flags=re.MULTILINE)
    one = r"(?:/\*(.*?)\*/\s*)?\b((?:or|OR_)\w+(?: = \w+)?),?[ ]*(?:/\*(.*?)\*/)?"
    for above, name, behind in re.findall(one, body, re.DOTALL):
        yield name, above or behind


def described(declaration, lists):
    """(directive, what it declares, lines of its body)."""
    plain = without_comments(declaration)
    enum = re.match(r"(?:typedef )?enum ?(\w*) ?\{", plain)
    if enum:
        lines = []
        body = declaration[declaration.index("{") + 1 : declaration.rindex("}")]
        for name, comment in enumerators(body, lists):
            lines += [f".. c:enumerator:: {name}", ""]
            lines += [f"   {line}" for line in paragraphs(comment)]
        return "enum", enum[1] or f"@{lines[0].split()[2]}", lines
    struct = re.match(r"typedef struct (\w+) \{", plain)
    if struct:
        return "struct", struct[1], [".. code-block:: c", "", *code(declaration)]
    if plain.startswith("typedef"):
        return "type", re.sub(r"^typedef (struct \w+ (?=\w+;))?|;$", "", plain), []
    return "function", plain.removeprefix("OR_API ").rstrip(";"), []


def code(text):
    return [f"   {line}" for line in text.split("\n")] + [""]


def x_lists(text):
    """The lists of X macros: X(name, .., "text")."""
    lists = re.findall(r"#define (\w+)\(X\)((?:.*\\\n)*.*)", text)
    return {
        name: re.findall(r'X\((\w+),[^"]*"(.*?)"\)', body.replace("\\\n", ""))
        for name, body in lists
    }


class Header:
    """Turns a header into lines of reStructuredText."""

    def __init__(self, name):
        self.lines = [name, "-" * len(name), "", f".. code-block:: c\n\n   #include <{name}>", ""]
        self.comment, self.declared = None, []
        self.text = INLINE.sub(r"\1;", (INCLUDE / name).read_text())
        self.lists = x_lists(self.text)
        for match in PIECE.finditer(self.text):
            self.add(match)
        self.flush()
        written, functions = (
            "\n".join(self.lines),
            re.findall(r"^OR_API [^;(]*?(or\w+)\(", self.text, re.M),
        )
        missing = [function for function in functions if f"{function}(" not in written]
        if missing:
            raise ValueError(f"{name} is not understood: where are {', '.join(missing)}?")

    def add(self, match):
        if match["comment"] is not None:
            self.flush()
            section = SECTION.match(match["comment"].strip())
            if section:
                self.lines += [section[1], "^" * len(section[1]), ""]
            elif not re.match(r" clang-format| X\(", match["comment"]):
                self.comment = match["comment"]
        elif match["empty"] is not None:
            self.flush()
        elif match["macro"]:
            name = re.match(r"\w+(?:\([\w, ]+\))?", match["macro"])[0]
            if "_H" not in name and not re.match(r"OR_(API|X\b|QUOTED|JOIN)|.*\(X\)", name):
                self.declared.append(("macro", name, []))
        elif match["declaration"]:
            self.declared.append(described(match["declaration"], self.lists))

    def flush(self):
        """Writes what has been gathered: declarations of one kind have one comment."""
        text = list(paragraphs(self.comment)) if self.comment else []
        if not self.declared:
            self.lines += text
        for index, (kind, what, body) in enumerate(self.declared):
            follows = index and self.declared[index - 1][0] == kind
            if follows and not body and kind != "enum":
                self.lines.insert(self.at, f"{' ' * (len(kind) + 8)}{what}")
                self.at += 1
                continue
            self.lines += [f".. c:{kind}:: {what}"]
            self.at = len(self.lines)
            self.lines += ["", *(f"   {line}" for line in [*text, *body]), ""]
            text = []
        self.comment, self.declared = None, []


class CHeader(Directive):
    required_arguments = 1

    def run(self):
        return parsed(self, "\n".join(Header(self.arguments[0]).lines), self.arguments[0])


class Options:
    """Stands for pytest's parser."""

    def __init__(self):
        self.lines = []

    def getgroup(self, *_):
        return self

    def addoption(self, name, metavar=None, help="", **_):
        signature = f"{name}={metavar}" if metavar else name
        self.lines += [f".. option:: {signature}", "", f"   {help}", ""]


class PytestOptions(Directive):
    def run(self):
        import pytest_openreg

        options = Options()
        pytest_openreg.pytest_addoption(options)
        return parsed(self, "\n".join(options.lines), "pytest_openreg.py")


def parsed(directive, text, source):
    from docutils import nodes

    node = nodes.Element()
    node.document = directive.state.document
    directive.state.nested_parse(StringList(text.split("\n"), source), 0, node, match_titles=True)
    return node.children


def setup(app):
    app.add_directive("c-header", CHeader)
    app.add_directive("pytest-options", PytestOptions)
    return {"parallel_read_safe": True}
