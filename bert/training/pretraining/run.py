"""A pretraining run from its configuration to results.json."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bert.config import ModelConfig, PretrainConfig
from bert.config.pretraining import Phase
from bert.errors import Log, UserError, log_info, require
from bert.model.names import PROJECTIONS
from bert.model.parameters import Params
from bert.parallel import multihost
from bert.parallel.backends import Parallelism
from bert.runs.checkpoint import Checkpointer, Checkpoints, make_checkpointer, require_space
from bert.runs.environment import begin_session, make_profiler
from bert.runs.folder import RunFolder
from bert.runs.loggers import Callback, RunStart
from bert.runs.report import Report, make_report
from bert.runtime.interrupts import Interrupted, InterruptHandler
from bert.runtime.process import release_free_memory
from bert.tokenizer.library import special_ids
from bert.training.flops import flops_per_token, shapes_of
from bert.training.initialization import Initializable, initialize_state
from bert.training.loop import TrainLoop, TrainStep
from bert.training.optimizer import learning_rate_schedule, make_optimizer
from bert.training.pretraining.branches import find_branch_source, restore_branched
from bert.training.pretraining.checkpoint_scores import CheckpointScores
from bert.training.pretraining.data import PhaseData, PretrainingData, build_data, predictable_counts
from bert.training.pretraining.evaluation import PretrainingEvaluator
from bert.training.pretraining.initialization import (
    init_embeddings,
    init_mlm_bias,
    start_from_teacher,
)
from bert.training.pretraining.objectives import OBJECTIVES, CompileLoss, build_with_teacher
from bert.training.pretraining.results import (
    add_transfer,
    curves_subject,
    log_summary,
    read_completed,
    unigram_loss,
    write_results,
)
from bert.training.pretraining.setup import Setup, has_begun, resolve_setup
from bert.training.pretraining.transfer import measure_transfer
from bert.training.recurrence import memory_shape
from bert.training.run_length import StepCosts, TimeBudget, time_train_step
from bert.training.step import TrainState, make_eval_step, make_train_step
from bert.training.timing import RunTimes, compilation_seconds, peak_flops_of_devices


def pretrain(run: RunFolder[PretrainConfig], log: Log = log_info, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Runs or resumes a pretraining run, and returns the content of its results.json.

    A completed run is not evaluated again, except for tasks of ``transfer`` that have no scores yet.

    Raises:
        UserError: the corpus, the vocabulary or a checkpoint cannot be used, or too many steps were skipped.
        Interrupted: a signal was received; the state is saved.
    """
    log = multihost.main_process_only(log)
    results = multihost.broadcast_from_main(partial(read_completed, run, log))
    if results is None:
        run, results = _train(run, log, callbacks)
    elif run.is_writer:
        for callback in callbacks:
            callback.on_start(RunStart(run.path, run.config, results["steps"], results["steps"]))
    if run.config.transfer is None:
        return dict(results)
    start_time = time.perf_counter()
    try:
        transfer = measure_transfer(run, results["steps"], log)
    except Interrupted as stop:  # its step is one of a fine-tuning run; the pretrained state is saved
        raise Interrupted(results["steps"], stop.signal_number) from None
    if transfer == results.get("transfer"):
        return dict(results)
    if run.config.transfer_every is not None:
        CheckpointScores.from_run(run, log).add_last(results["steps"], transfer)
    return dict(multihost.broadcast_from_main(partial(add_transfer, run, results, transfer, start_time)))


def _train(
    run: RunFolder[PretrainConfig], log: Log, callbacks: Sequence[Callback]
) -> tuple[RunFolder[PretrainConfig], dict[str, Any]]:
    """Trains from the start or the newest checkpoint to the end.

    Returns:
        The run with its resolved configuration, and the results without ``transfer``.
    """
    start_time = time.perf_counter()
    config, setup = resolve_setup(run, log)
    run = begin_session(run, config)
    run, data = build_data(run, setup, log)
    parallel = setup.parallel
    with (
        data,
        InterruptHandler() as interrupts,  # active until the last checkpoint is written
        make_checkpointer(run, log, parallel) as checkpoints,
        make_profiler(run.config.profile and run.is_writer, run.path, log) as profiler,
        TimeBudget(run, start_time, log) as budget,
    ):
        times = RunTimes(start_time, peak_flops_of_devices(run.config.training.dtype))
        model, loss, compile_loss = build_with_teacher(run.config, setup.teacher, parallel)

        def compile_loss_for(phase_config: PretrainConfig) -> CompileLoss:
            # Building the loss again copies the teacher to the devices again.
            is_same = phase_config.model == run.config.model
            return compile_loss if is_same else build_with_teacher(phase_config, setup.teacher, parallel)[2]

        compile_phases = partial(_compile_phases, compile_loss_for, loss.factors, parallel, interrupts)
        programs = compile_phases(run.config, data)
        state = _initialize(model, loss.metrics, run, setup, data, checkpoints, log)
        if run.is_writer:
            log_summary(state.params, run.config, parallel, data.phases)
        subject, baseline = curves_subject(run.config), unigram_loss(run.config, data)
        settings = (run, data.total_steps, int(state.step), subject, callbacks, baseline)
        with make_report(*settings, compilation_seconds) as report:
            if state.step < data.total_steps:
                require_space(run, state, log)
                with times.measure("compilation"):
                    costs, compilation = _measure_costs(programs, state, parallel)
                budget.start(data.total_steps, int(state.step), costs, compilation, state)
            make_loop = partial(
                TrainLoop,
                parallel=parallel,
                report=report,
                interrupts=interrupts,
                profiler=profiler,
                loss_factors=loss.factors,
                decide=budget.decide,
                times=times,
                score_checkpoint=partial(_score_checkpoint, run, checkpoints, log),
            )
            shapes = {path: shape for path, shape in shapes_of(state.params).items() if path[0] != PROJECTIONS}
            count_flops = partial(flops_per_token, shapes=shapes)
            for loop in _phase_loops(
                run,
                data,
                programs,
                int(state.step),
                make_loop,
                report,
                checkpoints,
                budget,
                compile_phases,
                count_flops,
            ):
                state = parallel.take_state(loop.run(state))
        with times.measure("saving"):
            checkpoints.wait()
        interrupts.raise_if_signalled(int(state.step))
    # Sharded parameters become whole arrays, to be used and exported.
    state = state.replace(params=parallel.to_host(parallel.put_state(state.params)))
    results = multihost.broadcast_from_main(
        partial(write_results, run, data, state, report.divergence, start_time, times)
    )
    return run, dict(results)


def _score_checkpoint(run: RunFolder[PretrainConfig], checkpoints: Checkpointer, log: Log, step: int) -> None:
    """Fine-tunes from the checkpoint of a step if ``transfer_every`` includes it and it has no scores yet."""
    every = run.config.transfer_every
    if every is None or not step or step % every:
        return
    checkpoints.wait()
    run.pull()
    try:
        CheckpointScores.from_run(run, log).measure(step)
    except Interrupted as stop:  # its step is one of a fine-tuning run; the pretrained state is saved
        raise Interrupted(step, stop.signal_number) from None
    release_free_memory()


@dataclass(frozen=True)
class PhaseProgram:
    """A phase with its compiled functions."""

    data: PhaseData
    train_step: TrainStep
    evaluate: PretrainingEvaluator


CompilePhases = Callable[..., list[PhaseProgram]]
"""(configuration, data, earlier programs) -> the programs of all phases."""


def _phase_loops(
    run: RunFolder[PretrainConfig],
    data: PretrainingData,
    programs: Sequence[PhaseProgram],
    step: int,
    make_loop: Callable[..., TrainLoop],
    report: Report,
    checkpoints: Checkpoints,
    budget: TimeBudget,
    compile_phases: CompilePhases,
    count_flops: Callable[[PretrainConfig], float],
) -> Iterator[TrainLoop]:
    """Yields the training loop of each remaining phase; the caller runs it before it requests the next one.

    When the time budget fixes the number of steps, the phases are compiled for this number and training continues.
    """
    while True:
        for program in programs:
            phase = program.data.phase
            if step > phase.end:
                continue  # at phase.end itself the evaluation may still be missing
            if len(programs) > 1:
                facts = {"phase": phase.number, "sequence_length": phase.config.data.sequence_length}
                if run.config.phases is not None and any(entry.batch_size_ramp for entry in run.config.phases):
                    facts["batch_size"] = phase.config.training.batch_size
                report.set_phase(facts)
            loop = make_loop(
                config=phase.config.training,
                end_step=phase.end,
                loader=program.data.loader,
                train_step=program.train_step,
                schedule=_schedule(phase),
                evaluate=program.evaluate,
                checkpoints=checkpoints,
                before_save=partial(program.data.record_position, run),
                is_last=phase.end == data.total_steps,
                flops_per_token=count_flops(phase.config),
            )
            yield loop
            step = loop.step
            if loop.is_stopped:
                return
            if loop.decided_steps is not None:
                run = budget.save(loop.decided_steps)
                break
        else:
            return
        data = data.with_steps(run.config)
        report.set_total_steps(data.total_steps)
        programs = compile_phases(run.config, data, programs)


def _schedule(phase: Phase) -> Callable[[int], Any]:
    first, last = phase.schedule_steps
    return learning_rate_schedule(phase.config.optimizer, last, first)


def _compile_phases(
    compile_loss_for: Callable[[PretrainConfig], CompileLoss],
    loss_factors: Mapping[str, float],
    parallel: Parallelism,
    interrupts: InterruptHandler,
    config: PretrainConfig,
    data: PretrainingData,
    earlier: Sequence[PhaseProgram] = (),
) -> list[PhaseProgram]:
    """Returns the functions of each phase, which JAX compiles at their first call; phases share the evaluation.

    Args:
        compile_loss_for: configuration of a phase -> `CompileLoss` of its model.
        earlier: programs of the same run with another number of steps, whose evaluations are reused.
    """
    programs: list[PhaseProgram] = []
    eval_steps: list[tuple[ModelConfig, Callable[..., Any]]] = []
    for number, phase in enumerate(data.phases):
        phase_config = phase.phase.config
        compile_loss = compile_loss_for(phase_config)
        if (eval_step := next((step for model, step in eval_steps if model == phase_config.model), None)) is None:
            eval_step = compile_loss(partial(make_eval_step, axis=parallel.axis), ())
            eval_steps.append((phase_config.model, eval_step))
        first, last = phase.phase.schedule_steps
        optimizer = make_optimizer(phase_config.optimizer, last, first_step=first)
        make_step = partial(
            make_train_step,
            optimizer=optimizer,
            seed=config.seed,
            dropout_rng=config.training.dropout_rng,
            axis=parallel.axis,
        )
        new = PretrainingEvaluator(eval_step, loss_factors, phase, parallel, interrupts)
        evaluate = earlier[number].evaluate if earlier else new
        programs.append(PhaseProgram(phase, compile_loss(make_step, (0,)), evaluate))
    return programs


def _initialize(
    model: Initializable,
    metrics: Sequence[str],
    run: RunFolder[PretrainConfig],
    setup: Setup,
    data: PretrainingData,
    checkpoints: Checkpointer,
    log: Log,
) -> TrainState:
    config, source = run.config, setup.init_model
    is_branch = config.init_state and not has_begun(run)
    restore: Callable[[Any], tuple[int, Any] | None] = checkpoints.restore
    if is_branch:
        log(f"continues the training state of {config.init}")
        restore = partial(restore_branched, checkpoints, *find_branch_source(config), log)
    first, objective = data.phases[0], OBJECTIVES[config.training.objective]
    counts = predictable_counts(first.examples, data.tokenizer, objective.special_tokens)
    teacher = setup.teacher if source is None and config.distillation.initial_weights == "teacher" else None

    def prepare(params: Params) -> Params:
        params = params if teacher is None else start_from_teacher(params, config.model, teacher, log)
        if config.embedding_init == "cooccurrence" and source is None and teacher is None:
            params = init_embeddings(first.examples, sorted(special_ids(data.tokenizer).all), params)
        return init_mlm_bias(config.mlm_bias_init, counts, objective.mlm_head, params)

    state = initialize_state(
        model,
        make_optimizer(config.optimizer, data.total_steps),
        metrics,
        config.seed,
        restore,
        None if source is None else (source.origin, source.params),
        objective.modules,
        log,
        prepare,
        memory_shape=memory_shape(config.model, config.training.batch_size),
    )
    if is_branch:
        if state.step >= data.total_steps:
            raise UserError(
                f"training.epochs {config.training.epochs} are {data.total_steps} steps, and init is at step "
                f"{state.step}: set training.steps above it instead"
            )
        checkpoints.save(int(state.step), state)  # the run no longer needs the run that it branched from
    return state


def _measure_costs(programs: list[PhaseProgram], state: TrainState, parallel: Parallelism) -> tuple[StepCosts, float]:
    """Returns the costs, and the seconds that the compilation of the steps takes.

    Times a step and an evaluation batch of each remaining phase. All phases are compiled before the first one starts,
    so that a phase that does not fit into memory fails immediately.
    """
    steps, evaluations, compilation = [], [], 0.0
    next_rows: dict[int, int] = {}  # next row of each stream, which is not read ahead for a later phase
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
