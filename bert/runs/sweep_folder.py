"""The folder of a sweep: sweep.json, and a run for each trial."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bert.errors import UserError
from bert.files import write_atomic
from bert.parallel.multihost import broadcast_from_main, is_main_process
from bert.runs.folder import claim_folder
from bert.runs.metrics_log import to_jsonable

SWEEP_FILE = "sweep.json"


@contextlib.contextmanager
def open_sweep(path: Path, plan: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Claims a folder for a sweep, on all hosts, and gives the trials of its sweep.json that are still there.

    Args:
        path: the folder, empty or of the same sweep.
        plan: what identifies the sweep: ``space`` by key, ``num_trials`` and ``seed``, both null for a grid.

    Raises:
        UserError: the folder is in use, or holds something that is not this sweep.
    """
    with contextlib.ExitStack() as stack:
        yield broadcast_from_main(lambda: stack.enter_context(_open_on_this_host(path, plan)))


@contextlib.contextmanager
def _open_on_this_host(path: Path, plan: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    with claim_folder(path, "sweep", SWEEP_FILE):
        file, trials = path / SWEEP_FILE, []
        if file.is_file():
            stored = _read(file)
            _check_is_same(path, plan, stored)
            trials = [trial for trial in stored["trials"] if (path / trial["name"]).is_dir()]
        else:
            write_sweep(path, {**plan, "trials": []})
        yield trials


def _read(file: Path) -> dict[str, Any]:
    try:
        stored = dict(json.loads(file.read_text(encoding="utf-8")))
        if stored.keys() >= {"space", "num_trials", "seed", "trials"}:
            return stored
    except (OSError, ValueError, TypeError):
        pass
    raise UserError(f"{file} cannot be read: remove it, or pass another --output_dir")


def _check_is_same(path: Path, plan: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raises UserError for a sweep over other keys. A grid may get other values, and a search more trials: trials that
    have ended stay as they are."""
    asked, held = to_jsonable(plan["space"]), stored["space"]
    if list(asked) != list(held):
        difference = f"sweeps over {', '.join(held)}, here over {', '.join(asked)}"
    elif (plan["num_trials"] is None) != (stored["num_trials"] is None):
        difference = "was started " + ("without" if stored["num_trials"] is None else "with") + " a number of trials"
    elif plan["num_trials"] is not None and (asked, plan["seed"]) != (held, stored["seed"]):
        difference = "searches other values, or with another seed"
    else:
        return
    raise UserError(f"{path} holds another sweep, which {difference}: pass the same keys, or another --output_dir")


def write_sweep(path: Path, content: Mapping[str, Any]) -> None:
    """Writes sweep.json, on the main process."""
    if is_main_process():
        write_atomic(path / SWEEP_FILE, json.dumps(to_jsonable(dict(content)), indent=2, allow_nan=False) + "\n")
