"""Selects how encoder layers are executed (rematerialization, scan, attention kernel) for a configuration and its
devices."""

from __future__ import annotations

from dataclasses import dataclass

from bert.config import ModelConfig, TrainingConfig
from bert.errors import UserError
from bert.parallel.devices import local_devices, max_cudnn_head_dim


@dataclass(frozen=True)
class LayerExecution:
    """How the layers are run. None of it changes parameters, or results and gradients by more than rounding.

    Attributes:
        remat: what the backward pass computes again: "none", "dots" (all but the results of linear layers) or "full"
            (a layer from its input; Chen et al. 2016).
        scan: compile one layer and loop over stacked weights; they are stacked within the step, so that every layer
            has its own parameters to optimizer, checkpoints and exports.
        attention: "written" out, with dropout, any mask and its weights to look at; or one kernel with neither
            (`bert.model.attention.fused_attention`), "cudnn" or "xla".
        pad_vocab_to_multiple_of: of the MLM head's logits; tokens beyond the vocabulary have no probability.
    """

    remat: str = "none"
    scan: bool = False
    attention: str = "written"
    pad_vocab_to_multiple_of: int = 1

    @classmethod
    def from_config(
        cls, config: TrainingConfig, model: ModelConfig | None = None, cudnn_head: int | None = None
    ) -> LayerExecution:
        """Resolves the execution options of a training configuration.

        Args:
            config: asks.
            model: None where it is not known yet, and taken for one that fits.
            cudnn_head: of the devices, as `max_cudnn_head_dim` has it; None for those that JAX has.

        Raises:
            UserError: cuDNN is asked for where there is none, or for heads or positions that it does not take.
        """
        largest = max_cudnn_head_dim(local_devices()) if cudnn_head is None else cudnn_head
        head_size = None if model is None else model.head_size
        disentangled = model is not None and model.position_embedding_type == "disentangled"
        cudnn = (
            largest > 0 and (head_size is None or (head_size % 8 == 0 and head_size <= largest)) and not disentangled
        )
        if config.attention_implementation == "cudnn" and disentangled:
            raise UserError(
                "training.attention_implementation is cudnn, whose kernel would read the scores that "
                "model.position_embedding_type disentangled has already computed: set it to xla, or leave it to "
                "training.preset"
            )
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
        kernel = "cudnn" if config.attention_implementation == "cudnn" or (config.preset == "fast" and cudnn) else "xla"
        fused = config.attention_implementation == "cudnn" or (
            config.preset == "fast" and config.attention_implementation == "auto"
        )
        return cls(config.remat, config.scan_layers, kernel if fused else "written", config.pad_vocab_to_multiple_of)
