"""The run directory: locking, resuming, and compatibility checks."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.model import MODEL_KEYS_KEPT_WITH_INIT
from bert.config.run_file import (
    CONFIG_FILE,
    DIGEST_FILE,
    check_vocabulary,
    flatten,
    load_run_config,
    save_run_config,
    with_credentials,
)
from bert.config.run_file import config_class_of_run as config_class_of_run
from bert.config.yaml_io import build_config, dump, keys_of, parse_yaml
from bert.errors import UserError, redact, require
from bert.files import is_temporary, local_path, require_utf8, write_atomic
from bert.locks import LOCK, exclusive_lock
from bert.runs.mirror import Mirror, local_folder
from bert.urls import is_url, writable_path

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)

KINDS: dict[type, str] = {PretrainConfig: "pretraining", FinetuneConfig: "fine-tuning"}

DATA_DIGEST_FILE = "data.digest"
"""File with the digest of the training data, so that a run does not resume with other data."""

STREAM_FILE = "stream.json"
"""File with the places of a stream's readers at the checkpoints, by the name of the examples of the phase."""

TARGET_TOKENIZER = "target_tokenizer"
"""Folder of the vocabulary of the targets, in the run of a model that has one of their own."""

# What may change when a run resumes: none of these changes the result beyond the rounding of sums. (Evaluations and log
# lines with other intervals are at other steps, and the best of other evaluations may be another one: the user asked
# for it.) Every remedy of `bert.runtime.system_errors.OUT_OF_MEMORY` is one of these. Keys of phases have no
# number here.
RESUMABLE_KEYS = (
    "output_dir",
    "profile",
    "loggers",
    "transfer",
    "num_seeds",
    "data.num_workers",
    "data.cache_dir",
    "training.log_every",
    "training.eval_every",
    "training.checkpoint_every",
    "training.max_to_keep",
    "training.max_consecutive_nonfinite_steps",
    "training.eval_batch_size",
    "training.gradient_accumulation_steps",
    "training.mesh",
    "training.remat",
    "training.scan_layers",
    "training.pad_vocab_to_multiple_of",
    "phases.gradient_accumulation_steps",
)

ENVIRONMENT_FILE = "environment.json"

LOGGER_RUNS_FILE = "loggers.json"
"""File with the ids of a run at the services of its loggers, so that a resumed run continues there."""

FROZEN_WEIGHTS = "frozen.safetensors"
"""File with the weights that a run with adapters (LoRA) does not train, which its checkpoints do not hold."""

ROWS = "rows"
"""Folder of a run with the rows that were given in memory."""

DERIVED_KEYS = (
    "model.vocab_size",
    "model.decoder_vocab_size",
    "model.decoder_layers",
    "data.labels",
    "data.clitics",
    "data.dev_fraction",
    "distillation.checksum",
    "embedding.pooling",
    "embedding.normalize",
    "embedding.lowercase",
    "embedding.query_prompt",
    "embedding.document_prompt",
    "lora.checksum",
)
"""Keys that default to null and are filled in from the data or the initial model; config.yaml records the value."""


EARLIER_DEFAULTS = {"tokenizer.strip_accents": None, "target_tokenizer.strip_accents": None}
"""Defaults of earlier versions, which the config.yaml of an older run records: the same command resumes that run."""


@dataclass(frozen=True)
class RunFolder(Generic[Config]):
    """An output folder that belongs to one run.

    Attributes:
        path: the folder.
        config: of the run; of a resumed one as it was resolved at its start.
        resumed: whether the run was started before.
        is_writer: whether this process writes into the folder; of several hosts, the first one does.
        mirror: its copy in an object store, if ``output_dir`` is a URL.
    """

    path: Path
    config: Config
    resumed: bool
    is_writer: bool = True
    mirror: Mirror | None = None

    def check_data(self, *digests: str) -> None:
        """Remembers the rows that the run is trained on, and those that choose its best step, by their digests.

        Raises:
            UserError: the run began with other data.
        """
        if not self.is_writer:
            return
        file = self.path / DATA_DIGEST_FILE
        if not file.is_file():
            write_atomic(file, " ".join(digests) + "\n")
            return
        stored = file.read_text(encoding="utf-8", errors="replace").split()
        if not stored or list(digests)[: len(stored)] != stored:  # older runs have that of the training rows alone
            way_out = "" if _has_checkpoint(self.path) else f", or remove {self.path}, which holds no checkpoint"
            raise UserError(
                f"the data is not what the run in {self.path} began with: restore it, or name another --output_dir"
                + way_out
            )

    def save_rows(self, tables: Mapping[str, str]) -> None:
        """Writes rows that were given in memory, so that the run can resume, and its config.yaml repeat it.

        Args:
            tables: contents of the files by file name: ``*.jsonl``, and ``*.json`` with the labels that rows declare.

        Raises:
            UserError: the run began with other rows.
        """
        folder: Path = self.path / ROWS
        stored = {file.name: file.read_text(encoding="utf-8", errors="replace") for file in folder.glob("*.json*")}
        if not self.is_writer or stored == tables:
            return
        if _has_checkpoint(self.path):
            if _rows_alone(stored) == _rows_alone(tables):  # config.yaml has the labels of a run that has begun
                return
            raise UserError(
                f"the rows are not those that the run in {self.path} began with: pass these, or another output_dir"
            )
        self.save_config(self.config)  # before other files: a folder without config.yaml belongs to no run
        for outdated in (*folder.glob("*.json*"), *self.path.glob(DATA_DIGEST_FILE)):
            outdated.unlink()
        folder.mkdir(exist_ok=True)
        for name, lines in tables.items():
            write_atomic(folder / name, lines)
        self.push()

    def push(self) -> None:
        """Copies what has changed into the object store, if the run is in one. Raises UserError."""
        if self.mirror is not None and self.is_writer:
            self.mirror.push()

    def pull(self) -> None:
        """Copies what the main process has pushed, on a host that does not write."""
        if self.mirror is not None and not self.is_writer:
            self.mirror.pull(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def save_config(self, config: Config, vocabulary: bool = True) -> RunFolder[Config]:
        """Writes config.yaml with everything resolved, and returns the folder with it.

        Args:
            config: everything resolved.
            vocabulary: whether the vocabulary in the folder is final.
        """
        if self.is_writer:
            save_run_config(config, self.path, vocabulary)
        return dataclasses.replace(self, config=config)


@contextlib.contextmanager
def open_run(config: Config, within: Mirror | None = None) -> Iterator[RunFolder[Config]]:
    """Claims ``config.output_dir`` for this process alone, or finds the same run there already.

    Of several hosts (`jax.distributed`), the first one claims the folder and writes; all get the same run. A URL names
    a folder in an object store, of which each host has a local copy (`bert.runs.mirror`).

    Args:
        config: as asked for.
        within: the mirror of the run or the sweep that this run is a part of; None unless that has a URL.

    Raises:
        UserError: the folder cannot be written, is in use by another process, or holds something that is not this run.
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
        run.pull()
        yield run


def _to_dict(run: RunFolder[Any]) -> dict[str, Any]:
    return {"path": str(run.path), "config": dump(run.config), "resumed": run.resumed}


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
    """Makes a folder, and holds it for this process alone, on this host.

    Args:
        output_dir: a path or a URL.
        kind: what the folder may hold.
        marker: the file that a folder of this kind has.

    Yields:
        The local folder, and for a URL its mirror.

    Raises:
        UserError: the folder cannot be written, is in use by another process, or holds anything else.
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
    """Raises UserError for a file, and for a folder with anything in it but one of its kind."""
    if path.exists() and not path.is_dir():
        raise UserError(f"output_dir {path} is a file: name a folder")
    if path.is_dir() and not (path / marker).is_file():
        allowed = {path / LOCK, *_leftovers(path)}
        if any(entry not in allowed for entry in path.iterdir()):
            raise UserError(f"{path} is not empty and holds no {kind} (no {marker}): name another --output_dir")


def _leftovers(path: Path) -> list[Path]:
    """What a kill left of files that were being written (`bert.files.atomic_write`)."""
    return [entry for entry in path.glob(".*") if is_temporary(entry) and entry.is_file()]


def _resume_or_start(path: Path, config: Config) -> RunFolder[Config]:
    """The run in a folder that this process has for itself."""
    file = path / CONFIG_FILE
    if file.is_file():
        stored = load_run_config(path)
        if not isinstance(stored, type(config)):
            raise UserError(
                f"{path} holds a {KINDS[type(stored)]} run, and this is a {KINDS[type(config)]} run: "
                "name another --output_dir"
            )
        different = _difference(config, stored)
        if different is None:
            check_vocabulary(path)
            return RunFolder(path, _apply_resumable_keys(stored, config), resumed=True)
        if _has_checkpoint(path):
            key, stored_value, value = different
            raise UserError(
                f"{path} holds another run: its {key} is {stored_value!r}, here {value!r}; name another --output_dir, "
                f"or resume it with --config {file}"
            )
        # Nothing was trained yet: the user fixed a mistake before the first checkpoint.
        # config.yaml stays until the new one takes its place: a folder without it belongs to no run.
        files = (
            "tokenizer.json",
            "vocab.txt",
            DIGEST_FILE,
            DATA_DIGEST_FILE,
            STREAM_FILE,
            ENVIRONMENT_FILE,
            LOGGER_RUNS_FILE,
            FROZEN_WEIGHTS,
        )
        for name in files:
            (path / name).unlink(missing_ok=True)
        for name in (TARGET_TOKENIZER, ROWS):
            shutil.rmtree(path / name, ignore_errors=True)
    return RunFolder(path, config, resumed=False)


def _rows_alone(tables: Mapping[str, str]) -> dict[str, str]:
    return {name: lines for name, lines in tables.items() if name.endswith(".jsonl")}


def run_and_step(source: str | Path) -> tuple[Path, int | None]:
    """The folder and the step of ``RUN@STEP``; of any other path, that and None."""
    path, (folder, _, step) = Path(source), str(source).rpartition("@")
    if step.isascii() and step.isdigit() and not path.exists() and (Path(folder) / "config.yaml").is_file():
        return Path(folder), int(step)
    return path, None


def _has_checkpoint(path: Path) -> bool:
    folder = path / "checkpoints"
    trained = folder.is_dir() and any(entry.name.isdigit() for entry in folder.iterdir())
    return trained or any(_has_checkpoint(seed) for seed in path.glob("seed-*"))


def _difference(requested: Config, stored: Config) -> tuple[str, Any, Any] | None:
    """The first key in which two runs differ, and its values in the stored and in the requested one."""
    # A run that starts from another one has that one's sizes, whatever the recipe says.
    source = requested.init not in (None, "none") or getattr(requested, "architecture_from", None) is not None
    stored_values, values = flatten(dataclasses.asdict(stored)), flatten(dataclasses.asdict(requested))
    defaults = {key: field.default for key, field in keys_of(type(requested)).items()}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        comes_along = section in ("model", "tokenizer") and name not in MODEL_KEYS_KEPT_WITH_INIT
        if key == "tokenizer.path" and isinstance(requested, PretrainConfig):
            comes_along = False  # the source's vocabulary may be extended
        taken = (source and comes_along) or re.sub(r"^phases\.\d+\.", "phases.", key) in RESUMABLE_KEYS
        if key == "num_seeds":  # more of several may come; one run and several are different folders
            taken = (value > 1) == (stored_values[key] > 1)
        resolved = key in DERIVED_KEYS and value is None
        older = key in EARLIER_DEFAULTS and (value, stored_values.get(key)) == (defaults[key], EARLIER_DEFAULTS[key])
        if not taken and not resolved and not older and redact(value) != redact(stored_values.get(key)):
            return key, stored_values.get(key), value
    return next(((key, value, None) for key, value in stored_values.items() if key not in values), None)


def _apply_resumable_keys(stored: Config, requested: Config) -> Config:
    """The stored configuration with the requested values of `RESUMABLE_KEYS`."""
    for key in RESUMABLE_KEYS:
        section, _, name = key.rpartition(".")
        if not section:
            stored = _with_value(stored, requested, name)
        elif getattr(stored, section, None) and getattr(requested, section, None):
            changed = _with_value(getattr(stored, section), getattr(requested, section), name)
            stored = dataclasses.replace(stored, **{section: changed})
    return with_credentials(stored, requested)


def _with_value(stored: Any, requested: Any, name: str) -> Any:
    """A section, or each of a list of sections, with one value of another; as it is without such a key."""
    if isinstance(stored, list):
        return [_with_value(*pair, name) for pair in zip(stored, requested, strict=True)]
    return dataclasses.replace(stored, **{name: getattr(requested, name)}) if hasattr(requested, name) else stored
