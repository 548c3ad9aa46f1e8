"""One process at a time in a folder of an object store, which has no locks: a lease that its holder renews."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
from pathlib import Path

from bert.errors import UserError
from bert.files import load_json, write_atomic
from bert.messages import LOGGER
from bert.object_store import ObjectStore

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
