"""A fine-tuning run from its configuration to results.json, also under several seeds with aggregated results."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from bert.config import FinetuneConfig
from bert.config.run_file import load_run_config
from bert.data.windows import row_shape
from bert.errors import LOGGER, Log, log_info, require
from bert.model.linear import NOTHING_FROZEN, FrozenWeights
from bert.model.parameters import Params
from bert.parallel import multihost
from bert.parallel.backends import Parallelism
from bert.runs import metrics_log
from bert.runs.checkpoint import make_checkpointer, require_space
from bert.runs.checkpoint_storage import Restored
from bert.runs.environment import begin_session, make_profiler, record_environment
from bert.runs.folder import RunFolder, open_run
from bert.runs.loggers import Callback, RunCallbacks
from bert.runs.report import make_report
from bert.runtime.interrupts import InterruptHandler
from bert.training.finetuning.contrastive import make_classifier_fit, row_vectors
from bert.training.finetuning.data import FinetuningData, build_data
from bert.training.finetuning.evaluation import DevEvaluator
from bert.training.finetuning.initialization import HeadStart, match_head, take_frozen_weights, trained_params
from bert.training.finetuning.kinds import TASK_KINDS, head_of_task, make_apply, make_evaluators
from bert.training.finetuning.results import (
    BestCheckpoint,
    ParameterCounts,
    curves_subject,
    log_summary,
    write_predictions,
    write_results,
)
from bert.training.finetuning.setup import Setup, resolve_setup
from bert.training.flops import finetuning_flops_per_token, shapes_of
from bert.training.initialization import initialize_state
from bert.training.loop import TrainLoop, TrainStep
from bert.training.means import EarlyStopping, ParameterAverage, read_eval_metrics
from bert.training.optimizer import learning_rate_schedule, make_optimizer
from bert.training.run_length import discard_results
from bert.training.step import TrainState, compile_bucketed_train_step
from bert.training.timing import RunTimes, compilation_seconds, peak_flops_of_devices


def finetune(run: RunFolder[FinetuneConfig], log: Log = log_info, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """Runs or resumes a fine-tuning run, and returns the content of its results.json.

    Raises:
        UserError: the data, the initial model or a checkpoint cannot be used, or too many steps were skipped.
        Interrupted: a signal was received; the state is saved.
    """
    start_time, log = time.perf_counter(), multihost.main_process_only(log)
    config, setup = resolve_setup(run, log)
    run = begin_session(run, config)
    run, data = build_data(run, setup, log)
    config, task, parallel = run.config, setup.task, setup.parallel
    times = RunTimes(start_time, peak_flops_of_devices(config.training.dtype))
    evaluator, final_evaluator = make_evaluators(task, setup.apply, parallel, config, setup.init_model.output_tokenizer)
    with (
        InterruptHandler() as interrupts,  # active until the last checkpoint is written
        make_checkpointer(run, log, parallel) as checkpoints,
        make_profiler(config.profile and run.is_writer, run.path, log) as profiler,
    ):
        size = config.training.average_checkpoints
        average = ParameterAverage(size) if size > 1 else None
        restore = checkpoints.restore if average is None else partial(average.restore, checkpoints)
        frozen = _take_frozen_weights(run, setup)
        optimizer = make_optimizer(config.optimizer, data.total_steps, setup.frozen)
        state = _initialize(run, setup, optimizer, restore, log)
        counts = ParameterCounts.from_params(state.params, frozen, setup)
        if run.is_writer:
            log_summary(state.params, counts, config, setup, data)
        evaluate = DevEvaluator(evaluator, task, setup.dev, interrupts, _merge_on_devices(frozen, parallel))
        subject = curves_subject(config, setup)
        settings = (run, data.total_steps, int(state.step), subject, callbacks)
        with make_report(*settings, compiled=compilation_seconds) as report:
            early_stopping = EarlyStopping(run.path, task.main_metric, task.higher_main_is_better, config.patience)
            train_step = compile_bucketed_train_step(
                setup.loss, optimizer, config.seed, config.training.dropout_rng, parallel, frozen
            )
            if state.step < data.total_steps and not early_stopping.should_stop(int(state.step)):
                require_space(run, state, log)
                with times.measure("compilation"):
                    _run_largest_batch(train_step, state, data, parallel, config.training.gradient_accumulation_steps)
            loop = TrainLoop(
                config=config.training,
                end_step=data.total_steps,
                loader=data.loader,
                train_step=train_step,
                schedule=learning_rate_schedule(config.optimizer, data.total_steps),
                loss_factors=setup.loss.factors,
                evaluate=evaluate,
                parallel=parallel,
                checkpoints=checkpoints,
                average=average,
                before_evaluation=_classifier_fit(run.config, setup, frozen),
                report=report,
                interrupts=interrupts,
                early_stopping=early_stopping,
                profiler=profiler,
                times=times,
                flops_per_token=_flops_per_token(config, setup, frozen.merge(state.params)),
            )
            loop.run(state)
        with times.measure("saving"):
            checkpoints.wait()
            checkpoints.thin_out()
            step, params = require(checkpoints.restore_best_params(), "the best checkpoint")
        lines = multihost.broadcast_from_main(partial(read_eval_metrics, run.path))
        interrupts.raise_if_signalled(lines[-1]["step"])
    is_final = step == lines[-1]["step"] and evaluator is final_evaluator
    dev_outputs = evaluate.last_outputs if is_final else None
    best = BestCheckpoint(step, frozen.merge(params), counts, lines, dev_outputs, report.divergence)
    with times.measure("evaluation"):
        scores = write_predictions(run, setup, final_evaluator, best)
    return write_results(run, setup, data, best, scores, start_time, times, log)


def _flops_per_token(config: FinetuneConfig, setup: Setup, params: Params) -> float | None:
    """Returns the FLOPs of a training step per token, for training rows of average length; None if unknown."""
    architecture = setup.task.architecture or type(setup.model).__name__
    length = max(1, round(float(setup.train.lengths.mean())))
    return finetuning_flops_per_token(config, shapes_of(params), architecture, length)


def _run_largest_batch(
    train_step: TrainStep, state: TrainState, data: FinetuningData, parallel: Parallelism, micro_batches: int
) -> None:
    """Runs a step on the largest batch ahead, so that a batch that does not fit in memory fails before the first step.

    The step trains a copy of the state, which is discarded. If the first batch is as large, the first step is the test.
    """
    first = int(state.step)
    steps = range(first, min(first + data.loader.steps_per_epoch, data.total_steps))
    largest = max(steps, key=data.loader.memory_key)
    if largest == first:
        return
    batch = parallel.shard_batch(data.loader.batch(largest), micro_batches)
    jax.block_until_ready(train_step(parallel.put_state(state), batch))


def _take_frozen_weights(run: RunFolder[FinetuneConfig], setup: Setup) -> FrozenWeights:
    """Returns the frozen weights of a run with adapters."""
    if run.config.lora.rank is None:
        return NOTHING_FROZEN
    source = _source(run.config, setup)
    return take_frozen_weights(run, None if source is None else source[1], TASK_KINDS[setup.task.kind].stacks)


def _classifier_fit(
    config: FinetuneConfig, setup: Setup, frozen: FrozenWeights
) -> Callable[[TrainState], TrainState] | None:
    """Returns the function that fits the classifier after contrastive training; None for other training."""
    if config.classifier_training != "contrastive":
        return None
    task, parallel = setup.task, setup.parallel
    vectors = make_apply(setup.model, setup.frozen, row_vectors)
    evaluator, _ = make_evaluators(task, vectors, parallel, config, setup.init_model.output_tokenizer)
    merge = _merge_on_devices(frozen, parallel)
    return make_classifier_fit(evaluator, task, setup.splits["train"], parallel, merge)


def _merge_on_devices(frozen: FrozenWeights, parallel: Parallelism) -> Callable[[Params], Params]:
    """Returns a function from the state's parameters to the model's parameters, both on the devices."""
    if not frozen.params:
        return lambda params: params
    return lambda params: parallel.put_state(frozen.merge(parallel.to_host(params)))


def _source(config: FinetuneConfig, setup: Setup) -> tuple[str, Params] | None:
    """Returns name and parameters of the initial model; None for random weights and for a run that resumes."""
    init = setup.init_model
    if init.params is None:
        return None
    return init.name, TASK_KINDS[setup.task.kind].init_params(config, init.params, init.name)


def _initialize(
    run: RunFolder[FinetuneConfig],
    setup: Setup,
    optimizer: optax.GradientTransformation,
    restore: Callable[[Any], Restored | None],
    log: Log,
) -> TrainState:
    train, config = setup.train, run.config
    kind = TASK_KINDS[setup.task.kind]
    # The initial weights are the first available of: 1. the run's newest checkpoint; 2. the matching modules of `init`:
    # encoder with pooler, decoder, MLM head, and the head's rows by label; 3. random weights, which depend only on the
    # seed.
    source = _source(config, setup)
    head = HeadStart() if source is None else _head_start(config, setup)
    state = initialize_state(
        kind.initializable(setup.model),
        optimizer,
        setup.loss.metrics,
        config.seed,
        restore,
        source,
        (*kind.init_modules, *head.modules),
        log,
        # Parameters do not depend on the length; the data determines whether rows have choices.
        input_shape=(*row_shape(train), 8),
        trained=partial(trained_params, config=config.lora, seed=config.seed),
        rows=head.rows,
    )
    if head.message:
        (multihost.main_process_only(LOGGER.warning) if head.incomplete else log)(head.message)
    return state


def _head_start(config: FinetuneConfig, setup: Setup) -> HeadStart:
    """Returns the weights of the initial model's head from which the run starts."""
    source = setup.init_model.head
    if source is None or config.head_init == "none":
        return HeadStart()
    return match_head(head_of_task(setup.task, config.num_feature_layers), source, setup.init_model.name)


def finetune_seeds(
    run: RunFolder[FinetuneConfig], log: Log = log_info, callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Runs or resumes ``num_seeds`` runs in seed-0, seed-1, ..., and returns the content of the common results.json.

    Completed runs are not repeated.

    Raises:
        UserError: see `finetune`; or a subfolder holds another run.
        Interrupted: a signal was received; the state of the current seed is saved.
    """
    began, log = time.perf_counter(), multihost.main_process_only(log)
    if run.previous is not None and run.is_writer:
        discard_results(run)
    run = run.save_config(run.config)
    record_environment(run)
    runs = []
    data, distillation = run.config.data, run.config.distillation
    if data.sample_seed is None:  # all seeds are scored on the same dev rows
        data = dataclasses.replace(data, sample_seed=run.config.seed)
    for seed in range(run.config.seed, run.config.seed + run.config.num_seeds):
        folder = os.path.join(require(run.config.output_dir, "output_dir"), f"seed-{seed}")
        config = dataclasses.replace(
            run.config, seed=seed, num_seeds=1, output_dir=folder, data=data, distillation=distillation
        )
        with open_run(config, run.mirror) as one:
            read_results = partial(metrics_log.read_results, one.path)
            finished = multihost.broadcast_from_main(read_results) if one.resumed and one.previous is None else None
            if finished is not None:
                log(f"seed {seed} has ended before: {folder}")
                runs.append(finished)
            else:
                log(f"seed {seed}: {folder}")
                with RunCallbacks(one, callbacks) as ending:
                    ending.results = finetune(one, log, ending.callbacks)
                runs.append(metrics_log.to_jsonable(ending.results))
            if distillation.is_used:  # all seeds have the same teacher
                checksum = multihost.broadcast_from_main(partial(_teacher_checksum, one.path))
                distillation = dataclasses.replace(distillation, checksum=checksum)
    results = {**aggregate_seeds(runs), "seconds": round(time.perf_counter() - began, 1)}
    if run.is_writer:
        metrics_log.write_results(run.path, results)
    return results


def _teacher_checksum(folder: Path) -> str | None:
    config = load_run_config(folder)
    return config.distillation.checksum


def aggregate_seeds(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Aggregates the results of runs that differ only in their seed.

    Returns:
        For each split with labels, ``mean`` and ``standard_deviation`` of each score (sample deviation, with n - 1;
        None for a single run) and the ``collapsed`` seeds (`Task.is_degenerate`). If only some seeds collapsed,
        ``without_collapsed`` has the same statistics without them. Also ``best_seed``, and ``runs``: the results of
        each run without the details.
    """
    first = runs[0]
    splits = metrics_log.scored_splits(first)
    collapsed = [one["seed"] for one in runs if one["collapsed"]]
    sound = [one for one in runs if not one["collapsed"]]
    main, higher = first["main_metric"], first.get("higher_is_better", True)
    results = {
        "task": first["task"],
        "init": first["init"],
        "seeds": [one["seed"] for one in runs],
        **{name: _mean_and_std(runs, name) for name in splits},
        **({"metric_labels": first["metric_labels"]} if "metric_labels" in first else {}),
        "collapsed": collapsed,
    }
    if collapsed and sound:
        results["without_collapsed"] = {name: _mean_and_std(sound, name) for name in splits}
    return {
        **results,
        "main_metric": main,
        "higher_is_better": higher,
        "best_seed": max(runs, key=lambda one: _rank(one[splits[0]][main], higher))["seed"],
        "baseline": first["baseline"],
        **({first["baseline"]: first[first["baseline"]]} if first["baseline"] else {}),
        "runs": [{key: value for key, value in one.items() if key != "details"} for one in runs],
    }


def _rank(score: float | None, higher: bool) -> float:
    """Returns a sort key that is higher for better scores; runs without a score are last."""
    return -math.inf if score is None else score if higher else -score


def _mean_and_std(runs: Sequence[dict[str, Any]], split: str) -> dict[str, dict[str, float | None]]:
    """Returns {"mean": {score: ...}, "standard_deviation": {score: ...}}."""
    values = {
        name: np.array([math.nan if one[split][name] is None else one[split][name] for one in runs])
        for name in runs[0][split]
    }
    return {
        "mean": {name: float(column.mean()) for name, column in values.items()},
        "standard_deviation": {
            name: float(column.std(ddof=1)) if len(runs) > 1 else None for name, column in values.items()
        },
    }
