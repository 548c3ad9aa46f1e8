"""The embedded corpus: the prose in the docstrings of the running Python's own standard library.

Real English that is on every machine: no download, no licence to ask for. Sources are parsed, never imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "__pycache__", "turtledemo"}
)
"""Folders of the standard library without prose of its own (tests), or that belong to others."""

_MIN_WORDS = 30
"""A document has at least a couple of sentences; a module with less is left out."""

_SENTENCE_END = re.compile(r"[.!?:;)\"'][)\"']?$")
_SIGNATURE = re.compile(r"^[\w.\[\], ]*\w\(.*\)\s*(->.*|[-:=].*)?$")
_RULE = re.compile(r"^[\W_]+$")
_CODE = re.compile(r"^(import |from \w+ import |def |class |return |for \w+ in |if .*:$|print\(|@\w|[\w.]+ = |\$ |% )")
_BULLET = re.compile(r"^([-*+o•]|\d+[.)]|:\w[\w ]*:|@\w+)\s+")
_FIELD = re.compile(r"^\w[\w.,*' ]{0,30}\s(--|-)\s")


def stdlib_documents() -> Iterator[list[str]]:
    """Documents, one a module in the sorted order of paths; each a list of paragraphs."""
    for document in _harvest():
        yield list(document)


def source_state() -> tuple[str, int]:
    """Hash of what the harvest depends on (interpreter, sources, rules), and the newest change in ns."""
    digest = hashlib.blake2b(f"{sys.version}".encode(), digest_size=16)
    digest.update(Path(__file__).read_bytes())
    newest = 0
    for relative, path in _modules():
        stat = path.stat()
        digest.update(f"{relative}|{stat.st_size}|{stat.st_mtime_ns}\n".encode())
        newest = max(newest, stat.st_mtime_ns)
    return f"stdlib|{digest.hexdigest()}", newest


@functools.cache
def _harvest() -> tuple[tuple[str, ...], ...]:
    """All documents: 1.6 MB, read up to three times (vocabulary, fingerprint, examples) but parsed once."""
    documents = []
    for _, path in _modules():
        paragraphs = tuple(paragraph for text in _docstrings(path) for paragraph in prose(text))
        if sum(paragraph.count(" ") + 1 for paragraph in paragraphs) >= _MIN_WORDS:
            documents.append(paragraphs)
    return tuple(documents)


def _modules() -> list[tuple[str, Path]]:
    """(path below the standard library, path) of its sources, sorted by the former."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                modules.append((path.relative_to(root).as_posix(), path))
    return sorted(modules)


def _docstrings(path: Path) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, in the order of the source, each text once."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # some files of the library are broken on purpose
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    seen = set()
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node, clean=False)
        if text and text not in seen:
            seen.add(text)
            yield inspect.cleandoc(text)


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
