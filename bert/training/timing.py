"""Time of a run by activity, and the use that training makes of the devices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

import jax

from bert.errors import Log
from bert.parallel.devices import figures_of_device, local_devices

ACTIVITIES = ("training", "input", "compilation", "evaluation", "saving", "other")
"""Activities of `RunTimes`, in the order of results.json."""

COMPILATION_EVENTS = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
"""Durations that JAX reports for each compiled program: lowering, and compilation or a read from the cache."""


class RunTimes:
    """Seconds of this session of a run by activity, and the work of its training steps.

    At any time there is one current activity, at first ``other``: preparation of the data, and results. Compilation is
    counted separately in all of them.
    """

    def __init__(
        self,
        start_time: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        compiled: Callable[[], float] | None = None,
    ) -> None:
        """Starts the measurement.

        Args:
            start_time: start of the session, by ``clock``. Defaults to now.
            peak_flops: FLOPs per second of all devices; None if unknown.
            compiled: returns the seconds of compilation so far. Defaults to `compilation_seconds`.
        """
        self.peak_flops, self._clock = peak_flops, clock
        self._compiled = compilation_seconds if compiled is None else compiled
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._activity, self._since = "other", clock() if start_time is None else start_time
        self._compiled_before = self._compiled()
        self._tokens, self._flops = 0, 0.0

    @contextlib.contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Counts the time in the context as an activity, except nested contexts."""
        before = self._activity
        self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def move(self, activity: str, seconds: float) -> None:
        """Counts past seconds of the current activity as another one."""
        self.seconds[activity] += seconds
        self.seconds[self._activity] -= seconds

    def add_work(self, tokens: int, flops_per_token: float) -> None:
        """Counts the tokens of training steps."""
        self._tokens += tokens
        self._flops += tokens * flops_per_token

    def utilization(self, flops_per_second: float) -> float | None:
        """Returns the share of the devices' peak (MFU), or None if it is unknown."""
        return None if self.peak_flops is None or not flops_per_second else flops_per_second / self.peak_flops

    def results(self) -> dict[str, Any]:
        """Returns the entry ``timing`` of results.json: seconds, and tokens per second and MFU of the training."""
        self._switch(self._activity)
        seconds = {name: round(self.seconds[name], 2) for name in ACTIVITIES}
        trained = self.seconds["training"] + self.seconds["input"]
        if not self._tokens or trained <= 0:
            return {"seconds": seconds}
        mfu = self.utilization(self._flops / trained)
        rates = {"tokens_per_second": round(self._tokens / trained, 1)}
        return {"seconds": seconds, **rates, **({} if mfu is None else {"mfu": round(mfu, 4)})}

    def _switch(self, activity: str) -> None:
        now, compiled = self._clock(), self._compiled()
        compilation = min(max(compiled - self._compiled_before, 0.0), now - self._since)
        self.seconds["compilation"] += compilation
        self.seconds[self._activity] += now - self._since - compilation
        self._activity, self._since, self._compiled_before = activity, now, compiled


def log_times(times: RunTimes, log: Log) -> dict[str, Any]:
    """Logs the share of each activity, and returns the entry ``timing`` of results.json."""
    timing = times.results()
    log(describe_times(timing))
    return timing


def describe_times(timing: dict[str, Any]) -> str:
    """Returns a log line with the share of each activity."""
    seconds = {name: value for name, value in timing["seconds"].items() if value > 0}
    total = sum(seconds.values())
    parts = [f"{name} {value:,.1f} s ({value / total:.0%})" for name, value in seconds.items()]
    rate = f"{timing['tokens_per_second']:,.0f} tokens/s in training" if "tokens_per_second" in timing else ""
    mfu = f"MFU {timing['mfu']:.1%}" if "mfu" in timing else ""
    return "time: " + ", ".join(filter(None, [*parts, rate, mfu]))


def peak_flops_of_devices(dtype: str) -> float | None:
    """Returns the published peak of the run's devices, in FLOPs per second; None if unknown for this data type."""
    devices = local_devices()
    figures = figures_of_device(devices[0].device_kind)
    if figures is None or dtype != "bfloat16":
        return None
    return figures.peak_tflops * 1e12 * len(devices) * jax.process_count()


@cache
def _compiled() -> list[float]:
    """Returns a list whose element is the seconds of compilation in this process, from the first call on."""
    total = [0.0]

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event in COMPILATION_EVENTS:
            total[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    return total


def compilation_seconds() -> float:
    """Returns the seconds of compilation in this process since the first call."""
    return _compiled()[0]


def is_ready(array: Any) -> bool:
    """Returns whether a dispatched computation has ended. Arrays of the host are ready."""
    return bool(cast(Any, array).is_ready()) if isinstance(array, jax.Array) else True
