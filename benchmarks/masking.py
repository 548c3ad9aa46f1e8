"""Tokens a second that masking takes on one thread: PYTHONPATH=. python benchmarks/masking.py"""

import statistics
import time

import numpy as np

from bert.data.masking import Masking, random_words

ROWS, LENGTH, STEPS, ROUNDS = 256, 128, 100, 7


def main() -> None:
    ids = np.random.default_rng(0).integers(1000, 30000, (ROWS, LENGTH)).astype(np.uint16)
    ids[:, 0] = 101
    ids[:, LENGTH // 2] = ids[:, -1] = 102
    # A fifth of the pieces continue a word, about as in English text.
    for name, continuing in (("single tokens", ()), ("whole words", range(24200, 30000))):
        masking = Masking(30522, 103, (0, 100, 101, 102, 103), max_predictions=20, continuing_ids=continuing)
        measure(name, masking, ids)


def measure(name: str, masking: Masking, ids: np.ndarray) -> None:
    width = masking.words_per_row(LENGTH)
    draw, mask = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for step in range(STEPS):
            words = random_words((0, step), 0, ROWS, width)
        middle = time.perf_counter()
        for _ in range(STEPS):
            masking(ids, words)
        draw.append(middle - start)
        mask.append(time.perf_counter() - middle)
    drawing, corrupting = statistics.median(draw) / STEPS, statistics.median(mask) / STEPS
    print(f"{name}: B {ROWS}, T {LENGTH}: drawing {drawing * 1e3:.3f} ms, masking {corrupting * 1e3:.3f} ms a batch")
    print(
        f"{ROWS * LENGTH / (drawing + corrupting) / 1e6:.0f} million tokens a second on one thread (median of {ROUNDS})"
    )


if __name__ == "__main__":
    main()
