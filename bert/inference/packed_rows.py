"""Many short texts in few rows, so that little of what is computed is padding; attention keeps the texts apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bert.config import ModelConfig
from bert.data.batching import bucket_length, evaluation_batches
from bert.data.features import Features
from bert.data.pretraining.packing import assign_packs, packing_arrays

LENGTH = 128
"""Tokens of a packed row, unless a text is longer: attention is a small part of the work, and packs are nearly full."""

TEXTS_A_ROW = 8
"""A batch has this many rows fewer than texts are wanted at once. For 32 texts that is four rows of 128 tokens, whose
activations stay in a core's cache."""

LEAST_BATCHES = 8
"""Batches of texts below which they are padded: fewer are soon done, and `Pretrained.warm_up` has compiled them."""


@dataclass(frozen=True)
class PackedRows:
    """Texts by the rows that hold them.

    Attributes:
        length: tokens T of a row.
        num_rows: rows B of a batch.
        packs: numbers of the texts of each row, in their order.
    """

    length: int
    num_rows: int
    packs: list[list[int]]

    def batches(self, features: Features) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """(numbers of the texts of a batch in the order of their tokens, the batch) of each.

        A batch has ``input_ids``, ``token_type_ids``, ``example_ids`` and ``position_ids``, [B, T] int32, the last two
        as `bert.model.encoder.Packing` takes them.
        """
        for start in range(0, len(self.packs), self.num_rows):
            packs = self.packs[start : start + self.num_rows]
            texts = np.concatenate([np.array(pack, np.int64) for pack in packs])
            sizes = np.zeros((self.num_rows, 1), np.int64)
            sizes[: len(packs), 0] = list(map(len, packs))
            taken = np.arange(sizes.max()) < sizes
            lengths, first_lengths = np.zeros(taken.shape, np.int64), np.zeros(taken.shape, np.int64)
            lengths[taken], first_lengths[taken] = features.lengths[texts], features.segment_a_lengths[texts]
            arrays = packing_arrays(lengths, first_lengths, self.length)
            input_ids = np.full((self.num_rows, self.length), features.pad_token_id, np.int32)
            input_ids[arrays["example_ids"] > 0] = np.concatenate(
                [features.ids[features.offsets[text] : features.offsets[text + 1]] for text in texts.tolist()]
            )
            names = ("token_type_ids", "example_ids", "position_ids")
            yield texts, {"input_ids": input_ids, **{name: arrays[name] for name in names}}


def pack_if_shorter(
    features: Features, config: ModelConfig, batch_size: int, buckets: tuple[int, ...]
) -> PackedRows | None:
    """Packed rows of texts, or None where padded ones compute less, or where there are few.

    Args:
        batch_size: texts that are padded to one of ``buckets`` together.
    """
    if len(features) < LEAST_BATCHES * batch_size or features.lengths.min() < 1:
        return None
    longest = config.max_position_embeddings
    length = bucket_length(max(int(features.lengths.max()), min(LENGTH, longest)), buckets, longest)
    num_rows = max(1, batch_size // TEXTS_A_ROW)
    packs = assign_packs(features.lengths, length, length)
    packed = -(-len(packs) // num_rows) * num_rows * length
    padded = [
        bucket_length(int(features.lengths[rows].max()), buckets, longest)
        for rows in evaluation_batches(features.lengths, batch_size)
    ]

    def cost(tokens: int, row: int) -> int:
        """In proportion to the operations of a layer: projections, feed-forward net, attention."""
        return tokens * (2 * config.hidden_size + config.intermediate_size + row)

    is_shorter = cost(packed, length) < sum(cost(batch_size * row, row) for row in padded)
    return PackedRows(length, num_rows, packs) if is_shorter else None
