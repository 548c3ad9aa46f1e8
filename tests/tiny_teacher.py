"""A random teacher, and the configuration of a run that learns from it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bert.config import DataConfig, DistillationConfig, ModelConfig, PretrainConfig, TrainingConfig
from bert.model.pretraining import BertForMaskedLM
from bert.training.pretraining.distillation import Teacher
from tests.tiny_training import CONFIG, P, T

WIDE = dataclasses.replace(CONFIG, hidden_size=24, num_hidden_layers=3)
"""Sizes of a teacher with other widths than the student's `CONFIG`."""

VOCABULARY = Tokenizer(WordLevel({str(number): number for number in range(CONFIG.known_vocab_size)}, "0"))


@functools.cache
def teacher_of(config: ModelConfig, head: bool = True) -> Teacher:
    params = jax.jit(BertForMaskedLM(config).init)(jax.random.key(1), jnp.zeros((1, 8), jnp.int32))["params"]
    if not head:
        params = {"bert": params["bert"]}
    return Teacher("teacher", "checksum", config, jax.device_get(params), VOCABULARY)


def config_of(training: TrainingConfig | None = None, **distillation) -> PretrainConfig:
    asked = DistillationConfig(teacher="teacher", **distillation)
    data = DataConfig(input_format="full_sentences", sequence_length=T, max_predictions_per_sequence=P)
    return PretrainConfig(data=data, model=CONFIG, distillation=asked, training=training or TrainingConfig())
