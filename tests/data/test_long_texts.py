"""Texts that are longer than a row: which tokens are kept, and which windows are read, in each mode."""

from __future__ import annotations

import dataclasses
import itertools
from typing import get_args

import numpy as np
import pytest
from tokenizers import Tokenizer

from bert.config import FinetuneConfig, TaskDataConfig, TrainingConfig
from bert.config.model import LongTextMode
from bert.data.batching import make_batches
from bert.data.encoding import tokenize
from bert.data.long_texts import LongTexts, encode_texts, head_length, tokenize_queries, with_long_texts
from bert.data.rows import TokenRows
from bert.data.windows import WindowedRows, row_shape, windowed_parts
from bert.errors import UserError
from bert.tasks import find_task, make_task
from tests.letters import byte_level_tokenizer, letter_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
MODES = get_args(LongTextMode)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return letter_tokenizer(WORDS)


def spaced(letters: str) -> str:
    return " ".join(letters)


def shown(rows: TokenRows) -> list[str]:
    """The rows as letters, with [ for [CLS] and ] for [SEP]."""
    names = np.array(["-", "?", "[", "]", "_", *LETTERS])
    return ["".join(names[rows.ids[start:end]]) for start, end in itertools.pairwise(rows.offsets)]


def windows_of(tokenizer: Tokenizer, texts: list, max_length: int, stride: int, **more) -> WindowedRows:
    rows = encode_texts(tokenizer, texts, LongTexts(max_length, "windows", stride), **more)
    assert isinstance(rows, WindowedRows)
    return rows


def test_the_head_is_128_of_510_tokens() -> None:
    assert [head_length(count) for count in (510, 126, 8, 0)] == [128, 32, 2, 0]


def test_head_and_tail_are_kept(tokenizer: Tokenizer) -> None:
    rows = encode_texts(tokenizer, [spaced(LETTERS), "a b"], LongTexts(10, "head_tail"))
    assert shown(rows) == ["[abuvwxyz]", "[ab]"]  # 2 of 8, and 6


@pytest.mark.parametrize("rule", ["google", "longest_first", None])
def test_of_a_pair_as_many_tokens_are_kept_as_with_cut(tokenizer: Tokenizer, rule) -> None:
    lengths = list(itertools.product((0, 1, 3, 4, 5, 6, 9, 20), repeat=2))
    texts = [(spaced(LETTERS[:first]), spaced(LETTERS[26 - second :])) for first, second in lengths]
    for max_length in (8, 11, 12):
        cut = tokenize(tokenizer, texts, max_length, pair_truncation=rule)
        kept = encode_texts(tokenizer, texts, LongTexts(max_length, "head_tail"), pair_truncation=rule)
        assert [row.index("]") for row in shown(cut)] == [row.index("]") for row in shown(kept)]
        assert np.array_equal(cut.offsets, kept.offsets)
        assert np.array_equal(cut.segment_a_lengths, kept.segment_a_lengths)


def test_windows_start_a_stride_apart_and_the_last_one_ends_with_the_text(tokenizer: Tokenizer) -> None:
    rows = windows_of(tokenizer, ["a b", spaced(LETTERS[:14]), spaced(LETTERS[:8])], 10, 3)
    assert shown(rows.windows) == ["[ab]", "[abcdefgh]", "[defghijk]", "[ghijklmn]", "[abcdefgh]"]
    assert (rows.offsets.tolist(), rows.lengths.tolist()) == ([0, 1, 4, 5], [4, 10, 10])
    assert rows.windows.input_numbers.tolist() == [0, 1, 1, 1, 2]
    assert shown(windows_of(tokenizer, [spaced(LETTERS[:11])], 10, 99).windows) == ["[abcdefgh]", "[defghijk]"]


def test_windows_are_those_of_the_library_except_for_the_last(tokenizer: Tokenizer) -> None:
    """`tokenizers` leaves the last window shorter."""
    text, length, stride = spaced(LETTERS * 3), 12, 4
    library = Tokenizer.from_str(tokenizer.to_str())
    library.post_processor = bert_post_processor()
    library.enable_truncation(length, stride=length - 2 - stride)
    first = library.encode(text)
    expected = [first.ids, *(more.ids for more in first.overflowing)]
    rows = windows_of(tokenizer, [text], length, stride).windows
    ours = [rows.ids[start:end].tolist() for start, end in itertools.pairwise(rows.offsets)]
    assert len(ours) == len(expected) > 10
    assert ours[:-1] == expected[:-1]
    assert ours[-1][-4:] == expected[-1][-4:]


def bert_post_processor():
    from tokenizers.processors import BertProcessing

    return BertProcessing(("[SEP]", 3), ("[CLS]", 2))


def test_of_a_pair_the_longer_text_is_read_through_windows(tokenizer: Tokenizer) -> None:
    pairs = [(spaced("abcdefghij"), "x y"), ("x y", spaced("abcdefghij")), (spaced(LETTERS[:9]), spaced(LETTERS[:9]))]
    rows = windows_of(tokenizer, pairs, 10, 3)
    assert shown(rows.windows) == [
        *("[abcde]xy]", "[defgh]xy]", "[fghij]xy]"),
        *("[xy]abcde]", "[xy]defgh]", "[xy]fghij]"),
        *("[abc]abcd]", "[abc]defg]", "[abc]fghi]"),
    ]
    assert rows.windows.segment_a_lengths.tolist() == [7, 7, 7, 4, 4, 4, 5, 5, 5]


@pytest.mark.parametrize("make", [lambda: letter_tokenizer(WORDS), byte_level_tokenizer])
def test_a_text_that_fits_has_the_same_row_in_all_modes(make) -> None:
    tokenizer, texts = make(), ["a b", "", spaced(LETTERS[:8]), ("a b", "c d e")]
    labels = np.arange(4, dtype=np.int32)
    digests = {encode_texts(tokenizer, texts, LongTexts(20, mode, 4), labels).digest() for mode in MODES}
    assert digests == {tokenize(tokenizer, texts, 20, labels).digest()}
    rows = windows_of(tokenizer, [*texts, spaced(LETTERS)], 20, 4)
    fits = tokenize(tokenizer, texts, 20)
    assert np.array_equal(rows.windows.ids[: len(fits.ids)], fits.ids)
    assert np.array_equal(rows.windows.offsets[:5], fits.offsets)


def test_a_training_batch_spreads_its_windows_over_a_text(tokenizer: Tokenizer) -> None:
    texts = ["a b", spaced(LETTERS), spaced(LETTERS[:10])]
    settings = LongTexts(10, "windows", 2, max_train_windows=4)
    rows = encode_texts(tokenizer, texts, settings, np.array([5, 6, 7], np.int32))
    assert rows.counts.tolist() == [1, 10, 2]
    batch = rows.batch(np.array([1, 0]), 10, 3)
    assert batch["input_ids"].shape == (3, 4, 10)
    assert batch["window_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    first = [WORDS[window[1]] for window in batch["input_ids"][0]]
    assert first == ["a", "g", "m", "s"]  # windows 0, 3, 6 and 9
    assert (batch["labels"].tolist(), batch["weights"].tolist()) == ([6, 5, 0], [1, 1, 0])
    two = rows.batch(np.array([2, 0]), 10, 2)
    assert two["window_mask"].tolist() == [[1, 1], [1, 0]]
    short = rows.batch(np.array([0]), 4, 2)
    assert "window_mask" not in short
    assert short["input_ids"].shape == (2, 4)
    assert row_shape(rows) == (1,)
    assert rows.sizes.tolist() == [4, 40, 20]


def test_long_texts_share_training_batches(tokenizer: Tokenizer) -> None:
    texts = [spaced(LETTERS[: 4 + 3 * (number % 7)]) for number in range(64)]
    rows = windows_of(tokenizer, texts, 10, 3)
    config = FinetuneConfig(training=TrainingConfig(batch_size=8), data=TaskDataConfig(max_length=10))
    batches = make_batches(rows, config, 1, by_length=True).epoch(0)
    assert sorted(np.concatenate(batches)) == list(range(64))
    assert [len(set(rows.counts[batch])) for batch in batches] == pytest.approx([1.5] * 8, abs=1.5)
    assert np.mean([np.ptp(rows.counts[batch]) for batch in batches]) < 1.5


def test_outputs_are_pooled_by_text(tokenizer: Tokenizer) -> None:
    rows = windows_of(tokenizer, ["a b", spaced(LETTERS[:14])], 10, 3)
    outputs = [np.array(values, np.float32) for values in ([3, 4], [3, 4], [0, 1], [6, 8])]
    assert np.array_equal(rows.pool(outputs), np.array([[3, 4], [3, 13 / 3]], np.float32))
    unit = rows.pool(outputs, normalize=True)
    assert np.array_equal(unit[0], outputs[0]), "a single window is unchanged"
    assert unit[1] == pytest.approx([0.4, (0.8 + 1 + 0.8) / 3])
    largest = dataclasses.replace(rows, maximum=True)
    assert np.array_equal(largest.pool(outputs), np.array([[3, 4], [6, 8]], np.float32))
    assert largest.pool(outputs, normalize=True)[1] == pytest.approx([0.6, 1])


def test_queries_and_documents_have_windows(tokenizer: Tokenizer) -> None:
    queries, documents = ["a b", spaced(LETTERS[:12])], [["c", spaced(LETTERS[:20])], ["d"]]
    rows = tokenize_queries(tokenizer, queries, documents, None, LongTexts(10, "windows", 4))
    assert [part.counts.tolist() for part in windowed_parts(rows)] == [[1, 2], [1, 4, 1]]
    batch = rows.batch(np.array([0, 1]), 10, 2)
    assert batch["input_ids"].shape == (2, 3, 4, 10)
    one, two, four = [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]
    assert batch["window_mask"].tolist() == [[one, one, four], [two, one, one]]
    assert batch["document_numbers"].tolist() == [[0, 1], [2, -1]]
    assert rows.sizes.tolist() == [40, 20]


def test_no_queries_are_no_rows(tokenizer: Tokenizer) -> None:
    assert len(tokenize_queries(tokenizer, [], [], None, LongTexts(24))) == 0


def test_wrong_settings_name_the_key() -> None:
    data = TaskDataConfig(dir="x", long_texts="windows")
    config = FinetuneConfig(init="none", data=data, training=TrainingConfig(tokens_per_batch=4096, epochs=1))
    with pytest.raises(UserError, match=r"training\.tokens_per_batch is 4096, but data\.long_texts is windows"):
        config.check()
    with pytest.raises(UserError, match=r"data\.long_texts is set, but it is for .*, and the task is ner"):
        make_task(FinetuneConfig(task="ner", data=data))
    for key in ("doc_stride", "max_train_windows"):
        with pytest.raises(UserError, match=rf"data\.{key} is set, but the task is sst2 and data\.long_texts is cut"):
            make_task(FinetuneConfig(task="sst2", data=TaskDataConfig(dir="x", **{key: 5})))
    with pytest.raises(UserError, match="long_texts is 'window': pass cut, head_tail, windows"):
        with_long_texts(data, "window")
    with pytest.raises(UserError, match="the task is squad"):
        with_long_texts(data, "windows", find_task("squad"))
