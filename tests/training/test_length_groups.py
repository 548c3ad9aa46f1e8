"""Batches of groups of rows: the gradients of whole batches, the same for devices and micro-batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import FinetuneConfig, ModelConfig, TaskDataConfig, TrainingConfig
from bert.data.batching import FinetuningLoader, LengthGroups, make_batches
from bert.data.rows import IGNORE_INDEX, TokenRows
from bert.model.dropout import Dropout
from bert.model.heads import BertForTokenClassification
from bert.parallel.backends import MeshParallel, Parallelism, PmapParallelism
from bert.training.length_groups import over_groups
from bert.training.losses import LOSSES, make_task_loss
from bert.training.step import compute_gradients
from tests.tiny_training import assert_same_gradients

T, B = 16, 16
MODEL = BertForTokenClassification(
    ModelConfig(61, 16, 1, 2, 32, max_position_embeddings=T, initializer_range=0.3), num_labels=5
)


def tagged_rows(count: int) -> TokenRows:
    """Rows of 3 to 16 tokens, with a label for about half of the tokens."""
    random = np.random.default_rng(0)
    lengths = random.integers(3, T + 1, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids, labels = (random.integers(0, size, offsets[-1]).astype(np.int32) for size in (61, 5))
    labels[random.random(offsets[-1]) < 0.5] = IGNORE_INDEX
    return TokenRows(ids, offsets, lengths.astype(np.int32), labels, token_labels=True)


def loader(multiple: int | None, rows: int = B) -> FinetuningLoader:
    """Returns batches in groups, or in one piece without a multiple."""
    config = FinetuneConfig(
        data=TaskDataConfig(dir="unused", max_length=T, buckets=[8]),
        training=TrainingConfig(batch_size=B, epochs=1),
    )
    groups = None if multiple is None else LengthGroups(config.data.buckets, T, multiple, True, (0,) * 4)
    features = tagged_rows(rows)
    return FinetuningLoader(features, config, (0, 1), make_batches(features, config, 1, by_length=False), groups)


def gradients(
    parallel: Parallelism, micro_batches: int, step: int, rows: int, grouped: bool, dropout: bool
) -> tuple[Any, Any]:
    multiple = parallel.row_shares * micro_batches
    batch = loader(multiple if grouped else None, rows).batch(step)
    loss = make_task_loss(
        LOSSES["token_classification"],
        lambda params, batch, dropout: MODEL.apply(
            {"params": params}, batch["input_ids"], batch["token_type_ids"], batch["attention_mask"], dropout=dropout
        ),
    )
    objective = over_groups(loss) if grouped else loss
    source = (lambda rows: Dropout.for_step(3, 5, rows)) if dropout else (lambda rows: None)
    compiled = parallel.compile(
        lambda params, batch: compute_gradients(params, batch, objective, source, parallel.axis)
    )
    params = jax.jit(MODEL.init)(jax.random.key(0), jnp.zeros((1, T), jnp.int32))["params"]
    grads, sums = compiled(parallel.put_state(params), parallel.shard_batch(batch, micro_batches))
    return parallel.to_host(grads), parallel.to_host(sums)


def on_devices(count: int) -> Parallelism:
    return PmapParallelism(jax.devices()[:count])


@pytest.mark.medium
@pytest.mark.parametrize(("step", "rows"), [(0, B), (1, B + 3)], ids=["full", "last"])
def test_gradients_are_those_of_the_whole_batch(step: int, rows: int) -> None:
    expected, expected_sums = gradients(on_devices(1), 1, step, rows, grouped=False, dropout=False)
    grads, sums = gradients(on_devices(1), 1, step, rows, grouped=True, dropout=False)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("place", ["eight devices, two micro-batches", pytest.param("mesh", marks=pytest.mark.slow)])
def test_devices_and_micro_batches_change_nothing(place: str) -> None:
    """Uses dropout, whose masks depend on the padded length of a row."""
    expected, expected_sums = gradients(on_devices(1), 1, 0, B, grouped=True, dropout=True)
    parallel = MeshParallel((4, 2, 1), jax.devices()[:8]) if place == "mesh" else on_devices(8)
    grads, sums = gradients(parallel, 1 if place == "mesh" else 2, 0, B, grouped=True, dropout=True)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=1e-5)


@pytest.mark.parametrize("multiple", [1, 4])
def test_groups_have_every_row_once(multiple: int) -> None:
    batches = loader(multiple, 3 * B + 5)
    whole, tokens, padded_tokens = loader(None, 3 * B + 5), 0, 0
    for step in range(4):
        batch, expected = batches.batch(step), whole.batch(step)
        seen = {}
        for group in range(sum(name.startswith("weights_") for name in batch)):
            rows, weights, ids = (batch[f"{name}_{group}"] for name in ("rows", "weights", "input_ids"))
            assert len(rows) % multiple == 0
            assert {name for name in batch if name.endswith(f"_{group}")} == {f"{name}_{group}" for name in expected}
            for row in np.flatnonzero(weights):
                seen[int(rows[row])] = np.pad(ids[row], (0, T - ids.shape[1]))
        rows = int(expected["weights"].sum())
        assert sorted(seen) == list(range(rows))
        padded = np.pad(expected["input_ids"], ((0, 0), (0, T - expected["input_ids"].shape[1])))
        np.testing.assert_array_equal([seen[row] for row in range(rows)], padded[:rows])
        tokens += sum(batch[name].size for name in batch if name.startswith("attention_mask"))
        padded_tokens += padded.size
    assert tokens < 0.95 * padded_tokens
