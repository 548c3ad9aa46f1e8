"""Checkpoints of a run on several hosts: each host writes its parts of the state, all read the same checkpoint."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from bert.errors import UserError
from bert.parallel.backends import Parallelism
from bert.parallel.multihost import broadcast_from_main, call_on_main, is_main_process, is_multihost, sync_hosts
from bert.runs.checkpoint import Checkpointer
from bert.runs.checkpoint_directory import CheckpointDirectory, remove
from bert.runs.folder import RunFolder
from bert.runs.mirror import Mirror
from bert.runs.orbax_io import is_part, keep_whole, num_bytes, save_parts

Restored = tuple[int, Any]


class PartsCheckpointer(Checkpointer):
    """The checkpoints as one of several hosts sees them: each writes its parts of arrays, the main process all else.

    Without a shared disk, each host writes to its own and sends its parts to the store. The main process gets those of
    the others, so that its disk, not its memory, has the whole checkpoint, to which it adds the manifest.
    """

    def __init__(self, *args: Any, mirror: Mirror | None) -> None:
        """
        Args:
            mirror: where hosts without a shared disk meet.
        """
        super().__init__(*args)
        self._mirror = mirror

    def _write(self, step: int, items: dict[str, Any]) -> None:
        has_parts = any(map(is_part, jax.tree.leaves(items)))
        if is_main_process() and not has_parts:
            super()._write(step, items)
        elif is_main_process():
            self._write_parts_and_complete(step, items)
        elif has_parts:
            self._write_parts(step, items)

    def _write_parts_and_complete(self, step: int, items: dict[str, Any]) -> None:
        draft, checkpoint = self._directory.draft(step), self.folder / str(step)
        self._directory.remove_incomplete()
        if self._mirror is None:
            self._save_parts(draft, items)
        else:
            self._mirror.withdraw(checkpoint)
            self._save_parts(draft, items)
            sync_hosts("parts_are_sent")
            self._mirror.fetch_parts(draft, checkpoint)
        self._complete(step)

    def _write_parts(self, step: int, items: dict[str, Any]) -> None:
        draft = self._directory.draft(step)
        if self._mirror is None:
            self._save_parts(draft, items)
        else:
            self._directory.remove_incomplete()
            self._save_parts(draft, items)
            self._mirror.send_parts(draft, self.folder / str(step))
            sync_hosts("parts_are_sent")
            remove(draft)

    def _save_parts(self, draft: Path, items: dict[str, Any]) -> None:
        # The main process may be completing the checkpoint before, which may take longer than orbax waits for it.
        sync_hosts("parts_begin")
        save_parts(draft, items, is_shared=self._mirror is None)


class MultihostCheckpointer:
    """A `Checkpointer` for all hosts: all read the step that the main process has verified."""

    def __init__(self, checkpoints: Checkpointer, pull: Callable[[], None]) -> None:
        """
        Args:
            pull: gets what the main process has written, on a host that does not see its disk.
        """
        self._checkpoints = checkpoints
        self._pull = pull

    def __enter__(self) -> MultihostCheckpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpoints.close()

    def save(self, step: int, state: Any) -> None:
        """Begins to save a state, of which every host has the arrays or its parts of them.

        After an error nobody else is here to save the other parts: then nothing is saved.
        """
        if sys.exception() is not None and any(map(is_part, jax.tree.leaves(state))):
            return
        self._checkpoints.save(step, state)

    def wait(self) -> None:
        """Waits until nothing is being saved."""
        self._checkpoints.wait()
        sync_hosts("checkpoints")

    def set_best(self, step: int) -> None:
        """Keeps a step besides the newest ones."""
        if is_main_process():
            self._checkpoints.set_best(step)

    def thin_out(self) -> None:
        """Removes what is not to be kept."""
        broadcast_from_main(self._checkpoints.thin_out)

    def restore_best_params(self) -> Restored | None:
        """The parameters of the best step, or of the newest good one: the same on every host."""
        return self._read_everywhere(self._checkpoints.restore_best_params, self._checkpoints.restore_params)

    def restore(self, like: Any = None) -> Restored | None:
        """The newest good checkpoint, the same on every host."""
        restore = partial(self._checkpoints.restore, like)
        return self._read_everywhere(restore, restore)

    def _read_everywhere(
        self, choose: Callable[[], Restored | None], read: Callable[..., Restored | None]
    ) -> Restored | None:
        """(step, state) that ``choose`` finds on the main process; the others ``read`` the checkpoint of that step."""
        restored, step = call_on_main(choose, lambda restored: None if restored is None else restored[0])
        if restored is not None or step is None:
            return restored
        self._pull()
        return read(step=step)


def make_checkpointer(
    run: RunFolder[Any], say: Callable[[str], None], parallel: Parallelism
) -> Checkpointer | MultihostCheckpointer:
    """The checkpoints of a run, for one host or for several."""

    def say_plainly(text: str) -> None:
        say(str(text))  # in the log of the run, where the steps before and after are, no warning

    folder, training = run.checkpoints, run.config.training
    if not is_multihost():
        return Checkpointer(folder, training.max_to_keep, say_plainly, run.push)
    place = parallel.host_sharding if training.average_checkpoints == 1 else keep_whole
    checkpoints = PartsCheckpointer(folder, training.max_to_keep, say_plainly, run.push, place, mirror=run.mirror)
    return MultihostCheckpointer(checkpoints, run.pull)


def require_space(run: RunFolder[Any], state: Any, say: Callable[[str], None]) -> None:
    """Compares the free space of a run's disk with the size of its checkpoints, before the first step.

    Args:
        run: the run.
        state: what its checkpoints hold.
        say: logs that a later checkpoint may find no room.

    Raises:
        UserError: not even one checkpoint fits.
    """

    def check() -> None:
        needed, disk = num_bytes(state) / 1e6, shutil.disk_usage(run.path)
        free = disk.free / 1e6
        if not disk.total:  # as some network file systems report
            return
        room = f"the disk of {run.path} has {free:,.1f} MB of free space"
        if free < needed:
            raise UserError(
                f"{room}, and a checkpoint needs {needed:,.1f} MB: free some, or pass an --output_dir on another disk"
            )
        # A new checkpoint is complete before the oldest one is removed.
        kept = run.config.training.max_to_keep or 1
        more = kept + 1 - len(CheckpointDirectory(run.checkpoints).steps())
        if free < more * needed:
            say(
                f"{room}, and {more} more checkpoints of {needed:,.1f} MB are kept at once (training.max_to_keep "
                f"{kept}): a later one may find no room"
            )

    broadcast_from_main(check)
