"""The command over a changing number of devices, in processes of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SMALL_RUN
from tests.helpers import REPOSITORY, lines_of

pytestmark = pytest.mark.slow

STEPS = 60


def train(run: Path, corpus: Path, devices: int, stop_at: int | None = None) -> list[str]:
    """Runs training on the given number of CPU devices and optionally sends SIGTERM when it logs a given step."""
    arguments = [f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, f"--training.steps={STEPS}"]
    arguments += ["--training.log_every=2", "--training.eval_every=30", "--training.checkpoint_every=1000"]
    environment = {
        **os.environ,
        "BERT_NUM_DEVICES": "",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    process = subprocess.Popen(
        [sys.executable, "pretrain.py", *arguments], cwd=REPOSITORY, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**environment, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if stop_at is not None and line.startswith(f"step {stop_at}/"):
            process.send_signal(signal.SIGTERM)
    assert process.wait() == (0 if stop_at is None else 143), "".join(lines)
    assert any(f"{devices} x cpu" in line for line in lines)
    return lines


def test_one_device_then_eight_then_one_give_the_losses_of_one(corpus: Path, tmp_path: Path) -> None:
    """Dropout is on (0.1 by default): rows, masks and dropout do not depend on the devices, so losses agree."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    train(whole, corpus, 1)
    train(moved, corpus, 1, stop_at=12)
    train(moved, corpus, 8, stop_at=36)
    train(moved, corpus, 1)
    largest = 0.0
    for ours, theirs in zip(lines_of(moved), lines_of(whole), strict=True):
        assert (ours["step"], ours["split"]) == (theirs["step"], theirs["split"])
        for name in (name for name in theirs if name.endswith("loss")):
            largest = max(largest, abs(ours[name] - theirs[name]) / theirs[name])
    print(f"largest relative difference of a loss: {largest:.2e}")
    assert largest <= 1e-5
