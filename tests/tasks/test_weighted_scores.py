"""Metrics as functions of row weights, against `Task.score` on the rows that are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bert.config import EmbeddingConfig
from bert.data.rows import number_texts
from bert.tasks import TASKS
from bert.tasks.embedding import EmbeddingTask, LabelledTextsTask, Similarities
from bert.tasks.multiple_choice import Chosen
from bert.tasks.multiple_choice import Examples as Questions
from bert.tasks.question_answering.span_features import Answer, Answers, Candidate, Example
from bert.tasks.question_answering.squad import Dataset
from bert.tasks.reranker import RankedExamples
from bert.tasks.sequence_classification.base import Examples
from bert.tasks.sequence_classification.classification import ClassificationPredictions
from bert.tasks.sequence_classification.custom import CustomClassification, CustomMultilabel, CustomRegression
from bert.tasks.sequence_classification.multilabel import MultilabelPredictions
from bert.tasks.sequence_to_sequence import SequenceToSequenceTask, TextPairs, Written
from bert.tasks.text_pairs import TextExamples
from bert.tasks.token_classification.conll import Sentences
from bert.tasks.token_classification.task import Tagged, TokenClassificationTask
from bert.tasks.weighted_scores import hits, weighted_scores

ROWS = 24
RNG = np.random.default_rng(1)
IDS = [str(row) for row in range(ROWS)]
TEXTS = [f"text {row}" for row in range(ROWS)]
NAMES = ("a", "b", "c")
TRUE, FOUND = RNG.integers(0, 3, ROWS), RNG.integers(0, 3, ROWS)
SHARES = RNG.dirichlet(np.ones(3), ROWS)
SEVERAL = RNG.integers(0, 2, (ROWS, 3)), RNG.integers(0, 2, (ROWS, 3))
SCORES, GUESSES = RNG.integers(0, 4, ROWS).astype(float), RNG.normal(size=ROWS)
TAGS = ["O", "B-PER", "I-PER", "B-LOC"]
GOLD, TAGGED = ([[TAGS[tag] for tag in RNG.integers(0, 4, 5)] for _ in range(ROWS)] for _ in range(2))
WORDS = ["red", "a blue", "green sea"]
LISTED = [WORDS[word] for word in TRUE], [WORDS[word] for word in FOUND]

Kept = Callable[[np.ndarray], tuple[Any, Any]]


def classified(rows: np.ndarray) -> tuple[Any, Any]:
    examples = Examples(TEXTS, None, TRUE, IDS).take(rows.tolist())
    return ClassificationPredictions(FOUND[rows], SHARES[rows]), examples


def with_labels(rows: np.ndarray) -> tuple[Any, Any]:
    examples = Examples(TEXTS, None, SEVERAL[0], IDS).take(rows.tolist())
    return MultilabelPredictions(SEVERAL[1][rows].astype(bool), SHARES[rows], np.full(3, 0.5)), examples


def with_scores(rows: np.ndarray) -> tuple[Any, Any]:
    return GUESSES[rows], Examples(TEXTS, None, SCORES, IDS).take(rows.tolist())


def with_tags(rows: np.ndarray) -> tuple[Any, Any]:
    words = [["word"] * 5 for _ in rows]
    return Tagged([TAGGED[row] for row in rows], []), Sentences(words, [GOLD[row] for row in rows])


def answered(impossible: bool) -> Kept:
    def kept(rows: np.ndarray) -> tuple[Any, Any]:
        none = [impossible and row % 3 == 0 for row in range(ROWS)]
        answers = [() if none[row] else (Answer(LISTED[0][row], 0),) for row in range(ROWS)]
        examples = [Example(IDS[row], "who", "in a context", answers[row], none[row]) for row in rows]
        candidates = {
            IDS[row]: [Candidate(LISTED[1][row], 0, 3, 0.7, 1.0, 1.0), Candidate("", -1, -1, 0.3, 0.0, 0.0)]
            for row in rows
        }
        odds = {IDS[row]: float(GUESSES[row]) for row in rows} if impossible else None
        found = {id: list(reversed(of)) if odds and odds[id] > 0 else of for id, of in candidates.items()}
        predictions = Answers(found, odds, 0.0 if impossible else None, dict.fromkeys(found, 0.0))
        return predictions, Dataset(examples, [])

    return kept


def chosen(rows: np.ndarray) -> tuple[Any, Any]:
    choices = [list(NAMES)] * ROWS
    examples = Questions(TEXTS, choices, choices, TRUE, IDS).take(rows.tolist())
    return Chosen(FOUND[rows], [SHARES[row] for row in rows]), examples


def written(rows: np.ndarray) -> tuple[Any, Any]:
    right = [[f"the {word} house is on the hill"] for word in LISTED[0]]
    found = [f"the {LISTED[1][row]} house is on the hill" for row in rows]
    return Written(found, False), TextPairs(TEXTS, right, IDS).take(rows.tolist())


def compared(rows: np.ndarray) -> tuple[Any, Any]:
    none: list[list[str]] = [[] for _ in TEXTS]
    return Similarities(GUESSES[rows]), TextExamples(TEXTS, TEXTS, none, SCORES, IDS, True).take(rows.tolist())


def retrieved(rows: np.ndarray) -> tuple[Any, Any]:
    none: list[list[str]] = [[] for _ in TEXTS]
    ranks = 1 + (np.arange(ROWS) * 7) % 13
    return Similarities(GUESSES[rows], ranks[rows]), TextExamples(TEXTS, TEXTS, none, None, IDS, True).take(
        rows.tolist()
    )


def reranked(rows: np.ndarray) -> tuple[Any, Any]:
    documents = [["a", "b", "c"] for _ in TEXTS]
    examples = RankedExamples(TEXTS, documents, [np.eye(3)[label] for label in TRUE], IDS).take(rows.tolist())
    return [SHARES[row] for row in rows], examples


SQUAD_2 = TASKS["squad2"]
CASES: dict[str, tuple[Any, Kept]] = {
    "classification": (CustomClassification(labels=NAMES, metrics=("accuracy", "macro_f1", "matthews")), classified),
    "multilabel": (CustomMultilabel(labels=NAMES), with_labels),
    "regression": (CustomRegression(), with_scores),
    "tags": (TokenClassificationTask(name="ner", labels=("O", *TAGS[1:], "I-LOC", "B-ORG", "I-ORG")), with_tags),
    "squad": (TASKS["squad"], answered(False)),
    "squad2": (SQUAD_2, answered(True)),
    "choices": (TASKS["swag"], chosen),
    "texts": (SequenceToSequenceTask(name="t", metrics=("bleu", "chrf", "rouge1", "rougeL", "exact_match")), written),
    "pairs": (EmbeddingTask(settings=EmbeddingConfig(loss="cosent")), compared),
    "queries": (EmbeddingTask(), retrieved),
    "reranker": (TASKS["reranker"], reranked),
}


@pytest.mark.parametrize("kind", CASES)
def test_weights_of_0_and_1_give_the_score_of_the_kept_rows(kind: str) -> None:
    task, make = CASES[kind]
    if kind == "texts":
        pytest.importorskip("sacrebleu")
        pytest.importorskip("rouge_score")
    weighted = weighted_scores(task, *make(np.arange(ROWS)))
    assert weighted is not None and weighted.num_units == ROWS
    kept = np.array([np.ones(ROWS), np.arange(ROWS) % 2, np.arange(ROWS) % 4 > 0], float)
    computed = weighted.compute(kept)
    for sample, weights in enumerate(kept):
        expected = task.score(*make(np.flatnonzero(weights)))
        expected = {name: value for name, value in expected.items() if not name.endswith(("total", "thresh"))}
        assert {name: values[sample] for name, values in computed.items()} == pytest.approx(expected, abs=1e-9)
        assert task.main_metric in computed


def test_the_nearest_text_of_the_same_label_counts() -> None:
    none: list[list[str]] = [[] for _ in TEXTS]
    examples = TextExamples(TEXTS, None, none, number_texts([NAMES[label] for label in TRUE]), IDS, True)
    task, vectors = LabelledTextsTask(), list(RNG.normal(size=(ROWS, 4)))
    weighted = weighted_scores(task, vectors, examples)
    assert weighted is not None
    assert weighted.compute(np.ones((1, ROWS)))["accuracy"][0] == task.score(vectors, examples)["accuracy"]


def test_rows_with_one_label_are_right_or_wrong() -> None:
    for kind in ("classification", "choices"):
        task, make = CASES[kind]
        rows = hits(task, *make(np.arange(ROWS)))
        assert rows is not None
        np.testing.assert_array_equal(rows.correct, FOUND == TRUE)
        np.testing.assert_array_equal(rows.confidences, SHARES[np.arange(ROWS), FOUND])
    task, make = CASES["regression"]
    assert hits(task, *make(np.arange(ROWS))) is None


def test_a_task_of_another_kind_has_no_weights() -> None:
    assert weighted_scores(object(), None, None) is None  # type: ignore[arg-type]
