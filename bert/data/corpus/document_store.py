"""Stores the documents of a corpus in one file with an index, for random access, and filters near-duplicates.

A corpus may be compressed, spread over files, or parsed on the fly, but workers that build examples need documents by
index. The store is removed when the examples are complete.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from bert.data.corpus.files import Document
from bert.errors import UserError
from bert.files import load_json, write_atomic

SHINGLE = 5
"""Words per run. The similarity of two documents is the share of distinct runs that both have (Jaccard)."""

PERMUTATIONS = 128
"""Hashes per document. The standard deviation of an estimated similarity of 0.8 is 0.04."""

MAX_REPEATS = 1000
"""Maximum repetitions of one corpus in a mixture; more indicates a mistake in `data.mixture_weights`."""

_TEXT, _OFFSETS, _SOURCES, _DONE = "text", "offsets.int64", "sources.int32", "done.json"


class NearDuplicateFilter:
    """Filters documents that are similar to an earlier one, by MinHash (Broder 1997) from the library datasketch.

    Uses about 6 kB of memory per document.

    Attributes:
        count: number of removed documents.
    """

    def __init__(self, threshold: float) -> None:
        """Takes the minimum estimated similarity of a near-duplicate. Raises UserError without datasketch."""
        require_datasketch()
        from datasketch import MinHash, MinHashLSH

        self.count = 0
        self._threshold = threshold
        # Weights that favour few misses, because each candidate is compared. No index exists for a threshold above 0.9.
        self._index = MinHashLSH(threshold=min(threshold, 0.9), num_perm=PERMUTATIONS, weights=(0.1, 0.9))
        self._empty = MinHash(num_perm=PERMUTATIONS)
        self._values: list[np.ndarray] = []

    def __call__(self, documents: Iterable[tuple[int, Document]]) -> Iterator[tuple[int, Document]]:
        """Yields the documents that are kept, each with the index of its source, in order."""
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
        fix = "use pip install 'bert-jax[dedup]', or remove the key"
        raise UserError(f"data.near_duplicates needs datasketch, which is not installed: {fix}")


def _shingles(document: Document) -> set[bytes]:
    """Returns the lower-cased runs of words; a shorter document is one run."""
    words = " ".join(document).lower().split()
    last = max(1, len(words) - SHINGLE + 1)
    return {" ".join(words[start : start + SHINGLE]).encode() for start in range(last)}


class Documents(Protocol):
    """Documents by index: a `DocumentStore`, or documents in memory."""

    def sources(self) -> np.ndarray:
        """Returns the index of the source of each document."""

    def read(self, indices: np.ndarray) -> Iterator[list[str]]:
        """Yields documents by index, as lists of lines."""


@dataclass(frozen=True)
class DocumentStore:
    """A folder with the text of N documents, their N + 1 byte offsets, and the index of the source of each.

    Offsets and indices, 12 bytes per document, are memory-mapped.
    """

    folder: Path
    number_of_documents: int
    number_of_bytes: int
    near_duplicates: int = 0
    """Number of near-duplicates that were removed."""

    def offsets(self) -> np.ndarray:
        """Returns the byte offsets, int64 [N + 1], mapped."""
        return np.memmap(self.folder / _OFFSETS, dtype=np.int64, mode="r")

    def sources(self) -> np.ndarray:
        """Returns the index of the source of each document, int32 [N], mapped."""
        return np.memmap(self.folder / _SOURCES, dtype=np.int32, mode="r")

    def read(self, indices: np.ndarray) -> Iterator[list[str]]:
        """Yields documents by index, as lists of lines."""
        offsets = self.offsets()
        with open(self.folder / _TEXT, "rb") as file:
            for index in indices:
                file.seek(offsets[index])
                yield file.read(int(offsets[index + 1] - offsets[index])).decode("utf-8").split("\n")

    def order(self, seed: int) -> np.ndarray:
        """Returns a random order of the documents, int64 [N].

        NumPy guarantees a stable stream of raw words, but not a stable Generator.permutation.
        """
        words = np.random.Philox(key=seed).random_raw(self.number_of_documents)
        return np.argsort(words, kind="stable")

    def mixture_order(self, order: np.ndarray, weights: list[float], seed: int) -> np.ndarray:
        """Returns an order in which every source has its share of the bytes, int64 [at least N].

        No document is left out: the source that is largest relative to its share is read once, the others repeatedly;
        their last pass may be partial.

        Raises:
          UserError: a source has no document in the order, or would be read more than MAX_REPEATS times.
        """
        offsets, sources = self.offsets(), self.sources()[order]
        sizes = np.maximum((offsets[1:] - offsets[:-1])[order], 1)
        totals = np.bincount(sources, sizes, minlength=len(weights))
        if not totals.all():
            raise UserError(
                f"data.mixture_weights: entry {int(totals.argmin()) + 1} of data.train has no document to train on: "
                "leave it out or add text to it"
            )
        passes = np.array(weights) / totals
        passes /= passes.min()
        if passes.max() > MAX_REPEATS:
            raise UserError(
                f"data.mixture_weights: entry {int(passes.argmax()) + 1} of data.train would be read "
                f"{passes.max():,.0f} times, more than {MAX_REPEATS:,}: use more text or a smaller weight"
            )
        orders, done = [], 0
        while (passes > done).any():
            words = np.random.Philox(key=np.array([seed, done], np.uint64)).random_raw(len(order))
            shuffled = np.argsort(words, kind="stable") if done else np.arange(len(order))
            keep = np.zeros(len(order), bool)
            for source, (times, total) in enumerate(zip(passes, totals, strict=True)):
                mine = shuffled[sources[shuffled] == source]
                # A document in which the last pass ends is included if more than half of it is.
                keep[mine[np.cumsum(sizes[mine]) - sizes[mine] / 2 <= (times - done) * total]] = True
            orders.append(order[shuffled[keep[shuffled]]])
            done += 1
        return np.concatenate(orders)

    def shard_ranges(self, order: np.ndarray, slice_bytes: int) -> list[tuple[int, int]]:
        """Returns ranges of an order with about ``slice_bytes`` bytes of text and at least two documents each."""
        offsets = self.offsets()
        ends = np.cumsum((offsets[1:] - offsets[:-1])[order])
        count = max(1, round(int(ends[-1]) / slice_bytes))
        step = int(ends[-1]) / count
        ranges: list[tuple[int, int]] = []
        start = 0
        while start < len(order):
            stop = int(np.searchsorted(ends, step * (len(ranges) + 1), side="right"))
            stop = max(stop, start + 2)
            # A single last document has no other document to draw from, so it joins the range before it.
            stop = len(order) if len(order) - stop < 2 else stop
            ranges.append((start, stop))
            start = stop
        return ranges


def write_store(
    documents: Iterable[tuple[int, list[str]]],
    folder: Path,
    progress: Callable[[int], None],
    new_only: NearDuplicateFilter | None = None,
) -> DocumentStore:
    """Writes pairs (index of the source, document) that pass the filter ``new_only``, in order.

    ``progress`` is called regularly with their number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _DONE).unlink(missing_ok=True)
    count, offset = 0, 0
    with (
        open(folder / _TEXT, "wb") as text,
        open(folder / _OFFSETS, "wb") as offsets,
        open(folder / _SOURCES, "wb") as sources,
    ):
        offsets.write(np.int64(0).tobytes())
        for count, (source, document) in enumerate(new_only(documents) if new_only else documents, start=1):
            data = "\n".join(document).encode("utf-8")
            offset += len(data)
            text.write(data)
            offsets.write(np.int64(offset).tobytes())
            sources.write(np.int32(source).tobytes())
            if count % 1000 == 0:
                progress(count)
        for file in (text, offsets, sources):
            file.flush()
            os.fsync(file.fileno())
    left_out = new_only.count if new_only else 0
    done = {"documents": count, "bytes": offset, "near_duplicates": left_out}
    write_atomic(folder / _DONE, json.dumps(done))  # written last, so that an incomplete store is recognized
    return DocumentStore(folder, count, offset, left_out)


def open_store(folder: Path) -> DocumentStore | None:
    """Opens a complete store of an interrupted build; returns None without one."""
    try:
        done = load_json((folder / _DONE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return DocumentStore(folder, done["documents"], done["bytes"], done.get("near_duplicates", 0))
