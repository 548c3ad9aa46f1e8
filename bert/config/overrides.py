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
LENGTH, SHARE, PREDICTION = "data.sequence_length", "data.masked_lm_prob", "training.objective"
PREDICTIONS = re.compile(r"(data|phases\.\d+)\.max_predictions_per_sequence")


def override(
    base: dict[str, UserValue], changes: dict[str, UserValue], keys: dict[str, ConfigField]
) -> dict[str, UserValue]:
    """The values of ``base`` with those of a later source, ``changes``.

    - The other key of `ALTERNATIVES` is removed from ``base``, and so are the items of a list that is replaced.
    - With another batch size, micro-batches keep their number of rows, or have fewer, in phases too.
    - With rows of another length, or another share of masked tokens, the most predictions of a row are `fitting`.
    """
    kept = _without_replaced(base, changes, keys)
    values = kept | changes

    def value_of(source: dict[str, UserValue], key: str) -> Any:
        return convert_value(source[key], keys[key]) if key in source else keys[key].default

    def share_and_length(source: dict[str, UserValue], section: str) -> tuple[float, int]:
        own = source.get(f"{section}.sequence_length")
        length = value_of(source, LENGTH) if own is None or own.value in NULLS else convert_value(own, keys[LENGTH])
        return value_of(source, SHARE), length

    if BATCH in changes:
        for key in _micro_batch_keys(kept):
            count = int(convert_value(base[key], keys[MICRO_BATCHES]))
            if key not in changes and count > 1:
                rows = max(value_of(base, BATCH) // count, 1)
                values[key] = base[key]._replace(value=str(micro_batches(value_of(changes, BATCH), rows)))
    if PREDICTION not in keys or value_of(values, PREDICTION) == "clm":
        return values
    for key, entry in kept.items():
        match = PREDICTIONS.fullmatch(key)
        if match is not None and key not in changes and entry.value not in NULLS:
            before, after = share_and_length(kept, match[1]), share_and_length(values, match[1])
            if before != after:
                most = convert_value(entry, keys["data.max_predictions_per_sequence"])
                values[key] = entry._replace(value=str(fitting(most, before, after)))
    return values


def fitting(most: int, before: tuple[float, int], after: tuple[float, int]) -> int:
    """The most predictions of a row after a change of (share of masked tokens, length of the row).

    They grow as the masked tokens of a full row do where they are fewer, and shrink where the row is too short for
    them. Shares that cannot be are left to the check.
    """
    if not all(0 < share < 1 and length > 1 for share, length in (before, after)):
        return most
    there, needed = (Fraction(str(share)) * length for share, length in (before, after))
    if most < needed:
        grown = math.ceil(most * needed / there)
        most = min(max(most, grown), math.ceil(needed))
    elif most >= after[1]:
        most = math.ceil(most * needed / there)
    return min(most, after[1] - 1)


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
