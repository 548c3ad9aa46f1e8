"""Makes the rows of a corpus that is streamed during training: reader processes with a shuffle buffer each.

    files -> documents of a reader -> chunks of text -> rows (as in a shard) -> blocks of mixed rows -> batches

A reader divides its documents into chunks of as much text as a shard has, and makes rows of each chunk as for a shard.
Each row of chunk c goes into a random one of the blocks c ... c + W - 1. A block is complete when all its chunks have
been read; then its rows are shuffled. Therefore W chunks are mixed, at most W chunks are in memory, and the first block
is ready after the first chunk.

All of this is a function of (files, seed, reader, chunk), so row n of a reader is always the same. To reproduce it, a
reader begins W - 1 chunks before its block, at a `Start`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bert.config import DataConfig
from bert.data.corpus.document_stream import DocumentReader, ReaderState, StreamedDocument, StreamFile
from bert.data.corpus.files import Document, Skipped
from bert.data.pretraining.input_formats import INPUT_FORMATS
from bert.data.pretraining.loader import PretrainingLoader
from bert.data.pretraining.packing import Columns, pack_rows
from bert.data.pretraining.shards import draw_rows, row_settings, tokenize
from bert.data.worker_processes import WorkerPool, start_worker
from bert.errors import LOGGER, Log, UserError, require

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Offsets of random streams, different from the offsets in `bert.data.pretraining.loader`.
_BLOCK_OF_ROW, _ORDER_IN_BLOCK = 5 << 40, 6 << 40

CHUNKS_WITHOUT_ROWS = 16
"""Consecutive chunks without rows after which an error is raised."""

BLOCKS_AHEAD = 2
"""Number of blocks that a reader builds in advance."""

BATCHES_KEPT = 8
"""Number of batches whose rows stay in memory, because the batch of a skipped step is read again."""

REPORT_SECONDS = 60.0
"""Seconds between two log lines about the rate."""


@dataclass(frozen=True)
class Start:
    """The point from which a reader makes a block and all following ones.

    Attributes:
        chunk: index of the first chunk to read.
        block: index of the first block to return.
        first_row: index of the first row of this block.
        state: state of the reader at the beginning of the chunk; empty at the start of the corpus.
    """

    chunk: int = 0
    block: int = 0
    first_row: int = 0
    state: ReaderState = ()


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a reader.

    Attributes:
        start: point from which the block can be reproduced.
        columns: columns of the rows, as in a shard.
        size: characters that the reader had read after the last chunk.
        passes: number of completed passes over the corpus before the last chunk.
        skipped: documents without text that were skipped since the process started.
        filtered: documents that the filters left out since the process started.
    """

    start: Start
    columns: Columns
    size: int
    passes: int
    skipped: int = 0
    filtered: int = 0

    @property
    def end_row(self) -> int:
        return self.start.first_row + len(self.columns["length"])


@dataclass(frozen=True)
class StreamSpec:
    """Everything that determines the rows of a reader, except the tokenizer.

    Attributes:
        files: files of the corpus.
        reader: index of the reader, below ``config.stream_readers``.
        chunk_size: characters of a chunk.
        window: number of chunks W that are mixed.
    """

    files: tuple[StreamFile, ...]
    config: DataConfig
    reader: int
    chunk_size: int
    window: int

    def chunks(
        self, state: ReaderState, skipped: Skipped | None = None
    ) -> Iterator[tuple[ReaderState, list[StreamedDocument]]]:
        """Yields the reader's state at the beginning of each chunk, and its documents.

        A chunk has at least the number of documents that the input format needs. It ends with a pass over the corpus,
        unless the corpus is mixed by weights. ``skipped`` counts documents without text.
        """
        config = self.config
        reader = DocumentReader(self.files, config, (self.reader, config.stream_readers), state or None, skipped)
        minimum, begin, size = INPUT_FORMATS[config.input_format].documents, reader.state, 0
        documents: list[StreamedDocument] = []
        while True:
            end, document = reader.state, next(reader)
            if len(documents) >= minimum:
                is_new_pass = config.mixture_weights is None and document.passes > documents[0].passes
                if size >= self.chunk_size or is_new_pass:
                    yield begin, documents
                    begin, documents, size = end, [], 0
            documents.append(document)
            size += document.size


def buffer_chunks(config: DataConfig, chunk_size: int) -> int:
    """Returns the number of chunks of this size that each reader mixes."""
    return max(1, round(config.shuffle_buffer * 1e6 / config.stream_readers / chunk_size))


def read_blocks(spec: StreamSpec, tokenizer: Tokenizer, start: Start) -> Iterator[Block]:
    """Yields the blocks of a reader from a start on, without end.

    Args:
      tokenizer: a `literal_tokenizer`.

    Raises:
      UserError: the corpus cannot be read, or has too few documents for the input format.
    """
    window, row, without_rows, skipped = spec.window, start.first_row, 0, Skipped()
    waiting: deque[list[Columns]] = deque([] for _ in range(window))
    states: deque[ReaderState] = deque(maxlen=window)
    for chunk, (state, documents) in enumerate(spec.chunks(start.state, skipped), start.chunk):
        states.append(state)
        columns = chunk_rows(spec, chunk, documents, tokenizer)
        without_rows = 0 if len(columns["length"]) else without_rows + 1
        if without_rows == CHUNKS_WITHOUT_ROWS:
            raise UserError(
                f"the documents of data.train give reader {spec.reader + 1} of {spec.config.stream_readers} no row of "
                f"data.input_format {spec.config.input_format}: use longer documents, more of them, or a smaller "
                "data.stream_readers"
            )
        if not without_rows:
            target = _random_words(_BLOCK_OF_ROW, spec, chunk, len(columns["length"])) % np.uint64(window)
            for ahead, parts in enumerate(waiting):
                parts.append({name: values[target == ahead] for name, values in columns.items()})
        parts = waiting.popleft()
        waiting.append([])
        if chunk < start.block or not any(len(part["length"]) for part in parts):
            continue  # blocks before the start lack rows of earlier chunks
        block = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(_random_words(_ORDER_IN_BLOCK, spec, chunk, len(block["length"])), kind="stable")
        again = Start(max(0, chunk - window + 1), chunk, row, states[0])
        row += len(order)
        size = sum(size for *_, size in state) + sum(document.size for document in documents)
        mixed = {name: values[order] for name, values in block.items()}
        yield Block(again, mixed, size, documents[0].passes, skipped.count, skipped.filtered)


def _random_words(stream: int, spec: StreamSpec, chunk: int, count: int) -> np.ndarray:
    key = np.array([stream + spec.config.seed, (spec.reader << 40) + chunk], np.uint64)
    return np.random.Philox(key=key).random_raw(count)


def chunk_rows(spec: StreamSpec, chunk: int, documents: list[StreamedDocument], tokenizer: Tokenizer) -> Columns:
    """Returns the rows of a chunk, none if it has too few documents for the input format."""
    from bert.tokenizer.library import special_ids
    from bert.tokenizer.vocabulary import embedding_rows

    settings = row_settings(spec.config, packing=True)
    numbers: dict[tuple[int, int, int], int] = {}
    identities = np.array([numbers.setdefault(document.identity, len(numbers)) for document in documents])
    store = _Documents({number: documents[index] for index, number in enumerate(identities.tolist())})
    text, template = tokenize(settings, store, identities, tokenizer)
    pad, vocab_size = special_ids(tokenizer).padding, embedding_rows(tokenizer)
    if len(set(text.indices)) < INPUT_FORMATS[settings.input_format].documents:
        text = text._replace(sentences=text.sentences[:1], documents=text.documents[:1], indices=[])
    name = f"stream-{spec.reader}-{chunk}"
    _, columns = draw_rows(settings, name, text, template, pad, vocab_size)
    if settings.max_sequences_per_pack is not None and len(columns["length"]):
        columns = pack_rows(columns, settings.max_sequences_per_pack, pad)
    return columns


@dataclass(frozen=True)
class _Documents:
    """Documents in memory by index."""

    documents: Mapping[int, StreamedDocument]

    def sources(self) -> np.ndarray:
        return np.array([self.documents[number].entry for number in range(len(self.documents))])

    def read(self, indices: np.ndarray) -> Iterator[Document]:
        return (self.documents[index].document for index in indices.tolist())


_blocks: Iterator[Block] | None = None
"""Iterator of a reader process."""


def _start_reader(spec: StreamSpec, tokenizer: str, start: Start) -> None:
    global _blocks
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the readers are the parallelism
    # Job managers and closed terminals signal all processes. The parent may need rows to save a checkpoint, and the
    # readers end with it.
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    start_worker()
    from tokenizers import Tokenizer

    from bert.tokenizer.vocabulary import literal_tokenizer

    _blocks = read_blocks(spec, literal_tokenizer(Tokenizer.from_str(tokenizer)), start)


def _next_block() -> Block:
    return next(require(_blocks, "the reader"))


class RowReader:
    """The rows of one reader by index, made in advance by a process.

    Attributes:
        waited: seconds that `take` has waited for the process.
    """

    def __init__(self, spec: StreamSpec, tokenizer: str, starts: Iterable[Start]) -> None:
        """Takes the tokenizer as JSON, and known starts, from which rows are reached quickly."""
        self.spec, self._tokenizer = spec, tokenizer
        self._starts = {Start(), *starts}
        self._blocks: deque[Block] = deque()
        self._pool: WorkerPool | None = None
        self._pending: deque[Future[Block]] = deque()
        self.waited = 0.0

    @property
    def newest(self) -> Block | None:
        """The last received block."""
        return self._blocks[-1] if self._blocks else None

    def seek(self, row: int) -> None:
        """Starts the process for this row, unless a process is running that reaches it."""
        if self._pool is not None and not (self._blocks and row < self._blocks[0].start.first_row):
            return
        start = self.start_of(row)
        self.close()
        self._pool = WorkerPool(1, _start_reader, (self.spec, self._tokenizer, start))
        self._submit()

    def take(self, rows: np.ndarray) -> Columns:
        """Returns consecutive rows by index. The process is restarted for rows far before the last ones.

        Raises:
            UserError: the corpus cannot be read, or the process was killed.
        """
        first, last = int(rows[0]), int(rows[-1])
        self.seek(first)
        while not self._blocks or self._blocks[-1].end_row <= last:
            self._receive()
            while self._blocks and self._blocks[0].end_row <= first - BATCHES_KEPT * len(rows):
                self._blocks.popleft()
        blocks = [block for block in self._blocks if block.end_row > first and block.start.first_row <= last]
        within = rows - blocks[0].start.first_row
        return {name: np.concatenate([block.columns[name] for block in blocks])[within] for name in blocks[0].columns}

    def start_of(self, row: int) -> Start:
        """Returns the last known start before a row."""
        known = (*self._starts, *(block.start for block in self._blocks))
        earlier = (start for start in known if start.first_row <= row)
        return max(earlier, key=lambda start: (start.first_row, start.state))

    def close(self) -> None:
        """Ends the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None
        self._pending.clear()
        self._blocks.clear()

    def _submit(self) -> None:
        pool = require(self._pool, "the process")
        while len(self._pending) < BLOCKS_AHEAD:
            self._pending.append(pool.submit(_next_block))

    def _receive(self) -> None:
        begin = time.perf_counter()
        try:
            block = self._pending.popleft().result()
            self._submit()
        except BrokenProcessPool:
            raise UserError(
                "a process that reads data.train was killed, most likely for lack of memory: resume with more memory, "
                "or start a new run with a smaller data.shuffle_buffer"
            ) from None
        self._blocks.append(block)
        self.waited += time.perf_counter() - begin


class StreamedRows:
    """The rows of this host's readers, which are started on first use. Row n of reader r of R has the index n R + r.

    Attributes:
        num_readers: number of readers R on all hosts.
    """

    def __init__(self, readers: Sequence[RowReader], log: Log) -> None:
        """Takes the readers of this host; ``log`` receives the rate."""
        self._readers = {reader.spec.reader: reader for reader in readers}
        self.num_readers = readers[0].spec.config.stream_readers
        self._log = log
        self._report_time: float | None = None
        self._reported_size, self._reported_wait, self._reported_skipped = 0, 0.0, 0

    def __len__(self) -> int:
        """Returns the number of rows made so far."""
        return sum(reader.newest.end_row for reader in self._readers.values() if reader.newest)

    def take(self, indices: np.ndarray) -> Columns:
        """Returns rows by index, like `ShardReader.take`; the rows of a reader must be consecutive."""
        owners, rows = indices % self.num_readers, indices // self.num_readers
        indices_of = {reader: np.flatnonzero(owners == reader) for reader in np.unique(owners).tolist()}
        for reader, own in indices_of.items():  # start all of them before waiting for one
            self._readers[reader].seek(int(rows[own[0]]))
        taken: Columns = {}
        for reader, own in indices_of.items():
            for name, values in self._readers[reader].take(rows[own]).items():
                column = taken.setdefault(name, np.empty((len(indices), *values.shape[1:]), np.int32))
                column[own] = values
        self._report()
        return taken

    def starts(self, row: int) -> list[Start]:
        """Returns a start for each reader, from which it reaches its row of this index."""
        return [reader.start_of(row) for reader in self._readers.values()]

    def close(self) -> None:
        """Ends the processes of the readers."""
        for reader in self._readers.values():
            reader.close()

    def _report(self) -> None:
        """Logs the rate if `REPORT_SECONDS` have passed since the last report."""
        now = time.perf_counter()
        newest = [reader.newest for reader in self._readers.values() if reader.newest]
        size, waited = sum(block.size for block in newest), sum(reader.waited for reader in self._readers.values())
        filtered = sum(block.filtered for block in newest)
        if self._report_time is None:
            self._log(f"stream: the first rows are ready, {waited:.1f} seconds after the start of its readers")
        elif (seconds := now - self._report_time) < REPORT_SECONDS:
            return
        else:
            self._log(
                f"stream: {(size - self._reported_size) / 1e6 / seconds:.2f} MB of text per second, read by "
                f"{len(newest)} processes in pass {1 + min(block.passes for block in newest)}; training waited "
                f"{(waited - self._reported_wait) / seconds:.0%} of the time"
                + (f"; filters left out {filtered:,} documents so far" if filtered else "")
            )
        self._report_time, self._reported_size, self._reported_wait = now, size, waited
        if (skipped := sum(block.skipped for block in newest)) > self._reported_skipped:
            LOGGER.warning(f"warning: stream: {skipped:,} documents without text are skipped so far")
            self._reported_skipped = skipped


@dataclass(frozen=True)
class StreamLoader(PretrainingLoader):
    """Batches of streamed rows. All readers contribute equally many consecutive rows to a batch, so that batches do not
    depend on the number of hosts."""

    rows: StreamedRows

    def row_indices(self, step: int) -> np.ndarray:
        """Returns the indices of this host's rows of the batch of ``step``."""
        index, count = self.process
        share = self.batch_size // self.rows.num_readers
        owners = np.arange(index * self.rows.num_readers // count, (index + 1) * self.rows.num_readers // count)
        rows = self.first_reader_row(step) + np.arange(share)
        return (rows * self.rows.num_readers + owners[:, None]).reshape(-1)

    def first_reader_row(self, step: int) -> int:
        """Returns the index, within a reader, of its first row of the batch of ``step``."""
        return (self.first_row + (step - self.first_step) * self.batch_size) // self.rows.num_readers
