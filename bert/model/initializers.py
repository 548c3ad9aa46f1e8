"""How parameters start, and the positions that are not learned."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert.config import ModelConfig

Dtype = Any


def truncated_normal_init(config: ModelConfig, scale: float = 1.0) -> nn.initializers.Initializer:
    """Truncated normal cut at two standard deviations, as TensorFlow's: the deviation is that before the cut.

    Args:
        config: its ``initializer_range`` is the deviation.
        scale: a factor of the deviation.
    """
    stddev = scale * config.initializer_range

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> jax.Array:
        return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)

    return init


def residual_initializer(config: ModelConfig) -> nn.initializers.Initializer:
    """`truncated_normal_init` of kernels whose output is added to the residual.

    Scaled, the sum over L layers of two has the same variance for any L (Radford et al. 2019, section 2.3).
    """
    scaled = config.residual_init == "scaled"
    return truncated_normal_init(config, (2 * config.num_hidden_layers) ** -0.5 if scaled else 1.0)


def position_initializer(config: ModelConfig) -> nn.initializers.Initializer:
    """Random numbers as `truncated_normal_init`, or sinusoids (Vaswani et al. 2017, 3.5) scaled to the same deviation.

    With sinusoids "the token before" is one and the same rotation at every position, so that all positions teach a
    head together; random rows are learned one by one.
    """
    if config.position_embedding_init == "normal":
        return truncated_normal_init(config)

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Dtype = jnp.float32) -> jax.Array:
        return sinusoids(shape, config.initializer_range).astype(dtype)

    return init


def sinusoids(shape: tuple[int, ...], deviation: float) -> jax.Array:
    """[positions, features] float32: sines and cosines by turns, of wavelengths from 2 pi to 10,000 * 2 pi."""
    positions, features = shape
    frequencies = 10_000.0 ** (-2 * (jnp.arange(features) // 2) / features)
    angles = jnp.arange(positions)[:, None] * frequencies
    waves = jnp.where(jnp.arange(features) % 2 == 0, jnp.sin(angles), jnp.cos(angles))
    return jnp.sqrt(2.0) * deviation * waves


def step_embeddings(config: ModelConfig) -> jax.Array:
    """[layers, D]: sinusoids of amplitude 1 for each layer's number (Dehghani et al. 2018, section 2.1)."""
    return sinusoids((config.num_hidden_layers, config.hidden_size), 2**-0.5)


def sinusoidal_position_table(config: ModelConfig) -> jax.Array:
    """[rows of a position table, E]: sinusoids of norm 1; with ``scale_embeddings`` of amplitude 1.

    As Vaswani et al. 2017 have them next to words of deviation 1, both divided by the root of E unless the words are
    multiplied by it; a function of sizes alone, so that how weights start does not change what a model computes.
    """
    rows = config.position_offset + config.max_position_embeddings
    deviation = 2**-0.5 if config.scale_embeddings else config.embedding_width**-0.5
    return sinusoids((rows, config.embedding_width), deviation)
