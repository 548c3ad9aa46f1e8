"""Scores of a search, by hand and next to scikit-learn's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from bert.metrics import retrieval
from bert.metrics.retrieval import chance_scores, find_ranks, normalized, retrieval_scores

LINE = np.eye(4, dtype=np.float32)


def test_ranks_and_scores_worked_by_hand() -> None:
    """Query 0 finds its document first, query 1 third; query 2 has two right documents, in the places 1 and 3."""
    documents = LINE
    queries = np.array([[1, 0.5, 0.2, 0], [0.9, 0.1, 0.5, 0], [0.1, 0.9, 0.2, 0.5], [0.1, 0.9, 0.2, 0.5]], np.float32)
    positives, numbers = np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2])
    ranks, first = find_ranks(queries, documents, positives, numbers)
    # Among itself and those that are not right: the second right document of query 2 is behind document 3 alone.
    assert ranks.tolist() == [1, 3, 1, 2]
    assert first.tolist() == [0, 0, 1, 1]
    scores = retrieval_scores(ranks, positives, numbers)
    gains = [1, 1 / math.log2(4), (1 + 1 / math.log2(4)) / (1 + 1 / math.log2(3))]
    assert scores["ndcg_at_10"] == pytest.approx(sum(gains) / 3)
    assert scores["mrr_at_10"] == pytest.approx((1 + 1 / 3 + 1) / 3)
    assert scores["recall_at_10"] == 1


def test_documents_beyond_the_tenth_are_not_found() -> None:
    scores = retrieval_scores(np.array([10, 11]), np.array([0, 1]), np.array([0, 1]))
    assert scores == {"ndcg_at_10": pytest.approx(1 / math.log2(11) / 2), "mrr_at_10": 0.05, "recall_at_10": 0.5}


def test_equal_embeddings_of_all_texts_find_nothing() -> None:
    same = np.ones((40, 3), np.float32) / math.sqrt(3)
    ranks, _ = find_ranks(same, same, np.arange(40), np.arange(40))
    assert ranks.tolist() == [40] * 40
    broken = normalized(np.full((40, 3), np.nan))
    assert find_ranks(broken, broken, np.arange(40), np.arange(40))[0].tolist() == [40] * 40


def test_ndcg_is_that_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in blocks, several right documents for some queries, and a row that is there twice."""
    monkeypatch.setattr(retrieval, "ROWS_AT_ONCE", 7)
    random = np.random.default_rng(0)
    numbers = random.integers(0, 30, 60)
    vectors = normalized(random.normal(size=(30, 5)))
    documents, positives = normalized(random.normal(size=(50, 5))), random.integers(0, 50, 60)
    numbers[-1], positives[-1] = numbers[0], positives[0]
    ranks, _ = find_ranks(vectors[numbers], documents, positives, numbers)
    there = np.unique(numbers)
    relevance = np.zeros((30, 50))
    relevance[numbers, positives] = 1
    expected = ndcg_score(relevance[there], (vectors @ documents.T)[there], k=10)
    assert retrieval_scores(ranks, positives, numbers)["ndcg_at_10"] == pytest.approx(expected, abs=1e-6)


def test_scores_are_those_of_trec_eval() -> None:
    """Queries with one to four right documents of 60, and embeddings that find about half of them."""
    library = pytest.importorskip("pytrec_eval", reason="pytrec-eval-terrier is not installed")
    random = np.random.default_rng(0)
    documents = normalized(random.normal(size=(60, 6)))
    numbers = np.repeat(np.arange(40), random.integers(1, 5, 40))
    positives = random.permuted(np.tile(np.arange(60), (40, 1)), axis=1)[numbers, np.arange(len(numbers)) % 60]
    queries = normalized(
        documents[positives[np.searchsorted(numbers, np.arange(40))]] + 0.4 * random.normal(size=(40, 6))
    )
    ranks, _ = find_ranks(queries[numbers], documents, positives, numbers)
    relevant: dict[str, dict[str, int]] = {}
    for query, positive in zip(numbers.tolist(), positives.tolist(), strict=True):
        relevant.setdefault(str(query), {})[str(positive)] = 1
    cosines = queries @ documents.T
    first = {
        str(query): {str(document): float(row[document]) for document in np.argsort(-row)[:10]}
        for query, row in enumerate(cosines)
    }
    measures = {"ndcg_cut.10", "recip_rank", "recall.10"}
    result = library.RelevanceEvaluator(relevant, measures).evaluate(first)
    names = {"ndcg_at_10": "ndcg_cut_10", "mrr_at_10": "recip_rank", "recall_at_10": "recall_10"}
    expected = {actual: np.mean([one[reference] for one in result.values()]) for actual, reference in names.items()}
    scores = retrieval_scores(ranks, positives, numbers)
    assert scores == pytest.approx(expected, abs=1e-9)
    assert 0.2 < scores["recall_at_10"] < 0.9


@pytest.mark.medium
def test_chance_is_the_mean_over_random_orders() -> None:
    random = np.random.default_rng(0)
    counts, documents = [1, 3, 12], 15
    numbers = np.repeat(np.arange(3), counts)
    sums = np.zeros(3)
    for _ in range(4000):
        ranks, positives = [], []
        for count in counts:
            order = random.permutation(documents)
            wrong_before = np.cumsum(order >= count)
            ranks += [1 + wrong_before[np.flatnonzero(order == right)[0]] for right in range(count)]
            positives += range(count)
        sums += list(retrieval_scores(np.array(ranks), np.array(positives), numbers).values())
    assert list(chance_scores(counts, documents).values()) == pytest.approx(sums / 4000, abs=0.01)


def test_graded_documents_are_scored_as_scikit_learn_does() -> None:
    random = np.random.default_rng(0)
    gains = [random.choice([0, 0.5, 1], size).astype(np.float32) for size in (3, 12, 30)]
    gains = [np.append(own, 1) for own in gains]
    scores = [random.normal(size=len(own)) for own in gains]
    expected = np.mean([ndcg_score(own[None], result[None], k=10) for own, result in zip(gains, scores, strict=True)])
    result = retrieval.reranking_scores([*scores, np.zeros(2)], [*gains, np.zeros(2)])
    assert result["ndcg_at_10"] == pytest.approx(expected, abs=1e-6)
    ties = retrieval.reranking_scores([np.zeros(3)], [np.array([1, 0, 0])])
    assert ties == {"ndcg_at_10": pytest.approx(0.5), "mrr_at_10": pytest.approx(1 / 3)}
    assert retrieval.reranking_scores([np.zeros(2)], [np.zeros(2)]) == {"ndcg_at_10": 0, "mrr_at_10": 0}


def test_random_order_is_the_mean_over_all_orders() -> None:
    gains = np.array([1, 0.5, 0])
    orders = [np.array(order) for order in ((3, 2, 1), (3, 1, 2), (2, 3, 1), (2, 1, 3), (1, 3, 2), (1, 2, 3))]
    each = [retrieval.reranking_scores([order], [gains]) for order in orders]
    expected = {name: pytest.approx(np.mean([scores[name] for scores in each])) for name in each[0]}
    assert retrieval.random_reranking_scores([gains]) == expected
