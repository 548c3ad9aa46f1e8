"""RoBERTa with pre-LN layers (Ott et al. 2019): any pre-LN encoder without a sentence-pair head."""

from __future__ import annotations

import dataclasses

import numpy as np

from bert.config import ModelConfig
from bert.interchange.families.base import ABSOLUTE_POSITIONS, Family, Limit, ParametersByPath, class_names
from bert.interchange.families.roberta import ROBERTA
from bert.interchange.names import Names
from bert.model.names import LAYER

PREFIX = "roberta_prelayernorm"
BLOCK = f"{PREFIX}.encoder.layer.{{}}"
CLASSES = class_names("RobertaPreLayerNorm")
POSITIONS = "bert/embeddings/position/embedding"


def _separate(config: ModelConfig, params: ParametersByPath, padding: int) -> tuple[ModelConfig, ParametersByPath]:
    """Extends the position table to begin at row 0. Positions begin after the padding id."""
    if config.position_offset or POSITIONS not in params:
        return config, params
    table = np.asarray(params[POSITIONS])
    padded = np.pad(table, [(padding + 1, 0), (0, 0)])
    return dataclasses.replace(config, position_offset=padding + 1), {**params, POSITIONS: padded}


ROBERTA_PRELAYERNORM = Family(
    model_type="roberta-prelayernorm",
    title="RoBERTa-PreLayerNorm",
    prefix=PREFIX,
    classes=CLASSES,
    names=Names(
        {
            **{ours: theirs.replace("roberta.", f"{PREFIX}.", 1) for ours, theirs in ROBERTA.names.modules.items()},
            f"{LAYER}/attention_norm": f"{BLOCK}.attention.LayerNorm",
            f"{LAYER}/output_norm": f"{BLOCK}.intermediate.LayerNorm",
            "bert/encoder/norm": f"{PREFIX}.LayerNorm",
        },
        heads=ROBERTA.names.heads,
    ),
    decoder_bias=ROBERTA.decoder_bias,
    limits={**ROBERTA.limits, "pre_layer_norm": Limit(True, "it has LayerNorm before attention and feed-forward")},
    prediction_act=ROBERTA.prediction_act,
    fixed=ABSOLUTE_POSITIONS,
    has_form=lambda config, architecture: config.pre_layer_norm and architecture in CLASSES,
    read_config=lambda content: {**ROBERTA.read_config(content), "pre_layer_norm": True},
    write_config=ROBERTA.write_config,
    separate=_separate,
)
