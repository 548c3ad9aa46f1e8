"""`evaluate` on a published classifier: scores by scikit-learn from the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax
from sklearn import metrics

import bert

pytestmark = pytest.mark.real

ROWS = 24


def test_the_scores_are_those_of_transformers_and_scikit_learn(shared: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(0)
    names = {0: "NEGATIVE", 1: "NEUTRAL", 2: "POSITIVE"}
    encoder, folder = shared / "models" / "all-MiniLM-L6-v2", tmp_path / "published"
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(
        encoder, num_labels=3, id2label=names, label2id={name: label for label, name in names.items()}
    ).eval()
    torch.nn.init.normal_(reference.classifier.weight, std=0.5)  # so that the predictions differ
    reference.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    tokenizer.save_pretrained(folder)
    lines = (shared / "data" / "glue" / "SST-2" / "dev.tsv").read_text().splitlines()[1 : ROWS + 1]
    texts = [line.split("\t")[0] for line in lines]
    with torch.no_grad():
        logits = reference(**tokenizer(texts, padding=True, return_tensors="pt")).logits.numpy()
    predicted, shares = logits.argmax(axis=1), softmax(logits, axis=1)
    labels = np.where(np.arange(ROWS) % 3, predicted, np.arange(ROWS) % 9 // 3)
    (tmp_path / "rows.tsv").write_text(
        "text\tlabel\n"
        + "".join(f"{text}\t{names[label].title()}\n" for text, label in zip(texts, labels, strict=True))
    )
    model = bert.load(folder)
    result = model.evaluate(tmp_path / "rows.tsv")
    expected = {
        "accuracy": metrics.accuracy_score(labels, predicted),
        "macro_f1": metrics.f1_score(labels, predicted, average="macro"),
        "matthews": metrics.matthews_corrcoef(labels, predicted),
    }
    assert result.metrics == pytest.approx(expected)
    assert result.details["confusion_matrix"] == metrics.confusion_matrix(labels, predicted).tolist()
    assert [answer.label for answer in model.predict(texts)] == [names[label] for label in predicted]
    bins = np.ceil(shares.max(axis=1) * 15).astype(int)
    gaps = [abs((labels == predicted)[bins == one].sum() - shares.max(axis=1)[bins == one].sum()) for one in set(bins)]
    assert result.calibration is not None and result.calibration.ece == pytest.approx(sum(gaps) / ROWS, abs=1e-5)
    accuracy, deviation = expected["accuracy"], np.sqrt(expected["accuracy"] * (1 - expected["accuracy"]) / ROWS)
    assert result.intervals["accuracy"].low == pytest.approx(accuracy - 1.96 * deviation, abs=0.06)
