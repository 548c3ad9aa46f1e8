"""Packs the texts of a fine-tuning batch into shared rows of the encoder (`bert.model.packing`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bert.data.batching import USUAL, LengthGroups, bucket_length, sequence_lengths
from bert.data.pretraining.packing import assign_packs
from bert.data.rows import TOKEN_ARRAYS, Rows

TEXTS_MULTIPLE = 8
"""The number of texts per share is a multiple of it, so that few programs are compiled."""


class _Share(NamedTuple):
    """The packed rows of a share of a batch, as numbers of packs, and its texts."""

    packs: list[int]
    texts: np.ndarray


@dataclass(frozen=True)
class PackedTexts(LengthGroups):
    """Divides a batch into one group of texts, whose tokens share rows of the encoder.

    A text and its packed row are in the same share of the batch, for a device and a micro-batch each. The packs depend
    only on the global batch.

    Attributes:
        multiple: number of shares.
        min_lengths: minimum padded length of the texts.
        packed_length: S, tokens of a packed row.
        min_rows, min_texts: minimum number of packed rows and of texts per share.
    """

    packed_length: int = 128
    min_rows: int = 1
    min_texts: int = TEXTS_MULTIPLE

    def usual_for(self, batches: Iterable[np.ndarray]) -> PackedTexts:
        """Returns packed rows with the same sizes for most batches, so that few programs are compiled."""
        sizes = [(lengths.max(initial=1), *self._sizes(self._shares(lengths)[1])) for lengths in batches]
        length, rows, texts = (int(size) for size in np.quantile(sizes, USUAL, axis=0, method="higher"))
        return dataclasses.replace(self, min_lengths=(self._padded(length),), min_rows=rows, min_texts=texts)

    def divide_sequences(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns a batch with one group, as in `LengthGroups`, and the arrays of `bert.model.packing.TokenPlaces`."""
        lengths = sequence_lengths(batch)
        length = batch["input_ids"].shape[-1]
        numbers, places = self._pack(lengths, length)
        copied = np.where(numbers < len(lengths), numbers, 0)
        group = {name: batch[name].reshape(-1, length)[copied] for name in TOKEN_ARRAYS}
        group["attention_mask"] = (places["token_places"] >= 0).astype(np.int32)
        others = {name: array for name, array in batch.items() if name not in TOKEN_ARRAYS}
        return others | {f"{name}_0": array for name, array in group.items()} | {"sequences_0": numbers} | places

    def divide_rows(self, features: Rows, rows: np.ndarray, batch_size: int) -> dict[str, np.ndarray]:
        """Returns the rows in the order of their shares, and the arrays of `bert.model.packing.TokenPlaces`.

        ``rows`` are the indices in the batch, the batch size for fill rows.
        """
        length = max(*self.min_lengths, self._padded(int(features.lengths[rows].max())))
        batch = features.batch(rows, length, batch_size + 1)  # the last row fills
        numbers, places = self._pack(batch["attention_mask"][:-1].sum(axis=1), length)
        return {name: array[numbers] for name, array in batch.items()} | {"rows": numbers} | places

    def _pack(self, lengths: np.ndarray, length: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns the number of each text, len(lengths) for texts that fill a share, and the places of their tokens."""
        packs, shares = self._shares(lengths)
        rows, texts = self._sizes(shares)
        sources = np.full((self.multiple, rows, self.packed_length), -1, np.int32)
        places = np.full((self.multiple, texts, length), -1, np.int32)
        numbers = np.full((self.multiple, texts), len(lengths), np.int32)
        pack_numbers = np.full((self.multiple, rows), len(packs), np.int32)
        for share, (share_packs, share_texts) in enumerate(shares):
            numbers[share, : len(share_texts)] = share_texts
            pack_numbers[share, : len(share_packs)] = share_packs
            index = {text: at for at, text in enumerate(share_texts.tolist())}
            for row, pack in enumerate(share_packs):
                start = 0
                for text in packs[pack]:
                    tokens, at = np.arange(lengths[text]), index[text]
                    sources[share, row, start + tokens] = at * length + tokens
                    places[share, at, tokens] = row * self.packed_length + start + tokens
                    start += len(tokens)
        arrays = {"token_sources": sources, "token_places": places.reshape(-1, length), "pack_numbers": pack_numbers}
        return numbers.ravel(), arrays

    def _shares(self, lengths: np.ndarray) -> tuple[list[list[int]], list[_Share]]:
        """Returns the texts of each pack, and the shares, with about equally many packs and texts each."""
        real = np.flatnonzero(lengths)
        packs = [real[pack].tolist() for pack in assign_packs(lengths[real], self.packed_length, self.packed_length)]
        dealt: list[list[int]] = [[] for _ in range(self.multiple)]
        for turn, pack in enumerate(sorted(range(len(packs)), key=lambda pack: -len(packs[pack]))):
            round_number, place = divmod(turn, self.multiple)
            dealt[-1 - place if round_number % 2 else place].append(pack)
        texts = [sorted(text for pack in share for text in packs[pack]) for share in dealt]
        return packs, [_Share(sorted(share), np.array(own, np.int32)) for share, own in zip(dealt, texts, strict=True)]

    def _sizes(self, shares: list[_Share]) -> tuple[int, int]:
        """Returns the numbers of packed rows and of texts per share."""
        rows, texts = (max(map(len, parts)) for parts in zip(*shares, strict=True))
        return max(self.min_rows, rows), max(self.min_texts, -(-texts // TEXTS_MULTIPLE) * TEXTS_MULTIPLE)

    def _padded(self, length: int) -> int:
        return bucket_length(length, self.buckets, self.max_length)
