"""The table of systems and figures: each file, notebook cell and test exists, and cells check themselves."""

from __future__ import annotations

import ast
import json
import re
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT_ASSERTION = "X, attend and Y"
ROW = re.compile(r"^\|([^|`]+)\|`([^|`]+)`\|(?:`([^|`]+)`)?\|$", re.MULTILINE)


@lru_cache
def names_of(file: Path) -> set[str]:
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@lru_cache
def cells_of(number: str) -> dict[str, str]:
    [notebook] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    return {cell["id"]: "".join(cell["source"]) for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]}


def asserts(reference: str) -> bool:
    """Whether NOTEBOOK#CELL has an assertion."""
    number, _, cell = reference.partition("#")
    return "assert " in cells_of(number)[cell]


def exists(reference: str) -> bool:
    """Whether NOTEBOOK#CELL, FILE or FILE:NAME exists; files of the package are relative to it."""
    number, separator, cell = reference.partition("#")
    if separator:
        return cell in cells_of(number)
    path, _, name = reference.partition(":")
    file = ROOT / path if (ROOT / path).is_file() else ROOT / "bert" / path
    return file.is_file() and (not name or name in names_of(file))


def test_files_cells_and_tests_of_each_system_exist() -> None:
    text = (ROOT / "docs" / "lectures.md").read_text(encoding="utf-8")
    rows = ROW.findall(text.split("|---|---|---|")[1])
    assert len(rows) == text.count("\n|") - 2 > 50
    for system, implementation, test in rows:
        assert exists(implementation), f"{system}: {implementation}"
        assert not test or exists(test), f"{system}: {test}"
        check = test or implementation
        assert system == WITHOUT_ASSERTION or "#" not in check or asserts(check), f"{system}: {check}"
        assert test or "#" in implementation, f"{system}: no test"
