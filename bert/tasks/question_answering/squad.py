"""Reads questions in SQuAD's layout or in columns, and writes the official prediction files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bert.config import ColumnsConfig
from bert.data.records import BAD_ROWS_FIX, Records, SkippedRows, listed_numbers
from bert.errors import UserError, convert, without_surrogates
from bert.files import parse_json, require_text, write_atomic
from bert.tasks.columns import is_missing, read_columns
from bert.tasks.question_answering.span_features import Answer, Answers, Example

Numbered = tuple[int, Mapping[str, Any]]
"""Line number and fields of a question."""


@dataclass(frozen=True)
class Dataset:
    """The questions of a file."""

    examples: list[Example]
    misplaced: list[str]
    """Ids of the questions with an answer that is not at its stated position."""
    labelled: bool = True
    """Whether the answers are known."""
    notes: tuple[str, ...] = ()
    may_be_impossible: bool = False
    """Whether the file has questions without an answer, including questions that were skipped."""

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def groups(self) -> Sequence[str]:
        """The contexts: questions with the same context are one group."""
        return [example.context for example in self.examples]

    def take(self, rows: Sequence[int]) -> Dataset:
        """Returns the questions with these numbers."""
        return replace(self, examples=[self.examples[row] for row in rows])

    def sentences(self) -> Iterator[str]:
        """Yields every context once, then every question."""
        yield from dict.fromkeys(example.context for example in self.examples)
        yield from (example.question for example in self.examples)

    @property
    def misplaced_note(self) -> str:
        """The number of misplaced answers, and the first ones, for a message."""
        count, ids = len(self.misplaced), listed_numbers(self.misplaced)
        return f"{count:,} question(s) have an answer that is not at its start in the context (id {ids})"

    @property
    def trainable(self) -> list[Example]:
        """The questions that are impossible or have an answer with a position; the others are skipped in training."""
        return [example for example in self.examples if example.is_impossible or example.answer is not None]

    @property
    def skipped(self) -> list[str]:
        """Ids of the questions that are not in ``trainable``."""
        kept = {example.id for example in self.trainable}
        return [example.id for example in self.examples if example.id not in kept]


def read(
    path: Path,
    strict: bool = False,
    labelled: bool = True,
    may_be_impossible: bool = True,
    skip_bad: bool = False,
) -> Dataset:
    """Reads a file in SQuAD's layout, v1.1 or v2.0.

    Args:
      strict: whether an answer that is not at its stated position is an error; otherwise it is counted.
      labelled: whether every question must have answers or be marked as impossible; otherwise the file is labelled if
        all questions do.
      may_be_impossible: whether a labelled file may have questions without an answer, as in v2.0.
      skip_bad: whether empty questions, and questions without answers that are not marked as impossible, are skipped.

    Raises:
      UserError: the file cannot be read, or a question is invalid.
    """
    path = Path(path)
    examples: list[Example] = []
    misplaced: list[str] = []
    seen: set[str] = set()
    bad: dict[str, UserError] = {}
    for context, question, location in _questions(path):
        id = _get(question, "id", str, location)
        location = f"{path}, question {id}"
        if id in seen:
            raise UserError(f"{location}: the id occurs twice: give every question its own id")
        seen.add(id)
        text = _get(question, "question", str, location)
        if not text.strip():
            fix = f"write it or remove the entry, {BAD_ROWS_FIX}"
            bad[id] = UserError(f"{location}: the question is empty: {fix}")
            continue
        impossible = "is_impossible" in question and _get(question, "is_impossible", bool, location)
        listed = _get(question, "answers", list, location) if labelled or "answers" in question else []
        answers = tuple(_answer(entry, context, location) for entry in listed)
        if impossible and answers:
            raise UserError(f"{location}: is_impossible is true, but it has answers: remove them, or set it to false")
        if labelled and not impossible and not answers:
            fix = f"list one, or set is_impossible to true, {BAD_ROWS_FIX}"
            bad[id] = UserError(f"{location}: no answers: {fix}")
            continue
        wrong = next((index for index, answer in enumerate(answers) if answer.start is None), None)
        if wrong is not None:
            if strict:
                start = listed[wrong]["answer_start"]
                raise UserError(
                    f"{location}: the answer {answers[wrong].text[:80]!r} does not stand at character {start} "
                    f"of its context, where there is {context[max(start, 0) :][:40]!r}: fix answer_start or the text"
                )
            misplaced.append(id)
        examples.append(Example(id, text, context, answers, impossible))
    notes = _notes_on_bad(path, bad, skip_bad)
    if not examples:
        raise UserError(f"{path} holds no questions: copy it again")
    labelled = labelled or all(example.answers or example.is_impossible for example in examples)
    impossible_id = next((example.id for example in examples if example.is_impossible), None)
    if labelled and impossible_id is not None and not may_be_impossible:
        raise UserError(f"{path}, question {impossible_id}: it has no answer, as in SQuAD v2.0: use the task squad2")
    return Dataset(examples, misplaced, labelled, notes, impossible_id is not None)


def _notes_on_bad(path: Path, bad: Mapping[str, UserError], skip_bad: bool) -> tuple[SkippedRows, ...]:
    """Returns a warning about skipped questions, by id. Raises UserError unless they are skipped."""
    if not bad:
        return ()
    ids = ", ".join(list(bad)[:10]) + (", ..." if len(bad) > 10 else "")
    if not skip_bad:
        first = next(iter(bad.values()))
        raise first if len(bad) == 1 else UserError(f"{first}; {len(bad):,} questions have such errors: {ids}")
    count = "1 question" if len(bad) == 1 else f"{len(bad):,} questions"
    return (SkippedRows(f"{path}: {count} without a text or an answer left out (question {ids})", len(bad)),)


def references(examples: Sequence[Example]) -> dict[str, list[str]]:
    """Returns the reference answers of each question for `bert.metrics.squad_metrics`; [] for no answer."""
    return {example.id: [answer.text for answer in example.answers] for example in examples}


def write_predictions(folder: Path, answers: Answers) -> list[Path]:
    """Writes predictions.json, nbest_predictions.json and, for v2.0, null_odds.json, in the format of run_squad.py."""
    n_best = {
        id: [
            {name: getattr(candidate, name) for name in ("text", "probability", "start_logit", "end_logit")}
            for candidate in candidates
        ]
        for id, candidates in answers.n_best.items()
    }
    files = {"predictions.json": answers.texts, "nbest_predictions.json": n_best}
    if answers.null_odds is not None:
        files["null_odds.json"] = answers.null_odds
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomic(folder / name, json.dumps(content, indent=4) + "\n")
    return [folder / name for name in files]


def _questions(path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields the context, the JSON object and the location for messages of each question."""
    try:
        data = path.read_bytes()
        require_text(path, data)
        content = parse_json(data.decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): pass a file in SQuAD's JSON layout") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, byte {error.start}: not UTF-8: {convert(error.object)}") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {error.lineno}: not JSON ({error.msg}), the file is damaged: copy it again"
        ) from None
    except ValueError as error:  # a number with thousands of digits, or thousands of nested brackets
        raise UserError(f"{path}: not JSON that can be read ({error}), the file is damaged: copy it again") from None
    for a, article in enumerate(_get(content, "data", list, str(path))):
        for p, paragraph in enumerate(_get(article, "paragraphs", list, f"{path}, data[{a}]")):
            location = f"{path}, data[{a}].paragraphs[{p}]"
            context = _get(paragraph, "context", str, location)
            for q, question in enumerate(_get(paragraph, "qas", list, location)):
                yield context, question, f"{location}.qas[{q}]"


_JSON_TYPES: dict[type, str] = {str: "a text", list: "a list", bool: "true or false", int: "a whole number"}


def _get(entry: Any, key: str, type_: type, location: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise UserError(f"{location}: no {key!r}: the file must follow SQuAD's layout")
    value = entry[key]
    if not isinstance(value, type_) or (type_ is int and isinstance(value, bool)):
        raise UserError(f"{location}: {key!r} is {str(value)[:40]!r}: it must be {_JSON_TYPES[type_]}")
    return value


def _answer(entry: Any, context: str, location: str) -> Answer:
    text, start = _get(entry, "text", str, location), _get(entry, "answer_start", int, location)
    has_position = start >= 0 and text.strip() and context.startswith(text, start)
    return Answer(text, start if has_position else None)


def read_questions(
    records: Records, names: ColumnsConfig, needed: bool = True, strict: bool = False, may_be_impossible: bool = True
) -> Dataset:
    """Returns the questions of a split.

    A row without an answer is a question that its context does not answer.

    Args:
      needed: whether answers are required; otherwise a split without any answers is a split to predict.
      strict: whether an answer that is not at its stated position is an error; otherwise it is counted.

    Raises:
      UserError: a row lacks a column, has an empty text, an answer without its start, or a repeated id.
    """
    questions = (question for row in records.rows for question in _flat_rows(*row))
    first = next(questions, None)
    if first is not None:
        names = _usual_names(first[1], names)
        records = replace(records, rows=_consistent(records, names.answer, itertools.chain([first], questions)))
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
        line_number, cells = columns.line_numbers[row], [column[row] for column in columns.labels]
        answers = _answers(records, line_number, names, context, *cells)
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


def _consistent(records: Records, answer: str, questions: Iterable[Numbered]) -> Iterator[Numbered]:
    """Yields the questions. Raises UserError for a question with an answer that is marked as impossible."""
    for line_number, fields in questions:
        is_impossible = str(fields.get("is_impossible")).lower() in ("true", "1", "1.0")
        if is_impossible and fields.get(answer) not in (None, "", []):
            problem = "is_impossible is true, but there is an answer"
            raise records.error(line_number, f"{problem}: remove the answer, or set is_impossible to false")
        yield line_number, fields


def _flat_rows(line_number: int, fields: Mapping[str, Any]) -> list[Numbered]:
    """Returns the questions of a row: itself, or all questions of an article in SQuAD's nested layout.

    Answers in an object, or in a list of objects as in SQuAD, become the fields ``answers.text`` and
    ``answers.answer_start``, as in data sets on the hub.
    """
    if isinstance(fields.get("paragraphs"), list):
        return [
            flat
            for paragraph in fields["paragraphs"]
            if isinstance(paragraph, Mapping) and isinstance(paragraph.get("qas"), list)
            for question in paragraph["qas"]
            if isinstance(question, Mapping)
            for flat in _flat_rows(line_number, {"context": paragraph.get("context"), **question})
        ]
    answers = [] if "answers" in fields and is_missing(fields["answers"]) else fields.get("answers")
    if isinstance(answers, list) and all(isinstance(answer, Mapping) for answer in answers):
        answers = {key: [answer.get(key) for answer in answers] for key in ("text", "answer_start")}
    if isinstance(answers, Mapping):
        fields = {**fields, **{f"answers.{key}": value for key, value in answers.items()}}
    return [(line_number, fields)]


def _usual_names(fields: Mapping[str, Any], names: ColumnsConfig) -> ColumnsConfig:
    """Returns the names of the columns; if the answer's is missing, the names in data sets on the hub."""
    if names.answer in fields or "answers.text" not in fields:
        return names
    start = "answers.answer_start" if "answers.answer_start" in fields else None
    return replace(names, answer="answers.text", answer_start=start)


def _answers(
    records: Records, line_number: int, names: ColumnsConfig, context: str, texts: Any, starts: Any = None
) -> tuple[Answer, ...]:
    """Returns the reference answers of a row; () without a text."""
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
