"""The source archive, the wheel built from it, and a run that uses only this wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FEW_STEPS = ["--training.steps=4", "--training.batch_size=8", "--training.log_every=2", "--training.eval_every=2",
             "--training.checkpoint_every=4", "--optimizer.warmup_steps=1", "--tokenizer.vocab_size=300",
             "--data.train=docstrings:stdlib", "--transfer=null"]  # fmt: skip


def run(*command: str | Path, **options) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS", "BERT_NUM_DEVICES")
    }
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, **options)
    if "Could not find a version" in done.stderr and "Retrying" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an archive of the files in git, and the wheel built from this archive."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [path] = built.glob("*.whl")
    return path


def test_the_archive_has_what_the_tests_need(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "configs/quickstart.yaml", "pretrain.py",
                 "tests/conftest.py", "docs/get_started.md", "bert/py.typed"):  # fmt: skip
        assert name in names
    assert not [name for name in names - {".gitignore"} if "__pycache__" in name or name.startswith((".", "runs"))]


def test_the_wheel_is_the_package_and_its_recipes(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = (name for name in names if name.endswith(".dist-info/METADATA"))
        facts = HeaderParser().parsestr(archive.read(metadata).decode())
        [entries] = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        assert "bert = bert.__main__:main" in archive.read(entries).decode()
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "bert").rglob("*") if path.is_file()}
    source = {name for name in source if "__pycache__" not in name}
    recipes = {f"bert/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == source | recipes
    assert {"bert/py.typed", "bert/inference/attention_page.html", "bert/configs/quickstart.yaml"} <= packaged
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert (facts["Name"], facts["License-Expression"]) == ("bert-jax", "Apache-2.0")
    assert facts["Requires-Python"] == ">=3.11"
    assert facts.get_payload().startswith("# bert-jax")
    needed = [line for line in facts.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in needed if line.startswith(("torch", "tensorflow", "pytest", "beartype", "mypy"))]


def test_a_run_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    scripts = tmp_path / "venv" / "bin"
    run(scripts / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "bert.py").write_text("raise SystemExit('the folder one stands in is not the package')\n")
    cache = f"--data.cache_dir={tmp_path / 'cache'}"
    said = run(scripts / "bert", "pretrain", *FEW_STEPS, cache, cwd=elsewhere)
    assert "runs/quickstart" in said
    results = json.loads((elsewhere / "runs" / "quickstart" / "results.json").read_text())
    assert results["eval"]["mlm_loss"] > 0
    base = ["--config=base", "--data.train=corpus.txt", "--print_config"]
    assert "hidden_size: 768" in run(scripts / "bert", "pretrain", *base, cwd=elsewhere)
    run(scripts / "python", "-m", "pip", "check")
