"""Scores of a run's checkpoints on labelled tasks, measured by the run itself or by a process that follows it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.run_file import load_run_config
from bert.errors import LOGGER, Log, UserError, require
from bert.files import exclusive_lock, is_locked
from bert.parallel import multihost
from bert.runs.checkpoint_directory import CheckpointDirectory, has_params_only, verify_manifest
from bert.runs.folder import RunFolder
from bert.runs.metrics_log import (
    TRANSFER_SCORES,
    append_transfer_score,
    best_transfer_step,
    mean_transfer_scores,
    read_metrics,
    read_results,
    read_transfer_scores,
    write_results,
)
from bert.runs.plots import plot_curves
from bert.training.finetuning.starts import PRETRAINED
from bert.training.pretraining.results import best_checkpoint, final_subject
from bert.training.pretraining.transfer import (
    check_recipe,
    compare_starts,
    recipe_settings,
    summarize_scores,
    transfer_config,
    transfer_names,
)

POLL_SECONDS = 5.0
"""Seconds between two looks at the folder of a run that is followed."""


class CheckpointScores:
    """Fine-tunes from checkpoints of a run on labelled tasks, each once, and keeps the best checkpoint.

    Scores are appended to transfer.jsonl. Nothing else is saved, so an interrupted fine-tuning starts again.
    """

    def __init__(
        self,
        run: Path,
        recipes: Mapping[str, FinetuneConfig],
        max_to_keep: int | None,
        log: Log,
        is_writer: bool = True,
    ) -> None:
        """Initializes the scores.

        Args:
            recipes: configuration of the fine-tuning on each task, by the name of its recipe or file. ``init`` is
                replaced by the checkpoint.
            max_to_keep: number of newest checkpoints that the run keeps.
        """
        self._run, self._recipes, self._log, self._is_writer = run, recipes, log, is_writer
        self._directory = CheckpointDirectory(run / "checkpoints", max_to_keep)

    @classmethod
    def from_run(cls, run: RunFolder[PretrainConfig], log: Log) -> CheckpointScores:
        """Returns the scores of ``transfer`` in the process that trains."""
        recipes = {name: transfer_config(run.config, name) for name in transfer_names(run.config)}
        return cls(run.path, recipes, run.config.training.max_to_keep, log, run.is_writer)

    def missing(self, step: int) -> list[str]:
        """Returns the recipes that have no score of a checkpoint."""
        lines = multihost.broadcast_from_main(partial(read_metrics, self._run, TRANSFER_SCORES))
        known = {(line["step"], line.get("task"), line.get("recipe")) for line in lines}
        keys = {name: (step, Path(name).stem, _digest(recipe)) for name, recipe in self._recipes.items()}
        return [name for name, key in keys.items() if key not in known]

    def measure(self, step: int) -> None:
        """Fine-tunes from a checkpoint on each task that has no score of it.

        Raises:
            UserError: the checkpoint or the data of a task cannot be used.
            Interrupted: a signal was received.
        """
        missing = self.missing(step)
        for name in missing:
            recipe = dataclasses.replace(self._recipes[name], init=f"{self._run}@{step}")
            comparison = compare_starts(recipe, name, self._is_writer)
            task = comparison.setup.task
            summary = summarize_scores(task, comparison.scores(PRETRAINED))
            self._log(f"step {step:,} fine-tuned on {Path(name).stem}: {task.main_metric} {summary['mean']:.4f}")
            self._add(step, name, {"kind": task.kind, "metric": task.main_metric, **summary})
        if missing and self._is_writer:
            self.protect_best()

    def add_last(self, step: int, transfer: Sequence[Mapping[str, Any]]) -> None:
        """Adds the scores of the last step, which ``transfer`` compares with other starts, and keeps the best one."""
        missing = self.missing(step)
        for name, task in zip(self._recipes, transfer, strict=True):
            if name in missing:
                self._add(step, name, {"kind": task["kind"], "metric": task["metric"], **task[PRETRAINED]})
        if self._is_writer:
            self.protect_best()
            self.thin_out()

    def _add(self, step: int, name: str, scores: Mapping[str, Any]) -> None:
        if self._is_writer:
            line = {"step": step, "task": Path(name).stem, **scores, "recipe": _digest(self._recipes[name])}
            append_transfer_score(self._run, {**line, "tasks": self._tasks})

    @property
    def _tasks(self) -> list[str]:
        return [Path(name).stem for name in self._recipes]

    def protect_best(self) -> None:
        """Keeps the checkpoint that is best on the tasks of the recipes, regardless of its age."""
        lines = [line for line in read_metrics(self._run, TRANSFER_SCORES) if line.get("task") in self._tasks]
        if lines and lines[-1].get("tasks") != self._tasks:
            # The tasks changed and no score was missing: a repeated line declares the new tasks.
            append_transfer_score(self._run, {**lines[-1], "tasks": self._tasks})
        best = best_transfer_step(self._run)
        if best in self._directory.steps() and best != self._directory.best:
            self._directory.set_best(best)

    def thin_out(self) -> None:
        """Deletes checkpoints that need not be kept. Only the process that holds the lock of the run may call it."""
        if steps := self._directory.steps():
            self._directory.apply_retention(steps[-1])


def _digest(recipe: FinetuneConfig) -> str:
    return hashlib.blake2b(json.dumps(recipe_settings(recipe)).encode(), digest_size=8).hexdigest()


def _pause() -> None:
    time.sleep(POLL_SECONDS)


def follow(
    run: Path, recipes: Mapping[str, FinetuneConfig], log: Log, wait: Callable[[], None] = _pause
) -> list[dict[str, Any]]:
    """Scores each checkpoint of a run, until no process trains the run and all of its checkpoints are scored.

    A checkpoint that is deleted before its turn is left out. The best one is kept, and results.json names it.

    Args:
        recipes: see `CheckpointScores`.
        wait: called if there is nothing to do.

    Returns:
        The lines of transfer.jsonl.

    Raises:
        UserError: the folder holds no pretraining run, or a recipe or its data cannot be used.
        Interrupted: a signal was received.
    """
    config = read_config(run)
    for name, recipe in recipes.items():
        _check_length(recipe, name, config)
        check_recipe(recipe, name, selects_best=True)
    scores = CheckpointScores(run, recipes, config.training.max_to_keep, log)
    directory, damaged = CheckpointDirectory(run / "checkpoints"), set[int]()
    directory.path.mkdir(exist_ok=True)
    with exclusive_lock(directory.path):  # a second process would measure the same scores
        while True:
            is_training = is_locked(run)  # before the checkpoints are listed, so that the last one is not missed
            if is_training is None:
                is_training = read_results(run) is None
            waiting = [step for step in directory.steps() if step not in damaged and scores.missing(step)]
            if waiting:
                damaged |= _measure_held(scores, directory, waiting[0])
                plot_curves(run, final_subject(config, read_results(run) or {}))
            elif is_training:
                wait()
            else:
                break
        directory.release()
        _finish(run, scores, config)
    return read_transfer_scores(run)


def _measure_held(scores: CheckpointScores, directory: CheckpointDirectory, step: int) -> set[int]:
    """Scores a checkpoint that the training process may want to delete meanwhile. Returns it if it is damaged."""
    directory.hold(step)
    before = directory.find().get(step)
    if before is None:
        return set()
    is_reduced = has_params_only(before)
    try:
        scores.measure(step)
    except UserError:
        path = directory.find().get(step)
        if path is None or has_params_only(path) != is_reduced:
            return set()  # deleted before it was held, or reduced to its parameters while it was read
        if not (problems := verify_manifest(path)):
            raise
        LOGGER.warning(f"checkpoint {path} is damaged: {problems[0]}; it is not scored")
        return {step}
    return set()


def _finish(run: Path, scores: CheckpointScores, config: PretrainConfig) -> None:
    """Names the best checkpoint in results.json, and deletes the one that was the best before."""
    with exclusive_lock(run):
        scores.protect_best()
        scores.thin_out()
        if (results := read_results(run)) is None:
            LOGGER.info(f"no process trains {run}, which has not ended: resume it, then repeat this command")
            return
        write_results(run, results | best_checkpoint(run))
        plot_curves(run, final_subject(config, results))


def read_config(run: Path) -> PretrainConfig:
    """Returns the configuration of a run to follow. Raises UserError if the folder holds no pretraining run."""
    if not (run / "config.yaml").is_file():
        problem = "holds no run (no config.yaml)" if run.is_dir() else "is not a folder"
        raise UserError(f"command line: --follow {run} {problem}: name the folder of a pretraining run")
    config = load_run_config(run)
    if not isinstance(config, PretrainConfig):
        raise UserError(f"command line: --follow {run} holds a fine-tuning run: name the folder of a pretraining run")
    return config


def _check_length(recipe: FinetuneConfig, name: str, config: PretrainConfig) -> None:
    positions, length = config.model.max_position_embeddings, recipe.data.max_length
    if length > positions:
        raise UserError(
            f"{name} has rows of {length} tokens, but the model of {require(config.output_dir, 'output_dir')} has "
            f"{positions} positions: pass --data.max_length {positions}"
        )


def score_rows(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Returns the rows of a table of the lines of transfer.jsonl, times 100: one per checkpoint, the best marked."""
    tasks, means = list(dict.fromkeys(line["task"] for line in lines)), mean_transfer_scores(lines)
    best = max(means, key=means.__getitem__, default=None)
    rows: list[tuple[str, ...]] = [("step", *tasks, "mean", "")]
    for step in sorted({line["step"] for line in lines}):
        own = {line["task"]: line["mean"] for line in lines if line["step"] == step}
        values = [own.get(task) for task in tasks] + [means.get(step)]
        texts = ["-" if value is None else f"{100 * value:.1f}" for value in values]
        rows.append((f"{step:,}", *texts, "best" if step == best else ""))
    return rows
