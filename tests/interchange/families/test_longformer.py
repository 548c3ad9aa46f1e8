"""Longformer's folders: names and settings, and a classifier that is fine-tuned from a masked language model."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import bert
from bert.commands.finetune import main as finetune
from bert.files import read_json
from bert.interchange.modules import build_module
from tests.helpers import lines_of
from tests.interchange.hf_folders import LONGFORMER, edit, random_model
from tests.tiny_models import PIECES

GLOBAL = [f"{part}_global" for part in ("query", "key", "value")]


def test_names_and_settings_are_longformers(made, tmp_path: Path) -> None:
    model = made("BertForMaskedLM", LONGFORMER)
    model.save(tmp_path / "out")
    tensors, content = load_file(tmp_path / "out/model.safetensors"), read_json(tmp_path / "out/config.json")
    assert (content["model_type"], content["architectures"]) == ("longformer", ["LongformerForMaskedLM"])
    assert (content["attention_window"], content["sep_token_id"], content["pad_token_id"]) == ([6, 6], 3, 0)
    attention = model.params["bert"]["encoder"]["layer_1"]["attention"]
    for name, ours in zip(GLOBAL, ("global_query", "global_key", "global_value"), strict=True):
        stored = tensors[f"longformer.encoder.layer.1.attention.self.{name}.weight"]
        np.testing.assert_array_equal(stored, attention[ours]["kernel"].T)


@pytest.mark.medium
def test_settings_as_transformers_and_the_hub_write_them(made, tmp_path: Path) -> None:
    made("Bert", LONGFORMER).save(tmp_path / "out")
    edit(tmp_path / "out", attention_window=6, attention_mode="longformer", ignore_attention_mask=False)
    assert bert.load(tmp_path / "out").config == LONGFORMER
    edit(tmp_path / "out", attention_window=None, sep_token_id=None)
    config = bert.load(tmp_path / "out").config
    assert (config.attention_window, config.global_attention_sep_id) == (256, 2)


def test_positions_begin_after_the_padding_id(made, tmp_path: Path) -> None:
    made("BertForMaskedLM", dataclasses.replace(LONGFORMER, position_offset=0)).save(tmp_path / "out")
    assert bert.load(tmp_path / "out").config == LONGFORMER


@pytest.mark.slow
def test_a_classifier_is_fine_tuned_from_a_masked_language_model(sst2: Path, tmp_path: Path) -> None:
    """The loss falls, also through the projections of the global token, and the classifier is exported."""
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    config = dataclasses.replace(
        LONGFORMER,
        vocab_size=len(PIECES),
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    start = random_model(tmp_path / "vocab.txt", "BertForMaskedLM", config)
    params = jax.jit(build_module(start).init)(jax.random.key(0), np.zeros((1, 9), np.int32))["params"]
    start = dataclasses.replace(start, params=jax.device_get(params))
    start.save(tmp_path / "start")
    run = tmp_path / "run"
    arguments = ["--training.epochs=6", "--training.batch_size=8", "--data.max_length=112"]
    arguments += ["--data.buckets=112", "--optimizer.learning_rate=1e-2"]
    arguments = [*arguments, f"--data.dir={sst2}", f"--output_dir={run}", f"--init={tmp_path / 'start'}"]
    assert finetune(["--config=sst2", *arguments]) == 0
    losses = [line["loss"] for line in lines_of(run) if line["split"] == "eval"]
    assert losses[-1] < losses[0] / 2
    model = bert.load(run)
    assert model.config.global_attention_sep_id == 3
    before, after = (
        one.params["bert"]["encoder"]["layer_0"]["attention"]["global_value"]["kernel"] for one in (start, model)
    )
    assert np.abs(before - after).max() > 1e-4
    model.save(tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["architectures"] == [
        "LongformerForSequenceClassification"
    ]
    again = bert.load(tmp_path / "hf")
    texts = ["ba ri tu", "lo " * 60]
    assert [one.label for one in again.predict(texts)] == [one.label for one in model.predict(texts)]
