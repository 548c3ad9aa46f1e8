"""Texts that share rows of the encoder have the outputs, losses and gradients of padded rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import EmbeddingConfig, ModelConfig
from bert.config.model import MIN_BLOCK
from bert.data.batching import LengthGroups
from bert.data.packed_batches import PackedTexts
from bert.data.rows import IGNORE_INDEX, TokenRows
from bert.model.dropout import Dropout
from bert.model.heads import HEADS, BertForEmbedding
from bert.parallel.backends import MeshParallel, Parallelism, PmapParallelism
from bert.training.finetuning.embedding_defaults import TRAINED_POOLING_MODES
from bert.training.finetuning.kinds import apply_head, make_apply
from bert.training.finetuning.ranking_losses import embed, embedding_loss, make_embedding_loss
from bert.training.losses import LOSSES, Loss, make_task_loss
from bert.training.step import compute_gradients
from tests.helpers import OPTIONS
from tests.tiny_training import assert_same_gradients

T, B, PACKED = 12, 16, 40
CONFIG = ModelConfig(61, 16, 2, 2, 32, max_position_embeddings=PACKED, initializer_range=0.3)


def spans(random: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
    return (random.random((len(lengths), 2)) * lengths[:, None]).astype(np.int32)


LABELS = {
    "sequence_classification": lambda random, lengths: random.integers(0, 3, len(lengths)).astype(np.int32),
    "regression": lambda random, lengths: random.random(len(lengths), np.float32),
    "token_classification": lambda random, lengths: np.where(
        random.random(lengths.sum()) < 0.5, IGNORE_INDEX, random.integers(0, 3, lengths.sum())
    ).astype(np.int32),
    "question_answering": spans,
}


def rows_for(kind: str, count: int = B) -> TokenRows:
    """Rows of two segments; every fifth token is the mask token 4."""
    random = np.random.default_rng(0)
    lengths = random.integers(2, T + 1, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = random.integers(5, 61, offsets[-1]).astype(np.int32)
    ids[::5] = 4
    labels = LABELS[kind](random, lengths)
    return TokenRows(ids, offsets, (lengths // 2).astype(np.int32), labels, token_labels=kind == "token_classification")


@functools.cache
def loss_and_params(kind: str, config: ModelConfig) -> tuple[Loss, Any]:
    model = HEADS["sequence_classification" if kind == "regression" else kind](
        config, {"regression": 1, "question_answering": 2}.get(kind, 3)
    )
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, T), jnp.int32))["params"]
    return make_task_loss(LOSSES[kind], make_apply(model, None, apply_head)), params


def gradients(
    loss: Loss, params: Any, batch: dict[str, np.ndarray], parallel: Parallelism, micro_batches: int, drop: bool
) -> tuple[Any, Any]:
    source = (lambda rows: Dropout.for_step(3, 5, rows)) if drop else (lambda rows: None)
    step = parallel.compile(lambda params, batch: compute_gradients(params, batch, loss, source, parallel.axis))
    grads, sums = step(parallel.put_state(params), parallel.shard_batch(batch, micro_batches))
    return parallel.to_host(grads), parallel.to_host(sums)


PLACES = {
    "one": lambda: PmapParallelism(jax.devices()[:1]),
    "eight": lambda: PmapParallelism(jax.devices()[:8]),
    "mesh": lambda: MeshParallel((2, 2, 2), jax.devices()[:8]),
}


def packed_batch(kind: str, shares: int, rows: int = B, length: int = PACKED) -> dict[str, np.ndarray]:
    return PackedTexts([8], T, shares, True, (0,), length).divide_rows(rows_for(kind, rows), np.arange(rows), B)


def assert_same(kind: str, config: ModelConfig, length: int = PACKED) -> None:
    """Compares a packed batch of 13 rows with the padded one: counts and loss, and every gradient."""
    loss, params = loss_and_params(kind, config)
    padded = {**rows_for(kind, 13).batch(np.arange(13), T, B), "rows": np.arange(B, dtype=np.int32)}
    expected, expected_sums = gradients(loss, params, padded, PLACES["one"](), 1, drop=False)
    grads, sums = gradients(loss, params, packed_batch(kind, 1, 13, length), PLACES["one"](), 1, drop=False)
    for name, (total, weight) in expected_sums.items():
        np.testing.assert_allclose(sums[name], (total, weight), rtol=1e-5)
    flat, same = (jax.tree_util.tree_leaves_with_path(tree) for tree in (expected, grads))
    norm = max(float(np.linalg.norm(leaf)) for _, leaf in flat)
    for (path, one), (_, other) in zip(flat, same, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 * norm, err_msg=jax.tree_util.keystr(path))


QUICK = ("sequence_classification", "rotary positions", "mean")
"""Cases that run often; the others are slow."""


ATTENTION = (
    *("fixed positions", "rotary positions", "local attention", "relative positions", "disentangled attention"),
    *("linear disentangled attention", "positions of Transformer-XL", "shared keys", "wide heads", "sandwich"),
    *("pooler of the mean", "convolution", "halting", "modern"),
)
"""The `OPTIONS` of which tokens and positions a layer or pooler reads."""


def cases(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.medium
@pytest.mark.parametrize("kind", cases(LABELS))
def test_losses_and_gradients_are_those_of_padded_rows(kind: str) -> None:
    """Learned positions."""
    assert_same(kind, CONFIG)


@pytest.mark.medium
@pytest.mark.parametrize("option", cases(ATTENTION))
def test_every_kind_of_attention_can_be_packed(option: str) -> None:
    """Shared keys have ALiBi, the sandwich has token dropout and local layers."""
    assert_same("sequence_classification", dataclasses.replace(CONFIG, **OPTIONS[option]))


@pytest.mark.medium
def test_local_attention_in_blocks() -> None:
    """Blocks of 32 tokens, which texts cross."""
    length = 3 * MIN_BLOCK + 4
    config = dataclasses.replace(
        CONFIG, attention_window=2, position_embedding_type="rotary", max_position_embeddings=length
    )
    assert config.local_block(length)
    assert_same("token_classification", config, length)


@pytest.mark.medium
def test_a_changed_text_changes_only_its_own_output() -> None:
    _, params = loss_and_params("sequence_classification", CONFIG)
    model, batch = HEADS["sequence_classification"](CONFIG, 3), packed_batch("sequence_classification", 1)
    apply = jax.jit(lambda batch: make_apply(model, None, apply_head)(params, batch, None))
    changed = {**batch, "input_ids": batch["input_ids"].copy()}
    changed["input_ids"][3] = (batch["input_ids"][3] + 7) % 61
    same = np.asarray(apply(changed)) == np.asarray(apply(batch))
    assert same.all(axis=1).tolist() == [row != 3 for row in range(B)]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("place", "micro_batches"),
    [("eight", 2), *(pytest.param(*more, marks=pytest.mark.slow) for more in [("mesh", 1), ("one", 4)])],
)
def test_devices_and_micro_batches_change_nothing(place: str, micro_batches: int) -> None:
    """Uses dropout, whose masks depend on the packed row of a text."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    loss, params = loss_and_params("sequence_classification", config)
    expected, expected_sums = gradients(
        loss, params, packed_batch("sequence_classification", 1), PLACES["one"](), 1, True
    )
    parallel: Parallelism = PLACES[place]()
    batch = packed_batch("sequence_classification", parallel.row_shares * micro_batches)
    grads, sums = gradients(loss, params, batch, parallel, micro_batches, drop=True)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=1e-5)


def pairs() -> dict[str, np.ndarray]:
    """Sixteen queries with their documents; the last two rows fill."""
    rows = rows_for("regression", 2 * B)
    batch = {
        name: array.reshape(B, 2, *array.shape[1:]) for name, array in rows.batch(np.arange(2 * B), T, 2 * B).items()
    }
    weights = (np.arange(B) < 14).astype(np.float32)
    numbers = np.where(weights > 0, np.arange(B), -1).astype(np.int32)
    batch |= {"weights": weights, "labels": batch["labels"][:, 0], "query_numbers": numbers}
    return batch | {"document_numbers": numbers[:, None], "rows": np.arange(B, dtype=np.int32)}


@functools.cache
def embedding_gradients(place: str, micro_batches: int, pooling: str, packed: bool, drop: bool) -> tuple[Any, Any]:
    parallel: Parallelism = PLACES[place]()
    model = BertForEmbedding(CONFIG, pooling=pooling)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, T), jnp.int32))["params"]
    loss = make_embedding_loss(embedding_loss(EmbeddingConfig(), parallel.axis), make_apply(model, None, embed))
    shares = parallel.row_shares * micro_batches
    groups = PackedTexts([8], T, shares, False, (0,), PACKED) if packed else LengthGroups([8], T, shares, False, (0,))
    return gradients(loss, params, groups.divide_sequences(pairs()), parallel, micro_batches, drop)


@pytest.mark.medium
@pytest.mark.parametrize("pooling", cases(mode for mode in TRAINED_POOLING_MODES if mode not in ("splade", "tokens")))
def test_packed_embeddings_are_those_of_padded_texts(pooling: str) -> None:
    expected, expected_sums = embedding_gradients("one", 1, pooling, packed=False, drop=False)
    grads, sums = embedding_gradients("one", 1, pooling, packed=True, drop=False)
    np.testing.assert_allclose(sums["in_batch_loss"], expected_sums["in_batch_loss"], rtol=1e-5)
    norm = max(float(np.linalg.norm(leaf)) for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(other, one, atol=1e-5 * norm), expected, grads)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("place", "micro_batches"), [pytest.param("eight", 1), pytest.param("mesh", 2, marks=pytest.mark.slow)]
)
def test_devices_change_nothing_for_packed_embeddings(place: str, micro_batches: int) -> None:
    expected, expected_sums = embedding_gradients("one", 1, "mean", packed=True, drop=True)
    grads, sums = embedding_gradients(place, micro_batches, "mean", packed=True, drop=True)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=1e-5)
