"""``data.class_weights``: how much the rows with each label weigh in the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bert.errors import UserError, quoted

BALANCED = "balanced"


def class_weights(given: str | Sequence[str], labels: Sequence[str], balanced: np.ndarray) -> tuple[float, ...]:
    """The weight of each label.

    Args:
      given: ``balanced``, or entries LABEL=WEIGHT; labels without one have 1.
      labels: all of them.
      balanced: the weights of ``balanced``.

    Raises:
      UserError: an entry is of another form, or of an unknown label.
    """
    if given in (BALANCED, [BALANCED]):
        return tuple(balanced.tolist())
    weights = dict.fromkeys(labels, 1.0)
    for entry in [given] if isinstance(given, str) else given:
        label, _, number = (part.strip() for part in entry.rpartition("="))
        if label not in weights:
            wrong = f"data.class_weights has {entry!r}, and the labels are {quoted(labels)}"
            raise UserError(f"{wrong}: use {BALANCED}, or LABEL=WEIGHT")
        weights[label] = _to_weight(entry, number)
    return tuple(weights.values())


def _to_weight(entry: str, number: str) -> float:
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise UserError(f"data.class_weights has {entry!r}: set the weight to a number above 0")
    return weight
