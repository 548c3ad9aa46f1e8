"""NaN and infinity: the step is skipped on all devices alike, written down, and too many of them end the run."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from bert.config import OptimizerConfig, TrainingConfig
from bert.errors import UserError
from bert.parallel.backends import PmapParallelism
from bert.runs.checkpoint import Checkpointer
from bert.runs.metrics_log import MAX_DUMPED_BATCHES, SkippedStep, read_metrics
from bert.runs.report import RunReport
from bert.training.loop import InterruptHandler, TrainLoop
from bert.training.optimizer import learning_rate_schedule
from bert.training.step import TrainState, make_train_step
from tests.tiny_training import OBJECTIVE, OPTIMIZER, B, TinyLoader, batch_of, initial_params

STEPS = 8


class DamagedLoader(TinyLoader):
    """Some batches have one NaN, in their last row: of eight devices, one alone sees it."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step)
        if step in self.bad:
            batch["masked_lm_weights"][-1, 0] = np.nan
        return batch


def train(folder: Path, bad: set[int], devices: int = 1, max_skipped: int = 10, params=None, optimizer=OPTIMIZER):
    """Eight steps, those in ``bad`` with a damaged batch, as commands run them; returns the state that is saved."""
    parallel = PmapParallelism(jax.devices()[:devices])
    intervals = {"log_every": 2, "checkpoint_every": 3, "eval_every": STEPS}
    config = TrainingConfig(steps=STEPS, batch_size=B, max_consecutive_nonfinite_steps=max_skipped, **intervals)
    params = initial_params() if params is None else params
    state = TrainState.create(params, optimizer, OBJECTIVE.metrics)
    with Checkpointer(folder / "checkpoints", 2, print) as checkpoints, InterruptHandler() as stop:
        restored = checkpoints.restore(state)
        state = state if restored is None else restored[1]
        with RunReport(folder, STEPS, int(state.step), 1) as listener:
            TrainLoop(
                config=config,
                end_step=STEPS,
                loader=DamagedLoader(bad),
                train_step=parallel.compile(make_train_step(OBJECTIVE, optimizer, seed=3), donate=(0,)),
                schedule=learning_rate_schedule(OptimizerConfig(learning_rate=1e-2, warmup_steps=2), 12),
                evaluate=lambda params: {},
                parallel=parallel,
                checkpoints=checkpoints,
                report=listener,
                interrupts=stop,
            ).run(state)
    return saved(folder)


def saved(folder: Path) -> TrainState:
    with Checkpointer(folder / "checkpoints", 2, print) as checkpoints:
        return checkpoints.restore(TrainState.create(initial_params(), OPTIMIZER, OBJECTIVE.metrics))[1]


def without(skipped: set[int]) -> TrainState:
    """The state after the other steps alone."""
    parallel = PmapParallelism(jax.devices()[:1])
    step_fn = parallel.compile(make_train_step(OBJECTIVE, OPTIMIZER, seed=3), donate=(0,))
    state = TrainState.create(initial_params(), OPTIMIZER, OBJECTIVE.metrics)
    for step in set(range(STEPS)) - skipped:
        state = state.replace(step=np.int32(step))
        state, _ = step_fn(parallel.put_state(state), parallel.shard_batch(batch_of(step), 1))
        state = parallel.to_host(state)
    return state


@pytest.mark.medium
@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_step_that_is_not_finite_leaves_no_trace_in_the_weights(tmp_path: Path, devices: int) -> None:
    state, expected = train(tmp_path, {2, 3, 6}, devices), without({2, 3, 6})
    kept, expected_arrays = (state.params, state.opt_state), (expected.params, expected.opt_state)
    if devices == 1:
        jax.tree.map(np.testing.assert_array_equal, kept, expected_arrays)
    else:

        def close(path, actual, reference) -> None:
            # The gradient of the key's bias is rounding alone, which Adam enlarges; the rest moves by 1e-2 a step.
            is_rounding = "'key'" in jax.tree_util.keystr(path) and np.ndim(actual) == 1
            np.testing.assert_allclose(actual, reference, rtol=1e-3, atol=1e-5 if is_rounding else 1e-6)

        jax.tree_util.tree_map_with_path(close, kept, expected_arrays)
    assert state.skipped.tolist() == [0, 3]
    lines = {line["step"]: line for line in read_metrics(tmp_path) if line["split"] == "train"}
    assert lines[4]["loss"] is None  # steps 3 and 4 were both skipped: there is no loss to tell
    assert "skipped_steps" not in lines[2]
    assert [lines[step]["skipped_steps"] for step in (4, 6, 8)] == [2, 2, 3]
    assert np.isfinite(lines[8]["loss"])
    assert lines[8]["learning_rate"] == pytest.approx(1e-2 * 0.8)  # of the fifth update
    assert sorted(path.name for path in (tmp_path / "nonfinite").iterdir()) == [
        "3.json", "3.npz", "4.json", "4.npz", "7.json", "7.npz",
    ]  # fmt: skip
    facts = json.loads((tmp_path / "nonfinite" / "4.json").read_text())
    assert (facts["step"], facts["loss"], facts["skipped_in_a_row"]) == (4, "nan", 2)
    assert facts["rows"] == (np.arange(B) + 3 * B).tolist()
    assert {"bert/embeddings", "bert/encoder/layer_0", "bert/pooler", "predictions", "update"} <= set(facts["norms"])
    with np.load(tmp_path / "nonfinite" / "4.npz") as arrays:
        np.testing.assert_array_equal(arrays["masked_lm_weights"], DamagedLoader({3}).batch(3)["masked_lm_weights"])
        np.testing.assert_array_equal(arrays["input_ids"], batch_of(3)["input_ids"])


@pytest.mark.medium
def test_every_device_decides_alike() -> None:
    parallel = PmapParallelism(jax.devices()[:8])
    step_fn = parallel.compile(make_train_step(OBJECTIVE, OPTIMIZER, seed=3), donate=(0,))
    state = parallel.put_state(TrainState.create(initial_params(), OPTIMIZER, OBJECTIVE.metrics))
    for batch, skipped in (
        (DamagedLoader({0}).batch(0), [1, 1]),
        (DamagedLoader({1}).batch(1), [2, 2]),
        (batch_of(2), [0, 2]),
    ):
        state, outcome = step_fn(state, parallel.shard_batch(batch, 1))
        for leaf in jax.tree.leaves(state):
            np.testing.assert_array_equal(leaf, np.broadcast_to(np.asarray(leaf)[:1], leaf.shape))
        assert np.asarray(outcome.skipped).tolist() == [skipped] * 8


@pytest.mark.medium
def test_too_many_in_a_row_end_the_run_with_a_diagnosis_and_the_state_before(tmp_path: Path) -> None:
    bad = {1, 3, 4, 5, 6, 7}
    with pytest.raises(UserError) as caught:
        train(tmp_path, bad, max_skipped=3)
    assert "\n" not in str(caught.value)
    for words in ("last 3 steps up to step 6 were skipped", "the loss is nan", "nonfinite/", "step 6"):
        assert words in str(caught.value)
    state = saved(tmp_path)
    assert (int(state.step), state.skipped.tolist()) == (6, [3, 4])
    jax.tree.map(np.testing.assert_array_equal, state.params, without(bad).params)
    with pytest.raises(UserError, match="last 4 steps up to step 7"):  # tried again, it does not begin to count again
        train(tmp_path, bad, max_skipped=3)
    assert saved(tmp_path).skipped.tolist() == [4 + 1, 5 + 1]
    assert int(train(tmp_path, bad, max_skipped=10).step) == STEPS


@pytest.mark.medium
def test_weights_that_are_not_finite_are_told_from_a_bad_batch(tmp_path: Path) -> None:
    params = jax.tree.map(np.array, initial_params())
    params["bert"]["encoder"]["layer_0"]["output"]["kernel"][0, 0] = np.inf
    with pytest.raises(UserError, match=r"last 3 steps.*step 3 were"):
        train(tmp_path, set(), max_skipped=3, params=params)


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_skipped_though_the_gradient_is(tmp_path: Path) -> None:
    def update(grads, state, params):
        updates, state = OPTIMIZER.update(grads, state, params)
        return jax.tree.map(lambda leaf: leaf / 0.0, updates), state

    with pytest.raises(UserError, match=r"are finite .* optimizer's update is not"):
        train(tmp_path, set(), max_skipped=2, optimizer=optax.GradientTransformation(OPTIMIZER.init, update))
    jax.tree.map(np.testing.assert_array_equal, saved(tmp_path).params, initial_params())


def skip_of(step: int, **norms: float) -> SkippedStep:
    return SkippedStep(step, 2.5, {"update": np.nan, **norms}, 1, 1, np.arange(2), {"input_ids": np.ones((2, 3))})


def test_the_diagnosis_names_the_groups() -> None:
    names = {f"layer_{i}": np.inf for i in range(5)}
    diagnosis = skip_of(1, head=1.0, **names).diagnosis
    assert diagnosis == "the loss is 2.5, the gradient of layer_0, layer_1, layer_2 and 2 more is not finite"
    large = SkippedStep(1, 2.5, {"head": 1e19, "update": 1.0}, 1, 1, np.arange(2), {})
    assert "too large to square" in large.diagnosis


def test_batches_are_written_down_up_to_a_number(tmp_path: Path) -> None:
    for step in range(MAX_DUMPED_BATCHES):
        (tmp_path / f"{step}.json").write_text("")
    assert skip_of(MAX_DUMPED_BATCHES).write(tmp_path) is None
    assert skip_of(0).write(tmp_path) == tmp_path / "0.json"
