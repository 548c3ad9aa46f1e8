"""Which tokens of a row are predicted: the protocol of every value of data.prediction, and the next token of each.

`bert.data.pretraining.masking` has masked tokens. NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Int32, UInt64

from bert.data.pretraining.objectives import NEXT_ID
from bert.data.pretraining.packing import EXAMPLE_LENGTH


class Predictions(Protocol):
    """Which tokens of rows are predicted, and what the model reads in their place.

    A row takes a fixed number of random words, so that any process can draw any row.
    """

    def uint64s_per_row(self, sequence_length: int, examples: int = 1) -> int:
        """64-bit random words that a row of T tokens, of so many packed examples, takes."""
        ...

    def batch_arrays(self, rows: dict[str, np.ndarray], words: np.ndarray) -> dict[str, Any]:
        """``input_ids`` [B, T] as the model reads them, and the arrays that say what is predicted.

        Args:
            rows: columns of `bert.data.pretraining.shards.ShardReader.take`.
            words: [B, uint64s_per_row(T, K)] uint64, uniformly distributed.
        """
        ...


@dataclass(frozen=True)
class NextTokens:
    """Every token is predicted from those before it in its row, or in its example of a packed row.

    The first token of a row is predicted by the row before it, if there is one, as in blocks.
    """

    def uint64s_per_row(self, sequence_length: int, examples: int = 1) -> int:
        """None: nothing is drawn."""
        del sequence_length, examples
        return 0

    def batch_arrays(
        self, rows: dict[str, np.ndarray], words: UInt64[np.ndarray, "B 0"]
    ) -> dict[str, Int32[np.ndarray, "B T"] | Float32[np.ndarray, "B T"]]:
        """Labels are the tokens, shifted by one.

        Returns:
            ``input_ids`` [B, T] int32; ``next_token_ids`` [B, T] int32, 0 where there is no next token;
            ``next_token_weights`` [B, T] float32, 1 where there is one and 0 elsewhere.
        """
        del words
        ids = rows["input_ids"].astype(np.int32)
        following = rows[NEXT_ID] if NEXT_ID in rows else np.full(len(ids), -1, np.int32)
        ends = np.cumsum(rows.get(EXAMPLE_LENGTH, rows["length"][:, None]), axis=1)
        places = np.arange(ids.shape[1])
        is_last = (places[:-1] == ends[:, :, None] - 1).any(axis=1)
        labels = np.concatenate([np.where(is_last, -1, ids[:, 1:]), following[:, None]], axis=1)
        weights = (places < rows["length"][:, None]) & (labels >= 0)
        return {
            "input_ids": ids,
            "next_token_ids": np.where(weights, labels, 0).astype(np.int32),
            "next_token_weights": weights.astype(np.float32),
        }
