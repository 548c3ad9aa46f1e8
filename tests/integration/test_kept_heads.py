"""A model that starts from a fine-tuned one keeps its head: nothing changes at a learning rate of nearly zero."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.errors import LOGGER
from tests.conftest import SMALL_MODEL

pytestmark = pytest.mark.medium

COLORS = ("red", "green", "blue", "black")
NUMBERS = ("one", "two", "three", "four")
SIZES = dict(option.removeprefix("--").split("=") for option in SMALL_MODEL)
SHORT = {"data.max_length": 16, "data.buckets": [16], "training.batch_size": 8, "training.eval_batch_size": 8}
TRAINED = {**SIZES, **SHORT, "training.epochs": 3, "optimizer.learning_rate": 2e-2, "model.initializer_range": 0.2,
           "tokenizer.vocab_size": 80, "tokenizer.min_frequency": 1}  # fmt: skip
UNCHANGED = {**SHORT, "training.epochs": 1, "optimizer.learning_rate": 1e-9}


def rows_of(make: Callable[[str, str], dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    stream = random.Random(seed)
    return [make(stream.choice(COLORS), stream.choice(NUMBERS)) for _ in range(count)]


def ranked(color: str, number: str) -> dict[str, Any]:
    others = [other for other in COLORS if other != color]
    return {"query": f"{color} {number}", "positive": f"the {color}", "negatives": [f"the {other}" for other in others]}


def chosen(color: str, number: str) -> dict[str, Any]:
    choices = [{"label": letter, "text": text} for letter, text in zip("ABCD", COLORS, strict=True)]
    question = {"stem": f"{number} {color}", "choices": choices}
    return {"id": f"{color}{number}", "answerKey": "ABCD"[COLORS.index(color)], "question": question}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A task with rows in which a color decides the answer."""

    task: str
    row: Callable[[str, str], dict[str, Any]]
    inputs: tuple[Any, ...] = ("red one", "blue four")
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


PAIRS = (("red one", "red two"), ("blue", "green"))
KINDS = {
    "classification": Kind("classification", lambda a, b: {"text": f"{a} {b}", "label": a}),
    "pairs": Kind("classification", lambda a, b: {"text": a, "second": f"{b} {a}", "label": f"is {a}"}, PAIRS,
                  {"data.columns.text_b": "second"}),
    "multilabel": Kind("multilabel", lambda a, b: {"text": f"{a} {b}", "labels": [a, b] if b != "one" else [a]},
                       settings={"data.columns.label": "labels"}),
    "regression": Kind("regression", lambda a, b: {"text": f"{a} {b}", "label": 0.5 * COLORS.index(a)}),
    "tagging": Kind("tagging", lambda a, b: {"words": [b, a, b], "tags": ["O", f"B-{a}", "O"]}),
    "span": Kind("span", lambda a, b: {"question": "what color", "context": f"{b} {a} {b}", "answer": a,
                                       "answer_start": len(b) + 1},
                 (("what color", "two red four"), ("what color", "blue one")),
                 {"data.max_query_length": 4, "data.doc_stride": 4}),
    "reranker": Kind("reranker", ranked, PAIRS),
    "choices": Kind("multiple_choice", chosen, (("three red", COLORS), ("one blue", COLORS))),
}  # fmt: skip


def train(kind: Kind, folder: Path, init: Any, overrides: dict[str, Any], **more: Any) -> bert.Run:
    train, dev = rows_of(kind.row, 40, 1), rows_of(kind.row, 24, 2)
    settings = {**overrides, **kind.settings}
    if kind.task == "multiple_choice":  # which reads its own files
        data = folder.parent / f"{folder.name}-data"
        data.mkdir()
        for name, rows in (("train", train), ("dev", dev)):
            numbered = [{**row, "id": str(number)} for number, row in enumerate(rows)]
            (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))
        return bert.finetune(
            "commonsenseqa", init=init, output_dir=folder, overrides={**settings, "data.dir": data}, **more
        )
    return bert.finetune(kind.task, init=init, train=train, dev=dev, output_dir=folder, overrides=settings, **more)


def values_of(answer: Any) -> dict[str, Any]:
    """The numbers of an answer by the names of its labels."""
    values: dict[str, Any] = {}

    def visit(value: Any, name: str) -> None:
        if isinstance(value, float):
            values[name] = value
        elif hasattr(value, "_asdict") or isinstance(value, dict):
            for key, item in (value if isinstance(value, dict) else value._asdict()).items():
                visit(item, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                visit(item, f"{name}.{number}")

    visit(answer, "")
    return values


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_head_is_kept_from_a_run_and_from_a_published_folder(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    first = train(kind, tmp_path / "first", "none", TRAINED)
    first.model.save(tmp_path / "published")
    before = [values_of(answer) for answer in first.model.predict(list(kind.inputs))]
    for source in ("first", "published"):
        again = train(kind, tmp_path / f"from-{source}", tmp_path / source, {**UNCHANGED, "seed": 7})
        after = [values_of(answer) for answer in again.model.predict(list(kind.inputs))]
        for actual, expected in zip(after, before, strict=True):
            assert actual == pytest.approx(expected, abs=1e-5)
        scores = {key: value for key, value in first.results["dev"].items() if key != "seconds"}
        assert again.results["dev"] == pytest.approx(scores, abs=1e-5), source


def test_labels_are_matched_by_name_and_what_is_dropped_is_a_warning(tmp_path: Path, caplog, monkeypatch) -> None:
    kind = KINDS["classification"]
    first = train(kind, tmp_path / "first", "none", TRAINED)
    before = first.model.predict("red one").probabilities
    monkeypatch.setattr(LOGGER, "propagate", True)
    order = {"data.labels": ["red", "black", "white", "green", "blue"]}
    again = train(kind, tmp_path / "more", first, {**UNCHANGED, **order, "seed": 7})
    after = again.model.predict("red one").probabilities
    assert list(after) == order["data.labels"]
    odds = {label: after[label] / after["red"] for label in COLORS}
    assert odds == pytest.approx({label: before[label] / before["red"] for label in COLORS}, rel=1e-4)
    assert f"labels of {first.path}, step " in caplog.text
    assert "kept: red, black, green, blue; randomly initialized: white" in caplog.text
    assert not any("labels of" in record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    random_head = train(kind, tmp_path / "new", first, {**UNCHANGED, **order, "seed": 7, "head_init": "none"})
    rows = [run.model.params["classifier"]["kernel"] for run in (again, random_head)]
    np.testing.assert_allclose(rows[0][:, 2], rows[1][:, 2], atol=1e-7)
    assert np.abs(rows[0][:, 0] - rows[1][:, 0]).max() > 1e-3
    train(kind, tmp_path / "back", again, {**UNCHANGED, "seed": 7})
    warnings = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    [warning] = [text for text in warnings if "labels of" in text]
    assert warning.endswith("kept: black, blue, green, red; not loaded: white")


def test_the_start_reports_the_rows_of_a_published_head(tmp_path: Path, caplog, monkeypatch) -> None:
    """Labels of config.json are matched like a run's, whatever their order and case."""
    kind = KINDS["tagging"]
    train(kind, tmp_path / "first", "none", TRAINED).model.save(tmp_path / "published")
    monkeypatch.setattr(LOGGER, "propagate", True)
    labels = ["O", *(f"{prefix}-{name}" for name in ("BLUE", "white") for prefix in "BI")]
    rows = [{"words": ["one", name], "tags": ["O", f"B-{name}"]} for name in ("BLUE", "white")] * 4
    bert.finetune(
        "tagging", init=tmp_path / "published", train=rows, dev=rows, output_dir=tmp_path / "more",
        overrides={**UNCHANGED, "data.labels": labels},
    )  # fmt: skip
    assert f"labels of {tmp_path / 'published'}: kept: O, B-BLUE, I-BLUE; randomly initialized: B-white" in caplog.text


@pytest.mark.slow
def test_adapters_and_averages_start_from_the_head_too(tmp_path: Path) -> None:
    kind = KINDS["classification"]
    first = train(kind, tmp_path / "first", "none", TRAINED)
    before = first.model.predict("red one").probabilities
    run: Any = first
    for name, settings in {
        "adapters": {"lora.rank": 2},
        "of-adapters": {},
        "average": {"training.average_checkpoints": 2, "training.eval_every": 2},
        "seeds": {"num_seeds": 2},
        "head": {"num_frozen_layers": 1},
    }.items():
        run = train(
            kind, tmp_path / name, run if name != "head" else run.path / "seed-7", {**UNCHANGED, "seed": 7, **settings}
        )
        assert run.model.predict("red one").probabilities == pytest.approx(before, abs=1e-5), name
