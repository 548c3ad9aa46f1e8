"""ERNIE 1 to 3 (Sun et al. 2020): BERT with an embedding of the task, whose default is added to the segments."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bert.config import ModelConfig
from bert.interchange.families.base import class_names
from bert.interchange.families.bert import BERT
from bert.interchange.names import Names

TASK, SEGMENT = "embeddings.task_type_embeddings.weight", "embeddings.token_type_embeddings.weight"


def _from_files(config: ModelConfig, content: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Adds the embedding of task 0, the default, to the segments if ``use_task_id`` is true; else it has no effect."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(TASK)}
    for name in tensors.keys() - kept.keys():
        segment = name.removesuffix(TASK) + SEGMENT
        if segment in kept and content.get("use_task_id"):
            kept[segment] = np.asarray(kept[segment], np.float32) + np.asarray(tensors[name][0], np.float32)
    return kept


ERNIE = dataclasses.replace(
    BERT,
    model_type="ernie",
    title="ERNIE",
    restrictions="Exported as BERT, with the embedding of task 0 in its segments.",
    prefix="ernie",
    classes=class_names("Ernie", "PreTraining", "NextSentencePrediction"),
    names=Names({path: name.replace("bert.", "ernie.", 1) for path, name in BERT.names.modules.items()}),
    has_form=lambda config, architecture: False,
    from_files=_from_files,
)
"""Exported as BERT, which is the same model."""
