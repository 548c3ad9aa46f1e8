"""Prose in docstrings: sentences are kept; code, sessions, tables and headings are left out."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterator

_SENTENCE_END = re.compile(r"[.!?:;)\"'][)\"']?$")
_SIGNATURE = re.compile(r"^[\w.\[\], ]*\w\(.*\)\s*(->.*|[-:=].*)?$")
_RULE = re.compile(r"^[\W_]+$")
_CODE = re.compile(r"^(import |from \w+ import |def |class |return |for \w+ in |if .*:$|print\(|@\w|[\w.]+ = |\$ |% )")
_BULLET = re.compile(r"^([-*+o•]|\d+[.)]|:\w[\w ]*:|@\w+)\s+")
_FIELD = re.compile(r"^\w[\w.,*' ]{0,30}\s(--|-)\s")

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (*_DOCUMENTED, ast.If, ast.Try, ast.With, ast.ExceptHandler)


def docstrings(source: bytes) -> list[str]:
    """Docstrings of a module, its classes and functions, in the order of the source; none if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # some files are broken on purpose
    return [inspect.cleandoc(text) for text in _documented(tree)]


def _documented(node: ast.AST) -> Iterator[str]:
    """Docstrings of a node and of what is defined in its blocks: expressions, most of a tree, are not walked."""
    if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
        yield text
    for block in ("body", "handlers", "orelse", "finalbody"):
        for statement in getattr(node, block, ()):
            if isinstance(statement, _BLOCKS):
                yield from _documented(statement)


def prose(docstring: str) -> list[str]:
    """Paragraphs of a cleaned docstring: hard-wrapped lines joined; code, sessions, tables and rules left
    out.

    What it keeps are blocks that read like sentences: at least four words, mostly letters. It would rather
    drop a paragraph than keep code, since a vocabulary learns from what is kept.
    """
    paragraphs = []
    for block in re.split(r"\n\s*\n", docstring):
        paragraphs += [text for lines in _items(block.split("\n")) if (text := _paragraph(lines))]
    return paragraphs


def _items(lines: list[str]) -> Iterator[list[str]]:
    """A block, cut before every item of a list and without interactive sessions."""
    item: list[str] = []
    for line in lines:
        stripped = line.strip()
        if stripped.startswith((">>>", "...")):
            break  # the output of a session reaches to the end of its block
        if _RULE.match(stripped):
            # An underline: what stands above is a heading, not a sentence.
            item = item[:-1]
            continue
        if item and (_BULLET.match(stripped) or _FIELD.match(stripped)):
            yield item
            item = []
        item.append(line)
    yield item


def _paragraph(lines: list[str]) -> str | None:
    """The lines joined, or None where they are not prose."""
    stripped = [line.strip() for line in lines]
    while stripped and _SIGNATURE.match(stripped[0]):
        stripped = stripped[1:]
    if not stripped or sum(bool(_CODE.match(line)) for line in stripped) * 2 > len(stripped):
        return None
    if sum("   " in line or "\t" in line for line in stripped) * 2 > len(stripped):
        return None  # columns: a table
    text = " ".join(stripped)
    text = re.sub(r"\s+", " ", _BULLET.sub("", text)).replace("``", "").strip()
    words = text.split()
    plain = sum(word.strip("\"'`.,:;!?()*").replace("-", "").replace("'", "").isalpha() for word in words)
    if len(words) < 4 or plain < 0.6 * len(words):
        return None
    return text if _SENTENCE_END.search(text) else text + "."
