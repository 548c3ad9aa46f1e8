"""`bert.Run`: the folder of a run with its configuration, results, curves and model."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.run_file import load_run_config
from bert.errors import UserError, format_number, system_errors_as_user_errors
from bert.files import path_text
from bert.inference.load import load
from bert.inference.pretrained import Pretrained
from bert.runs.metrics_log import read_metrics, read_results, scored_splits
from bert.runs.plots import RunCurves, Subject, make_comparison, make_curves
from bert.training.finetuning import results as finetuning_results
from bert.training.pretraining import results as pretraining_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Scores = dict[str, float | None]


@dataclass(frozen=True, init=False, repr=False)
class Run:
    """A running, interrupted or finished run. `os.fspath` returns its folder.

    Attributes:
        path: folder of the run.
    """

    path: Path

    @system_errors_as_user_errors()
    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens a run. Raises UserError if the folder holds no run."""
        object.__setattr__(self, "path", Path(path_text(path)))
        if not (self.path / "config.yaml").is_file():
            raise UserError(f"{self.path} holds no run (no config.yaml): pass the folder of a run")

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        """Returns the folder, the task, the state and the main score, on one line."""
        start = f"bert.Run({os.fspath(self)!r}"
        try:
            return f"<{start}): {', '.join(self._summary())}>"
        except Exception:  # a damaged file must not break the display of other values
            return f"{start})"

    @property
    def config(self) -> PretrainConfig | FinetuneConfig:
        """The resolved configuration from config.yaml."""
        return load_run_config(self.path)

    @property
    def results(self) -> dict[str, Any]:
        """The content of results.json. Raises UserError if the run has not ended."""
        results = read_results(self.path)
        if results is None:
            raise UserError(f"{self.path} has no results.json, because the run has not ended: resume it first")
        return results

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. Empty for several seeds: each folder seed-N has a separate file."""
        return read_metrics(self.path)

    @functools.cached_property
    def model(self) -> Pretrained:
        """The model that `bert.load` reads from the folder; the best one for several seeds."""
        seeds = getattr(self.config, "num_seeds", 1) > 1
        return load(self.path / f"seed-{self.results['best_seed']}" if seeds else self.path)

    def predict(self, inputs: Any, **options: Any) -> Any:
        """Predicts with `model`. Arguments: see `Pretrained.predict`."""
        return self.model.predict(inputs, **options)

    def plot(self) -> Figure:
        """Returns the curves as a figure, which notebooks show, also while the run is training.

        The figure is the one in curves.png. Several seeds are drawn in one figure, each with its own colour.

        Raises:
            UserError: there are no metrics yet, or matplotlib is not installed.
        """
        seeds, subject, task = self._lines(), self._subject(), getattr(self.config, "task", "")
        if len(seeds) == 1:
            figure = make_curves(self.metrics, subject)
        else:
            figure = make_comparison([RunCurves(name, task, [lines], subject) for name, lines in seeds])
        if figure is None:
            raise UserError(f"{self.path} has no curves: wait until it has metrics, and check that matplotlib is there")
        return figure

    def table(self) -> DataFrame:
        """Returns the scores: a row per metric, and a column per split, standard deviation and baseline.

        The columns of a run that has not ended are its last evaluation, for several seeds one per seed.
        """
        import pandas

        return pandas.DataFrame(self._scores(), dtype=float)

    def _lines(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Returns the name and the lines of metrics.jsonl of each seed; the name of a single one is empty."""
        config = self.config
        if isinstance(config, PretrainConfig) or config.num_seeds == 1:
            return [("", self.metrics)]
        names = [f"seed-{seed}" for seed in range(config.seed, config.seed + config.num_seeds)]
        return [(name, read_metrics(self.path / name)) for name in names]

    def _subject(self) -> Subject:
        config, results = self.config, read_results(self.path) or {}
        if isinstance(config, PretrainConfig):
            return pretraining_results.final_subject(config, results)
        return finetuning_results.final_subject(config, results)

    def _scores(self) -> dict[str, Scores]:
        """Returns the columns of the table."""
        results, subject = read_results(self.path), self._subject()
        held_out = "held out" if isinstance(self.config, PretrainConfig) else "dev"
        columns: dict[str, Scores] = {}
        for split in [] if results is None else scored_splits(results) or ["eval"]:
            name, scores = held_out if split == "eval" else split, (results or {})[split]
            columns[name] = _numbers(scores.get("mean", scores))
            if "standard_deviation" in scores:
                columns[f"{name} standard deviation"] = _numbers(scores["standard_deviation"])
        if results is None:
            for seed, lines in self._lines():
                last: dict[str, Any] = next((line for line in reversed(lines) if line["split"] == "eval"), {})
                columns[f"{held_out} {seed}".strip()] = _numbers(last)
        metrics = {metric for scores in columns.values() for metric in scores}
        baselines: Scores = {name: value for name, value in subject.baselines.items() if name in metrics}
        return {**columns, **({subject.baseline.replace("_", " "): baselines} if baselines else {})}

    def _summary(self) -> list[str]:
        config, results, subject = self.config, read_results(self.path), self._subject()
        task = "pretraining" if isinstance(config, PretrainConfig) else config.task
        num_seeds = 1 if isinstance(config, PretrainConfig) else config.num_seeds
        if results is None:
            steps = max((line["step"] for _, lines in self._lines() for line in lines), default=0)
            return [task, f"not ended, at step {steps:,}" if steps else "not ended"]
        (split, scores), *others = self._scores().items()
        score = _format(scores.get(subject.main_metric))
        if num_seeds > 1:
            score += f" ± {_format(dict(others)[f'{split} standard deviation'].get(subject.main_metric))}"
        state = f"{num_seeds} seeds" if num_seeds > 1 else f"{results['steps']:,} steps"
        baseline = subject.baselines.get(subject.main_metric)
        note = "" if baseline is None else f" (baseline {_format(baseline)})"
        return [task, state, f"{split} {subject.main_metric.replace('_', ' ')} {score}{note}"]


def _numbers(scores: dict[str, Any]) -> Scores:
    return {name: value for name, value in scores.items() if name != "step" and (value is None or _is_number(value))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format(value: float | None) -> str:
    return "nan" if value is None else format_number(value, 4)
