"""Spans of one's own: questions, contexts and answers in the columns of files or data sets -> SQuAD's examples."""

from __future__ import annotations

from typing import Any

from bert.config import ColumnsConfig
from bert.data.records import Records
from bert.data.spans import Answer, Example
from bert.data.tasks.cells import read_cells
from bert.data.tasks.squad import Dataset


def read_questions(
    records: Records, columns: ColumnsConfig, needed: bool = True, strict: bool = False, max_rows: int | None = None
) -> Dataset:
    """The questions of a split, R examples.

    A row without an answer is a question that its context does not answer.

    Args:
      needed: whether there have to be answers; otherwise a split whose first row has none is one to predict.
      strict: an answer that does not stand where its row says is an error, and not only counted.

    Raises:
      UserError: place of a row that lacks a column, has an empty text, an answer without its start, or another's id.
    """
    labels = {columns.answer: "data.columns.answer"}
    if columns.answer_start is not None:
        labels[columns.answer_start] = "data.columns.answer_start"
    cells = read_cells(
        records,
        {columns.question: "data.columns.question", columns.context: "data.columns.context"},
        labels,
        None if columns.id is None else (columns.id, "data.columns.id"),
        max_rows,
        needed,
    )
    examples, misplaced = [], []
    for row, (id, question, context) in enumerate(zip(cells.ids, *cells.texts, strict=True)):
        if cells.labels is None:
            examples.append(Example(id, question, context, ()))
            continue
        number, given = cells.numbers[row], [column[row] for column in cells.labels]
        answers = _answers(records, number, columns, context, *given)
        if wrong := next((answer for answer in answers if answer.start is None), None):
            if strict or columns.answer_start is None:
                where = "at its place in" if columns.answer_start is not None else "in"
                raise records.error(
                    number, f"the answer {wrong.text[:80]!r} does not stand {where} its context: mend the row"
                )
            misplaced.append(id)
        examples.append(Example(id, question, context, answers, is_impossible=not answers))
    return Dataset(examples, misplaced)


def _answers(
    records: Records, number: int, columns: ColumnsConfig, context: str, texts: Any, starts: Any = None
) -> tuple[Answer, ...]:
    """The right answers of a row; none where it has no text."""
    if not isinstance(texts, list):
        texts, starts = ([], []) if texts in (None, "") else ([texts], [starts])
    if columns.answer_start is None:
        starts = [context.find(text) if isinstance(text, str) else None for text in texts]
    if not isinstance(starts, list) or len(starts) != len(texts):
        raise records.error(
            number,
            f"{columns.answer} has {len(texts)} texts, {columns.answer_start} is {str(starts)[:40]}: give one for each",
        )
    answers = []
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or not text.strip():
            raise records.error(number, f"{columns.answer} is {str(text)[:40]!r}: it has to be a text, or empty")
        try:
            start = int(start)
        except (TypeError, ValueError):
            shown = repr(start)[:40]
            raise records.error(number, f"{columns.answer_start} is {shown}: it has to be a whole number") from None
        answers.append(Answer(text, start if start >= 0 and context.startswith(text, start) else None))
    return tuple(answers)
