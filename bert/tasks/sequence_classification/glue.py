"""The nine GLUE tasks (Wang et al. 2019); the diagnostic set is a split of MNLI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert.config import HUB_PREFIX
from bert.data.records import Records, dataset_records, is_dataset_dict, open_splits, read_records
from bert.errors import UserError
from bert.files import write_tsv
from bert.tasks.columns import Columns, read_columns
from bert.tasks.sequence_classification.base import Examples, SequenceClassificationTask
from bert.tasks.sequence_classification.classification import ClassificationTask, RegressionTask
from bert.tasks.splits import SplitNames, find_split_file, splits_in

ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True, kw_only=True)
class GlueTask(SequenceClassificationTask):
    """Base class: names and layout of GLUE's original files and data sets."""

    folder_name: str
    """Folder in GLUE's archive."""
    files: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)}
    )
    """Possible file names of each split."""
    submissions: Mapping[str, str]
    """File name in a submission to the leaderboard, for each split without labels."""
    id_column: str = "index"
    """Column of row ids."""
    unnamed_table_columns: tuple[str, ...] = ()
    """Columns of the labelled files, if these have no header."""
    skips_short_rows: bool = False
    """Whether the original labelled files have rows with too few columns."""
    may_be_empty: bool = False
    """Whether some original texts are empty."""
    hub_columns: tuple[str, ...] = ()
    """Text columns of data sets, if they differ from ``text_columns``."""

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        return (self.text_columns, self.hub_columns) if self.hub_columns else (self.text_columns,)

    @property
    def id_columns(self) -> tuple[str, ...]:
        return (self.id_column, "idx")

    def text_of(self, name: str, value: Any) -> str:
        return value if self.may_be_empty and isinstance(value, str) else super().text_of(name, value)

    @property
    def _paths(self) -> SplitNames:
        """The possible paths of each split, relative to the folder of the task or of GLUE's archive."""
        return {
            split: [
                path
                for name in (*names, *(f"{Path(name).with_suffix('')}.parquet" for name in names))
                for path in (name, f"{self.folder_name}/{name}")
            ]
            for split, names in self.files.items()
        }

    def splits(self, folder: Path) -> list[str]:
        if not is_glue(Path(folder), self.name):
            return splits_in(Path(folder), self._paths)
        return [
            split
            for split in self.files
            if split in ("train", "dev") or glue_records(Path(folder), self.name, split) is not None
        ]

    def records(self, folder: Path, split: str) -> Records:
        """Returns the rows of a split of a data set, or of a file in ``folder`` or in the task's subfolder."""
        if is_glue(folder, self.name):
            if (records := glue_records(folder, self.name, split)) is not None:
                return records
            raise UserError(
                f"{folder.as_posix()} has no split for {split}: set data.dir to the whole data set {self.folder_name}"
            )
        labelled = split not in self.submissions
        return read_records(
            find_split_file(folder, self._paths, split, self.folder_name),
            self.unnamed_table_columns if labelled else None,
            header_if=(*self.text_columns, self.label_column),
            literal_quotes=True,
            # A line feed in a text breaks its row into short rows, and two line feeds add an empty line.
            skip_short_rows=self.skips_short_rows and labelled,
        )

    def _read_columns(self, records: Records, split: str) -> Columns:
        """Reads the columns of GLUE's files or data sets. Labelled rows are numbered from 0."""
        names, labelled = records.names or (), split not in self.submissions
        texts = next((texts for texts in self.table_columns if set(texts) <= set(names)), self.text_columns)
        label = next((name for name in (self.label_column, "label") if name in names), self.label_column)
        id = next((name for name in self.id_columns if name in names), self.id_column)
        columns = read_columns(
            records,
            dict.fromkeys(texts, "task"),
            {label: "task"} if labelled else {},
            None if labelled and self.id_column not in names else (id, "task"),
            may_be_empty=self.may_be_empty,
            raise_faults=False,
        )
        return columns._replace(ids=[str(row) for row in range(len(columns.ids))]) if labelled else columns

    def _write(
        self, folder: Path, split: str, examples: Examples, words: Sequence[str], more: Mapping[str, Sequence[str]]
    ) -> list[Path]:
        """Writes the leaderboard's file for splits without labels, and SPLIT.tsv if there are more columns."""
        if examples.labelled or split not in self.submissions:
            return super()._write(folder, split, examples, words, more)
        rows = [("index", "prediction"), *zip(examples.ids, words, strict=True)]
        official = write_tsv(folder / self.submissions[split], rows)
        return [official, *(super()._write(folder, split, examples, words, more) if more else [])]


@dataclass(frozen=True, kw_only=True)
class GlueClassification(GlueTask, ClassificationTask):
    """One label per row."""

    unknown_label_fix = "fix it"
    lists_faults = False  # GLUE's files have no faults: more than one fault means that the file is another one


@dataclass(frozen=True, kw_only=True)
class GlueRegression(GlueTask, RegressionTask):
    """One score per row."""


SPLITS = {
    "train": ("train",),
    "dev": ("validation", "validation_matched"),
    "dev_mismatched": ("validation_mismatched",),
    "test": ("test", "test_matched"),
    "test_mismatched": ("test_mismatched",),
    "diagnostic": ("test",),
}
"""The names of each split in data sets; the diagnostic set is a separate configuration."""

DIAGNOSTIC = "ax"


def is_glue(folder: Path, task: str) -> bool:
    """Returns whether the data is a data set: ``hub:NAME``, a saved data set, or a folder with a subfolder ``task``."""
    return _find_dataset(folder, task, task) is not None


def glue_records(folder: Path, task: str, split: str) -> Records | None:
    """Returns the rows of a split of a task; None if it does not exist. Raises UserError if it cannot be loaded."""
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
    """Returns the data set of a configuration.

    A local data set is looked up in the folder, next to it, or, for the task itself, as the folder. On the hub, a
    configuration in the name belongs to the task; other configurations are looked up in the whole data set.
    """
    whole = folder.as_posix()
    if whole.startswith(HUB_PREFIX):
        return whole if config == task else HUB_PREFIX + whole.removeprefix(HUB_PREFIX).partition(":")[0]
    options = [(folder / config).as_posix(), whole if config == task else (folder.parent / config).as_posix()]
    return next((option for option in options if is_dataset_dict(option)), None)


def _lacks(source: str, config: str) -> bool:
    """Returns whether a data set on the hub is known to lack a configuration."""
    if not source.startswith(HUB_PREFIX):
        return False
    import datasets

    try:
        return config not in datasets.get_dataset_config_names(source.removeprefix(HUB_PREFIX))
    except Exception:  # the network or the hub failed: existence is unknown
        return False


def _classification(
    name: str, folder_name: str, text_columns: tuple[str, ...], label_names: tuple[str, ...], **options: Any
) -> GlueClassification:
    """Returns a task whose files have the label ``label_names`` (0, 1), unless ``options`` differ."""
    defaults = {"label_column": "label", "labels": ("0", "1"), "metrics": ("accuracy",), "main_metric": "accuracy"}
    submissions = {"submissions": {"test": f"{folder_name}.tsv"}}
    fields = {**defaults, **submissions, "label_names": label_names, **options}
    return GlueClassification(name=name, folder_name=folder_name, text_columns=text_columns, **fields)


ACCURACY_AND_F1 = {"metrics": ("accuracy", "f1"), "main_metric": "f1"}
DIAGNOSTIC_FILES = tuple(
    f"{folder.format(name)}{name}.tsv" for folder in ("", "../{}/", "{}/") for name in ("AX", "diagnostic")
)
"""The diagnostic set next to MNLI's folder in GLUE's archive, which has used two names."""

TASKS = (
    _classification("sst2", "SST-2", ("sentence",), ("negative", "positive")),
    _classification(
        "mrpc",
        "MRPC",
        ("#1 String", "#2 String"),
        ("not_equivalent", "equivalent"),
        hub_columns=("sentence1", "sentence2"),
        label_column="Quality",
        **ACCURACY_AND_F1,
    ),
    _classification(
        "cola",
        "CoLA",
        ("sentence",),
        ("unacceptable", "acceptable"),
        metrics=("matthews", "accuracy"),
        main_metric="matthews",
        unnamed_table_columns=("source", "label", "mark", "sentence"),
    ),
    GlueRegression(
        name="stsb",
        folder_name="STS-B",
        text_columns=("sentence1", "sentence2"),
        label_column="score",
        lowest=0.0,
        highest=5.0,
        metrics=("pearson", "spearman"),
        main_metric="pearson",
        submissions={"test": "STS-B.tsv"},
    ),
    _classification(
        "qqp",
        "QQP",
        ("question1", "question2"),
        ("not_duplicate", "duplicate"),
        label_column="is_duplicate",
        id_column="id",
        skips_short_rows=True,
        may_be_empty=True,  # question2 of two training rows
        **ACCURACY_AND_F1,
    ),
    _classification(
        "mnli",
        "MNLI",
        ("sentence1", "sentence2"),
        ("entailment", "neutral", "contradiction"),
        hub_columns=("premise", "hypothesis"),
        label_column="gold_label",
        labels=("entailment", "neutral", "contradiction"),
        files={
            "train": ("train.tsv",),
            "dev": ("dev_matched.tsv",),
            "dev_mismatched": ("dev_mismatched.tsv",),
            "test": ("test_matched.tsv",),
            "test_mismatched": ("test_mismatched.tsv",),
            "diagnostic": DIAGNOSTIC_FILES,
        },
        submissions={"test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv", "diagnostic": "AX.tsv"},
    ),
    _classification("qnli", "QNLI", ("question", "sentence"), ENTAILMENT, labels=ENTAILMENT),
    _classification("rte", "RTE", ("sentence1", "sentence2"), ENTAILMENT, labels=ENTAILMENT),
    _classification("wnli", "WNLI", ("sentence1", "sentence2"), ENTAILMENT[::-1]),
)

SUBMISSIONS = tuple(name for task in TASKS for name in task.submissions.values())
"""The files of a submission to gluebenchmark.com."""
