"""What the checks of all sections share: numbers out of range are one sentence."""

from __future__ import annotations

from bert.values import UserError


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # so that NaN fails too
        raise UserError(f"{name} is {value}: it must be at least {least}")


def fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"{name} is {value}: it must be at least 0 and below 1")


def seed_in_range(name: str, value: int) -> None:
    if not 0 <= value < 2**32:
        raise UserError(f"{name} is {value}: it must be at least 0 and below 2**32")
