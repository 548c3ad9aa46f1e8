"""The wire format of protocol buffers, by the examples of its documentation."""

import pytest

from bert.protobuf import MalformedMessage, last_value, parse_message, read_varint, values


def test_the_documented_examples() -> None:
    assert parse_message(b"\x08\x96\x01") == {1: [150]}
    assert parse_message(b"\x12\x07testing") == {2: [b"testing"]}
    assert parse_message(b"\x1a\x03\x08\x96\x01") == {3: [b"\x08\x96\x01"]}
    assert parse_message(b"\x25" + bytes(4) + b"\x31" + bytes(8)) == {4: [bytes(4)], 6: [bytes(8)]}
    assert parse_message(b"") == {}


def test_the_last_value_of_a_repeated_field_counts() -> None:
    fields = parse_message(b"\x08\x01\x08\x02")
    assert values(fields, 1, int) == [1, 2]
    assert (last_value(fields, 1, 0), last_value(fields, 2, 7), last_value(fields, 3, b"none")) == (2, 7, b"none")
    with pytest.raises(MalformedMessage):
        last_value(fields, 1, b"")


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**32, 2**64 - 1])
def test_integers(value: int) -> None:
    groups = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    data = bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])
    assert read_varint(b"x" + data, 1) == (value, 1 + len(data))


@pytest.mark.parametrize(
    "data",
    [b"\x08", b"\x08\x80", b"\x08\x80\x00", b"\x08" + b"\xff" * 9 + b"\x02", b"\x12\x05ab", b"\x0b", b"\x25\x00"],
    ids=["no value", "cut short", "not shortest", "over 64 bits", "bytes cut short", "group", "fixed cut short"],
)
def test_malformed_messages(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parse_message(data)
