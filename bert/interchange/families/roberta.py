"""RoBERTa, its multilingual and French versions, its pre-LN version, and MPNet.

RoBERTa is BERT with positions that begin after the padding id, and with different heads. XLM-RoBERTa and CamemBERT are
the same model with Unigram vocabularies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base
from bert.interchange.families.base import Family, Limit, ParametersByPath, class_names, encoder_names
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

LM_HEAD = {
    "predictions/transform": "lm_head.dense",
    "predictions/norm": "lm_head.layer_norm",
    "predictions/bias": "lm_head.bias",
    "predictions/decoder": "lm_head.decoder.weight",
}


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    padding = content.get("pad_token_id", 1)
    if not isinstance(padding, int):
        raise UserError(
            f"pad_token_id is {padding!r}, and RoBERTa counts its positions from it: set it to a whole number"
        )
    offset = padding + 1
    return {"position_offset": offset, "max_position_embeddings": content["max_position_embeddings"] - offset}


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {
        "max_position_embeddings": config.max_position_embeddings + config.position_offset,
        "pad_token_id": config.position_offset - 1,
        "bos_token_id": special.cls,
        "eos_token_id": special.sep,
    }


ROBERTA = Family(
    model_type="roberta",
    title="RoBERTa",
    published_tokenizer="byte-level BPE",
    prefix="roberta",
    classes=class_names("Roberta"),
    names=Names(
        {
            **encoder_names("roberta"),
            "bert/pooler": "roberta.pooler.dense",
            **LM_HEAD,
        },
        heads={"BertForSequenceClassification": base.CLASSIFIER_WITH_POOLER},
    ),
    decoder_bias="lm_head.decoder.bias",
    limits={**base.BERT_LIMITS, "embedding_size": base.FULL_WIDTH, "pooler_act": base.TANH_POOLER},
    prediction_act="gelu",
    pooler_dropout=True,
    fixed=base.ABSOLUTE_POSITIONS,
    has_form=lambda config, architecture: config.position_offset > 0 and not config.pre_layer_norm,
    read_config=_read_config,
    write_config=_write_config,
)

XLM_ROBERTA = dataclasses.replace(
    ROBERTA,
    model_type="xlm-roberta",
    title="XLM-RoBERTa",
    published_tokenizer="SentencePiece (Unigram)",
    classes=class_names("XLMRoberta"),
    vocabulary="unigram",
)

CAMEMBERT = dataclasses.replace(
    XLM_ROBERTA,
    model_type="camembert",
    title="CamemBERT",
    published_tokenizer="SentencePiece (Unigram)",
    restrictions="Exported as XLM-RoBERTa, which is the same model.",
    classes=class_names("Camembert"),
)

POSITIONS = "bert/embeddings/position/embedding"
PRELAYERNORM_LAYER = "roberta_prelayernorm.encoder.layer.{}"
PRELAYERNORM_CLASSES = class_names("RobertaPreLayerNorm")


def _separate(config: ModelConfig, params: ParametersByPath, padding: int) -> tuple[ModelConfig, ParametersByPath]:
    """Extends the position table to begin at row 0. Positions begin after the padding id."""
    if config.position_offset or POSITIONS not in params:
        return config, params
    table = np.asarray(params[POSITIONS])
    padded = np.pad(table, [(padding + 1, 0), (0, 0)])
    return dataclasses.replace(config, position_offset=padding + 1), {**params, POSITIONS: padded}


ROBERTA_PRELAYERNORM = dataclasses.replace(
    ROBERTA,
    model_type="roberta-prelayernorm",
    title="RoBERTa-PreLayerNorm",
    prefix="roberta_prelayernorm",
    classes=PRELAYERNORM_CLASSES,
    names=Names(
        {
            **encoder_names("roberta_prelayernorm"),
            "bert/pooler": "roberta_prelayernorm.pooler.dense",
            **LM_HEAD,
            f"{LAYER}/attention_norm": f"{PRELAYERNORM_LAYER}.attention.LayerNorm",
            f"{LAYER}/output_norm": f"{PRELAYERNORM_LAYER}.intermediate.LayerNorm",
            "bert/encoder/norm": "roberta_prelayernorm.LayerNorm",
        },
        heads=ROBERTA.names.heads,
    ),
    limits={**ROBERTA.limits, "pre_layer_norm": Limit(True, "it has LayerNorm before attention and feed-forward")},
    has_form=lambda config, architecture: config.pre_layer_norm and architecture in PRELAYERNORM_CLASSES,
    separate=_separate,
)
"""RoBERTa with pre-LN layers (Ott et al. 2019): any pre-LN encoder without a sentence-pair head."""

XL_LAYER = "roberta.encoder.layer.{}"

XLM_ROBERTA_XL = dataclasses.replace(
    ROBERTA_PRELAYERNORM,
    model_type="xlm-roberta-xl",
    title="XLM-RoBERTa-XL",
    published_tokenizer="SentencePiece (Unigram)",
    prefix="roberta",
    classes=class_names("XLMRobertaXL"),
    vocabulary="unigram",
    names=Names(
        {
            **encoder_names("roberta", without=("norm",)),
            "bert/pooler": "roberta.pooler.dense",
            **LM_HEAD,
            f"{LAYER}/attention_norm": f"{XL_LAYER}.attention.self_attn_layer_norm",
            f"{LAYER}/output_norm": f"{XL_LAYER}.LayerNorm",
            "bert/encoder/norm": "roberta.encoder.LayerNorm",
        },
        heads=ROBERTA.names.heads,
    ),
    limits={**ROBERTA_PRELAYERNORM.limits, "embedding_norm": Limit(False, "its embeddings have no LayerNorm")},
    defaults={"layer_norm_eps": 1e-5},
    has_form=lambda config, architecture: (
        config.pre_layer_norm
        and not config.embedding_norm
        and not config.causal
        and config.norm_type == "layer"
        and config.position_embedding_type != "rotary"
        and config.position_offset > 0
    ),
)
"""XLM-RoBERTa (Goyal et al. 2021) with pre-LN layers, and without LayerNorm after its embeddings."""

MPNET_ATTENTION = "mpnet.encoder.layer.{}.attention"
OFFSET, BUCKETS = 2, 32
"""Constants in transformers' code that config.json does not contain."""


def _write_mpnet_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {
        "max_position_embeddings": config.max_position_embeddings + OFFSET,
        "relative_attention_num_buckets": BUCKETS,
        "bos_token_id": special.cls,
        "eos_token_id": special.sep,
    }


MPNET = Family(
    model_type="mpnet",
    title="MPNet",
    restrictions="Other than 32 buckets of distances are an error.",
    prefix="mpnet",
    classes=class_names("MPNet"),
    names=Names(
        {
            **encoder_names("mpnet", without=("segment",)),
            **LM_HEAD,
            f"{LAYER}/attention/query": f"{MPNET_ATTENTION}.attn.q",
            f"{LAYER}/attention/key": f"{MPNET_ATTENTION}.attn.k",
            f"{LAYER}/attention/value": f"{MPNET_ATTENTION}.attn.v",
            f"{LAYER}/attention/output": f"{MPNET_ATTENTION}.attn.o",
            f"{LAYER}/attention_norm": f"{MPNET_ATTENTION}.LayerNorm",
            "bert/encoder/relative_attention_bias": "mpnet.encoder.relative_attention_bias",
            "bert/pooler": "mpnet.pooler.dense",
        },
        heads=ROBERTA.names.heads,
    ),
    decoder_bias=ROBERTA.decoder_bias,
    keys={name: key for name, key in base.KEYS.items() if name != "type_vocab_size"},
    limits={
        **base.BERT_LIMITS,
        "relative_attention_buckets": Limit(BUCKETS, f"it has {BUCKETS} buckets of distances"),
        "type_vocab_size": base.NO_SEGMENTS,
        "position_offset": Limit(OFFSET, f"its positions begin at row {OFFSET}"),
        "embedding_size": base.FULL_WIDTH,
        "pooler_act": base.TANH_POOLER,
    },
    prediction_act="gelu",
    pooler_dropout=True,
    fixed={"relative_attention_num_buckets": BUCKETS},
    has_form=lambda config, architecture: config.relative_attention_buckets is not None and not config.causal,
    read_config=lambda content: {"max_position_embeddings": content["max_position_embeddings"] - OFFSET},
    write_config=_write_mpnet_config,
)
"""MPNet (Song et al. 2020): RoBERTa without segments, and with relative attention bias."""
