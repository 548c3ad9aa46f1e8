"""Presets: one line that stands for several settings."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from bert.config.finetuning import FinetuneConfig
from bert.config.pretraining import PretrainConfig

Config = TypeVar("Config")
"""Of a run, or any other: then there is no preset in it."""

VOCAB_MULTIPLE = 64


def with_preset(config: Config) -> Config:
    """The configuration with what ``training.preset`` stands for; as it is with the faithful one."""
    if not isinstance(config, PretrainConfig | FinetuneConfig) or config.training.preset != "fast":
        return config
    training = dataclasses.replace(config.training, dtype="bfloat16", vocab_multiple=VOCAB_MULTIPLE)
    if isinstance(config, PretrainConfig) and config.data.packing:  # whose mask no length tells
        training = dataclasses.replace(training, attention="xla")
    run: Any = config
    model = dataclasses.replace(run.model, attention_probs_dropout_prob=0.0)
    return dataclasses.replace(run, training=training, model=model)
