"""Windows over a long input: where they begin, and which of them shows most around a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Text = str | tuple[str, str]


def window_starts(tokens: int, room: int) -> np.ndarray:
    """[windows] first token of each: half of ``room`` apart, the last one as far to the right as it goes."""
    last = max(tokens - room, 0)
    return np.array([*range(0, last, max(room // 2, 1)), last])


def widest_windows(starts: Sequence[int] | np.ndarray, ends: Sequence[int] | np.ndarray) -> np.ndarray:
    """[tokens] number of the window in which each token has most context, by run_squad.py's rule.

    That is the lesser of the numbers of tokens left and right of it, plus a hundredth of the window's length; the first
    of several with as much. Every token is in a window; time and memory are in proportion to the windows' tokens.
    """
    most = np.full(ends[-1], -1.0)
    widest = np.zeros(ends[-1], np.int64)
    for window, (start, end) in enumerate(zip(starts, ends, strict=True)):
        position = np.arange(end - start)
        score = np.minimum(position, position[::-1]) + 0.01 * (end - start)
        here = np.flatnonzero(score > most[start:end]) + start
        most[here], widest[here] = score[here - start], window
    return widest
