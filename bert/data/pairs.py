"""Next-sentence pairs of BERT (Devlin et al. 2019, appendix A.2), after ``create_instances_from_document`` of
google-research/bert ``create_pretraining_data.py``.

Pure functions of token counts and a random stream. A segment is a range of the flat token array, so that
nothing is copied until a row is written.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

IS_NEXT, IS_RANDOM = 0, 1
"""Google's labels: 0 where B follows A in its document, 1 where it is from another one."""

RANDOM_SHARE = 0.5
"""Share of random B among the chunks that offer a choice (the paper's 50%)."""


class Pair(NamedTuple):
    """One example: tokens [a_start, a_end) and [b_start, b_end), and whether B is random."""

    a_start: int
    a_end: int
    b_start: int
    b_end: int
    label: int


def stream(*key: int | str) -> random.Random:
    """A random stream that is the same in every Python, as long as only ``.random()`` is drawn from it."""
    return random.Random("/".join(map(str, key)))


def sentence_pairs(
    sentences: list[int],
    documents: list[int],
    sequence_length: int,
    short_seq_prob: float,
    draw: random.Random,
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
      sequence_length: T; a pair has at most T - 3 tokens.
      short_seq_prob: chance of a target length drawn from [2, T - 3].
      draw: random stream; only its ``.random()`` is used.
    """
    longest = sequence_length - 3
    for number in range(len(documents) - 1):
        start, stop = documents[number], documents[number + 1]
        while start < stop:
            target = longest
            if draw.random() < short_seq_prob:
                target = 2 + _below(draw, longest - 1)
            end = start + 1
            while end < stop and sentences[end] - sentences[start] < target:
                end += 1
            a_stop = start + 1 + _below(draw, end - start - 1) if end - start > 1 else end
            if end - start == 1 or draw.random() < RANDOM_SHARE:
                room = target - (sentences[a_stop] - sentences[start])
                b_first, b_stop = _random_segment(sentences, documents, number, room, draw)
                label, following = IS_RANDOM, a_stop
            else:
                b_first, b_stop, label, following = a_stop, end, IS_NEXT, end
            yield Pair(
                *truncated(sentences[start], sentences[a_stop], sentences[b_first], sentences[b_stop], longest, draw),
                label,
            )
            start = following


def truncated(a_start: int, a_end: int, b_start: int, b_end: int, longest: int, draw: random.Random):
    """Two ranges cut to ``longest`` tokens together: one by one from the longer, front or back by chance."""
    for _ in range(a_end - a_start + b_end - b_start - longest):
        front = draw.random() < 0.5
        if a_end - a_start > b_end - b_start:
            a_start, a_end = a_start + front, a_end - (not front)
        else:
            b_start, b_end = b_start + front, b_end - (not front)
    return a_start, a_end, b_start, b_end


def _random_segment(
    sentences: list[int], documents: list[int], number: int, room: int, draw: random.Random
) -> tuple[int, int]:
    """Sentences [first, stop) of another document, from a random one on, until ``room`` is filled."""
    other = _below(draw, len(documents) - 2)
    other += other >= number
    first = documents[other] + _below(draw, documents[other + 1] - documents[other])
    stop = first + 1
    while stop < documents[other + 1] and sentences[stop] - sentences[first] < room:
        stop += 1
    return first, stop


def _below(draw: random.Random, n: int) -> int:
    """A whole number in [0, n)."""
    return int(draw.random() * n)
