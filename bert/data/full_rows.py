"""Rows of whole sentences without a pair, for masked-LM alone: FULL-SENTENCES and DOC-SENTENCES of RoBERTa (Liu et al.
2019, section 4.2). Pure functions of token counts, as in `bert.data.pairs`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator


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


def rows_within_documents(
    sentences: list[int], documents: list[int], room: int, separator: int = 1
) -> Iterator[tuple[int, int]]:
    """The same, but a row ends where its document ends. Arguments as of ``rows_across_documents``."""
    for first, stop in itertools.pairwise(documents):
        yield from rows_across_documents(sentences[first : stop + 1], [], room, separator)
