"""Runs fine-tuning end to end: data, model, training loop, evaluation, predictions, results.json."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from bert.config import FinetuneConfig
from bert.data.batching import FinetuningLoader
from bert.errors import LOGGER, log_info, require
from bert.inference.pretrained import Params
from bert.model.lora import NOTHING_FROZEN, FrozenWeights
from bert.parallel import multihost
from bert.parallel.backends import Parallelism
from bert.runs import metrics_log
from bert.runs.checkpoint import make_checkpointer, require_space
from bert.runs.checkpoint_storage import Restored
from bert.runs.environment import record_environment
from bert.runs.folder import RunFolder
from bert.runs.loggers import Callback
from bert.runs.report import make_report
from bert.runtime.interrupts import InterruptHandler
from bert.runtime.profiling import make_profiler
from bert.training.averaging import ParameterAverage
from bert.training.finetuning.evaluation import DevEvaluator
from bert.training.finetuning.initialization import (
    HeadStart,
    match_head,
    take_frozen_weights,
    trained_params,
)
from bert.training.finetuning.kinds import TASK_KINDS, head_of_task
from bert.training.finetuning.results import (
    BestCheckpoint,
    ParameterCounts,
    curves_subject,
    log_summary,
    make_results,
    write_predictions,
)
from bert.training.finetuning.setup import Setup, resolve_setup
from bert.training.initialization import Log, initialize_state
from bert.training.loop import TrainLoop
from bert.training.means import EarlyStopping, read_eval_metrics
from bert.training.optimizer import learning_rate_schedule
from bert.training.step import TrainState, compile_bucketed_train_step


def finetune(run: RunFolder[FinetuneConfig], say: Log = log_info, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Runs or resumes a fine-tuning run, and returns the content of its results.json.

    Raises:
        UserError: the data, the initial model or a checkpoint cannot be used.
        Interrupted: a signal came; the state is saved.
    """
    start_time = time.perf_counter()
    say = multihost.main_process_only(say)
    setup = resolve_setup(run, say)
    record_environment(setup.run)
    best = train(setup, say, callbacks)
    scores = write_predictions(setup, best)
    results = {**make_results(setup, best, scores), "seconds": round(time.perf_counter() - start_time, 1)}
    if run.is_writer:
        metrics_log.write_results(run.path, results)
    return results


def train(setup: Setup, say: Log, callbacks: Sequence[Callback] = ()) -> BestCheckpoint:
    """Trains from the run's newest checkpoint, or from the initial model, and reads the best checkpoint.

    Raises:
        UserError: a checkpoint cannot be used, or too many steps were skipped.
        Interrupted: a signal came; the state is saved.
    """
    run, parallel, task, config = setup.run, setup.parallel, setup.task, setup.run.config
    total_steps = setup.total_steps
    with (
        InterruptHandler() as interrupts,  # also while the last checkpoint is written
        make_checkpointer(run, say, parallel) as checkpoints,
        make_profiler(config.profile and run.is_writer, run.path, say) as profiler,
    ):
        size = config.training.average_checkpoints
        average = ParameterAverage(size) if size > 1 else None
        restore = checkpoints.restore if average is None else partial(average.restore, checkpoints)
        frozen = _take_frozen_weights(setup)
        state = _initialize(setup, restore, say)
        counts = ParameterCounts.of(state.params, frozen, setup)
        if run.is_writer:
            log_summary(state.params, counts, setup)
        loader = FinetuningLoader(setup.train, config, parallel.process, setup.batches)
        train_step = compile_bucketed_train_step(
            setup.loss, setup.optimizer, config.seed, config.training.dropout_rng, parallel, frozen
        )
        evaluate = DevEvaluator(setup.evaluator, task, setup.dev, interrupts, _merge_on_devices(frozen, parallel))
        subject = curves_subject(setup)
        with make_report(run, total_steps, int(state.step), subject, callbacks) as report:
            early_stopping = EarlyStopping(run.path, task.main_metric, task.higher_main_is_better, config.patience)
            if state.step < total_steps and not early_stopping.should_stop(int(state.step)):
                require_space(run, state, say)
            TrainLoop(
                config=config.training,
                end_step=total_steps,
                loader=loader,
                train_step=train_step,
                schedule=learning_rate_schedule(config.optimizer, total_steps),
                loss_factors=setup.loss.factors,
                evaluate=evaluate,
                parallel=parallel,
                checkpoints=checkpoints,
                average=average,
                report=report,
                interrupts=interrupts,
                early_stopping=early_stopping,
                profiler=profiler,
            ).run(state)
        checkpoints.wait()
        checkpoints.thin_out()
        step, params = require(checkpoints.restore_best_params(), "the best checkpoint")
        lines = multihost.broadcast_from_main(partial(read_eval_metrics, run.path))
        interrupts.raise_if_signalled(lines[-1]["step"])
    is_final = step == lines[-1]["step"] and setup.evaluator is setup.final_evaluator
    dev_outputs = evaluate.last_outputs if is_final else None
    return BestCheckpoint(step, frozen.merge(params), counts, lines, dev_outputs, report.divergence)


def _take_frozen_weights(setup: Setup) -> FrozenWeights:
    """The weights that the run leaves to its adapters."""
    if setup.run.config.lora.rank is None:
        return NOTHING_FROZEN
    source = _source(setup)
    stacks = TASK_KINDS[setup.task.kind].stacks
    return take_frozen_weights(setup.run, None if source is None else source[1], stacks)


def _merge_on_devices(frozen: FrozenWeights, parallel: Parallelism) -> Callable[[Params], Params]:
    """The state's parameters -> the model's, both on the devices."""
    if not frozen.params:
        return lambda params: params
    return lambda params: parallel.put_state(frozen.merge(parallel.to_host(params)))


def _source(setup: Setup) -> tuple[str, Params] | None:
    """Name and parameters of the model to start from; None for random weights, and for a run that resumes."""
    init = setup.init_model
    if init.params is None:
        return None
    return init.name, TASK_KINDS[setup.task.kind].init_params(setup.run.config, init.params, init.name)


def _initialize(setup: Setup, restore: Callable[[Any], Restored | None], say: Log) -> TrainState:
    train, config = setup.train, setup.run.config
    kind = TASK_KINDS[setup.task.kind]
    # A run starts from the first of these that there is:
    # 1. its own newest checkpoint, as a whole;
    # 2. the modules of `init` that fit: encoder with pooler, decoder, MLM head, and the head's rows by label;
    # 3. random weights, which only depend on the seed.
    source = _source(setup)
    head = HeadStart() if source is None else _head_start(setup)
    state = initialize_state(
        kind.initializable(setup.model),
        setup.optimizer,
        setup.loss.metrics,
        config.seed,
        restore,
        source,
        (*kind.init_modules, *head.modules),
        say,
        # Parameters do not depend on the length; the data tells whether rows have choices.
        input_shape=(*train.batch(np.arange(1), int(train.lengths[0]), 1)["input_ids"].shape[:-1], 8),
        trained=partial(trained_params, config=config.lora, seed=config.seed),
        rows=head.rows,
    )
    if head.message:
        (multihost.main_process_only(LOGGER.warning) if head.incomplete else say)(head.message)
    return state


def _head_start(setup: Setup) -> HeadStart:
    """The weights of the source's head that the run starts from."""
    config, source = setup.run.config, setup.init_model.head
    if source is None or config.head_init == "none":
        return HeadStart()
    return match_head(head_of_task(setup.task, config.num_feature_layers), source, setup.init_model.name)
