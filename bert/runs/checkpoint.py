"""Checkpoints of a run: saved in the background, verified before they are read, deleted by age."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from flax import traverse_util
from safetensors.numpy import load_file

from bert.errors import UserError, WarningText
from bert.files import atomic_write, require_utf8, write_safetensors
from bert.parallel.devices import local_devices
from bert.runs.checkpoint_directory import (
    BEST,
    TRAINING_STATE,
    CheckpointDirectory,
    has_params_only,
    verify_manifest,
    write_manifest,
)
from bert.runs.folder import FROZEN_WEIGHTS
from bert.runs.orbax_io import (
    PARAMS,
    Place,
    describe_error,
    is_io_error,
    keep_whole,
    load_items,
    quiet_orbax,
    remove_paths,
    restore_into,
    save_items,
    to_items,
)


class Checkpointer:
    """Saves and restores the checkpoints of one run. One process writes; any number may read meanwhile.

    Close it, or use it in a ``with``: a save that the end of the interpreter overtakes is lost.
    """

    def __init__(
        self,
        folder: Path,
        max_to_keep: int | None,
        say: Callable[[str], None],
        after_save: Callable[[], None] = lambda: None,
        place: Place = keep_whole,
    ):
        """Opens ``folder`` (RUN/checkpoints), which the first save makes.

        Args:
          max_to_keep: how many of the newest checkpoints stay; None is 1.
          say: logs which damaged ones were passed over, and what is used instead.
          after_save: is called in the background once a checkpoint is in place.
          place: of which arrays a restored state has this host's parts.
        """
        require_utf8(folder)
        self._directory = CheckpointDirectory(folder, max_to_keep)
        self._say = say
        self._after_save = after_save
        self._place = place
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
        """Steps of the complete checkpoints, oldest first; whether one is damaged shows when it is read."""
        return self._directory.steps()

    # Writing

    def save(self, step: int, state: Any, *, wait: bool = False) -> None:
        """Begins to save ``state`` as ``step``, after a save still under way has ended.

        An older checkpoint of the same step is replaced once the new one is complete.

        Args:
          state: pytree of NumPy arrays, not to be changed before the save has ended, of arrays in parts, and of Python
            numbers.
          wait: return when it has ended.

        Raises:
          UserError: the save before this one failed; with ``wait``, this one too.
        """
        self.wait()
        self._while_saving.close()
        self._while_saving.enter_context(quiet_orbax())  # until it is closed: a failed save ends before its writes
        self._saving = self._worker.submit(self._save, step, to_items(state))
        if wait:
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being saved. Raises UserError, once, if the save failed."""
        saving = self._saving
        if saving is None:
            return
        try:
            saving.result()
        finally:
            if saving.done():  # not after a Ctrl-C inside result(): then the save still runs
                self._saving = None

    def close(self) -> None:
        """Waits for the last save and ends the background thread. Raises UserError if that save failed."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._while_saving.close()

    def set_best(self, step: int) -> None:
        """Keeps the parameters of ``step`` besides the newest checkpoints, instead of those of the best one before.

        Call it just before or after ``save(step)``: the next save might delete it.
        """
        try:
            self._directory.set_best(step)
        except OSError as error:
            raise UserError(
                f"{self.folder / BEST} cannot be written ({describe_error(error)}): "
                "fix this and run the same command again"
            ) from error

    def thin_out(self) -> None:
        """Removes what is not to be kept, as each save does: at a run's end, after the last `set_best`.

        Raises:
          UserError: the save before this failed, or a file cannot be removed.
        """
        self.wait()
        try:
            if steps := self.steps():
                self._directory.remove_incomplete()
                self._directory.apply_retention(steps[-1])
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be thinned out ({describe_error(error)}): fix this and run the same command "
                "again"
            ) from error

    def _save(self, step: int, items: dict[str, Any]) -> None:
        """Saves in the background thread."""
        directory = self._directory
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(step, items)
        except Exception as error:
            directory.discard_draft(step)
            if not is_io_error(error):  # a bug: let it be seen
                raise
            good = directory.good_steps
            raise UserError(
                f"the checkpoint of step {step} could not be saved in {self.folder}: {describe_error(error)}; "
                + (f"step {good[-1]} is the last good one: " if good else "there is none yet: ")
                + "fix this and run the same command again to resume from there"
            ) from error
        self._after_save()

    def _write(self, step: int, items: dict[str, Any]) -> None:
        directory = self._directory
        directory.remove_incomplete()
        save_items(directory.draft(step), items)
        self._complete(step)

    def _complete(self, step: int) -> None:
        """Puts a draft in place that has all of a checkpoint but its manifest."""
        directory = self._directory
        remove_paths(directory.draft(step))
        write_manifest(directory.draft(step), step)
        directory.commit(step)
        directory.apply_retention(step)

    # Reading

    def restore(self, like: Any = None, step: int | None = None) -> tuple[int, Any] | None:
        """Reads the newest undamaged checkpoint, or that of ``step``; None if there is none at all.

        Args:
          like: pytree of arrays (or anything with shape and dtype) and Python numbers; the state comes back
            in its structure. None: nested dicts of arrays; fields and indices have become string keys.
          step: this checkpoint and no other.

        Returns:
          (step, state), the state's leaves NumPy arrays; with ``like``, those that are placed in parts.

        Raises:
          UserError: every checkpoint is damaged or holds parameters alone, ``step`` is missing, damaged or such a
            one, or ``like`` does not fit.
        """
        restored = self._load_newest((PARAMS, TRAINING_STATE), step, keep_whole if like is None else self._place)
        if restored is None:
            return None
        step, items = restored
        state = items.pop(TRAINING_STATE, {}) | items
        return step, state if like is None else restore_into(like, state, self.folder / str(step))

    def restore_params(self, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """As ``restore``, but reads only the ``params`` of the saved state, as nested dicts of arrays."""
        restored = self._load_newest((PARAMS,), step, keep_whole)
        if restored is None:
            return None
        step, items = restored
        if PARAMS not in items:
            raise UserError(f"checkpoint {self.folder / str(step)} holds no {PARAMS}: it is not one of a training run")
        return step, items[PARAMS]

    def restore_best_params(self) -> tuple[int, dict[str, Any]] | None:
        """As ``restore_params`` of the best step; of the newest good one if that is damaged or missing."""
        best = self._directory.best
        if best is not None:
            try:
                return self.restore_params(best)
            except UserError as error:
                self._say(WarningText(f"{error}; the newest good checkpoint is used instead"))
        elif fault := self._directory.best_fault:
            self._say(WarningText(fault))
        return self.restore_params()

    def _load_newest(self, names: tuple[str, ...], step: int | None, place: Place) -> tuple[int, dict[str, Any]] | None:
        """(step, items) of the newest good checkpoint; None if there is no checkpoint."""
        self.wait()
        local_devices()  # if JAX has none, this says so; reading would fail, and the checkpoint be called damaged
        find = partial(self._candidates, step, resumable=TRAINING_STATE in names)
        candidates = find()
        while True:
            try:
                return self._load_first_good(candidates, names, step, place)
            except UserError:
                # Another process may have trained on meanwhile: the checkpoints made room for newer ones.
                tried, candidates = candidates, find()
                if candidates.keys() == tried.keys():
                    raise

    def _load_first_good(
        self, candidates: dict[int, Path], names: tuple[str, ...], step: int | None, place: Place
    ) -> tuple[int, dict[str, Any]] | None:
        """(step, items) of the newest of the folders that is good; None if there are none."""
        damages: list[str] = []
        for candidate in sorted(candidates, reverse=True):
            problems = verify_manifest(candidates[candidate])
            if not problems:
                try:
                    items = load_items(candidates[candidate], names, place)
                except Exception as error:  # whatever orbax raises, the checkpoint before may still be readable
                    problems = [f"orbax cannot read it: {describe_error(error)}"]
                else:
                    for damage in damages:
                        self._say(WarningText(f"{damage}; using the checkpoint of step {candidate} instead"))
                    return candidate, items
            self._directory.damaged.add(candidate)
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            damages.append(f"checkpoint {candidates[candidate]} is damaged: {problems[0]}{more}")
        if not damages:
            return None
        if step is not None:
            raise UserError(f"{damages[0]}: put back a copy or choose another step")
        raise UserError(
            f"{'; '.join(damages)}; no other checkpoint is left: "
            f"put back a copy, or remove {self.folder} to start again"
        )

    def _candidates(self, step: int | None, resumable: bool) -> dict[int, Path]:
        """The folders that may be read, all or that of ``step``.

        Raises:
          UserError: ``step`` is missing, or a ``resumable`` one is needed and all have parameters alone.
        """
        folders = self._directory.find()
        if step is not None:
            if step not in folders:
                steps = ", ".join(map(str, self.steps())) or "none"
                raise UserError(f"{self.folder} has no checkpoint of step {step}: choose one that is there ({steps})")
            folders = {step: folders[step]}
        whole = {step: path for step, path in folders.items() if not (resumable and has_params_only(path))}
        if folders and not whole:
            steps = ", ".join(map(str, sorted(folders)))
            raise UserError(
                f"{self.folder} has no state to resume from, only the best parameters (step {steps}): "
                f"put back a copy of the newest checkpoint, or remove {self.folder} to start again"
            )
        return whole


Params = dict[str, Any]


def params_checksum(params: Params) -> str:
    """SHA-256 of the names, shapes, types and values of parameters."""
    digest = hashlib.sha256()
    for name, array in sorted(traverse_util.flatten_dict(params, sep="/").items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def write_frozen_weights(run: Path, params: Params) -> None:
    """Writes the file into a run's folder. Raises OSError."""
    flat = traverse_util.flatten_dict(params, sep="/")
    with atomic_write(run / FROZEN_WEIGHTS) as temporary:
        write_safetensors(temporary, flat)
        temporary.chmod((run / "config.yaml").stat().st_mode)  # the library gives its file to the owner alone


def read_frozen_weights(run: Path, checksum: str | None) -> Params:
    """The parameters in the file.

    Args:
        run: the run's folder.
        checksum: of the parameters that the run began with.

    Raises:
        UserError: the file is missing or damaged, or holds others.
    """
    file = run / FROZEN_WEIGHTS
    try:
        params = traverse_util.unflatten_dict(load_file(file), sep="/")
    except FileNotFoundError:
        raise UserError(
            f"{file} is missing, which the run's adapters belong to: copy it from the original run"
        ) from None
    except (OSError, TypeError, AttributeError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}): copy it from the original run") from None
    if params_checksum(params) != checksum:
        raise UserError(
            f"{file} does not hold the weights that the run's adapters belong to (lora.checksum in config.yaml): copy "
            "it from the original run"
        )
    return params
