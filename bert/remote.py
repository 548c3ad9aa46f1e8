"""Access to URLs and object stores through fsspec. Failed calls are retried, and errors become UserError."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from bert.errors import LOGGER, UserError, cut_at_word, is_redacted
from bert.files import local_path, user_cache_dir

EXTRAS = {"gs": "gcs", "s3": "s3", "https": "https", "http": "https", "hf": None, "memory": None}
"""Maps readable schemes to the extra that installs the library; None if it is always installed."""

BLOCK_BYTES = 1 << 22
"""Block size for reading remote files."""

WRITABLE = ("gs", "s3", "memory")
"""Schemes of writable stores."""


def is_url(path: str | Path) -> bool:
    """Whether a string has a scheme and two slashes. ``Path`` drops the second slash."""
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path) is not None


def readable_path(path: str | Path, name: str = "") -> str:
    """Returns a URL unchanged, or a local path with ``~`` expanded. Does not access it.

    Raises:
        UserError: this kind of URL is not readable, the library is missing, or the path contains a null character.
    """
    if not is_url(path):
        return local_path(path, name)
    import fsspec  # takes a tenth of a second to import

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
    """Returns a URL unchanged, or a local path with ``~`` expanded. Does not access it.

    Raises:
        UserError: this kind of URL is not writable; also see `readable_path`.
    """
    if is_url(path) and str(path).partition("://")[0] in EXTRAS.keys() - set(WRITABLE):
        raise UserError(f"{name or path} is read-only: pass a local path, or a URL of gs:// or s3://")
    return readable_path(path, name)


def exists(path: str | Path) -> bool:
    """Whether a file or folder exists. Raises UserError if a URL cannot be read."""
    if not is_url(path):
        return Path(path).exists()
    with as_user_errors(str(path)):
        system, place = open_store(str(path))
        return bool(retry(system.exists, place))


@contextlib.contextmanager
def writable(path: str | Path) -> Iterator[Path]:
    """Yields a local path for a new file or folder. A URL is uploaded from a temporary path at the end.

    The configuration of a model or run is uploaded last, so that an interrupted upload is not recognized as either.

    Raises:
        UserError: it exists already or is not writable; also see `writable_path`.
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
    """Returns a local path for reading: a local path unchanged, or the path of a local copy of a URL.

    A URL names a file, a folder, or files that match a glob, which are placed in one folder. They are downloaded to the
    user's cache, and again after they have changed.

    Raises:
        UserError: it does not exist or cannot be read; also see `readable_path`.
    """
    path = readable_path(path, name)
    if not is_url(path):
        return path
    cache = user_cache_dir()
    if cache is None:
        raise UserError(f"{path} needs a local copy, but there is no home folder: set XDG_CACHE_HOME to a folder")
    with as_user_errors(path):
        return str(_copy(path, cache / "downloads"))


def remote_files(url: str, name: str = "") -> dict[str, int | None]:
    """Returns the URLs of the files in a folder, or of the files that match a glob, and their sizes if known.

    Raises:
        UserError: there are no files, or they cannot be read; also see `readable_path`.
    """
    readable_path(url, name)
    with as_user_errors(url):
        system, files, _ = _find(url)
        return {system.unstrip_protocol(info["name"]): info.get("size") for info in files.values()}


def open_remote(url: str) -> io.BufferedReader:
    """Opens a file, which is downloaded in blocks during reading. Reads may raise any error of the store's library.

    Raises:
        UserError: it cannot be opened.
    """
    with as_user_errors(url):
        system, place = open_store(url)
        file = retry(lambda: system.open(place, "rb", block_size=BLOCK_BYTES))
    return io.BufferedReader(_RemoteFile(url, file), BLOCK_BYTES)


class _RemoteFile(io.RawIOBase):
    """A file in a store. Reads are retried after network failures."""

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
            # Only seekable files keep their position after an error.
            data = retry(self._file.read, len(buffer)) if self.seekable() else self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _find(url: str) -> tuple[Any, dict[str, dict[str, Any]], str]:
    """Returns the file system of a URL, the details of each file by path, and the kind: file, folder or glob."""
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
            with contextlib.suppress(OSError):  # another process has downloaded it
                os.rename(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        # A warning goes to stderr, because the standard output of a command may be answers or JSON.
        LOGGER.warning(f"{url}: {len(files):,} files, {size / 1e6:,.1f} MB, are copied to {folder}")
    return folder / next(iter(files)) if kind == "file" else folder


def _kind(system: Any, place: str) -> str:
    if place.startswith(("http:", "https:")):  # fsspec would treat a page with links as a folder
        return "file"
    return "glob" if "*" in place else "folder" if system.isdir(place) else "file"


def _list(system: Any, place: str, kind: str) -> dict[str, dict[str, Any]]:
    """Returns the details of each file, by relative path."""
    if kind == "file":
        name = place
        if place.startswith(("http:", "https:")):  # the query is not part of the name
            name = re.split(r"[?#]", place)[0]
        info = system.info(place)
        return {path_of_key(name, name.rpartition("/")[0]): info} if info["type"] == "file" else {}
    if kind == "folder":
        entries, parent = system.find(place, detail=True), place.rstrip("/")
    else:
        entries, parent = system.glob(place, detail=True), place.partition("*")[0].rpartition("/")[0]
    named = {name: info for name, info in entries.items() if info["type"] == "file"}
    return {path_of_key(name, parent): info for name, info in sorted(named.items()) if not name.endswith("/")}


CALLS_AT_ONCE = 16
"""Maximum number of concurrent calls, which spend most of their time waiting."""

ATTEMPTS = 5
"""Maximum number of attempts. The delay starts at 1 second and doubles each time."""


class ObjectStore:
    """A folder in an object store. File names are relative to it. All methods raise UserError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with as_user_errors(url):
            self._system, place = open_store(url)
        self._place = place.rstrip("/")

    def files(self) -> list[str]:
        """Returns the names of all files, sorted; [] if the folder does not exist.

        Raises:
            UserError: a key is not a path inside the folder (`path_of_key`), or the store is not accessible.
        """
        with as_user_errors(self.url):
            self._system.invalidate_cache()
            keys = retry(self._system.find, self._place)
        return sorted(path_of_key(key, self._place) for key in keys if not key.endswith("/"))

    def read(self, name: str) -> bytes | None:
        """Reads a file; None if it does not exist."""
        with as_user_errors(f"{self.url}/{name}"):
            try:
                return bytes(retry(self._system.cat_file, self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Writes or replaces a file atomically."""
        with as_user_errors(f"{self.url}/{name}"):
            retry(self._system.pipe_file, self._path(name), content)

    def create(self, name: str, content: bytes) -> None:
        """Writes a file unless it exists. If several processes call this at once, exactly one succeeds."""
        with as_user_errors(f"{self.url}/{name}"), contextlib.suppress(FileExistsError):
            retry(lambda path: self._system.pipe_file(path, content, mode="create"), self._path(name))

    def upload(self, path: Path, name: str) -> None:
        """Uploads a local file."""
        with as_user_errors(f"{self.url}/{name}"):
            retry(self._system.put_file, str(path), self._path(name))

    def download(self, name: str, path: Path) -> None:
        """Downloads a file to a local path, and creates its folder."""
        with as_user_errors(f"{self.url}/{name}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            retry(self._system.get_file, self._path(name), str(path))

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        with as_user_errors(f"{self.url}/{name}"), contextlib.suppress(FileNotFoundError):
            retry(self._system.rm_file, self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._place}/{name}"


def path_of_key(key: str, folder: str) -> str:
    """Returns the path of an object relative to a folder in a store. It is safe to use inside any local folder.

    Stores accept any text as a key. As a local path, a key with ``..`` would point outside of the folder.

    Raises:
        UserError: a part of the path is empty, ``.`` or ``..``, or the key contains a null character or, on Windows, a
            drive.
    """
    path = key.removeprefix(folder).removeprefix("/")
    parts = re.split(r"[/\\]", path)  # Windows also uses backslashes
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in path or (os.name == "nt" and ":" in path):
        raise UserError(f"the key {key!r} leads out of its folder: rename or remove the object")
    return path


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, with all links resolved, is inside a folder."""
    return path.resolve().is_relative_to(folder.resolve())


def call_each(call: Callable[[str], None], names: Iterable[str]) -> None:
    """Calls a function with each name, concurrently. After all running calls have ended, raises the first error."""
    with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
        list(pool.map(call, names))


def open_store(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, with an empty cache, and the path in it."""
    import fsspec  # takes a tenth of a second to import

    system, place = fsspec.url_to_fs(url)
    system.invalidate_cache()
    return system, place


def retry(call: Any, *arguments: Any) -> Any:
    """Calls a function of a file system, up to `ATTEMPTS` times in case of network failures."""
    for attempt in range(ATTEMPTS):
        try:
            return call(*arguments)
        except (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError):
            raise
        except Exception as error:
            if not _is_of_network(error) or attempt == ATTEMPTS - 1:
                raise
            time.sleep(2.0**attempt)
    raise AssertionError("the last attempt returns or raises")


def _is_of_network(error: Exception) -> bool:
    """Whether an error is a network failure, so that a later call may succeed."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    of_botocore = {"botocore.ConnectionError", "botocore.HTTPClientError"}  # these are not OSErrors
    return isinstance(error, OSError) or type(error).__module__.startswith("aiohttp") or bool(names & of_botocore)


@contextlib.contextmanager
def as_user_errors(url: str) -> Iterator[None]:
    """Converts all errors to UserError."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{url} does not exist or cannot be reached: fix the URL") from None
    except Exception as error:  # each store raises its own errors
        reason = cut_at_word(str(error)) or type(error).__name__
        raise UserError(f"{url} cannot be used ({reason}): fix the URL, your credentials or the network") from None
