"""Losses of vectors of tokens: by hand, in blocks, and without gradients of tokens that have no vector."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import entropy

from bert.config import EmbeddingConfig, ModelConfig
from bert.config.options import LateInteractionConfig
from bert.errors import UserError
from bert.model.heads import BertForEmbedding
from bert.model.late_interaction import EMPTY_SCORE, max_sim
from bert.training.finetuning import ranking_losses
from bert.training.finetuning.ranking_losses import embedding_loss, max_sim_of

B, C, T, E = 6, 3, 7, 4


def vectors_and_batch() -> tuple[np.ndarray, dict[str, Any]]:
    """Vectors of length 1 with gaps; row 4 fills the batch, and some negatives are missing."""
    random = np.random.default_rng(0)
    vectors = random.normal(size=(B, 1 + C, T, E)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    vectors *= random.random((B, 1 + C, T, 1)) < 0.7
    documents = np.arange(B * C).reshape(B, C)
    documents[[0, 3], 2], documents[5, 0] = -1, documents[1, 0]
    weights = np.array([1, 1, 1, 1, 0, 1], np.float32)
    return vectors, {
        "query_numbers": np.array([0, 1, 2, 2, 4, 5]),
        "document_numbers": documents,
        "weights": weights,
        "labels": random.normal(size=(B, C)).astype(np.float32),
    }


def scores_by_hand(vectors: np.ndarray) -> np.ndarray:
    """Returns the scores of all queries and documents, [B, B, C], of the vectors that are not zero."""
    texts = [[text[np.linalg.norm(text, axis=-1) > 0] for text in row] for row in vectors]
    scores = max_sim([row[0] for row in texts], [text for row in texts for text in row[1:]])
    return scores.reshape(B, B, C)


def loss_of(vectors: Any, batch: dict[str, Any], **settings: Any) -> Any:
    loss = embedding_loss(EmbeddingConfig(pooling="tokens", dimensions=E, **settings), None)
    total, weight = loss.sums(vectors.reshape(B, -1), batch)[0]
    return total / weight


def expected_loss(scores: np.ndarray, batch: dict[str, Any], loss: str) -> float:
    """Loops over queries and documents."""
    documents, rows, losses = batch["document_numbers"], np.flatnonzero(batch["weights"]), []
    own = np.array([scores[row, row] for row in range(B)])
    if loss == "cosent":
        labels = batch["labels"]
        pairs = [(i, j) for i in rows for j in rows if labels[i] > labels[j]]
        return float(np.log(1 + np.sum([np.exp((own[j, 0] - own[i, 0]) / 2.0) for i, j in pairs])))
    for row in rows:
        negatives = [place for place in range(1, C) if documents[row, place] >= 0]
        if loss == "triplet":
            losses.append(np.mean([max(0, 0.5 - own[row, 0] + own[row, place]) for place in negatives]))
        elif loss == "margin_mse":
            margins = [(own[row, 0] - own[row, place]) / 2.0 for place in negatives]
            taught = [batch["labels"][row, 0] - batch["labels"][row, place] for place in negatives]
            losses.append(np.mean(np.square(np.subtract(margins, taught))))
        elif loss == "kl_divergence":
            own_scores, taught = (scores[row, [0, *negatives]] for scores in (own / 2.0, batch["labels"]))
            losses.append(entropy(softmax(taught), softmax(own_scores)))
        else:
            others = [
                scores[row, other, place] / 2.0
                for other in rows
                for place in range(C)
                if documents[other, place] not in (-1, documents[row, 0])
                and not (place == 0 and batch["query_numbers"][other] == batch["query_numbers"][row])
            ]
            losses.append(np.log(np.sum(np.exp([own[row, 0] / 2.0, *others]))) - own[row, 0] / 2.0)
    return float(np.mean(losses))


@pytest.mark.medium
@pytest.mark.parametrize("loss", ["in_batch", "triplet", "margin_mse", "kl_divergence", "cosent"])
def test_losses_are_those_of_loops(loss: str) -> None:
    vectors, batch = vectors_and_batch()
    if loss == "cosent":
        batch["labels"], batch["document_numbers"] = batch["labels"][:, 0], batch["document_numbers"][:, :1]
        vectors = np.concatenate([vectors[:, :2], vectors[:, 1:2], vectors[:, 1:2]], axis=1)
        batch["document_numbers"] = np.repeat(batch["document_numbers"], C, axis=1)
    settings = {"margin": 0.5} if loss == "triplet" else {"temperature": 2.0}
    found = loss_of(jnp.asarray(vectors), batch, loss=loss, **settings)
    assert float(found) == pytest.approx(expected_loss(scores_by_hand(vectors), batch, loss), rel=1e-5)


@pytest.mark.medium
def test_gradients_are_differences_of_the_loss() -> None:
    vectors, batch = vectors_and_batch()
    gradient = np.asarray(jax.grad(loss_of)(jnp.asarray(vectors), batch))
    random, step = np.random.default_rng(1), 1e-6
    with jax.enable_x64(True):
        direction = random.normal(size=vectors.shape) * (np.linalg.norm(vectors, axis=-1, keepdims=True) > 0)
        ends = [float(loss_of(jnp.asarray(vectors + sign * step * direction), batch)) for sign in (1, -1)]
    assert np.sum(gradient * direction) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3)


@pytest.mark.medium
def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one, two and all queries, whose products are in memory at once."""
    vectors, batch = vectors_and_batch()
    expected = jax.value_and_grad(loss_of)(jnp.asarray(vectors), batch)
    for limit in (1, 2 * T * T * B * C):
        monkeypatch.setattr(ranking_losses, "PRODUCTS_AT_ONCE", limit)
        jaxpr = str(jax.make_jaxpr(lambda x: loss_of(x, batch))(vectors))
        assert "scan" in jaxpr
        found = jax.value_and_grad(loss_of)(jnp.asarray(vectors), batch)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)


def test_documents_without_vectors_have_the_lowest_score() -> None:
    vectors, batch = vectors_and_batch()
    vectors[0, 1:] = 0
    compare = max_sim_of(None)
    scores = compare.all(jnp.asarray(vectors[:, 0]), jnp.asarray(vectors[:, 1:].reshape(-1, T, E)))
    np.testing.assert_allclose(scores.reshape(B, B, C), scores_by_hand(vectors), rtol=1e-5)
    assert (np.asarray(scores)[:, :C] == EMPTY_SCORE).all()
    gradient = jax.grad(loss_of)(jnp.asarray(vectors), batch)
    assert np.isfinite(gradient).all()


@pytest.mark.medium
def test_queries_have_their_maximum_length() -> None:
    """Rows are padded to the length of documents."""
    vectors, batch = vectors_and_batch()
    vectors[:, 0, 4:] = 0
    short = loss_of(jnp.asarray(vectors), batch, late_interaction=LateInteractionConfig(query_length=4))
    assert float(short) == pytest.approx(float(loss_of(jnp.asarray(vectors), batch)), rel=1e-6)


@pytest.mark.medium
def test_only_scored_tokens_have_vectors_and_gradients() -> None:
    """Unscored tokens are attended to, and tokens that are not attended to may be scored."""
    config = ModelConfig(61, 16, 1, 2, 32, max_position_embeddings=8, initializer_range=0.3)
    model = BertForEmbedding(config, pooling="tokens", dimensions=E)
    ids = np.arange(5, 21).reshape(2, 8)
    attended = np.array([[1] * 5 + [0] * 3, [1] * 8])
    scored = np.array([[1, 0, 1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1, 1]])
    params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
    assert params["projection"].keys() == {"kernel"} and params["projection"]["kernel"].shape == (16, E)
    apply = jax.jit(lambda params, scored: model.apply({"params": params}, ids, ids * 0, attended, scored))
    vectors = np.asarray(apply(params, scored))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=-1), scored, atol=1e-6)
    np.testing.assert_array_equal(vectors[0, 1:5] * (scored[0, 1:5] > 0)[:, None], vectors[0, 1:5])
    np.testing.assert_allclose(np.linalg.norm(apply(params, None), axis=-1), attended, atol=1e-6)
    gradient = jax.grad(lambda params: jnp.sum(apply(params, np.zeros_like(scored)) ** 2 + 1))(params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss": "cosine"}, "embedding.loss is cosine, but embedding.pooling is tokens"),
        ({"loss": "same_label"}, "embedding.loss is same_label"),
        ({"matryoshka": [8]}, "embedding.matryoshka"),
        ({"normalize": False}, "embedding.normalize is false"),
        ({"lowercase": True}, "embedding.lowercase"),
        ({"pooling": "mean", "dimensions": 8}, "embedding.dimensions is 8, but embedding.pooling is mean"),
        (
            {"pooling": "cls", "late_interaction": LateInteractionConfig(query_length=8)},
            "late_interaction.query_length",
        ),
        ({"late_interaction": LateInteractionConfig(query_length=8, expanded_length=9)}, "expanded_length is 9"),
        ({"late_interaction": LateInteractionConfig(skipping_roles=["texts"])}, "skipping_roles is 'texts'"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match="embedding") as error:
        EmbeddingConfig(**{"pooling": "tokens", **settings}).check()
    assert named in str(error.value)
