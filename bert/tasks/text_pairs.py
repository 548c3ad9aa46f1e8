"""Reads queries with documents, and pairs of texts with a score, from columns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from bert.config.finetuning import ColumnsConfig
from bert.data.inputs import Text
from bert.data.records import Records
from bert.data.rows import pad_and_stack
from bert.errors import UserError, WarningText, require, without_surrogates
from bert.tasks.columns import is_blank, read_columns
from bert.tasks.splits import ExampleColumns


@dataclass(frozen=True)
class TextExamples(ExampleColumns):
    """R queries with their positive documents, R pairs of texts, or R single texts."""

    queries: list[str]
    positives: list[str] | None
    """The positive documents, or the second texts of pairs; None for single texts."""
    negatives: list[list[str]]
    scores: np.ndarray | None
    """[R] float32 scores of pairs, [R, C] scores of the documents of each query, padded with 0, or [R] int32 label
    indices; None without scores or labels."""
    ids: list[str]
    labelled: bool
    notes: tuple[str, ...] = ()
    columns: ClassVar[tuple[str, ...]] = ("queries", "positives", "negatives", "scores", "ids")

    def sentences(self) -> Iterator[str]:
        """Yields all queries, then all documents."""
        yield from self.queries
        yield from self.positives or []
        for texts in self.negatives:
            yield from texts

    @property
    def texts(self) -> Sequence[Text]:
        """The single texts, or the pairs of texts."""
        return self.queries if self.positives is None else list(zip(self.queries, self.positives, strict=True))

    @property
    def documents(self) -> list[str]:
        """The positive documents or second texts, which must exist."""
        return require(self.positives, "the documents")

    @property
    def known_scores(self) -> np.ndarray:
        """The scores or labels, which must exist."""
        return require(self.scores, "the scores")


def read_queries(
    records: Records, names: ColumnsConfig, num_negatives: int | None, hint: str = "", has_scores: bool = False
) -> TextExamples:
    """Returns queries with their positive documents and optional negatives.

    Args:
        num_negatives: maximum number of negatives per row, from the first; None for all.
        hint: end of the message about a row without a document.
        has_scores: whether each row has a list with the scores of its positive and of each negative.

    Raises:
        UserError: a row has no document or an empty text.
    """
    rows = list(records.rows)
    if records.skips_bad_rows:
        needed = (names.query, names.positive)
        bad = {number for number, fields in rows if any(is_blank(fields.get(name)) for name in needed)}
        records.skip(sorted(bad))
        rows = [row for row in rows if row[0] not in bad]
    without = (
        f"the query has no {names.positive!r}: write the document that answers it, or remove the {records.unit}{hint}"
    )
    records.require_sound(
        [
            (line_number, records.error(line_number, without))
            for line_number, fields in rows
            if names.query in fields and fields.get(names.positive) in (None, "")
        ]
    )
    columns = read_columns(
        dataclasses.replace(records, rows=iter(rows)),
        {names.query: "data.columns.query", names.positive: "data.columns.positive"},
        {},
        _id(names),
    )
    queries, positives = columns.texts
    negatives = records.read_each(
        [
            (line_number, fields.get(names.negatives), names.negatives, positive)
            for (line_number, fields), positive in zip(rows, positives, strict=True)
        ],
        _negatives,
    )
    numbered = list(zip(rows, negatives, strict=True))
    scores = None
    if has_scores:
        rows_of_scores = (
            (line, names.label, fields.get(names.label), 1 + len(texts)) for (line, fields), texts in numbered
        )
        cells = records.read_each(rows_of_scores, _scores)
        scores = pad_and_stack([cell[: None if num_negatives is None else 1 + num_negatives] for cell in cells])
    negatives = [texts[:num_negatives] for texts in negatives]
    return TextExamples(queries, positives, negatives, scores, columns.ids, True, columns.notes)


def _scores(records: Records, line_number: int, name: str, cell: Any, count: int) -> np.ndarray:
    """Returns the scores as float32 [count]. Raises UserError unless the cell is a list of ``count`` finite numbers."""
    values = cell if isinstance(cell, list) else []
    are_numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    if len(values) != count or not are_numbers:
        shown = repr(cell)[:40]
        raise records.error(
            line_number,
            f"{name} is {shown}: it must be a list of {count} numbers, the scores of the positive and of each negative",
        )
    return np.array(values, np.float32)


def with_negatives(records: Records, examples: TextExamples, key: str) -> TextExamples:
    """Returns the rows with negatives. Raises UserError if there are none; ``key`` is the setting that needs them."""
    rows = [row for row, texts in enumerate(examples.negatives) if texts]
    if not rows:
        raise UserError(
            f"no row of {records.source} has negatives, and {key} compares these with the positive: add some, for "
            "instance with bert mine"
        )
    if not (left := len(examples) - len(rows)):
        return examples
    note = WarningText(f"{left:,} training rows without negatives are left out")
    return dataclasses.replace(examples.take(rows), notes=(*examples.notes, note))


def check_num_negatives(records: Records, negatives: Sequence[Sequence[str]], count: int | None, key: str) -> None:
    """Raises UserError if no training row has ``count`` negatives."""
    max_count = max(map(len, negatives))
    if count is not None and count > max_count:
        raise UserError(
            f"{key} is {count}, but no row of {records.source} has more than {max_count} negatives: "
            "set it to at most this number, or remove it"
        )


def read_scored_pairs(
    records: Records, names: ColumnsConfig, text_b: str, limits: tuple[float, float], needed: bool
) -> TextExamples:
    """Returns pairs of texts with a score.

    Args:
        limits: the lowest and the highest score.

    Raises:
        UserError: a row lacks a text or a score, or its score is not a number within the limits.
    """
    columns = read_columns(
        records,
        {names.text_a: "data.columns.text_a", text_b: "data.columns.text_b"},
        {names.label: "data.columns.label"},
        _id(names),
        needed=needed,
        leave_out=True,
        raise_faults=False,
    )
    scores = None
    if columns.labels is not None:
        cells = zip(columns.line_numbers, columns.labels[0], strict=True)
        rows = ((line_number, names.label, cell, limits) for line_number, cell in cells)
        scores = np.array(records.read_each(rows, _score, columns.faults), np.float32)
    records.require_sound(columns.faults)
    texts_a, texts_b = columns.texts
    none: list[list[str]] = [[] for _ in texts_a]
    return TextExamples(texts_a, texts_b, none, scores, columns.ids, scores is not None, columns.notes)


def _id(names: ColumnsConfig) -> tuple[str, str] | None:
    return None if names.id is None else (names.id, "data.columns.id")


def _score(records: Records, line_number: int, name: str, cell: Any, limits: tuple[float, float]) -> float:
    described = f"{name} is {str(cell)[:40]!r}"
    try:
        score = float(str(cell))
    except ValueError:
        raise records.error(line_number, f"{described}: it must be a number: fix it") from None
    lowest, highest = limits
    if not (math.isfinite(score) and lowest <= score <= highest):
        allowed = "finite" if math.isinf(highest) else f"from {lowest:g} to {highest:g}"
        raise records.error(line_number, f"{described}: it must be {allowed}: fix it, or set data.score_range")
    return score


def _negatives(records: Records, line_number: int, cell: Any, name: str, positive: str) -> list[str]:
    """Returns the negatives of a row, which may be missing, a text, or a list of texts. Raises UserError."""
    texts = cell if isinstance(cell, list) else [] if cell in (None, "") else [cell]
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            wrong = repr(text)[:40]
            raise records.error(
                line_number, f"{name} has {wrong}, which is no text: write one, or remove it from the {records.unit}"
            )
        if text == positive:
            raise records.error(
                line_number, f"{name} has the positive itself ({text[:40]!r}): remove it from the {records.unit}"
            )
    return [without_surrogates(text) for text in texts]
