"""Files with the metrics of a run: metrics.jsonl, transfer.jsonl, results.json, and nonfinite/ with skipped steps."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert.errors import LOGGER, UserError, redact
from bert.files import atomic_write, load_json

METRICS = "metrics.jsonl"
RESULTS = "results.json"
TRANSFER_SCORES = "transfer.jsonl"
"""File with the scores of checkpoints on labelled tasks, one line per checkpoint and task."""


class MetricsLog:
    """Writes metrics.jsonl. Only one process may have it open.

    On resume, lines after ``start_step`` are removed, so that the file is the same as without an interruption.
    """

    def __init__(self, folder: Path | str, start_step: int, provisional: Collection[str] = ()) -> None:
        """Opens the file.

        Args:
            provisional: splits whose line at ``start_step`` is removed as well.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        kept = [line for line in read_metrics(folder) if line["step"] <= start_step] if start_step else []
        kept = [line for line in kept if line["step"] < start_step or line.get("split") not in provisional]
        with atomic_write(path) as temporary:
            temporary.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def write(self, split: str, step: int, metrics: dict[str, Any]) -> None:
        """Appends one line; split is "train" or "eval". NaN and infinities become null, because JSON has neither."""
        line = to_jsonable({"step": step, "split": split, **metrics})
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()  # no line is lost if the process is killed

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(folder: Path | str, name: str = METRICS) -> list[dict[str, Any]]:
    """Reads the complete lines of metrics.jsonl; none if there is no file. A damaged line logs a warning."""
    path = Path(folder) / name
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    lines = []
    for number, text in enumerate(texts, 1):
        line = None
        with contextlib.suppress(ValueError):
            line = load_json(text)
        if isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("split"), str):
            lines.append(line)
        elif number < len(texts):  # the last line may be incomplete if the process was killed
            LOGGER.warning(f"{path}, line {number} is damaged, and is ignored")
    return lines


def append_transfer_score(folder: Path | str, line: dict[str, Any]) -> None:
    """Appends one line to transfer.jsonl in a single write, because two processes may append at the same time."""
    path = Path(folder) / TRANSFER_SCORES
    with path.open("ab+", buffering=0) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        is_cut = file.read(1) not in (b"", b"\n")  # a process was killed while it wrote
        text = json.dumps(to_jsonable({**line, "split": "transfer"}), allow_nan=False)
        file.write((f"\n{text}\n" if is_cut else f"{text}\n").encode())
        os.fsync(file.fileno())


def read_transfer_scores(folder: Path | str) -> list[dict[str, Any]]:
    """Reads the lines of transfer.jsonl by step: of the tasks that the newest line names, with their newest recipes."""
    needed = {"task", "metric", "mean", "recipe"}
    lines = [line for line in read_metrics(folder, TRANSFER_SCORES) if needed <= line.keys()]
    tasks = lines[-1].get("tasks") if lines else None  # older files do not name them
    lines = [line for line in lines if tasks is None or line["task"] in tasks]
    recipes = {line["task"]: line["recipe"] for line in lines}
    newest = {(line["step"], line["task"]): line for line in lines if line["recipe"] == recipes[line["task"]]}
    scores = [{key: value for key, value in line.items() if key != "tasks"} for line in newest.values()]
    return sorted(scores, key=lambda line: line["step"])


def mean_transfer_scores(lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Returns the mean over all tasks by step, for the steps that have a finite score of each task."""
    tasks, scores = {line["task"] for line in lines}, collections.defaultdict[int, list[float]](list)
    for line in lines:
        if line["mean"] is not None:
            scores[line["step"]].append(line["mean"])
    return {step: statistics.fmean(values) for step, values in scores.items() if len(values) == len(tasks)}


def best_transfer_step(folder: Path | str) -> int | None:
    """Returns the first checkpoint with the highest mean score of transfer.jsonl; None if no checkpoint is scored."""
    means = mean_transfer_scores(read_transfer_scores(folder))
    return max(means, key=means.__getitem__, default=None)


def write_results(folder: Path | str, results: dict[str, Any]) -> None:
    """Writes results.json atomically; numbers that are not finite become null."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / RESULTS) as temporary:
        text = json.dumps(redact(to_jsonable(results)), indent=2, allow_nan=False)
        # Puts each row of a matrix on one line. Strings do not match: in JSON they have no line ends.
        text = re.sub(r"\[\n +(-?\d+(?:,\n +-?\d+)*)\n +\]", lambda row: f"[{' '.join(row[1].split())}]", text)
        temporary.write_text(text + "\n", encoding="utf-8")


def read_results(folder: Path | str) -> dict[str, Any] | None:
    """Reads results.json; None if it does not exist yet. Raises UserError if it is damaged."""
    file = Path(folder) / RESULTS
    try:
        return dict(load_json(file.read_text(encoding="utf-8"))) if file.is_file() else None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}): remove it and run the same command again") from None


def scored_splits(results: dict[str, Any]) -> list[str]:
    """Returns the splits with scores in the results of a fine-tuning run, first the one that selects checkpoints."""
    if "main_metric" not in results:
        return []
    others = {"last", "tuned", "details", "without_collapsed", "metric_labels", "teacher", "skipped_rows", "timing"}
    return [
        name
        for name, value in results.items()
        if isinstance(value, dict) and name not in {*others, results.get("baseline")}
    ]


PANDAS_NULLS = ("NAType", "NaTType")
"""Types of the missing values of pandas that are no floats."""


def to_jsonable(value: Any) -> Any:
    """Converts a value for JSON: arrays and sorted sets to lists, NaN, infinities and pandas.NA to None, paths to
    strings, and bytes to an object with their number, which no task reads as a text or label."""
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(to_jsonable, value), key=str)
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        return to_jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray):
        return {"bytes": len(value)}
    if type(value).__name__ in PANDAS_NULLS:
        return None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


Metrics = dict[str, float]

SKIPPED_STEPS_FOLDER = "nonfinite"
MAX_DUMPED_BATCHES = 100
"""Maximum number of batches that are written; more would only use disk space."""


@dataclass(frozen=True)
class SkippedStep:
    """A step that was skipped because its loss, gradient or update was NaN or infinite.

    Attributes:
        step: its number, as in metrics.jsonl.
        loss: loss of its batch.
        norms: gradient norms by groups of parameters, and the norm of the whole ``update``.
        num_consecutive: consecutive skipped steps up to this one.
        num_total: skipped steps of the run up to this one.
        rows: [B] indices of the batch's rows in the training data.
        batch: inputs of the model.
    """

    step: int
    loss: float
    norms: Mapping[str, float]
    num_consecutive: int
    num_total: int
    rows: np.ndarray
    batch: Mapping[str, np.ndarray]

    @property
    def diagnosis(self) -> str:
        """Describes which value was not finite."""
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        bad = [name for name, norm in self.norms.items() if name != "update" and not math.isfinite(norm)]
        if bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            return f"the loss is {self.loss:.4g}, the gradient of {', '.join(bad[:3])}{more} is not finite"
        largest = max((norm for name, norm in self.norms.items() if name != "update"), default=0.0)
        if math.isfinite(self.norms["update"]):  # each group is finite, but not their sum of squares
            return f"the gradient has a norm of {largest:.1e} in one group, which is too large to square"
        return f"loss and gradient are finite (largest norm {largest:.3g}), but the optimizer's update is not"

    def write(self, folder: Path) -> Path | None:
        """Writes STEP.json, and the batch as STEP.npz. Returns None if there are `MAX_DUMPED_BATCHES` already."""
        folder.mkdir(exist_ok=True)
        file = folder / f"{self.step}.json"
        if not file.exists() and sum(1 for _ in folder.glob("*.json")) >= MAX_DUMPED_BATCHES:
            return None
        with atomic_write(file.with_suffix(".npz")) as temporary, temporary.open("wb") as arrays:
            batch: dict[str, Any] = dict(self.batch)
            np.savez_compressed(arrays, **batch)
        facts = {
            "step": self.step,
            "diagnosis": self.diagnosis,
            "loss": str(self.loss) if not math.isfinite(self.loss) else self.loss,
            "norms": {name: norm if math.isfinite(norm) else str(norm) for name, norm in self.norms.items()},
            "skipped_in_a_row": self.num_consecutive,
            "skipped_in_all": self.num_total,
            "rows": self.rows.tolist(),
        }
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        return file


def nonfinite_error_message(last: SkippedStep, saved: int) -> str:
    """Returns the error message for a run that ends because too many steps were skipped; ``saved`` is its last step."""
    several = f"the last {last.num_consecutive} steps up to step {last.step:,} were skipped"
    return (
        f"{several if last.num_consecutive > 1 else f'step {last.step:,} was skipped'} because values were not finite "
        f"({last.diagnosis}): nonfinite/ in the run's folder has the batches, and step {saved:,} is the state before "
        "them; look for damaged data, or start again with a lower optimizer.learning_rate or a longer warm-up"
    )
