"""RoBERTa and its multilingual and French versions, XLM-RoBERTa and CamemBERT.

RoBERTa is BERT with positions that begin after the padding id, and with different heads. XLM-RoBERTa and CamemBERT are
the same model with Unigram vocabularies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families.base import ABSOLUTE_POSITIONS, BERT_LIMITS, Family, Limit, class_names, encoder_names
from bert.interchange.names import Names
from bert.tokenizer.library import SpecialTokenIds


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    padding = content.get("pad_token_id", 1)
    if not isinstance(padding, int):
        raise UserError(f"pad_token_id is {padding!r}, and RoBERTa counts its positions from there: fix it")
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
    prefix="roberta",
    classes=class_names("Roberta"),
    names=Names(
        {
            **encoder_names("roberta"),
            "bert/pooler": "roberta.pooler.dense",
            "predictions/transform": "lm_head.dense",
            "predictions/norm": "lm_head.layer_norm",
            "predictions/bias": "lm_head.bias",
            "predictions/decoder": "lm_head.decoder.weight",
        },
        # BERT's pooler is the first layer of the classifier.
        heads={
            "BertForSequenceClassification": {"bert/pooler": "classifier.dense", "classifier": "classifier.out_proj"}
        },
    ),
    decoder_bias="lm_head.decoder.bias",
    limits={
        **BERT_LIMITS,
        "embedding_size": Limit(None, "its embeddings have hidden_size features"),
        "pooler_act": Limit("tanh", "its pooler has tanh"),
    },
    prediction_act="gelu",
    fixed=ABSOLUTE_POSITIONS,
    has_form=lambda config, architecture: config.position_offset > 0 and not config.pre_layer_norm,
    read_config=_read_config,
    write_config=_write_config,
)

XLM_ROBERTA = dataclasses.replace(
    ROBERTA, model_type="xlm-roberta", title="XLM-RoBERTa", classes=class_names("XLMRoberta"), vocabulary="unigram"
)

CAMEMBERT = dataclasses.replace(
    XLM_ROBERTA, model_type="camembert", title="CamemBERT", classes=class_names("Camembert")
)
