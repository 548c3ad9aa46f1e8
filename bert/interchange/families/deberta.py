"""DeBERTa (He et al. 2021): BERT with disentangled attention; versions 1, 2 and 3."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from bert.config import ModelConfig
from bert.errors import UserError, shorten
from bert.interchange.families import base
from bert.interchange.families.base import Family, Limit, class_names, encoder_names
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

ATTENTION = "deberta.encoder.layer.{}.attention.self"
POSITIONS = "embeddings.position_embeddings.weight"

FORM: dict[str, tuple[Any, Any]] = {
    "relative_attention": (False, True),
    "pooler_dropout": (0, 0),
}
"""Settings of all versions with a single supported value: transformers' default, and the supported value."""

SHARED_FORM: dict[str, tuple[Any, Any]] = {
    **FORM,
    "share_att_key": (False, True),
    "norm_rel_ebd": ("none", "layer_norm"),
}
"""Such settings of version 2. Version 1 does not read the last two."""

PRODUCTS = {
    ("c2p", "p2c"): "both",
    ("c2p",): "content_to_position",
    ("p2c",): "position_to_content",
}
"""``disentangled_products`` for each sorted ``pos_att_type``."""


def _read_form(content: dict[str, Any], form: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Checks the settings of a form, and returns the fields that both versions have."""
    size = content["hidden_size"]
    form = {**form, **dict.fromkeys(("embedding_size", "pooler_hidden_size"), (size, size))}
    for key, (default, supported) in form.items():
        if (value := content.get(key, default)) != supported:
            raise UserError(f"{key} is {value!r}, and only {supported!r} is supported: use another model")
    products = content.get("pos_att_type")
    listed = products.lower().split("|") if isinstance(products, str) else products
    kinds = tuple(sorted(str(kind).strip() for kind in listed)) if isinstance(listed, list) else ()
    if kinds not in PRODUCTS:
        choice = ", ".join("|".join(each) for each in PRODUCTS)
        raise UserError(f"pos_att_type is {products!r}, and only {choice} are supported: use another model")
    has_table = content.get("position_biased_input", True)
    if not isinstance(has_table, bool):
        raise UserError(f"position_biased_input is {shorten(has_table)}: set it to true or false")
    return {
        "pooler_act": content.get("pooler_hidden_act", "gelu"),
        "disentangled_products": PRODUCTS[kinds],
        "position_table": has_table,
    }


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    length, size = content["max_position_embeddings"], content["hidden_size"]
    head_size = size // max(content["num_attention_heads"], 1)
    form = {**SHARED_FORM, "attention_head_size": (head_size, head_size)}
    kernel_size = content.get("conv_kernel_size", 0)
    if isinstance(kernel_size, bool) or not isinstance(kernel_size, int):
        raise UserError(f"conv_kernel_size is {shorten(kernel_size)}: set it to a whole number")
    if kernel_size > 0:
        form |= {"conv_act": ("tanh", content["hidden_act"]), "conv_groups": (1, 1)}
    fields = _read_form(content, form)
    buckets, distance = content["position_buckets"], content.get("max_relative_positions", -1)
    if buckets < 1:
        raise UserError(f"position_buckets is {buckets}: set it to at least 1, or use another model")
    if distance not in (-1, 0, length):
        raise UserError(
            f"max_relative_positions is {distance!r}, and only max_position_embeddings ({length}) is supported: use "
            "another model"
        )
    convolution = {"conv_kernel_size": kernel_size if kernel_size > 0 else None}
    return {**fields, **convolution, "relative_attention_buckets": 2 * buckets}


def _read_linear_config(content: dict[str, Any]) -> dict[str, Any]:
    distance = content.get("max_relative_positions", -1)
    if isinstance(distance, bool) or not isinstance(distance, int):
        raise UserError(f"max_relative_positions is {shorten(distance)}: set it to a whole number")
    if content.get("talking_head"):
        raise UserError("talking_head is true, and only false is supported: use another model")
    distance = distance if distance > 0 else content["max_position_embeddings"]
    return {**_read_form(content, FORM), "relative_attention_buckets": 2 * distance}


def _write_form(config: ModelConfig, form: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    products = next(kinds for kinds, name in PRODUCTS.items() if name == config.disentangled_products)
    return {
        **{key: supported for key, (_, supported) in form.items()},
        "pos_att_type": list(products),
        "position_biased_input": config.position_table,
        "pooler_hidden_size": config.hidden_size,
        "pooler_hidden_act": config.pooler_act,
        "legacy": True,
    }


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {
        **_write_form(config, SHARED_FORM),
        "max_relative_positions": -1,
        "position_buckets": (config.relative_attention_buckets or 0) // 2,
        "conv_kernel_size": config.conv_kernel_size or 0,
    }


def _with_convolution(content: dict[str, Any], config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return content if config.conv_kernel_size is None else {**content, "conv_act": content["hidden_act"]}


def _write_linear_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    distance = (config.relative_attention_buckets or 0) // 2
    return {**_write_form(config, FORM), "max_relative_positions": distance}


def _from_files(config: ModelConfig, content: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Removes the position table of published models that do not use it, which transformers ignores."""
    return {name: array for name, array in tensors.items() if config.position_table or not name.endswith(POSITIONS)}


def _split_projections(config: ModelConfig, content: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Separates the queries, keys and values of ``in_proj``, which files of version 1 store head by head."""
    split = {}
    for name, array in _from_files(config, content, tensors).items():
        if name.endswith(".in_proj.weight"):
            parts = np.array_split(array, 3 * config.num_attention_heads)
            for index, part in enumerate(("query", "key", "value")):
                split[name.replace(".weight", f".{part}.weight")] = np.concatenate(parts[index::3])
        else:
            name = re.sub(r"\.q_bias$", ".in_proj.query.bias", name)
            split[re.sub(r"\.v_bias$", ".in_proj.value.bias", name)] = array
    return split


def _join_projections(config: ModelConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_split_projections`."""
    joined = {}
    for name, array in tensors.items():
        if name.endswith(".in_proj.query.weight"):
            parts = [tensors[name.replace("query", part)] for part in ("query", "key", "value")]
            by_head = [part.reshape(config.num_attention_heads, -1, part.shape[-1]) for part in parts]
            joined[name.replace(".query.", ".")] = np.concatenate(by_head, axis=1).reshape(-1, array.shape[-1])
        elif not re.search(r"\.in_proj\.(key|value)\.weight$", name):
            joined[re.sub(r"\.in_proj\.(.).*\.bias$", r".\1_bias", name)] = array
    return joined


LIMITS = {
    **{key: limit for key, limit in base.BERT_LIMITS.items() if key != "relative_attention_buckets"},
    "position_offset": base.FROM_ROW_0,
    "embedding_size": base.FULL_WIDTH,
}

NAMES = {
    **encoder_names("deberta", without=("segment",)),
    **base.BERT_PREDICTIONS,
    "bert/encoder/relative_attention_embeddings": "deberta.encoder.rel_embeddings",
}

DEBERTA = Family(
    model_type="deberta-v2",
    title="DeBERTa-v3",
    published_tokenizer="SentencePiece (Unigram)",
    restrictions="Versions 2 and 3. The heads of v3's pretraining are not read. A convolution with groups or with "
    "another activation than the layers (`conv_act`), and MLM heads other than transformers' default (`legacy`) are "
    "errors.",
    prefix="deberta",
    classes=class_names("DebertaV2"),
    defaults={"layer_norm_eps": 1e-7},
    names=Names(
        {
            **NAMES,
            **{f"{LAYER}/attention/{part}": f"{ATTENTION}.{part}_proj" for part in ("query", "key", "value")},
            "bert/encoder/relative_attention_norm": "deberta.encoder.LayerNorm",
            "bert/encoder/convolution": "deberta.encoder.conv.conv",
            "bert/encoder/convolution/norm": "deberta.encoder.conv.LayerNorm",
        },
        # BERT's pooler is the first layer of each row-level head.
        heads={f"BertFor{head}": {"bert/pooler": "pooler.dense"} for head in base.ROW_HEADS},
    ),
    decoder_bias="cls.predictions.decoder.bias",
    more_sizes=("position_buckets",),
    limits={
        **{key: limit for key, limit in LIMITS.items() if key != "conv_kernel_size"},
        "position_embedding_type": Limit("disentangled", "its attention is disentangled"),
        "type_vocab_size": base.NO_SEGMENTS,
    },
    fixed={"type_vocab_size": 0},
    # transformers does not load v3's pretraining heads, nor the parameters stored with its embeddings.
    settings={"BertForMaskedLM": {"legacy": True}},
    constants=r"(^|\.)embeddings\.(position_ids$|word_embeddings\._)|^(lm|mask)_predictions\.",
    has_form=lambda config, architecture: config.position_embedding_type == "disentangled" and not config.causal,
    read_config=_read_config,
    write_config=_write_config,
    head_dropout=("cls_dropout", base.ROW_HEADS),
    nest=_with_convolution,
    from_files=_from_files,
)

DEBERTA_V1 = dataclasses.replace(
    DEBERTA,
    model_type="deberta",
    title="DeBERTa",
    published_tokenizer="byte-level BPE",
    restrictions="Version 1. The heads of its pretraining are not read. MLM heads other than transformers' default "
    "(`legacy`) are errors.",
    classes={name: kind for name, kind in class_names("Deberta").items() if name != "BertForMultipleChoice"},
    names=Names(
        {
            **NAMES,
            "bert/embeddings/segment": "deberta.embeddings.token_type_embeddings",
            **{f"{LAYER}/attention/{part}": f"{ATTENTION}.in_proj.{part}" for part in ("query", "key", "value")},
            f"{LAYER}/attention/distance_query": f"{ATTENTION}.pos_q_proj",
            f"{LAYER}/attention/distance_key": f"{ATTENTION}.pos_proj",
        },
        heads={"BertForSequenceClassification": {"bert/pooler": "pooler.dense"}},
    ),
    may_lack_segments=True,
    more_sizes=(),
    limits={**LIMITS, "position_embedding_type": Limit("deberta_v1", "its distances are not in buckets")},
    fixed={},
    has_form=lambda config, architecture: config.position_embedding_type == "deberta_v1" and not config.causal,
    read_config=_read_linear_config,
    write_config=_write_linear_config,
    from_files=_split_projections,
    to_files=_join_projections,
)
