"""Streams a corpus repeatedly: readers share its files, and can resume at any earlier position.

A file is a local file, a URL, or a file of a data set on the hub. Each pass has another order of files. The state of a
reader is a few integers. A reader that resumes from a state reads the same documents as the first reader did.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert.config import DOCSTRINGS_PREFIX, HUB_PREFIX, DataConfig
from bert.data.corpus.data_sets import dataset_files, hub_stream, is_saved_dataset
from bert.data.corpus.documents import corpus_fingerprint, has_text, resolve_sources
from bert.data.corpus.files import (
    FOLDER_SUFFIXES,
    Document,
    Skipped,
    hub_documents,
    read_documents,
    reading,
    require_readable_kind,
)
from bert.data.corpus.filters import make_filters
from bert.errors import UserError, redact
from bert.remote import is_url, remote_files

HEAD_CHARACTERS = 64 << 20
"""Characters of a stream that are read before training, for its vocabulary and token frequencies. Frequencies of 4 MB
of English Wikipedia cost 0.06 nats of held-out loss (benchmarks/RESULTS.md, Streaming)."""
HEAD_VERSION = 2
"""Version of the selection of the head's documents, part of cache keys."""


@dataclass(frozen=True)
class StreamFile:
    """A file of a stream.

    Attributes:
        entry: index of its entry of ``data.train``.
        source: path, URL, or ``hub:...``.
        size: bytes, or None if unknown.
        number: index of the file in a data set on the hub, else None.
    """

    entry: int
    source: str
    size: int | None
    number: int | None = None

    def documents(self, config: DataConfig, skipped: Skipped | None = None) -> Iterator[Document]:
        """Yields the documents of the file; some have no visible character. ``skipped`` counts those without text."""
        if self.number is None:
            return read_documents(self.source, skipped, **reading(config))
        return hub_documents(self.source, self.number, skipped, **reading(config))


def stream_files(source: list[str] | str) -> list[StreamFile]:
    """Returns the files of a corpus without reading them.

    Raises:
        UserError: a source does not exist, cannot be streamed, or has an unsupported format.
    """
    entries = [source] if isinstance(source, str) else source
    files: list[StreamFile] = []
    for number, entry in enumerate(entries):
        if entry.startswith(DOCSTRINGS_PREFIX):
            raise UserError(f"data.train is {entry}, which cannot be streamed: set data.streaming to false")
        if entry.startswith(HUB_PREFIX):
            files += [StreamFile(number, entry, None, file) for file in range(hub_stream(entry).num_shards)]
        elif is_url(entry):
            files += [StreamFile(number, url, size) for url, size in _text_files(entry).items()]
    local = {i: entry for i, entry in enumerate(entries) if not (entry.startswith(HUB_PREFIX) or is_url(entry))}
    for number, paths in zip(local, resolve_sources(list(local.values())) if local else [], strict=True):
        for path in paths:
            size = sum(map(os.path.getsize, dataset_files(path) if is_saved_dataset(path) else [path]))
            files.append(StreamFile(number, path, size))
    return sorted(files, key=lambda file: file.entry)


def _text_files(url: str) -> dict[str, int | None]:
    """Returns the files of a URL with their sizes; of a folder, only corpus files."""
    files = remote_files(url, "data.train")
    if "*" not in url and len(files) > 1:
        files = {name: size for name, size in files.items() if name.lower().endswith(FOLDER_SUFFIXES)}
        if not files:
            suffixes = ", ".join("*" + suffix for suffix in FOLDER_SUFFIXES)
            raise UserError(f"{url} holds no corpus file: it needs {suffixes}, in it or below it")
    for name in files:
        require_readable_kind(name)
    return files


def stream_fingerprint(files: Iterable[StreamFile]) -> str:
    """Returns a hash, 64 hexadecimal digits, of the names and sizes of the files, whose content is not known yet.

    Folders do not enter the hash if the size is known, so that files may be moved.
    """
    names = []
    for file in files:
        source = redact(file.source)  # a signature may be renewed
        name = source if file.size is None else source.rpartition("/")[2]
        names.append((file.entry, name, file.size, file.number))
    return hashlib.blake2b(json.dumps(names).encode(), digest_size=32).hexdigest()


def training_fingerprint(config: DataConfig, cache: Path) -> str:
    """Returns a hash of the content and order of data.train, or, of a stream, of the names and sizes of its files."""
    streaming = config.streaming
    return stream_fingerprint(stream_files(config.train)) if streaming else corpus_fingerprint(config.train, cache)


@dataclass
class ReadPosition:
    """Position of a reader in a group of files.

    Attributes:
        passes: number of completed passes.
        file: index of the file in the order of this pass.
        documents: number of documents of the file that were read or left to other readers.
        size: characters of the group that were read since the start.
    """

    passes: int = 0
    file: int = 0
    documents: int = 0
    size: int = 0


ReaderState = tuple[tuple[int, ...], ...]
"""The `ReadPosition` of each group as a tuple, for JSON and arrays."""


class StreamedDocument(NamedTuple):
    """A document with the index of its entry in data.train, an identity, and the number of completed passes."""

    entry: int
    identity: tuple[int, int, int]
    passes: int
    document: Document

    @property
    def size(self) -> int:
        """Number of characters."""
        return sum(map(len, self.document))


class DocumentReader:
    """Endless iterator over the documents of one of several readers.

    If there are at least as many files as readers, each reader has separate files. Otherwise all readers read all
    files, and each uses every n-th document. With ``mixture_weights``, the entries of ``data.train`` are groups of
    files with separate passes, and the next document comes from the group that is furthest below its share.
    """

    def __init__(
        self,
        files: Sequence[StreamFile],
        config: DataConfig,
        reader: tuple[int, int] = (0, 1),
        state: ReaderState | None = None,
        skipped: Skipped | None = None,
    ) -> None:
        """Initializes the reader.

        Args:
            reader: (index, count).
            state: state from which to resume; None: begin at the start.
            skipped: counts documents without text.
        """
        self._skipped = skipped or Skipped()
        self._config, self._index, self._count = config, *reader
        weights = config.mixture_weights
        groups = range(1 if weights is None else len(weights))
        self._weights = np.array([1.0] if weights is None else weights)
        self._files = [[file for file in files if weights is None or file.entry == group] for group in groups]
        self._positions = [ReadPosition(*position) for position in state] if state else [ReadPosition() for _ in groups]
        self._filters = make_filters(config)
        self._documents = [self._read_group(group, self._positions[group]) for group in groups]

    @property
    def state(self) -> ReaderState:
        """State from which another reader continues identically."""
        return tuple(astuple(position) for position in self._positions)

    def __iter__(self) -> Iterator[StreamedDocument]:
        return self

    def __next__(self) -> StreamedDocument:
        sizes = np.array([position.size for position in self._positions])
        return next(self._documents[int(np.argmin(sizes / self._weights))])

    def _read_group(self, group: int, position: ReadPosition) -> Iterator[StreamedDocument]:
        files = self._files[group]
        has_own_files = len(files) >= self._count
        own_files = range(self._index, len(files), self._count) if has_own_files else range(len(files))
        has_documents = position != ReadPosition()
        while True:
            key = np.array([self._config.seed, position.passes], np.uint64)
            words = np.random.Philox(key=key).random_raw(len(own_files))
            for number in np.argsort(words, kind="stable")[position.file :].tolist():
                file, skipped = files[own_files[number]], position.documents
                # Only the first of the readers that read the same files counts skipped documents.
                counted = self._skipped if has_own_files or self._index == 0 else None
                documents = file.documents(self._config, counted)
                for index, document in enumerate(itertools.islice(documents, skipped, None), skipped):
                    position.documents = index + 1
                    if not has_own_files and index % self._count != self._index:
                        continue
                    if not has_text(document):
                        self._skipped.add(file.source)
                    elif (kept := self._filters.filter_document(file.entry, document)) is None:
                        self._skipped.filtered += 1
                    else:
                        has_documents, identity = True, (group, own_files[number], index)
                        streamed = StreamedDocument(file.entry, identity, position.passes, kept)
                        position.size += streamed.size
                        yield streamed
                position.file, position.documents = position.file + 1, 0
            position.passes, position.file = position.passes + 1, 0
            if not has_documents:
                count = "" if self._count == 1 else f" for each of {self._count} readers"
                filtered = ", with its filters" if self._filters else ""
                raise UserError(
                    f"data.train holds no text{count}{filtered}: name a corpus with more documents, or lower "
                    "data.stream_readers"
                )


def head_documents(files: Sequence[StreamFile], config: DataConfig, size: int) -> Iterator[tuple[int, Document]]:
    """Yields the first documents of all readers, in turns, each with the index of its entry.

    They have about ``size`` characters, and there are at least two. Documents that a reader repeats while others are in
    their first pass count as read, but are left out.
    """
    count, number, skipped = 0, config.stream_readers, Skipped()
    readers = [DocumentReader(files, config, (index, number), skipped=skipped) for index in range(number)]
    while readers:
        for reader in tuple(readers):
            document = next(reader)
            if size <= 0 and count > 1:
                readers.clear()
                break
            size -= document.size
            if document.passes == 0:
                count += 1
                yield document.entry, document.document
            elif all(passes for passes, *_ in reader.state):
                readers.remove(reader)
    skipped.log()
