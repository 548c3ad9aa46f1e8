"""The common part of `bert pretrain` and `bert finetune`: arguments, hosts, the run's folder, interrupts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from bert.commands.arguments import command_name, parse
from bert.commands.cluster import CLUSTER_OPTIONS, connect_hosts, parse_hosts
from bert.config import FinetuneConfig, PretrainConfig
from bert.errors import UserError

if TYPE_CHECKING:
    from bert.runs.folder import RunFolder

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)


def run_training(
    argv: list[str],
    config_class: type[Config],
    command: str,
    description: str,
    default_recipe: str | None,
    train: Callable[[RunFolder[Config]], dict[str, Any]],
    show: Callable[[dict[str, Any], str], None],
) -> int:
    """Trains according to the arguments and returns the exit status.

    Args:
        argv: arguments of the command.
        config_class: configuration that they describe.
        command: name of the command.
        description: its help.
        default_recipe: recipe without ``--config``; None if there is none.
        train: trains in an open run and returns its results.
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

    from bert.runs.folder import open_run
    from bert.runtime.interrupts import Interrupted

    with open_run(config) as run:
        if run.is_writer:
            print("".join(f"{note}\n" for note in notes), end="")
        try:
            results = train(run)
        except Interrupted as stop:
            if run.is_writer:
                resume = f"{prog} --config {run.path / 'config.yaml'}"
                print(f"interrupted and saved at step {stop.step:,}; resume with: {resume}")
            return stop.status
        if run.is_writer:
            show(results, str(run.path))
    return 0
