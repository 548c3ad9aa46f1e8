"""Llama (Touvron et al. 2023): causal, with rotary positions, RMSNorm, gates, and heads that share keys and values."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base
from bert.interchange.families.base import Family, Limit, ParametersByPath
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

ROTATIONS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Supported values of ``rope_type``, and their further keys."""

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "partial_rotary_factor": 1.0,
}
"""Keys of ``rope_parameters`` with a single supported value."""


def read_rotary(content: dict[str, Any], default_base: float = 10_000.0) -> dict[str, Any]:
    """Returns the rotary fields of `ModelConfig`: from ``rope_parameters``, or ``rope_scaling`` of transformers 4."""
    settings = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(settings, dict):
        raise UserError(f"rope_parameters is {settings!r}: copy the file again from the source of the weights")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROTATIONS:
        raise UserError(f"rope_parameters.rope_type is {kind!r}: use a model with one of {', '.join(ROTATIONS)}")
    for key in settings.keys() - {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}:
        if key not in YARN or settings[key] not in (None, YARN[key]):
            raise UserError(f"rope_parameters.{key} is {settings[key]!r}, which is not supported: use another model")

    def number(key: str, value: Any, minimum: float) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= sys.float_info.max:
            raise UserError(f"rope_parameters.{key} is {value!r}: set it to a number of at least {minimum:g}")
        return float(value)

    base = settings.get("rope_theta") or content.get("rope_theta") or default_base
    values: dict[str, Any] = {"rotary_base": number("rope_theta", base, 1)}
    if kind != "default":
        values |= {"rotary_scaling": kind, "rotary_scaling_factor": number("factor", settings.get("factor"), 1)}
    if kind == "yarn":
        key = "original_max_position_embeddings"  # transformers prefers the one outside of rope_parameters
        length = content.get(key) or settings.get(key) or content["max_position_embeddings"]
        values["rotary_original_length"] = int(number(key, length, 1))
    return values


def write_rotary(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json for the rotary positions of a model."""
    kind = "default" if config.rotary_scaling == "none" else config.rotary_scaling
    if kind not in ROTATIONS:
        raise UserError(
            f"model.rotary_scaling is {kind}, which transformers does not have: set model.rotary_base to the base that "
            "it makes, or export it as onnx"
        )
    length = config.rotary_original_length or int(config.max_position_embeddings / config.rotary_scaling_factor)
    values = {"factor": config.rotary_scaling_factor, "original_max_position_embeddings": length}
    settings = {"rope_type": kind, **{key: values[key] for key in ROTATIONS[kind]}}
    # transformers 4 reads the other two keys.
    old = {"rope_scaling": settings} if ROTATIONS[kind] else {}
    base = config.rotary_base
    return {"rope_theta": base, "rope_parameters": {**settings, "rope_theta": base}, **old}


def read_heads(content: dict[str, Any], head_size: int | None = None) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for the sizes of heads.

    Args:
        head_size: default of ``head_dim``; None for hidden_size / num_attention_heads.
    """
    width, heads = content["hidden_size"], content["num_attention_heads"]
    values = {"num_key_value_heads": content.get("num_key_value_heads"), "head_dim": content.get("head_dim", head_size)}
    for key, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{key} is {value!r}: set it to a whole number of at least 1")
    shared, size = values["num_key_value_heads"], values["head_dim"]
    return {
        "num_key_value_heads": None if shared == heads else shared,
        "attention_head_size": None if size is None or size * heads == width else size,
    }


def write_heads(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json for the sizes of heads."""
    return {"num_key_value_heads": config.key_value_heads, "head_dim": config.head_size}


def read_flag(content: dict[str, Any], key: str) -> bool:
    """Returns a setting that is false by default."""
    if not isinstance(value := content.get(key, False), bool):
        raise UserError(f"{key} is {value!r}: set it to true or false")
    return value


def read_biases(content: dict[str, Any], use_bias: bool) -> dict[str, Any]:
    """Returns the keys of `bert.config.model.BIASES` for a model whose other dense layers have ``use_bias``."""
    flags = {"query_key_value_bias": "attention_bias", "attention_output_bias": "attention_bias"}
    flags |= {"intermediate_bias": "mlp_bias", "output_bias": "mlp_bias"}
    values = {field: read_flag(content, key) for field, key in flags.items()}
    return {field: None if value == use_bias else value for field, value in values.items()}


def write_biases(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json for the biases. Raises UserError if transformers has no such combination."""
    pairs = {
        "attention_bias": ("query_key_value_bias", "attention_output_bias"),
        "mlp_bias": ("intermediate_bias", "output_bias"),
    }
    for first, second in pairs.values():
        if config.has_bias(first) != config.has_bias(second):
            raise UserError(
                f"model.{first} and model.{second} differ, which transformers does not support: export it as onnx"
            )
    return {key: config.has_bias(first) for key, (first, _) in pairs.items()}


def without_untied_default(content: dict[str, Any]) -> dict[str, Any]:
    """A ``flatten`` for families whose decoder has its own matrix unless config.json shares it."""
    return {"tie_word_embeddings": False, **content}


def without_dropout(config: ModelConfig, params: ParametersByPath, _: int) -> tuple[ModelConfig, ParametersByPath]:
    """A ``separate`` for families without dropout of hidden states, which only affects training."""
    return dataclasses.replace(config, hidden_dropout_prob=0.0), params


def read_config(content: dict[str, Any]) -> dict[str, Any]:
    return {
        **base.INITIAL,
        **read_heads(content),
        **read_rotary(content),
        **read_biases(content, use_bias=False),
    }


def write_special(special: SpecialTokenIds) -> dict[str, Any]:
    """Returns the ids of special tokens. Classifiers read the last token that is not padding."""
    end, padding = special.find("eos"), special.find("pad")
    return {
        "bos_token_id": special.find("bos"),
        "eos_token_id": end,
        "pad_token_id": end if padding is None else padding,
    }


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {**write_heads(config), **write_rotary(config), **write_biases(config), **write_special(special)}


def layer_names(prefix: str) -> dict[str, str]:
    """Returns the names of embeddings and layers that Llama's descendants share."""
    block = f"{prefix}.layers.{{}}"
    return {
        "bert/embeddings/word": f"{prefix}.embed_tokens",
        f"{LAYER}/attention_norm": f"{block}.input_layernorm",
        f"{LAYER}/attention/query": f"{block}.self_attn.q_proj",
        f"{LAYER}/attention/key": f"{block}.self_attn.k_proj",
        f"{LAYER}/attention/value": f"{block}.self_attn.v_proj",
        f"{LAYER}/attention/query_norm": f"{block}.self_attn.q_norm",
        f"{LAYER}/attention/key_norm": f"{block}.self_attn.k_norm",
        f"{LAYER}/attention/output": f"{block}.self_attn.o_proj",
        f"{LAYER}/output_norm": f"{block}.post_attention_layernorm",
        f"{LAYER}/intermediate": f"{block}.mlp.gate_proj",
        f"{LAYER}/gate": f"{block}.mlp.up_proj",
        f"{LAYER}/output": f"{block}.mlp.down_proj",
        "bert/encoder/norm": f"{prefix}.norm",
    }


LAYER_LIMITS = {
    **base.SEPARATE_LAYERS,
    "position_embedding_type": Limit("rotary", "its positions are rotary"),
    "rotary_fraction": Limit(1.0, "its rotations include all features of a head"),
    "relative_attention_buckets": Limit(None, "its attention scores have no bias by distance"),
    "attention_softcap": Limit(None, "its attention scores have no limit"),
    "query_pre_attn_scalar": base.PLAIN_SCALE,
    "attention_window": Limit(None, "all of its layers are global"),
    "norm_type": Limit("rms", "it has RMSNorm"),
    "norm_bias": Limit(False, "RMSNorm has no bias"),
    "pre_layer_norm": Limit(True, "it has RMSNorm before attention and feed-forward"),
    "first_layer_norm": Limit(True, "all of its layers have the same RMSNorm"),
    "gated_feed_forward": Limit(True, "its feed-forward layers are gated"),
    "scale_embeddings": Limit(False, "it takes the word embeddings as they are"),
    "embedding_norm": Limit(False, "its embeddings have no norm"),
    "prediction_transform": Limit(False, "it decodes the hidden states themselves"),
    "type_vocab_size": base.NO_SEGMENTS,
    "position_offset": base.FROM_ROW_0,
    "embedding_size": base.FULL_WIDTH,
    "pooler_type": Limit("dense", "it has no LayerNorm after its pooler"),
}
"""Limits of Llama's descendants, causal or not."""

KEYS = {
    **{name: name for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
    **{name: name for name in ("intermediate_size", "hidden_act", "max_position_embeddings", "initializer_range")},
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "rms_norm_eps",
}

DEFAULTS = {**base.NO_DROPOUT, "layer_norm_eps": 1e-6}
"""Values of optional settings that config.json lacks."""

LLAMA = Family(
    model_type="llama",
    title="Llama",
    published_tokenizer="SentencePiece (BPE), byte-level BPE",
    restrictions="A `rope_type` other than `default`, `linear` and `yarn`, and sliding windows are errors. Classifiers "
    "read the last token of a row, the end token included.",
    prefix="model",
    classes={
        "Bert": "LlamaModel",
        "BertForCausalLM": "LlamaForCausalLM",
        "BertForSequenceClassification": "LlamaForSequenceClassification",
        "BertForTokenClassification": "LlamaForTokenClassification",
        "BertForQuestionAnswering": "LlamaForQuestionAnswering",
    },
    names=Names(
        {**layer_names("model"), "predictions/decoder": "lm_head.weight", "qa_outputs": "qa_outputs"}
        | {"classifier": "score"},
        heads={"BertForQuestionAnswering": layer_names("transformer")},
    ),
    keys=KEYS,
    defaults=DEFAULTS,
    limits={
        **LAYER_LIMITS,
        "causal": Limit(True, "its tokens attend to those before them"),
        "use_bias": Limit(False, "its dense layers outside of the layers have no biases"),
        "query_key_norm": Limit(False, "its queries and keys are not normalized"),
        "prediction_bias": Limit(False, "its decoder has no bias"),
        "pooler_act": Limit("tanh", "it has no pooler"),
        "pooler_input": Limit("first", "it has no pooler"),
    },
    fixed={"pretraining_tp": 1, "is_causal": True},
    constants=r"(^|\.)rotary_emb\.",
    has_form=lambda config, architecture: (
        config.causal and config.position_embedding_type == "rotary" and config.norm_type == "rms"
    ),
    read_config=read_config,
    write_config=_write_config,
    flatten=without_untied_default,
    separate=without_dropout,
)
