"""The task of packages, on two small packages of the standard library."""

from pathlib import Path

import numpy as np
import pytest

from bert.config import FinetuneConfig, TaskDataConfig
from bert.data.corpus.docstrings import docstring_documents
from bert.errors import UserError
from bert.tasks import make_task
from bert.tasks.sequence_classification import custom as packages
from bert.tasks.sequence_classification.custom import Names

SOURCE = "docstrings:asyncio,email,logging"
NAMES = Names(frozenset({"numpy", "np"}), frozenset({"random", "linalg"}))


def task_of(source: str) -> packages.Packages:
    return make_task(FinetuneConfig(task="packages", data=TaskDataConfig(dir=source)))


@pytest.mark.medium
def test_rows_are_docstrings_with_their_package() -> None:
    task = task_of(SOURCE)
    train, dev = (task.read(Path(SOURCE), split) for split in ("train", "dev"))
    assert train.label_words == ("asyncio", "email", "logging")
    assert set(np.bincount(train.known_labels) > 0) == {True}
    assert np.bincount(train.known_labels).max() <= packages.MAX_ROWS
    lengths = [len(text.split()) for text in train.texts_a + dev.texts_a]
    assert min(lengths) >= packages.MIN_WORDS and max(lengths) == packages.MAX_WORDS
    assert task.splits(Path(SOURCE)) == ["train", "dev"]
    assert len(dev) > 0
    with pytest.raises(UserError, match="packages reads its own"):
        task.labelled_examples([{"text": "a", "label": "email"}])


@pytest.mark.medium
def test_dev_is_of_modules_that_pretraining_leaves_out() -> None:
    task = task_of(SOURCE)
    starts = {text[:60] for document in docstring_documents(f"{SOURCE}:train") for text in document}
    dev = task.read(Path(SOURCE), "dev")
    assert not [text for text in dev.texts_a if text[:60] in starts]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("An array of NumPy's, or np.", "An array of or"),
        ("Draw numpy.random.rand, or numpy-like things", "Draw or things"),
        ("A random number of `random` and random_state or linalg.norm", "A random number of and or"),
        ("In snp and numpyro nothing is named", "In snp and numpyro nothing is named"),
    ],
)
def test_names_are_taken_out(text: str, left: str) -> None:
    assert NAMES.remove_from(text) == left


@pytest.mark.medium
def test_names_are_those_of_packages_distributions_and_modules() -> None:
    names = Names.from_packages(frozenset({"sklearn"}), ["sklearn/linear_model/_base.py"])
    assert names.packages >= {"sklearn", "scikit", "learn", "np"}
    assert names.modules == {"sklearn", "linear", "model", "base", "py"}


@pytest.mark.medium
def test_a_package_gives_a_limited_number_of_rows_spread_over_its_modules(monkeypatch) -> None:
    whole = list(packages._rows(SOURCE, "train"))
    monkeypatch.setattr(packages, "MAX_ROWS", 10)
    some = list(packages._rows(SOURCE, "train"))
    assert len(some) == 30
    [first, *_, last] = [row for row in some if row["label"] == "email"]
    every = [row for row in whole if row["label"] == "email"]
    assert (every.index(first), every.index(last) > 0.7 * len(every)) == (0, True)


@pytest.mark.parametrize("source", ["folder", "docstrings:", "docstrings:json", "docstrings:json,email:train"])
def test_other_data_is_refused(source: str) -> None:
    with pytest.raises(UserError, match=r"set data\.dir to docstrings:PACKAGE,PACKAGE"):
        task_of(source)
