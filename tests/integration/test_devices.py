"""The command over a changing number of devices, in processes of their own."""

from pathlib import Path

import pytest

from tests.conftest import SMALL_RUN
from tests.helpers import lines_of
from tests.processes import finish, launch, read_to_step

pytestmark = pytest.mark.slow


def train(run: Path, corpus: Path, devices: int, stop_at: int | None = None) -> None:
    """Trains on CPU devices and optionally sends SIGTERM when the run logs a step."""
    arguments = [f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, "--training.steps=60"]
    arguments += ["--training.log_every=2", "--training.eval_every=30", "--training.checkpoint_every=1000"]
    process = launch("pretrain.py", *arguments, devices=devices, PYTHONUNBUFFERED="1")
    begun = "" if stop_at is None else read_to_step(process, stop_at)
    if stop_at is not None:
        process.terminate()
    [rest] = finish(process, status=0 if stop_at is None else 143)
    assert f"{devices} x cpu" in begun + rest


def test_one_device_then_eight_then_one_give_the_losses_of_one(corpus: Path, tmp_path: Path) -> None:
    """Dropout is on (0.1 by default): rows, masks and dropout do not depend on the devices, so losses agree."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    train(whole, corpus, 1)
    train(moved, corpus, 1, stop_at=12)
    train(moved, corpus, 8, stop_at=36)
    train(moved, corpus, 1)
    largest = 0.0
    for line, expected in zip(lines_of(moved), lines_of(whole), strict=True):
        assert (line["step"], line["split"]) == (expected["step"], expected["split"])
        for name in (name for name in expected if name.endswith("loss")):
            largest = max(largest, abs(line[name] - expected[name]) / expected[name])
    print(f"largest relative difference of a loss: {largest:.2e}")
    assert largest <= 1e-5
