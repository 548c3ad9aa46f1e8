"""Floating-point operations of a model, counted from its sizes. Imports no JAX.

A multiplication and the addition that follows it are two operations. Only products of matrices are counted: what is
left out (biases, LayerNorm, softmax, activations, dropout, the optimizer) is a few per cent at hidden size 128 and less
than one from 768 on. Shapes: T tokens per row, D hidden, F feed-forward, V vocabulary, P predictions per row,
L outputs of a head; E width of the embeddings, D unless the two differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bert.config import ModelConfig
from bert.errors import require

ATTENTION, FEED_FORWARD, POOLER, PREDICTIONS = "layers/attention", "layers/feed_forward", "pooler", "predictions"
GENERATOR, DECODER, PROJECTION = "generator", "decoder", "embeddings/projection"

TRAINING = 3
"""Operations of a training step per operation of the forward pass: the backward pass has two products for each one."""

FORMULA = {
    ATTENTION: "a layer: 8 D^2 (query, key, value, output) + 4 T D (scores and mix), in local layers with the keys of "
    "three blocks in place of T, in disentangled ones with T plus their buckets",
    FEED_FORWARD: "a layer: 4 D F, 6 D F if it is gated",
    PROJECTION: "2 E D",
    POOLER: "2 D^2 / T: one token a row; 2 D^2 where the head reads every token through it",
    PREDICTIONS: "(2 D E + 2 E V) P / T, without 2 D E if there is no transform: the P predicted positions alone are "
    "decoded",
    GENERATOR: "layers and predictions by these formulas, with the generator's D and F",
    DECODER: "a layer: 16 D^2 + 8 T D (attention to the target and to the source, of T tokens each) + 4 D F, "
    "6 D F if it is gated",
}
"""Operations a token of the forward pass, part by part."""

PERMUTED_FORMULA = {"layers of permuted rows": "these operations for each of T + 2 P tokens in place of T"}
"""What is added to `FORMULA` where tokens are predicted one after the other."""


def forward_flops(
    config: ModelConfig,
    length: int,
    components: Collection[str],
    predictions: int,
    outputs: Mapping[str, tuple[int, bool]],
    permuted: bool = False,
) -> dict[str, float]:
    """Operations a token of the forward pass over rows of T tokens, part by part.

    Args:
        config: sizes of the encoder.
        length: T.
        components: keys of `FORMULA` that the model has; the pooler and the MLM head may be absent.
        predictions: P, positions that the MLM head decodes.
        outputs: of each further head the elements of its matrix, and whether it reads every token or one a row.
        permuted: whether the P tokens are predicted one after the other, in rows of T + 2 P.
    """
    width, layers = config.hidden_size, config.num_hidden_layers
    read = length + 2 * predictions if permuted else length  # permuted rows are not computed in blocks
    keys = [read if permuted else config.keys_per_query(layer, length) for layer in range(layers)]
    disentangled = config.position_embedding_type == "disentangled"
    vectors = require(config.relative_attention_buckets, "the buckets") if disentangled else 0
    flops = {
        ATTENTION: read / length * sum(8.0 * width**2 + 4.0 * (count + vectors) * width for count in keys),
        FEED_FORWARD: read / length * layers * _feed_forward_flops(config),
    }
    if PROJECTION in components:
        flops[PROJECTION] = read / length * 2.0 * config.embedding_width * width
    if POOLER in components:
        pools_tokens = config.pools_tokens and any(every_token for _, every_token in outputs.values())
        flops[POOLER] = 2.0 * width**2 / (1 if pools_tokens else length)
    if PREDICTIONS in components:
        narrow = config.embedding_width
        transform = 2.0 * width * narrow if config.prediction_transform else 0.0
        flops[PREDICTIONS] = (transform + 2.0 * narrow * config.known_vocab_size) * predictions / length
    for name, (elements, every_token) in outputs.items():
        flops[name] = 2.0 * elements / (1 if every_token else length)
    return flops


def _feed_forward_flops(config: ModelConfig) -> float:
    return (6.0 if config.gated_feed_forward else 4.0) * config.hidden_size * config.intermediate_size


def decoder_flops(config: ModelConfig, length: int) -> float:
    """Operations a target token of the forward pass of a decoder's layers, over sources and targets of T tokens.

    Args:
        config: sizes of the decoder.
        length: T.
    """
    width = config.hidden_size
    return config.num_hidden_layers * (16.0 * width**2 + 8.0 * length * width + _feed_forward_flops(config))


def training_flops(
    forward: Mapping[str, float],
    num_hidden_layers: int,
    num_frozen_layers: int = 0,
    frozen: Collection[str] = (),
    adapters: bool = False,
) -> float:
    """Operations a token of a training step: thrice the forward pass, once where nothing is learned.

    Args:
        forward: as `forward_flops` gives it.
        num_hidden_layers: layers of the encoder.
        num_frozen_layers: how many of them stay as they are.
        frozen: other parts that stay as they are.
        adapters: whether the layers stay as they are next to adapters: gradients pass through them, those of their own
            weights are not counted.
    """
    learned = 0.5 if adapters else 1 - num_frozen_layers / num_hidden_layers
    total = 0.0
    for name, flops in forward.items():
        share = learned if name.startswith("layers/") else float(name not in frozen)
        total += flops * (1 + (TRAINING - 1) * share)
    return total
