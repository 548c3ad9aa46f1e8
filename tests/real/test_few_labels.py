"""The recipe few_shot with MiniLM on a few rows of SST-2, and its export in transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert

pytestmark = pytest.mark.real

OVERRIDES: dict[str, Any] = {"data": {"buckets": [16, 32]}}


def rows_of(folder: Path, split: str) -> list[dict[str, str]]:
    lines = (folder / f"{split}.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return [dict(zip(("text", "label"), line.split("\t"), strict=True)) for line in lines]


def test_it_beats_the_recipe_classification_and_transformers_reads_it(shared: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    train, dev = (rows_of(shared / "data" / "glue" / "SST-2", split) for split in ("train", "dev"))
    stream = random.Random(1)
    few = [row for label in "01" for row in stream.sample([each for each in train if each["label"] == label], 8)]
    dev = random.Random(0).sample(dev, 300)
    runs = {
        recipe: bert.finetune(
            recipe,
            init=shared / "models" / "all-MiniLM-L6-v2",
            train=few,
            dev=dev,
            output_dir=tmp_path / recipe,
            batch_size=16,
            max_length=32,
            overrides=OVERRIDES,
        )
        for recipe in ("few_shot", "classification")
    }
    accuracy = {recipe: run.results["dev"]["accuracy"] for recipe, run in runs.items()}
    assert accuracy["few_shot"] > max(accuracy["classification"], 0.55), accuracy
    model, texts = runs["few_shot"].model, [row["text"] for row in dev[:8]]
    model.save(tmp_path / "hf")
    theirs = library.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer = library.AutoTokenizer.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        logits = theirs(**tokenizer(texts, padding=True, truncation=True, max_length=32, return_tensors="pt")).logits
    ours = np.log([list(answer.probabilities.values()) for answer in model.predict(texts)])
    np.testing.assert_allclose(ours, torch.log_softmax(logits, dim=1).numpy(), atol=1e-4)
