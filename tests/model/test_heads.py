"""Heads: one constructor for all of them, and what they read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.heads import HEADS
from bert.tasks import TASKS
from bert.training.losses import LOSSES

CONFIG = ModelConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
                     max_position_embeddings=16)  # fmt: skip
SHAPES = {"classification": (2, 5), "tagging": (2, 8, 5), "span": (2, 8, 2), "choices": (2, 3)}


def inputs_of(head: str) -> jnp.ndarray:
    return jnp.zeros((2, 3, 8) if head == "choices" else (2, 8), jnp.int32)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layers", [None, 2])
def test_every_head_is_made_and_called_alike(head, layers):
    labels = {"span": 2, "choices": 1}.get(head, 5)
    model = HEADS[head](CONFIG, labels, 0.1, jnp.dtype("bfloat16"), layers)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), inputs_of(head))["params"])
    dense = params["qa_outputs" if head == "span" else "classifier"]
    assert dense["kernel"].shape == (16 * (layers or 1), labels)
    out = jax.eval_shape(lambda params: model.apply({"params": params}, inputs_of(head)), params)
    assert (out.shape, out.dtype) == (SHAPES[head], jnp.float32)


def test_features_of_tokens_are_the_last_layers_side_by_side():
    """Paper, section 5.3: the tagger over them is a dense layer and no more."""
    model = HEADS["tagging"](CONFIG, 5, None, jnp.float32, 2)
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


def test_every_task_names_a_head_and_a_loss():
    for task in TASKS.values():
        assert task.head in HEADS
        assert task.loss in LOSSES
