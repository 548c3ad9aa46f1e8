"""Transfer of a pretrained encoder to small labelled tasks, compared with random weights and bags of words."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from bert.config import FinetuneConfig, PretrainConfig, recipe_folder, recipe_names
from bert.config.data import DOCSTRINGS_PREFIX
from bert.config.sources import with_micro_batches
from bert.config.yaml_io import load_config
from bert.errors import Log, UserError, require
from bert.files import atomic_write, load_json
from bert.parallel import multihost
from bert.runs.folder import TRANSFER, RunFolder
from bert.runs.report import Progress
from bert.tasks import make_task
from bert.tasks.base import Task
from bert.tasks.docstring_tasks import DOCSTRING_TASKS, write_docstring_task
from bert.tasks.sequence_classification import lexical_baseline
from bert.tasks.splits import read_splits, require_dev
from bert.training.finetuning.starts import PRETRAINED, RANDOM, StartComparison, require_supported

BAG_OF_WORDS = "bag_of_words"

STARTS = (PRETRAINED, RANDOM)

SCORES_FILE = "scores.json"

MAX_NGRAMS = (1, 2)
"""Numbers of adjacent words that the bag of words of a classification task counts; the best one is reported."""


def transfer_names(config: PretrainConfig) -> list[str]:
    """Returns the recipes and files of ``transfer``.

    Raises:
        UserError: two files have the same name, by which their scores would be confused.
    """
    names = [] if config.transfer is None else [name.strip() for name in config.transfer.split(",")]
    tasks: dict[str, str] = {}
    for name in names:
        if (other := tasks.setdefault(Path(name).stem, name)) != name:
            raise UserError(
                f"transfer names {other} and {name}, whose scores have the same name: rename one of the two"
            )
    return names


def transfer_config(config: PretrainConfig, name: str) -> FinetuneConfig:
    """Returns the configuration of a fine-tuning run of ``transfer``, which starts from the pretrained encoder.

    Raises:
        UserError: the recipe or file does not exist, or contains an invalid value.
    """
    run = require(config.output_dir, "output_dir")
    path = recipe_folder() / f"{name}.yaml" if name in recipe_names() else Path(name)
    recipe = with_micro_batches(load_config(FinetuneConfig, path))
    folder = os.path.join(run, TRANSFER, path.stem)
    if recipe.data.dir is None and recipe.data.train is None:
        if name not in DOCSTRING_TASKS:
            raise UserError(
                f"transfer {name} names no data: copy {path} to a file of yours, set data.dir in it, and pass that file"
            )
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, dir=folder))
    if recipe.data.sample_seed is None:  # the same rows for all seeds and baselines
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, sample_seed=recipe.seed))
    recipe = dataclasses.replace(recipe, init=run, output_dir=folder)
    recipe.check()
    if recipe.data.max_length > config.model.max_position_embeddings:
        raise UserError(
            f"model.max_position_embeddings is {config.model.max_position_embeddings}, and transfer {name} has rows of "
            f"{recipe.data.max_length} tokens: lower data.max_length in a copy of {path}, or use a model with more"
        )
    return recipe


def check_transfer(config: PretrainConfig) -> None:
    """Raises UserError if a recipe is invalid or its files cannot be read."""
    for name in transfer_names(config):
        check_recipe(transfer_config(config, name), name, selects_best=config.transfer_every is not None)


def check_recipe(recipe: FinetuneConfig, name: str, selects_best: bool) -> None:
    """Raises UserError if a recipe cannot be compared, or if its files cannot be read.

    Args:
        selects_best: whether the scores select a checkpoint.
    """
    key = f"transfer {name}"
    require_supported(recipe, key)
    task = make_task(recipe)
    if selects_best and not task.higher_main_is_better:
        raise UserError(
            f"{key} has the score {task.main_metric}, of which lower is better, so it cannot select a checkpoint: "
            "remove this task"
        )
    if name not in DOCSTRING_TASKS and not (recipe.data.dir or "").startswith(DOCSTRINGS_PREFIX):
        require_dev(read_splits(task, recipe).examples, key)


def measure_transfer(run: RunFolder[PretrainConfig], step: int, log: Log) -> list[dict[str, Any]]:
    """Fine-tunes the run's model, and random weights of the same sizes, on each task of ``transfer``.

    The scores of a task are kept in its folder, and are not measured again for the same step and recipe.

    Args:
        step: the last step of the run.

    Returns:
        For each task its name, kind, metric and numbers of rows, and for each start and baseline ``mean``,
        ``standard_deviation`` (None for a single score) and ``scores``, as shares of a perfect score.

    Raises:
        UserError: the data of a recipe cannot be used.
        Interrupted: a signal was received.
    """
    recipes = {name: transfer_config(run.config, name) for name in transfer_names(run.config)}
    scores = {name: _read_scores(run, name, step, recipe) for name, recipe in recipes.items()}
    missing = {name: recipe for name, recipe in recipes.items() if scores[name] is None}
    if missing:
        tasks = ", ".join(Path(name).stem for name in missing)
        log(f"fine-tunes the encoder, and random weights for comparison, on {tasks}")
        total = sum(len(STARTS) * recipe.num_seeds for recipe in missing.values())
        with _ModelProgress(Progress(total, label="fine-tuning", unit="model") if run.is_writer else None) as progress:
            for name, recipe in missing.items():
                scores[name] = measured = _measure(run, recipe, name, progress)
                _save_scores(run, name, step, recipe, measured)
    return [dict(require(of_task, "scores")) for of_task in scores.values()]


class _ModelProgress:
    """Progress over all models that are fine-tuned; shows nothing on hosts that do not write."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._done = progress, 0

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.__enter__()
            self._progress.update(0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.__exit__(*error)

    def describe(self, task: str, work: str) -> None:
        """Sets the current work on a task."""
        if self._progress is not None:
            self._progress.set_label(f"{task}, {work.replace('_', ' ')}")
        self.update(0)

    def update(self, share: float) -> None:
        """Records the completed share of the current model."""
        if self._progress is not None:
            self._progress.update(self._done + share)

    def finish_model(self) -> None:
        """Counts the current model as completed."""
        self._done += 1
        self.update(0)


def _scores_file(run: RunFolder[PretrainConfig], name: str) -> Path:
    return run.path / TRANSFER / Path(name).stem / SCORES_FILE


def recipe_settings(recipe: FinetuneConfig) -> dict[str, Any]:
    """Returns the settings of a recipe of `transfer_config`, without folders of the run, which may be moved."""
    data = dataclasses.replace(recipe.data, dir=None) if recipe.data.dir == recipe.output_dir else recipe.data
    settings = dataclasses.asdict(dataclasses.replace(recipe, data=data, init=None, output_dir=None))
    return dict(load_json(json.dumps(settings)))


def _key_of_scores(step: int, recipe: FinetuneConfig) -> dict[str, Any]:
    """Returns what the scores of a task depend on, as in its file."""
    return {"step": step, "recipe": recipe_settings(recipe)}


def _read_scores(run: RunFolder[PretrainConfig], name: str, step: int, recipe: FinetuneConfig) -> dict[str, Any] | None:
    """Returns the scores in the folder of a task; None if they are of another step or recipe, or missing."""
    path, key = _scores_file(run, name), _key_of_scores(step, recipe)
    record = multihost.broadcast_from_main(lambda: load_json(path.read_bytes()) if path.is_file() else {})
    return record["scores"] if {name: record.get(name) for name in key} == key else None


def _save_scores(
    run: RunFolder[PretrainConfig], name: str, step: int, recipe: FinetuneConfig, scores: Mapping[str, Any]
) -> None:
    if run.is_writer:
        path = _scores_file(run, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps({**_key_of_scores(step, recipe), "scores": scores}), encoding="utf-8")


def _measure(
    run: RunFolder[PretrainConfig], recipe: FinetuneConfig, name: str, progress: _ModelProgress
) -> dict[str, Any]:
    stem = Path(name).stem
    progress.describe(stem, "rows")
    comparison = compare_starts(recipe, name, run.is_writer, progress.update)
    task, splits = comparison.setup.task, comparison.setup.splits
    train, dev = splits["train"].examples, splits["dev"].examples
    summary = partial(summarize_scores, task)
    results: dict[str, Any] = {"task": stem, "kind": task.kind, "metric": task.main_metric}
    results |= {"train_rows": len(train), "dev_rows": len(dev)}
    for start in STARTS:
        progress.describe(stem, start)
        scores = []
        for score in comparison.scores(start):
            scores.append(score)
            progress.finish_model()
        results[start] = summary(scores)
    progress.describe(stem, BAG_OF_WORDS)
    baselines = [scored for size in MAX_NGRAMS if (scored := lexical_baseline(task, train, dev, size))]
    if baselines:
        best = max(baselines, key=lambda scored: scored[1][task.main_metric])
        results[BAG_OF_WORDS] = {**summary([best[1][task.main_metric]]), "model": best[0]}
    if task.baseline:
        results[task.baseline] = summary([task.baseline_scores(dev)[task.main_metric]])
    return results


def compare_starts(
    recipe: FinetuneConfig, name: str, is_writer: bool, on_progress: Callable[[float], None] = lambda share: None
) -> StartComparison:
    """Returns the comparison of a task, after the main process has written the rows of a built-in task."""
    if name in DOCSTRING_TASKS and is_writer:
        write_docstring_task(name, Path(recipe.data.dir or ""))
    multihost.broadcast_from_main(lambda: None)  # the files are written
    return StartComparison(recipe, lambda message: None, on_progress)


def summarize_scores(task: Task, scores: Iterable[float]) -> dict[str, Any]:
    """Returns ``mean``, ``standard_deviation`` and ``scores``, as shares of a perfect score."""
    shares = [score / task.best_score for score in scores]
    deviation = statistics.stdev(shares) if len(shares) > 1 else None
    return {"mean": statistics.fmean(shares), "standard_deviation": deviation, "scores": shares}
