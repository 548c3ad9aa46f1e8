"""Permuted prediction in training: it learns dependencies that masked prediction cannot, and its runs resume."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import bert
from bert.commands.corpus import examples_command as examples
from bert.commands.pretrain import main
from bert.commands.reports import inspect_command as inspect
from bert.config import ModelConfig, OptimizerConfig
from bert.data.pretraining.masking import Masking, PermutedMasking, philox_uint64
from bert.model.pretraining import BertForMaskedLM, BertForPermutedLM, PermutedTokens
from bert.parallel.backends import PmapParallelism
from bert.training.losses import Loss, make_permuted_token_loss, make_pretraining_loss
from bert.training.optimizer import make_optimizer
from bert.training.step import TrainState, make_train_step
from tests.conftest import PERMUTED, SMALL_RUN
from tests.helpers import lines_of
from tests.tiny_training import CONFIG, B, P, assert_same_gradients, batch_of, sharded_gradients

CLS, SEP, MASK, NEW, YORK, LOS, ANGELES = 2, 3, 4, 5, 6, 7, 8
CITIES = ModelConfig(
    9, 16, 1, 2, 32, max_position_embeddings=4, type_vocab_size=0, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, initializer_range=0.2,
)  # fmt: skip


def trained(model, objective: Loss, masking: Masking) -> dict:
    """Parameters after 300 steps on equal numbers of "new york" and "los angeles", predicting both words."""
    ids = np.array([[CLS, NEW, YORK, SEP], [CLS, LOS, ANGELES, SEP]] * 8)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=3e-3, warmup_steps=10), 300)
    parallel = PmapParallelism(jax.devices()[:1])
    step = parallel.compile(make_train_step(objective, optimizer, 0))
    params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
    state = parallel.put_state(TrainState.create(params, optimizer, objective.metrics))
    for number in range(300):
        words = philox_uint64((0, number), 0, len(ids), masking.uint64s_per_row(4))
        batch = masking.batch_arrays({"input_ids": ids}, words)
        batch |= {"token_type_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}
        state, _ = step(state, parallel.shard_batch({**batch, "rows": np.arange(len(ids), dtype=np.int32)}, 1))
    return parallel.to_host(state).params


@pytest.mark.slow
def test_new_york() -> None:
    """Two words that depend on each other: predicted at once, each pair of them has a quarter of the probability; one
    after the other, the pairs that do not occur have next to none (Yang et al. 2019, section 2.2)."""
    settings = {"vocab_size": 9, "mask_id": MASK, "special_ids": range(5), "max_predictions": 2, "prob": 1.0}
    pairs = [(first, second) for first in (NEW, LOS) for second in (YORK, ANGELES)]
    masked_model = BertForMaskedLM(CITIES)
    params = trained(masked_model, make_pretraining_loss(masked_model.apply, None), Masking(**settings))
    chances = jax.nn.softmax(masked_model.apply({"params": params}, np.array([[CLS, MASK, MASK, SEP]])))[0, 1:3]
    masked = {pair: float(chances[0, pair[0]] * chances[1, pair[1]]) for pair in pairs}

    model = BertForPermutedLM(CITIES)
    params = trained(model, make_permuted_token_loss(model.apply), PermutedMasking(**settings))
    ids = np.array([[CLS, *pair, SEP] for pair in pairs])
    ones = np.ones((len(ids), 2), np.int32)
    permuted = []
    for order in ([1, 2], [2, 1]):
        tokens = PermutedTokens(ones * np.array(order), ones * MASK, ones.astype(np.float32))
        chances = np.asarray(jax.nn.softmax(model.apply({"params": params}, ids, permuted=tokens)))
        targets = np.take_along_axis(ids, np.asarray(tokens.positions), axis=1)
        joint = np.take_along_axis(chances, targets[..., None], axis=2)[..., 0].prod(axis=1)
        permuted.append(dict(zip(pairs, joint.tolist(), strict=True)))
    print(f"masked {masked}, permuted {permuted}")
    assert all(0.2 < chance < 0.3 for chance in masked.values())
    for chance in permuted:
        assert chance[NEW, ANGELES] < 0.02 and chance[LOS, YORK] < 0.02
        assert chance[NEW, YORK] > 0.4 and chance[LOS, ANGELES] > 0.4


MODEL = BertForPermutedLM(CONFIG)
OBJECTIVE = make_permuted_token_loss(MODEL.apply)


def batch_in_order() -> dict[str, np.ndarray]:
    """The uneven batch of the other tests, with places that differ within a row."""
    random, batch = np.random.default_rng(0), batch_of(0)
    positions = random.permuted(np.tile(np.arange(1, 6), (B, 1)), axis=1)[:, :P].astype(np.int32)
    batch |= {"masked_lm_positions": positions, "query_ids": np.full((B, P), MASK, np.int32)}
    return {name: array for name, array in batch.items() if not name.startswith("next_sentence")}


@functools.cache
def gradients(devices: int, micro_batches: int):
    params = jax.jit(MODEL.init)(jax.random.key(0), np.zeros((1, 8), np.int32))["params"]
    return sharded_gradients(OBJECTIVE, params, batch_in_order(), devices, micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "micro_batches"), [(8, 1), (2, 4)])
def test_devices_and_micro_batches_do_not_matter(devices: int, micro_batches: int) -> None:
    expected, expected_sums = gradients(1, 1)
    grads, sums = gradients(devices, micro_batches)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=2e-6, err_msg=name)


@pytest.mark.medium
def test_a_run_is_evaluated_and_is_a_masked_language_model(permuted: Path, corpus: Path, capsys) -> None:
    assert lines_of(permuted)[0]["loss"] == lines_of(permuted)[0]["plm_loss"]
    results = json.loads((permuted / "results.json").read_text())
    assert results["eval"]["perplexity"] == pytest.approx(np.exp(results["eval"]["plm_loss"]))
    assert 0 <= results["eval"]["plm_accuracy"] < 1
    assert results["baselines"]["unigram"]["loss"] > 0
    assert results["filled_masks"]
    model = bert.load(permuted)
    assert model.architecture == "BertForMaskedLM"
    assert len(model.fill_mask("Ba [MASK].")[0]) == 5
    capsys.readouterr()
    assert inspect([str(permuted)]) == 0
    assert "2 P tokens" in capsys.readouterr().out
    assert examples([f"--data.train={corpus}", *SMALL_RUN, *PERMUTED, "--show=1"]) == 0
    said = capsys.readouterr().out
    assert "token{place in the order}" in said and "{1}" in said and "[MASK]" not in said


@pytest.mark.slow
def test_masked_runs_start_from_permuted_ones_and_back(permuted: Path, corpus: Path, tmp_path: Path, capsys) -> None:
    more = [f"--data.train={corpus}", *SMALL_RUN, "--training.steps=2"]
    assert main([*more, f"--output_dir={tmp_path / 'masked'}", f"--init={permuted}"]) == 0
    assert "bert, predictions (" in capsys.readouterr().out
    assert main([*more, f"--output_dir={tmp_path / 'again'}", f"--init={tmp_path / 'masked'}", *PERMUTED]) == 0
    assert "bert, predictions (" in capsys.readouterr().out
