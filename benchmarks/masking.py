"""Measures tokens per second of masking on one thread: PYTHONPATH=. python benchmarks/masking.py"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from bert.data.pretraining.masking import Masking, philox_uint64, philox_uint64_of_rows

ROWS, LENGTH, STEPS, ROUNDS = 256, 128, 100, 7


def main() -> None:
    ids = np.random.default_rng(0).integers(1000, 30000, (ROWS, LENGTH)).astype(np.uint16)
    ids[:, 0] = 101
    ids[:, LENGTH // 2] = ids[:, -1] = 102
    # A fifth of the tokens continue a word, as in English text.
    for name, continuing in (("single tokens", ()), ("whole words", range(24200, 30000))):
        masking = Masking(30522, 103, (0, 100, 101, 102, 103), max_predictions=20, continuing_ids=continuing)
        width = masking.uint64s_per_row(LENGTH)
        measure(f"{name}, dynamic", partial(draw_dynamic, width), masking, ids)
        measure(f"{name}, static", partial(draw_static, width), masking, ids)


def draw_dynamic(width: int, step: int) -> np.ndarray:
    return philox_uint64((0, step), 0, ROWS, width)


def draw_static(width: int, step: int) -> np.ndarray:
    return philox_uint64_of_rows((0, 0), np.random.default_rng(step).integers(0, 10_000_000, ROWS), width)


def measure(name: str, draw_words: Callable[[int], np.ndarray], masking: Masking, ids: np.ndarray) -> None:
    draw, mask = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for step in range(STEPS):
            words = draw_words(step)
        middle = time.perf_counter()
        for _ in range(STEPS):
            masking(ids, words)
        draw.append(middle - start)
        mask.append(time.perf_counter() - middle)
    drawing, corrupting = statistics.median(draw) / STEPS, statistics.median(mask) / STEPS
    print(f"{name}: B {ROWS}, T {LENGTH}: drawing {drawing * 1e3:.3f} ms, masking {corrupting * 1e3:.3f} ms a batch")
    print(f"{ROWS * LENGTH / (drawing + corrupting) / 1e6:.0f} million tokens/s on one thread (median of {ROUNDS})")


if __name__ == "__main__":
    main()
