"""Classification and regression over custom columns: reading, values inferred from the data, and errors."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest

from bert.config import ColumnsConfig, FinetuneConfig, TaskDataConfig
from bert.errors import UserError
from bert.tasks import TASKS, find_task, make_task, register_task
from bert.tasks.base import Task
from bert.tasks.columns import table_files
from bert.tasks.sequence_classification import ClassificationPredictions, CustomClassification
from tests.helpers import made_files
from tests.messages import has_all

PAIRS = ColumnsConfig(text_a="claim", text_b="evidence", label="verdict", id="number")
PAIRS_CSV = 'number,claim,evidence,verdict\nb,"x, y",z,true\na,p,q,false\n'


def own(name: str = "classification", **data: object) -> Task:
    return make_task(FinetuneConfig(task=name, data=TaskDataConfig(**data)))


def error_of(task: Task, folder: Path, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        task.fit(task.read(folder, split))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_columns_are_found_by_their_names_in_every_kind_of_file(tmp_path: Path) -> None:
    rows = [{"verdict": True, "evidence": "z", "claim": "x, y", "number": "b"},
            {"verdict": False, "evidence": "q", "claim": "p", "number": "a", "more": None}]  # fmt: skip
    made_files(tmp_path, a_csv=PAIRS_CSV, a_jsonl="".join(json.dumps(row) + "\n" for row in rows))
    made_files(tmp_path, a_tsv=PAIRS_CSV.replace('"x, y"', "x; y").replace(",", "\t").replace(";", ","))
    for kind in ("csv", "tsv", "jsonl"):
        task = own(train=f"a.{kind}", columns=PAIRS)
        examples = task.read(tmp_path, "train")
        assert (examples.texts_a, examples.texts_b) == (["x, y", "p"], ["z", "q"])
        assert (examples.ids, examples.label_words, examples.labels.tolist()) == (["b", "a"], ("false", "true"), [1, 0])
        assert task.input_columns == ("text_a", "text_b")


def test_the_training_file_tells_the_labels_and_config_yaml_keeps_them(tmp_path: Path) -> None:
    made_files(tmp_path, train_tsv="text\tlabel\na\t10\nb\t2\nc\t10\n", dev_tsv="text\tlabel\nd\t10\n")
    task = own(dir=str(tmp_path))
    assert task.splits(tmp_path) == ["train", "dev"]
    fitted = task.fit(task.read(tmp_path, "train"))
    assert (fitted.labels, fitted.output_names, fitted.num_labels) == (("2", "10"), ("2", "10"), 2)
    assert fitted.read(tmp_path, "dev").labels.tolist() == [1]
    data = fitted.to_config(TaskDataConfig(dir="x"))
    assert data.labels == ["2", "10"]
    assert own(**{key.name: getattr(data, key.name) for key in dataclasses.fields(data)}).labels == ("2", "10")
    listed = own(labels=["10", "2", "0"])
    examples = listed.read(tmp_path, "train")
    assert (listed.fit(examples).labels, examples.labels.tolist()) == (("10", "2", "0"), [0, 1, 0])


def test_blanks_around_labels_do_not_count(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv=" text , label \na, pos \nb,neg\nc,pos\n", dev_csv="text,label\nd,neg \n")
    task = own(dir=str(tmp_path))
    task = task.fit(task.read(tmp_path, "train"))
    assert task.labels == own(labels=["neg ", " pos"]).labels == ("neg", "pos")
    assert task.read(tmp_path, "dev").labels.tolist() == [0]
    data = TaskDataConfig(dir="x", labels=["neg ", " pos"])
    assert own(labels=data.labels).to_config(data) == data, "so that the same command resumes"


def test_an_unusual_dialect_is_a_note(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv="text;label\na, b;x\nc;y\n")
    examples = own().read(tmp_path, "train")
    assert (examples.texts_a, examples.labels.tolist()) == (["a, b", "c"], [0, 1])
    assert examples.notes == (f"{tmp_path / 'train.csv'}: read as columns between semicolons",)
    made_files(tmp_path, dev_csv="question;context;answer;answer_start\nwho;Ann left;Ann;0\n")
    assert own("span").read(tmp_path, "dev").notes == (f"{tmp_path / 'dev.csv'}: read as columns between semicolons",)
    for delimiter in ";\t":
        made_files(tmp_path, tags_csv="words;tags\nAnn;B-PER\nleft;O\n\nHe;O\n".replace(";", delimiter))
        assert own("tagging", train="tags.csv").read(tmp_path, "train").tags == [["B-PER", "O"], ["O"]]


@pytest.mark.parametrize("test", ["text\nd\ne\n", "text\tlabel\nd\t\ne\t\n"])
def test_a_test_file_without_labels_is_predicted(tmp_path: Path, test: str) -> None:
    made_files(tmp_path, train_tsv="text\tlabel\na\tx\nb\ty\n", dev_tsv="text\tlabel\na\tx\n", test_tsv=test)
    task = own(labels=["x", "y"])
    assert task.splits(tmp_path) == ["train", "dev", "test"]
    examples = task.read(tmp_path, "test")
    assert not examples.labelled
    chosen = ClassificationPredictions(np.array([1, 0]), np.eye(2)[[1, 0]])
    [path] = task.write_predictions(tmp_path / "predictions", "test", chosen, examples)
    assert path.name == "test.tsv"
    assert path.read_text() == "index\tprediction\tprobability\ttext\n0\ty\t1.000000\td\n1\tx\t1.000000\te\n"


def test_a_test_file_in_which_some_rows_have_labels_is_no_file_without(tmp_path: Path) -> None:
    for test, line in (("text,label\na,\nb,y\n", 2), ("text,label\na,y\nb,\n", 3)):
        made_files(tmp_path, train_csv="text,label\na,x\nb,y\n", dev_csv="text,label\na,x\n", test_csv=test)
        with pytest.raises(UserError, match=rf"test.csv, line {line}: label is ''"):
            own(labels=["x", "y"]).read(tmp_path, "test")


def test_predictions_keep_the_name_of_the_id_column(tmp_path: Path) -> None:
    made_files(tmp_path, dev_csv="label,key,text\nx,k1,a\ny,k2,b\n", test_csv="key,text\nk3,c\n")
    task = own(labels=["x", "y"], columns=ColumnsConfig(id="key"))
    for split, number in (("dev", 2), ("test", 1)):
        chosen = ClassificationPredictions(np.zeros(number, np.int64), np.tile([0.75, 0.25], (number, 1)))
        [path] = task.write_predictions(tmp_path / "out", split, chosen, task.read(tmp_path, split))
        label = "label\t" if split == "dev" else ""
        assert path.read_text().splitlines()[0] == f"key\tprediction\t{label}probability\ttext"
    assert path.read_text().splitlines()[1] == "k3\tx\t0.750000\tc"
    task = own("regression", columns=ColumnsConfig(id="key"))
    [path] = task.write_predictions(tmp_path / "out", "test", np.array([0.5], np.float32), task.read(tmp_path, "test"))
    assert path.read_text() == "key\tprediction\ttext\nk3\t0.5\tc\n"


def test_a_test_file_with_labels_is_scored_under_the_rows_own_ids(tmp_path: Path) -> None:
    made_files(tmp_path, test_csv=PAIRS_CSV)
    task = own(labels=["false", "true"], columns=PAIRS, metrics=["macro_f1", "accuracy"])
    examples = task.read(tmp_path, "test")
    assert examples.labelled
    chosen = ClassificationPredictions(np.array([1, 1]), np.array([[0.25, 0.75], [0.0, 1.0]]))
    assert task.main_metric == "macro_f1"
    assert task.score(chosen, examples) == {"macro_f1": pytest.approx(1 / 3), "accuracy": 0.5}
    [path] = task.write_predictions(tmp_path / "predictions", "test", chosen, examples)
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    assert [line[:4] for line in lines[1:]] == [["b", "true", "true", "0.750000"], ["a", "true", "false", "1.000000"]]
    assert lines[0][4:] == ["text_a", "text_b"]
    assert [line[4:] for line in lines[1:]] == [[*map(str, pair)] for pair in examples.texts]


def test_scores_and_their_range(tmp_path: Path) -> None:
    made_files(tmp_path, train_jsonl='{"text": "a", "label": -2.5}\n{"text": "b", "label": 7}\n')
    free = own("regression")
    np.testing.assert_array_equal(free.read(tmp_path, "train").labels, np.array([-2.5, 7], np.float32))
    assert free.format_predictions(np.array([99.0]), None)[0].score == 99
    within = own("regression", score_range=[-3, 7])
    assert within.read(tmp_path, "train").labels.tolist() == [-2.5, 7]
    assert within.format_predictions(np.array([99.0]), None)[0].score == 7


def test_written_scores_keep_their_order(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": "a", "label": label}) + "\n" for label in (1234567.8, 1234568.9, 2e-7))
    made_files(tmp_path, dev_jsonl=rows)
    task = own("regression")
    [path] = task.write_predictions(
        tmp_path, "dev", np.array([3e-7, 2e-7, 1e-7], np.float32), task.read(tmp_path, "dev")
    )
    _, *lines = (line.split("\t") for line in path.read_text().splitlines())
    assert [line[1] for line in lines] == ["0.0000003", "0.0000002", "0.0000001"]
    assert [line[2] for line in lines] == ["1234567.8", "1234568.9", "0.0000002"]


def test_a_data_set_is_read_by_the_names_of_its_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["ham", "spam"])})
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=labels)
    saved = datasets.DatasetDict({"train": table, "validation": table, "unsupervised": table})
    saved.save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: saved)
    for place in (tmp_path / "saved", Path("hub:me/mail")):
        assert own().splits(place) == ["train", "dev"]
        assert own().read(place, "train").label_words == ("ham", "spam")
        assert own(labels=["ham", "spam"]).read(place, "dev").labels.tolist() == [1, 0]
        assert own(test="unsupervised").splits(place)[-1] == "test"
        assert "has no split 'dev'" in error_of(own(train="dev"), place)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("text,tag\na,x\n", "train.csv, line 1: no 'label' among 'text', 'tag': set data.columns.label"),
        ("text,label\n", "train.csv has no rows"),
        ("text,label\n ,x\n", "train.csv, line 2: text is empty"),
        ("text,label\na,x\nb,\n", "train.csv, line 3: label is ''"),
        ('text,label\na,x\nb,"x\ty"\n', r"train.csv, line 3: label is 'x\ty'"),
        ("text,label\na,x\nb,x\n", "every training row has the label 'x'"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_sentence(tmp_path: Path, train: str, words: str) -> None:
    assert words in error_of(own(), made_files(tmp_path, train_csv=train))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "b"}', "line 2: no 'label' among 'text': add it there, or set data.columns.label to the right one"),
        ('{"text": 3, "label": 1}', "line 2: text is 3: it must be a text"),
        ('{"text": null, "label": 1}', "line 2: text is missing (null): write it or remove the line"),
        ('{"text": "b", "label": 1.5}', "line 2: label is 1.5: it must be a text without tabs and line ends, or a"),
        ('{"text": "b", "label": null}', "line 2: label is missing (null): write it or remove the line"),
        ('{"text": "b" "label": 1}', "line 2: not JSON (Expecting ',' delimiter): fix or remove the line"),
    ],
)
def test_what_is_wrong_with_a_line_of_jsonl_is_one_sentence(tmp_path: Path, line: str, words: str) -> None:
    path = made_files(tmp_path, train_jsonl=f'{{"text": "a", "label": 0}}\n{line}\n') / "train.jsonl"
    assert f"{path}, {words}" in error_of(own(), tmp_path)


def test_what_is_wrong_with_labels_scores_and_ids_is_one_sentence(tmp_path: Path) -> None:
    made_files(tmp_path, train_tsv="text\tlabel\na\t1\nb\t0\n", dev_tsv="text\tlabel\na\t1\nb\t7\n")
    task = own().fit(own().read(tmp_path, "train"))
    unknown = "dev.tsv, line 3: label is '7', but the labels are '0', '1': fix it, or list all labels as data.labels"
    assert unknown in error_of(task, tmp_path, "dev")
    assert has_all(
        error_of(own(labels=["0", "1"], train="dev.tsv"), tmp_path), "line 3: label is '7'", "labels are '0', '1'"
    )
    scores = own("regression", score_range=[0, 5])
    assert has_all(error_of(scores, tmp_path, "dev"), "dev.tsv, line 3: label is '7'", "0 to 5")
    for word in ("nan", "inf", "1e39", "high"):
        made_files(tmp_path, train_tsv=f"text\tlabel\na\t{word}\n")
        assert f"train.tsv, line 2: label is '{word}': " in error_of(own("regression"), tmp_path)
    made_files(tmp_path, train_csv=PAIRS_CSV + "b,r,s,true\n")
    twice = "line 4: number 'b' is on line 2 already: give each row its own id, or leave data.columns.id out"
    assert twice in error_of(own(train="train.csv", columns=PAIRS), tmp_path)


def test_files_that_are_missing_or_there_twice(tmp_path: Path) -> None:
    assert has_all(
        error_of(own(), tmp_path, "dev"),
        f"{tmp_path} has no dev.tsv, dev.txt, dev.csv, dev.jsonl, dev.parquet: set data.dev",
    )
    assert has_all(error_of(own(dev="dev2.csv"), tmp_path, "dev"), "dev2.csv does not exist", "data.dev")
    made_files(tmp_path, dev_tsv="", dev_csv="")
    assert "dev.tsv and dev.csv: set data.dev" in error_of(own(), tmp_path, "dev")


def test_metrics_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.metrics has 'pearson'.*f1"):
        own(metrics=["pearson"])
    with pytest.raises(UserError, match=r"data\.metrics has 'f1'"):
        own("regression", metrics=["f1"])
    made_files(tmp_path, train_tsv="text\tlabel\na\tx\nb\ty\nc\tz\n")
    assert has_all(error_of(own(metrics=["f1"]), tmp_path), "f1", "there are 3: use macro_f1")


def test_keys_that_a_task_does_not_read_are_refused() -> None:
    for name, data in (
        ("sst2", {"train": "a.tsv"}), ("squad", {"columns": PAIRS}), ("tagging", {"metrics": ["f1"]}),
        ("span", {"score_range": [0, 1]}), ("classification", {"score_range": [0, 1]}),
    ):  # fmt: skip
        [key] = data
        with pytest.raises(UserError, match=rf"data\.{key} is set.*task is {name}"):
            own(name, dir="x", **data)
    with pytest.raises(UserError, match=r"data.score_range is \[5, 0\]"):
        TaskDataConfig(dir="x", score_range=[5, 0]).check()
    with pytest.raises(UserError, match=r"data.labels is \['a', 'a'\]"):
        TaskDataConfig(dir="x", labels=["a", "a"]).check()


def test_a_registered_task_is_found_and_the_toolkits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"task is 'mine'.*register_task"):
        find_task("mine")
    monkeypatch.setattr("bert.tasks.registry.TASKS", dict(TASKS))
    register_task(CustomClassification(name="mine"))
    assert find_task("mine").name == "mine"
    with pytest.raises(ValueError, match="rte is a built-in task"):
        register_task(CustomClassification(name="rte"))


@pytest.mark.parametrize("name", ["valid", "validation", "val"])
def test_a_dev_file_goes_by_any_of_its_usual_names(tmp_path: Path, name: str) -> None:
    made_files(tmp_path, train_csv="text,label\na,x\nb,y\n")
    (tmp_path / f"{name}.csv").write_text("text,label\nc,x\n")
    assert own().splits(tmp_path) == ["train", "dev"]
    assert list(own(labels=["x", "y"]).read(tmp_path, "dev").texts) == ["c"]
    (tmp_path / "dev.csv").write_text("text,label\nd,x\n")
    assert list(own(labels=["x", "y"]).read(tmp_path, "dev").texts) == ["d"], "which comes first"


def test_a_table_without_a_header_is_told_of_the_names_of_columns(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv="a,x\nb,y\n")
    error = error_of(own(), tmp_path)
    assert "set data.columns.text_a and data.columns.label to the right ones, or, if the first line is no" in error
    assert "header, name all columns in order as data.column_names" in error


NAMES = ["not_equivalent", "equivalent"]


def declared_rows(labels: list[int]) -> datasets.Dataset:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)})
    texts = [f"text {number}" for number in range(len(labels))]
    return datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)


def categorical_rows() -> pd.DataFrame:
    words = [NAMES[label] for label in (1, 0, 1)]
    label = pd.Categorical(words, categories=[NAMES[0], "unused", NAMES[1]])
    return pd.DataFrame({"text": ["a", "b", "c"], "label": label})


@pytest.mark.parametrize("rows", [declared_rows([1, 0, 1]), categorical_rows()])
def test_rows_in_memory_keep_the_declared_order_of_labels(tmp_path: Path, rows: object) -> None:
    for name, content in table_files(rows, "train").items():
        (tmp_path / name).write_text(content)
    task = own(metrics=["f1"])
    train = task.read(tmp_path, "train")
    fitted = task.fit(train)
    assert (fitted.labels, train.labels.tolist()) == (tuple(NAMES), [1, 0, 1])
    assert fitted.metric_labels == {"f1": "equivalent"}
    assert own(labels=sorted(NAMES)).read(tmp_path, "train").labels.tolist() == [0, 1, 0]  # a run that began before


def test_a_saved_data_set_keeps_the_declared_order_of_labels(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": declared_rows([1, 1, 0]), "validation": declared_rows([1] * 3)}).save_to_disk(
        str(tmp_path)
    )
    task = own(metrics=["f1"])
    task = task.fit(task.read(tmp_path, "train"))
    assert (task.labels, task.output_names) == (tuple(NAMES), tuple(NAMES))
    predictions = ClassificationPredictions(np.array([1, 0, 0]), np.eye(2)[[1, 0, 0]])
    assert task.score(predictions, task.read(tmp_path, "dev"))["f1"] == 0.5
    datasets.DatasetDict({"train": declared_rows([1, 1])}).save_to_disk(str(tmp_path / "one"))
    assert "label 'equivalent'" in error_of(own(), tmp_path / "one")


@pytest.mark.parametrize("rows", ["saved", "in memory"])
def test_rows_of_a_data_set_without_a_label_are_left_out(tmp_path: Path, rows: str) -> None:
    declared = declared_rows([0, -1, 1, -1])
    if rows == "saved":
        datasets.DatasetDict({"train": declared}).save_to_disk(str(tmp_path))
    else:
        for name, content in table_files(declared, "train").items():
            (tmp_path / name).write_text(content)
    train = own().read(tmp_path, "train")
    assert (train.labels.tolist(), train.ids) == ([0, 1], ["0", "2"])
    assert "2 rows without a label left out" in train.notes[0] and "2, 4" in train.notes[0]


def test_rows_that_are_not_scored_are_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr("bert.errors.LOGGER.propagate", True)
    examples = own(labels=NAMES).labelled_examples(declared_rows([0, -1, 1]))
    assert examples.labels.tolist() == [0, 1]
    told = {(record.levelname, record.getMessage()) for record in caplog.records if record.name == "bert"}
    assert told == {("WARNING", "data: 1 row without a label left out (row 2)")}


def rows_of(kind: str, rows: list[tuple[object, object]]) -> dict[str, str]:
    """Rows of text and label as the file of a kind, or as the files of a data frame."""
    frame = pd.DataFrame(rows, columns=["text", "label"])
    if kind == "frame":
        return table_files(frame, "train")
    if kind == "csv":
        return {"train.csv": frame.to_csv(index=False)}
    return {"train.jsonl": "".join(json.dumps(dict(zip(frame, row, strict=True))) + "\n" for row in rows)}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "frame"])
def test_all_bad_rows_are_reported_at_once(tmp_path: Path, kind: str) -> None:
    rows = [("a", "x"), (None, "y"), ("c", None), ("d", "y"), (" ", "x"), ("e", math.nan)]
    for name, content in rows_of(kind, rows).items():
        (tmp_path / name).write_text(content)
    first = 3 if kind == "csv" else 2
    message = error_of(own(), tmp_path)
    assert f"line {first}: text is" in message
    assert message.endswith(f"4 lines have such errors: {first}, {first + 1}, {first + 3}, {first + 4}")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "frame"])
def test_whole_floats_are_whole_numbers(tmp_path: Path, kind: str) -> None:
    for name, content in rows_of(kind, [("a", 1.0), ("b", 0.0), ("c", 1.0)]).items():
        (tmp_path / name).write_text(content)
    train = own().read(tmp_path, "train")
    assert (train.label_words, train.labels.tolist()) == (("0", "1"), [1, 0, 1])
    assert own(labels=["0.0", "1.0"]).read(tmp_path, "train").labels.tolist() == [1, 0, 1]  # a run that began before


def test_labels_that_are_not_all_whole_numbers_stay_as_they_are(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv="text,label\na,1.0\nb,1.5\n")
    assert own().read(tmp_path, "train").label_words == ("1.0", "1.5")


def test_labels_that_may_mean_none_are_noted(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv="text,label\na,nan\nb,x\nc,NaN\n")
    assert [note.split(": ")[1][:25] for note in own().read(tmp_path, "train").notes] == [
        "1 row has the label 'NaN'",
        "1 row has the label 'nan'",
    ]
    made_files(tmp_path, train_csv="text,label\na,-1\nb,0\nc,1\n")
    assert "label '-1'" in own().read(tmp_path, "train").notes[0]
    made_files(tmp_path, train_csv="text,label\na,-1\nb,1\n")
    assert not own().read(tmp_path, "train").notes


@pytest.mark.parametrize("name", ["classification", "multilabel"])
def test_swapped_columns_are_refused(tmp_path: Path, name: str) -> None:
    rows = "".join(f"{'good' if row % 2 else 'bad'},a text with the number {row}\n" for row in range(60))
    made_files(tmp_path, train_csv=f"text,label\n{rows}")
    assert has_all(error_of(own(name), tmp_path), "60 labels in 60 rows, such as 'a", "number 0'")
    listed = [f"a text with the number {row}" for row in range(60)]
    assert len(own(name, labels=listed).read(tmp_path, "train")) == 60


def test_a_dev_file_with_swapped_columns_names_one_text(tmp_path: Path) -> None:
    rows = "".join(f"good,a text with the number {row} that is longer than a name should be\n" for row in range(25))
    made_files(tmp_path, train_csv="text,label\na,good\nb,bad\n", dev_csv=f"text,label\n{rows}")
    task = own().fit(own().read(tmp_path, "train"))
    message = error_of(task, tmp_path, "dev")
    assert "line 2: label is 'a text" in message and "25 lines have such errors" in message
    assert len(message.removeprefix(str(tmp_path))) < 300


def test_labels_that_are_never_predicted_are_named(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv="text,label\n" + "".join(f"t{row},{'abcde'[row % 5]}\n" for row in range(20)))
    task = own()
    train = task.read(tmp_path, "train")
    task = task.fit(train)
    partly = np.where(train.labels == 1, 1, 3)
    assert task.remarks(ClassificationPredictions(partly, np.eye(5)[partly]), train) == [
        "labels 'a', 'c', 'e' never predicted"
    ]
    same = np.full(20, 3)
    [_, baseline] = task.remarks(ClassificationPredictions(same, np.eye(5)[same]), train)
    assert baseline == "no better than the baseline majority class: accuracy 0.2000 against 0.2000"
    assert not task.remarks(ClassificationPredictions(train.labels, np.eye(5)[train.labels]), train)


@pytest.mark.parametrize("name", ["classification", "tagging"])
@pytest.mark.parametrize(
    ("files", "folder", "words"),
    [
        ({}, "missing", "missing does not exist: set data.dir"),
        ({"train.csv": b"text,label\n"}, "train.csv", "train.csv is a file"),
        ({"train.xlsx": b"PK\3\4"}, ".", "train.xlsx has an unsupported format; save the sheet"),
        ({"train.parquet": b"PAR1"}, ".", "train.parquet is not a Parquet file"),
        ({"train.json": b"[]"}, ".", "train.json has an unsupported format; write one JSON"),
        ({"Train.csv": b"text,label\n"}, ".", "data.train to the file of train, for example Train.csv"),
        ({"train.csv": b"PK\3\4"}, ".", "a ZIP archive"),
        ({"train.jsonl": b"[\n{}\n]\n"}, ".", "line 1: not an object"),
    ],
)
def test_files_of_other_kinds_are_named(
    tmp_path: Path, name: str, files: dict[str, bytes], folder: str, words: str
) -> None:
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    task = own(name)
    assert task.splits(tmp_path / folder) == ["train"]
    assert words in error_of(task, tmp_path / folder)
