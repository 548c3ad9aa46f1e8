"""Late interaction: a vector per token, and queries and documents compared by MaxSim. Does not import JAX.

The method is ColBERT's (Khattab and Zaharia 2020). A and B are numbers of texts, T_i is the number of vectors of a
text, and E their width.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Role = Literal["query", "document"]
"""Role of a text in retrieval."""

MAX_SIM, MEAN_MAX_SIM = "maxsim", "meanmaxsim"
TOKEN_SIMILARITIES = (MAX_SIM, MEAN_MAX_SIM)
"""Similarities of lists of vectors. The second one is divided by the number of vectors of the query."""

EMPTY_SCORE = np.float32(-1e9)
"""Similarity to a document without vectors, below all others, as in sentence-transformers."""

QUERY_TOKENS, DOCUMENT_TOKENS = 1024, 16_384
"""Maximum number of vectors of queries and of documents that are compared at once, for 64 MiB of products."""


@dataclass(frozen=True)
class LateInteraction:
    """Lengths of queries and documents, and which of their tokens have a vector.

    Attributes:
        query_length: maximum number of tokens of a query; None for the maximum of other texts.
        document_length: maximum number of tokens of a document; None for the maximum of other texts.
        expanded_length: number of tokens to which shorter queries are extended by mask tokens, which have vectors as
            well (section 3.2); None for none.
        attends_to_expansion: whether tokens attend to these mask tokens.
        expansion_token: replaces the mask token; None for none.
        skipped_tokens: tokens without a vector, such as punctuation (section 3.2).
        skipping_roles: roles of the texts that lack vectors of skipped tokens. A text without a role is a document.
    """

    query_length: int | None = None
    document_length: int | None = None
    expanded_length: int | None = None
    attends_to_expansion: bool = False
    expansion_token: str | None = None
    skipped_tokens: tuple[str, ...] = ()
    skipping_roles: tuple[str, ...] = ("document",)

    def max_length(self, role: Role | None) -> int | None:
        """Returns the maximum number of tokens of a text; None for the maximum of texts without a role."""
        return {"query": self.query_length, "document": self.document_length, None: None}[role]


COLBERT = LateInteraction(query_length=32, expanded_length=32, skipped_tokens=tuple(string.punctuation))
"""Settings of ColBERT (Khattab and Zaharia 2020, section 3.2)."""


def max_sim(queries: Sequence[np.ndarray], documents: Sequence[np.ndarray], mean: bool = False) -> np.ndarray:
    """Computes the sum over a query's vectors of their maximum product with a document's vectors (equation 3).

    Args:
        queries: A arrays [T_i, E].
        documents: B arrays [T_i, E].
        mean: divide by the number of the query's vectors.

    Returns:
        [A, B] float32; `EMPTY_SCORE` for documents without vectors.
    """
    scores = np.zeros((len(queries), len(documents)), np.float32)
    for rows in _blocks(queries, QUERY_TOKENS):
        vectors = np.concatenate(queries[rows]).astype(np.float32, copy=False)
        for columns in _blocks(documents, DOCUMENT_TOKENS):
            products = vectors @ np.concatenate(documents[columns]).astype(np.float32, copy=False).T
            best = _reduce(np.maximum, products, documents[columns], axis=1)
            scores[rows, columns] = _reduce(np.add, best, queries[rows], axis=0)
    if mean:
        scores /= np.maximum(list(map(len, queries)), 1).astype(np.float32)[:, None]
    scores[:, [not len(document) for document in documents]] = EMPTY_SCORE
    return scores


def _blocks(texts: Sequence[np.ndarray], tokens: int) -> Iterator[slice]:
    """Splits texts into blocks of up to ``tokens`` vectors, or of one text with more."""
    ends = np.cumsum(list(map(len, texts)))
    start = 0
    while start < len(texts):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + tokens, side="right")), start + 1)
        yield slice(start, stop)
        start = stop


def _reduce(reduction: np.ufunc, array: np.ndarray, texts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Reduces the tokens of each text along an axis; 0 for texts without tokens."""
    lengths = np.array(list(map(len, texts)), np.int64)
    is_filled = lengths > 0
    reduced = reduction.reduceat(array, (np.cumsum(lengths) - lengths)[is_filled], axis=axis)
    return np.insert(reduced, np.cumsum(is_filled)[~is_filled], 0, axis=axis)
