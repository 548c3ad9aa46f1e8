"""Checkpoints of a run: saved in the background, verified before they are read, deleted by age."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bert.errors import Log, UserError, WarningText
from bert.files import require_utf8
from bert.parallel.backends import Parallelism
from bert.parallel.devices import local_devices
from bert.parallel.multihost import broadcast_from_main, is_multihost
from bert.runs.checkpoint_directory import BEST, TRAINING_STATE, CheckpointDirectory, has_params_only, verify_manifest
from bert.runs.checkpoint_storage import LocalStorage, MultihostStorage, Restored, Storage
from bert.runs.folder import RunFolder
from bert.runs.orbax_io import (
    PARAMS,
    Place,
    describe_error,
    is_io_error,
    keep_whole,
    load_items,
    num_bytes,
    quiet_orbax,
    restore_into,
    to_items,
)


class Checkpoints(Protocol):
    """States of a run by step, as a training loop saves and restores them: a `Checkpointer`."""

    def save(self, step: int, state: Any) -> None: ...

    def set_best(self, step: int) -> None: ...

    def restore(self, like: Any = None) -> Restored | None: ...


class Checkpointer:
    """Saves and restores the checkpoints of one run. One process writes; any number may read meanwhile.

    Close it, or use it as a context manager: a save that is still running when the interpreter exits is lost.
    """

    def __init__(
        self,
        folder: Path,
        max_to_keep: int | None,
        log: Log,
        after_save: Callable[[], None] = lambda: None,
        storage: Storage | None = None,
    ):
        """Opens ``folder`` (RUN/checkpoints), which the first save creates.

        Args:
          max_to_keep: number of newest checkpoints to keep; None means 1.
          log: receives a message about each damaged checkpoint, and about the one used instead.
          after_save: called in the background thread after each save.
          storage: sharing of the checkpoints between hosts; None for one host.
        """
        require_utf8(folder)
        self._directory = CheckpointDirectory(folder, max_to_keep)
        self._log = log
        self._after_save = after_save
        self._storage = storage or LocalStorage()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._while_saving = contextlib.ExitStack()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self._directory.path

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first. Damage is detected only when a checkpoint is read."""
        return self._directory.steps()

    # Writing

    def save(self, step: int, state: Any, *, wait: bool = False) -> None:
        """Starts to save ``state`` as ``step``, after the previous save has finished.

        An older checkpoint of the same step is replaced once the new one is complete. On several hosts, a state in
        parts is not saved while an error is handled, because the other hosts do not save their parts.

        Args:
          state: pytree of NumPy arrays, of arrays in parts, and of Python numbers. Arrays must not change before the
            save has finished.
          wait: return only when the save has finished.

        Raises:
          UserError: the previous save failed; with ``wait``, also if this one failed.
        """
        if not self._storage.can_save(state):
            return
        self._finish_save()
        self._while_saving.close()
        self._while_saving.enter_context(quiet_orbax())  # until it is closed: a failed save ends before its writes
        self._saving = self._worker.submit(self._save, step, to_items(state))
        if wait:
            self._finish_save()

    def wait(self) -> None:
        """Waits until nothing is being saved, on all hosts. Raises UserError, once, if the save failed."""
        self._finish_save()
        self._storage.sync()

    def close(self) -> None:
        """Waits for the last save and ends the background thread. Raises UserError if that save failed."""
        try:
            self._finish_save()
        finally:
            self._worker.shutdown()
            self._while_saving.close()

    def set_best(self, step: int) -> None:
        """Keeps the parameters of ``step`` in addition to the newest checkpoints, in place of the best step before.

        Call it just before or after ``save(step)``: the next save might delete the step.
        """
        if not self._storage.is_writer:
            return
        try:
            self._directory.set_best(step)
        except OSError as error:
            fix = "fix this and run the same command again"
            raise UserError(f"{self.folder / BEST} cannot be written ({describe_error(error)}): {fix}") from error

    def thin_out(self) -> None:
        """Deletes checkpoints that need not be kept, as each save does. Call it after the last `set_best` of a run.

        Raises:
          UserError: the previous save failed, or a file cannot be removed.
        """
        self._storage.call_on_main(self._thin_out)

    def _thin_out(self) -> None:
        self._finish_save()
        try:
            if steps := self.steps():
                self._directory.remove_incomplete()
                self._directory.apply_retention(steps[-1])
        except OSError as error:
            fix = "fix this and run the same command again"
            raise UserError(f"{self.folder} cannot be cleaned up ({describe_error(error)}): {fix}") from error

    def _finish_save(self) -> None:
        """Waits for the save of this host. Raises UserError, once, if it failed."""
        saving = self._saving
        if saving is None:
            return
        try:
            saving.result()
        finally:
            if saving.done():  # not after a Ctrl-C inside result(): then the save still runs
                self._saving = None

    def _save(self, step: int, items: dict[str, Any]) -> None:
        """Saves in the background thread."""
        directory = self._directory
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._storage.write(directory, step, items)
        except Exception as error:
            directory.discard_draft(step)
            if not is_io_error(error):  # indicates a bug
                raise
            good = directory.good_steps
            raise UserError(
                f"the checkpoint of step {step} could not be saved in {self.folder}: {describe_error(error)}; "
                + (f"step {good[-1]} is the last good one: " if good else "there is none yet: ")
                + "fix this and run the same command again to resume from there"
            ) from error
        self._after_save()

    # Reading: the same checkpoint on all hosts

    def restore(self, like: Any = None, step: int | None = None) -> Restored | None:
        """Reads the newest undamaged checkpoint, or the one of ``step``; None if there is none at all.

        Args:
          like: pytree of arrays (or anything with shape and dtype) and Python numbers; the state is returned
            in its structure. None: nested dicts of arrays; fields and indices have become string keys.
          step: reads only this checkpoint.

        Returns:
          (step, state). The state's leaves are NumPy arrays; with ``like``, arrays in parts are `jax.Array`.

        Raises:
          UserError: every checkpoint is damaged or has only parameters, ``step`` is missing, damaged or has only
            parameters, or ``like`` does not fit.
        """
        read = partial(self._restore, like)
        return self._storage.read(partial(read, step), read)

    def restore_params(self, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Reads only the ``params`` of the saved state, as nested dicts of arrays; see ``restore``."""
        return self._storage.read(partial(self._restore_params, step), self._restore_params)

    def restore_best_params(self) -> tuple[int, dict[str, Any]] | None:
        """Reads the parameters of the best step, or of the newest good step if that one is damaged or missing."""
        return self._storage.read(self._restore_best_params, self._restore_params)

    def _restore(self, like: Any, step: int | None) -> Restored | None:
        place = keep_whole if like is None else self._storage.place
        restored = self._load_newest((PARAMS, TRAINING_STATE), step, place)
        if restored is None:
            return None
        step, items = restored
        state = items.pop(TRAINING_STATE, {}) | items
        return step, state if like is None else restore_into(like, state, self.folder / str(step))

    def _restore_params(self, step: int | None = None) -> Restored | None:
        restored = self._load_newest((PARAMS,), step, keep_whole)
        if restored is None:
            return None
        step, items = restored
        if PARAMS not in items:
            raise UserError(f"checkpoint {self.folder / str(step)} has no {PARAMS}: name one of a training run")
        return step, items[PARAMS]

    def _restore_best_params(self) -> Restored | None:
        best = self._directory.best
        if best is not None:
            try:
                return self._restore_params(best)
            except UserError as error:
                self._log(WarningText(f"{error}; the newest good checkpoint is used instead"))
        elif fault := self._directory.best_fault:
            self._log(WarningText(fault))
        return self._restore_params()

    def _load_newest(self, names: tuple[str, ...], step: int | None, place: Place) -> tuple[int, dict[str, Any]] | None:
        """Returns (step, items) of the newest undamaged checkpoint; None if there is no checkpoint."""
        self._finish_save()
        local_devices()  # raises if JAX has none; otherwise the checkpoint would count as damaged
        find = partial(self._candidates, step, resumable=TRAINING_STATE in names)
        candidates = find()
        while True:
            try:
                return self._load_first_good(candidates, names, step, place)
            except UserError:
                # Another process may have replaced these checkpoints by newer ones meanwhile.
                tried, candidates = candidates, find()
                if candidates.keys() == tried.keys():
                    raise

    def _load_first_good(
        self, candidates: dict[int, Path], names: tuple[str, ...], step: int | None, place: Place
    ) -> tuple[int, dict[str, Any]] | None:
        """Returns (step, items) of the newest undamaged candidate; None if there are no candidates."""
        damages: list[str] = []
        for candidate in sorted(candidates, reverse=True):
            problems = verify_manifest(candidates[candidate])
            if not problems:
                try:
                    items = load_items(candidates[candidate], names, place)
                except Exception as error:  # errors of any type; the previous checkpoint may still be readable
                    problems = [f"orbax cannot read it: {describe_error(error)}"]
                else:
                    for damage in damages:
                        self._log(WarningText(f"{damage}; using the checkpoint of step {candidate} instead"))
                    return candidate, items
            self._directory.damaged.add(candidate)
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            damages.append(f"checkpoint {candidates[candidate]} is damaged: {problems[0]}{more}")
        if not damages:
            return None
        if step is not None:
            raise UserError(f"{damages[0]}: put back a copy or choose another step")
        fix = f"put back a copy, or remove {self.folder} to start again"
        raise UserError(f"{'; '.join(damages)}; there is no other checkpoint: {fix}")

    def _candidates(self, step: int | None, resumable: bool) -> dict[int, Path]:
        """Returns the folders that may be read, by step: all, or only the one of ``step``.

        Raises:
          UserError: ``step`` is missing, or a ``resumable`` state is needed but all folders have only parameters.
        """
        folders = self._directory.find()
        if step is not None:
            if step not in folders:
                steps = ", ".join(map(str, self.steps())) or "none"
                raise UserError(f"{self.folder} has no checkpoint of step {step}: choose one of {steps}")
            folders = {step: folders[step]}
        whole = {step: path for step, path in folders.items() if not (resumable and has_params_only(path))}
        if folders and not whole:
            steps = ", ".join(map(str, sorted(folders)))
            raise UserError(
                f"{self.folder} has no state to resume from, only the best parameters (step {steps}): "
                f"put back a copy of the newest checkpoint, or remove {self.folder} to start again"
            )
        return whole


def make_checkpointer(run: RunFolder[Any], log: Log, parallel: Parallelism) -> Checkpointer:
    """Returns the checkpoints of a run, for one host or for several."""

    def log_as_info(text: str) -> None:
        log(str(text))  # not a `WarningText`: the log of the run shows the surrounding steps

    storage: Storage | None = None
    if is_multihost():
        place = parallel.host_sharding if run.config.training.average_checkpoints == 1 else keep_whole
        storage = MultihostStorage(place, run.mirror, run.pull)
    return Checkpointer(run.checkpoints, run.config.training.max_to_keep, log_as_info, run.push, storage)


def require_space(run: RunFolder[Any], state: Any, log: Log) -> None:
    """Compares the free space of a run's disk with the size of its checkpoints, before the first step.

    Raises:
        UserError: not even one checkpoint fits.
    """

    def check() -> None:
        needed, disk = num_bytes(state) / 1e6, shutil.disk_usage(run.path)
        free = disk.free / 1e6
        if not disk.total:  # some network file systems report zeros
            return
        room = f"the disk of {run.path} has {free:,.1f} MB of free space"
        if free < needed:
            raise UserError(
                f"{room}, but a checkpoint needs {needed:,.1f} MB: free some, or pass an --output_dir on another disk"
            )
        # A new checkpoint is complete before the oldest one is removed.
        kept = run.config.training.max_to_keep or 1
        more = kept + 1 - len(CheckpointDirectory(run.checkpoints).steps())
        if free < more * needed:
            log(
                f"{room}, but up to {more} more checkpoints of {needed:,.1f} MB are kept (training.max_to_keep is "
                f"{kept}): a later one may not fit"
            )

    broadcast_from_main(check)
