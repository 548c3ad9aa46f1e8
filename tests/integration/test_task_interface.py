"""A new kind of task in one file and one call: a label for each token, trained, predicted with and exported."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

import bert
from bert.commands.export import main as export
from bert.commands.finetune import main as finetune
from bert.commands.predictions import predict_command as predict
from bert.config import TaskDataConfig
from bert.data import encoding
from bert.data.rows import IGNORE_INDEX, TokenRows
from bert.model.encoder import Bert
from bert.model.heads import HEADS
from bert.model.linear import dense
from bert.tasks import TASKS, find_task
from bert.tasks.base import Task
from bert.training.finetuning.kinds import TASK_KINDS, TaskKind, register_kind
from bert.training.losses import LOSSES
from tests.helpers import lines_of, results_of, run

pytestmark = pytest.mark.medium


class Tagger(nn.Module):
    """Encoder and a dense layer over every token."""

    config: object
    num_labels: int
    classifier_dropout: float | None = None
    dtype: object = jnp.float32
    num_feature_layers: int | None = None

    @nn.compact
    def __call__(self, input_ids, token_type_ids=None, attention_mask=None, *, dropout=None):
        hidden = Bert(self.config, name="bert")(input_ids, token_type_ids, attention_mask, dropout=dropout)
        return dense(self.config, self.num_labels, self.dtype, "classifier")(hidden.last_hidden_state)


class Lines(NamedTuple):
    """Texts, and a letter for each text, None where it is to be found."""

    texts: list[str]
    letters: list[str] | None
    notes: tuple[str, ...] = ("a line of notes",)

    @property
    def labelled(self) -> bool:
        return self.letters is not None

    def __len__(self) -> int:  # of examples, not of fields
        return len(self.texts)

    def sentences(self) -> Iterator[str]:
        return iter(self.texts)


class Answer(NamedTuple):
    letters: list[str]


@dataclasses.dataclass(frozen=True)
class Letters(Task):
    """Every token of a line but the first and the last has the line's letter; letters are what train has."""

    letters: tuple[str, ...] = ()
    name: str = "letters"
    kind: ClassVar = "letters"
    main_metric: str = "errors"
    baseline: str = ""
    windows = True
    directions: ClassVar = {"errors": False}

    num_labels = property(lambda self: len(self.letters))
    input_columns = ("line",)

    def fit(self, train: Lines) -> Letters:
        return dataclasses.replace(self, letters=tuple(sorted(set(train.letters))))

    def tune(self, outputs, features, examples) -> Letters:
        assert [len(output) for output in outputs] == features.lengths.tolist()
        return dataclasses.replace(self, letters=tuple(letter.upper() for letter in self.letters))

    def to_config(self, data: TaskDataConfig) -> TaskDataConfig:
        return dataclasses.replace(data, labels=list(self.letters))

    def from_config(self, data: TaskDataConfig) -> Letters:
        return dataclasses.replace(self, letters=tuple(data.labels or ()))

    def splits(self, folder: Path) -> list[str]:
        return ["train", "dev", "test"]

    def read(self, folder: Path, split: str) -> Lines:
        lines = [line.split(" ", 1) for line in (folder / f"{split}.txt").read_text().splitlines()]
        return Lines([text for _, text in lines], None if split == "test" else [letter for letter, _ in lines])

    def features(self, tokenizer, examples: Lines, data: TaskDataConfig) -> TokenRows:
        rows = encoding.tokenize(tokenizer, examples.texts, data.max_length)
        if not examples.labelled:
            return rows
        numbers = [self.letters.index(letter.lower()) for letter in examples.letters]
        labels = np.repeat(np.array(numbers, np.int32), rows.lengths)
        labels[rows.offsets[:-1]] = labels[rows.offsets[1:] - 1] = IGNORE_INDEX
        return dataclasses.replace(rows, labels=labels, token_labels=True)

    def predict(self, outputs, features, examples) -> list[np.ndarray]:
        return [output.argmax(-1)[1:-1] for output in outputs]

    def score(self, predictions, examples: Lines) -> dict[str, float]:
        own = [letter.lower() for letter in self.letters]  # upper case once tuned
        right = [np.mean(p == own.index(g)) for p, g in zip(predictions, examples.letters, strict=True)]
        return {"share": float(np.mean(right)), "errors": 1 - float(np.mean(right))}

    def write_predictions(self, folder: Path, split: str, predictions, examples) -> list[Path]:
        folder.mkdir(exist_ok=True)
        words = ["".join(self.letters[number] for number in row) for row in predictions]
        (folder / f"{split}.txt").write_text("\n".join(words))
        return [folder / f"{split}.txt"]

    def examples_from_inputs(self, inputs) -> Lines:
        return Lines(list(inputs), None)

    def format_predictions(self, predictions, examples) -> list[Answer]:
        return [Answer([self.letters[number] for number in row]) for row in predictions]


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registers the kind for one test."""
    for table in (TASKS, HEADS, TASK_KINDS):
        monkeypatch.delitem(table, "letters", raising=False)
    register_kind(TaskKind(lambda *_: LOSSES["token_classification"]), Letters(), Tagger)
    yield
    for table in (TASKS, HEADS, TASK_KINDS):
        del table["letters"]


def test_a_new_kind_trains_predicts_and_is_not_exported(
    letters, pretrained, tmp_path, monkeypatch, capsys, fails
) -> None:
    data, folder = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    for split, rows in (("train", 24), ("dev", 9), ("test", 3)):
        lines = [f"{'xyz'[row % 3]} {'ba ' * (row % 4 + 1)}" for row in range(rows)]
        (data / f"{split}.txt").write_text("\n".join(lines))
    monkeypatch.setattr(Letters, "directions", {})
    arguments = (f"--init={pretrained}", "--task=letters", "--training.epochs=1", "--training.eval_every=1")
    arguments = (*arguments, "--config=sst2", f"--data.dir={data}", f"--output_dir={folder}")
    assert "main_metric 'errors' has no direction" in fails(finetune, *arguments)
    monkeypatch.undo()

    arguments = (f"--init={pretrained}", "--task=letters", "--training.epochs=4", "--training.eval_every=1")
    arguments = (*arguments, "--optimizer.learning_rate=0.05")
    assert run(folder, data, *arguments) == 0
    assert "a line of notes" in capsys.readouterr().out
    results = results_of(folder)
    assert set(results["dev"]) == {"loss", "share", "errors"}
    errors = {line["step"]: line["errors"] for line in lines_of(folder) if line["split"] == "eval"}
    assert len(set(errors.values())) > 1
    assert results["best_step"] == min(errors, key=errors.get), "of a metric of which less is better, the least"
    assert (results["baseline"], results["collapsed"]) == ("", False)
    assert {line["split"] for line in lines_of(folder) if "token_loss" in line} == {"train"}
    assert find_task("letters").from_config(bert.load(folder).data).letters == ("X", "Y", "Z")
    assert len((folder / "predictions" / "test.txt").read_text().splitlines()) == 3

    (tmp_path / "lines.txt").write_text("ba\nba ba ba\n")
    assert predict([str(folder), str(tmp_path / "lines.txt")]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["line"] for answer in answers] == ["ba", "ba ba ba"]
    assert all(set(answer["letters"]) <= {"X", "Y", "Z"} for answer in answers)
    assert len(answers[0]["letters"]) < len(answers[1]["letters"])

    for format in ("hf", "stablehlo"):
        error = fails(export, str(folder), str(tmp_path / "out"), f"--format={format}")
        assert "the head Tagger" in error
    assert not (tmp_path / "out").exists()
