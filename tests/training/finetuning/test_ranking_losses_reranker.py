"""Losses of rerankers, by hand; and their gradients over devices and micro-batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig, RerankerConfig
from bert.model.dropout import Dropout
from bert.model.heads import BertForMultipleChoice
from bert.parallel.backends import PmapParallelism
from bert.training.finetuning.ranking_losses import reranker_loss
from bert.training.losses import make_task_loss
from bert.training.step import compute_gradients
from tests.tiny_training import assert_same_gradients

LOGITS = np.array([[1, 2, -1], [0.5, 3, 9], [9, 9, 9]], np.float32)
BATCH = {
    "labels": np.array([[1, 0.5, 0], [0, 1, 0], [0, 0, 0]], np.float32),
    "choice_mask": np.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]], np.int32),
    "weights": np.array([1, 1, 0], np.float32),
}


def by_hand(loss: str) -> float:
    """Loops over queries and documents."""
    total = 0.0
    for logits, labels in ((LOGITS[0], BATCH["labels"][0]), (LOGITS[1, :2], BATCH["labels"][1, :2])):
        shares = 1 / (1 + np.exp(-logits))
        if loss == "binary":
            total -= np.mean(labels * np.log(shares) + (1 - labels) * np.log(1 - shares))
        elif loss == "ordinal":
            pairs = [(i, j) for i in range(len(labels)) for j in range(len(labels)) if labels[i] > labels[j]]
            total += np.mean([np.log(1 + np.exp(logits[j] - logits[i])) for i, j in pairs])
        else:
            total -= np.sum(labels / labels.sum() * np.log(np.exp(logits) / np.exp(logits).sum()))
    return total


@pytest.mark.parametrize("loss", ["binary", "ordinal", "listwise"])
def test_losses_are_those_of_loops(loss: str) -> None:
    made = reranker_loss(RerankerConfig(loss=loss))
    (total, weight), (hits, _) = made.sums(jnp.asarray(LOGITS), BATCH)
    assert made.metrics == (f"{loss}_loss", "accuracy")
    assert (float(total), float(weight), float(hits)) == (pytest.approx(by_hand(loss), rel=1e-5), 2, 1)


@pytest.mark.slow
def test_gradients_are_those_of_one_device_and_batch() -> None:
    """Uses dropout, eight devices and two micro-batches."""
    config = ModelConfig(61, 16, 1, 2, 32, max_position_embeddings=8, initializer_range=0.3)
    model, random = BertForMultipleChoice(config), np.random.default_rng(0)
    ids = random.integers(5, 61, (16, 3, 8)).astype(np.int32)
    params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
    has = np.arange(3) < random.integers(1, 4, (16, 1))
    batch = {
        "input_ids": ids,
        "token_type_ids": np.zeros_like(ids),
        "attention_mask": np.ones_like(ids),
        "choice_mask": has.astype(np.int32),
        "labels": (random.choice([0, 0.5, 1], has.shape) * has).astype(np.float32),
        "weights": (np.arange(16) % 7 < 6).astype(np.float32),
        "rows": np.arange(16, dtype=np.int32),
    }

    def apply(params: Any, batch: Any, dropout: Dropout | None) -> Any:
        inputs = (batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
        return model.apply({"params": params}, *inputs, dropout=dropout)

    result = []
    for devices, micro_batches in ((1, 1), (8, 2)):
        parallel = PmapParallelism(jax.devices()[:devices])
        objective = make_task_loss(reranker_loss(RerankerConfig()), apply)

        def step(params: Any, batch: Any, objective: Any = objective, axis: Any = parallel.axis) -> Any:
            return compute_gradients(params, batch, objective, lambda rows: Dropout.for_step(3, 5, rows), axis)

        grads, _ = parallel.compile(step)(parallel.put_state(params), parallel.shard_batch(batch, micro_batches))
        result.append(parallel.to_host(grads))
    assert_same_gradients(result[1], result[0])
    assert np.linalg.norm(result[0]["classifier"]["kernel"]) > 1e-3
