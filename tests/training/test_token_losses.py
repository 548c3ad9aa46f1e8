"""The loss that never holds the logits of a whole row, against the one that does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.decoders import BertForCausalLM, ClassifierWithLanguageModel
from bert.model.heads import BertForSequenceClassification
from bert.model.linear import soft_cap, tied_logits
from bert.parallel.backends import MeshParallel
from bert.training.losses import LOSSES, cross_entropy, total_loss
from bert.training.token_losses import decoded_loss, make_classifier_loss, token_sums

pytestmark = pytest.mark.medium

B, T, E, V = 3, 10, 8, 23
KEYS = jax.random.split(jax.random.key(0), 5)
HIDDEN, TABLE, BIAS = (
    jax.random.normal(key, shape) for key, shape in zip(KEYS, [(B, T, E), (V, E), (V,)], strict=False)
)
LABELS = jax.random.randint(KEYS[3], (B, T), 0, V)
WEIGHTS = jnp.array([[1.0] * 10, [1.0] * 4 + [0.0] * 6, [0.0, 0.5] * 5])


def pad_vocabulary(table, bias, multiple: int = 8):
    """Pads the vocabulary like `bert.model.pretraining.MaskedLMHead`."""
    extra = -len(bias) % multiple
    return jnp.pad(table, ((0, extra), (0, 0))), jnp.pad(bias, (0, extra), constant_values=jnp.finfo(jnp.float32).min)


def whole(hidden, table, bias, labels=LABELS, weights=WEIGHTS, softcap=None, **options):
    return token_sums(soft_cap(tied_logits(hidden, table, bias, hidden.dtype), softcap), labels, weights, **options)


def gradients(function, *inputs, **options):
    """The sums, and the gradients of twice the loss's sum."""

    def total(*inputs):
        sums = function(*inputs, **options)
        return 2 * sums.loss[0], sums

    (_, sums), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return sums, grads


def check_equal(actual, expected, tolerance: float) -> None:
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())  # noqa: E731
    jax.tree.map(compare, actual, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("stretch", [1, 4, 5, 10, 99, None])
def test_values_and_gradients_are_those_of_all_logits_at_once(stretch, label_smoothing, padded) -> None:
    inputs = (HIDDEN, *(pad_vocabulary(TABLE, BIAS) if padded else (TABLE, BIAS)))
    options = {"label_smoothing": label_smoothing, "vocab_size": V}
    decode = functools.partial(decoded_loss, labels=LABELS, weights=WEIGHTS, stretch=stretch)
    actual, expected = gradients(decode, *inputs, **options), gradients(whole, *inputs, **options)
    check_equal(actual, expected, 2e-6)
    without_gradient = jax.jit(functools.partial(decode, **options))(*inputs)
    check_equal(without_gradient, expected[0], 2e-6)


def test_bfloat16_products_are_those_of_all_logits_at_once() -> None:
    hidden = HIDDEN.astype(jnp.bfloat16)
    decode = functools.partial(decoded_loss, labels=LABELS, weights=WEIGHTS, stretch=4)
    actual, expected = gradients(decode, hidden, TABLE, BIAS), gradients(whole, hidden, TABLE, BIAS)
    assert actual[1][0].dtype == jnp.bfloat16
    check_equal(actual[0], expected[0], 1e-6)
    check_equal(*jax.tree.map(lambda x: x.astype(jnp.float32), (actual[1], expected[1])), 1e-2)


def test_smoothed_labels_by_hand() -> None:
    """-(0.9 log p(label) + 0.1 mean of log p), over the vocabulary's own tokens."""
    log_p = np.log(np.asarray(jax.nn.softmax(HIDDEN @ TABLE.T + BIAS)))
    of_label = np.take_along_axis(log_p, np.asarray(LABELS)[..., None], -1)[..., 0]
    expected = -((0.9 * of_label + 0.1 * log_p.mean(-1)) * WEIGHTS).sum()
    inputs = (HIDDEN, *pad_vocabulary(TABLE, BIAS), LABELS, WEIGHTS)
    sums = decoded_loss(*inputs, label_smoothing=0.1, vocab_size=V)
    np.testing.assert_allclose(sums.loss, (expected, WEIGHTS.sum()), rtol=1e-5)
    np.testing.assert_allclose(sums.nll, (-(of_label * WEIGHTS).sum(), WEIGHTS.sum()), rtol=1e-5)


@pytest.mark.parametrize("softcap", [0.7, 4.0])
def test_capped_logits_by_hand(softcap: float) -> None:
    """The vocabulary's padding has no probability, although its logits are the farthest from 0."""
    logits = softcap * np.tanh(np.asarray(HIDDEN @ TABLE.T + BIAS) / softcap)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    expected = -(np.take_along_axis(log_p, np.asarray(LABELS)[..., None], -1)[..., 0] * WEIGHTS).sum()
    for inputs in ((TABLE, BIAS), pad_vocabulary(TABLE, BIAS)):
        options = {"labels": LABELS, "weights": WEIGHTS, "vocab_size": V, "softcap": softcap}
        decode = functools.partial(decoded_loss, stretch=4)
        actual, whole_row = gradients(decode, HIDDEN, *inputs, **options), gradients(whole, HIDDEN, *inputs, **options)
        np.testing.assert_allclose(actual[0].loss[0], expected, rtol=1e-5)
        check_equal(actual, whole_row, 2e-6)


def test_accuracy_counts_the_likeliest_token() -> None:
    best = jnp.argmax(HIDDEN @ TABLE.T + BIAS, axis=-1)
    labels = best.at[0, :3].add(1) % V
    hits, weight = decoded_loss(HIDDEN, TABLE, BIAS, labels, WEIGHTS).accuracy
    assert (hits, weight) == (WEIGHTS.sum() - 3, WEIGHTS.sum())


def test_only_a_stretch_of_logits_is_in_memory() -> None:
    """Temporary bytes of the compiled gradient: [B, T, V] logits are 8 x 128 x 30,000 x 4 = 123 MB."""
    shapes = [(8, 128, 16), (30_000, 16), (30_000,), (8, 128), (8, 128)]
    types = [jnp.float32] * 3 + [jnp.int32, jnp.float32]
    inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]

    def temporary(function) -> int:
        gradient = jax.jit(jax.grad(lambda *inputs: function(*inputs).loss[0], argnums=(0, 1, 2)))
        return gradient.lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    plain, stretches = temporary(whole), temporary(functools.partial(decoded_loss, stretch=8))
    assert plain > 120e6
    assert stretches < plain / 6


@pytest.mark.parametrize("shape", [(4, 2, 1), (2, 1, 4)])
def test_a_mesh_changes_no_sum_and_no_gradient(shape) -> None:
    """Rows sharded over 8 devices, or over 2 with the vocabulary sharded over 4."""
    repeat = lambda x: jnp.concatenate([x, x + jnp.ones((), x.dtype), x[:2]])  # noqa: E731
    hidden, labels, weights = repeat(HIDDEN), repeat(LABELS) % V, repeat(WEIGHTS)
    inputs = (hidden, *pad_vocabulary(TABLE, BIAS))
    decode = functools.partial(decoded_loss, labels=labels, weights=weights, vocab_size=V, label_smoothing=0.1)
    expected = gradients(decode, *inputs)
    parallel = MeshParallel(shape, jax.devices()[:8])
    with jax.set_mesh(parallel.mesh):
        actual = gradients(functools.partial(decode, stretch=4), *inputs)
    check_equal(jax.device_get(actual), jax.device_get(expected), 3e-6)


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_a_classifier_and_a_language_model_share_an_encoder(softcap: float | None) -> None:
    """Both losses equal the losses of the separate models. The language model ignores padding and fill rows."""
    config = ModelConfig(V, 16, 1, 2, 32, max_position_embeddings=T, initializer_range=0.3, causal=True)
    config = dataclasses.replace(config, prediction_softcap=softcap)
    model = ClassifierWithLanguageModel(config, 3)
    mask = (jnp.arange(T) < jnp.array([T, 4, 0])[:, None]).astype(jnp.int32)
    batch = {"input_ids": LABELS, "token_type_ids": jnp.zeros_like(LABELS), "attention_mask": mask}
    batch |= {"labels": jnp.array([2, 0, 0]), "weights": jnp.array([1.0, 1.0, 0.0])}
    inputs = (batch["input_ids"], batch["token_type_ids"], mask)
    params = jax.jit(model.init)(jax.random.key(0), LABELS)["params"]
    assert set(params) == {"bert", "classifier", "predictions"} and "pooler" not in params["bert"]

    apply = lambda params, batch, dropout: model.apply({"params": params}, *inputs, dropout=dropout)  # noqa: E731
    objective = make_classifier_loss(LOSSES["sequence_classification"], apply, 0.5, V, softcap)
    losses, counts = jax.jit(lambda params: objective.forward(params, batch, None))(params)
    labels = jax.jit(BertForSequenceClassification(config, 3).apply)({"params": params}, *inputs)
    logits = jax.jit(BertForCausalLM(config).apply)({"params": params}, *inputs)
    expected = {
        "classification_loss": cross_entropy(labels, batch["labels"], batch["weights"]),
        "lm_loss": cross_entropy(logits[:, :-1], LABELS[:, 1:], mask[:, 1:].astype(jnp.float32)),
    }
    check_equal(losses, expected, 1e-5)
    assert losses["lm_loss"][1] == T - 1 + 3
    assert objective.weights(batch) == {name: weight for name, (_, weight) in losses.items()}
    assert set(objective.metrics) == {*losses, *counts}
    assert total_loss({"classification_loss": 1.0, "lm_loss": 4.0}, objective.factors) == 3.0
