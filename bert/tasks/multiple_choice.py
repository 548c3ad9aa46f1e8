"""Multiple choice: SWAG's CSV and CommonsenseQA's JSONL -> questions -> a row of tokens for each choice -> answers."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from bert import metrics
from bert.config import TaskDataConfig
from bert.config.model import PairTruncation
from bert.data import encoding
from bert.data.inputs import as_texts
from bert.data.records import BAD_ROWS_FIX, Records, is_dataset_dict, read_records
from bert.data.rows import ChoiceRows, TokenRows
from bert.errors import UserError, quoted, require
from bert.files import write_tsv
from bert.tasks.base import Outputs, Task, json_input
from bert.tasks.columns import FILE_STEMS, dataset_split, dataset_splits, is_blank, label_text
from bert.tasks.error_files import write_errors
from bert.tasks.splits import ExampleColumns, SplitNames, find_split_file, splits_in

FILES: SplitNames = {
    "train": ("train.csv", "train.jsonl", "train_rand_split.jsonl", "train.parquet"),
    "dev": (
        *("val.csv", "dev.csv", "dev.jsonl", "val.jsonl", "dev_rand_split.jsonl"),
        *(f"{stem}.parquet" for stem in FILE_STEMS["dev"]),
    ),
    "test": ("test.csv", "test.jsonl", "test_nolabels.jsonl", "test_rand_split_no_answers.jsonl", "test.parquet"),
}
"""File names of SWAG, CommonsenseQA and data with their layout."""


@dataclass(frozen=True)
class Examples(ExampleColumns):
    """The E questions of one split, each with two or more choices."""

    contexts: list[str]
    choices: list[list[str]]
    names: list[list[str]]
    """Names of the choices in the file: A, B, ... or 0, 1, ..."""
    labels: np.ndarray | None
    """[E] int32: index of the correct choice; None for a split without labels."""
    ids: list[str]
    notes: tuple[str, ...] = ()
    columns: ClassVar[tuple[str, ...]] = ("contexts", "choices", "names", "labels", "ids")

    @property
    def labelled(self) -> bool:
        """Whether the correct choices are known."""
        return self.labels is not None

    def sentences(self) -> Iterator[str]:
        """Yields all contexts, then all choices."""
        yield from self.contexts
        yield from itertools.chain.from_iterable(self.choices)


def _answer_key(fields: Mapping[str, Any]) -> str:
    return "label" if "sent1" in fields else "answerKey"


def read(path: Path, labelled: bool | None = True) -> Examples:
    """Reads a file in the layout of SWAG or CommonsenseQA (see `read_questions`)."""
    return read_questions(read_records(Path(path)), labelled)


def read_questions(records: Records, labelled: bool | None = True) -> Examples:
    """Returns the questions of rows as in SWAG or CommonsenseQA, or with a text ``question`` and a list ``choices``.

    SWAG: the context is sent1; a choice is sent2 followed by one of ending0, ending1, ...
    CommonsenseQA: the context is question.stem; a choice is the text of an entry of question.choices.

    Args:
      labelled: whether the questions have correct choices; None: if any question has one.

    Raises:
      UserError: a row is invalid.
    """
    rows = list(records.rows)
    if labelled is None:
        labelled = any(not is_blank(fields.get(_answer_key(fields))) for _, fields in rows)
    if skipped := [line_number for line_number, fields in rows if _is_bad(records, fields, labelled)]:
        rows = [row for row in rows if row[0] not in set(skipped)]
    records.skip(skipped)
    line_of_id: dict[str, int] = {}
    questions = records.read_each(
        ((line_number, fields, index, labelled, line_of_id) for index, (line_number, fields) in enumerate(rows)),
        _read_question,
    )
    if not questions:
        raise UserError(f"{records.source} holds no questions: copy it again")
    contexts, choices, names, labels = (list(column) for column in zip(*questions, strict=True))
    right = np.array(labels, np.int32) if labelled else None
    return Examples(contexts, choices, names, right, list(line_of_id), tuple(records.notes))


def _read_question(
    records: Records,
    line_number: int,
    fields: Mapping[str, Any],
    index: int,
    labelled: bool,
    line_of_id: dict[str, int],
) -> tuple[str, list[str], list[str], int]:
    """Returns context, choices, names of the choices and correct choice (-1 without labels). Raises UserError."""
    key = _answer_key(fields)
    try:
        context, choices, names = parse_question(fields)
    except ValueError as error:
        raise records.error(line_number, str(error)) from None
    label = -1
    if labelled:
        if key not in fields or is_blank(fields[key]):
            shown = f"no {key!r}" if key not in fields else f"{key} is empty"
            raise records.error(line_number, f"{shown}: give every question its right choice, {BAD_ROWS_FIX}")
        answer = label_text(records, line_number, key, fields[key]).strip()
        if answer not in names:
            raise records.error(line_number, f"{key} is {answer[:40]!r}: it must be one of {', '.join(names)}")
        label = names.index(answer)
    id = label_text(records, line_number, "id", fields.get("id", index))
    if (before := line_of_id.setdefault(id, line_number)) != line_number:
        where = f"{records.unit} {before}"
        raise records.error(line_number, f"the id {id} is on {where} already: give every question its own id")
    return context, choices, names, label


def _nested(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a row with the choices as one object, which data sets divide into columns."""
    if "choices" in fields or "choices.text" not in fields:
        return fields
    return {**fields, "choices": {name: fields[f"choices.{name}"] for name in ("label", "text")}}


def _is_bad(records: Records, fields: Mapping[str, Any], labelled: bool) -> bool:
    """Returns whether a row is skipped because it lacks its question or its label."""
    key = _answer_key(fields)
    if labelled and is_blank(fields.get(key)) and (records.is_data_set or key in records.declared_labels):
        return True
    question = fields.get("sent1", fields.get("question"))
    question = question.get("stem") if isinstance(question, Mapping) else question
    return records.skips_bad_rows and (is_blank(question) or (labelled and is_blank(fields.get(key))))


def _listed_choices(listed: Any) -> list[Any]:
    """Returns the list of choices, also from the form of datasets: ``{"label": ["A", "B"], "text": ["x", "y"]}``."""
    columns = list(listed.values()) if isinstance(listed, Mapping) else []
    if all(isinstance(column, list) for column in columns) and len({len(column) for column in columns}) == 1:
        return [dict(zip(listed, entry, strict=True)) for entry in zip(*columns, strict=True)]
    return listed if isinstance(listed, list) else []


def parse_question(fields: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    """Returns the context, its choices, and their names in the file.

    Raises:
      ValueError: the row is invalid.
    """
    fields = _nested(fields)
    context: Any
    texts: list[Any]
    names: list[Any]
    if "sent1" in fields and "sent2" in fields:
        context, endings = fields["sent1"], [fields[name] for name in _ending_columns(fields)]
        start = "" if fields["sent2"] is None else fields["sent2"]
        are_texts = isinstance(start, str) and all(isinstance(ending, str) for ending in endings)
        texts = [f"{start} {ending}".strip() if are_texts and ending else None for ending in endings]
        names = [str(index) for index in range(len(texts))]
    elif "question" in fields:
        context, listed = fields["question"], fields.get("choices")
        if isinstance(context, Mapping):
            context, listed = context.get("stem"), context.get("choices")
        elif "choices" not in fields:
            raise ValueError(
                f"no 'choices' among {quoted(fields)}: write "
                '{"question": "...", "choices": ["x", "y"], "answerKey": "0"} on each line of a .jsonl file, '
                "or name the columns 'sent1', 'sent2', 'ending0', 'ending1', 'label' as in SWAG"
            )
        entries = _listed_choices(listed)
        texts = [entry.get("text") if isinstance(entry, dict) else entry for entry in entries]
        names = [entry.get("label") if isinstance(entry, dict) else str(index) for index, entry in enumerate(entries)]
    else:
        raise ValueError(
            f"no 'question' among {quoted(fields)}: name it and 'choices' as in CommonsenseQA, or 'sent1', "
            "'sent2', 'ending0', 'ending1' as in SWAG"
        )
    if not isinstance(context, str) or not context.strip():
        raise ValueError("the question is empty or not a text: write it or remove the row")
    if len(texts) < 2 or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("fewer than two choices, or one that is empty or not a text: write two or more texts")
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"the labels of the choices are {json.dumps(names)[:80]}: give each choice a different text")
    return context, texts, names


def _ending_columns(names: Collection[str]) -> list[str]:
    """Returns the columns of SWAG's endings, sorted by number."""
    endings = [name for name in names if name.startswith("ending") and name[len("ending") :].isdecimal()]
    return sorted(endings, key=lambda name: int(name[len("ending") :]))


def tokenize(
    tokenizer: Tokenizer, examples: Examples, max_length: int, pair_truncation: PairTruncation | None = None
) -> ChoiceRows:
    """Returns a row of at most ``max_length`` tokens for each pair of context and choice."""
    pairs = [
        (context, choice)
        for context, choices in zip(examples.contexts, examples.choices, strict=True)
        for choice in choices
    ]
    offsets = np.cumsum([0, *map(len, examples.choices)], dtype=np.int64)
    rows = encoding.tokenize(tokenizer, pairs, max_length, pair_truncation=pair_truncation)
    return ChoiceRows(rows, offsets, examples.labels)


def write_predictions(
    path: Path, examples: Examples, predictions: np.ndarray, probabilities: Sequence[np.ndarray]
) -> Path:
    """Writes a line for each question: id, predicted choice, correct choice if known, and probability.

    Args:
      probabilities: E arrays [C]; values beyond the choices of a question are ignored.
    """
    if not len(examples.ids) == len(predictions) == len(probabilities):
        raise ValueError(
            f"{len(examples.ids)} questions, {len(predictions)} predictions, {len(probabilities)} probabilities"
        )
    header = ["id", "prediction", *([] if examples.labels is None else ["label"]), "probability"]
    rows = [header]
    for index, (id, names, choice) in enumerate(zip(examples.ids, examples.names, predictions, strict=True)):
        expected = [] if examples.labels is None else [names[examples.labels[index]]]
        rows.append([id, names[choice], *expected, f"{probabilities[index][choice]:.6f}"])
    return write_tsv(path, rows)


class Chosen(NamedTuple):
    """Predicted choices [E] by index, and the probabilities of the choices, an array [C] per question."""

    choices: np.ndarray
    probabilities: list[np.ndarray]


class Choice(NamedTuple):
    """An answer: the most likely choice, and the probability of each choice."""

    choice: str
    probabilities: list[float]


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceTask(Task):
    """One correct choice per question. Each choice is a row, with a softmax over the choices of a question."""

    name: str
    skips_bad_rows: bool = False
    kind: ClassVar[str] = "multiple_choice"
    main_metric: str = "accuracy"
    baseline: str = "chance"
    num_labels = 1
    output_names = ()
    """The number of outputs is the number of choices of a question."""
    input_columns = ("question", "choices")
    id_columns = ("id",)

    def splits(self, folder: Path) -> list[str]:
        return dataset_splits(Path(folder)) or splits_in(Path(folder), FILES)

    def read(self, folder: Path, split: str) -> Examples:
        folder = Path(folder)
        if is_dataset_dict(folder.as_posix()):
            records = dataset_split(folder, split)
        else:
            records = read_records(find_split_file(folder, FILES, split, "multiple choice"))
        records = replace(records, skips_bad_rows=self.skips_bad_rows)
        return read_questions(records, None if split == "test" else True)

    def features(self, tokenizer: Tokenizer, examples: Examples, data: TaskDataConfig) -> ChoiceRows:
        return tokenize(tokenizer, examples, data.max_length, data.pair_truncation)

    def predict(self, outputs: Outputs, features: ChoiceRows, examples: Examples) -> Chosen:
        """Returns the most likely choice of each question for outputs [C]."""
        pairs = zip(outputs, examples.choices, strict=True)
        shares = [metrics.softmax(np.nan_to_num(scores[: len(choices)])) for scores, choices in pairs]
        return Chosen(np.array([share.argmax() for share in shares], np.int64), shares)

    def score(self, predictions: Chosen, examples: Examples) -> dict[str, float]:
        return metrics.compute_metrics(("accuracy",), predictions.choices, require(examples.labels, "the labels"))

    def baseline_scores(self, examples: Examples) -> dict[str, float]:
        """Returns the expected accuracy of random guessing."""
        return {"accuracy": float(np.mean([1 / len(choices) for choices in examples.choices]))}

    def is_degenerate(self, predictions: Chosen, examples: Examples) -> bool:
        """Returns whether the accuracy is no better than guessing."""
        return self.score(predictions, examples)["accuracy"] <= self.baseline_scores(examples)["accuracy"]

    def write_predictions(self, folder: Path, split: str, predictions: Chosen, examples: Examples) -> list[Path]:
        return [write_predictions(folder / f"{split}.tsv", examples, predictions.choices, predictions.probabilities)]

    def write_details(self, folder: Path, split: str, predictions: Chosen, examples: Examples) -> list[Path]:
        """Writes the wrongly answered questions to errors.tsv, the most confident errors first."""
        labels = require(examples.labels, "the labels")
        wrong = np.flatnonzero(predictions.choices != labels)
        shares = np.array([predictions.probabilities[row][predictions.choices[row]] for row in wrong])
        errors = (
            (
                examples.ids[row],
                examples.contexts[row],
                examples.choices[row][predictions.choices[row]],
                examples.choices[row][labels[row]],
                float(predictions.probabilities[row][predictions.choices[row]]),
            )
            for row in wrong[np.argsort(-shares, kind="stable")]
        )
        return [write_errors(folder, split, ("id", "question", "prediction", "label", "probability"), errors)]

    def blank_rows(self, rows: TokenRows) -> ChoiceRows:
        return ChoiceRows(rows, np.arange(len(rows) + 1), None)

    def parse_line(self, line: str) -> tuple[str, ...]:
        """Parses a question and its choices separated by tabs, or a JSON object with question and choices."""
        entry = json_input(line, self.input_columns)
        if entry is not None and not isinstance(entry["choices"], list):
            raise ValueError('choices is not a list: write it as ["one", "another"]')
        columns = line.split("\t") if entry is None else [entry["question"], *entry["choices"]]
        if len(columns) < 3:
            raise ValueError(f"{len(columns)} column(s): write a question and two or more choices with tabs between")
        if not all(isinstance(column, str) and column.strip() for column in columns):
            raise ValueError("the question or a choice is empty or not a text: write it or remove the line")
        return tuple(columns)

    def columns_among(self, names: Collection[str]) -> tuple[str, ...]:
        """Returns the columns of SWAG, or question and choices."""
        if "sent1" not in names:
            return super().columns_among(names)
        return ("sent1", "sent2", *_ending_columns(names))

    def input_of_row(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns question and choices of a row in any layout of `read`."""
        context, choices, _ = parse_question(fields)
        return (context, *choices)

    def input_fields(self, value: tuple[str, ...]) -> dict[str, Any]:
        return {"question": value[0], "choices": list(value[1:])}

    def sample(self, examples: Examples) -> tuple[str, ...]:
        return next(
            ((question, *choices) for question, choices in zip(examples.contexts, examples.choices, strict=True)), ()
        )

    def examples_from_inputs(self, inputs: Sequence[Any]) -> Examples:
        """Accepts a question followed by two or more choices, or a question and a list of choices, all not empty."""
        questions, choices = [], []
        expected = f"{self.name} takes a question and two or more choices: pass a list, [(question, choice, choice)]"
        for index, value in enumerate(inputs, 1):
            nested = isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[1], (list, tuple))
            texts = [value[0], *value[1]] if nested else value
            question, *answers = as_texts(texts, index, expected, range(3, sys.maxsize))
            if not all(text.strip() for text in (question, *answers)):
                raise UserError(f"input {index} has an empty question or choice: pass a text for each")
            questions.append(question)
            choices.append(answers)
        names = [[str(choice) for choice in range(len(answers))] for answers in choices]
        ids = [str(index) for index in range(len(questions))]
        return Examples(questions, choices, names, None, ids)

    def format_predictions(self, predictions: Chosen, examples: Examples) -> list[Choice]:
        answered = zip(examples.choices, *predictions, strict=True)
        return [Choice(choices[chosen], shares.tolist()) for choices, chosen, shares in answered]


TASKS = tuple(MultipleChoiceTask(name=name) for name in ("multiple_choice", "swag", "commonsenseqa"))
