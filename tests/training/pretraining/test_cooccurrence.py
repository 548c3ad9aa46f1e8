"""Initial word embeddings from neighbouring tokens."""

import numpy as np

from bert.training.pretraining.cooccurrence import cooccurrence_embeddings


def test_tokens_with_the_same_neighbours_are_similar() -> None:
    rng = np.random.default_rng(0)
    nouns, verbs = rng.integers(1, 4, 4000), rng.integers(4, 7, 4000)  # 0 is padding
    rows = np.stack([nouns, verbs, np.zeros_like(nouns)], axis=1).reshape(1000, 12)
    vectors = cooccurrence_embeddings(rows, np.array([0]), 8, 4, 0.1)
    assert vectors.shape == (8, 4)
    assert np.isclose(vectors.std(), 0.1)
    units = vectors[1:7] / np.linalg.norm(vectors[1:7], axis=1, keepdims=True)
    similarity = units @ units.T
    assert similarity[:3, :3].min() > 0.9 > similarity[:3, 3:].max()


def test_tokens_without_neighbours_are_zero() -> None:
    vectors = cooccurrence_embeddings(np.array([[1, 2, 1, 2, 0, 3]]), np.array([0]), 5, 8, 0.1)
    assert np.abs(vectors[[0, 4]]).max() < 1e-6
    assert np.abs(vectors[1]).max() > 1e-3
