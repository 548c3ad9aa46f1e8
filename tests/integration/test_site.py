"""The documentation site: it has every public name, key and recipe, and builds without warnings."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import bert
from bert.config import FinetuneConfig, PretrainConfig, recipe_names
from bert.config.validation import keys_of
from bert.interchange.families import FAMILIES

UNMEASURED = {"ernie", "new", "neobert", "encoder-decoder"}

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference(reference: ModuleType) -> None:
    described = set(re.findall(r"^\.\. auto\w+:: bert\.(\w+)$", reference.api(), re.MULTILINE))
    assert described == set(bert.__all__)


@pytest.mark.medium
def test_every_key_is_in_the_configuration_once(reference: ModuleType) -> None:
    sections = (reference.shared_keys(), reference.pretraining_keys(), reference.finetuning_keys())
    shared, *own = (re.findall(r"^```\{confval\} (.+)$", text, re.MULTILINE) for text in sections)
    for config_class, alone in zip((PretrainConfig, FinetuneConfig), own, strict=True):
        keys = [key for key in shared + alone if ".K." not in key]
        assert sorted(keys) == sorted(keys_of(config_class))
    assert "phases.K.batch_size" in own[0]


def test_a_type_is_described_with_its_range(reference: ModuleType) -> None:
    keys = reference.shared_keys()
    assert "{confval} training.batch_size\n:type: whole number at least 1\n:default: `32`\n" in keys
    assert ":type: `adamw` or " in keys


def test_every_recipe_has_a_section_and_pages_are_linked(reference: ModuleType) -> None:
    recipes = reference.recipes()
    assert re.findall(r"^### (.+)$", recipes, re.MULTILINE) == re.findall(r"^\| \[`(\w+)`\]", recipes, re.MULTILINE)
    assert sorted(re.findall(r"^### (.+)$", recipes, re.MULTILINE)) == recipe_names()
    for page in re.findall(r"\]\(([^)#]+)[^)]*\)", recipes):
        assert (DOCS / page).exists(), page


def test_every_family_has_a_measured_difference(reference: ModuleType) -> None:
    """Except for those that `tests/real` compares elsewhere: they have another form in files or two models."""
    rows = [line.strip("| ").split(" | ") for line in reference.families().splitlines() if line.startswith("| ")][1:]
    table = {row[1].strip("`"): row[-1].strip() for row in rows}
    assert table.keys() == {family.model_type for family in FAMILIES}
    assert {name for name, gap in table.items() if not gap.startswith(tuple("123456789"))} == UNMEASURED
    assert all(float(gap) <= 1e-4 for name, gap in table.items() if name not in UNMEASURED)


def test_the_index_has_every_page(reference: ModuleType) -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert page.name == "index.md" or re.search(rf"^{page.stem}$", index, re.MULTILINE), page.name
        for mark in reference.MARK.findall(page.read_text(encoding="utf-8")):
            assert mark in reference.GENERATED, f"{page.name}: {mark}"


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("myst_nb", reason="needs the extra docs")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    for page in ("index.html", "docs/api.html", "notebooks/1_attention_from_scratch.html", "benchmarks/RESULTS.html"):
        assert (tmp_path / "site" / page).is_file(), page
