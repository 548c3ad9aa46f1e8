"""Devices by name."""

import pytest

from bert.errors import UserError
from bert.parallel.devices import GIB, DeviceSpec, parse_device_spec


def test_a_kind_a_number_of_them_or_a_slice() -> None:
    assert parse_device_spec("h100") == DeviceSpec("h100", None, int(0.75 * 79 * GIB))
    assert parse_device_spec("H100:8").count == 8
    assert parse_device_spec("v5e:2x4") == DeviceSpec("v5e", 8, int(15.75 * GIB))
    assert parse_device_spec("v4:2x2x4").count == 16
    assert parse_device_spec("v5e:2x4").name == "TPU v5e"
    assert parse_device_spec("rtx4090").name == "RTX4090"


def test_whether_they_have_cudnns_attention() -> None:
    assert [parse_device_spec(kind).cudnn_head for kind in ("v5e:2x4", "t4", "a100", "h100:8")] == [0, 0, 128, 256]


def test_what_is_no_device_is_told_what_is() -> None:
    with pytest.raises(UserError, match=r"--device h900 is no kind that is known: choose one of v4, v5e, .*h100, h200"):
        parse_device_spec("h900")
    for text in ("h100:", "h100:0", "v5e:2x", "v5e:2x2x2x2"):
        with pytest.raises(UserError, match=r"write (h100|v5e):8 for eight of them, or a slice such as v5e:2x4"):
            parse_device_spec(text)
