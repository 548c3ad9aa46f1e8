"""Segment recurrence in training: runs resume with their memory, and devices and micro-batches do not matter."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bert
from bert.commands.pretrain import main
from bert.config import OptimizerConfig
from bert.data.pretraining.loader import MEMORY_TOKENS
from bert.model.decoders import BertForCausalLM
from bert.model.pretraining import BertForPermutedLM
from bert.parallel.backends import MeshParallel, PmapParallelism
from bert.tokenizer.library import special_ids
from bert.training.losses import make_permuted_token_loss
from bert.training.optimizer import make_optimizer
from bert.training.recurrence import memory_shape, with_memory
from bert.training.step import TrainState, make_train_step
from bert.training.token_losses import make_next_token_loss
from tests.conftest import NEXT, PERMUTED, SMALL_RUN
from tests.helpers import lines_of, state_of
from tests.interchange.hf_folders import assert_same
from tests.tiny_training import CONFIG, B, T, batch_of
from tests.training.pretraining.test_next_tokens import batch_of_next_tokens

TEXT = "baba kori tune losa mi riko neba salo tuko mine " * 4
RECURRENT = ["--model.position_embedding_type=transformer_xl", "--model.memory_length=40"]
ALONE = ["--training.batch_size=2", "--training.eval_batch_size=1", "--data.sequence_length=16"]
BLOCKS = [*PERMUTED, "--data.input_format=blocks"]
SIZES = dataclasses.replace(CONFIG, position_embedding_type="transformer_xl", memory_length=T + 4)


def train(corpus: Path, folder: Path, *options: str) -> Path:
    assert main([f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, *options, *RECURRENT]) == 0
    return folder


@pytest.mark.medium
@pytest.mark.parametrize("objective", [NEXT, pytest.param(BLOCKS, marks=pytest.mark.slow)], ids=["clm", "plm"])
def test_a_run_resumes_with_its_memory(objective: list[str], corpus: Path, tmp_path: Path) -> None:
    whole, again = train(corpus, tmp_path / "whole", *objective, *ALONE), tmp_path / "again"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "6")
    (again / "results.json").unlink()
    train(corpus, again, *objective, *ALONE)
    assert_same(bert.load(again).params, bert.load(whole).params)
    assert lines_of(again) == lines_of(whole)
    memory = state_of(whole)["memory"]
    assert memory.shape == (2, 1, 40, 16)
    assert np.abs(memory).max() > 0
    np.testing.assert_array_equal(state_of(again)["memory"], memory)


def train_step(objective: str, devices: int, micro_batches: int, mesh: tuple[int, int, int] | None = None) -> Any:
    """The states after two steps of rows that continue each other, on the host."""
    if objective == "clm":
        model: Any = BertForCausalLM(dataclasses.replace(SIZES, causal=True, type_vocab_size=0))
        loss, batches = with_memory(make_next_token_loss, model), [batch_of_next_tokens(step) for step in range(2)]
    else:
        model = BertForPermutedLM(SIZES)
        loss = with_memory(lambda model: make_permuted_token_loss(model.apply), model)
        batches = [batch_of(step) for step in range(2)]
        batches = [{**batch, "query_ids": np.full_like(batch["masked_lm_ids"], 4)} for batch in batches]
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8), np.int32))["params"]
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=1), 4)
    state = TrainState.create(params, optimizer, loss.metrics, memory_shape(model.config, B))
    used = jax.devices()[:devices]
    parallel = PmapParallelism(used) if mesh is None else MeshParallel(mesh, used)
    step, state = parallel.compile(make_train_step(loss, optimizer, 3, axis=parallel.axis)), parallel.put_state(state)
    for number, batch in enumerate(batches):
        batch[MEMORY_TOKENS] = (number * np.arange(B) % (T + 1)).astype(np.int32)
        state, _ = step(state, parallel.shard_batch(batch, micro_batches))
    return parallel.to_host(state)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["clm", "plm"])
def test_devices_and_micro_batches_do_not_matter(objective: str) -> None:
    expected = train_step(objective, 1, 1)
    for devices, micro_batches, mesh in [(8, 1, None), (2, 4, None), (8, 2, (2, 2, 2))]:
        state = train_step(objective, devices, micro_batches, mesh)
        np.testing.assert_allclose(state.memory, expected.memory, atol=2e-5)
        for name, pair in expected.sums.items():
            np.testing.assert_allclose(state.sums[name], pair, rtol=1e-5, err_msg=name)


@pytest.mark.medium
def test_a_step_with_a_loss_that_is_not_finite_keeps_the_memory() -> None:
    model = BertForCausalLM(dataclasses.replace(SIZES, causal=True, type_vocab_size=0))
    loss, optimizer = with_memory(make_next_token_loss, model), make_optimizer(OptimizerConfig(warmup_steps=1), 4)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8), np.int32))["params"]
    params["predictions"]["bias"] = jnp.full_like(params["predictions"]["bias"], jnp.nan)
    state = TrainState.create(params, optimizer, loss.metrics, memory_shape(model.config, B))
    parallel = PmapParallelism(jax.devices()[:1])
    batch = {**batch_of_next_tokens(), MEMORY_TOKENS: np.zeros(B, np.int32)}
    after, _ = parallel.compile(make_train_step(loss, optimizer, 3))(
        parallel.put_state(state), parallel.shard_batch(batch, 1)
    )
    assert (parallel.to_host(after).memory == 0).all()


@pytest.mark.medium
def test_held_out_text_is_scored_as_one_pass(corpus: Path, tmp_path: Path) -> None:
    """With a memory that covers a text, evaluation in a run and scores of texts are those of one pass."""
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(TEXT, encoding="utf-8")
    options = [f"--data.eval={held_out}", "--data.verbatim=true", "--training.steps=2", "--training.eval_every=2"]
    run = train(corpus, tmp_path / "run", *NEXT, *ALONE, *options, "--model.memory_length=256")
    model = bert.load(run)
    ids = np.array([model.tokenizer.encode(TEXT, add_special_tokens=False).ids])
    sizes = dataclasses.replace(model.config, memory_length=None, max_position_embeddings=256)

    def losses(ids: np.ndarray) -> np.ndarray:
        logits = BertForCausalLM(sizes).apply({"params": model.params}, ids[:, :-1])
        return -np.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=2)

    [line] = [line for line in lines_of(run) if line["split"] == "eval"]
    assert line["lm_loss"] == pytest.approx(losses(ids).mean(), abs=1e-5)
    end = special_ids(model.tokenizer).end
    scores = model.score([TEXT, TEXT[:50], ""], stride=8)
    assert [score.num_tokens for score in scores] == [ids.shape[1], scores[1].num_tokens, 0]
    expected = losses(np.insert(ids, 0, end, axis=1)).sum()
    assert scores[0].log_probability == pytest.approx(-expected, rel=1e-5)
    for stride, batch_size in ((None, 8), (5, 1)):
        again = model.score([TEXT[:50], TEXT], stride=stride, batch_size=batch_size)
        assert [score.log_probability for score in again[::-1]] == pytest.approx(
            [score.log_probability for score in scores[:2]], rel=1e-5
        )


REJECTED = [
    (["--training.objective=mlm", "--model.causal=false"], "model.memory_length is 40, training.objective is mlm"),
    (["--data.input_format=full_sentences"], "model.memory_length is 40, data.input_format is full_sentences"),
    (["--training.scan_layers=true"], "model.memory_length is 40, training.scan_layers is true"),
    (["--model.halting=0.0"], "model.memory_length is 40, model.halting is 0.0"),
    (["--training.attention_implementation=splash"], "attention_implementation"),
]


@pytest.mark.parametrize(("options", "words"), REJECTED)
def test_what_does_not_continue_rows_is_rejected(options: list[str], words: str, fails, tmp_path: Path) -> None:
    text = fails(main, "--data.train=x.txt", f"--output_dir={tmp_path}", *SMALL_RUN, *NEXT, *RECURRENT, *options)
    assert all(part in text for part in words.split(", ")), text
