"""A pretraining run that reads its corpus as a stream: its loaders, and where their readers are at each checkpoint."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert.config import DataConfig
from bert.data.corpus.streaming import Place, stream_files
from bert.data.pretraining import builder
from bert.data.pretraining.stream_readers import RowReader, StreamedRows, StreamLoader
from bert.data.pretraining.streaming import Start, StreamSpec, buffer_chunks
from bert.errors import UserError
from bert.files import load_json, write_atomic
from bert.parallel.multihost import broadcast_from_main, gather_rows, is_multihost
from bert.runs.folder import STREAM_FILE, RunFolder
from bert.training.initialization import Log
from bert.training.loop import CheckpointWriter

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Starts = Mapping[str, Sequence[Sequence[Start]]]
"""For each name and checkpoint, one for each reader."""


def check_readers(data: DataConfig, hosts: int) -> None:
    """Raises UserError if the hosts cannot share the readers."""
    if data.streaming and data.stream_readers % hosts:
        raise UserError(
            f"data.stream_readers is {data.stream_readers}, which {hosts} hosts cannot share: use a multiple of the "
            "number of hosts"
        )


def read_starts(run: RunFolder[Any]) -> Starts:
    """Those of the run's checkpoints, as the main process finds them; without the file, readers begin at the start."""
    known = broadcast_from_main(lambda: _read(run.path / STREAM_FILE))
    return {name: [[_to_start(one) for one in checkpoint] for checkpoint in of_name] for name, of_name in known.items()}


def _read(path: Path) -> dict[str, list[list[list[int]]]]:
    if not path.is_file():
        return {}
    try:
        return dict(load_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise UserError(f"{path} is damaged, which has the place in the stream: put back a copy") from None


def _to_integers(start: Start, groups: int) -> list[int]:
    """As many for each start; that of the whole stream has no places of the groups of files yet."""
    places = start.position or [astuple(Place())] * groups
    return [start.chunk, start.block, start.first_row, *itertools.chain.from_iterable(places)]


def _to_start(integers: Sequence[int]) -> Start:
    chunk, block, first_row, *rest = integers
    size = len(astuple(Place()))
    places = zip(*(rest[field::size] for field in range(size)), strict=True)
    return Start(chunk, block, first_row, tuple(places))


def make_rows(
    data: DataConfig,
    tokenizer: Tokenizer,
    starts: Sequence[Sequence[Start]],
    process: tuple[int, int],
    say: Log,
) -> StreamedRows:
    """The rows of this host's readers; ``starts`` has one for each reader of all hosts, for each checkpoint."""
    files, text = tuple(stream_files(data.train)), tokenizer.to_str()
    window = buffer_chunks(data, builder.SHARD_BYTES)
    index, count = process
    share = data.stream_readers // count
    readers = []
    for number in range(index * share, (index + 1) * share):
        spec = StreamSpec(files, data, number, builder.SHARD_BYTES, window)
        readers.append(RowReader(spec, text, [one[number] for one in starts]))
    return StreamedRows(readers, say)


@dataclass(frozen=True)
class StreamCheckpoints:
    """Checkpoints of a run, and with each the places of its readers.

    A place says where rows are found soon, not which rows: without it a resumed run reads all from the start, to the
    same result. So it is written before its checkpoint, and stays if that is deleted.

    Attributes:
        checkpoints: where states are saved.
        run: the folder.
        name: of the phase's examples.
        loader: of the phase.
    """

    checkpoints: CheckpointWriter
    run: RunFolder[Any]
    name: str
    loader: StreamLoader

    def save(self, step: int, state: Any) -> None:
        """Records where the batch after ``step`` begins, and saves the state."""
        # After an error this host alone is here.
        if not is_multihost() or sys.exception() is None:
            self._record(step)
        self.checkpoints.save(step, state)

    def set_best(self, step: int) -> None:
        """As of the checkpoints."""
        self.checkpoints.set_best(step)

    def _record(self, step: int) -> None:
        starts = self.loader.rows.starts(self.loader.first_reader_row(step))
        groups = len(self.run.config.data.mixture_weights or [1])
        everywhere = gather_rows(np.array([_to_integers(start, groups) for start in starts], np.int64)).tolist()
        if self.run.is_writer:
            path = self.run.path / STREAM_FILE
            known = _read(path)
            of_name = known.setdefault(self.name, [])
            if everywhere not in of_name:
                of_name.append(everywhere)
                write_atomic(path, json.dumps(known))
