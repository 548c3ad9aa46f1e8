"""One fine-tuning run under several seeds, with a sub-folder per seed and aggregated results."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from bert.config import FinetuneConfig
from bert.errors import log_info, require
from bert.parallel import multihost
from bert.runs import metrics_log
from bert.runs.environment import record_environment
from bert.runs.folder import RunFolder, open_run
from bert.runs.loggers import Callback, RunCallbacks
from bert.training.finetuning.run import finetune
from bert.training.initialization import Log
from bert.training.run_length import discard_results


def finetune_seeds(
    run: RunFolder[FinetuneConfig], log: Log = log_info, callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Runs or resumes ``num_seeds`` runs in seed-0, seed-1, ..., and returns the content of the common results.json.

    Completed runs are not repeated.

    Raises:
        UserError: see `bert.training.finetuning.finetune`; or a sub-folder holds another run.
        Interrupted: a signal was received; the state of the current seed is saved.
    """
    began, log = time.perf_counter(), multihost.main_process_only(log)
    if run.previous is not None and run.is_writer:
        discard_results(run)
    run = run.save_config(run.config)
    record_environment(run)
    runs = []
    data = run.config.data
    if data.sample_seed is None:  # all seeds are scored on the same dev rows
        data = dataclasses.replace(data, sample_seed=run.config.seed)
    for seed in range(run.config.seed, run.config.seed + run.config.num_seeds):
        folder = os.path.join(require(run.config.output_dir, "output_dir"), f"seed-{seed}")
        config = dataclasses.replace(run.config, seed=seed, num_seeds=1, output_dir=folder, data=data)
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
    results = {**aggregate_seeds(runs), "seconds": round(time.perf_counter() - began, 1)}
    if run.is_writer:
        metrics_log.write_results(run.path, results)
    return results


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
        "best_seed": max(runs, key=lambda one: _rank(one["dev"][main], higher))["seed"],
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
