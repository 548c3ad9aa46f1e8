"""Functions in Python source files: their names, parameters, and the parts of their docstrings."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from bert.data.corpus.docstrings import syntax_tree

SECTIONS = {
    **dict.fromkeys(("args", "arguments", "parameters", "params", "keyword args", "other parameters"), "parameters"),
    **dict.fromkeys(("return", "returns"), "returns"),
    **dict.fromkeys(
        ("raise", "raises", "yield", "yields", "attributes", "warns", "warnings", "note", "notes"), "other"
    ),
    **dict.fromkeys(("see also", "example", "examples", "reference", "references", "usage"), "other"),
}
"""Headings of Google's and NumPy's sections, in lower case, and the part of the docstring that they start."""

_SPHINX = re.compile(r":(param|parameter|arg|keyword|returns?|type|rtype|raises?)\b[^:]*:\s*(.*)")

_SPHINX_PARTS = {
    **dict.fromkeys(("param", "parameter", "arg", "keyword"), "parameters"),
    **dict.fromkeys(("return", "returns"), "returns"),
}

_UNDERLINE = re.compile(r"\s*-{3,}\s*")

_GOOGLE_ENTRY = re.compile(r"\*{0,2}\w+(?: \([^)]*\))?:\s+(.+)")

_GOOGLE_TYPE = re.compile(r"[\w.\[\], |]{1,40}:\s+(?=\w)")

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Docstring(NamedTuple):
    """The parts of a docstring in the style of Google, NumPy or Sphinx.

    Attributes:
        prose: the paragraphs outside of sections.
        parameters: the description of each parameter.
        returns: the description of the returned value; empty if there is none, or if there are several values.
    """

    prose: tuple[str, ...]
    parameters: tuple[str, ...]
    returns: str


class Function(NamedTuple):
    """A function or method with a docstring.

    Attributes:
        name: its name.
        parameters: the names of its parameters, except ``self`` and ``cls``.
        docstring: the parts of its docstring.
    """

    name: str
    parameters: tuple[str, ...]
    docstring: Docstring


def module_functions(source: bytes) -> list[Function]:
    """Returns the documented functions and methods of a module in source order, none if it cannot be parsed."""
    return list(_functions(syntax_tree(source)))


def _functions(node: ast.AST) -> Iterator[Function]:
    for statement in getattr(node, "body", ()):
        if isinstance(statement, _FUNCTIONS) and (text := ast.get_docstring(statement, clean=False)):
            arguments = statement.args
            every = (*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg)
            names = (argument.arg for argument in every if argument is not None)
            names = (name for name in names if name not in ("self", "cls"))
            yield Function(statement.name, tuple(names), parse_docstring(inspect.cleandoc(text)))
        if isinstance(statement, ast.ClassDef | ast.If | ast.Try):
            yield from _functions(statement)


class Block(NamedTuple):
    """Consecutive lines of a docstring.

    Attributes:
        part: prose, parameters, returns or other.
        is_numpy: whether the entries are lines of names and types, with indented descriptions below.
        lines: the lines without the heading.
    """

    part: str
    is_numpy: bool
    lines: list[str]


def parse_docstring(text: str) -> Docstring:
    """Divides a cleaned docstring into its parts."""
    prose: list[str] = []
    parameters: list[str] = []
    returns: list[str] = []
    for block in _blocks(text.split("\n")):
        if block.part == "prose":
            prose += _paragraphs(block.lines)
        elif block.part == "parameters":
            parameters += filter(None, _descriptions(block))
        elif block.part == "returns":
            returns.append(_returned(block))
    return Docstring(tuple(prose), tuple(parameters), returns[0] if len(returns) == 1 else "")


def _blocks(lines: list[str]) -> Iterator[Block]:
    block = Block("prose", False, [])
    for line, below in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        heading = SECTIONS.get(line.strip().lower().rstrip(":"))
        starts_at_margin = line[:1].strip() != ""
        if starts_at_margin and _UNDERLINE.fullmatch(below):
            yield block
            block = Block(heading or "other", True, [])
        elif starts_at_margin and heading and line.rstrip().endswith(":"):
            yield block
            block = Block(heading, False, [])
        elif sphinx := _SPHINX.match(line):
            yield block
            part = _SPHINX_PARTS.get(sphinx[1], "other")
            block = Block(part, False, [f"name: {sphinx[2]}" if part == "parameters" else sphinx[2]])
        elif starts_at_margin and block.part != "prose" and not block.is_numpy:
            yield block
            block = Block("prose", False, [line])
        elif not _UNDERLINE.fullmatch(line):
            block.lines.append(line)
    yield block


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Yields paragraphs as one line each, without interactive sessions."""
    for is_empty, group in itertools.groupby(lines, key=lambda line: not line.strip()):
        paragraph = [line.strip() for line in group]
        if not is_empty and not any(line.startswith(">>>") for line in paragraph):
            yield " ".join(paragraph)


def _descriptions(block: Block) -> list[str]:
    """Returns the descriptions of the entries of a section, empty for an entry without one."""
    margin = _margin(block.lines)
    entries: list[list[str]] = []
    for line in filter(str.strip, block.lines):
        if _indent(line) == margin:
            entry = None if block.is_numpy else _GOOGLE_ENTRY.match(line.strip())
            entries.append([entry[1]] if entry else [])
        elif entries:
            entries[-1].append(line.strip())
    return [" ".join(lines) for lines in entries]


def _returned(block: Block) -> str:
    """Returns the description of the only returned value, without its type; empty if there are several values."""
    if not block.is_numpy:
        return _GOOGLE_TYPE.sub("", " ".join(line.strip() for line in block.lines).strip(), count=1)
    descriptions = _descriptions(block)
    return descriptions[0] if len(descriptions) == 1 else ""


def _margin(lines: list[str]) -> int:
    return min((_indent(line) for line in lines if line.strip()), default=0)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
