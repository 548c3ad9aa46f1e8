"""Starts and resumes runs: `bert.pretrain` and `bert.finetune`, and the common part of the commands."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.sources import resolve_config
from bert.config.yaml_io import keys_of, parse_dict
from bert.errors import UserError
from bert.inference.run import Run
from bert.runs.callbacks import Callback, call_and_end
from bert.runs.folder import RunFolder, open_run
from bert.runtime.compilation_cache import use_compilation_cache
from bert.runtime.interrupts import Interrupted
from bert.runtime.system_errors import system_errors_as_user_errors
from bert.training import finetuning, pretraining, seeds

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)
Path = str | os.PathLike[str]

FUNCTIONS: dict[type, str] = {PretrainConfig: "bert.pretrain", FinetuneConfig: "bert.finetune"}


def pretrain(
    config: Path | PretrainConfig = "quickstart",
    *,
    output_dir: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Pretrains an encoder or a language model, as `bert pretrain` does; the same call again resumes.

    Args:
        config: name of a recipe, path of a YAML file, or a configuration.
        output_dir: folder of the run; None takes runs/ and the name of the recipe.
        overrides: values by dotted key, ``{"training.steps": 100}``, or nested, ``{"training": {"steps": 100}}``.
        callbacks: `Callback` objects that are told how the run goes, and may end it.

    Raises:
        UserError: wrong keys, values or data: one sentence that says what to change.
        KeyboardInterrupt: the run was interrupted; its state is saved.
    """
    with _as_library_call():
        configured = _configure(PretrainConfig, config, overrides, output_dir=output_dir)
        return start_or_resume(*configured, callbacks)


def finetune(
    config: Path | FinetuneConfig,
    *,
    init: Path | None = None,
    output_dir: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Fine-tunes a model on a task, as `bert finetune` does; the same call again resumes.

    Args:
        config: name of a recipe, path of a YAML file, or a configuration.
        init: run, folder or hub name of the model to start from; ``"none"`` starts from random weights.
        output_dir: folder of the run; None takes runs/ and the name of the recipe.
        overrides: values by dotted key, ``{"training.epochs": 2}``, or nested, ``{"training": {"epochs": 2}}``.
        callbacks: `Callback` objects that are told how the run goes, and may end it.

    Raises:
        UserError: wrong keys, values or data: one sentence that says what to change.
        KeyboardInterrupt: the run was interrupted; its state is saved.
    """
    with _as_library_call():
        configured = _configure(FinetuneConfig, config, overrides, init=init, output_dir=output_dir)
        return start_or_resume(*configured, callbacks)


def start_or_resume(config: Config, notes: Sequence[str] = (), callbacks: Sequence[Callback] = ()) -> Run:
    """Trains to the end in ``config.output_dir``, from the run's newest checkpoint if there is one.

    Args:
        config: checked.
        notes: lines to print first.
        callbacks: are told how the run goes.

    Raises:
        UserError: the folder, the data, the initial model or a checkpoint cannot be used.
        Interrupted: a signal came; the state is saved.
    """
    with open_run(config) as run:
        if run.is_writer:
            print("".join(f"{note}\n" for note in notes), end="")
        _train(run, callbacks)
        return Run(run.path)


def _train(run: RunFolder[Any], callbacks: Sequence[Callback]) -> None:
    if isinstance(run.config, FinetuneConfig) and run.config.num_seeds > 1:
        seeds.finetune_seeds(run, callbacks=callbacks)  # each of which has an end
        return
    train = pretraining.pretrain if isinstance(run.config, PretrainConfig) else finetuning.finetune
    call_and_end(partial(train, run, callbacks=callbacks), callbacks, run.is_writer)


def _configure(
    config_class: type[Config], config: Path | Config, overrides: Mapping[str, Any] | None, **arguments: Path | None
) -> tuple[Config, list[str]]:
    """The checked configuration of a call, and notes on it; ``arguments`` are keys that have their own argument."""
    keys = keys_of(config_class)
    given = parse_dict({} if overrides is None else overrides, "overrides", keys)
    for name, value in arguments.items():
        if value is not None:
            if name in given:
                raise UserError(f"{name} is both an argument and one of the overrides: remove one of the two")
            given |= parse_dict({name: value}, "arguments", keys)
    names, base = [], {}
    if isinstance(config, config_class):
        base = parse_dict(dataclasses.asdict(config), "config", keys)
    elif isinstance(config, str | os.PathLike):
        names = [os.fspath(config)]
    elif type(config) in FUNCTIONS:
        raise UserError(f"config is a {type(config).__name__}: pass it to {FUNCTIONS[type(config)]}")
    else:
        raise UserError(f"config is {config!r:.60}: pass the name of a recipe, a path or a {config_class.__name__}")
    notes: list[str] = []
    resolved = resolve_config(config_class, names, given, "config", base, notes.append)
    resolved.check()
    if resolved.config.output_dir is not None:
        return resolved.config, notes
    if resolved.recipe is None:
        raise UserError("output_dir is not set: pass output_dir, the folder of the run")
    return dataclasses.replace(resolved.config, output_dir=f"runs/{resolved.recipe}"), notes


@contextlib.contextmanager
def _as_library_call() -> Iterator[None]:
    """Around a call from Python: a signal that came becomes KeyboardInterrupt, or what it is without this package."""
    use_compilation_cache()
    with system_errors_as_user_errors():
        try:
            yield
        except Interrupted as stop:
            sentence = f"saved at step {stop.step:,}: make the same call again to resume"
            if stop.signal_number != signal.SIGINT:
                print(sentence, flush=True)
                signal.raise_signal(stop.signal_number)  # its own handler is back
            raise KeyboardInterrupt(sentence) from None
