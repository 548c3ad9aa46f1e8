"""What a pretraining row is: for each objective how its rows are drawn from the text, laid out and labelled.

Masked-LM is part of every objective. Beside it stands next-sentence prediction, sentence order, or nothing; a new one
is a new line in OBJECTIVES, and a loss (`bert.losses`) if it needs another than two classes over the pooled output.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bert.data.full_rows import rows_across_documents, rows_within_documents
from bert.data.pairs import Pair, ordered_pairs, sentence_pairs

if TYPE_CHECKING:
    from bert.tokenizer import SpecialTokens

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class RowObjective:
    """One way to make rows of text.

    Attributes:
      special_tokens: [CLS] and [SEP] of a row; a sentence is no longer than T less these.
      documents: least number of documents that rows can be drawn from.
      shortens: whether data.short_seq_prob has a say.
      draw: (sentences, documents, T, short_seq_prob, random stream, numbers) -> rows [R, ...]: the token ranges of
        each, start and end, and the label where there is one. Arguments as of ``bert.data.pairs.sentence_pairs``.
      lay_out: (tokens, boundaries of the documents among the tokens, drawn rows, T, special tokens, dtype) -> columns.
      label: what the label tells: the column NAME_label and the batch's NAME_labels and NAME_weights; None without.
      metric: start of the names of its loss and accuracy in metrics.jsonl.
      answers: the label's values in words.
    """

    special_tokens: int
    documents: int
    shortens: bool
    draw: Callable[[list[int], list[int], int, float, random.Random, list[int]], np.ndarray]
    lay_out: Callable[[np.ndarray, np.ndarray, np.ndarray, int, SpecialTokens, type], Columns]
    label: str | None = None
    metric: str | None = None
    answers: tuple[str, ...] = ()


def _paired(
    pairs: Callable[..., Iterator[Pair]],
    label: str,
    metric: str,
    documents: int,
    answers: tuple[str, ...],
) -> RowObjective:
    def draw(*arguments: Any) -> np.ndarray:
        return np.array(list(pairs(*arguments)), np.int64).reshape(-1, 5)

    def lay_out(
        tokens: np.ndarray, _: np.ndarray, found: np.ndarray, length: int, special: SpecialTokens, dtype: type
    ) -> Columns:
        return {
            **_pair_columns(tokens, found, length, special, dtype),
            f"{label}_label": found[:, 4].astype(np.int8),
        }

    return RowObjective(3, documents, True, draw, lay_out, label, metric, answers)


def _unpaired(rows: Callable[[list[int], list[int], int], Iterator[tuple[int, int]]]) -> RowObjective:
    def draw(sentences: list[int], documents: list[int], length: int, *_: Any) -> np.ndarray:
        return np.array(list(rows(sentences, documents, length - 2)), np.int64).reshape(-1, 2)

    return RowObjective(2, 1, False, draw, _full_columns)


def _pair_columns(tokens: np.ndarray, found: np.ndarray, length: int, special: SpecialTokens, dtype: type) -> Columns:
    """``[CLS] A [SEP] B [SEP]`` and padding for every pair [R, 5]."""
    rows: np.ndarray = np.full((len(found), length), special.pad, dtype)
    rows[:, 0] = special.cls
    a_length, b_length = found[:, 1] - found[:, 0] + 2, found[:, 3] - found[:, 2] + 1
    for row, (a_start, a_end, b_start, b_end, _), second in zip(rows, found.tolist(), a_length.tolist(), strict=True):
        row[1 : second - 1] = tokens[a_start:a_end]
        row[second : second + b_end - b_start] = tokens[b_start:b_end]
    every = np.arange(len(found))
    rows[every, a_length - 1] = special.sep
    rows[every, a_length + b_length - 1] = special.sep
    return {
        "input_ids": rows,
        "length": (a_length + b_length).astype(np.int32),
        "segment_a_length": a_length.astype(np.int32),
    }


def _full_columns(
    tokens: np.ndarray, documents: np.ndarray, found: np.ndarray, length: int, special: SpecialTokens, dtype: type
) -> Columns:
    """``[CLS] sentences [SEP]`` and padding for every range [R, 2]; one [SEP] more where a document ends inside."""
    rows: np.ndarray = np.full((len(found), length), special.pad, dtype)
    rows[:, 0] = special.cls
    first = np.searchsorted(documents, found[:, 0], side="right")
    inside = np.searchsorted(documents, found[:, 1], side="left") - first
    lengths = found[:, 1] - found[:, 0] + inside + 2
    for row, (start, end), cut, cuts in zip(rows, found.tolist(), first.tolist(), inside.tolist(), strict=True):
        place = 1
        for stop in [*documents[cut : cut + cuts].tolist(), end]:
            row[place : place + stop - start] = tokens[start:stop]
            place += stop - start
            row[place] = special.sep
            start, place = stop, place + 1
    return {
        "input_ids": rows,
        "length": lengths.astype(np.int32),
        "segment_a_length": lengths.astype(np.int32),
    }


OBJECTIVES = {
    "nsp": _paired(sentence_pairs, "next_sentence", "nsp", 2, ("B follows A", "B is from another document")),
    "sop": _paired(ordered_pairs, "sentence_order", "sop", 1, ("in order", "swapped")),
    "full_sentences": _unpaired(rows_across_documents),
    "doc_sentences": _unpaired(rows_within_documents),
}
"""By the name that data.objective takes; `bert.config.OBJECTIVES` lists the same names."""
