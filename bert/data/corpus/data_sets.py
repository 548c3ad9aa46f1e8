"""Reads a corpus in columns: Parquet files, data sets saved by ``datasets``, and data sets on the hub.

Each reader yields (row number from 1, values of the columns), and holds one batch of rows in memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bert.config import HUB_PREFIX
from bert.errors import UserError, damaged, unreadable
from bert.files import require_content
from bert.remote import open_remote

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, IterableDataset

ROWS_AT_ONCE = 256
"""Rows per batch in memory: documents may be long."""

NumberedValues = Generator[tuple[int, tuple[Any, ...]], None, None]


def is_saved_dataset(folder: str) -> bool:
    """Returns whether the folder is a data set saved by ``datasets``."""
    return os.path.isfile(os.path.join(folder, "state.json"))


def open_dataset(source: str) -> Dataset:
    """Opens the data set of a folder or of ``hub:NAME[:CONFIG][:SPLIT]``. Raises UserError."""
    import datasets

    if source.startswith(HUB_PREFIX):
        return cast("Dataset", _load_from_hub(source, streaming=False))
    try:
        return cast("Dataset", datasets.load_from_disk(source))
    except Exception as error:  # errors of Arrow, of JSON and of the library, including KeyError
        for file in sorted(Path(source).iterdir()):
            require_content(file)
        raise damaged(source, "", error) from None


def dataset_files(source: str) -> list[str]:
    """Returns the Arrow files of a data set in order."""
    return [entry["filename"] for entry in open_dataset(source).cache_files]


@functools.lru_cache(maxsize=16)
def hub_stream(source: str) -> IterableDataset:
    """Opens the data set of ``hub:NAME[:CONFIG][:SPLIT]`` for streaming. Raises UserError."""
    return cast("IterableDataset", _load_from_hub(source, streaming=True))


def hub_rows(source: str, file: int, columns: Sequence[str]) -> NumberedValues:
    """Yields the rows of one file of `hub_stream`, by its index."""
    stream, row = hub_stream(source), 0
    try:
        for row, record in enumerate(stream.shard(stream.num_shards, file), start=1):
            _require_columns(source, list(record), columns)
            yield row, tuple(record[name] for name in columns)
    except UserError:
        raise
    except Exception as error:  # errors of the network, the hub, and the files
        raise damaged(f"{source}, file {file + 1},", f" after row {row}", error) from None


def dataset_rows(source: str, columns: Sequence[str]) -> NumberedValues:
    """Yields the rows of a data set."""
    import pyarrow as pa

    row, dataset = 0, open_dataset(source)
    _require_columns(source, dataset.column_names, columns)
    try:
        for table in dataset.select_columns(list(columns)).with_format("arrow").iter(ROWS_AT_ONCE):
            yield from _numbered(table, columns, row)
            row += len(table)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise damaged(source, f" after row {row}", error) from None


def parquet_rows(path: Path | str, columns: Sequence[str] | None = None) -> NumberedValues:
    """Yields the rows of a Parquet file, by default with all columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    if isinstance(path, Path):
        require_content(path)
    try:
        with pq.ParquetFile(open_remote(path) if isinstance(path, str) else path, buffer_size=1 << 20) as file:
            columns = file.schema_arrow.names if columns is None else columns
            _require_columns(str(path), file.schema_arrow.names, columns)
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(columns)):
                yield from _numbered(batch, columns, row)
                row += len(batch)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise damaged(path, f" after row {row}", error) from None
    except OSError as error:
        if error.strerror is None:
            raise damaged(path, f" after row {row}", error) from None
        raise unreadable(path, error) from None


def _numbered(table: pa.Table | pa.RecordBatch, columns: Sequence[str], row: int) -> NumberedValues:
    """Yields the rows of a table, numbered from ``row`` + 1."""
    indices = [table.schema.get_all_field_indices(name)[0] for name in columns]
    values = zip(*(table.column(index).to_pylist() for index in indices), strict=True)
    yield from enumerate(values, start=row + 1)


def _require_columns(source: str, names: Sequence[str], columns: Sequence[str]) -> None:
    for column in columns:
        if column not in names:
            present = ", ".join(names)[:200]
            raise UserError(
                f'{source} has no column "{column}" but {present}: name the columns of text as data.text_field'
            )


def _load_from_hub(source: str, streaming: bool) -> Dataset | IterableDataset:
    import datasets

    name, config, split = [*source.removeprefix(HUB_PREFIX).split(":", 2), "", ""][:3]
    options: dict[str, Any] = {"streaming": True} if streaming else {}
    try:
        return datasets.load_dataset(name, config or None, split=split or "train", **options)
    except Exception as error:  # errors of the network, the hub, and the files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{source} cannot be loaded ({reason}): name hub:ORG/NAME, with :CONFIG or ::SPLIT where it needs them"
        ) from None
