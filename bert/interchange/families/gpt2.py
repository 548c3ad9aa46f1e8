"""GPT-2: causal, with pre-LN layers, and with the word embeddings as the whole decoder."""

from __future__ import annotations

from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base
from bert.interchange.families.base import Family, Limit
from bert.interchange.names import HF_ARRAYS, Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

BLOCK = "transformer.h.{}"


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    width, inner = content["n_embd"], content.get("n_inner")
    if inner is not None and (isinstance(inner, bool) or not isinstance(inner, int)):
        raise UserError(f"n_inner is {inner!r}: set it to a whole number, or null")
    rate = content.get("resid_pdrop", 0.1)
    if (other := content.get("embd_pdrop", rate)) != rate:
        raise UserError(
            f"embd_pdrop is {other!r} and resid_pdrop is {rate!r}, but this package has one rate "
            "(model.hidden_dropout_prob): set both to the same number"
        )
    return {
        **GPT2.initial,
        "intermediate_size": 4 * width if inner is None else inner,
    }


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    end, padding = special.find("eos"), special.find("pad")
    return {
        "n_inner": config.intermediate_size,
        "embd_pdrop": config.hidden_dropout_prob,
        "bos_token_id": special.find("bos"),
        "eos_token_id": end,
        "pad_token_id": end if padding is None else padding,  # classifiers read the last token that is not padding
    }


GPT2 = Family(
    model_type="gpt2",
    title="GPT-2",
    published_tokenizer="byte-level BPE",
    prefix="transformer",
    classes={
        "Bert": "GPT2Model",
        "BertForCausalLM": "GPT2LMHeadModel",
        "BertForSequenceClassification": "GPT2ForSequenceClassification",
        "BertForTokenClassification": "GPT2ForTokenClassification",
        "BertForQuestionAnswering": "GPT2ForQuestionAnswering",
    },
    names=Names(
        {
            "bert/embeddings/word": "transformer.wte",
            "bert/embeddings/position": "transformer.wpe",
            f"{LAYER}/attention_norm": f"{BLOCK}.ln_1",
            f"{LAYER}/attention/query": f"{BLOCK}.attn.c_attn",
            f"{LAYER}/attention/key": f"{BLOCK}.attn.c_attn",
            f"{LAYER}/attention/value": f"{BLOCK}.attn.c_attn",
            f"{LAYER}/attention/output": f"{BLOCK}.attn.c_proj",
            f"{LAYER}/output_norm": f"{BLOCK}.ln_2",
            f"{LAYER}/intermediate": f"{BLOCK}.mlp.c_fc",
            f"{LAYER}/output": f"{BLOCK}.mlp.c_proj",
            "bert/encoder/norm": "transformer.ln_f",
            "predictions/decoder": "lm_head.weight",
            "classifier": "classifier",
            "qa_outputs": "qa_outputs",
        },
        heads={"BertForSequenceClassification": {"classifier": "score"}},
        arrays={**HF_ARRAYS, "dense": (("/kernel", ".weight", False), ("/bias", ".bias", False))},
    ),
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "hidden_act": "activation_function",
        "hidden_dropout_prob": "resid_pdrop",
        "attention_probs_dropout_prob": "attn_pdrop",
        "max_position_embeddings": "n_positions",
        "initializer_range": "initializer_range",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    defaults={"layer_norm_eps": 1e-5},
    limits={
        **base.CLASSIC_LIMITS,
        "causal": Limit(True, "its tokens attend to those before them"),
        "pre_layer_norm": Limit(True, "it has LayerNorm before attention and feed-forward"),
        "scale_embeddings": Limit(False, "it adds the word embeddings as they are"),
        "embedding_norm": Limit(False, "its embeddings have no LayerNorm"),
        "prediction_transform": Limit(False, "it decodes the hidden states themselves"),
        "prediction_bias": Limit(False, "its decoder has no bias"),
        "type_vocab_size": base.NO_SEGMENTS,
        "position_offset": base.FROM_ROW_0,
        "embedding_size": base.FULL_WIDTH,
        "pooler_act": Limit("tanh", "it has no pooler"),
    },
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "is_causal": True},
    initial={"position_embedding_init": "normal", "residual_init": "scaled"},
    constants=r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$",
    has_form=lambda config, architecture: config.causal,
    read_config=_read_config,
    write_config=_write_config,
)
"""Matrices are stored as [in, out]. Query, key and value are concatenated in one matrix."""
