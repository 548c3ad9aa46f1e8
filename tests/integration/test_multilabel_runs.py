"""Several labels a row from rows in memory to scores, answers and exports, with what is tuned on dev."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

import bert
from bert.commands.export import main as export
from bert.commands.predictions import predict_command as predict
from bert.interchange.writers import hf
from tests.helpers import lines_of, results_of

pytestmark = pytest.mark.medium

MARKS = {"billing": "ba", "login": "ko", "speed": "ri"}
"""The word that each label goes by."""

SMALL = {
    "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
              "max_position_embeddings": 16, "initializer_range": 0.2, "hidden_dropout_prob": 0,
              "attention_probs_dropout_prob": 0},
    "tokenizer": {"vocab_size": 64, "min_frequency": 1},
    "data": {"max_length": 16, "buckets": [16], "class_weights": "balanced", "calibration": "temperature"},
    "training": {"batch_size": 8, "epochs": None, "steps": 12, "eval_every": 6, "log_every": 6},
    "optimizer.learning_rate": 2e-2,
}  # fmt: skip


def rows(count: int, seed: int) -> list[dict]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        labels = [label for label in MARKS if rng.random() < 0.4]
        words = [*rng.choice(["tu", "ne", "lo"], 3), *(MARKS[label] for label in labels)]
        made.append({"text": " ".join(rng.permutation(words)), "labels": labels})
    return made


def shares(answers: list) -> np.ndarray:
    """Returns the probabilities of answers, [rows, labels]."""
    return np.array([list(answer.probabilities.values()) for answer in answers])


@pytest.fixture(scope="module")
def finished(made_once) -> Path:
    def train(folder: Path) -> None:
        bert.finetune("multilabel", init="none", train=rows(48, 0), dev=rows(20, 1), output_dir=folder, overrides=SMALL)

    return made_once("multilabel", train)


def test_a_run_is_scored_and_answers_with_the_thresholds_tuned_on_dev(finished: Path, capfdbinary) -> None:
    results = results_of(finished)
    thresholds = results["tuned"]["label_thresholds"]
    assert (results["main_metric"], results["baseline"]) == ("micro_f1", "constant_labels")
    classes = results["details"]["dev"]["classes"]
    assert [scores["threshold"] for scores in classes.values()] == thresholds
    assert results["dev"]["macro_f1"] == pytest.approx(np.mean([scores["f1"] for scores in classes.values()]))
    logged = {line["step"]: line["micro_f1"] for line in lines_of(finished) if line["split"] == "eval"}
    assert results["dev"]["micro_f1"] == logged[results["best_step"]] == max(logged.values())
    losses = [line["multilabel_loss"] for line in lines_of(finished) if line["split"] == "train"]
    assert losses[-1] < losses[0]
    capfdbinary.readouterr()
    assert predict([str(finished), "dev"]) == 0
    assert capfdbinary.readouterr().out == (finished / "predictions" / "dev.tsv").read_bytes()
    answers = bert.load(finished).predict([row["text"] for row in rows(20, 1)])
    written = [line.split("\t") for line in (finished / "predictions" / "dev.tsv").read_text().splitlines()[1:]]
    assert [";".join(answer.labels) for answer in answers] == [cells[1] for cells in written]
    assert any(len(answer.labels) > 1 for answer in answers)


def test_an_export_has_the_thresholds_and_answers_alike(finished: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)  # compared in tests/real
    assert export([str(finished), str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    tuned = results_of(finished)["tuned"]["label_thresholds"]
    assert (content["problem_type"], content["label_thresholds"]) == ("multi_label_classification", tuned)
    assert "(a label is predicted if the sigmoid of its logit reaches" in (tmp_path / "out" / "README.md").read_text()
    run, exported = bert.load(finished), bert.load(tmp_path / "out")
    texts = ["ba ri tu", "ne", "ko ri ba"]
    answers = run.predict(texts)
    assert [answer.labels for answer in exported.predict(texts)] == [answer.labels for answer in answers]
    np.testing.assert_allclose(shares(exported.predict(texts)), shares(answers), rtol=1e-5)
    assert exported.task.label_thresholds == run.task.label_thresholds == tuple(tuned)


def test_a_graph_has_the_temperature(finished: Path, tmp_path: Path) -> None:
    """The sigmoids of the graph's outputs, and of the run's divided by the temperature, are the run's probabilities."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
    run = bert.load(finished)
    temperature = results_of(finished)["tuned"]["calibration"]
    assert temperature != 1
    run.save(tmp_path / "out", "onnx")
    texts = ["ba ri tu", "ne lo tu", "ko ri ba"]
    rows = run.tokenize(texts)
    inputs = {name: np.asarray(values, np.int64) for name, values in rows.items()}
    [outputs] = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx").run(None, inputs)
    probabilities = shares(run.predict(texts))
    np.testing.assert_allclose(expit(outputs), probabilities, atol=1e-5)
    logits = run.outputs(
        run.require_task().features(run.tokenizer, run.require_task().examples_from_inputs(texts), run.data)
    )
    np.testing.assert_allclose(expit(np.asarray(logits) / temperature), probabilities, atol=1e-5)
