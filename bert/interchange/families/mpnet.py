"""MPNet (Song et al. 2020): RoBERTa without segments, and with relative attention bias."""

from __future__ import annotations

from typing import Any

from bert.config import ModelConfig
from bert.interchange.families.base import BERT_LIMITS, KEYS, Family, Limit, class_names, encoder_names
from bert.interchange.families.roberta import ROBERTA
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

BLOCK = "mpnet.encoder.layer.{}.attention"
OFFSET, BUCKETS = 2, 32
"""Constants in transformers' code that config.json does not contain."""


def _read_config(content: dict[str, Any]) -> dict[str, Any]:
    return {
        "max_position_embeddings": content["max_position_embeddings"] - OFFSET,
        **{
            key: MPNET.limits[key].value for key in ("position_offset", "type_vocab_size", "relative_attention_buckets")
        },
    }


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {
        "max_position_embeddings": config.max_position_embeddings + OFFSET,
        "relative_attention_num_buckets": BUCKETS,
        "bos_token_id": special.cls,
        "eos_token_id": special.sep,
    }


MPNET = Family(
    model_type="mpnet",
    title="MPNet",
    prefix="mpnet",
    classes=class_names("MPNet"),
    names=Names(
        {
            **{path: name for path, name in encoder_names("mpnet").items() if path != "bert/embeddings/segment"},
            **{path: name for path, name in ROBERTA.names.modules.items() if path.startswith("predictions/")},
            **{f"{LAYER}/attention/{part}": f"{BLOCK}.attn.{part[0]}" for part in ("query", "key", "value", "output")},
            f"{LAYER}/attention_norm": f"{BLOCK}.LayerNorm",
            "bert/encoder/relative_attention_bias": "mpnet.encoder.relative_attention_bias",
            "bert/pooler": "mpnet.pooler.dense",
        },
        heads=ROBERTA.names.heads,
    ),
    decoder_bias=ROBERTA.decoder_bias,
    keys={name: key for name, key in KEYS.items() if name != "type_vocab_size"},
    limits={
        **BERT_LIMITS,
        "relative_attention_buckets": Limit(BUCKETS, f"it has {BUCKETS} buckets of distances"),
        "type_vocab_size": Limit(0, "it has no segments"),
        "position_offset": Limit(OFFSET, f"its positions begin at row {OFFSET}"),
        "embedding_size": Limit(None, "its embeddings have hidden_size features"),
        "pooler_act": Limit("tanh", "its pooler has tanh"),
    },
    prediction_act="gelu",
    fixed={"relative_attention_num_buckets": BUCKETS},
    has_form=lambda config, architecture: config.relative_attention_buckets is not None and not config.causal,
    read_config=_read_config,
    write_config=_write_config,
)
