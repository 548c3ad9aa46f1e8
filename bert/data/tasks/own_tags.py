"""Tagging of one's own: words and tags in JSONL, in a data set, or in CoNLL columns that the configuration names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from bert.config import TaskDataConfig, UserError
from bert.data.records import Records, is_dataset
from bert.data.tasks import ner
from bert.data.tasks.cells import KEYS, split_names, split_path, split_records, word_of
from bert.data.tasks.ner import Sentences
from bert.data.tasks.tagging import TaggingTask

KINDS = (".jsonl", ".conll", ".txt", ".tsv")


@dataclass(frozen=True, kw_only=True)
class Tagging(TaggingTask):
    """A tag for each word; whether the tags mark entities, they tell themselves."""

    name: str = "tagging"
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    own_keys = KEYS

    def shaped(self, data: TaskDataConfig) -> Self:
        return dataclasses.replace(super().shaped(data), data=data)

    def splits(self, folder: Path) -> list[str]:
        return split_names(Path(folder), self.data, KINDS)

    def records(self, folder: Path, split: str) -> Records:
        """The rows of a split that is not in columns, under the names that the configuration gives them."""
        return split_records(folder, split, self.data)

    def read(self, folder: Path, split: str, max_rows: int | None = None) -> Sentences:
        folder = Path(folder)
        broken: Literal["error", "count"] = "count" if self.may_be_broken else "error"
        if self._in_columns(folder, split):
            sentences = self._read_columns(folder, split, broken)
        else:
            columns = self.data.columns
            names = (columns.words or "words", columns.tags or "tags")
            sentences = read_sentences(self.records(folder, split), *names, needed=split != "test", broken=broken)
        labels = ner.labels_of(sentences) if sentences.labelled else ()
        return dataclasses.replace(sentences.first(max_rows), labels=labels)

    def _in_columns(self, folder: Path, split: str) -> bool:
        if is_dataset(folder.as_posix()):
            return False
        return ".jsonl" not in split_path(folder, split, self.data, KINDS).suffixes

    def _read_columns(self, folder: Path, split: str, broken: Literal["error", "count"]) -> Sentences:
        path, header = split_path(folder, split, self.data, KINDS), self.data.header
        width = ner.width(path)
        if header is None:
            if self.data.columns.words or self.data.columns.tags:
                raise UserError(f"{path} has columns without names: name them all in their order as data.header")
            labelled = split != "test" or width == ner.width(split_path(folder, "train", self.data, KINDS))
            return ner.read(path, labelled, broken)
        if width not in (len(header), len(header) - 1 if split == "test" else 0):
            raise UserError(f"{path} has {width} columns and data.header names {len(header)}: name each of them")
        word, tag = self._place("words", 0, header), self._place("tags", len(header) - 1, header)
        return ner.read(path, width == len(header), broken, word, tag)

    def _place(self, key: str, default: int, header: list[str]) -> int:
        name = getattr(self.data.columns, key)
        if name is None:
            return default
        if name not in header:
            raise UserError(f"data.columns.{key} is {name!r}, which is not in data.header: {', '.join(header)}")
        return header.index(name)


def read_sentences(records: Records, words: str, tags: str, needed: bool = True, broken: str = "error") -> Sentences:
    """The sentences of rows that hold a list of words and a list of tags.

    Args:
      needed: whether there have to be tags; otherwise a split whose first row has none is one to predict.
      broken: as for `bert.data.tasks.ner.read`.

    Raises:
      UserError: place of a row without such lists, or with lists that are not equally long; and as `ner.read`.
    """
    found: list[list[str]] = []
    right: list[list[str]] = []
    lines: list[int] = []
    labelled = True
    for number, fields in records.rows:
        if not (needed or lines):
            labelled = fields.get(tags) is not None
        wanted = {words: "data.columns.words", **({tags: "data.columns.tags"} if labelled else {})}
        records.require(number, list(fields), wanted)
        found.append(_list(records, number, words, fields[words]))
        lines.append(number)
        if labelled:
            right.append(_list(records, number, tags, fields[tags]))
            if len(right[-1]) != len(found[-1]):
                raise records.error(number, f"{len(found[-1])} {words} and {len(right[-1])} {tags}: give each word one")
    if not lines:
        raise UserError(f"{records.place} has no rows: it needs a {records.unit} for each sentence")
    delimiter = "\t" if any(" " in word for sentence in found for word in sentence) else " "
    right_of = right if labelled else [[] for _ in found]
    columns = [_columns(sentence, given) for sentence, given in zip(found, right_of, strict=True)]
    place = Path(records.place)
    untagged = Sentences(found, None, ner.PLAIN, columns, lines, delimiter=delimiter, path=place, lines_a_word=0)
    return ner.tagged(untagged, right, broken) if labelled else untagged


def _list(records: Records, number: int, name: str, values: Any) -> list[str]:
    if not isinstance(values, list) or not values:
        raise records.error(number, f"{name} is {str(values)[:40]!r}: it must be a list with at least one entry")
    return [word_of(records, number, name, value) for value in values]


def _columns(words: Sequence[str], tags: Sequence[str]) -> list[list[str]]:
    """A sentence as CoNLL has it: a row for each word."""
    return [list(cells) for cells in zip(words, tags, strict=True)] if tags else [[word] for word in words]


TASKS = (Tagging(),)
