"""Tests without a mark fail above a limit of CPU seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import time, pytest

def work():
    start = time.process_time()
    while time.process_time() < start + 0.3: pass

@pytest.fixture(scope="session")
def expensive(): work()

def test_small(): pass
def test_large(request): request.getfixturevalue("expensive")
@pytest.mark.medium
def test_marked(): work()
"""


@pytest.mark.medium
def test_a_test_without_a_mark_fails_above_the_limit(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = medium: longer\n")
    options = ["-p", "tests.cpu_budget", "-p", "no:xdist", "--cpu-limit=0.2", "--cpu-durations=2", "-rA"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    outcomes = dict(reversed(line.split()[:2]) for line in done.stdout.splitlines() if "test_some.py::" in line)
    assert outcomes["test_some.py::test_small"] == outcomes["test_some.py::test_marked"] == "PASSED", done.stdout
    assert outcomes["test_some.py::test_large"] == "FAILED"
    assert "mark it medium" in done.stdout
    assert "CPU seconds in 3 tests" in done.stdout
