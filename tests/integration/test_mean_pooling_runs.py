"""Classifiers that start from a sentence encoder read the mean of the tokens, and their exports do as well."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

import bert
from bert.config import FinetuneConfig, ModelConfig, TaskDataConfig, TrainingConfig
from bert.errors import UserError
from bert.interchange.writers import hf
from bert.interchange.writers.averaging import with_averaging_layer
from bert.interchange.writers.signature import make_forward, parameters
from bert.model.heads import BertForSequenceClassification
from bert.model.pooling import Pooling
from bert.tasks import make_task
from bert.training.finetuning.setup import task_model_config
from tests.tiny_models import CONFIG, model_of, sentence_encoder

pytestmark = pytest.mark.medium

ROWS = [
    {"text": text, "label": label} for text, label in (("a b c", "x"), ("d e", "y"), ("a c c a", "x"), ("e e d", "y"))
]
SETTINGS = {"data": {"max_length": 16, "buckets": [16]}, "training": {"batch_size": 4, "epochs": None, "steps": 2}}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return sentence_encoder(tmp_path_factory.mktemp("encoder"))


def train(folder: Path, encoder: Path | str, task: str = "classification", **more: Any) -> bert.Pretrained:
    bert.finetune(task, init=encoder, train=ROWS, dev=ROWS, output_dir=folder, overrides={**SETTINGS, **more})
    return bert.load(folder)


def test_a_classifier_reads_the_mean_of_the_tokens(encoder: Path, tmp_path: Path, monkeypatch) -> None:
    model = train(tmp_path / "run", encoder)
    assert (model.config.pooler_type, model.config.pooler_input) == ("norm", "mean")
    assert "pooler" not in model.params["bert"]
    texts = ["a b c d e f", "b"]
    hidden = model.encode(texts)
    mean = np.stack([states[: mask.sum()].mean(axis=0) for states, mask in zip(hidden[0], hidden[2], strict=True)])
    scaled = (mean - mean.mean(axis=1, keepdims=True)) / mean.std(axis=1, keepdims=True)
    head = model.params["classifier"]
    logits = scaled @ head["kernel"] + head["bias"]
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.allclose(probabilities(model, texts), expected, atol=1e-5)
    monkeypatch.setattr(hf, "logits_difference", lambda model, folder: None)  # compared in tests/real
    model.save(tmp_path / "hf")
    published = bert.load(tmp_path / "hf")
    assert published.config.num_hidden_layers == CONFIG.num_hidden_layers + 1
    assert np.allclose(probabilities(published, texts), expected, atol=1e-5)
    model.save(tmp_path / "onnx", "onnx")
    graph = dataclasses.replace(model, graph=tmp_path / "onnx" / "model.onnx")
    assert np.allclose(probabilities(graph, texts), expected, atol=1e-5)
    model.save(tmp_path / "jax", "stablehlo", length=16)
    again = train(tmp_path / "again", tmp_path / "run")
    assert (again.config.pooler_type, again.config.pooler_input) == ("norm", "mean")


def probabilities(model: bert.Pretrained, texts: list[str]) -> list[list[float]]:
    return [list(answer.probabilities.values()) for answer in model.predict(texts)]


def test_the_pooling_can_be_chosen(encoder: Path, tmp_path: Path) -> None:
    first = train(tmp_path / "first", encoder, classifier_pooling="first")
    assert (first.config.pooler_type, first.config.pooler_input) == ("dense", "first")
    assert "pooler" in first.params["bert"]
    file = tmp_path / "first" / "config.yaml"
    content = yaml.safe_load(file.read_text())
    del content["classifier_pooling"]  # as an earlier version wrote it
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(content))
    bert.finetune(config=tmp_path / "old.yaml", output_dir=tmp_path / "repeated")
    repeated = bert.load(tmp_path / "repeated")
    assert jax.tree.map(np.array_equal, repeated.params, first.params) == jax.tree.map(lambda leaf: True, first.params)


@pytest.mark.parametrize(
    ("task", "choice", "pooling", "expected"),
    [
        ("classification", "init", Pooling("mean"), ("norm", "mean")),
        ("multilabel", "init", Pooling("mean"), ("norm", "mean")),
        ("regression", "init", Pooling("mean"), ("norm", "mean")),
        ("classification", "init", Pooling("cls"), ("dense", "first")),
        ("classification", "init", None, ("dense", "first")),
        ("classification", "mean", None, ("norm", "mean")),
        ("classification", "first", Pooling("mean"), ("dense", "first")),
        ("sst2", "init", Pooling("mean"), ("dense", "first")),
        ("sst2", "mean", None, ("norm", "mean")),
        ("tagging", "init", Pooling("mean"), ("dense", "first")),
    ],
)
def test_custom_tasks_pool_as_init_declares(task, choice, pooling, expected) -> None:
    config = FinetuneConfig(task=task, classifier_pooling=choice)
    model = task_model_config(config, CONFIG, "init", pooling)
    assert (model.pooler_type, model.pooler_input) == expected
    resolved = dataclasses.replace(config, model=CONFIG)
    assert task_model_config(resolved, CONFIG, "init", pooling).pooler_type == "dense", "a run that has begun"
    resolved = dataclasses.replace(config, model=model)
    assert task_model_config(resolved, CONFIG, "init", pooling) == model


def test_a_choice_that_has_no_effect_is_an_error() -> None:
    with pytest.raises(UserError, match=r"classifier_pooling is mean, but it is for .* and the task is tagging"):
        make_task(FinetuneConfig(task="tagging", classifier_pooling="mean"))
    for more in ({"init": "none"}, {"init": "x", "num_feature_layers": 2}):
        config = FinetuneConfig(task="classification", classifier_pooling="mean", **more)
        config = dataclasses.replace(config, training=TrainingConfig(epochs=1), data=TaskDataConfig(dir="x"))
        with pytest.raises(UserError, match=r"classifier_pooling is mean, but (init|num_feature_layers)"):
            config.check()


@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
def test_the_averaging_layer_gives_the_same_logits(activation: str, tmp_path: Path) -> None:
    config = ModelConfig(50, 32, 2, 4, 64, max_position_embeddings=24, pooler_act=activation, pooler_type="norm",
                         pooler_input="mean")  # fmt: skip
    model = model_of(tmp_path, BertForSequenceClassification(config, 3), None, labels=("a", "b", "c"))
    random = np.random.default_rng(0)
    ids = random.integers(5, 50, (6, 24))
    mask = (np.arange(24) < np.array([[24], [1], [2], [13], [20], [24]])).astype(np.int32)
    inputs = {"input_ids": ids, "token_type_ids": 0 * ids, "attention_mask": mask}
    models = (model, with_averaging_layer(model))
    ours, theirs = (np.asarray(make_forward(each)(parameters(each), inputs)["logits"]) for each in models)
    assert np.allclose(ours, theirs, atol=5e-5 if activation != "tanh" else 1e-5)


def test_models_without_an_averaging_layer_are_errors(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, pooler_type="norm", pooler_input="mean", position_embedding_type="rotary")
    model = model_of(tmp_path, BertForSequenceClassification(config, 2), None, labels=("a", "b"))
    with pytest.raises(UserError, match="classifier_pooling first"):
        with_averaging_layer(model)
