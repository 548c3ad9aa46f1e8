"""Replaced-token detection (Clark et al. 2020): a small generator fills in masked tokens, and a discriminator detects
which tokens were replaced.

Shapes as in `bert.model.encoder`; P predicted tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Float, Int

from bert.config import ModelConfig
from bert.config.options import generator_heads
from bert.model.array_types import Array, Dtype, PaddingMask
from bert.model.dropout import Dropout
from bert.model.encoder import Bert, Encoder
from bert.model.layers import LayerExecution
from bert.model.linear import ACTIVATIONS, dense, hidden_dense
from bert.model.mask import Mask, Packing, make_mask
from bert.model.pretraining import MaskedLMHead, PretrainingModel
from bert.model.reductions import at_positions

BLOCK = 128
"""Block size in `sample_tokens`, in tokens."""


class DetectionHead(nn.Module):
    """One logit per token: a dense layer, the encoder's activation, and a dense layer with one output."""

    config: ModelConfig
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, hidden_states: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """[B, T, D] -> [B, T] float32 logits. Tokens above 0 are predicted as replaced."""
        x = hidden_dense(self.config, self.config.hidden_size, self.dtype, "dense")(hidden_states)
        x = dense(self.config, 1, self.dtype, "output")(ACTIVATIONS[self.config.hidden_act](x))
        return x[..., 0].astype(jnp.float32)


class BertForReplacedTokenDetection(PretrainingModel):
    """The discriminator: an encoder without pooler, and the detection head."""

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=False, execution=self.execution)
        self.discriminator_predictions = DetectionHead(self.config, self.dtype)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        *,
        packing: Packing | None = None,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B T"]:
        """[B, T] -> [B, T] float32 logits. Tokens above 0 are predicted as replaced."""
        encoded = self.bert(input_ids, token_type_ids, attention_mask, packing=packing, dropout=dropout)
        return self.discriminator_predictions(encoded.last_hidden_state)


class Generator(PretrainingModel):
    """The generator: an encoder and MLM head on top of the discriminator's embeddings."""

    def setup(self) -> None:
        if self.config.embedding_width != self.config.hidden_size:
            self.projection = hidden_dense(self.config, self.config.hidden_size, self.dtype, "projection")
        self.encoder = Encoder(self.config, self.dtype, self.execution)
        self.predictions = MaskedLMHead(self.config, self.dtype, self.execution.pad_vocab_to_multiple_of)

    def __call__(
        self,
        embedded: Float[Array, "B T E"],
        mask: Mask,
        positions: Int[Array, "B P"],
        word_embedding: Float[Array, "V E"],
        dropout: Dropout | None,
    ) -> Float[Array, "B P padded_V"]:
        """[B, T, E] embeddings -> [B, P, padded V] float32 logits at the given positions."""
        x = embedded if self.config.embedding_width == self.config.hidden_size else self.projection(embedded)
        hidden = self.encoder(x, mask, dropout).last_hidden_state
        return self.predictions(at_positions(hidden, positions), word_embedding)


class ElectraOutput(struct.PyTreeNode):
    """Output of `Electra`.

    Attributes:
        prediction_logits: [B, P, V], from the generator.
        replaced: [B, T] float32, 1 if the discriminator's input differs from the original token.
        detection_logits: [B, T], from the discriminator.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    prediction_logits: Array
    replaced: Array
    detection_logits: Array


class MaskedTokens(struct.PyTreeNode):
    """The predicted tokens of a batch, [B, P] each, made by `bert.data.pretraining.masking.SamplingMasking`.

    Attributes:
        positions: positions in the rows.
        ids: the original tokens.
        weights: 1 for a prediction, 0 for an unused entry.
        uniforms: random numbers in [0, 1) for sampling from the generator.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    positions: Array
    ids: Array
    weights: Array
    uniforms: Array


class Electra(nn.Module):
    """Generator and discriminator, trained jointly, with shared word, position and segment embeddings.

    Attributes:
        config: configuration of the discriminator, which is the model for fine-tuning.
        generator_config: configuration of the generator (`make_generator_config`).
        generator_execution: how the generator's layers run. Its head size may differ from the discriminator's.
    """

    config: ModelConfig
    generator_config: ModelConfig
    dtype: Dtype = jnp.float32
    execution: LayerExecution = LayerExecution()
    generator_execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=False, execution=self.execution)
        self.discriminator_predictions = DetectionHead(self.config, self.dtype)
        self.generator = Generator(self.generator_config, self.dtype, self.generator_execution)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: PaddingMask | None = None,
        masked: MaskedTokens | None = None,
        *,
        packing: Packing | None = None,
        dropout: Dropout | None = None,
    ) -> ElectraOutput:
        """Fills in the masked tokens with samples from the generator, and detects the replaced tokens.

        Gradients do not flow through the samples. During initialization ``masked`` is None, and the first token of each
        row is sampled.
        """
        if masked is None:
            first = jnp.zeros_like(input_ids[:, :1])
            masked = MaskedTokens(first, input_ids[:, :1], first.astype(jnp.float32), first.astype(jnp.float32))
        source = None if dropout is None else dropout.fold_in("generator")
        logits = self.generator(
            self.bert.embeddings.look_up(
                input_ids, token_type_ids, None, packing, source, attention_mask=attention_mask
            ),
            make_mask(self.config, attention_mask, packing),
            masked.positions,
            self.bert.embedding_table(),
            source,
        )
        sampled = sample_tokens(jax.lax.stop_gradient(logits), masked.uniforms)
        changed = (sampled != masked.ids).astype(jnp.float32)
        filled = _put(input_ids, masked, sampled)
        hidden = self.bert(filled, token_type_ids, attention_mask, packing=packing, dropout=dropout).last_hidden_state
        return ElectraOutput(
            logits, _put(jnp.zeros(input_ids.shape), masked, changed), self.discriminator_predictions(hidden)
        )


def make_generator_config(config: ModelConfig, hidden_size: int) -> ModelConfig:
    """Returns the configuration of the generator for a discriminator.

    The feed-forward layer is 4 times as wide as the hidden states, and all heads have separate keys and values. The
    MLM head has a transform to the width of the embeddings.
    """
    return dataclasses.replace(
        config,
        hidden_size=hidden_size,
        num_attention_heads=generator_heads(hidden_size),
        num_key_value_heads=None,
        attention_head_size=None,
        intermediate_size=4 * hidden_size,
        embedding_size=config.embedding_width,
        prediction_transform=True,
    )


def extract_generator(config: ModelConfig, params: dict[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """Extracts the generator of an `Electra` as the configuration and parameters of a `BertForMaskedLM`."""
    generator, embeddings = params["generator"], params["bert"]["embeddings"]
    shared = {name: table for name, table in embeddings.items() if name != "projection"}
    if "projection" in generator:
        shared["projection"] = generator["projection"]
    bert = {"embeddings": shared, "encoder": generator["encoder"]}
    width = generator["predictions"]["transform"]["kernel"].shape[0]
    return make_generator_config(config, width), {"bert": bert, "predictions": generator["predictions"]}


def sample_tokens(logits: Float[Array, "B P V"], uniforms: Float[Array, "B P"]) -> Int[Array, "B P"]:
    """Samples tokens [B, P] by inverting the cumulative softmax at random numbers in [0, 1).

    This needs one random number per sample. The Gumbel trick would need V. Probabilities are summed per block first,
    then within the sampled block.
    """
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, -weights.shape[-1] % BLOCK)))
    blocks = weights.reshape(*weights.shape[:-1], -1, BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    block, remainder = _invert_cumulative(sums, uniforms * jnp.sum(sums, axis=-1))
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * BLOCK + _invert_cumulative(inside, remainder)[0]


def _invert_cumulative(
    weights: Float[Array, "B P n"], target: Float[Array, "B P"]
) -> tuple[Int[Array, "B P"], Float[Array, "B P"]]:
    """Returns the first index [B, P] whose cumulative weight exceeds the target, and the remainder within that entry.

    Targets that rounding moved to the total weight or beyond are clipped.
    """
    sums = jnp.cumsum(weights, axis=-1)
    target = jnp.minimum(target, jnp.nextafter(sums[..., -1], jnp.zeros_like(target)))
    index = jnp.sum(sums <= target[..., None], axis=-1)
    before = jnp.where(index > 0, jnp.take_along_axis(sums, jnp.maximum(index - 1, 0)[..., None], axis=-1)[..., 0], 0)
    return index, target - before


def _put(x: Array, masked: MaskedTokens, values: Array) -> Array:
    """Returns a copy of [B, T] with the values [B, P] at the used positions."""
    rows = jnp.arange(len(x))[:, None]
    positions = jnp.where(masked.weights > 0, masked.positions, x.shape[1])  # an index beyond the row is dropped
    return jnp.asarray(x).at[rows, positions].set(values.astype(x.dtype), mode="drop")
