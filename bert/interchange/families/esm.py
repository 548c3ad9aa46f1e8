"""ESM-2 and ESM-1b (Lin et al. 2023): pre-LN encoders of proteins, whose mask tokens have no embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base, llama
from bert.interchange.families.base import Family, Limit, encoder_names
from bert.interchange.families.roberta import LM_HEAD
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

BLOCK = "esm.encoder.layer.{}"
CONTACTS = "esm.contact_head.regression"

POSITIONS = {"learned": "absolute", "rotary": "rotary"}
"""Values of ``position_embedding_type`` here and in config.json."""


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    kind = content.get("position_embedding_type", "absolute")
    if kind not in POSITIONS.values():
        raise UserError(f"position_embedding_type is {kind!r}: use a model with one of {', '.join(POSITIONS.values())}")
    ids: dict[str, Any] = {key: content.get(key) for key in ("mask_token_id", "pad_token_id")}
    has_dropout = llama.read_flag(content, "token_dropout")
    for key, needed in {"mask_token_id": has_dropout, "pad_token_id": kind == "absolute"}.items():
        if needed and (isinstance(ids[key], bool) or not isinstance(ids[key], int) or ids[key] < 0):
            raise UserError(f"{key} is {ids[key]!r}: set it to the id of the token")
    values = {
        "token_dropout_id": ids["mask_token_id"] if has_dropout else None,
        "embedding_norm": bool(content.get("emb_layer_norm_before")),
    }
    if kind == "rotary":
        rotary = llama.read_rotary({"rope_theta": content.get("rope_theta")})  # transformers reads no other key
        return {**values, **rotary, "position_embedding_type": "rotary"}
    offset = ids["pad_token_id"] + 1
    return {**values, "position_offset": offset, "max_position_embeddings": content["max_position_embeddings"] - offset}


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    if config.position_embedding_type not in POSITIONS:
        raise UserError(
            f"model.position_embedding_type is {config.position_embedding_type}, which transformers' ESM does not "
            "have: export it as onnx"
        )
    dropped = config.token_dropout_id
    return {
        "position_embedding_type": POSITIONS[config.position_embedding_type],
        "max_position_embeddings": config.max_position_embeddings + config.position_offset,
        "rope_theta": config.rotary_base,
        "emb_layer_norm_before": config.embedding_norm,
        "token_dropout": dropped is not None,
        "mask_token_id": special.find("mask") if dropped is None else dropped,
        "is_folding_model": False,
    }


def _to_files(config: ModelConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    """Adds zeros for the regression of contacts, which every class of transformers has."""
    features = config.num_hidden_layers * config.num_attention_heads
    shapes = {"weight": (1, features), "bias": (1,)}
    return tensors | {f"{CONTACTS}.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _from_files(config: ModelConfig, content: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Removes the position table that published models with rotary positions have, and that transformers ignores."""
    if not any("rotary_embeddings" in name for name in tensors):
        return tensors
    return {
        name: array for name, array in tensors.items() if not name.endswith("embeddings.position_embeddings.weight")
    }


ESM = Family(
    model_type="esm",
    title="ESM",
    published_tokenizer="one token per amino acid",
    restrictions="The regression of contacts is not read. The tokenizer is `vocab.txt`.",
    prefix="esm",
    classes={
        "Bert": "EsmModel",
        "BertForMaskedLM": "EsmForMaskedLM",
        "BertForSequenceClassification": "EsmForSequenceClassification",
        "BertForTokenClassification": "EsmForTokenClassification",
    },
    names=Names(
        {
            **encoder_names("esm", without=("segment",)),
            "bert/embeddings/norm": "esm.embeddings.layer_norm",
            f"{LAYER}/attention_norm": f"{BLOCK}.attention.LayerNorm",
            f"{LAYER}/output_norm": f"{BLOCK}.LayerNorm",
            "bert/encoder/norm": "esm.encoder.emb_layer_norm_after",
            "bert/pooler": "esm.pooler.dense",
            **LM_HEAD,
        },
        heads={"BertForSequenceClassification": base.CLASSIFIER_WITH_POOLER},
    ),
    keys={name: key for name, key in base.KEYS.items() if name != "type_vocab_size"},
    limits={
        **{
            key: limit
            for key, limit in base.BERT_LIMITS.items()
            if key not in ("position_embedding_type", "embedding_norm", "token_dropout_id")
        },
        "pre_layer_norm": Limit(True, "it has LayerNorm before attention and feed-forward"),
        "hidden_act": Limit("gelu", "its layers have gelu"),
        "type_vocab_size": base.NO_SEGMENTS,
        "embedding_size": base.FULL_WIDTH,
        "pooler_act": base.TANH_POOLER,
    },
    pooler_dropout=True,
    fixed={"is_folding_model": False, "hidden_act": "gelu"},
    constants=r"(^|\.)(rotary_embeddings\.|embeddings\.position_ids$|contact_head\.)",
    has_form=lambda config, architecture: (
        config.pre_layer_norm
        and not config.causal
        and config.norm_type == "layer"
        and not config.gated_feed_forward
        and config.attention_window is None
        and (config.token_dropout_id is not None or config.position_embedding_type == "rotary")
    ),
    read_config=_read_config,
    write_config=_write_config,
    flatten=lambda content: {"hidden_act": "gelu", **content},
    from_files=_from_files,
    to_files=_to_files,
)
