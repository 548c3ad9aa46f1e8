"""Compares local attention in blocks with masked local attention: CPU time and memory of a training step by T.

    PYTHONPATH=. python benchmarks/windows.py [--lengths 128 256 512 1024 2048 4096] [--repeats 3]

Runs an encoder of two local layers forwards and backwards over one row. The masked variant computes all T x T scores
and masks those beyond the window. Uses one thread and CPU time, so that other load has little effect.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import jax
import jax.numpy as jnp

from bert.config import ModelConfig
from bert.model.encoder import Encoder
from bert.model.mask import Mask

LOCAL = ModelConfig(
    hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=384, gated_feed_forward=True,
    position_embedding_type="rotary", attention_window=64, max_position_embeddings=8192, pre_layer_norm=True,
)  # fmt: skip
GLOBAL = dataclasses.replace(LOCAL, attention_window=None)


def measure(config: ModelConfig, mask: Mask, length: int, repeats: int) -> tuple[float, int]:
    """Returns the CPU seconds of a step, and the bytes that the program needs besides parameters and input."""
    x = jax.random.normal(jax.random.key(0), (1, length, config.hidden_size))
    params = jax.jit(Encoder(GLOBAL).init)(jax.random.key(1), x[:, :8], Mask())

    def loss(params: Any, x: jax.Array) -> jax.Array:
        states: Any = Encoder(config).apply(params, x, mask)
        return jnp.mean(jnp.sin(states.last_hidden_state))

    step = jax.jit(jax.grad(loss)).lower(params, x).compile()
    seconds = []
    for _ in range(repeats + 1):
        start = time.process_time()
        jax.block_until_ready(step(params, x))
        seconds.append(time.process_time() - start)
    memory: Any = step.memory_analysis()
    return statistics.median(seconds[1:]), memory.temp_size_in_bytes


def main() -> None:
    """Prints a row for each length when it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print("| T | masked, ms | in blocks, ms | masked, MiB | in blocks, MiB |\n|---|---|---|---|---|")
    for length in options.lengths:
        masked, masked_bytes = measure(GLOBAL, Mask(window=LOCAL.attention_window), length, options.repeats)
        blocks, blocks_bytes = measure(LOCAL, Mask(), length, options.repeats)
        times = f"{1e3 * masked:.0f} | {1e3 * blocks:.0f}"
        print(f"| {length:,} | {times} | {masked_bytes / 2**20:.0f} | {blocks_bytes / 2**20:.0f} |", flush=True)


if __name__ == "__main__":
    main()
