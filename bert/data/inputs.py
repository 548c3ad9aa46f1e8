"""Checks the inputs of `Pretrained`, so that each input has one answer or raises a UserError."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any

import numpy as np

from bert.errors import UserError, shorten, without_surrogates

Text = str | tuple[str, str]

TEXT_OR_PAIR = "a text or a pair of texts is needed: pass a string or a tuple of two strings"

EXPECTED_TEXTS = {1: "a single text: pass a string", 2: "a pair of texts: pass a list of tuples of two strings"}
"""Number of texts per input -> the expected input, and the fix."""

shown = shorten


def as_list(inputs: Any) -> list[Any]:
    """Returns the inputs as a list; a string is one input. Raises UserError for other types, such as sets."""
    if isinstance(inputs, str):
        return [inputs]
    if hasattr(inputs, "columns"):  # list(frame) would be the names of its columns
        raise UserError("the inputs are a data frame: pass one of its columns")
    if isinstance(inputs, (bytes, bytearray, Mapping, Set)):
        raise UserError(f"the inputs are {shown(inputs)}: pass a string or a list")
    try:
        return list(inputs)
    except TypeError:  # not iterable
        raise UserError(f"the inputs are {shown(inputs)}: pass a string or a list") from None


def as_texts(value: Any, index: int, expected: str, counts: Collection[int] = (1,)) -> tuple[str, ...]:
    """Returns the texts of one input: a string, or a tuple, list or array of strings.

    Args:
        expected: end of the error message: the expected input, and the fix.

    Raises:
        UserError: another number of texts, or values that are not strings.
    """
    texts = value.tolist() if isinstance(value, np.ndarray) else value
    texts = [texts] if isinstance(texts, str) else texts
    is_list = isinstance(texts, (list, tuple))
    if not is_list or len(texts) not in counts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"input {index} is {shown(value)}, but {expected}")
    return tuple(without_surrogates(text) for text in texts)


def as_text_or_pair(value: Any, index: int, expected: str = TEXT_OR_PAIR, counts: Collection[int] = (1, 2)) -> Text:
    """Returns one input as a text or a pair of texts, as ``counts`` allows. Raises UserError."""
    texts = as_texts(value, index, expected, counts)
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def as_filled_texts(name: str, value: Any) -> list[Text]:
    """Returns texts or pairs of texts. Raises UserError for an empty text, which the message calls ``name``."""
    texts = [as_text_or_pair(text, index) for index, text in enumerate(as_list(value), 1)]
    for index, text in enumerate(texts, 1):
        if not "".join(text).strip():
            raise UserError(f"{name} {index} is empty: write it or remove it")
    return texts


def check_count(name: str, value: Any) -> None:
    """Raises UserError for an argument that is not an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise UserError(f"{name} is {shown(value)}: pass a whole number of at least 1")
