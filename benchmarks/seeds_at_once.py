"""Compares a fine-tuning step of several seeds in one program (`jax.vmap`) with one step per seed:

    PYTHONPATH=. taskset -c 0,1 python benchmarks/seeds_at_once.py

Uses a classifier with two labels, float32, dropout 0.1, AdamW, and 32 rows of 64 tokens. Each seed has separate
parameters, batches and dropout. Both variants run in turns in one process. Prints medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bert.runtime.process import reexec_with_huge_pages

SIZES: dict[str, Any] = {
    "2 x 128": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "6 x 384": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
VOCAB_SIZE = 30522


def main() -> None:
    """Prints a Markdown row for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    print(f"| layers x width | {given.seeds} steps in turn, ms | one step of {given.seeds} seeds, ms | ratio |")
    print("|---|---|---|---|", flush=True)
    for size in given.sizes:
        in_turn, at_once = (1000 * seconds for seconds in measure(size, given))
        print(f"| {size} | {in_turn:.1f} | {at_once:.1f} | {at_once / in_turn:.2f} |", flush=True)


def measure(size: str, given: argparse.Namespace) -> list[float]:
    """Returns the median seconds of a step of all seeds, sequentially and at once."""
    ways = make_steps(size, given)
    for step in ways:  # compiles
        step()
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(given.rounds):
        for taken, step in zip(seconds, ways, strict=True):
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def make_steps(size: str, given: argparse.Namespace) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns both functions that run a step of every seed."""
    import jax
    import jax.numpy as jnp

    from bert.config import ModelConfig, OptimizerConfig
    from bert.model.heads import BertForSequenceClassification
    from bert.training.finetuning.kinds import make_apply
    from bert.training.losses import LOSSES, make_task_loss
    from bert.training.optimizer import make_optimizer
    from bert.training.step import StepMetrics, TrainState, make_train_step

    model = BertForSequenceClassification(ModelConfig(VOCAB_SIZE, **SIZES[size]), 2)
    loss = make_task_loss(LOSSES["sequence_classification"], make_apply(model, None))
    optimizer = make_optimizer(OptimizerConfig(), 1_000_000)

    def advance(seed: Any, state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, StepMetrics]:
        return make_train_step(loss, optimizer, seed, axis=None)(state, batch)

    def start(seed: int) -> TrainState:
        params = jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(params, optimizer, loss.metrics)

    seeds = range(given.seeds)
    batches = [batch_of(seed, given.rows, given.length) for seed in seeds]
    step_in_turn = jax.jit(advance, donate_argnums=1)
    step_at_once = jax.jit(jax.vmap(advance), donate_argnums=1)
    states = [start(seed) for seed in seeds]
    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)]
    batch = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}

    def in_turn() -> None:
        for seed in seeds:
            states[seed], _ = step_in_turn(seed, states[seed], batches[seed])
        jax.block_until_ready(states)

    def at_once() -> None:
        stacked[0], _ = step_at_once(np.arange(given.seeds), stacked[0], batch)
        jax.block_until_ready(stacked)

    return in_turn, at_once


def batch_of(seed: int, rows: int, length: int) -> dict[str, np.ndarray]:
    """Returns a micro-batch of random tokens, each array [1, B, ...]."""
    random = np.random.default_rng(seed)
    shape = (1, rows, length)
    return {
        "input_ids": random.integers(5, VOCAB_SIZE, shape).astype(np.int32),
        "token_type_ids": np.zeros(shape, np.int32),
        "attention_mask": np.ones(shape, np.int32),
        "labels": random.integers(0, 2, shape[:2]).astype(np.int32),
        "weights": np.ones(shape[:2], np.float32),
        "rows": np.arange(rows, dtype=np.int32)[None],
    }


if __name__ == "__main__":
    reexec_with_huge_pages()
    main()
