"""The folder of built examples and of vocabularies, and its copy in an object store.

Machines that share the store make each set once. A set is copied with one file last, without which it is not complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bert.config import DataConfig
from bert.errors import LOGGER, UserError
from bert.files import atomic_write, is_temporary, user_cache_dir
from bert.remote import ObjectStore, is_inside, is_url

WORK = "work"
"""Folder in that of a set with what is removed once it is complete."""


def cache_folder(config: DataConfig, cache_dir: Path | None = None) -> Path:
    """The folder of built examples and of vocabularies, on this machine.

    Raises UserError if none is set and there is no home folder.
    """
    named = cache_dir or config.cache_dir
    if named and not is_url(named):
        return Path(named).expanduser()
    caches = user_cache_dir()
    if caches is None and named:
        raise UserError(f"{named} has no place for its local copy: set XDG_CACHE_HOME to a folder")
    if caches is None:
        raise UserError("data.cache_dir is null, and the user has no home folder: name a folder, --data.cache_dir DIR")
    return caches / "examples"


@dataclass(frozen=True)
class CacheCopy:
    """The copy of a folder of the cache. All methods raise UserError if the store cannot be used.

    Attributes:
        folder: on this machine.
        last: name of the file that completes it.
        store: the copy.
    """

    folder: Path
    last: str
    store: ObjectStore

    def download(self) -> bool:
        """Copies the folder to this machine. Returns whether the store has all of it."""
        names = self.store.files()
        if self.last not in names:
            return False
        self.receive(name for name in names if name != self.last and not name.startswith(f"{WORK}/"))
        self.receive([self.last])
        LOGGER.info(f"{self.store.url} is copied to {self.folder}")
        return True

    def upload(self) -> None:
        """Copies the complete folder to the store, if that has not all of it, and removes parts from there."""
        present = set(self.store.files())
        if self.last in present:
            return
        paths = [path for path in self.folder.iterdir() if path.is_file() and not is_temporary(path)]
        files = [path for path in paths if is_inside(path, self.folder)]
        self.send(sorted({path.name for path in files} - present - {self.last}))
        self.send([self.last])
        for name in present:
            if name.startswith(f"{WORK}/"):
                self.store.remove(name)
        LOGGER.info(f"{self.folder} is copied to {self.store.url}")

    def exchange(self, own: Iterable[str], parts: list[str]) -> None:
        """Copies the parts of this machine to the store. If it then has all parts, or the complete folder, they are
        copied to this machine.

        Args:
            own: names of the parts that this machine has made.
            parts: names of all parts.
        """
        self.send(own)
        present = set(self.store.files())
        if self.last not in present and present.issuperset(parts):
            try:
                self.receive(parts)
            except UserError:  # another machine has completed the folder, and removed parts
                if not self.download():
                    raise
        elif self.last in present:
            self.download()

    def send(self, names: Iterable[str]) -> None:
        """Copies files to the store, in this order."""
        for name in names:
            self.store.upload(self.folder / name, name)

    def receive(self, names: Iterable[str]) -> None:
        """Copies files to this machine that it lacks, each whole or not at all, in this order."""
        for name in names:
            path = self.folder / name
            if not path.exists():
                with atomic_write(path) as draft:
                    self.store.download(name, draft)


def cache_copy(config: DataConfig, folder: Path, last: str) -> CacheCopy | None:
    """The copy of a folder below `cache_folder`, if ``data.cache_dir`` is a URL. Raises UserError."""
    if not is_url(config.cache_dir or ""):
        return None
    relative = folder.relative_to(cache_folder(config)).as_posix()
    return CacheCopy(folder, last, ObjectStore(f"{str(config.cache_dir).rstrip('/')}/{relative}"))
