"""Heads: one constructor for all of them, and what they read."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.encoder import Bert
from bert.model.heads import HEADS
from bert.model.names import ARCHITECTURE_OF_KIND
from bert.tasks import TASKS
from bert.training.finetuning.kinds import TASK_KINDS

CONFIG = ModelConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
                     max_position_embeddings=16)  # fmt: skip
SHAPES = {
    "sequence_classification": (2, 5),
    "token_classification": (2, 8, 5),
    "question_answering": (2, 8, 2),
    "multiple_choice": (2, 3),
    "reranker": (2, 3),
}


def inputs_of(head: str) -> jnp.ndarray:
    return jnp.zeros((2, 3, 8) if head in ("multiple_choice", "reranker") else (2, 8), jnp.int32)


@pytest.mark.medium
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layers", [None, 2])
def test_every_head_is_made_and_called_alike(head, layers):
    labels = {"question_answering": 2, "multiple_choice": 1, "reranker": 1}.get(head, 5)
    model = HEADS[head](CONFIG, labels, 0.1, jnp.dtype("bfloat16"), layers)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), inputs_of(head))["params"])
    dense = params["qa_outputs" if head == "question_answering" else "classifier"]
    assert dense["kernel"].shape == (16 * (layers or 1), labels)
    out = jax.eval_shape(lambda params: model.apply({"params": params}, inputs_of(head)), params)
    assert (out.shape, out.dtype) == (SHAPES[head], jnp.float32)


@pytest.mark.medium
def test_features_of_tokens_are_the_last_layers_side_by_side():
    """Paper, section 5.3: the tagger over them is a dense layer and no more."""
    model = HEADS["token_classification"](CONFIG, 5, None, jnp.float32, 2)
    ids = jnp.arange(16).reshape(2, 8)
    params = jax.jit(model.init)(jax.random.key(1), ids)["params"]

    @jax.jit
    def both(params):
        states = model.apply({"params": params}, ids, method=lambda m, x: m.bert(x, intermediates=True).hidden_states)
        return states, model.apply({"params": params}, ids)

    states, out = both(params)
    read = np.concatenate(states[-2:], axis=-1)
    dense = params["classifier"]
    expected = read @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"])
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("head", ["sequence_classification", "multiple_choice"])
@pytest.mark.parametrize("layers", [None, 2])
def test_a_head_over_a_row_of_a_causal_encoder_reads_the_last_token(head, layers):
    """Which alone has seen the whole row; there is no pooler, and the dense layer has no bias."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=2, causal=True)
    model = HEADS[head](config, 1, None, jnp.float32, layers)
    ids = jax.random.randint(jax.random.key(1), inputs_of(head).shape, 0, 50)
    mask = jnp.ones_like(ids).at[0, ..., 5:].set(0)
    params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
    assert "pooler" not in params["bert"] and set(params["classifier"]) == {"kernel"}

    @jax.jit
    def run(params):
        rows = (ids.reshape(-1, 8), None, mask.reshape(-1, 8))
        states = Bert(config, add_pooling_layer=False).apply({"params": params["bert"]}, *rows, intermediates=True)
        read = jnp.concatenate(states.hidden_states[-(layers or 1) :], axis=-1)
        last = read[jnp.arange(len(read)), rows[2].sum(1) - 1]
        actual, unmasked = (model.apply({"params": params}, ids, None, inputs) for inputs in (mask, None))
        return actual, unmasked, last @ params["classifier"]["kernel"]

    actual, unmasked, expected = map(np.asarray, run(params))
    np.testing.assert_allclose(actual.reshape(-1), expected[:, 0], atol=1e-5)
    assert np.abs(unmasked - actual).reshape(2, -1).max(1)[0] > 1e-4, "it reads another token of the first row"


def test_every_task_has_a_kind_in_the_table():
    for task in TASKS.values():
        assert task.kind in TASK_KINDS
        assert (task.kind in HEADS) == (not task.calls & {"embed", "generate"})


def test_names_of_heads_are_known_without_jax():
    assert {kind: head.__name__ for kind, head in HEADS.items()} == ARCHITECTURE_OF_KIND
