"""Configuration of runs: frozen dataclasses, their checks, recipes and files. Imports no JAX.

Field names follow Google's ``bert_config.json`` where it has one. The docstring of each field is its text in
``--help=all``.
"""

from __future__ import annotations

from bert.config.data import DOCSTRINGS_PREFIX, HUB_PREFIX, INPUT_FORMATS, DataConfig
from bert.config.finetuning import ColumnsConfig, FinetuneConfig, TaskDataConfig
from bert.config.model import ModelConfig
from bert.config.options import (
    Decoding,
    DistillationConfig,
    EmbeddingConfig,
    LoraConfig,
    RerankerConfig,
    TaskDistillationConfig,
)
from bert.config.pretraining import PretrainConfig
from bert.config.sources import apply_preset, recipe_folder, recipe_header, recipe_names
from bert.config.tokenizer import TokenizerConfig
from bert.config.training import OptimizerConfig, TrainingConfig
from bert.errors import UserError

__all__ = [
    "DOCSTRINGS_PREFIX",
    "HUB_PREFIX",
    "INPUT_FORMATS",
    "ColumnsConfig",
    "DataConfig",
    "Decoding",
    "DistillationConfig",
    "EmbeddingConfig",
    "FinetuneConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PretrainConfig",
    "RerankerConfig",
    "TaskDataConfig",
    "TaskDistillationConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "UserError",
    "apply_preset",
    "recipe_folder",
    "recipe_header",
    "recipe_names",
]
