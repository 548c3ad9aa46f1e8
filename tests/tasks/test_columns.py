"""Rows in memory, whatever holds them, are the same lines."""

import json

import datasets
import numpy as np
import pandas as pd
import pytest

from bert.data.records import Records
from bert.errors import UserError
from bert.tasks.columns import json_lines, label_text, table_files
from bert.tasks.labelled import read_with_new_labels

ROWS = [{"text": "fine ☃", "label": "good", "weight": 0.5}, {"text": "b", "label": "bad", "weight": None}]


def test_lists_data_frames_and_data_sets_are_the_same_lines():
    lines = json_lines(ROWS, "train")
    assert [json.loads(line) for line in lines.splitlines()] == ROWS
    assert json_lines(iter(ROWS), "train") == json_lines(pd.DataFrame(ROWS), "train") == lines
    features = {
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["bad", "good"]),
        "weight": datasets.Value("float32"),
    }
    assert json_lines(datasets.Dataset.from_list(ROWS, datasets.Features(features)), "train") == lines


def test_scalars_of_numpy_are_numbers():
    assert json_lines([{"label": np.int64(3), "score": np.float32(0.5)}], "train") == '{"label": 3, "score": 0.5}\n'


def test_missing_values_of_pandas_are_null_and_bytes_no_text():
    rows = [{"text": "a", "label": pd.NA, "day": pd.NaT, "words": ["b", pd.NA]}]
    assert json_lines(rows, "train") == '{"text": "a", "label": null, "day": null, "words": ["b", null]}\n'
    rows = [{"image": b"xyz", "words": np.array(["a", b"b"], object), "more": {"key": bytearray(b"b")}}]
    assert json.loads(json_lines(rows, "train")) == {
        "image": {"bytes": 3},
        "words": ["a", {"bytes": 1}],
        "more": {"key": {"bytes": 1}},
    }
    assert json_lines([{"label": np.array("x", object)}], "train") == '{"label": "x"}\n'
    with pytest.raises(UserError, match=r'row 1: text is {"bytes": 1}: it must be a text'):
        read_with_new_labels([{"text": b"a", "label": "x"}], "dev", {})
    with pytest.raises(UserError, match="train has several columns with the name 'text'"):
        json_lines(pd.DataFrame([["a", "b"]], columns=["text", "text"]), "train")


def test_a_data_frame_may_have_a_column_of_features():
    frame = pd.DataFrame({"text": ["a"], "label": ["x"], "features": [1]})
    assert table_files(frame, "train") == {"train.jsonl": '{"text": "a", "label": "x", "features": 1}\n'}


def test_a_streaming_data_set_keeps_its_labels():
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    whole = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, -1, 0]}, features=features)
    assert table_files(whole.to_iterable_dataset(), "train") == table_files(whole, "train")


def test_categories_are_written_as_labels():
    for values in ([True, False, True], [2.0, 1.0, 2.0], ["b", "a", "b"]):
        files = table_files(pd.DataFrame({"label": pd.Series(values, dtype="category")}), "train")
        rows = [json.loads(line)["label"] for line in files["train.jsonl"].splitlines()]
        records = Records("train", iter([]))
        written = [label_text(records, 1, "label", value) for value in rows]
        [declared] = (json.loads(text)["label"] for name, text in files.items() if name != "train.jsonl")
        assert declared == sorted(set(written))


def test_a_set_is_a_list_in_order():
    assert json_lines([{"text": "a", "labels": {"y", "x"}}], "train") == '{"text": "a", "labels": ["x", "y"]}\n'
