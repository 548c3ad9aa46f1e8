"""Transfer of a pretrained encoder to a small labelled task, compared with random weights and other baselines."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bert.config import FinetuneConfig, PretrainConfig, recipe_folder, recipe_names
from bert.config.data import DOCSTRINGS_PREFIX
from bert.config.sources import with_micro_batches
from bert.config.yaml_io import load_config
from bert.errors import UserError, require
from bert.parallel import multihost
from bert.runs import metrics_log
from bert.runs.folder import TRANSFER, RunFolder, has_ended, open_run
from bert.runs.loggers import RunCallbacks
from bert.tasks import make_task
from bert.tasks.sequence_classification import lexical_baseline
from bert.tasks.splits import read_splits
from bert.training.finetuning.run import finetune, finetune_seeds
from bert.training.initialization import Log

PRETRAINED, RANDOM = "pretrained", "random_weights"


def transfer_config(config: PretrainConfig) -> FinetuneConfig:
    """Returns the configuration of the fine-tuning run of ``transfer``, which starts from the pretrained encoder.

    Raises:
        UserError: the recipe or file does not exist, or contains an invalid value.
    """
    name, run = require(config.transfer, "transfer"), require(config.output_dir, "output_dir")
    path = recipe_folder() / f"{name}.yaml" if name in recipe_names() else Path(name)
    recipe = with_micro_batches(load_config(FinetuneConfig, path))
    if recipe.data.dir is None and recipe.data.train is None:
        raise UserError(
            f"transfer {name} names no data: copy {path} to a file of yours, set data.dir in it, and pass that file"
        )
    recipe = dataclasses.replace(recipe, init=run, output_dir=os.path.join(run, TRANSFER, PRETRAINED))
    recipe.check()
    make_task(recipe)
    if recipe.data.max_length > config.model.max_position_embeddings:
        raise UserError(
            f"model.max_position_embeddings is {config.model.max_position_embeddings}, and transfer {name} has rows of "
            f"{recipe.data.max_length} tokens (data.max_length): enlarge the former, or set transfer to null"
        )
    return recipe


def check_transfer(config: PretrainConfig) -> None:
    """Raises UserError if a recipe is invalid or its files cannot be read."""
    recipe = transfer_config(config)
    if not (recipe.data.dir or "").startswith(DOCSTRINGS_PREFIX):
        read_splits(make_task(recipe), recipe)


def measure_transfer(run: RunFolder[PretrainConfig], log: Log) -> dict[str, Any]:
    """Fine-tunes the run's model, and random weights of the same sizes, and returns their scores on dev.

    Completed runs are not repeated.

    Returns:
        Task, metric and numbers of rows; for each encoder and baseline ``mean``, ``standard_deviation`` (None for a
        single score) and ``scores``.

    Raises:
        UserError: the recipe's data cannot be used.
        Interrupted: a signal was received; the state of the current fine-tuning run is saved.
    """
    recipe = transfer_config(run.config)
    if recipe.data.sample_seed is None:  # the same rows for all seeds and baselines
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, sample_seed=recipe.seed))
    splits = read_splits(make_task(recipe), recipe)
    task, train, dev = splits.task, splits.examples["train"], splits.examples["dev"]
    folder = os.path.join(require(run.config.output_dir, "output_dir"), TRANSFER, RANDOM)
    random = dataclasses.replace(recipe, init="none", architecture_from=recipe.init, output_dir=folder)
    results: dict[str, Any] = {"task": task.name, "metric": task.main_metric}
    results |= {"train_rows": len(train), "dev_rows": len(dev)}
    for name, config in ((PRETRAINED, recipe), (RANDOM, random)):
        log(f"transfer: {task.name} from {name.replace('_', ' ')}, {config.num_seeds} seeds on {len(train):,} rows")
        results[name] = _summarize(_finetune(config, run))
    if lexical := lexical_baseline(task, train, dev):
        results[lexical[0]] = _summarize([lexical[1][task.main_metric]])
    if task.baseline:
        results[task.baseline] = _summarize([task.baseline_scores(dev)[task.main_metric]])
    return results


def _finetune(config: FinetuneConfig, within: RunFolder[PretrainConfig]) -> list[float]:
    """Returns the main metric of each seed. Output of the runs is appended to log.txt."""
    log_file = within.path / TRANSFER / "log.txt"
    log_file.parent.mkdir(exist_ok=True)
    with (
        open_run(config, within.mirror) as run,
        open(log_file, "a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
    ):
        if run.resumed and multihost.broadcast_from_main(partial(has_ended, run)):
            results = multihost.broadcast_from_main(lambda: metrics_log.read_results(run.path))
        elif config.num_seeds > 1:
            results = finetune_seeds(run)
        else:
            with RunCallbacks(run) as ending:
                results = ending.results = finetune(run, callbacks=ending.callbacks)
    return [one["dev"][results["main_metric"]] for one in results.get("runs", [results])]


def _summarize(scores: list[float]) -> Mapping[str, Any]:
    deviation = statistics.stdev(scores) if len(scores) > 1 else None
    return {"mean": statistics.fmean(scores), "standard_deviation": deviation, "scores": scores}
