"""Worker processes of a script."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.medium

CORPUS = """
from pathlib import Path
from bert.data.corpus import docstrings
from bert.data.corpus.documents import documents

with Path("runs.txt").open("a") as file:
    file.write("run\\n")
docstrings._PARALLEL_BYTES = 0
docstrings.available_cores = lambda: 2
print(len(list(documents("docstrings:json,email"))), "documents")
"""

EXAMPLES = """
import sys
from pathlib import Path
from bert.commands.examples import main
from bert.data.pretraining import builder

with Path("runs.txt").open("a") as file:
    file.write("run\\n")
builder.SHARD_BYTES = 1000
sys.exit(main(sys.argv[1:]))
"""


def run_script(folder: Path, script: str, *arguments: str) -> str:
    """What a script prints; it runs once alone, not in the worker processes too."""
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py", *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "runs.txt").read_text() == "run\n"
    return done.stdout


def test_docstrings_are_read_by_a_script_without_a_guard(tmp_path: Path) -> None:
    assert "documents" in run_script(tmp_path, CORPUS)


def test_examples_are_built_by_a_script_without_a_guard(corpus: Path, tmp_path: Path) -> None:
    arguments = [f"--data.train={corpus}", f"--data.cache_dir={tmp_path / 'cache'}", "--data.num_workers=2"]
    assert "examples in" in run_script(tmp_path, EXAMPLES, *arguments, "--tokenizer.vocab_size=200")
