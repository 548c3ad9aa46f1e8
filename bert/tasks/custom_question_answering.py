"""Custom question answering: questions, contexts and answers in columns of files or data sets -> SQuAD's examples."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bert.config import ColumnsConfig, TaskDataConfig
from bert.data.records import Records
from bert.errors import without_surrogates
from bert.tasks.column_files import ColumnFilesTask
from bert.tasks.question_answering import QUESTION_KEYS, Dataset, SquadTask
from bert.tasks.readers.columns import KEYS, read_columns
from bert.tasks.span_features import Answer, Example


@dataclass(frozen=True, kw_only=True)
class CustomQuestionAnswering(ColumnFilesTask, SquadTask):
    """Answers as spans of a context; where a training question has none, as in SQuAD v2.0."""

    name: str = "span"
    version: str = ""
    data_keys = (*KEYS, *QUESTION_KEYS)

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        return ((self.data.columns.question, self.data.columns.context),)

    def read(self, folder: Path, split: str) -> Dataset:
        records = self.records(Path(folder), split)
        may_be_impossible = self.may_be_impossible or split == "train"
        dataset = read_questions(records, self.data.columns, split != "test", self.strict, may_be_impossible)
        return self._kept(dataset, records.source, split)

    def fit(self, train: Dataset) -> CustomQuestionAnswering:
        return dataclasses.replace(self, may_be_impossible=self.may_be_impossible or train.may_be_impossible)

    def from_config(self, data: TaskDataConfig) -> Self:
        """A threshold, once found, says that questions may be impossible."""
        return dataclasses.replace(
            super().from_config(data), data=data, may_be_impossible=data.null_score_diff_threshold is not None
        )


def read_questions(
    records: Records, names: ColumnsConfig, needed: bool = True, strict: bool = False, may_be_impossible: bool = True
) -> Dataset:
    """The questions of a split, R examples.

    A row without an answer is a question that its context does not answer.

    Args:
      needed: whether there have to be answers; otherwise a split none of whose rows has one is one to predict.
      strict: an answer that does not stand where its row says is an error, and not only counted.

    Raises:
      UserError: place of a row that lacks a column, has an empty text, an answer without its start, or another's id.
    """
    labels = {names.answer: "data.columns.answer"}
    if names.answer_start is not None:
        labels[names.answer_start] = "data.columns.answer_start"
    columns = read_columns(
        records,
        {names.question: "data.columns.question", names.context: "data.columns.context"},
        labels,
        None if names.id is None else (names.id, "data.columns.id"),
        needed=needed,
        unlabelled=(),  # a row without an answer may be a question without one
    )
    if not needed and columns.labels and all(answer in (None, "", []) for answer in columns.labels[0]):
        columns = columns._replace(labels=None)
    examples, misplaced = [], []
    for row, (id, question, context) in enumerate(zip(columns.ids, *columns.texts, strict=True)):
        if columns.labels is None:
            examples.append(Example(id, question, context, ()))
            continue
        line_number, given = columns.line_numbers[row], [column[row] for column in columns.labels]
        answers = _answers(records, line_number, names, context, *given)
        if not (answers or may_be_impossible):
            raise records.error(
                line_number, "no answer, but every training question has one: remove it, or train with such questions"
            )
        if wrong := next((answer for answer in answers if answer.start is None), None):
            if strict or names.answer_start is None:
                where = "at its place in" if names.answer_start is not None else "in"
                raise records.error(
                    line_number, f"the answer {wrong.text[:80]!r} does not stand {where} its context: fix the row"
                )
            misplaced.append(id)
        examples.append(Example(id, question, context, answers, is_impossible=not answers))
    impossible = any(example.is_impossible for example in examples)
    return Dataset(examples, misplaced, columns.labels is not None, columns.notes, impossible)


def _answers(
    records: Records, line_number: int, names: ColumnsConfig, context: str, texts: Any, starts: Any = None
) -> tuple[Answer, ...]:
    """The right answers of a row; none where it has no text."""
    if not isinstance(texts, list):
        texts, starts = ([], []) if texts in (None, "") else ([texts], [starts])
    texts = [without_surrogates(text) if isinstance(text, str) else text for text in texts]
    if names.answer_start is None:
        starts = [context.find(text) if isinstance(text, str) else None for text in texts]
    if not isinstance(starts, list) or len(starts) != len(texts):
        raise records.error(
            line_number,
            f"{names.answer} has {len(texts)} texts, {names.answer_start} is {str(starts)[:40]}: give one for each",
        )
    answers = []
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or not text.strip():
            raise records.error(line_number, f"{names.answer} is {str(text)[:40]!r}: it must be a text, or empty")
        try:
            if isinstance(start, float) and not start.is_integer():
                raise ValueError
            start = int(start)
        except (TypeError, ValueError):
            shown = repr(start)[:40]
            raise records.error(line_number, f"{names.answer_start} is {shown}: it must be a whole number") from None
        answers.append(Answer(text, start if start >= 0 and context.startswith(text, start) else None))
    return tuple(answers)


TASKS = (CustomQuestionAnswering(),)
