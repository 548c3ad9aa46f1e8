"""The mean of the parameters at the last evaluations: by hand, through checkpoints, and in the loop."""

from pathlib import Path

import jax
import numpy as np
import pytest

from bert.runs.checkpoint import Checkpointer
from bert.training.averaging import AveragedCheckpoints, ParameterAverage, with_average
from bert.training.step import TrainState


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


def test_a_mean_of_one_is_no_mean(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, 1, print) as checkpoints:
        assert with_average(checkpoints, 1) == (checkpoints, None)


@pytest.mark.parametrize("evaluations", [0, 1, 2, 5])
def test_a_restored_window_goes_on_as_the_saved_one(tmp_path: Path, evaluations: int) -> None:
    with Checkpointer(tmp_path, 1, print) as checkpoints:
        states, average = with_average(checkpoints, 3)
        for number in range(evaluations):
            average.add(number + 1, params_of(0.1 * number, number))
        trained = params_of(7, 8)
        states.save(9, state_of_step(9, trained))
        checkpoints.wait()
        resumed = ParameterAverage(3)
        like = jax.tree.map(np.zeros_like, state_of_step(9, trained))
        step, state = AveragedCheckpoints(checkpoints, resumed).restore(like)
        assert (step, int(state.step), int(state.opt_state["count"])) == (9, 9, 9)
        np.testing.assert_array_equal(state.params["dense"]["kernel"], [7, 8])
        assert [at for at, _ in resumed.window] == list(range(1, evaluations + 1))[-3:]
        for one in (average, resumed):
            one.add(10, trained)
        jax.tree.map(np.testing.assert_array_equal, average.mean, resumed.mean)
        last = [params_of(0.1 * n, n)["dense"]["kernel"] for n in range(evaluations)][-3:] or [np.float32([7, 8])]
        mean = np.mean(last, axis=0, dtype=np.float64).astype(np.float32)
        np.testing.assert_array_equal(checkpoints.restore_params()[1]["dense"]["kernel"], mean)
