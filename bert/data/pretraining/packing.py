"""Packs several short examples into one row by histogram packing (Krell et al. 2021, arXiv 2107.02027).

The histogram of lengths determines which examples share a row. A packed row stores the lengths of up to K examples,
from which their offsets, positions and [CLS] follow.
"""

from __future__ import annotations

import numpy as np

Columns = dict[str, np.ndarray]

EXAMPLE_LENGTH = "example_length"
"""Column [R, K] of packed rows: tokens of each example, special tokens included."""


def shortest_pack_first(histogram: np.ndarray, max_examples: int) -> list[tuple[int, tuple[int, ...]]]:
    """Returns packs for examples of these lengths: SPFHP of Krell et al., section 3.2.

    From the longest example to the shortest, each one goes into the pack with the most room if it fits, otherwise into
    a new pack. Equal packs are counted, not listed, so that the time does not grow with the number of examples.
    Unlike in the paper's listing, examples of one length may share a pack.

    Args:
      histogram: number of examples of each length 0 ... T, integers [T + 1].

    Returns:
      (number of packs, lengths of the examples in each), with the longest example first.
    """
    max_length = len(histogram) - 1
    with_room: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(max_length + 1)]
    full: list[tuple[int, tuple[int, ...]]] = []

    def keep(count: int, pack: tuple[int, ...]) -> None:
        if count:
            (full if len(pack) == max_examples else with_room[max_length - sum(pack)]).append((count, pack))

    for length in range(max_length, 0, -1):
        left = int(histogram[length])
        if not left:
            continue
        for room in range(max_length, length - 1, -1):  # a filled pack is returned with less room
            while left and with_room[room]:
                count, pack = with_room[room].pop()
                number = min(count, left)
                left -= number
                keep(number, (*pack, length))
                keep(count - number, pack)
        together = min(max_examples, max_length // length)
        keep(left // together, (length,) * together)
        keep(min(left % together, 1), (length,) * (left % together))
    return [*full, *(group for groups in with_room for group in groups)]


def assign_packs(lengths: np.ndarray, max_length: int, max_examples: int) -> list[list[int]]:
    """Returns the indices of the examples of each row, ascending within a row; rows are sorted by their first index.

    Args:
      lengths: tokens of each example, [E] integers from 1 to ``max_length``.
    """
    histogram = np.bincount(lengths, minlength=max_length + 1)
    of_length = np.split(np.argsort(lengths, kind="stable"), np.cumsum(histogram)[:-1])
    waiting = [iter(indices.tolist()) for indices in of_length]
    packs = (pack for count, pack in shortest_pack_first(histogram, max_examples) for _ in range(count))
    return sorted(sorted(next(waiting[length]) for length in pack) for pack in packs)


def pack_rows(columns: Columns, max_examples: int, pad: int) -> Columns:
    """Packs rows of one example into rows of up to K examples.

    Args:
      columns: input_ids [E, T], length, segment_a_length and, if the input format has one, a label [E].

    Returns:
      input_ids [R, T], length [R] of all examples of a row; example_length, segment_a_length and label [R, K], 0
      where a row has fewer examples.
    """
    ids, lengths = columns["input_ids"], columns["length"]
    max_length = ids.shape[1]
    packs = assign_packs(lengths, max_length, max_examples)
    order = np.concatenate([np.array(pack, np.int64) for pack in packs])
    sizes = np.array([len(pack) for pack in packs])
    taken = np.arange(max_examples) < sizes[:, None]

    def per_example(values: np.ndarray) -> np.ndarray:
        spread = np.zeros(taken.shape, values.dtype)
        spread[taken] = values[order]
        return spread

    example_length = per_example(lengths)
    total = example_length.sum(axis=1, dtype=np.int32)
    rows = np.full((len(packs), max_length), pad, ids.dtype)
    # The concatenated tokens of the examples are the concatenated tokens of the packed rows.
    rows[np.arange(max_length) < total[:, None]] = ids[order][np.arange(max_length) < lengths[order][:, None]]
    rest = {name: per_example(values) for name, values in columns.items() if name not in ("input_ids", "length")}
    return {"input_ids": rows, "length": total, EXAMPLE_LENGTH: example_length, **rest}


def packing_arrays(example_length: np.ndarray, segment_a_length: np.ndarray, length: int) -> Columns:
    """Returns the arrays of a packed batch that describe its examples, all int32.

    Args:
      example_length, segment_a_length: [B, K].
      length: T.

    Returns:
      ``example_ids`` [B, T], 1 ... K and 0 for padding; ``position_ids`` [B, T], from 0 on in each example;
      ``token_type_ids`` [B, T]; ``cls_positions`` [B, K], the first position of each example, 0 if unused.
    """
    ends = np.cumsum(example_length, axis=1, dtype=np.int32)
    starts = ends - example_length
    position = np.arange(length, dtype=np.int32)
    present = position < ends[:, -1:]
    example = (position >= ends[:, :, None]).sum(axis=1)
    example[~present] = 0
    within = np.where(present, position - np.take_along_axis(starts, example, axis=1), 0)
    second = present & (within >= np.take_along_axis(segment_a_length, example, axis=1))
    return {
        "example_ids": np.where(present, example + 1, 0).astype(np.int32),
        "position_ids": within.astype(np.int32),
        "token_type_ids": second.astype(np.int32),
        "cls_positions": np.where(example_length > 0, starts, 0).astype(np.int32),
    }
