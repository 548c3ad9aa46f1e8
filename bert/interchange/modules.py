"""The Flax module of a `bert.interchange.bundle.ModelBundle`."""

from __future__ import annotations

import dataclasses
from typing import Any

from bert.interchange.bundle import ModelBundle
from bert.model import decoders, electra, heads, pretraining
from bert.model.encoder import Bert

OUTPUTS = {"BertForQuestionAnswering": 2, "BertForMultipleChoice": 1}
"""Number of outputs of heads without labels: start and end, or one score per choice."""

MODULE_HOMES = {
    "BertForPreTraining": pretraining,
    "BertForMaskedLM": pretraining,
    "BertForNextSentencePrediction": pretraining,
    "BertForReplacedTokenDetection": electra,
    "BertForCausalLM": decoders,
    "BertForSequenceToSequence": decoders,
}
"""Module classes of architectures that are not in `bert.model.heads`."""


def build_module(model: ModelBundle) -> Any:
    """Returns the Flax module that matches the parameters."""
    if model.architecture == "Bert":
        return Bert(model.config, add_pooling_layer="pooler" in model.params["bert"])
    module = getattr(MODULE_HOMES.get(model.architecture, heads), model.architecture)
    takes = {field.name for field in dataclasses.fields(module)}
    outputs = len(model.labels) or OUTPUTS.get(model.architecture, 0)
    return module(model.config, **({"num_labels": outputs} if "num_labels" in takes else {}))
