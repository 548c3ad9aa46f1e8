"""Presets: one setting that sets several others."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

from bert.config.finetuning import FinetuneConfig
from bert.config.pretraining import PretrainConfig

Config = TypeVar("Config")
"""Of a run, or any other: then there is no preset in it."""

VOCAB_MULTIPLE = 64


def apply_preset(config: Config, explicit: Collection[str] = ()) -> Config:
    """Applies the settings of ``training.preset``; the reference preset changes nothing.

    Args:
        config: as it was written.
        explicit: keys such as ``training.dtype`` that override the preset.
    """
    if not isinstance(config, PretrainConfig | FinetuneConfig) or config.training.preset != "fast":
        return config
    sets: dict[str, Any] = {"dtype": "bfloat16", "pad_vocab_to_multiple_of": VOCAB_MULTIPLE}
    training = dataclasses.replace(
        config.training, **{name: value for name, value in sets.items() if f"training.{name}" not in explicit}
    )
    run: Any = config
    model = run.model
    if "model.attention_probs_dropout_prob" not in explicit:
        model = dataclasses.replace(model, attention_probs_dropout_prob=0.0)
    data = config.data if isinstance(config, PretrainConfig) else None
    no_lengths = data is not None and (data.packing or config.training.objective == "plm")  # masks that no length tells
    no_kernel = no_lengths or model.attention_probs_dropout_prob > 0 or training.dtype != "bfloat16"
    if training.attention_implementation == "auto" and no_kernel:
        training = dataclasses.replace(training, attention_implementation="xla")
    return dataclasses.replace(run, training=training, model=model)
