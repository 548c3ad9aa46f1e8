"""Many short texts in few rows: the embeddings of padded ones, from fewer tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bert.data.rows import TokenRows
from bert.inference import compiled
from bert.inference.forward import BUCKETS, pack_if_shorter, packed_batches
from bert.model.decoders import BertForCausalLM
from bert.model.pooling import MODES, Pooling
from bert.model.pretraining import BertForPreTraining
from tests.helpers import OPTIONS
from tests.tiny_models import CONFIG, model_of

PUBLISHED = dataclasses.replace(CONFIG, hidden_size=384, intermediate_size=1536, max_position_embeddings=512)


def rows_of(lengths: np.ndarray) -> TokenRows:
    """Rows of these lengths, whose ids count all tokens."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenRows(np.arange(1, offsets[-1] + 1, dtype=np.int32), offsets, lengths.astype(np.int32), None)


def test_padding_of_mixed_lengths_is_under_a_twentieth_and_every_token_is_there_once() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(2.8, 0.7, 3000).astype(int), 3, 100)
    features = rows_of(lengths)
    packed = pack_if_shorter(features, PUBLISHED, 32, BUCKETS)
    assert packed is not None and (packed.length, packed.num_rows) == (128, 4)
    batches = list(packed_batches(packed, features))
    assert {array.shape for _, batch in batches for array in batch.values()} == {(4, 128)}
    computed = sum(batch["input_ids"].size for _, batch in batches)
    assert 1 - len(features.ids) / computed < 0.05
    assert sorted(np.concatenate([texts for texts, _ in batches]).tolist()) == list(range(len(lengths)))
    for texts, batch in batches:
        is_token = batch["example_ids"] > 0
        expected = [features.ids[features.offsets[text] : features.offsets[text + 1]] for text in texts]
        np.testing.assert_array_equal(batch["input_ids"][is_token], np.concatenate(expected))
        positions = np.concatenate([np.arange(length) for length in lengths[texts]])
        np.testing.assert_array_equal(batch["position_ids"][is_token], positions)


@pytest.mark.parametrize(
    ("lengths", "is_packed"),
    [
        ([17] * 255, False),  # few
        ([17] * 256, True),
        ([96] * 512, False),  # one fits a row of 128, and a bucket holds it exactly
        ([10] * 512 + [200], True),
        ([300] * 512, False),
        ([0] + [17] * 512, False),  # a text without tokens has no place in a row
    ],
)
def test_texts_are_packed_where_that_computes_less(lengths: list[int], is_packed: bool) -> None:
    assert (pack_if_shorter(rows_of(np.array(lengths)), PUBLISHED, 32, BUCKETS) is not None) == is_packed


@pytest.mark.parametrize("mode", MODES)
def test_pooling_of_sequences_in_a_line_is_that_of_padded_rows(mode: str) -> None:
    lengths = np.array([3, 1, 5])
    hidden = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    mask = (np.arange(5) < lengths[:, None]).astype(np.int32)
    for normalize in (False, True):
        pooling = Pooling(mode, normalize)
        result = pooling.of_sequences(hidden[mask > 0], lengths)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, pooling(hidden, mask), atol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["bert", "modern", "causal"])
def test_packed_texts_and_pairs_have_the_embeddings_of_padded_ones(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers token types, learned positions, and rotary positions with local attention."""
    options = {"bert": {}, "modern": OPTIONS["modern"], "causal": {"causal": True}}[kind]
    sizes = {"num_hidden_layers": 2, "intermediate_size": 512, "max_position_embeddings": 64}
    config = dataclasses.replace(CONFIG, **sizes, **options)
    model = model_of(tmp_path, (BertForCausalLM if kind == "causal" else BertForPreTraining)(config), None)
    letters = np.random.default_rng(0)
    texts = [" ".join(letters.choice(list("abcdefgh"), letters.integers(1, 12))) for _ in range(40)]
    mixed = [(text, texts[0]) if number % 3 == 0 else text for number, text in enumerate(texts)]
    used = []

    def spy(*inputs: object) -> object:
        used.append(pack_if_shorter(*inputs))
        return used[-1]

    monkeypatch.setattr(compiled, "pack_if_shorter", spy)
    packed = model.embed(mixed, 4)
    monkeypatch.setattr(compiled, "pack_if_shorter", lambda *inputs: None)
    padded = model.embed(mixed, 4)
    assert used[0] is not None and max(map(len, used[0].packs)) > 3
    assert np.ptp(padded, axis=0).max() > 0.02
    np.testing.assert_allclose(packed, padded, atol=2e-6)


@pytest.mark.medium
def test_a_cpu_computes_long_texts_in_smaller_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tmp_path, BertForPreTraining(CONFIG), None)
    texts = ["a b c d", "e f g h a b", "c", "d e", "f g h"]
    expected = model.embed(texts)
    monkeypatch.setattr(compiled, "CPU_TOKENS", 2 * BUCKETS[0])
    encoder, shapes = model._forward.encoder, []

    def spy(params: object, input_ids: np.ndarray, *inputs: np.ndarray) -> object:
        shapes.append(input_ids.shape)
        return encoder(params, input_ids, *inputs)

    monkeypatch.setattr(model._forward, "encoder", spy)
    np.testing.assert_allclose(model.embed(texts), expected, atol=1e-6)
    assert shapes == [(2, BUCKETS[0])] * 3
