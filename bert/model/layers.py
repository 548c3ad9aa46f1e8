"""One layer of the encoder (attention and feed-forward, each with a residual connection and LayerNorm), the convolution
after the first one, and how the layers run: attention kernel, rematerialization, and scanning over stacked parameters.

Shapes as in `bert.model.encoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from bert.config import ModelConfig, TrainingConfig
from bert.errors import UserError, require
from bert.model.array_types import Array, Dtype
from bert.model.attention import LayerCache, Memory
from bert.model.dropout import Dropout, maybe_dropout
from bert.model.linear import (
    ACTIVATIONS,
    LINEAR_OUTPUT,
    LayerNorm,
    hidden_dense,
    layer_norm,
    linear,
    residual_dense,
    truncated_normal_init,
)
from bert.model.mask import Mask
from bert.model.multi_head import Attention
from bert.model.positions import Positions
from bert.parallel.devices import are_tpus, local_devices, max_cudnn_head_dim
from bert.parallel.sharding import constrain_activation

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(LINEAR_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Policies for `jax.checkpoint`: which activations of a layer are kept for the backward pass.

Both recompute the attention scores, which are products with a batch dimension and grow with T squared.
"""


@dataclass(frozen=True)
class LayerExecution:
    """How the layers run. Parameters do not depend on it. Results and gradients change only by rounding.

    Attributes:
        remat: what the backward pass recomputes: "none", "dots" (everything except linear layers) or "full" (each
            layer from its input; Chen et al. 2016).
        scan: compile one layer and loop over stacked weights. They are stacked within the step, so the optimizer,
            checkpoints and exports still have separate parameters for each layer.
        attention: "eager" (explicit; supports dropout, any mask and attention weights), or a fused kernel without
            dropout and weights (`bert.model.attention.fused_attention`): "cudnn", "splash" or "xla".
        pad_vocab_to_multiple_of: multiple to which the MLM head pads its logits. Padding has probability 0.
    """

    remat: str = "none"
    scan: bool = False
    attention: str = "eager"
    pad_vocab_to_multiple_of: int = 1

    @classmethod
    def from_config(
        cls, config: TrainingConfig, model: ModelConfig | None = None, devices: Sequence[Any] | None = None
    ) -> LayerExecution:
        """Resolves the execution options of a training configuration.

        Args:
            model: configuration of the model; None if unknown, which skips the checks that need it.
            devices: devices to compile for; None for `jax.devices()`.

        Raises:
            UserError: the kernel is not available on the devices, or does not support the model's heads or positions.
        """
        devices = local_devices() if devices is None else devices
        if model is not None:
            config.check_kernel(model)
        has_cudnn = _has_cudnn(model, devices)
        if config.attention_implementation == "cudnn" and not has_cudnn:
            largest = max_cudnn_head_dim(devices)
            reason = (
                f"requires heads of a multiple of 8 features and at most {largest} on these devices, but the model's "
                f"have {model and model.head_size} (model.hidden_size / model.num_attention_heads)"
                if largest
                else "requires NVIDIA GPUs of compute capability 8.0 or more, but the devices are others"
            )
            raise UserError(
                f"training.attention_implementation is cudnn, which {reason}: set it to xla, or leave it to "
                "training.preset"
            )
        if config.attention_implementation == "splash" and not are_tpus(devices):
            raise UserError(
                "training.attention_implementation is splash, which requires TPUs, but the devices are others: set it "
                "to xla, or leave it to training.preset"
            )
        attention = "eager"
        if config.attention_implementation in ("cudnn", "splash"):
            attention = config.attention_implementation
        elif config.preset == "fast" and config.attention_implementation == "auto":
            attention = "cudnn" if has_cudnn else "xla"
        return cls(config.remat, config.scan_layers, attention, config.pad_vocab_to_multiple_of)


def _has_cudnn(model: ModelConfig | None, devices: Sequence[Any]) -> bool:
    """Whether cuDNN's kernel is available on the devices and supports the model's heads and positions."""
    largest = max_cudnn_head_dim(devices)
    if model is None:
        return largest > 0
    has_scores = model.is_disentangled or model.position_embedding_type == "transformer_xl"
    is_plain = not has_scores and model.attention_softcap is None
    return model.head_size % 8 == 0 and model.head_size <= largest and is_plain


def remat(module: ModuleClass, policy: str, in_loop: bool) -> ModuleClass:
    """Wraps a module class in `flax.linen.remat` with the given policy of `LayerExecution.remat`."""
    if policy == "none":
        return module
    # Inside a loop, XLA's CSE cannot merge the recomputation with the forward pass.
    return nn.remat(module, prevent_cse=not in_loop, policy=REMAT_POLICIES[policy])


def scan_layers(
    config: ModelConfig,
    params: Mapping[str, Any],
    first: int,
    x: Any,
    run_layer: Callable[[Any, Any, Any, dict[str, Any]], tuple[Any, Any]],
) -> tuple[Any, Any]:
    """Runs layers as one `jax.lax.scan` over their stacked parameters, and returns x and their stacked outputs.

    Layers that share parameters run in an inner scan.

    Args:
        params: parameters of the encoder, with ``layer_0`` and so on.
        first: number of the first layer to run. The layers before it must not share its parameters.
        run_layer: maps (x, layer number, whether the layer is local, its parameters) to x and an output of the layer.
    """
    groups = range(config.group_of(first), config.num_distinct_layers)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[f"layer_{group}"] for group in groups))
    numbers = jnp.arange(first, config.num_hidden_layers)
    local = jnp.array([config.is_local(number) for number in range(first, config.num_hidden_layers)])

    def run_one(x: Any, layer: tuple[Any, Any, dict[str, Any]]) -> tuple[Any, Any]:
        return run_layer(x, *layer)

    def run_group(x: Any, group: tuple[Any, Any, dict[str, Any]]) -> tuple[Any, Any]:
        numbers, local, params = group
        return jax.lax.scan(lambda x, layer: run_one(x, (*layer, params)), x, (numbers, local))

    if config.layers_per_group == 1:
        return jax.lax.scan(run_one, x, (numbers, local, stacked))
    numbers, local = (array.reshape(len(groups), -1) for array in (numbers, local))
    x, outputs = jax.lax.scan(run_group, x, (numbers, local, stacked))
    return x, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)


class LayerStates(struct.PyTreeNode):
    """Attention weights and cache that `Layer` returns in addition to its output.

    Attributes:
        weights: self-attention weights before dropout, [B, N, T, S]; None with a fused kernel.
        cross_weights: cross-attention weights, [B, N, T, S of the memory]; None without a memory or with a fused
            kernel.
        cache: the updated cache, including the keys and values of this call; None without a cache.
    """

    __no_type_check__ = True  # jax.tree.map may put any object into a field

    weights: Array | None
    cross_weights: Array | None = None
    cache: LayerCache | None = None


class Layer(nn.Module):
    """Self-attention, cross-attention if there is a memory, and feed-forward.

    Each sublayer has dropout, a residual connection and LayerNorm. LayerNorm follows the addition (post-LN, as in the
    paper), or precedes the sublayer inside the residual branch (pre-LN; Xiong et al. 2020).

    Attributes:
        kernel: see `LayerExecution.attention`.
        has_attention_norm: whether attention has a LayerNorm; see ``ModelConfig.first_layer_norm``.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    kernel: str = "eager"
    has_attention_norm: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
        dropout: Dropout | None = None,
        memory: Memory | None = None,
        cache: LayerCache | None = None,
        positions: Positions | None = None,
        earlier: Float[Array, "B mem D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerStates]:
        """[B, T, D] -> [B, T, D].

        Args:
            mask: mask of self-attention, over the cached keys if there is a cache.
            cache: keys and values of earlier positions. The keys and values of ``x`` are written at the mask's
                ``start``. The mask must exclude later positions, as a causal mask does.
            earlier: inputs of this layer at the positions of the segment memory, which are further keys and values.
        """
        rate = self.config.hidden_dropout_prob
        norm = layer_norm(self.config, self.dtype, "attention_norm")
        attention = Attention(self.config, self.dtype, self.kernel, name="attention")
        inputs = keys = self._norm_before(norm, x) if self.has_attention_norm else x
        if earlier is not None:
            before = self._norm_before(norm, earlier) if self.has_attention_norm else earlier
            keys = jnp.concatenate([before, inputs], axis=1)
        own = None if cache is None else cache.own.write(attention.keys_values(inputs, positions), mask.start)
        attended, weights = attention(inputs, keys if own is None else own, mask, dropout, positions)
        attended = self._norm_after(attended, "attention_output_norm")
        x = self._add(norm, x, maybe_dropout(attended, dropout, rate, "attention_output"))

        cross_weights = cross_cache = None
        if memory is not None:
            norm = layer_norm(self.config, self.dtype, "cross_norm")
            kernel = "xla" if self.kernel == "splash" else self.kernel  # splash needs as many queries as keys
            attention = Attention(self.config, self.dtype, kernel, name="cross_attention")
            source = None if dropout is None else dropout.fold_in("cross_attention")
            if cache is not None:
                cross_cache = cache.memory or attention.keys_values(memory.hidden_states)
            attended, cross_weights = attention(
                self._norm_before(norm, x), cross_cache or memory.hidden_states, memory.mask, source
            )
            attended = self._norm_after(attended, "cross_output_norm")
            x = self._add(norm, x, maybe_dropout(attended, source, rate, "attention_output"))

        norm = layer_norm(self.config, self.dtype, "output_norm")
        outputs = self._norm_after(self._feed_forward(self._norm_before(norm, x)), "feed_forward_norm")
        x = constrain_activation(self._add(norm, x, maybe_dropout(outputs, dropout, rate, "output")))
        return x, LayerStates(weights, cross_weights, None if own is None else LayerCache(own, cross_cache))

    def _feed_forward(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config, width = self.config, self.config.intermediate_size
        inner = hidden_dense(config, width, self.dtype, "intermediate", "intermediate_bias")(x)
        inner = ACTIVATIONS[config.hidden_act](constrain_activation(inner, None, "tensor"))
        if config.gated_feed_forward:
            gate = hidden_dense(config, width, self.dtype, "gate", "intermediate_bias")(x)
            inner = inner * constrain_activation(gate, None, "tensor")
        return residual_dense(config, self.dtype, "output", "output_bias")(inner)

    def _norm_before(self, norm: LayerNorm, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the input of a sublayer, normalized with pre-LN."""
        return norm(x) if self.config.pre_layer_norm else x

    def _norm_after(self, sublayer_output: Float[Array, "B T D"], name: str) -> Float[Array, "B T D"]:
        """Returns the output of a sublayer, normalized with ``sublayer_output_norm``."""
        if not self.config.sublayer_output_norm:
            return sublayer_output
        return layer_norm(self.config, self.dtype, name)(sublayer_output)

    def _add(
        self, norm: LayerNorm, x: Float[Array, "B T D"], sublayer_output: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Adds a sublayer's output to the residual stream. With post-LN, normalizes the sum."""
        x = x + sublayer_output
        return x if self.config.pre_layer_norm else norm(x)


class Convolution(nn.Module):
    """Adds a convolution over the embeddings to the output of the first layer, with a residual connection.

    Dropout, the activation and LayerNorm are placed as in DeBERTa-v2 (transformers, modeling_deberta_v2.py, ConvLayer),
    or LayerNorm is before the convolution (pre-LN). Padding and other examples of a packed row are read as zeros.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        embeddings: Float[Array, "B T D"],
        mask: Mask,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B T D"]:
        """[B, T, D] -> [B, T, D].

        Args:
            x: output of the first layer.
            embeddings: input of the first layer.
            mask: mask of self-attention.

        Raises:
            ValueError: see `Mask.neighbours`.
        """
        config, width = self.config, self.config.hidden_size
        size = require(config.conv_kernel_size, "model.conv_kernel_size")
        kernel = self.param("kernel", truncated_normal_init(config), (size, width, width), jnp.float32)
        bias = jnp.zeros(width)
        if config.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (width,), jnp.float32)
        norm = layer_norm(config, self.dtype, "norm")
        inputs = norm(embeddings) if config.pre_layer_norm else embeddings
        read = jnp.concatenate([mask.neighbours(inputs, tap - size // 2) for tap in range(size)], axis=-1)
        outputs = linear(read, kernel.reshape(size * width, width), bias, jnp.dtype(self.dtype))
        outputs = checkpoint_name(outputs, LINEAR_OUTPUT)
        outputs = maybe_dropout(outputs, dropout, config.hidden_dropout_prob, "convolution")
        x = x + ACTIVATIONS[config.hidden_act](outputs)
        return constrain_activation(x if config.pre_layer_norm else norm(x))
