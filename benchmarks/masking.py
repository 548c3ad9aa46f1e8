"""Tokens a second that masking takes on one thread: PYTHONPATH=. python benchmarks/masking.py"""

import statistics
import time

import numpy as np

from bert.data.masking import Masking, random_words

ROWS, LENGTH, STEPS, ROUNDS = 256, 128, 100, 7


def main() -> None:
    masking = Masking(vocab_size=30522, mask_id=103, special_ids=(0, 100, 101, 102, 103), max_predictions=20)
    ids = np.random.default_rng(0).integers(1000, 30000, (ROWS, LENGTH)).astype(np.uint16)
    ids[:, 0] = 101
    ids[:, LENGTH // 2] = ids[:, -1] = 102
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
    print(f"B {ROWS}, T {LENGTH}: drawing {drawing * 1e3:.3f} ms, masking {corrupting * 1e3:.3f} ms a batch")
    print(
        f"{ROWS * LENGTH / (drawing + corrupting) / 1e6:.0f} million tokens a second on one thread (median of {ROUNDS})"
    )


if __name__ == "__main__":
    main()
