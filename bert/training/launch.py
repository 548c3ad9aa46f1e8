"""Starts and resumes runs: `bert.pretrain` and `bert.finetune`, and the common part of the commands."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Literal, Never, TypeVar

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.sources import resolve_config
from bert.config.validation import keys_of
from bert.config.yaml_io import UserValue, parse_dict
from bert.errors import LOGGER, UserError, log_info, require, system_errors_as_user_errors
from bert.files import path_text
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
from bert.training.arguments import ARGUMENTS, FUNCTIONS, check_names, values_of_arguments
from bert.training.finetuning.run import finetune as run_finetuning
from bert.training.finetuning.run import finetune_seeds
from bert.training.pretraining.run import pretrain as run_pretraining
from bert.training.runs import Run

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


def pretrain(
    config: PathLike | PretrainConfig = "quickstart",
    *,
    train: PathLike | Sequence[PathLike] | None = None,
    eval: PathLike | Sequence[PathLike] | None = None,
    init: PathLike | None = None,
    output_dir: PathLike | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    sequence_length: int | None = None,
    vocab_size: int | None = None,
    seed: int | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **unknown: Never,  # for an error that names the most similar argument
) -> Run:
    """Pretrains an encoder or a language model, like `bert pretrain`; repeating the call resumes the run.

    An argument that is None leaves the value of the recipe.

    Args:
        config: name of a recipe, path of a YAML file, or a configuration.
        train: corpus: files, globs, folders, URLs, or ``hub:ORG/NAME`` (key ``data.train``).
        eval: held-out corpus; by default, a share of ``train`` is held out (key ``data.eval``).
        init: run, folder or hub name of the model to start from; None starts from random weights.
        output_dir: folder of the run. Defaults to runs/ and the name of the recipe.
        steps: number of optimizer steps (key ``training.steps``).
        epochs: number of passes over the training rows, instead of ``steps`` (key ``training.epochs``).
        batch_size: rows per step, over all devices (key ``training.batch_size``).
        learning_rate: peak learning rate (key ``optimizer.learning_rate``).
        sequence_length: tokens per row (key ``data.sequence_length``).
        vocab_size: number of tokens of the vocabulary that is trained (key ``tokenizer.vocab_size``).
        seed: seed of the initial weights, the order of the rows, masks and dropout.
        dtype: data type of the computation (key ``training.dtype``).
        overrides: values of all other keys, dotted, ``{"model.hidden_size": 64}``, or nested,
            ``{"model": {"hidden_size": 64}}``.
        callbacks: `Callback` objects that receive the metrics and may end the run.

    Raises:
        UserError: wrong arguments, keys, values or data; the message is one sentence with a fix.
        KeyboardInterrupt: the run was interrupted; its state is saved.
    """
    arguments = {name: value for name, value in locals().items() if name in ARGUMENTS[PretrainConfig]}
    with as_library_call():
        request = prepare_pretraining(config, overrides=overrides, **arguments, **unknown)
        run = start_or_resume(request, callbacks)
        for remark in run.results.get("remarks", ()):
            main_process_only(LOGGER.warning)(remark)
        return run


def prepare_pretraining(
    config: PathLike | PretrainConfig,
    *,
    overrides: Mapping[str, Any] | None = None,
    swept: Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> RunRequest[PretrainConfig]:
    """Resolves the arguments of `pretrain`; ``swept`` holds the values of a trial by dotted key."""
    values = values_of_arguments(PretrainConfig, arguments)
    return RunRequest(*_configure(PretrainConfig, config, overrides, values, swept))


def finetune(
    config: PathLike | FinetuneConfig,
    *,
    train: Any = None,
    dev: Any = None,
    init: PathLike | None = None,
    output_dir: PathLike | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    max_length: int | None = None,
    seed: int | None = None,
    num_seeds: int | None = None,
    patience: int | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **unknown: Never,  # for an error that names the most similar argument
) -> Run:
    """Fine-tunes a model on a task, like `bert finetune`; repeating the call resumes the run.

    An argument that is None leaves the value of the recipe.

    Args:
        config: name of a recipe, path of a YAML file, or a configuration.
        train: for the tasks on custom data, the path of a labelled file, or rows in memory: dictionaries by column, a
            ``pandas.DataFrame`` or a ``datasets.Dataset``. They are written to rows/ in the run's folder.
        dev: the same for the rows that select the best checkpoint; None holds out a share of ``train`` if there is no
            file.
        init: run, folder or hub name of the model to start from; ``"none"`` starts from random weights.
        output_dir: folder of the run. Defaults to runs/ and the name of the recipe.
        epochs: number of passes over the training rows (key ``training.epochs``).
        batch_size: rows per step, over all devices (key ``training.batch_size``).
        learning_rate: peak learning rate (key ``optimizer.learning_rate``).
        max_length: maximum number of tokens of a row (key ``data.max_length``).
        seed: seed of the initial head, the order of the rows and dropout.
        num_seeds: number of runs with consecutive seeds; the results have their mean and standard deviation.
        patience: number of consecutive evaluations without a better score after which training stops.
        dtype: data type of the computation (key ``training.dtype``).
        overrides: values of all other keys, dotted, ``{"lora.rank": 8}``, or nested, ``{"lora": {"rank": 8}}``.
        callbacks: `Callback` objects that receive the metrics and may end the run.

    Raises:
        UserError: wrong arguments, keys, values or data; the message is one sentence with a fix.
        KeyboardInterrupt: the run was interrupted; its state is saved.
    """
    arguments = {name: value for name, value in locals().items() if name in ARGUMENTS[FinetuneConfig]}
    with as_library_call():
        request = prepare_finetuning(config, overrides=overrides, **arguments, **unknown)
        with _rows_named_by_argument(request):
            run = start_or_resume(request, callbacks)
        if run.results["collapsed"]:
            main_process_only(LOGGER.warning)(
                "collapsed: on dev the model gives the same answer throughout, or is no better than the baseline in "
                "run.results: use another learning rate, or train longer"
            )
        for remark in run.results.get("remarks", ()):
            main_process_only(LOGGER.warning)(f"on dev: {remark}")
        return run


@contextlib.contextmanager
def _rows_named_by_argument(request: RunRequest[FinetuneConfig]) -> Iterator[None]:
    """Names the argument and the row in errors about rows in memory, instead of the file in the run's folder."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for file in request.tables:
            path = os.path.join(request.config.data.dir or "", file)
            message = re.sub(rf"{re.escape(path)}, line (?=\d)", f"argument {Path(file).stem}, row ", message)
        if message == str(error):
            raise
        raise UserError(message) from None


def prepare_finetuning(
    config: PathLike | FinetuneConfig,
    *,
    train: Any = None,
    dev: Any = None,
    overrides: Mapping[str, Any] | None = None,
    swept: Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> RunRequest[FinetuneConfig]:
    """Resolves the arguments of `finetune`; ``swept`` holds the values of a trial by dotted key."""
    check_names(FinetuneConfig, arguments)
    inputs = {"train": train, "dev": dev}
    tables: dict[str, str] = {}
    for name, rows in inputs.items():
        tables |= {} if _is_path(rows) else table_files(rows, name)
    values = values_of_arguments(FinetuneConfig, arguments | _file_names(inputs, tables))
    if tables:
        values |= parse_dict({"data.dir": ROWS}, "argument train", keys_of(FinetuneConfig))
    configured, notes = _configure(FinetuneConfig, config, overrides, values, swept)
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


def _file_names(inputs: Mapping[str, Any], tables: Mapping[str, str]) -> dict[str, PathLike | None]:
    """Returns the files of ``train`` and ``dev``: names in the folder `ROWS` for rows in memory, or absolute paths."""
    if "dev.jsonl" in tables and inputs["train"] is None:
        raise UserError("dev is given as rows, and train is not given: pass both")
    files: dict[str, PathLike | None] = {}
    for name, rows in inputs.items():
        file = f"{name}.jsonl"
        if file not in tables:
            file = rows if rows is None or is_url(rows) else os.path.abspath(rows)
        files[name] = file
    return files


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
    arguments: Mapping[str, UserValue],
    swept: Mapping[str, Any],
) -> tuple[Config, list[str]]:
    """Returns the checked configuration of a call and notes on it; ``arguments`` are keys with their own argument."""
    keys = keys_of(config_class)
    values = parse_dict({} if overrides is None else overrides, "overrides", keys)
    if double := [name for name in arguments if name in values]:
        raise UserError(f"{double[0]} is set by an argument and by the overrides: remove one of the two")
    values |= arguments
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
