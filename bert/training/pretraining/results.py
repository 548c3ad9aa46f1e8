"""Summary and results of a pretraining run: the table at its start, results.json and the curves."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert import metrics
from bert.config import PretrainConfig
from bert.config.run_file import load_run_config
from bert.data.pretraining.input_formats import INPUT_FORMATS
from bert.errors import Log, UserError, log_info
from bert.inference.pretrained import Pretrained
from bert.model.names import PROJECTIONS, pretraining_architecture
from bert.parallel.backends import Parallelism
from bert.runs import metrics_log
from bert.runs.checkpoint_directory import CheckpointDirectory, verify_manifest
from bert.runs.folder import RunFolder, read_budget
from bert.runs.plots import Bars, Subject, plot_curves
from bert.runs.report import log_table
from bert.training.loop import count_parameters
from bert.training.means import read_eval_metrics, scores_of_line
from bert.training.optimizer import describe_decay
from bert.training.pretraining.data import (
    PhaseData,
    PretrainingData,
    check_data_of_completed,
    predictable_counts,
)
from bert.training.pretraining.objectives import OBJECTIVES
from bert.training.step import TrainState
from bert.training.timing import RunTimes, log_times


def log_summary(params: Any, config: PretrainConfig, parallel: Parallelism, phases: Sequence[PhaseData]) -> None:
    """Logs the table of sizes before training."""
    examples = phases[0].examples
    corpus = {name: _describe_corpus(examples.counts, name) for name in ("train", "eval")}
    if config.data.streaming:
        corpus["train"] = f"streamed by {config.data.stream_readers} readers"
    log_table(
        [
            ("parameters", f"{count_parameters(params):,}"),
            ("devices", parallel.describe()),
            ("vocabulary", f"{config.model.vocab_size:,} tokens"),
            ("corpus", f"{corpus['train']} for training, {corpus['eval']} held out"),
            *examples.filter_lines(with_samples=False),
            ("fingerprint", examples.corpus[:16]),
            *(line for phase in phases for line in _describe_phase(phase, len(phases), config)),
            ("optimizer", describe_decay(params, config.optimizer)),
        ]
    )


def _describe_corpus(counts: Mapping[str, int], split: str) -> str:
    return f"{counts[f'{split}_documents']:,} documents, {counts[f'{split}_tokens']:,} tokens"


def _describe_phase(data: PhaseData, num_phases: int, config: PretrainConfig) -> list[tuple[str, str]]:
    """Returns the table entries of a phase; a single phase has no number."""
    phase = data.phase
    batch_size, length = data.loader.batch_size, phase.config.data.sequence_length
    num_steps = phase.end - phase.first
    train_rows, steps = "streamed", f"{num_steps:,}"
    if not data.is_streamed:
        num_rows = len(data.loader.rows)
        train_rows, steps = f"{num_rows:,} for training", f"{steps} ({num_steps * batch_size / num_rows:.1f} epochs)"
    rows = f"{train_rows}, {len(data.eval_rows):,} held out"
    tokens = f"{batch_size * length:,} ({batch_size} x {length})"
    if num_phases == 1:
        return [("rows", rows), ("tokens per step", tokens), ("steps", steps)]
    rate, predictions = phase.config.optimizer.learning_rate, phase.config.data.predictions_per_row
    predicted = "" if phase.config.training.objective == "clm" else f", up to {predictions} predicted a row"
    settings = "" if config.phases is None else config.phases[phase.number - 1].describe()
    return [
        (f"phase {phase.number}", f"steps {phase.first + 1:,} to {phase.end:,}: {steps}"),
        *([("  sets", settings)] if settings else []),
        ("  rows", rows),
        ("  tokens per step", f"{tokens}{predicted}, peak learning rate {rate:g}"),
    ]


def curves_subject(config: PretrainConfig, baselines: Mapping[str, Any] | None = None) -> Subject:
    """Returns title and baselines of the curves; the baselines are available at the end of a run."""
    rest = dict(baselines or {})
    objective = OBJECTIVES[config.training.objective]
    loss = objective.perplexity_loss
    unigram = rest.pop("unigram", {})
    scores = {f"{loss.removesuffix('loss')}{name}": unigram[name] for name in ("loss", "accuracy") if name in unigram}
    scores |= {name: unigram[name] for name in ("perplexity",) if name in unigram}
    scores |= {name.replace("_majority", ""): value for name, value in rest.items()}
    has_no_label = INPUT_FORMATS[config.data.input_format].metric is None and config.training.objective != "rtd"
    if has_no_label and config.distillation.teacher is None and not config.training.label_smoothing and loss in scores:
        scores["loss"] = scores[loss]
    model = config.model
    title = f"pretraining ({config.data.input_format}), {model.num_hidden_layers} layers of {model.hidden_size}"
    return Subject(
        title, baseline="word frequencies, majority class", baselines=scores, main_metric=objective.main_metric
    )


def final_subject(config: PretrainConfig, results: Mapping[str, Any]) -> Subject:
    """Returns the subject of the curves for the content of results.json, with bars if the encoder was transferred.

    Runs of earlier versions have one task, as a dictionary.
    """
    transfer = results.get("transfer")
    bars = transfer_bars([transfer] if isinstance(transfer, dict) else transfer) if transfer else None
    return dataclasses.replace(curves_subject(config, results.get("baselines")), bars=bars)


def unigram_loss(config: PretrainConfig, data: PretrainingData) -> tuple[str, float]:
    """Returns the name of the loss per predicted token, and its value for a prediction from token frequencies alone."""
    objective = OBJECTIVES[config.training.objective]
    counts = predictable_counts(data.phases[0].examples, data.tokenizer, objective.special_tokens)
    log_probabilities = metrics.unigram_log_probabilities(counts)
    return objective.perplexity_loss, -float(np.sum(np.exp(log_probabilities) * log_probabilities))


def remarks(name: str, loss: float | None, baselines: Mapping[str, Any], divergence: str | None) -> list[str]:
    """Returns warnings about a run that learned nothing.

    Args:
        name, loss: held-out loss per predicted token; None if it is not finite.
        baselines: baselines of results.json.
        divergence: a sentence if the training loss ended far above its start.
    """
    sentences = [] if divergence is None else [divergence]
    expected = baselines["unigram"].get("loss")
    if expected is not None and (loss is None or not loss < expected):
        sentences.append(
            f"nothing was learned: held-out {name} is {math.nan if loss is None else loss:.4g}, and token frequencies "
            f"alone have {expected:.4g}; train longer, or with another optimizer.learning_rate, before starting from it"
        )
    return sentences


EXPORT = "export"
"""Folder of a run with ``transfer`` that holds the model for Hugging Face transformers."""


def write_results(
    run: RunFolder[PretrainConfig],
    data: PretrainingData,
    state: TrainState,
    divergence: str | None,
    start_time: float,
    times: RunTimes,
) -> dict[str, Any]:
    """Writes results.json and the final curves.

    Args:
        state: the last state, on the host.
        divergence: a sentence if the training loss ended far above its start.
        start_time: start of the run, by `time.perf_counter`.
        times: time of the run by activity.

    Returns:
        The content of results.json.
    """
    config, step = run.config.distillation, int(state.step)
    # A callback may have ended the run early.
    last = next((phase for phase in data.phases if step <= phase.phase.end), data.phases[-1])
    sizes = last.phase.config.model
    params = {name: state.params[name] for name in state.params if name != PROJECTIONS}
    model = Pretrained(
        config=sizes,
        params=params,
        tokenizer=data.tokenizer,
        architecture=pretraining_architecture(set(params), sizes),
        step=step,
        source=str(run.path),
    )
    objective, input_format = OBJECTIVES[run.config.training.objective], INPUT_FORMATS[run.config.data.input_format]
    counts = predictable_counts(last.examples, data.tokenizer, objective.special_tokens)
    scores = scores_of_line(read_eval_metrics(run.path)[-1])
    baselines = objective.baselines(last.eval_batches(), input_format, counts, scores)
    loss = scores[objective.perplexity_loss]
    sentences = remarks(objective.perplexity_loss, loss, baselines, divergence)
    if run.config.transfer is not None and loss is not None:
        _export(model, run.path / EXPORT)
    results: dict[str, Any] = {
        "steps": step,
        **({"teacher": {"source": config.teacher, "checksum": config.checksum}} if config.teacher else {}),
        "eval": scores,
        "corpus": {**_counts_of_text(last), "fingerprint": last.examples.corpus, **_filtered_documents(last)},
        "baselines": baselines,
        **({"remarks": sentences} if sentences else {}),
        # A model with weights that are not finite predicts nothing.
        objective.examples_name: [] if loss is None else objective.examples(model, last.eval_rows),
        "stopped_early": step < (read_budget(run.path).get("steps") or data.total_steps),
        "seconds": round(time.perf_counter() - start_time, 1),
        "timing": log_times(times, log_info),
    }
    results |= best_checkpoint(run.path)
    metrics_log.write_results(run.path, results)
    plot_curves(run.path, curves_subject(run.config, results["baselines"]))
    return dict(metrics_log.to_jsonable(results))


def best_checkpoint(run: Path) -> dict[str, Any]:
    """Returns the entry of results.json that names the checkpoint with the best scores on labelled tasks, if any."""
    step = metrics_log.best_transfer_step(run)
    return {} if step is None else {"best_step": step}


def read_completed(run: RunFolder[PretrainConfig], log: Log) -> dict[str, Any] | None:
    """Returns the content of results.json of a run that needs no more training, else None.

    Raises:
        UserError: the run was trained on other data.
    """
    results = None
    # With a teacher, the whole start is repeated, which compares the teacher's weights.
    if run.resumed and run.previous is None and run.config.distillation.teacher is None:
        with contextlib.suppress(UserError):  # a damaged file is written again
            results = metrics_log.read_results(run.path)
    if results is None or results.get("stopped_early", True):  # the key is missing in earlier versions
        return None
    if run.config.transfer != getattr(load_run_config(run.path), "transfer", None):
        return None
    if run.config.transfer is not None and "transfer" not in results and not (run.path / EXPORT).is_dir():
        return None
    checkpoint = CheckpointDirectory(run.checkpoints).find().get(results["steps"])
    if checkpoint is None or verify_manifest(checkpoint) or not (run.path / "tokenizer.json").is_file():
        return None
    check_data_of_completed(run, log)
    log(f"{run.config.output_dir} has ended before")
    return results


def _export(model: Pretrained, folder: Path) -> None:
    """Writes the model for Hugging Face transformers; logs why, if transformers has no such model."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        model.save(folder, log=lambda message: None)
    except UserError as error:
        log_info(f"{folder.name} is not written: {error}")


def _counts_of_text(data: PhaseData) -> dict[str, int]:
    """Returns the counts of the built text; for a stream, these cover only its first documents."""
    counts = data.examples.counts
    if not data.is_streamed:
        return counts
    return {name: count for name, count in counts.items() if not name.startswith("train_")}


def _filtered_documents(data: PhaseData) -> dict[str, Any]:
    """Returns the number of documents that each filter left out, if there are filters."""
    filtered = {name: report["documents"] for name, report in data.examples.filtered.items()}
    return {"filtered": filtered} if filtered else {}


def add_transfer(
    run: RunFolder[PretrainConfig],
    results: Mapping[str, Any],
    transfer: Sequence[Mapping[str, Any]],
    start_time: float,
) -> dict[str, Any]:
    """Adds the scores of `measure_transfer` to results.json and to the curves, and returns the new content.

    Args:
        start_time: start of `measure_transfer`, by `time.perf_counter`. Its duration is added to ``seconds``.
    """
    seconds = round(results["seconds"] + time.perf_counter() - start_time, 1)
    results = {**results, "transfer": transfer, "seconds": seconds, **best_checkpoint(run.path)}
    metrics_log.write_results(run.path, results)
    plot_curves(run.path, final_subject(run.config, results))
    return dict(metrics_log.to_jsonable(results))


COMPARED = ("pretrained", "random_weights", "bag_of_words")
"""The scores of a task that the table and the picture of ``transfer`` compare."""


def transfer_bars(transfer: Sequence[Mapping[str, Any]]) -> Bars:
    """Returns the bars of each task."""
    groups = {}
    for task in transfer:
        name = f"{task['task'].replace('_', ' ')}\n({task['metric']}, {task['train_rows']:,} labels)"
        groups[name] = {
            start: (task[start]["mean"], task[start]["standard_deviation"]) for start in COMPARED if start in task
        }
    return Bars("fine-tuned on held-out modules", groups)
