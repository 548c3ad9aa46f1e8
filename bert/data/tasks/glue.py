"""GLUE's single sentences and pairs: the table of tasks; files -> examples -> features; predictions -> files.

The files are tab-separated without any quoting: a ``"`` is a character. Columns are found by header name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bert.config import UserError
from bert.data import features
from bert.data.features import Features


@dataclass(frozen=True)
class ClassificationTask:
    """A task with one label a row: what its files are called and hold, and how it is trained and measured."""

    name: str
    folder_name: str
    """Folder in GLUE's own archive."""
    text_columns: tuple[str, ...]
    """Header names of the one or two texts."""
    label_column: str
    labels: tuple[str, ...]
    """Label words of the files; a label's number is its place here."""
    label_names: tuple[str, ...]
    """The labels for people."""
    metrics: tuple[str, ...]
    """Names in bert.metrics, GLUE's official ones."""
    main_metric: str
    """The one that chooses the best checkpoint."""
    files: Mapping[str, str] = field(
        default_factory=lambda: {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}
    )
    """File of each split."""
    submissions: Mapping[str, str] = field(default_factory=dict)
    """File that the leaderboard wants for each split without labels."""
    id_column: str = "index"
    """Column that numbers the rows of a split without labels."""
    head: str = "classification"
    loss: str = "cross_entropy"


TASKS = (
    ClassificationTask(
        name="sst2",
        folder_name="SST-2",
        text_columns=("sentence",),
        label_column="label",
        labels=("0", "1"),
        label_names=("negative", "positive"),
        metrics=("accuracy",),
        main_metric="accuracy",
        submissions={"test": "SST-2.tsv"},
    ),
    ClassificationTask(
        name="mrpc",
        folder_name="MRPC",
        text_columns=("#1 String", "#2 String"),
        label_column="Quality",
        labels=("0", "1"),
        label_names=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
        main_metric="f1",
        submissions={"test": "MRPC.tsv"},
    ),
)


@dataclass(frozen=True)
class Examples:
    """The rows of one split, R of them, as text."""

    texts_a: list[str]
    texts_b: list[str] | None
    """None for a task of single sentences."""
    labels: np.ndarray | None
    """[R] int32; None for a split without labels."""
    ids: list[str]
    """As the file numbers its rows where it has no labels, else counted from 0."""

    @property
    def texts(self) -> list[str] | list[tuple[str, str]]:
        """The texts, or the pairs of texts."""
        return self.texts_a if self.texts_b is None else list(zip(self.texts_a, self.texts_b, strict=True))


def read_split(task: ClassificationTask, folder: Path, split: str, max_rows: int | None = None) -> Examples:
    """Reads ``split`` (train, dev, test) from ``folder``, or from its subfolder named as in GLUE's archive.

    Raises:
      UserError: file (and line) that is missing or not as the task needs it, and the mend.
    """
    path = _locate(task, Path(folder), split)
    labelled = split not in task.submissions
    lines = _lines(path)
    _, header = next(lines, (1, None))
    if header is None:
        raise UserError(f"{path} is empty: copy it again from the original {task.folder_name} data")
    names = header.split("\t")
    wanted = (*task.text_columns, task.label_column if labelled else task.id_column)
    if missing := [name for name in wanted if name not in names]:
        raise UserError(
            f"{path}, line 1: no column {missing[0]!r} among {', '.join(map(repr, names))[:200]}: "
            f"the first line has to name {', '.join(map(repr, wanted))}, with a tab between two names"
        )
    *text_places, last_place = map(names.index, wanted)

    columns: list[list[str]] = [[] for _ in text_places]
    last: list[str] = []
    for number, line in lines:
        if max_rows is not None and len(last) >= max_rows:
            break
        cells = line.split("\t")
        if len(cells) != len(names):
            raise UserError(
                f"{path}, line {number}: {_count(len(cells), 'column')} where the header has {len(names)}: "
                "mend or remove the line"
            )
        if labelled and cells[last_place] not in task.labels:
            raise UserError(
                f"{path}, line {number}: {task.label_column} is {cells[last_place]!r}: "
                f"{task.name} has the labels {', '.join(task.labels)}"
            )
        for column, place in zip(columns, text_places, strict=True):
            column.append(cells[place])
        last.append(cells[last_place])
    if not last:
        raise UserError(f"{path} has a header but no rows: copy it again from the original {task.folder_name} data")

    numbers = {label: number for number, label in enumerate(task.labels)}
    return Examples(
        texts_a=columns[0],
        texts_b=columns[1] if len(columns) > 1 else None,
        labels=np.array([numbers[label] for label in last], np.int32) if labelled else None,
        ids=[str(row) for row in range(len(last))] if labelled else last,
    )


def tokenize(tokenizer: Tokenizer, examples: Examples, max_length: int) -> Features:
    """The rows as `bert.data.features.tokenize` makes them of texts."""
    return features.tokenize(tokenizer, examples.texts, max_length, examples.labels)


def write_predictions(
    task: ClassificationTask,
    folder: Path,
    split: str,
    examples: Examples,
    predictions: np.ndarray,
    probabilities: np.ndarray,
) -> Path:
    """Writes GLUE's official file for a split without labels, a more telling ``SPLIT.tsv`` for one with them.

    Args:
      predictions: [R] numbers of labels, in the order of ``examples``.
      probabilities: [R, L] of each label.
    """
    if not len(examples.ids) == len(predictions) == len(probabilities):
        raise ValueError(
            f"{len(examples.ids)} rows, {len(predictions)} predictions, {len(probabilities)} probabilities"
        )
    words = [task.labels[number] for number in predictions]
    if examples.labels is None:
        path = folder / task.submissions[split]
        rows = [("index", "prediction"), *zip(examples.ids, words, strict=True)]
    else:
        path = folder / f"{split}.tsv"
        right = [task.labels[number] for number in examples.labels]
        chosen = np.take_along_axis(probabilities, np.asarray(predictions)[:, None], axis=1)[:, 0]
        rows = [("index", "prediction", "label", "probability")]
        rows += zip(examples.ids, words, right, (f"{share:.6f}" for share in chosen), strict=True)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return path


def _locate(task: ClassificationTask, folder: Path, split: str) -> Path:
    name = task.files[split]
    for path in (folder / name, folder / task.folder_name / name):
        if path.is_file():
            return path
    wrong = f"{folder} has no {name}" if folder.is_dir() else f"{folder} is not a folder"
    raise UserError(f"{wrong}: set data.dir to the folder with {', '.join(task.files.values())} of {task.folder_name}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line, without its end, byte order mark and empty lines at the end.

    Only ``\\n`` ends a line: sentences hold U+2028, U+0085 and their like. A ``\\r`` right before it belongs
    to it; elsewhere it is white space like any other. A NUL means that the file is no text or was damaged.
    """
    empty = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: byte 0x{raw[error.start]:02x} is not UTF-8: "
                    "convert the file, for example with iconv -f WINDOWS-1252 -t UTF-8"
                ) from error
            if "\0" in line:
                raise UserError(
                    f"{path}, line {number}: a NUL character: the file is damaged or not UTF-8, copy it again"
                )
            line = line.removesuffix("\n").removesuffix("\r")
            if not line:
                empty += 1
                continue
            if empty:
                raise UserError(f"{path}, line {number - empty}: the line is empty: remove it")
            yield number, line


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
