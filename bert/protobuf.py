"""Decodes messages in the protocol buffer wire format.

The package does not depend on SentencePiece and TensorFlow, which have the schemas of the files read here. Format:
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import collections
from typing import TypeVar

Fields = dict[int, list[int | bytes]]
"""Maps field numbers to the field's values in order: integers as int, everything else as bytes."""

Value = TypeVar("Value", int, bytes)

_FIXED_SIZES = {1: 8, 5: 4}
"""Maps wire types of fixed size to their size in bytes."""


class MalformedMessage(ValueError):
    """The bytes are not a valid message."""


def parse_message(data: bytes) -> Fields:
    """Parses the fields of a message. Raises MalformedMessage."""
    fields: Fields = collections.defaultdict(list)
    offset = 0
    while offset < len(data):
        key, offset = read_varint(data, offset)
        field, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, offset = read_varint(data, offset)
            fields[field].append(value)
            continue
        if wire_type == 2:
            size, offset = read_varint(data, offset)
        elif wire_type in _FIXED_SIZES:
            size = _FIXED_SIZES[wire_type]
        else:
            raise MalformedMessage(f"a field has the unknown wire type {wire_type}")
        if size > len(data) - offset:
            raise MalformedMessage("a field is cut short")
        fields[field].append(data[offset : offset + size])
        offset += size
    return dict(fields)


def read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Reads an integer (seven bits per byte, lowest bits first). Returns it and the offset after it.

    Raises:
        MalformedMessage: the integer is truncated, has more than 64 bits, or is not in its shortest form.
    """
    if offset < len(data) and data[offset] < 0x80:  # fast path for most integers
        return data[offset], offset + 1
    value = 0
    for index, octet in enumerate(data[offset : offset + 10]):
        value |= (octet & 0x7F) << 7 * index
        if octet < 0x80:
            if (index and not octet) or value >= 1 << 64:
                break
            return value, offset + index + 1
    raise MalformedMessage("an integer is malformed")


def values(fields: Fields, number: int, kind: type[Value]) -> list[Value]:
    """Returns all values of a field; [] if it is missing. Raises MalformedMessage if a value has another type."""
    found = fields.get(number, [])
    checked = [value for value in found if isinstance(value, kind)]
    if len(checked) < len(found):
        raise MalformedMessage(f"field {number} has another type")
    return checked


def last_value(fields: Fields, number: int, default: Value) -> Value:
    """Returns the last value of a field, which takes precedence, or the default."""
    return next(reversed(values(fields, number, type(default))), default)
