"""Shared parts of `bert pretrain` and `bert finetune`: arguments, hosts, sweeps, interrupts, exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from bert.commands.cli.arguments import COMMAND_LINE, command_name, parse
from bert.commands.cli.cluster import CLUSTER_OPTIONS, connect_hosts, ending_together, parse_hosts
from bert.config import FinetuneConfig, PretrainConfig
from bert.config.sweep import Space, corners, option_text, parse_space_options
from bert.config.validation import ConfigField, keys_of
from bert.errors import UserError, redact, require

if TYPE_CHECKING:
    from bert.training.launch import RunRequest
    from bert.training.runs import Run


Config = TypeVar("Config", PretrainConfig, FinetuneConfig)
Parsed = tuple[Config, list[str], dict[str, str]]
"""Configuration, notes on it, and the options that are not keys."""


class TrainingCommand(Generic[Config]):
    """Arguments and exit status of a training command.

    Attributes:
        config: configuration from the arguments; for a sweep, of one trial.
        status: exit status; known after `running`.
    """

    def __init__(
        self, argv: list[str], config_class: type[Config], name: str, description: str, default_recipe: str | None
    ) -> None:
        """Parses the arguments.

        Args:
            default_recipe: recipe without ``--config``; None if there is none.

        Raises:
            UserError: an argument is invalid.
        """
        self._program, self.status = command_name(name), 0
        rest, self._sweep = take_sweep_options(argv, keys_of(config_class))
        self._parse: Callable[..., Parsed[Config]] = partial(
            _parse, config_class, rest, self._program, description, default_recipe
        )
        self.config: Config
        self.config, self._notes, options = self._parse(self._sweep.any_values if self._sweep else {}, None)
        self._hosts = parse_hosts(options)
        self._folder = redact(require(self.config.output_dir, "output_dir"))

    @property
    def is_sweep(self) -> bool:
        return self._sweep is not None

    @property
    def request(self) -> RunRequest[Config]:
        """The run to start or resume."""
        from bert.training.launch import RunRequest

        return RunRequest(self.config, self._notes)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Connects the hosts, and turns an interruption into a message and an exit status.

        Raises:
            UserError: the hosts cannot connect.
        """
        if self._hosts is not None:
            connect_hosts(*self._hosts)

        from bert.parallel.multihost import is_main_process
        from bert.runtime.interrupts import Interrupted

        resume = f"resume with: {self._program} --config {os.path.join(self._folder, 'config.yaml')}"
        if self.is_sweep:
            resume = "the same command resumes the sweep"
        with ending_together():
            try:
                yield
            except Interrupted as stop:
                if is_main_process():
                    print(f"interrupted and saved at step {stop.step:,}; {resume}")
                self.status = stop.status

    def show(self, run: Run, show: Callable[[dict[str, Any], str], None]) -> None:
        """Calls ``show`` with the results and the folder of a run, on the main process."""
        from bert.parallel.multihost import is_main_process

        if is_main_process():
            show(run.results, self._folder)

    def run_sweep(self) -> None:
        """Trains the trials of the sweep, and prints their table."""
        from bert.training.launch import RunRequest
        from bert.training.sweep import run_sweep

        sweep = require(self._sweep, "--sweep")
        run_sweep(sweep.space, sweep.num_trials, lambda *trial: RunRequest(*self._parse(*trial)[:2]))


def _parse(
    config_class: type[Config],
    argv: list[str],
    prog: str,
    description: str,
    default_recipe: str | None,
    values: Mapping[str, Any],
    output_dir: str | None,
) -> Parsed[Config]:
    """Returns the configuration from the arguments, notes on it, and the options that are not keys.

    Args:
        values: values of a trial of a sweep, by dotted key.
        output_dir: folder of the trial; None for output_dir of the arguments, or runs/ and the recipe's name.
    """
    swept: list[str] = [f"--{name}={option_text(value)}" for name, value in values.items()]
    folder: list[str] = [] if output_dir is None else [f"--output_dir={output_dir}"]
    notes: list[str] = []
    usage = {**SWEEP_OPTIONS, **CLUSTER_OPTIONS}
    config, recipe, options = parse(
        config_class, [*argv, *swept, *folder], prog, description, default_recipe, usage, log=notes.append
    )
    if config.output_dir is None:
        if recipe is None:
            raise UserError(
                "command line: neither --config nor --output_dir is given: pass a recipe, for example --config sst2"
            )
        config = dataclasses.replace(config, output_dir=f"runs/{recipe}")
    return config, notes, options


SWEEP_OPTIONS = {
    "sweep KEY=V1,V2,...": "Train once with each value of a key, each in its own folder in output_dir, and print a "
    "table of the scores. Repeat the option to try all combinations of several keys. The same command resumes.",
    "trials N": "Train with N combinations that Optuna suggests, also from ranges --sweep KEY=LOW..HIGH on a "
    "logarithmic scale, and stop unpromising trials early.",
}


SWEEP_PLACEHOLDERS = {f"--{name}": value for name, value in (usage.split() for usage in SWEEP_OPTIONS)}


class SweepOptions(NamedTuple):
    """Values of the options.

    Attributes:
        num_trials: number of trials; None for all combinations.
    """

    space: Space
    num_trials: int | None

    @property
    def any_values(self) -> dict[str, Any]:
        """The values of one trial."""
        return corners(self.space)[0]


def take_sweep_options(argv: list[str], keys: dict[str, ConfigField]) -> tuple[list[str], SweepOptions | None]:
    """Returns the other arguments, and the sweep or None.

    Raises:
        UserError: an option is invalid, or one of its keys is also set.
    """
    groups: list[list[str]] = [[]]  # an option with its values
    for word in argv:
        if word.startswith("--") or word == "-h":
            groups.append([])
        groups[-1].append(word)
    rest: list[str] = []
    words_of: dict[str, list[str]] = {"--sweep": [], "--trials": []}
    for option, *words in filter(None, groups):
        name, equals, value = option.partition("=")
        if name not in words_of:
            rest += [option, *words]
        elif not (words := [value] * bool(equals) + words):
            raise UserError(f"{COMMAND_LINE}: {name} has no value: use {name} {SWEEP_PLACEHOLDERS[name]}")
        else:
            words_of[name] += words
    if not words_of["--sweep"] and not words_of["--trials"]:
        return rest, None
    if not words_of["--sweep"]:
        raise UserError(
            f"{COMMAND_LINE}: --trials is given without --sweep: pass --sweep KEY=V1,V2,... too, or remove it"
        )
    space = parse_space_options(words_of["--sweep"], keys, f"{COMMAND_LINE}: --sweep")
    for name in space:
        if any(word == f"--{name}" or word.startswith(f"--{name}=") for word in rest):
            raise UserError(f"{COMMAND_LINE}: {name} is set and swept: remove one of the two")
    return rest, SweepOptions(space, _num_trials(words_of["--trials"]))


def _num_trials(texts: list[str]) -> int | None:
    if not texts:
        return None
    if len(texts) > 1 or not texts[0].isdecimal() or int(texts[0]) < 1:
        raise UserError(f"{COMMAND_LINE}: --trials {' '.join(texts)}: use one whole number, 1 or more")
    return int(texts[0])
