"""Losses of embeddings and rerankers: by hand, and the same for devices, meshes and micro-batches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import entropy

from bert.config import EmbeddingConfig, ModelConfig, RerankerConfig
from bert.data.batching import LengthGroups
from bert.data.rows import SCORE_MASK, TOKEN_ARRAYS, number_texts
from bert.model.dropout import Dropout
from bert.model.heads import BertForEmbedding, BertForMultipleChoice
from bert.model.pooling import Pooling
from bert.model.pretraining import BertForMaskedLM
from bert.model.reductions import pool
from bert.parallel.backends import MeshParallel, Parallelism, PmapParallelism
from bert.training.finetuning.embedding_defaults import TRAINED_POOLING_MODES
from bert.training.finetuning.ranking_losses import (
    embed,
    embedding_loss,
    make_embedding_loss,
    reranker_loss,
)
from bert.training.length_groups import SequenceOutputs
from bert.training.losses import make_task_loss
from bert.training.step import compute_gradients
from tests.tiny_training import assert_same_gradients

T, B, C = 8, 16, 3
CONFIG = ModelConfig(61, 16, 1, 2, 32, max_position_embeddings=T, initializer_range=0.3)
MODEL = BertForEmbedding(CONFIG)
SPLADE = BertForEmbedding(CONFIG, pooling="splade")
TOKENS = BertForEmbedding(dataclasses.replace(CONFIG, initializer_range=0.1), pooling="tokens", dimensions=6)
FLOPS = {"pooling": "splade", "query_flops_weight": 0.5, "document_flops_weight": 0.25}


@functools.cache
def initial_params(model: BertForEmbedding = MODEL) -> Any:
    return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, T), jnp.int32))["params"]


def batch_of(rows: int = B) -> dict[str, np.ndarray]:
    """Rows with no, one or two negatives; some queries and documents are there twice, and every seventh row fills."""
    random = np.random.default_rng(0)
    lengths = random.integers(3, T + 1, (rows, 1 + C))
    masks = (np.arange(T) < lengths[..., None]).astype(np.int32)
    ids = random.integers(5, 61, masks.shape).astype(np.int32) * masks
    numbers = np.arange(rows * C, dtype=np.int32).reshape(rows, C)
    numbers[:, 1:][np.arange(rows)[:, None] % C <= np.arange(C - 1)] = -1
    queries = np.arange(rows, dtype=np.int32)
    numbers[9, 0], queries[12] = numbers[2, 0], queries[5]
    return {
        "input_ids": ids,
        "token_type_ids": np.zeros_like(ids),
        "attention_mask": masks,
        "query_numbers": queries,
        "document_numbers": numbers,
        "labels": random.choice([0, 0.25, 0.5, 1], rows).astype(np.float32),
        "weights": (np.arange(rows) % 7 < 6).astype(np.float32),
        "rows": np.arange(rows, dtype=np.int32),
    }


def embeddings_and_batch() -> tuple[np.ndarray, dict[str, Any]]:
    batch = batch_of()
    vectors = np.random.default_rng(1).normal(size=(B, 1 + C, 6)).astype(np.float32)
    return vectors, batch


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def sums_of(vectors: np.ndarray, batch: dict[str, Any], **settings: Any) -> list[float]:
    sums = embedding_loss(EmbeddingConfig(**settings), None).sums(jnp.asarray(vectors.reshape(len(vectors), -1)), batch)
    return [float(number) for pair in sums for number in pair]


def in_batch_by_hand(vectors: np.ndarray, batch: dict[str, Any], temperature: float) -> tuple[float, float]:
    """Loops over queries and documents."""
    vectors, total, hits = unit(vectors), 0.0, 0
    documents = batch["document_numbers"]
    for row in np.flatnonzero(batch["weights"]):
        right = vectors[row, 0] @ vectors[row, 1] / temperature
        others = []
        for other in np.flatnonzero(batch["weights"]):
            for place in range(C):
                is_there = documents[other, place] >= 0
                same_text = documents[other, place] == documents[row, 0]
                same_query = place == 0 and batch["query_numbers"][other] == batch["query_numbers"][row]
                if is_there and not same_text and not same_query:
                    others.append(vectors[row, 0] @ vectors[other, 1 + place] / temperature)
        total += np.log(np.exp(right) + np.sum(np.exp(others))) - right
        hits += right > max(others)
    return total, hits


def embeddings_of(batch: dict[str, Any], variables: Any, dropout: Dropout | None = None) -> np.ndarray:
    """Returns the embeddings of the texts of all rows, encoded in groups."""

    def of_rows(batch: Any) -> Any:
        numbers = jnp.concatenate([batch[name] for name in sorted(batch) if name.startswith("sequences")])
        return SequenceOutputs(embed(MODEL, variables, batch, dropout), numbers).of_rows(batch, None)

    groups = LengthGroups([5], T, 1, False, (0,) * 4).divide_sequences(batch)
    return np.asarray(jax.jit(of_rows)(groups)).reshape(B * (1 + C), -1)


@pytest.mark.medium
def test_embeddings_of_groups_are_those_of_padded_rows() -> None:
    variables, batch = {"params": initial_params()}, batch_of()
    flat = [batch[name].reshape(-1, T) for name in TOKEN_ARRAYS]
    expected = np.asarray(jax.jit(MODEL.apply)(variables, *flat)).reshape(B, 1 + C, -1)
    found = embeddings_of(batch, variables).reshape(B, 1 + C, -1)
    is_real = np.insert(batch["document_numbers"] >= 0, 0, True, axis=1) & (batch["weights"] > 0)[:, None]
    np.testing.assert_allclose(found[is_real], expected[is_real], atol=1e-6)
    assert not np.allclose(found[~is_real], expected[~is_real], atol=1e-3), "texts that fill a row have one token"


SLOW_LOSSES = ("cosent", "same_label", "splade", "tokens")
SLOW_PLACES = (("eight", 1), ("one", 4), ("mesh", 2))


@pytest.mark.medium
def test_in_batch_loss_is_that_of_loops() -> None:
    vectors, batch = embeddings_and_batch()
    total, weight, hits, _ = sums_of(vectors, batch, temperature=0.3)
    expected, expected_hits = in_batch_by_hand(vectors, batch, 0.3)
    assert (total, weight, hits) == (pytest.approx(expected, rel=1e-5), 14, expected_hits)


@pytest.mark.medium
def test_what_is_the_same_is_no_negative() -> None:
    """Rows with the same document or the same query are not negatives of each other."""
    batch = {name: array[:2] for name, array in batch_of().items()}
    batch["document_numbers"] = np.array([[0, -1, -1], [0, -1, -1]], np.int32)
    vectors = embeddings_and_batch()[0][:2]
    assert sums_of(vectors, batch)[:1] == [0]
    batch["document_numbers"] = np.array([[0, -1, -1], [1, -1, -1]], np.int32)
    assert sums_of(vectors, batch)[0] > 0
    assert sums_of(vectors, {**batch, "query_numbers": np.zeros(2, np.int32)})[:1] == [0]


@pytest.mark.medium
def test_cosent_is_the_sum_over_pairs_of_rows() -> None:
    vectors, batch = embeddings_and_batch()
    cosines = np.einsum("bd,bd->b", unit(vectors)[:, 0], unit(vectors)[:, 1])
    rows, scores = np.flatnonzero(batch["weights"]), batch["labels"]
    pairs = [np.exp((cosines[j] - cosines[i]) / 0.2) for i in rows for j in rows if scores[i] > scores[j]]
    total, weight = sums_of(vectors, batch, loss="cosent", temperature=0.2)
    assert (total / weight, weight) == (pytest.approx(np.log(1 + np.sum(pairs)), rel=1e-5), 14)


def test_cosine_loss_is_the_squared_error() -> None:
    vectors, batch = embeddings_and_batch()
    cosines = np.einsum("bd,bd->b", unit(vectors)[:, 0], unit(vectors)[:, 1])
    expected = np.sum((cosines - batch["labels"]) ** 2 * batch["weights"])
    assert sums_of(vectors, batch, loss="cosine") == [pytest.approx(expected, rel=1e-5), 14]


@pytest.mark.medium
def test_triplets_and_teachers_compare_a_row_with_its_own_negatives() -> None:
    vectors, batch = embeddings_and_batch()
    batch["labels"] = np.random.default_rng(2).normal(size=(B, C)).astype(np.float32)
    cosines = np.einsum("bd,bcd->bc", unit(vectors)[:, 0], unit(vectors)[:, 1:])
    triplet, teacher, divergence, hits = 0.0, 0.0, 0.0, 0
    for row in np.flatnonzero(batch["weights"]):
        own = [place for place in range(1, C) if batch["document_numbers"][row, place] >= 0]
        hits += all(cosines[row, place] < cosines[row, 0] for place in own)
        if own:
            triplet += np.mean([max(0, 0.3 - cosines[row, 0] + cosines[row, place]) for place in own])
            margins = [(cosines[row, 0] - cosines[row, place]) / 0.2 for place in own]
            expected = [batch["labels"][row, 0] - batch["labels"][row, place] for place in own]
            teacher += np.mean(np.square(np.subtract(margins, expected)))
            divergence += entropy(*(softmax(x[row, [0, *own]]) for x in (batch["labels"], cosines / 0.2)))
    sums = sums_of(vectors, batch, loss="triplet", margin=0.3)
    assert sums == [pytest.approx(triplet, rel=1e-5), 14, hits, 14]
    sums = sums_of(vectors, batch, loss="margin_mse", temperature=0.2)
    assert sums == [pytest.approx(teacher, rel=1e-5), 14]
    sums = sums_of(vectors, batch, loss="kl_divergence", temperature=0.2)
    assert sums == [pytest.approx(divergence, rel=1e-5), 14]


def labelled(batch: dict[str, Any]) -> dict[str, Any]:
    """The queries as texts with one of four labels. Only one text has the last label, and two texts are equal."""
    labels = np.append(np.arange(B - 1) % 3, 3)
    numbers = np.arange(B)
    numbers[3] = 0
    kept = {name: batch[name][:, 0] for name in TOKEN_ARRAYS} | {name: batch[name] for name in ("weights", "rows")}
    return {**kept, "labels": np.stack([labels, numbers], axis=1).astype(np.int32)}


@pytest.mark.medium
def test_texts_of_one_label_are_positives_of_each_other() -> None:
    vectors, batch = embeddings_and_batch()[0][:, :1], labelled(batch_of())
    (labels, texts), unit_vectors = batch["labels"].T, unit(vectors)[:, 0]
    rows, losses, hits = np.flatnonzero(batch["weights"]), [], 0
    for row in rows:
        logits = {other: unit_vectors[row] @ unit_vectors[other] / 0.3 for other in rows if texts[other] != texts[row]}
        total = np.log(np.sum(np.exp(list(logits.values()))))
        same = [other for other in logits if labels[other] == labels[row]]
        if same:
            losses.append(np.mean([total - logits[other] for other in same]))
            hits += labels[max(logits, key=logits.get)] == labels[row]
    total, weight, result, anchors = sums_of(vectors, batch, loss="same_label", temperature=0.3)
    assert (total / weight, weight) == (pytest.approx(np.mean(losses), rel=1e-5), 14)
    assert (result, anchors) == (hits, len(losses)) and anchors < 14
    alone = {**batch, "labels": np.stack([np.arange(B), np.arange(B)], axis=1)}
    assert sums_of(vectors, alone, loss="same_label")[0] == 0


@pytest.mark.medium
@pytest.mark.parametrize("loss", ["in_batch", "cosent", "cosine"])
def test_matryoshka_is_the_mean_over_widths(loss: str) -> None:
    vectors, batch = embeddings_and_batch()
    each = [sums_of(vectors[..., :width], batch, loss=loss)[0] for width in (6, 2, 4)]
    nested = sums_of(vectors, batch, loss=loss, matryoshka=[2, 4])
    assert nested[0] == pytest.approx(np.mean(each), rel=1e-5)
    assert nested[2:] == sums_of(vectors, batch, loss=loss)[2:], "the accuracy is that of the whole embedding"


@pytest.mark.medium
def test_flops_are_squares_of_the_mean_weight_of_each_word() -> None:
    """The rows and documents that only fill the batch do not count, and the ranking loss compares inner products."""
    vectors, batch = embeddings_and_batch()
    vectors, rows = np.maximum(vectors, 0), np.flatnonzero(batch["weights"])
    documents = [
        vectors[row, 1 + place] for row in rows for place in range(C) if batch["document_numbers"][row, place] >= 0
    ]
    expected = 0.5 * np.sum(np.mean(vectors[rows, 0], axis=0) ** 2) + 0.25 * np.sum(np.mean(documents, axis=0) ** 2)
    settings = {**FLOPS, "loss": "margin_mse"}
    batch["labels"] = np.zeros((B, C), np.float32)
    assert embedding_loss(EmbeddingConfig(**settings), None).metrics[1:] == (
        "flops_loss",
        "query_words",
        "document_words",
    )
    total, weight, flops, flops_weight, *words = sums_of(vectors, batch, **settings)
    assert (flops / flops_weight, flops_weight, weight) == (pytest.approx(expected, rel=1e-5), 14, 14)
    assert words == [np.count_nonzero(vectors[rows, 0]), 14, np.count_nonzero(documents), len(documents)]
    products = np.einsum("bd,bcd->bc", vectors[:, 0], vectors[:, 1:])
    errors = [
        np.mean(
            [(products[row, 0] - products[row, c]) ** 2 for c in range(1, C) if batch["document_numbers"][row, c] >= 0]
        )
        for row in rows
        if (batch["document_numbers"][row, 1:] >= 0).any()
    ]
    assert total == pytest.approx(np.sum(errors), rel=1e-5)
    assert sums_of(vectors, {**batch, "flops_ramp": np.full(B, 0.25)}, **settings)[2] == pytest.approx(flops / 4)


@pytest.mark.medium
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_words_that_are_trained_are_those_that_embed_computes(softcap: float | None) -> None:
    flat = [batch_of()[name].reshape(-1, T) for name in TOKEN_ARRAYS]
    variables = {"params": initial_params(SPLADE)}
    config = dataclasses.replace(CONFIG, prediction_softcap=softcap)
    logits = jax.jit(BertForMaskedLM(config).apply)(variables, *flat)
    expected = Pooling("max", num_log1p=1)(np.asarray(logits), flat[2])
    found = np.asarray(jax.jit(BertForEmbedding(config, pooling="splade").apply)(variables, *flat))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert 0.1 < np.mean(found == 0) < 0.9


@pytest.mark.parametrize("mode", [mode for mode in TRAINED_POOLING_MODES if mode not in ("splade", "tokens")])
def test_what_is_trained_is_what_embed_computes(mode: str) -> None:
    random = np.random.default_rng(0)
    states = random.normal(size=(5, T, 6)).astype(np.float32)
    mask = (np.arange(T) < random.integers(1, T + 1, (5, 1))).astype(np.int32)
    np.testing.assert_allclose(pool(jnp.asarray(states), mask, mode), Pooling(mode)(states, mask), atol=1e-6)


PARALLEL = {
    "one": lambda: PmapParallelism(jax.devices()[:1]),
    "eight": lambda: PmapParallelism(jax.devices()[:8]),
    "mesh": lambda: MeshParallel((4, 2, 1), jax.devices()[:8]),
}


@functools.cache
def gradients(place: str, micro_batches: int, loss: str) -> tuple[Any, Any]:
    """Gradients of a batch with dropout, and its losses."""
    parallel: Parallelism = PARALLEL[place]()
    model, settings = MODEL, EmbeddingConfig(loss=loss, temperature=0.3, matryoshka=[4])
    if loss == "splade":
        model, settings = SPLADE, EmbeddingConfig(temperature=3.0, **FLOPS)
    elif loss == "tokens":
        model, settings = TOKENS, EmbeddingConfig(temperature=3.0, pooling="tokens", dimensions=6)

    def apply(params: Any, batch: Any, dropout: Dropout | None) -> Any:
        return embed(model, {"params": params}, batch, dropout)

    objective = make_embedding_loss(embedding_loss(settings, parallel.axis), apply)
    step = parallel.compile(
        lambda params, batch: compute_gradients(
            params, batch, objective, lambda rows: Dropout.for_step(3, 5, rows), parallel.axis
        )
    )
    batch = labelled(batch_of()) if loss == "same_label" else batch_of()
    if loss == "tokens":  # queries are extended, and documents skip a token
        batch[SCORE_MASK] = batch["attention_mask"] * (batch["input_ids"] % 7 > 0)
        batch[SCORE_MASK][:, 0] = 1
    batch = LengthGroups([5], T, parallel.row_shares * micro_batches, False, (0,) * 4).divide_sequences(batch)
    grads, sums = step(parallel.put_state(initial_params(model)), parallel.shard_batch(batch, micro_batches))
    return parallel.to_host(grads), parallel.to_host(sums)


@pytest.mark.medium
@pytest.mark.parametrize(
    "loss",
    [
        "in_batch",
        *(pytest.param(loss, marks=pytest.mark.slow) for loss in SLOW_LOSSES),
    ],
)
@pytest.mark.parametrize(
    ("place", "micro_batches"),
    [("eight", 2), ("mesh", 1), *(pytest.param(*more, marks=pytest.mark.slow) for more in SLOW_PLACES)],
)
def test_negatives_are_those_of_all_devices_and_micro_batches(place: str, micro_batches: int, loss: str) -> None:
    """Gradients of the whole batch in one piece on one device, with dropout on."""
    expected, expected_sums = gradients("one", 1, loss)
    grads, sums = gradients(place, micro_batches, loss)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=1e-5)
    assert np.linalg.norm(expected["bert"]["encoder"]["layer_0"]["output"]["kernel"]) > 1e-3


@pytest.mark.medium
def test_micro_batches_by_themselves_would_have_been_noticed() -> None:
    """Fewer negatives, another gradient."""
    whole, halves = gradients("one", 1, "in_batch")[1], 0.0
    variables = {"params": initial_params()}
    vectors = embeddings_of(batch_of(), variables)
    for rows in (slice(0, B // 2), slice(B // 2, B)):
        halves += sums_of(vectors.reshape(B, 1 + C, -1)[rows], {k: v[rows] for k, v in batch_of().items()})[0]
    assert halves < 0.9 * sums_of(vectors.reshape(B, 1 + C, -1), batch_of())[0]
    assert whole["in_batch_loss"][1] == 14


@pytest.mark.medium
def test_each_text_of_a_row_has_its_own_dropout() -> None:
    batch = batch_of()
    batch["weights"][:], batch["document_numbers"][:] = 1, 0
    for name in TOKEN_ARRAYS:
        batch[name][:] = batch[name][0, 0]
    dropout = Dropout.for_step(0, 0, jnp.asarray(batch["rows"]))
    variables = {"params": initial_params()}
    texts = embeddings_of(batch, variables, dropout)
    assert len(np.unique(texts.round(5), axis=0)) == B * (1 + C)


def test_texts_are_numbered() -> None:
    assert number_texts(["b", "a", "b", "c"]).tolist() == [0, 1, 0, 2]


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
