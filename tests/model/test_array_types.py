"""The shapes and types that the core's signatures state are looked at in every test (tests/conftest.py): here, that a
wrong one is seen, and that nobody pays for it elsewhere."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from bert.config import ModelConfig
from bert.data.pretraining.masking import Masking, philox_uint64
from bert.model.attention import dot_product_attention
from bert.model.encoder import Bert
from bert.model.heads import BertForMultipleChoice
from bert.model.mask import Mask
from bert.model.pretraining import BertForPreTraining
from bert.training.losses import cross_entropy
from tests.conftest import TYPED

CONFIG = ModelConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
                     max_position_embeddings=16)  # fmt: skip


def ids(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


def values(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


WRONG = {
    "keys of another head size": lambda: dot_product_attention(
        values(2, 3, 2, 4), values(2, 5, 2, 8), values(2, 5, 2, 8)
    ),
    "fewer values than keys": lambda: dot_product_attention(values(2, 3, 2, 4), values(2, 5, 2, 4), values(2, 4, 2, 4)),
    "a mask of numbers": lambda: dot_product_attention(*3 * [values(2, 3, 2, 4)], mask=values(2, 1, 3, 3)),
    "a mask of other keys": lambda: dot_product_attention(*3 * [values(2, 3, 2, 4)], mask=values(2, 1, 3, 4) > 0),
    "a mask with four axes": lambda: Mask(keys=ids(2, 1, 1, 8)).booleans(8, 8),
    "labels of other rows": lambda: cross_entropy(values(2, 8, 50), ids(8, 2), values(2, 8)),
    "weights that would broadcast": lambda: cross_entropy(values(2, 8, 50), ids(2, 8), values(1, 8)),
    "labels that are no integers": lambda: cross_entropy(values(2, 50), values(2), values(2)),
    "words of other rows": lambda: masking()(np.full((3, 8), 9), philox_uint64((0, 0), 0, 2, 16)),
    "words of 32 bits": lambda: masking()(np.full((3, 8), 9), np.zeros((3, 16), np.uint32)),
}


def masking() -> Masking:
    return Masking(vocab_size=50, mask_id=4, special_ids=range(5), max_predictions=3)


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_wrong_shape_is_seen(call) -> None:
    with pytest.raises(TypeCheckError):
        call()


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Bert, (ids(2, 8), ids(2, 7))),
        (Bert, (ids(2, 8), None, ids(8, 2))),
        (Bert, (ids(8),)),
        (Bert, (values(2, 8),)),
        (BertForPreTraining, (ids(2, 8), None, None, ids(1, 3))),
        (BertForMultipleChoice, (ids(2, 8),)),
    ],
)
def test_a_wrong_input_is_seen_while_the_model_is_traced(model, inputs) -> None:
    with pytest.raises(TypeCheckError):
        jax.eval_shape(model(CONFIG).init, jax.random.key(0), *inputs)


@pytest.mark.medium
def test_right_ones_pass() -> None:
    query, memory, mask = values(2, 3, 2, 4), values(2, 5, 2, 4), Mask(keys=ids(2, 5)).booleans(3, 5)
    mixed, weights = dot_product_attention(query, memory, memory, mask)
    assert (mixed.shape, weights.shape) == (query.shape, (2, 2, 3, 5))
    arrays = masking()(np.full((3, 8), 9), philox_uint64((0, 0), 0, 3, masking().uint64s_per_row(8)))
    assert {name: array.shape for name, array in arrays.items()} == {
        "input_ids": (3, 8),
        "masked_lm_positions": (3, 3),
        "masked_lm_ids": (3, 3),
        "masked_lm_weights": (3, 3),
    }


@pytest.mark.medium
def test_the_checker_is_of_the_tests_alone() -> None:
    """Outside the tests no call is checked, the checker is optional, and the data package does not import JAX."""
    check = (
        "import sys; sys.modules['beartype'] = None\n"
        "import bert.data.pretraining.masking; assert 'jax' not in sys.modules\n"
        f"import {', '.join(TYPED)}; from bert.training.losses import cross_entropy; import jax.numpy as jnp\n"
        "cross_entropy(jnp.zeros((2, 8, 50)), jnp.zeros((2, 8), int), jnp.zeros((1, 8)))"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
