"""The next token of every position: labels, weights, and the batches of blocks, sentences and packed rows."""

from __future__ import annotations

import numpy as np
import pytest

from bert.config import TokenizerConfig
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import open_rows
from bert.data.pretraining.loader import PretrainingLoader, held_out_batches, make_predictions
from bert.data.pretraining.masking import NextTokens
from bert.tokenizer.byte_level import token_byte_counts, train_byte_level
from tests.data.pretraining.conftest import CLS, PAD, SEP, T
from tests.helpers import config_of

NO_WORDS = np.zeros((2, 0), np.uint64)


def test_labels_by_hand() -> None:
    rows = {
        "input_ids": np.array([[5, 6, 7, 8], [9, 5, 0, 0]]),
        "length": np.array([4, 2]),
        "next_id": np.array([9, -1]),
    }
    batch = NextTokens().batch_arrays(rows, NO_WORDS)
    assert batch["input_ids"].tolist() == rows["input_ids"].tolist()
    assert batch["next_token_ids"].tolist() == [[6, 7, 8, 9], [5, 0, 0, 0]]
    assert batch["next_token_weights"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32), np.dtype(np.float32)}
    del rows["next_id"]
    assert NextTokens().batch_arrays(rows, NO_WORDS)["next_token_weights"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_no_example_of_a_packed_row_predicts_another() -> None:
    rows = {
        "input_ids": np.array([[5, 6, 7, 8, 9, 4], [5, 6, 7, 8, 0, 0]]),
        "length": np.array([6, 4]),
        "example_length": np.array([[2, 3, 1], [4, 0, 0]]),
    }
    batch = NextTokens().batch_arrays(rows, NO_WORDS)
    assert batch["next_token_weights"].tolist() == [[1, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert batch["next_token_ids"].tolist() == [[6, 0, 8, 9, 0, 0], [6, 7, 8, 0, 0, 0]]


def test_every_token_of_the_held_out_text_is_predicted_once(place, tokenizer, tmp_path) -> None:
    """Excludes only the first token, for any batch size. Padding has no weight although its id is a token."""
    config = config_of(place, input_format="blocks", one_sentence_per_line=False)
    example_set = build_examples(config, tokenizer, tmp_path)
    rows = open_rows(example_set.eval)
    text = rows.take(np.arange(len(rows)))
    tokens = text["input_ids"][np.arange(T) < text["length"][:, None]]
    for size, processes in ((3, 1), (8, 2)):
        predicted = []
        for start in held_out_batches_of(rows, config, tokenizer, size, processes):
            predicted += start["next_token_ids"][start["next_token_weights"] > 0].tolist()
        assert predicted == tokens[1:].tolist()
    loader = PretrainingLoader(open_rows(example_set.train), make_predictions(config, tokenizer, "clm"), 4, 7)
    batch = loader.batch(3)
    assert batch["next_token_ids"].shape == (4, T)
    assert not (batch["input_ids"][batch["next_token_weights"] > 0] == PAD).any()
    for name, array in loader.batch(3).items():
        np.testing.assert_array_equal(array, batch[name])


def held_out_batches_of(rows, config, tokenizer, size, processes):
    """The batches of all hosts, put together."""
    shares = [
        held_out_batches(rows, make_predictions(config, tokenizer, "clm"), size, (index, processes))
        for index in range(processes)
    ]
    for parts in zip(*shares, strict=True):
        yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.medium
@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_sentences_predict_their_own_tokens(place, tokenizer, tmp_path, packing) -> None:
    config = config_of(place, input_format="doc_sentences", packing=packing)
    rows = open_rows(build_examples(config, tokenizer, tmp_path).train)
    batch = PretrainingLoader(rows, make_predictions(config, tokenizer, "clm"), 8, 0).batch(0)
    predicted = batch["next_token_weights"] > 0
    assert not np.isin(batch["next_token_ids"][predicted], [CLS, PAD]).any()
    assert not np.isin(batch["input_ids"][predicted], [SEP, PAD]).any()


def test_bytes_of_each_token(tokenizer) -> None:
    text = "a café \U0001f600\n\n" * 3
    byte_level = train_byte_level([text], TokenizerConfig(vocab_size=275))
    counts = token_byte_counts(byte_level)
    assert counts[byte_level.encode(text, add_special_tokens=False).ids].sum() == len(text.encode())
    assert counts[:5].tolist() == [0] * 5
    assert token_byte_counts(tokenizer) is None  # WordPiece alters texts
