"""Strategies by which the hosts of a run write checkpoints together, and read the same one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax

from bert.parallel.multihost import broadcast_from_main, call_on_main, is_main_process, sync_hosts
from bert.runs.checkpoint_directory import CheckpointDirectory, remove, write_manifest
from bert.runs.mirror import Mirror
from bert.runs.orbax_io import Place, is_part, keep_whole, remove_paths, save_items, save_parts

Restored = tuple[int, Any]
"""Step and state of a checkpoint."""


class Storage(Protocol):
    """Strategy by which the hosts of a run write a checkpoint together, and choose the checkpoint to read.

    Attributes:
        is_writer: whether this host records the best step.
        place: which arrays of a restored state this host has parts of.
    """

    is_writer: bool
    place: Place

    def can_save(self, state: Any) -> bool:
        """Returns whether all hosts that have parts of the state are saving it."""
        ...

    def write(self, directory: CheckpointDirectory, step: int, items: dict[str, Any]) -> None:
        """Writes the checkpoint of a step; called in the background thread. The main process puts it in place."""
        ...

    def read(self, choose: Callable[[], Restored | None], read: Callable[..., Restored | None]) -> Restored | None:
        """Returns what ``choose()`` returns on the main process; other hosts call ``read(step=...)`` with its step."""
        ...

    def call_on_main(self, call: Callable[[], None]) -> None:
        """Calls a function on the main process. Raises its UserError on all hosts."""
        ...

    def sync(self) -> None:
        """Waits for all hosts."""
        ...


class LocalStorage:
    """Checkpoints that one host writes and reads alone."""

    is_writer = True

    def __init__(self, place: Place = keep_whole) -> None:
        self.place = place

    def can_save(self, state: Any) -> bool:
        return True

    def write(self, directory: CheckpointDirectory, step: int, items: dict[str, Any]) -> None:
        directory.remove_incomplete()
        save_items(directory.draft(step), items)
        complete(directory, step)

    def read(self, choose: Callable[[], Restored | None], read: Callable[..., Restored | None]) -> Restored | None:
        return choose()

    def call_on_main(self, call: Callable[[], None]) -> None:
        call()

    def sync(self) -> None:
        """Returns immediately, because there are no other hosts."""


def complete(directory: CheckpointDirectory, step: int) -> None:
    """Puts the draft of a checkpoint in place; it has everything except the manifest."""
    remove_paths(directory.draft(step))
    write_manifest(directory.draft(step), step)
    directory.commit(step)
    directory.apply_retention(step)


class MultihostStorage:
    """Checkpoints of several hosts: each host writes its parts of arrays, and the main process everything else.

    Without a shared disk, each host writes to its own disk and uploads its parts to the object store. The main process
    downloads the parts of the other hosts to its disk, where it completes the checkpoint. No host needs the memory for
    a whole state.
    """

    def __init__(self, place: Place, mirror: Mirror | None, pull: Callable[[], None]) -> None:
        """Initializes the storage.

        Args:
            place: which arrays of a restored state this host has parts of.
            mirror: the object store of hosts without a shared disk; None for hosts with one.
            pull: downloads files of the main process, on a host that does not share its disk.
        """
        self.is_writer, self.place = is_main_process(), place
        self._mirror, self._pull = mirror, pull

    def can_save(self, state: Any) -> bool:
        return sys.exception() is None or not _has_parts(state)

    def write(self, directory: CheckpointDirectory, step: int, items: dict[str, Any]) -> None:
        has_parts = _has_parts(items)
        if self.is_writer and not has_parts:
            LocalStorage().write(directory, step, items)
        elif self.is_writer:
            self._write_parts_and_complete(directory, step, items)
        elif has_parts:
            self._write_parts(directory, step, items)

    def read(self, choose: Callable[[], Restored | None], read: Callable[..., Restored | None]) -> Restored | None:
        restored, step = call_on_main(choose, lambda restored: None if restored is None else restored[0])
        if restored is not None or step is None:
            return restored
        self._pull()
        return read(step=step)

    def call_on_main(self, call: Callable[[], None]) -> None:
        broadcast_from_main(call)

    def sync(self) -> None:
        sync_hosts("checkpoints")

    def _write_parts_and_complete(self, directory: CheckpointDirectory, step: int, items: dict[str, Any]) -> None:
        draft, checkpoint = directory.draft(step), directory.path / str(step)
        directory.remove_incomplete()
        if self._mirror is None:
            self._save_parts(draft, items)
        else:
            self._mirror.withdraw(checkpoint)
            self._save_parts(draft, items)
            sync_hosts("parts_are_sent")
            self._mirror.fetch_parts(draft, checkpoint)
        complete(directory, step)

    def _write_parts(self, directory: CheckpointDirectory, step: int, items: dict[str, Any]) -> None:
        draft = directory.draft(step)
        if self._mirror is None:
            self._save_parts(draft, items)
        else:
            directory.remove_incomplete()
            self._save_parts(draft, items)
            self._mirror.send_parts(draft, directory.path / str(step))
            sync_hosts("parts_are_sent")
            remove(draft)

    def _save_parts(self, draft: Path, items: dict[str, Any]) -> None:
        # The main process may still be completing the previous checkpoint, for longer than orbax would wait for it.
        sync_hosts("parts_begin")
        save_parts(draft, items, is_shared=self._mirror is None)


def _has_parts(state: Any) -> bool:
    return any(map(is_part, jax.tree.leaves(state)))
