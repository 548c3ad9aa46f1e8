"""GLUE as data sets: nyu-mll/glue on the hub, or the folders in which `datasets` saved its configurations."""

from __future__ import annotations

from pathlib import Path

from bert.config import HUB_PREFIX
from bert.data.records import Records, dataset_records, is_dataset_dict, open_splits
from bert.errors import UserError

SPLITS = {
    "train": ("train",),
    "dev": ("validation", "validation_matched"),
    "dev_mismatched": ("validation_mismatched",),
    "test": ("test", "test_matched"),
    "test_mismatched": ("test_mismatched",),
    "diagnostic": ("test",),
}
"""The names of each split there; the diagnostic set is a separate configuration."""

DIAGNOSTIC = "ax"


def is_glue(folder: Path, task: str) -> bool:
    """Whether the data of a task is a data set: ``hub:NAME``, its folder, or one with a folder of the task's name."""
    return _find_dataset(folder, task, task) is not None


def glue_records(folder: Path, task: str, split: str) -> Records | None:
    """The rows of one split of a task, None where it is not there. Raises UserError where it cannot be loaded."""
    config = DIAGNOSTIC if split == "diagnostic" else task
    source = _find_dataset(folder, task, config)
    if source is None:
        return None
    try:
        there = open_splits(source, config)
    except UserError:
        if config == DIAGNOSTIC and _lacks(source, config):
            return None
        raise
    name = next((name for name in SPLITS[split] if name in there), None)
    return None if name is None else dataset_records(source, there, name)


def _find_dataset(folder: Path, task: str, config: str) -> str | None:
    """The data set of a configuration: in the folder, next to it, or, the task's own, the folder itself.

    On the hub a configuration that is named is the task's: another one is looked for in the data set as a whole.
    """
    whole = folder.as_posix()
    if whole.startswith(HUB_PREFIX):
        return whole if config == task else HUB_PREFIX + whole.removeprefix(HUB_PREFIX).partition(":")[0]
    options = [(folder / config).as_posix(), whole if config == task else (folder.parent / config).as_posix()]
    return next((option for option in options if is_dataset_dict(option)), None)


def _lacks(source: str, config: str) -> bool:
    """Whether a data set on the hub is known to have no such configuration."""
    if not source.startswith(HUB_PREFIX):
        return False
    import datasets

    try:
        return config not in datasets.get_dataset_config_names(source.removeprefix(HUB_PREFIX))
    except Exception:  # of the network, of the hub: as little is known as before
        return False
