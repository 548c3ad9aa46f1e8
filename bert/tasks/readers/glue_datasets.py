"""GLUE as data sets: nyu-mll/glue on the hub, or the folders in which `datasets` saved its configurations."""

from __future__ import annotations

from pathlib import Path

from bert.config import HUB_PREFIX
from bert.data.records import Records, dataset_records, is_dataset, open_splits
from bert.errors import UserError

SPLITS = {
    "train": ("train",),
    "dev": ("validation", "validation_matched"),
    "dev_mismatched": ("validation_mismatched",),
    "test": ("test", "test_matched"),
    "test_mismatched": ("test_mismatched",),
    "diagnostic": ("test",),
}
"""The names that each split goes by there; the diagnostic set is a configuration of its own."""

DIAGNOSTIC = "ax"


def is_glue(folder: Path, task: str) -> bool:
    """Whether the data of a task is a data set: ``hub:NAME``, its folder, or one with a folder of the task's name."""
    return _place(folder, task, task) is not None


def glue_records(folder: Path, task: str, split: str) -> Records | None:
    """The rows of one split of a task, None where it is not there. Raises UserError where it cannot be loaded."""
    config = DIAGNOSTIC if split == "diagnostic" else task
    place = _place(folder, task, config)
    if place is None:
        return None
    try:
        there = open_splits(place, config)
    except UserError:
        if config == DIAGNOSTIC and _lacks(place, config):
            return None
        raise
    name = next((name for name in SPLITS[split] if name in there), None)
    return None if name is None else dataset_records(place, there, name)


def _place(folder: Path, task: str, config: str) -> str | None:
    """The data set of a configuration: in the folder, beside it, or, the task's own, the folder itself.

    On the hub a configuration that is named is the task's: another one is looked for in the data set as a whole.
    """
    whole = folder.as_posix()
    if whole.startswith(HUB_PREFIX):
        return whole if config == task else HUB_PREFIX + whole.removeprefix(HUB_PREFIX).partition(":")[0]
    places = [folder / config, *([folder] if config == task else [folder.parent / config])]
    return next((place.as_posix() for place in places if is_dataset(place.as_posix())), None)


def _lacks(place: str, config: str) -> bool:
    """Whether a data set on the hub is known to have no such configuration."""
    if not place.startswith(HUB_PREFIX):
        return False
    import datasets

    try:
        return config not in datasets.get_dataset_config_names(place.removeprefix(HUB_PREFIX))
    except Exception:  # of the network, of the hub: as little is known as before
        return False
