"""States to save in checkpoints, and what is done to their files."""

from __future__ import annotations

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import optax


def make_state(seed: int = 0) -> dict:
    """A small training state with every kind of leaf, moments of optax included."""
    random = np.random.default_rng(seed)
    params = {
        "encoder": {
            "kernel": random.standard_normal((4, 3)).astype(np.float32),
            "bias": np.zeros(3, np.float32),
        },
        "half": random.standard_normal(5).astype(ml_dtypes.bfloat16),
        "special": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1, 0, 9)))
    opt_state = jax.tree.map(np.asarray, optimizer.init(params))
    return {
        "params": params,
        "opt_state": opt_state,
        "step": seed,
        "count": np.array(2**63 + seed, np.uint64),
    }


def bits(tree: object) -> list[tuple]:
    return [(leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in map(np.asarray, jax.tree.leaves(tree))]


class Lines(list):
    """A ``say`` that remembers."""

    __call__ = list.append


def flip_byte(path: Path, place: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def largest(folder: Path) -> Path:
    return max(files(folder), key=lambda path: path.stat().st_size)


def flip_one(folder: Path) -> str:
    flip_byte(path := largest(folder))
    return path.name
