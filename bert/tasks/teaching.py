"""Rows of a task with the outputs of a fine-tuned teacher: rows without labels, labels and words of both models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from bert.config import TaskDataConfig
from bert.data.input_files import read_input_file
from bert.data.rows import IGNORE_INDEX, Rows, TokenRows, row_sizes
from bert.errors import UserError, quoted, require
from bert.remote import fetch
from bert.tasks.base import Outputs, Task
from bert.tasks.labelled import match_labels
from bert.tasks.sequence_classification.base import Examples
from bert.tasks.token_classification.conll import Sentences
from bert.tasks.token_classification.task import TokenClassificationTask
from bert.tasks.token_classification.word_features import WordFeatures


@dataclass(frozen=True)
class TaughtRows:
    """R training rows with the outputs of a teacher. The first rows have labels, and the others have none."""

    rows: Rows
    """`TokenRows`, or `bert.data.windows.WindowedRows`. The labels of rows without labels are arbitrary."""
    targets: np.ndarray
    """[R, L] float32; with ``words``, [words of all rows, L]."""
    num_labelled: int
    """Number of rows with labels."""
    words: np.ndarray | None = None
    """For an output per token: [tokens of all rows] int32, index of the word of each token that the teacher labels, or
    -1 (`bert.tasks.token_classification.word_features.WordFeatures`)."""
    key: str = ""
    """Hash of the rows, the teacher's weights and the order of its labels."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> np.ndarray | None:
        """The labels of all rows."""
        return self.rows.labels

    @property
    def lengths(self) -> np.ndarray:
        """[R] number of tokens of each row."""
        return self.rows.lengths

    @property
    def sizes(self) -> np.ndarray:
        """[R] number of tokens that each row occupies in a training batch."""
        return row_sizes(self.rows)

    def batch(self, rows: np.ndarray, length: int, batch_size: int) -> dict[str, np.ndarray]:
        """Returns the batch of some rows, padded to T = ``length`` tokens and B = ``batch_size`` rows.

        Returns:
          The arrays of the rows' batch; targets [B, L] or [B, T, L] float32; target_weights [B] or [B, T] float32, 1
          for rows or tokens with a target; labelled [B] float32, 1 for rows with labels; labelled_share [B] float32,
          the share of all rows that have labels.
        """
        rows = np.asarray(rows)
        batch = self.rows.batch(rows, length, batch_size)
        labelled = np.zeros(batch_size, np.float32)
        labelled[: len(rows)] = rows < self.num_labelled
        if self.words is None:
            targets = np.zeros((batch_size, *self.targets.shape[1:]), np.float32)
            targets[: len(rows)], weights = self.targets[rows], batch["weights"]
        else:
            numbers = self._token_words(rows, length, batch_size)
            weights = (numbers >= 0).astype(np.float32)
            targets = self.targets[numbers] * weights[..., None]
            batch["labels"] = np.where(labelled[:, None] > 0, batch["labels"], IGNORE_INDEX)
        share = np.full(batch_size, self.num_labelled / len(self), np.float32)
        more = {"targets": targets, "target_weights": weights, "labelled": labelled, "labelled_share": share}
        return batch | more

    def _token_words(self, rows: np.ndarray, length: int, batch_size: int) -> np.ndarray:
        """Returns ``words`` of some rows, padded with -1 to [B, T]."""
        of_tokens = dataclasses.replace(cast(TokenRows, self.rows), labels=self.words, token_labels=True)
        words: np.ndarray = of_tokens.batch(rows, length, batch_size)["labels"]
        return words

    def digest(self) -> str:
        """Returns a hash of the tokens and labels. The teacher's weights have a checksum of their own."""
        return self.rows.digest()


def read_unlabelled(task: Task, data: TaskDataConfig) -> Any:
    """Returns the inputs of ``data.unlabelled`` as examples without labels; None if it is not set.

    Raises:
      UserError: the file is missing, holds no input, or has an invalid line.
    """
    if data.unlabelled is None:
        return None
    path = Path(fetch(data.unlabelled))
    inside = Path(fetch(data.dir or ".")) / path
    path = inside if inside.is_file() else path
    if not path.is_file():
        raise UserError(f"data.unlabelled: neither {inside} nor {path} is a file: name a file of texts without labels")
    inputs, faults = [], []
    for item in read_input_file(path, task):
        if item.error is None:
            inputs.append(item.value)
        else:
            faults.append(f"{path}, line {item.line}: {item.error}")
    if faults:
        raise UserError(faults[0] + (f" ({len(faults):,} lines have such errors)" if len(faults) > 1 else ""))
    if not inputs:
        raise UserError(f"{path} holds no input: remove data.unlabelled, or write an input on each line")
    return task.examples_from_inputs(inputs)


def with_unlabelled(task: Task, train: Any, more: Any) -> Any:
    """Returns the training examples followed by examples without labels, which get the first label."""
    if isinstance(train, Sentences):
        tags = [[task.output_names[0]] * len(words) for words in more.words]
        return Sentences(train.words + more.words, require(train.tags, "the tags") + tags)
    labels = train.known_labels
    return dataclasses.replace(
        train,
        texts_a=[*train.texts_a, *more.texts_a],
        texts_b=None if train.texts_b is None else [*train.texts_b, *more.texts_b],
        labels=np.concatenate([labels, np.zeros((len(more), *labels.shape[1:]), labels.dtype)]),
        ids=[*train.ids, *more.ids],
    )


def inputs_of(task: Task, examples: Any) -> Sequence[Any]:
    """Returns examples as inputs for another task of the same kind: texts, pairs of texts, or lists of words.

    Raises:
      UserError: the examples have another type, which is possible in a registered task.
    """
    if isinstance(examples, Sentences):
        return examples.words
    if not isinstance(examples, Examples):
        raise UserError(
            f"distillation.teacher is set, but the rows of {task.name} are not plain texts: remove it, or return "
            "bert.tasks.sequence_classification.Examples"
        )
    return examples.texts


def output_order(task: Task, teacher: Task, source: str) -> list[int]:
    """Returns the index of each of the task's outputs among the teacher's outputs; labels are matched by name.

    Raises:
      UserError: the teacher answers otherwise, or has other labels; the message has both sets.
    """
    kinds = [_answer(one) for one in (task, teacher)]
    if kinds[0] != kinds[1]:
        raise UserError(
            f"the teacher {source} predicts {kinds[1]}, but {task.name} has {kinds[0]}: use a teacher of the same kind"
        )
    if kinds[0] == SCORE:
        return [0]
    names = _spellings(teacher)
    for spelling in _spellings(task):
        try:
            found = match_labels(spelling, names, "", "")
        except UserError:
            continue
        if len(set(found.values())) == task.num_labels == teacher.num_labels:
            return [found[name] for name in spelling]
    raise UserError(
        f"the labels of the teacher {source} are {quoted(names[0])}, but the labels of {task.name} are "
        f"{quoted(_spellings(task)[0])}: use a teacher with the same labels, or rename the labels in the data"
    )


SCORE = "a score per text"


def _answer(task: Task) -> str:
    """Returns the kind of the task's answers, in words."""
    if task.kind != "sequence_classification":
        return "a tag per word" if isinstance(task, TokenClassificationTask) else f"answers of the kind {task.kind}"
    return {None: "one label per text", "multi_label_classification": "several labels per text"}.get(
        task.problem_type, SCORE
    )


def _spellings(task: Task) -> tuple[tuple[str, ...], ...]:
    """Returns the labels of the task in each spelling, in the order of its outputs."""
    return (task.tags,) if isinstance(task, TokenClassificationTask) else (task.output_names, task.output_words)


def values_per_input(outputs: Outputs, features: Any, num_labels: int) -> np.ndarray:
    """Returns the outputs [R, L] of each row; for tags, the outputs [words, L] at the labelled token of each word."""
    if not isinstance(features, WordFeatures):
        return np.asarray(outputs, np.float32)
    flat = np.concatenate([np.zeros((0, num_labels), np.float32), *outputs])
    has_word = features.words >= 0
    values = np.empty((int(has_word.sum()), flat.shape[-1]), np.float32)
    values[features.words[has_word]] = flat[has_word]
    return values


def word_numbers(features: Any) -> np.ndarray | None:
    """Returns the word of each token, as in `WordFeatures`; None for rows with one output."""
    return features.words if isinstance(features, WordFeatures) else None
