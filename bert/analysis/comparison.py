"""Comparison of several runs: the settings that differ, the final scores, the curves."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert import metrics
from bert.config import FinetuneConfig, PretrainConfig
from bert.config.data import FILTER_KEYS, HELD_OUT_KEYS
from bert.config.phases import PhaseConfig, held_out_data
from bert.config.run_file import check_vocabulary, flatten, load_run_config
from bert.errors import LOGGER, UserError, format_number, quoted
from bert.runs.folder import KINDS
from bert.runs.metrics_log import (
    best_transfer_step,
    read_metrics,
    read_results,
    read_transfer_scores,
    scored_splits,
)
from bert.runs.plots import RunCurves, Subject, read_curves
from bert.training.finetuning.results import final_subject
from bert.training.pretraining.results import curves_subject

Rows = list[tuple[str, ...]]

BEST_STEP = "best checkpoint, step"

EVALUATION_KEYS: dict[type, tuple[str, ...]] = {
    PretrainConfig: (*("data.eval", "data.seed", "training.objective"), *(f"data.{name}" for name in HELD_OUT_KEYS)),
    FinetuneConfig: ("task", "data.dir", "data.dev", "data.dev_fraction", "data.max_dev_samples"),
}
"""Settings that determine the evaluation rows, except row lengths, vocabulary, and shares of training rows."""


@dataclass(frozen=True)
class ComparedRun:
    """A run, which may be unfinished.

    Attributes:
        lines: lines of metrics.jsonl for each seed, and in pretraining the scores of checkpoints (`read_curves`).
        results: content of results.json for each seed that has ended.
    """

    path: Path
    config: PretrainConfig | FinetuneConfig
    lines: list[list[dict[str, Any]]]
    results: list[dict[str, Any]]
    num_seeds: int

    @property
    def settings(self) -> dict[str, Any]:
        """The values of config.yaml by dotted key, without output_dir."""
        values = flatten(dataclasses.asdict(self.config))
        del values["output_dir"]
        return values

    def subject(self) -> Subject:
        """Returns title, main metric and baselines of the curves."""
        results = self.results[0] if self.results else {}
        if isinstance(self.config, PretrainConfig):
            return curves_subject(self.config, results.get("baselines"))
        return final_subject(self.config, results)

    def state(self) -> str:
        """Returns the last evaluated step, and the progress of an unfinished run."""
        last = [int(lines[-1]["step"]) for lines in map(_evaluations, self.lines) if lines]
        if len(self.results) == self.num_seeds:
            return f"{max(last):,}" if last else "ended"
        progress = f"step {max(last):,}" if last else "no evaluation yet"
        seeds = "" if self.num_seeds == 1 else f", {len(self.results)} of {self.num_seeds} seeds"
        return f"unfinished ({progress}{seeds})"

    def scores(self) -> dict[str, list[float]]:
        """Returns each seed's final scores by name, or the scores of the last evaluations if no seed has ended."""
        try:
            if self.results:
                scores = _by_name([_final_scores(results) for results in self.results])
                scores |= _transfer_scores(self.results[0])
            else:
                name = "eval" if isinstance(self.config, PretrainConfig) else "dev"
                scores = _by_name([_named(name, lines[-1]) for lines in map(_evaluations, self.lines) if lines])
            wrong = [name for name, values in scores.items() if not all(isinstance(x, (int, float)) for x in values)]
            scores |= _checkpoint_scores(self.path)
        except (AttributeError, KeyError, TypeError):  # a value of another type where a dictionary is expected
            scores, wrong = {}, ["a split"]
        if wrong:
            file = "results.json" if self.results else "metrics.jsonl"
            raise UserError(f"{self.path / file} is damaged (scores of {quoted(wrong)}): put back a copy")
        return scores


def read_runs(paths: Sequence[Path]) -> dict[str, ComparedRun]:
    """Reads the runs, each once, and returns them by name.

    Raises:
        UserError: a path is not a run, a file is damaged, or there are runs of both kinds.
    """
    folders = list(dict.fromkeys(path.resolve() for path in paths))
    runs = [_read_run(path) for path in folders]
    kinds = {type(run.config): run for run in runs}
    if len(kinds) > 1:
        named = " and ".join(f"{run.path} is a {KINDS[kind]} run" for kind, run in kinds.items())
        raise UserError(f"{named}: pass runs of one kind")
    return dict(zip(_shortest_names(folders), runs, strict=True))


def _read_run(path: Path) -> ComparedRun:
    if not (path / "config.yaml").is_file():
        missing = "is a file" if path.exists() else "does not exist"
        problem = "holds no run (no config.yaml)" if path.is_dir() else missing
        raise UserError(f"{path} {problem}: pass folders of runs")
    config = load_run_config(path)
    check_vocabulary(path)
    results = read_results(path)
    if isinstance(config, PretrainConfig) or config.num_seeds == 1:
        _warn_of_missing_lines(path, read_metrics(path), results)
        return ComparedRun(path, config, [read_curves(path)], [results] if results else [], 1)
    seeds = [path / f"seed-{seed}" for seed in range(config.seed, config.seed + config.num_seeds)]
    ended = results["runs"] if results else [one for one in map(read_results, seeds) if one]
    return ComparedRun(
        path, _with_resolved_sizes(config, seeds[0]), [read_metrics(seed) for seed in seeds], ended, config.num_seeds
    )


def _warn_of_missing_lines(path: Path, lines: list[dict[str, Any]], results: dict[str, Any] | None) -> None:
    """Logs a warning if a run has ended but its metrics.jsonl ends before its last step."""
    last, end = max((line["step"] for line in lines), default=0), (results or {}).get("steps")
    if isinstance(end, int) and last < end:
        LOGGER.warning(f"{path / 'metrics.jsonl'} ends at step {last:,} of {end:,}: lines are missing, put back a copy")


def _with_resolved_sizes(config: FinetuneConfig, seed: Path) -> FinetuneConfig:
    """Returns the configuration of several seeds with the resolved model and labels of one seed's config.yaml."""
    if not (seed / "config.yaml").is_file():
        return config
    resolved = load_run_config(seed)
    if not isinstance(resolved, FinetuneConfig):
        raise UserError(f"{seed} holds no fine-tuning run: put back a copy of its config.yaml")
    data = dataclasses.replace(resolved.data, sample_seed=config.data.sample_seed)
    return dataclasses.replace(resolved, seed=config.seed, num_seeds=config.num_seeds, data=data)


def _shortest_names(folders: Sequence[Path]) -> list[str]:
    """Returns the shortest distinct endings of the paths."""
    names = []
    for folder in folders:
        others = [other for other in folders if other != folder]
        counts = range(1, len(folder.parts))
        count = next((n for n in counts if all(folder.parts[-n:] != one.parts[-n:] for one in others)), None)
        names.append(str(folder) if count is None else "/".join(folder.parts[-count:]))
    return names


def _evaluations(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("split") == "eval"]


def _final_scores(results: dict[str, Any]) -> dict[str, float]:
    """Returns the scores of results.json, named like ``mlm_loss`` (pretraining) or ``dev accuracy`` (fine-tuning)."""
    scores: dict[str, float] = {}
    for split in scored_splits(results) or ["eval"]:
        scores |= _named(split, results.get(split, {}), results.get("main_metric"))
    timing = results.get("timing", {})
    rates = {name.replace("_", " "): timing[name] for name in ("tokens_per_second", "mfu") if name in timing}
    return scores | {name: results[name] for name in ("seconds",) if name in results} | rates


def _transfer_scores(results: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the scores of a pretraining run's ``transfer`` by initial weights, one per seed."""
    transfer = results.get("transfer") or []
    tasks = [transfer] if isinstance(transfer, dict) else transfer  # older runs have one task
    return {
        f"transfer to {task['task']}, {task['metric']}, {name.replace('_', ' ')}": start["scores"]
        for task in tasks
        for name, start in task.items()
        if isinstance(start, dict)
    }


def _checkpoint_scores(path: Path) -> dict[str, list[float]]:
    """Returns the step of the checkpoint with the best mean of transfer.jsonl, and its scores, one per seed."""
    best = best_transfer_step(path)
    lines = [line for line in read_transfer_scores(path) if line["step"] == best]
    scores = {f"{line['task']} {line['metric']}, best checkpoint": line.get("scores", [line["mean"]]) for line in lines}
    return {BEST_STEP: [best], **scores} if best is not None else {}


def _named(split: str, scores: dict[str, Any], main_metric: str | None = None) -> dict[str, float]:
    """Returns the scores for which higher or lower is better; scores of single labels are left out."""
    prefix = "" if split == "eval" else f"{split} "
    kept = {name: value for name, value in scores.items() if name == main_metric or _has_direction(name)}
    return {prefix + name: math.nan if value is None else value for name, value in kept.items()}


def _has_direction(name: str) -> bool:
    return metrics.higher_is_better(name) is not None


def _by_name(seeds: list[dict[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for scores in seeds for name in scores)
    return {name: [scores[name] for scores in seeds if name in scores] for name in names}


def setting_rows(runs: Sequence[ComparedRun]) -> Rows:
    """Returns the settings that differ: key and value in each run."""
    settings = [run.settings for run in runs]
    keys = dict.fromkeys(key for values in settings for key in values)
    rows = [(key, *(_setting(values[key]) if key in values else "-" for values in settings)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def score_rows(runs: Sequence[ComparedRun]) -> Rows:
    """Returns the progress and scores of each run; several seeds as mean and standard deviation."""
    scores = [run.scores() for run in runs]
    names = dict.fromkeys(name for values in scores for name in values)
    digits = {name: 1 if name in ("perplexity", "seconds", "tokens per second") else 4 for name in names}
    digits[BEST_STEP] = 0
    rows = [
        (name, *(_score(values[name], digits[name]) if name in values else "-" for values in scores)) for name in names
    ]
    return [("steps", *(run.state() for run in runs)), *rows]


def held_out_differences(runs: Sequence[ComparedRun]) -> list[str]:
    """Returns the names of differing settings that determine the evaluation rows."""
    held_out = [_held_out(run) for run in runs]
    names = dict.fromkeys(name for values in held_out for name in values)
    return [name for name in names if any(values.get(name) != held_out[0].get(name) for values in held_out)]


def _held_out(run: ComparedRun) -> dict[str, Any]:
    settings = run.settings
    values = {key: settings[key] for key in EVALUATION_KEYS[type(run.config)]}
    if isinstance(run.config, PretrainConfig):
        entries, predicts_all = run.config.phases or [PhaseConfig()], run.config.training.objective == "clm"
        phases = [held_out_data(run.config.data, phase, predicts_all) for phase in entries]
        values["sequence_length"] = [data.sequence_length for data in phases]
        values["max_predictions_per_sequence"] = [data.predictions_per_row for data in phases]
        vocabulary = run.path / "tokenizer.json"
        values["vocabulary"] = vocabulary.read_bytes() if vocabulary.is_file() else None
        if run.config.data.eval is None:
            values |= {
                key: settings[key]
                for key in ("data.train", "data.eval_fraction", *(f"data.{name}" for name in FILTER_KEYS))
            }
        return values
    data = run.config.data
    if data.dev_fraction is not None:
        values |= {"data.train": data.train, "data.stratify_dev": bool(data.stratify_dev)}
    if data.dev_fraction is not None or data.max_dev_samples is not None:
        values["data.sample_seed"] = run.config.seed if data.sample_seed is None else data.sample_seed
    return values


def curves(runs: dict[str, ComparedRun]) -> list[RunCurves]:
    """Returns the curves to plot."""
    return [
        RunCurves(name, getattr(run.config, "task", "pretraining"), run.lines, run.subject())
        for name, run in runs.items()
    ]


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _score(values: list[float], digits: int) -> str:
    spread = f" ± {format_number(float(np.std(values, ddof=1)), digits)}" if len(values) > 1 else ""
    return f"{format_number(float(np.mean(values)), digits, ',')}{spread}"
