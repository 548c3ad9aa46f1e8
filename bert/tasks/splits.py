"""Reads and samples the splits of a run, holds out dev if it has no file, and describes labels and truncated rows.

All randomness is a function of ``data.sample_seed``, so that a resumed run has the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, cast

import numpy as np
from tokenizers import Tokenizer

from bert.config import FinetuneConfig, TaskDataConfig
from bert.config.model import WINDOW_MODES
from bert.data.rows import Rows
from bert.data.windows import windowed_parts
from bert.errors import UserError, require
from bert.remote import fetch
from bert.tasks.base import Task

DEV_SHARE = 0.1
"""Share of the training rows held out as dev if there is no file for it and ``data.dev_fraction`` is not set."""

STREAMS = {name: 2**63 + number for number, name in enumerate(("dev_fraction", "max_train_samples", "max_dev_samples"))}
"""Second word of the key of each random stream; the order of batches uses the epoch number."""

MEASURED_ROWS = 5000
"""Number of rows whose untruncated length is measured. It is enough to estimate a share of rows, and fast."""

UNCUT = 1 << 24
"""A ``max_length`` above the length of any text."""

SHOWN_LABELS = 6
FAR_LESS_OFTEN = 3
"""A label logs a warning if its share in dev is more than this multiple of its share in train ..."""
ENOUGH_ROWS = 5
"""... and at least this number of dev rows have it."""

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
    """The examples of each split, train and dev first."""
    data: TaskDataConfig
    """The configuration with the share of train that was held out as dev, if any."""
    notes: tuple[str, ...]
    """Sentences for the user; `WarningText` for skipped and suspicious rows."""


def read_splits(task: Task, config: FinetuneConfig) -> Splits:
    """Reads all splits of a task.

    Dev is held out of train if ``data.dev_fraction`` is set or if there is no dev file. Then
    ``data.max_train_samples`` and ``data.max_dev_samples`` select samples. Rows keep the order and the ids of the file.

    Raises:
      UserError: a file cannot be used, or too few training rows remain.
    """
    data, folder = config.data, Path(fetch(config.data.dir or "."))
    seed = config.seed if data.sample_seed is None else data.sample_seed
    names = [name for name in task.splits(folder) if name not in ("train", "dev")]
    has_dev = "dev" in task.splits(folder)
    train = task.read(folder, "train")
    notes, examples = list(train.notes), {}
    if data.dev_fraction is not None or not has_dev:
        data = dataclasses.replace(data, dev_fraction=data.dev_fraction or DEV_SHARE)
        whole = len(train)
        rows = held_out(_groups(task, train), require(data.dev_fraction, "data.dev_fraction"), seed)
        examples["dev"] = _take(task, train, rows, "data.dev_fraction")
        train = _take(task, train, np.setdiff1d(np.arange(whole), rows), "data.dev_fraction")
        share = (
            f"data.dev_fraction {data.dev_fraction:g}"
            if has_dev
            else f"no dev file, data.dev_fraction {data.dev_fraction:g}"
        )
        notes.append(f"dev: {len(rows):,} of the {whole:,} training rows are held out at random ({share})")
    train = _sample(task, train, data.max_train_samples, "max_train_samples", seed)
    _require_labels(task, train, data)
    task = task.fit(train)
    for name in ([] if "dev" in examples else ["dev"]) + names:
        examples[name] = task.read(folder, name)
        notes += examples[name].notes
    for name in examples:
        if name.startswith("dev"):
            examples[name] = _sample(task, examples[name], data.max_dev_samples, "max_dev_samples", seed)
    return Splits(task, {"train": train, "dev": examples.pop("dev"), **examples}, data, tuple(notes))


def held_out(groups: Sequence[Any], share: float, seed: int) -> np.ndarray:
    """Returns the sorted indices of the rows to hold out: random whole groups, about ``share`` of all rows.

    Args:
      groups: [R] the group of each row, such as its context. If all rows are in one group, each row is a group.

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
    # Enough groups for the share; the last group always stays in train.
    count = min(int(np.searchsorted(np.cumsum(sizes[order]), row_count)) + 1, len(sizes) - 1)
    return np.flatnonzero(np.isin(group_ids, order[:count]))


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


def _groups(task: Task, examples: Any) -> Sequence[Any]:
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


def label_facts(task: Task, examples: dict[str, Any], data: TaskDataConfig) -> list[tuple[str, str]]:
    """Returns the shares of labels in train and dev, and warnings, for the table before training.

    Returns [] for tasks without labels of whole rows.
    """
    counts = {name: task.rows_by_label(examples[name]) for name in ("train", "dev")}
    if not all(len(count) for count in counts.values()):
        return []
    shares = {name: count / len(examples[name]) for name, count in counts.items()}
    order = np.argsort(-counts["train"], kind="stable")
    shown = np.sort(order) if len(order) <= SHOWN_LABELS else order[: SHOWN_LABELS - 1]
    rest = len(order) - len(shown)
    described = []
    for name, share in shares.items():
        words = [f"{task.output_names[label]} {_percent(share[label])}" for label in shown]
        if task.one_label:
            more = [f"{rest} other labels {_percent(1 - share[shown].sum())}"] if rest else []
        else:
            none = 1 - examples[name].known_labels.any(axis=1).mean()
            more = [*([f"{rest} other labels"] if rest else []), f"no label {_percent(none)}"]
        described.append(f"{name} {', '.join([*words, *more])}")
    facts = [("labels", "; ".join(described))]
    facts += [(name, f"of the label {label!r}") for name, label in task.metric_labels.items()]
    if task.class_weights:
        weights = ", ".join(f"{task.output_names[label]} {task.class_weights[label]:.3g}" for label in shown)
        facts.append(("class weights", weights + (", ..." if rest else "")))
    return [*facts, *_label_warnings(task, counts, shares, data)]


def _label_warnings(
    task: Task, counts: dict[str, np.ndarray], shares: dict[str, np.ndarray], data: TaskDataConfig
) -> list[tuple[str, str]]:
    lacking = (counts["train"] == 0) & (counts["dev"] > 0)
    rare = (shares["dev"] > FAR_LESS_OFTEN * shares["train"]) & (counts["dev"] >= ENOUGH_ROWS)
    suspicious = np.flatnonzero(lacking | rare)
    if not len(suspicious):
        return []
    worst = suspicious[np.argsort(-(shares["dev"] - shares["train"])[suspicious], kind="stable")][:3]
    words = [
        f"{task.output_names[label]!r} has {_percent(shares['train'][label])} of the training rows and "
        f"{_percent(shares['dev'][label])} of dev"
        for label in worst
    ]
    more = f", and {len(suspicious) - 3} other labels differ as much" if len(suspicious) > 3 else ""
    fix = "split the data again at random" if data.max_train_samples is None else "set a larger data.max_train_samples"
    return [("warning", f"{', '.join(words)}{more}: {fix}")]


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"


def cut_facts(
    task: Task,
    tokenizer: Tokenizer,
    examples: dict[str, Any],
    rows: dict[str, Rows],
    data: TaskDataConfig,
    max_length: int,
) -> list[tuple[str, str]]:
    """Returns the share of rows that ``data.max_length`` truncates, for the table before training.

    Returns [] if no row is truncated, or if the task splits long inputs into several rows. If texts are read through
    windows, returns the share of texts with several windows.
    """
    if data.long_texts in WINDOW_MODES:
        return _window_facts(rows, data)
    lengths = {}
    for name in ("train", "dev"):
        if task.windows or len(rows[name]) != len(examples[name]) or not hasattr(examples[name], "take"):
            return []
        lengths[name] = _whole_lengths(task, tokenizer, examples[name], rows[name], data)
    if not any((whole > data.max_length).any() for whole in lengths.values()):
        return []

    def cut(name: str, limit: int) -> str:
        return _percent(float((lengths[name] > limit).mean()))

    about = "about " if len(rows["train"]) > MEASURED_ROWS else ""
    median = int(np.median(lengths["train"]))
    text = f"train {about}{cut('train', data.max_length)} (median {median} tokens), dev {cut('dev', data.max_length)}"
    larger = [size for size in (2 * data.max_length, max_length) if data.max_length < size <= max_length]
    if larger:
        text += f"; --data.max_length {larger[0]} cuts {cut('train', larger[0])} of train"
    return [("rows cut", text)]


def _window_facts(rows: dict[str, Rows], data: TaskDataConfig) -> list[tuple[str, str]]:
    """Returns the share of texts with several windows, and how many have windows that training leaves out."""
    counts = {name: [part.counts for part in windowed_parts(rows[name])] for name in ("train", "dev")}
    shares = {name: np.concatenate(parts) for name, parts in counts.items() if parts}
    if not shares:
        return []
    facts = [
        f"{name} {_percent(float((of_split > 1).mean()))} of texts, with up to {of_split.max()} windows"
        for name, of_split in shares.items()
    ]
    if left_out := int((shares.get("train", np.zeros(0)) > data.max_train_windows).sum()):
        facts.append(f"a training step reads {data.max_train_windows} windows of {left_out:,} longer texts")
    return [("long texts", "; ".join(facts))]


def _whole_lengths(task: Task, tokenizer: Tokenizer, examples: Any, rows: Rows, data: TaskDataConfig) -> np.ndarray:
    """Returns the untruncated lengths of a sample of rows."""
    step = max(1, len(rows) // MEASURED_ROWS)
    measured = np.arange(0, len(rows), step)
    lengths = np.asarray(rows.lengths)[measured].copy()
    full = np.flatnonzero(lengths >= data.max_length)
    if len(full):
        whole = examples.take(measured[full].tolist())
        lengths[full] = task.features(tokenizer, whole, dataclasses.replace(data, max_length=UNCUT)).lengths
    return lengths
