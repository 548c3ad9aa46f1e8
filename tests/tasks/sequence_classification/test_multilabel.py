"""Multi-label classification: reading, thresholds, scores, written files and errors."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from scipy.special import expit
from sklearn.metrics import f1_score, log_loss

from bert.config import ColumnsConfig, FinetuneConfig, TaskDataConfig
from bert.errors import UserError
from bert.metrics.calibration import calibration
from bert.tasks import TASKS, make_task
from bert.tasks.registry import published_task
from bert.tasks.sequence_classification import CustomMultilabel, Examples, Labels, lexical_baseline
from bert.tasks.sequence_classification.multilabel import best_thresholds
from bert.tasks.split_facts import label_facts
from bert.tasks.weighted_scores import reliability
from tests.helpers import made_files

NAMES = ("bill", "login", "speed")
TRAIN = "text,label\na,login;bill\nb,\nc, bill \nd,speed;bill\n"
ROWS = [[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1]]
LOGITS = np.array([[3.0, 1.0, -2.0], [-3.0, -2.0, -2.5], [2.0, -1.0, -3.0], [1.0, 0.5, -1.0]], np.float32)


def own(name: str = "multilabel", **data: object) -> CustomMultilabel:
    return make_task(FinetuneConfig(task=name, data=TaskDataConfig(**data)))


def fitted(folder: Path, **data: object) -> tuple[CustomMultilabel, Examples]:
    made_files(folder, train_csv=TRAIN)
    train = own(**data).read(folder, "train")
    return own(**data).fit(train), train


def error_of(task: CustomMultilabel, folder: Path, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        task.fit(task.read(folder, split))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_cell_is_a_list_or_has_labels_with_semicolons_between(tmp_path: Path) -> None:
    lists = (["login", "bill"], [], ["bill"], "speed; bill")
    lines = [json.dumps({"text": text, "label": cell}) + "\n" for text, cell in zip("abcd", lists, strict=True)]
    made_files(tmp_path, a_csv=TRAIN, a_tsv=TRAIN.replace(",", "\t"), a_jsonl="".join(lines))
    for kind in ("csv", "tsv", "jsonl"):
        examples = own(train=f"a.{kind}").read(tmp_path, "train")
        assert (examples.labels.tolist(), examples.label_words) == (ROWS, NAMES), kind
    made_files(tmp_path, b_jsonl='{"text": "a", "label": null}\n{"text": "b", "label": 7}\n')
    assert own(train="b.jsonl").read(tmp_path, "train").labels.tolist() == [[0], [1]]


def test_a_list_of_class_labels_of_a_data_set(tmp_path: Path) -> None:
    features = {"text": datasets.Value("string"), "label": datasets.Sequence(datasets.ClassLabel(names=[*NAMES]))}
    columns = {"text": ["a", "b", "c"], "label": [[1, 0], [], [2]]}
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "saved"))
    assert own().read(tmp_path / "saved", "train").labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_the_training_rows_tell_the_labels_and_config_yaml_keeps_them(tmp_path: Path) -> None:
    task, train = fitted(tmp_path)
    assert (task.labels, task.num_labels, task.problem_type) == (NAMES, 3, "multi_label_classification")
    tuned = task.tune(LOGITS, None, train)
    data = tuned.to_config(TaskDataConfig(dir="x"))
    assert (data.labels, task.to_config(TaskDataConfig()).label_thresholds) == ([*NAMES], None)
    assert own(**vars(data)).label_thresholds == tuned.label_thresholds
    facts = [("labels", "train bill 75%, login 25%, speed 25%, no label 25%\ndev bill 75%, login 25%, speed 25%, "
              "no label 25%")]  # fmt: skip
    assert label_facts(task, {"train": train, "dev": train}, data) == facts


def test_one_temperature_calibrates_all_labels() -> None:
    """The labels are drawn at temperature 2.5; the fitted one has the least binary cross-entropy of scikit-learn."""
    random = np.random.default_rng(0)
    logits = (5 * random.normal(size=(400, 3))).astype(np.float32)
    labels = (random.random(logits.shape) < expit(logits / 2.5)).astype(np.int8)
    dev = Examples([str(row) for row in range(400)], None, labels, [str(row) for row in range(400)])
    task = own(labels=[*NAMES])
    plain = task.tune(logits, None, dev)
    tuned = dataclasses.replace(task, calibration="temperature").tune(logits, None, dev)
    assert tuned.temperature == pytest.approx(2.5, rel=0.15)
    assert tuned.to_config(TaskDataConfig()).calibration == tuned.temperature

    def loss(divisor: float) -> float:
        return float(log_loss(labels.ravel(), expit(logits.astype(np.float64).ravel() / divisor)))

    assert loss(tuned.temperature) <= min(loss(tuned.temperature * factor) for factor in (0.98, 0.999, 1.001, 1.02))
    before, after = (one.predict(logits, None, dev) for one in (plain, tuned))
    np.testing.assert_allclose(after.probabilities, expit(logits / tuned.temperature), rtol=1e-5)
    assert tuned.score(after, dev) == plain.score(before, dev), "no label changes"
    eces = [calibration(reliability(tuned, one, dev)).ece for one in (before, after)]
    assert eces[1] < eces[0] / 2


def test_a_test_file_has_labels_if_any_row_has(tmp_path: Path) -> None:
    made_files(tmp_path, a_csv="text\na\n", b_csv="text,label\na,\nb,\n", c_csv="text,label\na,\nb,bill\n",
               d_jsonl='{"text": "a", "label": []}\n')  # fmt: skip
    labels = {file: own(test=file, labels=[*NAMES]).read(tmp_path, "test").labels
              for file in ("a.csv", "b.csv", "c.csv", "d.jsonl")}  # fmt: skip
    assert labels["c.csv"].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert {file for file, read in labels.items() if read is None} == {"a.csv", "b.csv", "d.jsonl"}


def test_thresholds_are_tuned_on_dev_and_kept_for_test(tmp_path: Path) -> None:
    task, dev = fitted(tmp_path)
    assert task.predict(LOGITS, None, dev).thresholds.tolist() == [0.5] * 3, "not those of the rows to score"
    tuned = task.tune(LOGITS, None, dev)
    assert tuned.label_thresholds[0] == 0.5
    assert tuned.label_thresholds[2] == pytest.approx((1 / (1 + np.e) + 1 / (1 + np.exp(2))) / 2)
    decided = tuned.predict(LOGITS, None, dev)
    assert decided.labels.astype(int).tolist() == ROWS
    assert tuned.score(decided, dev) == {"micro_f1": 1.0, "macro_f1": 1.0}
    others = dataclasses.replace(dev, labels=1 - dev.labels)
    assert tuned.predict(LOGITS, None, others).thresholds.tolist() == [*tuned.label_thresholds]
    assert tuned.tune(LOGITS, None, others) is tuned
    for thresholds in ([0.2], [0.2, 0.2, 0.2]):
        assert (
            own(label_thresholds=thresholds, labels=[*NAMES]).predict(LOGITS, None, dev).thresholds.tolist()
            == [0.2] * 3
        )


def test_predictions_answers_and_errors(tmp_path: Path) -> None:
    task, dev = fitted(tmp_path, label_thresholds=[0.5])
    decided = task.predict(LOGITS, None, dev)
    [path] = task.write_predictions(tmp_path, "dev", decided, dev)
    header, first, second, *_ = path.read_text().splitlines()
    assert header == "index\tprediction\tlabel\tprobability_bill\tprobability_login\tprobability_speed\ttext"
    assert (first, second) == ("0\tbill;login\tbill;login\t0.952574\t0.731059\t0.119203\ta",
                               "1\t\t\t0.047426\t0.119203\t0.075858\tb")  # fmt: skip
    answer = task.format_predictions(decided, None)[0]
    assert answer == Labels(["bill", "login"], {"bill": pytest.approx(0.952574), "login": pytest.approx(0.731059),
                                                "speed": pytest.approx(0.119203)})  # fmt: skip
    [errors] = task.write_details(tmp_path, "test", decided, dev)
    assert errors.name == "test_errors.tsv"
    assert errors.read_text() == (
        "text\tprediction\tlabel\tsurest_error\tprobability\nd\tbill;login\tbill;speed\tspeed\t0.268941\n"
    )
    classes = task.details(decided, dev)["classes"]
    assert classes["bill"] == {"precision": 1, "recall": 1, "f1": 1, "support": 3, "predicted": 3, "threshold": 0.5}
    assert classes["login"]["precision"] == 0.5
    assert list(task.details(decided, dev)) == ["classes"]


def test_the_baseline_gives_every_row_the_same_labels(tmp_path: Path) -> None:
    task, dev = fitted(tmp_path)
    assert task.baseline_scores(dev) == {"micro_f1": pytest.approx(2 * 3 / (4 + 5)), "macro_f1": pytest.approx(2 / 7)}
    by_macro, _ = fitted(tmp_path, metrics=["macro_f1"])
    assert by_macro.baseline_scores(dev) == {"macro_f1": pytest.approx((6 / 7 + 2 / 5 + 2 / 5) / 3)}
    for logits, degenerate in ((LOGITS, False), (np.zeros_like(LOGITS), True), (-LOGITS, True)):
        assert task.is_degenerate(task.tune(logits, None, dev).predict(logits, None, dev), dev) is degenerate


def test_words_alone_make_a_baseline() -> None:
    texts = ["red rose", "red wine", "blue wine", "blue sky"] * 5
    labels = np.array([[1, 0], [1, 1], [0, 1], [0, 0]] * 5, np.int8)
    rows = Examples(texts, None, labels, [str(row) for row in range(20)])
    name, scores = lexical_baseline(CustomMultilabel(labels=("red", "wine"), label_names=("red", "wine")), rows, rows)
    assert (name, scores["micro_f1"]) == ("tf_idf_logistic_regression", 1.0)


def test_class_weights_are_balanced_or_given(tmp_path: Path) -> None:
    assert fitted(tmp_path)[0].class_weights == ()
    balanced, train = fitted(tmp_path, class_weights="balanced")
    assert balanced.class_weights == (1 / 3, 3.0, 3.0)
    facts = label_facts(balanced, {"train": train, "dev": train}, TaskDataConfig())
    assert facts[1] == ("class weights", "bill 0.333, login 3, speed 3")
    assert fitted(tmp_path, class_weights=["speed=2.5"])[0].class_weights == (1.0, 1.0, 2.5)
    made_files(tmp_path, train_csv="text,label\na,x;y\nb,x\nc,x;z\n")
    always = own(class_weights="balanced")
    assert always.fit(always.read(tmp_path, "train")).class_weights == (1.0, 2.0, 2.0), "x has no rows without it"
    made_files(tmp_path, train_csv="text,label\na,x\nb,y\nc,y\nd,y\n")
    single = own("classification", class_weights="balanced")
    assert single.fit(single.read(tmp_path, "train")).class_weights == (2.0, 2 / 3)
    more = own("classification", class_weights="balanced", labels=["x", "y", "unused"])
    assert more.fit(more.read(tmp_path, "train")).class_weights[:2] == (2.0, 2 / 3), "as in scikit-learn"
    for weights, wrong in (
        ("z=2", r"data.class_weights has 'z=2', but the labels are 'x', 'y': use balanced, or LABEL=WEIGHT"),
        (["x=0"], "data.class_weights has 'x=0': set the weight to a number above 0"),
        (["x=much"], "data.class_weights has 'x=much': set the weight to a number above 0"),
    ):
        assert wrong in error_of(own("classification", class_weights=weights), tmp_path)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ('"a;;b"', "line 3: label is 'a;;b', with an empty label next to a ;: remove that ;"),
        ('"a;"', "line 3: label is 'a;', with an empty label next to a ;: remove that ;"),
        ('["a;b"]', "line 3: label has 'a;b', but ; separates labels in tables: use a name without it"),
        ("[0, 1, 0]", "line 3: label has '0' twice: list each label of the row once"),
        ('["a", 0.5]', "line 3: label is 0.5: it must be a text without tabs"),
        ('["a", ""]', "line 3: label is '': it must be a text"),
        ('{"a": 1}', "line 3: label is {'a': 1}: it must be a text"),
    ],
)
def test_what_is_wrong_with_a_cell_is_one_sentence(tmp_path: Path, cell: str, words: str) -> None:
    head = '{"text": "a", "label": "a"}\n{"text": "b", "label": []}\n'
    made_files(tmp_path, train_jsonl=f'{head}{{"text": "c", "label": {cell}}}\n')
    assert words in error_of(own(), tmp_path)


def test_what_is_wrong_with_labels_and_settings_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    task, _ = fitted(tmp_path)
    made_files(tmp_path, dev_csv="text,label\na,bill;other\n", none_csv="text,label\na,\nb,\n",
               same_csv="text,label\na,x;y\nb,y;x\n", list_jsonl='{"text": "a", "label": ["x", "y"]}\n')  # fmt: skip
    unknown = "line 2: label is 'other', but the labels are 'bill', 'login', 'speed': fix it, or list all labels"
    assert unknown in error_of(task, tmp_path, "dev")
    assert "data.columns.label" in error_of(own(train="none.csv"), tmp_path)
    same = "every training row has the same labels ('x', 'y'): add rows without one of them"
    assert same in error_of(own(train="same.csv", labels=["x", "y", "z"]), tmp_path)
    single = "line 1: label is a list, but classification has one label per row: set task to multilabel, or fix the row"
    assert single in error_of(own("classification", train="list.jsonl"), tmp_path)
    two = "data.label_thresholds has 2 numbers, but there are 3 labels: set one per label, or one for all labels"
    assert two in error_of(own(label_thresholds=[0.5, 0.5]), tmp_path)
    with pytest.raises(UserError, match=r"data\.labels has 'a;b'"):
        own(labels=["a;b"])
    with pytest.raises(UserError, match=r"data\.metrics has 'accuracy'.*micro_f1, macro_f1"):
        own(metrics=["accuracy"])
    for key, value in (
        ("label_thresholds", [0.5]),
        ("class_weights", "balanced"),
        ("labels", ["a", "b"]),
        ("doc_stride", 7),
        ("null_score_diff_threshold", 2.0),
        ("invalid_tags", "count"),
    ):
        with pytest.raises(UserError, match=rf"data\.{key} is set.*task is sst2"):
            own("sst2", dir="x", **{key: value})
    with monkeypatch.context() as patch:
        patch.setitem(TASKS, "mine", dataclasses.replace(TASKS["regression"], name="mine"))
        assert own("mine", doc_stride=7).data.doc_stride == 7, "a registered task may read any key"
    with pytest.raises(UserError, match=r"data\.labels is \['a', 'a '\]"):
        TaskDataConfig(dir="x", labels=["a", "a "]).check()
    with pytest.raises(UserError, match=r"data\.columns\.text_a and text_b are both 'text'"):
        TaskDataConfig(dir="x", columns=ColumnsConfig(text_a="text", text_b="text")).check()
    with pytest.raises(UserError, match=r"data.label_thresholds is 1.5.*least 0.*most 1"):
        TaskDataConfig(dir="x", label_thresholds=[1.5]).check()


def test_a_published_model_answers_with_its_thresholds_or_one_half() -> None:
    for thresholds, expected in (((), ["bill", "login"]), ((0.99, 0.5, 0.1), ["login", "speed"])):
        task = published_task("sequence_classification", "mine", NAMES, "multi_label_classification", None, thresholds)
        examples = task.examples_from_inputs(["a", ("b", "c")])
        assert task.format_predictions(task.predict(LOGITS[:2], None, examples), examples)[0].labels == expected
    assert published_task("sequence_classification", "mine", ("one",), "multi_label_classification").num_labels == 1


def test_columns_of_pairs_and_ids(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv="id,one,two,tags\nk,a,b,x;y\nl,c,d,x\n")
    columns = ColumnsConfig(text_a="one", text_b="two", label="tags", id="id")
    task = own(columns=columns)
    examples = task.read(tmp_path, "train")
    assert (examples.texts, examples.ids, task.input_columns) == ([("a", "b"), ("c", "d")], ["k", "l"],
                                                                  ("text_a", "text_b"))  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([[0, 1], [1, 0], [0, 1], []], [[0, 1], [1, 0], [0, 1], [0, 0]]),
        ([[0, 1, 1], [1.0, 0.0, 0.0], None], [[0, 1, 1], [1, 0, 0], [0, 0, 0]]),
        ([[True, False], [False, False]], [[1, 0], [0, 0]]),
        (["[0, 1]", "[1, 0]"], [[0, 1], [1, 0]]),
        (["0;1;1", "1;0;0"], [[0, 1, 1], [1, 0, 0]]),
        ([[0], [1], [0, 1]], [[1, 0], [0, 1], [1, 1]]),  # names of labels
        (["['x', 'y']", "['y']", "[]"], [[1, 1], [0, 1], [0, 0]]),
    ],
)
def test_multi_hot_lists_are_read_as_such(tmp_path: Path, cells: list[object], expected: list[list[int]]) -> None:
    lines = (json.dumps({"text": "a", "label": cell}) + "\n" for cell in cells)
    made_files(tmp_path, train_jsonl="".join(lines))
    assert own().read(tmp_path, "train").labels.tolist() == expected


def test_multi_hot_lists_have_the_given_names_in_their_order(tmp_path: Path) -> None:
    made_files(tmp_path, train_csv='text,label\na,"[0, 1, 1]"\nb,"[1, 0, 0]"\n')
    task = own(labels=["z", "x", "y"])
    assert task.fit(task.read(tmp_path, "train")).labels == ("z", "x", "y")
    assert own().read(tmp_path, "train").label_words == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert "3 numbers, but there are 2 labels" in error_of(own(labels=["a", "b"]), tmp_path)


def test_a_run_whose_labels_are_called_0_and_1_reads_names(tmp_path: Path) -> None:
    made_files(tmp_path, dev_jsonl='{"text": "a", "label": [0, 1]}\n{"text": "b", "label": [1, 0]}\n')
    assert own(labels=["0", "1"]).read(tmp_path, "dev").labels.tolist() == [[1, 1], [1, 1]]


def test_a_column_for_each_label(tmp_path: Path) -> None:
    made_files(
        tmp_path,
        train_csv="id,text,toxic,rude\n7,a,0,1\n8,b,1.0,0.0\n9,c,0,0\n10,d,-1,-1\n",
        dev_csv="id,text,rude,toxic\n1,a,1,0\n",
        test_csv="id,text\n1,a\n",
    )
    task = own(labels=["toxic", "rude"], columns=ColumnsConfig(id="id"))
    train = task.read(tmp_path, "train")
    assert (train.labels.tolist(), train.ids) == ([[0, 1], [1, 0], [0, 0]], ["7", "8", "9"])
    assert "1 row with -1 for all labels skipped" in train.notes[0]
    task = task.fit(train)
    assert task.read(tmp_path, "dev").labels.tolist() == [[0, 1]]
    assert not task.read(tmp_path, "test").labelled
    assert "data.labels" in error_of(own(), tmp_path)
    made_files(tmp_path, train_csv="text,toxic,rude\na,0,0.7\nb,1,\nc,0,1\n")
    wrong = error_of(own(labels=["toxic", "rude"]), tmp_path)
    assert "line 2: rude is '0.7': write 1" in wrong and wrong.endswith("2 lines have such errors: 2, 3")


def best_by_search(probabilities: np.ndarray, labels: np.ndarray, average: str) -> float:
    """The best F1 over all combinations of one threshold per label."""
    choices = [[-1.0, *np.unique(column) + 1e-9] for column in probabilities.T]
    return max(
        f1_score(labels, probabilities > np.array(chosen), average=average, zero_division=0)
        for chosen in itertools.product(*choices)
    )


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("average", ["micro", "macro"])
def test_no_thresholds_are_better(average: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = (rng.random((7, 3)) < [0.6, 0.3, 0.1]).astype(np.int8)
    labels[0, 0] = 1
    probabilities = np.round(np.clip(0.3 * labels + rng.random((7, 3)) * 0.7, 0, 1), 1)  # some are the same
    thresholds = best_thresholds(probabilities, labels, micro=average == "micro")
    reached = f1_score(labels, probabilities >= thresholds, average=average, zero_division=0)
    assert reached == pytest.approx(best_by_search(probabilities, labels, average), abs=1e-9)


def test_of_equal_thresholds_the_one_nearest_to_one_half_is_taken() -> None:
    probabilities = np.array([[0.9, 0.3, 0.2, 0.8], [0.6, 0.2, 0.1, 0.7], [0.2, 0.1, 0.3, 0.6]])
    labels = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    for micro in (False, True):
        thresholds = best_thresholds(probabilities, labels, micro)
        np.testing.assert_allclose(thresholds[:3], [0.5, 0.15, 0.5])
    assert best_thresholds(probabilities, labels, micro=True)[3] == 0.9, "never, where no row has the label"
    assert best_thresholds(probabilities, labels, micro=False)[3] == 0.5, "no threshold gives it a score"


def test_certain_probabilities_keep_their_order() -> None:
    neighbours = np.array([[1.0], [np.nextafter(0.25, 1)], [0.25], [0.0]])
    thresholds = best_thresholds(neighbours, np.array([[1], [1], [0], [0]]), micro=False)
    assert (neighbours >= thresholds)[:, 0].tolist() == [True, True, False, False]
    always = best_thresholds(np.zeros((2, 1)), np.array([[1], [0]]), micro=True)
    assert (np.zeros((2, 1)) >= always).all()
    assert (np.ones((2, 1)) >= best_thresholds(np.ones((2, 1)), np.array([[1], [0]]), micro=True)).all()
