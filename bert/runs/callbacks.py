"""Callbacks: what a run tells the user's own code, and how that code ends a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert.config import FinetuneConfig, PretrainConfig


@dataclass(frozen=True)
class RunStart:
    """A run that is about to train.

    Attributes:
        path: its folder.
        config: with everything resolved.
        start_step: 0, or the step from which it resumes.
        total_steps: the step at which it ends.
    """

    path: Path
    config: PretrainConfig | FinetuneConfig
    start_step: int
    total_steps: int


class Callback:
    """Methods that a run calls, on its main process alone; a subclass overrides those that it needs.

    An exception in ``on_metrics`` ends the run with its traceback once the state is saved, so that the run can resume.
    Of several seeds, each is a run.
    """

    def on_start(self, start: RunStart) -> None:
        """Training is about to start or to resume."""

    def on_metrics(self, step: int, split: str, metrics: dict[str, Any]) -> bool | None:
        """Takes a line of metrics.jsonl.

        Args:
            step: of the run.
            split: ``train``, or ``eval`` for held-out data.
            metrics: its values.

        Returns:
            True to end the run after this step: it is evaluated and saved, and its results are written.
        """

    def on_end(self, results: dict[str, Any] | None) -> None:
        """The run has ended with these results, or with None if it was interrupted or has failed."""
