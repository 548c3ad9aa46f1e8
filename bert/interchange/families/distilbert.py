"""DistilBERT (Sanh et al. 2019): BERT without segments, and with relu in the row-level heads."""

from __future__ import annotations

from typing import Any

from bert.interchange.families.base import BERT_LIMITS, Family, Limit, class_names
from bert.interchange.names import Names
from bert.model.names import LAYER

BLOCK = "distilbert.transformer.layer.{}"
ROW_HEADS = ("SequenceClassification", "MultipleChoice")


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    return {key: limit.value for key, limit in DISTILBERT.limits.items()}


def _flatten(content: dict[str, Any]) -> dict[str, Any]:
    """Renames the dropout of row-level heads to its common key."""
    if not str(content.get("architectures")).strip("[]'").endswith(ROW_HEADS) or "seq_classif_dropout" not in content:
        return content
    return {"classifier_dropout": content["seq_classif_dropout"], **content}


DISTILBERT = Family(
    model_type="distilbert",
    title="DistilBERT",
    prefix="distilbert",
    classes=class_names("DistilBert"),
    names=Names(
        {
            "bert/embeddings/word": "distilbert.embeddings.word_embeddings",
            "bert/embeddings/position": "distilbert.embeddings.position_embeddings",
            "bert/embeddings/norm": "distilbert.embeddings.LayerNorm",
            f"{LAYER}/attention/query": f"{BLOCK}.attention.q_lin",
            f"{LAYER}/attention/key": f"{BLOCK}.attention.k_lin",
            f"{LAYER}/attention/value": f"{BLOCK}.attention.v_lin",
            f"{LAYER}/attention/output": f"{BLOCK}.attention.out_lin",
            f"{LAYER}/attention_norm": f"{BLOCK}.sa_layer_norm",
            f"{LAYER}/intermediate": f"{BLOCK}.ffn.lin1",
            f"{LAYER}/output": f"{BLOCK}.ffn.lin2",
            f"{LAYER}/output_norm": f"{BLOCK}.output_layer_norm",
            "predictions/transform": "vocab_transform",
            "predictions/norm": "vocab_layer_norm",
            "predictions/bias": "vocab_projector.bias",
            "predictions/decoder": "vocab_projector.weight",
            "classifier": "classifier",
            "qa_outputs": "qa_outputs",
        },
        # BERT's pooler is the first layer of each row-level head.
        heads={f"BertFor{head}": {"bert/pooler": "pre_classifier"} for head in ROW_HEADS},
    ),
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "max_position_embeddings": "max_position_embeddings",
        "initializer_range": "initializer_range",
    },
    limits={
        **BERT_LIMITS,
        "type_vocab_size": Limit(0, "it has no segments"),
        "position_offset": Limit(0, "its positions begin at row 0"),
        "embedding_size": Limit(None, "its embeddings have hidden_size features"),
        "pooler_act": Limit("relu", "its heads over a row have relu"),
        "layer_norm_eps": Limit(1e-12, "its LayerNorm has no other epsilon"),
    },
    has_form=lambda config, architecture: config.pooler_act == "relu",
    read_config=_read_config,
    flatten=_flatten,
)
