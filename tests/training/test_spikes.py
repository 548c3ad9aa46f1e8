"""Spikes of loss and gradient norm: the rule in NumPy, skipped updates, and runs that are interrupted and resumed."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bert.commands import main as command
from bert.config import OptimizerConfig, TrainingConfig
from bert.parallel.backends import PmapParallelism
from bert.runs.checkpoint import Checkpointer
from bert.runs.report import RunReport
from bert.runtime.interrupts import InterruptHandler
from bert.training import spikes
from bert.training.loop import TrainLoop
from bert.training.optimizer import make_optimizer
from bert.training.spikes import MIN_STEPS, WINDOW, detect_spikes
from bert.training.step import TrainState, make_train_step
from tests.messages import has_all
from tests.tiny_training import OBJECTIVE, TinyLoader, initial_params


def is_spike(values: np.ndarray, deviations: float) -> bool:
    """The rule in float64: whether the last value is above mean and standard deviation of those before it."""
    if len(values) <= MIN_STEPS:
        return False
    *history, last = values[-WINDOW - 1 :].astype(np.float64)
    return last > np.mean(history) + deviations * np.std(history, ddof=1)


@pytest.mark.medium
@pytest.mark.parametrize("skip", [False, True])
def test_spikes_are_those_of_the_formula(skip: bool) -> None:
    draw = np.random.default_rng(0)
    norms = np.exp(draw.normal(0, 0.2, 400)).astype(np.float32)
    norms[[10, 70, 200, 201, 350]] *= 8
    norms[300:] += 2  # a new level, to which the history adapts
    losses = (5 + draw.normal(0, 0.1, 400)).astype(np.float32)
    losses[[20, 120, 370]] += 2
    optimizer = detect_spikes(optax.sgd(0.1, momentum=0.9), 4.0, skip)
    update = jax.jit(optimizer.update)
    params = {"w": jnp.zeros(2)}
    state, weights, momentum = optimizer.init(params), np.zeros(2), np.zeros(2)
    expected = []
    for number, norm in enumerate(norms):
        grads = norm * np.array([0.6, 0.8])
        updates, state = update({"w": jnp.asarray(grads, jnp.float32)}, state, params, loss=losses[number])
        params = optax.apply_updates(params, updates)
        expected.append(any(is_spike(values[: number + 1], 4.0) for values in (losses, norms)))
        assert int(state.spikes[0]) == expected[-1], number
        if not (skip and expected[-1]):
            momentum = 0.9 * momentum + grads
            weights -= 0.1 * momentum
    assert {70, 120, 200, 370} < (found := set(np.flatnonzero(expected)))
    assert found.isdisjoint({10, 20})
    assert not any(expected[390:])
    assert state.spikes.tolist()[1:] == [sum(expected), sum(expected) * skip]
    np.testing.assert_allclose(params["w"], weights, rtol=1e-4)


@pytest.mark.medium
def test_an_interrupted_run_skips_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bert")
    monkeypatch.setattr(spikes, "WINDOW", 6)
    monkeypatch.setattr(spikes, "MIN_STEPS", 3)
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, spike_deviations=0.5, skip_spikes=True)
    optimizer, parallel = make_optimizer(config, 12), PmapParallelism(jax.devices()[:1])
    step = parallel.compile(make_train_step(OBJECTIVE, optimizer, seed=3))

    def train(folder: Path, end: int) -> TrainState:
        state = TrainState.create(initial_params(), optimizer, OBJECTIVE.metrics)
        with Checkpointer(folder / "checkpoints", 2, print) as checkpoints, InterruptHandler() as stop:
            restored = checkpoints.restore(state)
            state = state if restored is None else restored[1]
            with RunReport(folder, 12, int(state.step), 1) as report:
                loop = TrainLoop(
                    config=TrainingConfig(steps=12, batch_size=8, log_every=4, checkpoint_every=5, eval_every=12),
                    end_step=end,
                    loader=TinyLoader(),
                    train_step=step,
                    schedule=lambda count: count,
                    evaluate=lambda params: {},
                    parallel=parallel,
                    checkpoints=checkpoints,
                    report=report,
                    interrupts=stop,
                )
                return parallel.to_host(loop.run(state))

    whole = train(tmp_path / "whole", 12)
    train(tmp_path / "parts", 7)
    resumed = train(tmp_path / "parts", 12)
    number, skipped = whole.opt_state.spikes[1:].tolist()
    assert 0 < number == skipped < 9
    assert jax.tree.all(jax.tree.map(np.array_equal, resumed, whole))
    lines = (tmp_path / "whole/metrics.jsonl").read_text()
    assert f'"spikes": {number}' in lines
    assert f'"learning_rate": {11.0 - skipped}' in lines  # the schedule counts updates
    assert re.search(
        r"step \d+ was skipped: its loss is [\d.e+-]+, its gradient norm [\d.e+-]+; 1 spikes so far", caplog.text
    )


def test_skipping_needs_a_threshold(fails) -> None:
    message = fails(command, "pretrain", "--optimizer.skip_spikes=true", "--output_dir=run")
    assert has_all(message, "optimizer.skip_spikes is true", "optimizer.spike_deviations")
