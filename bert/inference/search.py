"""Search: the documents of the highest cosine with each query, exactly in blocks of bounded memory, or in an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from bert.errors import UserError

TEXTS_AT_ONCE = 4096
"""Documents, and queries, that are compared at once: 64 MiB of cosines."""


class SearchResults(NamedTuple):
    """What a search finds, the best document first.

    Attributes:
        indices: [Q, K] int64 number of each document in the corpus.
        scores: [Q, K] float32 cosine with the query.
    """

    indices: np.ndarray
    scores: np.ndarray


class RankedDocument(NamedTuple):
    """A document in the order of its score for a query: its number among those that were given."""

    number: int
    score: float


@runtime_checkable
class VectorIndex(Protocol):
    """An index of vectors as FAISS has it (``faiss.Index``), which is not imported here.

    Attributes:
        d: D, the width of the vectors.
        ntotal: N, their number.
        metric_type: 0 for the inner product.
    """

    d: int
    ntotal: int
    metric_type: int

    def search(self, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """[Q, D] -> the scores [Q, K] and the numbers [Q, K] of what is found, the best first."""


def check_index(index: VectorIndex, width: int, source: str) -> None:
    """Raises UserError for an index that is empty, or whose vectors or scores are of another kind than the queries'."""
    if index.d != width:
        raise UserError(
            f"the index has vectors of {index.d} numbers, and embeddings of {source} have {width}: make it of these"
        )
    if index.metric_type != 0:
        raise UserError("the index compares by a distance: make it with faiss.METRIC_INNER_PRODUCT")
    if not index.ntotal:
        raise UserError("the index has no documents: add their embeddings")


def find_in_index(queries: np.ndarray, index: VectorIndex, top_k: int) -> SearchResults:
    """What an index of vectors of length 1 finds for [Q, D] vectors, K at most the number of its vectors."""
    scores, indices = index.search(_unit(queries), min(top_k, index.ntotal))
    return SearchResults(indices.astype(np.int64), scores.astype(np.float32))


def find_nearest(queries: np.ndarray, blocks: Iterable[np.ndarray], top_k: int) -> SearchResults:
    """The ``top_k`` documents of the highest cosine; of equal ones the first ones.

    Args:
        queries: [Q, D] vectors.
        blocks: [n, D] vectors of the documents, in their order.
        top_k: K, at most the number of all documents.
    """
    queries = _unit(queries)
    indices = np.zeros((len(queries), 0), np.int64)
    scores = np.zeros((len(queries), 0), np.float32)
    start = 0
    for documents in blocks:
        documents, lengths = _measured(documents)
        numbers = np.arange(start, start + len(documents))
        found = [_merge(indices[rows], scores[rows], numbers, queries[rows] @ documents.T / lengths, top_k)
                 for rows in _slices(len(queries))]  # fmt: skip
        indices, scores = (np.concatenate([part[side] for part in found]) for side in range(2))
        start += len(documents)
    return SearchResults(indices, scores)


def _merge(
    indices: np.ndarray, scores: np.ndarray, numbers: np.ndarray, cosines: np.ndarray, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The best of those found before, [q, k], and of a block's cosines [q, n]."""
    candidates = np.concatenate([indices, np.broadcast_to(numbers, cosines.shape)], axis=1)
    cosines = np.concatenate([scores, cosines], axis=1)
    if cosines.shape[1] > top_k:
        # Those above the least of the best, and as many of its equals as fit, the first ones: a partition may take any.
        least = np.partition(cosines, -top_k, axis=1)[:, -top_k, None]
        above = cosines > least
        equal = cosines == least
        chosen = above | (equal & (np.cumsum(equal, axis=1) <= top_k - above.sum(axis=1, keepdims=True)))
        candidates, cosines = (array[chosen].reshape(len(cosines), top_k) for array in (candidates, cosines))
    order = np.argsort(-cosines, axis=1, kind="stable")
    return np.take_along_axis(candidates, order, axis=1), np.take_along_axis(cosines, order, axis=1)


def _slices(count: int) -> list[slice]:
    return [slice(start, start + TEXTS_AT_ONCE) for start in range(0, max(count, 1), TEXTS_AT_ONCE)]


def finite_blocks(vectors: np.ndarray) -> Iterator[np.ndarray]:
    """[N, D] vectors in blocks. Raises UserError, which names the row, for a NaN or an infinity."""
    for start, block in zip(range(0, len(vectors), TEXTS_AT_ONCE), blocks_of(vectors), strict=False):
        if not (finite := np.isfinite(block).all(axis=1)).all():
            row = start + int(np.argmin(finite))
            raise UserError(f"row {row} of the corpus (from 0) holds NaN or infinity: compute its embedding again")
        yield block


def blocks_of(vectors: np.ndarray) -> list[np.ndarray]:
    """[N, D] vectors in blocks."""
    return [vectors[rows] for rows in _slices(len(vectors))]


def rank_by_score(scores: Iterable[float]) -> list[RankedDocument]:
    """The numbers of scores, the highest first; of equal ones in their order."""
    ranked = [RankedDocument(number, score) for number, score in enumerate(scores)]
    return sorted(ranked, key=lambda document: -document.score)


def _measured(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n, D] vectors in float32 and their lengths [n]: scalar products are divided by these, since a pass that makes
    all vectors of length 1 takes ten times as long as the products with one query."""
    vectors = np.asarray(vectors, np.float32)
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    if not np.isfinite(lengths).all():
        return _unit(vectors), np.ones(len(vectors), np.float32)
    return vectors, np.maximum(lengths, np.finfo(np.float32).tiny)


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1 in float32; a zero vector stays, and what is not finite becomes 0."""
    vectors = np.nan_to_num(np.asarray(vectors, np.float32), posinf=0, neginf=0)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
