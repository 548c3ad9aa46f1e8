"""GLUE's files: read as published, rejected with file and line if they are malformed, tokenized and written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import BertProcessing

from bert.config import TaskDataConfig
from bert.data.rows import TokenRows
from bert.errors import UserError
from bert.tasks import TASKS, find_task
from bert.tasks.sequence_classification import ClassificationPredictions, Examples, glue
from tests.messages import has_all

SST2, MRPC = TASKS["sst2"], TASKS["mrpc"]
HEADER = b"sentence\tlabel\n"


def write(folder: Path, content: bytes, name: str = "train.tsv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def error_of(folder: Path, split: str = "train", task=SST2) -> str:
    with pytest.raises(UserError) as caught:
        task.read(folder, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_task_is_whole():
    for task in glue.TASKS:
        assert TASKS[task.name] is task
        assert task.main_metric in task.metrics
        assert len(task.text_columns) in (1, 2)
        assert set(task.submissions) <= set(task.files)


def test_unknown_tasks_are_told_the_nearest():
    assert find_task("mrpc") is MRPC
    with pytest.raises(UserError, match=r"task is 'SST-2'.*sst2\?"):
        find_task("SST-2")
    with pytest.raises(UserError, match="choose one of sst2, mrpc"):
        find_task("xyz")


def test_single_sentences(tmp_path):
    write(tmp_path, HEADER + b"it 's charming . \t1\nbleak\t0\n")
    examples = SST2.read(tmp_path, "train")
    assert examples.texts_a == ["it 's charming . ", "bleak"]
    assert examples.texts_b is None
    assert examples.labels.tolist() == [1, 0]
    assert examples.labels.dtype == np.int32
    assert examples.ids == ["0", "1"]


def test_pairs_with_a_byte_order_mark_in_any_order_of_columns(tmp_path):
    write(tmp_path, "\ufeff#2 String\tQuality\t#1 ID\t#1 String\nB\t1\t77\tA\n".encode(), "dev.tsv")
    examples = MRPC.read(tmp_path, "dev")
    assert (examples.texts_a, examples.texts_b, examples.labels.tolist()) == (["A"], ["B"], [1])


def test_a_test_file_has_ids_and_no_labels(tmp_path):
    write(tmp_path, b"index\tsentence\n10\tone\n11\ttwo\n", "test.tsv")
    examples = SST2.read(tmp_path, "test")
    assert examples.labels is None
    assert examples.ids == ["10", "11"]
    assert "no 'label' among" in error_of(write(tmp_path / "x", b"index\tsentence\n1\ta\n"))
    assert "no 'index' among" in error_of(write(tmp_path / "x", b"sentence\na\n", "test.tsv"), "test")


def test_text_may_hold_anything_but_tabs_and_line_feeds(tmp_path):
    """Quotes do not quote, and none of the characters at which str.splitlines would split ends a line."""
    texts = [
        '"an open quote',
        'a "" b"',
        "x\u2028y\u2029z",
        "a\x85b\x0bc\x0cd\x1ce\x1df\x1eg",
        "a\rb",
        " a ",
        "naïve 漢字 🙂",
        "\\t",
    ]
    write(tmp_path, HEADER + "".join(f"{text}\t1\n" for text in texts).encode())
    assert SST2.read(tmp_path, "train").texts_a == texts


def test_line_ends_of_windows_and_a_missing_last_one(tmp_path):
    write(tmp_path, b"\xef\xbb\xbfsentence\tlabel\r\na\t1\r\nb\t0")
    examples = SST2.read(tmp_path, "train")
    assert (examples.texts_a, examples.labels.tolist()) == (["a", "b"], [1, 0])


def test_empty_lines_end_a_file_but_do_not_interrupt_it(tmp_path):
    assert SST2.read(write(tmp_path, HEADER + b"a\t1\n\n\r\n"), "train").texts_a == ["a"]
    assert "train.tsv, line 3: the line is empty" in error_of(write(tmp_path, HEADER + b"a\t1\n\n\nb\t0\n"))


def test_the_folder_above_will_do(tmp_path):
    write(tmp_path / "SST-2", HEADER + b"a\t1\n")
    assert SST2.read(tmp_path, "train").texts_a == ["a"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (HEADER, "has no rows"),
        (b"text\tlabel\na\t1\n", "line 1: no 'sentence' among 'text', 'label'"),
        (b"a charming film\t1\nbleak\t0\n", "line 1: no 'sentence' and 'label' among"),
        (b"sentence,label\na,1\n", "with a tab between two names"),
        (HEADER + b"a\t1\nb\n", "line 3: 1 column where the header has 2"),
        (HEADER + b"a\tb\t1\n", "line 2: 3 columns where the header has 2"),
        (HEADER + b"a\t1\nb\t2\n", "line 3: label is '2'"),
        (HEADER + b"a\tgood\n", "line 2: label is 'good'"),
        (HEADER + b"a\t\n", "line 2: label is ''"),
        (HEADER + b"a\t1\n\t0\n", "line 3: sentence is empty"),
        (HEADER + b" \xe2\x80\xa8\t1\n", "line 2: sentence is empty"),
        (HEADER + b"a\t1\ncaf\xe9\t1\n", "line 3: not UTF-8"),
        (HEADER + b"a\x00b\t1\n", "line 2: a NUL character"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_line(tmp_path, content, words):
    message = error_of(write(tmp_path, content))
    assert message.startswith(str(tmp_path / "train.tsv"))
    assert words in message


def test_missing_folders_and_files_are_named(tmp_path):
    assert has_all(error_of(tmp_path, "dev"), f"{tmp_path} has no dev.tsv: set data.dir", "with train.tsv")
    assert "nowhere is not a folder" in error_of(tmp_path / "nowhere")
    write(tmp_path, HEADER)
    assert "train.tsv is not a folder" in error_of(tmp_path / "train.tsv")


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
PAD, CLS, SEP, A = 0, 2, 3, 5


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Letters a to h are tokens 5 to 12."""
    built = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer()
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return built


def make_examples(texts_a: list[str], texts_b: list[str] | None = None) -> Examples:
    labels = np.arange(len(texts_a), dtype=np.int32) % 2
    return Examples(texts_a, texts_b, labels, [str(row) for row in range(len(texts_a))])


def tokenize(tokenizer: Tokenizer, examples: Examples, max_length: int) -> TokenRows:
    return SST2.features(tokenizer, examples, TaskDataConfig(max_length=max_length))


def rows(features) -> list[list[int]]:
    return [row.tolist() for row in np.split(features.ids, features.offsets[1:-1])]


def test_sentences_are_tokenized_and_cut(tokenizer):
    features = tokenize(tokenizer, make_examples(["A b", "a b c d e f", ""]), max_length=5)
    assert rows(features) == [[CLS, 5, 6, SEP], [CLS, 5, 6, 7, SEP], [CLS, SEP]]
    assert features.segment_a_lengths.tolist() == features.lengths.tolist() == [4, 5, 2]
    assert features.labels.tolist() == [0, 1, 0]
    assert (features.ids.dtype, features.offsets.dtype) == (np.int32, np.int64)


def test_of_a_pair_the_longer_text_is_cut(tokenizer):
    pairs = make_examples(["a b c d e", "a", "a b c d"], ["f", "b c d e f", "e f g h"])
    features = tokenize(tokenizer, pairs, max_length=7)
    assert rows(features) == [
        [CLS, 5, 6, 7, SEP, 10, SEP],
        [CLS, 5, SEP, 6, 7, 8, SEP],
        [CLS, 5, 6, SEP, 9, 10, SEP],
    ]
    assert features.segment_a_lengths.tolist() == [5, 3, 4]


def test_the_tokenizer_of_the_caller_stays_as_it_is(tokenizer):
    tokenizer.post_processor = BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    tokenizer.enable_padding(length=16)
    before = tokenizer.to_str()
    features = tokenize(tokenizer, make_examples(["a b c d e f"]), max_length=4)
    assert rows(features) == [[CLS, 5, 6, SEP]]
    assert tokenizer.to_str() == before


def test_many_rows_are_tokenized_in_parts(tokenizer, monkeypatch):
    examples = make_examples(["a b c"[: 1 + 2 * (row % 3)] for row in range(11)])
    whole = tokenize(tokenizer, examples, 8)
    monkeypatch.setattr("bert.data.encoding.ROWS_AT_ONCE", 4)
    assert rows(tokenize(tokenizer, examples, 8)) == rows(whole)


def test_the_official_file_of_a_test_split(tmp_path):
    examples = Examples(["x", "y"], None, None, ["0", "1"])
    path, own = SST2.write_predictions(
        tmp_path / "predictions", "test", ClassificationPredictions(np.array([1, 0]), np.eye(2)[[1, 0]]), examples
    )
    assert path == tmp_path / "predictions" / "SST-2.tsv"
    assert path.read_bytes() == b"index\tprediction\n0\t1\n1\t0\n"
    assert own == tmp_path / "predictions" / "test.tsv"
    assert own.read_bytes() == b"index\tprediction\tprobability\n0\t1\t1.000000\n1\t0\t1.000000\n"


def test_the_file_of_a_dev_split_shows_labels_and_probabilities(tmp_path):
    probabilities = np.array([[0.25, 0.75], [0.9, 0.1]])
    [path] = MRPC.write_predictions(
        tmp_path, "dev", ClassificationPredictions(np.array([1, 0]), probabilities), make_examples(["x", "y"])
    )
    assert path.read_text() == ("index\tprediction\tlabel\tprobability\n0\t1\t0\t0.750000\n1\t0\t1\t0.900000\n")
    assert path.name == "dev.tsv"


def test_predictions_for_other_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="2 rows, 1 predictions"):
        SST2.write_predictions(
            tmp_path, "dev", ClassificationPredictions(np.array([1]), np.eye(2)), make_examples(["x", "y"])
        )
    assert list(tmp_path.iterdir()) == []
