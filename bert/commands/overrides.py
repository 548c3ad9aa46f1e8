"""Values on the command line that replace, or rescale, a file's values of other keys."""

from __future__ import annotations

import re
from typing import Any

from bert.config.yaml_io import NULLS, ConfigField, UserValue, convert_values

OTHER_WAYS = (
    ("training.steps", "training.epochs"),
    ("optimizer.warmup_steps", "optimizer.warmup_ratio"),
    ("phases.N.steps", "phases.N.share"),
)
"""Pairs of keys that say the same thing in two ways; N is the number of an item."""

BATCH, MICRO_BATCHES = "training.batch_size", "training.gradient_accumulation_steps"
LENGTH, PREDICTIONS = "data.sequence_length", "data.max_predictions_per_sequence"


def without_other_ways(of_file: dict[str, UserValue], of_command_line: dict[str, UserValue]) -> dict[str, UserValue]:
    """What a file gives, without the keys for which the command line has the other key of `OTHER_WAYS`."""
    replaced = set()
    for key, item in of_command_line.items():
        number = re.search(r"\d+", key)
        general = re.sub(r"\d+", "N", key)
        for pair in OTHER_WAYS:
            if general in pair and item.value not in NULLS:
                other = pair[1 - pair.index(general)]
                replaced.add(other.replace("N", number[0]) if number else other)
    return {key: item for key, item in of_file.items() if key not in replaced}


def rescaled(
    values: dict[str, Any],
    of_file: dict[str, UserValue],
    of_command_line: dict[str, UserValue],
    keys: dict[str, ConfigField],
) -> dict[str, Any]:
    """The typed values, with those of a file that no longer fit what the command line sets.

    With another batch size, micro-batches keep their number of rows, or have fewer. With rows so short that the most
    predictions are not below their length, the predictions keep their share of it.
    """
    wanted = {
        changed: derived
        for changed, derived in ((BATCH, MICRO_BATCHES), (LENGTH, PREDICTIONS))
        if changed in of_command_line and derived in of_file and derived not in of_command_line
    }
    if not wanted:
        return values
    names = {*wanted, *wanted.values()} & set(of_file)
    before = convert_values({name: of_file[name] for name in names}, keys)
    values = dict(values)
    if BATCH in wanted and before[MICRO_BATCHES] > 1:
        values[MICRO_BATCHES] = micro_batches(values[BATCH], before[BATCH] // before[MICRO_BATCHES])
    if LENGTH in wanted and values[PREDICTIONS] >= values[LENGTH]:
        values[PREDICTIONS] = -(-before[PREDICTIONS] * values[LENGTH] // before[LENGTH])
    return values


def micro_batches(rows: int, most: int) -> int:
    """The least number of equal micro-batches of at most ``most`` rows."""
    return next((count for count in range(1, rows + 1) if rows % count == 0 and rows // count <= most), 1)
