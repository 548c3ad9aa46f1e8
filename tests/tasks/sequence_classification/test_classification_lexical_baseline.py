import dataclasses

import numpy as np
import pytest

from bert.tasks import TASKS
from bert.tasks.sequence_classification import Examples, lexical_baseline

TEXTS = ["red rose", "red wine", "blue sky", "blue sea"] * 5


def examples(labels: list[float], dtype: type, pairs: bool = False) -> Examples:
    rows = [str(row) for row in range(len(TEXTS))]
    return Examples(TEXTS, TEXTS if pairs else None, np.array(labels * 5, dtype), rows)


def test_classification_reads_words() -> None:
    train = examples([0, 0, 1, 1], np.int32)
    name, scores = lexical_baseline(TASKS["sst2"], train, train)
    assert (name, scores["accuracy"]) == ("tf_idf_logistic_regression", 1.0)


def test_regression_reads_words_of_pairs() -> None:
    train = examples([0.0, 1.0, 4.0, 5.0], np.float32, pairs=True)
    name, scores = lexical_baseline(TASKS["stsb"], train, train)
    assert name == "tf_idf_ridge_regression"
    assert scores["pearson"] == pytest.approx(1.0, abs=0.05)


def test_pairs_are_compared_word_by_word() -> None:
    """The score is the number of words that two texts share, whichever they are."""
    rng = np.random.default_rng(0)
    drawn = [rng.permutation([f"word{number}" for number in range(200)])[:12] for _ in range(200)]
    shared = rng.integers(0, 7, 200)
    firsts = [" ".join(words[:6]) for words in drawn]
    seconds = [" ".join([*words[:n], *words[6 : 12 - n]]) for words, n in zip(drawn, shared, strict=True)]
    rows = Examples(firsts, seconds, shared.astype(np.float32), [str(row) for row in range(200)])
    scores = lexical_baseline(TASKS["stsb"], rows.take(range(150)), rows.take(range(150, 200)))[1]
    assert scores["spearman"] > 0.9


def test_other_tasks_have_none() -> None:
    assert lexical_baseline(TASKS["squad2"], None, None) is None


def test_without_words_or_with_one_label_there_is_none() -> None:
    train = examples([0, 0, 1, 1], np.int32)
    letters = dataclasses.replace(train, texts_a=["M K T A"] * len(TEXTS))
    assert lexical_baseline(TASKS["sst2"], letters, letters) is None
    assert lexical_baseline(TASKS["sst2"], examples([1, 1, 1, 1], np.int32), train) is None
