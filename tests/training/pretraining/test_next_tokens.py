"""Next-token prediction: the objective and its training."""

import dataclasses
import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import bert
from bert.commands.corpus import examples_command as examples
from bert.commands.plan import main as plan
from bert.commands.pretrain import main
from bert.commands.reports import inspect_command as inspect
from bert.config import OptimizerConfig, PretrainConfig
from bert.config.yaml_io import load_config
from bert.model.decoders import BertForCausalLM
from bert.parallel.backends import PmapParallelism
from bert.training.optimizer import make_optimizer
from bert.training.pretraining.results import curves_subject
from bert.training.step import TrainState, make_train_step
from bert.training.token_losses import make_next_token_loss
from tests.conftest import NEXT, SMALL_RUN
from tests.helpers import lines_of
from tests.tiny_training import CONFIG, V, assert_same_gradients, batch_of_next_tokens, sharded_gradients

SIZES = dataclasses.replace(
    CONFIG, causal=True, pre_layer_norm=True, embedding_norm=False, prediction_transform=False, type_vocab_size=0,
    initializer_range=0.02,
)  # fmt: skip
MODEL = BertForCausalLM(SIZES)
OBJECTIVE = make_next_token_loss(MODEL)


@functools.cache
def initial_params() -> Any:
    return jax.jit(MODEL.init)(jax.random.key(0), np.zeros((1, 8), np.int32))["params"]


@pytest.mark.medium
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_by_hand(label_smoothing: float) -> None:
    batch, objective = batch_of_next_tokens(), make_next_token_loss(MODEL, label_smoothing)
    losses, counts = jax.jit(lambda params, batch: objective.forward(params, batch, None))(initial_params(), batch)
    inputs = (batch["input_ids"], None, batch["attention_mask"])
    logits = np.asarray(jax.jit(MODEL.apply)({"params": initial_params()}, *inputs), np.float64)
    total, smoothed, hits, tokens = 0.0, 0.0, 0, 0
    for row, place in np.argwhere(batch["next_token_weights"] > 0):
        label = batch["input_ids"][row, place + 1]
        log_probabilities = logits[row, place] - np.log(np.exp(logits[row, place]).sum())
        share = np.full(V, label_smoothing / V)
        share[label] += 1 - label_smoothing
        total, smoothed = total - log_probabilities[label], smoothed - (share * log_probabilities).sum()
        hits, tokens = hits + (logits[row, place].argmax() == label), tokens + 1
    assert [float(x) for x in losses["lm_loss"]] == pytest.approx([total, tokens], rel=1e-5)
    assert [float(x) for x in counts["lm_accuracy"]] == [hits, tokens]
    assert {float(weight) for weight in objective.weights(batch).values()} == {tokens}
    assert set(objective.metrics) == {*losses, *counts}
    if label_smoothing:
        assert [float(x) for x in losses["smoothed_loss"]] == pytest.approx([smoothed, tokens], rel=1e-5)
        assert dict(objective.factors) == {"lm_loss": 0.0}


@functools.cache
def gradients(devices: int, micro_batches: int, mesh: tuple[int, int, int] | None = None):
    return sharded_gradients(OBJECTIVE, initial_params(), batch_of_next_tokens(), devices, micro_batches, mesh)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("devices", "micro_batches", "mesh"),
    [
        (8, 1, None),
        (1, 4, None),
        (4, 1, (1, 2, 2)),
        pytest.param(8, 1, (8, 1, 1), marks=pytest.mark.slow),
        pytest.param(2, 4, None, marks=pytest.mark.slow),
    ],
)
def test_devices_and_micro_batches_do_not_matter(devices: int, micro_batches: int, mesh) -> None:
    expected, expected_sums = gradients(1, 1)
    grads, sums = gradients(devices, micro_batches, mesh)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=2e-6, err_msg=name)


@pytest.mark.medium
def test_training_learns_a_batch_by_heart() -> None:
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=10), 150)
    parallel, batch = PmapParallelism(jax.devices()[:1]), batch_of_next_tokens()
    objective = make_next_token_loss(BertForCausalLM(dataclasses.replace(SIZES, hidden_dropout_prob=0.0)))
    state = parallel.put_state(TrainState.create(initial_params(), optimizer, objective.metrics))
    step, placed = parallel.compile(make_train_step(objective, optimizer, 0)), parallel.shard_batch(batch, 1)
    losses = []
    for _ in range(150):
        state, outcome = step(state, placed)
        losses.append(float(outcome.loss[0]))
    assert losses[-1] < 1.5 < 3.5 < losses[0]


def test_a_run_logs_its_scores_and_writes_its_baseline(continued: Path) -> None:
    line = lines_of(continued)[0]
    assert line["loss"] == line["lm_loss"]
    results = json.loads((continued / "results.json").read_text())
    scores, unigram = results["eval"], results["baselines"]["unigram"]
    assert scores["perplexity"] == pytest.approx(np.exp(scores["lm_loss"]))
    assert scores["lm_loss"] < math.log(300)
    config = load_config(PretrainConfig, continued / "config.yaml")
    drawn = curves_subject(config, results["baselines"]).baselines
    assert drawn["loss"] == drawn["lm_loss"] == unigram["loss"]
    assert {"lm_accuracy", "perplexity"} <= set(drawn)
    assert "filled_masks" not in results
    assert results["continuations"]
    assert all(set(sample) == {"text", "truth", "continuation"} for sample in results["continuations"])
    model = bert.load(continued)
    assert model.architecture == "BertForCausalLM"
    assert model.config.causal


def test_bits_per_byte_by_hand(continued: Path, corpus: Path) -> None:
    """The loss of the held-out tokens in bits, over the bytes that these tokens are."""
    from bert.data.pretraining.build import build_examples
    from bert.data.pretraining.dataset import open_rows
    from bert.tokenizer.vocabulary import load_tokenizer

    config, tokenizer = load_config(PretrainConfig, continued / "config.yaml"), load_tokenizer(continued)
    rows = open_rows(build_examples(config.data, tokenizer).eval)
    text = rows.take(np.arange(len(rows)))
    tokens = text["input_ids"][np.arange(32) < text["length"][:, None]][1:].tolist()
    size = len(tokenizer.decode(tokens, skip_special_tokens=True).encode())
    scores = json.loads((continued / "results.json").read_text())["eval"]
    assert scores["bits_per_byte"] == pytest.approx(scores["lm_loss"] * len(tokens) / (math.log(2) * size))


@pytest.mark.slow
def test_a_vocabulary_that_alters_texts_has_no_bits_per_byte(corpus: Path, tmp_path: Path) -> None:
    arguments = [f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN, *NEXT, "--training.steps=2"]
    kind = ["--tokenizer.kind=wordpiece", "--tokenizer.vocab_size=200", "--data.input_format=doc_sentences"]
    assert main([*arguments, *kind, "--data.packing=true", "--training.label_smoothing=0.1"]) == 0
    scores = json.loads((tmp_path / "run" / "results.json").read_text())["eval"]
    assert set(scores) == {"loss", "lm_loss", "smoothed_loss", "lm_accuracy", "perplexity"}
    assert scores["loss"] == scores["smoothed_loss"]
    assert scores["perplexity"] == pytest.approx(np.exp(scores["lm_loss"]))


@pytest.mark.slow
def test_masked_tokens_of_blocks(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["--data.input_format=blocks", "--tokenizer.kind=byte_level", "--tokenizer.vocab_size=300"]
    assert main([f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, *arguments]) == 0
    assert lines_of(folder)[0]["mlm_loss"] > 0


@pytest.mark.medium
def test_a_held_out_text_of_one_token_has_no_scores_to_compare(corpus: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "one.txt").write_text("a")
    arguments = [f"--data.train={corpus}", f"--data.eval={tmp_path / 'one.txt'}", f"--output_dir={tmp_path / 'run'}"]
    assert main([*arguments, *SMALL_RUN, *NEXT, "--training.steps=2"]) == 0
    assert "LM accuracy                0.000         nan" in capsys.readouterr().out


@pytest.mark.slow
def test_phases_of_two_lengths(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    phases = ["--phases.1.share=0.5", "--phases.1.sequence_length=16"]
    arguments = [f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, *NEXT]
    (tmp_path / "recipe.yaml").write_text("phases:\n  - share: 0.5\n    sequence_length: 16\n  - {}\n")
    assert main([f"--config={tmp_path / 'recipe.yaml'}", *arguments, *phases]) == 0
    assert {line["sequence_length"] for line in lines_of(folder)} == {16, 32}


@pytest.mark.medium
def test_another_run_starts_from_it(continued, pretrained, corpus, tmp_path, capsys, fails) -> None:
    arguments = [f"--data.train={corpus}", *SMALL_RUN, "--training.steps=2", f"--output_dir={tmp_path / 'more'}"]
    rows = ["--data.input_format=blocks", "--training.objective=clm", "--data.max_predictions_per_sequence=20"]
    assert main([*arguments, *rows, f"--init={continued}"]) == 0  # its settings come with the weights
    assert f"from {continued}, step 6: bert (" in capsys.readouterr().out
    arguments[-1] = f"--output_dir={tmp_path / 'other'}"
    assert "model.causal is false, but training.objective is clm" in fails(
        main, *arguments, *rows, f"--init={pretrained}"
    )
    assert "model.causal is true, but training.objective is mlm" in fails(
        main, *arguments, "--data.input_format=full_sentences", f"--init={continued}"
    )


def test_examples_are_shown(corpus: Path, tmp_path: Path, capsys) -> None:
    arguments = [f"--data.train={corpus}", *SMALL_RUN, *NEXT, f"--data.cache_dir={tmp_path}"]
    assert examples([*arguments, "--show=2", "--statistics"]) == 0
    shown = capsys.readouterr().out
    assert "32 of 32 tokens, 32 predicted; no label" in shown
    assert "train: sentences" not in shown
    assert "documents" in shown


def test_inspect_counts_the_decoder_at_every_position(continued, tmp_path, capsys) -> None:
    def facts_of(run: Path) -> dict:
        capsys.readouterr()
        assert inspect([str(run), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    facts = facts_of(continued)
    assert facts["architecture"] == "BertForCausalLM"
    assert facts["flops_per_token"]["predictions"] == 32
    flops = {part["part"]: part["flops_per_token"] for part in facts["parts"]}
    assert flops["predictions"] == 2 * 16 * facts["model"]["vocab_size"]
    planned = shutil.copytree(continued, tmp_path / "run")
    shutil.rmtree(planned / "checkpoints")
    again = facts_of(planned)
    assert (again["architecture"], again["parts"]) == (facts["architecture"], facts["parts"])


@pytest.mark.medium
def test_plan_compiles_the_step(capsys) -> None:
    assert plan([*SMALL_RUN, *NEXT, "--memory=1GiB"]) == 0
    assert "suggested: " in capsys.readouterr().out
