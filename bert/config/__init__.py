"""What a run is made of: frozen dataclasses, their checks, and where recipes lie. Imports no JAX.

Field names follow Google's ``bert_config.json`` where it has one. The text under each field is its ``--help=all``.
"""

from __future__ import annotations

import re
from pathlib import Path

from bert.config.data import DOCSTRINGS_PREFIX, HUB_PREFIX, INPUT_FORMATS, DataConfig
from bert.config.decoding import Decoding
from bert.config.distillation import DistillationConfig
from bert.config.embedding import EmbeddingConfig
from bert.config.finetuning import ColumnsConfig, FinetuneConfig, TaskDataConfig
from bert.config.lora import LoraConfig
from bert.config.model import ModelConfig, TokenizerConfig
from bert.config.presets import apply_preset
from bert.config.pretraining import PretrainConfig
from bert.config.reranker import RerankerConfig
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
    "TokenizerConfig",
    "TrainingConfig",
    "UserError",
    "apply_preset",
    "recipe_folder",
    "recipe_names",
]


def recipe_names(for_task: bool | None = None) -> list[str]:
    """Returns the names of the recipes: of fine-tuning (True), of pretraining (False), or all (None)."""
    return sorted(
        path.stem
        for path in recipe_folder().glob("*.yaml")
        if for_task in (None, re.search(r"^task:", path.read_text(encoding="utf-8"), re.MULTILINE) is not None)
    )


def recipe_folder() -> Path:
    """configs/ of the clone, or its copy inside the installed package."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "configs"
