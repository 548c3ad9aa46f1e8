"""The mean of the parameters at the last evaluations: by hand, through checkpoints, and in the loop."""

import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert.config import TrainingConfig
from bert.parallel.backends import PmapParallelism
from bert.runs.checkpoint import Checkpointer
from bert.runs.report import Report
from bert.runtime.interrupts import Interrupted, InterruptHandler
from bert.training.loop import TrainLoop
from bert.training.means import ParameterAverage
from bert.training.step import StepMetrics, TrainState


def params_of(*values: float) -> dict[str, dict[str, np.ndarray]]:
    return {"dense": {"kernel": np.array(values, np.float32)}}


def state_of_step(step: int, params: dict) -> TrainState:
    return TrainState(np.int32(step), params, {"count": np.int32(step)}, {"loss": np.zeros(2, np.float32)}, np.zeros(2))


def test_the_mean_is_that_of_the_last_ones_and_summed_in_float64() -> None:
    average = ParameterAverage(3)
    first = params_of(1e8, 0.1)
    assert average.add(10, first)
    np.testing.assert_array_equal(average.mean["dense"]["kernel"], first["dense"]["kernel"])
    assert average.add(20, params_of(1, 0.2)) and average.add(30, params_of(-1e8, 0.6))
    mean = average.mean["dense"]["kernel"]
    assert mean.dtype == np.float32
    # in float32, 1e8 + 1 - 1e8 would be 0
    np.testing.assert_allclose(mean, [1 / 3, 0.3], rtol=1e-7)
    assert average.add(40, params_of(3, 0.7))
    np.testing.assert_allclose(average.mean["dense"]["kernel"], [(1 - 1e8 + 3) / 3, 0.5], rtol=1e-7)
    assert not average.add(40, params_of(0, 0)), "a resumed run evaluates the step of its checkpoint again"
    assert [step for step, _ in average.window] == [20, 30, 40]


@pytest.mark.parametrize("evaluations", [0, 1, 2, 5])
def test_a_restored_window_goes_on_as_the_saved_one(tmp_path: Path, evaluations: int) -> None:
    with Checkpointer(tmp_path, 1, print) as checkpoints:
        average = ParameterAverage(3)
        for number in range(evaluations):
            average.add(number + 1, params_of(0.1 * number, number))
        trained = params_of(7, 8)
        checkpoints.save(9, average.add_to_state(state_of_step(9, trained)))
        checkpoints.wait()
        resumed = ParameterAverage(3)
        like = jax.tree.map(np.zeros_like, state_of_step(9, trained))
        step, state = resumed.restore(checkpoints, like)
        assert (step, int(state.step), int(state.opt_state["count"])) == (9, 9, 9)
        np.testing.assert_array_equal(state.params["dense"]["kernel"], [7, 8])
        assert [at for at, _ in resumed.window] == list(range(1, evaluations + 1))[-3:]
        for one in (average, resumed):
            one.add(10, trained)
        jax.tree.map(np.testing.assert_array_equal, average.mean, resumed.mean)
        last = [params_of(0.1 * n, n)["dense"]["kernel"] for n in range(evaluations)][-3:] or [np.float32([7, 8])]
        mean = np.mean(last, axis=0, dtype=np.float64).astype(np.float32)
        np.testing.assert_array_equal(checkpoints.restore_params()[1]["dense"]["kernel"], mean)


class Batches:
    """Batches without content, one of which comes with a SIGTERM."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at = stop_at

    def batch(self, step: int) -> dict[str, np.ndarray]:
        if step == self.stop_at:
            signal.raise_signal(signal.SIGTERM)
        return {"attention_mask": np.ones((1, 1), np.int32)}

    def row_indices(self, step: int) -> np.ndarray:
        return np.zeros(1, np.int64)


class EveryEvaluationIsTheBest:
    best_step: int | None = None

    def update(self, step: int, metrics: dict) -> bool:
        self.best_step = step
        return True

    def should_stop(self, step: int) -> bool:
        return False


class Evaluated(Report):
    """Remembers the steps that were evaluated, as metrics.jsonl does."""

    def __init__(self, lines: dict[int, dict]) -> None:
        self.lines = lines

    def metrics(self, step: int, split: str, metrics: dict) -> None:
        if split == "eval":
            self.lines[step] = metrics

    def evaluated(self, step: int) -> bool:
        return step in self.lines


PARALLEL = PmapParallelism(jax.devices()[:1])
GROW = PARALLEL.compile(
    lambda state, batch: (
        state.replace(step=state.step + 1, params=jax.tree.map(lambda p: 1.1 * p + 0.3, state.params)),
        StepMetrics(jnp.float32(0), {}, state.skipped),
    )
)


def grow(folder: Path, lines: dict[int, dict], stop_at: int | None = None, steps: int = 7) -> None:
    """Runs or resumes the steps. The mean over three evaluations is evaluated at every second step and the last."""
    config = TrainingConfig(steps=steps, eval_every=2, checkpoint_every=3, log_every=100)
    with Checkpointer(folder, 1, print) as checkpoints, InterruptHandler() as interrupts:
        average = ParameterAverage(3)
        sums = {"grad_norm": np.zeros(2, np.float32)}
        state = TrainState(np.int32(0), params_of(1, -2), (), sums, np.zeros(2, np.int32))
        restored = average.restore(checkpoints, state)
        loop = TrainLoop(
            config=config, end_step=steps, loader=Batches(stop_at), train_step=GROW, schedule=lambda n: 0.0,
            evaluate=lambda params: {"kernel": PARALLEL.to_host(params)["dense"]["kernel"].tolist()},
            parallel=PARALLEL, checkpoints=checkpoints, report=Evaluated(lines), interrupts=interrupts,
            early_stopping=EveryEvaluationIsTheBest(), average=average,
        )  # fmt: skip
        loop.run(state if restored is None else restored[1])


@pytest.mark.medium
@pytest.mark.parametrize("stop_at", [1, 2, 3, 5, 6])
def test_an_interrupted_mean_is_that_of_the_whole_run(tmp_path: Path, stop_at: int) -> None:
    """The mean is evaluated, is in the checkpoint, and needs the window from before the interruption."""
    whole, stopped = {}, {}
    grow(tmp_path / "whole", whole)
    with pytest.raises(Interrupted):
        grow(tmp_path / "run", stopped, stop_at)
    grow(tmp_path / "run", stopped)
    assert list(whole) == [2, 4, 6, 7] and whole == stopped
    params = [np.float32([1, -2])]
    for _ in range(7):
        params.append(np.float32(1.1) * params[-1] + np.float32(0.3))
    expected = {2: [2], 4: [2, 4], 6: [2, 4, 6], 7: [4, 6, 7]}
    for step, window in expected.items():
        np.testing.assert_allclose(whole[step]["kernel"], np.mean([params[i] for i in window], axis=0), rtol=1e-6)
    for folder in ("whole", "run"):
        with Checkpointer(tmp_path / folder, 1, print) as checkpoints:
            step, best = checkpoints.restore_best_params()
            assert step == 7 and best["dense"]["kernel"].tolist() == whole[7]["kernel"]


@pytest.mark.medium
def test_an_extended_mean_is_that_of_a_run_planned_so(tmp_path: Path) -> None:
    """Step 7 is evaluated only because the first run ends there."""
    extended, planned = {}, {}
    grow(tmp_path / "run", extended)
    grow(tmp_path / "run", extended, steps=12)
    grow(tmp_path / "planned", planned, steps=12)
    assert extended.pop(7) and extended == planned
