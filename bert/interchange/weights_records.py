"""Records of weights in the user's cache folder, so that a model whose graph is cached is loaded without its weights.

A record belongs to the content of files, not to their names, sizes or times. If a byte of a weights file or of its
config.json changes, no record is found, and the weights are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import bert
from bert.files import user_cache_dir, write_atomic
from bert.interchange.bundle import ModelBundle
from bert.model.names import part_of
from bert.model.parameters import arrays_by_path

FORMAT = 1
"""Version of the records."""


class WeightsRecord(NamedTuple):
    """Facts that were found by reading and checking weights.

    Attributes:
        checksum: `params_checksum` of the parameters.
        parts: parts of the model that have parameters, as in `bert.model.names.ARCHITECTURES`.
        tie_word_embeddings: whether the MLM decoder equals the word embeddings.
    """

    checksum: str
    parts: frozenset[str]
    tie_word_embeddings: bool

    @classmethod
    def from_model(cls, model: ModelBundle) -> WeightsRecord:
        """Returns the record of a model whose parameters were read."""
        parts = frozenset(map(part_of, arrays_by_path(model.params)))
        return cls(model.params_checksum, parts, model.config.tie_word_embeddings)


def content_key(files: Iterable[Path]) -> str | None:
    """Returns a SHA-256 of the names and the content of files; None if there are no files or one cannot be read."""
    digest = hashlib.sha256(f"{FORMAT} {bert.__version__}".encode())
    count = 0
    try:
        for count, path in enumerate(files, 1):  # noqa: B007
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name} {content};".encode("utf-8", "surrogateescape"))
    except OSError:
        return None
    return digest.hexdigest() if count else None


def read_record(key: str) -> WeightsRecord | None:
    """Returns the record of a `content_key`; None if there is none, or if it is damaged."""
    file = _file(key)
    try:
        content = json.loads(file.read_bytes()) if file is not None else {}
        return WeightsRecord(
            str(content["checksum"]), frozenset(map(str, content["parts"])), bool(content["tie_word_embeddings"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_record(key: str, record: WeightsRecord) -> None:
    """Writes a record. Does nothing if the cache folder cannot be written."""
    file = _file(key)
    if file is not None:
        content = {**record._asdict(), "parts": sorted(record.parts)}
        with contextlib.suppress(OSError):
            os.makedirs(file.parent, exist_ok=True)
            write_atomic(file, json.dumps(content) + "\n")


def _file(key: str) -> Path | None:
    caches = user_cache_dir()
    return None if caches is None else caches / "weights" / f"{key}.json"
