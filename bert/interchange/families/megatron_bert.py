"""MegatronBERT (Shoeybi et al. 2019): BERT with LayerNorm before attention and feed-forward instead of after them."""

from __future__ import annotations

import dataclasses

from bert.interchange.families.base import Limit, class_names
from bert.interchange.families.bert import BERT
from bert.interchange.names import Names
from bert.model.names import LAYER

BLOCK = "bert.encoder.layer.{}"
CLASSES = class_names("MegatronBert", "PreTraining", "NextSentencePrediction")

MEGATRON_BERT = dataclasses.replace(
    BERT,
    model_type="megatron-bert",
    title="MegatronBERT",
    classes=CLASSES,
    names=Names(
        {
            **{path: name for path, name in BERT.names.modules.items() if path != "bert/embeddings/norm"},
            f"{LAYER}/attention_norm": f"{BLOCK}.attention.ln",
            f"{LAYER}/output_norm": f"{BLOCK}.ln",
            "bert/encoder/norm": "bert.encoder.ln",
        }
    ),
    limits={
        **BERT.limits,
        "pre_layer_norm": Limit(True, "it has LayerNorm before attention and feed-forward"),
        "embedding_norm": Limit(False, "its embeddings have no LayerNorm"),
    },
    has_form=lambda config, architecture: (
        config.pre_layer_norm
        and not config.embedding_norm
        and not config.causal
        and config.norm_type == "layer"
        and architecture in CLASSES
        and config.position_embedding_type != "rotary"
    ),
)
