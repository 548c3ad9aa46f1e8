"""Combines the values of several files and the overrides: a later source replaces, or rescales, earlier values."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

from bert.config.yaml_io import NULLS, ConfigField, UserValue, convert_value

ALTERNATIVES = (
    ("training.steps", "training.epochs"),
    ("optimizer.warmup_steps", "optimizer.warmup_ratio"),
    ("phases.N.steps", "phases.N.share"),
)
"""Pairs of keys that set the same thing in two ways; N is the number of an item."""

BATCH, MICRO_BATCHES = "training.batch_size", "training.gradient_accumulation_steps"
PHASE_MICRO_BATCHES = re.compile(r"phases\.\d+\.gradient_accumulation_steps")
LENGTH, SHARE = "data.sequence_length", "data.masked_lm_prob"
PREDICTIONS = "data.max_predictions_per_sequence"
PHASE_PREDICTIONS = re.compile(r"phases\.\d+\.max_predictions_per_sequence")


def override(
    base: dict[str, UserValue], changes: dict[str, UserValue], keys: dict[str, ConfigField]
) -> dict[str, UserValue]:
    """The values of ``base`` with those of a later source, ``changes``.

    - The other key of `ALTERNATIVES` is removed from ``base``, and so are the items of a list that is replaced.
    - With another batch size, micro-batches keep their number of rows, or have fewer, in phases too.
    - With longer rows, or rows too short for the predictions, the predictions keep their share of the length.
    - With a larger share of masked tokens, the most predictions grow as it does, in phases too.
    """
    kept = _without_replaced(base, changes, keys)
    values = kept | changes

    def to_number(source: dict[str, UserValue], key: str) -> Any:
        return convert_value(source[key], keys[key]) if key in source else keys[key].default

    if BATCH in changes:
        for key in _micro_batch_keys(kept):
            count = int(convert_value(base[key], keys[MICRO_BATCHES]))
            if key not in changes and count > 1:
                rows = max(to_number(base, BATCH) // count, 1)
                values[key] = base[key]._replace(value=str(micro_batches(to_number(changes, BATCH), rows)))
    longer, more = Fraction(1), Fraction(1)
    if LENGTH in changes:
        length, before = to_number(changes, LENGTH), max(to_number(base, LENGTH), 1)
        if length > before or to_number(base, PREDICTIONS) >= length:
            longer = Fraction(length, before)
    if SHARE in changes and (share := Fraction(str(to_number(base, SHARE)))) > 0:
        more = max(Fraction(str(to_number(changes, SHARE))) / share, more)
    for key in _numbers_of_predictions(kept):
        factor = more * longer if key == PREDICTIONS else more
        if key not in changes and factor != 1:
            predictions = int(convert_value(base[key], keys[PREDICTIONS]))
            values[key] = base[key]._replace(value=str(math.ceil(predictions * factor)))
    return values


def _numbers_of_predictions(base: dict[str, UserValue]) -> list[str]:
    """The keys of ``base`` that say how many tokens of a row are predicted at most."""
    return [
        key
        for key, entry in base.items()
        if (key == PREDICTIONS or PHASE_PREDICTIONS.fullmatch(key)) and entry.value not in NULLS
    ]


def _micro_batch_keys(base: dict[str, UserValue]) -> list[str]:
    """The numbers of micro-batches in ``base`` that divide `BATCH`; a phase may have its own batch size."""
    given = [key for key, entry in base.items() if entry.value not in NULLS]
    phases = [key.removesuffix("gradient_accumulation_steps") for key in given if PHASE_MICRO_BATCHES.fullmatch(key)]
    of_phases = [f"{phase}gradient_accumulation_steps" for phase in phases if f"{phase}batch_size" not in given]
    return [*([MICRO_BATCHES] if MICRO_BATCHES in given else []), *of_phases]


def _without_replaced(
    base: dict[str, UserValue], changes: dict[str, UserValue], keys: dict[str, ConfigField]
) -> dict[str, UserValue]:
    """``base`` without the alternatives of the changed keys, and without the items of lists that change."""
    replaced = set()
    for key, entry in changes.items():
        match = re.search(r"\d+", key)
        general = re.sub(r"\d+", "N", key)
        for pair in ALTERNATIVES:
            if general in pair and entry.value not in NULLS:
                other = pair[1 - pair.index(general)]
                replaced.add(other.replace("N", match[0]) if match else other)
        if key in keys and keys[key].item is not None:  # the whole list
            replaced |= {item for item in base if item.startswith(f"{key}.")}
        section = key.partition(".")[0]
        if section in base and base[section].value in NULLS:  # items for a list that was null
            replaced.add(section)
    return {key: entry for key, entry in base.items() if key not in replaced}


def micro_batches(rows: int, most: int) -> int:
    """The least number of equal micro-batches of at most ``most`` rows."""
    return next((count for count in range(1, rows + 1) if rows % count == 0 and rows // count <= most), 1)
