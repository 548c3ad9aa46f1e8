"""Reads the documents of one file or data set of a corpus, local or by URL, with one document or batch in memory.

In text files, empty lines end documents. ``.jsonl`` (or ``.ndjson``) files have one object per line whose "text" is a
document; Parquet files and data sets of the ``datasets`` library have a "text" column. Text and JSONL may be compressed
(gzip, bzip2, xz, zstd). Read verbatim, a text file is one document, and documents keep white space and empty lines.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import math
import os
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, Unpack, cast

from bert.config import HUB_PREFIX, DataConfig
from bert.data.corpus.data_sets import NumberedValues, dataset_rows, hub_rows, is_saved_dataset, parquet_rows
from bert.errors import (
    UTF16_MARKS,
    UTF32_MARKS,
    UserError,
    convert,
    damaged,
    listed,
    unreadable,
    warn_once,
    without_surrogates,
)
from bert.files import FIRST_BYTES, load_json, require_content, require_text
from bert.remote import is_url, open_remote

Document = list[str]
"""Nonempty lines (paragraphs or sentences); of a verbatim document, the text split at line feeds."""

BYTE_ORDER_MARK = "\ufeff"

MAX_DOCUMENT_BYTES = 64 << 20
"""Maximum bytes of a document, which is held in memory. A longer one probably lacks empty lines."""


def _open_zstd(file: Path | BinaryIO) -> io.BufferedIOBase:
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(file) if isinstance(file, Path) else file, compression="zstd"))


DECOMPRESSORS: dict[str, Callable[[Any], io.BufferedIOBase]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
"""Suffix of a compressed file -> function that opens its path or file object."""

_JSON_LINES = (".jsonl", ".ndjson")

FOLDER_SUFFIXES = (*(kind + packed for kind in (".txt", *_JSON_LINES) for packed in ("", *DECOMPRESSORS)), ".parquet")
"""Suffixes of the corpus files of a folder."""

MARKUP = ("<?xml", "<!doctype", "<html", "<doc ", "<mediawiki")
"""Beginnings of XML and HTML files in lower case; "<doc " is WikiExtractor's."""

_UNREADABLE = (".json", ".csv", ".tsv", ".arrow", ".parquet", ".tar", ".html", ".xml", ".pdf")
"""Suffixes of files that are not text, plain or compressed."""

_UNPACKED = (".zip", ".tgz", ".tbz2", ".txz", ".7z", ".rar", ".zstd", ".lz4", ".lzma", ".br", ".z")
"""Suffixes of archives and compressed files that are not supported."""


class Reading(TypedDict, total=False):
    """Keys of `DataConfig` that determine how documents are read."""

    verbatim: bool
    document_per_line: bool
    text_field: list[str] | str


def reading(config: DataConfig) -> Reading:
    """Returns the reading settings of a configuration."""
    per_line = config.document_per_line
    return {"verbatim": config.verbatim, "document_per_line": per_line, "text_field": config.text_field}


def reading_settings(config: DataConfig) -> list[Any]:
    """Returns the settings of `reading` that are not defaults, for cache keys."""
    return [
        *(["verbatim"] if config.verbatim else []),
        *(["document_per_line"] if config.document_per_line else []),
        *([{"text_field": config.text_field}] if config.text_field != "text" else []),
    ]


@dataclass
class Skipped:
    """Counts documents without text: null or empty rows, and rows of invisible characters."""

    count: int = 0
    first: str = ""
    """Source and line or row of the first one."""
    filtered: int = 0
    """Number of documents that the filters of a stream left out."""

    def add(self, place: str) -> None:
        self.first = self.first or place
        self.count += 1

    def log(self) -> None:
        """Logs a warning with the number of skipped documents, if any."""
        if self.count:
            documents = "document without text is" if self.count == 1 else "documents without text are"
            warn_once(f"warning: {self.count:,} {documents} skipped, the first one in {self.first}")


def read_documents(source: str, skipped: Skipped | None = None, **how: Unpack[Reading]) -> Iterator[Document]:
    """Yields the documents of a file or its URL, of a folder saved by ``datasets``, or of a data set on the hub.

    Args:
      skipped: counts documents without text.
      how: with ``verbatim`` documents keep white space and empty lines, and a text file is one document. With
        ``document_per_line`` each line of a text file is a document. ``text_field`` names the columns of text, which
        are joined by line ends.

    Raises:
      UserError: a file is damaged, truncated or missing (with the number of the line or row, if known).
    """
    file_format, path = corpus_format(source), source if is_url(source) else Path(source)
    columns = text_columns(how)
    if file_format == "text":
        if how.get("verbatim"):
            yield _whole_text(path, columns).split("\n")
        else:
            yield from _text_documents(path, how.get("document_per_line", False), columns)
        return
    if file_format == "jsonl":
        rows, unit = _json_rows(path, columns), "line"
    else:
        rows, unit = dataset_rows(source, columns) if file_format == "dataset" else parquet_rows(path, columns), "row"
    yield from row_documents(rows, source, unit, skipped or Skipped(), how)


def hub_documents(source: str, file: int, skipped: Skipped | None = None, **how: Unpack[Reading]) -> Iterator[Document]:
    """Yields the documents of one file of `bert.data.corpus.data_sets.hub_stream`, by its index."""
    yield from row_documents(hub_rows(source, file, text_columns(how)), source, "row", skipped or Skipped(), how)


def text_columns(how: Reading) -> list[str]:
    """Returns the columns with the text of a row."""
    names = how.get("text_field", "text")
    return [names] if isinstance(names, str) else names


def row_documents(rows: NumberedValues, source: str, unit: str, skipped: Skipped, how: Reading) -> Iterator[Document]:
    """Yields the documents of numbered rows. ``unit`` (line or row) is for messages."""
    columns = text_columns(how)
    with contextlib.closing(rows):
        for number, values in rows:
            place = f"{source}, {unit} {number}"
            text = _row_text(place, columns, values)
            lines = [] if text is None else text.split("\n")
            if not how.get("verbatim"):
                lines = [line for line in map(str.strip, lines) if line]
            if lines:
                yield lines
            else:
                skipped.add(place)


def _row_text(place: str, columns: list[str], values: tuple[Any, ...]) -> str | None:
    """Returns the texts of a row, joined by line ends; None if all are null."""
    texts = []
    for column, value in zip(columns, values, strict=True):
        if _is_null(value):
            continue
        if not isinstance(value, str):
            kind = type(value).__name__
            raise UserError(f'{place}: "{column}" is {kind} and not a string: convert it, or set data.text_field')
        texts.append(without_surrogates(value))
    if sum(map(len, texts)) > MAX_DOCUMENT_BYTES:
        raise UserError(f"{place}: the document is over {MAX_DOCUMENT_BYTES >> 20} MiB: divide it")
    return "\n".join(texts) if texts else None


def _is_null(value: Any) -> bool:
    """Returns whether a value is missing; pandas writes NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def corpus_format(source: str) -> str:
    """Returns the format of a source: text, jsonl, parquet or dataset."""
    if source.startswith(HUB_PREFIX) or is_saved_dataset(source):
        return "dataset"
    if _name(source).endswith(".parquet"):
        return "parquet"
    return "jsonl" if _unpacked_name(source).endswith(_JSON_LINES) else "text"


def _name(path: Path | str) -> str:
    """Returns the name in lower case; of a web server's URL, without the query."""
    name = str(path).lower()
    return name.partition("?")[0] if name.startswith(("http:", "https:")) else name


def _unpacked_name(path: str) -> str:
    """Returns the name in lower case, without the suffix of a compressed file."""
    name = _name(path)
    return name.removesuffix(next((suffix for suffix in DECOMPRESSORS if name.endswith(suffix)), ""))


def require_readable_kind(path: str) -> None:
    """Raises UserError for a file with the suffix of an unsupported format."""
    if corpus_format(path) == "parquet":
        return
    kinds = f".txt or .jsonl (plain or with {', '.join(DECOMPRESSORS)}) or .parquet"
    name = _unpacked_name(path)
    if name.endswith(".json"):
        raise UserError(
            f'{path} may be one value of JSON: if it has one object with a "text" on each line, call it .jsonl; else '
            f"convert it to {kinds}"
        )
    if name.endswith((*_UNREADABLE, *_UNPACKED)):
        raise UserError(f"{path} has an unsupported format: convert it to {kinds}")


def _open(path: Path | str) -> io.BufferedReader:
    """Opens a file for reading, decompressed. Decompressors return classes with the methods of a BufferedReader."""
    decompress = DECOMPRESSORS.get(os.path.splitext(_name(path))[1])
    if is_url(path):
        file = open_remote(str(path))
        require_content(path, file.peek(FIRST_BYTES))
        return cast(io.BufferedReader, decompress(file)) if decompress else file
    require_content(path)
    return cast(io.BufferedReader, decompress(path)) if decompress else open(path, "rb")


def _raw_lines(path: Path | str, utf_16: bool) -> Iterator[bytes]:
    """Yields the lines of a file with their ends, at most one byte over the limit; converts UTF-16 to UTF-8."""
    with _open(path) as file:
        require_text(path, file.peek(FIRST_BYTES)[:FIRST_BYTES])
        line = file.readline(MAX_DOCUMENT_BYTES + 1)
        if not (utf_16 and line.startswith(UTF16_MARKS)) or line.startswith(UTF32_MARKS):
            while line:
                yield line
                line = file.readline(MAX_DOCUMENT_BYTES + 1)
            return
    with _open(path) as file, io.TextIOWrapper(file, "utf-16", newline="\n") as text:
        while characters := text.readline(MAX_DOCUMENT_BYTES + 1):
            yield characters.encode("utf-8")


def numbered_lines(
    path: Path | str, utf_16: bool = False, errors: str = "strict", keep_ends: bool = False
) -> Generator[tuple[int, str], None, None]:
    """Yields (line number, line without its end), decoded line by line so that errors name the line.

    Args:
      utf_16: accept files that begin with a byte order mark of UTF-16.
      errors: error handler of `bytes.decode` for bytes that are not UTF-8.
      keep_ends: yield lines with their ends.
    """
    with contextlib.closing(_decoded_lines(path, utf_16, errors)) as lines:
        for line_number, line in lines:
            line = line.removeprefix("\ufeff") if line_number == 1 else line
            yield line_number, line if keep_ends else line.rstrip("\r\n")


def _decoded_lines(path: Path | str, utf_16: bool, errors: str) -> Generator[tuple[int, str], None, None]:
    """Yields (line number, unchanged line), including line ends and byte order mark; see `numbered_lines`."""
    line_number = 0
    try:
        # Not all decoders report an empty file.
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
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise damaged(path, f" after line {line_number}", error) from None
    except OSError as error:
        if error.strerror is None:  # bz2 and zstd raise these: the file is damaged
            raise damaged(path, f" after line {line_number}", error) from None
        raise unreadable(path, error) from None


def is_blank(line: str) -> bool:
    """Returns whether a line has no visible character; zero-width spaces are not visible."""
    stripped = line.strip()
    return not stripped or not (
        stripped[0].isprintable() or any(character != " " and character.isprintable() for character in stripped)
    )


def _checked_lines(path: Path | str, lines: Iterator[tuple[int, str]], columns: list[str]) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text file, after checking that the first one does not indicate another format."""
    for number, line in lines:
        if is_blank(line):
            yield number, line
            continue
        _check_first_line(path, line.strip().removeprefix(BYTE_ORDER_MARK), columns)
        yield number, line
        break
    yield from lines


def _check_first_line(path: Path | str, line: str, columns: list[str]) -> None:
    """Raises UserError for JSON objects with a text; logs a warning for other JSON and markup."""
    if 4 * line.count("\0") > len(line):
        fix = "convert the file, for example with iconv -f UTF-16LE -t UTF-8"
        raise UserError(f"{path}, line 1: NUL characters: {fix}")
    packed = next((suffix for suffix in DECOMPRESSORS if _name(path).endswith(suffix)), "")
    fix = f"let its name end in .jsonl{packed} if each line is an object"
    record = None
    if line.startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            record = load_json(line)
    fields = next((row for row in (record if isinstance(record, list) else [record]) if isinstance(row, dict)), {})
    if named := [column for column in columns if isinstance(fields.get(column), str)]:
        raise UserError(f'{path} holds JSON with a "{named[0]}" but its name is for plain text: {fix}')
    folder = os.path.dirname(path) or "."
    if fields:
        keys = listed(fields)
        warn_once(
            f"warning: text files in {folder} hold JSON with {keys}, which is read as plain text: {fix}, and set "
            "data.text_field"
        )
    elif line in ("{", "["):
        warn_once(f"warning: text files in {folder} begin like JSON, which is read as plain text: write .jsonl files")
    elif markup := next((start for start in MARKUP if line.lower().startswith(start)), None):
        warn_once(f"warning: text files in {folder} begin with {markup}: tags are read as text")


def _text_documents(path: Path | str, document_per_line: bool, columns: list[str]) -> Iterator[Document]:
    document: Document = []
    size, has_text = 0, False
    with contextlib.closing(numbered_lines(path)) as lines:
        for line_number, line in _checked_lines(path, lines, columns):
            text = line.strip()
            is_text = not is_blank(text)
            is_end = not (is_text if has_text else text)  # invisible lines are a document only between empty lines
            # A byte order mark within a file marks the beginning of the next of several joined files.
            if document and (is_end or document_per_line or line.startswith(BYTE_ORDER_MARK)):
                yield document
                document, size, has_text = [], 0, False
                text = text if is_text else ""
            if not text:
                continue
            if is_text and not has_text:
                document, has_text = [], True
            document.append(text.removeprefix(BYTE_ORDER_MARK))
            size += len(text)
            if size > MAX_DOCUMENT_BYTES:
                fix = "separate documents with an empty line, or set data.document_per_line"
                raise _too_long(path, line_number, fix)
    if document:
        yield document


def _whole_text(path: Path | str, columns: list[str]) -> str:
    parts: list[str] = []
    size = 0
    with contextlib.closing(_decoded_lines(path, utf_16=False, errors="strict")) as lines:
        for line_number, line in _checked_lines(path, lines, columns):
            parts.append(line)
            size += len(line)
            if size > MAX_DOCUMENT_BYTES:
                raise _too_long(path, line_number, "divide the file, or set data.verbatim to false")
    return "".join(parts)


def _json_rows(path: Path | str, columns: list[str]) -> NumberedValues:
    with contextlib.closing(numbered_lines(path)) as lines:
        for line_number, line in lines:
            if is_blank(line):
                continue
            try:
                record = load_json(line.removeprefix(BYTE_ORDER_MARK))
            except ValueError as error:
                reason = getattr(error, "msg", str(error))
                raise UserError(f"{path}, line {line_number}: not JSON ({reason}): fix or remove the line") from None
            for column in columns:
                value = record.get(column, 0) if isinstance(record, dict) else 0
                if not (isinstance(value, str) or _is_null(value)):
                    raise UserError(
                        f'{path}, line {line_number}: no string "{column}" in it: each line must be an object with '
                        "one, or set data.text_field to the name of its text"
                    )
            yield line_number, tuple(record[column] for column in columns)


def _too_long(path: Path | str, line_number: int, fix: str) -> UserError:
    return UserError(f"{path}, line {line_number}: the document is over {MAX_DOCUMENT_BYTES >> 20} MiB: {fix}")
