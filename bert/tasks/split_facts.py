"""Describes the labels and the truncated rows of the splits of a run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bert.config import TaskDataConfig
from bert.config.model import WINDOW_MODES
from bert.data.long_texts import UNCUT
from bert.data.rows import Rows
from bert.data.windows import windowed_parts
from bert.errors import require
from bert.tasks.base import Task
from bert.tasks.token_classification.conll import PLAIN, Sentences

MEASURED_ROWS = 5000
"""Number of rows whose untruncated length is measured. It is enough to estimate a share of rows, and fast."""

SHOWN_LABELS = 20
"""Maximum number of labels whose shares are shown."""

FAR_LESS_OFTEN = 3
"""A label logs a warning if its share in dev is more than this multiple of its share in train ..."""
ENOUGH_ROWS = 5
"""... and at least this number of dev rows have it."""


def label_facts(task: Task, examples: dict[str, Any], data: TaskDataConfig) -> list[tuple[str, str]]:
    """Returns the shares of labels in train and dev (if there is any), and warnings, for the table before training.

    For tags, returns the numbers of entities of each type, or of words with each plain tag. Returns [] for other tasks
    without labels of whole rows.
    """
    names = [split for split in ("train", "dev") if split in examples]
    if isinstance(examples["train"], Sentences):
        what = "tags" if examples["train"].scheme == PLAIN else "entities"
        return [(what, "\n".join(f"{name} {_tag_counts(examples[name])}" for name in names))]
    counts: dict[str, np.ndarray] = {name: task.rows_by_label(examples[name]) for name in names}
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
    facts = [("labels", "\n".join(described))]
    facts += [(name, f"of the label {label!r}") for name, label in task.metric_labels.items()]
    if task.class_weights:
        weights = ", ".join(f"{task.output_names[label]} {task.class_weights[label]:.3g}" for label in shown)
        facts.append(("class weights", weights + (", ..." if rest else "")))
    return [*facts, *(_label_warnings(task, counts, shares, data) if "dev" in counts else [])]


def _tag_counts(sentences: Sentences) -> str:
    tags = (tag for tags in require(sentences.tags, "the tags") for tag in tags)
    if sentences.scheme != PLAIN:
        tags = (tag.removeprefix("B-") for tag in tags if tag.startswith("B-"))
    counts = Counter(tags).most_common()
    words = [f"{tag} {count:,}" for tag, count in counts[:SHOWN_LABELS]]
    return ", ".join([*words, *([f"{len(counts) - len(words)} others"] if len(counts) > len(words) else [])]) or "none"


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
    lengths: dict[str, np.ndarray] = {}
    for name in [split for split in ("train", "dev") if split in examples]:
        if task.windows or len(rows[name]) != len(examples[name]) or not hasattr(examples[name], "take"):
            return []
        lengths[name] = _whole_lengths(task, tokenizer, examples[name], rows[name], data)
    if not any((whole > data.max_length).any() for whole in lengths.values()):
        return []

    def cut(name: str, limit: int) -> str:
        return _percent(float((lengths[name] > limit).mean()))

    about = "about " if len(rows["train"]) > MEASURED_ROWS else ""
    median = int(np.median(lengths["train"]))
    text = f"train {about}{cut('train', data.max_length)} (median {median} tokens)"
    text += f", dev {cut('dev', data.max_length)}" if "dev" in lengths else ""
    larger = [size for size in (2 * data.max_length, max_length) if data.max_length < size <= max_length]
    if larger:
        text += f"; --data.max_length {larger[0]} cuts {cut('train', larger[0])} of train"
    return [("rows cut", text)]


def _window_facts(rows: dict[str, Rows], data: TaskDataConfig) -> list[tuple[str, str]]:
    """Returns the share of texts with several windows, and how many have windows that training leaves out."""
    counts = {name: [part.counts for part in windowed_parts(rows[name])] for name in ("train", "dev") if name in rows}
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
