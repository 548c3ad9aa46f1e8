"""RoFormer (Su et al. 2021): BERT with rotary positions instead of a position table, and without pooler."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families.base import BERT_LIMITS, Family, Limit, ParametersByPath, class_names, encoder_names
from bert.interchange.names import Names
from bert.tokenizer.library import SpecialTokenIds

CLASSES = {ours: name for ours, name in class_names("RoFormer").items() if ours != "BertForMultipleChoice"}
"""All classes except multiple choice, whose classifier reads the last token."""

POOLER_ACTIVATIONS = ("gelu", "relu", "tanh")
"""Supported activations of row-level heads."""

ROTATED = re.compile(r".*/attention/(query|key)/(kernel|bias)")
THEIR_ROTATED = re.compile(r".*\.self\.(query|key)\.(weight|bias)")


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    size, activation = content.get("embedding_size"), content.get("hidden_act", "gelu")
    declared = content.get("architectures") or []
    if activation not in POOLER_ACTIVATIONS and CLASSES["BertForSequenceClassification"] in declared:
        raise UserError(
            f"hidden_act is {activation!r}, which the classifier takes too, and {', '.join(POOLER_ACTIVATIONS)} are "
            "read there: name another model"
        )
    return {
        "embedding_size": None if size == content["hidden_size"] else size,
        "pooler_act": activation if activation in POOLER_ACTIVATIONS else "gelu",
        "position_embedding_type": "rotary",
    }


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {"embedding_size": config.embedding_width, "rotary_value": False}


def _to_files(config: ModelConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    """Interleaves the features that are rotated together, and adds the table of sines and cosines."""

    def pairs(array: Any) -> Any:
        heads = np.reshape(array, (config.num_attention_heads, 2, -1, *np.shape(array)[1:]))
        return heads.swapaxes(1, 2).reshape(np.shape(array))

    rates = np.arange(config.head_size // 2) * 2 / config.head_size
    angles = np.arange(config.max_position_embeddings)[:, None] / np.power(config.rotary_base, rates)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    return {
        **{name: pairs(array) if THEIR_ROTATED.fullmatch(name) else array for name, array in tensors.items()},
        "roformer.encoder.embed_positions.weight": table,
    }


def _share(config: ModelConfig, params: ParametersByPath) -> tuple[ModelConfig, ParametersByPath]:
    """Moves the features that are rotated together half a head apart, as in `bert.model.positions.Rotation`."""

    def halves(array: Any) -> Any:
        heads = np.reshape(array, (*np.shape(array)[:-1], config.num_attention_heads, -1, 2))
        return heads.swapaxes(-1, -2).reshape(np.shape(array))

    return config, {path: halves(array) if ROTATED.fullmatch(path) else array for path, array in params.items()}


ROFORMER = Family(
    model_type="roformer",
    title="RoFormer",
    prefix="roformer",
    classes=CLASSES,
    own_tokenizer="cuts Chinese text by a dictionary",
    names=Names(
        {
            **{ours: theirs for ours, theirs in encoder_names("roformer").items() if "position" not in ours},
            "bert/embeddings/projection": "roformer.embeddings_project",
            "predictions/transform": "cls.predictions.transform.dense",
            "predictions/norm": "cls.predictions.transform.LayerNorm",
            "predictions/bias": "cls.predictions.bias",
            "predictions/decoder": "cls.predictions.decoder.weight",
        },
        heads={
            "BertForSequenceClassification": {"bert/pooler": "classifier.dense", "classifier": "classifier.out_proj"}
        },
    ),
    decoder_bias="cls.predictions.decoder.bias",
    limits={
        **BERT_LIMITS,
        "position_embedding_type": Limit("rotary", "its positions are rotary"),
        "rotary_base": Limit(ModelConfig.rotary_base, "its rotations have this base"),
        "position_offset": Limit(0, "its positions begin at 0"),
        "hidden_act": Limit("gelu", "its classifier takes the activation of its layers, and gelu alone is read"),
        "pooler_act": Limit("gelu", "its heads over a row have gelu"),
    },
    fixed={"rotary_value": False},
    constants=r"(^|\.)(encoder\.embed_positions\.weight|embeddings\.position_ids)$",
    has_form=lambda config, architecture: config.position_embedding_type == "rotary" and not config.pre_layer_norm,
    read_config=_read_config,
    write_config=_write_config,
    share=_share,
    to_files=_to_files,
)
