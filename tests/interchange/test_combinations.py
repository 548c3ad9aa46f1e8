"""Any combination of the model's keys trains, in a loop as layer by layer, and is exported or refused in a sentence."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bert
from bert.config import ModelConfig
from bert.errors import UserError
from bert.interchange.names import pretraining_architecture
from bert.model.execution import LayerExecution
from bert.model.heads import BertForMaskedLM
from tests.helpers import thoroughly

pytestmark = pytest.mark.slow

KEYS = {
    "position_embedding_type": ["learned", "sinusoidal", "rotary", "disentangled", "none"],
    "attention_window": [None, 2],
    "global_attention_every": [None, 2],
    "local_rotary_base": [None, 50.0],
    "hidden_act": ["gelu", "silu", "elu"],
    "pooler_type": ["dense", "transform"],
    "pooler_input": ["first", "mean"],
    "norm_type": ["layer", "rms"],
    "type_vocab_size": [0, 2],
    "embedding_size": [None, 6],
    "layer_groups": [None, 1, 3],
    "relative_attention_buckets": [None, 8, 32],
    **{key: [False, True] for key in ("gated_feed_forward", "use_bias", "norm_bias", "pre_layer_norm")},
    **{key: [False, True] for key in ("first_layer_norm", "embedding_norm", "prediction_transform")},
    **{key: [False, True] for key in ("prediction_bias", "tie_word_embeddings")},
    "scale_embeddings": [False, True],
    "step_embedding": [False, True],
}
IDS = np.random.default_rng(0).integers(5, 50, (2, 9))


def value_and_gradients(config: ModelConfig, params: dict, scan: bool):
    model = BertForMaskedLM(config, execution=LayerExecution("dots" if scan else "none", scan))

    def loss(params):
        logits = model.apply({"params": params}, IDS)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), IDS[..., None], axis=-1).mean()

    return jax.jit(jax.value_and_grad(loss))(params)


def check(options: dict, make) -> None:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, **options}
    try:
        ModelConfig(**sizes).check()
    except UserError as error:
        assert "\n" not in str(error) and "model." in str(error)
        return
    model = make("BertForMaskedLM", **sizes)
    (loss, grads), (looped, others) = (value_and_gradients(model.config, model.params, scan) for scan in (False, True))
    assert np.isfinite(loss)
    np.testing.assert_allclose(loss, looped, rtol=1e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-4 * largest), grads, others)
    stepped = jax.tree.map(lambda leaf, grad: leaf - 1e-3 / largest * grad, model.params, grads)
    assert value_and_gradients(model.config, stepped, scan=False)[0] < loss
    assert pretraining_architecture(set(model.params), model.config) in ("BertForMaskedLM", "Bert")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        try:
            model.save(out)
        except UserError as error:
            assert "\n" not in str(error) and "cannot express" in str(error) and not out.exists()
            return
        assert bert.load(out).config.hidden_size == model.config.hidden_size


@given(options=st.fixed_dictionaries({key: st.sampled_from(values) for key, values in KEYS.items()}))
@thoroughly(100)
def test_many_combinations(options: dict, make) -> None:
    check(options, make)
