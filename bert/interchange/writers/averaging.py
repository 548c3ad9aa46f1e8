"""Mean pooling for model classes that read the first token: a further layer averages the tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from bert.config.model import IN_ATTENTION
from bert.errors import UserError
from bert.interchange.bundle import ModelBundle

GAIN = 2.0**20
"""Factor of the mean, next to which the residual connection of the averaging layer is below the rounding of float32."""

SHRINK = 2.0**-14
"""Factor of the pooler's input, for which tanh is the identity within the rounding of float32."""

SHIFT = 64.0
"""Bias of a pooler with relu or gelu, which are the identity for large numbers."""


def with_averaging_layer(model: ModelBundle) -> ModelBundle:
    """Returns a classifier over the first token with the same outputs as one over the mean of the tokens.

    - The attention of a further layer has equal scores, so its output is the mean of the hidden states. GAIN makes the
      residual connection negligible, and the layer's two LayerNorms make the same vector of it as the model's pooler of
      type norm.
    - The pooler is the identity: it scales its input so that tanh is linear, or shifts it where relu and gelu are. The
      classifier reverses this.

    The outputs are equal within 1e-5 in float32, but not with 16 bits.

    Raises:
        UserError: the model is not a post-norm encoder with separate layers and absolute positions.
    """
    config, params = model.config, model.params
    fixed = {
        "pooler_input": "mean",
        "pre_layer_norm": False,
        "norm_type": "layer",
        "relative_attention_buckets": None,
        "layer_groups": None,
        "attention_window": None,
        "gated_feed_forward": False,
        "num_key_value_heads": None,
        "attention_head_size": None,
    }
    in_attention = config.position_embedding_type in IN_ATTENTION
    if in_attention or any(getattr(config, key) != value for key, value in fixed.items()):
        raise UserError(
            f"{model.source} has model.pooler_type norm, which transformers' classes cannot express for this encoder: "
            "export it as stablehlo, or fine-tune with classifier_pooling first"
        )
    encoder = params["bert"]["encoder"]
    layer = _averaging_layer(encoder["layer_0"])
    pooler, classifier = _identity_pooler(config.hidden_size, config.pooler_act, params["classifier"])
    bert = {
        **params["bert"],
        "encoder": {**encoder, f"layer_{config.num_hidden_layers}": layer},
        "pooler": pooler,
    }
    config = dataclasses.replace(
        config, num_hidden_layers=config.num_hidden_layers + 1, pooler_type="dense", pooler_input="first"
    )
    return dataclasses.replace(model, config=config, params={**params, "bert": bert, "classifier": classifier})


def _averaging_layer(like: dict[str, Any]) -> dict[str, Any]:
    """Returns a layer with the shapes of another one: its output is LayerNorm(GAIN * mean + input)."""
    layer: dict[str, Any] = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), like)
    width = len(layer["attention"]["value"]["kernel"])
    layer["attention"]["value"]["kernel"] = np.eye(width, dtype=np.float32)
    layer["attention"]["output"]["kernel"] = np.eye(width, dtype=np.float32) * np.float32(GAIN)
    for norm in ("attention_norm", "output_norm"):
        layer[norm]["scale"] = np.ones(width, np.float32)
    return layer


def _identity_pooler(width: int, activation: str, classifier: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a pooler that is the identity up to a scale or a shift, and the classifier that reverses it."""
    kernel, bias = (np.asarray(classifier[name], np.float32) for name in ("kernel", "bias"))
    factor, shift = (SHRINK, 0.0) if activation == "tanh" else (1.0, SHIFT)
    pooler = {
        "kernel": np.eye(width, dtype=np.float32) * np.float32(factor),
        "bias": np.full(width, shift, np.float32),
    }
    bias = (bias.astype(np.float64) - shift * kernel.astype(np.float64).sum(axis=0)).astype(np.float32)
    return pooler, {"kernel": kernel / np.float32(factor), "bias": bias}
