"""DeBERTa-v3 (He et al. 2021): BERT with disentangled attention, without position table and segments."""

from __future__ import annotations

from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base
from bert.interchange.families.base import Family, Limit, class_names, encoder_names
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

ATTENTION = "deberta.encoder.layer.{}.attention.self"

FORM: dict[str, tuple[Any, Any]] = {
    "relative_attention": (False, True),
    "position_biased_input": (True, False),
    "share_att_key": (False, True),
    "norm_rel_ebd": ("none", "layer_norm"),
    "conv_kernel_size": (0, 0),
    "pooler_dropout": (0, 0),
}
"""Settings with a single supported value: transformers' default, and the supported value, which v3 uses."""

PRODUCTS = ["p2c", "c2p"]


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    size, length = content["hidden_size"], content["max_position_embeddings"]
    form = {
        **FORM,
        **dict.fromkeys(("embedding_size", "pooler_hidden_size"), (size, size)),
        "attention_head_size": (size // max(content["num_attention_heads"], 1),) * 2,
    }
    for key, (default, supported) in form.items():
        if (value := content.get(key, default)) != supported:
            raise UserError(f"{key} is {value!r}, and only {supported!r} is supported: use another model")
    products = content.get("pos_att_type")
    listed = products.lower().split("|") if isinstance(products, str) else products
    if not isinstance(listed, list) or sorted(str(kind).strip() for kind in listed) != sorted(PRODUCTS):
        raise UserError(f"pos_att_type is {products!r}, and only {'|'.join(PRODUCTS)} is supported: use another model")
    buckets, distance = content["position_buckets"], content.get("max_relative_positions", -1)
    if buckets < 1:
        raise UserError(f"position_buckets is {buckets}: set it to at least 1, or use another model")
    if distance not in (-1, 0, length):
        raise UserError(
            f"max_relative_positions is {distance!r}, and only max_position_embeddings ({length}) is supported: use "
            "another model"
        )
    return {
        "layer_norm_eps": content.get("layer_norm_eps", 1e-7),
        "relative_attention_buckets": 2 * buckets,
        "pooler_act": content.get("pooler_hidden_act", "gelu"),
    }


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {
        **{key: supported for key, (_, supported) in FORM.items()},
        "pos_att_type": PRODUCTS,
        "max_relative_positions": -1,
        "position_buckets": (config.relative_attention_buckets or 0) // 2,
        "pooler_hidden_size": config.hidden_size,
        "pooler_hidden_act": config.pooler_act,
        "legacy": True,
    }


DEBERTA = Family(
    model_type="deberta-v2",
    title="DeBERTa-v3",
    restrictions="The heads of v3's pretraining are not read. A convolution (`conv_kernel_size`) and MLM heads other "
    "than transformers' default (`legacy`) are errors.",
    prefix="deberta",
    classes=class_names("DebertaV2"),
    names=Names(
        {
            **encoder_names("deberta", without=("position", "segment")),
            **base.BERT_PREDICTIONS,
            **{f"{LAYER}/attention/{part}": f"{ATTENTION}.{part}_proj" for part in ("query", "key", "value")},
            "bert/encoder/relative_attention_embeddings": "deberta.encoder.rel_embeddings",
            "bert/encoder/relative_attention_norm": "deberta.encoder.LayerNorm",
        },
        # BERT's pooler is the first layer of each row-level head.
        heads={f"BertFor{head}": {"bert/pooler": "pooler.dense"} for head in base.ROW_HEADS},
    ),
    decoder_bias="cls.predictions.decoder.bias",
    more_sizes=("position_buckets",),
    limits={
        **{key: limit for key, limit in base.BERT_LIMITS.items() if key != "relative_attention_buckets"},
        "position_embedding_type": Limit("disentangled", "its attention is disentangled"),
        "type_vocab_size": base.NO_SEGMENTS,
        "position_offset": base.FROM_ROW_0,
        "embedding_size": base.FULL_WIDTH,
    },
    fixed={"type_vocab_size": 0},
    # transformers does not load v3's pretraining heads, nor the parameters stored with its embeddings.
    settings={"BertForMaskedLM": {"legacy": True}},
    constants=r"(^|\.)embeddings\.(position_ids$|position_embeddings\.|word_embeddings\._)|^(lm|mask)_predictions\.",
    has_form=lambda config, architecture: config.position_embedding_type == "disentangled" and not config.causal,
    read_config=_read_config,
    write_config=_write_config,
    flatten=base.rename_dropout("cls_dropout", base.ROW_HEADS),
)
