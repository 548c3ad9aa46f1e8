"""The lines of an exported README.md on long texts, run with transformers, give the model's own outputs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import bert
from bert.config import TaskDataConfig
from bert.data.long_texts import LongTexts
from bert.model.heads import BertForSequenceClassification
from bert.tasks.sequence_classification import CustomClassification

pytestmark = pytest.mark.real

TEXT = " ".join(f"Sentence {number} says that the boat is {number % 7} years older." for number in range(40))
SETTINGS = [LongTexts(64, "windows", 40), LongTexts(64, "windows_max", 40), LongTexts(64, "head_tail")]


def run_readme(folder: Path, text: str) -> dict:
    """Runs the Python blocks of README.md."""
    pytest.importorskip("torch", reason="torch is not installed")
    blocks = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec("\n".join(blocks).replace('"PATH"', repr(str(folder))).replace('"a text"', repr(text)), names)
    return names


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.mode)
def test_logits_of_the_readme(settings: LongTexts, shared: Path, tmp_path: Path) -> None:
    encoder = bert.load(shared / "models" / "all-MiniLM-L6-v2")
    labels = ("no", "yes", "perhaps")
    head = {
        "kernel": np.random.default_rng(0).normal(size=(384, 3)).astype(np.float32),
        "bias": np.zeros(3, np.float32),
    }
    data = TaskDataConfig(max_length=64, long_texts=settings.mode, doc_stride=settings.stride)
    model = dataclasses.replace(
        encoder,
        params={**encoder.params, "classifier": head},
        architecture=BertForSequenceClassification.__name__,
        task=CustomClassification(labels=labels, label_names=labels),
        labels=labels,
        texts_per_input=1,
        pooling=None,
        data=data,
        long_texts=settings,
    )
    model.save(tmp_path / "out")
    for text in (TEXT, "Short."):
        names = run_readme(tmp_path / "out", text)
        features = model.task.features(model.tokenizer, model.task.examples_from_inputs([text]), data)
        assert names["logits"].tolist() == pytest.approx(model.outputs(features)[0], abs=1e-4)
    again = bert.load(tmp_path / "out")
    assert again.predict(TEXT).probabilities == pytest.approx(model.predict(TEXT).probabilities, abs=1e-6)
    assert again.predict(TEXT) != again.predict(TEXT, long_texts="cut")


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.mode)
def test_vectors_of_the_readme(settings: LongTexts, shared: Path, tmp_path: Path) -> None:
    encoder = bert.load(shared / "models" / "all-MiniLM-L6-v2")
    data = dataclasses.replace(encoder.data, long_texts=settings.mode, doc_stride=settings.stride)
    pooling = dataclasses.replace(encoder.pooling, max_length=64)
    model = dataclasses.replace(encoder, pooling=pooling, data=data, long_texts=settings)
    model.save(tmp_path / "out")
    for text in (TEXT, "Short."):
        assert run_readme(tmp_path / "out", text)["embedding"].tolist() == pytest.approx(model.embed(text), abs=1e-5)
    assert np.allclose(bert.load(tmp_path / "out").embed(TEXT), model.embed(TEXT), atol=1e-6)
