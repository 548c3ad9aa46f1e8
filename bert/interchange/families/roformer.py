"""RoFormer (Su et al. 2021): BERT with rotary positions instead of a position table, and without pooler."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base
from bert.interchange.families.base import Family, Limit, ParametersByPath, class_names, encoder_names
from bert.interchange.names import Names

CLASSES = {name: known for name, known in class_names("RoFormer").items() if name != "BertForMultipleChoice"}
"""All classes except multiple choice, whose classifier reads the last token."""

POOLER_ACTIVATIONS = ("gelu", "relu", "tanh")
"""Supported activations of row-level heads."""

ROTATED = re.compile(r".*/attention/(query|key)/(kernel|bias)")
ROTATED_IN_FILES = re.compile(r".*\.self\.(query|key)\.(weight|bias)")
"""Paths and names of the arrays whose features are rotated."""


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    activation, declared = content.get("hidden_act", "gelu"), content.get("architectures") or []
    if activation not in POOLER_ACTIVATIONS and CLASSES["BertForSequenceClassification"] in declared:
        raise UserError(
            f"hidden_act is {activation!r}, which the classifier applies too, and only "
            f"{', '.join(POOLER_ACTIVATIONS)} are supported there: use another model"
        )
    pooler_act = activation if activation in POOLER_ACTIVATIONS else "gelu"
    return {
        "embedding_size": base.read_embedding_size(content),
        "pooler_act": pooler_act,
        "pooler_dropout": pooler_act == "gelu",
    }


def _to_files(config: ModelConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    """Interleaves the features that are rotated together, and adds the table of sines and cosines."""

    def pairs(array: Any) -> Any:
        heads = np.reshape(array, (config.num_attention_heads, 2, -1, *np.shape(array)[1:]))
        return heads.swapaxes(1, 2).reshape(np.shape(array))

    rates = np.arange(config.head_size // 2) * 2 / config.head_size
    angles = np.arange(config.max_position_embeddings)[:, None] / np.power(config.rotary_base, rates)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    return {
        **{name: pairs(array) if ROTATED_IN_FILES.fullmatch(name) else array for name, array in tensors.items()},
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
    restrictions="`tokenizer_config.json` must name `BertTokenizer` or another class than RoFormer's. Multiple choice "
    "is not read, because it reads the last token.",
    names=Names(
        {
            **encoder_names("roformer", without=("position",)),
            "bert/embeddings/projection": "roformer.embeddings_project",
            **base.BERT_PREDICTIONS,
        },
        heads={"BertForSequenceClassification": base.CLASSIFIER_WITH_POOLER},
    ),
    decoder_bias="cls.predictions.decoder.bias",
    limits={
        **base.BERT_LIMITS,
        "position_embedding_type": Limit("rotary", "its positions are rotary"),
        "rotary_base": Limit(ModelConfig.rotary_base, "its rotations have this base"),
        "position_offset": base.FROM_ROW_0,
        "hidden_act": Limit("gelu", "its classifier applies the activation of its layers, and only gelu is supported"),
        "pooler_act": Limit("gelu", "its heads over a row have gelu"),
    },
    fixed={"rotary_value": False},
    constants=r"(^|\.)(encoder\.embed_positions\.weight|embeddings\.position_ids)$",
    has_form=lambda config, architecture: config.position_embedding_type == "rotary" and not config.pre_layer_norm,
    read_config=_read_config,
    write_config=lambda config, special: {"embedding_size": config.embedding_width, "rotary_value": False},
    share=_share,
    to_files=_to_files,
)
