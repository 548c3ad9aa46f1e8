"""GTE (Zhang et al. 2024) and Jina embeddings v3 (Sturua et al. 2024): BERT and XLM-RoBERTa with rotary positions."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.families import base, llama
from bert.interchange.families.base import Family, Limit, class_names
from bert.interchange.families.roberta import LM_HEAD, ROBERTA
from bert.interchange.names import Names
from bert.model.names import LAYER
from bert.tokenizer.library import SpecialTokenIds

BLOCK, JINA_BLOCK = "gte.encoder.layer.{}", "roberta.encoder.layers.{}"
GTE_BASE, JINA_BASE = 160_000.0, 20_000.0
"""Defaults of ``rope_theta``."""

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "up_gate_proj": ("up_proj", "gate_proj")}
"""Modules of files of GTE, and the modules of transformers' class of which they consist."""

PUBLISHED = {
    "layer_norm_type": "layer_norm",
    "position_embedding_type": "rope",
    "pack_qkv": True,
    "logn_attention_scale": False,
    "logn_attention_clip1": False,
}
"""Keys of the files of model_type ``new`` with a single supported value; their other values are not published."""


def _read_gte(content: dict[str, Any]) -> dict[str, Any]:
    return llama.read_rotary(content, GTE_BASE)


def _read_new(content: dict[str, Any]) -> dict[str, Any]:
    """Reads the rotations of the published code (class NTKScalingRotaryEmbedding in its modeling.py).

    Scaling of type ntk multiplies the base by the factor f, and divides all frequencies by f^(2 / H).
    """
    for key, value in PUBLISHED.items():
        if content.get(key, value) not in (value, None):
            raise UserError(f"{key} is {content[key]!r}, and only {value!r} is supported: use another model")
    scaling = content.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("type", scaling.get("rope_type")) != "ntk":
        return llama.read_rotary(content)
    if unknown := scaling.keys() - {"type", "rope_type", "factor"}:
        key = min(unknown)
        raise UserError(f"rope_scaling.{key} is {scaling[key]!r}, which is not supported: use another model")
    plain = {key: value for key, value in content.items() if key != "rope_scaling"}
    read = llama.read_rotary({**plain, "rope_scaling": {"rope_type": "linear", "factor": scaling.get("factor")}})
    factor, size = read["rotary_scaling_factor"], content["hidden_size"] // max(content["num_attention_heads"], 1)
    return {**read, "rotary_base": read["rotary_base"] * factor, "rotary_scaling_factor": factor ** (2 / max(size, 1))}


def _from_files(config: ModelConfig, content: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Replaces the prefix of the published models."""
    return {re.sub(r"^new\.", "gte.", name): array for name, array in tensors.items()}


def _locate_in_gte(module: str) -> tuple[str, int, int]:
    """Maps a module of transformers' class to the files."""
    module = re.sub(r"\blayers\.(?=\d)", "encoder.layer.", module).replace("self_attn.", "attention.")
    stem, _, name = module.rpartition(".")
    for whole, parts in FUSED.items():
        if name in parts:
            return f"{stem}.{whole}", parts.index(name), len(parts)
    return module, 0, 1


def _locate_in_jina(module: str) -> tuple[str, int, int]:
    """Maps a module of transformers' class, or of the published adapters, to the files."""
    module = re.sub(r"(?<!encoder\.)\blayers\.(?=\d)", "encoder.layers.", module)
    module = module.replace("self_attn.o_proj", "mixer.out_proj")
    whole, count = re.subn(r"self_attn\.[qkv]_proj$", "mixer.Wqkv", module)
    return (whole, "qkv".index(module[-len("q_proj")]), 3) if count else (module, 0, 1)


def published_as_jina(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of Jina embeddings v3 as first published, with transformers' names; others unchanged.

    Its own code, which is not executed, is an XLM-RoBERTa with rotary positions (class XLMRobertaLoRA).
    """
    is_encoder = str(content.get("architectures")).strip("[]'") in ("XLMRobertaModel", "XLMRobertaLoRA")
    is_rotary = content.get("position_embedding_type") == "rotary"
    if content.get("model_type") != "xlm-roberta" or not is_rotary or not is_encoder:
        return content
    names = {"model_type": JINA_V3.model_type, "architectures": [JINA_V3.classes["Bert"]]}
    return {**content, **names, "rope_theta": content.get("rotary_emb_base", 10_000.0)}


def _read_jina(content: dict[str, Any]) -> dict[str, Any]:
    return llama.read_rotary(content, JINA_BASE)


def _write_config(config: ModelConfig, special: SpecialTokenIds) -> dict[str, Any]:
    return {
        **llama.write_rotary(config),
        "bos_token_id": special.find("cls"),
        "eos_token_id": special.find("sep"),
    }


LIMITS = {
    **{key: limit for key, limit in base.BERT_LIMITS.items() if key != "rotary_scaling"},
    "position_embedding_type": Limit("rotary", "its positions are rotary"),
    "position_offset": base.FROM_ROW_0,
    "embedding_size": base.FULL_WIDTH,
    "pooler_act": base.TANH_POOLER,
}

GTE = Family(
    model_type="gte",
    title="GTE",
    published_tokenizer="WordPiece, SentencePiece (Unigram)",
    restrictions="Models without segments are exported with one, whose vector is zero.",
    prefix="gte",
    classes={name: known for name, known in class_names("Gte").items() if not name.endswith(("Answering", "Choice"))},
    names=Names(
        {
            "bert/embeddings/word": "gte.embeddings.word_embeddings",
            "bert/embeddings/segment": "gte.embeddings.token_type_embeddings",
            "bert/embeddings/norm": "gte.embeddings.LayerNorm",
            **{f"{LAYER}/attention/{part}": f"{BLOCK}.attention.qkv_proj" for part in ("query", "key", "value")},
            f"{LAYER}/attention/output": f"{BLOCK}.attention.o_proj",
            f"{LAYER}/attention_norm": f"{BLOCK}.attn_ln",
            f"{LAYER}/gate": f"{BLOCK}.mlp.up_gate_proj",  # the first half of the matrix
            f"{LAYER}/intermediate": f"{BLOCK}.mlp.up_gate_proj",
            f"{LAYER}/output": f"{BLOCK}.mlp.down_proj",
            f"{LAYER}/output_norm": f"{BLOCK}.mlp_ln",
            "bert/pooler": "gte.pooler.dense",
            "predictions/transform": "lm_head.dense",
            "predictions/norm": "lm_head.norm",
            "predictions/bias": "lm_head.decoder.bias",
            "predictions/decoder": "lm_head.decoder.weight",
            "classifier": "classifier",
        }
    ),
    limits={
        **LIMITS,
        "gated_feed_forward": Limit(True, "its feed-forward layers are gated"),
        "intermediate_bias": Limit(False, "the first layers of its feed-forward network have no biases"),
    },
    defaults={"attention_probs_dropout_prob": 0.0},
    prediction_act="gelu",
    constants=r"(^|\.)(rotary_emb\.|embeddings\.position_ids$)|inv_freq$",
    has_form=lambda config, architecture: (
        config.position_embedding_type == "rotary"
        and not config.pre_layer_norm
        and not config.causal
        and config.gated_feed_forward
        and not config.has_bias("intermediate_bias")
        and config.has_bias("query_key_value_bias")
    ),
    read_config=_read_gte,
    write_config=_write_config,
    locate=_locate_in_gte,
    attention_modules="gte.layers.{}.self_attn",
    from_files=_from_files,
)
"""Files have the names of the published models with another prefix, like files that transformers writes."""

NEW = dataclasses.replace(
    GTE,
    model_type="new",
    title="GTE",
    published_tokenizer="WordPiece, SentencePiece (Unigram)",
    restrictions="The published config.json, whose code is not executed. Exported as `gte`.",
    classes={name: known.replace("Gte", "New") for name, known in GTE.classes.items()},
    has_form=lambda config, architecture: False,
    read_config=_read_new,
)
"""The config.json of the published models, which name classes of their own code. Exported as GTE."""

JINA_V3 = Family(
    model_type="jina_embeddings_v3",
    title="Jina embeddings v3",
    published_tokenizer="SentencePiece (Unigram)",
    restrictions="Also the config.json of the original, whose code is not executed.",
    prefix="roberta",
    vocabulary="unigram",
    classes={name: known for name, known in class_names("JinaEmbeddingsV3").items() if not name.endswith("Choice")},
    names=Names(
        {
            "bert/embeddings/word": "roberta.embeddings.word_embeddings",
            "bert/embeddings/segment": "roberta.embeddings.token_type_embeddings",
            "bert/embeddings/norm": "roberta.emb_ln",
            **{f"{LAYER}/attention/{part}": f"{JINA_BLOCK}.mixer.Wqkv" for part in ("query", "key", "value")},
            f"{LAYER}/attention/output": f"{JINA_BLOCK}.mixer.out_proj",
            f"{LAYER}/attention_norm": f"{JINA_BLOCK}.norm1",
            f"{LAYER}/intermediate": f"{JINA_BLOCK}.mlp.fc1",
            f"{LAYER}/output": f"{JINA_BLOCK}.mlp.fc2",
            f"{LAYER}/output_norm": f"{JINA_BLOCK}.norm2",
            "bert/pooler": "roberta.pooler.dense",
            **LM_HEAD,
            "classifier": "classifier",
            "qa_outputs": "qa_outputs",
        },
        heads=ROBERTA.names.heads,
    ),
    decoder_bias=ROBERTA.decoder_bias,
    defaults={"layer_norm_eps": 1e-5},
    limits=LIMITS,
    prediction_act="gelu",
    pooler_dropout=True,
    constants=GTE.constants,
    has_form=lambda config, architecture: (
        config.position_embedding_type == "rotary"
        and not config.pre_layer_norm
        and not config.causal
        and not config.gated_feed_forward
    ),
    read_config=_read_jina,
    write_config=_write_config,
    locate=_locate_in_jina,
    attention_modules="roberta.layers.{}.self_attn",
)
"""The adapters of its tasks are read by `bert.interchange.task_adapters`."""
