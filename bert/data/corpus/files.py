"""One file, or one data set, of a corpus -> its documents. Streaming: memory holds one document or one batch of rows.
A file is a local one, or one in a store that is read while it comes, named by its URL.

Text files hold a document as a block of lines (paragraphs or sentences) that an empty line ends; ``.jsonl`` (or
``.ndjson``) files hold one object a line whose "text" is a document; Parquet files and data sets of the ``datasets``
library have a "text" column. Text and JSONL may be compressed (gzip, bzip2, xz, zstd). Read verbatim, a text file is
one document, and documents keep their white space and empty lines.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from bert.config import HUB_PREFIX
from bert.errors import UTF16_MARKS, UserError, convert, without_surrogates
from bert.urls import is_url, open_remote

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, IterableDataset

Document = list[str]
"""Its lines: paragraphs or sentences, none of them empty; of a verbatim document the text split at line feeds."""

MAX_DOCUMENT_BYTES = 64 << 20
"""Longest document. One that is longer lacks its empty lines, and would be held in memory whole."""

ROWS_AT_ONCE = 256
"""Rows of Parquet and of data sets in memory together: documents may be long."""


def _open_zstd(file: Path | BinaryIO) -> io.BufferedIOBase:
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(file) if isinstance(file, Path) else file, compression="zstd"))


DECOMPRESSORS: dict[str, Callable[[Any], io.BufferedIOBase]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
"""By the end of a file's name, for its path or the open file; any other is plain."""

_JSON_LINES = (".jsonl", ".ndjson")

FOLDER_SUFFIXES = (*(kind + packed for kind in (".txt", *_JSON_LINES) for packed in ("", *DECOMPRESSORS)), ".parquet")
"""Files that are read where a folder is named."""

_UNREADABLE = (".json", ".csv", ".tsv", ".arrow", ".parquet", ".tar", ".html", ".xml", ".pdf")
"""No text, plain or compressed."""

_UNPACKED = (".zip", ".tgz", ".tbz2", ".txz", ".7z", ".rar", ".zstd", ".lz4", ".lzma", ".br", ".z")
"""Packed in a way that is not unpacked here."""


def read_documents(source: str, verbatim: bool = False) -> Iterator[Document]:
    """Documents of a file or its URL, of a folder that ``datasets`` saved, or of a data set on the hub.

    Args:
      verbatim: whether documents keep their white space and empty lines; a text file is then one document.

    Raises:
      UserError: a file that is damaged, cut short or gone (with the number of the line or row where there is one).
    """
    file_format, path = corpus_format(source), source if is_url(source) else Path(source)
    if file_format == "text" and not verbatim:
        yield from _text_documents(path)
        return
    if file_format == "text":
        texts = _whole_text(path)
    elif file_format == "jsonl":
        texts = _json_texts(path)
    else:
        texts = _dataset_texts(source) if file_format == "dataset" else _parquet_texts(path)
    with contextlib.closing(texts):
        for text in texts:
            if document := text.split("\n") if verbatim else _split_lines(text):
                yield document


def corpus_format(source: str) -> str:
    """text, jsonl, parquet or dataset."""
    if source.startswith(HUB_PREFIX) or is_saved_dataset(source):
        return "dataset"
    if _name(source).endswith(".parquet"):
        return "parquet"
    return "jsonl" if _unpacked_name(source).endswith(_JSON_LINES) else "text"


def _name(path: Path | str) -> str:
    """In lower case; of a web server's URL, without what follows a question mark."""
    name = str(path).lower()
    return name.partition("?")[0] if name.startswith(("http:", "https:")) else name


def _unpacked_name(path: str) -> str:
    """In lower case, without the end of a compressed file."""
    name = _name(path)
    return name.removesuffix(next((suffix for suffix in DECOMPRESSORS if name.endswith(suffix)), ""))


def is_saved_dataset(folder: str) -> bool:
    """Whether ``datasets`` saved a data set in this folder."""
    return os.path.isfile(os.path.join(folder, "state.json"))


def require_readable_kind(path: str) -> None:
    """Raises UserError for a file whose name says that it is no text."""
    if corpus_format(path) == "parquet":
        return
    wanted = f".txt or .jsonl (plain or with {', '.join(DECOMPRESSORS)}) or .parquet"
    name = _unpacked_name(path)
    if name.endswith(".json"):
        raise UserError(
            f'{path} may be one value of JSON: if it has one object with a "text" on each line, call it .jsonl; else '
            f"convert it to {wanted}"
        )
    if name.endswith((*_UNREADABLE, *_UNPACKED)):
        raise UserError(f"{path} is of a kind that is not read: convert it to {wanted}")


@functools.lru_cache(maxsize=16)
def hub_stream(source: str) -> IterableDataset:
    """The data set of ``hub:NAME[:CONFIG][:SPLIT]``, whose files are read while they come. Raises UserError."""
    return cast("IterableDataset", _load_from_hub(source, streaming=True))


def hub_documents(source: str, file: int, verbatim: bool = False) -> Iterator[Document]:
    """Documents of one of the files of `hub_stream`, by its number."""
    stream = hub_stream(source)
    row = 0
    try:
        for row, record in enumerate(stream.shard(stream.num_shards, file), start=1):
            if "text" not in record:
                raise _no_text_column(source, list(record))
            for text in _checked_texts(source, [record["text"]], row - 1):
                if document := text.split("\n") if verbatim else _split_lines(text):
                    yield document
    except UserError:
        raise
    except Exception as error:  # of the network, of the hub, of the files behind it
        raise _damaged_error(f"{source}, file {file + 1},", f" after row {row}", error) from None


def _load_from_hub(source: str, streaming: bool) -> Dataset | IterableDataset:
    import datasets

    name, config, split = [*source.removeprefix(HUB_PREFIX).split(":", 2), "", ""][:3]
    options: dict[str, Any] = {"streaming": True} if streaming else {}
    try:
        return datasets.load_dataset(name, config or None, split=split or "train", **options)
    except Exception as error:  # of the network, of the hub, of the files behind it
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{source} cannot be loaded ({reason}): name hub:ORG/NAME, with :CONFIG or ::SPLIT where it needs them"
        ) from None


def _no_text_column(source: str, names: list[str]) -> UserError:
    return UserError(f'{source} has no column "text" but {", ".join(names)}: rename the one with the text')


def open_dataset(source: str) -> Dataset:
    """The data set of a folder or of ``hub:NAME[:CONFIG][:SPLIT]``. Raises UserError where it cannot be opened."""
    import datasets

    if not source.startswith(HUB_PREFIX):
        try:
            dataset = datasets.load_from_disk(source)
        except Exception as error:  # Arrow's, JSON's and the library's own, bare KeyErrors among them
            raise _damaged_error(Path(source), "", error) from None
    else:
        dataset = _load_from_hub(source, streaming=False)
    if "text" not in dataset.column_names:
        raise _no_text_column(source, dataset.column_names)
    return dataset


def dataset_files(source: str) -> list[str]:
    """The Arrow files behind a data set, in their order."""
    return [entry["filename"] for entry in open_dataset(source).cache_files]


def unreadable(path: Path | str, error: OSError) -> UserError:
    """The error for a file that the system does not give."""
    if isinstance(error, FileNotFoundError):
        return UserError(f"{path} has disappeared: put it back or leave it out")
    return UserError(f"{path} cannot be read ({error.strerror}): fix its permissions or leave it out")


def _damaged_error(path: Path | str, where: str, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return UserError(f"{path} is cut short or damaged{where} ({reason}): copy it again")


def _open(path: Path | str) -> io.BufferedIOBase:
    decompress = DECOMPRESSORS.get(os.path.splitext(_name(path))[1])
    if is_url(path):
        file = open_remote(str(path))
        return decompress(file) if decompress else file
    return decompress(path) if decompress else open(path, "rb")


def _raw_lines(path: Path | str, utf_16: bool) -> Iterator[bytes]:
    """The lines of a file with their ends, cut at one byte over the longest; those of UTF-16 become UTF-8."""
    with _open(path) as file:
        line = file.readline(MAX_DOCUMENT_BYTES + 1)
        if not (utf_16 and line.startswith(UTF16_MARKS)):
            while line:
                yield line
                line = file.readline(MAX_DOCUMENT_BYTES + 1)
            return
    with _open(path) as file, io.TextIOWrapper(cast(io.BufferedReader, file), "utf-16", newline="\n") as text:
        while characters := text.readline(MAX_DOCUMENT_BYTES + 1):
            yield characters.encode("utf-8")


def numbered_lines(
    path: Path | str, utf_16: bool = False, errors: str = "strict"
) -> Generator[tuple[int, str], None, None]:
    """(number, line without its end), decoded line by line, so that an error knows its place.

    Args:
      path: of a local file, or its URL.
      utf_16: whether a file that begins with a byte order mark of UTF-16 is read as such; otherwise it is an error.
      errors: what `bytes.decode` does with bytes that are not UTF-8.
    """
    with contextlib.closing(_decoded_lines(path, utf_16, errors)) as lines:
        for line_number, line in lines:
            yield line_number, (line.removeprefix("\ufeff") if line_number == 1 else line).rstrip("\r\n")


def _decoded_lines(path: Path | str, utf_16: bool, errors: str) -> Generator[tuple[int, str], None, None]:
    """(number, line as it is, with its end and a byte order mark); arguments as of `numbered_lines`."""
    line_number = 0
    try:
        # Not all decoders mind.
        if isinstance(path, Path) and path.suffix.lower() in DECOMPRESSORS and not path.stat().st_size:
            raise EOFError("it is empty")
        for data in _raw_lines(path, utf_16):
            line_number += 1
            if len(data) > MAX_DOCUMENT_BYTES:
                is_jsonl = corpus_format(str(path)) == "jsonl"
                raise _too_long(path, line_number, "divide it" if is_jsonl else "separate documents with an empty line")
            try:
                yield line_number, data.decode("utf-8", errors)
            except UnicodeDecodeError:
                raise UserError(f"{path}, line {line_number}: not UTF-8: {convert(data)}") from None
    except UnicodeDecodeError as error:
        raise _damaged_error(path, f" after line {line_number}", error) from None
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise _damaged_error(path, f" after line {line_number}", error) from None
    except OSError as error:
        if error.strerror is None:  # of bz2 and zstd: the file's fault, not the system's
            raise _damaged_error(path, f" after line {line_number}", error) from None
        raise unreadable(path, error) from None


def _text_documents(path: Path | str) -> Iterator[Document]:
    document: Document = []
    size = 0
    with contextlib.closing(numbered_lines(path)) as lines:
        for line_number, line in lines:
            if stripped := line.strip():
                document.append(stripped)
                size += len(stripped)
                if size > MAX_DOCUMENT_BYTES:
                    raise _too_long(path, line_number, "separate documents with an empty line")
            elif document:
                yield document
                document, size = [], 0
    if document:
        yield document


def _whole_text(path: Path | str) -> Generator[str, None, None]:
    """The text of a file, as one."""
    parts: list[str] = []
    size = 0
    with contextlib.closing(_decoded_lines(path, utf_16=False, errors="strict")) as lines:
        for line_number, line in lines:
            parts.append(line)
            size += len(line)
            if size > MAX_DOCUMENT_BYTES:
                raise _too_long(path, line_number, "divide the file, or set data.verbatim to false")
    yield "".join(parts)


def _json_texts(path: Path | str) -> Generator[str, None, None]:
    with contextlib.closing(numbered_lines(path)) as lines:
        for line_number, line in lines:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", str(error))
                raise UserError(f"{path}, line {line_number}: not JSON ({reason}): fix or remove the line") from None
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise UserError(
                    f'{path}, line {line_number}: no string "text" in it: each line must be an object with one'
                )
            yield without_surrogates(text)


def _parquet_texts(path: Path | str) -> Generator[str, None, None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(open_remote(path) if isinstance(path, str) else path, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            if "text" not in names:
                raise _no_text_column(str(path), names)
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=["text"]):
                yield from _column_texts(str(path), batch.column(0), row)
                row += len(batch)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _damaged_error(path, f" after row {row}", error) from None
    except OSError as error:
        if error.strerror is None:
            raise _damaged_error(path, f" after row {row}", error) from None
        raise unreadable(path, error) from None


def _dataset_texts(source: str) -> Generator[str, None, None]:
    import pyarrow as pa

    row = 0
    try:
        for table in open_dataset(source).select_columns("text").with_format("arrow").iter(ROWS_AT_ONCE):
            for chunk in table.column("text").chunks:
                yield from _column_texts(source, chunk, row)
                row += len(chunk)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise _damaged_error(Path(source), f" after row {row}", error) from None


def _column_texts(source: str, column: pa.ChunkedArray, row: int) -> Iterator[str]:
    """Texts of an Arrow column, whose first row is number ``row`` of the place; a null is no document."""
    return _checked_texts(source, column.to_pylist(), row)


def _checked_texts(source: str, texts: list[Any], row: int) -> Iterator[str]:
    for row_number, text in enumerate(texts, start=row + 1):
        if text is None:
            continue
        if not isinstance(text, str):
            raise UserError(f'{source}, row {row_number}: "text" is {type(text).__name__} and not a string: convert it')
        size = len(text)
        if size > MAX_DOCUMENT_BYTES:
            raise UserError(
                f"{source}, row {row_number}: the document is over {MAX_DOCUMENT_BYTES >> 20} MiB: divide it"
            )
        yield text


def _split_lines(text: str) -> Document:
    return [stripped for line in text.split("\n") if (stripped := line.strip())]


def _too_long(path: Path | str, line_number: int, fix: str) -> UserError:
    return UserError(f"{path}, line {line_number}: the document is over {MAX_DOCUMENT_BYTES >> 20} MiB: {fix}")
