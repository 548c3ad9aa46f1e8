"""Labelled rows from the source code of a made-up environment."""

import json
import random
from pathlib import Path

import pytest

from bert.data.corpus.docstrings import Module
from bert.data.corpus.functions import module_functions
from bert.errors import UserError
from bert.tasks import docstring_tasks
from bert.tasks.docstring_tasks import (
    DOCSTRING_TASKS,
    collect_rows,
    parameters,
    which_parameter,
    word_order,
    write_docstring_task,
)

SOURCE = '''
def scale(array, Factor=1):
    """Multiplies the values of the given `array` by a constant.

    The result has the shape of ``array``, times Factor. It is short.

    Parameters
    ----------
    array : ndarray
        Values to be multiplied.
    Factor : float
        The constant to multiply by

    Returns
    -------
    ndarray
        A new array of products. More.
    """
'''


@pytest.fixture
def functions():
    return module_functions(SOURCE.encode())


def test_parameters_are_tagged_without_their_markup(functions) -> None:
    rows = list(parameters(functions, random.Random(0)))
    assert [" ".join(row["words"]) for row in rows] == [
        "multiplies the values of the given array by a constant .",
        "the result has the shape of array , times factor .",
        "a new array of products .",
    ]
    tagged = [[word for word, tag in zip(*row.values(), strict=True) if tag == "B-PARAMETER"] for row in rows]
    assert tagged == [["array"], ["array", "factor"], ["array"]]


def test_questions_are_about_sentences_with_one_parameter(functions) -> None:
    rows = list(which_parameter(functions, random.Random(0)))
    assert [row["answer"] for row in rows] == ["array", "array"]
    for row in rows:
        assert row["question"] == "which parameter of scale?"
        assert row["context"][row["answer_start"] :].startswith("array ")


def test_shuffled_sentences_keep_their_words(functions) -> None:
    sentence = "multiplies the values of the given array by a constant"
    rows = [row for seed in range(20) for row in word_order(functions, random.Random(seed))]
    rows = [row for row in rows if sorted(row["text"].split()) == sorted(sentence.split())]
    assert {row["label"] for row in rows} == {"original", "shuffled"}
    assert all((row["text"] == sentence) == (row["label"] == "original") for row in rows)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Module]:
    modules = []
    for number in range(60):
        path = tmp_path / f"m{number}.py"
        # Every tenth module repeats the first one.
        path.write_text(SOURCE.replace("constant", f"constant{'abcdefghij'[number % 10]}{'xyz'[number % 3]}"))
        modules.append(Module(f"pkg/m{number}.py", path, is_stdlib=False))
    monkeypatch.setattr(docstring_tasks, "installed_modules", lambda: modules)
    return modules


@pytest.mark.parametrize("name", DOCSTRING_TASKS)
def test_splits_share_no_row(name, environment) -> None:
    rows = collect_rows(name)
    assert {module.split for module in environment} == {"train", "dev"}
    keys = [json.dumps(sorted(str(row.get("words") or row.get("text") or row["context"]).split()))
            for split in rows.values() for row in split]  # fmt: skip
    assert keys
    assert len(keys) == len(set(keys))


def test_files_are_written_once(environment, tmp_path) -> None:
    folder = tmp_path / "rows"
    write_docstring_task("parameters", folder)
    text = (folder / "train.jsonl").read_text()
    assert json.loads(text.splitlines()[0])["tags"]
    environment.clear()
    write_docstring_task("parameters", folder)
    assert (folder / "train.jsonl").read_text() == text


def test_too_few_docstrings_name_the_key(environment, tmp_path) -> None:
    environment.clear()
    with pytest.raises(UserError, match=r"transfer parameters .*transfer to null"):
        write_docstring_task("parameters", tmp_path / "rows")
