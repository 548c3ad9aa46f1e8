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
from bert.config import FinetuneConfig, ModelConfig, TrainingConfig
from bert.data.batching import _Batches
from bert.data.pretraining.id_checks import require_known_ids_of_rows
from bert.errors import Count, UserError, known
from bert.inference.loading import load
from bert.inference.pretrained import Params, Pretrained
from bert.model.dropout import Dropout
from bert.model.execution import Execution
from bert.model.heads import HEADS
from bert.parallel import multihost
from bert.parallel.backends import DataParallel, Parallel, parallel_of
from bert.runs import metrics_log, progress, shared_run
from bert.runs.checkpoint import Checkpointer
from bert.runs.curves import Subject
from bert.runs.folder import RunFolder
from bert.runtime.interrupts import StopRequest
from bert.runtime.profiling import profiling
from bert.tasks import task_of
from bert.tasks.base import Examples, Outputs, Task
from bert.tasks.splits import cut_facts, label_facts, read_splits
from bert.tokenizer.wordpiece import load_tokenizer, save_tokenizer, train_tokenizer, vocabulary_size
from bert.training.evaluation import Apply, Split, _Evaluator, _scores, evaluations, out_of_patience
from bert.training.initialization import sizes_of_source, sizes_of_vocabulary, starting_state
from bert.training.loop import Work, count_parameters, fit, steps_of, time_step
from bert.training.losses import LOSSES, Batch, task_objective
from bert.training.optimizer import ParameterPath, describe_decay, frozen_parts, learning_rate_schedule, make_optimizer
from bert.training.step import TrainState, compile_for_lengths
from bert.training.timing import Timed, pace_of_training, seconds_of_scoring

Say = Callable[[str], None]


class Origin(NamedTuple):
    """What the encoder starts as: sizes, vocabulary, and weights (None for random ones)."""

    config: ModelConfig
    tokenizer: Tokenizer
    params: Params | None
    name: str


def finetune(run: RunFolder[FinetuneConfig], say: Say = print) -> dict[str, Any]:
    """Runs, or goes on with, a fine-tuning run and returns what stands in its results.json.

    Raises:
        UserError: the data, the start or a checkpoint cannot be used.
        Interrupted: a signal came; the state is saved.
    """
    began = time.perf_counter()
    say = multihost.spoken(say)
    Execution.of(run.config.training)  # what these devices cannot do is said first
    task, read, data, notes = read_splits(task_of(run.config), run.config)
    main, higher = task.main_metric, task.higher_main_is_better
    for note in notes:
        say(note)

    origin = _origin(run, read["train"], say)
    data = task.shape(data)
    if data.max_length > origin.config.max_position_embeddings:
        raise UserError(
            f"data.max_length ({data.max_length}) is over the model's position table "
            f"({origin.config.max_position_embeddings}): shorten it"
        )
    splits = {name: Split(examples, task.features(origin.tokenizer, examples, data)) for name, examples in read.items()}
    for name, split in splits.items():
        require_known_ids_of_rows(split.features, origin.config.known_vocab_size, name)
    train, dev = splits["train"].features, splits["dev"]
    config = _resolved(dataclasses.replace(run.config, data=data, model=origin.config), len(train))
    config.check_model()
    model, parallel = _model(task, config), parallel_of(config.training, config.model)
    eval_batch_size = known(config.training.eval_batch_size, "training.eval_batch_size")
    parallel.check_batch("training.batch_size", config.training.batch_size, config.training.gradient_accumulation_steps)
    parallel.check_batch("training.eval_batch_size", eval_batch_size)
    run = run.resolve(config)  # first: a folder with other files and no config.yaml is nobody's
    run.check_data(train.digest())
    if run.writes:
        save_tokenizer(origin.tokenizer, run.path)
    frozen = frozen_parts(config.frozen_layers, config.feature_layers)
    apply = _forward(model, frozen)
    objective = task_objective(LOSSES[task.loss], apply)
    total_steps = steps_of(config.training, len(train))
    optimizer = make_optimizer(config.optimizer, total_steps, frozen)
    outputs_of = _Evaluator(apply, LOSSES[task.loss], parallel, config)

    with (
        shared_run.checkpoints_of(run, say) as checkpoints,
        StopRequest() as stop,
        profiling(config.profile and run.writes, run.path, say) as profiled,
    ):
        newest: list[Outputs] = []  # dev's, of the evaluation that this process has made last

        def evaluate(params: Any) -> dict[str, float]:
            outputs, losses = outputs_of(params, dev, stop.check)
            newest[:] = [outputs]
            predictions = task.predict(outputs, dev.features, dev.examples)
            return {**losses, **task.score(predictions, dev.examples)}

        weights = None if origin.params is None else (origin.name, origin.params)
        state = starting_state(
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
        if run.writes:
            rows = {name: split.features for name, split in splits.items()}
            positions = config.model.max_position_embeddings
            progress.startup_table(
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
        with shared_run.report_of(run, total_steps, int(state.step), subject=_subject(task, config, dev)) as listener:

            def is_best(step: int, scores: dict[str, float]) -> bool:
                past = [line for line in evaluations(run.path) if line["step"] < step]
                return all(metrics.is_better(scores[main], line[main], higher) for line in past)

            def is_enough(step: int) -> bool:
                past = [line[main] for line in evaluations(run.path) if line["step"] <= step]
                return config.patience is not None and out_of_patience(past, config.patience, higher)

            batches = _Batches(train, config, parallel.process, LOSSES[task.loss].by_length)
            work = Work(
                total_steps=total_steps,
                eval_every=int(known(config.training.eval_every, "training.eval_every")),
                batch=batches,
                rows=batches.rows,
                train_step=profiled(
                    compile_for_lengths(objective, optimizer, config.seed, config.training.dropout_rng, parallel)
                ),
                learning_rate=learning_rate_schedule(config.optimizer, total_steps),
                evaluate=evaluate,
                evaluated=lambda step, scores: multihost.from_first(partial(is_best, step, scores)),
                keep=checkpoints.protect,
                enough=lambda step: multihost.from_first(partial(is_enough, step)),
            )
            scored = [split for name, split in splits.items() if name not in ("train", "dev")]
            work = dataclasses.replace(work, pace=partial(_pace, work, batches, outputs_of, dev, scored, parallel))
            fit(work, state, config.training, parallel, checkpoints, listener, stop)
        checkpoints.wait()
        checkpoints.thin_out()
        best_step, best = known(checkpoints.restore_best_params(), "the best checkpoint")

    best = parallel.replicate(best)
    lines = multihost.from_first(lambda: evaluations(run.path))
    known_outputs = newest[0] if newest and lines[-1]["step"] == best_step else None

    def answer(split: Split) -> tuple[Outputs, dict[str, float]]:
        return (known_outputs, {}) if split is dev and known_outputs is not None else outputs_of(best, split)

    measured, collapsed, details = _answer(task, run, splits, answer)
    best_line = next(_scores(line) for line in lines if line["step"] == best_step)
    results = {
        "task": task.name,
        "init": config.init,
        "seed": config.seed,
        "steps": lines[-1]["step"],
        "best_step": best_step,
        **{**measured, "dev": {**best_line, **measured["dev"]}},
        "last": _scores(lines[-1]),
        "baseline": task.baseline,
        **({task.baseline: task.baseline_scores(dev.examples)} if task.baseline else {}),
        "main_metric": main,
        "higher_is_better": higher,
        "collapsed": collapsed,
        **({"details": details} if details else {}),
        "sample_input": list(task.sample(dev.examples)),
        "stopped_early": lines[-1]["step"] < total_steps,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if run.writes:
        metrics_log.write_results(run.path, results)
    return results


def _answer(
    task: Task,
    run: RunFolder[FinetuneConfig],
    splits: dict[str, Split],
    outputs_of: Callable[[Split], tuple[Outputs, dict[str, float]]],
) -> tuple[dict[str, dict[str, float]], bool, dict[str, dict[str, Any]]]:
    """Writes the predictions of all splits but train, and in config.yaml what the task has learned from dev's.

    Returns:
        The scores of the splits with labels, whether the run has collapsed on dev, and the details of these splits.
    """
    measured, details = {}, {}
    outputs, _ = outputs_of(splits["dev"])
    tuned = task.tuned(outputs, splits["dev"].features, splits["dev"].examples)
    if tuned is not task:
        run.resolve(dataclasses.replace(run.config, data=tuned.shape(run.config.data)))
    for name, (examples, features) in splits.items():
        if name == "train":
            continue
        losses: dict[str, float] = {}
        if name != "dev":
            outputs, losses = outputs_of(splits[name])
        predictions = tuned.predict(outputs, features, examples)
        if run.writes:
            tuned.write(run.path / "predictions", name, predictions, examples)
        if name == "dev":
            collapsed = tuned.collapsed(predictions, examples)
        if examples.labelled:
            measured[name] = {**losses, **tuned.score(predictions, examples)}
            details[name] = tuned.details(predictions, examples)
            if run.writes:
                tuned.write_details(run.path / "predictions", name, predictions, examples)
    return measured, collapsed, {name: found for name, found in details.items() if found}


def predict_split(model: Pretrained, config: FinetuneConfig, name: str, folder: Path, say: Say) -> list[Path]:
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
    task = model.answering()
    examples = read_splits(task, config).examples[name]
    split = Split(examples, task.features(model.tokenizer, examples, config.data))
    try:
        parallel = parallel_of(config.training, config.model)
        parallel.check_batch(
            "training.eval_batch_size", known(config.training.eval_batch_size, "training.eval_batch_size")
        )
        head = _model(task, config)
    except UserError as error:
        say(f"computed on one device in another way, so that the last digits may differ: {error}")
        parallel = DataParallel(jax.local_devices()[:1])
        head = _model(task, dataclasses.replace(config, training=TrainingConfig(dtype=config.training.dtype)))
    apply = _forward(head, frozen_parts(config.frozen_layers, config.feature_layers))
    evaluator = _Evaluator(apply, LOSSES[task.loss], parallel, config)
    outputs, _ = evaluator(parallel.replicate(model.params), split)
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
        eval_every=training.eval_every or Count(per_epoch),
        eval_batch_size=training.eval_batch_size or training.batch_size,
        keep_checkpoints=training.keep_checkpoints or 1,
    )
    return dataclasses.replace(config, training=training)


def _origin(run: RunFolder[FinetuneConfig], train: Examples, say: Say) -> Origin:
    """Where sizes, vocabulary and weights come from: the run itself if begun, else ``init``, ``like``, config."""
    config, init = run.config, known(run.config.init, "init")
    own = Checkpointer(run.checkpoints, config.training.keep_checkpoints, say)
    if run.resumed and multihost.from_first(own.steps):
        return Origin(config.model, load_tokenizer(run.path), None, init)
    if init != "none":
        source = load(init, say)
        model = sizes_of_source(config.model, source.config, source.source)
        return Origin(model, source.tokenizer, source.params, source.origin)
    if config.like is not None:
        source = load(config.like, say)
        model = sizes_of_source(config.model, source.config, source.source)
        return Origin(model, source.tokenizer, None, "none")
    if config.tokenizer.path is not None:
        tokenizer = load_tokenizer(config.tokenizer.path, config.tokenizer)
    else:
        tokenizer = train_tokenizer(train.sentences(), config.tokenizer)
    return Origin(sizes_of_vocabulary(config.model, vocabulary_size(tokenizer)), tokenizer, None, "none")


def _forward(model: nn.Module, frozen: Callable[[ParameterPath], bool] | None) -> Apply:
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
        config.feature_layers,
        **_execution(config),
    )


def _execution(config: FinetuneConfig) -> dict[str, Execution]:
    """What a head is told of how to run its layers: nothing where it is as ever, so that few heads need to know."""
    execution = Execution.of(config.training, config.model.head_size)
    return {} if execution == Execution() else {"execution": execution}


def _trained(params: Params, frozen: Callable[[ParameterPath], bool] | None) -> Params:
    flat = traverse_util.flatten_dict(params)
    kept = {path: leaf for path, leaf in flat.items() if frozen is None or not frozen(path)}
    return traverse_util.unflatten_dict(kept)


def _describe_frozen(params: Params, frozen: Callable[[ParameterPath], bool] | None) -> str:
    return "" if frozen is None else f", of which {count_parameters(_trained(params, frozen)):,} are trained"


def _pace(
    work: Work,
    batches: _Batches,
    evaluator: _Evaluator,
    dev: Split,
    scored_at_the_end: list[Split],
    parallel: Parallel,
    state: TrainState,
    first: Timed,
) -> progress.Pace:
    """The time that a run has left, by timing a step of another length and a batch of dev."""
    length, scored = evaluator.time(parallel.replicate(state.params), dev)
    micro_batches = batches.micro_batches

    def measure(step: int) -> Timed:
        return time_step(work.train_step, parallel.replicate(state), parallel.place(batches(step), micro_batches))

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
