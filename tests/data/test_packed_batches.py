"""Packed batches of fine-tuning: every token once, in as few rows as histogram packing needs, on its text's device."""

from __future__ import annotations

import numpy as np
import pytest

from bert.data.batching import sequence_lengths
from bert.data.packed_batches import PackedTexts
from bert.data.rows import TokenRows

BUCKETS, LONGEST, PACKED = [4, 8], 12, 16


def rows_of(lengths: list[int]) -> TokenRows:
    """Rows whose tokens are numbered over all rows, from 1, with the index of the row as its label."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    return TokenRows(ids, offsets, np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32))


def packs(shares: int, by_rows: bool = True) -> PackedTexts:
    return PackedTexts(BUCKETS, LONGEST, shares, by_rows, (0,), PACKED)


def test_a_packed_batch_by_hand():
    """12 + 3 + 1, 8 + 7: two packed rows in the order of their first rows; the texts stay padded rows."""
    batch = packs(1).divide_rows(rows_of([3, 12, 8, 7, 1]), np.arange(5), 6)
    assert batch["rows"].tolist() == [0, 1, 2, 3, 4, 6, 6, 6], "eight texts: five rows, and fill rows"
    assert batch["weights"].tolist() == [1] * 5 + [0] * 3
    assert batch["labels"].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    ids = batch["input_ids"].ravel()
    packed = np.where(batch["token_sources"] < 0, 0, ids[batch["token_sources"]])
    assert packed.tolist() == [[[1, 2, 3, *range(4, 16), 31], [*range(16, 24), *range(24, 31), 0]]]
    assert batch["pack_numbers"].tolist() == [[0, 1]]


@pytest.mark.parametrize("shares", [1, 4])
def test_places_are_the_inverse_of_sources_in_each_share(shares: int):
    lengths = np.random.default_rng(0).integers(1, LONGEST + 1, 29).tolist()
    batch = packs(shares).divide_rows(rows_of(lengths), np.arange(29), 32)
    seen = []
    for share in range(shares):
        ids, places = (np.split(batch[name], shares)[share].ravel() for name in ("input_ids", "token_places"))
        packed = np.where(batch["token_sources"][share] < 0, 0, ids[batch["token_sources"][share]])
        np.testing.assert_array_equal(np.where(places < 0, 0, packed.ravel()[places]), ids)
        seen += packed[packed > 0].tolist()
        rows = batch["rows"].reshape(shares, -1)[share]
        assert batch["labels"].reshape(shares, -1)[share].tolist() == [row if row < 29 else 0 for row in rows]
    assert sorted(seen) == list(range(1, sum(lengths) + 1)), "every token once"
    assert sorted(row for row in batch["rows"].tolist() if row < 32) == list(range(29)), "every row once"
    assert batch["token_sources"].size < 1.15 * sum(lengths) + shares * PACKED


def test_devices_do_not_change_the_packs():
    """A text has the same packed row, so that dropout draws the same numbers."""
    rows = rows_of(np.random.default_rng(1).integers(1, LONGEST + 1, 32).tolist())

    def tokens_of_packs(shares: int) -> dict[int, list[int]]:
        batch = packs(shares).divide_rows(rows, np.arange(32), 32)
        ids = batch["input_ids"].reshape(shares, -1)
        return {
            int(number): np.where(sources < 0, 0, ids[share][sources]).tolist()
            for share in range(shares)
            for number, sources in zip(batch["pack_numbers"][share], batch["token_sources"][share], strict=True)
            if (sources >= 0).any()
        }

    assert tokens_of_packs(1) == tokens_of_packs(2) == tokens_of_packs(8)


def test_sequences_of_a_row_may_be_in_several_packed_rows():
    mask = (np.arange(LONGEST) < np.array([[9, 3], [8, 8], [12, 2]])[..., None]).astype(np.int32)
    ids = np.cumsum(mask, axis=-1, dtype=np.int32) * mask
    batch = {"input_ids": ids, "token_type_ids": 0 * ids, "attention_mask": mask}
    batch |= {"weights": np.array([1, 1, 0]), "labels": np.array([5, 6, 7])}
    divided = packs(2, by_rows=False).divide_sequences(batch)
    assert divided["labels"].tolist() == [5, 6, 7]
    numbers = divided["sequences_0"].tolist()
    assert sorted(number for number in numbers if number < 6) == list(range(6))
    lengths = [sequence_lengths(batch)[number] if number < 6 else 0 for number in numbers]
    assert divided["attention_mask_0"].sum(axis=1).tolist() == lengths
    assert lengths.count(1) == 2, "the texts of a fill row have one token"
    assert (divided["token_sources"] >= 0).sum() == 9 + 3 + 8 + 8 + 1 + 1


def test_most_batches_have_the_same_sizes():
    random = np.random.default_rng(0)
    batches = [random.integers(1, LONGEST + 1, 32) for _ in range(50)]
    features = rows_of(np.concatenate(batches).tolist())

    def num_programs(packed: PackedTexts) -> list[int]:
        parts = (packed.divide_rows(features, np.arange(at, at + 32), 32) for at in range(0, 1600, 32))
        shapes = [(batch["token_sources"].shape, batch["input_ids"].shape) for batch in parts]
        return sorted((shapes.count(shape) for shape in set(shapes)), reverse=True)

    each, usual = num_programs(packs(4)), num_programs(packs(4).usual_for(batches))
    assert 2 * len(usual) < len(each) and usual[0] > each[0]
