"""Processes that read a stream ahead of time, and batches of their rows."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from bert.data.pretraining.loader import PretrainingLoader
from bert.data.pretraining.objectives import Columns
from bert.data.pretraining.streaming import Block, Start, StreamSpec, read_blocks
from bert.data.worker_processes import WorkerPool, start_worker
from bert.errors import LOGGER, UserError, require

BLOCKS_AHEAD = 2
"""Blocks of a reader that are built before they are needed."""

BATCHES_KEPT = 8
"""Batches whose rows stay in memory after they were taken: those of a step that was skipped are taken again."""

REPORT_SECONDS = 60.0
"""Time between two lines about the rate."""

_blocks: Iterator[Block] | None = None
"""Of a reader's process."""


def _start_reader(spec: StreamSpec, tokenizer: str, start: Start) -> None:
    global _blocks
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the readers are the parallelism
    # Job managers and closed terminals notify all processes. The parent saves, for which it may need rows, and its
    # end ends the readers.
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
    """The rows of one reader by number, which a process makes ahead of time.

    Attributes:
        waited: seconds that `take` has waited for the process.
    """

    def __init__(self, spec: StreamSpec, tokenizer: str, starts: Iterable[Start]) -> None:
        """
        Args:
            tokenizer: in JSON.
            starts: known ones; rows are found soon if they follow one.
        """
        self.spec, self._tokenizer = spec, tokenizer
        self._starts = {Start(), *starts}
        self._blocks: deque[Block] = deque()
        self._pool: WorkerPool | None = None
        self._pending: deque[Future[Block]] = deque()
        self.waited = 0.0

    @property
    def newest(self) -> Block | None:
        """The last block that was received."""
        return self._blocks[-1] if self._blocks else None

    def seek(self, row: int) -> None:
        """Starts the process so that it makes this row, unless that is what it does."""
        if self._pool is not None and not (self._blocks and row < self._blocks[0].start.first_row):
            return
        start = self.start_of(row)
        self.close()
        self._pool = WorkerPool(1, _start_reader, (self.spec, self._tokenizer, start))
        self._submit()

    def take(self, rows: np.ndarray) -> Columns:
        """Consecutive rows by number. The process starts again for rows long before those that were taken last.

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
        """Where to begin to have a row, as far as that is known."""
        known = (*self._starts, *(block.start for block in self._blocks))
        return max(
            (start for start in known if start.first_row <= row), key=lambda start: (start.first_row, start.position)
        )

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
                "a process that reads data.train was killed, most likely for lack of memory: resume with more of it, "
                "or start a new run with a smaller data.shuffle_buffer"
            ) from None
        self._blocks.append(block)
        self.waited += time.perf_counter() - begin


class StreamedRows:
    """The rows of this host's readers, which start when rows are taken.

    Row n of reader r, of R, has the number n R + r.

    Attributes:
        num_readers: R, of all hosts.
    """

    def __init__(self, readers: Sequence[RowReader], say: Callable[[str], None]) -> None:
        """
        Args:
            say: logs the rate.
        """
        self._readers = {reader.spec.reader: reader for reader in readers}
        self.num_readers = readers[0].spec.config.stream_readers
        self._say = say
        self._report_time: float | None = None
        self._reported_size, self._reported_wait, self._reported_skipped = 0, 0.0, 0

    def __len__(self) -> int:
        """Rows that have been made."""
        return sum(reader.newest.end_row for reader in self._readers.values() if reader.newest)

    def take(self, indices: np.ndarray) -> Columns:
        """Rows by number, as of `bert.data.pretraining.shards.ShardReader`: those of a reader one after the other."""
        owners, rows = indices % self.num_readers, indices // self.num_readers
        places = {reader: np.flatnonzero(owners == reader) for reader in np.unique(owners).tolist()}
        for reader, mine in places.items():  # all start before one is waited for
            self._readers[reader].seek(int(rows[mine[0]]))
        taken: Columns = {}
        for reader, mine in places.items():
            for name, values in self._readers[reader].take(rows[mine]).items():
                column = taken.setdefault(name, np.empty((len(indices), *values.shape[1:]), np.int32))
                column[mine] = values
        self._report()
        return taken

    def starts(self, row: int) -> list[Start]:
        """Where each of the readers begins to have its row of this number."""
        return [reader.start_of(row) for reader in self._readers.values()]

    def close(self) -> None:
        """Ends the readers' processes."""
        for reader in self._readers.values():
            reader.close()

    def _report(self) -> None:
        """Logs the rate since the last report, now and then."""
        now = time.perf_counter()
        newest = [reader.newest for reader in self._readers.values() if reader.newest]
        size, waited = sum(block.size for block in newest), sum(reader.waited for reader in self._readers.values())
        if self._report_time is None:
            self._say(f"stream: the first rows are there, {waited:.1f} seconds after the start of its readers")
        elif (seconds := now - self._report_time) < REPORT_SECONDS:
            return
        else:
            self._say(
                f"stream: {(size - self._reported_size) / 1e6 / seconds:.2f} MB of text per second, read by "
                f"{len(newest)} processes in pass {1 + min(block.passes for block in newest)}; training waited "
                f"{(waited - self._reported_wait) / seconds:.0%} of the time"
            )
        self._report_time, self._reported_size, self._reported_wait = now, size, waited
        if (skipped := sum(block.skipped for block in newest)) > self._reported_skipped:
            LOGGER.warning(f"warning: stream: {skipped:,} documents without text are skipped so far")
            self._reported_skipped = skipped


@dataclass(frozen=True)
class StreamLoader(PretrainingLoader):
    """Batches of the rows of a stream. Each reader gives as many consecutive rows of a batch as every other one, so
    that the batches do not depend on the number of hosts."""

    rows: StreamedRows

    def row_indices(self, step: int) -> np.ndarray:
        """[B] numbers of this host's rows of the batch of ``step``."""
        index, count = self.process
        share = self.batch_size // self.rows.num_readers
        owners = np.arange(index * self.rows.num_readers // count, (index + 1) * self.rows.num_readers // count)
        rows = self.first_reader_row(step) + np.arange(share)
        return (rows * self.rows.num_readers + owners[:, None]).reshape(-1)

    def first_reader_row(self, step: int) -> int:
        """Number, among those of a reader, of its first row of the batch of ``step``."""
        return (self.first_row + (step - self.first_step) * self.batch_size) // self.rows.num_readers
