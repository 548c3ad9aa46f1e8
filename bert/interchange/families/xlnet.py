"""XLNet (Yang et al. 2019): relative positions and segments of Transformer-XL, and a classifier over the last token."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base
from bert.interchange.families.base import Family, Limit, ParametersByPath
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

BLOCK = "transformer.layer.{}"
ATTENTION = f"{BLOCK}.rel_attn"

SEGMENTS = 3
"""Segments of a row: both texts, and <cls>."""

MAX_LENGTH, MAX_LENGTH_KEY = 512, "max_length"
"""Tokens per row of the published models, whose config.json has no such key, and the key that declares another number.
"""

ATTENTION_DROPOUT = "attention_dropout"
"""Key of the dropout of attention weights, if it is not the rate of all other layers."""

HEADS = "classifiers read the last token through a dense layer and tanh"

ARRAYS = {
    "attention/content_bias": "r_w_bias",
    "attention/position_bias": "r_r_bias",
    "attention/segment_bias": "r_s_bias",
    "attention/segment": "seg_embed",
}
"""Arrays of attention that are not matrices of dense layers."""


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    memory = content.get("mem_len")
    if isinstance(memory, bool) or not isinstance(memory, int | None):
        raise UserError(f"mem_len is {memory!r}: set it to a whole number, or to null")
    settings: dict[str, Any] = {
        "max_position_embeddings": content.get(MAX_LENGTH_KEY, MAX_LENGTH),
        "memory_length": memory or None,
    }
    if ATTENTION_DROPOUT in content:
        settings["attention_probs_dropout_prob"] = content[ATTENTION_DROPOUT]
    return settings


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    rate = config.attention_probs_dropout_prob
    return {
        "dropout": config.hidden_dropout_prob,
        **({ATTENTION_DROPOUT: rate} if rate != config.hidden_dropout_prob else {}),
        MAX_LENGTH_KEY: config.max_position_embeddings,
        "mem_len": config.memory_length,
        "bos_token_id": special.find("bos"),
        "eos_token_id": special.find("eos"),
    }


def _with_segments(config: ModelConfig, params: ParametersByPath, padding: int) -> tuple[ModelConfig, ParametersByPath]:
    """Returns the same model with three segments, which all have the same vectors. Without segments, these are zero."""
    if not config.type_vocab_size:
        width, params = config.num_attention_heads * config.head_size, dict(params)
        for number in range(config.num_distinct_layers):
            layer = LAYER.format(number)
            params[f"{layer}/attention/segment_bias"] = np.zeros(width, np.float32)
            params[f"{layer}/attention/segment"] = np.zeros((2, width), np.float32)
    return dataclasses.replace(config, type_vocab_size=SEGMENTS), params


def _from_files(config: ModelConfig, content: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors with merged heads. Matrices get the layout and names of dense layers."""
    merged = {}
    for name, array in tensors.items():
        kind = name.rpartition(".")[2]
        is_attention = ".rel_attn." in name
        if is_attention and kind in ("q", "k", "v", "r", "o") and array.ndim == 3:
            matrix = array.reshape(len(array), -1)  # [D, N * H]
            name, array = f"{name}.weight", matrix if kind == "o" else matrix.T
        elif is_attention and kind in ARRAYS.values() and array.ndim > 1:
            array = array.reshape(*array.shape[:-2], -1)
        elif kind == "mask_emb" and array.ndim == 3:
            array = array[0, 0]
        merged[name] = array
    return merged


def _to_files(config: ModelConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_from_files`."""
    heads, split = (config.num_attention_heads, config.head_size), {}
    for name, array in tensors.items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if ".rel_attn." in name and kind in ("q", "k", "v", "r", "o"):
            matrix = array if kind == "o" else array.T
            name, array = name.removesuffix(".weight"), matrix.reshape(-1, *heads)
        elif kind in ARRAYS.values():
            array = array.reshape(*array.shape[:-1], *heads)
        elif kind == "mask_emb":
            array = array[None, None]
        split[name] = array
    return split


XLNET = Family(
    model_type="xlnet",
    title="XLNet",
    published_tokenizer="SentencePiece (Unigram)",
    prefix="transformer",
    classes={
        "Bert": "XLNetModel",
        "BertForMaskedLM": "XLNetLMHeadModel",
        "BertForSequenceClassification": "XLNetForSequenceClassification",
        "BertForTokenClassification": "XLNetForTokenClassification",
        "BertForQuestionAnswering": "XLNetForQuestionAnsweringSimple",
        "BertForMultipleChoice": "XLNetForMultipleChoice",
    },
    names=Names(
        {
            "bert/embeddings/word": "transformer.word_embedding",
            "bert/embeddings/query": "transformer.mask_emb",
            f"{LAYER}/attention/query": f"{ATTENTION}.q",
            f"{LAYER}/attention/key": f"{ATTENTION}.k",
            f"{LAYER}/attention/value": f"{ATTENTION}.v",
            f"{LAYER}/attention/output": f"{ATTENTION}.o",
            f"{LAYER}/attention/position": f"{ATTENTION}.r",
            **{f"{LAYER}/{path}": f"{ATTENTION}.{name}" for path, name in ARRAYS.items()},
            f"{LAYER}/attention_norm": f"{ATTENTION}.layer_norm",
            f"{LAYER}/intermediate": f"{BLOCK}.ff.layer_1",
            f"{LAYER}/output": f"{BLOCK}.ff.layer_2",
            f"{LAYER}/output_norm": f"{BLOCK}.ff.layer_norm",
            "predictions/bias": "lm_loss.bias",
            "predictions/decoder": "lm_loss.weight",
            "classifier": "classifier",
            "qa_outputs": "qa_outputs",
        },
        # BERT's pooler is the first layer of each row-level head.
        heads={
            f"BertFor{head}": {"bert/pooler": "sequence_summary.summary", "classifier": "logits_proj"}
            for head in base.ROW_HEADS
        },
    ),
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "d_inner",
        "hidden_act": "ff_activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "dropout",
        "initializer_range": "initializer_range",
        "layer_norm_eps": "layer_norm_eps",
    },
    limits={
        **base.BERT_LIMITS,
        "position_embedding_type": Limit("transformer_xl", "its positions are relative"),
        "query_key_value_bias": Limit(False, "its queries, keys and values have no biases"),
        "attention_output_bias": Limit(False, "its attention output has no bias"),
        "embedding_norm": Limit(False, "its embeddings have no LayerNorm"),
        "prediction_transform": Limit(False, "it decodes the hidden states themselves"),
        "pooler_input": Limit("last", HEADS),
        "pooler_act": Limit("tanh", HEADS),
        "type_vocab_size": Limit(SEGMENTS, "its rows have three segments"),
        "position_offset": base.FROM_ROW_0,
        "embedding_size": base.FULL_WIDTH,
    },
    fixed={"attn_type": "bi", "bi_data": False, "clamp_len": -1, "same_length": False},
    settings={
        f"BertFor{head}": {"summary_type": "last", "summary_use_proj": True, "summary_activation": "tanh"}
        for head in base.ROW_HEADS
    },
    pads_left=True,
    has_form=lambda config, architecture: config.position_embedding_type == "transformer_xl" and not config.causal,
    read_config=_read_config,
    write_config=_write_config,
    head_dropout=("summary_last_dropout", base.ROW_HEADS),
    separate=_with_segments,
    from_files=_from_files,
    to_files=_to_files,
)
