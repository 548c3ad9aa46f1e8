"""Packages import only from packages above them in ORDER, and modules in no circle, wherever the import stands."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "bert"
ORDER = (
    *(
        "errors",
        "files",
        "remote",
        "object_store",
        "protobuf",
        "metrics",
        "config",
        "parallel",
        "tokenizer",
        "runtime",
        "model",
        "runs",
    ),
    *("data", "tasks", "interchange", "inference", "serving", "demo", "training", "analysis", "commands"),
)
MODULES = {".".join(["bert", *path.relative_to(PACKAGE).with_suffix("").parts]): path for path in PACKAGE.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports, also inside functions and under TYPE_CHECKING."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                imported.add(name if {name, f"{name}.__init__"} & MODULES.keys() else str(node.module))
    named = {name if name in MODULES else f"{name}.__init__" for name in imported}
    return named & MODULES.keys()


GRAPH = {name: imports_of(path) - {name} for name, path in MODULES.items()}


def test_no_package_imports_from_a_higher_one() -> None:
    inside = {name: name.split(".")[1] for name in MODULES if name.split(".")[1] in ORDER}
    assert {name.split(".")[1] for name in MODULES} - set(ORDER) == {"__init__", "__main__"}
    upward = [
        f"{name} imports {target}"
        for name, package in inside.items()
        for target in GRAPH[name]
        if target in inside and ORDER.index(inside[target]) > ORDER.index(package)
    ]
    assert not upward


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter({name: targets for name, targets in GRAPH.items() if name != "bert.__init__"}).prepare()


@pytest.mark.medium
def test_no_test_module_imports_another_one() -> None:
    tests = Path(__file__).parents[1]
    for path in tests.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests."):
                assert ".test_" not in f".{node.module}", (
                    f"{path.relative_to(tests)}: move what it imports to helpers.py"
                )


def test_only_tasks_and_the_table_of_kinds_know_which_task_is_running() -> None:
    pattern = re.compile(
        r"isinstance\([\w.]*\btask\b|isinstance\(.*(Classification|Answering|Embedding|Reranker|Choice|Sequence)Task\b"
        r"|\btask\.(head|loss|name|kind) *(==|!=|in |not in )"
    )
    for name, path in MODULES.items():
        if not name.startswith("bert.tasks.") and name != "bert.training.finetuning.kinds":
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if pattern.search(line)]
            assert not lines, f"{name}: move this to an attribute of `Task` or a field of `TaskKind`: {lines}"
