"""environment.json: the software and the devices of each session of a run, for people; a resume compares none of it."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import bert
from bert.files import write_atomic
from bert.parallel.devices import local_devices
from bert.runs.folder import ENVIRONMENT_FILE, RunFolder

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
GIT_SECONDS = 10
"""What a run waits for git, which may have a large working tree to look at."""


def record_environment(run: RunFolder[Any]) -> None:
    """Adds this session to environment.json, on the host that writes."""
    if run.is_writer:
        sessions = [*read_environment(run.path), describe_environment()]
        write_atomic(run.path / ENVIRONMENT_FILE, json.dumps(sessions, indent=2) + "\n")


def read_environment(run: Path) -> list[dict[str, Any]]:
    """The sessions of a run, the first one first; none if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        sessions = json.loads((run / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
        if isinstance(sessions, list) and all(isinstance(session, dict) for session in sessions):
            return sessions
    return []


def describe_environment() -> dict[str, Any]:
    """This process: no environment variables, and ~ for the user's home, which may have the user's name."""
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
        "command": [_without_home(argument) for argument in sys.argv],
        "git": _git(Path.cwd()),
    }


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _without_home(text: str) -> str:
    with contextlib.suppress(RuntimeError):  # a user without a home, as in some containers
        home = str(Path.home())
        return text if home == "/" else text.replace(home, "~")
    return text


def _git(folder: Path) -> dict[str, Any] | None:
    """The commit of a folder's working tree, and whether files differ from it; None for any other folder."""

    def run(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True).stdout.strip()

    try:
        return {"commit": run("rev-parse", "HEAD"), "changed": bool(run("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
