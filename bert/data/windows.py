"""Where the windows over a long input begin."""

from __future__ import annotations

import numpy as np

Text = str | tuple[str, str]


def window_starts(tokens: int, room: int) -> np.ndarray:
    """[windows] first token of each: half of ``room`` apart, the last one as far to the right as it goes."""
    last = max(tokens - room, 0)
    return np.array([*range(0, last, max(room // 2, 1)), last])
