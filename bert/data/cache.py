"""The cache folder of built examples and vocabularies, and its copy in an object store.

Machines that share the store build each set once. One file of a set is copied last and marks the copy as complete.
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
"""Subfolder of a set for intermediate files, removed when the set is complete."""


def cache_folder(config: DataConfig, cache_dir: Path | None = None) -> Path:
    """Returns the local cache folder. Raises UserError if none is configured and there is no home folder."""
    named = cache_dir or config.cache_dir
    if named and not is_url(named):
        return Path(named).expanduser()
    caches = user_cache_dir()
    if caches is None and named:
        raise UserError(
            f"data.cache_dir is {named}, but there is no home folder for its local copy: set XDG_CACHE_HOME to a folder"
        )
    if caches is None:
        raise UserError("data.cache_dir is null, but the user has no home folder: name a folder, --data.cache_dir DIR")
    return caches / "examples"


@dataclass(frozen=True)
class CacheCopy:
    """Synchronizes a folder of the cache with an object store. All methods raise UserError if the store fails.

    Attributes:
        folder: local folder.
        last: name of the file that marks the folder as complete.
        store: copy of the folder.
    """

    folder: Path
    last: str
    store: ObjectStore

    def download(self) -> bool:
        """Downloads the folder. Returns False if the store does not have all of it."""
        names = self.store.files()
        if self.last not in names:
            return False
        self.receive(name for name in names if name != self.last and not name.startswith(f"{WORK}/"))
        self.receive([self.last])
        LOGGER.info(f"copied {self.store.url} to {self.folder}")
        return True

    def upload(self) -> None:
        """Uploads the complete folder unless the store has it, and removes intermediate files from the store."""
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
        LOGGER.info(f"copied {self.folder} to {self.store.url}")

    def exchange(self, own: Iterable[str], parts: list[str]) -> None:
        """Uploads the parts built on this machine, and downloads the other parts or the folder if all are there."""
        self.send(own)
        present = set(self.store.files())
        if self.last not in present and present.issuperset(parts):
            try:
                self.receive(parts)
            except UserError:  # another machine has completed the folder and removed the parts
                if not self.download():
                    raise
        elif self.last in present:
            self.download()

    def send(self, names: Iterable[str]) -> None:
        """Uploads files in this order."""
        for name in names:
            self.store.upload(self.folder / name, name)

    def receive(self, names: Iterable[str]) -> None:
        """Downloads missing files in this order, each atomically."""
        for name in names:
            path = self.folder / name
            if not path.exists():
                with atomic_write(path) as draft:
                    self.store.download(name, draft)


def cache_copy(config: DataConfig, folder: Path, last: str) -> CacheCopy | None:
    """Returns the copy of a folder below `cache_folder` if ``data.cache_dir`` is a URL. Raises UserError."""
    if not is_url(config.cache_dir or ""):
        return None
    relative = folder.relative_to(cache_folder(config)).as_posix()
    return CacheCopy(folder, last, ObjectStore(f"{str(config.cache_dir).rstrip('/')}/{relative}"))
