"""Reads TensorFlow's checkpoints (tensor bundles, "V2") without TensorFlow, verifying every checksum on the way.

A checkpoint PREFIX is ``PREFIX.index``, a sorted table from names to where their tensors lie, and the data files
``PREFIX.data-00000-of-00001`` and so on, which hold the raw bytes. The formats: tensorflow/core/util/tensor_bundle and
tensorflow/core/protobuf/tensor_bundle.proto; the table is LevelDB's (its doc/table_format.md); the values in it are
protocol buffers.
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
"""TensorFlow's numbers (framework/types.proto) of the types that are read."""

_FOOTER = 48
_MAGIC = 0xDB4775248B80FB57
_TRAILER = 5  # after each block: its compression, one byte, and its checksum
_VERSION = 1  # of the bundle format that this reads
_NO_COMPRESSION = 0
_BIG_ENDIAN = 1
_MASK_DELTA = 0xA282EAD8  # added to a stored checksum


class _Damaged(Exception):
    """An error in a file; the caller adds its name."""


class _Unsupported(_Damaged):
    """The file may be whole, but is of a kind that is not read; the text says what it is, and the fix."""


@dataclass(frozen=True)
class Entry:
    """The entry of a tensor in the index.

    Attributes:
        dtype: TensorFlow's number of its type.
        shape: its dimensions.
        shard: number of the data file that holds it.
        offset: where in that file, in bytes.
        size: its bytes.
        checksum: masked CRC-32C of these bytes.
        partitioned: whether it is stored in several parts, each with its own entry.
    """

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    partitioned: bool


class Bundle:
    """A checkpoint, opened: the index is read and verified, tensors are read when asked for.

    Attributes:
        prefix: the checkpoint's path, without ``.index``.
        entries: by name, sorted; parts of partitioned tensors are left out.
    """

    def __init__(self, prefix: Path) -> None:
        """Reads the index.

        Raises:
            UserError: there is none, it is damaged, or it is of a kind that is not read.
        """
        self.prefix = prefix
        self._index = Path(f"{prefix}.index")
        if not self._index.is_file():
            if prefix.is_file():
                raise UserError(
                    f"{prefix} is a checkpoint in TensorFlow's old format (V1), which is not read: restore it and save "
                    "it again in TensorFlow, whose Saver writes the newer one"
                )
            raise UserError(f"{self._index} does not exist: copy it from where the checkpoint came from")
        try:
            table = dict(_read_table(require(_read(self._index), str(self._index))))
            if b"" not in table:
                raise _Damaged("no header")
            self._shards, self._big_endian = _parse_header(table.pop(b""))
            # Keys that start with a zero byte are not names but parts of partitioned tensors.
            parsed = {key.decode(): _parse_entry(value) for key, value in table.items() if key[0]}
        except _Unsupported as fault:
            raise UserError(f"{self._index} {fault}") from None
        except (_Damaged, MalformedMessage, UnicodeDecodeError) as fault:
            _fail(self._index, str(fault))
        self.entries: dict[str, Entry] = parsed

    def read(self, name: str) -> np.ndarray:
        """A tensor, verified, of the type and shape it was stored in.

        Raises:
            UserError: the data file is missing, cut short or damaged, or the tensor is of a kind that is not read.
        """
        entry = self.entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or entry.partitioned:
            reason = "is stored in parts" if entry.partitioned else f"has TensorFlow's type number {entry.dtype}"
            raise UserError(
                f"{self._index}: {name} {reason}, which is not read: store it whole, as one of float32, "
                "float64, float16, bfloat16, int32, int64"
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
    raise UserError(f"{file} is damaged ({fault}): copy it again from where the checkpoint came from") from None


def _read(file: Path, offset: int = 0, size: int | None = None) -> np.ndarray | None:
    """Bytes of a file, to its end where no size is given; None where it ends before."""
    require_content(file)
    try:
        if offset + (size or 0) > file.stat().st_size:
            return None
        return np.fromfile(file, np.uint8, -1 if size is None else size, offset=offset)
    except FileNotFoundError:
        raise UserError(f"{file} does not exist: copy it from where the checkpoint came from") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): fix its permissions or copy it again") from None


def _masked_crc32c(content: bytes) -> int:
    """The CRC-32C of bytes as TensorFlow stores it: rotated and shifted, since files may hold checksums of checksums.

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
    """Keys and values of a table in order: footer -> index block -> data blocks."""
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
    """Keys and values of one block, given its offset and size. A key is stored as what differs from the one before."""
    begin, end = handle[0], sum(handle)
    if end + _TRAILER > len(content) - _FOOTER:
        raise _Damaged("it is shorter than it says")
    if _masked_crc32c(content[begin : end + 1]) != int.from_bytes(content[end + 1 : end + _TRAILER], "little"):
        raise _Damaged("a checksum is wrong")
    if content[end] != _NO_COMPRESSION:
        raise _Unsupported("is compressed, which is not read: let TensorFlow's Saver write it, which does not compress")
    # The block ends with a list of places for binary search, and its length.
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
    """A block's (offset, size), and where the next thing begins."""
    offset, at = read_varint(content, at)
    size, at = read_varint(content, at)
    return (offset, size), at


def _parse_header(message: bytes) -> tuple[int, bool]:
    """BundleHeaderProto: number of data files, and whether the tensors' bytes are big-endian."""
    fields = parse_message(message)
    needed = last_value(parse_message(last_value(fields, 3, b"")), 2, 0)
    if needed > _VERSION:
        raise _Unsupported(
            f"needs a reader of version {needed}, this is one of {_VERSION}: save it with an older TensorFlow"
        )
    return last_value(fields, 1, 0), last_value(fields, 2, 0) == _BIG_ENDIAN


def _parse_entry(message: bytes) -> Entry:
    """BundleEntryProto. Numbers that are 0 are not stored."""
    fields = parse_message(message)
    # TensorShapeProto: field 2, repeated, is a dimension, whose field 1 is its size.
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
