"""New inputs make the rows that dev's make: of tasks without windows long ones are cut alike."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bert.config import TaskDataConfig
from bert.data.encoding import widest_windows, window_starts
from bert.tasks import find_task
from bert.tasks.multiple_choice import MultipleChoiceTask
from bert.tasks.question_answering import span_features
from bert.tasks.token_classification import conll, word_features
from tests.letters import letter_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
SHORT = TaskDataConfig(max_length=8)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return letter_tokenizer(WORDS)


def test_windows_overlap_by_half():
    assert window_starts(4, 4).tolist() == [0]
    assert window_starts(7, 4).tolist() == [0, 2, 3]


@pytest.mark.parametrize(("tokens", "room", "stride"), [(1, 4, 2), (9, 4, 2), (50, 11, 5), (50, 11, 1), (53, 10, 10)])
def test_a_token_belongs_to_the_window_that_shows_most_around_it(tokens, room, stride):
    """By the rule as run_squad.py states it, token by token."""
    starts = list(range(0, max(tokens - room, 0) + stride, stride))
    starts = starts[: 1 + next(number for number, start in enumerate(starts) if start + room >= tokens)]
    windows = [(start, min(start + room, tokens)) for start in starts]
    expected = []
    for token in range(tokens):
        scores = [
            min(token - start, end - 1 - token) + 0.01 * (end - start) if start <= token < end else -1
            for start, end in windows
        ]
        expected.append(scores.index(max(scores)))
    assert widest_windows(*zip(*windows, strict=True)).tolist() == expected


def test_long_inputs_take_time_in_proportion_to_their_length(tokenizer: Tokenizer):
    """0.3 s here; minutes and gigabytes if every window is compared with every token."""
    start = time.process_time()
    tagged = word_features.tokenize(tokenizer, conll.Sentences([["a", "b"] * 20_000], None), (), 32)
    asked = span_features.make_qa_features(tokenizer, [span_features.Example("1", "a", "a b " * 20_000, ())], 32, 14, 8)
    assert time.process_time() - start < 5
    assert (tagged.words >= 0).sum() == asked.is_max_context.sum() == 40_000


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
    new = task.features(tokenizer, task.examples_from_inputs([row[0] if len(row) == 1 else row for row in rows]), SHORT)
    assert (len(new), int(new.lengths.max())) == (len(rows), 8)
    np.testing.assert_array_equal(new.ids, dev.ids)
    np.testing.assert_array_equal(new.lengths, dev.lengths)


def test_a_long_context_is_cut_beside_every_choice(tokenizer: Tokenizer):
    task = MultipleChoiceTask(name="multiple_choice")
    rows = task.features(
        tokenizer, task.examples_from_inputs([("a b c d e f", "x y", "z"), ("a", "b", "c", "d")]), SHORT
    )
    batch = rows.batch(np.arange(2), 8, 2)
    shown = ["".join(WORDS[id] for id in row if id > 4) for row in batch["input_ids"][0, :2]]
    assert shown == ["abcxy", "abcdz"]
