import numpy as np
import pytest

from bert.data.pretraining.loader import PretrainingLoader, held_out_batches
from bert.data.pretraining.masking import Masking, SamplingMasking
from tests.helpers import MASKING, NumberedRows, originals


def test_every_row_once_an_epoch_across_batch_boundaries() -> None:
    loader = PretrainingLoader(NumberedRows(100), MASKING, batch_size=8, seed=1)
    first = np.concatenate([originals(loader.batch(step))[:, 0] for step in range(25)])  # 200 rows: two epochs
    assert sorted(first[:100]) == list(range(5, 105))
    assert sorted(first[100:]) == list(range(5, 105))
    assert (first[:100] != first[100:]).any()


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    loader = PretrainingLoader(NumberedRows(100), MASKING, batch_size=8, seed=1)
    forward = [loader.batch(step) for step in range(30)]
    again = PretrainingLoader(NumberedRows(100), MASKING, batch_size=8, seed=1)
    for step in (29, 3, 17, 3):
        for name, value in again.batch(step).items():
            np.testing.assert_array_equal(value, forward[step][name])
    other = PretrainingLoader(NumberedRows(100), MASKING, batch_size=8, seed=2).batch(0)
    assert (other["input_ids"] != forward[0]["input_ids"]).any()


@pytest.mark.parametrize("processes", [2, 4])
def test_hosts_read_their_rows_of_the_same_global_batch(processes: int) -> None:
    whole = PretrainingLoader(NumberedRows(100), MASKING, batch_size=8, seed=1)
    parts = [PretrainingLoader(NumberedRows(100), MASKING, 8, 1, (i, processes)) for i in range(processes)]
    for step in (0, 11, 12):
        batches = [part.batch(step) for part in parts]
        for name, value in whole.batch(step).items():
            np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), value)


def test_masks_are_fresh_at_every_visit() -> None:
    loader = PretrainingLoader(NumberedRows(8), MASKING, batch_size=8, seed=1)
    first, second = loader.batch(0), loader.batch(1)
    order = np.argsort(originals(first)[:, 0]), np.argsort(originals(second)[:, 0])
    np.testing.assert_array_equal(originals(first)[order[0]], originals(second)[order[1]])
    assert (first["input_ids"][order[0]] != second["input_ids"][order[1]]).any(axis=1).all()


@pytest.mark.parametrize("processes", [1, 2])
def test_frozen_masks_are_those_of_the_row_at_every_visit(processes: int) -> None:
    hosts = [(index, processes) for index in range(processes)]
    loaders = [PretrainingLoader(NumberedRows(24), MASKING, 8, 1, host, static_masking=True) for host in hosts]
    seen: dict[int, np.ndarray] = {}
    for step in range(9):
        for loader in loaders:
            batch = loader.batch(step)
            for first, row in zip(originals(batch)[:, 0], batch["input_ids"], strict=True):
                np.testing.assert_array_equal(seen.setdefault(first, row), row)
    assert len(seen) == 24
    places = {tuple(np.flatnonzero(row == MASKING.mask_id)) for row in seen.values()}
    assert len(places) > 18, "each row has masks of its own"
    other = PretrainingLoader(NumberedRows(24), MASKING, 24, 2, static_masking=True).batch(0)
    rows = zip(originals(other)[:, 0], other["input_ids"], strict=True)
    assert sum((seen[first] != row).any() for first, row in rows) > 18, "another seed freezes other masks"


def test_frozen_masks_are_the_papers_over_the_rows() -> None:
    """Masks 15% of each row, 80/10/10, uniformly over positions and independently of neighbouring rows."""
    masking = Masking(vocab_size=500, mask_id=4, special_ids=(0, 1, 2, 3, 4), max_predictions=20)
    batch = PretrainingLoader(NumberedRows(20_000), masking, 20_000, 1, static_masking=True).batch(0)
    used, lengths = batch["masked_lm_weights"] > 0, batch["attention_mask"].sum(axis=1)
    tokens = (originals(batch) >= 5).sum(axis=1)
    np.testing.assert_array_equal(used.sum(axis=1), np.maximum(1, np.floor(0.15 * tokens + 0.5)))
    rows, places = np.nonzero(used)
    positions = batch["masked_lm_positions"][rows, places]
    before, after = batch["masked_lm_ids"][rows, places], batch["input_ids"][rows, positions]
    to_mask, kept = after == masking.mask_id, after == before
    for share, expected in ((to_mask, 0.8), (~to_mask & ~kept, 0.1 * 494 / 495), (kept, 0.1 + 0.1 / 495)):
        assert abs(share.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / len(rows))
    chosen = np.zeros(batch["input_ids"].shape)
    chosen[rows, positions] = 1
    whole = chosen[lengths == 32]
    rate = whole.mean()
    assert abs(whole.mean(axis=0) - rate).max() < 5 * np.sqrt(rate * (1 - rate) / len(whole))
    both = (whole[:-1] * whole[1:]).mean()
    assert abs(both - rate**2) < 5 * rate / np.sqrt(whole.size)


def test_the_attention_mask_is_that_of_the_uncorrupted_row() -> None:
    batch = PretrainingLoader(NumberedRows(100), MASKING, batch_size=32, seed=1).batch(5)
    np.testing.assert_array_equal(batch["attention_mask"], originals(batch) != 0)
    assert ((batch["token_type_ids"] == 1) <= (batch["attention_mask"] == 1)).all()
    np.testing.assert_array_equal(batch["rows"], np.arange(32))


@pytest.mark.parametrize(("batch_size", "processes"), [(8, 1), (32, 1), (8, 2)])
def test_held_out_rows_count_once_with_one_fixed_masking(batch_size: int, processes: int) -> None:
    rows = NumberedRows(21)
    seen: dict[int, np.ndarray] = {}
    for process in range(processes):
        for batch in held_out_batches(rows, MASKING, batch_size, (process, processes)):
            assert len(batch["input_ids"]) == batch_size // processes
            real = batch["next_sentence_weights"] > 0
            assert not batch["masked_lm_weights"][~real].any()
            assert not batch["attention_mask"][~real].any()
            for first, row in zip(originals(batch)[real, 0], batch["input_ids"][real], strict=True):
                assert first not in seen
                seen[first] = row
    assert sorted(seen) == list(range(5, 26))
    reference = {
        row[0]: row
        for batch in held_out_batches(rows, MASKING, 21)
        for row in np.concatenate([originals(batch)[:, :1], batch["input_ids"]], axis=1)
    }
    for first, row in seen.items():
        np.testing.assert_array_equal(row, reference[first][1:])


@pytest.mark.parametrize("batch_size", [4, 7])
def test_samples_of_held_out_rows_are_drawn_by_the_row_alone(batch_size: int) -> None:
    masking = SamplingMasking(500, 4, (0, 1, 2, 3, 4), max_predictions=5)
    [whole] = held_out_batches(NumberedRows(10), masking, 10)
    parts = list(held_out_batches(NumberedRows(10), masking, batch_size))
    for name in ("input_ids", "sample_uniforms"):
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts])[:10], whole[name])
    assert len(np.unique(whole["sample_uniforms"])) > 45
