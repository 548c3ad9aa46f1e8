"""Configuration of the optimizer and the training loop."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from bert.config.model import DISENTANGLED, ModelConfig
from bert.config.validation import (
    Fraction,
    InnerFraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Range,
    check_fields,
    check_unused,
    conflict,
)
from bert.errors import UserError

Remat = Literal["none", "dots", "full"]
LoggerName = Literal["tensorboard", "wandb", "mlflow"]
ObjectiveName = Literal["mlm", "rtd", "plm", "clm"]
ScheduleName = Literal["linear", "cosine", "inverse_sqrt", "constant", "warmup_stable_decay", "one_minus_sqrt"]

ROW_SHARES = "shares of rows (data x fsdp)"

UNSUPPORTED_POSITIONS = {"cudnn": (*DISENTANGLED, "transformer_xl"), "splash": ("alibi", "transformer_xl")}
"""Values of model.position_embedding_type that a kernel of training.attention_implementation does not support."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate schedule."""

    name: Literal["adamw", "lamb", "lion", "adafactor", "muon", "stable_adamw"] = "adamw"
    """Optimizer: adamw (as in BERT), lamb (for batches of thousands of rows), lion (one moment; beta2 0.99 in the
    paper), adafactor (little memory, no betas), muon (orthogonal updates of the layers' matrices, adamw for the
    rest) or stable_adamw (with bias correction; clips the updates of each tensor instead of the gradient, as in
    ModernBERT)."""
    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate. adafactor: relative to the scale of each tensor (1e-2 in the paper). lion: 3 to 10 times
    lower than for adamw."""
    warmup_steps: NonNegative | None = None
    """Steps of linear warm-up. Defaults to warmup_ratio of all steps."""
    warmup_ratio: Fraction = 0.1
    """Share of all steps that warm up if warmup_steps is null, rounded down."""
    schedule: ScheduleName = "linear"
    """Decay of the learning rate after the warm-up: linear; half a cosine (cosine); 1 / sqrt(step), independent of the
    number of steps, as in the Transformer (inverse_sqrt); none (constant); linear over the last decay_ratio of the
    steps (warmup_stable_decay); or 1 - sqrt(share of the steps done), for the last phase of a run (one_minus_sqrt)."""
    decay_ratio: InnerFraction = 0.1
    """warmup_stable_decay: share of the steps in which the learning rate decays."""
    final_rate: Fraction = 0.0
    """linear, cosine, warmup_stable_decay, one_minus_sqrt: final learning rate as a share of the peak."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; not applied to biases and LayerNorm."""
    beta1: Fraction = 0.9
    """Decay rate of the first moment."""
    beta2: Fraction = 0.999
    """Decay rate of the second moment."""
    epsilon: NonNegativeFloat = 1e-6
    """Constant added to the square root of the second moment."""
    bias_correction: bool = False
    """Correct the bias of the moments towards zero; Google's BERT does not."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the gradient to this global norm; 0 turns clipping off. stable_adamw never clips the gradient."""
    spike_deviations: PositiveFloat | None = None
    """Log steps whose loss or gradient norm is more than this many standard deviations above the mean of the last 128
    steps (6 in OLMo 2). null: do not detect spikes."""
    skip_spikes: bool = False
    """Skip the updates of these steps. Needs spike_deviations."""
    layerwise_lr_decay: Annotated[float, Range(above=0, maximum=1)] = 1.0
    """Learning rate of each encoder layer as a factor of the rate of the layer above; 1: the same rate for all."""

    def check(self) -> None:
        """Raises UserError for values that cannot train."""
        check_fields("optimizer.", self)
        if self.final_rate and self.schedule in ("inverse_sqrt", "constant"):
            fix = "remove it, or set optimizer.schedule to linear or cosine"
            raise conflict(self, "optimizer.final_rate", "optimizer.schedule", fix)
        if self.schedule != "warmup_stable_decay":
            reason = "which optimizer.schedule warmup_stable_decay alone uses: remove it"
            check_unused("optimizer.", self, reason, ["decay_ratio"])
        if self.skip_spikes and self.spike_deviations is None:
            fix = "set optimizer.spike_deviations, for example to 6"
            raise conflict(self, "optimizer.skip_spikes", "optimizer.spike_deviations", fix)
        if self.name == "stable_adamw" and self.max_grad_norm > 0:
            clips = "but optimizer.name stable_adamw clips updates instead: remove it, or set it to 0"
            check_unused("optimizer.", self, clips, ["max_grad_norm"])

    def num_warmup_steps(self, total_steps: int) -> int:
        """Steps of warm-up of a run of ``total_steps``. Raises UserError if the rate would never fall."""
        if self.warmup_steps is None:
            return int(self.warmup_ratio * total_steps)
        if self.warmup_steps >= total_steps:
            raise UserError(
                f"optimizer.warmup_steps ({self.warmup_steps}) is not below the {total_steps} steps of the run "
                "(training.steps, or the steps of training.epochs): set a smaller number, or pass "
                f"--optimizer.warmup_ratio {self.warmup_ratio} for a share of the steps"
            )
        return int(self.warmup_steps)


@dataclass(frozen=True)
class TrainingConfig:
    """The training loop: steps, batches, execution, logging and checkpoints."""

    objective: ObjectiveName = "mlm"
    """Pretraining objective: mlm (masked language modelling, as in BERT), rtd (replaced token detection, as in
    ELECTRA), plm (permuted language modelling, as in XLNet and MPNet) or clm (causal language modelling, as in GPT;
    needs model.causal). All except mlm need a data.input_format without pairs."""
    steps: Positive | None = None
    """Number of optimizer steps. null: use training.epochs."""
    epochs: PositiveFloat | None = None
    """Number of passes over the training rows if training.steps is null."""
    max_minutes: PositiveFloat | None = None
    """Pretraining: time limit in minutes over all sessions of the run, from data preparation to results.json, without
    transfer at the end. training.steps is the maximum number of steps. With optimizer.schedule warmup_stable_decay, the
    learning rate decays before the limit; with constant and inverse_sqrt, the run just ends. null: no limit."""
    batch_size: Positive = 32
    """Rows B per optimizer step, over all devices."""
    tokens_per_batch: Positive | None = None
    """Fine-tuning: tokens per optimizer step, over all devices, including padding. A batch has as many rows of similar
    length as fit. null: use batch_size."""
    eval_batch_size: Positive | None = None
    """Rows per evaluation batch, over all devices. Defaults to the rows of a micro-batch."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches per batch, computed one after the other to save memory. The result does not depend on it."""
    micro_batch_size: Positive | None = None
    """Maximum number of rows in a micro-batch, over all devices: sets gradient_accumulation_steps to the smallest
    number of equal micro-batches with at most this number of rows. null: use gradient_accumulation_steps.
    """
    label_smoothing: Fraction = 0.0
    """training.objective clm and sequence to sequence: share of the probability of the next token that is spread evenly
    over the vocabulary. The logged lm_loss or nll does not include it."""
    z_loss: NonNegativeFloat = 0.0
    """training.objective mlm without a teacher: weight of the squared log of the softmax's denominator at the predicted
    tokens, which is meant to keep this log near 0 and training stable (z-loss; 1e-4 in PaLM, section 5). The logged
    mlm_loss does not include it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the computation; parameters are always float32."""
    preset: Literal["reference", "fast"] = "reference"
    """reference: the paper's computation. fast: sets dtype to bfloat16, model.attention_probs_dropout_prob to 0 and
    pad_vocab_to_multiple_of to 64, except where they are set explicitly, and computes attention in one kernel (cuDNN on
    NVIDIA GPUs)."""
    attention_implementation: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    """Attention: compiled by XLA (xla), cuDNN's kernel (cudnn; bfloat16) or JAX's kernel for TPUs
    (splash). The kernels have no dropout of attention weights. auto: chosen by preset."""
    pad_vocab_to_multiple_of: Positive = 1
    """Pad the output of the MLM head to a multiple of this number, which is faster on GPUs. The padding has no
    probability and no parameters, and is not part of checkpoints and exports."""
    dropout_rng: Literal["hash", "threefry"] = "hash"
    """Random bits of dropout: a counter hash (fast), or JAX's threefry."""
    mesh: str | None = None
    """Devices as DATAxFSDPxTENSOR, such as 2x4x1: rows are sharded over the first two axes, parameters and optimizer
    state over the second, heads and feed-forward over the third. null: a copy of the model on every device (pmap)."""
    remat: Remat = "none"
    """Values that the backward pass recomputes to save memory: none; all except outputs of linear layers (dots); or all
    inside a layer (full)."""
    scan_layers: bool = False
    """Compile one layer and loop over it: compiles faster, but keeps a stacked copy of all layers' weights in
    memory."""
    log_every: Positive = 100
    """Steps between two log lines of training metrics."""
    eval_every: Positive | None = None
    """Steps between two evaluations. Defaults to one epoch in fine-tuning and to checkpoint_every in pretraining."""
    checkpoint_every: Positive = 1000
    """Steps between two checkpoints."""
    average_checkpoints: Positive = 1
    """Fine-tuning: evaluate, select and keep the mean of the parameters at the last n evaluations; 5 in the
    Transformer's base models."""
    max_to_keep: Positive | None = None
    """Number of newest checkpoints to keep for resuming. Defaults to 3 in pretraining and 1 in fine-tuning, which also
    keeps the parameters of the best checkpoint."""
    max_consecutive_nonfinite_steps: Positive = 10
    """Stop after this number of consecutive steps with a NaN or infinite loss, gradient or update. Fewer such steps are
    skipped, and their batches are written to nonfinite/ in the run's folder."""

    def check(self) -> None:
        """Raises UserError for values that contradict each other."""
        check_fields("training.", self)
        if (self.steps is None) == (self.epochs is None):
            state = "are both null" if self.steps is None else "are both set"
            raise UserError(f"training.steps and training.epochs {state}: set exactly one of them")
        self.check_micro_batches("training")
        if self.mesh is not None and self.mesh_shape is None:
            raise UserError(f"training.mesh is {self.mesh!r}: write DATAxFSDPxTENSOR, such as 2x4x1")

    def check_micro_batches(self, section: str) -> None:
        """Raises UserError if a batch cannot be split evenly."""
        if self.tokens_per_batch is None and self.batch_size % self.gradient_accumulation_steps:
            raise UserError(
                f"{section}.batch_size ({self.batch_size}) is not divisible by "
                f"{section}.gradient_accumulation_steps ({self.gradient_accumulation_steps}): change one of them"
            )

    def check_warmup(self, optimizer: OptimizerConfig) -> None:
        """Raises UserError for a warm-up that is not shorter than the run, if the number of steps is set."""
        if self.steps is not None:
            optimizer.num_warmup_steps(int(self.steps))

    @property
    def rows_per_evaluation(self) -> int:
        """Rows per evaluation batch: ``eval_batch_size``, or the rows of a micro-batch if that is null."""
        return self.eval_batch_size or max(1, self.batch_size // self.gradient_accumulation_steps)

    @property
    def mesh_shape(self) -> tuple[int, int, int] | None:
        """``mesh`` as numbers; None if it is null or does not have three numbers."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", self.mesh or "")
        return (int(match[1]), int(match[2]), int(match[3])) if match else None

    def check_attention(self, dropout: float) -> None:
        """Raises UserError if a kernel does not support the dropout or the mask of attention."""
        kernel = self.attention_implementation
        if kernel not in ("cudnn", "splash"):
            return
        for name, value, fix, wrong in (
            ("training.dtype", self.dtype, "bfloat16", kernel == "cudnn" and self.dtype != "bfloat16"),
            ("model.attention_probs_dropout_prob", dropout, "0", dropout > 0),
            ("training.objective", self.objective, "mlm", self.objective == "plm"),
        ):
            if wrong:
                raise UserError(
                    f"{name} is {value}, which training.attention_implementation {kernel} does not support: set it to "
                    f"{fix}, or training.attention_implementation to xla"
                )

    def check_kernel(self, model: ModelConfig) -> None:
        """Raises UserError if the attention kernel does not support the model's scores on any device."""
        kernel, kind = self.attention_implementation, model.position_embedding_type
        unsupported = None
        if kind in UNSUPPORTED_POSITIONS.get(kernel, ()):
            unsupported = f"model.position_embedding_type {kind}"
        elif kernel == "cudnn" and model.attention_softcap is not None:
            unsupported = "model.attention_softcap"
        elif kernel == "splash" and model.relative_attention_buckets is not None:
            unsupported = f"biases, but model.relative_attention_buckets is {model.relative_attention_buckets}"
        if unsupported is not None:
            raise UserError(
                f"training.attention_implementation is {kernel}, which does not support {unsupported}: set it to xla "
                "or auto"
            )

    def check_mesh_sizes(self, model: ModelConfig) -> None:
        """Raises UserError if ``mesh`` is set and cannot divide the model evenly."""
        if self.mesh_shape is not None:
            check_mesh_sizes(self.mesh_shape, model)

    def check_mesh_batches(self, batches: Iterable[tuple[str, int, int]]) -> None:
        """Raises UserError if ``mesh`` is set and cannot divide the rows of a batch evenly.

        Args:
            batches: key, rows and micro-batches of each.
        """
        if self.mesh_shape is not None:
            for name, rows, micro_batches in batches:
                check_shares(name, rows, self.mesh_shape[0] * self.mesh_shape[1], ROW_SHARES, micro_batches)


def check_mesh_sizes(shape: tuple[int, int, int], model: ModelConfig) -> None:
    """Raises UserError if a dimension of the model cannot be sharded evenly over a mesh."""
    _, fsdp, tensor = shape
    for axis, devices, names in (
        ("fsdp", fsdp, ("hidden_size",)),
        ("tensor", tensor, ("num_attention_heads", "key_value_heads", "intermediate_size")),
    ):
        for name in names:
            if getattr(model, name) % devices:
                key = "num_key_value_heads" if name == "key_value_heads" else name
                raise UserError(
                    f"model.{key} ({getattr(model, name)}) is not divisible by the {devices} devices of "
                    f"training.mesh's axis {axis}: use fewer of these and more along data"
                )


def check_shares(name: str, batch_size: int, shares: int, what: str = ROW_SHARES, micro_batches: int = 1) -> None:
    """Raises UserError if a global batch cannot be sharded evenly."""
    parts = shares * micro_batches
    if batch_size % parts:
        lower, upper = batch_size // parts * parts, -(-batch_size // parts) * parts
        nearest = f"{lower} or {upper}" if lower else str(upper)
        raise UserError(
            f"{name} ({batch_size}) is not divisible by {shares} {what} x {micro_batches} micro-batches: use {nearest}"
        )


def num_micro_batches(rows: int, max_rows: int) -> int:
    """Returns the smallest number of equal micro-batches of at most ``max_rows`` rows."""
    return next((count for count in range(1, rows + 1) if rows % count == 0 and rows // count <= max_rows), 1)
