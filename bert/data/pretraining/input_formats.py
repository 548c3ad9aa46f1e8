"""Input formats: how rows are drawn from the text, laid out and labelled.

Rows may have a label besides the tokens that are predicted: next-sentence prediction (Devlin et al. 2019, appendix A.2,
and ``create_instances_from_document`` of google-research/bert ``create_pretraining_data.py``), sentence order (Lan et
al. 2020, section 3.1), or none. A new input format is a new line in INPUT_FORMATS, and a loss (`bert.training.losses`)
if its label has more than two classes.

Segments are drawn by pure functions of token counts and a random stream. A segment is a range of the flat token array,
so that nothing is copied until a row is written.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bert.data.pretraining.packing import Columns

if TYPE_CHECKING:
    from bert.data.encoding import RowTemplate

IS_NEXT, IS_RANDOM = 0, 1
"""Google's labels: 0 if B follows A in its document, 1 if it is from another document."""

IN_ORDER, SWAPPED = 0, 1
"""ALBERT's labels: 0 if A comes before B in the text, 1 if they are swapped."""

RANDOM_SHARE = 0.5
"""Share of random B among chunks of several sentences, and share of swapped pairs (50% in both papers)."""


class Pair(NamedTuple):
    """One example: tokens [a_start, a_end) and [b_start, b_end), and the label of its input format."""

    a_start: int
    a_end: int
    b_start: int
    b_end: int
    label: int


def make_rng(*key: int | str) -> random.Random:
    """Returns a random stream that is the same in all versions of Python if only ``.random()`` is used."""
    return random.Random("/".join(map(str, key)))


def sentence_pairs(
    sentences: list[int],
    documents: list[int],
    room: int,
    short_seq_prob: float,
    draw: random.Random,
    document_ids: Sequence[int] | None = None,
) -> Iterator[Pair]:
    """Yields the next-sentence pairs of a set of documents.

    Sentences are gathered up to a target length and divided at a random sentence. In half of the cases, and if the
    chunk is a single sentence, B is drawn from another document instead. The sentences that it replaces are used again.
    Two differences from Google's code: a short target is drawn per example, not per document (which over-represents
    short rows), and the other document is drawn only from the others (Google's code retries ten times).

    Args:
      sentences: boundaries of S nonempty sentences in the flat token array, S + 1 ascending offsets.
      documents: boundaries of at least two nonempty documents among the sentences, ascending.
      room: maximum tokens of a pair, T less the special tokens.
      short_seq_prob: probability of a target length drawn from [2, room].
      draw: random stream; only its ``.random()`` is used.
      document_ids: id of each document; copies of a document have the same id. At least two ids differ. None: there are
        no copies.
    """
    document_ids = range(len(documents) - 1) if document_ids is None else document_ids
    for document in range(len(documents) - 1):
        start, stop = documents[document], documents[document + 1]
        while start < stop:
            target = _target(room, short_seq_prob, draw)
            end = _chunk_end(sentences, start, start + 1, stop, target)
            a_stop = start + 1 + _randint(draw, end - start - 1) if end - start > 1 else end
            if end - start == 1 or draw.random() < RANDOM_SHARE:
                left = target - (sentences[a_stop] - sentences[start])
                b_first, b_stop = _random_segment(sentences, documents, document_ids, document, left, draw)
                label, following = IS_RANDOM, a_stop
            else:
                b_first, b_stop, label, following = a_stop, end, IS_NEXT, end
            yield Pair(
                *truncate_pair(sentences[start], sentences[a_stop], sentences[b_first], sentences[b_stop], room, draw),
                label,
            )
            start = following


def sentence_order_pairs(
    sentences: list[int],
    documents: list[int],
    room: int,
    short_seq_prob: float,
    draw: random.Random,
    document_ids: Sequence[int] | None = None,
) -> Iterator[Pair]:
    """Yields pairs of consecutive segments of one document, half of them swapped (see ``sentence_pairs``).

    Chunks are gathered and divided as for next-sentence pairs, but have at least two sentences. ALBERT's code pairs a
    chunk of one sentence with a random segment and labels it swapped. Here a single last sentence is paired with the
    one before it, and a document of one sentence has no pair. ``document_ids`` is not used.
    """
    for start, stop in itertools.pairwise(documents):
        first = start
        while start < stop and stop - first > 1:
            start = min(start, stop - 2)
            end = _chunk_end(sentences, start, start + 2, stop, _target(room, short_seq_prob, draw))
            middle = start + 1 + _randint(draw, end - start - 1)
            a_start, a_end, b_start, b_end = truncate_pair(
                sentences[start], sentences[middle], sentences[middle], sentences[end], room, draw
            )
            if draw.random() < RANDOM_SHARE:
                yield Pair(b_start, b_end, a_start, a_end, SWAPPED)
            else:
                yield Pair(a_start, a_end, b_start, b_end, IN_ORDER)
            start = end


def truncate_pair(
    a_start: int, a_end: int, b_start: int, b_end: int, max_length: int, draw: random.Random
) -> tuple[int, int, int, int]:
    """Truncates two ranges to ``max_length`` tokens in total: the longer one loses tokens at a random end."""
    for _ in range(a_end - a_start + b_end - b_start - max_length):
        front = draw.random() < 0.5
        if a_end - a_start > b_end - b_start:
            a_start, a_end = a_start + front, a_end - (not front)
        else:
            b_start, b_end = b_start + front, b_end - (not front)
    return a_start, a_end, b_start, b_end


def _random_segment(
    sentences: list[int],
    documents: list[int],
    document_ids: Sequence[int],
    document: int,
    room: int,
    draw: random.Random,
) -> tuple[int, int]:
    """Returns sentences [first, stop) of another document, from a random one on, until ``room`` is filled."""
    other = document
    while document_ids[other] == document_ids[document]:
        other = _randint(draw, len(documents) - 2)
        other += other >= document
    first = documents[other] + _randint(draw, documents[other + 1] - documents[other])
    return first, _chunk_end(sentences, first, first + 1, documents[other + 1], room)


def _target(max_length: int, short_seq_prob: float, draw: random.Random) -> int:
    """Returns the target length of a chunk: the maximum, or with ``short_seq_prob`` a random one."""
    return 2 + _randint(draw, max_length - 1) if draw.random() < short_seq_prob else max_length


def _chunk_end(sentences: list[int], start: int, end: int, stop: int, target: int) -> int:
    """Returns the end of a chunk: at least ``end``, at most ``stop``, as soon as the target is reached."""
    while end < stop and sentences[end] - sentences[start] < target:
        end += 1
    return end


def _randint(draw: random.Random, n: int) -> int:
    """Returns a random integer in [0, n)."""
    return int(draw.random() * n)


def rows_across_documents(
    sentences: list[int], documents: list[int], room: int, separator: int = 1
) -> Iterator[tuple[int, int]]:
    """Yields the token ranges [start, end) of rows: consecutive sentences, also across documents, as many as fit.

    Args:
      sentences: boundaries of S sentences of at most ``room`` tokens in the flat token array, S + 1 ascending offsets.
      documents: boundaries of the documents among the sentences, ascending.
      room: maximum tokens of a row, T less the special tokens around one text.
      separator: number of special tokens between two documents within a row.
    """
    ends = set(documents)
    start, separators = 0, 0
    for sentence in range(1, len(sentences) - 1):
        separators += separator * (sentence in ends)
        if sentences[sentence + 1] - sentences[start] + separators > room:
            yield sentences[start], sentences[sentence]
            start, separators = sentence, 0
    if len(sentences) > 1:
        yield sentences[start], sentences[-1]


def rows_of_blocks(
    sentences: list[int], documents: list[int], room: int, separator: int = 0
) -> Iterator[tuple[int, int]]:
    """Yields consecutive ranges of ``room`` tokens; the last one may be shorter. Documents are ignored."""
    del documents, separator
    for start in range(sentences[0], sentences[-1], room):
        yield start, min(start + room, sentences[-1])


def rows_within_documents(
    sentences: list[int], documents: list[int], room: int, separator: int = 1
) -> Iterator[tuple[int, int]]:
    """Yields rows like ``rows_across_documents``, but a row ends with its document."""
    for first, stop in itertools.pairwise(documents):
        yield from rows_across_documents(sentences[first : stop + 1], [], room, separator)


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
