"""Worker processes of a script."""

import signal
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
from bert.commands.corpus import examples_command as main
from bert.data.pretraining import build

with Path("runs.txt").open("a") as file:
    file.write("run\\n")
build.SHARD_BYTES = 1000
sys.exit(main(sys.argv[1:]))
"""


def run_script(folder: Path, script: str, *arguments: str) -> str:
    """Output of a script, which must run once only and not again in the worker processes."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "script.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "runs.txt").read_text() == "run\n"
    return done.stdout


def test_docstrings_are_read_by_a_script_without_a_guard(tmp_path: Path) -> None:
    assert "documents" in run_script(tmp_path, CORPUS)


def test_examples_are_built_by_a_script_without_a_guard(corpus: Path, tmp_path: Path) -> None:
    arguments = [f"--data.train={corpus}", f"--data.cache_dir={tmp_path / 'cache'}", "--data.num_workers=2"]
    assert "examples in" in run_script(tmp_path, EXAMPLES, *arguments, "--tokenizer.vocab_size=100")


SLOW = """
import sys, time
from bert.data.worker_processes import WorkerPool, start_worker

if __name__ == "__main__":
    with WorkerPool(2, start_worker) as pool:
        print("started", flush=True)
        for future in [pool.submit(time.sleep, 60) for _ in range(2)]:
            future.result()
"""


def test_workers_end_without_a_traceback_on_sigterm(tmp_path: Path) -> None:
    """A worker that starts prints one if the process that started it has ended."""
    (tmp_path / "script.py").write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "Traceback" not in errors
