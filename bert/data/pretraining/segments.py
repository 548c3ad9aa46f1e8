"""Pairs of segments for a sentence input format: next sentence (Devlin et al. 2019, appendix A.2, after
``create_instances_from_document`` of google-research/bert ``create_pretraining_data.py``) and sentence order (Lan et
al. 2020, section 3.1).

Pure functions of token counts and a random stream. A segment is a range of the flat token array, so that
nothing is copied until a row is written.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

IS_NEXT, IS_RANDOM = 0, 1
"""Google's labels: 0 where B follows A in its document, 1 where it is from another one."""

IN_ORDER, SWAPPED = 0, 1
"""ALBERT's labels: 0 where A comes before B in the text, 1 where the two have changed places."""

RANDOM_SHARE = 0.5
"""Share of random B among the chunks that offer a choice, and of swapped pairs (50% in both papers)."""


class Pair(NamedTuple):
    """One example: tokens [a_start, a_end) and [b_start, b_end), and the label of its input format."""

    a_start: int
    a_end: int
    b_start: int
    b_end: int
    label: int


def make_rng(*key: int | str) -> random.Random:
    """A random stream that is the same in every Python, as long as only ``.random()`` is drawn from it."""
    return random.Random("/".join(map(str, key)))


def sentence_pairs(
    sentences: list[int],
    documents: list[int],
    room: int,
    short_seq_prob: float,
    draw: random.Random,
    document_ids: Sequence[int] | None = None,
) -> Iterator[Pair]:
    """Examples of a set of documents.

    Sentences are gathered to a target length, cut in two at a random sentence; in half of the cases, and
    wherever the chunk is a single sentence, B is taken from another document instead, and the sentences it
    replaces are gathered again. Departing from Google's code in two points: a short target is drawn for an
    example, not for a whole document (which over-represents short rows: a document cut small gives many), and
    the other document is drawn from the others alone (it retries ten times).

    Args:
      sentences: boundaries of S sentences in the flat token array, S + 1 ascending offsets; none is empty.
      documents: boundaries of the documents among the sentences, ascending; at least two documents, none
        empty.
      room: most tokens of a pair, T less the special tokens.
      short_seq_prob: chance of a target length drawn from [2, room].
      draw: random stream; only its ``.random()`` is used.
      document_ids: which document each is: copies of one, which are not another document to each other, have the same
        id. At least two of them differ; None where there are no copies.
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
    """Two consecutive segments of one document, half of the pairs swapped. Arguments as of ``sentence_pairs``;
    document_ids have no say, since no pair needs another document.

    Chunks are gathered and cut in two as for next-sentence pairs, but hold two sentences at least. Departing from
    ALBERT's code, which gives a chunk of one sentence a random partner and calls it swapped: the last sentence of a
    document, where it is left alone, is paired with the one before it, and a document of one sentence gives no pair.
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
    """Two ranges cut to ``max_length`` tokens together: one by one from the longer, front or back by chance."""
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
    """Sentences [first, stop) of another document, from a random one on, until ``room`` is filled."""
    other = document
    while document_ids[other] == document_ids[document]:
        other = _randint(draw, len(documents) - 2)
        other += other >= document
    first = documents[other] + _randint(draw, documents[other + 1] - documents[other])
    return first, _chunk_end(sentences, first, first + 1, documents[other + 1], room)


def _target(max_length: int, short_seq_prob: float, draw: random.Random) -> int:
    """Tokens that a chunk is to have: the longest, or now and then fewer."""
    return 2 + _randint(draw, max_length - 1) if draw.random() < short_seq_prob else max_length


def _chunk_end(sentences: list[int], start: int, end: int, stop: int, target: int) -> int:
    """The end of a chunk from ``start`` on: at least ``end``, and up to ``stop`` until the target is reached."""
    while end < stop and sentences[end] - sentences[start] < target:
        end += 1
    return end


def _randint(draw: random.Random, n: int) -> int:
    """A whole number in [0, n)."""
    return int(draw.random() * n)


def rows_across_documents(
    sentences: list[int], documents: list[int], room: int, separator: int = 1
) -> Iterator[tuple[int, int]]:
    """Token ranges [start, end) of rows: sentences as they come, over the ends of documents, as many as fit.

    A document that ends inside a row costs the tokens of a separator there, a [SEP].

    Args:
      sentences: boundaries of S sentences in the flat token array, S + 1 ascending offsets; none is over ``room``.
      documents: boundaries of the documents among the sentences, ascending.
      room: most tokens of a row, T less the special tokens around one text.
      separator: number of tokens between two documents.
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
    """Token ranges of ``room`` tokens each, one after the other; the last one is shorter if tokens run out.

    Arguments as of ``rows_across_documents``; sentences, documents and separators have no say.
    """
    del documents, separator
    for start in range(sentences[0], sentences[-1], room):
        yield start, min(start + room, sentences[-1])


def rows_within_documents(
    sentences: list[int], documents: list[int], room: int, separator: int = 1
) -> Iterator[tuple[int, int]]:
    """The same, but a row ends where its document ends. Arguments as of ``rows_across_documents``."""
    for first, stop in itertools.pairwise(documents):
        yield from rows_across_documents(sentences[first : stop + 1], [], room, separator)
