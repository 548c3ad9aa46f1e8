"""Documents that repeat most of an earlier one are left out, by MinHash (Broder 1997), of the library datasketch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator

import numpy as np

from bert.data.corpus.files import Document
from bert.errors import UserError

SHINGLE = 5
"""Words of a run; two documents are as similar as the share of their different runs that both have (Jaccard)."""

PERMUTATIONS = 128
"""Hashes of a document. An estimated similarity is off by 0.04 (one standard deviation) at 0.8."""


class NearDuplicateFilter:
    """Passes on documents that are not similar to one that it has passed on.

    Memory grows with the documents, by about 6 kB each.

    Attributes:
        count: documents that were left out.
    """

    def __init__(self, threshold: float) -> None:
        """
        Args:
            threshold: least estimated similarity of a near-duplicate.

        Raises:
            UserError: datasketch is not installed.
        """
        require_datasketch()
        from datasketch import MinHash, MinHashLSH

        self.count = 0
        self._threshold = threshold
        # Few misses rather than few candidates, since each candidate is compared. No index exists for more than 0.9.
        self._index = MinHashLSH(threshold=min(threshold, 0.9), num_perm=PERMUTATIONS, weights=(0.1, 0.9))
        self._empty = MinHash(num_perm=PERMUTATIONS)
        self._values: list[np.ndarray] = []

    def __call__(self, documents: Iterable[tuple[int, Document]]) -> Iterator[tuple[int, Document]]:
        """The documents, each with the number of its source, in their order."""
        for source, document in documents:
            if self._is_new(document):
                yield source, document
            else:
                self.count += 1

    def _is_new(self, document: Document) -> bool:
        hashes = self._empty.copy()
        hashes.update_batch(_shingles(document))
        values = hashes.hashvalues.astype(np.uint32)  # a hash has 32 bits
        for candidate in self._index.query(hashes):
            if np.mean(self._values[candidate] == values) >= self._threshold:
                return False
        self._index.insert(len(self._values), hashes)
        self._values.append(values)
        return True


def require_datasketch() -> None:
    """Raises UserError if the library is not installed."""
    if importlib.util.find_spec("datasketch") is None:
        raise UserError(
            "data.near_duplicates needs datasketch, which is not installed: use pip install 'bert-jax[dedup]', or "
            "remove the key"
        )


def _shingles(document: Document) -> set[bytes]:
    """The runs of words, without case; a document with fewer words is one run."""
    words = " ".join(document).lower().split()
    last = max(1, len(words) - SHINGLE + 1)
    return {" ".join(words[start : start + SHINGLE]).encode() for start in range(last)}
