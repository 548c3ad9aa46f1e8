"""Starts and resumes runs: `bert.pretrain` and `bert.finetune`, and the common part of the commands."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.sources import resolve_config
from bert.config.yaml_io import keys_of, parse_dict
from bert.errors import LOGGER, UserError, log_info, require, system_errors_as_user_errors
from bert.files import path_text
from bert.inference.load import Run
from bert.parallel.devices import local_devices
from bert.parallel.multihost import broadcast_from_main, main_process_only
from bert.remote import is_url
from bert.runs.folder import ROWS, has_ended, open_run
from bert.runs.loggers import Callback, RunCallbacks, make_loggers
from bert.runs.mirror import Mirror
from bert.runtime.compilation_cache import use_compilation_cache
from bert.runtime.interrupts import Interrupted
from bert.tasks import find_task
from bert.tasks.columns import table_files
from bert.training.finetuning.run import finetune as run_finetuning
from bert.training.finetuning.seeds import finetune_seeds
from bert.training.pretraining.run import pretrain as run_pretraining

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class RunRequest(Generic[Config]):
    """A run before its folder is opened.

    Attributes:
        config: the checked configuration, with ``output_dir``.
        notes: messages to log first.
        tables: contents of the files that hold rows in memory, by file name.
    """

    config: Config
    notes: Sequence[str] = ()
    tables: Mapping[str, str] = field(default_factory=dict)


FUNCTIONS: dict[type, str] = {PretrainConfig: "bert.pretrain", FinetuneConfig: "bert.finetune"}


def pretrain(
    config: PathLike | PretrainConfig = "quickstart",
    *,
    init: PathLike | None = None,
    output_dir: PathLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Pretrains an encoder or a language model, like `bert pretrain`; repeating the call resumes the run.

    Args:
        config: name of a recipe, path of a YAML file, or a configuration.
        init: run, folder or hub name of the model to start from; None starts from random weights.
        output_dir: folder of the run. Defaults to runs/ and the name of the recipe.
        overrides: values by dotted key, ``{"training.steps": 100}``, or nested, ``{"training": {"steps": 100}}``.
        callbacks: `Callback` objects that receive the metrics and may end the run.

    Raises:
        UserError: wrong keys, values or data; the message is one sentence with a fix.
        KeyboardInterrupt: the run was interrupted; its state is saved.
    """
    with as_library_call():
        request = prepare_pretraining(config, init=init, output_dir=output_dir, overrides=overrides)
        run = start_or_resume(request, callbacks)
        for remark in run.results.get("remarks", ()):
            main_process_only(LOGGER.warning)(remark)
        return run


def prepare_pretraining(
    config: PathLike | PretrainConfig,
    *,
    init: PathLike | None = None,
    output_dir: PathLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    swept: Mapping[str, Any] = MappingProxyType({}),
) -> RunRequest[PretrainConfig]:
    """Resolves the arguments of `pretrain`; ``swept`` holds the values of a trial by dotted key."""
    return RunRequest(*_configure(PretrainConfig, config, overrides, {"init": init, "output_dir": output_dir}, swept))


def finetune(
    config: PathLike | FinetuneConfig,
    *,
    init: PathLike | None = None,
    train: Any = None,
    dev: Any = None,
    output_dir: PathLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Fine-tunes a model on a task, like `bert finetune`; repeating the call resumes the run.

    Args:
        config: name of a recipe, path of a YAML file, or a configuration.
        init: run, folder or hub name of the model to start from; ``"none"`` starts from random weights.
        train: for the tasks on custom data, the path of a labelled file, or rows in memory: dictionaries by column, a
            ``pandas.DataFrame`` or a ``datasets.Dataset``. They are written to rows/ in the run's folder.
        dev: the same for the rows that select the best checkpoint; None holds out a share of ``train`` if there is no
            file.
        output_dir: folder of the run. Defaults to runs/ and the name of the recipe.
        overrides: values by dotted key, ``{"training.epochs": 2}``, or nested, ``{"training": {"epochs": 2}}``.
        callbacks: `Callback` objects that receive the metrics and may end the run.

    Raises:
        UserError: wrong keys, values or data; the message is one sentence with a fix.
        KeyboardInterrupt: the run was interrupted; its state is saved.
    """
    with as_library_call():
        request = prepare_finetuning(
            config, init=init, train=train, dev=dev, output_dir=output_dir, overrides=overrides
        )
        run = start_or_resume(request, callbacks)
        if run.results["collapsed"]:
            main_process_only(LOGGER.warning)(
                "collapsed: on dev the model gives the same answer throughout, or is no better than the baseline in "
                "run.results: use another learning rate, or train longer"
            )
        for remark in run.results.get("remarks", ()):
            main_process_only(LOGGER.warning)(f"on dev: {remark}")
        return run


def prepare_finetuning(
    config: PathLike | FinetuneConfig,
    *,
    init: PathLike | None = None,
    train: Any = None,
    dev: Any = None,
    output_dir: PathLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    swept: Mapping[str, Any] = MappingProxyType({}),
) -> RunRequest[FinetuneConfig]:
    """Resolves the arguments of `finetune`; ``swept`` holds the values of a trial by dotted key."""
    inputs = {"train": train, "dev": dev}
    tables: dict[str, str] = {}
    for name, rows in inputs.items():
        tables |= {} if _is_path(rows) else table_files(rows, name)
    arguments = {"init": init, "output_dir": output_dir, **_data_arguments(inputs, tables)}
    configured, notes = _configure(FinetuneConfig, config, overrides, arguments, swept)
    if tables:
        task = find_task(configured.task)
        if "train" not in task.data_keys:
            raise UserError(
                f"train is given as rows, and the task {task.name} reads its own files: pass the recipe "
                "classification, or another one for custom data"
            )
        folder = os.path.join(require(configured.output_dir, "output_dir"), ROWS)
        configured = dataclasses.replace(configured, data=dataclasses.replace(configured.data, dir=folder))
    return RunRequest(configured, notes, tables)


def _is_path(rows: Any) -> bool:
    return rows is None or isinstance(rows, str | os.PathLike)


def _data_arguments(inputs: Mapping[str, Any], tables: Mapping[str, str]) -> dict[str, PathLike | None]:
    """Returns the keys of ``data`` for rows in memory, stored in the folder `ROWS`, and for absolute paths."""
    if "dev.jsonl" in tables and inputs["train"] is None:
        raise UserError("dev is given as rows, and train is not given: pass both")
    keys: dict[str, PathLike | None] = {"data.dir": ROWS if tables else None}
    for name, rows in inputs.items():
        file = f"{name}.jsonl"
        if file not in tables:
            file = rows if rows is None or is_url(rows) else os.path.abspath(rows)
        keys[f"data.{name}"] = file
    return keys


def start_or_resume(
    request: RunRequest[Config],
    callbacks: Sequence[Callback] = (),
    repeat: bool = True,
    within: Mirror | None = None,
) -> Run:
    """Trains to the end in ``output_dir``, from the run's newest checkpoint if there is one.

    Args:
        request: the run.
        callbacks: receive the metrics and may end the run.
        repeat: whether a completed run is evaluated again.
        within: the mirror of the sweep that contains the run; None unless the sweep has a URL.

    Raises:
        UserError: the folder, the data, the initial model or a checkpoint cannot be used.
        Interrupted: a signal was received; the state is saved.
    """
    local_devices()  # like the loggers, it raises before the folder is created
    make_loggers(request.config.loggers)
    with open_run(request.config, within) as run:
        log = main_process_only(log_info)
        for note in request.notes:
            log(note)
        if request.tables:
            broadcast_from_main(partial(run.save_rows, request.tables))
        if not repeat and run.resumed and broadcast_from_main(partial(has_ended, run)):
            log(f"{run.config.output_dir} has ended before")
        elif isinstance(run.config, FinetuneConfig) and run.config.num_seeds > 1:
            finetune_seeds(run, callbacks=callbacks)  # each seed calls the callbacks
        else:
            with RunCallbacks(run, callbacks) as ending:
                train = run_pretraining if isinstance(run.config, PretrainConfig) else run_finetuning
                ending.results = train(run, callbacks=ending.callbacks)
        broadcast_from_main(run.push)
        run.pull()
        return Run(run.path)


def _configure(
    config_class: type[Config],
    config: PathLike | Config,
    overrides: Mapping[str, Any] | None,
    arguments: Mapping[str, PathLike | None],
    swept: Mapping[str, Any],
) -> tuple[Config, list[str]]:
    """Returns the checked configuration of a call and notes on it; ``arguments`` are keys with their own argument."""
    keys = keys_of(config_class)
    values = parse_dict({} if overrides is None else overrides, "overrides", keys)
    for name, value in arguments.items():
        if value is not None:
            if name in values:
                raise UserError(f"{name} is set by an argument and by the overrides: remove one of the two")
            values |= parse_dict({name: path_text(value, name)}, "arguments", keys)
    if double := [name for name in swept if name in values]:
        raise UserError(f"{double[0]} is set and swept: remove one of the two")
    values |= parse_dict(swept, "space", keys)
    names, base = [], {}
    if isinstance(config, config_class):
        base = parse_dict(dataclasses.asdict(config), "config", keys)
    elif isinstance(config, str | os.PathLike):
        names = [path_text(config, "config")]
    elif type(config) in FUNCTIONS:
        raise UserError(f"config is a {type(config).__name__}: pass it to {FUNCTIONS[type(config)]}")
    else:
        raise UserError(f"config is {config!r:.60}: pass the name of a recipe, a path or a {config_class.__name__}")
    notes: list[str] = []
    resolved = resolve_config(config_class, names, values, "config", base, notes.append)
    resolved.check()
    if resolved.config.output_dir is not None:
        return resolved.config, notes
    if resolved.recipe is None:
        raise UserError("output_dir is not set: pass output_dir, the folder of the run")
    return dataclasses.replace(resolved.config, output_dir=f"runs/{resolved.recipe}"), notes


@contextlib.contextmanager
def as_library_call() -> Iterator[None]:
    """Wraps a call from Python: a received signal raises KeyboardInterrupt, or what it raises without this package."""
    use_compilation_cache()
    with system_errors_as_user_errors():
        try:
            yield
        except Interrupted as stop:
            sentence = f"saved at step {stop.step:,}: make the same call again to resume"
            if stop.signal_number != signal.SIGINT:
                LOGGER.info(sentence)
                signal.raise_signal(stop.signal_number)  # the signal's own handler is installed again
            raise KeyboardInterrupt(sentence) from None
