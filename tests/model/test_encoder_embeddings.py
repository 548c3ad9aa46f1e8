"""Tables of positions, and embeddings of another width."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.encoder import Bert
from bert.model.positions import position_initializer, sinusoidal_position_table
from bert.model.pretraining import BertForMaskedLM, BertForPreTraining

CONFIG = ModelConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=24, initializer_range=0.2,
)  # fmt: skip
IDS = jax.random.randint(jax.random.key(1), (3, 12), 0, 99)


@pytest.mark.medium
def test_sinusoidal_positions_are_one_rotation_a_step_at_the_asked_for_deviation() -> None:
    config = dataclasses.replace(CONFIG, position_embedding_init="sinusoidal", initializer_range=0.05, hidden_size=16)
    table = np.asarray(position_initializer(config)(jax.random.key(0), (40, 16)))
    assert np.mean(table**2) == pytest.approx(0.05**2, rel=1e-5)  # sin^2 + cos^2 = 1 in each pair
    # (sin a, cos a) at place n + 1 is that at place n turned by the pair's frequency, wherever n is.
    for pair in range(8):
        turn = 10_000.0 ** (-2 * pair / 16)
        rotation = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
        two = slice(2 * pair, 2 * pair + 2)
        np.testing.assert_allclose(table[1:, two], table[:-1, two] @ rotation.T, atol=1e-6)


@pytest.mark.medium
def test_fixed_positions_are_those_of_vaswani_at_norm_1() -> None:
    config = dataclasses.replace(CONFIG, position_embedding_type="sinusoidal", position_offset=2)
    table = np.asarray(sinusoidal_position_table(config))
    assert table.shape == (26, 32)
    np.testing.assert_allclose(np.linalg.norm(table, axis=1), 1, rtol=1e-5)
    place, pair = np.arange(26)[:, None], np.arange(16)
    angles = place / 10_000 ** (2 * pair / 32)
    np.testing.assert_allclose(table[:, ::2] * 4, np.sin(angles), atol=1e-4)  # amplitude sqrt(2 / 32)
    np.testing.assert_allclose(table[:, 1::2] * 4, np.cos(angles), atol=1e-4)
    # The model adds exactly these: a model with a learned table that holds them answers the same.
    learned = dataclasses.replace(config, position_embedding_type="learned")
    params = jax.jit(Bert(config).init)(jax.random.key(0), IDS)
    assert "position" not in params["params"]["embeddings"]
    embeddings = {**params["params"]["embeddings"], "position": {"embedding": table}}
    same = jax.jit(Bert(learned).apply)({"params": {**params["params"], "embeddings": embeddings}}, IDS)
    fixed = jax.jit(Bert(config).apply)(params, IDS)
    np.testing.assert_allclose(fixed.last_hidden_state, same.last_hidden_state, atol=1e-5)


@pytest.mark.medium
def test_scaled_words_by_hand_and_a_tied_decoder_that_reads_the_table_as_it_is() -> None:
    """The words times sqrt(32) and sinusoids of amplitude 1."""
    model = BertForMaskedLM(
        dataclasses.replace(
            CONFIG, scale_embeddings=True, position_embedding_type="sinusoidal", type_vocab_size=0,
            embedding_norm=False, prediction_transform=False, prediction_bias=False,
        )
    )  # fmt: skip
    params = jax.jit(model.init)(jax.random.key(0), IDS)["params"]
    words = np.asarray(params["bert"]["embeddings"]["word"]["embedding"], np.float64)
    angles = np.arange(12)[:, None] / 10_000 ** (2 * np.arange(16) / 32)
    waves = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(12, 32)
    hidden = words[np.asarray(IDS)] * np.sqrt(32) + waves
    summed = model.apply({"params": params}, IDS, method=lambda m, ids: m.bert.embeddings.look_up(ids))
    np.testing.assert_allclose(summed, hidden, atol=1e-5)
    logits = model.apply({"params": params}, hidden, method=lambda m, x: m.predictions(x, m.bert.embedding_table()))
    np.testing.assert_allclose(logits, hidden @ words.T, atol=1e-4)


def test_an_embedding_size_that_is_the_hidden_size_has_no_projection() -> None:
    wide = BertForPreTraining(dataclasses.replace(CONFIG, embedding_size=32))
    plain = BertForPreTraining(CONFIG)
    shapes = [
        jax.tree.map(jnp.shape, jax.eval_shape(lambda m=m: m.init(jax.random.key(0), IDS))) for m in (wide, plain)
    ]
    assert shapes[0] == shapes[1]


def test_a_sequence_over_the_position_table_is_refused() -> None:
    with pytest.raises(ValueError, match="25 tokens, but max_position_embeddings is 24"):
        jax.eval_shape(Bert(CONFIG).init, jax.random.key(0), jnp.zeros((1, 25), jnp.int32))
