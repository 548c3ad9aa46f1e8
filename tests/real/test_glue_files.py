"""The real files of five of GLUE's tasks, and their tokens against transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer, Tokenizer

from bert.config import TaskDataConfig
from bert.data.tables import table_rows
from bert.tasks import TASKS
from bert.tasks.sequence_classification import Examples

pytestmark = pytest.mark.real

ROWS = {
    "cola": {"train": 8551, "dev": 1043, "test": 1063},
    "sst2": {"train": 67349, "dev": 872, "test": 1821},
    "mrpc": {"train": 3668, "dev": 408, "test": 1725},
    "stsb": {"train": 5749, "dev": 1500, "test": 1379},
    "rte": {"train": 2490, "dev": 277, "test": 3000},
}


@pytest.fixture
def vocabulary(shared: Path) -> Path:
    return shared / "data" / "vocab" / "bert-base-uncased" / "vocab.txt"


@pytest.mark.parametrize("name", ROWS)
def test_row_counts_are_the_official_ones(shared, name):
    task = TASKS[name]
    folder = shared / "data" / "glue" / task.folder_name
    assert task.splits(folder) == ["train", "dev", "test"]
    for split, count in ROWS[name].items():
        examples = task.read(folder, split)
        assert len(examples) == len(examples.texts_a) == len(examples.ids) == count
        assert all(examples.texts_a)
        assert examples.texts_b is None or all(examples.texts_b)
        assert examples.notes == ()
        if split == "test":
            assert examples.labels is None
            assert examples.ids == [str(row) for row in range(count)]
        elif name == "stsb":
            assert (examples.labels.min(), examples.labels.max()) == (0, 5)
        else:
            assert set(examples.labels.tolist()) == {0, 1}


def test_quotes_of_the_original_files_are_characters(shared: Path) -> None:
    """Includes a task with named columns, which detects quoting from the file."""
    for path in sorted((shared / "data" / "glue").glob("*/*.tsv")):
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        rows, notes = table_rows(path)
        assert notes == []
        assert list(rows) == [(number, line.split("\t")) for number, line in enumerate(lines, 1) if line], path


def test_majority_classes_are_the_known_ones(shared):
    """Dev scores that papers give for always answering the most frequent label."""
    known = {"cola": {"matthews": 0, "accuracy": 0.691}, "rte": {"accuracy": 0.527}, "mrpc": {"f1": 0.812}}
    for name, expected in known.items():
        task = TASKS[name]
        examples = task.read(shared / "data" / "glue" / task.folder_name, "dev")
        scores = task.baseline_scores(examples)
        assert {metric: round(scores[metric], 3) for metric in expected} == expected


def test_first_and_last_rows(shared):
    mrpc = TASKS["mrpc"].read(shared / "data" / "glue" / "MRPC", "train")
    assert mrpc.texts_a[0].startswith('Amrozi accused his brother , whom he called " the witness "')
    assert mrpc.texts_b[0].startswith('Referring to him as only " the witness "')
    assert mrpc.labels[:3].tolist() == [1, 0, 1]
    sst2 = TASKS["sst2"].read(shared / "data" / "glue" / "SST-2", "dev")
    assert sst2.texts_a[0] == "it 's a charming and often affecting journey . "
    assert sst2.labels[:2].tolist() == [1, 0]


@pytest.mark.parametrize(("name", "max_length"), [("mrpc", 128), ("mrpc", 48), ("mrpc", 9), ("sst2", 24)])
def test_tokens_are_those_of_transformers(shared, vocabulary, name, max_length):
    transformers = pytest.importorskip("transformers")
    reference = transformers.BertTokenizer(vocab=str(vocabulary))
    task = TASKS[name]
    examples = task.read(shared / "data" / "glue" / task.folder_name, "dev")
    ours = Tokenizer.from_str(BertWordPieceTokenizer(str(vocabulary)).to_str())
    features = task.features(ours, examples, TaskDataConfig(max_length=max_length))
    expected = reference(
        examples.texts_a,
        examples.texts_b,
        truncation="longest_first",
        max_length=max_length,
        return_token_type_ids=True,
    )
    assert features.lengths.max() <= max_length
    for row in range(len(features)):
        length = len(expected["input_ids"][row])
        batch = features.batch(np.array([row]), length, 1)
        assert batch["input_ids"][0].tolist() == expected["input_ids"][row]
        assert batch["token_type_ids"][0].tolist() == expected["token_type_ids"][row]


def test_hostile_pairs_are_tokenized_as_by_transformers(vocabulary):
    """Pairs where either side, both or neither is too long, and odd characters."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.BertTokenizer(vocab=str(vocabulary))
    long, short = "The quick brown fox jumps over unbelievably lazy dogs . " * 9, "Short one ."
    odd = "naïve \u2028 漢字 [MASK] \u200b a\u0301 " + "x" * 300
    texts = [long, short, odd, "", "½"]
    pairs = [(a, b) for a in texts for b in texts]
    examples = Examples([a for a, _ in pairs], [b for _, b in pairs], None, [])
    ours = Tokenizer.from_str(BertWordPieceTokenizer(str(vocabulary)).to_str())
    features = TASKS["mrpc"].features(ours, examples, TaskDataConfig(max_length=31))
    expected = reference(examples.texts_a, examples.texts_b, truncation="longest_first", max_length=31)
    assert [row.tolist() for row in np.split(features.ids, features.offsets[1:-1])] == expected["input_ids"]
