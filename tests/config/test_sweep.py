"""The space of a sweep: its values, their sentences, and the names of trials."""

from pathlib import Path

import numpy as np
import pytest

from bert.config import FinetuneConfig
from bert.config.sweep import (
    Range,
    corners,
    earlier_trial_name,
    grid,
    parse_space,
    parse_space_options,
    trial_name,
    with_current_names,
)
from bert.config.validation import keys_of
from bert.errors import UserError

KEYS = keys_of(FinetuneConfig)
RATE = "optimizer.learning_rate"


def options(*texts):
    return parse_space_options(texts, KEYS, "--sweep")


def test_a_grid_has_all_combinations_and_a_name_for_each():
    space = options(f"{RATE}=2e-5,3.0e-5", "training.batch_size=16,1e3")
    trials = list(grid(space))
    assert trials[1] == {RATE: 2e-5, "training.batch_size": 1000}
    assert [trial_name(values) for values in trials] == [
        "learning_rate=2e-5,batch_size=16",
        "learning_rate=2e-5,batch_size=1000",
        "learning_rate=3e-5,batch_size=16",
        "learning_rate=3e-5,batch_size=1000",
    ]


@pytest.mark.parametrize(
    ("text", "values", "name"),
    [
        ("patience=2,null", [2, None], "patience=null"),
        ("data.buckets=[32,64],64", [[32, 64], [64]], "buckets=64"),
        ("lora.projections=[query,value],query", [["query", "value"], ["query"]], "projections=query"),
        ("profile=true,false", [True, False], "profile=false"),
        (f"{RATE}=0.5,1e-4", [0.5, 1e-4], "learning_rate=1e-4"),
        ("data.dir=a,'b, c'", ["a", "b, c"], "dir=b,_c-bee106"),
        (f"init={'x' * 300}", ["x" * 300], f"init={'x' * 145}-7ee1da"),
    ],
)
def test_values_are_those_of_the_command_line(text, values, name):
    space = options(text)
    assert list(space.values()) == [values]
    assert trial_name(list(grid(space))[-1]) == name


def test_keys_with_the_same_last_part_are_named_in_full():
    values = {"data.max_length": 8, "decoding.max_length": 9, "patience": 1}
    assert trial_name(values) == "data.max_length=8,decoding.max_length=9,patience=1"


def test_a_trial_has_the_name_of_earlier_versions() -> None:
    values = {"data.input_format": "sop", "training.objective": "mlm", "data.buckets": [8, 16]}
    assert trial_name(values) == "input_format=sop,objective=mlm,buckets=8+16"
    assert earlier_trial_name(values) == "objective=sop,prediction=masked,buckets=8+16"
    assert earlier_trial_name({"patience": 1}) == "patience=1"
    earlier = {"data.objective": ["nsp", "sop"], "data.prediction": ["masked", "next"], "seed": [1, 2]}
    current = {"data.input_format": ["nsp", "sop"], "training.objective": ["mlm", "clm"], "seed": [1, 2]}
    assert list(with_current_names(earlier).items()) == list(current.items())


def test_ranges_are_logarithmic_and_keep_the_type():
    space = options(f"{RATE}=1e-5..1e-4", "training.batch_size=8..64", "patience=1,2")
    assert space == {RATE: Range(1e-5, 1e-4), "training.batch_size": Range(8, 64), "patience": [1, 2]}
    assert [trial_name(values) for values in corners(space)] == [
        "learning_rate=1e-5,batch_size=8,patience=1",
        "learning_rate=1e-4,batch_size=64,patience=2",
    ]
    with pytest.raises(UserError, match=r"1e-5\.\.1e-4.*with --trials"):
        list(grid(space))


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["optimizer.learning_rat=1"], "--sweep: unknown key optimizer.learning_rat: did you mean optimizer.learning"),
        (["data.columns.text=a"], "--sweep: unknown key data.columns.text: did you mean data.columns.text_a"),
        (["optimizer=1"], "--sweep: optimizer is a section: set its keys one by one"),
        ([f"{RATE}="], f"--sweep: {RATE} has no values: use {RATE}=V1,V2,..."),
        ([RATE], f"--sweep {RATE} is no list of values: use KEY=V1,V2,..."),
        ([f"{RATE}=1,,2"], f"--sweep {RATE}=1,,2 is no list of values"),
        ([f"{RATE}=2e-5,0.00002"], f"--sweep: {RATE} has 2e-5 twice: remove one of the two"),
        ([f"{RATE}=1", f"{RATE}=2"], f"--sweep has {RATE} twice: remove one of the two"),
        ([f"{RATE}=x"], f"--sweep: {RATE}=x: a number (0.01 or 1e-2) is expected"),
        ([f"{RATE}=1e-4..1e-5"], f"--sweep: {RATE}=1e-4..1e-5: use bounds above 0, the lower one first"),
        ([f"{RATE}=0..1"], "use bounds above 0"),
        ([f"{RATE}=1e-5..1e-4,1"], "has a range and other values: use one range, or values alone"),
        (["data.metrics=f1,accuracy"], "data.metrics cannot be swept, since the first one compares all trials"),
        (["output_dir=a,b"], "output_dir cannot be swept, since each trial has a separate folder in it: remove it"),
    ],
)
def test_what_cannot_be_swept_is_one_sentence(texts, sentence):
    with pytest.raises(UserError) as caught:
        options(*texts)
    assert sentence in str(caught.value)


def test_python_values_are_lists_or_a_range():
    space = {RATE: np.array([1e-5, 2e-5]), "init": [Path("a")], "data.buckets": [[8], [8, 16]], "patience": "1..4"}
    assert parse_space(space, KEYS, "space") == {
        RATE: [1e-5, 2e-5],
        "init": ["a"],
        "data.buckets": [[8], [8, 16]],
        "patience": Range(1, 4),
    }
    for wrong in ({}, [1], {RATE: 1e-5}, {RATE: "1e-5"}, {RATE: []}):
        with pytest.raises(UserError, match=r"^space"):
            parse_space(wrong, KEYS, "space")
