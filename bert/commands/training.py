"""The common part of `bert pretrain` and `bert finetune`: arguments, hosts, the run's folder, interrupts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bert.commands.arguments import command_name, parse
from bert.commands.cluster import CLUSTER_OPTIONS, connect_hosts, parse_hosts
from bert.config import FinetuneConfig, PretrainConfig
from bert.errors import UserError, require

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
    notes: list[str] = []
    config, recipe, options = parse(
        config_class, argv, prog, description, default_recipe, CLUSTER_OPTIONS, say=notes.append
    )
    hosts = parse_hosts(options)
    if config.output_dir is None:
        if recipe is None:
            raise UserError(
                "command line: neither --config nor --output_dir is given: pass a recipe, for example --config sst2"
            )
        config = dataclasses.replace(config, output_dir=f"runs/{recipe}")
    if hosts is not None:
        connect_hosts(*hosts)

    from bert.parallel.multihost import is_main_process
    from bert.runtime.interrupts import Interrupted
    from bert.training.launch import start_or_resume

    try:
        run = start_or_resume(config, notes)
    except Interrupted as stop:
        if is_main_process():
            resume = f"{prog} --config {Path(require(config.output_dir, 'output_dir'), 'config.yaml')}"
            print(f"interrupted and saved at step {stop.step:,}; resume with: {resume}")
        return stop.status
    if is_main_process():
        show(run.results, str(run.path))
    return 0
