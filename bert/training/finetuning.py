"""A fine-tuning run from labelled files to predictions: puts the rooms together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from tokenizers import Tokenizer

from bert import metrics
from bert.config import FinetuneConfig, ModelConfig, TaskDataConfig, TrainingConfig
from bert.data.batching import FinetuningLoader
from bert.errors import UserError, require
from bert.inference.loading import load
from bert.inference.pretrained import Params, Pretrained
from bert.model.dropout import Dropout
from bert.model.execution import LayerExecution
from bert.model.heads import HEADS
from bert.parallel import multihost
from bert.parallel.backends import Parallelism, PmapParallelism, make_parallelism
from bert.runs import metrics_log, progress, shared_run
from bert.runs.checkpoint import Checkpointer
from bert.runs.curves import Subject
from bert.runs.folder import RunFolder
from bert.runtime.interrupts import InterruptHandler
from bert.runtime.profiling import profiler
from bert.tasks import make_task
from bert.tasks.base import Examples, Outputs, Task
from bert.tasks.splits import cut_facts, label_facts, read_splits
from bert.tokenizer.wordpiece import (
    embedding_rows,
    load_tokenizer,
    require_embedding_rows,
    save_tokenizer,
    train_tokenizer,
)
from bert.training.evaluation import Apply, Split, TaskEvaluator, read_eval_metrics, scores_of_line, should_stop_early
from bert.training.initialization import initialize_state, model_config_from_source, with_vocab_size
from bert.training.loop import LoopHooks, count_parameters, fit, num_train_steps, time_step
from bert.training.losses import LOSSES, Batch, task_objective
from bert.training.optimizer import (
    ParameterPath,
    describe_decay,
    learning_rate_schedule,
    make_frozen_predicate,
    make_optimizer,
)
from bert.training.step import TrainState, compile_bucketed_train_step
from bert.training.timing import Timed, pace_of_training, seconds_of_scoring

Log = Callable[[str], None]


class InitialModel(NamedTuple):
    """What the encoder starts as: sizes, vocabulary, and weights (None for random ones)."""

    config: ModelConfig
    tokenizer: Tokenizer
    params: Params | None
    name: str


def finetune(run: RunFolder[FinetuneConfig], say: Log = print) -> dict[str, Any]:
    """Runs, or goes on with, a fine-tuning run and returns what stands in its results.json.

    Raises:
        UserError: the data, the start or a checkpoint cannot be used.
        Interrupted: a signal came; the state is saved.
    """
    began = time.perf_counter()
    say = multihost.main_process_only(say)
    LayerExecution.from_config(run.config.training)  # what these devices cannot do is said first
    task, read, data, notes = read_splits(make_task(run.config), run.config)
    main, higher = task.main_metric, task.higher_main_is_better
    for note in notes:
        say(note)

    origin = _resolve_init(run, read["train"], say)
    require_embedding_rows(origin.tokenizer, origin.config.known_vocab_size, origin.name)
    data = task.to_config(data)
    if data.max_length > origin.config.max_position_embeddings:
        raise UserError(
            f"data.max_length ({data.max_length}) is over the model's position table "
            f"({origin.config.max_position_embeddings}): shorten it"
        )
    splits = {name: Split(examples, task.features(origin.tokenizer, examples, data)) for name, examples in read.items()}
    train, dev = splits["train"].features, splits["dev"]
    config = _resolved(dataclasses.replace(run.config, data=data, model=origin.config), len(train))
    config.check_model()
    model, parallel = _model(task, config), make_parallelism(config.training, config.model)
    eval_batch_size = require(config.training.eval_batch_size, "training.eval_batch_size")
    parallel.check_batch("training.batch_size", config.training.batch_size, config.training.gradient_accumulation_steps)
    parallel.check_batch("training.eval_batch_size", eval_batch_size)
    run = run.save_config(config)  # first: a folder with other files and no config.yaml is nobody's
    run.check_data(train.digest())
    if run.is_writer:
        save_tokenizer(origin.tokenizer, run.path)
    frozen = make_frozen_predicate(config.num_frozen_layers, config.num_feature_layers)
    apply = _make_apply(model, frozen)
    objective = task_objective(LOSSES[task.loss], apply)
    total_steps = num_train_steps(config.training, len(train))
    optimizer = make_optimizer(config.optimizer, total_steps, frozen)
    outputs_of = TaskEvaluator(apply, LOSSES[task.loss], parallel, config)

    with (
        shared_run.make_checkpointer(run, say) as checkpoints,
        InterruptHandler() as stop,
        profiler(config.profile and run.is_writer, run.path, say) as profiled,
    ):
        newest: list[Outputs] = []  # dev's, of the evaluation that this process has made last

        def evaluate(params: Any) -> dict[str, float]:
            outputs, losses = outputs_of(params, dev, stop.check)
            newest[:] = [outputs]
            predictions = task.predict(outputs, dev.features, dev.examples)
            return {**losses, **task.score(predictions, dev.examples)}

        weights = None if origin.params is None else (origin.name, origin.params)
        state = initialize_state(
            model,
            optimizer,
            objective.metrics,
            config.seed,
            checkpoints,
            weights,
            ("bert",),
            say,
            # Parameters do not depend on the length; whether there are choices, the data tells.
            input_shape=(*train.batch(np.arange(1), int(train.lengths[0]), 1)["input_ids"].shape[:-1], 8),
        )
        batch, length = config.training.batch_size, config.data.max_length
        if run.is_writer:
            rows = {name: split.features for name, split in splits.items()}
            positions = config.model.max_position_embeddings
            progress.print_table(
                [
                    ("task", f"{task.name}: {len(train):,} training rows, {len(dev.features):,} dev"),
                    *label_facts(task, read, data),
                    *cut_facts(task, origin.tokenizer, read, rows, data, positions),
                    ("parameters", f"{count_parameters(state.params):,}" + _describe_frozen(state.params, frozen)),
                    ("devices", parallel.describe()),
                    ("tokens per step", f"up to {batch * length:,} ({batch} x {length}, padded to buckets)"),
                    ("steps", f"{total_steps:,} ({total_steps / -(-len(train) // batch):.1f} epochs)"),
                    ("optimizer", describe_decay(_trained(state.params, frozen), config.optimizer)),
                ]
            )
        with shared_run.make_report(run, total_steps, int(state.step), subject=_subject(task, config, dev)) as listener:

            def is_best(step: int, scores: dict[str, float]) -> bool:
                past = [line for line in read_eval_metrics(run.path) if line["step"] < step]
                return all(metrics.is_better(scores[main], line[main], higher) for line in past)

            def is_enough(step: int) -> bool:
                past = [line[main] for line in read_eval_metrics(run.path) if line["step"] <= step]
                return config.patience is not None and should_stop_early(past, config.patience, higher)

            batches = FinetuningLoader(train, config, parallel.process, LOSSES[task.loss].by_length)
            work = LoopHooks(
                total_steps=total_steps,
                eval_every=int(require(config.training.eval_every, "training.eval_every")),
                batch=batches,
                rows=batches.rows,
                train_step=profiled(
                    compile_bucketed_train_step(
                        objective, optimizer, config.seed, config.training.dropout_rng, parallel
                    )
                ),
                learning_rate=learning_rate_schedule(config.optimizer, total_steps),
                evaluate=evaluate,
                is_best=lambda step, scores: multihost.broadcast_from_main(partial(is_best, step, scores)),
                protect_checkpoint=checkpoints.set_best,
                should_stop_early=lambda step: multihost.broadcast_from_main(partial(is_enough, step)),
            )
            scored = [split for name, split in splits.items() if name not in ("train", "dev")]
            work = dataclasses.replace(work, pace=partial(_pace, work, batches, outputs_of, dev, scored, parallel))
            fit(work, state, config.training, parallel, checkpoints, listener, stop)
        checkpoints.wait()
        checkpoints.thin_out()
        best_step, best = require(checkpoints.restore_best_params(), "the best checkpoint")

    best = parallel.put_state(best)
    lines = multihost.broadcast_from_main(lambda: read_eval_metrics(run.path))
    known_outputs = newest[0] if newest and lines[-1]["step"] == best_step else None

    def answer(split: Split) -> tuple[Outputs, dict[str, float]]:
        return (known_outputs, {}) if split is dev and known_outputs is not None else outputs_of(best, split)

    tuned, measured, collapsed, details = _write_predictions(task, run, splits, answer)
    best_line = next(scores_of_line(line) for line in lines if line["step"] == best_step)
    results = {
        "task": task.name,
        "init": config.init,
        "seed": config.seed,
        "steps": lines[-1]["step"],
        "best_step": best_step,
        **{**measured, "dev": {**best_line, **measured["dev"]}},
        "last": scores_of_line(lines[-1]),
        "baseline": task.baseline,
        **({task.baseline: task.baseline_scores(dev.examples)} if task.baseline else {}),
        "main_metric": main,
        "higher_is_better": higher,
        "collapsed": collapsed,
        **({"tuned": tuned} if tuned else {}),
        **({"details": details} if details else {}),
        "sample_input": list(task.sample(dev.examples)),
        "stopped_early": lines[-1]["step"] < total_steps,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if run.is_writer:
        metrics_log.write_results(run.path, results)
    return results


def _write_predictions(
    task: Task,
    run: RunFolder[FinetuneConfig],
    splits: dict[str, Split],
    outputs_of: Callable[[Split], tuple[Outputs, dict[str, float]]],
) -> tuple[dict[str, Any], dict[str, dict[str, float]], bool, dict[str, dict[str, Any]]]:
    """Writes the predictions of all splits but train.

    Returns:
        Fields of ``data`` that the task has tuned on dev, the scores of the splits with labels, whether the run has
        collapsed on dev, and the details of these splits.
    """
    measured, details = {}, {}
    outputs, _ = outputs_of(splits["dev"])
    tuned = task.tune(outputs, splits["dev"].features, splits["dev"].examples)
    for name, (examples, features) in splits.items():
        if name == "train":
            continue
        losses: dict[str, float] = {}
        if name != "dev":
            outputs, losses = outputs_of(splits[name])
        predictions = tuned.predict(outputs, features, examples)
        if run.is_writer:
            tuned.write(run.path / "predictions", name, predictions, examples)
        if name == "dev":
            collapsed = tuned.is_degenerate(predictions, examples)
        if examples.labelled:
            measured[name] = {**losses, **tuned.score(predictions, examples)}
            details[name] = tuned.details(predictions, examples)
            if run.is_writer:
                tuned.write_details(run.path / "predictions", name, predictions, examples)
    changed = _changed_fields(run.config.data, tuned.to_config(run.config.data))
    return changed, measured, collapsed, {name: found for name, found in details.items() if found}


def _changed_fields(before: TaskDataConfig, after: TaskDataConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(after).items() if value != getattr(before, name)}


def predict_split(model: Pretrained, config: FinetuneConfig, name: str, folder: Path, say: Log) -> list[Path]:
    """Writes the prediction files of a split of a run's data as the run wrote them, and returns their paths.

    On the devices of the run they are the same bytes: batches, lengths and precision are those of its evaluations.

    Args:
        model: the run's best checkpoint.
        config: the run's.
        name: of the split.
        folder: where the files go.
        say: told where the run's devices are not here, so that the last digits may differ.

    Raises:
        UserError: the split is not there, or not as it should be.
    """
    task = model.require_task()
    examples = read_splits(task, config).examples[name]
    split = Split(examples, task.features(model.tokenizer, examples, config.data))
    try:
        parallel = make_parallelism(config.training, config.model)
        parallel.check_batch(
            "training.eval_batch_size", require(config.training.eval_batch_size, "training.eval_batch_size")
        )
        head = _model(task, config)
    except UserError as error:
        say(f"computed on one device in another way, so that the last digits may differ: {error}")
        parallel = PmapParallelism(jax.local_devices()[:1])
        head = _model(task, dataclasses.replace(config, training=TrainingConfig(dtype=config.training.dtype)))
    apply = _make_apply(head, make_frozen_predicate(config.num_frozen_layers, config.num_feature_layers))
    evaluator = TaskEvaluator(apply, LOSSES[task.loss], parallel, config)
    outputs, _ = evaluator(parallel.put_state(model.params), split)
    return task.write(folder, name, task.predict(outputs, split.features, examples), examples)


def _subject(task: Task, config: FinetuneConfig, dev: Split) -> Subject:
    """What the curves of a run are of."""
    source = "random weights" if config.init == "none" else config.init
    return Subject(
        title=f"{task.name}, from {source} ({config.model.num_hidden_layers} layers of {config.model.hidden_size})",
        baseline=task.baseline,
        baselines=task.baseline_scores(dev.examples) if task.baseline else {},
        main_metric=task.main_metric,
        higher_is_better=task.higher_is_better,
    )


def _resolved(config: FinetuneConfig, train_rows: int) -> FinetuneConfig:
    training = config.training
    per_epoch = -(-train_rows // training.batch_size)
    training = dataclasses.replace(
        training,
        eval_every=training.eval_every or per_epoch,
        eval_batch_size=training.eval_batch_size or training.batch_size,
        max_to_keep=training.max_to_keep or 1,
    )
    return dataclasses.replace(config, training=training)


def _resolve_init(run: RunFolder[FinetuneConfig], train: Examples, say: Log) -> InitialModel:
    """Sizes, vocabulary and weights: of the run if begun, else of ``init``, ``architecture_from`` or the config."""
    config, init = run.config, require(run.config.init, "init")
    own = Checkpointer(run.checkpoints, config.training.max_to_keep, say)
    if run.resumed and multihost.broadcast_from_main(own.steps):
        return InitialModel(config.model, load_tokenizer(run.path), None, init)
    if init != "none":
        source = load(init, say)
        model = model_config_from_source(config.model, source.config, source.source)
        return InitialModel(model, source.tokenizer, source.params, source.origin)
    if config.architecture_from is not None:
        source = load(config.architecture_from, say)
        model = model_config_from_source(config.model, source.config, source.source)
        return InitialModel(model, source.tokenizer, None, "none")
    if config.tokenizer.path is not None:
        tokenizer = load_tokenizer(config.tokenizer.path, config.tokenizer)
    else:
        tokenizer = train_tokenizer(train.sentences(), config.tokenizer)
    return InitialModel(with_vocab_size(config.model, embedding_rows(tokenizer)), tokenizer, None, "none")


def _make_apply(model: nn.Module, frozen: Callable[[ParameterPath], bool] | None) -> Apply:
    """What the head gives, as a function of a batch; nothing is learned through ``frozen`` parameters."""

    forward: Callable[..., Any] = model.apply

    def learned(params: Mapping[str, Any]) -> Mapping[str, Any]:
        if frozen is None:
            return params
        return traverse_util.path_aware_map(
            lambda path, leaf: jax.lax.stop_gradient(leaf) if frozen(path) else leaf, params
        )

    def apply(params: Params, batch: Batch, dropout: Dropout | None) -> jax.Array:
        inputs = (batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
        return forward({"params": learned(params)}, *inputs, dropout=dropout)

    return apply


def _model(task: Task, config: FinetuneConfig) -> nn.Module:
    """The encoder with the task's head. Raises UserError where the devices cannot run it as the configuration asks."""
    return HEADS[task.head](
        config.model,
        task.num_labels,
        config.classifier_dropout,
        jnp.dtype(config.training.dtype),
        config.num_feature_layers,
        **_execution(config),
    )


def _execution(config: FinetuneConfig) -> dict[str, LayerExecution]:
    """Keyword arguments for the head. Empty for default execution, so custom heads need no `execution` field."""
    execution = LayerExecution.from_config(config.training, config.model.head_size)
    return {} if execution == LayerExecution() else {"execution": execution}


def _trained(params: Params, frozen: Callable[[ParameterPath], bool] | None) -> Params:
    flat = traverse_util.flatten_dict(params)
    kept = {path: leaf for path, leaf in flat.items() if frozen is None or not frozen(path)}
    return traverse_util.unflatten_dict(kept)


def _describe_frozen(params: Params, frozen: Callable[[ParameterPath], bool] | None) -> str:
    return "" if frozen is None else f", of which {count_parameters(_trained(params, frozen)):,} are trained"


def _pace(
    work: LoopHooks,
    batches: FinetuningLoader,
    evaluator: TaskEvaluator,
    dev: Split,
    scored_at_the_end: list[Split],
    parallel: Parallelism,
    state: TrainState,
    first: Timed,
) -> progress.StepCosts:
    """The time that a run has left, by timing a step of another length and a batch of dev."""
    length, scored = evaluator.time(parallel.put_state(state.params), dev)
    micro_batches = batches.micro_batches

    def measure(step: int) -> Timed:
        return time_step(work.train_step, parallel.put_state(state), parallel.shard_batch(batches(step), micro_batches))

    step, total = int(state.step), work.total_steps
    pace = pace_of_training(batches.lengths(step), step, total, first, measure)
    compiled = {length}
    first_evaluation, *ends = (
        seconds_of_scoring([padded for _, padded in evaluator.batches(split)], length, scored, compiled)
        for split in (dev, *scored_at_the_end)
    )
    again = seconds_of_scoring([padded for _, padded in evaluator.batches(dev)], length, scored, compiled)
    evaluated = min((step // work.eval_every + 1) * work.eval_every, total)
    once = (*pace.once, (evaluated, first_evaluation - again), (total, sum(ends)))
    return dataclasses.replace(pace, once=once, evaluations=((total, work.eval_every, again),))
