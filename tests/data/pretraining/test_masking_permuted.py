"""Permuted masking: chooses the same tokens as masking, in random order, and hides nothing."""

import numpy as np

from bert.data.pretraining.loader import PretrainingLoader, held_out_batches
from bert.data.pretraining.masking import Masking, PermutedMasking, philox_uint64
from tests.helpers import NumberedRows

SETTINGS = {"vocab_size": 500, "mask_id": 4, "special_ids": (0, 1, 2, 3, 4), "max_predictions": 5}
PERMUTED, ROWS = PermutedMasking(**SETTINGS), NumberedRows(400)


def batches(rows: int, packed: bool = False) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The arrays of permuted rows, and of masking by the same random words."""
    taken = ROWS.take(np.arange(rows))
    if packed:
        taken["example_length"] = np.stack([taken["length"] - 10, np.full(rows, 10)], axis=1)
    words = philox_uint64((3, 0), 0, rows, PERMUTED.uint64s_per_row(32, 1 + packed))
    return PERMUTED.batch_arrays(taken, words), Masking(**SETTINGS).batch_arrays(taken, words)


def test_the_same_tokens_are_predicted_in_another_order() -> None:
    for packed in (False, True):
        permuted, masked = batches(50, packed)
        np.testing.assert_array_equal(permuted["input_ids"], ROWS.take(np.arange(50))["input_ids"])
        np.testing.assert_array_equal(permuted["masked_lm_weights"], masked["masked_lm_weights"])
        used = permuted["masked_lm_weights"] > 0
        assert permuted["query_ids"].shape == used.shape and (permuted["query_ids"] == 4).all()
        moved = 0
        for row in range(50):
            actual, expected = (
                list(zip(x["masked_lm_positions"][row, used[row]], x["masked_lm_ids"][row, used[row]], strict=True))
                for x in (permuted, masked)
            )
            assert sorted(actual) == expected
            moved += actual != expected
        assert moved > 40


def test_every_order_is_as_likely() -> None:
    """The first two predictions of a row are in left-to-right order in half of the rows."""
    permuted, _ = batches(400)
    first, second = permuted["masked_lm_positions"][:, :2].T
    assert 0.42 < (first < second).mean() < 0.58


def test_orders_follow_from_seed_step_and_row() -> None:
    whole = PretrainingLoader(ROWS, PERMUTED, 16, seed=7)
    parts = [PretrainingLoader(ROWS, PERMUTED, 16, seed=7, process=(index, 2)).batch(3) for index in range(2)]
    for name, array in whole.batch(3).items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)
    assert (whole.batch(3)["masked_lm_positions"] != whole.batch(4)["masked_lm_positions"]).any()
    held_out = [[batch["masked_lm_positions"] for batch in held_out_batches(ROWS, PERMUTED, 64)] for _ in range(2)]
    np.testing.assert_array_equal(*map(np.concatenate, held_out))
