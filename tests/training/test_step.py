"""Training results do not depend on devices, gradient accumulation or interruptions."""

import dataclasses
import functools
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import OptimizerConfig, TrainingConfig
from bert.errors import UserError
from bert.model.dropout import Dropout
from bert.model.heads import BertForSequenceClassification
from bert.parallel.backends import AXIS, PmapParallelism
from bert.runs.checkpoint import Checkpointer
from bert.runs.metrics_log import SkippedStep
from bert.runtime.interrupts import Interrupted, InterruptHandler
from bert.training.loop import ThroughputTimer, TrainLoop
from bert.training.losses import LOSSES, make_task_loss
from bert.training.means import compute_means
from bert.training.optimizer import learning_rate_schedule, make_optimizer
from bert.training.run_length import num_train_steps
from bert.training.step import (
    TrainState,
    compile_bucketed_train_step,
    compute_gradients,
    make_eval_step,
    make_train_step,
)
from tests.tiny_training import (
    CONFIG,
    OBJECTIVE,
    OPTIMIZER,
    B,
    T,
    TinyLoader,
    assert_same_gradients,
    batch_of,
    initial_params,
)


@functools.cache
def gradients(devices: int, micro_batches: int, generator: str | None):
    """Gradients and metrics of one batch for a number of devices and micro-batches. No generator means no dropout."""
    parallel = PmapParallelism(jax.devices()[:devices])

    def dropout(rows: jax.Array) -> Dropout | None:
        return None if generator is None else Dropout.for_step(3, 5, rows, generator)

    step = parallel.compile(lambda params, batch: compute_gradients(params, batch, OBJECTIVE, dropout))
    grads, sums = step(parallel.put_state(initial_params()), parallel.shard_batch(batch_of(0), micro_batches))
    copies = jax.tree.map(np.asarray, grads)
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, np.broadcast_to(g[:1], g.shape)), copies)
    return parallel.to_host(grads), parallel.to_host(sums)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("devices", "micro_batches", "generator"),
    [
        pytest.param(8, 1, None, marks=pytest.mark.slow),
        (8, 1, "hash"),
        (1, 4, "hash"),
        pytest.param(1, 16, "hash", marks=pytest.mark.slow),
        pytest.param(4, 2, "hash", marks=pytest.mark.slow),
        pytest.param(8, 1, "threefry", marks=pytest.mark.slow),
    ],
)
def test_devices_and_micro_batches_do_not_matter(devices: int, micro_batches: int, generator: str | None) -> None:
    expected, expected_sums = gradients(1, 1, generator)
    grads, sums = gradients(devices, micro_batches, generator)

    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_step_for_lengths_is_the_step_and_traces_its_update_once(devices: int) -> None:
    traced = []
    update = OPTIMIZER.update

    def counted(*arguments, **extra):
        traced.append(None)
        return update(*arguments, **extra)

    parallel = PmapParallelism(jax.devices()[:devices])
    optimizer = OPTIMIZER._replace(update=counted)
    in_two = compile_bucketed_train_step(OBJECTIVE, optimizer, 3, "hash", parallel)
    in_one = parallel.compile(make_train_step(OBJECTIVE, OPTIMIZER, 3), donate=(0,))
    states = [parallel.put_state(TrainState.create(initial_params(), OPTIMIZER, OBJECTIVE.metrics)) for _ in range(2)]
    for number, length in enumerate((T, T - 4, T)):
        batch = batch_of(number)
        cut = {name: batch[name][:, :length] for name in ("input_ids", "token_type_ids", "attention_mask")}
        placed = parallel.shard_batch({**batch, **cut}, 1)
        (states[0], outcome), (states[1], expected) = in_two(states[0], placed), in_one(states[1], placed)
        np.testing.assert_allclose(parallel.to_host(outcome.loss), parallel.to_host(expected.loss), rtol=1e-6)
    assert len(traced) == 1
    two, one = (parallel.to_host(state.params) for state in states)
    # Adam's first steps are of the size of the learning rate wherever a gradient is only rounding.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), two, one)


@pytest.mark.medium
def test_a_mean_of_means_would_have_been_noticed() -> None:
    """`pmean` of each device's mean gives a different result on this uneven batch."""
    parallel = PmapParallelism(jax.devices()[:8])

    def wrong(params, batch):
        def loss(params):
            losses, _ = OBJECTIVE.forward(params, jax.tree.map(lambda x: x[0], batch), None)
            return sum(total / jnp.maximum(weight, 1) for total, weight in losses.values())

        return jax.lax.pmean(jax.grad(loss)(params), AXIS)

    grads = parallel.to_host(
        parallel.compile(wrong)(parallel.put_state(initial_params()), parallel.shard_batch(batch_of(0), 1))
    )
    right = gradients(1, 1, None)[0]["predictions"]["transform"]["kernel"]
    assert np.linalg.norm(grads["predictions"]["transform"]["kernel"] - right) > 0.1 * np.linalg.norm(right)


@pytest.mark.medium
def test_dropout_changes_the_gradient_and_the_step_changes_dropout() -> None:
    without, one = gradients(1, 1, None)[0], gradients(1, 1, "hash")[0]
    kernel = lambda g: g["bert"]["encoder"]["layer_0"]["output"]["kernel"]  # noqa: E731
    assert np.linalg.norm(kernel(one) - kernel(without)) > 0.05 * np.linalg.norm(kernel(without))


@pytest.mark.medium
def test_evaluation_over_devices_counts_every_row_once() -> None:
    for devices in (1, 8):
        parallel = PmapParallelism(jax.devices()[:devices])
        sums = parallel.compile(make_eval_step(OBJECTIVE))(
            parallel.put_state(initial_params()), parallel.shard_batch(batch_of(1))
        )
        fetched = parallel.to_host(sums)
        assert fetched["nsp_loss"][1] == batch_of(1)["next_sentence_weights"].sum()
        assert fetched["mlm_loss"][1] == batch_of(1)["masked_lm_weights"].sum()
        if devices == 1:
            expected = compute_means(fetched)
    assert compute_means(fetched) == pytest.approx(expected, rel=1e-6)


class Memory:
    """A listener that remembers."""

    stop_reason: str | None = None

    def __init__(self, evaluated: tuple[int, ...] = ()) -> None:
        self.lines: list[tuple[int, str, dict[str, float]]] = []
        self.steps: list[int] = []
        self.skips: list[SkippedStep] = []
        self.past = evaluated

    def step(self, step: int) -> None:
        self.steps.append(step)

    def first_loss(self, loss: float) -> None:
        self.first = loss

    def skipped(self, step: SkippedStep) -> None:
        self.skips.append(step)

    def metrics(self, step: int, split: str, metrics: dict[str, float]) -> None:
        self.lines.append((step, split, {k: v for k, v in metrics.items() if k != "tokens_per_second"}))

    def has_line(self, step: int, split: str) -> bool:
        return split == "eval" and step in self.past


class StoppingLoader(TinyLoader):
    """Sends SIGTERM while it makes the batch of a step."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at = stop_at

    def batch(self, step: int) -> dict[str, np.ndarray]:
        if step == self.stop_at:
            signal.raise_signal(signal.SIGTERM)
        return super().batch(step)


def train(folder: Path, devices: int = 1, stop_at: int | None = None, micro_batches: int = 1, steps: int = 12):
    """Runs or resumes 12 steps. ``stop_at`` sends SIGTERM before that step."""
    parallel = PmapParallelism(jax.devices()[:devices])
    config = TrainingConfig(
        steps=steps,
        batch_size=B,
        gradient_accumulation_steps=micro_batches,
        log_every=4,
        checkpoint_every=5,
        eval_every=6,
    )
    listener = Memory()
    with Checkpointer(folder, max_to_keep=2, log=lambda text: None) as checkpoints, InterruptHandler() as stop:
        loop = TrainLoop(
            config=config,
            end_step=steps,
            loader=StoppingLoader(stop_at),
            train_step=parallel.compile(make_train_step(OBJECTIVE, OPTIMIZER, seed=3), donate=(0,)),
            schedule=learning_rate_schedule(OptimizerConfig(learning_rate=1e-2, warmup_steps=2), 12),
            evaluate=lambda params: {
                "norm": float(sum(np.abs(p).sum() for p in jax.tree.leaves(parallel.to_host(params))))
            },
            parallel=parallel,
            checkpoints=checkpoints,
            report=listener,
            interrupts=stop,
        )
        state = TrainState.create(initial_params(), OPTIMIZER, OBJECTIVE.metrics)
        restored = checkpoints.restore(state)
        if restored is not None:
            state = restored[1]
        try:
            params = parallel.to_host(loop.run(state)).params
        except Interrupted as interrupted:
            assert interrupted.status == 143
            params = None
    assert listener.steps == sorted(set(listener.steps))
    assert listener.skips == []
    return params, listener.lines


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("whole")
    params, lines = train(folder)
    with Checkpointer(folder, max_to_keep=2, log=lambda text: None) as checkpoints:
        _, state = checkpoints.restore(TrainState.create(initial_params(), OPTIMIZER, OBJECTIVE.metrics))
    return params, lines, state


@pytest.mark.medium
@pytest.mark.parametrize("stop_at", [pytest.param(1, marks=pytest.mark.slow), 6, 7])
def test_interruption_does_not_matter_bit_for_bit(tmp_path: Path, uninterrupted, stop_at: int) -> None:
    expected, expected_lines, expected_state = uninterrupted
    _, before = train(tmp_path, stop_at=stop_at)
    params, after = train(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert before + after == expected_lines
    with Checkpointer(tmp_path, max_to_keep=2, log=lambda text: None) as checkpoints:
        step, state = checkpoints.restore(TrainState.create(initial_params(), OPTIMIZER, OBJECTIVE.metrics))
    assert step == 12
    jax.tree.map(np.testing.assert_array_equal, state, expected_state)


@pytest.mark.slow
def test_training_on_eight_devices_follows_training_on_one(tmp_path: Path, uninterrupted) -> None:
    _expected, expected_lines, _ = uninterrupted
    _, lines = train(tmp_path, devices=8)
    for (step, split, actual), (expected_step, expected_split, expected) in zip(lines, expected_lines, strict=True):
        assert (step, split) == (expected_step, expected_split)
        assert actual == pytest.approx(expected, rel=1e-4)


@pytest.mark.medium
def test_a_run_saved_on_one_device_goes_on_on_eight_and_back(tmp_path: Path, uninterrupted) -> None:
    """Rows, masks and dropout are the same, so the losses agree up to rounding."""
    _, expected_lines, _ = uninterrupted
    _, first = train(tmp_path, stop_at=4)
    _, second = train(tmp_path, devices=8, stop_at=9)
    _, third = train(tmp_path)
    for actual, expected in zip(first + second + third, expected_lines, strict=True):
        assert actual[:2] == expected[:2]
        assert actual[2] == pytest.approx(expected[2], rel=1e-4)
        losses = {name: value for name, value in expected[2].items() if name.endswith("loss")}
        assert {name: actual[2][name] for name in losses} == pytest.approx(losses, rel=1e-5)


@pytest.mark.medium
def test_what_is_logged(uninterrupted) -> None:
    _, lines, _ = uninterrupted
    assert [line[:2] for line in lines] == [(4, "train"), (6, "eval"), (8, "train"), (12, "train"), (12, "eval")]
    first = lines[0][2]
    assert first["loss"] == pytest.approx(first["mlm_loss"] + first["nsp_loss"])
    assert first["learning_rate"] == pytest.approx(1e-2 * 0.9)
    assert set(first) >= {"mlm_accuracy", "nsp_accuracy", "grad_norm"}


@pytest.mark.medium
def test_training_learns_a_batch_by_heart() -> None:
    model = BertForSequenceClassification(CONFIG, num_labels=2)
    loss = make_task_loss(
        LOSSES["sequence_classification"],
        lambda params, batch, dropout: model.apply(
            {"params": params},
            batch["input_ids"],
            batch["token_type_ids"],
            batch["attention_mask"],
            dropout=dropout,
        ),
    )
    optimizer = make_optimizer(OptimizerConfig(learning_rate=3e-3, warmup_steps=5), 60)
    parallel = PmapParallelism(jax.devices()[:2])
    batch = batch_of(0)
    batch |= {"labels": batch["input_ids"][:, 1] % 2, "weights": np.ones(B, np.float32)}
    batch["attention_mask"][:] = 1
    params = jax.jit(model.init)(jax.random.key(0), batch["input_ids"])["params"]
    state = TrainState.create(params, optimizer, loss.metrics)
    state, step = parallel.put_state(state), parallel.compile(make_train_step(loss, optimizer, 0), donate=(0,))
    losses = []
    for _ in range(60):
        state, outcome = step(state, parallel.shard_batch(batch, 1))
        losses.append(float(outcome.loss[0]))
    assert losses[0] > 0.5
    assert losses[-1] < 0.1


def test_batches_that_cannot_be_dealt_out_are_refused() -> None:
    parallel = PmapParallelism(jax.devices()[:8])
    parallel.check_batch("training.batch_size", 32, 2)
    with pytest.raises(UserError, match=r"batch_size \(20\).*8 devices x 2 .*use 16 or 32"):
        parallel.check_batch("training.batch_size", 20, 2)
    with pytest.raises(UserError, match=r"use 8$"):
        parallel.check_batch("training.batch_size", 4)


def test_steps_by_epochs() -> None:
    config = TrainingConfig(epochs=3, batch_size=32)
    assert num_train_steps(config, 115) == 3 * 115
    assert num_train_steps(dataclasses.replace(config, epochs=0.5), 2) == 1
    assert num_train_steps(dataclasses.replace(config, epochs=None, steps=7), 115) == 7


def test_pauses_within_pauses_are_left_out_of_the_throughput_once(monkeypatch) -> None:
    times = iter([0.0, 1.0, 2.0, 5.0, 7.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    timer = ThroughputTimer()
    with timer.paused(), timer.paused():  # from 1 and from 2, both to 5
        pass
    timer.tokens = 30
    assert timer.lap() == 30 / (7 - 4)
