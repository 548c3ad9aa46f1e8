"""Mirror of a run or a sweep in an object store: a local folder that processes work in, and its copy in the store.

The copy is authoritative. A process that opens the run first makes its local folder equal to the copy, so that any
machine can resume the run. After each checkpoint and at the end, changed files are uploaded. The manifest of a
checkpoint is uploaded last and removed first, and a checkpoint without a manifest is ignored.

Object stores have no locks. Instead, the writing process holds a lease and renews it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Set
from pathlib import Path, PurePosixPath

from bert.errors import LOGGER, UserError
from bert.files import LOCK, is_temporary, load_json, user_cache_dir, write_atomic
from bert.remote import ObjectStore, call_each, is_inside
from bert.runs.checkpoint_directory import MANIFEST, listed_files, remove

SMALL = 2**24
"""Files below this size in bytes are read before they are uploaded, because they may grow, like metrics.jsonl."""

PARTS = "*/*/**/*"
"""Glob of the files with parts of arrays (item/array/...). The files above them describe the arrays on each host."""

Signature = tuple[int, int]
"""Size and modification time of a file."""


class Mirror:
    """A local folder of a run or a sweep, with its runs, and the copy in a store.

    Attributes:
        folder: the local folder.
        url: URL of the copy, without a slash at the end.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url.rstrip("/")
        self._store = ObjectStore(url)
        self._lease: Lease | None = None
        self._known: dict[str, Signature | None] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def claim(self, kind: str = "run", marker: str = "config.yaml") -> Iterator[None]:
        """Claims the copy for this process, and uploads changes at the end. The caller has claimed the local folder.

        After an error nothing is uploaded: the copy already has the newest checkpoint.

        Raises:
            UserError: another process has claimed it, it has other content, or the store cannot be used.
        """
        self._check_is_kind_or_empty(kind, marker)
        with Lease(self._store, machine_name(self.folder.with_suffix(".machine"))) as lease:
            self._lease = lease
            self.pull()
            LOGGER.info(f"{self.url} is mirrored in {self.folder}")
            yield
            self.push()

    def path_of(self, url: str) -> Path:
        """Returns the local folder of this run, or of a run in this folder, by its URL."""
        return self.folder / url.removeprefix(self.url).strip("/")

    def pull(self, part: Path | None = None) -> None:
        """Makes the local folder, or a part of it, equal to the copy.

        Incomplete checkpoints are not downloaded, and neither are files that the manifest of their checkpoint does not
        list: a process died while it replaced the checkpoint by its parameters.

        Args:
            part: local folder of a run in this folder.
        """
        part = part or self.folder
        part.mkdir(parents=True, exist_ok=True)
        for entry in part.iterdir():
            if entry.name != LOCK:
                remove(entry)
        names = [name for name in self._files() if part in (self.folder / name).parents]
        listed = {}
        for name in names:
            if (checkpoint := _checkpoint(name)) and name == f"{checkpoint}/{MANIFEST}":
                self._store.download(name, self.folder / name)
                listed[checkpoint] = listed_files(self.folder / checkpoint)
        self._known = {name: known for name, known in self._known.items() if part not in (self.folder / name).parents}

        def get(name: str) -> None:
            checkpoint = _checkpoint(name)
            if checkpoint is None or _belongs(name.removeprefix(f"{checkpoint}/"), listed.get(checkpoint, set())):
                self._store.download(name, self.folder / name)
                self._known[name] = _signature(self.folder / name)
            else:
                self._known[name] = None

        call_each(get, names)

    def push(self) -> None:
        """Uploads changed files of the local folder, and removes files from the copy that no longer exist.

        Raises:
            UserError: the store cannot be used, or another process holds the lease.
        """
        with self._lock:
            if self._lease is not None:
                self._lease.check()
            current = _signatures(self.folder)
            changed = [name for name, signature in current.items() if self._known.get(name) != signature]

            def send(name: str) -> None:
                if self._send(name):
                    self._known[name] = current[name]

            call_each(send, filter(_is_content, changed))
            for name in sorted(itertools.filterfalse(_is_content, changed), key=_rank):
                send(name)
            self._remove_all(self._known.keys() - current.keys())

    def withdraw(self, checkpoint: Path) -> None:
        """Removes a checkpoint that will be replaced, so that its files cannot mix with the new ones."""
        folder = f"{self._name(checkpoint)}/"
        with self._lock:
            self._remove_all({name for name in self._known if name.startswith(folder)})

    def send_parts(self, draft: Path, checkpoint: Path) -> None:
        """Uploads this host's parts of arrays from the draft of a checkpoint to the place of the checkpoint."""
        folder = self._name(checkpoint)
        names = (path.relative_to(draft).as_posix() for path in draft.glob(PARTS) if path.is_file())
        call_each(lambda name: self._store.upload(draft / name, f"{folder}/{name}"), names)

    def fetch_parts(self, draft: Path, checkpoint: Path) -> None:
        """Downloads the parts of other hosts into the draft of a checkpoint."""
        folder = f"{self._name(checkpoint)}/"

        def get(name: str) -> None:
            path = draft / name.removeprefix(folder)
            if not path.exists():
                self._store.download(name, path)
                self._known[name] = _signature(path)

        with self._lock:
            call_each(get, [name for name in self._files() if name.startswith(folder)])

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _send(self, name: str) -> bool:
        """Uploads a file. Returns False if it no longer exists: a logger may have removed it."""
        path = self.folder / name
        if not path.exists():
            return False
        if path.stat().st_size < SMALL:
            self._store.write(name, path.read_bytes())
        else:
            self._store.upload(path, name)
        return True

    def _remove_all(self, names: Set[str]) -> None:
        """Removes files from the copy, manifests first."""

        def remove_one(name: str) -> None:
            self._store.remove(name)
            del self._known[name]

        for name in sorted(itertools.filterfalse(_is_content, names), key=_rank, reverse=True):
            remove_one(name)
        call_each(remove_one, filter(_is_content, names))

    def _check_is_kind_or_empty(self, kind: str, marker: str) -> None:
        names = [name for name in self._files() if _checkpoint(name) is None]
        if names and marker not in names:
            raise UserError(f"{self.url} is not empty and holds no {kind} (no {marker}): name another --output_dir")

    def _files(self) -> list[str]:
        """Returns the files of the copy except leases. Trials that were resumed as runs may have left their own."""
        return [name for name in self._store.files() if PurePosixPath(name).name != LEASE]


def local_folder(url: str, process_index: int = 0) -> Path:
    """Returns the local folder of the run or sweep of a URL. Each host has its own.

    Raises:
        UserError: the user has no cache folder.
    """
    cache = user_cache_dir()
    if cache is None:
        raise UserError(f"{url} needs a local copy, but there is no home folder: set XDG_CACHE_HOME to a folder")
    name = hashlib.blake2b(url.rstrip("/").encode(), digest_size=12).hexdigest()
    folder = cache / "runs" / (f"{name}-{process_index}" if process_index else name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a folder") from None
    return folder


def _names(folder: Path) -> list[str]:
    """Returns the files of a run to upload, without temporary files and links to files outside the run."""
    names = []
    for root, folders, files in os.walk(folder):
        if Path(root).name == "checkpoints":
            folders[:] = [name for name in folders if name.isdigit()]
        for path in (Path(root, file) for file in files if file != LOCK):
            if not is_temporary(path) and (not path.is_symlink() or is_inside(path, folder)):
                names.append(path.relative_to(folder).as_posix())
    return names


def _checkpoint(name: str) -> str | None:
    """Returns the folder of the checkpoint that a file belongs to; None for other files."""
    match = re.match(r"(?:.*/)?checkpoints/\d+(?=/)", name)
    return match[0] if match else None


def _belongs(name: str, listed: set[str] | None) -> bool:
    """Returns whether the manifest of a checkpoint lists a file. If the manifest is damaged (None), all files belong to
    the checkpoint: the damage is reported when it is read."""
    return listed is None or name in listed or name == MANIFEST


def _is_content(name: str) -> bool:
    """Returns whether a file is part of a checkpoint, except its manifest. These are uploaded first, in any order."""
    return _checkpoint(name) is not None and not name.endswith(MANIFEST)


def _rank(name: str) -> tuple[bool, bool, str]:
    """Returns the sort key for uploads of other files: first the marker of a run or a sweep, then files that describe
    it, then manifests of checkpoints."""
    return _checkpoint(name) is not None, name not in ("config.yaml", "sweep.json"), name


def _signatures(folder: Path) -> dict[str, Signature]:
    """Returns the signatures of a run's files, without files that vanish meanwhile and dangling links of loggers."""
    signatures = {}
    for name in _names(folder):
        with contextlib.suppress(FileNotFoundError):
            signatures[name] = _signature(folder / name)
    return signatures


def _signature(path: Path) -> Signature:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


LEASE = ".lease.json"
"""File in the store with the holder of the lease."""

PERIOD = 15.0
"""Seconds between two renewals."""

EXPIRY = 60.0
"""Seconds without a renewal after which the holder counts as dead. Each process uses its own clock."""

SETTLING = 2.0
"""Seconds to wait before confirming that this process was the only one to acquire an expired lease."""


class Lease:
    """An exclusive write lock on a folder in an object store; it expires if its holder dies.

    Use it as a context manager, which waits up to `EXPIRY` seconds for a holder that may be dead.

    Attributes:
        holder: name of this machine in the lease. If a lease has the name of this machine, and this process has the
            local lock of the run, the holder is dead. The process then does not wait.
    """

    def __init__(self, store: ObjectStore, holder: str) -> None:
        self.holder = holder
        self._store = store
        self._taken: str | None = None
        self._ended = threading.Event()
        self._renewed = 0.0
        self._thread = threading.Thread(target=self._renew_until_end, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        """Raises UserError if another process holds the lease."""
        self._renewed = time.monotonic()
        self._store.create(LEASE, self._content())
        current = self._store.read(LEASE)
        if not self._is_own(current):
            self._wait_for_expiry(current)
            self._renewed = time.monotonic()
            self._store.write(LEASE, self._content())
            time.sleep(SETTLING)
            self.check()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(UserError):  # the lease expires without a renewal
            if self._is_own(self._store.read(LEASE)):
                self._store.remove(LEASE)

    def check(self) -> None:
        """Raises UserError if another process holds the lease, or may hold it because it was not renewed in time."""
        if time.monotonic() - self._renewed >= EXPIRY:
            raise UserError(
                f"{self._store.url} could not be reached for {EXPIRY:g} seconds, so another process may have taken "
                "it over: run the same command again"
            )
        self._taken = self._taken or _other(self._store.read(LEASE), self.holder)
        if self._taken:
            fix = "wait until that has ended, and run the same command again"
            raise UserError(f"{self._store.url} was taken over by {self._taken}: {fix}")

    def _renew_until_end(self) -> None:
        while not self._ended.wait(PERIOD):
            try:
                self._taken = self._taken or _other(self._store.read(LEASE), self.holder)
                if self._taken:
                    return
                began = time.monotonic()
                self._store.write(LEASE, self._content())
                self._renewed = began
            except UserError as error:  # the next renewal may succeed; `check` counts the time
                LOGGER.warning(str(error))

    def _wait_for_expiry(self, current: bytes | None) -> None:
        """Waits until a lease has not been renewed for `EXPIRY` seconds. Raises UserError if it is renewed."""
        seen = time.monotonic()
        LOGGER.info(
            f"{self._store.url} is in use by {_describe(current)}: waiting up to {EXPIRY:g} seconds in case that "
            "process has died"
        )
        while time.monotonic() - seen < EXPIRY:
            time.sleep(min(1.0, EXPIRY / 10))
            latest = self._store.read(LEASE)
            if latest is None:
                return
            if latest != current:
                fix = "wait until that has ended, or pass another --output_dir"
                raise UserError(f"{self._store.url} is in use by {_describe(latest)}: {fix}")

    def _is_own(self, content: bytes | None) -> bool:
        return content is not None and _other(content, self.holder) is None

    def _content(self) -> bytes:
        lease = {"holder": self.holder, "process": f"process {os.getpid()} on {socket.gethostname()}"}
        return json.dumps({**lease, "renewed": time.time()}).encode()


def machine_name(file: Path) -> str:
    """Returns the name of this machine as the holder of a lease. ``file`` stores it for later processes."""
    name = ""
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        name = file.read_text(encoding="utf-8")
    if not re.fullmatch("[0-9a-f]{32}", name):  # damaged: the lease of the old name expires
        name = uuid.uuid4().hex
        write_atomic(file, name)
    return f"{name}@{socket.gethostname()}"


def _other(content: bytes | None, holder: str) -> str | None:
    """Returns a description of the holder of a lease; None if it is ``holder``."""
    try:
        held = load_json(content or b"{}").get("holder")
    except (ValueError, AttributeError):
        held = None
    return None if held == holder else _describe(content)


def _describe(content: bytes | None) -> str:
    try:
        return str(load_json(content or b"")["process"])
    except (ValueError, KeyError, TypeError):
        return "another process"
