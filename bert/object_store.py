"""Object stores through fsspec: failing calls are repeated, and errors are one sentence."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bert.errors import UserError, cut_at_word

CALLS_AT_ONCE = 16
"""Of the calls that do not depend on each other: most of a call's time is spent waiting."""

ATTEMPTS = 5
"""Times that a call is made, with a second between the first two, then twice as long each time."""


class ObjectStore:
    """The folder that a URL names. Names of files are relative to it. All methods raise UserError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with as_user_errors(url):
            self._system, place = open_store(url)
        self._place = place.rstrip("/")

    def files(self) -> list[str]:
        """Returns the names of all files, sorted; none if there is no such folder.

        Raises:
            UserError: a key is no path inside the folder (`path_of_key`), or the store cannot be used.
        """
        with as_user_errors(self.url):
            self._system.invalidate_cache()
            found = retry(self._system.find, self._place)
        return sorted(path_of_key(key, self._place) for key in found if not key.endswith("/"))

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None without one."""
        with as_user_errors(f"{self.url}/{name}"):
            try:
                return bytes(retry(self._system.cat_file, self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, or replaces it: whole or not at all."""
        with as_user_errors(f"{self.url}/{name}"):
            retry(self._system.pipe_file, self._path(name), content)

    def create(self, name: str, content: bytes) -> None:
        """Writes a file unless there is one. Of several processes that call this at once, one succeeds."""
        with as_user_errors(f"{self.url}/{name}"), contextlib.suppress(FileExistsError):
            retry(lambda path: self._system.pipe_file(path, content, mode="create"), self._path(name))

    def upload(self, path: Path, name: str) -> None:
        """Copies a local file into the store."""
        with as_user_errors(f"{self.url}/{name}"):
            retry(self._system.put_file, str(path), self._path(name))

    def download(self, name: str, path: Path) -> None:
        """Copies a file of the store to a local path, whose folder is made."""
        with as_user_errors(f"{self.url}/{name}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            retry(self._system.get_file, self._path(name), str(path))

    def remove(self, name: str) -> None:
        """Removes a file, if there is one."""
        with as_user_errors(f"{self.url}/{name}"), contextlib.suppress(FileNotFoundError):
            retry(self._system.rm_file, self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._place}/{name}"


def path_of_key(key: str, folder: str) -> str:
    """Returns the path of an object below a folder of a store, which is also a path inside any local folder.

    A store accepts any text as a key. As a local path, a key with ``..`` would be a file outside the folder.

    Raises:
        UserError: a part of the path is empty, ``.`` or ``..``, or the key has a null character; on Windows also a
            drive.
    """
    path = key.removeprefix(folder).removeprefix("/")
    parts = re.split(r"[/\\]", path)  # Windows separates folders by backslashes as well
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in path or (os.name == "nt" and ":" in path):
        raise UserError(f"the key {key!r} leads out of its folder: rename or remove the object")
    return path


def is_inside(path: Path, folder: Path) -> bool:
    """Returns whether a path, with all links followed, lies below a folder."""
    return path.resolve().is_relative_to(folder.resolve())


def call_each(call: Callable[[str], None], names: Iterable[str]) -> None:
    """Calls a function with each name, several at once; raises the first error once the calls under way have ended."""
    with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
        list(pool.map(call, names))


def open_store(url: str) -> tuple[Any, str]:
    """The file system of a URL, without what it has read of it before, and the place in it."""
    import fsspec  # which takes a tenth of a second that others need not wait for

    system, place = fsspec.url_to_fs(url)
    system.invalidate_cache()
    return system, place


def retry(call: Any, *arguments: Any) -> Any:
    """Calls a function of a file system, `ATTEMPTS` times if the network fails."""
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
    """Whether a call may succeed later: the network failed, not what was asked for."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    of_botocore = {"botocore.ConnectionError", "botocore.HTTPClientError"}  # no OSErrors
    return isinstance(error, OSError) or type(error).__module__.startswith("aiohttp") or bool(names & of_botocore)


@contextlib.contextmanager
def as_user_errors(url: str) -> Iterator[None]:
    """Raises what goes wrong with a URL as UserError."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{url} does not exist or cannot be reached: fix the URL") from None
    except Exception as error:  # each store has errors of its own
        reason = cut_at_word(str(error)) or type(error).__name__
        raise UserError(f"{url} cannot be used ({reason}): fix the URL, your credentials or the network") from None
