"""Buckets, epochs and padded batches: pure, complete, and mostly without padding."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bert.config import FinetuneConfig, TaskDataConfig, TrainingConfig
from bert.data.batching import (
    BATCHES_A_WINDOW,
    FinetuningLoader,
    LengthGroups,
    bucket_length,
    epoch_batches,
    evaluation_batches,
    host_slice,
    make_batches,
    sequence_lengths,
    token_batches,
)
from bert.data.packed_batches import PackedTexts
from bert.data.rows import ChoiceRows, TokenRows
from bert.training.losses import LOSSES, make_task_loss
from bert.training.step import compute_gradients


def test_the_smallest_bucket_that_holds_the_length():
    buckets = [96, 32, 64, 512]  # in any order
    assert [bucket_length(length, buckets, 128) for length in (1, 32, 33, 64, 65, 96, 97, 128)] == [
        32, 32, 64, 64, 96, 96, 128, 128,
    ]  # fmt: skip
    assert bucket_length(20, [512], 24) == 24
    with pytest.raises(ValueError, match="129 tokens exceed max_length 128"):
        bucket_length(129, buckets, 128)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 1000, 1024])
def test_an_epoch_holds_every_row_once(rows):
    lengths = np.random.default_rng(0).integers(3, 60, rows)
    batches = epoch_batches(lengths, 8, seed=1, epoch=0)
    assert sorted(np.concatenate(batches)) == list(range(rows))
    assert [len(batch) for batch in batches[:-1]] == [8] * ((rows - 1) // 8)
    assert 1 <= len(batches[-1]) <= 8


def test_an_epoch_is_a_function_of_seed_and_epoch():
    lengths = np.random.default_rng(0).integers(3, 60, 500)
    first = np.concatenate(epoch_batches(lengths, 8, seed=1, epoch=0))
    np.random.seed(3)  # noqa: NPY002 - the global state is what must not matter
    assert np.array_equal(first, np.concatenate(epoch_batches(lengths, 8, seed=1, epoch=0)))
    others = [np.concatenate(epoch_batches(lengths, 8, seed, epoch)) for seed, epoch in ((1, 1), (2, 0), (0, 1))]
    assert all(not np.array_equal(first, other) for other in others)


def test_the_order_of_an_epoch_is_pinned():
    """A changed order would resume old runs on other rows: change these numbers only on purpose."""
    batches = epoch_batches(np.array([5, 9, 4, 7, 3, 8, 6]), 2, seed=0, epoch=0)
    assert [batch.tolist() for batch in batches] == [[5, 1], [0, 3], [4, 2], [6]]


def test_rows_of_a_batch_have_similar_lengths_but_batches_come_in_any_order():
    lengths = np.random.default_rng(0).integers(3, 120, 64 * BATCHES_A_WINDOW)
    batches = epoch_batches(lengths, 16, seed=0, epoch=0)
    max_lengths = np.array([lengths[batch].max() for batch in batches])
    real_share = lengths.sum() / (max_lengths.sum() * 16)
    assert real_share > 0.9  # unsorted: about 0.55
    window = max_lengths[:BATCHES_A_WINDOW]
    assert abs(np.corrcoef(window, np.arange(len(window)))[0, 1]) < 0.6
    means = [window.mean() for window in np.split(max_lengths, len(max_lengths) // BATCHES_A_WINDOW)]
    assert np.ptp(means) < 25  # every window is a sample of the whole


def test_tokens_of_short_and_long_sentences_weigh_alike_in_tagging():
    """The loss of tagging is a mean over a batch's tokens. With similar lengths it is not one over the data."""
    lengths = np.random.default_rng(0).integers(5, 60, 4096)

    def weight_of_short_rows(by_length: bool) -> float:
        weights = np.zeros(len(lengths))
        for batch in epoch_batches(lengths, 32, seed=0, epoch=0, by_length=by_length):
            weights[batch] = 1 / lengths[batch].sum()  # of each token of these rows
        short = lengths < 15
        return float(weights[short].mean() / weights[~short].mean())

    assert weight_of_short_rows(LOSSES["token_classification"].by_length) == pytest.approx(1, abs=0.05)
    assert weight_of_short_rows(by_length=True) > 2
    assert LOSSES["sequence_classification"].by_length, "a mean over rows is the same with rows of any length"


def test_a_random_epoch_holds_every_row_once():
    lengths = np.random.default_rng(0).integers(3, 60, 1003)
    batches = epoch_batches(lengths, 8, seed=1, epoch=0, by_length=False)
    assert sorted(np.concatenate(batches)) == list(range(1003))
    assert [len(batch) for batch in batches] == [8] * 125 + [3]


def test_the_last_smaller_batch_is_a_random_sample():
    """Not the longest rows of the last window, which would then always be trained on alone."""
    lengths = np.arange(1, 36)
    last = [epoch_batches(lengths, 8, seed=0, epoch=epoch)[-1] for epoch in range(200)]
    assert all(len(batch) == 3 for batch in last)
    assert abs(np.mean([lengths[batch].mean() for batch in last]) - lengths.mean()) < 2


def random_rows(count: int, max_length: int = 60) -> TokenRows:
    """Rows of at least 3 tokens, each with a random number as its label."""
    lengths = np.random.default_rng(0).integers(3, max_length, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    labels = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    return TokenRows(np.ones(offsets[-1], np.int32), offsets, lengths.astype(np.int32), labels)


def config_by_tokens(tokens: int, **training) -> FinetuneConfig:
    """Configuration for rows of up to 64 tokens, with additional buckets of 16 and 32."""
    data = TaskDataConfig(dir="unused", max_length=64, buckets=[32, 16])
    return FinetuneConfig(data=data, training=TrainingConfig(epochs=1, tokens_per_batch=tokens, **training), seed=3)


def token_loader(features: TokenRows | ChoiceRows, tokens: int, row_shares: int = 1, **training) -> FinetuningLoader:
    config = config_by_tokens(tokens, **training)
    return FinetuningLoader(features, config, (0, 1), make_batches(features, config, row_shares, by_length=True))


def test_batches_by_tokens_by_hand():
    """Five rows of 8 and two of 16: the leftover row of 8 joins the rows of 16.

    A changed order would resume old runs on other rows: change the last line only on purpose.
    """
    padded = np.array([8, 16, 8, 8, 16, 8, 8])
    for epoch in range(5):
        batches = token_batches(padded, {8: 4, 16: 2}, seed=0, epoch=epoch)
        assert sorted(np.concatenate(batches)) == list(range(7))
        assert sorted(padded[batch].tolist() for batch in batches) == [[8, 8, 8, 8], [8, 16], [16]]
    batches = token_batches(padded, {16: 2, 8: 4}, seed=0, epoch=0)
    assert [batch.tolist() for batch in batches] == [[4], [6, 1], [0, 2, 5, 3]]


def test_an_epoch_by_tokens_holds_every_row_once_in_as_many_batches():
    features = random_rows(1003)
    batches = make_batches(features, config_by_tokens(512), 1, by_length=True)
    epochs = [batches.epoch(epoch) for epoch in range(3)]
    assert {len(epoch) for epoch in epochs} == {len(batches)}
    for epoch in epochs:
        assert sorted(np.concatenate(epoch)) == list(range(1003))
        tokens = [bucket_length(int(features.lengths[rows].max()), [16, 32], 64) * len(rows) for rows in epoch]
        assert sorted(tokens)[1:] == [512] * (len(epoch) - 1), "all but one batch are full"
    assert not np.array_equal(np.concatenate(epochs[0]), np.concatenate(epochs[1]))


def test_devices_and_micro_batches_change_nothing_but_the_rows_of_no_weight():
    features = random_rows(200)
    one, many = token_loader(features, 200), token_loader(features, 200, 4, gradient_accumulation_steps=2)
    shapes = set()
    for step in range(30):
        actual, expected = one.batch(step), many.batch(step)
        rows = int(actual["weights"].sum())
        assert len(expected["weights"]) % 8 == 0 and expected["weights"].sum() == rows
        np.testing.assert_array_equal(actual["input_ids"][:rows], expected["input_ids"][:rows])
        np.testing.assert_array_equal(one.row_indices(step), many.row_indices(step))
        assert actual["mean_rows"].sum() == pytest.approx(expected["mean_rows"].sum())
        assert actual["input_ids"].size <= 200
        shapes.add(actual["input_ids"].shape)
    assert shapes == {(12, 16), (6, 32), (3, 64)}, "one program for each length"


@pytest.mark.medium
def test_rows_of_batches_by_tokens_weigh_alike():
    """The mean gradient over an epoch equals the gradient of all rows at once, although batches have 3 to 12 rows."""
    features = random_rows(100)
    loader = token_loader(features, 200)

    def apply(params, batch, dropout):  # long rows have other outputs than short ones
        return params * batch["attention_mask"].sum(axis=1, keepdims=True)

    objective = make_task_loss(LOSSES["regression"], apply)
    gradients = []
    for step in range(len(make_batches(features, config_by_tokens(200), 1, by_length=True))):
        batch = {name: array[None] for name, array in loader.batch(step).items()}
        gradients.append(compute_gradients(np.float32(0.01), batch, objective, lambda rows: None, axis=None)[0])
    errors = 0.01 * features.lengths - features.labels
    assert np.mean(gradients) == pytest.approx(np.mean(2 * errors * features.lengths), rel=1e-5)


def test_all_choices_of_a_row_count():
    choices = ChoiceRows(random_rows(40, max_length=16), np.arange(0, 41, 4), np.zeros(10, np.int32))
    assert token_loader(choices, 192).batch(0)["input_ids"].shape == (3, 4, 16)
    assert token_loader(choices, 64).batch(0)["input_ids"].shape == (1, 4, 16)


def batch_of_lengths(lengths: list[list[int]]) -> dict[str, np.ndarray]:
    """A batch of rows with several sequences, whose tokens are 1, 2, ..."""
    mask = (np.arange(12) < np.array(lengths)[..., None]).astype(np.int32)
    ids = np.cumsum(mask, axis=-1, dtype=np.int32) * mask
    return {"input_ids": ids, "token_type_ids": 0 * ids, "attention_mask": mask, "weights": np.ones(len(ids))}


def groups_in(divided: dict[str, np.ndarray]) -> list[tuple[list[int], int]]:
    """The sequences and the padded length of each group."""
    names = sorted(name for name in divided if name.startswith("sequences"))
    arrays = [divided[f"input_ids_{name[-1]}"] for name in names]
    return [(divided[name].tolist(), array.shape[1]) for name, array in zip(names, arrays, strict=True)]


def test_groups_by_hand():
    """Eight sequences in pairs of similar lengths; two pairs of the same padded length are one group."""
    batch = batch_of_lengths([[2, 9], [3, 5], [12, 4], [1, 6]])
    divided = LengthGroups([4, 8], 12, 1, False, (0,) * 4).divide_sequences(batch)
    assert groups_in(divided) == [([6, 0, 2, 5], 4), ([3, 7], 8), ([1, 4], 12)]
    assert divided["input_ids_1"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [1, 2, 3, 4, 5, 6, 0, 0]]
    assert divided["attention_mask_1"].sum(axis=1).tolist() == [5, 6]
    assert set(divided) >= {"weights", "token_type_ids_2"}
    assert not {"input_ids", "token_type_ids", "attention_mask"} & set(divided)
    at_least = LengthGroups([4, 8], 12, 1, False, (4, 8, 8, 8)).divide_sequences(batch)
    assert groups_in(at_least) == [([6, 0], 4), ([2, 5, 3, 7], 8), ([1, 4], 12)]


def test_sequences_that_only_fill_a_row_have_one_token():
    batch = batch_of_lengths([[9, 9], [9, 9], [9, 9], [9, 9]])
    batch |= {"weights": np.array([1, 1, 1, 0]), "document_numbers": np.array([[0], [-1], [1], [-1]])}
    divided = LengthGroups([4], 12, 1, False, (0,) * 4).divide_sequences(batch)
    lengths = {}
    for group in (0, 1):
        lengths |= zip(divided[f"sequences_{group}"].tolist(), divided[f"attention_mask_{group}"].sum(1), strict=True)
    assert lengths == {0: 9, 1: 9, 2: 9, 3: 1, 4: 9, 5: 9, 6: 1, 7: 1}


def test_devices_and_micro_batches_do_not_change_the_padding_of_a_sequence():
    lengths = np.random.default_rng(0).integers(1, 13, (9, 2)).tolist()

    def padded(multiple: int) -> dict[int, int]:
        groups = groups_in(
            LengthGroups([4, 6, 8], 12, multiple, False, (0,) * 4).divide_sequences(batch_of_lengths(lengths))
        )
        assert all(len(numbers) % multiple == 0 for numbers, _ in groups)
        return {number: length for numbers, length in groups for number in numbers if number < 18}

    assert padded(1) == padded(4)
    assert sorted(padded(4)) == list(range(18))


def test_most_batches_have_groups_of_the_same_lengths():
    random = np.random.default_rng(0)
    batches = [batch_of_lengths(random.integers(1, 11, (16, 2)).tolist()) for _ in range(50)]
    groups = LengthGroups([2, 4, 6, 8, 10], 12, 1, False, (0,) * 4)
    few, many = (
        Counter(str([length for _, length in groups_in(divide(batch))]) for batch in batches)
        for divide in (groups.usual_for(map(sequence_lengths, batches)).divide_sequences, groups.divide_sequences)
    )
    assert len(few) < len(many)
    assert max(few.values()) > 1.25 * max(many.values())


def test_a_batch_of_short_rows_has_the_lengths_of_most_batches():
    """One batch has no row of over 32 tokens: its last group is padded to 64, as in the others."""
    lengths = np.where(np.arange(40) % 8 < 2, 60, 20)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = TokenRows(np.ones(offsets[-1], np.int32), offsets, lengths.astype(np.int32), None)
    data = TaskDataConfig(dir="unused", max_length=64, buckets=[16, 32])
    config = FinetuneConfig(data=data, training=TrainingConfig(batch_size=8, epochs=1))
    for by_rows in (True, False):
        loader = FinetuningLoader(rows, config, (0, 1), InOrder(), LengthGroups([16, 32], 64, 1, by_rows, (0,) * 4))
        shapes = [sorted(array.shape for name, array in loader.batch(step).items() if name.startswith("input_ids"))
                  for step in (0, 5)]  # fmt: skip
        assert shapes == [[(2, 64), (6, 32)]] * 2


@pytest.mark.parametrize(
    "groups", [None, *(kind([16, 32], 64, 1, True, (0,) * 4) for kind in (LengthGroups, PackedTexts))]
)
def test_the_largest_batch_has_the_longest_row_or_in_groups_the_most_tokens(groups: LengthGroups | None):
    lengths = np.repeat([10, 10, 10, 40, 10], 8)
    lengths[0] = 60
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = TokenRows(np.ones(offsets[-1], np.int32), offsets, lengths.astype(np.int32), None)
    config = FinetuneConfig(data=TaskDataConfig(dir="unused", max_length=64, buckets=[16, 32]))
    loader = FinetuningLoader(rows, config, (0, 1), InOrder(), groups)
    assert max(range(5), key=loader.memory_key) == (0 if groups is None else 3)


class InOrder:
    """Batches of eight rows in their order, and a last one of the rows of 20 tokens."""

    mean_rows = None

    def __len__(self) -> int:
        return 6

    def epoch(self, epoch: int) -> list[np.ndarray]:
        return [*np.arange(40).reshape(-1, 8), np.array([2, 3, 4, 5, 6, 7, 10, 11])]

    def padded_rows(self, length: int) -> int:
        return 8


def test_evaluation_holds_every_row_once_sorted_by_length():
    lengths = np.array([5, 9, 4, 9, 3])
    assert [batch.tolist() for batch in evaluation_batches(lengths, 2)] == [[4, 2], [0, 1], [3]]


@pytest.fixture
def features() -> TokenRows:
    """[CLS] 11 [SEP] | [CLS] 12 13 [SEP] 14 [SEP] | [CLS] [SEP]"""
    return TokenRows(
        ids=np.array([2, 11, 3, 2, 12, 13, 3, 14, 3, 2, 3], np.int32),
        offsets=np.array([0, 3, 9, 11]),
        segment_a_lengths=np.array([3, 4, 2], np.int32),
        labels=np.array([1, 0, 1], np.int32),
        pad_token_id=99,
    )


def test_a_batch_by_hand(features):
    assert len(features) == 3
    assert features.lengths.tolist() == [3, 6, 2]
    batch = features.batch(np.array([1, 0]), length=7, batch_size=3)
    assert batch["input_ids"].tolist() == [
        [2, 12, 13, 3, 14, 3, 99],
        [2, 11, 3, 99, 99, 99, 99],
        [99, 99, 99, 99, 99, 99, 99],
    ]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0], [0] * 7, [0] * 7]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0], [0] * 7]
    assert batch["labels"].tolist() == [0, 1, 0]
    assert batch["weights"].tolist() == [1, 1, 0]
    assert {name: array.dtype for name, array in batch.items()} == {
        "input_ids": np.int32, "token_type_ids": np.int32, "attention_mask": np.int32,
        "labels": np.int32, "weights": np.float32,
    }  # fmt: skip


def test_a_batch_of_no_rows_weighs_nothing(features):
    """A host without remaining rows gets this batch while other hosts still have rows."""
    batch = features.batch(np.array([], int), length=4, batch_size=2)
    assert batch["weights"].tolist() == [0, 0]
    assert not batch["attention_mask"].any()


def test_rows_without_labels(features):
    unlabelled = TokenRows(features.ids, features.offsets, features.segment_a_lengths, None)
    assert unlabelled.batch(np.array([2]), length=2, batch_size=1)["labels"].tolist() == [0]


def test_what_does_not_fit_is_refused_instead_of_cut(features):
    with pytest.raises(ValueError, match=r"2 rows.*6 tokens do not fit"):
        features.batch(np.array([0, 1]), length=5, batch_size=2)
    with pytest.raises(ValueError, match="do not fit"):
        features.batch(np.array([0, 2]), length=5, batch_size=1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_hosts_divide_a_batch(count: int) -> None:
    parts = [np.arange(8)[host_slice(8, (index, count))] for index in range(count)]
    assert np.concatenate(parts).tolist() == list(range(8))
    assert {len(part) for part in parts} == {8 // count}
