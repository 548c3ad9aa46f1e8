"""JSON from anywhere as values that tokenizers and UTF-8 files take."""

from __future__ import annotations

import json
import re
from typing import Any

from bert.files import load_json

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """`json.loads` with ``?`` for each half of a surrogate pair, in keys as well.

    Raises:
        ValueError: not JSON (a `json.JSONDecodeError`), or a number or a nesting beyond Python's limits.
    """
    value = load_json(text)
    try:
        if _SURROGATE.search(text):  # also of whole pairs, which stay
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    return value
