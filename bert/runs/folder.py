"""The folder of a run: locking, resuming, and compatibility checks."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.run_file import (
    CONFIG_FILE,
    DIGEST_FILE,
    apply_resumable_keys,
    check_vocabulary,
    describe_resumable_keys,
    first_difference,
    has_other_schedule,
    load_run_config,
    save_run_config,
)
from bert.config.run_file import config_class_of_run as config_class_of_run
from bert.config.validation import keys_of
from bert.config.yaml_io import build_config, dump, parse_yaml
from bert.errors import UserError, require
from bert.files import LOCK, exclusive_lock, is_temporary, local_path, read_json, require_utf8, write_atomic
from bert.remote import is_url, writable_path
from bert.runs.metrics_log import TRANSFER_SCORES, read_results
from bert.runs.mirror import Mirror, local_folder

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)

KINDS: dict[type, str] = {PretrainConfig: "pretraining", FinetuneConfig: "fine-tuning"}

DATA_DIGEST_FILE = "data.digest"
"""File with digests of the data, so that a run does not resume with other data."""

STREAM_FILE = "stream.json"
"""File with the positions of a stream's readers at each checkpoint, by the name of the examples of the phase."""

BRANCH_FILE = "branch.json"
"""File with the step and the number of rows after which a run with init_state continues its source's data."""

TARGET_TOKENIZER = "target_tokenizer"
"""Folder of the vocabulary of the targets, if a model has a separate one."""

ENVIRONMENT_FILE = "environment.json"

BUDGET_FILE = "budget.json"
"""File with the time that a run with training.max_minutes has used, and with its number of steps once fixed."""

LENGTH_KEYS = ("steps", "epochs", "max_minutes")
"""Keys of ``training`` that are replaced when the time budget fixes the number of steps."""

LOGGER_RUNS_FILE = "loggers.json"
"""File with the ids of a run at the services of its loggers, which a resumed run continues."""

STATE_FILES = (DIGEST_FILE, DATA_DIGEST_FILE, STREAM_FILE, BRANCH_FILE, ENVIRONMENT_FILE, LOGGER_RUNS_FILE, BUDGET_FILE)

FROZEN_WEIGHTS = "frozen.safetensors"
"""File with the frozen weights of a run with adapters (LoRA), which its checkpoints do not contain."""

TRANSFER = "transfer"
"""Folder of a pretraining run with the rows of the tasks that it is fine-tuned on."""

ROWS = "rows"
"""Folder of a run with training rows that were passed in memory."""


@dataclass(frozen=True)
class RunFolder(Generic[Config]):
    """The folder of one run.

    Attributes:
        path: the folder.
        config: configuration of the run; for a resumed run, as resolved at its start.
        resumed: whether the run was started before.
        is_writer: whether this process writes into the folder; with several hosts, only the first one does.
        mirror: the copy in an object store, if ``output_dir`` is a URL.
        previous: previous configuration of a resumed run whose schedule changes; else None.
        extended_from: number of steps before the schedule changed; None unless it changes.
    """

    path: Path
    config: Config
    resumed: bool
    is_writer: bool = True
    mirror: Mirror | None = None
    previous: Config | None = None
    extended_from: int | None = None

    def check_data(self, *digests: str) -> None:
        """Records the digests of the training rows, and of the rows that select the best step.

        Raises:
            UserError: the run started with other data.
        """
        if not self.is_writer:
            return
        file = self.path / DATA_DIGEST_FILE
        if not file.is_file():
            write_atomic(file, " ".join(digests) + "\n")
            return
        stored = file.read_text(encoding="utf-8", errors="replace").split()
        if not stored or list(digests)[: len(stored)] != stored:  # older runs only have the digest of the training rows
            fix = f"name another --output_dir, or remove {self.path}, which holds no checkpoint"
            if _has_checkpoint(self.path):
                fix = f"or start a new run from its weights: --init {self.path} and another --output_dir"
            raise UserError(f"the data is not what the run in {self.path} began with: restore it, {fix}")

    def save_rows(self, tables: Mapping[str, str]) -> None:
        """Writes rows that were passed in memory, so that the run can resume, and can be repeated from its config.yaml.

        Args:
            tables: contents by file name: ``*.jsonl`` with rows, and ``*.json`` with declared labels.

        Raises:
            UserError: the run started with other rows.
        """
        folder: Path = self.path / ROWS
        stored = {file.name: file.read_text(encoding="utf-8", errors="replace") for file in folder.glob("*.json*")}
        if not self.is_writer or stored == tables:
            return
        if _has_checkpoint(self.path):
            if _rows_alone(stored) == _rows_alone(tables):  # config.yaml has the labels
                return
            before, now = _rows_alone(stored), _rows_alone(tables)
            name = min(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            counts = [f"{len(rows.get(name, '').splitlines()):,}" for rows in (before, now)]
            raise UserError(
                f"the run in {self.path} began with other rows of {Path(name).stem} ({counts[0]}, now {counts[1]}): "
                "pass these to resume it, or name another output_dir"
            )
        self.save_config(self.config)  # written first: a folder without config.yaml is not a run
        for outdated in (*folder.glob("*.json*"), *self.path.glob(DATA_DIGEST_FILE)):
            outdated.unlink()
        folder.mkdir(exist_ok=True)
        for name, lines in tables.items():
            write_atomic(folder / name, lines)
        self.push()

    def push(self) -> None:
        """Uploads changes to the object store, if the run is in one. Raises UserError."""
        if self.mirror is not None and self.is_writer:
            self.mirror.push()

    def pull(self) -> None:
        """Downloads what the main process has pushed, on a host that does not write."""
        if self.mirror is not None and not self.is_writer:
            self.mirror.pull(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def save_config(self, config: Config, vocabulary: bool = True) -> RunFolder[Config]:
        """Writes config.yaml, and returns the folder with this configuration.

        Args:
            vocabulary: whether the vocabulary in the folder is final.
        """
        if self.is_writer:
            save_run_config(config, self.path, vocabulary)
        return dataclasses.replace(self, config=config)


@contextlib.contextmanager
def open_run(config: Config, within: Mirror | None = None) -> Iterator[RunFolder[Config]]:
    """Claims ``config.output_dir`` for this process, and starts or resumes the run in it.

    With several hosts (`jax.distributed`), the first one claims the folder and writes; all hosts open the same run. A
    URL names a folder in an object store, of which each host has a local copy (`bert.runs.mirror`).

    Args:
        within: the mirror of the run or sweep that contains this run, if that has a URL.

    Raises:
        UserError: the folder cannot be written, is in use by another process, or has other content.
    """
    jax = sys.modules.get("jax")  # without JAX there is one host
    if jax is None or not jax.distributed.is_initialized():
        with _open_on_this_host(config, within) as run:
            yield run
        return
    from bert.parallel.multihost import call_on_main

    with contextlib.ExitStack() as stack:
        claimed = call_on_main(partial(stack.enter_context, _open_on_this_host(config, within)), _to_dict)
        opened, run_dict = claimed
        if opened is not None:
            yield opened
            return
        keys = keys_of(type(config))
        resolved = build_config(type(config), parse_yaml(run_dict["config"], "config.yaml", keys))
        path, mirror, output_dir = Path(run_dict["path"]), within, require(resolved.output_dir, "output_dir")
        if is_url(output_dir):
            mirror = within or Mirror(local_folder(output_dir, jax.process_index()), output_dir)
            path = mirror.path_of(output_dir)
        run = RunFolder(path, resolved, run_dict["resumed"], is_writer=False, mirror=mirror)
        if run_dict["previous"] is not None:
            previous = build_config(type(config), parse_yaml(run_dict["previous"], "config.yaml", keys))
            run = dataclasses.replace(run, previous=previous)
        run.pull()
        yield run


def _to_dict(run: RunFolder[Any]) -> dict[str, Any]:
    previous = None if run.previous is None else dump(run.previous)
    return {"path": str(run.path), "config": dump(run.config), "resumed": run.resumed, "previous": previous}


@contextlib.contextmanager
def _open_on_this_host(config: Config, within: Mirror | None) -> Iterator[RunFolder[Config]]:
    output_dir, mirror = require(config.output_dir, "output_dir"), within
    with contextlib.ExitStack() as stack:
        if mirror is None:
            path, mirror = stack.enter_context(claim_output_dir(output_dir, "run", "config.yaml"))
        else:
            path = mirror.path_of(output_dir)
            path.mkdir(parents=True, exist_ok=True)
        run = dataclasses.replace(_resume_or_start(path, config), mirror=mirror)
        yield run
        run.push()


@contextlib.contextmanager
def claim_output_dir(output_dir: str, kind: str, marker: str) -> Iterator[tuple[Path, Mirror | None]]:
    """Creates a folder, and claims it for this process, on this host.

    Args:
        kind: description of the allowed content, for messages.
        marker: a file that every folder of this kind has.

    Yields:
        The local folder, and its mirror if ``output_dir`` is a URL.

    Raises:
        UserError: the folder cannot be written, is in use by another process, or has other content.
    """
    if not is_url(output_dir):
        path = Path(local_path(output_dir, "output_dir"))
        require_utf8(path.absolute(), "output_dir")
        with _claim_folder(path, kind, marker):
            yield path, None
        return
    path = local_folder(writable_path(output_dir, "output_dir"))
    mirror = Mirror(path, output_dir)
    with exclusive_lock(path), mirror.claim(kind, marker):
        yield path, mirror


@contextlib.contextmanager
def _claim_folder(path: Path, kind: str, marker: str) -> Iterator[None]:
    _check_is_kind_or_empty(path, kind, marker)  # before the lock, which writes
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir {path} cannot be written ({error.strerror}): name another one") from None
    with exclusive_lock(path):
        _check_is_kind_or_empty(path, kind, marker)
        for leftover in _leftovers(path):
            leftover.unlink(missing_ok=True)
        yield


def _check_is_kind_or_empty(path: Path, kind: str, marker: str) -> None:
    """Raises UserError for a file, and for a folder that is not empty and has no marker."""
    if path.exists() and not path.is_dir():
        raise UserError(f"output_dir {path} is a file: name a folder")
    if path.is_dir() and not (path / marker).is_file():
        allowed = {path / LOCK, *_leftovers(path)}
        if any(entry not in allowed for entry in path.iterdir()):
            raise UserError(f"{path} is not empty and holds no {kind} (no {marker}): name another --output_dir")


def _leftovers(path: Path) -> list[Path]:
    """Returns temporary files of killed processes (`bert.files.atomic_write`)."""
    return [entry for entry in path.glob(".*") if is_temporary(entry) and entry.is_file()]


def _is_missing(folder: str | None) -> bool:
    """Whether a folder is a local path that does not exist."""
    return folder is not None and not folder.startswith("hub:") and not is_url(folder) and not Path(folder).exists()


def _resume_or_start(path: Path, config: Config) -> RunFolder[Config]:
    """Returns the run in a folder that this process has claimed."""
    file = path / CONFIG_FILE
    if file.is_file():
        stored = load_run_config(path)
        if not isinstance(stored, type(config)):
            fix = "name another --output_dir"
            raise UserError(f"{path} holds a {KINDS[type(stored)]} run, but this is a {KINDS[type(config)]} run: {fix}")
        config = _with_decided_steps(path, config, stored)
        different = first_difference(config, stored)
        if different is None:
            check_vocabulary(path)
            resumed = RunFolder(path, apply_resumable_keys(stored, config), resumed=True)
            changes = has_other_schedule(config, stored) and _has_checkpoint(path)
            return dataclasses.replace(resumed, previous=stored) if changes else resumed
        if _has_checkpoint(path):
            key, stored_value, value = different
            if isinstance(config, FinetuneConfig) and _is_missing(config.data.dir):
                raise UserError(f"data.dir {config.data.dir} does not exist: name the folder of the task's files")
            is_pretraining = isinstance(stored, PretrainConfig)
            branch = f", or continue it there with --init {path}@STEP --init_state true" if is_pretraining else ""
            raise UserError(
                f"{path} holds another run: its {key} is {stored_value!r}, here {value!r}; name another --output_dir"
                f"{branch}, or resume it with --config {file} (keys that may change on resume: "
                f"{describe_resumable_keys(config, stored)})"
            )
        # Without a checkpoint, the user has only fixed a mistake in the configuration. The old config.yaml stays until
        # it is replaced, because a folder without it is not a run.
        for name in ("tokenizer.json", "vocab.txt", FROZEN_WEIGHTS, TRANSFER_SCORES, *STATE_FILES):
            (path / name).unlink(missing_ok=True)
        for name in (TARGET_TOKENIZER, ROWS):
            shutil.rmtree(path / name, ignore_errors=True)
    return RunFolder(path, config, resumed=False)


def read_budget(path: Path) -> dict[str, Any]:
    """Reads budget.json in a run's folder; empty if the file is missing or damaged."""
    with contextlib.suppress(UserError, OSError):
        budget = read_json(path / BUDGET_FILE)
        if isinstance(budget, dict) and isinstance(budget.get("seconds"), int | float):
            return budget
    return {}


def _with_decided_steps(path: Path, requested: Config, stored: Config) -> Config:
    """Returns the requested configuration, or with the stored number of steps if it was fixed for this request."""
    lengths = {key: getattr(requested.training, key) for key in LENGTH_KEYS}
    budget = read_budget(path)
    if budget.get("steps") is None or budget.get("requested") != lengths:
        return requested
    decided = {key: getattr(stored.training, key) for key in LENGTH_KEYS}
    return dataclasses.replace(requested, training=dataclasses.replace(requested.training, **decided))


def _rows_alone(tables: Mapping[str, str]) -> dict[str, str]:
    return {name: lines for name, lines in tables.items() if name.endswith(".jsonl")}


def run_and_step(source: str | Path) -> tuple[Path, int | None]:
    """Returns folder and step of ``RUN@STEP``; for any other path, the path and None."""
    path, (folder, _, step) = Path(source), str(source).rpartition("@")
    if step.isascii() and step.isdigit() and not path.exists() and (Path(folder) / "config.yaml").is_file():
        return Path(folder), int(step)
    return path, None


def _has_checkpoint(path: Path) -> bool:
    folder = path / "checkpoints"
    trained = folder.is_dir() and any(entry.name.isdigit() for entry in folder.iterdir())
    return trained or any(_has_checkpoint(seed) for seed in path.glob("seed-*"))


def has_ended(run: RunFolder[Any]) -> bool:
    """Returns whether a run has all of its results (all seeds, transfer), and its schedule does not change."""
    if run.previous is not None:
        return False
    results = read_results(run.path)
    if results is None or len(results.get("runs", [results])) != getattr(run.config, "num_seeds", 1):
        return False
    return getattr(run.config, "transfer", None) is None or "transfer" in results
