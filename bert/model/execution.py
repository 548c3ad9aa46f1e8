"""How the encoder layers run: attention kernel, rematerialization, and scanning over stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from bert.config import ModelConfig, TrainingConfig
from bert.errors import UserError
from bert.model.linear import LINEAR_OUTPUT
from bert.parallel.devices import are_tpus, local_devices, max_cudnn_head_dim

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
        attention: "written" (explicit; supports dropout, any mask and attention weights), or a fused kernel without
            dropout and weights (`bert.model.attention.fused_attention`): "cudnn", "splash" or "xla".
        pad_vocab_to_multiple_of: multiple to which the MLM head pads its logits. Padding has probability 0.
    """

    remat: str = "none"
    scan: bool = False
    attention: str = "written"
    pad_vocab_to_multiple_of: int = 1

    @classmethod
    def from_config(
        cls, config: TrainingConfig, model: ModelConfig | None = None, devices: Sequence[Any] | None = None
    ) -> LayerExecution:
        """Resolves the execution options of a training configuration.

        Args:
            config: the training section of a configuration.
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
        attention = "written"
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
    return model.head_size % 8 == 0 and model.head_size <= largest and model.position_embedding_type != "disentangled"


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
    run_layer: Callable[[Any, Any, Any, dict[str, Any]], Any],
) -> Any:
    """Runs layers as one `jax.lax.scan` over their stacked parameters.

    Layers that share parameters run in an inner scan.

    Args:
        config: model configuration.
        params: parameters of the encoder, with ``layer_0`` and so on.
        first: number of the first layer to run. The layers before it must not share its parameters.
        x: hidden states.
        run_layer: maps (x, layer number, whether the layer is local, its parameters) to x.
    """
    groups = range(config.group_of(first), config.num_distinct_layers)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[f"layer_{group}"] for group in groups))
    numbers = jnp.arange(first, config.num_hidden_layers)
    local = jnp.array([config.is_local(number) for number in range(first, config.num_hidden_layers)])

    def run_one(x: Any, layer: tuple[Any, Any, dict[str, Any]]) -> tuple[Any, None]:
        return run_layer(x, *layer), None

    def run_group(x: Any, group: tuple[Any, Any, dict[str, Any]]) -> tuple[Any, None]:
        numbers, local, params = group
        return jax.lax.scan(lambda x, layer: run_one(x, (*layer, params)), x, (numbers, local))

    if config.layers_per_group == 1:
        return jax.lax.scan(run_one, x, (numbers, local, stacked))[0]
    numbers, local = (array.reshape(len(groups), -1) for array in (numbers, local))
    return jax.lax.scan(run_group, x, (numbers, local, stacked))[0]
