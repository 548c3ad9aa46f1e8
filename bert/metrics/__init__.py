"""Official metrics and trivial baselines over plain arrays. scikit-learn and SciPy are imported when first needed."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from bert.metrics import retrieval
from bert.metrics.tagging_schemes import extract_entities


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Share of right predictions, 0 to 1."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 of label 1 against label 0, as GLUE has it for MRPC and QQP; 0 where nothing is predicted as 1."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, pos_label=1, average="binary", zero_division=0))


def macro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Mean of the F1 of each label, 0 to 1: with one label a row of those that are predicted or right somewhere, else
    of all L, of which one without either has 0."""
    return _mean_f1(predictions, labels, "macro")


def micro_f1(predictions: np.ndarray, labels: np.ndarray) -> float:
    """F1 over all labels of all rows, [R, L], 0 to 1; 0 where no row has or is given any."""
    return _mean_f1(predictions, labels, "micro")


def _mean_f1(predictions: np.ndarray, labels: np.ndarray, average: str) -> float:
    from sklearn.metrics import f1_score

    if labels.shape[1:] == (1,):  # which scikit-learn takes for two labels: to have the one, and not to have it
        return f1(predictions[:, 0], labels[:, 0])
    return float(f1_score(labels, predictions, average=average, zero_division=0))


def matthews_correlation(predictions: np.ndarray, labels: np.ndarray) -> float:
    """Matthews correlation, -1 to 1, as GLUE has it for CoLA; 0 where one label is predicted throughout."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def pearson(predictions: np.ndarray, scores: np.ndarray) -> float:
    """Pearson's correlation, -1 to 1; 0 where it is undefined: a side is constant, or a run has diverged."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, predictions, scores)


def spearman(predictions: np.ndarray, scores: np.ndarray) -> float:
    """Spearman's rank correlation, ties at their mean rank; 0 where Pearson's is."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, predictions, scores)


def _correlation(of: Callable[..., Any], predictions: np.ndarray, scores: np.ndarray) -> float:
    sides = [np.asarray(side, np.float64) for side in (predictions, scores)]
    if not all(np.isfinite(side).all() and np.ptp(side) > 0 for side in sides):
        return 0.0
    return float(of(*sides).statistic)


METRICS = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "micro_f1": micro_f1,
    "matthews": matthews_correlation,
    "pearson": pearson,
    "spearman": spearman,
}
"""Metrics of a task with labels or a score a row, by name."""

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
"""Direction of the metrics of this module, of `bert.training.losses` and of the tasks: whether higher is better."""


def higher_is_better(name: str) -> bool | None:
    """Whether a higher value of a metric is better; None for anything without a direction, such as a count.

    Names of losses end in ``_loss`` (`bert.training.losses.Loss`); their sum is ``loss``.
    """
    if name == "loss" or name.endswith("_loss"):
        return False
    return HIGHER_IS_BETTER.get(name)


def is_better(score: float | None, other: float | None, higher: bool) -> bool:
    """Whether ``score`` is strictly better than ``other``; None (a NaN) is worse than any number."""
    if score is None or math.isnan(score):
        return False
    if other is None or math.isnan(other):
        return True
    return score > other if higher else score < other


def compute_metrics(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The named metrics of [R] predicted labels or scores, or of [R, L] with any number of labels a row."""
    return {name: METRICS[name](predictions, labels) for name in names}


def by_class(names: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Scores of each of L labels of [R] or [R, L], and which labels of [R] are taken for which.

    Returns:
      ``classes``: precision, recall, f1, support (rows with the label) and predicted (rows given it) of each name; 0
        for what cannot be divided. ``confusion_matrix`` of [R]: [L, L] rows by their label and their prediction.
    """
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    classes = np.arange(len(names))
    more = {}
    if labels.ndim == 1:
        more["confusion_matrix"] = confusion_matrix(labels, predictions, labels=classes).tolist()
        labels, predictions = (side[:, None] == classes for side in (labels, predictions))
    # For scikit-learn a single column is a vector of two labels: only those who have the label are of interest.
    only = {"labels": [1]} if labels.shape[1] == 1 else {}
    columns = precision_recall_fscore_support(labels, predictions, average=None, zero_division=0, **only)
    keys = ("precision", "recall", "f1", "support", "predicted")
    rows = zip(*(column.tolist() for column in (*columns, predictions.sum(axis=0))), strict=True)
    return {"classes": {name: dict(zip(keys, row, strict=True)) for name, row in zip(names, rows, strict=True)}, **more}


def softmax(logits: np.ndarray) -> np.ndarray:
    """[..., L] logits -> [..., L] float64 probabilities."""
    logits = np.asarray(logits, np.float64)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """[...] logits -> [...] float64 probabilities."""
    return np.exp(-np.logaddexp(0, -np.asarray(logits, np.float64)))


def majority_class(names: Sequence[str], labels: np.ndarray) -> dict[str, float]:
    """The named metrics of always answering the most frequent label: what any model has to beat."""
    labels = np.asarray(labels)
    return compute_metrics(names, np.full_like(labels, np.bincount(labels).argmax()), labels)


def unigram_baseline(train_counts: np.ndarray, label_ids: np.ndarray) -> dict[str, float]:
    """Tokens predicted from how often each token occurs in the training text, whatever the context.

    Args:
      train_counts: [V] occurrences of each token.
      label_ids: [tokens] the held-out ones.

    Returns:
      loss (nats a token), perplexity, and accuracy of always answering the most frequent token.
    """
    if len(label_ids) == 0:
        raise ValueError("label_ids is empty: there is nothing to predict")
    log_probabilities = unigram_log_probabilities(train_counts)
    loss = -float(np.mean(log_probabilities[label_ids]))
    hits = float(np.mean(np.asarray(label_ids) == log_probabilities.argmax()))
    return {"loss": loss, "perplexity": perplexity(loss), "accuracy": hits}


def unigram_log_probabilities(counts: np.ndarray) -> np.ndarray:
    """[V] log relative frequencies; one is added to each count, so that a token never seen has a finite one."""
    counts = np.asarray(counts, np.float64) + 1
    return np.log(counts) - np.log(counts.sum())


def bits_per_byte(loss: float, tokens_per_byte: float) -> float:
    """Bits that a model of the text takes for each of its bytes, of a loss in nats a token."""
    return loss * tokens_per_byte / math.log(2)


def perplexity(loss: float) -> float:
    """exp of a loss in nats a token; a diverged run's stays finite, since JSON has no infinity."""
    return math.exp(min(loss, 700.0))  # exp overflows beyond 709


def squad_metrics(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]], v2: bool | None = None
) -> dict[str, float]:
    """Exact match and F1 of answers in percent, as SQuAD's official evaluators have them.

    Where every question has an answer it is v1.1's (keys exact_match, f1): a question without a prediction
    scores 0. Where one has none it is v2.0's (exact, f1, total, and the same with ``HasAns_`` and ``NoAns_`` before).

    Args:
      predictions: a text for each question's id; empty: no answer.
      references: the right answers of each question's id; none: it has no answer. The best match counts.
      v2: which of the two evaluators it is; None: as the questions tell.

    Raises:
      ValueError: no questions, or, under v2.0, one without a prediction.
    """
    if not references:
        raise ValueError(_NO_QUESTIONS)
    v2 = not all(references.values()) if v2 is None else v2
    exact, f1 = _squad_scores(predictions, references, v2)
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
    """The thresholds above which to give no answer, by SQuAD v2.0's official search, and the scores they reach.

    As there, 0 is the threshold where no question is better answered, of two questions with equal odds one may be
    counted as answered and the other not, and odds of ids that are not among the references are passed over.

    Args:
      predictions: for each question's id the best answer that is one (`bert.tasks.question_answering.Answers.best`).
      null_odds: the higher, the likelier that there is no answer.
      references: as for `squad_metrics`.

    Returns:
      best_exact, best_f1 (percent), best_exact_thresh, best_f1_thresh.

    Raises:
      ValueError: no questions, or one without a prediction.
    """
    if not references:
        raise ValueError(_NO_QUESTIONS)
    order = sorted((id for id in null_odds if id in references), key=null_odds.__getitem__)
    result: dict[str, float] = {}
    for name, scores in zip(("exact", "f1"), _squad_scores(predictions, references, v2=True), strict=True):
        best = total = float(sum(not golds for golds in references.values()))
        threshold = 0.0
        for id in order:
            total += scores[id] if references[id] else -bool(predictions[id])
            if total > best:
                best, threshold = total, null_odds[id]
        result |= {f"best_{name}": 100.0 * best / len(references), f"best_{name}_thresh": threshold}
    return result


def entity_metrics(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of entities, and accuracy of tags, 0 to 1, as conlleval and seqeval have them.

    An entity counts where type, first and last word are right; `extract_entities` defines one, whatever the
    scheme, sound or not. precision, recall and f1 are over all entities (seqeval's "micro"); macro_f1 is the mean
    of the types' and weighted_f1 that weighted by the types' entities. What cannot be divided is 0.

    Args:
      predictions, references: the tags of each word of each sentence.
    """
    by_type = entities_by_type(predictions, references)
    correct, predicted, support = (
        int(sum(scores[name] for scores in by_type.values())) for name in ("correct", "predicted", "support")
    )
    supports = [scores["support"] for scores in by_type.values()]
    f1s = [scores["f1"] for scores in by_type.values()]
    right = sum(
        a == b for ours, golds in zip(predictions, references, strict=True) for a, b in zip(ours, golds, strict=True)
    )
    weighted = sum(f1 * support for f1, support in zip(f1s, supports, strict=True))
    return {
        **_prf(correct, predicted, support),
        "accuracy": right / max(sum(map(len, references)), 1),
        "macro_f1": sum(f1s) / max(len(f1s), 1),
        "weighted_f1": weighted / max(sum(supports), 1),
    }


def entities_by_type(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> dict[str, dict[str, float]]:
    """precision, recall, f1, correct, predicted and support (right entities) of each type, in alphabetical order."""
    counts: dict[str, Counter[str]] = {"correct": Counter(), "predicted": Counter(), "support": Counter()}
    for sentence, (ours, golds) in enumerate(zip(predictions, references, strict=True)):
        if len(ours) != len(golds):
            raise ValueError(f"sentence {sentence}: {len(ours)} predicted tags for {len(golds)} words")
        ours_entities, right = set(extract_entities(ours)), set(extract_entities(golds))
        for name, entities in (("correct", ours_entities & right), ("predicted", ours_entities), ("support", right)):
            counts[name].update(entity.type for entity in entities)
    return {
        type: {**_prf(*(count[type] for count in counts.values())), **{name: counts[name][type] for name in counts}}
        for type in sorted(counts["predicted"] | counts["support"])
    }


def _prf(correct: int, predicted: int, support: int) -> dict[str, float]:
    precision, recall = correct / max(predicted, 1), correct / max(support, 1)
    return {"precision": precision, "recall": recall, "f1": 2 * correct / max(predicted + support, 1)}


def _squad_scores(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]], v2: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Exact match and F1 of each question, 0 to 1. Raises ValueError: under v2.0, one without a prediction."""
    if v2 and (missing := [id for id in references if id not in predictions]):
        raise ValueError(f"{len(missing)} questions have no prediction, {missing[0]} is the first")
    exact, f1 = {}, {}
    for id, golds in references.items():
        if id not in predictions:
            exact[id] = f1[id] = 0.0
            continue
        words = _answer_words(predictions[id])
        right = [_answer_words(gold) for gold in golds]
        if v2:  # there, a right answer of articles and punctuation alone is none
            right = [gold for gold in right if gold] or [[]]
        exact[id] = float(words in right)
        f1[id] = max(_word_f1(words, gold, v2) for gold in right)
    return exact, f1


def _answer_words(text: str) -> list[str]:
    """Lower case, without ASCII punctuation, then without articles."""
    text = text.lower().translate(_NO_PUNCTUATION)
    return _ARTICLES.sub(" ", text).split()


def _word_f1(words: list[str], gold: list[str], v2: bool) -> float:
    if v2 and not (words and gold):  # v1.1 gives no points where there are no words to share
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
