"""Stores the documents of a corpus in one file with an index, for random access.

A corpus may be compressed, spread over files, or parsed on the fly, but workers that build examples need documents by
index. The store is removed when the examples are complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bert.data.corpus.filters import Filters
from bert.data.worker_processes import Engine
from bert.errors import UserError
from bert.files import load_json, write_atomic

MAX_REPEATS = 1000
"""Maximum repetitions of one corpus in a mixture; more indicates a mistake in `data.mixture_weights`."""

_TEXT, _OFFSETS, _SOURCES, _DONE = "text", "offsets.int64", "sources.int32", "done.json"


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
    filtered: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`FilterReport` of each filter, as a dictionary."""

    @property
    def num_filtered(self) -> int:
        """Number of documents that filters left out."""
        return sum(report["documents"] for report in self.filtered.values())

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
    filters: Filters | None = None,
    engine: Engine = "local",
) -> DocumentStore:
    """Writes pairs (index of the source, document) that pass the filters, in order.

    ``progress`` is called regularly with their number.
    """
    kept = filters.filter_documents(documents, engine) if filters else documents
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _DONE).unlink(missing_ok=True)
    count, offset = 0, 0
    with (
        open(folder / _TEXT, "wb") as text,
        open(folder / _OFFSETS, "wb") as offsets,
        open(folder / _SOURCES, "wb") as sources,
    ):
        offsets.write(np.int64(0).tobytes())
        for count, (source, document) in enumerate(kept, start=1):
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
    filtered = {name: asdict(report) for name, report in filters.reports.items()} if filters else {}
    done = {"documents": count, "bytes": offset, "filtered": filtered}
    write_atomic(folder / _DONE, json.dumps(done))  # written last, so that an incomplete store is recognized
    return DocumentStore(folder, count, offset, filtered)


def open_store(folder: Path) -> DocumentStore | None:
    """Opens a complete store of an interrupted build; returns None without one."""
    try:
        done = load_json((folder / _DONE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return DocumentStore(folder, done["documents"], done["bytes"], done.get("filtered", {}))
