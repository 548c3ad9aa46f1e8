"""Retrieval metrics: nDCG, MRR and recall of ranked documents.

They are implemented here because existing libraries need a C compiler (pytrec_eval, ir-measures) or Numba (ranx).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

CUTOFF = 10
"""Number of top documents that the metrics use."""

NAMES = (f"ndcg_at_{CUTOFF}", f"mrr_at_{CUTOFF}", f"recall_at_{CUTOFF}")

ROWS_AT_ONCE = 512
"""Number of queries that are compared with all documents at a time, to limit memory."""


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Normalizes vectors [R, D] to length 1. Non-finite values become 0."""
    vectors = np.nan_to_num(np.asarray(vectors, np.float32), posinf=0, neginf=0)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def inner_products(vectors: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the inner product of each vector [A, D] with each of the others [B, D], [A, B]."""
    return vectors @ others.T


def find_ranks(
    queries: np.ndarray,
    documents: np.ndarray,
    positives: np.ndarray,
    query_numbers: np.ndarray,
    compare: Callable[[np.ndarray, np.ndarray], np.ndarray] = inner_products,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rank of the positive document of each row.

    The positive document is last among documents with equal similarity, so that constant embeddings score 0.

    Args:
      queries: [R, D] vectors.
      documents: [N, D] vectors.
      positives: [R] index of a positive document of the row.
      query_numbers: [R] query of each row. Rows of the same query share their positive documents.
      compare: computes the similarities of vectors [A, D] and [B, D], [A, B].

    Returns:
      [R] int64 rank, from 1, among the document and the negative documents of its query; and [R] int64 index of the
      first of all documents.
    """
    positives_of: dict[int, set[int]] = {}
    for query, positive in zip(query_numbers.tolist(), positives.tolist(), strict=True):
        positives_of.setdefault(query, set()).add(positive)
    ranks, first = np.zeros(len(queries), np.int64), np.zeros(len(queries), np.int64)
    for start in range(0, len(queries), ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, len(queries)))
        similarities = compare(queries[rows], documents)
        own = np.take_along_axis(similarities, positives[rows, None], axis=1)
        first[rows] = similarities.argmax(axis=1)
        before = similarities >= own
        for place, query in enumerate(query_numbers[rows].tolist()):
            before[place, list(positives_of[query])] = False
        ranks[rows] = 1 + before.sum(axis=1)
    return ranks, first


def find_nearest_others(
    vectors: np.ndarray, compare: Callable[[np.ndarray, np.ndarray], np.ndarray] = inner_products
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nearest other vector of each vector. A single vector has index 0 and similarity 0.

    Args:
      vectors: [R, D] vectors.
      compare: see `find_ranks`.

    Returns:
      [R] float32 similarities and [R] int64 indices of the nearest vectors.
    """
    similarities, others = np.zeros(len(vectors), np.float32), np.zeros(len(vectors), np.int64)
    if len(vectors) < 2:
        return similarities, others
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, len(vectors)))
        of_rows = compare(vectors[rows], vectors)
        of_rows[np.arange(len(rows)), rows] = -np.inf
        others[rows], similarities[rows] = of_rows.argmax(axis=1), of_rows.max(axis=1)
    return similarities, others


def retrieval_scores(ranks: np.ndarray, positives: np.ndarray, query_numbers: np.ndarray) -> dict[str, float]:
    """Computes nDCG@10 (gain 1 for positive documents), MRR@10 and recall@10, averaged over the queries, 0 to 1.

    Args:
      ranks, positives, query_numbers: [R] results and arguments of `find_ranks`.
    """
    return _means(retrieval_scores_of_queries(ranks, positives, query_numbers), NAMES)


def retrieval_scores_of_queries(ranks: np.ndarray, positives: np.ndarray, query_numbers: np.ndarray) -> np.ndarray:
    """Computes the scores of `retrieval_scores` for each query, [queries, 3]."""
    of_query: dict[int, dict[int, int]] = {}
    for query, positive, rank in zip(query_numbers.tolist(), positives.tolist(), ranks.tolist(), strict=True):
        of_query.setdefault(query, {})[positive] = rank
    rows = []
    for rank_of in of_query.values():
        # The i-th positive document has i positive documents before it.
        places = [rank + i for i, rank in enumerate(sorted(rank_of.values())) if rank + i <= CUTOFF]
        gains = sum(map(_discount, places)) / _ideal(len(rank_of))
        rows.append((gains, 1 / places[0] if places else 0.0, len(places) / len(rank_of)))
    return np.array(rows)


def _means(rows: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Returns the means of columns by name; 0 without rows."""
    sums = np.zeros(len(names))
    for row in rows:
        sums += row
    return dict(zip(names, (sums / max(len(rows), 1)).tolist(), strict=True))


def chance_scores(counts: Sequence[int], documents: int) -> dict[str, float]:
    """Returns the expected `retrieval_scores` of randomly ordered documents.

    Args:
      counts: number of positive documents of each query.
    """
    places = range(1, min(CUTOFF, documents) + 1)
    sums = np.zeros(3)
    for right in counts:
        none_before, reciprocal = 1.0, 0.0
        for place in places:
            left = documents - place + 1
            reciprocal += none_before * min(right / left, 1) / place
            none_before *= max(1 - right / left, 0)
        gains = right / documents * sum(map(_discount, places)) / _ideal(right)
        sums += gains, reciprocal, len(places) / documents
    return dict(zip(NAMES, (sums / len(counts)).tolist(), strict=True))


def reranking_scores(scores: Sequence[np.ndarray], gains: Sequence[np.ndarray]) -> dict[str, float]:
    """Computes nDCG@10 and MRR@10 of documents sorted by score: means over queries with a relevant document; 0 if none.

    Among documents with equal scores, the least relevant comes first.

    Args:
      scores: [C] scores of each query's documents.
      gains: [C] relevance of each query's documents, at least 0. MRR treats any gain above 0 as relevant.
    """
    return _means(reranking_scores_of_queries(scores, gains), NAMES[:2])


def reranking_scores_of_queries(scores: Sequence[np.ndarray], gains: Sequence[np.ndarray]) -> np.ndarray:
    """Computes the scores of `reranking_scores` for each query with a relevant document, [queries, 2]."""
    rows = []
    for own, relevance in zip(scores, gains, strict=True):
        if relevance.max(initial=0) > 0:
            ranked = relevance[np.lexsort((relevance, -own))][:CUTOFF]
            relevant = np.flatnonzero(ranked > 0)
            first = 1 / (1 + relevant[0]) if len(relevant) else 0.0
            rows.append((_dcg(ranked) / _dcg(np.sort(relevance)[::-1]), first))
    return np.array(rows).reshape(-1, 2)


def random_reranking_scores(gains: Sequence[np.ndarray]) -> dict[str, float]:
    """Returns the expected `reranking_scores` of randomly ordered documents."""
    sums, queries = np.zeros(2), 0
    for relevance in gains:
        if relevance.max(initial=0) > 0:
            expected = _dcg(np.full(len(relevance), relevance.mean())) / _dcg(np.sort(relevance)[::-1])
            sums += expected, chance_scores([int(np.count_nonzero(relevance))], len(relevance))[NAMES[1]]
            queries += 1
    return dict(zip(NAMES[:2], (sums / max(queries, 1)).tolist(), strict=True))


def _dcg(gains: np.ndarray) -> float:
    """Computes the discounted cumulative gain of ranked documents (Järvelin and Kekäläinen 2002)."""
    return sum(float(gain) * _discount(place) for place, gain in enumerate(gains[:CUTOFF], 1))


def _discount(place: int) -> float:
    return 1 / math.log2(1 + place)


def _ideal(right: int) -> float:
    """Computes the DCG if positive documents come first."""
    return sum(map(_discount, range(1, min(right, CUTOFF) + 1)))
