"""Rows in memory, whatever holds them, are the same lines."""

import json

import datasets
import numpy as np
import pandas as pd

from bert.tasks.columns import json_lines

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


def test_a_set_is_a_list_in_order():
    assert json_lines([{"text": "a", "labels": {"y", "x"}}], "train") == '{"text": "a", "labels": ["x", "y"]}\n'
