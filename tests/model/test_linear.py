"""Derivatives that are written out against those that JAX derives."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from bert.model.linear import gelu, linear, tied_logits
from bert.training.losses import cross_entropy
from tests.tiny_training import OBJECTIVE, batch_of, initial_params

ROWS, WIDTH, OUT = (3, 5), 16, 24


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def value_and_grads(function, *arguments):
    return jax.jit(lambda *inputs: jax.value_and_grad(function, tuple(range(len(inputs))))(*inputs))(*arguments)


def relative(actual, expected):
    actual, expected = (np.asarray(array, np.float64) for array in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


PRODUCTS = {
    "linear": (linear, lambda x, w, b, dtype: x.astype(dtype) @ w.astype(dtype) + b.astype(dtype), (WIDTH, OUT)),
    "decode": (
        tied_logits,
        lambda x, w, b, dtype: (x.astype(dtype) @ w.astype(dtype).T).astype(jnp.float32) + b,
        (OUT, WIDTH),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("dtype", "limit"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)])
def test_products_are_as_derived(name, dtype, limit):
    product, plain, shape = PRODUCTS[name]
    inputs, target = (normal(0, *ROWS, WIDTH), normal(1, *shape), normal(2, OUT)), normal(3, *ROWS, OUT)
    dtype = jnp.dtype(dtype)
    actual, expected = (
        value_and_grads(lambda *inputs, of=of: jnp.sum(of(*inputs, dtype).astype(jnp.float32) * target), *inputs)
        for of in (product, plain)
    )
    assert product(*inputs, dtype).dtype == (jnp.float32 if name == "decode" else dtype)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert relative(one, other) <= limit


@pytest.mark.medium
@pytest.mark.parametrize("name", PRODUCTS)
def test_bfloat16_rounds_less_than_what_jax_derives(name):
    """Its sums stay float32 to the end: against float32 with the same rounded operands only the gradient's own
    rounding is left."""
    product, plain, shape = PRODUCTS[name]
    inputs, target = (normal(0, 512, WIDTH), normal(1, *shape), normal(2, OUT)), normal(3, 512, OUT)

    def errors(of, dtype):
        loss = lambda *inputs: jnp.sum(of(*inputs, jnp.dtype(dtype)).astype(jnp.float32) * target)  # noqa: E731
        _, result = value_and_grads(loss, *inputs)
        _, exact = value_and_grads(lambda *inputs: jnp.sum(plain(*inputs, jnp.dtype("float32")) * target), *inputs)
        return [relative(one, other) for one, other in zip(result[1:], exact[1:], strict=True)]

    for mine, derived in zip(errors(product, "bfloat16"), errors(plain, "bfloat16"), strict=True):
        assert mine <= 1.01 * derived + 1e-6


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_what_other_platforms_compute_is_what_a_cpu_does(monkeypatch, name, dtype, limit):
    """Over rows in two dimensions. In bfloat16 a CPU sums in float32 and rounds once, others round as JAX does."""
    product, _, shape = PRODUCTS[name]
    inputs, target = (normal(0, *ROWS, WIDTH), normal(1, *shape), normal(2, OUT)), normal(3, *ROWS, OUT)
    taken = []

    def default_alone(*operands, default, **platforms):
        taken.append(platforms.keys())
        return default(*operands)

    def of(*inputs):
        return jnp.sum(product(*inputs, jnp.dtype(dtype)).astype(jnp.float32) * target)

    on_cpu = value_and_grads(of, *inputs)
    monkeypatch.setattr(jax.lax, "platform_dependent", default_alone)
    elsewhere = value_and_grads(of, *inputs)
    # Products forward and back in bfloat16, and the gradients of the weights in both types.
    assert taken == [{"cpu"}] * (1 if dtype == "float32" else 3)
    for one, other in zip(jax.tree.leaves(elsewhere), jax.tree.leaves(on_cpu), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert relative(one, other) <= limit


@pytest.mark.medium
@pytest.mark.parametrize(("dtype", "limit"), [(jnp.float32, 3e-7), (jnp.bfloat16, 5e-3)])
def test_gelu_is_as_derived(dtype, limit):
    x = jnp.linspace(-9, 9, 2001)
    plain = lambda x: jax.nn.gelu(x, approximate=False)  # noqa: E731
    result, exact = (value_and_grads(lambda x, of=of: jnp.sum(of(x)), x)[1][0] for of in (gelu, plain))
    assert np.abs(gelu(x.astype(dtype)).astype(jnp.float32) - plain(x)).max() <= 9 * limit
    assert np.abs(result - exact).max() <= 1e-6
    assert gelu(x.astype(dtype)).dtype == dtype


def pretraining_loss(params):
    losses, _ = OBJECTIVE.forward(params, batch_of(0), None)
    return sum(total / weight for total, weight in losses.values())


@pytest.mark.slow
def test_forward_mode_and_hessian_vector_products_without_the_custom_backward(monkeypatch):
    """Against the gradient, and the difference of two gradients, of the backward passes written for CPUs."""
    direction = jax.tree.map(lambda array: 0.1 * normal(4, *array.shape), initial_params())
    gradient = jax.jit(jax.grad(pretraining_loss))
    step = 1e-2
    ahead, behind = (
        gradient(jax.tree.map(lambda p, d, way=way: p + way * step * d, initial_params(), direction)) for way in (1, -1)
    )
    difference = jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)
    slope = sum(
        jnp.vdot(g, d)
        for g, d in zip(jax.tree.leaves(gradient(initial_params())), jax.tree.leaves(direction), strict=True)
    )
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(pretraining_loss, (initial_params(),), (direction,))

    monkeypatch.setenv("BERT_NO_CUSTOM_VJP", "1")
    _, tangent = jax.jit(lambda *inputs: jax.jvp(pretraining_loss, (inputs[0],), (inputs[1],)))(
        initial_params(), direction
    )
    assert tangent == pytest.approx(float(slope), rel=1e-4)
    product = jax.jit(lambda *inputs: jax.jvp(jax.grad(pretraining_loss), (inputs[0],), (inputs[1],))[1])
    result = jax.flatten_util.ravel_pytree(product(initial_params(), direction))[0]
    assert relative(result, jax.flatten_util.ravel_pytree(difference)[0]) <= 1e-2


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_other_backends_have_no_custom_backward(monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    inputs = (normal(0, *ROWS, WIDTH), normal(1, WIDTH, OUT), normal(2, OUT))
    for dtype in ("float32", "bfloat16"):
        jax.jvp(lambda *inputs, dtype=dtype: linear(*inputs, jnp.dtype(dtype)), inputs, inputs)


@pytest.mark.medium
def test_cross_entropy_is_as_derived():
    logits, weights = normal(0, *ROWS, OUT) * 4, jnp.asarray([[1, 0, 1, 1, 0.5]] * 3)
    labels = jnp.asarray(np.random.default_rng(1).integers(0, OUT, ROWS), jnp.int32)

    def plain(logits, labels, weights):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
        return jnp.sum(-chosen * weights)

    actual, expected = (
        jax.value_and_grad(lambda logits, of=of: of(logits, labels, weights))(logits)
        for of in (lambda *inputs: cross_entropy(*inputs)[0], plain)
    )
    assert relative(actual[0], expected[0]) <= 1e-6
    assert relative(actual[1], expected[1]) <= 1e-6


@pytest.mark.medium
def test_a_class_shut_out_of_the_softmax_has_no_gradient_and_spoils_none():
    logits = jnp.asarray([[1.0, float(jnp.finfo(jnp.float32).min), 2.0]])
    grad = jax.grad(lambda logits: cross_entropy(logits, jnp.asarray([2]), jnp.ones(1))[0])(logits)
    assert grad[0, 1] == 0
    assert np.isfinite(grad).all()
