"""The line of a value in a JSON file, for the sentence that says what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bert.errors import UserError, require


class JsonLocation(NamedTuple):
    """The place of a value in a file; its line is looked for only when something is wrong."""

    path: Path
    text: str
    """Of the whole file."""
    keys: tuple[str | int, ...] = ()
    """Keys and indices that lead to it; all of them do."""
    name: str | None = None
    """What the sentence calls it; None: by its keys."""

    def inside(self, *keys: str | int) -> JsonLocation:
        return self._replace(keys=(*self.keys, *keys))

    @property
    def line(self) -> int:
        """From 1."""
        start = _after_space(self.text, 0)
        for key in self.keys:
            start = dict(_entries(self.text, start))[key]  # of equal keys the last one, as json.loads
        return self.text.count("\n", 0, start) + 1

    def error(self, wrong: str) -> UserError:
        """With its name, or its keys as ``data[0].paragraphs[1]``."""
        keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys)[1:] or "the file"
        return UserError(f"{self.path}, line {self.line}, {self.name or keys}: {wrong}")


def _entries(text: str, start: int) -> Iterator[tuple[str | int, int]]:
    """Key, or index, and first character of each value in the JSON object or list that begins at ``start``."""
    decode = json.JSONDecoder().raw_decode
    at, index = _after_space(text, start + 1), 0
    while text[at] not in "]}":
        key: str | int = index
        if text[start] == "{":
            key, at = decode(text, at)
            at = _after_space(text, _after_space(text, at) + 1)  # past the colon
        yield key, at
        at = _after_space(text, decode(text, at)[1])
        at, index = _after_space(text, at + (text[at] == ",")), index + 1


def _after_space(text: str, at: int) -> int:
    return require(_SPACE.match(text, at), "the end of the white space").end()


_SPACE = re.compile(r"[ \t\n\r]*")
