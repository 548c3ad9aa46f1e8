"""Multiple choice: SWAG's CSV and CommonsenseQA's JSONL -> questions -> a row of tokens for each choice -> answers."""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from bert import metrics
from bert.config import TaskDataConfig
from bert.data import features
from bert.data.dialects import csv_reader
from bert.data.features import ChoiceFeatures
from bert.data.inputs import as_texts
from bert.data.json_text import parse_json
from bert.data.records import csv_rows
from bert.errors import UserError, convert, require
from bert.tasks.base import Outputs, Task, json_input
from bert.tasks.readers import split_files
from bert.tasks.readers.tsv import write_rows

FILES: split_files.Names = {
    "train": ("train.csv", "train.jsonl", "train_rand_split.jsonl"),
    "dev": ("val.csv", "dev.csv", "dev.jsonl", "val.jsonl", "dev_rand_split.jsonl"),
    "test": ("test.csv", "test.jsonl", "test_nolabels.jsonl", "test_rand_split_no_answers.jsonl"),
}
"""Of SWAG and of CommonsenseQA, and of what is laid out like one of them."""


@dataclass(frozen=True)
class Examples:
    """The questions of one split, E of them; each has choices of its own, two or more."""

    contexts: list[str]
    choices: list[list[str]]
    names: list[list[str]]
    """What the file calls each choice: A, B, ... or 0, 1, ..."""
    labels: np.ndarray | None
    """[E] int32: place of the right choice; None for a split without labels."""
    ids: list[str]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def labelled(self) -> bool:
        """Whether the right choices are known."""
        return self.labels is not None

    @property
    def groups(self) -> Sequence[str]:
        """The contexts: questions about the same one stay together."""
        return self.contexts

    def take(self, rows: Sequence[int]) -> Examples:
        """The questions of these numbers."""
        return replace(
            self,
            contexts=[self.contexts[row] for row in rows],
            choices=[self.choices[row] for row in rows],
            names=[self.names[row] for row in rows],
            labels=None if self.labels is None else self.labels[list(rows)],
            ids=[self.ids[row] for row in rows],
        )

    def sentences(self) -> Iterator[str]:
        """All contexts, then all choices."""
        yield from self.contexts
        yield from itertools.chain.from_iterable(self.choices)


def read(path: Path, labelled: bool = True, max_rows: int | None = None) -> Examples:
    """Reads SWAG's layout from a ``.csv`` file, CommonsenseQA's from any other.

    SWAG: the context is sent1; a choice is sent2 and an ending (ending0, ending1, ...: as many as the header has).
    CommonsenseQA: the context is question.stem; a choice is the text of one of question.choices.

    Raises:
      UserError: the file and line, what is wrong, and the fix.
    """
    path = Path(path)
    questions = (_read_csv if path.suffix == ".csv" else _read_jsonl)(path, labelled)
    found = []
    lines: dict[str, int] = {}
    for question in itertools.islice(questions, max_rows):
        if question.id in lines:
            raise UserError(
                f"{path}, line {question.line}: the id {question.id} stands on line {lines[question.id]} already: "
                "give every question an id of its own"
            )
        lines[question.id] = question.line
        found.append(question)
    if not found:
        raise UserError(f"{path} holds no questions: copy it again")
    return Examples(
        contexts=[question.context for question in found],
        choices=[question.choices for question in found],
        names=[question.names for question in found],
        labels=np.array([question.label for question in found], np.int32) if labelled else None,
        ids=[question.id for question in found],
    )


def tokenize(tokenizer: Tokenizer, examples: Examples, max_length: int) -> ChoiceFeatures:
    """A pair of context and choice, up to ``max_length`` tokens, for every choice; the longer is cut first."""
    pairs = [
        (context, choice)
        for context, choices in zip(examples.contexts, examples.choices, strict=True)
        for choice in choices
    ]
    offsets = np.cumsum([0, *map(len, examples.choices)], dtype=np.int64)
    return ChoiceFeatures(features.tokenize(tokenizer, pairs, max_length), offsets, examples.labels)


def write_predictions(
    path: Path, examples: Examples, predictions: np.ndarray, probabilities: Sequence[np.ndarray]
) -> Path:
    """Writes a line for each question: its id, the choice by the file's name for it, the right one if known, the share.

    Args:
      predictions: [E] place of the choice.
      probabilities: E arrays [C] of each choice; what lies beyond a question's own choices is ignored.
    """
    if not len(examples.ids) == len(predictions) == len(probabilities):
        raise ValueError(
            f"{len(examples.ids)} questions, {len(predictions)} predictions, {len(probabilities)} probabilities"
        )
    header = ["id", "prediction", *([] if examples.labels is None else ["label"]), "probability"]
    rows = [header]
    for number, (id, names, choice) in enumerate(zip(examples.ids, examples.names, predictions, strict=True)):
        right = [] if examples.labels is None else [names[examples.labels[number]]]
        rows.append([id, names[choice], *right, f"{probabilities[number][choice]:.6f}"])
    return write_rows(path, rows)


@dataclass(frozen=True)
class _Question:
    line: int
    id: str
    context: str
    choices: list[str]
    names: list[str]
    label: int


def _read_csv(path: Path, labelled: bool) -> Iterator[_Question]:
    rows = csv_rows(csv_reader(io.StringIO(_text(path), newline="")), path)
    _, header = next(rows, (1, []))
    endings = _endings(header)
    wanted = ["sent1", "sent2", *endings]
    wanted += ["label"] if labelled else []
    if missing := [name for name in wanted if name not in header]:
        raise UserError(
            f"{path}, line 1: no column {missing[0]!r} among {', '.join(map(repr, header))[:200]}: "
            f"the first line must name {', '.join(map(repr, wanted))}"
        )
    places = {name: header.index(name) for name in wanted}
    names = [str(number) for number in range(len(endings))]
    for number, (line, cells) in enumerate(rows):
        if len(cells) != len(header):
            raise UserError(
                f"{path}, line {line}: {len(cells)} columns where the header has {len(header)}: "
                "quote texts that hold a comma, or remove the line"
            )
        first, second = cells[places["sent1"]], cells[places["sent2"]]
        texts = [cells[places[name]] for name in endings]
        if not first.strip():
            raise UserError(f"{path}, line {line}: sent1 is empty: write it or remove the line")
        if not all(text.strip() for text in texts):
            raise UserError(f"{path}, line {line}: an ending is empty: write it or remove the line")
        label = cells[places["label"]].strip() if labelled else names[0]
        if label not in names:
            raise UserError(f"{path}, line {line}: label is {label!r}: it must be one of {', '.join(names)}")
        choices = [f"{second} {text}".strip() for text in texts]
        yield _Question(line, str(number), first, choices, names, names.index(label))


def _endings(names: Collection[str]) -> list[str]:
    """The columns of SWAG's endings, in the order of their numbers; at least two, there or not."""
    endings = [name for name in names if name.startswith("ending") and name[len("ending") :].isdecimal()]
    endings.sort(key=lambda name: int(name[len("ending") :]))
    return endings if len(endings) > 1 else ["ending0", "ending1"]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read_jsonl(path: Path, labelled: bool) -> Iterator[_Question]:
    for line, text in enumerate(_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            entry = parse_json(text)
        except ValueError as error:
            reason = getattr(error, "msg", error)
            raise UserError(f"{path}, line {line}: not JSON ({reason}): fix or remove the line") from None
        question = _get(entry, "question", dict, path, line)
        stem = _get(question, "stem", str, path, line)
        if not stem.strip():
            raise UserError(f"{path}, line {line}: the question is empty: write it or remove the line")
        choices = _get(question, "choices", list, path, line)
        texts = [_get(choice, "text", str, path, line) for choice in choices]
        names = [_get(choice, "label", str, path, line) for choice in choices]
        if len(names) < 2 or len(set(names)) < len(names) or not all(text.strip() for text in texts):
            raise UserError(
                f"{path}, line {line}: the choices are {json.dumps(choices)[:80]}: "
                "a question needs two or more, each with a text and a label of its own"
            )
        answer = _get(entry, "answerKey", str, path, line) if labelled else names[0]
        if answer not in names:
            raise UserError(f"{path}, line {line}: answerKey is {answer!r}: it must be one of {', '.join(names)}")
        id = _get(entry, "id", str, path, line) if isinstance(entry, dict) and "id" in entry else str(line - 1)
        yield _Question(line, id, stem, texts, names, names.index(answer))


_KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}


def _get(entry: Any, key: str, kind: type, path: Path, line: int) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise UserError(f"{path}, line {line}: no {key!r}: the line must follow CommonsenseQA's layout")
    if not isinstance(entry[key], kind):
        raise UserError(f"{path}, line {line}: {key!r} is {str(entry[key])[:40]!r}: it must be {_KINDS[kind]}")
    return entry[key]


def has_labels(path: Path) -> bool:
    """Whether a file to predict comes with the right choices, by its first line."""
    first = next((line for line in _text(path).split("\n") if line.strip()), "")
    if path.suffix == ".csv":
        return "label" in next(csv_reader([first], strict=False))
    return '"answerKey"' in first


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): name a .csv or .jsonl file") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8: {convert(content)}") from None


class Chosen(NamedTuple):
    """Predicted choices [E] by their place, and the probability of each choice, an array [C] a question."""

    choices: np.ndarray
    probabilities: list[np.ndarray]


class Choice(NamedTuple):
    """An answer: the most likely choice, and the probability of each, in their order."""

    choice: str
    probabilities: list[float]


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceTask(Task):
    """One right choice of two or more a question; every choice is a row of its own, with the softmax over them."""

    name: str
    head: str = "choices"
    loss: str = "choices"
    main_metric: str = "accuracy"
    baseline: str = "chance"

    @property
    def num_labels(self) -> int:
        return 1

    @property
    def output_names(self) -> tuple[str, ...]:
        """None: there are as many outputs as a question has choices."""
        return ()

    def splits(self, folder: Path) -> list[str]:
        return split_files.splits_in(Path(folder), FILES)

    def read(self, folder: Path, split: str, max_rows: int | None = None) -> Examples:
        path = split_files.find_split_file(folder, FILES, split, "multiple choice")
        return read(path, split != "test" or has_labels(path), max_rows)

    def features(self, tokenizer: Tokenizer, examples: Examples, data: TaskDataConfig) -> ChoiceFeatures:
        return tokenize(tokenizer, examples, data.max_length)

    def predict(self, outputs: Outputs, features: ChoiceFeatures, examples: Examples) -> Chosen:
        """[C] scores of each row, of which its own come first -> the most likely choice."""
        own = zip(outputs, examples.choices, strict=True)
        shares = [metrics.softmax(np.nan_to_num(scores[: len(choices)])) for scores, choices in own]
        return Chosen(np.array([share.argmax() for share in shares], np.int64), shares)

    def score(self, predictions: Chosen, examples: Examples) -> dict[str, float]:
        return metrics.compute_metrics(("accuracy",), predictions.choices, require(examples.labels, "the labels"))

    def baseline_scores(self, examples: Examples) -> dict[str, float]:
        """What guessing comes to."""
        return {"accuracy": float(np.mean([1 / len(choices) for choices in examples.choices]))}

    def is_degenerate(self, predictions: Chosen, examples: Examples) -> bool:
        """No better than guessing."""
        return self.score(predictions, examples)["accuracy"] <= self.baseline_scores(examples)["accuracy"]

    def write(self, folder: Path, split: str, predictions: Chosen, examples: Examples) -> list[Path]:
        return [write_predictions(folder / f"{split}.tsv", examples, predictions.choices, predictions.probabilities)]

    @property
    def input_columns(self) -> tuple[str, ...]:
        return ("question", "choices")

    def parse_line(self, line: str) -> tuple[str, ...]:
        """The question and its choices with tabs between, or a JSON object: a text ``question``, a list ``choices``."""
        given = json_input(line, self.input_columns)
        if given is not None and not isinstance(given["choices"], list):
            raise ValueError('choices is not a list: write it as ["one", "another"]')
        columns = line.split("\t") if given is None else [given["question"], *given["choices"]]
        if len(columns) < 3:
            raise ValueError(f"{len(columns)} column(s): write a question and two or more choices with tabs between")
        if not all(isinstance(column, str) and column.strip() for column in columns):
            raise ValueError("the question or a choice is empty or not a text: write it or remove the line")
        return tuple(columns)

    @property
    def id_columns(self) -> tuple[str, ...]:
        return ("id",)

    def columns_among(self, names: Collection[str]) -> tuple[str, ...]:
        """SWAG's columns, or those of CommonsenseQA and of lines of `parse_line`."""
        if "sent1" not in names:
            return super().columns_among(names)
        wanted = ("sent1", "sent2", *_endings(names))
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(f"no {missing[0]!r}: name the columns {', '.join(map(repr, wanted))} as in SWAG")
        return wanted

    def input_of_row(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
        """A row of SWAG's layout, an object of CommonsenseQA's, or a text ``question`` and a list ``choices``."""
        if "sent1" in fields:
            names = self.columns_among(fields)
            context, *endings = (self.text_of(name, fields[name]) for name in names if name != "sent2")
            return (context, *(f"{fields['sent2']} {ending}".strip() for ending in endings))
        question, choices = fields.get("question"), fields.get("choices")
        if isinstance(question, dict):
            listed = _as_list(question.get("choices"))
            choices = [choice.get("text") if isinstance(choice, dict) else None for choice in listed]
            question = question.get("stem")
        if question is None:
            self.columns_among(fields)
        texts = [self.text_of("a choice", choice) for choice in _as_list(choices)]
        if len(texts) < 2:
            raise ValueError("fewer than two choices: write a question and a list of two or more choices")
        return (self.text_of("question", question), *texts)

    def input_fields(self, given: tuple[str, ...]) -> dict[str, Any]:
        return {"question": given[0], "choices": list(given[1:])}

    def sample(self, examples: Examples) -> tuple[str, ...]:
        return next(((question, *own) for question, own in zip(examples.contexts, examples.choices, strict=True)), ())

    def examples_from_inputs(self, inputs: Sequence[Any]) -> Examples:
        """Each input is a question followed by two or more choices, or a question and the list of them; none empty."""
        questions, choices = [], []
        wanted = f"{self.name} takes a question and two or more choices: pass a tuple of strings"
        for number, given in enumerate(inputs, 1):
            nested = isinstance(given, (list, tuple)) and len(given) == 2 and isinstance(given[1], (list, tuple))
            texts = [given[0], *given[1]] if nested else given
            question, *own = as_texts(texts, number, wanted, range(3, sys.maxsize))
            if not all(text.strip() for text in (question, *own)):
                raise UserError(f"input {number} has an empty question or choice: pass a text for each")
            questions.append(question)
            choices.append(own)
        names = [[str(place) for place in range(len(own))] for own in choices]
        ids = [str(number) for number in range(len(questions))]
        return Examples(questions, choices, names, None, ids)

    def answers(self, predictions: Chosen, examples: Examples) -> list[Choice]:
        found = zip(examples.choices, *predictions, strict=True)
        return [Choice(choices[place], shares.tolist()) for choices, place, shares in found]


TASKS = tuple(MultipleChoiceTask(name=name) for name in ("multiple_choice", "swag", "commonsenseqa"))
