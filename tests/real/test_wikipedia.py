"""Examples and masks of real text: the Wikipedia validation articles with BERT's own vocabulary."""

from pathlib import Path

import numpy as np
import pytest

from bert.config import DataConfig
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import open_rows
from bert.data.pretraining.loader import PretrainingLoader
from bert.data.pretraining.masking import Masking
from bert.data.pretraining.packing import EXAMPLE_LENGTH, packing_arrays
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer

pytestmark = pytest.mark.real

SEQUENCE_LENGTH, PREDICTIONS = 128, 20


@pytest.fixture(scope="module")
def built(shared: Path, tmp_path_factory: pytest.TempPathFactory):
    tokenizer = load_tokenizer(shared / "data/vocab/bert-base-uncased")
    config = DataConfig(train=str(shared / "data/pretrain/enwiki/valid.txt"), sequence_length=SEQUENCE_LENGTH)
    return tokenizer, build_examples(config, tokenizer, tmp_path_factory.mktemp("cache"))


def test_next_sentence_examples_of_real_text(built) -> None:
    tokenizer, examples = built
    special = special_ids(tokenizer)
    rows = open_rows(examples.train)
    every = rows.take(np.arange(len(rows)))
    # Half of the chunks that offer a choice, and all that do not: the paper's 50% and a little more.
    assert 0.5 < every["next_sentence_label"].mean() < 0.6
    # 10% of the targets are drawn from [2, T - 3]; a sentence (25 tokens) over the target, about 3 in 10 of these rows
    # stay under half of T.
    assert 0.015 < (every["length"] < SEQUENCE_LENGTH / 2).mean() < 0.06
    assert np.median(every["length"]) > 0.9 * SEQUENCE_LENGTH
    ids = every["input_ids"]
    at = np.arange(len(ids))
    assert (ids[:, 0] == special.cls).all()
    assert (ids[at, every["segment_a_length"] - 1] == special.sep).all()
    assert (ids[at, every["length"] - 1] == special.sep).all()
    assert ((ids == special.sep).sum(axis=1) == 2).all()
    assert not (ids == special.mask).any()
    assert (ids == special.unk).sum() < 0.002 * every["length"].sum()


def test_masks_of_real_text(built) -> None:
    tokenizer, examples = built
    special = special_ids(tokenizer)
    masking = Masking(embedding_rows(tokenizer), special.mask, special.all, PREDICTIONS)
    rows = open_rows(examples.train)
    batch = PretrainingLoader(rows, masking, batch_size=len(rows), seed=0).batch(0)
    row, place = np.nonzero(batch["masked_lm_weights"])
    positions, original = batch["masked_lm_positions"][row, place], batch["masked_lm_ids"][row, place]
    now = batch["input_ids"][row, positions]
    assert not np.isin(original, special.all).any()
    maskable = batch["attention_mask"].sum() - 3 * len(rows)
    assert abs(len(original) / maskable - 0.15) < 0.003  # rounding by row, and [UNK]
    # Four standard deviations of a binomial.
    for share, expected in (((now == special.mask).mean(), 0.8), ((now == original).mean(), 0.1)):
        assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / len(original))


def test_packing_of_real_text(shared: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(shared / "data/vocab/bert-base-uncased")
    text, length = str(shared / "data/pretrain/enwiki/valid.txt"), 512
    found = build_examples(DataConfig(train=text, sequence_length=length, packing=True), tokenizer, tmp_path)
    rows = open_rows(found.train)
    every = rows.take(np.arange(len(rows)))
    lengths = every[EXAMPLE_LENGTH]
    examples = np.count_nonzero(lengths)
    assert 1 - lengths.sum() / (examples * length) > 0.08, "one example a row leaves a tenth empty"
    assert 1 - lengths.sum() / (len(rows) * length) < 0.02
    # Every example begins with its [CLS] and ends with its second [SEP], wherever it lies.
    special, owners = special_ids(tokenizer), packing_arrays(lengths, every["segment_a_length"], length)
    for name, ids, each in (("cls", special.cls, 1), ("sep", special.sep, 2)):
        assert (every["input_ids"] == ids).sum() == each * examples, name
    assert (every["input_ids"][owners["position_ids"] == 0] != special.sep).all()
    assert ((every["input_ids"] == special.cls) <= (owners["position_ids"] == 0)).all()
