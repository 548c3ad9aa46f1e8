"""Draws the segments of rows: next-sentence pairs, sentence-order pairs, and rows of consecutive text.

Next-sentence pairs follow Devlin et al. 2019, appendix A.2, and ``create_instances_from_document`` of
google-research/bert ``create_pretraining_data.py``; sentence-order pairs follow Lan et al. 2020, section 3.1.

All functions are pure functions of token counts and a random stream. A segment is a range of the flat token array, so
that nothing is copied until a row is written.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
