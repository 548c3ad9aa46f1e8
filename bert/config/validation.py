"""Checks that all sections share, and the keys and defaults of earlier versions."""

from __future__ import annotations

import math
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from bert.errors import UserError
from bert.files import local_path
from bert.remote import readable_path, writable_path

MAX_LENGTH = 2**16 - 1
"""Maximum number of tokens per row: masks have 16-bit positions (`bert.data.pretraining.masking`)."""


PATHS = (
    "output_dir", "init", "architecture_from", "transfer", "tokenizer.path", "target_tokenizer.path", "data.dir",
    "data.train", "data.dev", "data.test", "data.eval", "data.cache_dir", "distillation.teacher",
)  # fmt: skip
"""Keys with a path, in pretraining and fine-tuning."""

LOCAL = ("transfer",)
"""Paths that cannot be URLs."""

WRITTEN = ("output_dir", "data.cache_dir")
"""Paths that are written to; URLs must name a writable store."""


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


@dataclass(frozen=True)
class Range:
    """Allowed values of a number, as metadata of its type: ``Annotated[int, Range(least=1)]``."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            _is_finite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        limits = {"at least": self.least, "above": self.above, "below": self.below, "at most": self.most}
        return " and ".join(f"{words} {limit:,}" for words, limit in limits.items() if limit is not None) or "finite"


Positive = Annotated[int, Range(least=1)]
NonNegative = Annotated[int, Range(least=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
Fraction = Annotated[float, Range(least=0, below=1)]
InnerFraction = Annotated[float, Range(above=0, below=1)]
Seed = Annotated[int, Range(least=0, below=2**32)]


def check_fields(prefix: str, config: object) -> None:
    """Raises UserError for the first field of a dataclass with a value outside of its Literal or Range.

    Args:
        prefix: prefix of the fields' names in messages, such as ``training.``.
        config: the dataclass.
    """
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        takes_null = type(None) in typing.get_args(hint)
        has_lists = any(typing.get_origin(member) is list for member in (hint, *typing.get_args(hint)))
        values = value if has_lists and isinstance(value, list) else [] if value is None and takes_null else [value]
        if (choices := choices_of(hint)) and (wrong := [text for text in values if text not in choices]):
            raise UserError(f"{prefix}{name} is {wrong[0]!r}: use one of {', '.join(choices)}")
        for limits in _ranges(hint):
            if outside := [number for number in values if number is not None and number not in limits]:
                raise UserError(f"{prefix}{name} is {outside[0]}: it must be {limits}")


def choices_of(hint: Any) -> tuple[str, ...]:
    """Returns the texts of a Literal (alone, in a list or with None); () for other types."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return choices_of(members[0]) if len(members) == 1 else ()


def _ranges(hint: Any) -> Iterator[Range]:
    """Yields the ranges in a type, including its unions and lists."""
    yield from (item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Range))
    for member in typing.get_args(hint):
        yield from _ranges(member)


class Renaming(NamedTuple):
    """Current name of a key, and current names of its renamed values."""

    key: str
    values: Mapping[str, str] = {}


RENAMED = {
    "data.objective": Renaming("data.input_format"),
    "data.prediction": Renaming(
        "training.objective", {"masked": "mlm", "replaced": "rtd", "permuted": "plm", "next": "clm"}
    ),
}
"""Renamed keys of earlier versions. They are accepted in files, runs, dictionaries and on the command line."""

EARLIER_DEFAULTS: dict[str, Any] = {"strip_accents": None, "max_predictions_per_sequence": 20}
"""Defaults of earlier versions by field name, as recorded in config.yaml of older runs."""


def fields_that_differ(config: object) -> Iterator[str]:
    """Yields the fields of a dataclass whose value differs from the defaults of this and earlier versions."""
    for name, default in vars(type(config)()).items():
        value = getattr(config, name)
        if value != default and not (name in EARLIER_DEFAULTS and value == EARLIER_DEFAULTS[name]):
            yield name


def check_unused(prefix: str, config: object, reason: str, names: Collection[str] | None = None) -> None:
    """Raises UserError, with ``reason`` at its end, for the first field that differs from its default.

    Args:
        names: the fields to check; None for all of them.
    """
    for name in fields_that_differ(config):
        if names is None or name in names:
            raise UserError(f"{prefix}{name} is {getattr(config, name)}, {reason}")


def check_paths(config: object) -> None:
    """Raises UserError for the first key of PATHS that contains a URL that is not supported there."""
    for key in PATHS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        for path in value if isinstance(value, list) else [value]:
            if path is not None:
                check = local_path if key in LOCAL else writable_path if key in WRITTEN else readable_path
                check(path, key)
