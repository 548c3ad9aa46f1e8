"""Copies of what URLs name, so that all that reads and writes files reads and writes local ones."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bert.errors import UserError, is_redacted
from bert.files import local_path, user_cache_dir
from bert.messages import LOGGER
from bert.object_store import as_user_errors, open_store, path_of_key, retry

EXTRAS = {"gs": "gcs", "s3": "s3", "https": "https", "http": "https", "hf": None, "memory": None}
"""Schemes that can be read, and the extra that brings the library; None where it is there anyway."""

BLOCK_BYTES = 1 << 22
"""What is read of a remote file at once."""

WRITABLE = ("gs", "s3", "memory")
"""Schemes of the stores that results can be written to."""


def is_url(path: str | Path) -> bool:
    """Whether this has a scheme and two slashes. ``Path`` drops the second one."""
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path) is not None


def readable_path(path: str | Path, name: str = "") -> str:
    """The path, with the home folder for ``~``, or the URL as it is; nothing is read yet.

    Raises:
        UserError: no URL of this kind can be read, or its library is missing, or the path holds a null character.
    """
    if not is_url(path):
        return local_path(path, name)
    import fsspec  # which takes a tenth of a second that others need not wait for

    described = f"{name} is {path}, which" if name else str(path)
    if is_redacted(str(path)):
        fix = f"pass --{name} with the whole URL again" if name else "pass the whole URL again"
        raise UserError(f"{described} was stored without its credentials: {fix}")
    scheme = str(path).partition("://")[0]
    if scheme not in EXTRAS:
        known = ", ".join(f"{known}://" for known in EXTRAS if known != "memory")
        raise UserError(f"{described} is not a local path, nor a URL that can be read ({known}): pass one of these")
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError:
        fix = f"pip install 'bert-jax[{EXTRAS[scheme]}]'"
        raise UserError(f"{described} needs a library that is not installed: install it with {fix}") from None
    return str(path)


def writable_path(path: str | Path, name: str = "") -> str:
    """The path, with the home folder for ``~``, or the URL as it is; nothing is written yet.

    Raises:
        UserError: as of `readable_path`, or nothing can be written to URLs of this kind.
    """
    if is_url(path) and str(path).partition("://")[0] in EXTRAS.keys() - set(WRITABLE):
        raise UserError(f"{name or path} is read-only: pass a local path, or a URL of gs:// or s3://")
    return readable_path(path, name)


def exists(path: str | Path) -> bool:
    """Whether there is something. Raises UserError if a URL cannot be read."""
    if not is_url(path):
        return Path(path).exists()
    with as_user_errors(str(path)):
        system, place = open_store(str(path))
        return bool(retry(system.exists, place))


@contextlib.contextmanager
def writable(path: str | Path) -> Iterator[Path]:
    """A local path for a new file or folder: the path itself, or one that is copied to where a URL points at the end.

    A model's or a run's configuration is copied last, so that an interrupted copy is taken for neither.

    Raises:
        UserError: there is something already, or it cannot be written, or as of `writable_path`.
    """
    path = writable_path(path)
    if not is_url(path):
        yield Path(path)
        return
    if exists(path):
        raise UserError(f"{path} exists already: name another one or remove it")
    with tempfile.TemporaryDirectory() as folder:
        _, place = open_store(path)
        draft = Path(folder) / PurePosixPath(place).name
        yield draft
        with as_user_errors(path):
            _upload(draft, path)


def _upload(draft: Path, url: str) -> None:
    system, place = open_store(url)
    files = [path for path in draft.rglob("*") if path.is_file()] if draft.is_dir() else [draft]
    for file in sorted(files, key=lambda file: (file.name.startswith("config."), file)):
        relative = file.relative_to(draft).as_posix()
        retry(system.put_file, str(file), place if relative == "." else f"{place.rstrip('/')}/{relative}")


def fetch(path: str | Path, name: str = "") -> str:
    """The local path of what is to be read: a path as it is, or that of a copy of what a URL names.

    A file, a folder with all below it, or the files that fit a glob, which come as a folder. They are copied into the
    user's cache once, and again when they have changed.

    Raises:
        UserError: there is nothing, or it cannot be read, or as of `readable_path`.
    """
    path = readable_path(path, name)
    if not is_url(path):
        return path
    cache = user_cache_dir()
    if cache is None:
        raise UserError(f"{path} has no place to be copied to: set XDG_CACHE_HOME to a folder")
    with as_user_errors(path):
        return str(_copy(path, cache / "downloads"))


def remote_files(url: str, name: str = "") -> dict[str, int | None]:
    """The URLs of the files that a URL names, a folder with all below it or a glob, each with its size if it is known.

    Raises:
        UserError: there is nothing, or it cannot be read, or as of `readable_path`.
    """
    readable_path(url, name)
    with as_user_errors(url):
        system, files, _ = _find(url)
        return {system.unstrip_protocol(info["name"]): info.get("size") for info in files.values()}


def open_remote(url: str) -> io.BufferedReader:
    """Opens a file for reading while it is read, block by block. Reads raise OSError or what the store's library does.

    Raises:
        UserError: it cannot be opened.
    """
    with as_user_errors(url):
        system, place = open_store(url)
        file = retry(lambda: system.open(place, "rb", block_size=BLOCK_BYTES))
    return io.BufferedReader(_RemoteFile(url, file), BLOCK_BYTES)


class _RemoteFile(io.RawIOBase):
    """A file of a store, whose reads are repeated if the network fails."""

    def __init__(self, url: str, file: Any) -> None:
        self._url, self._file = url, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        with as_user_errors(self._url):
            # Only a file that can be sought is still where it was after an error.
            data = retry(self._file.read, len(buffer)) if self.seekable() else self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _find(url: str) -> tuple[Any, dict[str, dict[str, Any]], str]:
    """The file system of a URL, what is known of each file by its path below the place, and what the place is."""
    system, place = open_store(url)
    kind = retry(_kind, system, place)
    files = retry(_list, system, place, kind)
    if not files:
        raise FileNotFoundError(url)
    return system, files, kind


def _copy(url: str, root: Path) -> Path:
    system, files, kind = _find(url)
    state = json.dumps([url, files], default=str, sort_keys=True)
    folder = root / hashlib.blake2b(state.encode(), digest_size=12).hexdigest()
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=root))
        try:
            for relative, info in files.items():
                local = draft / relative
                local.parent.mkdir(parents=True, exist_ok=True)
                retry(system.get_file, info["name"], str(local))
            size = sum(file.stat().st_size for file in draft.rglob("*") if file.is_file())
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        # As a warning it goes to stderr: what a command prints may be answers or JSON.
        LOGGER.warning(f"{url}: {len(files):,} files, {size / 1e6:,.1f} MB, are copied to {folder}")
    return folder / next(iter(files)) if kind == "file" else folder


def _kind(system: Any, place: str) -> str:
    if place.startswith(("http:", "https:")):  # a page with links would be a folder
        return "file"
    return "glob" if "*" in place else "folder" if system.isdir(place) else "file"


def _list(system: Any, place: str, kind: str) -> dict[str, dict[str, Any]]:
    """What is known of each file, by its path below the place."""
    if kind == "file":
        name = place
        if place.startswith(("http:", "https:")):  # the query belongs to the address, not to the name
            name = re.split(r"[?#]", place)[0]
        info = system.info(place)
        return {path_of_key(name, name.rpartition("/")[0]): info} if info["type"] == "file" else {}
    if kind == "folder":
        found, parent = system.find(place, detail=True), place.rstrip("/")
    else:
        found, parent = system.glob(place, detail=True), place.partition("*")[0].rpartition("/")[0]
    named = {name: info for name, info in found.items() if info["type"] == "file"}
    return {path_of_key(name, parent): info for name, info in sorted(named.items()) if not name.endswith("/")}
