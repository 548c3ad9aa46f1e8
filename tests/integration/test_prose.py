"""Docstrings begin with a verb or a noun, and neither package nor tests use phrases of an older private dialect."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "bert").rglob("*.py"))
TEST_SOURCES = sorted((ROOT / "tests").rglob("*.py"))

FIRST_WORDS = ("Of", "As", "What", "Who", "Whose", "Those", "That", "With", "Whoever", "Whatever")
"""First words of docstrings that lack a subject."""

BEGINNINGS = re.compile(rf'"\s*({"|".join(FIRST_WORDS)})\b')
"""Strings that may be such docstrings. Parsing only the files that have one is much faster."""

PHRASES = re.compile(
    r"\b(that of|those of|but for|so many|every so-many|a single time|comes to|of its own|is told|are told|anew|mended?"
    r"|without a word|have no say|has no say|is asked for|are asked for|asks for|by itself alone|what is left"
    r"|whoever|refuses?|refused)\b",
    re.IGNORECASE,
)


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, also of those below attributes."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            value = getattr(getattr(statement, "value", None), "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, str):
                yield statement.lineno, value


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments and strings of a module."""
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        if token.type in kinds:
            yield token.start[0], token.string


def comments(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments of a module."""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert [
        f"{file.relative_to(ROOT)}:{line}: {text[:60]}"
        for file in SOURCES + TEST_SOURCES
        if BEGINNINGS.search(file.read_text(encoding="utf-8"))
        for line, text in docstrings(file)
        if re.match(r"[\w-]*", text.strip())[0] in FIRST_WORDS
    ] == []


def test_docstrings_comments_and_messages_are_in_plain_english() -> None:
    assert [
        f"{file.relative_to(ROOT)}:{line}: {phrase[0]}"
        for file in SOURCES
        for line, text in texts(file)
        for phrase in PHRASES.finditer(text)
    ] == []


def test_docstrings_and_comments_of_tests_are_in_plain_english() -> None:
    """Other strings of tests are data, or quote messages."""
    assert [
        f"{file.relative_to(ROOT)}:{line}: {phrase[0]}"
        for file in TEST_SOURCES
        if PHRASES.search(file.read_text(encoding="utf-8"))
        for line, text in (*docstrings(file), *comments(file))
        for phrase in PHRASES.finditer(text)
    ] == []
