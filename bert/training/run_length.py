"""Number of steps of a run: its extension on resume, and a time budget that determines it."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert.config import FinetuneConfig, OptimizerConfig, PretrainConfig, TrainingConfig
from bert.config.pretraining import resolve_phases
from bert.errors import LOGGER, Log, UserError, require
from bert.files import write_atomic
from bert.parallel.backends import Parallelism
from bert.parallel.multihost import broadcast_from_main
from bert.runs.checkpoint_directory import CheckpointDirectory
from bert.runs.folder import BUDGET_FILE, LENGTH_KEYS, TRANSFER, RunFolder, read_budget
from bert.runs.metrics_log import RESULTS
from bert.training.optimizer import learning_rate_schedule, num_decay_steps

FLOPS_RAMP = 1 / 3
"""Share of the steps over which the weight of the FLOPS regularizer grows."""


def num_train_steps(config: TrainingConfig, steps_per_epoch: float) -> int:
    """Returns the steps of a run: `training.steps`, or `training.epochs` passes."""
    if config.steps is not None:
        return config.steps
    return max(1, round(require(config.epochs, "training.epochs") * steps_per_epoch))


def num_flops_ramp_steps(config: FinetuneConfig, total_steps: int) -> int | None:
    """Returns the steps over which the weight of the FLOPS regularizer grows; None without SPLADE's pooling."""
    return round(FLOPS_RAMP * total_steps) if config.embedding.is_lexical else None


def check_extension(run: RunFolder[Any], steps_per_epoch: float, log: Log) -> RunFolder[Any]:
    """Checks that a resumed run with another schedule continues as if it had been planned with it.

    Call it before the new configuration is saved. If the run has ended before, its results are removed, because they
    will be replaced.

    Raises:
        UserError: a completed step would have had another learning rate, phase or weight of the FLOPS regularizer.
    """
    if run.previous is None:
        return run
    before = num_train_steps(run.previous.training, steps_per_epoch)
    after = num_train_steps(run.config.training, steps_per_epoch)
    steps = broadcast_from_main(CheckpointDirectory(run.checkpoints).steps)
    step = steps[-1] if steps else 0
    if after < step:
        raise UserError(
            f"training.steps is {after}, but the run in {run.path} is at step {step}: set it to at least {step}"
        )
    same = num_equal_steps(run.previous, before, run.config, after, step)
    if same < step:
        raise UserError(_other_schedule(run, steps, before, after, same))
    log(f"continues at step {step:,} with the schedule of a run of {after:,} steps; it had {before:,}")
    if run.is_writer:
        discard_results(run)
    return dataclasses.replace(run, previous=None, extended_from=before)


def discard_results(run: RunFolder[Any]) -> None:
    """Removes the files that a run writes at its end, because training continues."""
    (run.path / RESULTS).unlink(missing_ok=True)
    shutil.rmtree(run.path / TRANSFER, ignore_errors=True)


def num_equal_steps(
    before: PretrainConfig | FinetuneConfig,
    steps_before: int,
    after: PretrainConfig | FinetuneConfig,
    steps_after: int,
    limit: int,
) -> int:
    """Returns how many of the first ``limit`` steps two runs have in common.

    Equal steps have the same learning rate, phase, and share of the weight of the FLOPS regularizer.

    Args:
        steps_before, steps_after: steps of the two runs, which may be fewer than ``limit``.
    """
    rows = [_steps_of(config, total, limit) for config, total in ((before, steps_before), (after, steps_after))]
    length = min(map(len, rows))
    different = np.flatnonzero((rows[0][:length] != rows[1][:length]).any(axis=1))
    return int(different[0]) if len(different) else length


def _steps_of(config: PretrainConfig | FinetuneConfig, total_steps: int, limit: int) -> np.ndarray:
    """Returns [S, 4] float64: phase, rows, learning rate and share of the FLOPS weight of each step.

    Rows are 0 in fine-tuning, where they do not depend on the number of steps.
    """
    ramp = num_flops_ramp_steps(config, total_steps) if isinstance(config, FinetuneConfig) else None
    spans: list[tuple[int, int, OptimizerConfig, tuple[int, int], list[int]]] = [
        (0, total_steps, config.optimizer, (0, total_steps), [0, 0])
    ]
    if isinstance(config, PretrainConfig):
        phases = resolve_phases(config, total_steps)
        spans = [
            (
                phase.first,
                phase.end,
                phase.config.optimizer,
                phase.schedule_steps,
                [phase.number, phase.config.training.batch_size],
            )
            for phase in phases
        ]
    rows = [np.zeros((0, 4))]
    for first, end, optimizer, (start, last), facts in spans:
        if first == end:
            continue  # a phase beyond the steps of the run
        steps = np.arange(first, max(first, min(end, limit)))
        rates = learning_rate_schedule(optimizer, last, start)(jnp.asarray(steps))
        shares = np.ones(len(steps)) if ramp is None else np.minimum(steps / max(ramp, 1), 1)
        rows.append(np.column_stack([np.tile(facts, (len(steps), 1)), np.asarray(rates, np.float64), shares]))
    return np.concatenate(rows)


def _other_schedule(run: RunFolder[Any], checkpoints: list[int], before: int, after: int, same: int) -> str:
    """Returns the error message for a schedule that differs after ``same`` steps."""
    config, step, fixes = run.config, checkpoints[-1], []
    previous = require(run.previous, "the configuration so far")
    change = f"{after} steps instead of {before}" if before != after else f"schedule {config.optimizer.schedule}"
    warmup = previous.optimizer.num_warmup_steps(before)
    kept = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, warmup_steps=warmup))
    if num_equal_steps(previous, before, kept, after, step) == step:
        fixes.append(f"pass --optimizer.warmup_steps {warmup} to keep the warm-up")
    elif isinstance(config, PretrainConfig):
        at = max([number for number in checkpoints if number <= same], default=step)
        fixes.append(f"branch from it with --init {run.path}@{at} --init_state true and another --output_dir")
    else:
        fixes.append("name another --output_dir")
    return (
        f"the run in {run.path} is at step {step}, and with {change} the learning rate, the phase or the FLOPS weight "
        f"of its step {same + 1} would change: {', or '.join(fixes)}, or resume it with "
        f"--config {run.path / 'config.yaml'}"
    )


@dataclass(frozen=True)
class Timed:
    """Seconds of a compiled function.

    Attributes:
        compilation: extra seconds of the first call, compared with a later call.
        call: seconds of a later call.
    """

    compilation: float
    call: float


LATER_SECONDS, MAX_LATER_CALLS = 0.5, 8
"""Maximum seconds and number of calls for which a function is called without waiting for its results."""

LONG_CALL_SECONDS = 5.0
"""Calls that take longer are not repeated for a second measurement."""


def timed(call: Callable[[], Any]) -> Timed:
    """Calls a function until a later call has been timed, and waits for the results.

    Short calls are started without waiting for the previous one, as in a training loop, where they take less time. A
    long call is timed only once after its compilation. All hosts make the same number of calls, which the main process
    determines, because a call may wait for the other hosts.
    """
    compilation, waited = _seconds(call, 1)
    if broadcast_from_main(lambda: waited > LONG_CALL_SECONDS):
        return Timed(compilation, waited)
    first, later = compilation + waited, sum(_seconds(call, 1))
    more = broadcast_from_main(lambda: min(int(LATER_SECONDS / max(later, 1e-6)), MAX_LATER_CALLS))
    if more > 1:
        later = sum(_seconds(call, more)) / more
    return Timed(max(first - later, 0.0), later)


def _seconds(call: Callable[[], Any], times: int) -> tuple[float, float]:
    """Returns the seconds until a number of consecutive calls is started, and until their results are available.

    Compilation is complete when the calls are started.
    """
    start = time.perf_counter()
    results = [call() for _ in range(times)]
    started = time.perf_counter()
    jax.block_until_ready(results[-1])
    return started - start, time.perf_counter() - started


def time_train_step(
    train_step: Callable[..., Any], state: Any, batch: dict[str, np.ndarray], parallel: Parallelism, micro_batches: int
) -> Timed:
    """Compiles and times a step on a copy of the state, because steps donate their state.

    Args:
        state: a state on the host.
    """
    losses = _losses(train_step, parallel.put_state(state), parallel.shard_batch(batch, micro_batches))
    return timed(partial(next, losses))


def _losses(train_step: Callable[..., Any], state: Any, sharded: dict[str, jax.Array]) -> Iterator[jax.Array]:
    """Yields the losses of consecutive steps on one batch."""
    while True:
        state, metrics = train_step(state, sharded)
        yield metrics.loss


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the steps and evaluations of a run.

    Attributes:
        phases: last step and seconds per step, by phase.
        evaluations: last step, steps between two evaluations and seconds per evaluation, by phase.
    """

    phases: tuple[tuple[int, float], ...]
    evaluations: tuple[tuple[int, int, float], ...] = ()

    def cost(self, first: int, last: int) -> float:
        """Returns the seconds of the steps first + 1 to last, evaluations included."""
        total, begin = 0.0, 0
        for end, seconds in self.phases:
            total += seconds * max(0, min(last, end) - max(first, begin))
            begin = end
        begin = 0
        for end, every, seconds in self.evaluations:
            low, high = max(first, begin), min(last, end)
            if low < high:
                total += seconds * (high // every - low // every + (high == end and end % every > 0))
            begin = end
        return total


RESERVE_SECONDS, RESERVE_SHARE = 10.0, 0.02
"""Time of a budget that is reserved for unmeasured work: baselines, examples, plots, and noise."""

BYTES_PER_SECOND = 1e8
"""Assumed speed of writing a checkpoint."""


class TimeBudget:
    """Determines how many steps a run has, so that it ends within ``training.max_minutes``.

    The number of steps is determined once, as late as possible: at the last log line before the learning rate has to
    fall or the run has to end. Until then the schedule does not depend on it, so the run equals one that was planned
    with this number. config.yaml then has the steps in place of the minutes.

    Does nothing without ``training.max_minutes``. Use it as a context manager, which records the time of an interrupted
    run.
    """

    def __init__(
        self,
        run: RunFolder[PretrainConfig],
        start_time: float,
        log: Log,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Initializes the budget.

        Args:
            run: the run; its budget.json has the time of earlier sessions.
            start_time: start of this session, by ``clock``.
        """
        self._run, self._log, self._clock = run, log, clock
        self._begin = start_time - read_budget(run.path).get("seconds", 0.0)
        minutes = run.config.training.max_minutes
        self._limit = math.inf if minutes is None else 60 * minutes
        self._costs: StepCosts | None = None
        self._steps: int | None = None

    def __enter__(self) -> TimeBudget:
        return self

    def __exit__(self, *_: object) -> None:
        self._record()

    def start(self, max_steps: int, step: int, costs: StepCosts, compilation: float, state: Any) -> None:
        """Starts the measurement when training starts.

        Args:
            max_steps: maximum number of steps.
            costs: costs of all steps up to ``max_steps``.
            compilation: seconds of compiling the steps. They are compiled again when the number of steps is fixed, and
                compiling the model for the examples of results.json takes about as long.
            state: the training state; its arrays may be divided over hosts.
        """
        self._max_steps, self._first, self._costs = max_steps, step, costs
        self._first_time = self._clock()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        _, _, evaluation = costs.evaluations[-1]
        reserve = RESERVE_SECONDS + RESERVE_SHARE * self._limit
        self._end_seconds = reserve + 2 * compilation + 2 * evaluation + 2 * size / BYTES_PER_SECOND

    def decide(self, step: int) -> int | None:
        """Returns the number of steps if it has to be fixed after this step, the same on every host; else None."""
        if self._limit == math.inf or self._steps is not None:
            return None
        return broadcast_from_main(partial(self._decide, step))

    def save(self, steps: int) -> RunFolder[PretrainConfig]:
        """Records the number of steps, and returns the run with it."""
        training = self._run.config.training
        self._steps = steps
        self._record()
        training = dataclasses.replace(training, steps=steps, epochs=None, max_minutes=None)
        return self._run.save_config(dataclasses.replace(self._run.config, training=training))

    def _decide(self, step: int) -> int | None:
        self._record()
        if self._costs is None or step >= self._max_steps or self._decay_start(self._max_steps) < step:
            return None
        left = self._limit - (self._clock() - self._begin)
        low, high = self._min_steps(step), self._max_steps
        if self._seconds(step, high) <= left:
            return None
        fits = bisect.bisect_right(range(low, high), left, key=partial(self._seconds, step)) + low - 1
        log_every = self._run.config.training.log_every
        if fits >= low and self._decay_start(fits) > step + log_every:
            return None  # the next log line is early enough
        steps = max(fits, low)
        self._log(
            f"training.max_minutes: {left / 60:.1f} of {self._limit / 60:g} minutes are left after step {step:,}, so "
            f"the run has {steps:,} steps"
        )
        if (late := self._seconds(step, steps) - left) > self._end_seconds:
            LOGGER.warning(f"the run is estimated to end {late / 60:.1f} minutes after training.max_minutes")
        return steps

    def _seconds(self, step: int, steps: int) -> float:
        """Returns the estimated seconds from a step to the end of a run with this number of steps."""
        costs = require(self._costs, "the costs of steps")
        expected, measured = costs.cost(self._first, step), self._clock() - self._first_time
        slowness = measured / expected if expected > 0 else 1.0
        return slowness * costs.cost(step, steps) + self._end_seconds

    def _min_steps(self, step: int) -> int:
        """Returns the minimum steps of a run whose learning rate is still at its peak after this step."""
        config = self._run.config
        last = resolve_phases(config, self._max_steps)[-1]
        first = max(step, config.optimizer.num_warmup_steps(self._max_steps) + 1, last.first + 1)
        return next(steps for steps in itertools.count(first) if self._decay_start(steps) >= step)

    def _decay_start(self, steps: int) -> int:
        """Returns the step after which the learning rate of a run falls, or after which the run ends."""
        optimizer = self._run.config.optimizer
        if optimizer.schedule != "warmup_stable_decay":
            return steps
        return steps - num_decay_steps(optimizer, optimizer.num_warmup_steps(steps), steps)

    def _record(self) -> None:
        if self._limit == math.inf or not self._run.is_writer:
            return
        training = self._run.config.training
        content = {
            "requested": {key: getattr(training, key) for key in LENGTH_KEYS},
            "seconds": self._clock() - self._begin,
            "steps": self._steps,
        }
        write_atomic(self._run.path / BUDGET_FILE, json.dumps(content, indent=2) + "\n")
