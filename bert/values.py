"""What every part of the configuration needs: the mistake, the whole number as people write it, what is known."""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value")


class UserError(Exception):
    """A mistake the user can mend. Its text is one sentence: what, where, and the mend. Commands exit with 2."""


class Count(int):
    """A whole number that may be written ``1e6`` or ``1_000_000``."""


def known(value: Value | None, name: str) -> Value:
    """A value that is None only until it is checked, resolved or read. Raises ValueError where that was left out."""
    if value is None:
        raise ValueError(f"{name} is not known yet")
    return value
