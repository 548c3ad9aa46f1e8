"""Input formats: how rows are drawn from the text, laid out and labelled.

Rows may have a label besides the tokens that are predicted: next-sentence prediction, sentence order, or none. A new
input format is a new line in INPUT_FORMATS, and a loss (`bert.training.losses`) if its label has more than two classes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bert.data.pretraining.packing import Columns
from bert.data.pretraining.segments import (
    Pair,
    rows_across_documents,
    rows_of_blocks,
    rows_within_documents,
    sentence_order_pairs,
    sentence_pairs,
)

if TYPE_CHECKING:
    from bert.data.encoding import RowTemplate

NEXT_ID = "next_id"
"""Column [R] of blocks: the token after the last one of a row; -1 if there is none."""


@dataclass(frozen=True)
class InputFormat:
    """One way to make rows of text.

    Attributes:
      pair: whether a row is laid out as a pair of texts instead of one.
      documents: minimum number of documents from which rows can be drawn.
      uses_short_sequences: whether data.short_seq_prob is used.
      sample_rows: (sentences, documents, T, template, short_seq_prob, random stream, document_ids) -> rows [R, ...]:
        start and end of each token range, and the label if there is one (see `sentence_pairs`).
      to_columns: (tokens, boundaries of the documents among the tokens, sampled rows, template, input_ids) -> columns.
        They are written into input_ids [R, T], which contain padding.
      label: NAME of the column NAME_label and of the batch's NAME_labels and NAME_weights; None without a label.
      metric: prefix of the label's loss and accuracy in metrics.jsonl.
      label_names: names of the label's values.
      whole_documents: whether rows are cut from the concatenated documents, separated by end tokens, instead of being
        made of sentences.
    """

    pair: bool
    documents: int
    uses_short_sequences: bool
    sample_rows: Callable[[list[int], list[int], int, RowTemplate, float, random.Random, list[int]], np.ndarray]
    to_columns: Callable[[np.ndarray, np.ndarray, np.ndarray, RowTemplate, np.ndarray], Columns]
    label: str | None = None
    metric: str | None = None
    label_names: tuple[str, ...] = ()
    whole_documents: bool = False


def _paired_format(
    pairs: Callable[..., Iterator[Pair]],
    label: str,
    metric: str,
    documents: int,
    label_names: tuple[str, ...],
) -> InputFormat:
    def sample_rows(
        sentences: list[int], documents: list[int], length: int, template: RowTemplate, *arguments: Any
    ) -> np.ndarray:
        ranges = pairs(sentences, documents, template.room(length), *arguments)
        return np.array(list(ranges), np.int64).reshape(-1, 5)

    def to_columns(
        tokens: np.ndarray, _: np.ndarray, ranges: np.ndarray, template: RowTemplate, input_ids: np.ndarray
    ) -> Columns:
        return {
            **_pair_columns(tokens, ranges, template, input_ids),
            f"{label}_label": ranges[:, 4].astype(np.int8),
        }

    return InputFormat(True, documents, True, sample_rows, to_columns, label, metric, label_names)


def _unpaired_format(
    rows: Callable[[list[int], list[int], int, int], Iterator[tuple[int, int]]],
    to_columns: Callable[[np.ndarray, np.ndarray, np.ndarray, RowTemplate, np.ndarray], Columns],
    whole_documents: bool = False,
) -> InputFormat:
    def sample_rows(
        sentences: list[int], documents: list[int], length: int, template: RowTemplate, *_: Any
    ) -> np.ndarray:
        ranges = rows(sentences, documents, template.room(length), len(template.suffix))
        return np.array(list(ranges), np.int64).reshape(-1, 2)

    return InputFormat(False, 1, False, sample_rows, to_columns, whole_documents=whole_documents)


def _pair_columns(tokens: np.ndarray, ranges: np.ndarray, template: RowTemplate, input_ids: np.ndarray) -> Columns:
    """Lays out the pairs [R, 5] as ``[CLS] A [SEP] B [SEP]`` and padding."""
    first, second = ranges[:, 1] - ranges[:, 0], ranges[:, 3] - ranges[:, 2]
    lengths = first + second + template.size
    a_column, gap = len(template.prefix), len(template.separator)
    for row, (a_start, a_end, b_start, b_end, _) in zip(input_ids, ranges.tolist(), strict=True):
        b_column = a_column + a_end - a_start + gap
        row[a_column : b_column - gap] = tokens[a_start:a_end]
        row[b_column : b_column + b_end - b_start] = tokens[b_start:b_end]
    _put(input_ids, template.prefix, np.zeros_like(first))
    _put(input_ids, template.separator, a_column + first)
    _put(input_ids, template.suffix, lengths - len(template.suffix))
    return {
        "input_ids": input_ids,
        "length": lengths.astype(np.int32),
        "segment_a_length": template.segment_a_length(first, second).astype(np.int32),
    }


def _put(input_ids: np.ndarray, special: tuple[int, ...], columns: np.ndarray) -> None:
    """Writes special tokens into all rows, starting at their columns [R]."""
    every = np.arange(len(input_ids))
    for offset, token in enumerate(special):
        input_ids[every, columns + offset] = token


def _full_columns(
    tokens: np.ndarray, documents: np.ndarray, ranges: np.ndarray, template: RowTemplate, input_ids: np.ndarray
) -> Columns:
    """Lays out the ranges [R, 2] as ``[CLS] sentences [SEP]`` and padding, with [SEP] between documents."""
    first = np.searchsorted(documents, ranges[:, 0], side="right")
    inside = np.searchsorted(documents, ranges[:, 1], side="left") - first
    lengths = ranges[:, 1] - ranges[:, 0] + inside * len(template.suffix) + template.size
    _put(input_ids, template.prefix, np.zeros(len(ranges), np.int64))
    for row, (start, end), cut, cuts in zip(input_ids, ranges.tolist(), first.tolist(), inside.tolist(), strict=True):
        column = len(template.prefix)
        for stop in [*documents[cut : cut + cuts].tolist(), end]:
            row[column : column + stop - start] = tokens[start:stop]
            column += stop - start
            row[column : column + len(template.suffix)] = template.suffix
            start, column = stop, column + len(template.suffix)
    return {
        "input_ids": input_ids,
        "length": lengths.astype(np.int32),
        "segment_a_length": lengths.astype(np.int32),
    }


def _block_columns(
    tokens: np.ndarray, documents: np.ndarray, ranges: np.ndarray, template: RowTemplate, input_ids: np.ndarray
) -> Columns:
    """Returns ``_full_columns`` and the token after each row."""
    following = np.append(tokens, -1)[ranges[:, 1]]
    return {**_full_columns(tokens, documents, ranges, template, input_ids), NEXT_ID: following.astype(np.int32)}


INPUT_FORMATS = {
    "nsp": _paired_format(sentence_pairs, "next_sentence", "nsp", 2, ("B follows A", "B is from another document")),
    "sop": _paired_format(sentence_order_pairs, "sentence_order", "sop", 1, ("in order", "swapped")),
    "full_sentences": _unpaired_format(rows_across_documents, _full_columns),
    "doc_sentences": _unpaired_format(rows_within_documents, _full_columns),
    "blocks": _unpaired_format(rows_of_blocks, _block_columns, whole_documents=True),
}
"""Input formats by the value of data.input_format; `bert.config.INPUT_FORMATS` lists the same names."""
