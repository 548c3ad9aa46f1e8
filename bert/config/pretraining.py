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
from typing import Literal

from bert.config.data import PAIR_FORMATS, REPLACEMENT_KEYS, REPLACEMENTS, UNUSED_BY_CLM, DataConfig
from bert.config.model import DECODER_KEYS, ModelConfig
from bert.config.options import DistillationConfig, ElectraConfig
from bert.config.phases import (
    PhaseConfig,
    data_of_phase,
    held_out_data,
    optimizer_of_phase,
    phase_boundaries,
    ramp_boundaries,
    ramp_of_phase,
)
from bert.config.tokenizer import TokenizerConfig
from bert.config.training import LoggerName, OptimizerConfig, TrainingConfig
from bert.config.validation import (
    Positive,
    Seed,
    check_fields,
    check_paths,
    check_unused,
    conflict,
)
from bert.errors import UserError, require


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
    training.steps then includes the steps of init. All keys may differ except the model's, data.input_format,
    training.objective, distillation, optimizer.name, and whether optimizer.max_grad_norm, optimizer.spike_deviations,
    training.z_loss and training.label_smoothing are used."""
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
    transfer_every: Positive | None = None
    """Steps between two checkpoints from which transfer is also fine-tuned while the run trains, a multiple of
    training.checkpoint_every. Scores are in transfer.jsonl and curves.png; the best checkpoint is kept. null: only at
    the end. bert benchmark transfer --follow RUN scores the checkpoints of a run in another process."""
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
        self._check_z_loss()
        self._check_halting()
        self._check_memory()
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
        self._check_transfer_every()
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
            for step in [] if self.phases is None else ramp_of_phase(training, self.phases[number - 1]):
                key = f"{section}.batch_size_ramp"
                batches.append((key, step.batch_size, step.gradient_accumulation_steps))
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
        if objective not in REPLACEMENTS:
            kept = f"but training.objective {objective} does not replace tokens: remove it"
            check_unused("data.", self.data, kept, REPLACEMENT_KEYS)
            return
        set_shares = (self.data.mask_share, self.data.random_share)
        shares = [
            share if given is None else given for share, given in zip(REPLACEMENTS[objective], set_shares, strict=True)
        ]
        if sum(shares) > 1 + 1e-9:
            raise UserError(
                f"data.mask_share is {shares[0]:g} and data.random_share {shares[1]:g}: lower one of them, they are "
                "shares of the same tokens"
            )

    def _check_z_loss(self) -> None:
        """Raises UserError for a z-loss with a loss that has none."""
        if not self.training.z_loss:
            return
        if self.training.objective != "mlm":
            raise conflict(self, "training.z_loss", "training.objective", "remove it, only mlm uses it")
        if self.distillation.teacher is not None:
            raise conflict(self, "training.z_loss", "distillation.teacher", "remove one of the two")

    def _check_halting(self) -> None:
        """Raises UserError for adaptive halting with a loss that has no cost of steps."""
        if self.model.halting is None:
            return
        if self.training.objective not in ("mlm", "clm"):
            raise conflict(self, "model.halting", "training.objective", "set the objective to mlm or clm")
        if self.distillation.teacher is not None:
            raise conflict(self, "model.halting", "distillation.teacher", "remove one of the two")

    def _check_memory(self) -> None:
        """Raises UserError for segment recurrence with rows or steps that do not continue each other."""
        if self.model.memory_length is None:
            return
        if self.training.objective not in ("clm", "plm"):
            raise conflict(self, "model.memory_length", "training.objective", "set the objective to clm or plm")
        if self.data.input_format != "blocks":
            fix = "set the format to blocks, whose rows continue each other"
            raise conflict(self, "model.memory_length", "data.input_format", fix)
        for key in ("data.streaming", "model.halting", "init_state"):
            section, _, name = key.rpartition(".")
            value = getattr(getattr(self, section) if section else self, name)
            if value is not None and value is not False:
                raise conflict(self, "model.memory_length", key, "remove one of the two")
        if self.phases is not None:
            raise UserError("model.memory_length is set, but a phase begins with other rows: set phases to null")

    def _check_max_minutes(self) -> None:
        """Raises UserError if ``max_minutes`` is set and the schedule depends on the unknown number of steps."""
        if self.training.max_minutes is None:
            return
        fixes = []
        if self.optimizer.schedule in ("linear", "cosine", "one_minus_sqrt"):
            fixes.append(f"optimizer.schedule to warmup_stable_decay (it is {self.optimizer.schedule})")
        if self.optimizer.warmup_steps is None and self.optimizer.warmup_ratio:
            fixes.append("optimizer.warmup_steps to the steps of the warm-up (optimizer.warmup_ratio is a share)")
        if any(phase.share is not None for phase in self.phases or ()):
            fixes.append("phases to null, or their steps in place of share")
        if self.phases and self.phases[-1].schedule is not None:
            fixes.append(f"phases.{len(self.phases)}.schedule to null (the last phase has the schedule of the run)")
        if self.phases and self.phases[-1].ramp_share is not None:
            fixes.append(f"phases.{len(self.phases)}.ramp_steps in place of ramp_share")
        if fixes:
            raise UserError(
                f"training.max_minutes is {self.training.max_minutes:g}, but the number of steps is not known in "
                f"advance: set {', and '.join(fixes)}"
            )

    def _check_transfer_every(self) -> None:
        """Raises UserError if ``transfer_every`` is set without tasks, or for steps that have no checkpoint."""
        if self.transfer_every is None:
            return
        if self.transfer is None:
            raise conflict(self, "transfer_every", "transfer", "name recipes in transfer, or remove transfer_every")
        if self.transfer_every % self.training.checkpoint_every:
            fix = "set it to a multiple, since only checkpoints are scored"
            raise conflict(self, "transfer_every", "training.checkpoint_every", fix)

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
        for key, rows, _ in self.batches():
            if not key.startswith("training.eval") and rows % self.data.stream_readers:
                readers = f"data.stream_readers is {self.data.stream_readers}"
                raise UserError(f"{readers}, but {key} is {rows}: use a divisor of the batch size")

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
                positions = self.model.max_position_embeddings
                raise UserError(
                    f"{section}.sequence_length is {length}, but model.max_position_embeddings is {positions}: set "
                    f"{section}.sequence_length to at most {positions}"
                )

    def _check_direction(self) -> None:
        """Raises UserError if the tokens that the model reads do not fit training.objective."""
        is_causal = self.training.objective == "clm"
        if is_causal != self.model.causal:
            fix = "set model.causal to true for clm, and to false for all other objectives"
            raise conflict(self, "model.causal", "training.objective", fix)
        if self.model.conv_kernel_size is not None and self.training.objective == "plm":
            fix = "remove the convolution, since it would read the tokens that are predicted"
            raise conflict(self, "model.conv_kernel_size", "training.objective", fix)
        if self.training.label_smoothing and not is_causal:
            raise conflict(self, "training.label_smoothing", "training.objective", "remove it, only clm uses it")


@dataclass(frozen=True)
class Phase:
    """A phase of a run whose number of steps is known, or the steps of a phase with one batch size of its ramp.

    Attributes:
        number: index of the phase, from 1.
        first, end: its steps are first + 1 to end, as counted in metrics and checkpoints.
        config: configuration of a run with only this phase.
        held_out: the same data with the masks of the run.
        schedule_steps: (first, end) of the learning rate schedule: the run's, or the phase's if it sets a schedule.
    """

    number: int
    first: int
    end: int
    config: PretrainConfig
    held_out: DataConfig
    schedule_steps: tuple[int, int]


def resolve_phases(config: PretrainConfig, total_steps: int) -> list[Phase]:
    """Returns the phases of a run of ``total_steps``; a configuration without phases has one.

    A phase with `batch_size_ramp` is divided into one for each batch size.
    """
    entries, resolved = config.phases or [PhaseConfig()], []
    spans = itertools.pairwise([0, *phase_boundaries(entries, total_steps)])
    predicts_all = config.training.objective == "clm"
    for number, (entry, (first, end), one) in enumerate(zip(entries, spans, phase_configs(config), strict=True), 1):
        held_out = held_out_data(config.data, entry, predicts_all)
        schedule_steps = (0, total_steps) if entry.schedule is None else (first, end)
        parts = itertools.pairwise([first, *ramp_boundaries(entry, first, end)])
        for training, part in zip([*ramp_of_phase(one.training, entry), one.training], parts, strict=True):
            phase_config = dataclasses.replace(one, training=training)
            if part[0] < part[1] or not entry.batch_size_ramp:  # a ramp of few steps skips batch sizes
                resolved.append(Phase(number, *part, phase_config, held_out, schedule_steps))
    return resolved


def phase_of_step(config: PretrainConfig, step: int) -> PretrainConfig:
    """Returns the configuration of the phase that a checkpoint belongs to, or the configuration if it has no phases."""
    if config.phases is None:
        return config
    phases = resolve_phases(config, require(config.training.steps, "training.steps"))
    return next((phase.config for phase in phases if step <= phase.end), phases[-1].config)


def corpus_keys(config: PretrainConfig) -> list[str]:
    """Returns the key that names the corpus of each phase: data.train, or the first phases.N.train with this corpus."""
    keys = {str(config.data.train): "data.train"}
    phases = enumerate(phase_configs(config), 1)
    return [keys.setdefault(str(phase.data.train), f"phases.{number}.train") for number, phase in phases]


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
    share, steps = sum(phase.share or 0.0 for phase in phases), sum(phase.steps or 0 for phase in phases)
    if share and share * total + steps > total * (1 - 1e-9):
        others = f" and {steps:,} of the {total:,} steps" if steps else ""
        raise UserError(f"phases have shares of {share:g}{others}, which leaves no steps for the last one: lower them")
    first = 0
    boundaries = phase_boundaries(phases, total)
    for number, (phase, end, phase_config) in enumerate(zip(phases, boundaries, phase_configs(config), strict=True), 1):
        if end <= first:
            raise UserError(
                f"phases.{number} has no steps, since the phases before it have {first:,} and training.steps is "
                f"{total:,}: raise training.steps, or set phases to null"
            )
        if phase_config.training.objective == "clm" and phase.max_predictions_per_sequence is not None:
            raise UserError(
                f"phases.{number}.max_predictions_per_sequence is {phase.max_predictions_per_sequence}, but "
                "training.objective clm masks no tokens: remove it"
            )
        _check_lengths(phase_config, f"phases.{number}")
        phase_config.training.check_micro_batches(f"phases.{number}")
        _check_phase(config, phase_config, phase, f"phases.{number}", end - first)
        first = end


def _check_phase(
    config: PretrainConfig, phase_config: PretrainConfig, phase: PhaseConfig, name: str, num_steps: int
) -> None:
    """Raises UserError if the settings of a phase do not fit together, or do not fit the run."""
    if phase.train is not None and config.data.eval is None:
        raise UserError(
            f"{name}.train is set, but data.eval is null: set data.eval, since text that is held out of one corpus may "
            "be in the other"
        )
    if phase.ramp_steps is not None and phase.ramp_steps >= num_steps:
        raise UserError(f"{name}.ramp_steps is {phase.ramp_steps}, but the phase has {num_steps:,} steps: use fewer")
    try:
        check_paths(phase_config)
        phase_config.data.check()
        phase_config.model.check()
        phase_config.optimizer.check()
        phase_config.optimizer.num_warmup_steps(num_steps if phase.schedule else int(config.training.steps or 0))
        phase_config._check_objective()
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _check_lengths(config: PretrainConfig, section: str) -> None:
    """Raises UserError if rows are too long for any model, or too short for their predictions."""
    length, predictions = config.data.sequence_length, config.data.predictions_per_row
    config.model.check_length(f"{section}.sequence_length", length)
    if predictions >= length and config.training.objective != "clm":
        raise UserError(
            f"{section}.max_predictions_per_sequence is {predictions}, but {section}.sequence_length is {length}: "
            "lower the first or raise the second"
        )


def _config_for_phase(config: PretrainConfig, phase: PhaseConfig) -> PretrainConfig:
    """Returns the configuration of a run that consists of this phase."""
    predicts_all = config.training.objective == "clm"
    return dataclasses.replace(
        config,
        phases=None,
        data=data_of_phase(config.data, phase, predicts_all),
        model=dataclasses.replace(config.model, **phase.overrides("model")),
        training=dataclasses.replace(config.training, **phase.overrides("training")),
        optimizer=optimizer_of_phase(config.optimizer, phase),
    )
