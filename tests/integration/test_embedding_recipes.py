"""Recipes with the settings of published embedding models, on small models of their families."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import bert
from bert.config import FinetuneConfig, recipe_folder
from bert.config.yaml_io import load_config
from bert.interchange.writers import hf
from bert.tasks import make_task
from tests.helpers import lines_of
from tests.tiny_models import EMBEDDING_RECIPES, QUESTIONS, embedding_recipe_run

pytestmark = pytest.mark.medium

FAMILIES = {"nomic_embed": "nomic_bert", "qwen3_embed": "qwen3"}


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=pytest.mark.slow) if name == "qwen3_embed" else name for name in EMBEDDING_RECIPES],
)
def test_both_sides_are_trained_and_read_back_with_their_prompts(recipe: str, tmp_path: Path, monkeypatch) -> None:
    run = embedding_recipe_run(recipe, tmp_path)
    assert json.loads((tmp_path / "init" / "config.json").read_text())["model_type"] == FAMILIES[recipe]
    assert [line["step"] for line in lines_of(tmp_path / "run") if line["split"] == "train"] == [3]
    published = load_config(FinetuneConfig, recipe_folder() / f"{recipe}.yaml").embedding
    prompts = {"query": published.query_prompt, "document": published.document_prompt}
    assert prompts["query"]

    config = load_config(FinetuneConfig, tmp_path / "run" / "config.yaml")
    task, tokenizer = make_task(config), run.model.tokenizer
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    rows = task.features(tokenizer, task.read(tmp_path / "data", "train"), config.data)
    batch = rows.batch(np.arange(2), 160, 2)
    for row, texts, masks in zip(QUESTIONS, batch["input_ids"], batch["attention_mask"], strict=False):
        sides = [("query", row["query"]), ("document", row["positive"]), ("document", row["negatives"][0])]
        for (side, text), ids, mask in zip(sides, texts, masks, strict=True):
            assert ids[mask == 1].tolist() == tokenizer.encode(prompts[side] + text).ids

    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)  # compared in tests/real
    run.model.save(tmp_path / "out")
    texts = [row["query"] for row in QUESTIONS]
    untrained = bert.load(tmp_path / "init").replace(pooling=run.model.pooling)
    models = [run.model, bert.load(tmp_path / "run"), bert.load(tmp_path / "out")]
    if config.lora.rank is not None:
        run.model.save(tmp_path / "adapter", format="peft", base=str(tmp_path / "init"))
        models += [bert.load(tmp_path / "adapter"), bert.load(tmp_path / "init", adapter=tmp_path / "adapter")]
    for model in models:
        assert model.pooling_or_default.mode == published.pooling
        for side, prompt in prompts.items():
            vectors = model.embed(texts, prompt=side)
            np.testing.assert_allclose(vectors, model.embed([prompt + text for text in texts]), atol=1e-5)
            np.testing.assert_allclose(vectors, run.model.embed(texts, prompt=side), atol=1e-5)
            np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
            assert np.abs(vectors - untrained.embed(texts, prompt=side)).max() > 1e-4
