"""The folder of a run's checkpoints: names, completeness, retention, and the checksums of each checkpoint.

A checkpoint of step 100 is written as ``100.saving``. Once all of it and its manifest are on the disk, it is renamed
to ``100``. A folder with a bare number for a name was therefore complete once, no matter when the process died.

The newest checkpoints are whole states, from which a run resumes. The best one, of fine-tuning, keeps only its
parameters once it is no longer among them.

The manifest has the checksums of all files of a checkpoint. It is written last and verified before anything is read
back, because orbax restores a flipped byte without an error. It includes its own checksum.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from bert.files import load_json, pointer_fault, sync_folder, write_atomic

MANIFEST = "MANIFEST.json"
FORMAT = 1
"""Version of the manifest."""
SAVING = ".saving"
"""Suffix of a checkpoint that is being written."""
REPLACED = ".replaced"
"""Suffix of a checkpoint that a new one of the same step replaces; valid until the new one is in place."""
DELETED = ".deleted"
"""Suffix of a checkpoint that is being deleted. The rename is atomic, the deletion is not."""
BEST = "PROTECTED"
"""File with the best step, which is kept regardless of its age."""
HELD = "HELD"
"""File with a step that another process reads, which is kept meanwhile."""
PARAMS_ONLY = "PARAMS_ONLY"
"""File in a checkpoint whose training state was removed; listed in its manifest."""
TRAINING_STATE = "rest"
"""Folder in a checkpoint with all of the state except the parameters."""


class CheckpointDirectory:
    """The checkpoints in a folder, by step. Reading changes nothing.

    Attributes:
        path: absolute; the first save creates it.
        damaged: steps of the checkpoints that were read and found damaged.
    """

    def __init__(self, path: Path, max_to_keep: int | None = None) -> None:
        """Takes the number of newest checkpoints to keep; None means 1."""
        self.path = Path(path).absolute()
        self.damaged: set[int] = set()
        self._max_to_keep = max(1, max_to_keep or 1)

    def find(self) -> dict[int, Path]:
        """Returns the folders by step, complete or not."""
        folders = {}
        for path in self.path.iterdir() if self.path.is_dir() else ():
            name = path.name.removesuffix(REPLACED)
            is_step = re.fullmatch(r"0|[1-9][0-9]*", name) and path.is_dir()
            # A replaced checkpoint counts only if the process died between the two renames.
            if is_step and (name == path.name or not (self.path / name).exists()):
                folders[int(name)] = path
        return folders

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, oldest first. Damage is only detected when one is read."""
        return sorted(step for step, path in self.find().items() if (path / MANIFEST).is_file())

    @property
    def good_steps(self) -> list[int]:
        """The `steps` that are not in `damaged`."""
        return [step for step in self.steps() if step not in self.damaged]

    @property
    def best(self) -> int | None:
        """The last argument of `set_best`, if there is a checkpoint of this step."""
        step = self._read_step(BEST)
        return step if step in self.steps() else None

    @property
    def best_fault(self) -> str | None:
        """Describes an invalid file of `set_best`; None if it names a checkpoint, or if there is no file."""
        if self.best is not None or not (self.path / BEST).exists():
            return None
        return f"{self.path / BEST} names a checkpoint that does not exist; the newest good checkpoint is used instead"

    def set_best(self, step: int) -> None:
        """Records the step whose parameters are kept in addition to the newest checkpoints."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / BEST, f"{step}\n")

    def hold(self, step: int) -> None:
        """Keeps the parameters of a step until another one is held or released, while this process reads it."""
        write_atomic(self.path / HELD, f"{step}\n")

    def release(self) -> None:
        """Ends `hold`."""
        (self.path / HELD).unlink(missing_ok=True)

    def draft(self, step: int) -> Path:
        """Returns the folder to write a checkpoint into before `commit`."""
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
        """Removes the draft of a step whose save failed, so that a full disk has space again."""
        # Late writes of tensorstore may create the folder again. The next save then removes it.
        for _ in range(10):
            for path in self.path.glob(f"{step}{SAVING}*"):
                remove(path, ignore_errors=True)
            time.sleep(0.05)
            if not any(self.path.glob(f"{step}{SAVING}*")):
                return

    def remove_incomplete(self) -> None:
        """Removes the incomplete checkpoints of a killed process, and restores a replaced checkpoint."""
        for path in list(self.path.iterdir()):
            # orbax appends a suffix while it writes
            if match := re.fullmatch(rf"(\d+)(?:{SAVING}|{REPLACED}|{DELETED})(?:\.orbax.*)?", path.name):
                original = self.path / match[1]
                if path.name.endswith(REPLACED) and not original.exists():
                    os.replace(path, original)
                else:
                    remove(path)

    def apply_retention(self, newest: int) -> None:
        """Deletes checkpoints before ``newest`` that are not among the newest.

        The best one and the held one keep their parameters. Damaged checkpoints do not count: they would displace good
        ones. Steps after ``newest`` are kept. The run has resumed from an older checkpoint, and will reach them again.
        """
        folders, kept = self.find(), {self._read_step(BEST), self._read_step(HELD)}
        good = [step for step in self.good_steps if step <= newest and not has_params_only(folders[step])]
        for step, path in folders.items():
            if step >= newest or step in good[-self._max_to_keep :]:
                continue
            if step in kept:
                self._reduce_to_params(step, path)
                continue
            deleted = self.path / f"{step}{DELETED}"
            os.replace(path, deleted)
            remove(deleted)

    def _reduce_to_params(self, step: int, path: Path) -> None:
        """Replaces a checkpoint by one with only its parameters, unless its manifest is damaged."""
        if has_params_only(path):
            return
        reduced = self.draft(step)
        left_out = {str(path): {TRAINING_STATE, MANIFEST}}
        try:
            shutil.copytree(
                path, reduced, copy_function=_link_or_copy, ignore=lambda place, _: left_out.get(place, set())
            )
        except shutil.Error as error:  # has no errno: the disk is full or unreadable
            remove(reduced, ignore_errors=True)
            raise OSError(errno.EIO, str(error.args[0][0][2]), str(reduced)) from error
        (reduced / PARAMS_ONLY).write_text("The optimizer's state was removed: a run cannot resume from this.\n")
        try:
            write_partial_manifest(reduced, path)
        except ValueError:
            remove(reduced)
        else:
            self.commit(step)

    def _read_step(self, name: str) -> int | None:
        try:
            return int((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def has_params_only(checkpoint: Path) -> bool:
    """Returns whether a checkpoint's training state was removed."""
    return (checkpoint / PARAMS_ONLY).is_file()


def remove(path: Path, ignore_errors: bool = False) -> None:
    """Removes a file, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=ignore_errors)
    else:
        path.unlink(missing_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def write_manifest(folder: Path, step: int) -> None:
    """Writes ``folder/MANIFEST.json`` for all files in ``folder``, atomically and synced to disk."""
    _write_manifest(folder, step, {})


def _write_manifest(folder: Path, step: int, known: dict[str, Any]) -> None:
    files = {
        name: known.get(name) or {"size": path.stat().st_size, "sha256": _sha256(path)}
        for name, path in sorted(_files(folder).items())
    }
    write_atomic(folder / MANIFEST, _dump({"format": FORMAT, "step": step, "files": files}))


def write_partial_manifest(folder: Path, source: Path) -> None:
    """Writes ``folder/MANIFEST.json`` for a folder with some of the files of ``source``, and others.

    Checksums of the files of ``source`` are copied from its manifest, so that a damaged file still counts as damaged.

    Raises:
      ValueError: the manifest of ``source`` cannot be used.
    """
    manifest = _read_manifest(source)
    if isinstance(manifest, str):
        raise ValueError(manifest)
    _write_manifest(folder, manifest["step"], manifest["files"])


def verify_manifest(folder: Path) -> list[str]:
    """Compares ``folder`` with its manifest, and returns one phrase for each difference."""
    manifest = _read_manifest(folder)
    if isinstance(manifest, str):
        return [manifest]
    problems = []
    try:
        present = _files(folder)
    except OSError as error:
        return [f"it cannot be read ({error.strerror})"]
    if folder.name.isdigit() and int(folder.name) != manifest["step"]:
        problems.append(f"{MANIFEST} belongs to step {manifest['step']}")
    for name, expected in manifest["files"].items():
        if name not in present:
            problems.append(f"{name} is missing")
        elif problem := _compare(present[name], expected):
            problems.append(f"{name} {problem}")
    problems += [f"{name} is not listed in {MANIFEST}" for name in sorted(present.keys() - manifest["files"].keys())]
    return problems


def listed_files(folder: Path) -> set[str] | None:
    """Returns the files that the manifest of a checkpoint lists; None if the manifest is missing or damaged."""
    manifest = _read_manifest(folder)
    return None if isinstance(manifest, str) else set(manifest["files"])


def _read_manifest(folder: Path) -> dict[str, Any] | str:
    """Returns the manifest of ``folder``, or a phrase that describes why it cannot be used."""
    try:
        text = (folder / MANIFEST).read_bytes().decode()
        manifest = load_json(text)
        # The text must equal the output of _dump byte for byte, including its own checksum.
        if text != _dump({key: manifest[key] for key in ("format", "step", "files")}):
            raise ValueError
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{MANIFEST} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError):  # ValueError includes bytes that are not UTF-8 or not JSON
        return f"{MANIFEST} is damaged"
    if manifest["format"] != FORMAT:
        return f"{MANIFEST} has format {manifest['format']}, this version reads format {FORMAT}"
    return dict(manifest)


def _compare(path: Path, expected: dict[str, Any]) -> str | None:
    try:
        if pointer_fault(path):
            return "is a Git LFS pointer, not the file itself (run git lfs pull)"
        size = path.stat().st_size
        if size != expected["size"]:
            return f"has {size} bytes instead of {expected['size']}"
        return None if _sha256(path) == expected["sha256"] else "has a wrong checksum"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _files(folder: Path) -> dict[str, Path]:
    """Returns the files by path inside ``folder``, without hidden ones (.DS_Store, .nfs...): orbax writes none."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if not path.is_dir() and not path.name.startswith(".") and path != folder / MANIFEST
    }


def _dump(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1) + "\n"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
