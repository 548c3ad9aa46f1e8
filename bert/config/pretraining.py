"""A pretraining run and its phases, such as short rows first and then long ones (Devlin et al. 2018, appendix A.2).

Each phase resolves to the configuration of a single-phase run, so that other code does not depend on phases.
Parameters and the optimizer's moments are carried over. All phases share one count of steps, one warm-up and one decay;
the rate of update n (from 0) is scaled by the peak of its phase:

    rate(n) = learning_rate of the phase of n * min(n / warm-up, (steps - n) / (steps - warm-up))

(with the default optimizer.schedule and final_rate). If all phases have the same peak, this is the paper's schedule.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Annotated, Literal

from bert.config.data import PAIR_FORMATS, UNUSED_BY_CLM, DataConfig
from bert.config.model import DECODER_KEYS, ModelConfig
from bert.config.options import DistillationConfig, ElectraConfig
from bert.config.tokenizer import TokenizerConfig
from bert.config.training import LoggerName, OptimizerConfig, TrainingConfig
from bert.config.validation import (
    InnerFraction,
    Positive,
    PositiveFloat,
    Range,
    Seed,
    check_fields,
    check_paths,
    check_unused,
    conflict,
)
from bert.errors import UserError


@dataclass(frozen=True)
class PhaseConfig:
    """One phase of a run; unset keys default to the rest of the configuration."""

    share: InnerFraction | None = None
    """Share of training.steps. The last phase has neither share nor steps: it has the remaining steps."""
    steps: Positive | None = None
    """Number of steps, instead of a share."""
    sequence_length: Annotated[int, Range(minimum=8)] | None = None
    """Tokens T per row. Defaults to data.sequence_length."""
    max_predictions_per_sequence: Positive | None = None
    """Maximum number of predictions P per row. Defaults to data.max_predictions_per_sequence, in proportion to the
    lengths; if that is null too, to data.masked_lm_prob x sequence_length, rounded up."""
    batch_size: Positive | None = None
    """Rows B of one optimizer step. Defaults to training.batch_size."""
    gradient_accumulation_steps: Positive | None = None
    """Micro-batches per batch. Defaults to training.gradient_accumulation_steps."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate. Defaults to optimizer.learning_rate. Warm-up and decay are one schedule over all phases."""
    micro_batch_size: Positive | None = None
    """Maximum number of rows in a micro-batch, in place of gradient_accumulation_steps. Defaults to
    training.micro_batch_size."""

    def check(self, name: str, is_last: bool) -> None:
        """Raises UserError for invalid values; ``name`` is the key of the phase, such as phases.2."""
        lengths = [key for key in ("share", "steps") if getattr(self, key) is not None]
        if is_last and lengths:
            raise UserError(f"{name}.{lengths[0]} is set, but the last phase has the remaining steps: remove it")
        if not is_last and len(lengths) != 1:
            state = "are both set" if lengths else "are both null"
            raise UserError(f"{name}.share and {name}.steps {state}: set exactly one of them, as another phase follows")
        check_fields(f"{name}.", self)


@dataclass(frozen=True)
class PretrainConfig:
    """A pretraining run."""

    output_dir: str | None = None
    """Folder of the run, or its URL in a bucket (gs://, s3://). Defaults to runs/ and the name of the recipe. The same
    command resumes the run."""
    init: str | None = None
    """Run, Hugging Face folder, folder of google-research/bert or hub name to start from, with its weights and
    vocabulary. null: random weights."""
    init_state: bool = False
    """Continue from the whole training state of init, which is RUN@STEP: weights, optimizer, step and data position.
    training.steps then includes the steps of init. All keys may differ except the model's and optimizer.name."""
    seed: Seed = 0
    """Seed of the initial weights, the order of the data, masks and dropout."""
    mlm_bias_init: Literal["unigram", "zeros"] = "unigram"
    """Initial output bias of the MLM head, if it has one: log frequencies of the tokens (unigram), or zeros, as in
    BERT."""
    embedding_init: Literal["random", "cooccurrence"] = "random"
    """Initial word embeddings without init: random numbers (random), or vectors computed from the tokens that occur
    next to each other in the training rows (cooccurrence), with which a short run learns faster."""
    phases: list[PhaseConfig] | None = None
    """Consecutive phases of the run with their own rows and batches: in YAML a list, each phase with some of the keys
    below. null: one phase; on the command line, this drops the phases of a recipe."""
    transfer: str | None = None
    """Fine-tuning recipe or YAML file to run at the end, or several separated by commas: from the pretrained encoder
    and, as controls, from random weights of the same sizes and with a linear model on words. Scores are in
    results.json, rows of the recipes without data (word_order, parameters, which_parameter) in transfer/ in the run's
    folder. null: none. A recipe's transfer is dropped if data.train is set elsewhere."""
    loggers: list[LoggerName] | None = None
    """Loggers of metrics besides metrics.jsonl: tensorboard, wandb (Weights & Biases), mlflow, or several separated by
    commas; [] for none. Defaults to tensorboard if tensorboardX is installed."""
    profile: bool = False
    """Write a profile of a few early steps to profile/ in the run's folder, for TensorBoard and Perfetto."""
    data: DataConfig = field(default_factory=DataConfig)
    """the corpus and its examples"""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """the vocabulary"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """the encoder"""
    electra: ElectraConfig = field(default_factory=ElectraConfig)
    """the generator of training.objective rtd"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """the optimizer"""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """the teacher"""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """the training loop"""

    def check(self) -> None:
        """Raises UserError for the first invalid value or combination of values."""
        check_paths(self)
        check_fields("", self)
        for part in (self.model, self.tokenizer, self.data, self.optimizer, self.distillation, self.training):
            part.check()
        self._check_objective()
        only_rows = "but pretraining has batches of training.batch_size rows: remove it"
        check_unused("training.", self.training, only_rows, ["tokens_per_batch"])
        no_best = "but pretraining keeps its last parameters: remove it"
        check_unused("training.", self.training, no_best, ["average_checkpoints"])
        check_unused("model.", self.model, "but pretraining has no decoder: remove it", DECODER_KEYS)
        if self.distillation.teacher is not None and self.training.objective != "mlm":
            fix = "set the objective to mlm, or remove the teacher"
            raise conflict(self, "distillation.teacher", "training.objective", fix)
        if self.init == "none":
            raise UserError("init is none: remove it, pretraining starts from random weights without it")
        if self.init_state:
            self._check_init_state()
        if self.init is None:
            self.check_model()
        self.electra.check(self.model, self.training.objective)
        self.training.check_warmup(self.optimizer)
        self._check_max_minutes()
        dropout = self.model.attention_probs_dropout_prob
        self.training.check_attention(dropout)
        _check_lengths(self, "data")
        if self.data.streaming:
            self._check_streaming()
        if self.phases is not None:
            check_phases(self)
        self.training.check_mesh_batches(self.batches())

    def batches(self) -> list[tuple[str, int, int]]:
        """Returns (key, rows, micro-batches) of the training and evaluation batches of each phase."""
        batches = []
        for number, config in enumerate(phase_configs(self), 1):
            training, section = config.training, "training" if self.phases is None else f"phases.{number}"
            batches.append((f"{section}.batch_size", training.batch_size, training.gradient_accumulation_steps))
            batches.append(("training.eval_batch_size", training.rows_per_evaluation, 1))
        return batches

    def capped_predictions(self, section: str = "data") -> str | None:
        """Returns a message if ``max_predictions_per_sequence`` of ``section`` limits the predictions of full rows."""
        data = self.data
        tokens, limit = data.sequence_length - 2, data.predictions_per_row  # a row begins and ends with a token
        if self.training.objective == "clm" or data.packing or int(data.masked_lm_prob * tokens + 0.5) <= limit:
            return None
        return (
            f"{section}.max_predictions_per_sequence {limit} allows {limit / tokens:.1%} of the tokens of a full row "
            f"of {data.sequence_length} tokens, where data.masked_lm_prob is {data.masked_lm_prob:g}"
        )

    def _check_objective(self) -> None:
        """Raises UserError if the rows have a label that the objective does not learn, or for unused keys of masks."""
        objective = self.training.objective
        if objective != "mlm" and self.data.input_format in PAIR_FORMATS:
            formats = "blocks, full_sentences" if objective == "clm" else "full_sentences"
            fix = f"set data.input_format to {formats} or doc_sentences, since {objective} learns no label of rows"
            raise conflict(self, "data.input_format", "training.objective", fix)
        if objective == "clm":
            no_masks = "but training.objective clm masks no tokens: remove it"
            check_unused("data.", self.data, no_masks, UNUSED_BY_CLM)

    def _check_max_minutes(self) -> None:
        """Raises UserError if ``max_minutes`` is set and the schedule depends on the unknown number of steps."""
        if self.training.max_minutes is None:
            return
        fixes = []
        if self.optimizer.schedule in ("linear", "cosine"):
            fixes.append(f"optimizer.schedule to warmup_stable_decay (it is {self.optimizer.schedule})")
        if self.optimizer.warmup_steps is None and self.optimizer.warmup_ratio:
            fixes.append("optimizer.warmup_steps to the steps of the warm-up (optimizer.warmup_ratio is a share)")
        if any(phase.share is not None for phase in self.phases or ()):
            fixes.append("phases to null, or their steps in place of share")
        if fixes:
            raise UserError(
                f"training.max_minutes is {self.training.max_minutes:g}, but the number of steps is not known in "
                f"advance: set {', and '.join(fixes)}"
            )

    def _check_init_state(self) -> None:
        """Raises UserError if ``init`` names no checkpoint, or one that is not before the last step of the run."""
        run, _, step = (self.init or "").rpartition("@")
        if not run or not (step.isascii() and step.isdigit()):
            fix = "name the checkpoint of a pretraining run, such as runs/mini@1000, or remove init_state"
            raise conflict(self, "init_state", "init", fix)
        if self.training.steps is not None and self.training.steps <= int(step):
            fix = f"set it above {step}, since init_state counts the steps of init as well"
            raise conflict(self, "training.steps", "init", fix)

    def _check_streaming(self) -> None:
        """Raises UserError if the number of steps or the batches do not work with a stream."""
        if self.training.steps is None:
            fix = "set training.steps instead, since the length of an epoch is not known"
            raise conflict(self, "training.epochs", "data.streaming", fix)
        for config in phase_configs(self):
            if config.training.batch_size % self.data.stream_readers:
                fix = "use a divisor of the batch size"
                raise conflict(config, "data.stream_readers", "training.batch_size", fix)

    def check_model(self) -> None:
        """Raises UserError if the model, whose sizes are known now, does not fit the other settings."""
        self._check_direction()
        self.model.check_depths(self.optimizer.layerwise_lr_decay)
        self.training.check_kernel(self.model)
        self.training.check_mesh_sizes(self.model)
        if self.model.type_vocab_size < 2 and self.data.input_format in PAIR_FORMATS:
            fix = "start from a model with two segments, or set data.input_format to full_sentences"
            raise conflict(self, "model.type_vocab_size", "data.input_format", fix)
        for number, config in enumerate([self, *(phase_configs(self) if self.phases else [])]):
            section, length = f"phases.{number}" if number else "data", config.data.sequence_length
            if length > self.model.max_position_embeddings:
                raise UserError(
                    f"{section}.sequence_length is {length}, but model.max_position_embeddings is "
                    f"{self.model.max_position_embeddings}: use at most as many tokens"
                )

    def _check_direction(self) -> None:
        """Raises UserError if model.causal does not fit training.objective."""
        is_causal = self.training.objective == "clm"
        if is_causal != self.model.causal:
            fix = "set model.causal to true for clm, and to false for all other objectives"
            raise conflict(self, "model.causal", "training.objective", fix)
        if self.training.label_smoothing and not is_causal:
            raise conflict(self, "training.label_smoothing", "training.objective", "remove it, only clm uses it")


@dataclass(frozen=True)
class Phase:
    """A phase of a run whose number of steps is known.

    Attributes:
        number: index of the phase, from 1.
        first, end: its steps are first + 1 to end, as counted in metrics and checkpoints.
        config: configuration of a run with only this phase.
    """

    number: int
    first: int
    end: int
    config: PretrainConfig


def resolve_phases(config: PretrainConfig, total_steps: int) -> list[Phase]:
    """Returns the phases of a run of ``total_steps``; a configuration without phases has one."""
    ends = _phase_boundaries(config.phases or [PhaseConfig()], total_steps)
    spans = itertools.pairwise([0, *ends])
    return [Phase(i, *span, one) for i, (span, one) in enumerate(zip(spans, phase_configs(config), strict=True), 1)]


def phase_configs(config: PretrainConfig) -> list[PretrainConfig]:
    """Returns the configuration of each phase, or the configuration itself if it has no phases."""
    return [config] if config.phases is None else [_config_for_phase(config, phase) for phase in config.phases]


def check_phases(config: PretrainConfig) -> None:
    """Raises UserError if the phases contradict each other, or one does not fit the model."""
    phases = config.phases
    if not phases:
        raise UserError("phases is an empty list: describe at least one phase, or set it to null")
    if config.training.steps is None:
        raise UserError("phases are set, but training.steps is null: set training.steps, or phases to null")
    for number, phase in enumerate(phases, 1):
        phase.check(f"phases.{number}", is_last=number == len(phases))
    total = int(config.training.steps)
    first = 0
    boundaries = _phase_boundaries(phases, total)
    for number, (phase, end, alone) in enumerate(zip(phases, boundaries, phase_configs(config), strict=True), 1):
        if end <= first:
            raise UserError(
                f"phases.{number} has no steps, since the phases before it have {first:,} and training.steps is "
                f"{total:,}: raise training.steps, or set phases to null"
            )
        first = end
        if alone.training.objective == "clm" and phase.max_predictions_per_sequence is not None:
            raise UserError(
                f"phases.{number}.max_predictions_per_sequence is {phase.max_predictions_per_sequence}, but "
                "training.objective clm masks no tokens: remove it"
            )
        _check_lengths(alone, f"phases.{number}")
        alone.training.check_micro_batches(f"phases.{number}")


def _check_lengths(config: PretrainConfig, section: str) -> None:
    """Raises UserError if rows are too long for any model, or too short for their predictions."""
    length, predictions = config.data.sequence_length, config.data.predictions_per_row
    config.model.check_length(f"{section}.sequence_length", length)
    if predictions >= length and config.training.objective != "clm":
        raise UserError(
            f"{section}.max_predictions_per_sequence is {predictions}, but {section}.sequence_length is {length}: "
            "lower the first or raise the second"
        )


def _phase_boundaries(phases: list[PhaseConfig], total_steps: int) -> list[int]:
    """Returns the last step of each phase. Shares are summed before they are rounded, so that no step is lost. A phase
    with a share leaves at least one step for each later phase."""
    ends, share, steps = [], 0.0, 0
    for number, phase in enumerate(phases[:-1], 1):
        share, steps = share + (phase.share or 0.0), steps + int(phase.steps or 0)
        last = total_steps if phase.share is None else total_steps - (len(phases) - number)
        ends.append(min(last, round(share * total_steps) + steps))
    return [*ends, total_steps]


def _config_for_phase(config: PretrainConfig, phase: PhaseConfig) -> PretrainConfig:
    """Returns the configuration of a run that consists of this phase."""
    data, training, optimizer = config.data, config.training, config.optimizer
    length = phase.sequence_length or data.sequence_length
    predictions = phase.max_predictions_per_sequence or data.max_predictions_per_sequence
    if predictions and phase.max_predictions_per_sequence is None and training.objective != "clm":
        predictions = -(-predictions * length // data.sequence_length)
    accumulation = phase.gradient_accumulation_steps or training.gradient_accumulation_steps
    return dataclasses.replace(
        config,
        phases=None,
        data=dataclasses.replace(data, sequence_length=length, max_predictions_per_sequence=predictions),
        training=dataclasses.replace(
            training,
            batch_size=phase.batch_size or training.batch_size,
            gradient_accumulation_steps=accumulation,
        ),
        optimizer=dataclasses.replace(optimizer, learning_rate=phase.learning_rate or optimizer.learning_rate),
    )
