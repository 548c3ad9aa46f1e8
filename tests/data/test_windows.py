"""Long inputs in parts: every word is read, no part is too long, one answer comes of several."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from bert.config import TaskDataConfig
from bert.data.tasks import find_task
from bert.data.tasks.multiple_choice import MultipleChoiceTask
from bert.data.windows import Parts, mean_of_parts, split_text, tokenize_whole
from tests.data.letters import letter_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "."]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return letter_tokenizer(WORDS)


def test_parts_overlap_by_half_and_are_cut_between_words(tokenizer):
    assert split_text(tokenizer, "a b", 2) == ["a b"]
    assert split_text(tokenizer, "a b c d e f", 4) == ["a b c d", "c d e f"]
    # The second of tokens 2 to 5: it begins inside "bc" and ends inside "fgh".
    assert split_text(tokenizer, "a bc d e fgh i", 4) == ["a bc d", "d e", "e fgh", "fgh i"]
    assert split_text(tokenizer, "abcdefgh", 4) == ["abcd", "cdef", "efgh"], "a word that does not fit is cut"


def test_every_word_is_read_whole_in_some_part(tokenizer):
    random = np.random.default_rng(0)
    for room in (8, 11, 30):
        words = ["".join(random.choice(list(LETTERS), random.integers(1, room // 2 + 1))) for _ in range(60)]
        parts = split_text(tokenizer, "  ".join(words), room)
        assert max(len(part.replace(" ", "")) for part in parts) <= room
        assert set(words) <= {word for part in parts for word in part.split()}


def test_short_texts_are_rows_as_ever_and_long_ones_several(tokenizer):
    rows = tokenize_whole(tokenizer, ["a b", "c"], 6)
    assert (len(rows), rows.inputs.tolist(), rows.lengths.tolist()) == (2, [0, 1], [4, 3])
    rows = tokenize_whole(tokenizer, ["a b c d e f", "c", ("a", "b c d e f g")], 6)
    assert rows.inputs.tolist() == [0, 0, 1, 2, 2, 2, 2, 2]
    assert rows.lengths.max() <= 6
    read = [[WORDS[id] for id in row] for row in np.split(rows.rows.ids, rows.rows.offsets[1:-1])]
    assert read[:2] == [["[CLS]", *"abcd", "[SEP]"], ["[CLS]", *"cdef", "[SEP]"]]
    assert [row[1:] for row in read[3:5]] == [["a", "[SEP]", *"bc", "[SEP]"], ["a", "[SEP]", *"cd", "[SEP]"]]
    assert rows.batch(np.array([2]), 8, 1)["input_ids"].shape == (1, 8)


def test_the_longer_of_a_pair_is_read_in_parts_whichever_it_is(tokenizer):
    rows = tokenize_whole(tokenizer, [("b c d e f g", "a a a a")], 9)
    read = ["".join(WORDS[id] for id in row if id > 3) for row in np.split(rows.rows.ids, rows.rows.offsets[1:-1])]
    assert read == ["bcdaaa", "cdeaaa", "defaaa", "efgaaa"], "the other takes at most half of the row"


def test_outputs_of_parts_count_as_their_mean():
    outputs = [np.array([2.0, 0.0]), np.array([0.0, 1.0]), np.array([5.0, 6.0])]
    rows = Parts(np.zeros(3), np.array([0, 0, 1], np.int32))
    assert [output.tolist() for output in mean_of_parts(outputs, rows)] == [[1.0, 0.5], [5.0, 6.0]]
    assert mean_of_parts(outputs, np.zeros(3)) is outputs


def test_a_long_text_is_classified_as_a_whole(tokenizer):
    """Of two parts one says negative and the other, louder, positive."""
    task = find_task("sst2")
    examples = task.asked(["a b c d e f g h i j", "k"])
    rows = task.features(tokenizer, examples, TaskDataConfig(max_length=8))
    assert rows.inputs.tolist() == [0, 0, 0, 1]
    outputs = [np.array(logits) for logits in ([2.0, 0.0], [0.0, 1.0], [0.0, 4.0], [1.0, 0.0])]
    found = task.answers(task.predict(outputs, rows, examples), examples)
    assert [answer.label for answer in found] == ["positive", "negative"]
    assert found[0].probabilities["positive"] == pytest.approx(1 / (1 + np.exp(2 / 3 - 5 / 3)))


def test_a_long_context_is_read_beside_every_choice(tokenizer):
    task = MultipleChoiceTask(name="multiple_choice")
    examples = task.asked([("a b c d e f", "x y", "z"), ("a", "b", "c", "d")])
    rows = task.features(tokenizer, examples, TaskDataConfig(max_length=8))
    assert rows.inputs.tolist() == [0, 0, 0, 0, 1]
    batch = rows.batch(np.arange(5), 8, 5)
    assert batch["choice_mask"].tolist() == [[1, 1, 0]] * 4 + [[1, 1, 1]]
    shown = ["".join(WORDS[id] for id in row if id > 4) for row in batch["input_ids"][:4, 0]]
    assert shown == ["abcxy", "bcdxy", "cdexy", "defxy"]
    outputs = [np.array(scores) for scores in ([3.0, 0, 9], [0, 1.0, 9], [0, 1.0, 9], [0, 0, 9], [0, 0, 1.0])]
    found = task.answers(task.predict(outputs, rows, examples), examples)
    assert [answer.choice for answer in found] == ["x y", "d"]
