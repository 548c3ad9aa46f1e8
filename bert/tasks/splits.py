"""Reads and samples the splits of a run, and holds out dev if it has no file.

All randomness is a function of ``data.sample_seed``, so that a resumed run has the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, cast

import numpy as np

from bert.config import FinetuneConfig, TaskDataConfig
from bert.errors import UserError, quoted, require
from bert.remote import fetch
from bert.tasks.base import Task

DEV_SHARE = 0.1
"""Share of the training rows held out as dev if there is no file for it and ``data.dev_fraction`` is not set."""

COUNTS_SHOWN = 20
"""Maximum number of labels whose rows in dev are counted in a message."""

STREAMS = {name: 2**63 + number for number, name in enumerate(("dev_fraction", "max_train_samples", "max_dev_samples"))}
"""Second word of the key of each random stream; the order of batches uses the epoch number."""

SplitNames = Mapping[str, Sequence[str]]
"""File names, or patterns with a *, of each split; the first one that exists is used."""

INSTEAD = {"dev": ", or data.dev_fraction to hold out training rows"}
"""Alternatives in messages about a missing file."""


class ExampleColumns:
    """Base class of dataclasses of examples whose ``columns`` are lists or arrays with one entry per example."""

    columns: ClassVar[tuple[str, ...]]
    """The first column also has the groups."""

    def __len__(self) -> int:
        return len(getattr(self, self.columns[0]))

    @property
    def groups(self) -> Sequence[Any]:
        """The first column: examples with equal entries are one group."""
        groups: Sequence[Any] = getattr(self, self.columns[0])
        return groups

    def take(self, rows: Sequence[int]) -> Self:
        """Returns the examples with these numbers; columns that are None stay None."""

        def rows_of(values: Any) -> Any:
            return values[list(rows)] if isinstance(values, np.ndarray) else [values[row] for row in rows]

        columns = {name: values for name in self.columns if (values := getattr(self, name)) is not None}
        return dataclasses.replace(cast(Any, self), **{name: rows_of(values) for name, values in columns.items()})


class Examples(Protocol):
    """The examples of one split."""

    @property
    def labelled(self) -> bool:
        """Whether the labels are known."""

    @property
    def notes(self) -> Sequence[str]:
        """Sentences for the user, for example about rows that were left out."""

    def __len__(self) -> int: ...

    @property
    def groups(self) -> Sequence[Hashable]:
        """The group of each example. Holding out dev keeps groups together."""

    def take(self, rows: Sequence[int]) -> Self:
        """Returns the examples with these numbers. Like ``groups``, needed only to sample examples or hold out dev."""

    def sentences(self) -> Iterator[str]:
        """Yields every text, to train a vocabulary if the run has none."""


def splits_in(folder: Path, names: SplitNames) -> list[str]:
    """Returns ``train``, ``dev`` and the other splits that exist."""
    return [split for split in names if split in ("train", "dev") or _find(folder, names[split])]


def _find(folder: Path, names: Sequence[str]) -> Path | None:
    """Returns the file in ``folder``, or None.

    Raises:
      UserError: a pattern matches several files.
    """
    for name in names:
        paths = sorted(folder.glob(name)) if "*" in name else [folder / name]
        paths = [path for path in paths if path.is_file()]
        if len(paths) > 1:
            several = ", ".join(path.name for path in paths)
            raise UserError(f"{folder} has {several}: rename the file to read to {name.replace('*', '')}")
        if paths:
            return paths[0]
    return None


def find_split_file(folder: Path, names: SplitNames, split: str, described: str) -> Path:
    """Returns the file of a split in ``folder``. Raises UserError with the content, ``described``, if it is missing."""
    folder = Path(folder)
    path = _find(folder, names[split]) if folder.is_dir() else None
    if path is None:
        wrong = f"{folder} has no {names[split][0]}" if folder.is_dir() else f"{folder} is not a folder"
        usual = ", ".join(options[0] for options in names.values())
        raise UserError(f"{wrong}: set data.dir to the folder with {usual} of {described}{INSTEAD.get(split, '')}")
    return path


class Splits(NamedTuple):
    """The splits of a run."""

    task: Task
    """The task, fitted to its training examples."""
    examples: dict[str, Any]
    """The examples of each split, train and dev first. Without dev rows, the training rows are both."""
    data: TaskDataConfig
    """The configuration with the share of train that was held out as dev, if any, and how."""
    notes: tuple[str, ...]
    """Sentences for the user; `WarningText` for skipped and suspicious rows."""


def has_dev(examples: Mapping[str, Any]) -> bool:
    """Returns whether the dev rows of `Splits` are not the training rows."""
    return examples["dev"] is not examples["train"]


def require_dev(examples: Mapping[str, Any], source: str) -> None:
    """Raises UserError if there are no dev rows."""
    if not has_dev(examples):
        raise UserError(
            f"{source} has no dev rows, because data.dev_fraction is 0 and there is no dev file: add dev rows, or set "
            "data.dev_fraction to the share of the training rows to hold out"
        )


def read_splits(task: Task, config: FinetuneConfig, is_new: bool = False) -> Splits:
    """Reads all splits of a task.

    Dev is held out of train if ``data.dev_fraction`` is set or if there is no dev file. Then
    ``data.max_train_samples`` and ``data.max_dev_samples`` select samples. Rows keep the order and the ids of the file.

    Args:
      is_new: whether the run starts now. Otherwise ``data.stratify_dev`` of null means a run of an older version, whose
        dev rows are held out at random.

    Raises:
      UserError: a file cannot be used, or too few training rows remain.
    """
    data, folder = config.data, Path(fetch(config.data.dir or "."))
    seed = config.seed if data.sample_seed is None else data.sample_seed
    names = [name for name in task.splits(folder) if name not in ("train", "dev")]
    has_file = "dev" in task.splits(folder)
    train = task.read(folder, "train")
    notes, examples = list(train.notes), {}
    if data.dev_fraction or not has_file:
        data = _with_dev_share(task, config, is_new)
    if data.dev_fraction:
        train, examples["dev"], more = _hold_out(task, train, data, seed, has_file)
        notes += more
    train = _sample(task, train, data.max_train_samples, "max_train_samples", seed)
    _require_labels(task, train, data)
    if data.dev_fraction == 0 and not has_file:
        examples["dev"] = train
        notes.append(
            f"dev: none of the {len(train):,} training rows are held out (no dev file, data.dev_fraction 0), so that "
            "there is no dev score; estimate it with bert evaluate --cross_validate"
        )
    task = task.fit(train)
    for name in ([] if "dev" in examples else ["dev"]) + names:
        examples[name] = task.read(folder, name)
        notes += examples[name].notes
    for name in examples:
        if name.startswith("dev") and examples[name] is not train:
            examples[name] = _sample(task, examples[name], data.max_dev_samples, "max_dev_samples", seed)
    return Splits(task, {"train": train, "dev": examples.pop("dev"), **examples}, data, tuple(notes))


def _with_dev_share(task: Task, config: FinetuneConfig, is_new: bool) -> TaskDataConfig:
    """Returns the configuration with the share of the training rows to hold out, and how. Raises UserError."""
    data, share, by_label = config.data, config.data.dev_fraction, config.data.stratify_dev
    if share is None:
        share = 0.0 if config.classifier_training == "contrastive" else DEV_SHARE
    if share == 0:
        if not task.one_label:
            raise UserError(
                f"data.dev_fraction is 0 and there is no dev file, but the task {task.name} needs dev rows: add a dev "
                "file, or raise data.dev_fraction"
            )
        for key, unset in (("calibration", data.calibration != "temperature"), ("patience", config.patience is None)):
            if not unset:
                raise UserError(
                    f"{'data.' if key == 'calibration' else ''}{key} is set, but there are no dev rows: add a dev "
                    f"file, set data.dev_fraction to hold out training rows, or remove {key}"
                )
    if by_label and not task.one_label:
        raise UserError(f"data.stratify_dev is true, but {task.name} does not have one label per row: remove it")
    by_label = task.one_label if by_label is None and is_new else bool(by_label)
    return dataclasses.replace(data, dev_fraction=share, stratify_dev=by_label)


def _hold_out(task: Task, train: Any, data: TaskDataConfig, seed: int, has_file: bool) -> tuple[Any, Any, list[str]]:
    """Returns the rows that are trained on, the rows that are held out as dev, and sentences for the user."""
    share = require(data.dev_fraction, "data.dev_fraction")
    labels = train.known_labels if data.stratify_dev else None
    rows = held_out(_groups(train), share, seed, labels)
    dev = _take(task, train, rows, "data.dev_fraction")
    rest = _take(task, train, np.setdiff1d(np.arange(len(train)), rows), "data.dev_fraction")
    how = "at random" if labels is None else "at random, by label"
    reason = f"{'' if has_file else 'no dev file, '}data.dev_fraction {share:g}"
    notes = [f"dev: {len(rows):,} of the {len(train):,} training rows are held out {how} ({reason})"]
    if labels is not None:
        words = getattr(train, "label_words", ()) or task.output_words
        counts = {word: int((dev.known_labels == label).sum()) for label, word in enumerate(words)}
        present = {word for label, word in enumerate(words) if (labels == label).any()}
        if missing := [word for word in words if word in present and not counts[word]]:
            shown = ", ".join(f"{word!r} {count:,}" for word, count in list(counts.items())[:COUNTS_SHOWN])
            more = f" and {len(counts) - COUNTS_SHOWN} other labels" if len(counts) > COUNTS_SHOWN else ""
            notes.append(
                f"dev has no row of {'the label' if len(missing) == 1 else f'{len(missing)} labels,'} "
                f"{quoted(missing)}, which have too few training rows; rows held out by label: {shown}{more}"
            )
    return rest, dev, notes


def held_out(groups: Sequence[Any], share: float, seed: int, labels: np.ndarray | None = None) -> np.ndarray:
    """Returns the sorted indices of the rows to hold out: random whole groups, about ``share`` of all rows.

    Args:
      groups: [R] the group of each row, such as its context. If all rows are in one group, each row is a group.
      labels: [R] the label of each row: about ``share`` of the rows of each label are held out, and at least one group
        of it stays in train. A group has its most frequent label. None: labels do not matter.

    Raises:
      UserError: there is only one row.
    """
    if len(groups) < 2:
        raise UserError("the training file has 1 row, and there is no dev file: set data.dev to a file of dev rows")
    group_of: dict[Any, int] = {}
    group_ids = np.array([group_of.setdefault(group, len(group_of)) for group in groups])
    if len(group_of) == 1:
        group_ids = np.arange(len(groups))
    sizes = np.bincount(group_ids)
    order = _permutation(len(sizes), seed, "dev_fraction")
    row_count = max(1, round(share * len(groups)))
    if labels is None:
        return np.flatnonzero(np.isin(group_ids, _first_groups(order, sizes, row_count)))
    votes = np.zeros((len(sizes), int(labels.max()) + 1), np.int64)
    np.add.at(votes, (group_ids, labels), 1)
    parts = [order[votes.argmax(axis=1)[order] == label] for label in range(votes.shape[1])]
    parts = [part for part in parts if len(part)]
    # Largest remainders, so that the counts add up to the share of all rows; ties in random order.
    expected = np.array([share * sizes[part].sum() if len(part) > 1 else 0.0 for part in parts])
    counts = np.floor(expected + 1e-9).astype(np.int64)
    position = np.argsort(order)
    by_remainder = np.lexsort(([position[part[0]] for part in parts], -np.round(expected - counts, 9)))
    several = [number for number in by_remainder if len(parts[number]) > 1]
    counts[several[: max(0, row_count - int(counts.sum()))]] += 1
    chosen = [_first_groups(part, sizes, count) for part, count in zip(parts, counts, strict=True) if count]
    if not chosen:
        raise UserError("no label has two training rows, and there is no dev file: set data.dev to a file of dev rows")
    return np.flatnonzero(np.isin(group_ids, np.concatenate(chosen)))


def _first_groups(order: np.ndarray, sizes: np.ndarray, row_count: int) -> np.ndarray:
    """Returns enough of the first groups for a number of rows; the last group always stays in train."""
    return order[: min(int(np.searchsorted(np.cumsum(sizes[order]), row_count)) + 1, len(order) - 1)]


def _permutation(count: int, seed: int, stream: str) -> np.ndarray:
    # Not Generator.permutation: NumPy guarantees the raw words of a bit generator, but not the methods of Generator.
    words = np.random.Philox(key=np.array([seed, STREAMS[stream]], np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable")


def _sample(task: Task, examples: Any, max_count: int | None, key: str, seed: int) -> Any:
    if max_count is None or len(examples) <= max_count:
        return examples
    return _take(task, examples, np.sort(_permutation(len(examples), seed, key)[:max_count]), f"data.{key}")


def _take(task: Task, examples: Any, rows: np.ndarray, key: str) -> Any:
    if not hasattr(examples, "take"):
        raise UserError(f"{key} needs examples with a method take, but the examples of {task.name} have none: "
                        f"remove {key}, or add the method")  # fmt: skip
    return examples.take(rows.tolist())


def _groups(examples: Any) -> Sequence[Any]:
    groups: Sequence[Any] = getattr(examples, "groups", range(len(examples)))
    return groups


def _require_labels(task: Task, train: Any, data: TaskDataConfig) -> None:
    """Raises UserError if only one of several labels remains after sampling."""
    if not task.one_label or data.max_train_samples is None:
        return
    present = np.unique(train.known_labels)
    words = getattr(train, "label_words", None) or task.output_words
    if len(present) == 1 < len(words):
        raise UserError(
            f"the {len(train):,} training rows that data.max_train_samples leaves all have the label "
            f"{words[present[0]]!r}: set data.max_train_samples to a larger number, or remove it"
        )
