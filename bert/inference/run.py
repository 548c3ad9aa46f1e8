"""A run's folder as an object: its configuration, its metrics, its results, its model."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert.config import FinetuneConfig, PretrainConfig
from bert.config.run_file import load_run_config
from bert.errors import UserError
from bert.files import path_text
from bert.inference.loading import load
from bert.inference.pretrained import Pretrained
from bert.runs.metrics_log import read_metrics, read_results
from bert.runtime.system_errors import system_errors_as_user_errors


@dataclass(frozen=True)
class Run:
    """A run in a folder, which may be under way, interrupted or finished; `os.fspath` gives the folder.

    Attributes:
        path: the folder.
    """

    path: Path

    @system_errors_as_user_errors()
    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(path_text(self.path)))
        if not (self.path / "config.yaml").is_file():
            raise UserError(f"{self.path} holds no run (no config.yaml): pass the folder of a run")

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> PretrainConfig | FinetuneConfig:
        """The configuration in config.yaml, with everything resolved."""
        return load_run_config(self.path)

    @property
    def results(self) -> dict[str, Any]:
        """The content of results.json. Raises UserError if the run has not ended."""
        results = read_results(self.path)
        if results is None:
            raise UserError(f"{self.path} has no results.json, since the run has not ended: resume it first")
        return results

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; none for several seeds, whose folders seed-N have their own."""
        return read_metrics(self.path)

    @functools.cached_property
    def model(self) -> Pretrained:
        """`bert.load` of the folder; for several seeds, of the best one."""
        seeds = getattr(self.config, "num_seeds", 1) > 1
        return load(self.path / f"seed-{self.results['best_seed']}" if seeds else self.path)
