"""EuroBERT (Boizard et al. 2025): Llama that reads both sides, with a classifier over all tokens."""

from __future__ import annotations

from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base, llama
from bert.interchange.families.base import Family, Limit
from bert.interchange.names import Names
from bert.model.names import POOLER
from bert.tokenizer.library import SpecialTokenIds

POOLING = {"first": "bos", "mean": "mean", "each": "late"}
"""Values of ``pooler_input``, and the corresponding values of ``classifier_pooling``."""


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    pooling = content.get("classifier_pooling", "late")
    if pooling not in POOLING.values():
        raise UserError(f"classifier_pooling is {pooling!r}: use a model with one of {', '.join(POOLING.values())}")
    return {
        **base.INITIAL,
        **llama.read_heads(content),
        **llama.read_rotary(content),
        **llama.read_biases(content, use_bias=True),
        "prediction_bias": llama.read_flag(content, "mlp_bias"),
        "pooler_input": next(kind for kind, name in POOLING.items() if name == pooling),
    }


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    biases = llama.write_biases(config)
    if config.prediction_bias and not biases["mlp_bias"]:
        raise UserError(
            "model.prediction_bias is true but model.intermediate_bias is false, which transformers' EuroBERT does not "
            "have: export it as onnx"
        )
    return {
        **llama.write_heads(config),
        **llama.write_rotary(config),
        **biases,
        "classifier_pooling": POOLING[config.pooler_input],
        **llama.write_special(special),
        "mask_token_id": special.find("mask"),
    }


EUROBERT = Family(
    model_type="eurobert",
    title="EuroBERT",
    published_tokenizer="byte-level BPE",
    restrictions="A `rope_type` other than `default`, `linear` and `yarn` is an error.",
    prefix="model",
    classes={
        "Bert": "EuroBertModel",
        "BertForMaskedLM": "EuroBertForMaskedLM",
        "BertForSequenceClassification": "EuroBertForSequenceClassification",
        "BertForTokenClassification": "EuroBertForTokenClassification",
    },
    names=Names(
        {
            **llama.layer_names("model"),
            POOLER: "dense",
            "classifier": "classifier",
            "predictions/decoder": "lm_head.weight",
            "predictions/bias": "lm_head.bias",
        },
    ),
    keys=llama.KEYS,
    defaults={**base.NO_DROPOUT, "layer_norm_eps": 1e-5},
    limits={
        **llama.LAYER_LIMITS,
        "causal": Limit(False, "its tokens attend to the whole row"),
        "use_bias": Limit(True, "the first layer of its classifier has a bias"),
        "query_key_norm": Limit(False, "its queries and keys are not normalized"),
        "pooler_act": Limit("gelu", "its classifier has gelu"),
    },
    fixed={"pretraining_tp": 1},
    constants=r"(^|\.)rotary_emb\.",
    has_form=lambda config, architecture: (
        not config.causal
        and config.position_embedding_type == "rotary"
        and config.norm_type == "rms"
        and config.pre_layer_norm
        and config.attention_window is None
    ),
    read_config=_read_config,
    write_config=_write_config,
    flatten=llama.without_untied_default,
    separate=llama.without_dropout,
)
