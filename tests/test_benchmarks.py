"""The benchmarks run, at toy sizes, and write down what they measure as they go."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(name, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "XLA_FLAGS": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_gpu_measures_every_row_and_goes_on_where_it_was(tmp_path):
    output = tmp_path / "gpu.json"
    assert "the budget of 0 s has ended before matmul base projection, " in run(
        "gpu.py", "--small", "--budget", 0, "--output", output
    )
    printed = run("gpu.py", "--small", "--output", output)
    rows = json.loads(output.read_text())["rows"]
    for name, row in rows.items():
        missing = "cudnn" in name or "torch" in name
        assert row["seconds"] > 0 if "error" not in row else missing, (name, row)
        assert name in printed
    assert rows["base T16 faithful"]["sequences_per_second"] > 0
    failed = sum("error" in row for row in rows.values())
    assert run("gpu.py", "--small", "--output", output).count('"took"') == failed  # they alone are tried again
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--output", str(output)]
    mixed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert mixed.returncode == 2
    assert "holds rows of the other sizes: name another file with --output" in mixed.stderr


@pytest.mark.slow
def test_the_train_step_is_measured_in_turns(tmp_path):
    output = tmp_path / "train_step.json"
    sizes = {"layers": 1, "width": 16, "heads": 2, "pieces": 99, "rows": 2, "length": 8, "predicted": 2}
    sizes = [f"--{name}={value}" for name, value in {**sizes, "steps": 2, "rounds": 2}.items()]
    sides = ["ours float32", "ours bfloat16"]
    printed = run("train_step.py", "--output", output, "--sides", *sides, *sizes)
    found = json.loads(output.read_text())
    assert {name: len(runs) for name, runs in found["sides"].items()} == dict.fromkeys(sides, 2)
    assert printed.index("ours bfloat16, 1 of 2") < printed.index("ours float32, 2 of 2")
    assert "of 2:" not in run("train_step.py", "--output", output, "--sides", *sides, *sizes)


@pytest.mark.slow
def test_masking_is_measured_fresh_and_frozen():
    printed = run("masking.py")
    for kind in ("single tokens, fresh", "single tokens, frozen", "whole words, fresh", "whole words, frozen"):
        assert f"{kind}: B 256, T 128" in printed
    assert printed.count("million tokens a second") == 4
