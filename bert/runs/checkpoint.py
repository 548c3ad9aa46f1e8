"""Checkpoints: saved in the background through orbax, verified before they are read, thinned out.

A checkpoint of step 100 comes into being as ``100.saving``; when orbax has written it and its manifest is on
the disk, it is renamed to ``100``. Whatever has a bare number for a name was therefore complete once, no
matter when the process died.

The newest checkpoints are whole states, which a run resumes from. The protected one, fine-tuning's best, keeps its
parameters alone once it is no longer among them.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from bert.errors import UserError
from bert.files import sync_folder, write_atomic
from bert.runs.manifest import MANIFEST, verify_manifest, write_manifest, write_partial_manifest

SAVING = ".saving"
"""Suffix of a checkpoint that is being written."""
REPLACED = ".replaced"
"""Suffix of a checkpoint that makes room for a new one of the same step; valid until that one is in place."""
DELETED = ".deleted"
"""Suffix of a checkpoint that is being deleted: the rename takes an instant, the deletion does not."""
PROTECTED = "PROTECTED"
"""File with the step that is kept whatever its age."""
PARAMS_ONLY = "PARAMS_ONLY"
"""File in a checkpoint whose other item was removed; listed in its manifest."""

PARAMS, TRAINING_STATE = "params", "rest"
"""The two orbax items of a checkpoint: inference reads the first and leaves the optimizer's moments alone."""

# orbax tells of its progress, and of errors that are raised here anyway, through a logger it shares.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


def _ignore_writes_after_the_end(
    unraisable: sys.UnraisableHookArgs, others: Callable[..., Any] = sys.unraisablehook
) -> None:
    # When one array cannot be written, orbax closes its event loop; the others, still on their way in tensorstore,
    # then find it closed and each prints a stack trace into the user's terminal. The error itself is raised anyway.
    if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"):
        others(unraisable)


sys.unraisablehook = _ignore_writes_after_the_end


class Checkpointer:
    """The checkpoints of one run. One process writes; any number may read meanwhile.

    Close it, or use it in a ``with``: a save that the end of the interpreter overtakes is lost.
    """

    def __init__(self, folder: Path, keep: int | None, say: Callable[[str], None]):
        """Opens ``folder`` (RUN/checkpoints), which the first save makes.

        Args:
          keep: how many of the newest checkpoints stay; None is 1.
          say: is told which damaged ones were passed over, and what is used instead.
        """
        self.folder = Path(folder).absolute()  # orbax takes no relative paths
        self.keep = max(1, keep or 1)
        self._say = say
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._damaged: set[int] = set()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Writing

    def save(self, step: int, state: Any, *, wait: bool = False) -> None:
        """Begins to save ``state`` as ``step``, after a save still under way has ended.

        An older checkpoint of the same step is replaced once the new one is complete.

        Args:
          state: pytree of NumPy arrays, not to be changed before the save has ended, and Python numbers.
          wait: return when it has ended.

        Raises:
          UserError: the save before this one failed; with ``wait``, this one too.
        """
        self.wait()
        self._saving = self._worker.submit(self._save, step, _to_items(state))
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

    def set_best(self, step: int) -> None:
        """Keeps the parameters of ``step`` (fine-tuning's best) besides the newest checkpoints.

        It takes the place of the one protected before.

        Call it just before or after ``save(step)``: the next save might delete it. It is written down, and so
        holds for the process that resumes.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / PROTECTED, f"{step}\n")
        except OSError as error:
            raise UserError(
                f"{self.folder / PROTECTED} cannot be written ({_reason(error)}): "
                "fix this and run the same command again"
            ) from error

    def thin_out(self) -> None:
        """Removes what is not to be kept, as each save does: at a run's end, after the last ``protect``.

        Raises:
          UserError: the save before this failed, or a file cannot be removed.
        """
        self.wait()
        if not self.steps():
            return
        try:
            self._clean()
            self._thin_out(self.steps()[-1])
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be thinned out ({_reason(error)}): fix this and run the same command again"
            ) from error

    # Reading

    @property
    def protected(self) -> int | None:
        """The protected step, if there is such a checkpoint."""
        step = self._read_protected()
        return step if step in self.steps() else None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first; whether one is damaged shows when it is read."""
        return sorted(step for step, path in self._found().items() if (path / MANIFEST).is_file())

    def restore(self, like: Any = None, step: int | None = None) -> tuple[int, Any] | None:
        """Reads the newest undamaged checkpoint, or that of ``step``; None if there is none at all.

        Args:
          like: pytree of arrays (or anything with shape and dtype) and Python numbers; the state comes back
            in its structure. None: nested dicts of arrays; fields and indices have become string keys.
          step: this checkpoint and no other.

        Returns:
          (step, state), the state's leaves NumPy arrays.

        Raises:
          UserError: every checkpoint is damaged or holds parameters alone, ``step`` is missing, damaged or such a
            one, or ``like`` does not fit.
        """
        read = self._read_newest((PARAMS, TRAINING_STATE), step)
        if read is None:
            return None
        step, items = read
        state = items.pop(TRAINING_STATE, {}) | items
        return step, state if like is None else _restore_into(like, state, self.folder / str(step))

    def restore_params(self, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """As ``restore``, but reads only the ``params`` of the saved state, as nested dicts of arrays."""
        read = self._read_newest((PARAMS,), step)
        if read is None:
            return None
        step, items = read
        if PARAMS not in items:
            raise UserError(f"checkpoint {self.folder / str(step)} holds no {PARAMS}: it is not one of a training run")
        return step, items[PARAMS]

    def restore_best_params(self) -> tuple[int, dict[str, Any]] | None:
        """As ``restore_params`` of the protected step; of the newest good one where that is damaged or missing."""
        best = self.protected
        if best is not None:
            try:
                return self.restore_params(best)
            except UserError as error:
                self._say(f"{error}; the newest good checkpoint is used instead")
        return self.restore_params()

    def _read_newest(self, names: tuple[str, ...], step: int | None) -> tuple[int, dict[str, Any]] | None:
        self.wait()
        found = self._found()
        if step is not None:
            if step not in found:
                steps = ", ".join(map(str, self.steps())) or "none"
                raise UserError(f"{self.folder} has no checkpoint of step {step}: choose one that is there ({steps})")
            found = {step: found[step]}
        if TRAINING_STATE in names and found:
            found = self._resumable(found)
        passed_over: list[str] = []
        for candidate in sorted(found, reverse=True):
            problems = verify_manifest(found[candidate])
            if not problems:
                try:
                    items = _read_items(found[candidate], names)
                except Exception as error:  # whatever orbax raises, the checkpoint before may still be readable
                    problems = [f"orbax cannot read it: {_reason(error)}"]
                else:
                    for message in passed_over:
                        self._say(f"{message}; using the checkpoint of step {candidate} instead")
                    return candidate, items
            self._damaged.add(candidate)
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            passed_over.append(f"checkpoint {found[candidate]} is damaged: {problems[0]}{more}")
        if not passed_over:
            return None
        if step is not None:
            raise UserError(f"{passed_over[0]}: put back a copy or choose another step")
        raise UserError(
            f"{'; '.join(passed_over)}; no other checkpoint is left: "
            f"put back a copy, or remove {self.folder} to start again"
        )

    def _resumable(self, found: dict[int, Path]) -> dict[int, Path]:
        """The checkpoints that are whole states. Raises UserError if there is none among those found."""
        whole = {step: path for step, path in found.items() if not _has_params_only(path)}
        if not whole:
            steps = ", ".join(map(str, sorted(found)))
            raise UserError(
                f"{self.folder} has no state to resume from, only the best parameters (step {steps}): "
                f"put back a copy of the newest checkpoint, or remove {self.folder} to start again"
            )
        return whole

    # In the background

    def _save(self, step: int, items: dict[str, Any]) -> None:
        fresh = self.folder / f"{step}{SAVING}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clean()
            _check_space(self.folder, items)
            with _orbax() as orbax:
                orbax.save(fresh, args=_composite(items, ocp.args.PyTreeSave))
            write_manifest(fresh, step)
            self._put_in_place(step, fresh)
            self._thin_out(step)
        except Exception as error:
            _remove_for_good(self.folder, f"{step}{SAVING}*")  # frees a full disk
            if not _is_io_error(error):  # a bug of ours: let it be seen
                raise
            good = [s for s in self.steps() if s not in self._damaged]
            raise UserError(
                f"the checkpoint of step {step} could not be saved in {self.folder}: {_reason(error)}; "
                + (f"step {good[-1]} is the last good one: " if good else "there is none yet: ")
                + "fix this and run the same command again to go on from there"
            ) from error

    def _put_in_place(self, step: int, fresh: Path) -> None:
        target, replaced = self.folder / str(step), self.folder / f"{step}{REPLACED}"
        if target.exists():
            os.replace(target, replaced)
        os.replace(fresh, target)
        sync_folder(self.folder)
        self._damaged.discard(step)
        _remove(replaced)

    def _thin_out(self, newest: int) -> None:
        """Deletes what is older than ``newest`` and not among the newest ``keep``; of the protected one not its
        parameters.

        Damaged ones do not count, or they would push out good ones. Later steps are left alone: they are from
        before a return to an older checkpoint, and their turn comes when training reaches them again.
        """
        found, protected = self._found(), self._read_protected()
        good = [step for step in self.steps() if step <= newest and step not in self._damaged]
        kept = [step for step in good if not _has_params_only(found[step])][-self.keep :]
        for step, path in found.items():
            if step >= newest or step in kept:
                continue
            if step == protected:
                self._reduce_to_params(step, path)
                continue
            deleted = self.folder / f"{step}{DELETED}"
            os.replace(path, deleted)
            _remove(deleted)

    def _reduce_to_params(self, step: int, path: Path) -> None:
        """Replaces a checkpoint by one with its parameters alone; one without a good manifest stays as it is."""
        if _has_params_only(path):
            return
        reduced = self.folder / f"{step}{SAVING}"
        left_out = {str(path): {TRAINING_STATE, MANIFEST}}
        shutil.copytree(path, reduced, copy_function=_link_or_copy, ignore=lambda place, _: left_out.get(place, set()))
        (reduced / PARAMS_ONLY).write_text("The optimizer's state was removed: a run cannot resume from this.\n")
        try:
            write_partial_manifest(reduced, path)
        except ValueError:
            _remove(reduced)
        else:
            self._put_in_place(step, reduced)

    def _clean(self) -> None:
        """Removes what a killed process left half done; not before the first save: readers change nothing."""
        for path in list(self.folder.iterdir()):
            # orbax adds its own suffix to ours while it writes
            if match := re.fullmatch(rf"(\d+)(?:{SAVING}|{REPLACED}|{DELETED})(?:\.orbax.*)?", path.name):
                original = self.folder / match[1]
                if path.name.endswith(REPLACED) and not original.exists():
                    os.replace(path, original)
                else:
                    _remove(path)

    def _found(self) -> dict[int, Path]:
        """Folders by step, complete or not."""
        if not self.folder.is_dir():
            return {}
        found = {}
        for path in self.folder.iterdir():
            name = path.name.removesuffix(REPLACED)
            is_step = re.fullmatch(r"0|[1-9][0-9]*", name) and path.is_dir()
            # A replaced one only counts where the process died between the two renames.
            if is_step and (name == path.name or not (self.folder / name).exists()):
                found[int(name)] = path
        return found

    def _read_protected(self) -> int | None:
        try:
            return int((self.folder / PROTECTED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


# States and orbax's items


def _to_items(state: Any) -> dict[str, Any]:
    """A pytree as nested dicts of arrays, ``params`` apart: optimizer classes leave no trace in the files."""
    tree: dict[str, Any] = {}
    for path, leaf in _leaves(state).items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = np.asarray(leaf)
    items = {PARAMS: tree.pop(PARAMS, None), TRAINING_STATE: tree}
    return {name: item for name, item in items.items() if item}


def _restore_into(like: Any, state: Mapping[str, Any], where: Path) -> Any:
    """The arrays of ``state`` in the structure of ``like``; UserError if names, shapes or dtypes differ."""
    expected, found = _leaves(like), _leaves(state)
    problems = [f"{'/'.join(path)} is missing" for path in expected if path not in found]
    problems += [f"{'/'.join(path)} has no place" for path in found if path not in expected]
    leaves = []
    for path, leaf in expected.items():
        if path not in found:
            continue
        array = found[path]
        if isinstance(leaf, bool | int | float):
            leaves.append(type(leaf)(array.item()) if array.ndim == 0 else None)
            matches = array.ndim == 0
            wanted = f"a {type(leaf).__name__}"
        else:
            leaves.append(array)
            matches = (array.shape, array.dtype) == (tuple(leaf.shape), np.dtype(leaf.dtype))
            wanted = _describe_array(leaf)
        if not matches:
            problems.append(f"{'/'.join(path)} is {_describe_array(array)} instead of {wanted}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(
            f"checkpoint {where} does not fit this model and optimizer: {'; '.join(problems[:8])}{more}: "
            "go on with the configuration it was saved with, or choose another output_dir"
        )
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _leaves(tree: Any) -> dict[tuple[str, ...], Any]:
    return {
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _describe_array(array: Any) -> str:
    return f"{np.dtype(array.dtype).name}[{','.join(map(str, array.shape))}]"


def _read_items(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    items = {name: None for name in names if (folder / name).is_dir()}
    with _orbax() as orbax:
        restored = orbax.restore(folder, args=_composite(items, lambda _: ocp.args.PyTreeRestore()))
    return {name: restored[name] for name in items}


def _composite(items: Mapping[str, Any], argument: Callable[[Any], Any]) -> ocp.args.Composite:
    return ocp.args.Composite(**{name: argument(item) for name, item in items.items()})


def _orbax() -> ocp.Checkpointer:
    # The synchronous one: the manifest has to follow in the same thread, so the thread is ours, not orbax's.
    # Left to itself, orbax waits for every process of a distributed run to come along; here one acts alone.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=f"process_{jax.process_index()}",
    )
    items = {name: ocp.PyTreeCheckpointHandler(multiprocessing_options=alone) for name in (PARAMS, TRAINING_STATE)}
    options = ocp.CompositeOptions(multiprocessing_options=alone)
    handler = ocp.CompositeCheckpointHandler(composite_options=options, **items)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


# Files


def _has_params_only(folder: Path) -> bool:
    return (folder / PARAMS_ONLY).is_file()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _remove(path: Path, ignore_errors: bool = False) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


def _remove_for_good(folder: Path, pattern: str) -> None:
    # What tensorstore still has on its way may make the folder again. What outlasts this goes before the next save.
    for _ in range(10):
        for path in folder.glob(pattern):
            _remove(path, ignore_errors=True)
        time.sleep(0.05)
        if not any(folder.glob(pattern)):
            return


def _check_space(folder: Path, items: Any) -> None:
    """Raises OSError before anything is written where it cannot all be written: orbax fails slowly and untidily."""
    needed, disk = sum(array.nbytes for array in jax.tree.leaves(items)), shutil.disk_usage(folder)
    if disk.total and disk.free < needed:  # some network file systems report zeros
        raise OSError(
            errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({needed / 1e6:.1f} MB needed, {disk.free / 1e6:.1f} MB free)"
        )


def _is_io_error(error: Exception) -> bool:
    # Every failure inside tensorstore is a ValueError that begins with a status such as PERMISSION_DENIED. One array
    # that does not fit may show as another one that is NOT_FOUND: the system's own number is not always there.
    return _system_error(error) is not None or bool(re.match(r"[A-Z_]{3,}: ", str(error)))


def _system_error(error: Exception) -> int | None:
    """The system's error number, if a file operation failed."""
    if isinstance(error, OSError):
        return error.errno
    # tensorstore, which writes for orbax, raises ValueError; the number has stood in its text in two forms
    match = re.search(r"(?:os_error_code='|OS error )(\d+)", str(error))
    return int(match[1]) if match else None


def _reason(error: Exception) -> str:
    """What went wrong in a few words: tensorstore's own text fills a page."""
    if (number := _system_error(error)) is not None:
        text = getattr(error, "strerror", None) or os.strerror(number)
        file = getattr(error, "filename", None)
        return f"{text} ({file})" if file else text
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
