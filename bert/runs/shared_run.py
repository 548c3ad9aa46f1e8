"""One run directory shared by several hosts: the main process writes, all read the same state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bert.errors import require
from bert.parallel.multihost import broadcast_from_main, is_main_process, is_multihost, sync_hosts
from bert.runs.checkpoint import Checkpointer
from bert.runs.curves import Subject
from bert.runs.folder import RunFolder
from bert.runs.metrics_log import Metrics
from bert.runs.progress import StepCosts
from bert.runs.report import RunReport
from bert.runs.skipped_steps import SkippedStep


class MultihostCheckpointer:
    """A `Checkpointer` for all hosts: the first one writes, and all read the step that it has found good."""

    def __init__(self, checkpoints: Checkpointer) -> None:
        self._own = checkpoints

    def __enter__(self) -> MultihostCheckpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self._own.close()

    def save(self, step: int, state: Any) -> None:
        """Begins to save a state, of which every host has the arrays."""
        if is_main_process():
            self._own.save(step, state)

    def wait(self) -> None:
        """Waits until nothing is being saved."""
        self._own.wait()
        sync_hosts("checkpoints")

    def set_best(self, step: int) -> None:
        """Keeps a step besides the newest ones."""
        if is_main_process():
            self._own.set_best(step)

    def thin_out(self) -> None:
        """Removes what is not to be kept."""
        broadcast_from_main(self._own.thin_out)

    def restore_best_params(self) -> tuple[int, Any] | None:
        """The parameters of the protected step, or of the newest good one: the same on every host."""
        read: tuple[int, Any] | None = None

        def best() -> int | None:
            nonlocal read
            read = self._own.restore_best_params()
            return None if read is None else read[0]

        step = broadcast_from_main(best)
        return read if read is not None or step is None else self._own.restore_params(step)

    def restore(self, like: Any = None) -> tuple[int, Any] | None:
        """The newest good checkpoint, the same on every host."""
        read: tuple[int, Any] | None = None

        def newest() -> int | None:
            nonlocal read
            read = self._own.restore(like)
            return None if read is None else read[0]

        step = broadcast_from_main(newest)
        return read if read is not None or step is None else self._own.restore(like, step)


class MultihostReport:
    """The `RunReport` of the first host for all of them.

    Args:
        report: None on the others.
    """

    def __init__(self, report: RunReport | None) -> None:
        self._report = report

    def __enter__(self) -> MultihostReport:
        if self._report is not None:
            self._report.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._report is not None:
            self._report.__exit__(*error)

    def on_start(self, step: int, pace: StepCosts) -> None:
        if self._report is not None:
            self._report.on_start(step, pace)

    def step(self, step: int, loss: float) -> None:
        if self._report is not None:
            self._report.step(step, loss)

    def skipped(self, step: SkippedStep) -> None:
        if self._report is not None:
            self._report.skipped(step)

    def set_phase(self, phase: dict[str, int]) -> None:
        if self._report is not None:
            self._report.set_phase(phase)

    def metrics(self, step: int, split: str, metrics: Metrics) -> None:
        if self._report is not None:
            self._report.metrics(step, split, metrics)

    def evaluated(self, step: int) -> bool:
        return broadcast_from_main(lambda: require(self._report, "the report").evaluated(step))


def make_checkpointer(run: RunFolder[Any], say: Callable[[str], None]) -> Checkpointer | MultihostCheckpointer:
    """The checkpoints of a run, for one host or for several."""
    own = Checkpointer(run.checkpoints, run.config.training.max_to_keep, say)
    return MultihostCheckpointer(own) if is_multihost() else own


def make_report(
    run: RunFolder[Any],
    total_steps: int,
    start_step: int,
    pace: StepCosts | None = None,
    subject: Subject | None = None,
) -> RunReport | MultihostReport:
    """What the loop tells of a run, for one host or for several."""
    own = None
    if run.is_writer:
        own = RunReport(run.path, total_steps, start_step, int(run.config.training.log_every), pace, subject)
    return MultihostReport(own) if is_multihost() else require(own, "the report")
