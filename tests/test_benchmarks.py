"""The benchmarks run, at toy sizes, and write down what they measure as they go."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bert
from bert.tokenizer import load_tokenizer
from tests.conftest import SMALL_MODEL

ROOT = Path(__file__).parents[1]


def run(name, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "XLA_FLAGS": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def shared(corpus, pretrained, tmp_path):
    """A folder that holds the corpus and a vocabulary where the benchmarks look for Wikipedia and BERT's own."""
    text, vocabulary = tmp_path / "shared/data/pretrain/enwiki", tmp_path / "shared/data/vocab/bert-base-uncased"
    text.mkdir(parents=True)
    vocabulary.mkdir(parents=True)
    shutil.copy(corpus, text / "train.txt")
    pieces = load_tokenizer(pretrained).get_vocab()
    (vocabulary / "vocab.txt").write_text("".join(f"{piece}\n" for piece in sorted(pieces, key=pieces.get)))
    return tmp_path / "shared"


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


@pytest.mark.slow
def test_building_examples_is_measured_beside_three_others(shared):
    printed = run("examples.py", "--shared", shared, "--megabytes", 1, "--rounds", 1, "--workers", 1, 2)
    rows = [line.split() for line in printed.splitlines()[2:]]
    assert [tuple(row[:2]) for row in rows] == [
        (side, workers) for side in ("raw", "ours", "run_mlm") for workers in "12"
    ] + [("google", "1")]
    assert all(float(value) > 0 for row in rows for value in row[2:])


@pytest.mark.slow
def test_packed_steps_are_measured_in_turns_with_unpacked_ones(shared):
    printed = run("packing.py", "--shared", shared, "--sequence_length", 64, "--batch_size", 2, "--rounds", 2)
    assert "2 steps of each in turns, B 2" in printed
    assert "a packed step takes" in printed


@pytest.mark.slow
def test_a_curve_is_drawn_beside_pytorch_and_not_run_twice(corpus, pretrained, tmp_path):
    pytest.importorskip("torch")
    places = [tmp_path, "--train", corpus, "--eval", corpus, "--tokenizer", pretrained]
    sizes = ["--seeds", 1, "--steps", 12, "--eval_every", 6, "--batch_size", 2, "--eval_rows", 8, "--dropout", 0]
    printed = run("curve.py", *places, *sizes)
    assert "ours seed 0: " in printed and "torch seed 0: " in printed
    for line in printed.splitlines()[-2:]:
        assert abs(float(line.split("|")[4])) <= 1e-4  # printed with four digits; nothing is drawn
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert "seed 0" not in run("curve.py", *places, *sizes)


@pytest.mark.slow
def test_embeddings_are_measured_against_onnxruntime(pretrained, tmp_path):
    pytest.importorskip("onnxruntime")
    arguments = [pretrained, "--output", tmp_path / "inference.json", "--sides", "ours", "onnxruntime", "transformers"]
    printed = run("inference.py", *arguments, "--rounds", 1, "--sentences", 20, "--batch_size", 4)
    assert all(side in printed for side in ("ours", "onnxruntime", "transformers"))


@pytest.mark.slow
def test_the_first_step_is_timed_cold_and_warm(corpus, tmp_path):
    small = [f"--data.train={corpus}", "--training.steps=5", *SMALL_MODEL, "--training.batch_size=8"]
    small += ["--data.sequence_length=32", "--tokenizer.vocab_size=200"]
    printed = run("startup.py", "--output", tmp_path / "startup.json", "--rounds", 1, "--quickstart", *small)
    assert "first step, cold" in printed and "first step, warm" in printed


@pytest.mark.slow
def test_fine_tuning_is_timed_beside_pytorch(pretrained, mrpc, tmp_path):
    pytest.importorskip("torch")
    bert.load(pretrained).save(tmp_path / "model")
    (tmp_path / "glue").mkdir()
    (tmp_path / "glue/MRPC").symlink_to(mrpc)
    places = [tmp_path / "model", tmp_path / "glue", "--output", tmp_path / "speed.json"]
    printed = run("finetune_speed.py", *places, "--rounds", 1, "--tasks", "MRPC")
    assert all(f"MRPC, {side}" in printed for side in ("ours cold", "ours warm", "torch"))
