"""Permuted prediction: which tokens a prediction depends on, and its relation to masked prediction."""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.layers import LayerExecution
from bert.model.mask import Packing
from bert.model.pretraining import BertForMaskedLM, BertForPermutedLM, PermutedTokens, permutation_mask

T, P, V, MASK = 12, 4, 40, 4
CONFIG = ModelConfig(
    V, 32, 2, 4, 64, max_position_embeddings=16, initializer_range=0.3, type_vocab_size=0,
    position_embedding_type="rotary", relative_attention_buckets=8,
)  # fmt: skip
"""Rotary and relative positions at once, which both read the positions of the mask."""
MODEL = BertForPermutedLM(CONFIG)
IDS = jax.random.randint(jax.random.key(0), (3, T), 5, V)


@functools.cache
def initial_params() -> Any:
    return jax.jit(MODEL.init)(jax.random.key(1), IDS)["params"]


ORDER = np.array([[7, 2, 10, 3], [1, 4, 9, 0], [5, 3, 0, 0]], np.int32)
WEIGHTS = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]], np.float32)
TOKENS = PermutedTokens(jnp.asarray(ORDER), jnp.full((3, P), MASK), jnp.asarray(WEIGHTS))
REAL = jnp.asarray(np.arange(T) < np.array([[12], [12], [8]]), jnp.int32)


@pytest.mark.medium
def test_the_mask_by_hand() -> None:
    """Positions that may not see a predicted token see [MASK] there, so that all see as many tokens as the row has."""
    booleans = np.asarray(permutation_mask(TOKENS, 3, T, REAL).booleans(T + 2 * P, T + 2 * P))[:, 0]
    for row in range(3):
        used = int(WEIGHTS[row].sum())
        rank = {int(place): number for number, place in enumerate(ORDER[row, :used], 1)}
        seen = [rank.get(place, 0) for place in range(T)] + [0] * P + list(range(P))
        for token, last in enumerate(seen):
            content = [bool(REAL[row, s]) and rank.get(s, 0) <= last for s in range(T)]
            masks = [number <= used and number > last for number in range(1, P + 1)]
            assert booleans[row, token].tolist() == [*content, *masks, *[False] * P]
            if token < T + P or token - T - P < used:
                assert booleans[row, token].sum() == REAL[row].sum()


@pytest.mark.medium
@pytest.mark.parametrize("kernel", ["eager", pytest.param("xla", marks=pytest.mark.slow)])
def test_gradients_of_tokens_that_are_not_seen_are_exactly_zero(kernel: str) -> None:
    """The gradient of each prediction with respect to the embedding of each token, all layers through."""
    model = BertForPermutedLM(CONFIG, execution=LayerExecution(attention=kernel))
    table = initial_params()["bert"]["embeddings"]["word"]["embedding"]
    # Each position reads a different row of the table, and [MASK] another one.
    ids = jnp.arange(5, 5 + T)[None].repeat(3, axis=0)

    def scores(table: jax.Array, row: int, number: int) -> jax.Array:
        embeddings = {**initial_params()["bert"]["embeddings"], "word": {"embedding": table}}
        head = {**initial_params()["predictions"], "decoder": jax.lax.stop_gradient(table)}
        params = {"bert": {**initial_params()["bert"], "embeddings": embeddings}, "predictions": head}
        untied = model.clone(config=dataclasses.replace(CONFIG, tie_word_embeddings=False))
        return untied.apply({"params": params}, ids, None, REAL, TOKENS)[row, number].std()

    gradient = jax.jit(jax.grad(scores))
    for row, number in ((0, 0), (0, 2), (0, 3), (1, 1), (2, 1)):
        influence = np.abs(gradient(table, row, number)).sum(1)[5 : 5 + T]
        hidden = set(ORDER[row, number : int(WEIGHTS[row].sum())].tolist())
        hidden |= set(np.flatnonzero(REAL[row] == 0).tolist())
        assert all(influence[place] == 0 for place in hidden), "no information at all"
        assert all(influence[place] > 1e-7 for place in set(range(T)) - hidden), "everything else is read"


@pytest.mark.medium
def test_the_first_prediction_is_that_of_masked_language_modelling() -> None:
    """The first prediction sees [MASK] for all predicted tokens (position compensation). Later ones see more tokens."""
    logits = jax.jit(MODEL.apply)({"params": initial_params()}, IDS, None, REAL, TOKENS)
    masked = np.array(IDS)
    for row in range(3):
        masked[row, ORDER[row, WEIGHTS[row] > 0]] = MASK
    expected = jax.jit(BertForMaskedLM(CONFIG).apply)({"params": initial_params()}, masked, None, REAL, ORDER)
    np.testing.assert_allclose(logits[:, 0], expected[:, 0], atol=2e-5)
    assert np.abs(logits[0, 1:] - expected[0, 1:]).max(-1).min() > 0.01
    masked[0, ORDER[0, :-1]] = np.array(IDS)[0, ORDER[0, :-1]]
    last = BertForMaskedLM(CONFIG).apply({"params": initial_params()}, masked, None, REAL, ORDER)[0, -1]
    assert np.abs(logits[0, -1] - last).max() > 1e-4, "one [MASK] that the others do not see until they may"


@pytest.mark.slow
def test_the_loop_windows_and_packed_rows_give_the_same() -> None:
    """Two examples of six tokens in a row are predicted as they are alone."""
    config = dataclasses.replace(CONFIG, position_embedding_type="learned", attention_window=4, type_vocab_size=2)
    model = BertForPermutedLM(config)
    params = jax.jit(model.init)(jax.random.key(2), IDS)["params"]
    segments = (jnp.arange(T) % 6 > 2).astype(jnp.int32)[None].repeat(3, axis=0)
    packing = Packing(
        jnp.asarray([[1] * 6 + [2] * 6] * 3), jnp.asarray([[*range(6), *range(6)]] * 3), jnp.asarray([[0, 6]] * 3)
    )
    ones = jnp.ones_like(IDS)
    run = jax.jit(partial(model.apply, {"params": params}))
    packed = run(IDS, segments, ones, TOKENS, packing=packing)
    looped = model.clone(execution=LayerExecution(scan=True, remat="full"))
    again = jax.jit(partial(looped.apply, {"params": params}))(IDS, segments, ones, TOKENS, packing=packing)
    np.testing.assert_allclose(again, packed, atol=2e-5)
    for start in (0, 6):
        inside = np.flatnonzero((ORDER[0] >= start) & (ORDER[0] < start + 6))
        tokens = jax.tree.map(lambda x, inside=inside: x[:, inside], TOKENS)
        tokens = tokens.replace(positions=tokens.positions - start, weights=jnp.ones_like(tokens.weights))
        part = slice(start, start + 6)
        alone = run(IDS[:1, part], segments[:1, part], ones[:1, part], jax.tree.map(lambda x: x[:1], tokens))
        np.testing.assert_allclose(alone[0], packed[0, inside], atol=2e-5)
