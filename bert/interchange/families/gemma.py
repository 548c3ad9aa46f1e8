"""Gemma 1 to 3 (text): Llama with other norms, scaled embeddings and, from Gemma 2 on, local layers.

EmbeddingGemma is a Gemma 3 whose tokens attend to both sides.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import llama
from bert.interchange.families.base import Limit
from bert.interchange.families.llama import LLAMA
from bert.interchange.families.modernbert import GLOBAL, LOCAL
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

BLOCK = "model.layers.{}"

BASES = {GLOBAL: ("rope_theta", 1_000_000.0), LOCAL: ("rope_local_base_freq", 10_000.0)}
"""Keys of the rotary bases of Gemma 3 in transformers 4, and their defaults."""

HEAD_SIZE = 256
"""Default of ``head_dim`` and ``query_pre_attn_scalar``."""

EVERY = {"gemma2": 2, "gemma3_text": 6}
"""Interval of global layers, if config.json does not list the layers. The last layer of each interval is global."""


def _read_gemma(content: dict[str, Any]) -> dict[str, Any]:
    values = {**llama.read_config(content), **llama.read_heads(content, head_size=HEAD_SIZE), "intermediate_bias": None}
    if llama.read_flag(content, "mlp_bias"):
        raise UserError("mlp_bias is true, which no Gemma has: copy the file again from the source of the weights")
    return values


def _number(content: dict[str, Any], key: str, default: float | None) -> float | None:
    value = content.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < 1e9):
        raise UserError(f"{key} is {value!r}: set it to a positive number")
    return None if value is None else float(value)


def _is_causal(content: dict[str, Any]) -> bool:
    both_sides = content.get("use_bidirectional_attention") or False
    if not isinstance(both_sides, bool):
        raise UserError(f"use_bidirectional_attention is {both_sides!r}: set it to true or false")
    declared = str(content.get("architectures"))
    if both_sides and "For" in declared:
        raise UserError(
            f"use_bidirectional_attention is true, which is supported without a head, but architectures is {declared}: "
            "use another model"
        )
    if not both_sides and content.get("is_causal") is False:
        raise UserError("is_causal is False: set use_bidirectional_attention to true, if the model has no head")
    return not both_sides


def _read_layers(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the window on each side, and the global layers. Raises UserError for another layout."""
    count, kinds = content["num_hidden_layers"], content.get("layer_types")
    every = EVERY[content["model_type"]]
    if content["model_type"] != "gemma2":  # which transformers gives every second layer, whatever the file says
        every = content.get("sliding_window_pattern", every)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UserError(f"sliding_window_pattern is {every!r}: set it to a whole number of at least 1")
    if kinds is None:
        kinds = [LOCAL if (number + 1) % every else GLOBAL for number in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(map(str, kinds)) <= {GLOBAL, LOCAL}:
        raise UserError(f"layer_types is not a list of {count} entries {GLOBAL} or {LOCAL}: copy the file again")
    layers = [number for number, kind in enumerate(kinds) if kind == GLOBAL]
    if len(layers) == count:
        return {}
    tokens = content.get("sliding_window", 4096)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise UserError(f"sliding_window is {tokens!r}: set it to a whole number of at least 2")
    window = {"attention_window": tokens - 1 if _is_causal(content) else tokens // 2}
    if not layers:
        return window
    interval = layers[1] - layers[0] if len(layers) > 1 else max(layers[0] + 1, count - layers[0], 2)
    if interval < 2 or layers[0] >= interval or layers != list(range(layers[0], count, interval)):
        raise UserError(
            f"layer_types has {GLOBAL} at layers {layers}, but it must be every n-th layer: use another model"
        )
    return {**window, "global_attention_every": interval, "first_global_layer": layers[0]}


def _read_gemma2(content: dict[str, Any]) -> dict[str, Any]:
    values = _read_gemma(content)
    scalar = _number(content, "query_pre_attn_scalar", HEAD_SIZE)
    size = values["attention_head_size"] or content["hidden_size"] // content["num_attention_heads"]
    return {
        **values,
        **_read_layers(content),
        "query_pre_attn_scalar": None if scalar == size else scalar,
        "attention_softcap": _number(content, "attn_logit_softcapping", 50.0),
        "prediction_softcap": _number(content, "final_logit_softcapping", 30.0),
    }


def _read_gemma3(content: dict[str, Any]) -> dict[str, Any]:
    settings = content.get("rope_parameters") or {}
    if not isinstance(settings, dict):
        raise UserError(f"rope_parameters is {settings!r}: copy the file again from the source of the weights")
    rotations = {}
    for kind, (key, default) in BASES.items():
        of_kind = {"rope_parameters": settings.get(kind), "rope_theta": content.get(key)}
        scaling = content.get("rope_scaling") if kind == GLOBAL else None
        sizes = {"max_position_embeddings": content["max_position_embeddings"]}
        rotations[kind] = llama.read_rotary({**sizes, **of_kind, "rope_scaling": scaling}, default)
    if rotations[LOCAL].keys() != {"rotary_base"}:
        raise UserError(f"rope_parameters.{LOCAL}.rope_type is not 'default': use another model")
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": content.get("final_logit_softcapping")}
    # Only the rotations of global layers are scaled.
    values = _read_gemma2({**content, **caps, "rope_parameters": None, "rope_scaling": None})
    local_base = rotations[LOCAL]["rotary_base"] if "attention_window" in values else None
    return {**values, **rotations[GLOBAL], "local_rotary_base": local_base, "causal": _is_causal(content)}


def _write_gemma(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {
        **llama.write_heads(config),
        **llama.write_rotary(config),
        "attention_bias": llama.write_biases(config)["attention_bias"],
        **llama.write_special(special),
    }


def _write_gemma2(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    window = config.attention_window
    tokens = None if window is None else window + 1 if config.causal else 2 * window
    scalar = config.query_pre_attn_scalar or config.head_size
    if scalar != int(scalar):
        raise UserError(
            f"model.query_pre_attn_scalar is {scalar}, and transformers' Gemma needs a whole number: export it as onnx"
        )
    return {
        **_write_gemma(config, special),
        "query_pre_attn_scalar": int(scalar),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.prediction_softcap,
        "sliding_window": tokens or 4096,
        "layer_types": [LOCAL if config.is_local(number) else GLOBAL for number in range(config.num_hidden_layers)],
    }


def _write_gemma3(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    written = _write_gemma2(config, special)
    bases = {LOCAL: {"rope_type": "default", "rope_theta": config.local_rotary_base or BASES[LOCAL][1]}}
    return {
        **written,
        "rope_parameters": {GLOBAL: written["rope_parameters"], **bases},
        "rope_local_base_freq": bases[LOCAL]["rope_theta"],
        "use_bidirectional_attention": not config.causal,
    }


GEMMA_LIMITS = {
    **LLAMA.limits,
    "norm_type": Limit("rms_plus_one", "it has RMSNorm with the scale 1 + weight"),
    "scale_embeddings": Limit(True, "it multiplies the word embeddings by the square root of their width"),
    **{key: Limit(None, "its feed-forward layers have no biases") for key in ("intermediate_bias", "output_bias")},
}
OTHER_LIMITS = {
    key: limit
    for key, limit in GEMMA_LIMITS.items()
    if key not in ("attention_window", "first_global_layer", "query_pre_attn_scalar")
    and key not in ("attention_softcap", "prediction_softcap")
} | {"sublayer_output_norm": Limit(True, "its layers have norms after attention and feed-forward")}
"""Limits of Gemma 2 and 3."""

NAMES = {key: name for key, name in LLAMA.names.modules.items() if key != "qa_outputs"}
OTHER_NAMES = Names(
    NAMES
    | {
        f"{LAYER}/attention_output_norm": f"{BLOCK}.post_attention_layernorm",
        f"{LAYER}/output_norm": f"{BLOCK}.pre_feedforward_layernorm",
        f"{LAYER}/feed_forward_norm": f"{BLOCK}.post_feedforward_layernorm",
    }
)
HEADS = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")

GEMMA = dataclasses.replace(
    LLAMA,
    model_type="gemma",
    title="Gemma",
    published_tokenizer="SentencePiece (BPE)",
    restrictions="Classifiers read the last token of a row.",
    classes={"Bert": "GemmaModel"} | {f"Bert{head}": f"Gemma{head}" for head in HEADS},
    names=Names(NAMES),
    limits=GEMMA_LIMITS,
    fixed={"use_bidirectional_attention": False, "is_causal": True},
    has_form=lambda config, architecture: (
        config.position_embedding_type == "rotary" and config.norm_type == "rms_plus_one"
    ),
    read_config=_read_gemma,
    write_config=_write_gemma,
    # "gelu" is the tanh approximation in the first files.
    flatten=lambda content: {**content, "hidden_act": "gelu_new"} if content.get("hidden_act") == "gelu" else content,
)

GEMMA2 = dataclasses.replace(
    GEMMA,
    model_type="gemma2",
    title="Gemma 2",
    restrictions="Global layers that are not every n-th one, and attention to both sides, are errors.",
    classes={"Bert": "Gemma2Model"} | {f"Bert{head}": f"Gemma2{head}" for head in HEADS},
    names=OTHER_NAMES,
    keys={name: "hidden_activation" if name == "hidden_act" else key for name, key in llama.KEYS.items()},
    limits={**OTHER_LIMITS, "local_rotary_base": Limit(None, "all of its layers have the same rotations")},
    has_form=lambda config, architecture: GEMMA.has_form(config, architecture) and config.sublayer_output_norm,
    read_config=_read_gemma2,
    write_config=_write_gemma2,
    flatten=lambda content: content,
)

GEMMA3 = dataclasses.replace(
    GEMMA2,
    model_type="gemma3_text",
    title="Gemma 3",
    restrictions="Global layers that are not every n-th one, and heads over attention to both sides (EmbeddingGemma "
    "has none), are errors.",
    classes={
        "Bert": "Gemma3TextModel",
        "BertForCausalLM": "Gemma3ForCausalLM",
        "BertForSequenceClassification": "Gemma3TextForSequenceClassification",
    },
    limits={key: limit for key, limit in OTHER_LIMITS.items() if key != "causal"}
    | {
        "query_key_norm": Limit(True, "its queries and keys are normalized"),
        "attention_softcap": Limit(None, "its attention scores have no limit"),
    },
    fixed={"attn_logit_softcapping": None},  # transformers reads the key and does not apply it
    has_form=lambda config, architecture: GEMMA2.has_form(config, architecture) and config.query_key_norm,
    read_config=_read_gemma3,
    write_config=_write_gemma3,
)
