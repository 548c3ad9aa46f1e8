"""TensorFlow's checkpoint format, read from files that a plain writer of the tests has made.

That TensorFlow itself writes the same is shown in tests/real/test_google_parity.py.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

from bert.errors import UserError
from bert.interchange.readers.tf_checkpoint import Bundle
from tests.interchange.bundle_writer import BFLOAT16, field, varint, write_bundle


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "layer_0/bias": random.normal(size=5).astype(np.float32),
        "layer_0/kernel": random.normal(size=(3, 4)).astype(np.float32),
        "layer_10/half": random.normal(size=(2, 3)).astype(np.float16),
        "layer_10/brain": random.normal(size=(7,)).astype(BFLOAT16),
        "layer_10/empty": np.zeros((0, 4), np.float32),
        "ids": random.integers(-(2**31), 2**31, (2, 2), np.int32),
        "step": np.array(-(2**40), np.int64),
    }


def read_all(prefix: Path) -> dict[str, np.ndarray]:
    bundle = Bundle(prefix)
    return {name: bundle.read(name) for name in bundle.entries}


def error_of(prefix: Path) -> str:
    """The one sentence that reading everything ends with."""
    with pytest.raises(UserError) as caught:
        read_all(prefix)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_checksum_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(tmp_path / "model.ckpt", tensors())
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    assert "pip install google-crc32c" in error_of(tmp_path / "model.ckpt")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("pairs_a_block", [1, 3, 100])
def test_tensors_come_back_as_they_were(tmp_path: Path, shards: int, pairs_a_block: int) -> None:
    expected = tensors()
    write_bundle(tmp_path / "model.ckpt", expected, shards=shards, pairs_a_block=pairs_a_block)
    result = read_all(tmp_path / "model.ckpt")
    assert list(result) == sorted(expected)
    for name, array in expected.items():
        assert result[name].dtype == array.dtype
        np.testing.assert_array_equal(result[name], array)


def test_tensors_written_on_a_big_endian_machine(tmp_path: Path) -> None:
    write_bundle(tmp_path / "model.ckpt", tensors(), big_endian=True)
    for name, array in read_all(tmp_path / "model.ckpt").items():
        np.testing.assert_array_equal(array, tensors()[name])


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_no_flipped_byte_of_the_index_goes_unseen(tmp_path: Path, flip: int) -> None:
    """Data blocks, meta and index block, their trailers, the footer with its padding: every byte."""
    prefix = tmp_path / "model.ckpt"
    write_bundle(prefix, tensors())
    file = tmp_path / "model.ckpt.index"
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        assert str(file) in error_of(prefix), place


def test_no_flipped_byte_of_the_data_goes_unseen(tmp_path: Path) -> None:
    prefix = tmp_path / "model.ckpt"
    write_bundle(prefix, tensors(), shards=2)
    for file in tmp_path.glob("*.data-*"):
        whole = file.read_bytes()
        for place in range(len(whole)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            message = error_of(prefix)
            assert str(file) in message and "checksum" in message
        file.write_bytes(whole)
    read_all(prefix)


def test_a_file_cut_short_is_refused_at_every_length(tmp_path: Path) -> None:
    prefix = tmp_path / "model.ckpt"
    write_bundle(prefix, tensors())
    for file in tmp_path.iterdir():
        whole = file.read_bytes()
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            assert str(file) in error_of(prefix)
        file.write_bytes(whole)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    prefix = tmp_path / "model.ckpt"
    write_bundle(prefix, tensors(), shards=3)
    (tmp_path / "model.ckpt.data-00001-of-00003").unlink()
    assert "model.ckpt.data-00001-of-00003 does not exist" in error_of(prefix)
    (tmp_path / "model.ckpt.index").unlink()
    assert "model.ckpt.index does not exist" in error_of(prefix)


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    prefix = tmp_path / "model.ckpt"
    prefix.write_bytes(b"a table of tensor slices")
    assert "old format (V1)" in error_of(prefix)
    write_bundle(prefix, tensors(), compression=1)
    assert "model.ckpt.index is compressed" in error_of(prefix)
    write_bundle(prefix, tensors(), min_consumer=2)
    assert "needs a reader of version 2" in error_of(prefix)
    write_bundle(prefix, {"flags": np.ones(3, bool)})
    assert "flags has TensorFlow's type number 10" in error_of(prefix)
    write_bundle(prefix, tensors(), partitioned=("layer_0/kernel",), more={b"\0\xff\1part": b""})
    assert "layer_0/kernel is stored in parts" in error_of(prefix)


@pytest.mark.parametrize(
    "value",
    [
        field(1, 1) + field(2, b"") + field(5, 2**62),  # larger than its shape
        field(1, 1) + field(2, field(2, field(1, 2**40))) + field(4, 2**63 - 1) + field(5, 2**42),  # beyond the file
        field(1, 1) + field(3, 7) + field(5, 4),  # in a data file there is none of
        field(1, b"text"),
        field(2, 5),
        field(2, field(2, 5)),
        varint(1 << 3 | 3),
        varint(6 << 3 | 5) + b"12",
        b"\xff" * 11,
    ],
    ids=[
        "larger than its shape",
        "beyond the file",
        "no such data file",
        "type that is text",
        "shape that is a number",
        "dimension that is a number",
        "unknown wire type",
        "cut short",
        "varint without an end",
    ],
)
def test_an_entry_that_makes_no_sense_is_refused(tmp_path: Path, value: bytes) -> None:
    """Checksums do not help against a file that was written so."""
    write_bundle(tmp_path / "model.ckpt", {}, more={b"weights": value})
    assert "is damaged" in error_of(tmp_path / "model.ckpt")


def test_an_index_that_was_forged_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checksums pass, and any byte may have any value: the reader returns an array or raises a UserError."""

    class Right:
        def __ne__(self, other: object) -> bool:
            return False

    monkeypatch.setattr("bert.interchange.readers.tf_checkpoint._masked_crc32c", lambda content: Right())
    prefix = tmp_path / "model.ckpt"
    write_bundle(prefix, tensors())
    file = tmp_path / "model.ckpt.index"
    whole = file.read_bytes()
    read_all(prefix)
    random, refused = np.random.default_rng(0), 0
    for place, octet in enumerate(random.integers(0, 256, len(whole), np.uint8)):
        file.write_bytes(whole[:place] + octet.tobytes() + whole[place + 1 :])
        try:
            read_all(prefix)
        except UserError:
            refused += 1
    assert refused > len(whole) // 3


def test_an_index_without_a_header_or_with_names_that_are_none(tmp_path: Path) -> None:
    prefix = tmp_path / "model.ckpt"
    write_bundle(prefix, {}, more={b"": b"", b"\xff\xfe": b""})
    assert "model.ckpt.index is damaged" in error_of(prefix)


@pytest.mark.real
@pytest.mark.parametrize("shards", [1, 3])
def test_tensorflow_reads_what_these_tests_write(tmp_path: Path, shards: int) -> None:
    """Else the other tests would show no more than that two readings of the format agree."""
    tensorflow = pytest.importorskip("tensorflow", reason="needs the extra `tf`")
    write_bundle(tmp_path / "model.ckpt", tensors(), shards=shards)
    reader = tensorflow.train.load_checkpoint(str(tmp_path / "model.ckpt"))
    assert sorted(reader.get_variable_to_shape_map()) == sorted(tensors())
    for name, array in tensors().items():
        np.testing.assert_array_equal(reader.get_tensor(name), array)
