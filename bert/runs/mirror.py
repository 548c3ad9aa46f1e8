"""A run or a sweep in an object store: a local folder, which it works in, and its copy in the store.

The copy decides. A process that opens the run makes its local folder equal to the copy, so that a machine with an empty
disk resumes as any other one. After each checkpoint and at the end, what has changed is copied back. The manifest of a
checkpoint is written after all else and removed before all else, so that one without it counts for nothing.

Object stores have no locks. Instead, the process that writes holds a lease, which it renews.
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
"""Bytes of a file that is read before it is sent: it may grow meanwhile, as metrics.jsonl does."""

PARTS = "*/*/**/*"
"""Files of a checkpoint with parts of arrays (item/array/...). Each host has those above, which describe the whole."""

Signature = tuple[int, int]
"""Size and time of change of a file."""


class Mirror:
    """The local folder of a run or a sweep, with the runs that are parts of it, and its copy in a store.

    Attributes:
        folder: on this machine.
        url: of the copy, without a slash at the end.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url.rstrip("/")
        self._store = ObjectStore(url)
        self._lease: Lease | None = None
        self._known: dict[str, Signature | None] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def claim(self, kind: str = "run", marker: str = "config.yaml") -> Iterator[None]:
        """Holds the copy for this process, and copies what has changed at the end; the local folder is claimed.

        After an error nothing is copied: the copy has the newest checkpoint.

        Args:
            kind: what the folder may hold.
            marker: the file that a folder of this kind has.

        Raises:
            UserError: another process holds it, it holds anything else, or the store cannot be used.
        """
        self._check_is_kind_or_empty(kind, marker)
        with Lease(self._store, machine_name(self.folder.with_suffix(".machine"))) as lease:
            self._lease = lease
            self.pull()
            LOGGER.info(f"{self.url} has its local copy in {self.folder}")
            yield
            self.push()

    def path_of(self, url: str) -> Path:
        """The local folder of a run that is a part of this one, or of this one."""
        return self.folder / url.removeprefix(self.url).strip("/")

    def pull(self, part: Path | None = None) -> None:
        """Makes the local folder, or a part of it, equal to the copy.

        Checkpoints that are not complete are left out, and files that the manifest of a checkpoint does not list: the
        process died while it replaced the checkpoint by its parameters.

        Args:
            part: the local folder of a run that is a part of this one.
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
        """Copies what has changed in the local folder, and removes from the copy what is no longer there.

        Raises:
            UserError: the store cannot be used, or another process has taken over.
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
        """Removes a checkpoint that is about to be replaced: no file of it is to be taken for one of the new one."""
        folder = f"{self._name(checkpoint)}/"
        with self._lock:
            self._remove_all({name for name in self._known if name.startswith(folder)})

    def send_parts(self, draft: Path, checkpoint: Path) -> None:
        """Copies this host's parts of arrays, which are in a draft of a checkpoint, to where the checkpoint belongs."""
        folder = self._name(checkpoint)
        names = (path.relative_to(draft).as_posix() for path in draft.glob(PARTS) if path.is_file())
        call_each(lambda name: self._store.upload(draft / name, f"{folder}/{name}"), names)

    def fetch_parts(self, draft: Path, checkpoint: Path) -> None:
        """Adds to the draft of a checkpoint what other hosts have sent."""
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
        """Copies a file, and returns whether it is still there: a logger may have removed it meanwhile."""
        path = self.folder / name
        if not path.exists():
            return False
        if path.stat().st_size < SMALL:
            self._store.write(name, path.read_bytes())
        else:
            self._store.upload(path, name)
        return True

    def _remove_all(self, names: Set[str]) -> None:
        """Removes files of the copy, manifests first."""

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
        """The files of the copy but leases: a trial of a sweep that was resumed as a run may have left its own."""
        return [name for name in self._store.files() if PurePosixPath(name).name != LEASE]


def local_folder(url: str, process_index: int = 0) -> Path:
    """Where the run or the sweep of a URL works on this machine; of several hosts, each has its own.

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
    """Returns the files of a run to copy: none that is about to be renamed, and no link to a file outside the run."""
    names = []
    for root, folders, files in os.walk(folder):
        if Path(root).name == "checkpoints":
            folders[:] = [name for name in folders if name.isdigit()]
        for path in (Path(root, file) for file in files if file != LOCK):
            if not is_temporary(path) and (not path.is_symlink() or is_inside(path, folder)):
                names.append(path.relative_to(folder).as_posix())
    return names


def _checkpoint(name: str) -> str | None:
    """The folder of the checkpoint that a file belongs to, if it belongs to one."""
    match = re.match(r"(?:.*/)?checkpoints/\d+(?=/)", name)
    return match[0] if match else None


def _belongs(name: str, listed: set[str] | None) -> bool:
    """Whether a file belongs to a checkpoint whose manifest lists these; without a usable one, which is found damaged
    when it is read, each file does."""
    return listed is None or name in listed or name == MANIFEST


def _is_content(name: str) -> bool:
    """Whether a file is part of a checkpoint, but not its manifest: these are copied first, in any order."""
    return _checkpoint(name) is not None and not name.endswith(MANIFEST)


def _rank(name: str) -> tuple[bool, bool, str]:
    """The order of copying what is no content: first the file that makes the folder one of a run or a sweep, then what
    describes the run, and at last the manifests of checkpoints."""
    return _checkpoint(name) is not None, name not in ("config.yaml", "sweep.json"), name


def _signatures(folder: Path) -> dict[str, Signature]:
    """Sizes and times of the files of a run. Files that vanish meanwhile and dangling links, which loggers leave, are
    left out."""
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
"""Seconds without a renewal after which the holder counts as dead. Each process measures them by its own clock."""

SETTLING = 2.0
"""Seconds after which an expired lease that was taken is read again: another process may have taken it too."""


class Lease:
    """The right to write into a folder of a store. Of a dead process, another one takes it.

    Use it in a ``with``, which waits up to `EXPIRY` seconds for a holder that may be dead.

    Attributes:
        holder: name by which this machine's lease is known. A process that finds its own machine's name, and holds
            the local lock of the run, follows one that is dead, and need not wait.
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
        found = self._store.read(LEASE)
        if not self._is_own(found):
            self._wait_for_expiry(found)
            self._renewed = time.monotonic()
            self._store.write(LEASE, self._content())
            time.sleep(SETTLING)
            self.check()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(UserError):  # the lease expires by itself
            if self._is_own(self._store.read(LEASE)):
                self._store.remove(LEASE)

    def check(self) -> None:
        """Raises UserError if another process has taken the lease, or may have: it was not renewed for too long."""
        if time.monotonic() - self._renewed >= EXPIRY:
            raise UserError(
                f"{self._store.url} could not be reached for {EXPIRY:g} seconds, and another process may have taken "
                "it over: run the same command again"
            )
        self._taken = self._taken or _other(self._store.read(LEASE), self.holder)
        if self._taken:
            raise UserError(
                f"{self._store.url} was taken over by {self._taken}: wait until that has ended, and run the same "
                "command again"
            )

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

    def _wait_for_expiry(self, found: bytes | None) -> None:
        """Returns once a lease has not been renewed for `EXPIRY` seconds. Raises UserError when it is renewed."""
        seen = time.monotonic()
        LOGGER.info(
            f"{self._store.url} is in use by {_describe(found)}: waiting up to {EXPIRY:g} seconds, to see whether that "
            "process still runs"
        )
        while time.monotonic() - seen < EXPIRY:
            time.sleep(min(1.0, EXPIRY / 10))
            latest = self._store.read(LEASE)
            if latest is None:
                return
            if latest != found:
                raise UserError(
                    f"{self._store.url} is in use by {_describe(latest)}: wait until that has ended, or pass another "
                    "--output_dir"
                )

    def _is_own(self, content: bytes | None) -> bool:
        return content is not None and _other(content, self.holder) is None

    def _content(self) -> bytes:
        lease = {"holder": self.holder, "process": f"process {os.getpid()} on {socket.gethostname()}"}
        return json.dumps({**lease, "renewed": time.time()}).encode()


def machine_name(file: Path) -> str:
    """The name of this machine as the holder of a lease, which ``file`` keeps from one process to the next."""
    name = ""
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        name = file.read_text(encoding="utf-8")
    if not re.fullmatch("[0-9a-f]{32}", name):  # damaged: the lease of the name before expires
        name = uuid.uuid4().hex
        write_atomic(file, name)
    return f"{name}@{socket.gethostname()}"


def _other(content: bytes | None, holder: str) -> str | None:
    """The process that a lease names, unless its holder is this one."""
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
