"""ELECTRA in Hugging Face's layout: the names that differ from BERT's, and its settings in config.json.

The discriminator is transformers' ElectraForPreTraining. The generator is its ElectraForMaskedLM, which is also the
class of any masked language model with narrow embeddings.
"""

from __future__ import annotations

from typing import Any

from bert.config import ModelConfig

DECODER_BIAS = "generator_lm_head.bias"

NAMES: dict[str, str | None] = {
    "bert/embeddings/projection": "electra.embeddings_project",
    "predictions/transform": "generator_predictions.dense",
    "predictions/norm": "generator_predictions.LayerNorm",
    "predictions/bias": DECODER_BIAS,
    "predictions/decoder": "generator_lm_head.weight",
    "discriminator_predictions/dense": "discriminator_predictions.dense",
    "discriminator_predictions/output": "discriminator_predictions.dense_prediction",
    "bert/pooler": None,
    "seq_relationship": None,
}
"""Our modules and their names; None for those that ELECTRA lacks. Others are BERT's with ``electra`` for ``bert``."""

HEADS = {
    "BertForSequenceClassification": {"bert/pooler": "classifier.dense", "classifier": "classifier.out_proj"},
    "BertForMultipleChoice": {"bert/pooler": "sequence_summary.summary"},
}
"""The names of an architecture's head: of each head over a row, the first layer is what BERT has as its pooler."""

SUMMARY = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
"""Settings of ElectraForMultipleChoice that are read, and transformers' defaults of them."""


def find_name(ours: str, bert: str | None, architecture: str) -> str | None:
    """ELECTRA's name of a module of ours, given BERT's; None where ELECTRA has none."""
    if ours in (head := HEADS.get(architecture, {})):
        return head[ours]
    if ours in NAMES:
        return NAMES[ours]
    return None if bert is None else bert.replace("bert.", "electra.", 1)


def is_electra(config: ModelConfig) -> bool:
    """Whether an encoder is of ELECTRA's form: with narrow embeddings, or with gelu in its pooler."""
    return config.pooler_act == "gelu" or config.embedding_width != config.hidden_size


def to_config(content: dict[str, Any]) -> dict[str, Any]:
    """Fields of our configuration, of a config.json's content beyond those that BERT has."""
    size = content["embedding_size"]
    return {"embedding_size": None if size == content["hidden_size"] else size, "pooler_act": "gelu"}


def from_config(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `to_config`."""
    return {"embedding_size": config.embedding_width}
