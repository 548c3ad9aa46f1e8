"""Runs with a fine-tuned teacher, for each kind of task: what they learn, repeat, resume and reject."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import bert
from bert.errors import UserError
from bert.tasks.teaching import TaughtRows
from tests.conftest import SMALL_MODEL
from tests.helpers import lines_of, state_of

pytestmark = pytest.mark.medium

COLORS = ("red", "green", "blue", "black")
NUMBERS = ("one", "two", "three", "four")
SIZES = dict(option.removeprefix("--").split("=") for option in SMALL_MODEL)
TRAINED = {
    **SIZES, "data.max_length": 16, "data.buckets": [16], "training.batch_size": 8, "training.eval_batch_size": 8,
    "training.epochs": 6, "training.log_every": 5, "optimizer.learning_rate": 2e-2, "model.initializer_range": 0.2,
    "tokenizer.vocab_size": 80, "tokenizer.min_frequency": 1,
}  # fmt: skip


def tagged(color: str, number: str) -> dict[str, Any]:
    return {"words": [number, color, number], "tags": ["O", f"B-{color}", "O"]}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A task with rows in which a color decides the answer."""

    task: str
    row: Callable[[str, str], dict[str, Any]]
    settings: dict[str, Any]


KINDS = {
    "classification": Kind("classification", lambda a, b: {"text": f"{a} {b}", "label": a}, {}),
    "multilabel": Kind("multilabel", lambda a, b: {"text": f"{a} {b}", "labels": [a, b]},
                       {"data.columns.label": "labels"}),
    "regression": Kind("regression", lambda a, b: {"text": f"{a} {b}", "label": 0.5 * COLORS.index(a)}, {}),
    "tagging": Kind("tagging", tagged, {}),
}  # fmt: skip
ORDERS = {
    "classification": {"data.labels": ["blue", "red", "black", "green"]},
    "multilabel": {"data.labels": ["four", "blue", "one", "red", "two", "black", "three", "green"]},
    "regression": {},
    "tagging": {},
}


def rows_of(kind: Kind, count: int, seed: int, wrong: bool = False) -> list[dict[str, Any]]:
    """Rows with their labels, or with the labels of other rows."""
    stream = random.Random(seed)
    rows = [kind.row(stream.choice(COLORS), stream.choice(NUMBERS)) for _ in range(count)]
    if wrong:
        others = [kind.row(stream.choice(COLORS), stream.choice(NUMBERS)) for _ in range(count)]
        labels = [name for name in rows[0] if name not in ("text", "words")]
        rows = [row | {name: other[name] for name in labels} for row, other in zip(rows, others, strict=True)]
    return rows


def train(kind: Kind, folder: Path, overrides: dict[str, Any], wrong: bool = False, **more: Any) -> bert.Run:
    rows = {"train": rows_of(kind, 40, 1, wrong), "dev": rows_of(kind, 24, 2)}
    settings = {**TRAINED, **kind.settings, **overrides}
    return bert.finetune(kind.task, **{"init": "none", **rows, "output_dir": folder, **more}, overrides=settings)


def unlabelled(kind: Kind, folder: Path, count: int) -> Path:
    file = folder / "texts.jsonl"
    kept = ("text", "words")
    rows = [{name: value for name, value in row.items() if name in kept} for row in rows_of(kind, count, 3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def teacher_of(made_once) -> Callable[[str], Path]:
    """Returns a teacher of a kind, whose vocabulary differs from the students'."""

    def make(name: str, folder: Path) -> None:
        train(KINDS[name], folder, {"tokenizer.vocab_size": 50, "training.epochs": 20})

    return lambda name: made_once(f"{name}_teacher", functools.partial(make, name))


def same_state(first: Path, second: Path) -> None:
    jax.tree.map(np.testing.assert_array_equal, state_of(first)["params"], state_of(second)["params"])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_student_learns_what_its_wrong_labels_do_not_tell_it(name: str, teacher_of: Callable, tmp_path: Path) -> None:
    kind, teacher = KINDS[name], teacher_of(name)
    taught = {
        "distillation.teacher": str(teacher),
        "data.unlabelled": str(unlabelled(kind, tmp_path, 60)),
        "training.epochs": 15,
        **ORDERS[name],
    }
    metric = bert.load(teacher).task.main_metric
    scores = {
        weight: train(kind, tmp_path / str(weight), {**taught, "distillation.weight": weight}, wrong=True)
        for weight in (0.0, 1.0)
    }
    reached = {weight: run.results["dev"][metric] for weight, run in scores.items()}
    assert reached[1.0] > 0.9 * bert.Run(teacher).results["dev"][metric]
    assert reached[1.0] > reached[0.0] + 0.1
    results = scores[1.0].results
    assert results["teacher"]["source"] == str(teacher)
    assert len(results["teacher"]["checksum"]) == 64
    assert scores[1.0].model.evaluate(rows_of(kind, 24, 2)).metrics[metric] == pytest.approx(reached[1.0], abs=1e-6)
    logged = [line["teacher_loss"] for line in lines_of(tmp_path / "1.0") if line["split"] == "train"]
    assert logged[-1] < 0.2 * logged[0]


def test_a_teacher_without_weight_changes_no_bit(teacher_of: Callable, tmp_path: Path) -> None:
    kind = KINDS["classification"]
    train(kind, tmp_path / "plain", {"training.epochs": 2})
    weightless = {"distillation.teacher": str(teacher_of("classification")), "distillation.weight": 0.0}
    train(kind, tmp_path / "taught", {**weightless, "training.epochs": 2})
    same_state(tmp_path / "taught", tmp_path / "plain")


@pytest.mark.slow
def test_a_resumed_run_ends_the_same_and_rejects_another_teacher(
    teacher_of: Callable, tmp_path: Path, monkeypatch
) -> None:
    kind, teacher = KINDS["classification"], tmp_path / "teacher"
    shutil.copytree(teacher_of("classification"), teacher)
    settings = {
        "distillation.teacher": str(teacher), "training.checkpoint_every": 4, "training.epochs": 2,
        "data.unlabelled": str(unlabelled(kind, tmp_path, 20)),
    }  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(kind, whole, settings)
    batch, calls = TaughtRows.batch, []

    def interrupt(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 10:
            signal.raise_signal(signal.SIGINT)
        return batch(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TaughtRows, "batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(kind, cut, settings)
    other = train(kind, tmp_path / "other", {"training.epochs": 1}).path
    shutil.move(teacher, tmp_path / "kept")
    shutil.copytree(other, teacher)
    with pytest.raises(UserError, match=rf"distillation\.teacher {teacher}.*began with"):
        train(kind, cut, settings)
    shutil.rmtree(teacher)
    shutil.move(tmp_path / "kept", teacher)
    with monkeypatch.context() as patch:
        patch.setattr("bert.inference.pretrained.Pretrained.outputs", None)  # the stored outputs are used
        train(kind, cut, settings)
    same_state(cut, whole)
    assert [line for line in lines_of(cut) if line["split"] == "eval"] == [
        line for line in lines_of(whole) if line["split"] == "eval"
    ]


@pytest.mark.slow
def test_devices_do_not_matter(teacher_of: Callable, tmp_path: Path, monkeypatch) -> None:
    kind = KINDS["tagging"]
    settings = {"distillation.teacher": str(teacher_of("tagging")), "training.epochs": 1, "training.log_every": 1}
    settings["data.unlabelled"] = str(unlabelled(kind, tmp_path, 20))
    train(kind, tmp_path / "one", settings)
    monkeypatch.setenv("BERT_NUM_DEVICES", "4")
    train(kind, tmp_path / "four", settings)
    monkeypatch.setenv("BERT_NUM_DEVICES", "1")
    for one, four in zip(lines_of(tmp_path / "one"), lines_of(tmp_path / "four"), strict=True):
        names = {"token_loss", "teacher_loss", "loss", "grad_norm"} & set(one)
        assert {name: four[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-4)


@pytest.mark.slow
def test_students_have_some_of_their_teachers_layers(tmp_path: Path) -> None:
    kind = KINDS["classification"]
    teacher = train(kind, tmp_path / "teacher", {"model.num_hidden_layers": 3, "training.epochs": 2})
    own = {key: value for key, value in TRAINED.items() if not key.startswith(("model.", "tokenizer."))}
    student = bert.finetune(
        kind.task, init=teacher.path, train=rows_of(kind, 40, 1), dev=rows_of(kind, 24, 2), output_dir=tmp_path / "s",
        overrides={**own, "num_init_layers": 2, "distillation.teacher": str(teacher.path),
                   "optimizer.learning_rate": 1e-9, "training.epochs": 1, "num_seeds": 2},
    )  # fmt: skip
    model, source = bert.load(tmp_path / "s" / "seed-0"), teacher.model
    assert model.config.num_hidden_layers == 2
    for layer, taken in ((0, 0), (1, 2)):
        mine, theirs = (m.params["bert"]["encoder"][f"layer_{n}"] for m, n in ((model, layer), (source, taken)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), mine, theirs)
    np.testing.assert_allclose(model.params["classifier"]["kernel"], source.params["classifier"]["kernel"], atol=1e-6)
    model.save(tmp_path / "exported")
    texts = ["red one", "blue four"]
    exported = bert.load(tmp_path / "exported").predict(texts)
    for answer, expected in zip(exported, model.predict(texts), strict=True):
        assert answer.probabilities == pytest.approx(expected.probabilities, abs=1e-5)
    assert student.results["seeds"] == [0, 1]


@pytest.mark.slow
def test_seeds_share_the_teacher_that_the_first_one_had(teacher_of: Callable, tmp_path: Path) -> None:
    kind, teacher = KINDS["classification"], tmp_path / "teacher"
    shutil.copytree(teacher_of("classification"), teacher)
    settings = {"distillation.teacher": str(teacher), "training.epochs": 1}
    train(kind, tmp_path / "seeds", settings, num_seeds=2)
    shutil.rmtree(teacher)
    shutil.copytree(train(kind, tmp_path / "other", {"training.epochs": 1}).path, teacher)
    with pytest.raises(UserError, match=rf"distillation\.teacher {teacher}.*began with"):
        train(kind, tmp_path / "seeds", settings, num_seeds=3)


def test_teachers_that_cannot_be_used_are_errors_before_anything_is_written(
    pretrained: Path, teacher_of: Callable, tmp_path: Path
) -> None:
    kind = KINDS["classification"]
    labels = {"data.labels": ["red", "green", "blue", "black", "white"]}
    for teacher, more, words in (
        (pretrained, {}, "not fine-tuned"),
        (teacher_of("regression"), {}, "a score per text.*one label per text"),
        (teacher_of("classification"), labels, "labels of the teacher.*'black'.*labels of classification.*'white'"),
        (tmp_path / "nothing", {}, "nothing"),
        (teacher_of("classification"), {"data.unlabelled": "nothing.txt"}, r"data\.unlabelled.*nothing\.txt"),
    ):
        with pytest.raises(UserError, match=words):
            train(kind, tmp_path / "run", {"distillation.teacher": str(teacher), **more})
        assert not (tmp_path / "run" / "data.digest").exists()
    squad = {"distillation.teacher": str(teacher_of("tagging"))}
    span = Kind("span", lambda a, b: {"question": "what color", "context": f"{b} {a}", "answer": a}, {})
    with pytest.raises(UserError, match=r"distillation\.teacher.*span"):
        train(span, tmp_path / "span", {**squad, "data.max_query_length": 4, "data.doc_stride": 4,
                                        "data.columns.answer_start": None})  # fmt: skip
