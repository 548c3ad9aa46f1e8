"""metrics.jsonl as TensorBoard reads it: one event file a run, each line of the metrics one event.

metrics.jsonl is the truth. A kill loses what the event file had in its buffer, and leaves in it what lies beyond the
checkpoint that the run goes back to; a run that goes on therefore writes its events again from the lines that are left,
with the times of day of the old ones. tensorboardX gives the format and is imported at the moment of use.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

FLUSH_SECONDS = 30
_PATTERN = "*tfevents*"

Line = dict[str, Any]


class TensorBoardWriter:
    """The event file of a run, open for more. Begins with ``lines``, in place of all events in ``folder``.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, lines: Iterable[Line]) -> None:
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import RecordWriter

        self._events = event_pb2
        folder.mkdir(parents=True, exist_ok=True)
        old = list(folder.glob(_PATTERN))
        times = {(step, tag): at for file in old for at, step, values in read_events(file) for tag in values}
        draft = folder / ".new"
        self._writer = RecordWriter(str(draft))
        self._record(wall_time=time.time(), file_version="brain.Event:2")
        # Tells a TensorBoard that is looking on to forget the events it has read from the files of before.
        self._record(wall_time=time.time(), session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        for line in lines:
            values = scalars(line)
            known = [times[line["step"], tag] for tag in values if (line["step"], tag) in times]
            self._add(line["step"], values, min(known, default=time.time()))
        self._writer.flush()
        # A name of its own that comes last: TensorBoard reads files in the order of their names.
        draft.rename(folder / f"events.out.tfevents.{time.time_ns()}.bert")
        for file in old:
            file.unlink(missing_ok=True)
        self._flushed = time.monotonic()

    def write(self, line: Line) -> None:
        """Adds one line of metrics.jsonl."""
        self._add(line["step"], scalars(line), time.time())
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.flush()
        self._writer.close()

    def _add(self, step: int, values: dict[str, float], wall_time: float) -> None:
        summary = type(self._events.Event().summary)()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        if values:
            self._record(wall_time=wall_time, step=step, summary=summary)

    def _record(self, **fields: Any) -> None:
        self._writer.write(self._events.Event(**fields).SerializeToString())


def scalars(line: Line) -> dict[str, float]:
    """Tags and values of a line: numbers alone; null, which stands for NaN, is left out."""
    return {
        f"{line['split']}/{name}": float(value)
        for name, value in line.items()
        if name not in ("step", "split") and isinstance(value, (int, float))
    }


def read_events(file: Path) -> Iterator[tuple[float, int, dict[str, float]]]:
    """(time of day, step, value by tag) of every whole event of a file that has values.

    A record is: length (8 bytes), its checksum (4), the event, its checksum (4); the last one may be cut short.
    """
    from google.protobuf.message import DecodeError
    from tensorboardX.proto import event_pb2

    with file.open("rb") as records:
        while len(header := records.read(12)) == 12:
            (length,) = struct.unpack("<Q", header[:8])
            data = records.read(length + 4)
            if len(data) < length + 4:
                return
            try:
                event = event_pb2.Event.FromString(data[:length])
            except DecodeError:  # a damaged file: only times of day are lost
                return
            if event.summary.value:
                yield event.wall_time, event.step, {value.tag: value.simple_value for value in event.summary.value}
