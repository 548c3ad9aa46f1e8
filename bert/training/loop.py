"""The training loop of pretraining and fine-tuning."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from bert.config import TrainingConfig
from bert.errors import UserError, require
from bert.parallel.backends import Parallelism
from bert.parallel.multihost import broadcast_from_main
from bert.runs.checkpoint import Checkpoints
from bert.runs.environment import StepProfiler
from bert.runs.metrics_log import Metrics, SkippedStep, nonfinite_error_message
from bert.runs.report import Report
from bert.runtime.interrupts import EvaluationInterrupted, InterruptHandler
from bert.runtime.process import release_free_memory
from bert.training.means import EarlyStopping, ParameterAverage, compute_means
from bert.training.spikes import spike_counts
from bert.training.step import StepMetrics, TrainState
from bert.training.timing import RunTimes, is_ready

TrainStep = Callable[[Any, dict[str, jax.Array]], tuple[Any, StepMetrics]]
"""(state, batch) -> (state, metrics), compiled and donating its state."""


class Loader(Protocol):
    """This host's rows of each batch, as a function of the step."""

    def batch(self, step: int) -> dict[str, np.ndarray]: ...

    def row_indices(self, step: int) -> np.ndarray:
        """Returns the [B] indices of the batch's rows in the training data."""


@dataclass(kw_only=True, eq=False)
class TrainLoop:
    """Trains from a state to ``end_step``, or to the step where ``early_stopping`` or a callback ends the run.

    The host never waits for the step it has just dispatched. Meanwhile it builds the next batch and puts it onto the
    devices. At most `Parallelism.steps_in_flight` steps are in flight, which bounds memory use and the delay before a
    signal is handled. A state is saved before it is evaluated, because evaluations can be long and a resumed run
    repeats a missing one.

    Attributes:
        config: intervals, micro-batches and the limit of skipped steps.
        end_step: the last step of the run or of its phase.
        schedule: update number -> learning rate, for the log.
        evaluate: parameters on the devices -> metrics. It may raise `EvaluationInterrupted` between two batches.
        early_stopping: None trains to ``end_step`` and keeps no best checkpoint.
        decide: step -> the total number of steps if it is fixed at this step, else None. The loop then ends.
        is_last: whether ``end_step`` ends the run rather than only a phase.
        average: the average whose mean is evaluated; None evaluates the trained parameters.
        before_evaluation: changes a state on the devices that will be evaluated, before it is saved.
        before_save: called with the step before each save.
        score_checkpoint: called with the step of a saved state, except at the end of the run. It reads the checkpoint.
        times: measures the time of the run by activity.
        flops_per_token: FLOPs of training per token, for the use of the devices; None if unknown.
    """

    config: TrainingConfig
    end_step: int
    loader: Loader
    train_step: TrainStep
    schedule: Callable[[int], Any]
    evaluate: Callable[[Any], Metrics]
    parallel: Parallelism
    checkpoints: Checkpoints
    report: Report
    interrupts: InterruptHandler
    early_stopping: EarlyStopping | None = None
    profiler: StepProfiler | None = None
    loss_factors: Mapping[str, float] = field(default_factory=dict)
    average: ParameterAverage | None = None
    before_evaluation: Callable[[TrainState], TrainState] | None = None
    is_last: bool = True
    decide: Callable[[int], int | None] = lambda step: None
    before_save: Callable[[int], None] = lambda step: None
    score_checkpoint: Callable[[int], None] = lambda step: None
    times: RunTimes = field(default_factory=RunTimes)
    flops_per_token: float | None = None

    def __post_init__(self) -> None:
        self._in_flight: collections.deque[tuple[int, StepMetrics]] = collections.deque()
        self._timer = ThroughputTimer()
        self._too_many_skipped: SkippedStep | None = None
        self._stop_reason: str | None = None
        self.decided_steps: int | None = None

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._step

    @property
    def is_stopped(self) -> bool:
        """True if a callback has ended the run."""
        return self._stop_reason is not None

    def run(self, state: TrainState) -> TrainState:
        """Trains from a state on the host and returns the last state, on the devices.

        Raises:
            Interrupted: after a signal; the state is saved when the checkpointer is closed.
            UserError: too many consecutive steps were skipped, or data cannot be read; the state is saved.
            Exception: an error of a callback; the state is saved.
        """
        with self.times.measure("training"):
            return self._run(state)

    def _run(self, state: TrainState) -> TrainState:
        self._step = int(state.step)
        self._saved_step: int | None = self._step
        self._state = self.parallel.put_state(state)
        if self.early_stopping is not None and self.early_stopping.best_step is not None:
            # A killed process may have recorded a best step whose checkpoint was never completed.
            self.checkpoints.set_best(self.early_stopping.best_step)
        self._log_if_missing()
        self._evaluate_if_missing()
        self.decided_steps = self.decide(self._step)
        if not self._has_ended():
            self._score_checkpoint()
            with self.times.measure("input"):
                self._load_batch()
        while not self._has_ended():
            self._timer.tokens += self._num_tokens
            self.times.add_work(self._num_tokens, self.flops_per_token or 0.0)
            if self.profiler is not None:
                self.profiler.before_step(self._state)
            with jax.profiler.StepTraceAnnotation("train", step_num=self._step):
                self._state, metrics = self.train_step(self._state, self._batch)
            self._after_dispatch(metrics)
            if self._is_due(self.config.log_every):
                self._log()
                self.decided_steps = self.decide(self._step)
            self._prepare_evaluation()
            if self._is_due(self.config.checkpoint_every):
                self._save()
            if self._too_many_skipped is not None:
                self._save()
                raise UserError(nonfinite_error_message(self._too_many_skipped, self._step))
            interrupted = self.interrupts.should_stop(self._step)
            if not interrupted and not self.is_stopped and self._is_due(self._eval_every):
                self._run_evaluation()
            self._raise_if_interrupted()
            self._score_checkpoint()
        self._save()
        self._end_if_stopped()
        return self._state

    @property
    def _eval_every(self) -> int:
        return require(self.config.eval_every, "training.eval_every")

    def _is_due(self, every: int) -> bool:
        return self._step % every == 0 or self._step == self.end_step

    def _has_ended(self) -> bool:
        stopped_early = self.early_stopping is not None and self.early_stopping.should_stop(self._step)
        is_decided = self.decided_steps is not None
        return self._step >= self.end_step or stopped_early or self.is_stopped or is_decided

    def _log_if_missing(self) -> None:
        """Logs the last steps of a run that was shortened to the steps already done."""
        if self._step < self.end_step or broadcast_from_main(partial(self.report.has_line, self._step, "train")):
            return
        if self.parallel.to_host(self._state.sums)["grad_norm"][1]:
            self._log()

    def _evaluate_if_missing(self) -> None:
        """Evaluates a restored state if the run stopped between its checkpoint and its evaluation."""
        if self._step > 0 and self._is_due(self._eval_every):
            self._evaluate_once()

    def _evaluate_once(self) -> None:
        """Evaluates this step unless metrics.jsonl has it."""
        if not broadcast_from_main(partial(self.report.has_line, self._step, "eval")):
            self._prepare_evaluation()
            self._run_evaluation()
            self._raise_if_interrupted()

    def _end_if_stopped(self) -> None:
        """Evaluates the last step of a run that a callback ended, and raises the error of a callback that failed."""
        if self._stop_reason == "callback":
            self._evaluate_once()
        if self._stop_reason == "error":
            self.report.raise_error()

    def _prepare_evaluation(self) -> None:
        """Completes the parameters of a step that will be evaluated, before its state is saved."""
        if not self._is_due(self._eval_every) and self._stop_reason != "callback":
            return
        with self._timer.paused(), self.times.measure("evaluation"):
            if self.before_evaluation is not None:
                self._state = self.before_evaluation(self._state)
            if self.average is None:
                return
            params, in_window = self.parallel.to_host(self._state.params), self._step % self._eval_every == 0
            if self.average.add(self._step, params, in_window):
                self._saved_step = None

    def _load_batch(self) -> None:
        with self._saved_on_error():
            batch = self.loader.batch(self._step)
        masks = [array for name, array in batch.items() if name.startswith("attention_mask")]
        self._num_tokens = sum(int(mask.sum()) for mask in masks) * self.parallel.process[1]
        self._batch = self.parallel.shard_batch(batch, self.config.gradient_accumulation_steps)

    def _after_dispatch(self, metrics: StepMetrics) -> None:
        """Loads the next batch while the devices compute the step, then waits for older steps."""
        self._step += 1
        self._in_flight.append((self._step, metrics))
        if self._step < self.end_step:
            start = time.perf_counter()
            self._load_batch()
            if is_ready(metrics.loss):  # the devices have been idle
                self.times.move("input", time.perf_counter() - start)
        self._drain(0 if self._is_due(self.config.log_every) else self.parallel.steps_in_flight)

    def _drain(self, keep: int = 0) -> None:
        """Waits until ``keep`` steps are in flight, and reports the others."""
        while len(self._in_flight) > keep:
            step, metrics = self._in_flight.popleft()
            num_consecutive, _ = self.parallel.to_host(metrics.skipped)
            self.report.step(step)
            if step == 1:
                self.report.first_loss(float(self.parallel.to_host(metrics.loss)))
            if num_consecutive:
                self._report_skipped(step, self.parallel.to_host(metrics))
            elif metrics.spikes is not None:
                self._report_spike(step, metrics)

    def _report_spike(self, step: int, metrics: StepMetrics) -> None:
        """Reports the step if its loss or gradient norm is a spike."""
        is_spike, number, _ = self.parallel.to_host(metrics.spikes)
        if is_spike:
            host = self.parallel.to_host(metrics)
            norm = sum(float(value) ** 2 for name, value in host.norms.items() if name != "update") ** 0.5
            self.report.spike(step, float(host.loss), norm, int(number), is_skipped=not float(host.norms["update"]))

    def _report_skipped(self, step: int, metrics: StepMetrics) -> None:
        """Reports a skipped step with its batch, which is rebuilt: batches are a function of the step."""
        skipped = SkippedStep(
            step=step,
            loss=float(metrics.loss),
            norms={name: float(norm) for name, norm in metrics.norms.items()},
            num_consecutive=int(metrics.skipped[0]),
            num_total=int(metrics.skipped[1]),
            rows=self.loader.row_indices(step - 1),
            batch=self.loader.batch(step - 1),
        )
        self.report.skipped(skipped)
        if self._too_many_skipped is None and skipped.num_consecutive >= self.config.max_consecutive_nonfinite_steps:
            self._too_many_skipped = skipped

    def _log(self) -> None:
        """Reports the means since the last log line, and resets their sums in the state."""
        sums, skipped = self.parallel.to_host((self._state.sums, self._state.skipped))
        spikes = self.parallel.to_host(spike_counts(self._state.opt_state))
        metrics = compute_means(sums, self.loss_factors)
        if not sums["grad_norm"][1]:  # every step was skipped
            metrics = dict.fromkeys(metrics, float("nan"))
        if skipped[1]:
            metrics["skipped_steps"] = int(skipped[1])
        if spikes is not None:
            metrics["spikes"] = int(spikes[1])
        updates = self._step - 1 - int(skipped[1]) - (0 if spikes is None else int(spikes[2]))
        metrics["learning_rate"] = float(self.schedule(updates))
        metrics["tokens_per_second"] = rate = self._timer.lap()
        if (mfu := self.times.utilization(rate * (self.flops_per_token or 0.0))) is not None:
            metrics["mfu"] = mfu
        self._report_metrics("train", metrics)
        if self.is_last and self._step == self.end_step and self._step % self.config.log_every:
            return  # if the run is extended, these steps are part of the next log line
        zeros = {name: np.zeros(2, np.float32) for name in self._state.sums}
        self._state = self._state.replace(sums=self.parallel.put_state(zeros))

    def _save(self) -> None:
        """Saves the state unless this step is saved already."""
        self._drain()  # a resumed run would not report these steps
        if self._saved_step != self._step:
            with self._timer.paused(), self.times.measure("saving"):
                # The average holds whole arrays, and so do its checkpoints.
                self.before_save(self._step)
                if self.average is None:
                    self.checkpoints.save(self._step, self.parallel.take_state(self._state))
                else:
                    self.checkpoints.save(self._step, self.average.add_to_state(self.parallel.to_host(self._state)))
                release_free_memory()
        self._saved_step = self._step

    @contextlib.contextmanager
    def _saved_on_error(self) -> Iterator[None]:
        """Saves the state if the data can no longer be read."""
        try:
            yield
        except UserError:
            self._save()
            raise

    def _run_evaluation(self) -> None:
        with self._timer.paused(), self.times.measure("evaluation"):
            with self._saved_on_error():
                try:
                    metrics = self.evaluate(self._evaluated_params())
                except EvaluationInterrupted:
                    return
            if self.early_stopping is not None and self.early_stopping.update(self._step, metrics):
                self._save()
                self.checkpoints.set_best(self._step)
            release_free_memory()
            self._report_metrics("eval", metrics)  # last: without this line, a resumed run repeats all

    def _score_checkpoint(self) -> None:
        """Scores the state of this step if it is saved, unless the run ends here."""
        if self._saved_step == self._step and not self._has_ended():
            with self._timer.paused(), self.times.measure("evaluation"):
                self.score_checkpoint(self._step)

    def _report_metrics(self, split: str, metrics: Metrics) -> None:
        """Reports metrics; callbacks of the main process may end the run on every host."""
        self.report.metrics(self._step, split, metrics)
        self._stop_reason = broadcast_from_main(lambda: self.report.stop_reason)

    def _evaluated_params(self) -> Any:
        """Returns the evaluated parameters, on the devices."""
        return self._state.params if self.average is None else self.parallel.put_state(self.average.mean)

    def _raise_if_interrupted(self) -> None:
        if self.interrupts.signal_number is not None:
            self._save()
            self.interrupts.raise_if_signalled(self._step)


class ThroughputTimer:
    """Tokens per second of training, excluding evaluations and checkpoints."""

    def __init__(self) -> None:
        self.tokens = 0
        self._start, self._pause, self._is_paused = time.perf_counter(), 0.0, False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time inside the context; nested pauses count once."""
        start, was_paused = time.perf_counter(), self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = was_paused
            if not was_paused:
                self._pause += time.perf_counter() - start

    def lap(self) -> float:
        """Returns the tokens per second since the last lap."""
        now = time.perf_counter()
        rate = self.tokens / max(now - self._start - self._pause, 1e-9)
        self._start, self._pause, self.tokens = now, 0.0, 0
        return rate


def count_parameters(params: Any) -> int:
    """Returns the number of elements in a tree of arrays or shapes."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
