"""Temperature scaling against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.metrics import log_loss

from bert.metrics.calibration import TEMPERATURES, Hits, calibration, fit_temperature


def drawn_rows(temperature: float, rows: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits, and labels drawn from their softmax at a temperature."""
    random = np.random.default_rng(0)
    logits = 4 * random.normal(size=(rows, 3))
    shares = softmax(logits / temperature, axis=1)
    return logits.astype(np.float32), np.array([random.choice(3, p=row) for row in shares])


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_the_temperature_has_the_least_cross_entropy(temperature: float) -> None:
    logits, labels = drawn_rows(temperature)
    fitted = fit_temperature(logits, labels)
    assert fitted is not None and fitted == pytest.approx(temperature, rel=0.25)

    def loss(divisor: float) -> float:
        return float(log_loss(labels, softmax(logits.astype(np.float64) / divisor, axis=1)))

    grid = fitted * np.array([0.9, 0.99, 0.999, 1.001, 1.01, 1.1])
    assert loss(fitted) <= min(map(loss, (1.0, *grid)))
    before, after = (softmax(logits / divisor, axis=1) for divisor in (1, fitted))
    assert (before.argmax(1) == after.argmax(1)).all()
    if temperature == 2.5:  # overconfident logits
        eces = [calibration(Hits(one.argmax(1) == labels, one.max(1))).ece for one in (before, after)]
        assert eces[1] < eces[0] / 2


def test_there_is_no_temperature_if_all_rows_are_right() -> None:
    assert fit_temperature(np.array([[2.0, 0.0], [0.0, 1.0]]), np.array([0, 1])) is None


def test_the_temperature_is_bounded_if_the_logits_mislead() -> None:
    logits = np.array([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    assert fit_temperature(logits, np.array([1, 0, 0])) == pytest.approx(TEMPERATURES[1], rel=1e-3)
