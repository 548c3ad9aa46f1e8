"""Sweeps: trials of a search space, each a run in a separate folder, and the table of their scores."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.data import FILTER_KEYS, HELD_OUT_KEYS
from bert.config.sweep import (
    Choices,
    Range,
    Space,
    corners,
    describe_space,
    earlier_trial_name,
    grid,
    parse_space,
    short_names,
    trial_name,
    value_text,
)
from bert.config.validation import keys_of
from bert.config.yaml_io import load_config
from bert.errors import LOGGER, UserError, format_number, log_info, require
from bert.parallel.multihost import broadcast_from_main, is_multihost, main_process_only
from bert.runs.loggers import Callback, RunStart
from bert.runs.metrics_log import read_results, to_jsonable
from bert.runs.report import align_columns
from bert.runs.sweep_folder import SWEEP_FILE, SweepFolder, open_sweep
from bert.tasks import make_task
from bert.tasks.splits import read_splits, require_dev
from bert.training import launch
from bert.training.means import read_eval_metrics
from bert.training.runs import Run

PREPARE: dict[Callable[..., Run], tuple[type, Callable[..., launch.RunRequest[Any]]]] = {
    launch.pretrain: (PretrainConfig, launch.prepare_pretraining),
    launch.finetune: (FinetuneConfig, launch.prepare_finetuning),
}

OTHER_LOSS = (
    *(f"data.{name}" for name in (*HELD_OUT_KEYS, "sequence_length", "max_predictions_per_sequence")),
    *("phases", "tokenizer.", "electra.", "distillation.", "training.objective", "training.label_smoothing"),
)
"""Prefixes of keys that determine the loss that pretraining computes on held-out text, or its rows."""
OTHER_ROWS = ("data.train", *(f"data.{name}" for name in FILTER_KEYS))
"""Keys that determine the rows if the held-out text is a share of the training text."""

SAMPLE_SEED = 0
"""``data.sample_seed`` of trials with different seeds. It is constant because trials may be added later."""
Prepare = Callable[[Mapping[str, Any], str | None], launch.RunRequest[Any]]
"""(values by dotted key, path or URL of the folder) -> the run of a trial; None for the folder of the sweep."""


def sweep(
    function: Callable[..., Run],
    config: launch.PathLike | PretrainConfig | FinetuneConfig,
    space: Mapping[str, Any],
    /,
    *,
    num_trials: int | None = None,
    output_dir: launch.PathLike | None = None,
    callbacks: Sequence[Callback] = (),
    **arguments: Any,
) -> list[Run]:
    """Trains with all combinations of some values, like ``--sweep``; repeating the call resumes the sweep.

    Each trial is a run in a separate folder in ``output_dir``, which also contains sweep.json. Completed trials are not
    repeated.

    Args:
        function: `bert.finetune` or `bert.pretrain`.
        config: its first argument.
        space: lists of values by dotted key, ``{"optimizer.learning_rate": [2e-5, 3e-5]}``, or with ``num_trials`` also
            ranges on a logarithmic scale, ``{"optimizer.learning_rate": "1e-5..1e-4"}``.
        num_trials: trials that Optuna suggests and, from the sixth on, ends early if they are not promising; None for
            all combinations.
        output_dir: folder of the sweep, or its URL. Defaults to runs/ and the name of the recipe.
        callbacks: `Callback` objects that receive the metrics of each trial.
        arguments: all other arguments of the function.

    Returns:
        The runs, the best one first; runs that were ended early are last and have no results.

    Raises:
        UserError: wrong keys, values or data; the message is one sentence with a fix, and with the name of the trial if
            there is one.
        KeyboardInterrupt: a trial was interrupted; its state is saved.
    """
    if function not in PREPARE:
        raise UserError(f"{function!r:.60} is no function that trains: pass bert.finetune or bert.pretrain")
    config_class, prepare_run = PREPARE[function]
    # Every trial reads the rows.
    arguments = {name: list(value) if isinstance(value, Iterator) else value for name, value in arguments.items()}

    def prepare(values: Mapping[str, Any], folder: str | None) -> launch.RunRequest[Any]:
        return prepare_run(config, output_dir=folder or output_dir, swept=values, **arguments)

    with launch.as_library_call():
        return run_sweep(parse_space(space, keys_of(config_class), "space"), num_trials, prepare, callbacks)


def run_sweep(space: Space, num_trials: int | None, prepare: Prepare, callbacks: Sequence[Callback] = ()) -> list[Run]:
    """Runs or resumes the trials of a space, logs their table, and returns their runs, the best one first.

    Raises:
        UserError: a trial cannot run, or the folder contains something else.
        Interrupted: a signal was received; the state of the current trial is saved.
    """
    log = main_process_only(log_info)
    if num_trials is not None:
        if importlib.util.find_spec("optuna") is None:
            raise UserError(
                "--trials needs optuna, which is not installed: pip install 'bert-jax[optuna]', or remove it"
            )
        if num_trials < 1:
            raise UserError(f"num_trials is {num_trials}: use 1 or more")
    known = list(grid(space)) if num_trials is None else corners(space)
    first, *_ = [prepare(values, None) for values in known]  # reports invalid trials before the first one runs
    for note in first.notes:
        log(note)
    metric, higher_is_better = main_metric(first)
    total = len(known) if num_trials is None else num_trials
    seed = None if num_trials is None else first.config.seed
    plan = {"space": describe_space(space), "num_trials": num_trials, "seed": seed}
    plan |= {"metric": metric, "higher_is_better": higher_is_better}
    trials: list[dict[str, Any]] = []
    with open_sweep(require(first.config.output_dir, "output_dir"), plan) as folder:
        pruned = {trial["name"]: trial for trial in folder.trials if trial["pruned"]}
        for number in range(total):
            draw = partial(suggest, space, trials, higher_is_better, seed or 0)
            values = known[number] if num_trials is None else broadcast_from_main(draw)
            name = broadcast_from_main(partial(find_trial_name, folder.path, values))
            trial = Trial(folder, name, values, metric, higher_is_better)
            log(f"trial {number + 1} of {total}: {trial.name}")
            if trial.name not in pruned:
                prunes = partial(should_prune, space, list(trials), higher_is_better)
                pruning = [] if num_trials is None else [Pruning(prunes, metric)]
                request = with_fixed_sample(prepare(values, folder.place(trial.name)), folder.path / trial.name, values)
                trial.run(request, callbacks, pruning)
            trials.append(pruned.get(trial.name) or broadcast_from_main(trial.read))
            if trials[-1]["pruned"]:  # if it is suggested again, it stays ended
                pruned[trial.name] = trials[-1]
            ranked = rank([*folder.trials, *trials], higher_is_better)
            broadcast_from_main(partial(folder.write, {**plan, "best": ranked[0]["name"], "trials": ranked}))
    for line in table(ranked, metric, first.config):
        log(line)
    if different := incomparable(space, first.config):
        log(f"\nthese losses are not of the same rows and predictions, because of {', '.join(different)}")
    log(f"\nbest: {folder.place(ranked[0]['name'])}\nall trials: {folder.place(SWEEP_FILE)}")
    return [Run(folder.path / trial["name"]) for trial in ranked]


def main_metric(request: launch.RunRequest[Any]) -> tuple[str, bool]:
    """Returns the score that ranks trials (main score on dev, or pretraining loss), and whether higher is better."""
    config: PretrainConfig | FinetuneConfig = request.config
    if isinstance(config, PretrainConfig):
        return "loss", False
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in request.tables.items():  # rows in memory that no trial has written yet
            Path(folder, name).write_text(lines, encoding="utf-8")
        if request.tables:
            config = replace(config, data=replace(config.data, dir=folder))
        splits = read_splits(make_task(config), config)  # the training rows of some tasks determine the metric
        require_dev(splits.examples, "the sweep")
        task = splits.task
    return task.main_metric, task.higher_main_is_better


def incomparable(space: Space, config: PretrainConfig | FinetuneConfig) -> list[str]:
    """Returns the swept keys that make pretraining losses incomparable."""
    if isinstance(config, FinetuneConfig):
        return []
    keys = OTHER_LOSS if config.data.eval is not None else (*OTHER_LOSS, *OTHER_ROWS)
    return [key for key in space if key.startswith(keys)]


def with_fixed_sample(
    request: launch.RunRequest[Any], folder: Path, values: Mapping[str, Any]
) -> launch.RunRequest[Any]:
    """Returns the trial with `SAMPLE_SEED` if its seed is swept, because each seed would hold out other rows.

    A trial that has begun keeps its value.
    """
    config = request.config
    if isinstance(config, PretrainConfig) or "seed" not in values or config.data.sample_seed is not None:
        return request
    sample_seed: int | None = SAMPLE_SEED
    if (folder / "config.yaml").is_file():
        sample_seed = load_config(FinetuneConfig, folder / "config.yaml").data.sample_seed
    return replace(request, config=replace(config, data=replace(config.data, sample_seed=sample_seed)))


def find_trial_name(folder: Path, values: Mapping[str, Any]) -> str:
    """Returns the name of a trial: the one with earlier names of keys if the sweep has such a folder."""
    earlier = earlier_trial_name(values)
    return earlier if (folder / earlier).is_dir() else trial_name(values)


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: the name of its folder, its values by dotted key, and the score that ranks trials."""

    folder: SweepFolder
    name: str
    values: Mapping[str, Any]
    metric: str
    higher_is_better: bool

    def run(self, request: launch.RunRequest[Any], callbacks: Sequence[Callback], pruning: Sequence[Callback]) -> None:
        """Trains to the end unless the trial is complete. Raises UserError with the trial's name."""
        if getattr(request.config, "num_seeds", 1) == 1 and not is_multihost():
            callbacks = [*callbacks, *pruning]
        try:
            launch.start_or_resume(replace(request, notes=()), callbacks, repeat=False, within=self.folder.mirror)
        except PrunedTrial:
            place = self.folder.place(self.name)
            LOGGER.info(f"{place} is ended early: its {self.metric} is worse than the median of earlier trials")
        except UserError as error:
            raise UserError(f"trial {self.name}: {error}") from None
        finally:
            gc.collect()
            jax.clear_caches()  # frees the memory that this trial's compiled programs hold

    def read(self) -> dict[str, Any]:
        """Returns the entry of a finished trial in sweep.json."""
        path = self.folder.path / self.name
        results = read_results(path) or {}
        evaluations = read_scores(path, self.metric)
        scores = results.get("dev") or results.get("eval") or {}
        deviations = scores.get("standard_deviation", {})  # set if the trial has several seeds
        best = (max if self.higher_is_better else min)((x for x in evaluations if x is not None), default=None)
        return to_jsonable(
            {
                "name": self.name,
                "values": self.values,
                "score": scores.get("mean", scores).get(self.metric) if results else best,
                "standard_deviation": deviations.get(self.metric),
                "loss": scores.get("mean", scores).get("loss"),
                "evaluations": evaluations,
                "pruned": not results,
                "collapsed": bool(results.get("collapsed")),
                "seconds": results.get("seconds"),
            }
        )


def rank(trials: Sequence[dict[str, Any]], higher_is_better: bool) -> list[dict[str, Any]]:
    """Returns each trial once, the best one first; equal scores are ordered by loss.

    Trials without a score, and trials that were ended early, are last.
    """

    def place(trial: dict[str, Any]) -> tuple[bool, float, float]:
        score = math.inf if trial["score"] is None else -trial["score"] if higher_is_better else trial["score"]
        return trial["pruned"], score, math.inf if trial["loss"] is None else trial["loss"]

    return sorted({trial["name"]: trial for trial in trials}.values(), key=place)


def table(ranked: Sequence[dict[str, Any]], metric: str, config: PretrainConfig | FinetuneConfig) -> list[str]:
    """Returns the table of the trials as lines, with a title."""
    split, num_seeds = ("dev", config.num_seeds) if isinstance(config, FinetuneConfig) else ("held-out text", 1)
    seeds = f", mean of {num_seeds} seeds" if num_seeds > 1 else ""
    losses = ["loss"] * (metric != "loss")
    rows: list[tuple[str, ...]] = [(*short_names(ranked[0]["values"]), metric, *losses, "seconds", "")]
    for trial in ranked:
        deviation = "" if trial["standard_deviation"] is None else f" +-{format_number(trial['standard_deviation'], 4)}"
        score, *more = ("-" if trial[name] is None else format_number(trial[name], 4) for name in ("score", *losses))
        seconds = "-" if trial["seconds"] is None else f"{trial['seconds']:.0f}"
        note = "ended early" if trial["pruned"] else "collapsed" if trial["collapsed"] else ""
        values = map(value_text, trial["values"].values())
        rows.append((*values, score + deviation, *more, seconds, note))
    title = f"\n{len(ranked)} trials, best first, by {metric} on {split}{seeds}:"
    return [title, *(line.rstrip() for line in align_columns(rows))]


DIGITS = 4
"""Significant digits of a suggested number; more digits would only make names longer."""

Scores = Sequence[float | None]


def suggest(
    space: Mapping[str, Choices], history: Sequence[Mapping[str, Any]], higher_is_better: bool, seed: int
) -> dict[str, Any]:
    """Suggests the values of the next trial with a tree-structured Parzen estimator (Bergstra et al. 2011).

    ``history`` has the earlier trials, in order: ``values``, ``score``, ``evaluations`` and ``pruned``.
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
    """Returns whether a trial with these scores is worse than the median of at least five earlier trials."""
    with _study(space, history, higher_is_better, 0) as study:
        trial = study.ask(_distributions(space))
        for index, score in enumerate(scores):
            trial.report(math.nan if score is None else score, index)
        return bool(trial.should_prune())


@contextlib.contextmanager
def _study(
    space: Mapping[str, Choices], history: Sequence[Mapping[str, Any]], higher_is_better: bool, seed: int
) -> Iterator[Any]:
    """Returns an in-memory study with the earlier trials."""
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
            state = states.FAIL if trial["score"] is None else states.COMPLETE
            state = states.PRUNED if trial["pruned"] else state
            study.add_trial(
                optuna.trial.create_trial(
                    state=state,
                    value=trial["score"] if state == states.COMPLETE else None,
                    params={  # the index of a value in a list
                        name: value if isinstance(choices, Range) else choices.index(value)
                        for name, choices in space.items()
                        for value in [trial["values"][name]]
                    },
                    distributions=distributions,
                    intermediate_values={
                        index: math.nan if score is None else score for index, score in enumerate(trial["evaluations"])
                    },
                )
            )
        yield study
    finally:
        optuna.logging.set_verbosity(verbosity)


def _distributions(space: Mapping[str, Choices]) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def distribution(choices: Choices) -> Any:
        if not isinstance(choices, Range):
            return CategoricalDistribution(list(range(len(choices))))
        kind = FloatDistribution if isinstance(choices.low, float) else IntDistribution
        return kind(choices.low, choices.high, log=True)

    return {name: distribution(choices) for name, choices in space.items()}


class PrunedTrial(Exception):
    """Raised when the current trial is not promising; its state is saved."""


class Pruning(Callback):
    """Ends a trial whose scores are not promising by raising `PrunedTrial`."""

    def __init__(self, prunes: Callable[[Scores], bool], metric: str) -> None:
        """``prunes`` maps the scores of all evaluations so far to whether the trial ends."""
        self._prunes, self._metric = prunes, metric

    def on_start(self, start: RunStart) -> None:
        self._start = start
        self._check(start.start_step)  # the process may have been killed before the exception

    def on_metrics(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        if split == "eval":
            self._check(step)

    def _check(self, step: int) -> None:
        """Raises `PrunedTrial`, except after the last evaluation, when there are no steps to save."""
        scores = read_scores(self._start.path, self._metric, step)
        if scores and step < self._start.total_steps and self._prunes(scores):
            raise PrunedTrial


def read_scores(run: Path, metric: str, last_step: float = math.inf) -> list[float | None]:
    """Returns the scores of a run's evaluations up to a step."""
    return [line[metric] for line in read_eval_metrics(run) if line["step"] <= last_step]
