"""Initial word embeddings from the tokens that occur next to each other."""

from __future__ import annotations

import numpy as np
import scipy.linalg

WINDOW = 2
"""Maximum distance of two tokens that are counted as neighbours."""

SMOOTHING = 0.75
"""Exponent of the neighbours' frequencies, as in Levy, Goldberg and Dagan (2015), section 3.1."""


def cooccurrence_embeddings(
    rows: np.ndarray, ignored: np.ndarray, vocab_size: int, width: int, deviation: float
) -> np.ndarray:
    """Returns word embeddings [V, D] from a factorization of the mutual information of neighbouring tokens.

    Rows of tokens without neighbours are 0. The method is the singular value decomposition of positive pointwise mutual
    information (Levy and Goldberg 2014, Neural word embedding as implicit matrix factorization), with separate columns
    for neighbours to the left and to the right.

    Args:
        rows: [R, T] token ids.
        ignored: ids of the tokens that are not counted, such as padding.
        vocab_size: V.
        width: D; columns beyond V are 0.
        deviation: standard deviation of the result.
    """
    is_counted = ~np.isin(rows, ignored)
    counts = np.zeros((vocab_size, vocab_size))
    for distance in range(1, WINDOW + 1):
        left, right = rows[:, :-distance].astype(np.int64), rows[:, distance:]
        pairs = (left * vocab_size + right)[is_counted[:, :-distance] & is_counted[:, distance:]]
        counts += np.bincount(pairs, minlength=vocab_size**2).reshape(counts.shape)
    information = np.concatenate([_positive_information(counts), _positive_information(counts.T)], axis=1)
    rank = min(width, vocab_size)
    values, vectors = scipy.linalg.eigh(
        information @ information.T, subset_by_index=[vocab_size - rank, vocab_size - 1], driver="evr"
    )
    embeddings = np.zeros((vocab_size, width), np.float32)
    embeddings[:, :rank] = vectors * np.sqrt(np.sqrt(np.maximum(values, 0)))
    return np.asarray(embeddings * (deviation / max(float(embeddings.std()), 1e-12)), np.float32)


def _positive_information(counts: np.ndarray) -> np.ndarray:
    """Returns the positive pointwise mutual information [V, V] of tokens (rows) and neighbours (columns)."""
    tokens, neighbours = counts.sum(axis=1, keepdims=True), counts.sum(axis=0, keepdims=True) ** SMOOTHING
    expected = tokens * neighbours / max(neighbours.sum(), 1)
    ratio = np.divide(counts, expected, out=np.ones_like(counts), where=(counts > 0) & (expected > 0))
    return np.asarray(np.maximum(np.log(ratio), 0), np.float32)
