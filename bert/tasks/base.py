"""The interface of a fine-tuning task, `Task`, for training and inference. NumPy only, no JAX.

Data flow: files -> ``read`` -> examples -> ``features`` -> rows -> the model of the task's kind -> outputs, one array
per row -> ``predict`` -> predictions -> ``score``, ``write_predictions`` or ``format_predictions``. The task defines
the types of examples and predictions. A row is one input of the model; an example is one row, or several (the windows
of a long text).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from tokenizers import Tokenizer

from bert import metrics
from bert.config import FinetuneConfig, TaskDataConfig
from bert.data.rows import Rows, TokenRows
from bert.errors import LOGGER, UserError, quoted
from bert.files import parse_json

PERFECT = (1.0, 100.0)
"""The best values of metrics from 0 to 1 and of percentages."""

FORMER_HEADS = {
    "classification": "sequence_classification",
    "tagging": "token_classification",
    "span": "question_answering",
    "choices": "multiple_choice",
}
FORMER_LOSSES = {"binary_cross_entropy": "multi_label_classification", "mean_squared_error": "regression"}

Outputs = Sequence[np.ndarray]
"""The head's outputs, one float32 array per row: [L] labels, [C] choices, or [T, L] for the T tokens of the row."""


def json_input(line: str, keys: Sequence[str]) -> dict[str, Any] | None:
    """Returns the values of ``keys`` in a JSON object on one line; None for a line that does not start with a brace.

    Raises:
      ValueError: the line starts with a brace but is not JSON, or lacks a key.
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


class Task(ABC):
    """A fine-tuning task: its files, labels, scores and predictions."""

    name: str
    kind: ClassVar[str]
    """Key of `bert.training.finetuning.kinds.TASK_KINDS`, the table of models, losses and evaluators."""
    architecture: ClassVar[str | None] = None
    """Key of `bert.model.names.ARCHITECTURES` for exports; None for the class of the head."""
    answer_type: ClassVar[type] = tuple
    """Type of the answers to new inputs."""
    main_metric: str
    """The score of dev that selects the best checkpoint."""
    directions: ClassVar[Mapping[str, bool]] = {}
    """Whether higher is better, for metrics of the task that are not in `bert.metrics.HIGHER_IS_BETTER`."""
    baseline: str
    """Name of the baseline whose scores `baseline_scores` returns, such as ``majority_class``; "" for none."""
    windows: ClassVar[bool] = False
    """Whether long inputs become several rows; otherwise they are truncated to ``data.max_length``."""
    best_score: ClassVar[float] = 1.0
    """Main metric of perfect answers."""
    tuned_at_each_evaluation: ClassVar[bool] = False
    """Whether `tune` is applied at every evaluation of dev; otherwise only for the best checkpoint."""
    class_weights: tuple[float, ...] = ()
    """Factor of the loss of each label [L] (`bert.training.losses.with_class_weights`); () for none."""
    skips_bad_rows: bool = False
    """Whether rows without a text or a label are skipped; a field of the built-in tasks (``data.bad_rows``)."""
    pools_as_declared: ClassVar[bool] = False
    """Whether the classifier pools as the initial model declares (``classifier_pooling``); tasks of benchmarks keep the
    pooler, whose scores are published."""
    one_label: ClassVar[bool] = False
    """Whether each row has exactly one label."""
    data_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of ``data`` that the task reads, among the keys that not every task reads."""

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
        """L, the number of outputs of the head."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the L outputs in exported models."""
        return tuple(f"LABEL_{label}" for label in range(self.num_labels))

    @property
    def output_words(self) -> tuple[str, ...]:
        """Labels of the L outputs in the files, if they differ from `output_names`."""
        return self.output_names

    @property
    def problem_type(self) -> str | None:
        """``problem_type`` in Hugging Face's config.json, if the number of outputs does not determine it."""
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
        """Returns whether a higher score is better; None for a score without a direction."""
        return self.directions.get(metric, metrics.higher_is_better(metric))

    @property
    def higher_main_is_better(self) -> bool:
        """Whether a higher value of ``main_metric`` is better. Raises UserError if no direction is declared."""
        higher = self.higher_is_better(self.main_metric)
        if higher is None:
            raise UserError(
                f"task {self.name}: its main_metric {self.main_metric!r} has no direction: "
                f"set directions = {{{self.main_metric!r}: True}} on the class if higher is better, else False"
            )
        return higher

    def fit(self, train: Any) -> Task:
        """Returns the task with the values that depend on the training examples, such as the set of labels.

        ``to_config`` stores them. The returned task reads the other splits.
        """
        return self

    def bag_of_words(self, train: Any, dev: Any) -> tuple[str, dict[str, float]] | None:
        """Returns name and scores on dev of a linear model on words; None if the task has none.

        Call this on the task fitted to ``train``.
        """
        return None

    def tune(self, outputs: Outputs, features: Any, examples: Any) -> Task:
        """Returns the task with values tuned on dev, such as a threshold, for the best checkpoint.

        Changed fields of ``data`` are written to results.json, not to config.yaml.
        """
        return self

    def to_config(self, data: TaskDataConfig) -> TaskDataConfig:
        """Returns the configuration with the results of ``fit`` and ``tune``, from which `bert.load` makes the task.

        Fields that are null before ``fit`` belong in `bert.config.run_file.DERIVED_KEYS`.
        """
        return data

    def from_config(self, data: TaskDataConfig) -> Self:
        """Returns the task that a configuration describes: the inverse of ``to_config``."""
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
        """Returns the names of the splits: ``train``, ``dev``, further dev splits (``dev_...``), and splits to predict.

        Without ``dev``, some rows of train are held out as dev. The names become file names under predictions/ and
        keys of results.json.
        """

    @abstractmethod
    def read(self, folder: Path, split: str) -> Any:
        """Returns the `Examples` of a split.

        Raises:
          UserError: a file is missing or a line is invalid.
        """

    def labelled_examples(self, data: Any, split: str = "dev") -> Any:
        """Returns the `Examples` of a labelled file, a split of a folder or data set, or rows in memory.

        Raises:
          UserError: the task has another layout, or the rows cannot be used.
        """
        raise UserError(
            f"{self.name} reads its own files, whose scores are in results.json: name a split of the run's data"
        )

    @abstractmethod
    def features(self, tokenizer: Tokenizer, examples: Any, data: TaskDataConfig) -> Rows:
        """Returns the examples as rows of at most ``data.max_length`` tokens."""

    @abstractmethod
    def predict(self, outputs: Outputs, features: Any, examples: Any) -> Any:
        """Returns the predictions for all examples from the outputs of all rows."""

    @abstractmethod
    def score(self, predictions: Any, examples: Any) -> dict[str, float]:
        """Returns the official metrics of a labelled split, including ``main_metric``; undefined metrics are 0."""

    def baseline_scores(self, examples: Any) -> dict[str, float]:
        """Returns the same metrics for predictions that ignore the text."""
        return {}

    @property
    def metric_labels(self) -> Mapping[str, str]:
        """The label that a metric refers to, for metrics of a single label, such as f1 with two labels."""
        return {}

    def never_predicted(self, predictions: Any, examples: Any) -> list[str]:
        """Returns the labels of the examples that are never predicted."""
        return []

    def is_no_better(self, scores: Mapping[str, float], baseline: Mapping[str, float]) -> bool:
        """Returns whether the scores are no better than the scores of the baseline, which are not perfect."""
        reached, trivial = scores.get(self.main_metric), baseline.get(self.main_metric)
        if reached is None or trivial is None or (reached == trivial and trivial in PERFECT):
            return False
        return not metrics.is_better(reached, trivial, self.higher_main_is_better)

    def remarks(self, predictions: Any, examples: Any) -> list[str]:
        """Returns sentences on faults in the predictions of a labelled split that scores may hide."""
        remarks = []
        if never := self.never_predicted(predictions, examples):
            remarks.append(f"{'label' if len(never) == 1 else 'labels'} {quoted(never)} never predicted")
        if self.baseline:
            scores, baseline = self.score(predictions, examples), self.baseline_scores(examples)
            if self.is_no_better(scores, baseline):
                name = self.main_metric
                described = f"{name} {scores[name]:.4f} against {baseline[name]:.4f}"
                remarks.append(f"no better than the baseline {self.baseline.replace('_', ' ')}: {described}")
        return remarks

    def is_degenerate(self, predictions: Any, examples: Any) -> bool:
        """Returns whether the predictions are constant or no better than the baseline."""
        return False

    @abstractmethod
    def write_predictions(self, folder: Path, split: str, predictions: Any, examples: Any) -> list[Path]:
        """Writes the official prediction files of a split to ``folder``, and returns their paths."""

    def details(self, predictions: Any, examples: Any) -> dict[str, Any]:
        """Returns further results of a labelled split for results.json."""
        return {}

    def write_details(self, folder: Path, split: str, predictions: Any, examples: Any) -> list[Path]:
        """Writes further files about a labelled split, such as a list of errors, and returns their paths."""
        return []

    # New inputs

    def rows_by_label(self, examples: Any) -> np.ndarray:
        """Returns the number of rows with each label, [L]; [0] for tasks without labels of whole rows."""
        return np.zeros(0, np.int64)

    @property
    def exclusive_labels(self) -> tuple[str, ...]:
        """The labels, if an answer is exactly one of them; otherwise ()."""
        return self.output_names if self.one_label else ()

    def pair_score(self, answer: Any, label: str) -> float:
        """Returns the score by which pairs of texts are ranked, if ``calls`` has rank."""
        raise NotImplementedError

    def without_limits(self) -> Self:
        """Returns the task whose scores are not clipped to a range."""
        return self

    def without_activation(self) -> Self:
        """Returns the task whose scores are the model's outputs."""
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
            models = "models with one label per input" if name == "min_confidence" else "question answering models"
            raise UserError(f"{name} is for {models}, but the task is {self.name}: remove it")
        return self

    def read_inputs(self, path: Path) -> Iterator[tuple[int, Any]] | None:
        """Yields (line, input) of a file in a layout of the task, other than a table; None for other files."""
        return None

    @property
    @abstractmethod
    def input_columns(self) -> tuple[str, ...]:
        """Names of the texts of an input of `bert predict`."""

    def parse_line(self, line: str) -> Any:
        """Parses a line of an input file for ``examples_from_inputs``: a text, or texts separated by tabs.

        Raises:
          ValueError: the line has an empty text or the wrong number of texts.
        """
        count = len(self.input_columns)
        columns = line.split("\t") if count > 1 else [line]
        if not all(column.strip() for column in columns):
            raise ValueError("an empty text: write it or remove the line")
        if len(columns) != count:
            names = ", ".join(self.input_columns)
            raise ValueError(f"{len(columns)} column(s), but this task needs {count}: write {names} separated by tabs")
        return columns[0] if count == 1 else tuple(columns)

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        """Alternative column names of an input's texts in a table; the first whose columns all exist is used."""
        return (self.input_columns,)

    @property
    def id_columns(self) -> tuple[str, ...]:
        """Columns of a table that are copied to the answers, if they exist."""
        return ()

    @property
    def unnamed_table_columns(self) -> tuple[str, ...]:
        """Column names of a table without a header."""
        return ()

    def columns_among(self, names: Collection[str]) -> tuple[str, ...]:
        """Returns the columns of a table that are the texts of an input.

        Raises:
          ValueError: a column is missing.
        """
        for columns in self.table_columns:
            if set(columns) <= set(names):
                return columns
        columns = self.table_columns[0]
        missing = next(name for name in columns if name not in names)
        raise ValueError(
            f"no {missing!r} among {quoted(names) or 'the fields'}: name the column(s) {quoted(columns)} as in training"
        )

    def input_of_row(self, fields: Mapping[str, Any]) -> Any:
        """Returns the input for ``examples_from_inputs`` from a row of a table, a dictionary by column.

        Raises:
          ValueError: a column is missing or a text is invalid.
        """
        texts = [self.text_of(name, fields[name]) for name in self.columns_among(fields)]
        return texts[0] if len(texts) == 1 else tuple(texts)

    def text_of(self, name: str, value: Any) -> str:
        """Returns a text of a row. Raises ValueError if it is empty or not a string."""
        if not isinstance(value, str):
            raise ValueError(f"{name} is {json.dumps(value, default=str)[:40]}: it must be a text")
        if not value.strip():
            raise ValueError(f"{name} is empty: write it or remove the row")
        return value

    def input_fields(self, value: Any) -> dict[str, Any]:
        """Returns an input as the first fields of its line of answers."""
        return dict(zip(self.input_columns, [value] if isinstance(value, str) else value, strict=True))

    def sample(self, examples: Any) -> tuple[str, ...]:
        """Returns the texts of one example as an input; () if no example has only non-empty texts."""
        if len(self.input_columns) > 1:
            return ()
        return next(((text,) for text in examples.sentences() if text.strip()), ())

    @abstractmethod
    def examples_from_inputs(self, inputs: Sequence[Any]) -> Any:
        """Returns new inputs as examples without labels.

        Raises:
          UserError: an input has the wrong type or number of texts.
        """

    @abstractmethod
    def format_predictions(self, predictions: Any, examples: Any) -> list[Any]:
        """Returns the answers, one named tuple per input, with values that JSON supports."""
