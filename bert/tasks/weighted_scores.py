"""The metrics of each kind of task as functions of row weights, for bootstrap intervals, and its correct rows."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import numpy as np

from bert import metrics
from bert.data.rows import number_texts
from bert.errors import require
from bert.metrics import retrieval, weighted
from bert.metrics import text as text_metrics
from bert.metrics.calibration import Hits
from bert.metrics.tagging_schemes import SCHEMES, convert, extract_entities
from bert.metrics.weighted import WeightedScores
from bert.tasks.base import Task
from bert.tasks.embedding import EmbeddingTask, LabelledTextsTask
from bert.tasks.multiple_choice import MultipleChoiceTask
from bert.tasks.question_answering.squad import references
from bert.tasks.question_answering.task import QuestionAnsweringTask
from bert.tasks.reranker import RerankerTask
from bert.tasks.sequence_classification.classification import ClassificationTask, RegressionTask
from bert.tasks.sequence_classification.multilabel import MultilabelTask
from bert.tasks.sequence_to_sequence import SequenceToSequenceTask, exact_match
from bert.tasks.token_classification.task import TokenClassificationTask


def weighted_scores(task: Task, predictions: Any, examples: Any) -> WeightedScores | None:
    """Returns the metrics of ``task.score`` as a function of weights; None for other kinds of tasks.

    The units of the weights are rows, sentences, questions or, for retrieval, queries.
    """
    if isinstance(task, ClassificationTask):
        return weighted.classification(task.metrics, predictions.labels, examples.known_labels)
    if isinstance(task, MultilabelTask):
        return weighted.multilabel(task.metrics, predictions.labels, examples.known_labels)
    if isinstance(task, RegressionTask):
        return weighted.correlations(task.metrics, predictions, examples.known_labels)
    if isinstance(task, TokenClassificationTask):
        return _of_tags(task, predictions.tags, examples)
    if isinstance(task, QuestionAnsweringTask):
        return _of_answers(task, predictions, examples)
    if isinstance(task, MultipleChoiceTask):
        return weighted.means({"accuracy": predictions.choices == examples.labels})
    if isinstance(task, SequenceToSequenceTask):
        return _of_texts(task, predictions, examples)
    if isinstance(task, EmbeddingTask):
        return _of_embeddings(task, predictions, examples)
    if isinstance(task, RerankerTask):
        rows = retrieval.reranking_scores_of_queries(predictions, examples.known_relevance)
        return weighted.means(dict(zip(retrieval.NAMES, rows.T, strict=False)))
    return None


def hits(task: Task, predictions: Any, examples: Any) -> Hits | None:
    """Returns which rows are correct, and with what confidence, for tasks with one label or choice per row."""
    if isinstance(task, ClassificationTask):
        return task.hits(predictions, examples)
    if isinstance(task, MultipleChoiceTask):
        pairs = zip(predictions.choices, predictions.probabilities, strict=True)
        return Hits(predictions.choices == examples.labels, np.array([shares[choice] for choice, shares in pairs]))
    return None


def reliability(task: Task, predictions: Any, examples: Any) -> Hits | None:
    """Returns the events whose probabilities are calibrated: `hits`, or all labels of all rows of multi-label tasks."""
    if isinstance(task, MultilabelTask):
        return task.reliability(predictions, examples)
    return hits(task, predictions, examples)


def _of_tags(task: TokenClassificationTask, tags: list[list[str]], examples: Any) -> WeightedScores:
    expected = require(examples.tags, "the tags")
    if task.marks_entities and examples.scheme in SCHEMES:  # accuracy depends on the scheme of the file
        tags, expected = (
            [convert(sentence, examples.scheme) for sentence in sentences] for sentences in (tags, expected)
        )
    hits = np.array([sum(map(str.__eq__, *pair)) for pair in zip(tags, expected, strict=True)], np.float64)
    words = np.array([len(sentence) for sentence in expected], np.float64)
    if not task.marks_entities:
        return weighted.WeightedScores(
            len(words), lambda weights: {"accuracy": (weights @ hits) / np.maximum(weights @ words, 1)}
        )
    pairs = zip(tags, expected, strict=True)
    sentences = [(set(extract_entities(found)), set(extract_entities(gold))) for found, gold in pairs]
    types = sorted({entity.type for pair in sentences for entities in pair for entity in entities})
    counts = {name: np.zeros((len(words), len(types))) for name in ("correct", "predicted", "support")}
    columns = {type: column for column, type in enumerate(types)}
    for row, (found, gold) in enumerate(sentences):
        for name, entities in (("correct", found & gold), ("predicted", found), ("support", gold)):
            for type, count in Counter(entity.type for entity in entities).items():
                counts[name][row, columns[type]] = count
    return weighted.entities({**counts, "hits": hits, "words": words}, types, task.types)


def _of_answers(task: QuestionAnsweringTask, predictions: Any, examples: Any) -> WeightedScores:
    expected = references(examples.examples)
    ids, v2 = list(expected), task.may_be_impossible
    by_id = metrics.squad_answer_scores(predictions.texts, expected, v2)
    exact, f1 = (100 * np.array([scores[id] for id in ids]) for scores in by_id)
    if not v2:
        return weighted.means({"exact_match": exact, "f1": f1})
    answerable = np.array([bool(expected[id]) for id in ids])
    values, included = {}, {}
    for group, rows in (("", np.ones(len(ids), bool)), ("HasAns_", answerable), ("NoAns_", ~answerable)):
        for name, scores in (("exact", exact), ("f1", f1)):
            values[f"{group}{name}"], included[f"{group}{name}"] = scores, rows
    best = {id: candidate.text for id, candidate in predictions.best.items()}
    gains = {
        f"best_{name}": np.array([scores[id] if expected[id] else -float(bool(best[id])) for id in ids])
        for name, scores in zip(("exact", "f1"), metrics.squad_answer_scores(best, expected, v2=True), strict=True)
    }
    odds = np.array([require(predictions.null_odds, "the odds of no answer")[id] for id in ids])
    return weighted.combined(weighted.means(values, included), weighted.best_scores(odds, gains, ~answerable))


def _of_texts(task: SequenceToSequenceTask, predictions: Any, examples: Any) -> WeightedScores:
    texts, right, lowercase = predictions.texts, require(examples.references, "the targets"), predictions.lowercase
    parts, values = [], {}
    if rouge := [name for name in task.metrics if name in text_metrics.ROUGE]:
        rows = text_metrics.rouge_of_rows(texts, right)
        values = {name: np.array([100 * row[name] for row in rows]) for name in rouge}
    if "exact_match" in task.metrics:
        pairs = zip(texts, right, strict=True)
        values["exact_match"] = np.array([exact_match([text], [of_row], lowercase) for text, of_row in pairs])
    if values:
        parts.append(weighted.means(values))
    names: tuple[Literal["bleu"], Literal["chrf"]] = ("bleu", "chrf")
    of_corpus = {
        name: text_metrics.corpus_score_of_weights(name, texts, right, lowercase)
        for name in names
        if name in task.metrics
    }
    if of_corpus:
        parts.append(
            weighted.per_sample(len(texts), lambda row: {name: score(row) for name, score in of_corpus.items()})
        )
    return weighted.combined(*parts)


def _of_embeddings(task: EmbeddingTask, predictions: Any, examples: Any) -> WeightedScores:
    if isinstance(task, LabelledTextsTask):
        return weighted.means({"accuracy": task.nearest_has_label(predictions, examples)})
    if predictions.ranks is None:
        return weighted.correlations(("spearman", "pearson"), predictions.similarities, examples.known_scores)
    numbers = (number_texts(examples.documents), number_texts(examples.queries))
    rows = retrieval.retrieval_scores_of_queries(predictions.ranks, *numbers)
    return weighted.means(dict(zip(retrieval.NAMES, rows.T, strict=True)))
