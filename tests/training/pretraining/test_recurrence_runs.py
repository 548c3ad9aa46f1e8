"""Segment recurrence in training: runs resume with their memory, and devices and micro-batches do not matter."""

import dataclasses
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
from bert.training.recurrence import MEMORY, gather_memory, memory_shape, scatter_memory, with_memory
from bert.training.step import TrainState, make_train_step, make_update_fn
from bert.training.token_losses import make_next_token_loss
from tests.conftest import NEXT, PERMUTED, SMALL_RUN
from tests.helpers import assert_resumes, lines_of, state_of
from tests.tiny_training import CONFIG, B, T, batch_of, batch_of_next_tokens

TEXT = "baba kori tune losa mi riko neba salo tuko mine " * 4
MEMORY_LENGTH = 256
RECURRENT = [
    *("--model.position_embedding_type=transformer_xl", f"--model.memory_length={MEMORY_LENGTH}"),
    *("--training.batch_size=2", "--training.eval_batch_size=1", "--data.sequence_length=16"),
]
SIZES = dataclasses.replace(CONFIG, position_embedding_type="transformer_xl", memory_length=T + 4)


@pytest.fixture(scope="module")
def left_to_right(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run of six steps with a memory of the whole held-out text, and its arguments."""
    folder = tmp_path_factory.mktemp("recurrent")
    (folder / "held_out.txt").write_text(TEXT, encoding="utf-8")
    files = [f"--data.train={corpus}", f"--data.eval={folder / 'held_out.txt'}", "--data.verbatim=true"]
    arguments = [*files, *SMALL_RUN, *NEXT, *RECURRENT]
    assert main([*arguments, f"--output_dir={folder / 'run'}"]) == 0
    return folder / "run", arguments


def assert_resumes_with_memory(whole: Path, arguments: list[str], again: Path) -> None:
    memory = state_of(whole)["memory"]
    assert memory.shape == (2, 1, MEMORY_LENGTH, 16)
    assert np.abs(memory).max() > 0
    assert_resumes(main, arguments, whole, again)


@pytest.mark.medium
def test_a_run_resumes_with_its_memory(left_to_right: tuple[Path, list[str]], tmp_path: Path) -> None:
    assert_resumes_with_memory(*left_to_right, tmp_path / "again")


@pytest.mark.slow
def test_a_run_of_permuted_tokens_resumes_with_its_memory(corpus: Path, tmp_path: Path) -> None:
    arguments = [f"--data.train={corpus}", *SMALL_RUN, *PERMUTED, "--data.input_format=blocks", *RECURRENT]
    assert main([*arguments, f"--output_dir={tmp_path / 'whole'}"]) == 0
    assert_resumes_with_memory(tmp_path / "whole", arguments, tmp_path / "again")


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
    if mesh is not None:  # each device has the memory of its rows
        assert state.memory.addressable_shards[0].data.shape[0] == B // (mesh[0] * mesh[1])
    return parallel.to_host(state)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["clm", "plm"])
def test_devices_and_micro_batches_do_not_matter(objective: str) -> None:
    expected = train_step(objective, 1, 1)
    for devices, micro_batches, mesh in [(8, 1, None), (2, 4, None), (8, 2, (2, 2, 2)), (8, 1, (2, 2, 2))]:
        state = train_step(objective, devices, micro_batches, mesh)
        np.testing.assert_allclose(state.memory, expected.memory, atol=2e-5)
        for name, pair in expected.sums.items():
            np.testing.assert_allclose(state.sums[name], pair, rtol=1e-5, err_msg=name)


@pytest.mark.medium
def test_a_step_that_is_not_finite_keeps_the_memory() -> None:
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=1), 4)
    state = TrainState.create({"bert": {"x": jnp.zeros(3)}}, optimizer, ("lm_loss",), (2, 1, 3, 4))
    update = make_update_fn(optimizer, {})
    for loss, expected in ((np.float32(np.nan), 0), (np.float32(1), 1)):
        sums = {"lm_loss": (loss, np.float32(1)), MEMORY: jnp.ones((2, 1, 3, 4))}
        after, _ = update(state, {"bert": {"x": jnp.full(3, loss)}}, sums)
        assert (np.asarray(after.memory) == expected).all()


@pytest.mark.medium
def test_held_out_text_is_scored_as_one_pass(left_to_right: tuple[Path, list[str]]) -> None:
    """Evaluation in a run and scores of texts equal one pass if the memory covers the text."""
    run, _ = left_to_right
    model = bert.load(run)
    ids = np.array([model.tokenizer.encode(TEXT, add_special_tokens=False).ids])
    sizes = dataclasses.replace(model.config, memory_length=None, max_position_embeddings=MEMORY_LENGTH)

    def losses(ids: np.ndarray) -> np.ndarray:
        logits = BertForCausalLM(sizes).apply({"params": model.params}, ids[:, :-1])
        return -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), ids[:, 1:, None], axis=2)

    evaluated = [line for line in lines_of(run) if line["split"] == "eval"]
    assert evaluated[-1]["lm_loss"] == pytest.approx(losses(ids).mean(), abs=1e-5)
    end = special_ids(model.tokenizer).end
    whole, part, empty = model.score([TEXT, TEXT[:50], ""], stride=8)
    assert (whole.num_tokens, empty.num_tokens) == (ids.shape[1], 0)
    assert whole.log_probability == pytest.approx(-losses(np.insert(ids, 0, end, axis=1)).sum(), rel=1e-5)
    for stride, batch_size in ((None, 8), (5, 1)):
        again = model.score([TEXT[:50], TEXT], stride=stride, batch_size=batch_size)
        expected = [part.log_probability, whole.log_probability]
        assert [score.log_probability for score in again] == pytest.approx(expected, rel=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("batch", [["--training.eval_batch_size=3"], ["--training.eval_batch_size=40"]])
def test_held_out_losses_do_not_depend_on_the_batch(
    batch: list[str], left_to_right: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """The memory is shorter than the text, and there are two layers: rows depend on others before the memory."""
    _, arguments = left_to_right
    shorter = ["--model.memory_length=24", "--model.num_hidden_layers=2", "--training.steps=2"]
    losses = []
    for name, options in {"one": [], "several": batch}.items():
        assert main([*arguments, *shorter, *options, f"--output_dir={tmp_path / name}"]) == 0
        losses.append([line["lm_loss"] for line in lines_of(tmp_path / name) if line["split"] == "eval"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6) and losses[0]


REJECTED = [
    (["--training.objective=mlm", "--model.causal=false"], "model.memory_length is 256, training.objective is mlm"),
    (["--data.input_format=full_sentences"], "model.memory_length is 256, data.input_format is full_sentences"),
    (["--model.halting=0.0"], "model.memory_length is 256, model.halting is 0.0"),
    (["--data.streaming=true", "--data.eval=x.txt"], "model.memory_length is 256, data.streaming is true"),
    (["--init=runs/x@3", "--init_state=true"], "model.memory_length is 256, init_state is true"),
    (["--training.attention_implementation=splash"], "attention_implementation"),
]


@pytest.mark.parametrize(("options", "words"), REJECTED)
def test_what_does_not_continue_rows_is_rejected(options: list[str], words: str, fails, tmp_path: Path) -> None:
    text = fails(main, "--data.train=x.txt", f"--output_dir={tmp_path}", *SMALL_RUN, *NEXT, *RECURRENT, *options)
    assert all(part in text for part in words.split(", ")), text


def test_phases_are_rejected(fails, tmp_path: Path) -> None:
    (tmp_path / "phases.yaml").write_text("phases: [{share: 0.5, sequence_length: 16}, {share: 0.5}]")
    arguments = [f"--config={tmp_path / 'phases.yaml'}", "--data.train=x.txt", *SMALL_RUN, *NEXT, *RECURRENT]
    assert "a phase begins with other rows: set phases to null" in fails(main, *arguments)


@pytest.mark.medium
def test_a_mesh_does_not_gather_the_memory() -> None:
    """A batch of all rows reads and writes the memory where it is, while micro-batches select rows by their numbers."""
    memory = jnp.arange(8.0)[:, None]
    whole, part = {"rows": jnp.arange(8)[None]}, {"rows": jnp.arange(4, 8)[None]}
    assert "gather" not in str(jax.make_jaxpr(gather_memory)(memory, whole))
    np.testing.assert_array_equal(gather_memory(memory, whole)[MEMORY], memory[None])
    np.testing.assert_array_equal(gather_memory(memory, part)[MEMORY], memory[None, 4:])
    np.testing.assert_array_equal(scatter_memory({MEMORY: memory}, whole["rows"][0], 8)[MEMORY], memory)
    scattered = scatter_memory({MEMORY: memory[4:]}, part["rows"][0], 8)[MEMORY]
    np.testing.assert_array_equal(scattered, np.where(np.arange(8)[:, None] >= 4, memory, 0))
