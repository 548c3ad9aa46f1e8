"""A classifier over the mean of MiniLM's tokens, exported and run with transformers' pipeline."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import bert
from bert.tasks.sequence_classification import CustomClassification

pytestmark = pytest.mark.real

TEXTS = ["I was charged twice for one month.", "No.", "The app closes when I log in, and again when I log out. " * 8]


def test_the_pipeline_gives_the_same_probabilities(shared: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    encoder = bert.load(shared / "models" / "all-MiniLM-L6-v2")
    labels = ("no", "yes", "perhaps")
    kernel = np.random.default_rng(0).normal(scale=0.1, size=(384, 3)).astype(np.float32)
    own = {name: tree for name, tree in encoder.params["bert"].items() if name != "pooler"}
    model = dataclasses.replace(
        encoder,
        config=dataclasses.replace(encoder.config, pooler_type="norm", pooler_input="mean"),
        params={"bert": own, "classifier": {"kernel": kernel, "bias": np.zeros(3, np.float32)}},
        architecture="BertForSequenceClassification",
        task=CustomClassification(labels=labels, label_names=labels),
        labels=labels,
        texts_per_input=1,
        pooling=None,
    )
    model.save(tmp_path / "out")
    pipeline = library.pipeline("text-classification", str(tmp_path / "out"), device="cpu", top_k=None)
    for answer, theirs in zip(model.predict(TEXTS), pipeline(TEXTS), strict=True):
        expected = {each["label"]: each["score"] for each in theirs}
        assert answer.probabilities == pytest.approx(expected, abs=1e-5)
