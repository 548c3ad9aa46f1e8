"""The published activation formula, by hand."""

from bert.analysis.memory_estimate import activation_bytes
from bert.config import ModelConfig

BASE = ModelConfig(30522, 768, 12, 12, 3072)


def test_formula_by_hand() -> None:
    s, h, a = 128, 768, 12
    assert activation_bytes(BASE, s) == 12 * s * h * (34 + 5 * a * s / h)
    assert activation_bytes(BASE, s, itemsize=4) == 2 * activation_bytes(BASE, s)
    assert activation_bytes(BASE, s, remat="full") == 12 * 2 * s * h + s * h * (34 + 5 * a * s / h)
    assert activation_bytes(BASE, s, stores_scores=False) == 12 * 34 * s * h
    assert activation_bytes(BASE, s, tensor=2) == 12 * s * h * (10 + 24 / 2 + 5 * a * s / (h * 2))
