"""The loop that every kind of training shares, and what it adds up."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from bert.config import TrainingConfig
from bert.errors import UserError, require
from bert.parallel.backends import Parallelism
from bert.runs.metrics_log import Metrics
from bert.runs.progress import StepCosts
from bert.runs.skipped_steps import SkippedStep, nonfinite_error_message
from bert.runtime.interrupts import EvaluationInterrupted, Interrupted, InterruptHandler
from bert.runtime.malloc import release_free_memory
from bert.training.losses import WeightedSums
from bert.training.step import StepMetrics, TrainState
from bert.training.timing import Timed


def compute_means(sums: dict[str, Any]) -> Metrics:
    """(sum, weight) pairs -> means, and ``loss``: the losses' sum. A weight of 0 gives 0."""
    means = {name: float(total) / float(weight) if weight else 0.0 for name, (total, weight) in sums.items()}
    return {"loss": sum(value for name, value in means.items() if name.endswith("_loss")), **means}


def accumulate_sums(parts: Iterable[WeightedSums], parallel: Parallelism) -> dict[str, np.ndarray]:
    """Sums of evaluation batches, added in float64."""
    totals: dict[str, np.ndarray] = {}
    for part in parts:
        for name, pair in parallel.to_host(part).items():
            totals[name] = totals.get(name, np.zeros(2)) + np.array(pair, dtype=np.float64)
    return totals


class CheckpointWriter(Protocol):
    """Where the loop keeps its state: `bert.runs.checkpoint.Checkpointer`."""

    def save(self, step: int, state: Any) -> None: ...


class ReportCallback(Protocol):
    """Who the loop tells: `bert.runs.report.RunReport`."""

    def on_start(self, step: int, pace: StepCosts) -> None: ...

    def step(self, step: int, loss: float) -> None: ...

    def skipped(self, step: SkippedStep) -> None: ...

    def metrics(self, step: int, split: str, metrics: Metrics) -> None: ...

    def evaluated(self, step: int) -> bool: ...


@dataclass(frozen=True)
class LoopHooks:
    """The callbacks and settings that a training mode passes to `fit`.

    Attributes:
        total_steps: the step to go to: the last one of the run, or of its phase.
        eval_every: steps between evaluations; one more follows the last step.
        batch: step -> this host's rows of its batch.
        rows: step -> the numbers of these rows in the training data, for those who ask what was in a batch.
        train_step: (state, batch) -> (state, outcome), compiled and donating its state.
        learning_rate: update number -> rate, for the log.
        evaluate: replicated parameters -> metrics; may end in `EvaluationInterrupted` between two batches.
        is_best: called with (step, metrics) after each evaluation; says whether its state is to be kept.
        protect_checkpoint: called with the step once the state that ``is_best`` asked for is saved.
        should_stop_early: step -> whether the run ends early there, called at the start and after each
            evaluation; a function of the evaluations up to that step, so that a resumed run ends where it would have
            ended.
        pace: (state on the host, what its next step takes) -> the time that is left, for the estimate at the start;
            None: every step takes as long, and nothing else takes time.
    """

    total_steps: int
    eval_every: int
    batch: Callable[[int], dict[str, np.ndarray]]
    rows: Callable[[int], np.ndarray]
    train_step: Callable[..., Any]
    learning_rate: Callable[[int], Any]
    evaluate: Callable[[Any], Metrics]
    is_best: Callable[[int, Metrics], bool] = lambda step, metrics: False
    protect_checkpoint: Callable[[int], None] = lambda step: None
    should_stop_early: Callable[[int], bool] = lambda step: False
    pace: Callable[[TrainState, Timed], StepCosts] | None = None


def fit(
    work: LoopHooks,
    state: TrainState,
    config: TrainingConfig,
    parallel: Parallelism,
    saver: CheckpointWriter,
    listener: ReportCallback,
    stop: InterruptHandler,
) -> Any:
    """Runs the loop from ``state.step`` to the end, or to where it is ``enough``; returns the replicated state.

    The host never waits for the step it has just started: it makes and places the next batch meanwhile. At most two
    steps are in flight, which bounds memory use and the delay before a signal is handled. A state that is due is saved
    before it is evaluated: evaluations can be long, and a resumed run repeats a missing one.

    Raises:
        Interrupted: after a signal, with the state saved.
        UserError: too many steps in a row were skipped, with the state before them saved.
    """
    step = int(state.step)
    done = step >= work.total_steps or work.should_stop_early(step)
    if not done:
        batch = work.batch(step)
        placed = parallel.shard_batch(batch, config.gradient_accumulation_steps)
        measured = time_step(work.train_step, parallel.put_state(state), placed)
        alone = StepCosts(((work.total_steps, measured.call),))
        listener.on_start(step, alone if work.pace is None else work.pace(state, measured))
    state = parallel.put_state(state)
    clock = _ThroughputTimer()
    in_flight: collections.deque[tuple[int, StepMetrics]] = collections.deque()
    saved = step
    hopeless: SkippedStep | None = None

    def settle(left: int) -> None:
        """Waits for the steps in flight but for the last ones, and looks at what has become of them."""
        nonlocal hopeless
        while len(in_flight) > left:
            finished, outcome = in_flight.popleft()
            loss, skipped = parallel.to_host((outcome.loss, outcome.skipped))
            listener.step(finished, float(loss))
            if skipped[0]:
                found = _skipped(finished, parallel.to_host(outcome), work)
                listener.skipped(found)
                hopeless = hopeless or (
                    found if found.num_consecutive >= config.max_consecutive_nonfinite_steps else None
                )

    def save() -> None:
        nonlocal saved
        settle(0)  # so that what a kill leaves unsaid is said by the run that goes on
        if saved != step:
            with clock.paused():
                saver.save(step, parallel.to_host(state))
                release_free_memory()
        saved = step

    @contextlib.contextmanager
    def reading() -> Iterator[None]:
        try:
            yield
        except UserError:  # the data can no longer be read: what is trained is not lost with it
            save()
            raise

    def evaluate() -> None:
        with clock.paused(), reading():
            try:
                metrics = work.evaluate(state.params)
            except EvaluationInterrupted:
                return
        if work.is_best(step, metrics):
            save()
            work.protect_checkpoint(step)
        release_free_memory()
        listener.metrics(step, "eval", metrics)  # last: where this line is missing, a resumed run does it all again

    def due(every: int) -> bool:
        return step % every == 0 or step == work.total_steps

    # A signal or a kill may have come between a checkpoint and the evaluation due at its step.
    if step and due(work.eval_every) and not listener.evaluated(step):
        evaluate()
        if stop.number is not None:
            raise Interrupted(step, stop.number)
        done = done or work.should_stop_early(step)
    while not done:
        clock.tokens += int(batch["attention_mask"].sum()) * parallel.process[1]
        state, outcome = work.train_step(state, placed)
        step += 1
        in_flight.append((step, outcome))
        if step < work.total_steps:
            with reading():
                batch = work.batch(step)
            placed = parallel.shard_batch(batch, config.gradient_accumulation_steps)
        settle(0 if due(config.log_every) else parallel.steps_in_flight)
        if due(config.log_every):
            sums, skipped = parallel.to_host((state.sums, state.skipped))
            metrics = compute_means(sums) if sums["grad_norm"][1] else dict.fromkeys(compute_means(sums), float("nan"))
            if skipped[1]:
                metrics["skipped_steps"] = int(skipped[1])
            metrics["learning_rate"] = float(work.learning_rate(step - 1 - int(skipped[1])))
            metrics["tokens_per_second"] = clock.lap()
            listener.metrics(step, "train", metrics)
            state = state.replace(sums=parallel.put_state({name: np.zeros(2, np.float32) for name in state.sums}))
        if due(config.checkpoint_every):
            save()
        if hopeless is not None:
            save()
            raise UserError(nonfinite_error_message(hopeless, step))
        done = step >= work.total_steps
        if not stop.after(step) and due(work.eval_every):
            evaluate()
            done = done or work.should_stop_early(step)
        if stop.number is not None:
            save()
            raise Interrupted(step, stop.number)
    save()  # where the run ends early; else it is saved
    return state


def time_step(train_step: Callable[..., Any], state: Any, batch: dict[str, jax.Array]) -> Timed:
    """Compiles a step and times it on a copy of the state that is thrown away: for the estimate before the start."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        state, outcome = train_step(state, batch)
        outcome.loss.block_until_ready()
        seconds.append(time.perf_counter() - start)
    return Timed(max(seconds[0] - seconds[1], 0.0), seconds[1])


def _skipped(step: int, outcome: StepMetrics, work: LoopHooks) -> SkippedStep:
    """A skipped step with its batch, which is made again: batches follow from the step."""
    return SkippedStep(
        step=step,
        loss=float(outcome.loss),
        norms={name: float(norm) for name, norm in outcome.norms.items()},
        num_consecutive=int(outcome.skipped[0]),
        num_total=int(outcome.skipped[1]),
        rows=work.rows(step - 1),
        batch=work.batch(step - 1),
    )


class _ThroughputTimer:
    """Tokens a second of training, without the time that evaluations and checkpoints take."""

    def __init__(self) -> None:
        self.tokens = 0
        self._start = time.perf_counter()
        self._pause = 0.0

    def paused(self) -> _ThroughputTimer:
        return self

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._pause += time.perf_counter() - self._entered

    def lap(self) -> float:
        now = time.perf_counter()
        rate = self.tokens / max(now - self._start - self._pause, 1e-9)
        self._start, self._pause, self.tokens = now, 0.0, 0
        return rate


def count_parameters(params: Any) -> int:
    """Number of elements in a tree of arrays (or shapes)."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def num_train_steps(config: TrainingConfig, rows: int) -> int:
    """Steps of a run over ``rows`` training rows: `training.steps`, or `training.epochs` passes."""
    if config.steps is not None:
        return int(config.steps)
    per_epoch = -(-rows // config.batch_size)
    return max(1, round(require(config.epochs, "training.epochs") * per_epoch))
