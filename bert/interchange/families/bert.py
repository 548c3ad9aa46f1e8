"""BERT in the layouts of Hugging Face and google-research/bert, and DistilBERT, ELECTRA and ALBERT."""

from __future__ import annotations

from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base
from bert.interchange.families.base import Family, Limit, class_names, encoder_names
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

BERT = Family(
    model_type="bert",
    title="BERT",
    prefix="bert",
    classes=class_names("Bert", "PreTraining", "NextSentencePrediction"),
    names=Names(
        {
            **encoder_names("bert"),
            "bert/pooler": "bert.pooler.dense",
            **base.BERT_PREDICTIONS,
            "seq_relationship": "cls.seq_relationship",
        }
    ),
    decoder_bias="cls.predictions.decoder.bias",
    limits={**base.BERT_LIMITS, "embedding_size": base.FULL_WIDTH, "pooler_act": base.TANH_POOLER},
    fixed=base.ABSOLUTE_POSITIONS,
    has_form=lambda config, architecture: True,
)

GOOGLE_NAMES = Names(
    {
        "bert/embeddings/word": "bert/embeddings/word_embeddings",
        "bert/embeddings/position": "bert/embeddings/position_embeddings",
        "bert/embeddings/segment": "bert/embeddings/token_type_embeddings",
        "bert/embeddings/norm": "bert/embeddings/LayerNorm",
        f"{LAYER}/attention/query": f"{LAYER}/attention/self/query",
        f"{LAYER}/attention/key": f"{LAYER}/attention/self/key",
        f"{LAYER}/attention/value": f"{LAYER}/attention/self/value",
        f"{LAYER}/attention/output": f"{LAYER}/attention/output/dense",
        f"{LAYER}/attention_norm": f"{LAYER}/attention/output/LayerNorm",
        f"{LAYER}/intermediate": f"{LAYER}/intermediate/dense",
        f"{LAYER}/output": f"{LAYER}/output/dense",
        f"{LAYER}/output_norm": f"{LAYER}/output/LayerNorm",
        "bert/pooler": "bert/pooler/dense",
        "predictions/transform": "cls/predictions/transform/dense",
        "predictions/norm": "cls/predictions/transform/LayerNorm",
        "predictions/bias": "cls/predictions/output_bias",
        "seq_relationship": "cls/seq_relationship/",
        "classifier": "",  # run_classifier.py
        "qa_outputs": "cls/squad/",  # run_squad.py
    },
    arrays={
        "table": (("/embedding", "", False),),
        "dense": (("/kernel", "/kernel", False), ("/bias", "/bias", False)),
        "output": (("/kernel", "output_weights", True), ("/bias", "output_bias", False)),
        "norm": (("/scale", "/gamma", False), ("/bias", "/beta", False)),
        "array": (("", "", False),),
    },
)
"""Names in google-research/bert checkpoints, which store the last dense layer of a head as a matrix [outputs, D]."""

DISTILBERT_LAYER = "distilbert.transformer.layer.{}"

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
            f"{LAYER}/attention/query": f"{DISTILBERT_LAYER}.attention.q_lin",
            f"{LAYER}/attention/key": f"{DISTILBERT_LAYER}.attention.k_lin",
            f"{LAYER}/attention/value": f"{DISTILBERT_LAYER}.attention.v_lin",
            f"{LAYER}/attention/output": f"{DISTILBERT_LAYER}.attention.out_lin",
            f"{LAYER}/attention_norm": f"{DISTILBERT_LAYER}.sa_layer_norm",
            f"{LAYER}/intermediate": f"{DISTILBERT_LAYER}.ffn.lin1",
            f"{LAYER}/output": f"{DISTILBERT_LAYER}.ffn.lin2",
            f"{LAYER}/output_norm": f"{DISTILBERT_LAYER}.output_layer_norm",
            "predictions/transform": "vocab_transform",
            "predictions/norm": "vocab_layer_norm",
            "predictions/bias": "vocab_projector.bias",
            "predictions/decoder": "vocab_projector.weight",
            "classifier": "classifier",
            "qa_outputs": "qa_outputs",
        },
        # BERT's pooler is the first layer of each row-level head.
        heads={f"BertFor{head}": {"bert/pooler": "pre_classifier"} for head in base.ROW_HEADS},
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
        **base.BERT_LIMITS,
        "type_vocab_size": base.NO_SEGMENTS,
        "position_offset": base.FROM_ROW_0,
        "embedding_size": base.FULL_WIDTH,
        "pooler_act": Limit("relu", "its heads over a row have relu"),
        "layer_norm_eps": Limit(1e-12, "its LayerNorm has no other epsilon"),
    },
    has_form=lambda config, architecture: config.pooler_act == "relu",
    head_dropout=("seq_classif_dropout", base.ROW_HEADS),
)
"""DistilBERT (Sanh et al. 2019): BERT without segments, and with relu in the row-level heads."""

ELECTRA_CLASSES = {**class_names("Electra"), "BertForReplacedTokenDetection": "ElectraForPreTraining"}


def _is_electra(config: ModelConfig, architecture: str) -> bool:
    narrow = config.embedding_width != config.hidden_size
    detects = architecture == "BertForReplacedTokenDetection"
    has_form = detects or narrow or config.pooler_act == "gelu"
    return architecture in ELECTRA_CLASSES and not config.position_offset and has_form


ELECTRA = Family(
    model_type="electra",
    title="ELECTRA",
    prefix="electra",
    classes=ELECTRA_CLASSES,
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
            "BertForSequenceClassification": base.CLASSIFIER_WITH_POOLER,
            "BertForMultipleChoice": {"bert/pooler": "sequence_summary.summary"},
        },
    ),
    more_sizes=("embedding_size",),
    limits={**base.BERT_LIMITS, "pooler_act": Limit("gelu", "its heads over a row have gelu")},
    prediction_act="gelu",
    pooler_dropout=True,
    settings={
        "BertForMultipleChoice": {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
    },
    fixed=base.ABSOLUTE_POSITIONS,
    has_form=_is_electra,
    read_config=lambda content: {"embedding_size": base.read_embedding_size(content)},
    write_config=lambda config, special: {"embedding_size": config.embedding_width},
)
"""ELECTRA (Clark et al. 2020): narrow embeddings, no pooler, gelu in the row-level heads.

The discriminator, whose head detects replaced tokens, is transformers' ElectraForPreTraining. The generator is
ElectraForMaskedLM, which is also the class of any masked language model with narrow embeddings.
"""

ALBERT_CLASSES = class_names("Albert", "PreTraining")
ALBERT_LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.0"


def _read_albert_config(content: dict[str, Any]) -> dict[str, Any]:
    if base.read_embedding_size(content) is None:
        raise UserError(
            f"embedding_size and hidden_size are both {content['hidden_size']}, and a mapping between equal sizes is "
            "not supported: use another model"
        )
    return {"embedding_size": content["embedding_size"], "layer_groups": content["num_hidden_groups"]}


def _write_albert_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {
        "embedding_size": config.embedding_width,
        "num_hidden_groups": config.layer_groups,
        "inner_group_num": 1,
        "bos_token_id": special.find("cls"),
        "eos_token_id": special.find("sep"),
    }


def _is_albert(config: ModelConfig, architecture: str) -> bool:
    narrow = config.embedding_width != config.hidden_size
    return architecture in ALBERT_CLASSES and narrow and config.layer_groups is not None


ALBERT = Family(
    model_type="albert",
    title="ALBERT",
    published_tokenizer="SentencePiece (Unigram)",
    restrictions="Several layers per group (`inner_group_num`) are an error.",
    prefix="albert",
    classes=ALBERT_CLASSES,
    names=Names(
        {
            "bert/embeddings/word": "albert.embeddings.word_embeddings",
            "bert/embeddings/position": "albert.embeddings.position_embeddings",
            "bert/embeddings/segment": "albert.embeddings.token_type_embeddings",
            "bert/embeddings/norm": "albert.embeddings.LayerNorm",
            "bert/embeddings/projection": "albert.encoder.embedding_hidden_mapping_in",
            f"{LAYER}/attention/query": f"{ALBERT_LAYER}.attention.query",
            f"{LAYER}/attention/key": f"{ALBERT_LAYER}.attention.key",
            f"{LAYER}/attention/value": f"{ALBERT_LAYER}.attention.value",
            f"{LAYER}/attention/output": f"{ALBERT_LAYER}.attention.dense",
            f"{LAYER}/attention_norm": f"{ALBERT_LAYER}.attention.LayerNorm",
            f"{LAYER}/intermediate": f"{ALBERT_LAYER}.ffn",
            f"{LAYER}/output": f"{ALBERT_LAYER}.ffn_output",
            f"{LAYER}/output_norm": f"{ALBERT_LAYER}.full_layer_layer_norm",
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
    defaults=base.NO_DROPOUT,
    more_sizes=("embedding_size", "num_hidden_groups"),
    limits={
        **{key: limit for key, limit in base.BERT_LIMITS.items() if key != "layer_groups"},
        "position_offset": base.FROM_ROW_0,
        "pooler_act": base.TANH_POOLER,
    },
    fixed={"inner_group_num": 1, **base.ABSOLUTE_POSITIONS},
    has_form=_is_albert,
    read_config=_read_albert_config,
    write_config=_write_albert_config,
    head_dropout=("classifier_dropout_prob", ("",)),
)
"""ALBERT (Lan et al. 2019): BERT with narrow embeddings, shared layers, and sentence order prediction."""
