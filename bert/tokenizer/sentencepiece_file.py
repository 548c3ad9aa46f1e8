"""The content of a SentencePiece file (Kudo and Richardson 2018), decoded without its library.

A file is a protocol buffer; the numbers of its fields are those of google/sentencepiece's sentencepiece_model.proto.
"""

from __future__ import annotations

import collections
import math
import struct
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from bert.errors import UserError

UNIGRAM = 1
MODELS = {UNIGRAM: "Unigram", 2: "BPE", 3: "word", 4: "character"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

Fields = dict[int, list[int | bytes]]
Value = TypeVar("Value", int, bytes)


class Piece(NamedTuple):
    """A token, its logarithmic probability and its kind, NORMAL and so on."""

    text: str
    score: float
    kind: int


class Content(NamedTuple):
    """A file.

    Attributes:
        pieces: in the order of their numbers.
        model: a key of MODELS.
        splits: no piece contains a space between words.
        suffix: the space behind a word is a part of it, not the one before it.
        byte_fallback: unknown characters become their bytes.
        charsmap: the character map; empty if there is none.
        rule: name of the map, such as nmt_nfkc.
        prefix: the first word has a space before it as well.
        trims: spaces at both ends, and all but one between words, are left out.
        escapes: spaces are marked.
    """

    pieces: list[Piece]
    model: int
    splits: int
    suffix: int
    byte_fallback: int
    charsmap: bytes
    rule: bytes
    prefix: int
    trims: int
    escapes: int


def parse_sentencepiece(data: bytes, file: Path) -> Content:
    """What a tokenizer needs of a file's content. Raises UserError if it is damaged or another file."""
    try:
        return _parse(data)
    except (ValueError, LookupError, struct.error):
        raise UserError(f"{file} is not a whole SentencePiece file: copy it again") from None


def _parse(data: bytes) -> Content:
    model = _fields(data)
    trainer, steps = (_fields(_values(model, number, bytes)[-1]) for number in (2, 3))  # the last parts of a file
    if charsmap := _last(steps, 2, b""):
        _require_whole_map(charsmap)
    return Content(
        pieces=[_piece(_fields(piece)) for piece in _values(model, 1, bytes)],
        model=_last(trainer, 3, UNIGRAM),
        splits=_last(trainer, 22, 1),
        suffix=_last(trainer, 24, 0),
        byte_fallback=_last(trainer, 35, 0),
        charsmap=charsmap,
        rule=_last(steps, 1, b""),
        prefix=_last(steps, 3, 1),
        trims=_last(steps, 4, 1),
        escapes=_last(steps, 5, 1),
    )


def _piece(fields: Fields) -> Piece:
    text, (score,) = _last(fields, 1, b"").decode(), struct.unpack("<f", _last(fields, 2, bytes(4)))
    if not text or not math.isfinite(score):
        raise ValueError("a piece without a text or a score")
    return Piece(text, score, _last(fields, 3, NORMAL))


def _require_whole_map(charsmap: bytes) -> None:
    """Raises ValueError if a lookup could leave the map: the size of a double array, its units of 32 bits, and texts.

    A unit has a label and the offset to those that follow it, and one that ends a key (bit 8) to the place of its text.
    """
    size = int.from_bytes(charsmap[:4], "little")
    units, texts = np.frombuffer(charsmap[4 : 4 + size], "<u4").astype(np.int64), charsmap[4 + size :]
    inner = units < 1 << 31
    following = (np.arange(len(units)) ^ (units >> 10 << ((units & 1 << 9) >> 6)))[inner]
    if not len(following) or (following | 0xFF).max() >= len(units):
        raise ValueError("a unit without followers")
    places = units[following[units[inner] & 1 << 8 != 0]] & (1 << 31) - 1
    texts.decode()
    if any(place >= len(texts) or texts[place] & 0xC0 == 0x80 for place in places.tolist()):
        raise ValueError("a key without a text")


def _fields(data: bytes) -> Fields:
    """The values of a message by field number, of the wire types 0 (integers), 1, 2 and 5 (bytes)."""
    found: Fields = collections.defaultdict(list)
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        if (wire := key & 7) == 0:
            value, place = _varint(data, place)
            found[key >> 3].append(value)
            continue
        size, place = _varint(data, place) if wire == 2 else ({1: 8, 5: 4}[wire], place)
        if size > len(data) - place:
            raise ValueError("a field beyond the end")
        found[key >> 3].append(data[place : place + size])
        place += size
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """The integer at a place, seven bits a byte from the lowest on, and the place behind it."""
    value = data[place]
    if value < 0x80:
        return value, place + 1
    value &= 0x7F
    for shift in range(7, 70, 7):
        place += 1
        value |= (data[place] & 0x7F) << shift
        if data[place] < 0x80:
            return value, place + 1
    raise ValueError("an integer of more than 64 bits")


def _values(fields: Fields, number: int, kind: type[Value]) -> list[Value]:
    values = [value for value in fields.get(number, []) if isinstance(value, kind)]
    if len(values) < len(fields.get(number, [])):
        raise ValueError("a field of another type")
    return values


def _last(fields: Fields, number: int, default: Value) -> Value:
    values = _values(fields, number, type(default))
    return values[-1] if values else default
