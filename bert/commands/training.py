"""The common part of `bert pretrain` and `bert finetune`: arguments, hosts, the run's folder, interrupts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from bert.commands.cli.arguments import command_name, parse
from bert.commands.cli.cluster import CLUSTER_OPTIONS, connect_hosts, ending_together, parse_hosts
from bert.commands.sweep import SWEEP_OPTIONS, take_sweep_options
from bert.config import FinetuneConfig, PretrainConfig
from bert.config.sweep import option_text
from bert.config.yaml_io import keys_of
from bert.errors import UserError, redact, require

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)


def run_training(
    argv: list[str],
    config_class: type[Config],
    command: str,
    description: str,
    default_recipe: str | None,
    show: Callable[[dict[str, Any], str], None],
) -> int:
    """Trains according to the arguments and returns the exit status.

    Args:
        argv: arguments of the command.
        config_class: configuration that they describe.
        command: name of the command.
        description: its help.
        default_recipe: recipe without ``--config``; None if there is none.
        show: prints the results of a run in a folder.

    Raises:
        UserError: wrong arguments or data.
    """
    prog = command_name(command)
    rest, sweep = take_sweep_options(argv, keys_of(config_class))
    prepare = partial(_parse, config_class, rest, prog, description, default_recipe)
    config, notes, options = prepare(sweep.any_values if sweep else {}, None)
    if (hosts := parse_hosts(options)) is not None:
        connect_hosts(*hosts)

    from bert.parallel.multihost import is_main_process
    from bert.runtime.interrupts import Interrupted
    from bert.training.launch import RunRequest, start_or_resume
    from bert.training.sweep import run_sweep

    folder = redact(require(config.output_dir, "output_dir"))
    resume = f"resume with: {prog} --config {os.path.join(folder, 'config.yaml')}"
    with ending_together():
        try:
            if sweep is not None:
                resume = "the same command resumes the sweep"
                run_sweep(sweep.space, sweep.num_trials, lambda *trial: RunRequest(*prepare(*trial)[:2]))
                return 0
            run = start_or_resume(RunRequest(config, notes))
        except Interrupted as stop:
            if is_main_process():
                print(f"interrupted and saved at step {stop.step:,}; {resume}")
            return stop.status
        if is_main_process():
            show(run.results, folder)
    return 0


def _parse(
    config_class: type[Config],
    argv: list[str],
    prog: str,
    description: str,
    default_recipe: str | None,
    values: Mapping[str, Any],
    output_dir: str | None,
) -> tuple[Config, list[str], dict[str, str]]:
    """The configuration of the arguments, notes on it, and the options that are no keys.

    Args:
        values: those of a trial of a sweep, by dotted key.
        output_dir: of the trial; None takes that of the arguments, or runs/ and the recipe's name.
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
