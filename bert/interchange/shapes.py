"""The shapes that parameters must have, whatever format they come in."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
from flax import traverse_util

from bert.config import ModelConfig
from bert.interchange import names
from bert.model.heads import BertForPreTraining

FIRST_LAYER = "/layer_0/"

ARCHITECTURES_WITH_LABELS = ("BertForSequenceClassification", "BertForTokenClassification")
"""Architectures with as many outputs as there are labels."""


@lru_cache(maxsize=16)
def expected_shapes(config: ModelConfig, architecture: str, num_labels: int) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter that `names.tensors` may name, by its path.

    Args:
        config: sizes of the encoder.
        architecture: a key of `names.ARCHITECTURES`.
        num_labels: L, where the architecture is one of `ARCHITECTURES_WITH_LABELS`.
    """
    model = BertForPreTraining(dataclasses.replace(config, num_hidden_layers=1))  # all layers have the same shapes
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"])
    shapes = {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}
    for path in [path for path in shapes if FIRST_LAYER in path]:
        for layer in range(1, config.num_hidden_layers):
            shapes[path.replace(FIRST_LAYER, f"/layer_{layer}/")] = shapes[path]
    outputs = {names.CLASSIFIER: num_labels if architecture in ARCHITECTURES_WITH_LABELS else 1, names.QA_OUTPUTS: 2}
    if architecture == "BertForReplacedTokenDetection":
        for name, features in (("dense", config.hidden_size), ("output", 1)):
            path = f"{names.DETECTION}/{name}"
            shapes |= {f"{path}/kernel": (config.hidden_size, features), f"{path}/bias": (features,)}
    for head in set(names.ARCHITECTURES[architecture]) & set(outputs):
        shapes |= {f"{head}/kernel": (config.hidden_size, outputs[head]), f"{head}/bias": (outputs[head],)}
    if config.causal and names.POOLER in names.ARCHITECTURES[architecture]:  # it reads the last token, without a bias
        shapes.pop(f"{names.CLASSIFIER}/bias", None)
    return shapes
