"""Commands without packages of the extras, and modules without platform-specific standard modules."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.medium

REPOSITORY = Path(__file__).parent.parent.parent

HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


def declared() -> set[str]:
    """The distributions that pip installs with this one, without extras: what they ask for included."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expected, seen = [Requirement(line) for line in project["dependencies"]], set()
    actual: set[str] = set()
    while expected:
        requirement = expected.pop()
        name = requirement.name.lower().replace("_", "-")
        if (name, *sorted(requirement.extras)) in seen:
            continue
        seen.add((name, *sorted(requirement.extras)))
        actual.add(name)
        for line in importlib.metadata.requires(requirement.name) or []:
            one = Requirement(line)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                expected.append(one)
    return actual


def undeclared() -> set[str]:
    """Names of installed modules that no declared distribution has."""
    holders = defaultdict(set)
    for module, distributions in importlib.metadata.packages_distributions().items():
        holders[module] |= {name.lower().replace("_", "-") for name in distributions}
    plain = declared() | {"bert-jax"}
    return {module for module, distributions in holders.items() if not distributions & plain}


def run_hidden(hidden: set[str], program: str, *arguments: str) -> str:
    """Output of a program in a process that cannot import some modules."""
    code = f"HIDDEN = {hidden!r}\n{HIDING}\n{program}"
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout + process.stderr


COMMANDS = """
import pathlib, sys
from bert.commands import main

run, text, out = sys.argv[1:]
pathlib.Path(text).write_text("a b\\n")
for command in (
    ["inspect", run],
    ["predict", run, text],
    ["attention", run, "a b", "--output", f"{out}/page.html"],
    ["attention", run, "a b", "--output", f"{out}/picture.png"],
    ["export", run, f"{out}/hf"],
    ["export", run, f"{out}/stablehlo", "--format", "stablehlo", "--dynamic_length"],
    ["plan", "--device", "h100"],
):
    assert main(command) == 0, command
try:
    print("status", main(["export", run, f"{out}/onnx", "--format", "onnx"]))
except Exception as error:
    print("error:", error)
"""


def test_commands_need_nothing_but_what_is_declared(made, tmp_path: Path) -> None:
    hidden = undeclared()
    assert {"pytest", "onnxruntime"} <= hidden
    assert not {"jax", "flax", "numpy", "google", "datasets", "bert"} & hidden
    made("BertForSequenceClassification").save(tmp_path / "model")
    said = run_hidden(hidden, COMMANDS, str(tmp_path / "model"), str(tmp_path / "texts.txt"), str(tmp_path))
    assert "pip install 'bert-jax[onnx]'" in said
    assert {path.name for path in tmp_path.iterdir()} == {
        "model",
        "texts.txt",
        "page.html",
        "picture.png",
        "hf",
        "stablehlo",
    }
    for file in (tmp_path / "stablehlo").iterdir():
        for place in (REPOSITORY, tmp_path, sys.prefix):
            assert str(place).encode() not in file.read_bytes(), f"{file.name} has {place}"


MODULES = """
import importlib, os, pathlib, sys

sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios"), None))
import bert
from bert.commands import COMMANDS, main

root = pathlib.Path(bert.__file__).parent
for file in sorted(root.rglob("*.py")):
    name = ".".join(["bert", *file.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
    if name not in ("bert.__main__", "bert.serving.app"):
        importlib.import_module(name)
for name in ("confstr", "sched_getaffinity", "pread", "O_CLOEXEC", "fork", "getuid"):
    delattr(os, name)
sys.platform = "win32"
assert main(["--help"]) == 0
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert not end.code
print(bert.load(sys.argv[1]).predict(["a b"]))
"""


def test_every_module_is_imported_without_extras_and_without_what_windows_lacks(made, tmp_path: Path) -> None:
    """Simulates Windows by hiding the modules that it lacks."""
    made("BertForSequenceClassification").save(tmp_path / "model")
    assert "label=" in run_hidden(undeclared(), MODULES, str(tmp_path / "model"))
