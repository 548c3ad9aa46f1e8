"""Longformer (Beltagy et al. 2020): RoBERTa with a window around each token, and global tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError, shorten
from bert.interchange.families import base
from bert.interchange.families.base import class_names, encoder_names
from bert.interchange.families.roberta import LM_HEAD, ROBERTA, ROBERTA_PRELAYERNORM
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

DEFAULT_WINDOW, DEFAULT_SEPARATOR = 512, 2
"""Defaults of LongformerConfig in transformers: window size (both sides), and id of the separator."""

SELF_ATTENTION = "longformer.encoder.layer.{}.attention.self"


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    separator = content.get("sep_token_id", DEFAULT_SEPARATOR)
    if type(separator) is not int or separator < 0:
        raise UserError(f"sep_token_id is {shorten(separator)}: set it to the id of the separator token")
    return {
        **ROBERTA.read_config(content),
        "attention_window": _read_window(content),
        "global_attention_sep_id": separator,
    }


def _read_window(content: dict[str, Any]) -> int:
    """Returns the window on each side. Raises UserError if layers have different windows."""
    value, count = content.get("attention_window", DEFAULT_WINDOW), content["num_hidden_layers"]
    windows = value if isinstance(value, list) else [value] * count
    if len(windows) != count or any(type(window) is not int or window < 2 or window % 2 for window in windows):
        raise UserError(
            f"attention_window is {shorten(value)}: set it to an even number of at least 2, or to one for each of the "
            f"{count} layers"
        )
    if len(set(windows)) > 1:
        raise UserError(
            f"attention_window is {shorten(value)}, but this package has one window for all layers "
            "(model.attention_window): use another model"
        )
    window: int = windows[0]
    return window // 2


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {
        **ROBERTA.write_config(config, special),
        "sep_token_id": config.global_attention_sep_id,
        "attention_window": [2 * (config.attention_window or 0)] * config.num_hidden_layers,
    }


LONGFORMER = dataclasses.replace(
    ROBERTA,
    model_type="longformer",
    title="Longformer",
    restrictions="Windows that differ by layer are an error. The class selects the global tokens; `model.apply` of an "
    "encoder also reads a `global_attention_mask`.",
    prefix="longformer",
    classes=class_names("Longformer"),
    names=Names(
        {
            **encoder_names("longformer"),
            "bert/pooler": "longformer.pooler.dense",
            **LM_HEAD,
            **{
                f"{LAYER}/attention/global_{part}": f"{SELF_ATTENTION}.{part}_global"
                for part in ("query", "key", "value")
            },
        },
        heads=ROBERTA.names.heads,
    ),
    limits={
        key: limit
        for key, limit in ROBERTA.limits.items()
        if key not in ("attention_window", "global_attention_sep_id")
    },
    fixed={**base.ABSOLUTE_POSITIONS, "attention_mode": "longformer", "ignore_attention_mask": False},
    has_form=lambda config, architecture: config.global_attention_sep_id is not None,
    read_config=_read_config,
    write_config=_write_config,
    separate=ROBERTA_PRELAYERNORM.separate,
)
