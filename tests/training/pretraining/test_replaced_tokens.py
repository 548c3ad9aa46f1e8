"""Replaced-token detection: its losses and training."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import bert
from bert.commands.finetune import main as finetune
from bert.commands.pretrain import main
from bert.config import OptimizerConfig, PretrainConfig
from bert.config.yaml_io import load_config
from bert.model.electra import Electra, MaskedTokens, make_generator_config
from bert.parallel.backends import PmapParallelism
from bert.training.losses import make_replaced_token_loss
from bert.training.optimizer import make_optimizer
from bert.training.pretraining.results import curves_subject
from bert.training.step import TrainState, make_train_step
from tests.conftest import REPLACED, SMALL_RUN
from tests.helpers import lines_of
from tests.tiny_training import CONFIG, B, P, assert_same_gradients, batch_of, sharded_gradients

SIZES = dataclasses.replace(CONFIG, embedding_size=8)
MODEL = Electra(SIZES, make_generator_config(SIZES, 8))
OBJECTIVE = make_replaced_token_loss(MODEL.apply, 50.0)


@functools.cache
def initial_params() -> Any:
    return jax.jit(MODEL.init)(jax.random.key(0), np.zeros((1, 8), np.int32))["params"]


def batch_to_detect(step: int = 0) -> dict[str, np.ndarray]:
    """The uneven batch of the other tests, with places that differ within a row."""
    random = np.random.default_rng(step)
    batch = batch_of(step)
    positions = np.sort(random.permuted(np.tile(np.arange(1, 6), (B, 1)), axis=1)[:, :P], axis=1).astype(np.int32)
    uniforms = random.random((B, P)).astype(np.float32)
    batch |= {"masked_lm_positions": positions, "sample_uniforms": uniforms}
    return {name: array for name, array in batch.items() if not name.startswith("next_sentence")}


@pytest.mark.medium
def test_the_losses_by_hand() -> None:
    batch = batch_to_detect()
    losses, counts = jax.jit(lambda params, batch: OBJECTIVE.forward(params, batch, None))(initial_params(), batch)
    targets = (batch["masked_lm_ids"], batch["masked_lm_weights"])
    output = jax.jit(MODEL.apply)(
        {"params": initial_params()},
        batch["input_ids"],
        batch["token_type_ids"],
        batch["attention_mask"],
        MaskedTokens(batch["masked_lm_positions"], *targets, batch["sample_uniforms"]),
    )
    total, correct, tokens, result, fakes = 0.0, 0, 0, 0, 0
    for logit, replaced, real in zip(
        *(np.asarray(x, np.float64).ravel() for x in (output.detection_logits, output.replaced)),
        batch["attention_mask"].ravel(),
        strict=True,
    ):
        if real:
            probability = 1 / (1 + np.exp(-logit))
            total -= np.log(probability if replaced else 1 - probability)
            correct += (logit > 0) == replaced
            result += logit > 0 and replaced
            fakes, tokens = fakes + replaced, tokens + 1
    assert fakes > 5
    assert [float(x) for x in losses["disc_loss"]] == pytest.approx([total, tokens], rel=1e-5)
    assert [float(x) for x in counts["disc_accuracy"]] == [correct, tokens]
    assert [float(x) for x in counts["disc_recall"]] == [result, fakes]
    assert [float(x) for x in counts["replaced_share"]] == [fakes, tokens]
    assert {name: float(weight) for name, weight in OBJECTIVE.weights(batch).items()} == {
        "mlm_loss": batch["masked_lm_weights"].sum(),
        "disc_loss": tokens,
    }


@pytest.mark.medium
def test_the_generator_learns_nothing_from_the_discriminator() -> None:
    """But through the embeddings, which are the same."""

    def gradient_of(name: str):
        loss = lambda params, batch: OBJECTIVE.forward(params, batch, None)[0][name][0]  # noqa: E731
        return jax.jit(jax.grad(loss))(initial_params(), batch_to_detect())

    grads = gradient_of("disc_loss")
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(grads["generator"]))
    assert np.asarray(grads["bert"]["embeddings"]["word"]["embedding"]).any()
    grads = gradient_of("mlm_loss")
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(grads["discriminator_predictions"]))
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(grads["bert"]["encoder"]))


@functools.cache
def gradients(devices: int, micro_batches: int, mesh: tuple[int, int, int] | None = None):
    return sharded_gradients(OBJECTIVE, initial_params(), batch_to_detect(), devices, micro_batches, mesh)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("devices", "micro_batches", "mesh"),
    [
        (8, 1, None),
        pytest.param(1, 4, None, marks=pytest.mark.slow),
        pytest.param(4, 1, (1, 2, 2), marks=pytest.mark.slow),
        pytest.param(2, 4, None, marks=pytest.mark.slow),
    ],
)
def test_devices_and_micro_batches_do_not_matter(devices: int, micro_batches: int, mesh) -> None:
    expected, expected_sums = gradients(1, 1)
    grads, sums = gradients(devices, micro_batches, mesh)
    assert_same_gradients(grads, expected)
    assert float(expected_sums["replaced_share"][0]) > 5
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=2e-6, err_msg=name)


@pytest.mark.medium
def test_the_step_minimises_the_weighted_sum() -> None:
    parallel, optimizer = PmapParallelism(jax.devices()[:1]), make_optimizer(OptimizerConfig(), 10)
    step = parallel.compile(make_train_step(OBJECTIVE, optimizer, 0))
    state = parallel.put_state(TrainState.create(initial_params(), optimizer, OBJECTIVE.metrics))
    after, outcome = step(state, parallel.shard_batch(batch_to_detect(), 1))
    sums = parallel.to_host(after.sums)
    means = {name: total / weight for name, (total, weight) in sums.items()}
    assert float(outcome.loss[0]) == pytest.approx(means["mlm_loss"] + 50 * means["disc_loss"], rel=1e-6)


@pytest.mark.slow
def test_training_learns_a_batch_by_heart() -> None:
    optimizer = make_optimizer(OptimizerConfig(learning_rate=5e-3, warmup_steps=10), 300)
    parallel, batch = PmapParallelism(jax.devices()[:1]), batch_to_detect()
    state = parallel.put_state(TrainState.create(initial_params(), optimizer, OBJECTIVE.metrics))
    step, placed = parallel.compile(make_train_step(OBJECTIVE, optimizer, 0)), parallel.shard_batch(batch, 1)
    sums = []
    for _ in range(300):
        before = state.sums
        state, _ = step(state, placed)
        sums.append(jax.tree.map(lambda new, old: np.asarray(new - old)[0], state.sums, before))
    first, last = ({name: total / weight for name, (total, weight) in at.items()} for at in (sums[0], sums[-1]))
    assert last["mlm_loss"] < 0.5 < first["mlm_loss"]
    assert last["disc_loss"] < 0.3 < first["disc_loss"]


def test_a_run_logs_both_models_and_writes_their_baselines(detected: Path) -> None:
    line = lines_of(detected)[0]
    assert line["loss"] == pytest.approx(line["mlm_loss"] + 50 * line["disc_loss"], rel=1e-6)
    assert set(line) >= {"mlm_accuracy", "disc_accuracy", "disc_recall", "replaced_share"}
    results = json.loads((detected / "results.json").read_text())
    share = results["eval"]["replaced_share"]
    assert 0 < share < 0.5
    assert results["baselines"]["disc_majority_accuracy"] == pytest.approx(1 - share)
    assert results["eval"]["perplexity"] == pytest.approx(np.exp(results["eval"]["mlm_loss"]))
    assert results["filled_masks"]
    drawn = curves_subject(load_config(PretrainConfig, detected / "config.yaml"), results["baselines"]).baselines
    assert set(drawn) >= {"mlm_loss", "mlm_accuracy", "disc_accuracy"}
    assert "loss" not in drawn  # which the weighted loss of both has none for


def test_fill_mask_answers_by_the_generator(detected: Path) -> None:
    model = bert.load(detected)
    assert model.architecture == "BertForReplacedTokenDetection"
    assert model.generator.config.hidden_size == 8
    assert model.fill_mask("Ba [MASK].") == model.generator.fill_mask("Ba [MASK].")
    assert model.encode("Ba ko.").last_hidden_state.shape[-1] == 16


@pytest.mark.medium
def test_fine_tuning_takes_the_discriminator(detected: Path, sst2: Path, tmp_path: Path, capsys) -> None:
    arguments = [f"--init={detected}", f"--data.dir={sst2}", f"--output_dir={tmp_path}", "--data.max_length=32"]
    sizes = ["--data.buckets=32", "--training.batch_size=8", "--training.epochs=1"]
    assert finetune(["--config=sst2", *arguments, *sizes]) == 0
    said = capsys.readouterr().out
    assert f"from {detected}, step 6: bert (" in said
    assert "not loaded: discriminator_predictions, generator" in said
    model = bert.load(tmp_path)
    assert model.config.pooler_act == "gelu"
    assert set(model.params) == {"bert", "classifier"}


@pytest.mark.slow
def test_other_runs_start_from_the_discriminator(detected, corpus, tmp_path, capsys) -> None:
    arguments = [f"--data.train={corpus}", *SMALL_RUN, f"--init={detected}"]
    assert main([*arguments, f"--output_dir={tmp_path / 'more'}", *REPLACED, "--training.steps=2"]) == 0
    assert "bert, generator, discriminator_predictions (" in capsys.readouterr().out
    assert main([*arguments, f"--output_dir={tmp_path / 'mlm'}", "--training.steps=2"]) == 0
    said = capsys.readouterr().out
    assert f"from {detected}, step 6: bert (" in said
    assert "not loaded: discriminator_predictions, generator" in said
