"""Reads TensorFlow checkpoints (tensor bundles, "V2") without TensorFlow, and verifies all checksums.

A checkpoint PREFIX consists of ``PREFIX.index``, a sorted table that maps names to the locations of their tensors, and
of the data files ``PREFIX.data-00000-of-00001`` and so on, which hold the raw bytes. The formats are defined in
tensorflow/core/util/tensor_bundle and tensorflow/core/protobuf/tensor_bundle.proto. The table is LevelDB's
(doc/table_format.md there), and its values are protocol buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ml_dtypes
import numpy as np

from bert.errors import UserError, require
from bert.files import require_content
from bert.protobuf import MalformedMessage, last_value, parse_message, read_varint, values

DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    9: np.dtype("<i8"),
    14: np.dtype(ml_dtypes.bfloat16),
    19: np.dtype("<f2"),
}
"""TensorFlow's numbers (framework/types.proto) of the supported types."""

_FOOTER = 48
_MAGIC = 0xDB4775248B80FB57
_TRAILER = 5  # bytes after each block: the compression (1) and the checksum (4)
_VERSION = 1  # supported version of the bundle format
_NO_COMPRESSION = 0
_BIG_ENDIAN = 1
_MASK_DELTA = 0xA282EAD8  # added to stored checksums


class _Damaged(Exception):
    """An error in a file. The caller adds the file name."""


class _Unsupported(_Damaged):
    """An unsupported kind of file, which may be intact. The message names the kind and the fix."""


@dataclass(frozen=True)
class Entry:
    """The index entry of a tensor.

    Attributes:
        dtype: TensorFlow's number of the type.
        shard: number of the data file.
        offset: offset in the data file, in bytes.
        checksum: masked CRC-32C of the bytes.
        partitioned: whether the tensor is stored in several parts, each with a separate entry.
    """

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    partitioned: bool


class Bundle:
    """An open checkpoint. The index is read and verified at once, tensors on demand.

    Attributes:
        prefix: path of the checkpoint, without ``.index``.
        entries: index entries by name, sorted; without the parts of partitioned tensors.
    """

    def __init__(self, prefix: Path) -> None:
        """Reads and verifies the index.

        Raises:
            UserError: the index is missing, damaged or not supported.
        """
        self.prefix = prefix
        self._index = Path(f"{prefix}.index")
        if not self._index.is_file():
            if prefix.is_file():
                raise UserError(
                    f"{prefix} is a checkpoint in TensorFlow's old format (V1), which is not supported: restore it in "
                    "TensorFlow and save it again in the newer one"
                )
            raise UserError(f"{self._index} does not exist: copy it from the source of the checkpoint")
        try:
            table = dict(_read_table(require(_read(self._index), str(self._index))))
            if b"" not in table:
                raise _Damaged("no header")
            self._shards, self._big_endian = _parse_header(table.pop(b""))
            # Keys that start with a zero byte are parts of partitioned tensors, not names.
            parsed = {key.decode(): _parse_entry(value) for key, value in table.items() if key[0]}
        except _Unsupported as fault:
            raise UserError(f"{self._index} {fault}") from None
        except (_Damaged, MalformedMessage, UnicodeDecodeError) as fault:
            _fail(self._index, str(fault))
        self.entries: dict[str, Entry] = parsed

    def read(self, name: str) -> np.ndarray:
        """Reads and verifies a tensor, in its stored type and shape.

        Raises:
            UserError: the data file is missing, truncated or damaged, or the tensor is not supported.
        """
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or entry.partitioned:
            reason = "is stored in parts" if entry.partitioned else f"has TensorFlow's type number {entry.dtype}"
            raise UserError(
                f"{self._index}: {name} {reason}, which is not supported: store it whole, as one of "
                "float32, float64, float16, bfloat16, int32, int64"
            )
        if entry.size != math.prod(entry.shape) * dtype.itemsize or entry.shard >= self._shards:
            _fail(self._index, f"the entry of {name} contradicts itself")
        file = Path(f"{self.prefix}.data-{entry.shard:05d}-of-{self._shards:05d}")
        octets = _read(file, entry.offset, entry.size)
        if octets is None:
            _fail(file, f"it ends before {name} does")
        if _masked_crc32c(octets.tobytes()) != entry.checksum:
            _fail(file, f"the checksum of {name} is wrong")
        if self._big_endian:
            octets = octets.reshape(-1, dtype.itemsize)[:, ::-1].copy().reshape(-1)
        return octets.view(dtype).reshape(entry.shape)


def _fail(file: Path, fault: str) -> NoReturn:
    raise UserError(f"{file} is damaged ({fault}): copy it again from the source of the checkpoint") from None


def _read(file: Path, offset: int = 0, size: int | None = None) -> np.ndarray | None:
    """Reads bytes of a file, up to its end if ``size`` is None. Returns None if the file is too short."""
    require_content(file)
    try:
        if offset + (size or 0) > file.stat().st_size:
            return None
        return np.fromfile(file, np.uint8, -1 if size is None else size, offset=offset)
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: copy it from the source of the checkpoint") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): fix its permissions or copy it again") from None


def _masked_crc32c(content: bytes) -> int:
    """Returns the CRC-32C of bytes as TensorFlow stores it: rotated and shifted.

    The mask is needed because files may contain checksums of checksums.

    Raises:
        UserError: the package google-crc32c is missing.
    """
    try:
        import google_crc32c
    except ImportError:
        raise UserError(
            "the checksums of TensorFlow's checkpoints need the package google-crc32c: pip install google-crc32c"
        ) from None
    checksum = google_crc32c.value(content)
    return (((checksum >> 15) | (checksum << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _read_table(octets: np.ndarray) -> Iterator[tuple[bytes, bytes]]:
    """Yields keys and values of a table in order: footer, index block, data blocks."""
    content = octets.tobytes()
    if len(content) < _FOOTER or int.from_bytes(content[-8:], "little") != _MAGIC:
        raise _Damaged("it does not end as an index does")
    footer = content[-_FOOTER:-8]
    meta, at = _handle(footer, 0)
    index, at = _handle(footer, at)
    if footer[at:].strip(b"\0"):
        raise _Damaged("its last bytes are wrong")
    for _ in _read_block(content, meta):
        raise _Damaged("an unknown part in it")
    last = None
    for _, entry in _read_block(content, index):
        handle, _ = _handle(entry, 0)
        for key, value in _read_block(content, handle):
            if last is not None and key <= last:
                raise _Damaged("its names are out of order")
            last = key
            yield key, value


def _read_block(content: bytes, handle: tuple[int, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yields keys and values of one block, given its offset and size. Each key stores only its new suffix."""
    begin, end = handle[0], sum(handle)
    if end + _TRAILER > len(content) - _FOOTER:
        raise _Damaged("it is shorter than its index entry")
    if _masked_crc32c(content[begin : end + 1]) != int.from_bytes(content[end + 1 : end + _TRAILER], "little"):
        raise _Damaged("a checksum is wrong")
    if content[end] != _NO_COMPRESSION:
        raise _Unsupported(
            "is compressed, which is not supported: save it with TensorFlow's Saver, which does not compress"
        )
    # The block ends with a list of offsets for binary search, and its length.
    restarts = int.from_bytes(content[end - 4 : end], "little")
    end -= 4 * restarts + 4
    if end < begin:
        raise _Damaged("a block is too short")
    key = b""
    while begin < end:
        shared, begin = read_varint(content, begin)
        fresh, begin = read_varint(content, begin)
        length, begin = read_varint(content, begin)
        if shared > len(key) or begin + fresh + length > end:
            raise _Damaged("a block contradicts itself")
        key = key[:shared] + content[begin : begin + fresh]
        begin += fresh
        yield key, content[begin : begin + length]
        begin += length


def _handle(content: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Returns a block's (offset, size), and the offset after the handle."""
    offset, at = read_varint(content, at)
    size, at = read_varint(content, at)
    return (offset, size), at


def _parse_header(message: bytes) -> tuple[int, bool]:
    """Parses a BundleHeaderProto: number of data files, and whether tensors are big-endian."""
    fields = parse_message(message)
    needed = last_value(parse_message(last_value(fields, 3, b"")), 2, 0)
    if needed > _VERSION:
        raise _Unsupported(
            f"needs a reader of version {needed}, but this one has version {_VERSION}: save it with an older TensorFlow"
        )
    return last_value(fields, 1, 0), last_value(fields, 2, 0) == _BIG_ENDIAN


def _parse_entry(message: bytes) -> Entry:
    """Parses a BundleEntryProto. Zeros are not stored."""
    fields = parse_message(message)
    # TensorShapeProto: each field 2 is a dimension, and its field 1 is the size.
    dims = map(parse_message, values(parse_message(last_value(fields, 2, b"")), 2, bytes))
    return Entry(
        dtype=last_value(fields, 1, 0),
        shape=tuple(last_value(dim, 1, 0) for dim in dims),
        shard=last_value(fields, 3, 0),
        offset=last_value(fields, 4, 0),
        size=last_value(fields, 5, 0),
        checksum=int.from_bytes(last_value(fields, 6, b""), "little"),
        partitioned=7 in fields,
    )
