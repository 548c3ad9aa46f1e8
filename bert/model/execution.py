"""Selects how encoder layers are executed (rematerialization, scan, attention kernel) for a configuration and its
devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bert.config import ModelConfig, TrainingConfig
from bert.errors import UserError
from bert.parallel.devices import are_tpus, local_devices, max_cudnn_head_dim


@dataclass(frozen=True)
class LayerExecution:
    """How the layers are run. None of it changes parameters, or results and gradients by more than rounding.

    Attributes:
        remat: what the backward pass computes again: "none", "dots" (all but the results of linear layers) or "full"
            (a layer from its input; Chen et al. 2016).
        scan: compile one layer and loop over stacked weights; they are stacked within the step, so that every layer
            has its own parameters to optimizer, checkpoints and exports.
        attention: "written" out, with dropout, any mask and its weights to look at; or one kernel with neither
            (`bert.model.attention.fused_attention`), "cudnn", "splash" or "xla".
        pad_vocab_to_multiple_of: of the MLM head's logits; tokens beyond the vocabulary have no probability.
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
            config: asks.
            model: None where it is not known yet, and taken for one that fits.
            devices: those that it is compiled for; None for those that JAX has.

        Raises:
            UserError: a kernel is asked for that the devices do not have, or for heads or positions that it does not
                take.
        """
        devices = local_devices() if devices is None else devices
        largest = max_cudnn_head_dim(devices)
        head_size = None if model is None else model.head_size
        disentangled = model is not None and model.position_embedding_type == "disentangled"
        cudnn = (
            largest > 0 and (head_size is None or (head_size % 8 == 0 and head_size <= largest)) and not disentangled
        )
        if model is not None:
            config.check_kernel(model)
        if config.attention_implementation == "cudnn" and not cudnn:
            reason = (
                f"whose heads have a multiple of 8 features and at most {largest} on these devices, and the model's "
                f"have {head_size} (model.hidden_size / model.num_attention_heads)"
                if largest
                else "which is for NVIDIA GPUs of compute capability 8.0 or more, and the devices are none"
            )
            raise UserError(
                f"training.attention_implementation is cudnn, {reason}: set it to xla, or leave it to training.preset"
            )
        if config.attention_implementation == "splash":
            _check_splash(devices)
        attention = "written"
        if config.attention_implementation in ("cudnn", "splash"):
            attention = config.attention_implementation
        elif config.preset == "fast" and config.attention_implementation == "auto":
            attention = "cudnn" if cudnn else "xla"
        return cls(config.remat, config.scan_layers, attention, config.pad_vocab_to_multiple_of)


def _check_splash(devices: Sequence[Any]) -> None:
    if not are_tpus(devices):
        raise UserError(
            "training.attention_implementation is splash, which is for TPUs, and the devices are none: set it to xla, "
            "or leave it to training.preset"
        )
