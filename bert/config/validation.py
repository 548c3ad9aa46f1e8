"""What the checks of all sections share: numbers out of range are one sentence."""

from __future__ import annotations

import typing
from typing import Any

from bert.errors import UserError
from bert.files import local_path

MAX_LENGTH = 2**16 - 1
"""Tokens of a row: its places have 16 bits where masks are drawn (`bert.data.pretraining.masking`)."""


PATHS = (
    "output_dir", "init", "architecture_from", "tokenizer.path", "data.dir", "data.train", "data.dev", "data.test",
    "data.eval", "data.cache_dir",
)  # fmt: skip
"""Options that take a path, of pretraining and of fine-tuning."""


def check_choices(section: str, config: object) -> None:
    """Raises UserError for the first field of a dataclass whose value is none of those that its Literal type lists."""
    for name, hint in typing.get_type_hints(type(config)).items():
        choices, value = typing.get_args(hint), getattr(config, name)
        if typing.get_origin(hint) is typing.Literal and value not in choices:
            raise UserError(f"{section}{name} is {value!r}: use one of {', '.join(choices)}")


def check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # so that NaN fails too
        raise UserError(f"{name} is {value}: it must be at least {least}")


def check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"{name} is {value}: it must be at least 0 and below 1")


def check_seed(name: str, value: int) -> None:
    if not 0 <= value < 2**32:
        raise UserError(f"{name} is {value}: it must be at least 0 and below 2**32")


def at_most(name: str, value: float, most: float) -> None:
    if not value <= most:
        raise UserError(f"{name} is {value}: it must be at most {most:,}")


def local_paths(config: object) -> None:
    """Raises UserError for the first of PATHS that holds a path with a scheme, alone or in a list."""
    for key in PATHS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        for path in value if isinstance(value, list) else [value]:
            if path is not None:
                local_path(path, key)
