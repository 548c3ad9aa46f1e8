"""NomicBERT (Nussbaum et al. 2024): BERT with rotary positions, gates, and no biases inside the layers."""

from __future__ import annotations

import re
from typing import Any

from bert.config import ModelConfig
from bert.config.model import BIASES
from bert.errors import UserError
from bert.interchange.families import base, llama
from bert.interchange.families.base import Family, Limit
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

BLOCK = "nomic_bert.encoder.layers.{}"

BASE = 1000.0
"""Default of ``rope_theta``."""

RENAMED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
"""Keys of the config.json of the published models, which were trained with other code, and their names here."""

PUBLISHED = {
    "activation_function": "swiglu",
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "causal": False,
    "use_rms_norm": False,
}
"""Keys of these files with a single supported value."""


MODULES = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
}
"""Modules of transformers' class, and their names in files."""


def _flatten(content: dict[str, Any]) -> dict[str, Any]:
    """Renames the keys of the published models. Raises UserError for settings that transformers lacks."""
    if "n_embd" not in content:
        return content
    for key, value in PUBLISHED.items():
        if content.get(key, value) not in (value, None):
            raise UserError(f"{key} is {content[key]!r}, and only {value!r} is supported: use another model")
    renamed = {RENAMED.get(key, key): value for key, value in content.items() if key not in PUBLISHED}
    return {"hidden_act": "silu", **renamed}


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    return {**llama.read_heads(content), **llama.read_rotary(content, BASE)}


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {"head_dim": config.head_size, **llama.write_rotary(config)}


def _locate(module: str) -> tuple[str, int, int]:
    """Maps a module of transformers' class to the files."""
    module = re.sub(r"(?<!encoder\.)\blayers\.(?=\d)", "encoder.layers.", module)
    for name, stored in MODULES.items():
        module = module.replace(name, stored)
    whole, count = re.subn(r"self_attn\.[qkv]_proj$", "attn.Wqkv", module)
    return (whole, "qkv".index(module[-len("q_proj")]), 3) if count else (module, 0, 1)


NOMIC_BERT = Family(
    model_type="nomic_bert",
    title="NomicBERT",
    restrictions="The published config.json, with `n_embd` and similar keys, is read as well.",
    prefix="nomic_bert",
    classes={
        "Bert": "NomicBertModel",
        "BertForMaskedLM": "NomicBertForMaskedLM",
        "BertForSequenceClassification": "NomicBertForSequenceClassification",
        "BertForTokenClassification": "NomicBertForTokenClassification",
    },
    names=Names(
        {
            "bert/embeddings/word": "nomic_bert.embeddings.word_embeddings",
            "bert/embeddings/segment": "nomic_bert.embeddings.token_type_embeddings",
            "bert/embeddings/norm": "nomic_bert.emb_ln",
            **{f"{LAYER}/attention/{part}": f"{BLOCK}.attn.Wqkv" for part in ("query", "key", "value")},
            f"{LAYER}/attention/output": f"{BLOCK}.attn.out_proj",
            f"{LAYER}/attention_norm": f"{BLOCK}.norm1",
            f"{LAYER}/intermediate": f"{BLOCK}.mlp.fc12",
            f"{LAYER}/gate": f"{BLOCK}.mlp.fc11",
            f"{LAYER}/output": f"{BLOCK}.mlp.fc2",
            f"{LAYER}/output_norm": f"{BLOCK}.norm2",
            "bert/pooler": "nomic_bert.pooler.dense",
            **base.BERT_PREDICTIONS,
            "predictions/norm": "cls.predictions.transform.layer_norm",
            "classifier": "classifier",
        }
    ),
    decoder_bias="cls.predictions.decoder.bias",
    defaults=base.NO_DROPOUT,
    limits={
        **{
            key: limit
            for key, limit in base.BERT_LIMITS.items()
            if key not in ("attention_head_size", "rotary_scaling")
        },
        **dict.fromkeys(BIASES, Limit(False, "the dense layers inside its layers have no biases")),
        "position_embedding_type": Limit("rotary", "its positions are rotary"),
        "gated_feed_forward": Limit(True, "its feed-forward layers are gated"),
        "position_offset": base.FROM_ROW_0,
        "embedding_size": base.FULL_WIDTH,
        "pooler_act": base.TANH_POOLER,
    },
    constants=r"(^|\.)(rotary_emb\.|embeddings\.(position_ids|token_type_ids)$)|\.rotary_emb\.inv_freq$",
    has_form=lambda config, architecture: (
        config.position_embedding_type == "rotary"
        and not config.pre_layer_norm
        and config.gated_feed_forward
        and not config.causal
    ),
    read_config=_read_config,
    write_config=_write_config,
    flatten=_flatten,
    locate=_locate,
    attention_modules="nomic_bert.layers.{}.self_attn",
)
"""Files have the names of the published models, which transformers maps to its own."""
