"""A tiny model with its loss, optimizer and batches, for tests of steps and of the loop."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert.config import ModelConfig, OptimizerConfig
from bert.model.dropout import Dropout
from bert.model.pretraining import BertForPreTraining
from bert.parallel.backends import MeshParallel, PmapParallelism
from bert.training.losses import Loss, make_pretraining_loss
from bert.training.optimizer import make_optimizer
from bert.training.step import compute_gradients

V, T, P, B = 61, 16, 4, 16


CONFIG = ModelConfig(V, 16, 1, 2, 32, max_position_embeddings=T, initializer_range=0.1)


MODEL = BertForPreTraining(CONFIG)


OBJECTIVE = make_pretraining_loss(MODEL.apply)


@functools.cache
def initial_params() -> Any:
    return jax.jit(MODEL.init)(jax.random.key(0), jnp.zeros((1, T), jnp.int32))["params"]


OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=2), 12)


def batch_of(step: int, rows: int = B) -> dict[str, np.ndarray]:
    """Masked tokens and real rows are spread unevenly: row r predicts r % 5 tokens, every seventh row is empty."""
    random = np.random.default_rng(step)
    places = np.arange(P)
    count = np.arange(rows) % (P + 1)
    empty = np.arange(rows) % 7 == 6
    weights = ((places < count[:, None]) & ~empty[:, None]).astype(np.float32)
    lengths = np.where(empty, 0, random.integers(6, T + 1, rows))
    return {
        "input_ids": random.integers(5, V, (rows, T)).astype(np.int32),
        "token_type_ids": (np.arange(T) > 7).astype(np.int32) * np.ones((rows, 1), np.int32),
        "attention_mask": (np.arange(T) < lengths[:, None]).astype(np.int32),
        "masked_lm_positions": np.sort(random.integers(1, 6, (rows, P)), axis=1).astype(np.int32),
        "masked_lm_ids": random.integers(5, V, (rows, P)).astype(np.int32),
        "masked_lm_weights": weights,
        "next_sentence_labels": random.integers(0, 2, rows).astype(np.int32),
        "next_sentence_weights": (~empty).astype(np.float32),
        "rows": np.arange(rows, dtype=np.int32),
    }


def batch_of_next_tokens(step: int = 0) -> dict[str, np.ndarray]:
    """Rows of uneven lengths, every seventh one empty."""
    batch = batch_of(step)
    mask = batch["attention_mask"]
    weights = (np.arange(T) < mask.sum(axis=1, keepdims=True) - 1).astype(np.float32)
    labels = np.where(weights > 0, np.roll(batch["input_ids"], -1, axis=1), 0)
    kept = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids", "rows")}
    return kept | {"next_token_ids": labels.astype(np.int32), "next_token_weights": weights}


class TinyLoader:
    """The batches of `batch_of`, with the interface that the loop needs."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        return batch_of(step)

    def row_indices(self, step: int) -> np.ndarray:
        return np.arange(B) + step * B


def sharded_gradients(
    loss: Loss,
    params: Any,
    batch: dict[str, np.ndarray],
    devices: int,
    micro_batches: int,
    mesh: tuple[int, int, int] | None = None,
) -> tuple[Any, Any]:
    """Returns the gradients and sums of a batch with dropout, under pmap or on a mesh, on the host."""
    used = jax.devices()[:devices]
    parallel = PmapParallelism(used) if mesh is None else MeshParallel(mesh, used)
    compiled = parallel.compile(
        lambda params, batch: compute_gradients(
            params, batch, loss, lambda rows: Dropout.for_step(3, 5, rows), parallel.axis
        )
    )
    return parallel.to_host(compiled(parallel.put_state(params), parallel.shard_batch(batch, micro_batches)))


def assert_same_gradients(grads, expected) -> None:
    """Equal within 1e-6 of a tensor's norm, tensor by tensor; prints the largest difference."""

    def close(path, actual: np.ndarray, reference: np.ndarray) -> float:
        # float32 sums in another order differ by rounding only. The gradient of the key's bias is zero in theory (it
        # moves all scores alike), so its rounding is measured by the bias's peers.
        norm = np.linalg.norm(reference)
        if "key" in jax.tree_util.keystr(path) and actual.ndim == 1:
            norm = max(norm, 1.0)
        assert np.linalg.norm(actual - reference) <= 1e-6 * norm, jax.tree_util.keystr(path)
        return float(np.linalg.norm(actual - reference) / norm)

    differences = jax.tree.leaves(jax.tree_util.tree_map_with_path(close, grads, expected))
    print(f"largest difference of a gradient: {max(differences):.1e} of its norm")
