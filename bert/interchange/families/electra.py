"""ELECTRA: narrow embeddings, no pooler, gelu in the row-level heads, and a head that detects replaced tokens.

The discriminator is transformers' ElectraForPreTraining. The generator is ElectraForMaskedLM, which is also the class
of any masked language model with narrow embeddings.
"""

from __future__ import annotations

from typing import Any

from bert.config import ModelConfig
from bert.interchange.families.base import ABSOLUTE_POSITIONS, BERT_LIMITS, Family, Limit, class_names, encoder_names
from bert.interchange.names import Names
from bert.tokenizer.library import SpecialTokenIds

CLASSES = {**class_names("Electra"), "BertForReplacedTokenDetection": "ElectraForPreTraining"}


def _has_form(config: ModelConfig, architecture: str) -> bool:
    narrow = config.embedding_width != config.hidden_size
    detects = architecture == "BertForReplacedTokenDetection"
    return architecture in CLASSES and not config.position_offset and (detects or narrow or config.pooler_act == "gelu")


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    size = content["embedding_size"]
    return {"embedding_size": None if size == content["hidden_size"] else size, "pooler_act": "gelu"}


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {"embedding_size": config.embedding_width}


ELECTRA = Family(
    model_type="electra",
    title="ELECTRA",
    prefix="electra",
    classes=CLASSES,
    names=Names(
        {
            **encoder_names("electra"),
            "bert/embeddings/projection": "electra.embeddings_project",
            "predictions/transform": "generator_predictions.dense",
            "predictions/norm": "generator_predictions.LayerNorm",
            "predictions/bias": "generator_lm_head.bias",
            "predictions/decoder": "generator_lm_head.weight",
            "discriminator_predictions/dense": "discriminator_predictions.dense",
            "discriminator_predictions/output": "discriminator_predictions.dense_prediction",
        },
        # BERT's pooler is the first layer of each row-level head.
        heads={
            "BertForSequenceClassification": {"bert/pooler": "classifier.dense", "classifier": "classifier.out_proj"},
            "BertForMultipleChoice": {"bert/pooler": "sequence_summary.summary"},
        },
    ),
    more_sizes=("embedding_size",),
    limits={**BERT_LIMITS, "pooler_act": Limit("gelu", "its heads over a row have gelu")},
    prediction_act="gelu",
    settings={
        "BertForMultipleChoice": {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
    },
    fixed=ABSOLUTE_POSITIONS,
    has_form=_has_form,
    read_config=_read_config,
    write_config=_write_config,
)
