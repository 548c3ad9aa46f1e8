"""5,000 steps with checkpoints and evaluations: nothing grows, nothing slows down, no file stays open."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import Window, verdict

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_long_run_neither_grows_nor_slows_down() -> None:
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "soak.py")]
    completed = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def windows(**last: float) -> list[Window]:
    early = [Window(500, 600.0, 3.0, 38), Window(1000, 700.0, 2.5, 39)]
    same = [Window(500 * number, 800.0, 2.0, 40) for number in range(3, 11)]
    return [*early, *same, Window(5500, 800.0, 2.0, 40)._replace(**last)]


@pytest.mark.parametrize(
    ("last", "status"),
    [({}, 0), ({"megabytes": 817.0}, 1), ({"milliseconds": 2.11}, 1), ({"milliseconds": 1.5}, 0), ({"files": 41}, 1)],
)
def test_what_the_soak_lets_pass(last: dict[str, float], status: int, capsys) -> None:
    assert verdict(windows(**last)) == status
    assert "open files" in capsys.readouterr().out
