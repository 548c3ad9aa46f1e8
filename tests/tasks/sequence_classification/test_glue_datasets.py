"""GLUE from data sets: the columns, splits and class labels of nyu-mll/glue, saved in folders or "downloaded"."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest

from bert.errors import UserError
from bert.tasks import TASKS
from bert.tasks.sequence_classification import glue
from tests.messages import has_all

# As nyu-mll/glue has them: text columns, class labels (None: a score).
COLUMNS = {
    "cola": (("sentence",), ("unacceptable", "acceptable")),
    "sst2": (("sentence",), ("negative", "positive")),
    "mrpc": (("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    "qqp": (("question1", "question2"), ("not_duplicate", "duplicate")),
    "stsb": (("sentence1", "sentence2"), None),
    "mnli": (("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
    "qnli": (("question", "sentence"), ("entailment", "not_entailment")),
    "rte": (("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "wnli": (("sentence1", "sentence2"), ("not_entailment", "entailment")),
}
PLAIN = {"train": "train", "dev": "validation", "test": "test"}
MNLI = {
    "train": "train", "dev": "validation_matched", "dev_mismatched": "validation_mismatched",
    "test": "test_matched", "test_mismatched": "test_mismatched",
}  # fmt: skip


def split(texts: tuple[str, ...], labels: tuple[str, ...] | None, values: list[float]) -> datasets.Dataset:
    """Rows numbered from 7."""
    kind = datasets.Value("float32") if labels is None else datasets.ClassLabel(names=list(labels))
    features = {**{name: datasets.Value("string") for name in texts}, "label": kind, "idx": datasets.Value("int32")}
    rows = {name: [f"{name} {row}" for row in range(len(values))] for name in texts}
    rows |= {"label": values, "idx": list(range(7, 7 + len(values)))}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def glue_set(name: str, labels: tuple[str, ...] | None = None) -> datasets.DatasetDict:
    texts, own = COLUMNS[name]
    labels = labels or own
    known, unknown = ([3.8, 0.0], [-1.0]) if labels is None else ([len(labels) - 1, 0], [-1])
    names = MNLI if name == "mnli" else PLAIN
    return datasets.DatasetDict(
        {
            published_name: split(texts, labels, unknown if "test" in own_name else known)
            for own_name, published_name in names.items()
        }
    )


@pytest.mark.parametrize("name", COLUMNS)
def test_every_split_of_a_saved_data_set_is_read(tmp_path: Path, name: str) -> None:
    glue_set(name).save_to_disk(str(tmp_path / name))
    task, (texts, labels) = TASKS[name], COLUMNS[name]
    for folder in (tmp_path / name, tmp_path):  # the configuration's own folder, and one that holds it by name
        assert task.splits(folder) == list(MNLI if name == "mnli" else PLAIN)
    for splits in task.splits(tmp_path):
        examples = task.read(tmp_path, splits)
        assert examples.texts_a == [f"{texts[0]} {row}" for row in range(1 if "test" in splits else 2)]
        assert examples.texts_b == (None if len(texts) == 1 else [text.replace(*texts) for text in examples.texts_a])
        if "test" in splits:
            assert (examples.labels, examples.ids) == (None, ["7"])
        elif labels is None:
            np.testing.assert_array_equal(examples.labels, np.array([3.8, 0], np.float32))
        else:
            assert [task.label_names[number] for number in examples.labels] == [labels[-1], labels[0]]


@pytest.mark.parametrize("name", ["sst2", "mrpc", "stsb"])
def test_parquet_files_have_the_columns_of_the_data_set(tmp_path: Path, name: str) -> None:
    saved, task = glue_set(name), TASKS[name]
    saved.save_to_disk(str(tmp_path / "saved"))
    for file, split_name in (("train", "train"), ("dev", "validation"), ("test", "test")):
        saved[split_name].to_parquet(tmp_path / f"{file}.parquet")
    assert task.splits(tmp_path) == ["train", "dev", "test"]
    for split_name in ("train", "dev", "test"):
        file, expected = task.read(tmp_path, split_name), task.read(tmp_path / "saved", split_name)
        assert (file.texts, file.ids) == (expected.texts, expected.ids)
        np.testing.assert_array_equal(file.labels, expected.labels)


def test_labels_go_by_their_names_whatever_their_numbers(tmp_path: Path) -> None:
    glue_set("mnli", ("contradiction", "entailment", "neutral")).save_to_disk(str(tmp_path))
    examples = TASKS["mnli"].read(tmp_path, "train")
    assert [TASKS["mnli"].label_names[number] for number in examples.labels] == ["neutral", "contradiction"]


def test_the_hub_is_asked_for_the_tasks_configuration_and_the_diagnostic_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str) -> datasets.DatasetDict:
        asked.append((name, config))
        if config == "ax":
            return datasets.DatasetDict({"test": split(*COLUMNS["mnli"], [-1])})
        return glue_set(config)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    place = Path("hub:nyu-mll/glue")  # as the loop hands over data.dir
    assert TASKS["rte"].read(place, "dev").labels.tolist() == [1, 0]
    assert asked == [("nyu-mll/glue", "rte")]
    assert TASKS["mnli"].splits(place) == [*MNLI, "diagnostic"]
    assert TASKS["mnli"].read(place, "diagnostic").ids == ["7"]
    assert asked[-1] == ("nyu-mll/glue", "ax")
    assert TASKS["rte"].read(Path("hub:me/mine:rte"), "dev").texts_a[0] == "sentence1 0"
    assert asked[-1] == ("me/mine", "rte")


DIAGNOSED = """---
configs:
- config_name: mnli
  data_files: [{split: train, path: train.csv}, {split: test_matched, path: test.csv}]
- config_name: mine
  data_files: [{split: train, path: train.csv}, {split: test, path: test.csv}]
"""
AX = "- config_name: ax\n  data_files: [{split: test, path: ax.csv}]\n"


@pytest.fixture
def hub_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set as on the hub, which `datasets` itself loads from a folder: its configurations are in README.md."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for name, label, number in (("train", 1, 3), ("test", -1, 7), ("ax", -1, 9)):
        text = f"premise,hypothesis,label,idx\n{name} a,{name} b,{label},{number}\n"
        (folder / f"{name}.csv").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("config", ["", ":mnli", ":mine"])
def test_the_diagnostic_set_is_a_configuration_of_its_own(hub_set: Path, config: str) -> None:
    """The diagnostic set ignores the task's configuration, whose test rows are not diagnostic rows."""
    place = Path(f"hub:{hub_set}{config}")
    (hub_set / "README.md").write_text(f"{DIAGNOSED}{AX}---\n")
    assert TASKS["mnli"].splits(place) == ["train", "dev", "test", "diagnostic"]
    diagnostic = TASKS["mnli"].read(place, "diagnostic")
    assert (diagnostic.texts_a, diagnostic.ids) == (["ax a"], ["9"])
    (hub_set / "README.md").write_text(f"{DIAGNOSED}---\n")
    assert TASKS["mnli"].splits(place) == ["train", "dev", "test"]
    with pytest.raises(UserError, match="has no split for diagnostic"):
        TASKS["mnli"].read(place, "diagnostic")


def test_a_data_set_of_one_nameless_configuration_has_no_diagnostic_set(hub_set: Path) -> None:
    (hub_set / "ax.csv").unlink()
    assert TASKS["mnli"].splits(Path(f"hub:{hub_set}:default")) == ["train", "dev", "test"]


def test_a_diagnostic_set_that_is_there_and_cannot_be_loaded_is_told(
    hub_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub_set / "README.md").write_text(f"{DIAGNOSED}{AX}---\n")
    (hub_set / "ax.csv").write_text('premise,hypothesis\n"a\n')
    place = Path(f"hub:{hub_set}")
    with pytest.raises(UserError, match="set cannot be loaded"):
        TASKS["mnli"].splits(place)

    def unreachable(*_: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "get_dataset_config_names", unreachable)
    with pytest.raises(UserError, match="set cannot be loaded"):
        TASKS["mnli"].splits(place)


def test_empty_texts_are_refused_but_for_those_of_the_original(tmp_path: Path) -> None:
    for name in ("rte", "qqp"):
        data = glue_set(name)
        texts, _ = COLUMNS[name]
        for part in ("train", "test"):
            data[part] = data[part].map(lambda _, column=texts[1]: {column: ""})
        data.save_to_disk(str(tmp_path / name))
    with pytest.raises(UserError, match="row 1: sentence2 is empty"):
        TASKS["rte"].read(tmp_path, "train")
    with pytest.raises(UserError, match="split test, row 1: sentence2 is empty"):
        TASKS["rte"].read(tmp_path, "test")
    assert TASKS["qqp"].read(tmp_path, "train").texts_b == ["", ""]


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    def error_of(task: str, folder: Path, name: str = "train") -> str:
        with pytest.raises(UserError) as caught:
            TASKS[task].read(folder, name)
        return str(caught.value)

    data = glue_set("rte", ("yes", "no"))
    data.save_to_disk(str(tmp_path / "words"))
    wrong = "label is 'no', but the labels are 'entailment', 'not_entailment': fix it"
    assert error_of("rte", tmp_path / "words") == f"{tmp_path / 'words'}, split train, row 1: {wrong}"
    message = error_of("qnli", tmp_path / "words")
    assert "row 1: no 'question' and 'sentence' among 'sentence1', 'sentence2', 'label', 'idx'" in message
    del data["validation"]
    data["train"] = split(*COLUMNS["rte"], [0, -1])
    data.save_to_disk(str(tmp_path / "partial"))
    assert "row 2: label is missing (null)" in error_of("rte", tmp_path / "partial")
    assert has_all(error_of("rte", tmp_path / "partial", "dev"), "partial has no split", "data.dir", "set RTE")


def test_all_nine_are_tried() -> None:
    assert set(COLUMNS) == {task.name for task in glue.TASKS}
