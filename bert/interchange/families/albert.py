"""ALBERT (Lan et al. 2019): BERT with narrow embeddings, shared layers, and sentence order prediction."""

from __future__ import annotations

from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families.base import ABSOLUTE_POSITIONS, BERT_LIMITS, Family, Limit, class_names
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

CLASSES = class_names("Albert", "PreTraining")
BLOCK = "albert.encoder.albert_layer_groups.{}.albert_layers.0"


def _has_form(config: ModelConfig, architecture: str) -> bool:
    narrow = config.embedding_width != config.hidden_size
    return architecture in CLASSES and narrow and config.layer_groups is not None


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    if content["embedding_size"] == content["hidden_size"]:
        raise UserError(
            f"embedding_size and hidden_size are both {content['hidden_size']}, and a mapping between equal sizes is "
            "not read: name another model"
        )
    return {"embedding_size": content["embedding_size"], "layer_groups": content["num_hidden_groups"]}


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {
        "embedding_size": config.embedding_width,
        "num_hidden_groups": config.layer_groups,
        "inner_group_num": 1,
        "bos_token_id": special.find("cls"),
        "eos_token_id": special.find("sep"),
    }


def _flatten(content: dict[str, Any]) -> dict[str, Any]:
    """Renames the dropout of heads to its common key."""
    if content.get("classifier_dropout_prob") is None:
        return content
    return {"classifier_dropout": content["classifier_dropout_prob"], **content}


ALBERT = Family(
    model_type="albert",
    title="ALBERT",
    prefix="albert",
    classes=CLASSES,
    names=Names(
        {
            "bert/embeddings/word": "albert.embeddings.word_embeddings",
            "bert/embeddings/position": "albert.embeddings.position_embeddings",
            "bert/embeddings/segment": "albert.embeddings.token_type_embeddings",
            "bert/embeddings/norm": "albert.embeddings.LayerNorm",
            "bert/embeddings/projection": "albert.encoder.embedding_hidden_mapping_in",
            f"{LAYER}/attention/query": f"{BLOCK}.attention.query",
            f"{LAYER}/attention/key": f"{BLOCK}.attention.key",
            f"{LAYER}/attention/value": f"{BLOCK}.attention.value",
            f"{LAYER}/attention/output": f"{BLOCK}.attention.dense",
            f"{LAYER}/attention_norm": f"{BLOCK}.attention.LayerNorm",
            f"{LAYER}/intermediate": f"{BLOCK}.ffn",
            f"{LAYER}/output": f"{BLOCK}.ffn_output",
            f"{LAYER}/output_norm": f"{BLOCK}.full_layer_layer_norm",
            "bert/pooler": "albert.pooler",
            "predictions/transform": "predictions.dense",
            "predictions/norm": "predictions.LayerNorm",
            "predictions/bias": "predictions.bias",
            "predictions/decoder": "predictions.decoder.weight",
            "seq_relationship": "sop_classifier.classifier",
            "classifier": "classifier",
            "qa_outputs": "qa_outputs",
        }
    ),
    decoder_bias="predictions.decoder.bias",
    more_sizes=("embedding_size", "num_hidden_groups"),
    limits={
        **{key: limit for key, limit in BERT_LIMITS.items() if key != "layer_groups"},
        "position_offset": Limit(0, "its positions begin at row 0"),
        "pooler_act": Limit("tanh", "its pooler has tanh"),
    },
    fixed={"inner_group_num": 1, **ABSOLUTE_POSITIONS},
    has_form=_has_form,
    read_config=_read_config,
    write_config=_write_config,
    flatten=_flatten,
)
