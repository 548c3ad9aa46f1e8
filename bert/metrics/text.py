"""Metrics of generated text in percent: BLEU and chrF by sacreBLEU, ROUGE by rouge-score, of the extra ``text``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import chain, zip_longest
from types import ModuleType
from typing import Any, Literal, NamedTuple

from bert.errors import UserError

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")

LIBRARIES = {
    "bleu": "sacrebleu.metrics",
    "chrf": "sacrebleu.metrics",
    **dict.fromkeys(ROUGE, "rouge_score.rouge_scorer"),
}
"""The module that computes each metric."""

BleuTokenizer = Literal["13a", "intl", "zh", "char", "none"]
"""sacreBLEU's tokenizers that need no further library; ``none`` is for text that is tokenized already."""


class TextScore(NamedTuple):
    """A score of sacreBLEU."""

    score: float
    """0 to 100."""
    signature: str
    """sacreBLEU's settings and version, without which two scores cannot be compared (Post 2018)."""


def require_libraries(metrics: Iterable[str]) -> None:
    """Raises UserError if a library of the named metrics is not installed: call it before training starts."""
    for metric in metrics:
        _library(metric)


def bleu(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    lowercase: bool = False,
    tokenizer: BleuTokenizer = "13a",
) -> TextScore:
    """BLEU of a corpus (Papineni et al. 2002).

    Args:
      predictions: one detokenized text for each row.
      references: one or more texts for each row, not equally many for all.
      lowercase: whether upper and lower case are equal.
      tokenizer: how the texts are split into words.
    """
    metric = _library("bleu").BLEU(lowercase=lowercase, tokenize=tokenizer, force=True)
    return _corpus_score(metric, predictions, references)


def chrf(predictions: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool = False) -> TextScore:
    """chrF2, the F score of character 6-grams (Popović 2015), of a corpus; arguments as for `bleu`."""
    return _corpus_score(_library("chrf").CHRF(lowercase=lowercase), predictions, references)


def rouge(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Mean over rows of the F1 of each of ROUGE, 0 to 100, with Porter's stemmer (Lin 2004).

    Of several references the one with the highest F1 counts. rougeLsum takes the lines of a text as its sentences.

    Raises:
      UserError: as `require_latin`.
    """
    scorer = _library("rouge1").RougeScorer(ROUGE, use_stemmer=True)
    _check_rows(predictions, references)
    require_latin(chain.from_iterable(references))
    rows = [scorer.score_multi(right, text) for text, right in zip(predictions, references, strict=True)]
    return {name: 100.0 * sum(row[name].fmeasure for row in rows) / len(rows) for name in ROUGE}


def require_latin(references: Iterable[str]) -> None:
    """Raises UserError if most letters of the references are not among a to z, the only ones that ROUGE counts."""
    letters = [letter for text in references for letter in text if letter.isalnum()]
    if 2 * sum(letter.isascii() for letter in letters) < len(letters):
        raise UserError("ROUGE counts only the letters a to z and digits, which few references have: use chrf")


def _corpus_score(metric: Any, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> TextScore:
    """The score of one of sacreBLEU's metrics, which takes a list of all first references, then of all second."""
    _check_rows(predictions, references)
    streams = [list(stream) for stream in zip_longest(*references)]
    return TextScore(float(metric.corpus_score(list(predictions), streams).score), str(metric.get_signature()))


def _check_rows(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if not predictions or len(predictions) != len(references) or not all(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} rows: each needs a reference")


def _library(metric: str) -> ModuleType:
    """The module that computes a metric."""
    try:
        return import_module(LIBRARIES[metric])
    except ImportError as error:
        raise UserError(
            f"the metric {metric} needs {error.name}, which is not installed: pip install 'bert-jax[text]'"
        ) from None
