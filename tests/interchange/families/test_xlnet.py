"""XLNet's memory in config.json."""

from typing import Any

import pytest

from bert.errors import UserError
from bert.interchange.families.xlnet import XLNET


@pytest.mark.parametrize(("value", "expected"), [(None, None), (0, None), (384, 384)])
def test_the_memory_is_read(value: int | None, expected: int | None) -> None:
    assert XLNET.read_config({"mem_len": value})["memory_length"] == expected


@pytest.mark.parametrize("value", ["384", 1.5, True])
def test_another_value_is_rejected(value: Any) -> None:
    with pytest.raises(UserError, match=f"mem_len is {value!r}: set it to a whole number, or to null"):
        XLNET.read_config({"mem_len": value})
