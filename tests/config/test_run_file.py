"""Differences between the configuration of a run and the one that it is resumed with."""

from dataclasses import replace
from typing import Any

import pytest

from bert.config import DataConfig, ModelConfig, PretrainConfig
from bert.config.pretraining import PhaseConfig
from bert.config.run_file import RESUMABLE_KEYS, describe_resumable_keys, first_difference

GELU, LONG = ModelConfig(pooler_act="gelu"), DataConfig(sequence_length=512)


def difference(stored: dict[str, Any], requested: dict[str, Any]) -> str | None:
    result = first_difference(PretrainConfig(**requested), PretrainConfig(**stored))
    return None if result is None else result[0]


def test_a_few_keys_that_may_change_are_listed_the_changed_ones_first() -> None:
    stored = PretrainConfig()
    described = describe_resumable_keys(replace(stored, profile=True, output_dir="x"), stored)
    assert described.startswith("profile, training.steps, training.epochs, ")
    assert described.endswith(f" and {len(RESUMABLE_KEYS) - 5} others")
    assert described.count(",") == 4


@pytest.mark.parametrize(("value", "key"), [(True, None), (False, "model.pooler_dropout")])
def test_a_value_that_null_stands_for_is_no_difference(value: bool, key: str | None) -> None:
    explicit = replace(GELU, pooler_dropout=value)
    assert difference({"model": GELU}, {"model": explicit}) == key
    assert difference({"model": explicit}, {"model": GELU}) == key


@pytest.mark.parametrize(
    ("stored", "requested", "key"),
    [
        (77, None, None),
        (None, 77, None),
        (20, None, None),  # the default of an earlier version
        (60, None, "data.max_predictions_per_sequence"),
        (None, 60, "data.max_predictions_per_sequence"),
    ],
)
def test_predictions_per_row_are_compared_as_numbers(stored, requested, key) -> None:
    stored, requested = (replace(LONG, max_predictions_per_sequence=value) for value in (stored, requested))
    assert difference({"data": stored}, {"data": requested}) == key


def test_predictions_of_phases_are_compared_as_numbers() -> None:
    data, rest = DataConfig(max_predictions_per_sequence=20), PhaseConfig(share=0.9)
    before = [rest, PhaseConfig(sequence_length=512, max_predictions_per_sequence=77)]
    after = [rest, PhaseConfig(sequence_length=512)]
    assert difference({"data": data, "phases": before}, {"phases": after}) is None
    other = [rest, PhaseConfig(sequence_length=512, max_predictions_per_sequence=60)]
    assert difference({"data": data, "phases": other}, {"phases": after}) == "phases.2.max_predictions_per_sequence"
