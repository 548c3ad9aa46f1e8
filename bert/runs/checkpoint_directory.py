"""The folder of a run's checkpoints: names, completeness, retention. Knows nothing of what is in a checkpoint.

A checkpoint of step 100 is written as ``100.saving``. Once all of it and its manifest are on the disk, it is renamed
to ``100``. A folder with a bare number for a name was therefore complete once, no matter when the process died.

The newest checkpoints are whole states, from which a run resumes. The best one, of fine-tuning, keeps only its
parameters once it is no longer among them.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from pathlib import Path

from bert.files import sync_folder, write_atomic
from bert.runs.manifest import MANIFEST, write_partial_manifest

SAVING = ".saving"
"""Suffix of a checkpoint that is being written."""
REPLACED = ".replaced"
"""Suffix of a checkpoint that makes room for a new one of the same step; valid until that one is in place."""
DELETED = ".deleted"
"""Suffix of a checkpoint that is being deleted: the rename takes an instant, the deletion does not."""
BEST = "PROTECTED"
"""File with the step that is kept whatever its age."""
PARAMS_ONLY = "PARAMS_ONLY"
"""File in a checkpoint whose training state was removed; listed in its manifest."""
TRAINING_STATE = "rest"
"""Folder in a checkpoint with all of the state but the parameters."""


class CheckpointDirectory:
    """The checkpoints in a folder, by step. Nothing changes in it before the first `remove_incomplete`.

    Attributes:
        path: absolute; the first save makes it.
        damaged: steps whose checkpoint was found damaged.
    """

    def __init__(self, path: Path, max_to_keep: int | None = None) -> None:
        """
        Args:
            max_to_keep: how many of the newest checkpoints stay; None is 1.
        """
        self.path = Path(path).absolute()
        self.damaged: set[int] = set()
        self._max_to_keep = max(1, max_to_keep or 1)

    def find(self) -> dict[int, Path]:
        """Folders by step, complete or not."""
        folders = {}
        for path in self.path.iterdir() if self.path.is_dir() else ():
            name = path.name.removesuffix(REPLACED)
            is_step = re.fullmatch(r"0|[1-9][0-9]*", name) and path.is_dir()
            # A replaced one counts only if the process died between the two renames.
            if is_step and (name == path.name or not (self.path / name).exists()):
                folders[int(name)] = path
        return folders

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first; whether one is damaged shows when it is read."""
        return sorted(step for step, path in self.find().items() if (path / MANIFEST).is_file())

    @property
    def good_steps(self) -> list[int]:
        """The `steps` without those that were found damaged."""
        return [step for step in self.steps() if step not in self.damaged]

    @property
    def best(self) -> int | None:
        """The step that `set_best` named last, if there is such a checkpoint."""
        step = self._read_best()
        return step if step in self.steps() else None

    @property
    def best_fault(self) -> str | None:
        """What is wrong with the file of `set_best`; None if it names a checkpoint, or if there is no file."""
        if self.best is not None or not (self.path / BEST).exists():
            return None
        return f"{self.path / BEST} names no checkpoint that is there; the newest good checkpoint is used instead"

    def set_best(self, step: int) -> None:
        """Names the step whose parameters stay besides the newest checkpoints, also for a process that resumes."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / BEST, f"{step}\n")

    def draft(self, step: int) -> Path:
        """The folder to write a checkpoint into, for `commit`."""
        return self.path / f"{step}{SAVING}"

    def commit(self, step: int) -> None:
        """Puts the draft of a step in place, and removes an older checkpoint of the same step."""
        target, replaced = self.path / str(step), self.path / f"{step}{REPLACED}"
        if target.exists():
            os.replace(target, replaced)
        os.replace(self.draft(step), target)
        sync_folder(self.path)
        self.damaged.discard(step)
        remove(replaced)

    def discard_draft(self, step: int) -> None:
        """Removes the draft of a step whose save failed, which frees a full disk."""
        # Late writes of tensorstore may make the folder again. What outlasts this goes before the next save.
        for _ in range(10):
            for path in self.path.glob(f"{step}{SAVING}*"):
                remove(path, ignore_errors=True)
            time.sleep(0.05)
            if not any(self.path.glob(f"{step}{SAVING}*")):
                return

    def remove_incomplete(self) -> None:
        """Removes what a killed process left half done."""
        for path in list(self.path.iterdir()):
            # orbax adds its own suffix while it writes
            if match := re.fullmatch(rf"(\d+)(?:{SAVING}|{REPLACED}|{DELETED})(?:\.orbax.*)?", path.name):
                original = self.path / match[1]
                if path.name.endswith(REPLACED) and not original.exists():
                    os.replace(path, original)
                else:
                    remove(path)

    def apply_retention(self, newest: int) -> None:
        """Deletes checkpoints before ``newest`` that are not among the newest; the best one keeps its parameters.

        Damaged ones do not count, or they would push out good ones. Later steps stay: they are from before a return to
        an older checkpoint, and training will reach them again.
        """
        folders, best = self.find(), self._read_best()
        good = [step for step in self.good_steps if step <= newest and not has_params_only(folders[step])]
        for step, path in folders.items():
            if step >= newest or step in good[-self._max_to_keep :]:
                continue
            if step == best:
                self._reduce_to_params(step, path)
                continue
            deleted = self.path / f"{step}{DELETED}"
            os.replace(path, deleted)
            remove(deleted)

    def _reduce_to_params(self, step: int, path: Path) -> None:
        """Replaces a checkpoint by one with its parameters alone; one without a good manifest stays as it is."""
        if has_params_only(path):
            return
        reduced = self.draft(step)
        left_out = {str(path): {TRAINING_STATE, MANIFEST}}
        try:
            shutil.copytree(
                path, reduced, copy_function=_link_or_copy, ignore=lambda place, _: left_out.get(place, set())
            )
        except shutil.Error as error:  # of several files, without their errno: the disk is full, or cannot be read
            remove(reduced, ignore_errors=True)
            raise OSError(errno.EIO, str(error.args[0][0][2]), str(reduced)) from error
        (reduced / PARAMS_ONLY).write_text("The optimizer's state was removed: a run cannot resume from this.\n")
        try:
            write_partial_manifest(reduced, path)
        except ValueError:
            remove(reduced)
        else:
            self.commit(step)

    def _read_best(self) -> int | None:
        try:
            return int((self.path / BEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def has_params_only(checkpoint: Path) -> bool:
    """Whether a checkpoint's training state was removed."""
    return (checkpoint / PARAMS_ONLY).is_file()


def remove(path: Path, ignore_errors: bool = False) -> None:
    """Removes a file or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
