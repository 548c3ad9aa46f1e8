"""New inputs make the rows that dev's make: of tasks without windows long ones are cut alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bert.config import TaskDataConfig
from bert.data.tasks import find_task
from bert.data.tasks.multiple_choice import MultipleChoiceTask
from bert.data.windows import window_starts
from tests.data.letters import letter_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
SHORT = TaskDataConfig(max_length=8)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return letter_tokenizer(WORDS)


def test_windows_overlap_by_half():
    assert window_starts(4, 4).tolist() == [0]
    assert window_starts(7, 4).tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("name", "rows"),
    [("sst2", [("a b c d e f g h i j",), ("k",)]), ("rte", [("a b c d e f", "g h"), ("a", "b c d e f g")])],
)
def test_long_texts_are_cut_as_those_of_dev(name, rows, tokenizer: Tokenizer, tmp_path: Path):
    task = find_task(name)
    names = ("index", *task.text_columns, "label")
    lines = ["\t".join(names), *("\t".join([str(i), *row, task.labels[0]]) for i, row in enumerate(rows))]
    (tmp_path / "dev.tsv").write_text("\n".join(lines) + "\n")
    dev = task.features(tokenizer, task.read(tmp_path, "dev"), SHORT)
    new = task.features(tokenizer, task.asked([row[0] if len(row) == 1 else row for row in rows]), SHORT)
    assert (len(new), int(new.lengths.max())) == (len(rows), 8)
    np.testing.assert_array_equal(new.ids, dev.ids)
    np.testing.assert_array_equal(new.lengths, dev.lengths)


def test_a_long_context_is_cut_beside_every_choice(tokenizer: Tokenizer):
    task = MultipleChoiceTask(name="multiple_choice")
    rows = task.features(tokenizer, task.asked([("a b c d e f", "x y", "z"), ("a", "b", "c", "d")]), SHORT)
    batch = rows.batch(np.arange(2), 8, 2)
    shown = ["".join(WORDS[id] for id in row if id > 4) for row in batch["input_ids"][0, :2]]
    assert shown == ["abcxy", "abcdz"]
