"""Qwen2 and Qwen3: Llama with other biases, and with normalized queries and keys in Qwen3."""

from __future__ import annotations

import dataclasses
from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import llama
from bert.interchange.families.base import Limit
from bert.interchange.families.llama import LLAMA
from bert.tokenizer.library import SpecialTokenIds


def _read_qwen(content: dict[str, Any]) -> dict[str, Any]:
    if content.get("use_sliding_window") or "sliding_attention" in (content.get("layer_types") or []):
        raise UserError("use_sliding_window is true, and only layers over whole rows are supported: use another model")
    return llama.read_config({**content, "mlp_bias": False})


def _read_qwen2(content: dict[str, Any]) -> dict[str, Any]:
    return {**_read_qwen({**content, "attention_bias": False}), "query_key_value_bias": True}


def _read_qwen3(content: dict[str, Any]) -> dict[str, Any]:
    return {**_read_qwen(content), **llama.read_heads(content, head_size=128)}


def _write_qwen2(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {
        **llama.write_heads(config),
        **llama.write_rotary(config),
        **llama.write_special(special),
        "use_sliding_window": False,
    }


def _write_qwen3(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    biases = {"attention_bias": llama.write_biases(config)["attention_bias"]}
    return {**_write_qwen2(config, special), **biases}


WITHOUT_MLP_BIAS = {
    key: Limit(None, "its feed-forward layers have no biases") for key in ("intermediate_bias", "output_bias")
}

QWEN2 = dataclasses.replace(
    LLAMA,
    model_type="qwen2",
    title="Qwen2",
    published_tokenizer="byte-level BPE",
    classes={name: class_name.replace("Llama", "Qwen2") for name, class_name in LLAMA.classes.items()},
    limits={
        **LLAMA.limits,
        **WITHOUT_MLP_BIAS,
        "query_key_value_bias": Limit(True, "its queries, keys and values have biases"),
        "attention_output_bias": Limit(None, "the output of its attention has no bias"),
    },
    fixed={"is_causal": True},
    has_form=lambda config, architecture: (
        LLAMA.has_form(config, architecture)
        and config.has_bias("query_key_value_bias")
        and not config.has_bias("attention_output_bias")
    ),
    read_config=_read_qwen2,
    write_config=_write_qwen2,
)

QWEN3 = dataclasses.replace(
    QWEN2,
    model_type="qwen3",
    title="Qwen3",
    published_tokenizer="byte-level BPE",
    classes={name: class_name.replace("Llama", "Qwen3") for name, class_name in LLAMA.classes.items()},
    limits={
        **LLAMA.limits,
        **WITHOUT_MLP_BIAS,
        "query_key_norm": Limit(True, "its queries and keys are normalized"),
    },
    has_form=lambda config, architecture: LLAMA.has_form(config, architecture) and config.query_key_norm,
    read_config=_read_qwen3,
    write_config=_write_qwen3,
)
