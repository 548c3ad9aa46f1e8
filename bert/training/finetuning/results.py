"""Summary, predictions and results of a fine-tuning run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flax import traverse_util

from bert.config import FinetuneConfig, TrainingConfig
from bert.data.records import SkippedRows
from bert.errors import Log, UserError
from bert.inference.pretrained import Pretrained
from bert.metrics.calibration import calibration
from bert.model.linear import FrozenWeights
from bert.model.parameters import Params
from bert.parallel.backends import make_local_parallelism, make_parallelism
from bert.parallel.devices import local_devices
from bert.runs import metrics_log
from bert.runs.folder import RunFolder
from bert.runs.plots import Subject
from bert.runs.report import log_table
from bert.tasks import make_task
from bert.tasks.base import Outputs, Task
from bert.tasks.split_facts import cut_facts, label_facts
from bert.tasks.splits import read_splits, require_dev
from bert.tasks.weighted_scores import reliability
from bert.training.finetuning.data import FinetuningData
from bert.training.finetuning.evaluation import Evaluator, Split
from bert.training.finetuning.initialization import with_projection
from bert.training.finetuning.kinds import TASK_KINDS, build_task_model, make_apply, make_evaluators
from bert.training.finetuning.setup import Setup
from bert.training.loop import count_parameters
from bert.training.means import scores_of_line
from bert.training.optimizer import ParameterPath, describe_decay, make_frozen_predicate
from bert.training.timing import RunTimes, log_times


class ParameterCounts(NamedTuple):
    """Number of parameters of the model, and of its trained parameters, adapters included."""

    total: int
    trained: int

    @classmethod
    def from_params(cls, params: Params, frozen: FrozenWeights, setup: Setup) -> ParameterCounts:
        """Counts the parameters of a run, whose state holds ``params``."""
        trained = count_parameters(_trained(params, setup.frozen))
        return cls(count_parameters(frozen.merge(params)), trained)

    def __str__(self) -> str:
        if self.trained == self.total:
            return f"{self.total:,}"
        return f"{self.total:,}, of which {self.trained:,} ({self.trained / self.total:.2%}) are trained"


def log_summary(
    params: Params, counts: ParameterCounts, config: FinetuneConfig, setup: Setup, data: FinetuningData
) -> None:
    """Logs the table of sizes before training."""
    task = setup.task
    splits = {name: split for name, split in setup.splits.items() if name != "dev" or setup.has_dev}
    examples = {name: split.examples for name, split in splits.items()}
    rows = {name: split.features for name, split in splits.items()}
    num_dev = f"{len(setup.dev.features):,} dev" if setup.has_dev else "no dev"
    max_length = config.model.max_position_embeddings
    log_table(
        [
            ("task", f"{task.name}: {len(rows['train']):,} training rows, {num_dev}"),
            *_teacher_facts(config, setup),
            *label_facts(task, examples, config.data),
            *cut_facts(task, setup.init_model.tokenizer, examples, rows, config.data, max_length),
            ("parameters", str(counts)),
            ("devices", setup.parallel.describe()),
            ("tokens per step", _tokens_per_step(config)),
            ("steps", f"{data.total_steps:,} ({data.total_steps / data.loader.steps_per_epoch:.1f} epochs)"),
            ("optimizer", describe_decay(_trained(params, setup.frozen), config.optimizer)),
        ]
    )


def _teacher_facts(config: FinetuneConfig, setup: Setup) -> list[tuple[str, str]]:
    """Returns the line on the teacher for the table; [] without one."""
    settings, taught = config.distillation, setup.taught
    if taught is None:
        return []
    more = len(taught) - taught.num_labelled
    unlabelled = f"; {more:,} more rows without labels" if more else ""
    heat = "" if setup.task.problem_type == "regression" else f", temperature {settings.temperature:g}"
    return [("teacher", f"{settings.teacher}, weight {settings.weight:g}{heat}{unlabelled}")]


def _tokens_per_step(config: FinetuneConfig) -> str:
    """Returns the cell "tokens per step" of the table."""
    training, length = config.training, config.data.max_length
    if training.tokens_per_batch is not None:
        return f"up to {training.tokens_per_batch:,}, in as many rows as fit"
    return f"up to {training.batch_size * length:,} ({training.batch_size} x {length}, padded to buckets)"


def _trained(params: Params, frozen: Callable[[ParameterPath], bool] | None) -> Params:
    flat = traverse_util.flatten_dict(params)
    kept = {path: leaf for path, leaf in flat.items() if frozen is None or not frozen(path)}
    return traverse_util.unflatten_dict(kept)


class BestCheckpoint(NamedTuple):
    """The best checkpoint of a run.

    Attributes:
        params: the model's parameters, on the host.
        lines: all evaluation lines of metrics.jsonl.
        divergence: a sentence if the training loss ended far above its start.
        dev_outputs: its outputs for dev if this process made its evaluation last and final predictions use the same
            settings; else None.
    """

    step: int
    params: Params
    counts: ParameterCounts
    lines: list[dict[str, Any]]
    dev_outputs: Outputs | None
    divergence: str | None


def curves_subject(config: FinetuneConfig, setup: Setup) -> Subject:
    """Returns title and baselines of the curves."""
    task = setup.task
    return _subject(config, task, task.baseline, task.baseline_scores(setup.dev.examples) if task.baseline else {})


def final_subject(config: FinetuneConfig, results: Mapping[str, Any]) -> Subject:
    """Returns title and baselines of the curves for the content of results.json, which may be empty."""
    task, baseline = make_task(config), results.get("baseline") or "baseline"
    subject = _subject(config, task, baseline, results.get(baseline, {}))
    return dataclasses.replace(subject, main_metric=results.get("main_metric", subject.main_metric))


def _subject(config: FinetuneConfig, task: Task, baseline: str, baselines: Mapping[str, float]) -> Subject:
    source = "random weights" if config.init == "none" else config.init
    return Subject(
        title=f"{task.name}, from {source} ({config.model.num_hidden_layers} layers of {config.model.hidden_size})",
        baseline=baseline,
        baselines=baselines,
        main_metric=task.main_metric,
        higher_is_better=task.higher_is_better,
    )


class Scores(NamedTuple):
    """Scores of the best checkpoint.

    Attributes:
        by_split: scores of each split with labels; of ``train`` instead of ``dev`` if there are no dev rows.
        tuned: fields of ``data`` that the task tuned on dev.
        collapsed: whether the predictions of the first split are degenerate.
        details: additional results by split with labels, for splits that have any.
        remarks: sentences that describe problems of the predictions of the first split.
    """

    by_split: dict[str, dict[str, float]]
    tuned: dict[str, Any]
    collapsed: bool
    details: dict[str, dict[str, Any]]
    remarks: list[str]


def write_predictions(
    run: RunFolder[FinetuneConfig], setup: Setup, evaluate: Evaluator, best: BestCheckpoint
) -> Scores:
    """Tunes the task on dev, and writes and scores the predictions of all splits except train.

    Without dev rows, the training rows are scored.
    """
    dev, config = setup.dev, run.config.data
    params, folder = setup.parallel.put_state(best.params), run.path / "predictions"
    dev_outputs = evaluate(params, dev)[0] if best.dev_outputs is None else best.dev_outputs
    task = setup.task.tune(dev_outputs, dev.features, dev.examples) if setup.has_dev else setup.task
    tuned = {name: value for name, value in vars(task.to_config(config)).items() if value != getattr(config, name)}
    by_split, details, collapsed, remarks = {}, {}, False, []
    for name, split in setup.splits.items():
        if name == "train":
            continue
        outputs, losses = (dev_outputs, {}) if name == "dev" else evaluate(params, split)
        predictions = task.predict(outputs, split.features, split.examples)
        is_written = run.is_writer and (name != "dev" or setup.has_dev)
        if is_written:
            task.write_predictions(folder, name, predictions, split.examples)
        if name == "dev":
            collapsed = task.is_degenerate(predictions, split.examples)
            remarks = task.remarks(predictions, split.examples)
            name = name if setup.has_dev else "train"
        if split.examples.labelled:
            by_split[name] = {**losses, **task.score(predictions, split.examples)}
            details[name] = task.details(predictions, split.examples)
            if (correct := reliability(task, predictions, split.examples)) is not None:
                details[name]["calibration"] = calibration(correct)._asdict()
            if is_written:
                task.write_details(folder, name, predictions, split.examples)
    return Scores(by_split, tuned, collapsed, {name: more for name, more in details.items() if more}, remarks)


def write_results(
    run: RunFolder[FinetuneConfig],
    setup: Setup,
    data: FinetuningData,
    best: BestCheckpoint,
    scores: Scores,
    start_time: float,
    times: RunTimes,
    log: Log,
) -> dict[str, Any]:
    """Writes results.json and returns its content.

    Args:
        start_time: start of the run, by `time.perf_counter`.
        times: time of the run by activity, which is logged.
    """
    task, config, dev = setup.task, run.config, setup.dev.examples
    teacher = config.distillation
    main = "dev" if setup.has_dev else "train"
    logged = next((scores_of_line(line) for line in best.lines if line["step"] == best.step), {})
    results = {
        "task": task.name,
        "init": config.init,
        **({"teacher": {"source": teacher.teacher, "checksum": teacher.checksum}} if teacher.is_used else {}),
        "seed": config.seed,
        "steps": best.lines[-1]["step"],
        "best_step": best.step,
        "parameters": best.counts.total,
        "trained_parameters": best.counts.trained,
        **{**scores.by_split, main: {**logged, **scores.by_split[main]}},
        "last": scores_of_line(best.lines[-1]),
        "baseline": task.baseline,
        **({task.baseline: task.baseline_scores(dev)} if task.baseline else {}),
        "main_metric": task.main_metric,
        "higher_is_better": task.higher_main_is_better,
        **({"metric_labels": dict(task.metric_labels)} if task.metric_labels else {}),
        "collapsed": scores.collapsed,
        **({"remarks": scores.remarks} if scores.remarks else {}),
        **({"skipped_rows": skipped} if (skipped := _skipped_rows(setup.splits)) else {}),
        **({"divergence": best.divergence} if best.divergence else {}),
        **({"tuned": scores.tuned} if scores.tuned else {}),
        **({"details": scores.details} if scores.details else {}),
        "sample_input": list(task.sample(dev)),
        "stopped_early": best.lines[-1]["step"] < data.total_steps,
        "seconds": round(time.perf_counter() - start_time, 1),
        "timing": log_times(times, log),
    }
    if run.is_writer:
        metrics_log.write_results(run.path, results)
    return results


def _skipped_rows(splits: Mapping[str, Split]) -> dict[str, int]:
    """Returns the number of rows of each split that were skipped because they had no text or no label.

    If dev is held out of train, its rows are counted for train.
    """
    counts: dict[str, int] = {}
    counted = set[str]()
    for name, split in splits.items():
        notes = {note for note in getattr(split.examples, "notes", ()) if isinstance(note, SkippedRows)} - counted
        counted |= notes
        if notes:
            counts[name] = sum(note.rows for note in notes)
    return counts


def predict_split(model: Pretrained, config: FinetuneConfig, name: str, folder: Path, log: Log) -> list[Path]:
    """Writes the prediction files of a split of a run's data in the run's format, and returns their paths.

    Raises:
        UserError: the split is missing or malformed, or the run has no dev rows.
    """
    task = model.require_task()
    splits = read_splits(task, config).examples
    if name == "dev":
        require_dev(splits, model.source)
    examples = splits[name]
    split = Split(examples, task.features(model.tokenizer, examples, config.data))
    outputs = run_outputs(model, config, split, log)
    return task.write_predictions(folder, name, task.predict(outputs, split.features, examples), examples)


def run_outputs(model: Pretrained, config: FinetuneConfig, split: Split, log: Log) -> Outputs:
    """Returns the outputs of each row of a split, computed as in the evaluations of the run.

    On the devices of the run they are identical to the run's, because batches, lengths and precision are the same.
    An engine other than JAX computes them as for any other inputs.

    Args:
        log: logs a message if the run's devices are absent, since the last digits may then differ.
    """
    task = model.require_task()
    if model.engine != "jax":
        return model.outputs(split.features)
    try:
        parallel = make_parallelism(config.training, config.model)
        parallel.check_batch("training.eval_batch_size", config.training.rows_per_evaluation)
        head = build_task_model(task, config)
    except UserError as error:
        log(f"computed on one device in another way, so that the last digits may differ: {error}")
        parallel = make_local_parallelism(local_devices()[:1])
        head = build_task_model(task, dataclasses.replace(config, training=TrainingConfig(dtype=config.training.dtype)))
    apply = make_apply(
        head, make_frozen_predicate(config.num_frozen_layers, config.num_feature_layers), TASK_KINDS[task.kind].forward
    )
    tokenizer = model.target_tokenizer or model.tokenizer
    _, evaluator = make_evaluators(task, apply, parallel, config, tokenizer)
    return evaluator(parallel.put_state(with_projection(model.params, model.pooling)), split)[0]
