import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.errors import UserError
from bert.model.dropout import Dropout

SHAPE = (64, 16, 48)
ROWS = jnp.arange(SHAPE[0])


def keep(seed: int = 1, step: int = 3, rows: jax.Array = ROWS, site: str = "x", rate: float = 0.1, **kw) -> np.ndarray:
    return np.asarray(Dropout.for_step(seed, step, rows, **kw).keep_mask((len(rows), *SHAPE[1:]), rate, site))


@pytest.mark.medium
@pytest.mark.parametrize("generator", ["hash", "threefry"])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_rate_is_kept_overall_by_row_and_by_place(generator: str, rate: float) -> None:
    mask = keep(rate=rate, generator=generator)
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(mask.mean() - (1 - rate)) < 4 * deviation / np.sqrt(mask.size)
    for axes in ((1, 2), (0, 2), (0, 1)):
        means = mask.mean(axis=axes)
        assert abs(means - (1 - rate)).max() < 5 * deviation / np.sqrt(mask.size / means.size)


@pytest.mark.parametrize("generator", ["hash", "threefry"])
def test_masks_are_independent_of_each_other_and_of_their_neighbours(generator: str) -> None:
    here = keep(rate=0.5, generator=generator)
    others = [
        keep(seed=2, rate=0.5, generator=generator),
        keep(step=4, rate=0.5, generator=generator),
        keep(site="y", rate=0.5, generator=generator),
        np.asarray(Dropout.for_step(1, 3, ROWS, generator).fold_in(0).keep_mask(SHAPE, 0.5, "x")),
        np.asarray(Dropout.for_step(1, 3, ROWS, generator).fold_in(1).keep_mask(SHAPE, 0.5, "x")),
        np.roll(here, 1, axis=0),
        np.roll(here, 1, axis=1),
        np.roll(here, 1, axis=2),
        np.roll(here, 7, axis=2),
        np.roll(here, (0, 1, 16), axis=(0, 1, 2)),
    ]
    # Two independent fair masks agree in half of their places: five standard deviations.
    for other in others:
        assert abs((here == other).mean() - 0.5) < 5 * 0.5 / np.sqrt(here.size)


@pytest.mark.medium
def test_no_row_is_a_copy_of_another() -> None:
    masks = keep(rows=jnp.arange(512), rate=0.5).reshape(512, -1)[:, :64]
    assert len(np.unique(masks, axis=0)) == 512


@pytest.mark.medium
@pytest.mark.parametrize("generator", ["hash", "threefry"])
def test_a_row_has_its_mask_wherever_it_runs(generator: str) -> None:
    whole = keep(generator=generator)
    np.testing.assert_array_equal(keep(rows=ROWS[24:32], generator=generator), whole[24:32])
    shuffled = jnp.array([5, 63, 0])
    np.testing.assert_array_equal(keep(rows=shuffled, generator=generator), whole[np.array(shuffled)])


def test_more_places_than_the_counter_has_are_refused() -> None:
    fits, over = (1, 1, 65535, 65535), (1, 1, 65537, 65536)
    assert jax.eval_shape(lambda: Dropout.for_step(1, 3, jnp.arange(1)).keep_mask(fits, 0.1, "x")).shape == fits
    for shape in (over, (1, 16, 32768, 32768)):
        with pytest.raises(UserError, match="use shorter rows, or set"):
            jax.eval_shape(lambda shape=shape: Dropout.for_step(1, 3, jnp.arange(1)).keep_mask(shape, 0.1, "x"))


@pytest.mark.medium
def test_what_is_kept_is_scaled_and_the_gradient_is_the_mask() -> None:
    dropout = Dropout.for_step(1, 3, ROWS)
    x = jnp.ones(SHAPE)
    y, gradient = dropout(x, 0.25, "x"), jax.grad(lambda x: dropout(x, 0.25, "x").sum())(x)
    expected = np.where(np.asarray(dropout.keep_mask(SHAPE, 0.25, "x")), np.float32(1 / 0.75), 0)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(gradient, expected)
    assert dropout(x, 0.0, "x") is x


@pytest.mark.medium
def test_in_bfloat16_the_scale_is_that_of_float32_rounded_once() -> None:
    """So that dropout keeps the mean: the factor itself, in bfloat16, would be 0.16% too small."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64, 256)), jnp.bfloat16)
    dropout = Dropout.for_step(1, 3, jnp.arange(len(x)))
    y = jax.jit(lambda x: dropout(x, 0.1, "x"))(x)
    assert y.dtype == jnp.bfloat16
    kept = np.asarray(dropout.keep_mask(x.shape, 0.1, "x"))
    expected = (np.asarray(x, np.float32) * np.float32(1 / 0.9)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(y)[kept], expected[kept])
    assert not np.asarray(y)[~kept].any()
    ratio = np.abs(np.asarray(y, np.float64)[kept]).sum() / np.abs(np.asarray(x, np.float64)[kept]).sum()
    assert abs(ratio - 1 / 0.9) < 5e-5
    ones = jax.grad(lambda x: dropout(x, 0.1, "x").astype(jnp.float32).sum())(x)
    assert set(np.unique(np.asarray(ones, np.float32))) == {0.0, float(jnp.bfloat16(1 / 0.9))}
