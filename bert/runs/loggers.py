"""Callbacks of a run, and loggers: callbacks that send metrics to TensorBoard, Weights & Biases or MLflow.

The libraries of the loggers are imported when a run starts. A logger never ends a run: after an error it logs one
warning and does nothing more.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib.util
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.run_file import flatten, redact_paths
from bert.errors import LOGGER, UserError
from bert.files import load_json, write_atomic
from bert.runs.environment import without_secrets
from bert.runs.folder import LOGGER_RUNS_FILE, RunFolder
from bert.runs.metrics_log import to_jsonable


@dataclass(frozen=True)
class RunStart:
    """The start of a run.

    Attributes:
        path: the run's folder.
        config: the resolved configuration.
        start_step: 0, or the step from which the run resumes.
        total_steps: the step at which the run ends.
    """

    path: Path
    config: PretrainConfig | FinetuneConfig
    start_step: int
    total_steps: int


class Callback:
    """Base class for callbacks. A run calls these methods on its main process; subclasses override some of them.

    After an exception in ``on_metrics``, the run saves its state, so that it can resume, and raises the exception.
    Each of several seeds is a run.
    """

    def on_start(self, start: RunStart) -> None:
        """Called before training starts or resumes."""

    def on_metrics(self, step: int, split: str, metrics: dict[str, Any]) -> bool | None:
        """Called with each line of metrics.jsonl.

        Args:
            step: the step of the run.
            split: ``train``, or ``eval`` for held-out data.
            metrics: the values by name.

        Returns:
            True to end the run after this step. It is evaluated and saved, and its results are written.
        """

    def on_end(self, results: dict[str, Any] | None) -> None:
        """Called at the end with the results, or with None if the run was interrupted or failed."""


PROJECT = "bert-jax"
"""Default project of Weights & Biases, and default experiment of MLflow."""

FLUSH_SECONDS = 5
"""Seconds of TensorBoard events that may be lost when the process is killed; metrics.jsonl loses none."""

PARAMS_PER_REQUEST = 100
"""MLflow's limit."""

WANDB_SECONDS = 300
"""Maximum time that a run waits at its end for uploads to Weights & Biases. Without a limit, it would wait forever for
an unreachable server. The files stay in wandb/ for ``wandb sync``.
"""

MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""Defaults of environment variables; otherwise MLflow would wait minutes for an unreachable server."""


class Logger(Callback):
    """A callback that never ends a run: after the first error of `start`, `log` or `end` it warns once and stops."""

    module: ClassVar[str]
    extra: ClassVar[str | None] = None
    """Required library, and the extra of this package that installs it."""

    _is_open = False

    @abc.abstractmethod
    def start(self, start: RunStart) -> None:
        """Opens the run at the service, or continues it."""

    @abc.abstractmethod
    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Sends finite numbers by ``split/name``."""

    @abc.abstractmethod
    def end(self, scores: dict[str, float] | None) -> None:
        """Closes the run with the numbers of its results.json; None if the run is incomplete."""

    def on_start(self, start: RunStart) -> None:
        self._is_open = True
        self._attempt(self.start, start)

    def on_metrics(self, step: int, split: str, metrics: dict[str, Any]) -> None:
        self._attempt(self.log, step, {f"{split}/{name}": value for name, value in _numbers(metrics).items()})

    def on_end(self, results: dict[str, Any] | None) -> None:
        self._attempt(self.end, None if results is None else _numbers(results))
        self._is_open = False

    def _attempt(self, call: Callable[..., None], *arguments: Any) -> None:
        if not self._is_open:
            return
        try:
            call(*arguments)
        except Exception as error:
            self._is_open = False
            reason = " ".join(str(error).split()) or type(error).__name__
            LOGGER.warning("%s failed, and the run continues without it: %.1000s", type(self).__name__, reason)


class TensorBoardLogger(Logger):
    """Writes metrics to tensorboard/ in the run's folder. On resume, TensorBoard hides the events of repeated steps."""

    module = "tensorboardX"

    def start(self, start: RunStart) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(
            str(start.path / "tensorboard"),
            purge_step=start.start_step + 1,
            flush_secs=FLUSH_SECONDS,
            # TensorBoard reads files in the order of their names, to which tensorboardX adds whole seconds.
            filename_suffix=f".{time.time_ns()}",
        )

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def end(self, scores: dict[str, float] | None) -> None:
        self._writer.close()


class WandbLogger(Logger):
    """Logs to Weights & Biases: configuration, metrics by ``train/`` and ``eval/``, and final scores in the summary.

    Local files are in wandb/ in the run's folder. Environment variables such as WANDB_MODE and WANDB_PROJECT apply.

    Args:
        settings: further arguments of ``wandb.init``, such as ``project``, ``entity`` and ``tags``.
    """

    module = extra = "wandb"

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def start(self, start: RunStart) -> None:
        import wandb

        # Git could run programs that the settings of the working directory name.
        wandb_settings: dict[str, Any] = {"console": "off", "disable_git": True}
        # Otherwise the service receives the command line with the credentials in its URLs.
        wandb_settings["x_disable_meta"] = without_secrets(sys.argv) != sys.argv
        if "finish_timeout" in wandb.Settings.model_fields:
            wandb_settings["finish_timeout"] = WANDB_SECONDS
        defaults = {
            "project": os.environ.get("WANDB_PROJECT", PROJECT),
            "name": _name(start.path),
            "reinit": "create_new",  # keeps another run of the user open
            "dir": str(start.path),
            "settings": wandb.Settings(**wandb_settings),
        }
        # The id is stored before the run is created, so that a run that is killed meanwhile has one.
        run_id = _read_run_ids(start.path).get(self.module) or uuid.uuid4().hex[:8]
        _keep_run_id(start.path, self.module, run_id)
        self._run = wandb.init(**{**defaults, **self._settings}, id=run_id, resume="allow")
        config = {**dataclasses.asdict(redact_paths(start.config)), "run_folder": str(start.path.resolve())}
        self._run.config.update(config, allow_val_change=True)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def end(self, scores: dict[str, float] | None) -> None:
        self._run.summary.update({f"final/{name}": value for name, value in (scores or {}).items()})
        self._run.finish(exit_code=1 if scores is None else 0)


class MlflowLogger(Logger):
    """Logs to MLflow: configuration as parameters, metrics by ``train/`` and ``eval/``, final scores by ``final/``.

    Args:
        experiment: name of the experiment; defaults to MLFLOW_EXPERIMENT_NAME, or bert-jax.
        tracking_uri: server or database; defaults to MLFLOW_TRACKING_URI, or MLflow's default.
    """

    module = extra = "mlflow"

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        self._experiment, self._tracking_uri = experiment, tracking_uri

    def start(self, start: RunStart) -> None:
        for name, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client, self._last_step = MlflowClient(tracking_uri=self._tracking_uri), start.start_step
        if run_id := _read_run_ids(start.path).get(self.module):
            self._client.update_run(run_id, status="RUNNING")
            self._run_id = run_id
            return
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        tags = {"run_folder": str(start.path.resolve())}
        self._run_id = self._client.create_run(experiment_id, run_name=_name(start.path), tags=tags).info.run_id
        _keep_run_id(start.path, self.module, self._run_id)
        values = flatten(dataclasses.asdict(redact_paths(start.config)))
        params = [Param(key, str(value)) for key, value in values.items()]
        for first in range(0, len(params), PARAMS_PER_REQUEST):
            self._client.log_batch(self._run_id, params=params[first : first + PARAMS_PER_REQUEST])

    def log(self, step: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        self._last_step, now = step, int(1000 * time.time())
        # MLflow rejects names with other characters.
        metrics = [Metric(re.sub(r"[^\w\-. /]", "_", name), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def end(self, scores: dict[str, float] | None) -> None:
        if scores is not None:
            self.log(self._last_step, {f"final/{name}": value for name, value in scores.items()})
        self._client.set_terminated(self._run_id, "KILLED" if scores is None else "FINISHED")


LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MlflowLogger}
"""Loggers by their names in the key ``loggers``."""


def make_loggers(names: Sequence[str] | None) -> list[Logger]:
    """Returns the loggers of a run; None means TensorBoard if tensorboardX is installed.

    Raises:
        UserError: a library is not installed.
    """
    if names is None:
        return [TensorBoardLogger()] if _is_installed(TensorBoardLogger) else []
    for name in names:
        if not _is_installed(LOGGERS[name]):
            package = f"'bert-jax[{extra}]'" if (extra := LOGGERS[name].extra) else LOGGERS[name].module
            raise UserError(f"loggers has {name}, but it is not installed: pip install {package}, or remove it")
    return [LOGGERS[name]() for name in dict.fromkeys(names)]


def _is_installed(logger: type[Logger]) -> bool:
    return importlib.util.find_spec(logger.module) is not None


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Returns finite numbers by dotted names, without the ``details`` of results.json."""
    flat = flatten({name: value for name, value in to_jsonable(metrics).items() if name != "details"})
    return {name: value for name, value in flat.items() if type(value) in (int, float)}


def _name(path: Path) -> str:
    """Returns the name of a run at a service: the name of its folder, and for one of several seeds the folder above."""
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.name.startswith("seed-") else path.name


def _read_run_ids(folder: Path) -> dict[str, str]:
    """Returns the ids of a run at services, by module."""
    file = folder / LOGGER_RUNS_FILE
    return dict(load_json(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _keep_run_id(folder: Path, module: str, run_id: str) -> None:
    ids = {**_read_run_ids(folder), module: run_id}
    write_atomic(folder / LOGGER_RUNS_FILE, json.dumps(ids, indent=2) + "\n")


class RunCallbacks:
    """The loggers of a run and further callbacks, as a context manager; at its exit they receive the results.

    Attributes:
        callbacks: loggers first.
        results: passed to `Callback.on_end`; None if training raised an error.
    """

    def __init__(self, run: RunFolder[Any], callbacks: Sequence[Callback] = ()) -> None:
        """Raises UserError if the library of a logger is not installed."""
        self.callbacks: list[Callback] = [*make_loggers(run.config.loggers), *callbacks]
        self.results: dict[str, Any] | None = None
        self._is_writer = run.is_writer

    def __enter__(self) -> RunCallbacks:
        return self

    def __exit__(self, *_: object) -> None:
        for callback in self.callbacks if self._is_writer else ():
            callback.on_end(to_jsonable(self.results))
