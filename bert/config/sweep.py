"""Search space of a sweep: keys with lists or ranges of values. Imports no JAX."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from bert.config.validation import (
    RENAMED,
    ConfigField,
    current_key,
    current_value,
    key_of,
    rename,
    sibling_keys,
    unknown_key,
)
from bert.config.yaml_io import NULLS, UserValue, convert_value, parse_dict, parse_items
from bert.errors import UserError

RANGE = re.compile(r"(.+?)\.\.(.+)")

NOT_SWEPT = {
    "output_dir": "each trial has a separate folder in it",
    "task": "scores of different tasks cannot be compared",
    "num_seeds": "all trials have the same number of seeds",
    "data.metrics": "the first one compares all trials",
    **dict.fromkeys(
        (
            *("data.sample_seed", "data.dev_fraction", "data.stratify_dev", "data.max_dev_samples", "data.dev"),
            *("data.eval", "data.eval_fraction", "data.seed"),
        ),
        "trials are scored on the same rows",
    ),
}
"""Keys that cannot be swept, with the reason."""

MAX_NAME_LENGTH = 150
"""Maximum length of a trial's name before it is shortened."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high`` on a logarithmic scale; whole numbers if the bounds are."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{value_text(self.low)}..{value_text(self.high)}"


Choices = list[Any] | Range
Space = dict[str, Choices]
"""Converted values by dotted key."""


def parse_space_options(texts: Sequence[str], keys: dict[str, ConfigField], source: str) -> Space:
    """Parses options ``KEY=V1,V2,...`` and ``KEY=LOW..HIGH``; ``source`` names them in messages.

    Raises:
        UserError: a key, or one of its values, cannot be swept.
    """
    space: Space = {}
    for text in texts:
        name, equals, values = text.partition("=")
        items = parse_items(values)
        if not equals or items is None:
            raise UserError(f"{source} {text} is no list of values: use KEY=V1,V2,...")
        name, items = rename(name, items, source, keys)
        if name in space:
            raise UserError(f"{source} has {name} twice: remove one of the two")
        space[name] = _choices(name, items, keys, source)
    return space


def parse_space(values: Mapping[str, Any], keys: dict[str, ConfigField], source: str) -> Space:
    """Parses a dictionary with lists of values, or ranges such as ``"1e-5..1e-4"``, by dotted key.

    Raises:
        UserError: a key, or one of its values, cannot be swept.
    """
    if not isinstance(values, Mapping) or not values:
        raise UserError(f"{source} is {values!r:.60}: pass a dictionary of keys and their values")
    space: Space = {}
    for name, choices in values.items():
        if isinstance(choices, str) and RANGE.fullmatch(choices):
            choices = [choices]
        if isinstance(choices, str | Mapping) or not isinstance(choices, Iterable):
            raise UserError(
                f"{source}: {name} is {choices!r:.60}: pass a list of values, or a range such as '1e-5..1e-4'"
            )
        items = [entry.value for value in choices for entry in parse_dict({name: value}, source, keys).values()]
        key = current_key(name, keys)
        if key in space:
            raise UserError(f"{source} has {key} twice: remove one of the two")
        space[key] = _choices(key, items, keys, source)
    return space


def _choices(name: str, items: Sequence[Any], keys: dict[str, ConfigField], source: str) -> Choices:
    """Converts the values of a key to its type."""
    field = key_of(name, keys)
    if field is None:
        raise UserError(f"{source}: {unknown_key(name, sibling_keys(name, keys))}")
    if name in NOT_SWEPT:
        raise UserError(f"{source}: {name} cannot be swept, since {NOT_SWEPT[name]}: remove it")
    if not items:
        raise UserError(f"{source}: {name} has no values: use {name}=V1,V2,...")
    if {int, float} & set(field.members) and isinstance(items[0], str) and (bounds := RANGE.fullmatch(items[0])):
        if len(items) > 1:
            raise UserError(f"{source}: {name} has a range and other values: use one range, or values alone")
        low, high = (_convert(name, text, field, source) for text in bounds.groups())
        if not 0 < low < high < float("inf"):
            raise UserError(f"{source}: {name}={items[0]}: use bounds above 0, the lower one first")
        return Range(low, high)
    values = [_convert(name, item, field, source) for item in items]
    for index, value in enumerate(values):
        if value in values[:index]:
            raise UserError(f"{source}: {name} has {value_text(value)} twice: remove one of the two")
    return values


def _convert(name: str, item: Any, field: ConfigField, source: str) -> Any:
    """Converts a value from the user's text."""
    is_item = isinstance(item, str) and field.takes_list and str not in field.members and item not in NULLS
    return convert_value(UserValue([item] if is_item else item, source, None, f"{name}={item}"), field)


def grid(space: Mapping[str, Choices]) -> Iterator[dict[str, Any]]:
    """Yields all combinations of the values; the last key changes fastest.

    Raises:
        UserError: a key has a range.
    """
    lists: list[list[Any]] = []
    for name, choices in space.items():
        if isinstance(choices, Range):
            raise UserError(f"{name} has the range {choices}, but no number of trials: set it, with --trials N")
        lists.append(choices)
    for values in itertools.product(*lists):
        yield dict(zip(space, values, strict=True))


def corners(space: Mapping[str, Choices]) -> list[dict[str, Any]]:
    """Returns two trials of a space with ranges: the first and the last value of every key."""
    ends = {
        name: (choices.low, choices.high) if isinstance(choices, Range) else (choices[0], choices[-1])
        for name, choices in space.items()
    }
    return [{name: pair[end] for name, pair in ends.items()} for end in (0, 1)]


def describe_space(space: Mapping[str, Choices]) -> dict[str, Any]:
    """Returns the space as JSON values."""
    return {name: str(choices) if isinstance(choices, Range) else choices for name, choices in space.items()}


def trial_name(values: Mapping[str, Any]) -> str:
    """Returns the folder name of a trial, such as ``learning_rate=2e-5,batch_size=16``.

    The name depends only on the values. Special characters are replaced and long names are shortened; such names
    end in a digest.
    """
    name = ",".join(
        f"{key}={value_text(value)}" for key, value in zip(short_names(values), values.values(), strict=True)
    )
    safe = re.sub(r"[^\w.+=,-]", "_", name)[:MAX_NAME_LENGTH]
    return name if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def earlier_trial_name(values: Mapping[str, Any]) -> str:
    """Returns the name of a trial with the keys and values of earlier versions (`RENAMED`)."""
    before = {renaming.key: (name, renaming.values) for name, renaming in RENAMED.items()}
    earlier: dict[str, Any] = {}
    for key, value in values.items():
        name, current = before.get(key, (key, {}))
        earlier[name] = next((old for old, new in current.items() if new == value), value)
    return trial_name(earlier)


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values, or lists of values, of an earlier version's sweep.json under their current names."""
    return {
        RENAMED[name].key if name in RENAMED else name: current_value(name, value) for name, value in values.items()
    }


def short_names(keys: Iterable[str]) -> list[str]:
    """Returns the last part of each dotted key, or the whole key if that is ambiguous."""
    keys = list(keys)
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)]


def value_text(value: Any) -> str:
    """Formats a value on one line: 2e-5, true, null, a list as 32+64."""
    if isinstance(value, list):
        return "+".join(map(value_text, value))
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        return f"{Decimal(repr(value)):e}"
    return value if isinstance(value, str) else json.dumps(value)


def option_text(value: Any) -> str:
    """Formats a value as an option of the command line."""
    return json.dumps(value) if isinstance(value, list) else value_text(value)
