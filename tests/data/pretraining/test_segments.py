"""Rows that continue the rows of the batch before."""

import numpy as np
import pytest

from bert.data.pretraining.loader import (
    MEMORY_TOKENS,
    HeldOutMemory,
    SegmentLoader,
    held_out_batches,
    num_held_out_batches,
)
from bert.data.pretraining.masking import NextTokens
from bert.errors import UserError

T, M = 4, 6


class Blocks:
    """Rows of T tokens that count upwards; row 7 ends its text, and has no next token."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        ids = indices[:, None] * T + np.arange(T)
        following = np.where((indices == 7) | (indices == self.count - 1), -1, ids[:, -1] + 1)
        full = np.full(len(indices), T)
        return {"input_ids": ids, "length": full, "segment_a_length": full, "next_id": following}


def loader(rows: int = 23, batch_size: int = 4, process: tuple[int, int] = (0, 1)) -> SegmentLoader:
    return SegmentLoader(Blocks(rows), NextTokens(), batch_size, seed=1, process=process, memory_length=M)


def test_each_row_continues_the_row_of_the_batch_before() -> None:
    whole, steps = loader(), 23 // 4
    firsts = set()
    for epoch in range(8):
        indices = np.stack([whole.row_indices(epoch * steps + step) for step in range(steps)])
        assert ((indices[1:] - indices[:-1]) % 23 == 1).all()
        assert len(np.unique(indices)) == 4 * steps, "no row twice in an epoch"
        firsts.add(int(indices[0, 0]))
    assert len(firsts) > 4, "epochs begin at other rows, so that those left out differ"


def test_the_memory_has_the_tokens_before_a_row_in_its_text() -> None:
    whole, steps = loader(), 23 // 4
    for step in range(3 * steps):
        batch, indices = whole.batch(step), whole.row_indices(step)
        for index, tokens in zip(indices.tolist(), batch[MEMORY_TOKENS].tolist(), strict=True):
            start = 8 if index >= 8 else 0
            assert tokens == min(M, T * min(step % steps, index - start)), (step, index)


def test_hosts_read_their_rows_of_the_same_global_batch() -> None:
    whole, parts = loader(), [loader(process=(index, 2)) for index in range(2)]
    for step in (0, 3, 11):
        batches = [part.batch(step) for part in parts]
        for name, value in whole.batch(step).items():
            np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), value)


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("processes", [1, 2])
def test_every_held_out_row_counts_once(processes: int, num_before: int) -> None:
    seen: list[int] = []
    for process in range(processes):
        before: dict[int, int] = {}
        memory = HeldOutMemory(M, num_before)
        batches = list(held_out_batches(Blocks(23), NextTokens(), 4, (process, processes), memory))
        assert len(batches) == num_held_out_batches(23, 4, memory) == 6 + num_before
        for number, batch in enumerate(batches):
            assert len(batch["rows"]) == 4 // processes
            for place, real in enumerate(batch["attention_mask"][:, 0]):
                if real:
                    index = int(batch["input_ids"][place, 0]) // T
                    assert before.get(place, index - 1) == index - 1
                    before[place] = index
                    if number >= num_before:
                        seen.append(index)
                    else:
                        assert not batch["next_token_weights"][place].any()
                    start = 8 if index >= 8 else 0
                    assert batch[MEMORY_TOKENS][place] == min(M, T * min(number, index - start))
                else:
                    assert not batch["next_token_weights"][place].any()
    assert sorted(seen) == list(range(23))


def test_fewer_rows_than_a_batch_are_rejected() -> None:
    with pytest.raises(UserError, match=r"data\.train has 3 rows, but with model\.memory_length each of the 4 rows"):
        loader(rows=3)
