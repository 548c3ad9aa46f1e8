"""A run in an object store: a local folder, which the run works in, and its copy in the store.

The copy decides. A process that opens the run makes its local folder equal to the copy, so that a machine with an empty
disk resumes as any other one. After each checkpoint and at the end, what has changed is copied back. The manifest of a
checkpoint is written after all else and removed before all else, so that one without it counts for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from bert.errors import UserError
from bert.files import is_temporary, user_cache_dir
from bert.locks import LOCK
from bert.messages import LOGGER
from bert.object_store import ObjectStore
from bert.runs.checkpoint_directory import remove
from bert.runs.lease import LEASE, Lease, machine_name
from bert.runs.manifest import MANIFEST, listed_files

SMALL = 2**24
"""Bytes of a file that is read before it is sent: it may grow meanwhile, as metrics.jsonl does."""

Signature = tuple[int, int]
"""Size and time of change of a file."""


class Mirror:
    """The local folder of a run and its copy in a store."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._store = ObjectStore(url)
        self._lease: Lease | None = None
        self._known: dict[str, Signature | None] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Holds the copy for this process, and copies what has changed at the end; the local folder is claimed.

        After an error nothing is copied: the copy has the newest checkpoint.

        Raises:
            UserError: another process holds it, it is no run's, or the store cannot be used.
        """
        self._check_is_run_or_empty()
        with Lease(self._store, machine_name(self.folder.with_suffix(".machine"))) as lease:
            self._lease = lease
            self.pull()
            LOGGER.info(f"{self._store.url} has its local copy in {self.folder}")
            yield
            self.push()

    def pull(self) -> None:
        """Makes the local folder equal to the copy.

        Checkpoints that are not complete are left out, and files that the manifest of a checkpoint does not list: the
        process died while it replaced the checkpoint by its parameters.
        """
        for entry in self.folder.iterdir():
            if entry.name != LOCK:
                remove(entry)
        names = [name for name in self._store.files() if name != LEASE]
        listed = {}
        for name in names:
            if (checkpoint := _checkpoint(name)) and name == f"{checkpoint}/{MANIFEST}":
                self._store.download(name, self.folder / name)
                listed[checkpoint] = listed_files(self.folder / checkpoint)
        self._known = {}
        for name in names:
            checkpoint = _checkpoint(name)
            if checkpoint is None or _belongs(name.removeprefix(f"{checkpoint}/"), listed.get(checkpoint, set())):
                self._store.download(name, self.folder / name)
                self._known[name] = _signature(self.folder / name)
            else:
                self._known[name] = None

    def push(self) -> None:
        """Copies what has changed in the local folder, and removes from the copy what is no longer there.

        Raises:
            UserError: the store cannot be used, or another process has taken over.
        """
        with self._lock:
            if self._lease is not None:
                self._lease.check()
            current = {name: _signature(self.folder / name) for name in _names(self.folder)}
            changed = [name for name, signature in current.items() if self._known.get(name) != signature]
            for name in sorted(changed, key=_rank):
                self._send(name)
                self._known[name] = current[name]
            for name in sorted(self._known.keys() - current.keys(), key=_rank, reverse=True):
                self._store.remove(name)
                del self._known[name]

    def _send(self, name: str) -> None:
        path = self.folder / name
        if path.stat().st_size < SMALL:
            self._store.write(name, path.read_bytes())
        else:
            self._store.upload(path, name)

    def _check_is_run_or_empty(self) -> None:
        names = [name for name in self._store.files() if name != LEASE and _checkpoint(name) is None]
        if names and "config.yaml" not in names:
            raise UserError(
                f"{self._store.url} is not empty and holds no run (no config.yaml): name another --output_dir"
            )


def local_folder(url: str, process_index: int = 0) -> Path:
    """Where the run of a URL works on this machine; of several hosts, each has its own.

    Raises:
        UserError: the user has no folder for caches.
    """
    cache = user_cache_dir()
    if cache is None:
        raise UserError(f"{url} has no place for its local copy: set XDG_CACHE_HOME to a folder")
    name = hashlib.blake2b(url.rstrip("/").encode(), digest_size=12).hexdigest()
    folder = cache / "runs" / (f"{name}-{process_index}" if process_index else name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder") from None
    return folder


def _names(folder: Path) -> list[str]:
    """The files of a run that are not about to change their name."""
    names = []
    for root, folders, files in os.walk(folder):
        if Path(root).name == "checkpoints":
            folders[:] = [name for name in folders if name.isdigit()]
        relative = Path(root).relative_to(folder)
        names += [(relative / file).as_posix() for file in files if file != LOCK and not is_temporary(Path(root, file))]
    return names


def _checkpoint(name: str) -> str | None:
    """The folder of the checkpoint that a file belongs to, if it belongs to one."""
    match = re.match(r"(?:.*/)?checkpoints/\d+(?=/)", name)
    return match[0] if match else None


def _belongs(name: str, listed: set[str] | None) -> bool:
    """Whether a file belongs to a checkpoint whose manifest lists these; without a usable one, which is found damaged
    when it is read, each file does."""
    return listed is None or name in listed or name == MANIFEST


def _rank(name: str) -> tuple[int, str]:
    """The order of copying: the files of checkpoints, what describes them, and at last the manifests."""
    in_checkpoint = _checkpoint(name) is not None
    return (2 if in_checkpoint and name.endswith(MANIFEST) else 0 if in_checkpoint else 1), name


def _signature(path: Path) -> Signature:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
