import dataclasses
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, path_aware_map, unflatten_dict

from bert.config import OptimizerConfig
from bert.errors import UserError
from bert.runs.checkpoint import Checkpointer
from bert.training.optimizer import (
    decay_mask,
    describe_decay,
    is_matrix_of_layer,
    layer_depth,
    learning_rate_schedule,
    make_frozen_predicate,
    make_optimizer,
    scale_by_bert_adam,
)

NAMES = get_args(get_type_hints(OptimizerConfig)["name"])

PARAMS = {
    "dense": {"kernel": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "bias": jnp.array([0.5, -0.5])},
    "norm": {"scale": jnp.array([1.0, 1.5]), "bias": jnp.array([0.1, 0.2])},
    "word": {"embedding": jnp.array([[0.3, -0.7]])},
}
GRADS = [jax.tree.map(lambda p, i=i: (0.3 + 0.1 * i) * p + 0.05, PARAMS) for i in range(4)]
DECAYED = {
    "dense": {"kernel": True, "bias": False},
    "norm": {"scale": False, "bias": False},
    "word": {"embedding": True},
}


def run(config: OptimizerConfig, steps: int) -> dict:
    optimizer = make_optimizer(config, total_steps=10)
    params, state = PARAMS, optimizer.init(PARAMS)
    for grads in GRADS[:steps]:
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def by_hand(config: OptimizerConfig, steps: int) -> dict:
    """The formulas, tensor by tensor, in float64."""
    rates = [config.learning_rate * min(t / 2, (10 - t) / 8) for t in range(10)]  # warm-up 2 of 10 steps
    result = jax.tree.map(lambda p: np.asarray(p, np.float64), PARAMS)
    m = v = jax.tree.map(np.zeros_like, result)
    for t, grads in enumerate(GRADS[:steps]):
        grads = jax.tree.map(lambda g: np.asarray(g, np.float64), grads)
        norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        if config.max_grad_norm and norm > config.max_grad_norm:
            grads = jax.tree.map(lambda g: g * config.max_grad_norm / norm, grads)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, v, grads)

        def update(p, m, v, decayed):
            if config.bias_correction:
                m, v = m / (1 - 0.9 ** (t + 1)), v / (1 - 0.999 ** (t + 1))
            u = m / (np.sqrt(v) + config.epsilon) + decayed * config.weight_decay * p
            if config.name == "lamb" and decayed:
                u = u * np.linalg.norm(p) / np.linalg.norm(u)
            return p - rates[t] * u

        result = jax.tree.map(update, result, m, v, DECAYED)
    return result


@pytest.mark.medium
@pytest.mark.parametrize("name", ["adamw", "lamb"])
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_four_steps_equal_the_formulas_by_hand(name: str, bias_correction: bool, max_grad_norm: float) -> None:
    config = OptimizerConfig(name, 0.1, 2, bias_correction=bias_correction, max_grad_norm=max_grad_norm)
    # float32 against float64: a few units in the last place.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), run(config, 4), by_hand(config, 4)
    )


@pytest.mark.medium
def test_a_decay_of_zero_keeps_nothing_and_needs_no_correction() -> None:
    both = {flag: run(OptimizerConfig("adamw", 0.1, 2, bias_correction=flag, beta1=0.0, beta2=0.0), 3)
            for flag in (False, True)}  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, both[False], both[True])


def by_formula(name: str, grad: np.ndarray, state: dict, param: np.ndarray, step: int) -> np.ndarray:
    """The direction of an optimizer for one tensor as its paper has it; ``state`` is updated."""
    if name == "lion":  # Chen et al. 2023, algorithm 2
        m = state.get("m", np.zeros_like(grad))
        state["m"] = 0.999 * m + 0.001 * grad
        return np.sign(0.9 * m + 0.1 * grad)
    if name == "adafactor":  # Shazeer and Stern 2018, algorithms 4 and 5, with their constants
        beta, squares = 1 - step**-0.8, grad**2 + 1e-30
        if min(grad.shape) >= 128:
            state["row"] = beta * state.get("row", 0) + (1 - beta) * squares.mean(1)
            state["column"] = beta * state.get("column", 0) + (1 - beta) * squares.mean(0)
            moments = np.outer(state["row"], state["column"]) / state["row"].mean()
        else:
            moments = state["v"] = beta * state.get("v", 0) + (1 - beta) * squares
        update = grad / np.sqrt(moments)
        update /= max(1, np.sqrt((update**2).mean()))
        return update * max(1e-3, np.sqrt((param**2).mean()))
    m = state["m"] = 0.95 * state.get("m", 0) + 0.05 * grad  # Jordan et al. 2024, scaled as in Liu et al. 2025
    x = 0.95 * m / (1 - 0.95 ** (step + 1)) + 0.05 * grad / (1 - 0.95**step)  # without the bias of the first steps
    left, values, right = np.linalg.svd(x, full_matrices=False)
    values /= np.sqrt((values**2).sum())
    for _ in range(5):  # an odd polynomial of a matrix applies to its singular values
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right * 0.2 * np.sqrt(max(grad.shape))


@pytest.mark.medium
@pytest.mark.parametrize("name", ["lion", "adafactor", "muon"])
@pytest.mark.parametrize("shape", [(3, 5), (130, 128)])
def test_three_steps_equal_the_formula_of_the_paper(name: str, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    params = expected = {"layer_0": {"kernel": random.normal(size=shape)}}
    config = OptimizerConfig(name, 0.1, 0, schedule="constant", max_grad_norm=0.0)
    optimizer = make_optimizer(config, 10)
    params, state, actual = jax.tree.map(jnp.float32, params), {}, None
    expected = expected["layer_0"]["kernel"]
    for step in (1, 2, 3):
        grad = random.normal(size=shape)
        actual = optimizer.init(params) if actual is None else actual
        updates, actual = optimizer.update({"layer_0": {"kernel": jnp.float32(grad)}}, actual, params)
        params = optax.apply_updates(params, updates)
        expected = expected - 0.1 * (by_formula(name, grad, state, expected, step) + 0.01 * expected)
    np.testing.assert_allclose(params["layer_0"]["kernel"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("epsilon", [1e-6, 0.1])
def test_stable_adamw_is_the_papers_algorithm(epsilon: float) -> None:
    """Wortsman et al. 2023, algorithm 2, with its debiased betas, in float64."""
    random = np.random.default_rng(1)
    config = OptimizerConfig(
        "stable_adamw", 0.1, 0, schedule="constant", weight_decay=0.2, beta1=0.9, beta2=0.95, epsilon=epsilon
    )
    optimizer = make_optimizer(config, 10)
    params = {"kernel": jnp.float32(random.normal(size=(3, 5))), "bias": jnp.float32(random.normal(size=5))}
    expected = {name: np.asarray(value, np.float64) for name, value in params.items()}
    state, v, u, clipped = optimizer.init(params), dict.fromkeys(params, 0.0), dict.fromkeys(params, 0.0), []
    for t in range(1, 7):
        scale = 30.0 if t == 4 else 1.0  # a spike, which is clipped
        grads = {name: scale * random.normal(size=value.shape) for name, value in params.items()}
        grads["kernel"][0] = 0.0
        updates, state = optimizer.update(jax.tree.map(jnp.float32, grads), state, params)
        params = optax.apply_updates(params, updates)
        beta1, beta2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in (0.9, 0.95))
        for name, grad in grads.items():
            v[name] = beta1 * v[name] + (1 - beta1) * grad
            u[name] = beta2 * u[name] + (1 - beta2) * grad**2
            rms = np.sqrt(np.mean(grad**2 / np.maximum(u[name], epsilon**2)))
            clipped.append(rms > 1)
            rate = 0.1 / max(1.0, rms)
            decay = 0.2 if name == "kernel" else 0.0
            direction = v[name] / (np.sqrt(u[name]) + epsilon)
            expected[name] = expected[name] - rate * decay * expected[name] - rate * direction
    assert any(clipped) and not all(clipped)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=2e-5, atol=1e-6)


def test_stable_adamw_has_no_clipping_of_gradients() -> None:
    with pytest.raises(UserError, match=r"optimizer\.max_grad_norm is 0\.5.*stable_adamw"):
        OptimizerConfig("stable_adamw", max_grad_norm=0.5).check()
    OptimizerConfig("stable_adamw", max_grad_norm=0.0).check()


@pytest.mark.medium
def test_muon_is_adam_but_for_the_matrices_of_layers() -> None:
    changes = {}
    for name in ("muon", "adamw"):
        config = OptimizerConfig(name, 0.1, 0, max_grad_norm=0.0)
        changes[name] = one_update(config, ENCODER, jax.tree.map(lambda p: 0.1 * p + 0.05, ENCODER))
    same = {path for path, value in changes["muon"].items() if np.array_equal(value, changes["adamw"][path])}
    assert changes["muon"].keys() - same == {f"bert/encoder/layer_{n}/output/kernel" for n in range(2)}
    assert not is_matrix_of_layer(("distillation", "layer_2", "kernel")), "a projection to a teacher's width is none"


@pytest.mark.medium
@pytest.mark.parametrize("name", ["lion", "adafactor", "muon"])
def test_a_state_is_checkpointed_bit_for_bit(name: str, tmp_path) -> None:
    """Includes the state of factored moments and of masked parts."""
    big = {**PARAMS, "layer_0": {"kernel": jnp.ones((128, 130))}}
    optimizer = make_optimizer(OptimizerConfig(name, 0.1, 0), 10)

    def take(params, state):
        grads = jax.tree.map(lambda p: 0.3 * p + 0.05, params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = take(*take(big, optimizer.init(big)))
    with Checkpointer(tmp_path, None, print) as checkpoints:
        checkpoints.save(2, {"params": params, "opt_state": state})
        checkpoints.wait()
        _, restored = checkpoints.restore({"params": params, "opt_state": state})
    assert jax.tree.structure(restored["opt_state"]) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, take(restored["params"], restored["opt_state"]), take(params, state))


def test_with_correction_it_is_optax_adam() -> None:
    actual, expected = scale_by_bert_adam(bias_correction=True, epsilon=1e-6), optax.scale_by_adam(eps=1e-6)
    states = actual.init(PARAMS), expected.init(PARAMS)
    for grads in GRADS:
        first, a = actual.update(grads, states[0])
        second, b = expected.update(grads, states[1])
        states = a, b
        # optax takes 1 - beta2**count in float32, which is good to 6e-5 at the first step.
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=5e-5), first, second)


def test_decay_spares_biases_and_layer_norm_and_says_so() -> None:
    assert decay_mask(PARAMS) == DECAYED
    text = describe_decay(PARAMS, OptimizerConfig())
    assert text == "weight decay 0.01 on 2 tensors (6 parameters), none on 3 biases and LayerNorm tensors (6)"


def test_learning_rate_rises_and_falls_in_lines() -> None:
    rate = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=4), 12)
    expected = [0, 0.25, 0.5, 0.75, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0]
    np.testing.assert_allclose([float(rate(n)) for n in range(14)], expected, atol=1e-6)
    no_warmup = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=0), 4)
    np.testing.assert_allclose([float(no_warmup(n)) for n in range(5)], [1, 0.75, 0.5, 0.25, 0], atol=1e-6)


def test_a_cosine_ends_at_the_final_rate() -> None:
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, schedule="cosine", final_rate=0.1)
    rate = learning_rate_schedule(config, 12)
    expected = [0, 0.5, 1, 1.5, *(0.2 + 1.8 * (1 + np.cos(np.pi * n / 8)) / 2 for n in range(9))]
    np.testing.assert_allclose([float(rate(n)) for n in range(13)], expected, rtol=1e-6)
    line = learning_rate_schedule(dataclasses.replace(config, schedule="linear"), 12)
    np.testing.assert_allclose([float(line(n)) for n in (4, 8, 12)], [2, 1.1, 0.2], rtol=1e-6)


@pytest.mark.medium
def test_inverse_square_root_of_the_step() -> None:
    """By hand, and as Vaswani et al. 2017, equation 3, for D 512 and 4,000 steps of warm-up."""
    rate = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=4, schedule="inverse_sqrt"), 100)
    steps = {0: 0, 1: 0.25, 4: 1, 9: 2 / 3, 16: 1 / 2, 64: 1 / 4, 400: 1 / 10}
    np.testing.assert_allclose([float(rate(n)) for n in steps], list(steps.values()), rtol=1e-6)
    n = np.array([1, 10, 3999, 4000, 4001, 50_000, 300_000])
    published = OptimizerConfig(learning_rate=(512 * 4000) ** -0.5, warmup_steps=4000, schedule="inverse_sqrt")
    formula = 512**-0.5 * np.minimum(n**-0.5, n * 4000**-1.5)
    np.testing.assert_allclose(jax.vmap(learning_rate_schedule(published, 100_000))(n), formula, rtol=1e-4)
    no_warmup = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=0, schedule="inverse_sqrt"), 4)
    np.testing.assert_allclose([float(no_warmup(n)) for n in (0, 3, 8)], [1, 1 / 2, 1 / 3], rtol=1e-6)


def test_a_constant_rate_and_one_that_falls_at_the_end() -> None:
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=2, schedule="constant")
    rate = learning_rate_schedule(config, 10)
    np.testing.assert_allclose([float(rate(n)) for n in (0, 1, 2, 9, 10)], [0, 1, 2, 2, 2])
    config = dataclasses.replace(config, schedule="warmup_stable_decay", decay_ratio=0.4, final_rate=0.5)
    rate = learning_rate_schedule(config, 10)
    expected = [0, 1, 2, 2, 2, 2, 2, 1.75, 1.5, 1.25, 1]
    np.testing.assert_allclose([float(rate(n)) for n in range(11)], expected)
    longest_decay = learning_rate_schedule(dataclasses.replace(config, decay_ratio=0.9), 10)  # starts after the warm-up
    np.testing.assert_allclose([float(longest_decay(n)) for n in (1, 2, 6, 10)], [1, 2, 1.5, 1])


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "constant"])
def test_a_last_rate_is_refused_where_the_schedule_has_none(schedule) -> None:
    with pytest.raises(UserError, match=rf"final_rate is 0\.1, but optimizer\.schedule is {schedule}: remove"):
        OptimizerConfig(schedule=schedule, final_rate=0.1).check()


def test_a_share_of_decay_is_refused_where_the_schedule_has_none() -> None:
    sentence = "optimizer.decay_ratio is 0.2, which optimizer.schedule warmup_stable_decay alone uses: remove it"
    with pytest.raises(UserError, match=f"^{sentence}$"):
        OptimizerConfig(decay_ratio=0.2).check()


def test_warm_up_by_share_or_by_steps() -> None:
    assert OptimizerConfig(warmup_ratio=0.1).num_warmup_steps(345) == 34
    assert OptimizerConfig(warmup_steps=50, warmup_ratio=0.1).num_warmup_steps(345) == 50
    with pytest.raises(UserError, match=r"warmup_steps \(345\) is not below the 345 steps"):
        OptimizerConfig(warmup_steps=345).num_warmup_steps(345)


ENCODER = {
    "bert": {
        "embeddings": {"word": {"embedding": jnp.array([[0.3, -0.7]])}},
        "encoder": {f"layer_{n}": {"output": {"kernel": jnp.array([[1.0 + n]])}} for n in range(2)},
        "pooler": {"bias": jnp.array([0.5])},
    },
    "classifier": {"kernel": jnp.array([[2.0]])},
}


def one_update(config: OptimizerConfig, params: dict, grads: dict, frozen=None) -> dict:
    """Parameters after three steps of the same gradients, by their dotted names."""
    optimizer = make_optimizer(config, 10, frozen)
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return flatten_dict(params, sep="/")


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
def test_rates_fall_from_layer_to_layer(name: str) -> None:
    grads = jax.tree.map(lambda p: 0.1 * p + 0.05, ENCODER)

    def first_change(decay: float) -> dict:
        config = OptimizerConfig(name, 0.1, 0, layerwise_lr_decay=decay)
        optimizer = make_optimizer(config, 10)
        return flatten_dict(optimizer.update(grads, optimizer.init(ENCODER), ENCODER)[0], sep="/")

    plain, layered = first_change(1.0), first_change(0.5)
    factors = {
        "bert/embeddings/word/embedding": 0.125,
        "bert/encoder/layer_0/output/kernel": 0.25,
        "bert/encoder/layer_1/output/kernel": 0.5,
        "bert/pooler/bias": 1.0,
        "classifier/kernel": 1.0,
    }
    for path, factor in factors.items():
        np.testing.assert_allclose(layered[path], factor * plain[path], rtol=1e-6)


def test_depths() -> None:
    assert layer_depth(("bert", "embeddings", "norm", "scale")) == 0
    assert layer_depth(("bert", "encoder", "layer_11", "output", "bias")) == 12
    assert layer_depth(("bert", "encoder", "convolution", "norm", "scale")) == 1
    assert layer_depth(("bert", "pooler", "bias")) is None
    assert layer_depth(("predictions", "bias")) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("num_frozen_layers", "num_feature_layers", "names"),
    [
        (0, None, {"embeddings"}),
        (1, None, {"embeddings", "layer_0"}),
        (2, None, {"embeddings", "layer_0", "layer_1"}),
        (None, 4, {"embeddings", "layer_0", "layer_1", "pooler"}),
    ],
)
def test_what_is_frozen_stays_and_the_rest_is_trained_as_if_alone(
    name, num_frozen_layers, num_feature_layers, names
) -> None:
    frozen = make_frozen_predicate(num_frozen_layers, num_feature_layers)
    grads = path_aware_map(lambda path, p: jnp.zeros_like(p) if frozen(path) else 0.7 * p, ENCODER)
    config = OptimizerConfig(name, 0.1, 0, weight_decay=0.1, max_grad_norm=0.5, layerwise_lr_decay=0.9)
    after, before = one_update(config, ENCODER, grads, frozen), flatten_dict(ENCODER, sep="/")
    for path, value in before.items():
        assert np.array_equal(after[path], value) == bool(names & set(path.split("/"))), path
    # Only trained parameters count towards the norm and have moments.
    everything = one_update(config, ENCODER, grads)
    for path, value in after.items():
        if not names & set(path.split("/")):
            np.testing.assert_array_equal(value, everything[path])
    moments = jax.tree.leaves(make_optimizer(config, 10, frozen).init(ENCODER))
    trained = unflatten_dict(
        {path: value for path, value in before.items() if not names & set(path.split("/"))}, sep="/"
    )
    alone = jax.tree.leaves(make_optimizer(config, 10).init(trained))
    assert [leaf.shape for leaf in moments] == [leaf.shape for leaf in alone]


def test_nothing_is_frozen_unless_asked() -> None:
    assert make_frozen_predicate(None, None) is None
