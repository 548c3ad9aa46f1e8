"""The weights that a run starts from, and the pooler of ModernBERT's form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import ModelConfig
from bert.model.heads import BertForSequenceClassification
from bert.model.pretraining import BertForMaskedLM
from bert.training.initialization import load_pretrained_params

CONFIG = ModelConfig(23, 16, 1, 2, 32, max_position_embeddings=8, pooler_type="transform")
IDS = jnp.zeros((1, 4), jnp.int32)


def drawn(module, seed: int) -> dict:
    return jax.jit(module.init)(jax.random.key(seed), IDS)["params"]


@pytest.mark.medium
def test_a_pooler_of_the_mlm_heads_form_starts_as_its_transform() -> None:
    said: list[str] = []
    source = drawn(BertForMaskedLM(CONFIG), 0)
    fresh = drawn(BertForSequenceClassification(CONFIG, 2), 1)
    params = load_pretrained_params(fresh, source, "mlm", ("bert",), said.append)
    pooler = params["bert"]["pooler"]
    np.testing.assert_array_equal(pooler["dense"]["kernel"], source["predictions"]["transform"]["kernel"])
    np.testing.assert_array_equal(pooler["norm"]["scale"], source["predictions"]["norm"]["scale"])
    assert "randomly initialized: classifier" in said


@pytest.mark.medium
def test_another_pooler_starts_at_random() -> None:
    narrow = dataclasses.replace(CONFIG, embedding_size=8)
    for config in (dataclasses.replace(CONFIG, pooler_type="dense"), narrow):
        said: list[str] = []
        source = drawn(BertForMaskedLM(config), 0)
        fresh = drawn(BertForSequenceClassification(config, 2), 1)
        params = load_pretrained_params(fresh, source, "mlm", ("bert",), said.append)
        jax.tree.map(np.testing.assert_array_equal, params["bert"]["pooler"], fresh["bert"]["pooler"])
        assert "randomly initialized: bert/pooler, classifier" in said


def test_rows_move_with_their_bias_and_new_ones_stay_as_drawn() -> None:
    encoder = {"bert": {"embeddings": {}}}
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    source = {**encoder, "classifier": {"kernel": kernel, "bias": np.array([5, 6, 7], np.float32)}}
    fresh = {**encoder, "classifier": {"kernel": np.full((2, 2), -1.0), "bias": np.zeros(2)}}
    rows_of_head = {"classifier": (2, None)}
    params = load_pretrained_params(fresh, source, "X", ("bert", "classifier"), lambda text: None, rows_of_head)
    np.testing.assert_array_equal(params["classifier"]["kernel"], [[2, -1], [5, -1]])
    np.testing.assert_array_equal(params["classifier"]["bias"], [7, 0])
