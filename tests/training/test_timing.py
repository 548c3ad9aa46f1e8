"""The estimate of the time that a run has left: compilations, lengths, evaluations and the scoring at the end."""

import pytest

from bert.runs.report import StepCosts
from bert.training import timing
from bert.training.loop import ThroughputTimer
from bert.training.timing import Timed, costs_of_training, line_through, seconds_of_scoring, timed


def test_a_pace_counts_what_is_done_once_and_each_evaluation() -> None:
    pace = StepCosts(((100, 0.5), (150, 2.0)), once=((1, 7.0), (40, 3.0)), evaluations=((100, 30, 4.0), (150, 20, 1.0)))
    assert pace.cost(0, 150) == 50 + 100 + 10 + 4 * 4 + 3 * 1  # steps 30, 60, 90 and 100; 120, 140 and 150
    assert pace.cost(0, 1) == 7.5
    assert pace.cost(1, 29) == 14
    assert pace.cost(29, 30) == 4.5
    assert pace.cost(90, 100) == 5 + 4
    assert pace.cost(149, 150) == 2 + 1
    assert [pace.each(step) for step in (0, 99, 100, 150)] == [0.5, 0.5, 2, 2]


@pytest.mark.parametrize(
    ("clock", "calls", "expected"),
    [
        ([0.0, 4.0, 5.0, 5.0, 5.5, 6.5], 2, (3.5, 1.5)),
        ([0.0, 4.0, 5.0, 5.0, 5.1, 5.25, 6.0, 6.1, 6.5], 4, (4.75, 0.25)),  # two more calls
        ([0.0, 4.0, 5.0, 5.0, 5.0, 5.0, 6.0, 6.4, 6.8], 10, (4.9, 0.1)),
        ([0.0, 4.0, 30.0], 1, (4.0, 26.0)),  # a long call is not repeated: what follows its compilation is timed
    ],
)
def test_the_first_call_is_timed_apart(
    monkeypatch, clock: list[float], calls: int, expected: tuple[float, float]
) -> None:
    times, made = iter(clock), []
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    measured = timed(lambda: made.append(0))
    assert len(made) == calls, "short calls are started without waiting for each"
    assert (measured.compilation, measured.call) == pytest.approx(expected)


def test_seconds_by_length() -> None:
    assert line_through({32: 0.5})(64) == 1.0
    two = line_through({32: 1.0, 128: 4.0})
    assert [two(length) for length in (32, 80, 128, 256)] == [1.0, 2.5, 4.0, 8.0]
    assert line_through({32: 1.0, 128: 0.9})(64) == 1.0, "timed under load: a longer row takes no less"


@pytest.mark.parametrize("total", [8, 24])
def test_the_estimate_is_the_time_that_a_run_takes(total: int) -> None:
    """A machine whose steps take 10 ms a token and 100 ms more, and whose compilations take 3 s, with 5 for the update.

    Three lengths more than the one that is timed first have to be compiled: one of them before the start.
    """
    lengths = [32, 16, 64, 32, 128, 16, 32, 64]

    def seconds(length: int) -> float:
        return 0.1 + 0.01 * length

    measured = []

    def measure(step: int) -> Timed:
        measured.append(step)
        return Timed(3.0, seconds(lengths[step % 8]))

    pace = costs_of_training(lengths, 0, total, measure)
    assert measured == [0, 4], "the first length, and the length that is farthest from the first"
    took = sum(seconds(lengths[step % 8]) for step in range(total)) + 2 * 3.0
    assert pace.cost(0, total) == pytest.approx(took)
    assert pace.once == ((2, 3.0), (3, 3.0))


def test_a_resumed_run_has_less_ahead() -> None:
    measured = []
    pace = costs_of_training([32, 16, 64, 64], 2, 4, lambda step: measured.append(step) or Timed(9.0, 1.0))
    assert measured == [2], "one length is left"
    assert pace.cost(2, 4) == 2.0
    assert pace.once == ()


def test_scoring_compiles_each_length_once() -> None:
    compiled = {32}
    measured = Timed(compilation=2.0, call=0.5)
    assert seconds_of_scoring([16, 32, 64, 64], 32, measured, compiled) == 2 * 2.0 + 0.25 + 0.5 + 1 + 1
    assert seconds_of_scoring([16, 32, 64, 64], 32, measured, compiled) == 2.75
    assert seconds_of_scoring([128], 32, measured, compiled) == 2.0 + 2.0


def test_every_host_makes_as_many_calls_as_the_main_process_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has times of its own, and a host that called once more than the others would wait for them for ever."""

    def calls_if_the_main_process_says(*answers: int) -> int:
        said, calls = iter(answers), []
        monkeypatch.setattr(timing, "broadcast_from_main", lambda make: next(said))
        timed(lambda: calls.append(1))
        return len(calls)

    assert calls_if_the_main_process_says(False, 5) == 2 + 5
    assert calls_if_the_main_process_says(True) == 1, "the call was long there"


def test_pauses_within_pauses_are_left_out_of_the_throughput_once(monkeypatch) -> None:
    times = iter([0.0, 1.0, 2.0, 5.0, 7.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    timer = ThroughputTimer()
    with timer.paused(), timer.paused():  # from 1 and from 2, both to 5
        pass
    timer.tokens = 30
    assert timer.lap() == 30 / (7 - 4)
