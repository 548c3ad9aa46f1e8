"""The trials of a search, suggested and pruned by Optuna: both are functions of the trials before.

Nothing is kept but the trials themselves: a search that is resumed makes the same suggestions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert.config.sweep import Choices, Range
from bert.errors import UserError
from bert.runs.callbacks import Callback, RunStart
from bert.training.evaluation import read_eval_metrics

DIGITS = 4
"""Significant digits of a suggested number: more would say nothing, and make long names."""

Scores = Sequence[float | None]


def require_optuna() -> None:
    """Raises UserError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError("--trials needs optuna, which is not installed: pip install 'bert-jax[optuna]', or remove it")


def suggest(
    space: Mapping[str, Choices], history: Sequence[Mapping[str, Any]], higher_is_better: bool, seed: int
) -> dict[str, Any]:
    """The values of the next trial, by a tree-structured Parzen estimator (Bergstra et al. 2011).

    Args:
        space: the keys with their values and ranges.
        history: the trials before, in order: ``values``, ``score``, ``evaluations`` and ``pruned``.
        higher_is_better: of the scores.
        seed: of the sampler.
    """
    with _study(space, history, higher_is_better, seed) as study:
        suggested = study.ask(_distributions(space)).params
    values = {}
    for name, choices in space.items():
        value = suggested[name]
        if not isinstance(choices, Range):
            value = choices[value]
        elif isinstance(choices.low, float):
            value = min(max(float(f"{value:.{DIGITS}g}"), choices.low), choices.high)
        values[name] = value
    return values


def should_prune(
    space: Mapping[str, Choices], history: Sequence[Mapping[str, Any]], higher_is_better: bool, scores: Scores
) -> bool:
    """Whether a trial with these scores so far is worse than the median of the trials before, of which the first five
    are not pruned."""
    with _study(space, history, higher_is_better, 0) as study:
        trial = study.ask(_distributions(space))
        for index, score in enumerate(scores):
            trial.report(_number(score), index)
        return bool(trial.should_prune())


@contextlib.contextmanager
def _study(
    space: Mapping[str, Choices], history: Sequence[Mapping[str, Any]], higher_is_better: bool, seed: int
) -> Iterator[Any]:
    """A study in memory with the trials before."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            direction="maximize" if higher_is_better else "minimize",
            sampler=optuna.samplers.TPESampler(seed=(seed + len(history)) % 2**32),
            pruner=optuna.pruners.MedianPruner(),
        )
        states, distributions = optuna.trial.TrialState, _distributions(space)
        for trial in history:
            is_failed = trial["score"] is None
            state = states.PRUNED if trial["pruned"] else states.FAIL if is_failed else states.COMPLETE
            study.add_trial(
                optuna.trial.create_trial(
                    state=state,
                    value=trial["score"] if state == states.COMPLETE else None,
                    params={name: _param(choices, trial["values"][name]) for name, choices in space.items()},
                    distributions=distributions,
                    intermediate_values={index: _number(score) for index, score in enumerate(trial["evaluations"])},
                )
            )
        yield study
    finally:
        optuna.logging.set_verbosity(verbosity)


def _distributions(space: Mapping[str, Choices]) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    return {
        name: CategoricalDistribution(list(range(len(choices))))
        if not isinstance(choices, Range)
        else (FloatDistribution if isinstance(choices.low, float) else IntDistribution)(
            choices.low, choices.high, log=True
        )
        for name, choices in space.items()
    }


def _param(choices: Choices, value: Any) -> Any:
    """A value as Optuna has it: of a list its index."""
    return value if isinstance(choices, Range) else choices.index(value)


def _number(score: float | None) -> float:
    return math.nan if score is None else score


class PrunedTrial(Exception):
    """The trial under way is not promising; its state is saved."""


class Pruning(Callback):
    """Ends a trial whose scores are not promising, by `PrunedTrial`."""

    def __init__(self, prunes: Callable[[Scores], bool], metric: str) -> None:
        """
        Args:
            prunes: scores of all evaluations so far -> whether to end the trial.
            metric: name of the score.
        """
        self._prunes, self._metric = prunes, metric

    def on_start(self, start: RunStart) -> None:
        self._start = start
        self._check(start.start_step)  # a kill may have come before the exception

    def on_metrics(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        if split == "eval":
            self._check(step)

    def _check(self, step: int) -> None:
        """Raises `PrunedTrial`; but for the last evaluation, after which there is nothing to save."""
        scores = read_scores(self._start.path, self._metric, step)
        if scores and step < self._start.total_steps and self._prunes(scores):
            raise PrunedTrial


def read_scores(run: Path, metric: str, last_step: float = math.inf) -> list[float | None]:
    """The scores of a run's evaluations up to a step."""
    return [line[metric] for line in read_eval_metrics(run) if line["step"] <= last_step]
