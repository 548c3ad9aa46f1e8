"""Reads records of sentences: lists of words and tags, or texts with the character offsets of their entities.

The second form is the one that `bert predict` writes and that labelling tools export.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bert.data.records import BAD_ROWS_FIX, Records, listed_numbers
from bert.errors import UserError, WarningText, quoted, without_surrogates
from bert.metrics.tagging_schemes import OUTSIDE, join_tag
from bert.tasks.columns import is_blank, is_missing, label_text
from bert.tasks.token_classification import conll
from bert.tasks.token_classification.conll import Reading, Sentences
from bert.tasks.token_classification.word_features import CLITICS, split_text

PRODIGY_SPANS = "spans"
"""Column of entities in exports of Prodigy, whose column ``answer`` is accept, reject or ignore."""

NO_BREAK_SPACE = "\u00a0"

_LINE_BREAKS = re.compile(r"[\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


class SentenceColumns(NamedTuple):
    """Names of the columns of a sentence. Several names are alternatives; the first one that exists is used."""

    words: tuple[str, ...] = ("words", "tokens")
    tags: tuple[str, ...] = ("tags", "ner_tags")
    text: str = "text"
    entities: tuple[str, ...] = ("entities", "spans", "label")
    """Columns of entities in ``text``, for rows without words."""


class Row(NamedTuple):
    """A sentence."""

    words: list[str]
    tags: list[str]
    """[] without tags."""
    text: str | None = None
    spans: list[tuple[int, int]] | None = None


@dataclass(frozen=True)
class _Reader:
    """Reads the rows of a split, which all have the same form."""

    records: Records
    column: str
    """The column of words, or of texts."""
    labels: str
    """The column of tags, or of entities."""
    has_words: bool
    labelled: bool
    widens: bool
    clitics: Sequence[str]
    widened: list[int] = dataclasses.field(default_factory=list)
    """Lines with entities that were widened to whole words."""
    cut: list[int] = dataclasses.field(default_factory=list)
    """Lines with entities that lost words, because an earlier entity was widened to these words."""

    @property
    def required(self) -> dict[str, str]:
        keys = ("data.columns.words", "data.columns.tags")
        if not self.has_words:
            keys = ("data.columns.text_a", "data.columns.tags")
        return dict(zip((self.column, *([self.labels] if self.labelled else [])), keys, strict=False))

    def is_bad(self, fields: Mapping[str, Any]) -> bool:
        """Returns whether a row is skipped because it lacks its text or its labels."""
        records = self.records
        values = fields.get(self.column), fields.get(self.labels)
        may_lack = records.is_data_set or self.labels in records.declared_labels or records.skips_bad_rows
        if self.labelled and may_lack and self.labels in fields and _lacks_tags(values[1]):
            return True
        return records.skips_bad_rows and (is_blank(values[0]) or (self.labelled and self.labels not in fields))

    def row(self, line_number: int, fields: Mapping[str, Any]) -> Row:
        """Returns the sentence of a row. Raises UserError."""
        records = self.records
        if self.has_words and self.column not in fields:
            raise records.error(
                line_number,
                f"no {self.column!r} among {quoted(fields)}: set data.columns.words and data.columns.tags to the lists "
                "of words and tags, or data.columns.text_a and data.columns.tags to the text and its entities",
            )
        records.require(line_number, list(fields), self.required)
        if self.has_words:
            words = _words(records, line_number, self.column, fields[self.column])
            if not self.labelled:
                return Row(words, [])
            return Row(words, _tags(records, line_number, self.labels, fields[self.labels], len(words)))
        text = fields[self.column]
        if is_blank(text) or not isinstance(text, str):
            shown = "missing" if is_missing(text) else f"{str(text)[:40]!r}"
            fix = f"write a text, remove the {records.unit}, {BAD_ROWS_FIX}"
            raise records.error(line_number, f"{self.column} is {shown}: {fix}")
        text = without_surrogates(text)
        words, spans = split_text(text, self.clitics)
        if not self.labelled:
            return Row(words, [], text, spans)
        entities = _entities(records, line_number, self.labels, fields[self.labels], text)
        return Row(words, self._tags_of_entities(line_number, text, spans, entities), text, spans)

    def _tags_of_entities(
        self, line_number: int, text: str, spans: Sequence[tuple[int, int]], entities: Sequence[Entity]
    ) -> list[str]:
        """Returns the BIO tag of each word. Raises UserError for an entity that ends inside a word."""
        tags = [OUTSIDE] * len(spans)
        for entity in entities:
            start, end = entity.trimmed(text)
            inside = [word for word, (first, last) in enumerate(spans) if first < end and start < last]
            whole = spans[inside[0]][0], spans[inside[-1]][1]
            if whole != (start, end) and not self.widens:
                cut = next(spans[word] for word in inside if spans[word][0] < start or spans[word][1] > end)
                raise self.records.error(
                    line_number,
                    f"the entity {entity.described(text)} starts or ends inside the word {text[slice(*cut)]!r} "
                    f"({cut[0]} to {cut[1]}): widen it to {whole[0]} to {whole[1]}, or widen all such entities "
                    "to whole words: data.invalid_tags count",
                )
            free = [word for word in inside if tags[word] == OUTSIDE]
            if len(free) < len(inside):
                self.cut.append(line_number)
            if free and whole != (start, end):
                self.widened.append(line_number)
            for prefix, word in zip(itertools.chain("B", itertools.repeat("I")), free, strict=False):
                tags[word] = join_tag(prefix, entity.label)
        return tags


class Entity(NamedTuple):
    """An entity as it is written in a row: the first character, one past the last, and the type."""

    start: int
    end: int
    label: str

    def trimmed(self, text: str) -> tuple[int, int]:
        """Returns the start and the end without the white space around the entity."""
        part = text[self.start : self.end]
        return self.end - len(part.lstrip()), self.start + len(part.rstrip())

    def described(self, text: str) -> str:
        """Returns the entity for a message."""
        return f"{self.start} to {self.end} ({self.label}, {text[self.start : self.end][:40]!r})"


def read_sentences(
    records: Records,
    names: SentenceColumns,
    needed: bool = True,
    reading: Reading = "error",
    types: Collection[str] | None = None,
    clitics: Sequence[str] = CLITICS,
) -> Sentences:
    """Returns the sentences of rows with lists of words and tags, or with a text and its entities.

    Words may be numbers and any texts, including white space. Rows without tags are skipped and counted in a note if
    they come from a data set, if the tags are class labels, or if ``records`` skips bad rows.

    Args:
      needed: whether tags are required; otherwise a split whose first row has no tags is a split to predict.
      reading, types: see `bert.tasks.token_classification.conll.read`. Entities that end inside a word are an error,
        or are widened to whole words if tags that violate their scheme are counted.
      clitics: word endings that are separate words in texts.

    Raises:
      UserError: a row lacks a list, its lists have different lengths, or a tag or an entity is invalid.
    """
    first = next(records.rows, None)
    fields = {} if first is None else first[1]
    rows = itertools.chain([] if first is None else [first], records.rows)
    reader = _reader(records, fields, names, needed, reading == "count", clitics)
    sentences: list[Row] = []
    lines: list[int] = []
    faults: list[tuple[int, UserError]] = []
    skipped: list[int] = []
    rejected: list[int] = []
    for line_number, fields in rows:
        if reader.labelled and reader.labels == PRODIGY_SPANS and fields.get("answer") in ("reject", "ignore"):
            rejected.append(line_number)
            continue
        if reader.is_bad(fields):
            skipped.append(line_number)
            continue
        try:
            sentences.append(reader.row(line_number, fields))
        except UserError as error:
            faults.append((line_number, error))
            continue
        lines.append(line_number)
    records.require_sound(faults)
    records.skip(skipped)
    if not any(sentence.words for sentence in sentences):
        what = "no row with a text and tags" if skipped else "no words"
        raise UserError(f"{records.source} has {what}: it needs a {records.unit} for each sentence")
    remarks = list(records.notes)
    if rejected:
        where = f"({records.unit} {listed_numbers(rejected)})"
        remarks.append(WarningText(f"{records.source}: {len(rejected):,} rejected or ignored rows left out {where}"))
    for numbers, done in (
        (reader.widened, "that start or end inside a word widened to whole words"),
        (reader.cut, "shortened or left out, because an earlier entity was widened to their words"),
    ):
        if numbers:
            where = f"({records.unit} {listed_numbers(sorted(set(numbers)))})"
            remarks.append(WarningText(f"{records.source}: {len(numbers):,} entities {done} {where}"))
    untagged = Sentences(
        [sentence.words for sentence in sentences],
        None,
        conll.PLAIN,
        [_columns(sentence.words, sentence.tags) for sentence in sentences],
        lines,
        path=Path(records.source),
        texts=None if reader.has_words else [sentence.text or "" for sentence in sentences],
        spans=None if reader.has_words else [sentence.spans or [] for sentence in sentences],
        unit=records.unit,
        lines_a_word=0,
        remarks=tuple(remarks),
    )
    untagged = in_conll_columns(untagged)
    tags = [sentence.tags for sentence in sentences]
    return conll.attach_tags(untagged, tags, reading, types) if reader.labelled else untagged


def _reader(
    records: Records,
    fields: Mapping[str, Any],
    names: SentenceColumns,
    needed: bool,
    widens: bool,
    clitics: Sequence[str],
) -> _Reader:
    """Returns the reader for the form of the first row."""

    def present(options: Sequence[str]) -> str:
        return next((name for name in options if name in fields), options[0])

    words, has_words = present(names.words), True
    labels, entities = present(names.tags), present(names.entities)
    if names.text in fields and (words not in fields or (labels not in fields and entities in fields)):
        words, has_words, labels = names.text, False, entities
    labelled = needed or fields.get(labels) is not None
    return _Reader(records, words, labels, has_words, labelled, widens, clitics)


def in_conll_columns(sentences: Sentences) -> Sentences:
    """Returns sentences whose columns are written with spaces, or with tabs if cells are empty or have spaces."""
    rows = (cells for sentence in sentences.columns or () for cells in sentence)
    odd = any(" " in cell or not cell for cells in rows for cell in cells)
    return dataclasses.replace(sentences, delimiter="\t" if odd else " ")


def _lacks_tags(values: Any) -> bool:
    """Returns whether a cell has no list, or a list with missing items."""
    return is_blank(values) or (isinstance(values, list) and any(map(is_missing, values)))


def _words(records: Records, line_number: int, name: str, values: Any) -> list[str]:
    """Returns the words of a row. Raises UserError."""
    if not isinstance(values, list):
        raise records.error(line_number, f"{name} is {str(values)[:40]!r}: it must be a list of words")
    wrong = next((value for value in values if not isinstance(value, str | int | float)), "")
    if wrong != "":
        raise records.error(line_number, f"{name} has {repr(wrong)[:40]}: each word must be a text or a number")
    return [without_surrogates(value if isinstance(value, str) else json.dumps(value)) for value in values]


def _tags(records: Records, line_number: int, name: str, values: Any, count: int) -> list[str]:
    """Returns the tags of a row, one for each word. Raises UserError."""
    if not isinstance(values, list):
        raise records.error(line_number, f"{name} is {str(values)[:40]!r}: it must be a list of tags")
    if len(values) != count:
        raise records.error(line_number, f"{count} words, but {len(values)} {name}: write one for each word")
    return [label_text(records, line_number, name, value).strip() for value in values]


def _entities(records: Records, line_number: int, name: str, values: Any, text: str) -> list[Entity]:
    """Returns the entities of a row by position. Raises UserError for invalid and for overlapping entities."""
    form = '{"start": 0, "end": 3, "label": "PER"}'
    if not isinstance(values, list):
        shown = json.dumps(values, default=str)[:40]
        raise records.error(line_number, f"{name} is {shown}: it must be a list of entities such as {form}")
    entities = []
    for value in values:
        start, end, label = _parts(value)
        if not (_is_offset(start) and _is_offset(end)) or is_missing(label):
            shown = json.dumps(value, default=str)[:80]
            raise records.error(line_number, f"{name} has {shown}: write each entity as {form}")
        entity = Entity(start, end, label_text(records, line_number, f"the label of {start} to {end}", label).strip())
        if not 0 <= start < end <= len(text):
            raise records.error(
                line_number,
                f"the entity {start} to {end} ({entity.label}) is not within the {len(text)} characters of the text: "
                "count characters from 0, not bytes, and let end be one past the last",
            )
        if not text[start:end].strip():
            raise records.error(line_number, f"the entity {entity.described(text)} has no word: remove it")
        entities.append(entity)
    entities.sort()
    for one, other in itertools.pairwise(entities):
        if other.start < one.end:
            both = f"{one.described(text)} and {other.described(text)}"
            raise records.error(line_number, f"the entities {both} overlap: keep one of them")
    return entities


def _parts(value: Any) -> tuple[Any, Any, Any]:
    """Returns start, end and label of an entity in an object or in a list of three."""
    if isinstance(value, Mapping):
        start, end = (value.get(name, value.get(f"{name}_offset")) for name in ("start", "end"))
        label = next((value[name] for name in ("label", "type", "labels") if value.get(name) is not None), None)
        return start, end, label[0] if isinstance(label, list) and len(label) == 1 else label
    return tuple(value) if isinstance(value, list) and len(value) == 3 else (None, None, None)


def _is_offset(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _columns(words: Sequence[str], tags: Sequence[str]) -> list[list[str]]:
    """Returns a sentence as CoNLL columns. Characters that are invalid in columns become no-break spaces."""
    cells = [_LINE_BREAKS.sub(NO_BREAK_SPACE, word) for word in words]
    cells = [cell if cell.strip(" ") else NO_BREAK_SPACE * max(len(cell), 1) for cell in cells]
    return [list(row) for row in zip(cells, tags, strict=True)] if tags else [[cell] for cell in cells]
