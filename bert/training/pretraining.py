"""Runs pretraining end to end: data, model, training loop, evaluation, results.json."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bert import metrics
from bert.config import PretrainConfig
from bert.config.pretraining import phase_configs
from bert.errors import UserError, require
from bert.inference.loading import fetch_model, load
from bert.inference.pretrained import Pretrained
from bert.messages import log_info
from bert.model.execution import LayerExecution
from bert.parallel import multihost
from bert.parallel.backends import Parallelism, make_parallelism
from bert.runs import shared_run
from bert.runs.callbacks import Callback
from bert.runs.checkpoint import Checkpointer
from bert.runs.checkpoint_directory import CheckpointDirectory
from bert.runs.environment import record_environment
from bert.runs.folder import RunFolder, config_class_of_run
from bert.runs.metrics_log import Metrics
from bert.runs.progress import StepCosts
from bert.runtime.interrupts import InterruptHandler
from bert.runtime.profiling import make_profiler
from bert.tokenizer.extension import decompose_new_tokens
from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer
from bert.training.assembly import Learner, build_learner
from bert.training.distillation import Teacher, check_student, load_teacher
from bert.training.evaluation import accumulate_sums, compute_means
from bert.training.initialization import (
    BranchedCheckpoints,
    CheckpointReader,
    Log,
    Params,
    extend_embeddings,
    init_mlm_bias,
    initialize_state,
    model_config_from_source,
)
from bert.training.loop import CheckpointWriter, TrainLoop, TrainStep
from bert.training.losses import WeightedSums
from bert.training.optimizer import learning_rate_schedule, make_optimizer
from bert.training.predictions import PREDICTIONS
from bert.training.pretraining_data import PhaseData, PretrainingData, predictable_counts, prepare_data
from bert.training.pretraining_results import (
    add_transfer,
    curves_subject,
    print_summary,
    unigram_loss,
    write_results,
)
from bert.training.run_length import TimeBudget
from bert.training.step import TrainState, make_eval_step, make_train_step
from bert.training.streaming import check_readers
from bert.training.student_initialization import start_from_teacher
from bert.training.timing import time_train_step, timed
from bert.training.transfer import check_transfer, measure_transfer

DEFAULT_MAX_TO_KEEP = 3
"""Checkpoints that stay if training.max_to_keep is null."""


def pretrain(run: RunFolder[PretrainConfig], say: Log = log_info, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Runs or resumes a pretraining run, and returns the content of its results.json.

    Raises:
        UserError: the corpus, the vocabulary or a checkpoint cannot be used.
        Interrupted: a signal came; the state is saved.
    """
    start_time = time.perf_counter()
    say = multihost.main_process_only(say)
    setup = resolve_setup(run, say)
    record_environment(setup.run)
    run, data = prepare_data(setup.run, setup.init_model, setup.teacher, setup.parallel.process, say)
    with data:
        budget = None if run.config.training.max_minutes is None else TimeBudget(run, start_time, say)
        state, divergence = train(dataclasses.replace(setup, run=run), data, say, callbacks, budget)
    results = dict(multihost.broadcast_from_main(partial(write_results, run, data, state, divergence, start_time)))
    if run.config.transfer is None:
        return results
    transfer = measure_transfer(run, say)
    return dict(multihost.broadcast_from_main(partial(add_transfer, run, results, transfer, start_time)))


@dataclass(frozen=True)
class Setup:
    """A run before its data is read.

    Attributes:
        run: its configuration without null, but for ``model.vocab_size``.
        parallel: its devices.
        init_model: the model of ``init``; None for random weights.
        teacher: the model to learn from; None for none.
    """

    run: RunFolder[PretrainConfig]
    parallel: Parallelism
    init_model: Pretrained | None
    teacher: Teacher | None


def resolve_setup(run: RunFolder[PretrainConfig], say: Log) -> Setup:
    """Fills in the defaults, takes the model's sizes from ``init``, and checks all of it before data is read.

    Raises:
        UserError: the devices cannot run it, or ``init`` does not fit.
    """
    config = _resolve_defaults(run.config)
    parallel = make_parallelism(config.training, config.model)
    LayerExecution.from_config(config.training)
    for name, rows, micro_batches in config.batches():
        parallel.check_batch(name, rows, micro_batches)
    check_readers(config.data, parallel.process[1])
    for number, phase in enumerate(phase_configs(config), 1):
        own = config.phases is not None and config.phases[number - 1].max_predictions_per_sequence is not None
        if (note := phase.data.capped_predictions(f"phases.{number}" if own else "data")) is not None:
            say(note)
    init_model = None if config.init is None or _has_begun(run) else _load_init_model(run, say)
    if init_model is not None:
        model = model_config_from_source(config.model, init_model.config, init_model.source)
        config = dataclasses.replace(config, model=model)
        config.check()
        config.check_model()
    if config.transfer is not None:
        check_transfer(config)  # before hours of training
    LayerExecution.from_config(config.training, config.model)
    teacher = load_teacher(config.distillation, say)
    if teacher is not None:
        check_student(config, teacher)
        config = dataclasses.replace(
            config, distillation=dataclasses.replace(config.distillation, checksum=teacher.checksum)
        )
    # A resumed run has its config.yaml; whether a new schedule fits its steps is known once the data is.
    run = dataclasses.replace(run, config=config) if run.resumed else run.save_config(config, vocabulary=False)
    return Setup(run, parallel, init_model, teacher)


def _has_begun(run: RunFolder[Any]) -> bool:
    """Whether a run has a checkpoint and its vocabulary, and no longer needs the model that it started from."""

    def has_files() -> bool:
        return bool(CheckpointDirectory(run.checkpoints).steps()) and (run.path / "tokenizer.json").is_file()

    return run.resumed and bool(multihost.broadcast_from_main(has_files))


def _resolve_defaults(config: PretrainConfig) -> PretrainConfig:
    training = config.training
    training = dataclasses.replace(
        training,
        eval_every=training.eval_every or training.checkpoint_every,
        max_to_keep=training.max_to_keep or DEFAULT_MAX_TO_KEEP,
    )
    return dataclasses.replace(config, training=training)


def _load_init_model(run: RunFolder[PretrainConfig], say: Log) -> Pretrained:
    """The model of ``init``, with embedding rows for the words that ``tokenizer.path`` adds to its vocabulary."""
    config = run.config
    source = require(config.init, "init")
    if config.init_state:
        _find_branch_source(config)
    model = load(source, say)
    path = run.path if (run.path / "tokenizer.json").is_file() else config.tokenizer.path
    if path is None:
        return model
    tokenizer = load_tokenizer(path, config.tokenizer)
    rows = decompose_new_tokens(model.tokenizer, tokenizer, model.source, str(path))
    if not rows:
        return dataclasses.replace(model, tokenizer=tokenizer)
    size = max(model.config.known_vocab_size, embedding_rows(tokenizer))
    if not run.resumed:
        say(
            f"{len(rows):,} new rows seeded from the mean of their old tokens, "
            f"the first for {tokenizer.id_to_token(next(iter(rows)))!r}; the embedding has {size:,} rows"
        )
    return dataclasses.replace(
        model,
        config=dataclasses.replace(model.config, vocab_size=size),
        params=extend_embeddings(model.params, rows, size),
        tokenizer=tokenizer,
    )


def _find_branch_source(config: PretrainConfig) -> tuple[Path, int]:
    """Folder and step of the pretraining run whose state is continued. Raises UserError if there is none."""
    init = require(config.init, "init")
    folder, step = fetch_model(init)
    if step is None or not (folder / "config.yaml").is_file() or config_class_of_run(folder) is not PretrainConfig:
        raise UserError(
            f"init is {init}, and init_state needs the checkpoint of a pretraining run: name it as RUN@STEP, such as "
            "runs/mini@1000, or remove init_state"
        )
    return folder, step


class PretrainingEvaluator:
    """Means of the objective over the held-out rows of a phase: parameters on the devices -> metrics."""

    def __init__(
        self,
        eval_step: Callable[..., WeightedSums],
        loss_factors: Mapping[str, float],
        data: PhaseData,
        parallel: Parallelism,
        interrupts: InterruptHandler,
    ) -> None:
        self._eval_step, self._data, self._parallel, self._interrupts = eval_step, data, parallel, interrupts
        self._loss_factors = loss_factors
        self._perplexity_loss = PREDICTIONS[data.phase.config.data.prediction].perplexity_loss

    def __call__(self, params: Any) -> Metrics:
        means = compute_means(accumulate_sums(self._sums(params), self._parallel), self._loss_factors)
        loss, tokens_per_byte = means[self._perplexity_loss], self._data.tokens_per_byte
        bits = {} if tokens_per_byte is None else {"bits_per_byte": metrics.bits_per_byte(loss, tokens_per_byte)}
        return {**means, "perplexity": metrics.perplexity(loss), **bits}

    def _sums(self, params: Any) -> Iterator[WeightedSums]:
        for batch in self._data.eval_batches(self._parallel.process):
            self._interrupts.raise_if_requested()
            yield self._eval_step(params, self._parallel.shard_batch(batch))

    def seconds(self, params: Any) -> float:
        """Seconds of an evaluation, by timing one batch."""
        batch = self._parallel.shard_batch(next(self._data.eval_batches(self._parallel.process)))
        return timed(partial(self._eval_step, params, batch)).call * self._data.num_eval_batches


@dataclass(frozen=True)
class PhaseProgram:
    """A phase with its compiled functions."""

    data: PhaseData
    train_step: TrainStep
    evaluate: PretrainingEvaluator


def train(
    setup: Setup,
    data: PretrainingData,
    say: Log,
    callbacks: Sequence[Callback] = (),
    budget: TimeBudget | None = None,
) -> tuple[TrainState, str | None]:
    """Trains through all phases from the run's newest checkpoint, or from the start.

    Args:
        budget: decides on the number of steps; None for a run without a limit of its time.

    Returns:
        The last state on the host, and a sentence if the training loss ended far above its start. Of several hosts,
        each has all of the parameters.

    Raises:
        UserError: a checkpoint cannot be used, or too many steps were skipped.
        Interrupted: a signal came; the state is saved.
    """
    run, parallel, config = setup.run, setup.parallel, setup.run.config
    with (
        InterruptHandler() as interrupts,  # also while the last checkpoint is written
        shared_run.make_checkpointer(run, say, parallel) as checkpoints,
        make_profiler(config.profile and run.is_writer, run.path, say) as profiler,
        contextlib.nullcontext() if budget is None else budget,
    ):
        learner = build_learner(config, setup.teacher, parallel)
        programs = _compile_phases(learner, config, data, parallel, interrupts)
        state = _initialize(learner, setup, data, checkpoints, say)
        if run.is_writer:
            print_summary(state.params, config, parallel, data.phases)
        subject, baseline = curves_subject(config), unigram_loss(config, data)
        with shared_run.make_report(run, data.total_steps, int(state.step), subject, callbacks, baseline) as report:
            if state.step < data.total_steps:
                shared_run.require_space(run, state, say)
                costs, compilation = _measure_costs(programs, state, parallel)
                report.on_start(costs)
                if budget is not None:
                    budget.start(data.total_steps, int(state.step), costs, compilation, state)
            make_loop = partial(
                TrainLoop,
                parallel=parallel,
                report=report,
                interrupts=interrupts,
                profiler=profiler,
                loss_factors=learner.loss_factors,
                decide=(lambda step: None) if budget is None else budget.decide,
            )
            state, decided = _run_phases(run, programs, state, make_loop, checkpoints)
            if decided is not None:
                run = require(budget, "the budget").save(decided)
                report.set_total_steps(decided)
                data = data.with_steps(run.config)
                again = _compile_phases(learner, run.config, data, parallel, interrupts, programs)
                state, _ = _run_phases(run, again, state, partial(make_loop, decide=lambda step: None), checkpoints)
        checkpoints.wait()
        interrupts.raise_if_signalled(int(state.step))
    whole = parallel.to_host(parallel.put_state(state.params))  # to be used and exported
    return state.replace(params=whole), report.divergence


def _run_phases(
    run: RunFolder[PretrainConfig],
    programs: Sequence[PhaseProgram],
    state: TrainState,
    make_loop: partial[TrainLoop],
    checkpoints: CheckpointWriter,
) -> tuple[TrainState, int | None]:
    """Trains through the phases that are left; returns the state, and the steps that were decided on, if any."""
    total_steps = programs[-1].data.phase.end
    for program in programs:
        phase = program.data.phase
        if state.step > phase.end:
            continue  # at phase.end itself the evaluation may still be missing
        if len(programs) > 1:
            facts = {"phase": phase.number, "sequence_length": phase.config.data.sequence_length}
            make_loop.keywords["report"].set_phase(facts)
        loop = make_loop(
            config=phase.config.training,
            end_step=phase.end,
            loader=program.data.loader,
            train_step=program.train_step,
            schedule=learning_rate_schedule(phase.config.optimizer, total_steps),
            evaluate=program.evaluate,
            checkpoints=program.data.checkpoints(checkpoints, run),
            is_last=phase.end == total_steps,
        )
        state = loop.parallel.take_state(loop.run(state))
        if loop.is_stopped or loop.decided_steps is not None:
            return state, None if loop.is_stopped else loop.decided_steps
    return state, None


def _compile_phases(
    learner: Learner,
    config: PretrainConfig,
    data: PretrainingData,
    parallel: Parallelism,
    interrupts: InterruptHandler,
    earlier: Sequence[PhaseProgram] = (),
) -> list[PhaseProgram]:
    """The functions of each phase, which JAX compiles at their first call; phases share the evaluation.

    Args:
        earlier: programs of the same run with another number of steps, whose evaluations are used again.
    """
    eval_step = learner.compile(partial(make_eval_step, axis=parallel.axis), ())
    programs = []
    for number, phase in enumerate(data.phases):
        optimizer = make_optimizer(phase.phase.config.optimizer, data.total_steps)
        make_step = partial(
            make_train_step,
            optimizer=optimizer,
            seed=config.seed,
            dropout_rng=config.training.dropout_rng,
            axis=parallel.axis,
        )
        new = PretrainingEvaluator(eval_step, learner.loss_factors, phase, parallel, interrupts)
        evaluate = earlier[number].evaluate if earlier else new
        programs.append(PhaseProgram(phase, learner.compile(make_step, (0,)), evaluate))
    return programs


def _initialize(
    learner: Learner,
    setup: Setup,
    data: PretrainingData,
    checkpoints: Checkpointer | shared_run.MultihostCheckpointer,
    say: Log,
) -> TrainState:
    config, source = setup.run.config, setup.init_model
    is_branch = config.init_state and not _has_begun(setup.run)
    reader: CheckpointReader = checkpoints
    if is_branch:
        say(f"continues the training state of {config.init}")
        reader = BranchedCheckpoints(checkpoints, *_find_branch_source(config), say)
    first, prediction = data.phases[0], PREDICTIONS[config.data.prediction]
    counts = predictable_counts(first.examples, data.tokenizer, prediction.special_tokens)
    teacher = setup.teacher if source is None and config.distillation.initial_weights == "teacher" else None

    def prepare(params: Params) -> Params:
        params = params if teacher is None else start_from_teacher(params, config.model, teacher, say)
        return init_mlm_bias(config.mlm_bias_init, counts, prediction.mlm_head, params)

    state = initialize_state(
        learner.model,
        make_optimizer(first.phase.config.optimizer, data.total_steps),
        learner.metrics,
        config.seed,
        reader,
        None if source is None else (source.origin, source.params),
        prediction.modules,
        say,
        prepare,
    )
    if is_branch:
        if state.step >= data.total_steps:
            raise UserError(
                f"training.epochs {config.training.epochs} are {data.total_steps} steps, and init is at step "
                f"{state.step}: set training.steps above it instead"
            )
        checkpoints.save(int(state.step), state)  # the run no longer needs the one that it continues
    return state


def _measure_costs(programs: list[PhaseProgram], state: TrainState, parallel: Parallelism) -> tuple[StepCosts, float]:
    """Returns the costs, and the seconds in which the steps are compiled.

    Times a step and an evaluation batch of each phase that is left.

    All phases are so compiled before the first one starts: one that does not fit into memory fails at once.
    """
    steps, evaluations, compilation = [], [], 0.0
    next_rows: dict[int, int] = {}  # of each stream, which is not read ahead for a later phase
    for program in programs:
        phase, step_seconds, eval_seconds = program.data.phase, 0.0, 0.0
        if state.step < phase.end:
            loader, step = program.data.loader, max(phase.first, int(state.step))
            if program.data.is_streamed:
                row = loader.first_row + (step - loader.first_step) * loader.batch_size
                row = next_rows.setdefault(id(loader.rows), row)
                loader = dataclasses.replace(loader, first_step=step, first_row=row)
            batch = loader.batch(step)
            micro_batches = phase.config.training.gradient_accumulation_steps
            measured = time_train_step(program.train_step, state, batch, parallel, micro_batches)
            step_seconds, compilation = measured.call, compilation + measured.compilation
            eval_seconds = program.evaluate.seconds(parallel.put_state(state.params))
        steps.append((phase.end, step_seconds))
        eval_every = require(phase.config.training.eval_every, "training.eval_every")
        evaluations.append((phase.end, eval_every, eval_seconds))
    return StepCosts(tuple(steps), evaluations=tuple(evaluations)), compilation
