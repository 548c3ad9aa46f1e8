"""The shapes that parameters must have, whatever format they come in."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from bert.config import ModelConfig
from bert.interchange import names
from bert.model.encoder_decoder import BertForSequenceToSequence
from bert.model.heads import BertForPreTraining

INNER_LAYER = "/layer_1/"

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
    # All layers have the same shapes, but the first may lack a LayerNorm.
    shallow = dataclasses.replace(config, num_hidden_layers=2, layer_groups=None, decoder_layers=None)
    ids = jnp.zeros((1, 1), jnp.int32)
    shapes = _shapes(BertForPreTraining(shallow), ids)
    if names.has_decoder(architecture):
        shapes |= _shapes(BertForSequenceToSequence(shallow), ids, ids)
    for path in [path for path in shapes if INNER_LAYER in path]:
        in_decoder, shape = names.part_of(path) == names.DECODER, shapes.pop(path)
        for layer in range(1, (config.decoder if in_decoder else config).num_distinct_layers):
            shapes[path.replace(INNER_LAYER, f"/layer_{layer}/")] = shape
    outputs = {names.CLASSIFIER: num_labels if architecture in ARCHITECTURES_WITH_LABELS else 1, names.QA_OUTPUTS: 2}
    if architecture == "BertForReplacedTokenDetection":
        for name, features in (("dense", config.hidden_size), ("output", 1)):
            path = f"{names.DETECTION}/{name}"
            shapes |= {f"{path}/kernel": (config.hidden_size, features), f"{path}/bias": (features,)}
        if not config.use_bias:
            del shapes[f"{names.DETECTION}/dense/bias"]
    for head in set(names.ARCHITECTURES[architecture]) & set(outputs):
        shapes |= {f"{head}/kernel": (config.hidden_size, outputs[head]), f"{head}/bias": (outputs[head],)}
    if config.causal and names.POOLER in names.ARCHITECTURES[architecture]:  # it reads the last token, without a bias
        shapes.pop(f"{names.CLASSIFIER}/bias", None)
    return shapes


def _shapes(model: nn.Module, *inputs: jax.Array) -> dict[str, tuple[int, ...]]:
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs)["params"])
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}
