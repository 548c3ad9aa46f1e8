"""Official metrics and trivial baselines for plain arrays. scikit-learn and SciPy are imported on first use."""

from __future__ import annotations

import itertools
import math
import operator
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from bert.metrics import retrieval
from bert.metrics.tagging_schemes import extract_entities


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the fraction of correct predictions, 0 to 1."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the F1 of label 1, as in GLUE for MRPC and QQP; 0 if label 1 is never predicted."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, pos_label=1, average="binary", zero_division=0))


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean F1 over the labels, 0 to 1.

    With one label per row, the mean includes only labels that are predicted or correct in some row. With several labels
    per row, it includes all L labels, and labels that never occur have F1 0.
    """
    return _mean_f1(predictions, labels, "macro")


def micro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the F1 over all labels of all rows [R, L], 0 to 1; 0 if there are no labels and no predictions."""
    return _mean_f1(predictions, labels, "micro")


def _mean_f1(predictions: np.ndarray, labels: np.ndarray, average: str) -> float:
    from sklearn.metrics import f1_score

    if labels.shape[1:] == (1,):  # scikit-learn would treat presence and absence as two labels
        return f1(predictions[:, 0], labels[:, 0])
    return float(f1_score(labels, predictions, average=average, zero_division=0))


def matthews_correlation(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Returns the Matthews correlation, -1 to 1, as in GLUE for CoLA; 0 if all predictions are equal."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def pearson(predictions: np.ndarray, scores: np.ndarray) -> float:
    """Returns Pearson's correlation, -1 to 1; 0 if one side is constant or not finite."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, predictions, scores)


def spearman(predictions: np.ndarray, scores: np.ndarray) -> float:
    """Returns Spearman's rank correlation, with mean ranks for ties; 0 if one side is constant or not finite."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, predictions, scores)


def _correlation(correlate: Callable[..., Any], predictions: np.ndarray, scores: np.ndarray) -> float:
    sides = [np.asarray(side, np.float64) for side in (predictions, scores)]
    if not all(np.isfinite(side).all() and np.ptp(side) > 0 for side in sides):
        return 0.0
    return float(correlate(*sides).statistic)


METRICS = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "micro_f1": micro_f1,
    "matthews": matthews_correlation,
    "pearson": pearson,
    "spearman": spearman,
}
"""Metrics for rows with labels or scores, by name."""

SQUAD_V2 = tuple(f"{answers}{name}" for answers in ("", "HasAns_", "NoAns_", "best_") for name in ("exact", "f1"))

HIGHER_IS_BETTER = {
    **dict.fromkeys((*METRICS, *retrieval.NAMES), True),
    **dict.fromkeys(("exact_match", *SQUAD_V2, "exact_span"), True),
    **dict.fromkeys(("precision", "recall", "weighted_f1"), True),
    **dict.fromkeys(("bleu", "chrf", "rouge1", "rouge2", "rougeL", "rougeLsum"), True),
    **dict.fromkeys(("mlm_accuracy", "plm_accuracy", "lm_accuracy", "nsp_accuracy", "sop_accuracy"), True),
    **dict.fromkeys(("disc_accuracy", "disc_recall"), True),
    **dict.fromkeys(("perplexity", "bits_per_byte"), False),
}
"""Whether higher is better, for metrics of this module, of `bert.training.losses` and of the tasks."""


def higher_is_better(name: str) -> bool | None:
    """Returns whether a higher value is better; None for metrics without a direction, such as counts.

    Names of losses end in ``_loss`` (`bert.training.losses.Loss`). Their sum is ``loss``.
    """
    if name == "loss" or name.endswith("_loss"):
        return False
    return HIGHER_IS_BETTER.get(name)


def is_better(score: float | None, other: float | None, higher: bool) -> bool:
    """Whether ``score`` is strictly better than ``other``. None and NaN are worse than any number."""
    if score is None or math.isnan(score):
        return False
    if other is None or math.isnan(other):
        return True
    return score > other if higher else score < other


def compute_metrics(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Computes the named metrics for labels or scores [R], or for several labels per row [R, L]."""
    return {name: METRICS[name](predictions, labels) for name in names}


def by_class(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Computes the scores of each label for labels [R] or [R, L], and the confusion matrix for labels [R].

    Returns:
      ``classes``: precision, recall, f1, support (rows with the label) and predicted (rows predicted as the label), by
        name. Undefined scores are 0. ``confusion_matrix``: [L, L] number of rows by label and prediction.
    """
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    classes = np.arange(len(names))
    more = {}
    if labels.ndim == 1:
        more["confusion_matrix"] = confusion_matrix(labels, predictions, labels=classes).tolist()
        labels, predictions = (side[:, None] == classes for side in (labels, predictions))
    # scikit-learn treats a single column as two labels, of which only label 1 is relevant.
    only = {"labels": [1]} if labels.shape[1] == 1 else {}
    columns = precision_recall_fscore_support(labels, predictions, average=None, zero_division=0, **only)
    keys = ("precision", "recall", "f1", "support", "predicted")
    rows = zip(*(column.tolist() for column in (*columns, predictions.sum(axis=0))), strict=True)
    return {"classes": {name: dict(zip(keys, row, strict=True)) for name, row in zip(names, rows, strict=True)}, **more}


def softmax(logits: np.ndarray) -> np.ndarray:
    """Computes float64 probabilities from logits [..., L]."""
    logits = np.asarray(logits, np.float64)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Computes float64 probabilities from logits [...]."""
    return np.exp(-np.logaddexp(0, -np.asarray(logits, np.float64)))


def majority_class(names: Sequence[str], labels: np.ndarray) -> dict[str, float]:
    """Returns the named metrics when the most frequent label is always predicted."""
    labels = np.asarray(labels)
    return compute_metrics(names, np.full_like(labels, np.bincount(labels).argmax()), labels)


def unigram_baseline(train_counts: np.ndarray, label_ids: np.ndarray) -> dict[str, float]:
    """Returns the scores when tokens are predicted from their frequencies in the training text.

    Args:
      train_counts: [V] number of occurrences of each token.
      label_ids: [tokens] held-out tokens.

    Returns:
      loss (nats per token), perplexity, and the accuracy when the most frequent token is always predicted.
    """
    if len(label_ids) == 0:
        raise ValueError("label_ids is empty: there is nothing to predict")
    log_probabilities = unigram_log_probabilities(train_counts)
    loss = -float(np.mean(log_probabilities[label_ids]))
    hits = float(np.mean(np.asarray(label_ids) == log_probabilities.argmax()))
    return {"loss": loss, "perplexity": perplexity(loss), "accuracy": hits}


def unigram_log_probabilities(counts: np.ndarray) -> np.ndarray:
    """Returns the logarithms of the relative frequencies [V]. Each count is increased by 1 to keep them finite."""
    counts = np.asarray(counts, np.float64) + 1
    return np.log(counts) - np.log(counts.sum())


def bits_per_byte(loss: float, tokens_per_byte: float) -> float:
    """Converts a loss in nats per token to bits per byte of text."""
    return loss * tokens_per_byte / math.log(2)


def perplexity(loss: float) -> float:
    """Returns exp(loss) for a loss in nats per token. The result is finite, because JSON has no infinity."""
    return math.exp(min(loss, 700.0))  # exp overflows beyond 709


def squad_metrics(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]], v2: bool | None = None
) -> dict[str, float]:
    """Computes exact match and F1 of answers in percent, like SQuAD's official evaluators.

    v1.1 has the keys exact_match and f1, and scores 0 for a question without a prediction. v2.0 has the keys exact, f1
    and total, and the same with the prefixes ``HasAns_`` and ``NoAns_``.

    Args:
      predictions: answer text by question id; "" for no answer.
      references: correct answers by question id; [] for no answer. The best match counts.
      v2: whether to use the v2.0 evaluator; None: if any question has no answer.

    Raises:
      ValueError: there are no questions, or a question has no prediction in v2.0.
    """
    if not references:
        raise ValueError(_NO_QUESTIONS)
    v2 = not all(references.values()) if v2 is None else v2
    exact, f1 = squad_answer_scores(predictions, references, v2)
    if not v2:
        return {"exact_match": _percent(exact, references), "f1": _percent(f1, references)}
    scores: dict[str, float] = {}
    groups = {"": list(references), "HasAns_": [id for id, golds in references.items() if golds]}
    groups["NoAns_"] = [id for id, golds in references.items() if not golds]
    for name, ids in groups.items():
        if ids:
            scores |= {f"{name}exact": _percent(exact, ids), f"{name}f1": _percent(f1, ids), f"{name}total": len(ids)}
    return scores


def best_null_threshold(
    predictions: Mapping[str, str], null_odds: Mapping[str, float], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Finds the best no-answer thresholds with SQuAD v2.0's official search, and their scores.

    As in the official script, the threshold is 0 if answering no question is best, questions with equal odds may be
    counted differently, and odds of ids without references are ignored.

    Args:
      predictions: the best non-empty answer by question id (`bert.tasks.question_answering.Answers.best`).
      null_odds: odds by question id. Higher values mean that no answer is more likely.
      references: see `squad_metrics`.

    Returns:
      best_exact, best_f1 (percent), best_exact_thresh, best_f1_thresh.

    Raises:
      ValueError: there are no questions, or a question has no prediction.
    """
    if not references:
        raise ValueError(_NO_QUESTIONS)
    order = sorted((id for id in null_odds if id in references), key=null_odds.__getitem__)
    result: dict[str, float] = {}
    for name, scores in zip(("exact", "f1"), squad_answer_scores(predictions, references, v2=True), strict=True):
        best = total = float(sum(not golds for golds in references.values()))
        threshold = 0.0
        for id in order:
            total += scores[id] if references[id] else -bool(predictions[id])
            if total > best:
                best, threshold = total, null_odds[id]
        result |= {f"best_{name}": 100.0 * best / len(references), f"best_{name}_thresh": threshold}
    return result


def entity_metrics(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Computes precision, recall and F1 of entities, and the accuracy of tags, 0 to 1, like conlleval and seqeval.

    An entity is correct if its type, first word and last word are correct. `extract_entities` defines entities for all
    schemes, including invalid tags. precision, recall and f1 are over all entities (micro in seqeval). macro_f1 is the
    mean over the types, and weighted_f1 is weighted by the number of entities. Undefined scores are 0.

    Args:
      predictions, references: tags of each word of each sentence.
    """
    types = entities_by_type(predictions, references).values()
    correct, predicted, support = (int(sum(x[name] for x in types)) for name in ("correct", "predicted", "support"))
    tags, golds = (list(itertools.chain.from_iterable(sentences)) for sentences in (predictions, references))
    return {
        **_prf(correct, predicted, support),
        "accuracy": sum(map(operator.eq, tags, golds)) / max(len(golds), 1),
        "macro_f1": sum(x["f1"] for x in types) / max(len(types), 1),
        "weighted_f1": sum(x["f1"] * x["support"] for x in types) / max(support, 1),
    }


def entities_by_type(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Computes precision, recall, f1, correct, predicted and support of each type, in alphabetical order."""
    counts: dict[str, Counter[str]] = {"correct": Counter(), "predicted": Counter(), "support": Counter()}
    for sentence, (tags, golds) in enumerate(zip(predictions, references, strict=True)):
        if len(tags) != len(golds):
            raise ValueError(f"sentence {sentence}: {len(tags)} predicted tags for {len(golds)} words")
        predicted, support = set(extract_entities(tags)), set(extract_entities(golds))
        for name, entities in (("correct", predicted & support), ("predicted", predicted), ("support", support)):
            counts[name].update(entity.type for entity in entities)
    return {
        type: {**_prf(*(count[type] for count in counts.values())), **{name: counts[name][type] for name in counts}}
        for type in sorted(counts["predicted"] | counts["support"])
    }


def _prf(correct: int, predicted: int, support: int) -> dict[str, float]:
    precision, recall = correct / max(predicted, 1), correct / max(support, 1)
    return {"precision": precision, "recall": recall, "f1": 2 * correct / max(predicted + support, 1)}


def squad_answer_scores(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]], v2: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Computes exact match and F1 per question, 0 to 1. Raises ValueError for missing predictions in v2.0."""
    if v2 and (missing := [id for id in references if id not in predictions]):
        raise ValueError(f"{len(missing)} questions have no prediction, {missing[0]} is the first")
    exact, f1 = {}, {}
    for id, golds in references.items():
        if id not in predictions:
            exact[id] = f1[id] = 0.0
            continue
        words = _answer_words(predictions[id])
        right = [_answer_words(gold) for gold in golds]
        if v2:  # v2.0 does not count a correct answer of only articles and punctuation
            right = [gold for gold in right if gold] or [[]]
        exact[id] = float(words in right)
        f1[id] = max(_word_f1(words, gold, v2) for gold in right)
    return exact, f1


def _answer_words(text: str) -> list[str]:
    """Returns the lower-case words, without ASCII punctuation and articles."""
    text = text.lower().translate(_NO_PUNCTUATION)
    return _ARTICLES.sub(" ", text).split()


def _word_f1(words: list[str], gold: list[str], v2: bool) -> float:
    if v2 and not (words and gold):  # v1.1 scores 0 if there are no words to share
        return float(words == gold)
    shared = (Counter(words) & Counter(gold)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(words), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


def _percent(scores: Mapping[str, float], ids: Collection[str]) -> float:
    return 100.0 * sum(scores[id] for id in ids) / len(ids)


_NO_QUESTIONS = "there are no questions to score"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
