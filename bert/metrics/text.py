"""Metrics of generated text in percent: BLEU and chrF with sacreBLEU, ROUGE with rouge-score (extra ``text``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import chain, zip_longest
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from bert.errors import UserError

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")

LIBRARIES = {
    "bleu": "sacrebleu.metrics",
    "chrf": "sacrebleu.metrics",
    **dict.fromkeys(ROUGE, "rouge_score.rouge_scorer"),
}
"""The module that implements each metric."""

BleuTokenizer = Literal["13a", "intl", "zh", "char", "none"]
"""sacreBLEU's tokenizers that need no further libraries. ``none`` is for tokenized text."""


class TextScore(NamedTuple):
    """A sacreBLEU score."""

    score: float
    """0 to 100."""
    signature: str
    """Settings and version of sacreBLEU, which are needed to compare scores (Post 2018)."""


def require_libraries(metrics: Iterable[str]) -> None:
    """Raises UserError if a library for the named metrics is not installed. Call this before training starts."""
    for metric in metrics:
        _library(metric)


def bleu(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    lowercase: bool = False,
    tokenizer: BleuTokenizer = "13a",
) -> TextScore:
    """Computes corpus BLEU (Papineni et al. 2002).

    Args:
      predictions: one detokenized text per row.
      references: one or more texts per row. Rows may have different numbers of references.
    """
    metric = _library("bleu").BLEU(lowercase=lowercase, tokenize=tokenizer, force=True)
    return _corpus_score(metric, predictions, references)


def chrf(predictions: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool = False) -> TextScore:
    """Computes corpus chrF2, the F-score of character 6-grams (Popović 2015). Arguments: see `bleu`."""
    return _corpus_score(_library("chrf").CHRF(lowercase=lowercase), predictions, references)


def rouge(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Computes the mean F1 of each ROUGE metric over the rows, 0 to 100, with Porter's stemmer (Lin 2004).

    The reference with the highest F1 counts. rougeLsum treats each line as a sentence.

    Raises:
      UserError: the references are not in Latin script (see `require_latin`).
    """
    rows = rouge_of_rows(predictions, references)
    return {name: 100.0 * sum(row[name] for row in rows) / len(rows) for name in ROUGE}


def rouge_of_rows(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[dict[str, float]]:
    """Computes the F1 of each ROUGE metric for each row, 0 to 1. Raises UserError like `rouge`."""
    scorer = _library("rouge1").RougeScorer(ROUGE, use_stemmer=True)
    _check_rows(predictions, references)
    require_latin(chain.from_iterable(references))
    rows = [scorer.score_multi(right, text) for text, right in zip(predictions, references, strict=True)]
    return [{name: row[name].fmeasure for name in ROUGE} for row in rows]


def corpus_score_of_weights(
    name: Literal["bleu", "chrf"], predictions: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool
) -> Callable[[np.ndarray], float]:
    """Returns the BLEU or chrF of a sample as a function of the weights [R] of its rows.

    Both are computed from sums of counts over the rows, as in sacreBLEU's own bootstrap (``sacrebleu.significance``).
    """
    library = _library(name)
    metric = library.BLEU(lowercase=lowercase, force=True) if name == "bleu" else library.CHRF(lowercase=lowercase)
    _check_rows(predictions, references)
    streams = [list(stream) for stream in zip_longest(*references)]
    statistics = np.array(metric._extract_corpus_statistics(list(predictions), streams), np.int64)

    def score(weights: np.ndarray) -> float:
        sums = (weights.astype(np.int64)[:, None] * statistics).sum(axis=0)
        return float(metric._compute_score_from_stats(sums.tolist()).score)

    return score


def require_latin(references: Iterable[str]) -> None:
    """Raises UserError if most letters of the references are outside of a to z, which ROUGE ignores."""
    letters = [letter for text in references for letter in text if letter.isalnum()]
    if 2 * sum(letter.isascii() for letter in letters) < len(letters):
        raise UserError("ROUGE counts only the letters a to z and digits, which few references have: use chrf")


def _corpus_score(metric: Any, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> TextScore:
    """Computes a sacreBLEU metric, which expects lists of all first references, all second references, etc."""
    _check_rows(predictions, references)
    streams = [list(stream) for stream in zip_longest(*references)]
    return TextScore(float(metric.corpus_score(list(predictions), streams).score), str(metric.get_signature()))


def _check_rows(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if not predictions or len(predictions) != len(references) or not all(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} rows: each needs a reference")


def _library(metric: str) -> ModuleType:
    """Returns the module that implements a metric."""
    try:
        return import_module(LIBRARIES[metric])
    except ImportError as error:
        raise UserError(
            f"the metric {metric} needs {error.name}, which is not installed: pip install 'bert-jax[text]'"
        ) from None
