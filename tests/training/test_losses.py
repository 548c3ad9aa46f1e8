from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.training.losses import (
    LOSSES,
    cross_entropy,
    make_pretraining_loss,
    make_task_loss,
    total_loss,
    weighted_accuracy_sum,
    with_class_weights,
)


@pytest.mark.medium
def test_cross_entropy_by_hand() -> None:
    logits = jnp.log(jnp.array([[[0.7, 0.2, 0.1], [0.25, 0.5, 0.25]]]))
    total, weight = cross_entropy(logits, jnp.array([[0, 2]]), jnp.array([[1.0, 1.0]]))
    np.testing.assert_allclose(total, -np.log(0.7) - np.log(0.25), rtol=1e-6)
    assert weight == 2
    total, weight = cross_entropy(logits, jnp.array([[0, 2]]), jnp.array([[0.0, 1.0]]))
    np.testing.assert_allclose(total, -np.log(0.25), rtol=1e-6)
    assert weight == 1


@pytest.mark.medium
@pytest.mark.parametrize("label", [None, "next_sentence"])
def test_z_loss_is_the_papers_formula(label: str | None) -> None:
    """Chowdhery et al. 2022, section 5: 1e-4 log(Z)^2 in addition to the cross-entropy, by NumPy."""
    random = np.random.default_rng(0)
    logits, ids = random.normal(size=(2, 3, 7)).astype(np.float32), random.integers(0, 7, (2, 3))
    weights = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], np.float32)
    batch = {"masked_lm_ids": ids, "masked_lm_weights": weights, "masked_lm_positions": ids, "input_ids": ids}
    batch |= {"attention_mask": ids, "token_type_ids": ids}
    rows = {"next_sentence_labels": np.array([0, 1]), "next_sentence_weights": np.ones(2, np.float32)}

    class Output(NamedTuple):
        prediction_logits: jnp.ndarray
        seq_relationship_logits: jnp.ndarray

    output = jnp.asarray(logits) if label is None else Output(jnp.asarray(logits), jnp.zeros((2, 2)))
    apply = lambda *inputs, **more: output  # noqa: E731
    metric = None if label is None else "nsp"
    loss = make_pretraining_loss(apply, label, metric, 1e-4)
    plain = make_pretraining_loss(apply, label, metric)
    batch |= rows if label else {}
    losses, _ = loss.forward({}, batch, None)
    before, _ = plain.forward({}, batch, None)
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
    np.testing.assert_allclose(losses["z_loss"][0], (weights * log_z**2).sum(), rtol=1e-5)
    assert losses["z_loss"][1] == loss.weights(batch)["z_loss"] == 3
    assert losses.keys() - before.keys() == {"z_loss"}
    assert losses["mlm_loss"] == before["mlm_loss"]
    means = {name: total / weight for name, (total, weight) in losses.items()}
    without = {name: total / weight for name, (total, weight) in before.items()}
    added = total_loss(means, loss.factors) - total_loss(without, plain.factors)
    np.testing.assert_allclose(added, 1e-4 * (weights * log_z**2).sum() / 3, rtol=1e-2)
    assert set(loss.metrics) - set(plain.metrics) == {"z_loss"}
    if label is None:
        arrays = {name: jnp.asarray(array) for name, array in batch.items()}
        of_params = make_pretraining_loss(lambda variables, *inputs, **more: variables["params"], None, None, 1e-4)
        gradient = jax.grad(lambda params: of_params.forward(params, arrays, None)[0]["z_loss"][0])(jnp.asarray(logits))
        shares = np.exp(logits - log_z[..., None])
        np.testing.assert_allclose(gradient, 2 * (weights * log_z)[..., None] * shares, rtol=1e-4, atol=1e-6)


@pytest.mark.medium
def test_huge_logits_stay_finite() -> None:
    total, _ = cross_entropy(jnp.array([[1e4, -1e4]]), jnp.array([1]), jnp.array([1.0]))
    np.testing.assert_allclose(total, 2e4)


def test_correct_counts_weighted_hits() -> None:
    logits = jnp.array([[1.0, 2.0, 0.0], [5.0, 2.0, 0.0], [0.0, 0.0, 3.0]])
    hits, weight = weighted_accuracy_sum(logits, jnp.array([1, 1, 2]), jnp.array([1.0, 1.0, 0.5]))
    assert (hits, weight) == (1.5, 2.5)


def sums(name: str, outputs: list, **batch: list) -> tuple:
    """The loss, the counts and the weight of a task's loss."""
    batch = {key: jnp.asarray(value) for key, value in batch.items()}
    loss, *counts = LOSSES[name].sums(jnp.asarray(outputs), batch)
    assert loss[1] == LOSSES[name].weight(batch)
    assert len(LOSSES[name].metrics) == 1 + len(counts)
    return loss, *counts


def test_squared_errors_of_rows_that_count() -> None:
    [(total, weight)] = sums("regression", [[1.0], [4.0], [9.0]], labels=[3.0, 3.5, 0.0], weights=[1.0, 1.0, 0])
    assert (total, weight) == (4.25, 2)


@pytest.mark.medium
def test_tokens_without_a_label_have_no_part() -> None:
    logits = np.log([[[0.5, 0.5], [0.9, 0.1]], [[0.2, 0.8], [0.5, 0.5]]])
    (total, weight), (hits, _) = sums("token_classification", logits, labels=[[-1, 0], [0, -1]], weights=[1.0, 1.0])
    np.testing.assert_allclose(total, -np.log(0.9) - np.log(0.2), rtol=1e-6)
    assert (weight, hits) == (2, 1)


@pytest.mark.medium
def test_choices_that_a_row_lacks_have_no_share() -> None:
    logits = np.log([[1.0, 3.0, 4.0], [1.0, 3.0, 4.0], [1.0, 1.0, 1.0]])
    mask = [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    (total, weight), (hits, _) = sums(
        "multiple_choice", logits, choice_mask=mask, labels=[1, 1, 0], weights=[1.0, 1.0, 0.0]
    )
    np.testing.assert_allclose(total, -np.log(3 / 4) - np.log(3 / 8), rtol=1e-6)
    assert (weight, hits) == (2, 1)


@pytest.mark.medium
def test_a_span_is_the_mean_of_start_and_end_over_the_rows_own_tokens() -> None:
    start, end = np.log([1.0, 3.0, 96.0]), np.log([2.0, 6.0, 92.0])
    logits = np.stack([np.stack([start, end], -1)] * 3)
    mask = [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
    (total, weight), (exact, _) = sums(
        "question_answering", logits, attention_mask=mask, labels=[[1, 1], [0, 2], [0, 0]], weights=[1.0, 1.0, 0.0]
    )
    np.testing.assert_allclose(total, -(2 * np.log(3 / 4) + np.log(1 / 100) + np.log(92 / 100)) / 2, rtol=1e-5)
    assert (weight, exact) == (2, 1)


def test_an_objective_has_the_weights_of_the_data_alone() -> None:
    loss = make_task_loss(LOSSES["sequence_classification"], lambda params, batch, dropout: params * batch["x"])
    batch = {"x": jnp.array([[0.0, 0.0]]), "labels": jnp.array([1]), "weights": jnp.array([1.0])}
    losses, counts = loss.forward(1.0, batch, None)
    np.testing.assert_allclose(losses["classification_loss"][0], np.log(2), rtol=1e-6)
    assert (set(losses), set(counts)) == ({"classification_loss"}, {"accuracy"})
    assert loss.weights(batch) == {"classification_loss": 1}


@pytest.mark.medium
def test_several_labels_a_row_are_sigmoids_and_their_mean() -> None:
    logits = [[np.log(3.0), 0.0], [0.0, np.log(4.0)], [9.0, 9.0]]  # probabilities 0.75, 0.5; 0.5, 0.8
    batch = {"labels": np.array([[1, 0], [0, 0], [1, 1]], np.int8), "weights": [1.0, 1.0, 0.0]}
    (total, weight), (hits, places) = sums("multi_label_classification", logits, **batch)
    np.testing.assert_allclose(total, -(np.log(0.75) + 2 * np.log(0.5) + np.log(0.2)) / 2, rtol=1e-6)
    assert (weight, hits, places) == (2, 2, 3), "one of two predicted labels is right, and one label is there"


@pytest.mark.medium
def test_class_weights_multiply_the_loss_of_a_label() -> None:
    """Weights apply to the loss of a single label, or of each present label. Other counts stay the same."""
    batch = {"labels": jnp.array([0, 1]), "weights": jnp.ones(2)}
    logits = jnp.log(jnp.array([[0.7, 0.3], [0.6, 0.4]]))
    weighted = with_class_weights(LOSSES["sequence_classification"], (1.0, 5.0))
    (total, weight), hits = weighted.sums(logits, batch)
    np.testing.assert_allclose(total, -np.log(0.7) - 5 * np.log(0.4), rtol=1e-6)
    assert (weight, hits, weighted.weight(batch)) == (2, (1, 2), 2)
    batch = {"labels": jnp.array([[1, 0]]), "weights": jnp.ones(1)}
    (total, weight), _ = with_class_weights(LOSSES["multi_label_classification"], (3.0, 5.0)).sums(
        jnp.zeros((1, 2)), batch
    )
    np.testing.assert_allclose(total, (3 + 1) * np.log(2) / 2, rtol=1e-6)
    assert weight == 1
