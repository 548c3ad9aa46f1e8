"""The folder of a sweep: sweep.json, and a run for each trial."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from bert.config.sweep import with_current_names
from bert.errors import UserError, redact
from bert.files import load_json, write_atomic
from bert.remote import is_url
from bert.runs.folder import claim_output_dir
from bert.runs.metrics_log import to_jsonable
from bert.runs.mirror import Mirror, local_folder

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class SweepFolder:
    """The folder of one sweep: sweep.json, and a run for each trial.

    Attributes:
        path: the folder, or its local copy if ``output_dir`` is a URL.
        mirror: the copy in an object store, if ``output_dir`` is a URL.
        trials: trials in sweep.json whose folders exist.
    """

    path: Path
    mirror: Mirror | None
    trials: list[dict[str, Any]] = field(default_factory=list)

    def place(self, name: str) -> str:
        """Returns the path or URL of a file or a trial."""
        return f"{self.mirror.url}/{name}" if self.mirror else str(self.path / name)

    def write(self, content: Mapping[str, Any]) -> None:
        """Writes sweep.json; called on the main process. Raises UserError."""
        write_atomic(
            self.path / SWEEP_FILE, json.dumps(redact(to_jsonable(dict(content))), indent=2, allow_nan=False) + "\n"
        )
        if self.mirror is not None:
            self.mirror.push()


@contextlib.contextmanager
def open_sweep(output_dir: str, plan: Mapping[str, Any]) -> Iterator[SweepFolder]:
    """Claims a folder for a sweep, on all hosts.

    Args:
        output_dir: path or URL of the folder, which is empty or contains the same sweep.
        plan: identity of the sweep: ``space`` by key, ``num_trials`` and ``seed``, which are null for a grid.

    Raises:
        UserError: the folder is in use, or has other content.
    """
    import jax

    from bert.parallel.multihost import call_on_main

    with contextlib.ExitStack() as stack:
        claim = partial(stack.enter_context, _open_sweep_on_this_host(output_dir, plan))
        folder, trials = call_on_main(claim, attrgetter("trials"))
        if folder is None:
            folder = SweepFolder(Path(output_dir), None, trials)
            if is_url(output_dir):
                mirror = Mirror(local_folder(output_dir, jax.process_index()), output_dir)
                mirror.pull()
                folder = SweepFolder(mirror.folder, mirror, trials)
        yield folder


@contextlib.contextmanager
def _open_sweep_on_this_host(output_dir: str, plan: Mapping[str, Any]) -> Iterator[SweepFolder]:
    with claim_output_dir(output_dir, "sweep", SWEEP_FILE) as (path, mirror):
        folder = SweepFolder(path, mirror)
        if (path / SWEEP_FILE).is_file():
            stored = _read_sweep(folder)
            _check_is_same_sweep(output_dir, plan, stored)
            folder.trials.extend(trial for trial in stored["trials"] if (path / trial["name"]).is_dir())
        else:
            folder.write({**plan, "trials": []})
        yield folder


def _read_sweep(folder: SweepFolder) -> dict[str, Any]:
    try:
        stored = dict(load_json((folder.path / SWEEP_FILE).read_text(encoding="utf-8")))
        if stored.keys() >= {"space", "num_trials", "seed", "trials"}:
            trials = [_with_current_values(trial) for trial in stored["trials"]]
            return {**stored, "space": with_current_names(stored["space"]), "trials": trials}
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    raise UserError(f"{folder.place(SWEEP_FILE)} cannot be read: remove it, or pass another --output_dir")


def _with_current_values(trial: dict[str, Any]) -> dict[str, Any]:
    return {**trial, "values": with_current_names(trial["values"])} if "values" in trial else trial


def _check_is_same_sweep(output_dir: str, plan: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raises UserError for a sweep over other keys.

    A grid may have other values, and a search more trials, because completed trials do not change.
    """
    space, stored_space = redact(to_jsonable(plan["space"])), stored["space"]
    if list(space) != list(stored_space):
        difference = f"sweeps over {', '.join(stored_space)}, here over {', '.join(space)}"
    elif (plan["num_trials"] is None) != (stored["num_trials"] is None):
        difference = "was started " + ("without" if stored["num_trials"] is None else "with") + " a number of trials"
    elif plan["num_trials"] is not None and (space, plan["seed"]) != (stored_space, stored["seed"]):
        difference = "searches other values, or with another seed"
    else:
        return
    raise UserError(
        f"{output_dir} holds another sweep, which {difference}: pass the same keys, or another --output_dir"
    )
