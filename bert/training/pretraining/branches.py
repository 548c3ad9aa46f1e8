"""Branches: runs that continue the training state of another run's checkpoint (``init_state``)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from tokenizers import Tokenizer

from bert.config import PretrainConfig
from bert.config.pretraining import Phase, phase_configs, resolve_phases
from bert.config.run_file import load_run_config
from bert.data.pretraining.build import Progress, examples_name
from bert.errors import Log, UserError, require
from bert.files import read_json, write_atomic
from bert.inference.load import fetch_model
from bert.parallel.multihost import broadcast_from_main
from bert.runs.checkpoint import Checkpointer, Checkpoints
from bert.runs.folder import BRANCH_FILE, STREAM_FILE, RunFolder, config_class_of_run


class BranchStart(NamedTuple):
    """Where the data of a branch starts.

    Attributes:
        step: step of the source.
        rows: number of training rows that the source has read, by the name of the examples.
    """

    step: int
    rows: Mapping[str, int]


BEGINNING = BranchStart(0, {})
"""The start of a run that is no branch."""


def find_branch_source(config: PretrainConfig) -> tuple[Path, int]:
    """Returns folder and step of the pretraining run to continue. Raises UserError if there is none."""
    init = require(config.init, "init")
    folder, step = fetch_model(init)
    if step is None or not (folder / "config.yaml").is_file() or config_class_of_run(folder) is not PretrainConfig:
        raise UserError(
            f"init is {init}, and init_state needs the checkpoint of a pretraining run: name it as RUN@STEP, such as "
            "runs/mini@1000, or remove init_state"
        )
    return folder, step


def restore_branched(checkpoints: Checkpoints, folder: Path, step: int, log: Log, like: Any) -> tuple[int, Any] | None:
    """Restores the newest checkpoint of a run; if it has none, restores the state of the run that it continues.

    Raises:
        UserError: the state does not fit.
    """
    if (restored := checkpoints.restore(like)) is not None:
        return restored
    with Checkpointer(folder / "checkpoints", None, log) as source:
        try:
            return source.restore(like, step)
        except UserError as error:
            raise UserError(
                f"init_state is true, but the training state of {folder} cannot be continued ({error}): keep "
                "what the run is trained with (optimizer.name, optimizer.max_grad_norm, whether "
                "optimizer.spike_deviations is null, data.input_format, training.objective, distillation, whether "
                "training.z_loss and training.label_smoothing are 0), or remove init_state to take the weights alone"
            ) from None


def rows_read(phases: Sequence[Phase], names: Sequence[str], step: int, start: BranchStart) -> Counter[str]:
    """Returns the number of training rows that all steps up to ``step`` have read, by the name of the examples.

    Args:
        names: the name of the examples of each phase of the configuration.
    """
    rows = Counter(start.rows)
    for phase in phases:
        steps = min(phase.end, step) - max(phase.first, start.step)
        rows[names[phase.number - 1]] += max(steps, 0) * phase.config.training.batch_size
    return rows


def branch_start(
    run: RunFolder[PretrainConfig], tokenizer: Tokenizer, names: Sequence[str], has_begun: bool, progress: Progress
) -> BranchStart:
    """Returns where the data of a run starts. A new branch records it, since its source may be deleted later.

    Examples that the source has not read start at their first row.

    Args:
        names: the name of the examples of each phase.

    Raises:
        UserError: the source or its corpus cannot be read.
    """
    if not run.config.init_state:
        return BEGINNING

    def find() -> list[Any]:
        if has_begun:
            return list(_read(run.path))
        folder, step = find_branch_source(run.config)
        source = cast(PretrainConfig, load_run_config(folder))
        of_source = [_examples_name(phase, tokenizer, progress) for phase in phase_configs(source)]
        rows = rows_read(resolve_phases(source, max(step, source.training.steps or 0)), of_source, step, _read(folder))
        start = BranchStart(step, {name: count for name, count in rows.items() if name})
        write_atomic(run.path / BRANCH_FILE, json.dumps(start._asdict()))
        positions = folder / STREAM_FILE  # from which the rows of a stream are reached quickly
        if positions.is_file() and source.data.shuffle_buffer == run.config.data.shuffle_buffer:
            write_atomic(run.path / STREAM_FILE, positions.read_text(encoding="utf-8"))
        return list(start)

    return BranchStart(*broadcast_from_main(find))


def _read(folder: Path) -> BranchStart:
    """Returns the recorded start of a run. Branches of older versions have none, and count all rows as their own."""
    path = folder / BRANCH_FILE
    return BranchStart(**read_json(path)) if path.is_file() else BEGINNING


def _examples_name(config: PretrainConfig, tokenizer: Tokenizer, progress: Progress) -> str:
    """Returns the name of the examples; empty if the corpus is no longer there, so that the branch does not read it."""
    try:
        return examples_name(config.data, tokenizer, progress)
    except UserError:
        return ""
