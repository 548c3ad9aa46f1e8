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
from bert.config.model import DECODER_KEYS, ModelConfig, TokenizerConfig
from bert.config.options import DistillationConfig, ElectraConfig
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
)
from bert.errors import UserError


@dataclass(frozen=True)
class PhaseConfig:
    """One phase of a run; what it leaves out it takes from the rest of the configuration."""

    share: InnerFraction | None = None
    """Share of training.steps; the last phase has neither share nor steps, and takes what is left."""
    steps: Positive | None = None
    """Steps, in place of a share."""
    sequence_length: Annotated[int, Range(least=8)] | None = None
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
        """Raises UserError for values that no phase can have; ``name`` is its place in the list."""
        given = [key for key in ("share", "steps") if getattr(self, key) is not None]
        if is_last and given:
            raise UserError(f"{name}.{given[0]} is set, but the last phase takes the steps that are left: leave it out")
        if not is_last and len(given) != 1:
            state = "are both set" if given else "are both null"
            raise UserError(f"{name}.share and {name}.steps {state}: set exactly one of them, as another phase follows")
        check_fields(f"{name}.", self)


@dataclass(frozen=True)
class PretrainConfig:
    """A pretraining run."""

    output_dir: str | None = None
    """Folder of the run, or its URL in a bucket (gs://, s3://); null takes runs/ and the name of the recipe. Run
    again, it resumes."""
    init: str | None = None
    """Run, Hugging Face folder, folder of google-research/bert or hub name to start from: weights and vocabulary; null
    starts from random weights."""
    init_state: bool = False
    """Continue from the whole training state of init, which is RUN@STEP: weights, optimizer, number of steps and place
    in the data. training.steps then counts the steps of init as well. Every key may differ except those of the model
    and the kind of the optimizer."""
    seed: Seed = 0
    """Seed of initialisation, order of data, masks and dropout."""
    mlm_bias_init: Literal["unigram", "zeros"] = "unigram"
    """Start of the MLM head's output bias, if it has one: log frequencies of the tokens (unigram), or, as published,
    zeros."""
    phases: list[PhaseConfig] | None = None
    """Phases of the run, one after the other, each with its own rows and batches; null is a single one. In YAML a
    list, each phase with some of the keys below; null on the command line drops a recipe's."""
    transfer: str | None = None
    """Fine-tuning recipe, or its YAML file, to run at the end: from the pretrained encoder and, as controls, from
    random weights of the same sizes and as TF-IDF with a linear model. Scores are in results.json, the runs in
    transfer/ in the run's folder; null for none. If data.train is set, a recipe's transfer is left out."""
    loggers: list[LoggerName] | None = None
    """Where metrics go besides metrics.jsonl: tensorboard, wandb (Weights & Biases), mlflow, or several with commas
    between them; null takes tensorboard where tensorboardX is installed, [] none."""
    profile: bool = False
    """Write a trace of a few early steps to profile/ in the run's folder, for TensorBoard and Perfetto."""
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
        """Raises UserError at the first value, or pair of values, that cannot work."""
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
            raise UserError(
                f"distillation.teacher is set, and training.objective is {self.training.objective}: set it to mlm, or "
                "remove the teacher"
            )
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
        self.training.check_attention(dropout, self.data.packing)
        _check_lengths(self, "data")
        if self.data.streaming:
            self._check_streaming()
        if self.phases is not None:
            check_phases(self)
        self.training.check_mesh_batches(self.batches())

    def batches(self) -> list[tuple[str, int, int]]:
        """Key, rows and micro-batches of the training and evaluation batches of each phase."""
        batches = []
        for number, config in enumerate(phase_configs(self), 1):
            training, section = config.training, "training" if self.phases is None else f"phases.{number}"
            batches.append((f"{section}.batch_size", training.batch_size, training.gradient_accumulation_steps))
            batches.append(("training.eval_batch_size", training.rows_per_evaluation, 1))
        return batches

    def capped_predictions(self, section: str = "data") -> str | None:
        """A sentence where a full row has fewer predicted tokens than ``masked_lm_prob`` says; the most of them is set
        in ``section``."""
        data = self.data
        tokens, most = data.sequence_length - 2, data.predictions_per_row  # a row begins and ends with a token
        if self.training.objective == "clm" or data.packing or int(data.masked_lm_prob * tokens + 0.5) <= most:
            return None
        return (
            f"{section}.max_predictions_per_sequence {most} allows {most / tokens:.1%} of the tokens of a full row of "
            f"{data.sequence_length} tokens, where data.masked_lm_prob is {data.masked_lm_prob:g}"
        )

    def _check_objective(self) -> None:
        """Raises UserError if the rows have a label that the objective does not learn, or for unused keys of masks."""
        objective = self.training.objective
        if objective != "mlm" and self.data.input_format in PAIR_FORMATS:
            formats = "blocks, full_sentences" if objective == "clm" else "full_sentences"
            raise UserError(
                f"data.input_format is {self.data.input_format}, but training.objective {objective} does not learn its "
                f"label: set data.input_format to {formats} or doc_sentences"
            )
        if objective == "clm":
            no_masks = "but training.objective clm masks no tokens: remove it"
            check_unused("data.", self.data, no_masks, UNUSED_BY_CLM)

    def _check_max_minutes(self) -> None:
        """Raises UserError if steps that are done would depend on a number of steps that is not known yet."""
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
                f"training.max_minutes is {self.training.max_minutes:g}, and how many steps fit is not known before "
                f"they are measured: set {', and '.join(fixes)}"
            )

    def _check_init_state(self) -> None:
        """Raises UserError if ``init`` names no checkpoint, or one at or after the last step of the run."""
        run, _, step = (self.init or "").rpartition("@")
        if not run or not (step.isascii() and step.isdigit()):
            raise UserError(
                f"init is {'not set' if self.init is None else self.init}, and init_state needs the checkpoint of a "
                "pretraining run: name it as RUN@STEP, such as runs/mini@1000, or remove init_state"
            )
        if self.training.steps is not None and self.training.steps <= int(step):
            raise UserError(
                f"training.steps is {self.training.steps}, and with init_state it counts the {step} steps of init as "
                f"well: set it above {step}"
            )

    def _check_streaming(self) -> None:
        """Raises UserError if the number of steps or the batches do not fit a stream."""
        if self.training.steps is None:
            raise UserError(
                "training.epochs is set, and data.streaming does not know how long an epoch is: set training.steps "
                "instead"
            )
        for config in phase_configs(self):
            if config.training.batch_size % self.data.stream_readers:
                raise UserError(
                    f"data.stream_readers is {self.data.stream_readers}, and a batch of {config.training.batch_size} "
                    "rows has no equal share for each: use a divisor of training.batch_size"
                )

    def check_model(self) -> None:
        """Raises UserError if the model does not fit the rest; with ``init``, its settings come with the weights."""
        self._check_direction()
        self.model.check_depths(self.optimizer.layerwise_lr_decay)
        self.training.check_kernel(self.model)
        self.training.check_mesh_sizes(self.model)
        segments, input_format = self.model.type_vocab_size, self.data.input_format
        if segments < 2 and input_format in PAIR_FORMATS:
            raise UserError(
                f"model.type_vocab_size is {segments}, but data.input_format {input_format} has pairs of segments: "
                "start from a model with two, or set data.input_format to full_sentences"
            )
        for number, config in enumerate([self, *(phase_configs(self) if self.phases else [])]):
            section, length = f"phases.{number}" if number else "data", config.data.sequence_length
            if length > self.model.max_position_embeddings:
                raise UserError(
                    f"{section}.sequence_length ({length}) is over model.max_position_embeddings "
                    f"({self.model.max_position_embeddings}): shorten the one or enlarge the other"
                )

    def _check_direction(self) -> None:
        """Raises UserError if the model reads the text in another direction than training.objective needs."""
        objective = self.training.objective
        if objective == "clm" and not self.model.causal:
            raise UserError(
                "model.causal is false, and training.objective clm needs a model that does not see the tokens it "
                "predicts: set model.causal to true, or training.objective to mlm"
            )
        if objective != "clm" and self.model.causal:
            raise UserError(
                f"model.causal is true, and training.objective {objective} needs a model that sees the tokens on both "
                "sides: set model.causal to false, or training.objective to clm"
            )
        if self.training.label_smoothing and objective != "clm":
            raise UserError(
                f"training.label_smoothing is {self.training.label_smoothing}, and training.objective {objective} does "
                "not use it: remove it"
            )


@dataclass(frozen=True)
class Phase:
    """A phase of a run whose number of steps is known.

    Attributes:
        number: from 1 on.
        first, end: its steps are first + 1 to end, as they are counted in metrics and checkpoints.
        config: of a run that is this phase alone.
    """

    number: int
    first: int
    end: int
    config: PretrainConfig


def resolve_phases(config: PretrainConfig, total_steps: int) -> list[Phase]:
    """The phases of a run of ``total_steps``, one where the configuration has none."""
    ends = _phase_boundaries(config.phases or [PhaseConfig()], total_steps)
    spans = itertools.pairwise([0, *ends])
    return [Phase(i, *span, one) for i, (span, one) in enumerate(zip(spans, phase_configs(config), strict=True), 1)]


def phase_configs(config: PretrainConfig) -> list[PretrainConfig]:
    """The configuration of each phase; of a run without phases its own."""
    return [config] if config.phases is None else [_config_for_phase(config, phase) for phase in config.phases]


def check_phases(config: PretrainConfig) -> None:
    """Raises UserError where the phases cannot follow one another, or one does not fit the model."""
    phases = config.phases
    if not phases:
        raise UserError("phases is an empty list: describe at least one phase, or set it to null")
    if config.training.steps is None:
        raise UserError(
            "phases are set, but training.steps is not, and rows of several lengths have no epochs in common: set "
            "training.steps instead of training.epochs, or phases to null"
        )
    for number, phase in enumerate(phases, 1):
        phase.check(f"phases.{number}", is_last=number == len(phases))
    total = int(config.training.steps)
    first = 0
    boundaries = _phase_boundaries(phases, total)
    for number, (phase, end, alone) in enumerate(zip(phases, boundaries, phase_configs(config), strict=True), 1):
        if end <= first:
            raise UserError(
                f"phases.{number} is left without a step, since those before it take {first:,} and training.steps is "
                f"{total:,}: enlarge training.steps, or set phases to null"
            )
        first = end
        if alone.training.objective == "clm" and phase.max_predictions_per_sequence is not None:
            raise UserError(
                f"phases.{number}.max_predictions_per_sequence is {phase.max_predictions_per_sequence}, which "
                "training.objective clm does not use: remove it, no token is masked"
            )
        _check_lengths(alone, f"phases.{number}")
        alone.training.check_micro_batches(f"phases.{number}")


def _check_lengths(config: PretrainConfig, section: str) -> None:
    """Raises UserError if rows are too long for any model, or for their predictions too short."""
    length, predictions = config.data.sequence_length, config.data.predictions_per_row
    config.model.check_length(f"{section}.sequence_length", length)
    if predictions >= length and config.training.objective != "clm":
        raise UserError(
            f"{section}.max_predictions_per_sequence ({predictions}) is not below {section}.sequence_length "
            f"({length}): lower the one or raise the other"
        )


def _phase_boundaries(phases: list[PhaseConfig], total_steps: int) -> list[int]:
    """The last step of each phase; shares are added up before they are rounded, so that no step is lost. One with a
    share leaves a step for each that follows."""
    ends, share, steps = [], 0.0, 0
    for number, phase in enumerate(phases[:-1], 1):
        share, steps = share + (phase.share or 0.0), steps + int(phase.steps or 0)
        most = total_steps if phase.share is None else total_steps - (len(phases) - number)
        ends.append(min(most, round(share * total_steps) + steps))
    return [*ends, total_steps]


def _config_for_phase(config: PretrainConfig, phase: PhaseConfig) -> PretrainConfig:
    """The configuration of a run that is this phase alone."""
    data, training, optimizer = config.data, config.training, config.optimizer
    length = phase.sequence_length or data.sequence_length
    predictions = phase.max_predictions_per_sequence or data.max_predictions_per_sequence
    if predictions and phase.max_predictions_per_sequence is None and training.objective != "clm":
        predictions = -(-predictions * length // data.sequence_length)
    accumulation = phase.gradient_accumulation_steps or training.gradient_accumulation_steps
    return dataclasses.replace(
        config,
        phases=None,
        data=dataclasses.replace(
            data,
            sequence_length=length,
            max_predictions_per_sequence=predictions,
        ),
        training=dataclasses.replace(
            training,
            batch_size=phase.batch_size or training.batch_size,
            gradient_accumulation_steps=accumulation,
        ),
        optimizer=dataclasses.replace(optimizer, learning_rate=phase.learning_rate or optimizer.learning_rate),
    )
