"""The interface of a task to the fine-tuning loop and to `bert predict`: subclasses of `Task`; NumPy only, no JAX.

Data flow: files -> ``read`` -> examples -> ``features`` -> rows for the model -> (head, loss: by name) ->
outputs, one array a row -> ``predict`` -> predictions -> ``score``, ``write_predictions`` or ``format_predictions``.
The task chooses the types of examples and predictions: the loop only hands them back to it. A row is what the model
reads at once; an example may be one row, or several (the windows of a long text).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from tokenizers import Tokenizer

from bert import metrics
from bert.config import FinetuneConfig, TaskDataConfig
from bert.data.rows import Rows, TokenRows
from bert.errors import LOGGER, UserError, quoted
from bert.files import parse_json

PERFECT = (1.0, 100.0)
"""Best values of metrics: shares and percentages."""

FORMER_HEADS = {
    "classification": "sequence_classification",
    "tagging": "token_classification",
    "span": "question_answering",
    "choices": "multiple_choice",
}
FORMER_LOSSES = {"binary_cross_entropy": "multi_label_classification", "mean_squared_error": "regression"}

Outputs = Sequence[np.ndarray]
"""What the head says of each row, R float32 arrays: [L] labels, [C] choices, or [T, L] for the row's own T tokens."""


def json_input(line: str, keys: Sequence[str]) -> dict[str, Any] | None:
    """The values of ``keys`` in a line that is a JSON object; None for a line that does not begin as one.

    Raises:
      ValueError: the line begins as an object, but is none, or lacks a key.
    """
    if not line.lstrip().startswith("{"):
        return None
    try:
        entry = parse_json(line)
    except ValueError as error:
        reason = getattr(error, "msg", error)
        raise ValueError(f"not JSON ({reason}): fix it, or put tabs between {', '.join(keys)}") from None
    if missing := [key for key in keys if key not in entry]:
        raise ValueError(f"no {missing[0]!r}: the object needs {' and '.join(keys)}")
    return {key: entry[key] for key in keys}


class Examples(Protocol):
    """The examples of one split, as read."""

    @property
    def labelled(self) -> bool:
        """Whether the answers are known."""

    @property
    def notes(self) -> Sequence[str]:
        """What the user has to know, such as rows that were left out: a sentence each."""

    def __len__(self) -> int: ...

    @property
    def groups(self) -> Sequence[Hashable]:
        """What each example is about: those about the same are not separated when dev is held out of train."""

    def take(self, rows: Sequence[int]) -> Self:
        """The examples of these numbers. Needed, as ``groups``, only to sample examples and to hold some out."""

    def sentences(self) -> Iterator[str]:
        """Every text, to train a vocabulary on where the run has none."""


class Task(ABC):
    """A task: its data, the names of its head and loss, its scores, its files."""

    name: str
    kind: ClassVar[str]
    """Key of `bert.training.finetuning.kinds.TASK_KINDS`; the head of that name is in `bert.model.heads.HEADS`."""
    architecture: ClassVar[str | None] = None
    """Key of `bert.interchange.names.ARCHITECTURES` for exports; None for the class of the head."""
    answer_type: ClassVar[type] = tuple
    """Type of the answers to new inputs."""
    main_metric: str
    """The score, of the first dev split, that chooses the best checkpoint."""
    directions: ClassVar[Mapping[str, bool]] = {}
    """Whether higher is better, of the task's metrics that `bert.metrics.HIGHER_IS_BETTER` does not list."""
    baseline: str
    """What `baseline_scores` are those of, such as ``majority_class``; "" for none."""
    windows: ClassVar[bool] = False
    """Whether long inputs become several rows; else they are cut to ``data.max_length``."""
    tuned_at_each_evaluation: ClassVar[bool] = False
    """Whether every evaluation of dev is scored as `tune` answers it; else only that of the best checkpoint is."""
    class_weights: tuple[float, ...] = ()
    """L factors of the loss of each label, which `bert.training.losses.with_class_weights` applies; () for none."""
    data_keys: ClassVar[tuple[str, ...]] = ()
    """Which keys of ``data`` that not every task reads, such as train, columns and doc_stride, it reads."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Sets ``kind`` and ``problem_type`` of classes that still name a head and a loss."""
        super().__init_subclass__(**options)
        head, loss = cls.__dict__.get("head"), cls.__dict__.get("loss")
        if isinstance(head, str):
            cls.kind = FORMER_HEADS.get(head, head)
            LOGGER.warning(
                f"{cls.__name__}.head is now called kind: set kind to {cls.kind!r}, and remove head and loss"
            )
        if loss in FORMER_LOSSES and cls.problem_type is Task.problem_type:
            cls.problem_type = FORMER_LOSSES[loss]  # type: ignore[assignment, method-assign]

    @property
    @abstractmethod
    def num_labels(self) -> int:
        """L, the width of the head."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the L outputs, for those who read an exported model."""
        return tuple(f"LABEL_{label}" for label in range(self.num_labels))

    @property
    def output_words(self) -> tuple[str, ...]:
        """The words that the files have for the L outputs, if they differ from `output_names`."""
        return self.output_names

    @property
    def problem_type(self) -> str | None:
        """What Hugging Face's config.json calls the problem, where the number of outputs does not tell it."""
        return None

    @property
    def calls(self) -> frozenset[str]:
        """Methods of `bert.Pretrained` that use the head: predict, and embed, generate, rank or score."""
        return frozenset({"predict"})

    @property
    def bundle_fields(self) -> dict[str, Any]:
        """Fields of `bert.interchange.bundle.ModelBundle` that exports need to make the same predictions."""
        return {}

    def higher_is_better(self, metric: str) -> bool | None:
        """Whether a higher value of one of the scores is better; None for a score without a direction."""
        return self.directions.get(metric, metrics.higher_is_better(metric))

    @property
    def higher_main_is_better(self) -> bool:
        """Whether a higher value of ``main_metric`` is better. Raises UserError if that is not declared."""
        higher = self.higher_is_better(self.main_metric)
        if higher is None:
            raise UserError(
                f"task {self.name}: its main_metric {self.main_metric!r} has no direction: "
                f"set directions = {{{self.main_metric!r}: True}} on the class if higher is better, else False"
            )
        return higher

    def fit(self, train: Any) -> Task:
        """The task with what only its training examples tell, such as the set of tags; ``to_config`` keeps it.

        Args:
          train: what ``read`` returned for the split ``train``; the other splits are read by the task that this
            returns.
        """
        return self

    def tune(self, outputs: Outputs, features: Any, examples: Any) -> Task:
        """The task with what the best checkpoint's outputs for dev tell, such as a threshold, or the task itself.

        Fields of ``data`` that `to_config` changes for it are written into results.json, not into config.yaml.
        """
        return self

    def to_config(self, data: TaskDataConfig) -> TaskDataConfig:
        """The configuration with what ``fit`` and ``tune`` have found: `bert.load` knows the task by it.

        Fields that are null until ``fit`` belong into `bert.config.resume.DERIVED_KEYS`.
        """
        return data

    def from_config(self, data: TaskDataConfig) -> Self:
        """The task as the configuration of a run describes it: the inverse of ``to_config``."""
        return self

    def with_settings(self, config: FinetuneConfig) -> Task:
        """Returns the task with the keys of the configuration outside of ``data``. Raises UserError."""
        return self

    def with_target_tokenizer(self, tokenizer: Tokenizer | None) -> Self:
        """Returns the task with the vocabulary of the texts that it generates, if it generates any."""
        return self

    # Files

    @abstractmethod
    def splits(self, folder: Path) -> list[str]:
        """``train``, ``dev`` and whatever more the folder has: further dev splits (named ``dev_...``), then those to
        predict. Without ``dev``, some rows of train are held out as dev. Names of splits are names of files under
        predictions/ and keys of results.json."""

    @abstractmethod
    def read(self, folder: Path, split: str) -> Any:
        """The `Examples` of a split.

        Raises:
          UserError: file (and line) that is missing or not as the task needs it, and the fix.
        """

    def labelled_examples(self, data: Any) -> Any:
        """Returns the `Examples` of a labelled file, or of rows in memory, if ``calls`` has score.

        Raises:
          UserError: the task has another layout, or the rows cannot be used.
        """
        raise UserError(
            f"{self.name} reads its own files, whose scores are in results.json: use a model of a custom task"
        )

    @abstractmethod
    def features(self, tokenizer: Tokenizer, examples: Any, data: TaskDataConfig) -> Rows:
        """The examples as rows of at most ``data.max_length`` tokens."""

    @abstractmethod
    def predict(self, outputs: Outputs, features: Any, examples: Any) -> Any:
        """The answers that the outputs of all rows amount to, one an example."""

    @abstractmethod
    def score(self, predictions: Any, examples: Any) -> dict[str, float]:
        """The official metrics of a split with labels, ``main_metric`` among them; 0 where one is undefined."""

    def baseline_scores(self, examples: Any) -> dict[str, float]:
        """The same metrics of an answer that looks at no text: what any model has to beat."""
        return {}

    @property
    def metric_labels(self) -> Mapping[str, str]:
        """Metrics that score one label against all others, such as f1 of two labels -> that label."""
        return {}

    def never_predicted(self, predictions: Any, examples: Any) -> list[str]:
        """Returns the labels that examples of a split have and that no prediction has."""
        return []

    def is_no_better(self, ours: Mapping[str, float], baseline: Mapping[str, float]) -> bool:
        """Whether the scores are no better than the baseline's, which is not perfect."""
        reached, trivial = ours.get(self.main_metric), baseline.get(self.main_metric)
        if reached is None or trivial is None or (reached == trivial and trivial in PERFECT):
            return False
        return not metrics.is_better(reached, trivial, self.higher_main_is_better)

    def remarks(self, predictions: Any, examples: Any) -> list[str]:
        """Returns sentences on what is wrong with the predictions of a split with labels, which scores may hide."""
        found = []
        if never := self.never_predicted(predictions, examples):
            found.append(f"{'label' if len(never) == 1 else 'labels'} {quoted(never)} never predicted")
        if self.baseline:
            ours, baseline = self.score(predictions, examples), self.baseline_scores(examples)
            if self.is_no_better(ours, baseline):
                name = self.main_metric
                described = f"{name} {ours[name]:.4f} against {baseline[name]:.4f}"
                found.append(f"no better than the baseline {self.baseline.replace('_', ' ')}: {described}")
        return found

    def is_degenerate(self, predictions: Any, examples: Any) -> bool:
        """Whether the run is degenerate: predictions are constant, or no better than the baseline."""
        return False

    @abstractmethod
    def write_predictions(self, folder: Path, split: str, predictions: Any, examples: Any) -> list[Path]:
        """Writes the official prediction files of a split into ``folder``, made if need be, and returns them."""

    def details(self, predictions: Any, examples: Any) -> dict[str, Any]:
        """More on a split with labels than its scores, of values that JSON has, for results.json."""
        return {}

    def write_details(self, folder: Path, split: str, predictions: Any, examples: Any) -> list[Path]:
        """Writes files for people on a split with labels, such as one with the errors, and returns them."""
        return []

    # New inputs

    @property
    def exclusive_labels(self) -> tuple[str, ...]:
        """The labels, if an answer chooses exactly one of them; else ()."""
        return ()

    def pair_score(self, answer: Any, label: str) -> float:
        """Returns the score by which pairs of texts are ranked, if ``calls`` has rank."""
        raise NotImplementedError

    def without_limits(self) -> Self:
        """Returns the task whose scores are not clipped to a range."""
        return self

    def blank_rows(self, rows: TokenRows) -> Rows:
        """Returns rows of the kind that ``features`` returns, to compile the model with."""
        return rows

    def with_answer_settings(self, settings: Mapping[str, Any]) -> Self:
        """Returns the task with settings of `bert.Pretrained.predict`; None is the task's value.

        Raises:
          UserError: a setting is not one of the task, or has a wrong value.
        """
        if name := next((name for name, value in settings.items() if value is not None), None):
            raise UserError(f"{name} is for question answering models, but the task is {self.name}: remove it")
        return self

    def read_inputs(self, path: Path) -> Iterator[tuple[int, Any]] | None:
        """Yields (line, input) of a file in a layout of the task, other than a table; None for other files."""
        return None

    @property
    @abstractmethod
    def input_columns(self) -> tuple[str, ...]:
        """Names of the texts of one input of `bert predict`."""

    def parse_line(self, line: str) -> Any:
        """Parses a line of an input file for ``examples_from_inputs``: a text, or texts with tabs between.

        Raises:
          ValueError: what is wrong with the line, and the fix.
        """
        wanted = len(self.input_columns)
        columns = line.split("\t") if wanted > 1 else [line]
        if not all(column.strip() for column in columns):
            raise ValueError("an empty text: write it or remove the line")
        if len(columns) != wanted:
            names = ", ".join(self.input_columns)
            raise ValueError(
                f"{len(columns)} column(s) where this task takes {wanted}: write {names} with a tab between"
            )
        return columns[0] if wanted == 1 else tuple(columns)

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        """Names of the texts of one input in a table: the first of these whose names are all there."""
        return (self.input_columns,)

    @property
    def id_columns(self) -> tuple[str, ...]:
        """Columns of a table that answers keep, where they are there."""
        return ()

    @property
    def unnamed_table_columns(self) -> tuple[str, ...]:
        """Columns of a table whose first line does not name them."""
        return ()

    def columns_among(self, names: Collection[str]) -> tuple[str, ...]:
        """Which of the columns of a table are the texts of an input.

        Raises:
          ValueError: one is missing, and how to name it.
        """
        for wanted in self.table_columns:
            if set(wanted) <= set(names):
                return wanted
        wanted = self.table_columns[0]
        missing = next(name for name in wanted if name not in names)
        there, named = quoted(names), quoted(wanted)
        raise ValueError(
            f"no {missing!r} among {there or 'the fields'}: name the column(s) {named} as in training, or write one "
            "input a line to a .txt file"
        )

    def input_of_row(self, fields: Mapping[str, Any]) -> Any:
        """The fields of a table's row, by the names of their columns, as ``examples_from_inputs`` takes them.

        Raises:
          ValueError: what is wrong with the row, and how to fix it.
        """
        texts = [self.text_of(name, fields[name]) for name in self.columns_among(fields)]
        return texts[0] if len(texts) == 1 else tuple(texts)

    def text_of(self, name: str, value: Any) -> str:
        """A text of a row. Raises ValueError if it is none or empty."""
        if not isinstance(value, str):
            raise ValueError(f"{name} is {json.dumps(value, default=str)[:40]}: it must be a text")
        if not value.strip():
            raise ValueError(f"{name} is empty: write it or remove the row")
        return value

    def input_fields(self, given: Any) -> dict[str, Any]:
        """An input as the first fields of its line of answers."""
        return dict(zip(self.input_columns, [given] if isinstance(given, str) else given, strict=True))

    def sample(self, examples: Any) -> tuple[str, ...]:
        """The texts of one of the examples, as a line of an input file has them; () where there is no such example."""
        if len(self.input_columns) > 1:
            return ()
        return next(((text,) for text in examples.sentences() if text.strip()), ())

    @abstractmethod
    def examples_from_inputs(self, inputs: Sequence[Any]) -> Any:
        """New inputs as examples without labels.

        Raises:
          UserError: an input is not what the task takes.
        """

    @abstractmethod
    def format_predictions(self, predictions: Any, examples: Any) -> list[Any]:
        """Predictions for people, one named tuple an input, of values that JSON has."""
