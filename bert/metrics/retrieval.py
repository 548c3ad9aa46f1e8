"""Scores of a search: where the right documents come among all of them, in the order of their cosines.

Each is a few lines of exact arithmetic. Libraries that have them compile code of their own (pytrec_eval, and with it
ir-measures) or bring a compiler (ranx, by Numba).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CUTOFF = 10
"""Documents that a search shows."""

NAMES = (f"ndcg_at_{CUTOFF}", f"mrr_at_{CUTOFF}", f"recall_at_{CUTOFF}")

ROWS_AT_ONCE = 512
"""Queries compared with all documents at once: bounds memory."""


def normalized(vectors: np.ndarray) -> np.ndarray:
    """[R, D] vectors -> the same of length 1; what is not finite, as after a run that diverged, becomes 0."""
    vectors = np.nan_to_num(np.asarray(vectors, np.float32), posinf=0, neginf=0)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def find_ranks(
    queries: np.ndarray, documents: np.ndarray, positives: np.ndarray, query_numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where the right document of each row comes.

    Of documents with the same cosine the right one comes last, so that equal embeddings of all texts find nothing.

    Args:
      queries: [R, D] vectors of length 1.
      documents: [N, D] vectors of length 1.
      positives: [R] number of a document that is right for the row.
      query_numbers: [R], the same for rows of the same query: the documents of all of these are right for it.

    Returns:
      [R] int64 rank of the document among it and those that are not right for the query, from 1; and [R] int64 number
      of the first document of all.
    """
    right: dict[int, set[int]] = {}
    for query, positive in zip(query_numbers.tolist(), positives.tolist(), strict=True):
        right.setdefault(query, set()).add(positive)
    ranks, first = np.zeros(len(queries), np.int64), np.zeros(len(queries), np.int64)
    for start in range(0, len(queries), ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, len(queries)))
        cosines = queries[rows] @ documents.T
        own = np.take_along_axis(cosines, positives[rows, None], axis=1)
        first[rows] = cosines.argmax(axis=1)
        before = cosines >= own
        for place, query in enumerate(query_numbers[rows].tolist()):
            before[place, list(right[query])] = False
        ranks[rows] = 1 + before.sum(axis=1)
    return ranks, first


def find_nearest_others(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest other vector of each; of a single one itself, with a cosine of 0.

    Args:
      vectors: [R, D] of length 1.

    Returns:
      [R] float32 cosine with it, and [R] int64 number of it.
    """
    cosines, others = np.zeros(len(vectors), np.float32), np.zeros(len(vectors), np.int64)
    if len(vectors) < 2:
        return cosines, others
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, len(vectors)))
        found = vectors[rows] @ vectors.T
        found[np.arange(len(rows)), rows] = -np.inf
        others[rows], cosines[rows] = found.argmax(axis=1), found.max(axis=1)
    return cosines, others


def retrieval_scores(ranks: np.ndarray, positives: np.ndarray, query_numbers: np.ndarray) -> dict[str, float]:
    """nDCG@10 (gain 1 for a right document), MRR@10 and recall@10, means over the distinct queries, 0 to 1.

    Args:
      ranks, positives, query_numbers: [R] as `find_ranks` gives and takes them.
    """
    of_query: dict[int, dict[int, int]] = {}
    for query, positive, rank in zip(query_numbers.tolist(), positives.tolist(), ranks.tolist(), strict=True):
        of_query.setdefault(query, {})[positive] = rank
    sums = np.zeros(3)
    for found in of_query.values():
        # The i-th of the right documents has i right ones before it.
        places = [rank + i for i, rank in enumerate(sorted(found.values())) if rank + i <= CUTOFF]
        gains = sum(map(_discount, places)) / _ideal(len(found))
        sums += gains, 1 / places[0] if places else 0.0, len(places) / len(found)
    return dict(zip(NAMES, (sums / len(of_query)).tolist(), strict=True))


def chance_scores(counts: Sequence[int], documents: int) -> dict[str, float]:
    """The same of documents in random order, as expected.

    Args:
      counts: right documents of each query.
      documents: N of all.
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
    """nDCG@10 and MRR@10 of documents in the order of their scores, means over the queries with a document of any gain;
    0 without such a query.

    Of documents with the same score those with the least gain come first.

    Args:
      scores: [C] of the documents of each query.
      gains: [C] of each query, at least 0. Any gain above 0 is right for MRR.
    """
    sums, queries = np.zeros(2), 0
    for own, relevance in zip(scores, gains, strict=True):
        if relevance.max(initial=0) > 0:
            found = relevance[np.lexsort((relevance, -own))][:CUTOFF]
            right = np.flatnonzero(found > 0)
            sums += _dcg(found) / _dcg(np.sort(relevance)[::-1]), 1 / (1 + right[0]) if len(right) else 0.0
            queries += 1
    return dict(zip(NAMES[:2], (sums / max(queries, 1)).tolist(), strict=True))


def random_reranking_scores(gains: Sequence[np.ndarray]) -> dict[str, float]:
    """The same of documents in random order, as expected."""
    sums, queries = np.zeros(2), 0
    for relevance in gains:
        if relevance.max(initial=0) > 0:
            expected = _dcg(np.full(len(relevance), relevance.mean())) / _dcg(np.sort(relevance)[::-1])
            sums += expected, chance_scores([int(np.count_nonzero(relevance))], len(relevance))[NAMES[1]]
            queries += 1
    return dict(zip(NAMES[:2], (sums / max(queries, 1)).tolist(), strict=True))


def _dcg(gains: np.ndarray) -> float:
    """Of the gains of the documents in their places (Järvelin and Kekäläinen 2002)."""
    return sum(float(gain) * _discount(place) for place, gain in enumerate(gains[:CUTOFF], 1))


def _discount(place: int) -> float:
    return 1 / math.log2(1 + place)


def _ideal(right: int) -> float:
    """DCG of as many right documents in the first places."""
    return sum(map(_discount, range(1, min(right, CUTOFF) + 1)))
