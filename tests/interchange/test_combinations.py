"""Combinations of the model's keys train with and without a loop over layers, and resume exactly.

Each combination is either exported or rejected with one error message.
"""

import dataclasses
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bert
from bert.config import ModelConfig, OptimizerConfig
from bert.errors import UserError
from bert.model.layers import LayerExecution
from bert.model.names import pretraining_architecture
from bert.model.pretraining import BertForMaskedLM, BertForPreTraining
from bert.parallel.backends import PmapParallelism
from bert.runs.checkpoint import Checkpointer
from bert.training.losses import make_pretraining_loss
from bert.training.optimizer import make_optimizer
from bert.training.step import TrainState, make_train_step
from tests import tiny_training
from tests.helpers import thoroughly

pytestmark = pytest.mark.slow

KEYS = {
    "position_embedding_type": [
        *("learned", "sinusoidal", "rotary", "disentangled", "deberta_v1", "alibi", "transformer_xl", "none")
    ],
    "position_offset": [0, 1],
    "rotary_base": [10_000.0, 50.0],
    "residual_init": ["plain", "scaled"],
    "attention_window": [None, 2],
    "global_attention_every": [None, 2],
    "global_attention_sep_id": [None, 3],
    "local_rotary_base": [None, 50.0],
    "first_global_layer": [0, 1],
    "hidden_act": ["gelu", "silu", "elu", "relu", "tanh"],
    "pooler_type": ["dense", "transform"],
    "pooler_input": ["first", "last", "mean"],
    "norm_type": ["layer", "rms", "rms_plus_one"],
    "type_vocab_size": [0, 2],
    "embedding_size": [None, 6],
    "conv_kernel_size": [None, 1, 5],
    "layer_groups": [None, 1, 3],
    "relative_attention_buckets": [None, 8, 32],
    "disentangled_products": ["both", "content_to_position", "position_to_content"],
    "position_table": [False, True],
    **{key: [False, True] for key in ("gated_feed_forward", "use_bias", "norm_bias", "pre_layer_norm")},
    **{key: [False, True] for key in ("first_layer_norm", "embedding_norm", "prediction_transform")},
    **{key: [False, True] for key in ("prediction_bias", "tie_word_embeddings")},
    "prediction_softcap": [None, 4.0],
    "scale_embeddings": [False, True],
    "step_embedding": [False, True],
    "halting": [None, 0.01],
    "num_key_value_heads": [None, 1, 2],
    "attention_head_size": [None, 6],
    "query_key_norm": [False, True],
    "attention_softcap": [None, 2.0],
    "query_pre_attn_scalar": [None, 3.0],
    "token_dropout_id": [None, 7],
    "sublayer_output_norm": [False, True],
    "rotary_fraction": [1.0, 0.5],
    "rotary_original_length": [None, 8],
    "rotary_scaling": ["none", "linear", "ntk", "yarn"],
    "rotary_scaling_factor": [1.0, 3.0],
    **{f"{name}_bias": [None, False, True] for name in ("query_key_value", "attention_output")},
    **{f"{name}_bias": [None, False, True] for name in ("intermediate", "output")},
}
IDS = np.random.default_rng(0).integers(5, 50, (2, 9))


def value_and_gradients(config: ModelConfig, params: dict, scan: bool):
    model = BertForMaskedLM(config, execution=LayerExecution("dots" if scan else "none", scan))

    def loss(params):
        logits = model.apply({"params": params}, IDS)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), IDS[..., None], axis=-1).mean()

    return jax.jit(jax.value_and_grad(loss))(params)


def without_contradictions(options: dict) -> dict:
    """The options, without the ones that contradict earlier options."""
    kept: dict = {}
    for key, value in options.items():
        try:
            dataclasses.replace(tiny_training.CONFIG, num_hidden_layers=3, **kept, **{key: value}).check()
        except UserError as error:
            assert "\n" not in str(error) and "model." in str(error)
        else:
            kept[key] = value
    return kept


def check_resume(options: dict) -> None:
    """Two steps of the trainer, with a pair's head, and the second one again from the checkpoint of the first."""
    config = dataclasses.replace(tiny_training.CONFIG, num_hidden_layers=3, **options)
    model, optimizer = BertForPreTraining(config), make_optimizer(OptimizerConfig(learning_rate=1e-2), 10)
    objective, parallel = make_pretraining_loss(model.apply), PmapParallelism(jax.devices()[:1])
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, tiny_training.T), np.int32))["params"]
    step = parallel.compile(make_train_step(objective, optimizer, 0))
    batches = [parallel.shard_batch(tiny_training.batch_of(number), 1) for number in range(2)]
    first, _ = step(parallel.put_state(TrainState.create(params, optimizer, objective.metrics)), batches[0])
    saved = parallel.to_host(first)
    second, _ = step(first, batches[1])
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(Path(folder) / "checkpoints", None, pytest.fail) as files,
    ):
        files.save(1, saved, wait=True)
        _, restored = files.restore(saved)
    again, outcome = step(parallel.put_state(restored), batches[1])
    assert np.isfinite(outcome.loss).all()
    jax.tree.map(np.testing.assert_array_equal, parallel.to_host(again), parallel.to_host(second))
    changed = jax.tree.map(lambda one, other: np.abs(one - other).max(), parallel.to_host(again).params, saved.params)
    assert max(jax.tree.leaves(changed)) > 0


def check(options: dict, make) -> None:
    model = make("BertForMaskedLM", **{"num_hidden_layers": 3, "num_attention_heads": 2, **options})
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
            assert "\n" not in str(error) and "transformers" in str(error) and not out.exists()
            return
        assert bert.load(out).config.hidden_size == model.config.hidden_size


OPTIONS = st.fixed_dictionaries({key: st.sampled_from(values) for key, values in KEYS.items()})


@given(options=OPTIONS)
@thoroughly(20)
def test_many_combinations_resume_exactly(options: dict) -> None:
    check_resume(without_contradictions(options))


@given(options=OPTIONS)
@thoroughly(40)
def test_many_combinations(options: dict, make) -> None:
    check(without_contradictions(options), make)
