import jax.numpy as jnp
import numpy as np

from bert.losses import correct, cross_entropy


def test_cross_entropy_by_hand() -> None:
    logits = jnp.log(jnp.array([[[0.7, 0.2, 0.1], [0.25, 0.5, 0.25]]]))
    total, weight = cross_entropy(logits, jnp.array([[0, 2]]), jnp.array([[1.0, 1.0]]))
    np.testing.assert_allclose(total, -np.log(0.7) - np.log(0.25), rtol=1e-6)
    assert weight == 2
    total, weight = cross_entropy(logits, jnp.array([[0, 2]]), jnp.array([[0.0, 1.0]]))
    np.testing.assert_allclose(total, -np.log(0.25), rtol=1e-6)
    assert weight == 1


def test_huge_logits_stay_finite() -> None:
    total, _ = cross_entropy(jnp.array([[1e4, -1e4]]), jnp.array([1]), jnp.array([1.0]))
    np.testing.assert_allclose(total, 2e4)


def test_correct_counts_weighted_hits() -> None:
    logits = jnp.array([[1.0, 2.0, 0.0], [5.0, 2.0, 0.0], [0.0, 0.0, 3.0]])
    hits, weight = correct(logits, jnp.array([1, 1, 2]), jnp.array([1.0, 1.0, 0.5]))
    assert (hits, weight) == (1.5, 2.5)
