"""Error analysis of a classification run: scores of each label, the confusion matrix and the misclassified rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from bert import metrics
from bert.runs.prediction_plots import draw_confusion_matrix
from bert.tasks import TASKS
from bert.tasks.sequence_classification import ClassificationPredictions, CustomClassification, Examples

FILES = ["confusion_matrix.png", "errors.tsv", "reliability.png"]


def test_scores_of_each_label_by_hand() -> None:
    scores = metrics.by_class(("a", "b", "c"), np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1]))
    assert scores["confusion_matrix"] == [[1, 0, 0], [1, 2, 0], [0, 0, 0]]
    assert scores["classes"]["a"] == {"precision": 0.5, "recall": 1, "f1": pytest.approx(2 / 3), "support": 1,
                                     "predicted": 2}  # fmt: skip
    assert scores["classes"]["b"]["recall"] == pytest.approx(2 / 3)
    assert scores["classes"]["c"] == dict.fromkeys(("precision", "recall", "f1", "support", "predicted"), 0)


@pytest.mark.medium
def test_errors_are_the_surest_first_with_their_texts(tmp_path: Path) -> None:
    task = CustomClassification(labels=("0", "1"), label_names=("no", "yes"))
    texts = ["right", "less sure", 'a "quote"\tand\r\nlines', "sure"]
    examples = Examples(texts, None, np.array([0, 0, 1, 0]), list("0123"))
    shares = np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3], [0.1, 0.9]])
    predictions = ClassificationPredictions(shares.argmax(-1), shares)
    paths = task.write_details(tmp_path / "predictions", "dev", predictions, examples)
    assert sorted(path.name for path in paths) == FILES
    assert paths[0].read_text() == (
        "text\tprediction\tlabel\tprobability\n"
        "sure\tyes\tno\t0.900000\n"
        'a "quote" and lines\tno\tyes\t0.700000\n'
        "less sure\tyes\tno\t0.600000\n"
    )
    pairs = Examples(["a"], ["b"], np.array([2]), ["0"])
    predicted = ClassificationPredictions(np.array([0]), np.array([[1.0, 0, 0]]))
    paths = TASKS["mnli"].write_details(tmp_path, "dev_mismatched", predicted, pairs)
    names = ["errors.tsv", "confusion_matrix.png", "reliability.png"]
    assert [path.name for path in paths] == [f"dev_mismatched_{name}" for name in names]
    head, row = paths[0].read_text().splitlines()
    assert head.split("\t") == ["text_a", "text_b", "prediction", "label", "probability"]
    assert row.split("\t") == ["a", "b", "entailment", "contradiction", "1.000000"]


@pytest.mark.medium
@pytest.mark.parametrize("count", [2, pytest.param(25, marks=pytest.mark.slow), 200])
def test_a_confusion_matrix_of_any_number_of_labels(tmp_path: Path, count: int) -> None:
    matrix = np.random.default_rng(0).poisson(1, (count, count)) + 1000 * np.eye(count, dtype=int)
    matrix[1] = 0  # a label without rows
    names = [f"{'a long name of a label ' * (number % 3)}$_{number}" for number in range(count)]
    path = draw_confusion_matrix(tmp_path / "new" / "matrix.png", matrix, names, "task $x_1$, dev")
    assert path is not None
    height, width = imread(path).shape[:2]
    assert max(height, width) < 3200


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert draw_confusion_matrix(tmp_path / "matrix.png", np.eye(2), ["a", "b"], "") is None


def test_a_run_tells_of_its_errors(finetuned: Path) -> None:
    text = (finetuned / "results.json").read_text()
    results = json.loads(text)
    assert list(results["details"]) == ["dev"]
    classes, matrix = (results["details"]["dev"][key] for key in ("classes", "confusion_matrix"))
    assert {name: scores["support"] for name, scores in classes.items()} == {"negative": 6, "positive": 11}
    assert np.trace(matrix) / np.sum(matrix) == pytest.approx(results["dev"]["accuracy"])
    assert f"[{matrix[0][0]}, {matrix[0][1]}]" in text, "a row of the matrix on one line"
    errors = (finetuned / "predictions" / "errors.tsv").read_text().splitlines()
    assert len(errors) - 1 == np.sum(matrix) - np.trace(matrix)
    shares = [float(line.split("\t")[-1]) for line in errors[1:]]
    assert shares == sorted(shares, reverse=True)
    assert (finetuned / "predictions" / "confusion_matrix.png").is_file()
