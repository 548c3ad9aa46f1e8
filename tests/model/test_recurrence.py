"""Segment recurrence: segments with a memory that covers the text equal one pass, and no gradient enters the memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.errors import UserError
from bert.model.decoders import BertForCausalLM
from bert.model.layers import LayerExecution
from bert.model.mask import Mask
from bert.model.recurrence import COLLECTION, SegmentMemory, kept_memory, memory_variables

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=24, position_embedding_type="transformer_xl", initializer_range=0.4, causal=True,
    type_vocab_size=0, memory_length=24,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 31, (3, 24))
PRE_NORM = dataclasses.replace(CONFIG, pre_layer_norm=True, first_layer_norm=False, step_embedding=True)
SHARED = dataclasses.replace(CONFIG, num_hidden_layers=4, layer_groups=2)


@functools.cache
def initial_params(config: ModelConfig = CONFIG) -> Any:
    return jax.jit(BertForCausalLM(config).init)(jax.random.key(0), IDS[:1, :4])["params"]


def in_segments(model: BertForCausalLM, params: Any, ids: np.ndarray, size: int) -> tuple[np.ndarray, SegmentMemory]:
    """Logits of consecutive segments, and the memory after them."""
    apply = jax.jit(functools.partial(model.apply, mutable=[COLLECTION]))
    memory, logits = SegmentMemory.empty(model.config, len(ids)), []
    for start in range(0, ids.shape[1], size):
        output, kept = apply({"params": params, **memory_variables(memory)}, ids[:, start : start + size])
        memory = kept_memory(kept)
        logits.append(output)
    return np.concatenate(logits, axis=1), memory


@pytest.mark.medium
@pytest.mark.parametrize(
    "execution",
    [{}, {"attention": "xla", "remat": "full"}, {"scan": True}],
    ids=["eager", "kernel and remat", "scan"],
)
@pytest.mark.parametrize("config", [CONFIG, PRE_NORM, SHARED], ids=["post-norm", "pre-norm", "shared layers"])
def test_segments_equal_one_pass(config: ModelConfig, execution: dict[str, str]) -> None:
    params = initial_params(config)
    expected = jax.jit(BertForCausalLM(config).apply)({"params": params}, IDS)
    logits, memory = in_segments(BertForCausalLM(config, execution=LayerExecution(**execution)), params, IDS, 6)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert memory.length.tolist() == [24] * 3


@pytest.mark.medium
def test_a_shorter_memory_has_the_newest_tokens() -> None:
    """The first layer's memory is the embeddings, and what is before the memory changes nothing."""
    model = BertForCausalLM(dataclasses.replace(CONFIG, memory_length=5, num_hidden_layers=1))
    params = initial_params(model.config)
    logits, memory = in_segments(model, params, IDS, 4)
    embedded = model.apply({"params": params}, IDS, method=lambda model, ids: model.bert.embeddings(ids))
    np.testing.assert_allclose(memory.states[:, 0], embedded[:, -5:], atol=1e-6)
    other = np.where(np.arange(24) < 15, (IDS + 1) % 31, IDS)  # the last segment and its memory begin at 20 and 15
    changed, _ = in_segments(model, params, other, 4)
    np.testing.assert_allclose(changed[:, -4:], logits[:, -4:], atol=1e-6)
    assert np.abs(changed[:, 16:20] - logits[:, 16:20]).max() > 1e-3


@pytest.mark.medium
def test_no_gradient_enters_the_memory() -> None:
    model = BertForCausalLM(CONFIG)
    _, memory = in_segments(model, initial_params(), IDS[:, :6], 6)

    def total(states: jax.Array) -> jax.Array:
        variables = {"params": initial_params(), **memory_variables(memory.replace(states=states))}
        return jnp.sum(model.apply(variables, IDS[:, 6:12]) ** 2)

    value, gradient = jax.jit(jax.value_and_grad(total))(memory.states)
    assert (np.asarray(gradient) == 0).all()
    assert abs(total(memory.states + 0.1) - value) > 1e-3, "the memory is read"


def test_packed_rows_have_no_memory() -> None:
    with pytest.raises(ValueError, match="have no memory"):
        SegmentMemory.empty(CONFIG, 2).extend(Mask(examples=jnp.ones((2, 4), int)), 4)


def test_other_positions_are_rejected() -> None:
    with pytest.raises(
        UserError, match=r"model\.memory_length is 8, but model\.position_embedding_type is rotary: set"
    ):
        ModelConfig(memory_length=8, position_embedding_type="rotary").check()
