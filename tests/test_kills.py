"""Kill -9 at random moments, for real: what is left equals an uninterrupted run."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.conftest import SMALL_RUN
from tests.test_pretraining import REPOSITORY, lines_of, state_of

pytestmark = pytest.mark.slow

STEPS = 400


def start(run: Path, corpus: Path) -> subprocess.Popen:
    command = [sys.executable, "pretrain.py", f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN]
    command += [f"--training.steps={STEPS}", "--training.log_every=7", "--training.checkpoint_every=10"]
    return subprocess.Popen(
        [*command, "--training.eval_every=50"], cwd=REPOSITORY, env={**os.environ, "XLA_FLAGS": ""},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_run_killed_at_random_moments_equals_an_uninterrupted_one(corpus: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(whole, corpus)
    assert process.wait(300) == 0, process.stdout.read()
    draw = random.Random(0)
    kills = 0
    while kills < 6:
        process = start(killed, corpus)
        # From the first line of training on, so that most kills hit steps, evaluations and saves.
        for line in process.stdout:
            if line.startswith("step "):
                time.sleep(draw.uniform(0, 0.3))
                break
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
    process = start(killed, corpus)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert kills >= 3
    assert lines_of(killed) == lines_of(whole)
    jax.tree.map(np.testing.assert_array_equal, state_of(killed), state_of(whole))
