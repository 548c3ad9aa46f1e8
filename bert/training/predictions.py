"""Predictions of a fine-tuning run's best checkpoint: files and scores of its splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bert.config import FinetuneConfig, TrainingConfig
from bert.errors import UserError
from bert.inference.pretrained import Params, Pretrained
from bert.parallel.backends import PmapParallelism, make_parallelism
from bert.tasks.base import Outputs
from bert.tasks.splits import read_splits
from bert.training.assembly import build_task_model, make_apply
from bert.training.evaluation import Split, TaskEvaluator
from bert.training.finetuning_setup import Program, Setup
from bert.training.losses import LOSSES
from bert.training.optimizer import make_frozen_predicate

Log = Callable[[str], None]


class BestCheckpoint(NamedTuple):
    """The best checkpoint of a run.

    Attributes:
        step: its step.
        params: on the host.
        lines: all evaluation lines of metrics.jsonl.
        dev_outputs: if this process made its evaluation last; else None.
        stopped_early: whether the run ended before its last step.
    """

    step: int
    params: Params
    lines: list[dict[str, Any]]
    dev_outputs: Outputs | None
    stopped_early: bool


class Scores(NamedTuple):
    """What the best checkpoint reaches.

    Attributes:
        by_split: scores of each split with labels.
        tuned: fields of ``data`` that the task has tuned on dev.
        collapsed: whether its predictions for dev are degenerate.
        details: more on each split with labels, for those that have some.
    """

    by_split: dict[str, dict[str, float]]
    tuned: dict[str, Any]
    collapsed: bool
    details: dict[str, dict[str, Any]]


def write_predictions(setup: Setup, program: Program, best: BestCheckpoint) -> Scores:
    """Tunes the task on dev, and writes and scores the predictions of all splits but train."""
    run, dev, config = setup.run, setup.dev, setup.run.config.data
    params, folder = setup.parallel.put_state(best.params), run.path / "predictions"
    dev_outputs = program.evaluator(params, dev)[0] if best.dev_outputs is None else best.dev_outputs
    task = setup.task.tune(dev_outputs, dev.features, dev.examples)
    tuned = {name: value for name, value in vars(task.to_config(config)).items() if value != getattr(config, name)}
    by_split, details, collapsed = {}, {}, False
    for name, split in setup.splits.items():
        if name == "train":
            continue
        outputs, losses = (dev_outputs, {}) if name == "dev" else program.evaluator(params, split)
        predictions = task.predict(outputs, split.features, split.examples)
        if run.is_writer:
            task.write(folder, name, predictions, split.examples)
        if name == "dev":
            collapsed = task.is_degenerate(predictions, split.examples)
        if split.examples.labelled:
            by_split[name] = {**losses, **task.score(predictions, split.examples)}
            details[name] = task.details(predictions, split.examples)
            if run.is_writer:
                task.write_details(folder, name, predictions, split.examples)
    return Scores(by_split, tuned, collapsed, {name: more for name, more in details.items() if more})


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
        parallel.check_batch("training.eval_batch_size", config.training.rows_per_evaluation)
        head = build_task_model(task, config)
    except UserError as error:
        say(f"computed on one device in another way, so that the last digits may differ: {error}")
        parallel = PmapParallelism(jax.local_devices()[:1])
        head = build_task_model(task, dataclasses.replace(config, training=TrainingConfig(dtype=config.training.dtype)))
    apply = make_apply(head, make_frozen_predicate(config.num_frozen_layers, config.num_feature_layers))
    evaluator = TaskEvaluator(apply, LOSSES[task.loss], parallel, config)
    outputs, _ = evaluator(parallel.put_state(model.params), split)
    return task.write(folder, name, task.predict(outputs, split.features, examples), examples)
