"""ModernBERT (Warner et al. 2024): rotary positions, local and global layers, gated feed-forward, and pre-LN."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base
from bert.interchange.families.base import Family, Limit, ParametersByPath, class_names
from bert.interchange.names import Names
from bert.model.names import LAYER, POOLER
from bert.tokenizer.library import SpecialTokenIds

BLOCK = "model.layers.{}"
GLOBAL, LOCAL = "full_attention", "sliding_attention"

POOLING = {"first": "cls", "mean": "mean"}
"""Values of ``pooler_input``, and the corresponding values of ``classifier_pooling``."""

DEFAULT_WINDOW, DEFAULT_EVERY = 128, 3
"""Defaults of ModernBertConfig in transformers: window size (both sides), and interval of global layers."""

BASES = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}
"""Keys of the rotary bases in transformers 4, and their defaults."""

ONE_SETTING: dict[str, dict[str, Any]] = {
    "use_bias": {"attention_bias": False, "mlp_bias": False, "classifier_bias": False},
    "hidden_dropout_prob": {"embedding_dropout": 0.0, "mlp_dropout": 0.0},
    "hidden_act": {"hidden_activation": "gelu", "classifier_activation": "gelu"},
}
"""Fields of `ModelConfig` that correspond to several keys, with their defaults."""


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    for field, defaults in ONE_SETTING.items():
        values = {key: content.get(key, default) for key, default in defaults.items()}
        if len(set(map(repr, values.values()))) > 1:
            shown = ", ".join(f"{key} {value!r}" for key, value in values.items())
            raise UserError(f"{shown} differ, but this package has one setting (model.{field}): use another model")
    pooling = content.get("classifier_pooling", "cls")
    if pooling not in POOLING.values():
        raise UserError(f"classifier_pooling is {pooling!r}: use a model with one of {', '.join(POOLING.values())}")
    window, every = _read_layers(content)
    bases = {kind: _read_base(content, kind) for kind in BASES}
    return {
        "use_bias": _flag(content, "attention_bias", False),
        "norm_bias": _flag(content, "norm_bias", False),
        "prediction_bias": _flag(content, "decoder_bias", True),
        "pooler_input": next(kind for kind, name in POOLING.items() if name == pooling),
        "attention_window": window,
        "global_attention_every": every,
        "rotary_base": bases[GLOBAL],
        "local_rotary_base": None if window is None else bases[LOCAL],
    }


def _flag(content: dict[str, Any], key: str, default: bool) -> bool:
    if not isinstance(value := content.get(key, default), bool):
        raise UserError(f"{key} is {value!r}: set it to true or false")
    return value


def _read_layers(content: dict[str, Any]) -> tuple[int | None, int | None]:
    """Returns the window on each side, and the interval of global layers. Raises UserError for another layout."""
    tokens, every = content.get("local_attention", DEFAULT_WINDOW), content.get("global_attn_every_n_layers")
    for key, value in {
        "local_attention": tokens,
        "global_attn_every_n_layers": DEFAULT_EVERY if every is None else every,
    }.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{key} is {value!r}: set it to a whole number of at least 1")
    if tokens < 2:
        raise UserError("local_attention is 1, which is a window without neighbours: use another model")
    kinds = content.get("layer_types")
    if kinds is None:
        every = DEFAULT_EVERY if every is None else every
        return (None, None) if every == 1 else (tokens // 2, every)
    count = content["num_hidden_layers"]
    if not isinstance(kinds, list) or len(kinds) != count or not set(map(str, kinds)) <= {GLOBAL, LOCAL}:
        raise UserError(f"layer_types is not a list of {count} entries {GLOBAL} or {LOCAL}: copy the file again")
    layers = [number for number, kind in enumerate(kinds) if kind == GLOBAL]
    if len(layers) == count:
        return None, None
    if not layers:
        return tokens // 2, None
    if every is None or layers != list(range(0, count, every)):
        every = layers[1] if len(layers) > 1 else count
    if layers != list(range(0, count, every)):
        raise UserError(
            f"layer_types has {GLOBAL} at layers {layers}, but it must be the first and every n-th layer: use another "
            "model"
        )
    return tokens // 2, every


def _read_base(content: dict[str, Any], kind: str) -> float:
    old, default = BASES[kind]
    settings = content.get("rope_parameters") or {}
    of_kind = settings.get(kind) or {} if isinstance(settings, dict) else settings
    if not isinstance(of_kind, dict) or not set(of_kind) <= {"rope_type", "rope_theta"}:
        raise UserError(
            f"rope_parameters.{kind} is {of_kind!r}, and only rope_type and rope_theta are supported: use another model"
        )
    if (rope_type := of_kind.get("rope_type", "default")) != "default":
        raise UserError(
            f"rope_parameters.{kind}.rope_type is {rope_type!r}, and only 'default' is supported: use another model"
        )
    base = of_kind.get("rope_theta", content.get(old, default))
    if base is None and kind == LOCAL:  # transformers 4 defaults to the base of global layers
        return _read_base(content, GLOBAL)
    if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base <= sys.float_info.max:
        raise UserError(f"the base of rotary positions ({old}) is {base!r}: set it to a positive number")
    return float(base)


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    bases = {GLOBAL: config.rotary_base, LOCAL: config.local_rotary_base or config.rotary_base}
    window, every = config.attention_window, config.global_attention_every
    return {
        **dict.fromkeys(ONE_SETTING["use_bias"], config.use_bias),
        **dict.fromkeys(ONE_SETTING["hidden_dropout_prob"], config.hidden_dropout_prob),
        "norm_bias": config.norm_bias,
        "decoder_bias": config.prediction_bias,
        "classifier_pooling": POOLING[config.pooler_input],
        "local_attention": DEFAULT_WINDOW if window is None else 2 * window,
        "layer_types": [LOCAL if config.is_local(number) else GLOBAL for number in range(config.num_hidden_layers)],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        # transformers 4 reads these keys, and always has a global layer.
        **{BASES[kind][0]: base for kind, base in bases.items()},
        **({} if window and not every else {"global_attn_every_n_layers": every or 1}),
        **{f"{role}_token_id": special.find(role) for role in ("cls", "sep")},
        "bos_token_id": special.find("cls"),
        "eos_token_id": special.find("sep"),
    }


def _separate(config: ModelConfig, params: ParametersByPath, _: int) -> tuple[ModelConfig, ParametersByPath]:
    """Normalizes settings without effect to the values that ``_read_config`` returns."""
    if config.pooler_input not in POOLING:
        raise UserError(
            f"model.pooler_input is {config.pooler_input}, which transformers' ModernBERT does not support: export it "
            "as onnx"
        )
    local = any(config.is_local(number) for number in range(config.num_hidden_layers))
    values: dict[str, Any] = {"pooler_act": "tanh", "local_rotary_base": config.local_rotary_base or config.rotary_base}
    if not local:
        values |= {"attention_window": None, "global_attention_every": None, "local_rotary_base": None}
    return dataclasses.replace(config, **values), params


HEAD = {
    "predictions/transform": None,
    "predictions/norm": None,
    f"{POOLER}/dense": "head.dense",
    f"{POOLER}/norm": "head.norm",
}
"""Each head has a separate copy of the transform of the MLM head."""

MODERNBERT = Family(
    model_type="modernbert",
    title="ModernBERT",
    published_tokenizer="byte-level BPE",
    restrictions="A `rope_type` other than `default`, biases in some kinds of layers only, and another order of local "
    "and global layers are errors.",
    prefix="model",
    classes=class_names("ModernBert"),
    names=Names(
        {
            "bert/embeddings/word": "model.embeddings.tok_embeddings",
            "bert/embeddings/norm": "model.embeddings.norm",
            f"{LAYER}/attention_norm": f"{BLOCK}.attn_norm",
            f"{LAYER}/attention/query": f"{BLOCK}.attn.Wqkv",
            f"{LAYER}/attention/key": f"{BLOCK}.attn.Wqkv",
            f"{LAYER}/attention/value": f"{BLOCK}.attn.Wqkv",
            f"{LAYER}/attention/output": f"{BLOCK}.attn.Wo",
            f"{LAYER}/output_norm": f"{BLOCK}.mlp_norm",
            f"{LAYER}/intermediate": f"{BLOCK}.mlp.Wi",
            f"{LAYER}/gate": f"{BLOCK}.mlp.Wi",
            f"{LAYER}/output": f"{BLOCK}.mlp.Wo",
            "bert/encoder/norm": "model.final_norm",
            "predictions/transform": "head.dense",
            "predictions/norm": "head.norm",
            "predictions/bias": "decoder.bias",
            "predictions/decoder": "decoder.weight",
            "classifier": "classifier",
        },
        heads={
            "BertForSequenceClassification": HEAD,
            "BertForTokenClassification": HEAD,
            "BertForQuestionAnswering": {**HEAD, "qa_outputs": "classifier"},
            "BertForMultipleChoice": HEAD,
        },
    ),
    keys={
        **{name: name for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
        "intermediate_size": "intermediate_size",
        "hidden_act": "hidden_activation",
        "hidden_dropout_prob": "embedding_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "max_position_embeddings": "max_position_embeddings",
        "initializer_range": "initializer_range",
        "layer_norm_eps": "norm_eps",
    },
    defaults={**base.NO_DROPOUT, "layer_norm_eps": 1e-5},
    limits={
        **base.SEPARATE_LAYERS,
        **base.PLAIN_ATTENTION,
        **base.PLAIN_BIASES,
        "position_embedding_type": Limit("rotary", "its positions are rotary"),
        "relative_attention_buckets": Limit(None, "its attention scores have no bias by distance"),
        "causal": Limit(False, "its tokens attend to both sides"),
        "pre_layer_norm": Limit(True, "it has LayerNorm before attention and feed-forward"),
        "first_layer_norm": Limit(False, "its first layer has no LayerNorm before attention"),
        "norm_type": Limit("layer", "it has LayerNorm"),
        "gated_feed_forward": Limit(True, "its feed-forward layers are gated"),
        "scale_embeddings": Limit(False, "it takes the word embeddings as they are"),
        "embedding_norm": Limit(True, "its embeddings have LayerNorm"),
        "prediction_transform": Limit(True, "its MLM head has a dense layer before its decoder"),
        "type_vocab_size": base.NO_SEGMENTS,
        "position_offset": base.FROM_ROW_0,
        "embedding_size": base.FULL_WIDTH,
        "pooler_type": Limit("transform", "its heads have LayerNorm behind their first layer"),
    },
    fixed={"rope_scaling": None},
    constants=r"(^|\.)rotary_emb\.",
    has_form=lambda config, architecture: config.position_embedding_type == "rotary",
    read_config=_read_config,
    write_config=_write_config,
    nest=lambda content, *_: {**content, "classifier_activation": content["hidden_activation"]},
    separate=_separate,
)
