"""Records software and devices of each session of a run in environment.json, and profiler traces in profile/."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bert
from bert.errors import REDACTED, Log, is_secret_name, redact
from bert.files import load_json, write_atomic
from bert.parallel.devices import local_devices
from bert.runs.folder import ENVIRONMENT_FILE, Config, RunFolder

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
GIT_FILE_BYTES = 2**22
"""Maximum size of files of git that are read. ``packed-refs`` of a large repository has some megabytes."""


def begin_session(run: RunFolder[Config], config: Config) -> RunFolder[Config]:
    """Returns the run with its resolved configuration, and records configuration and environment in its folder.

    The config.yaml of a resumed run is kept until ``build_data`` has checked a changed schedule.
    """
    run = dataclasses.replace(run, config=config) if run.resumed else run.save_config(config, vocabulary=False)
    record_environment(run)
    return run


def record_environment(run: RunFolder[Any]) -> None:
    """Adds this session to environment.json, on the host that writes."""
    if run.is_writer:
        sessions = [*read_environment(run.path), describe_environment()]
        write_atomic(run.path / ENVIRONMENT_FILE, json.dumps(sessions, indent=2) + "\n")


def read_environment(run: Path) -> list[dict[str, Any]]:
    """Returns the sessions of a run in order; none if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        sessions = load_json((run / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
        if isinstance(sessions, list) and all(isinstance(session, dict) for session in sessions):
            return sessions
    return []


def describe_environment() -> dict[str, Any]:
    """Describes this process, without environment variables. The user's home folder is replaced by ~."""
    import jax

    first, *_ = devices = local_devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"bert-jax": bert.__version__, **{name: _version(name) for name in PACKAGES}},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": {
            "platform": first.platform,
            "kind": first.device_kind,
            "count": len(devices) * jax.process_count(),
            "processes": jax.process_count(),
        },
        "command": [_without_home(argument) for argument in without_secrets(sys.argv)],
        "git": _git(Path.cwd()),
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Redacts credentials in URLs, and values of options such as --token, in the arguments of a program."""
    kept: list[str] = []
    after_secret = False
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        is_secret = option.startswith("-") and is_secret_name(option)
        shown = f"{option}={REDACTED}" if is_secret and equals else redact(argument)
        kept.append(REDACTED if after_secret and not argument.startswith("-") else shown)
        after_secret = is_secret and not equals
    return kept


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _without_home(text: str) -> str:
    with contextlib.suppress(RuntimeError):  # a user without a home folder, as in some containers
        home = str(Path.home())
        return text if home == "/" else text.replace(home, "~")
    return text


def _git(folder: Path) -> dict[str, Any] | None:
    """Returns the commit of the working tree that contains a folder; None for any other folder.

    It is read from the files of git, because git itself could run programs that an untrusted folder configures.
    """
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        if git.exists():
            if match := re.fullmatch(r"gitdir: (.+)\n?", _read_small(git)):  # a linked working tree or a submodule
                git = parent / match[1]
            common = git / (_read_small(git / "commondir").strip() or ".")
            commit = _commit(git, common)
            return {"commit": commit} if commit else None
    return None


def _commit(git: Path, common: Path) -> str | None:
    """Returns the commit of HEAD. ``common`` is the folder with the branches, which working trees share."""
    head = _read_small(git / "HEAD").strip()
    if match := re.fullmatch(r"ref: (refs/[^\s\\]+)", head):
        if ".." in match[1]:
            return None
        packed = re.search(rf"^(\w+) {re.escape(match[1])}$", _read_small(common / "packed-refs"), re.MULTILINE)
        head = _read_small(common / match[1]).strip() or (packed[1] if packed else "")
    return head if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", head) else None


def _read_small(file: Path) -> str:
    """Reads a text file; returns "" for other paths, such as a folder, a pipe or a large file."""
    with contextlib.suppress(OSError, ValueError):
        if file.is_file() and file.stat().st_size <= GIT_FILE_BYTES:
            return file.read_text(encoding="utf-8", errors="replace")
    return ""


FOLDER = "profile"

WARMUP_STEPS = 5
"""Number of steps before the trace, while caches fill."""

TRACED_STEPS = 5
"""Number of traced steps, including the host's work between them."""


def make_profiler(enabled: bool, folder: Path, log: Log) -> contextlib.AbstractContextManager[StepProfiler | None]:
    """Returns a context manager that yields a `StepProfiler` for a run's folder, or None if profiling is disabled."""
    return StepProfiler(folder, log) if enabled else contextlib.nullcontext()


class StepProfiler:
    """Writes a trace of a few early steps to ``profile/`` in a run's folder.

    Use it as a context manager or close it, so that a run that ends during the trace still writes the trace.
    """

    def __init__(self, folder: Path, log: Log) -> None:
        self._folder, self._log = folder / FOLDER, log
        self._num_steps = 0
        self._trace = contextlib.ExitStack()

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def before_step(self, state: Any) -> None:
        """Starts or ends the trace. Waits for ``state``, the result of the previous step."""
        import jax

        if self._num_steps == WARMUP_STEPS:
            jax.block_until_ready(state)
            self._trace.callback(self._print_path)  # after the trace is written
            self._trace.enter_context(jax.profiler.trace(str(self._folder), create_perfetto_trace=True))
        if self._num_steps == WARMUP_STEPS + TRACED_STEPS:
            jax.block_until_ready(state)
            self._trace.close()
        self._num_steps += 1

    def close(self) -> None:
        """Writes the trace, even if it is incomplete."""
        if 0 < self._num_steps <= WARMUP_STEPS:
            self._log(f"no step was traced: the trace starts after {WARMUP_STEPS} steps")
        self._trace.close()

    def _print_path(self) -> None:
        [*_, trace] = sorted(self._folder.rglob("perfetto_trace.json.gz"))
        self._log(
            f"the trace is in {self._folder}: open it with tensorboard --logdir {self._folder} "
            f"(xprof must be installed), or open {trace} on https://ui.perfetto.dev"
        )
