"""Question answering: SQuAD v1.1 and v2.0, and questions in columns of files or data sets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from tokenizers import Tokenizer

from bert import metrics
from bert.config import ColumnsConfig, TaskDataConfig
from bert.data.inputs import as_texts, check_count
from bert.data.records import RECORDS, Records, is_dataset_dict, read_records
from bert.data.records import SUFFIXES as RECORD_SUFFIXES
from bert.data.rows import pad_and_stack
from bert.data.tables import file_suffix
from bert.errors import UserError, WarningText, require
from bert.tasks.bag_of_words import WINDOWS, best_sentences, best_words
from bert.tasks.base import Outputs, Task, json_input
from bert.tasks.columns import (
    FILE_STEMS,
    KEYS,
    ColumnFilesTask,
    dataset_split,
    dataset_splits,
    record_files,
    split_names,
    split_path,
)
from bert.tasks.error_files import write_errors
from bert.tasks.question_answering.span_features import (
    Answers,
    Candidate,
    Example,
    Windows,
    decode_answers,
    make_qa_features,
)
from bert.tasks.question_answering.squad import Dataset, read, read_questions, references, write_predictions
from bert.tasks.splits import SplitNames, find_split_file, splits_in


class AnswerPrediction(NamedTuple):
    """An answer: its text, cut from the context, and its probability among the n best answers and no answer. "": no
    answer.
    """

    answer: str
    start: int | None
    """First character in the context."""
    end: int | None
    """One past the last character."""
    probability: float


ANSWER_SETTINGS = ("null_score_diff_threshold", "doc_stride", "max_answer_length", "n_best")
"""Settings of `bert.Pretrained.predict` for question answering."""

QUESTION_KEYS = (
    "doc_stride",
    "max_query_length",
    "max_answer_length",
    "n_best_size",
    "null_score_diff_threshold",
    "misaligned_answers",
)
"""Keys of ``data`` that question answering reads."""


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringTask(Task):
    """SQuAD v1.1, or v2.0, in which questions may have no answer; predictions are `Answers`.

    For v2.0 the best checkpoint is selected by the F1 at its best threshold, and this threshold on dev is stored.
    """

    name: str
    version: str
    may_be_impossible: bool = False
    n_best_size: int = 20
    max_answer_length: int = 30
    null_score_diff_threshold: float | None = None
    """None until it is set or tuned: then `predict` uses 0."""
    num_answers: int | None = None
    """Number of answers per question in `format_predictions`; None for one answer instead of a list."""
    strict: bool = False
    """Whether misplaced answers are an error."""
    skips_bad_rows: bool = False
    data_keys: ClassVar[tuple[str, ...]] = QUESTION_KEYS
    kind: ClassVar[str] = "question_answering"
    best_score: ClassVar[float] = 100.0
    answer_type: ClassVar[type] = AnswerPrediction
    windows: ClassVar[bool] = True
    num_labels = 2
    output_names = ()
    """The start and the end are not labels."""
    input_columns = ("question", "context")

    @property
    def main_metric(self) -> str:  # type: ignore[override]  # a field in other tasks
        return "best_f1" if self.may_be_impossible else "f1"

    @property
    def baseline(self) -> str:  # type: ignore[override]
        return "no_answer" if self.may_be_impossible else ""

    @property
    def bundle_fields(self) -> dict[str, Any]:
        threshold = self.null_score_diff_threshold or 0.0
        return {"null_score_diff_threshold": threshold if self.may_be_impossible else None}

    def tune(self, outputs: Outputs, features: Windows, examples: Dataset) -> QuestionAnsweringTask:
        """Returns the task with the threshold of the best F1, halfway between an answered and an unanswered question.

        The official search returns the odds of the last answered question. New questions with slightly lower confidence
        would then have no answer. If never answering is best, the threshold is 0.
        """
        if not self.may_be_impossible or self.null_score_diff_threshold is not None:
            return self
        answers, expected = self.predict(outputs, features, examples), references(examples.examples)
        odds_of = require(answers.null_odds, "the odds of no answer")
        never = min(odds_of.values()) - 1.0
        best = self.score(answers, examples)["best_f1_thresh"]
        best = (best + min((odds for odds in odds_of.values() if odds > best), default=best)) / 2

        def f1(threshold: float) -> float:
            texts = replace(answers, null_score_diff_threshold=threshold).texts
            return metrics.squad_metrics(texts, expected, v2=True)["f1"]

        return replace(self, null_score_diff_threshold=max(best, never, key=f1))

    def to_config(self, data: TaskDataConfig) -> TaskDataConfig:
        if not self.may_be_impossible:
            return data
        return replace(data, null_score_diff_threshold=self.null_score_diff_threshold)

    def from_config(self, data: TaskDataConfig) -> Self:
        return replace(
            self,
            n_best_size=data.n_best_size,
            max_answer_length=data.max_answer_length,
            null_score_diff_threshold=data.null_score_diff_threshold,
            strict=data.misaligned_answers == "error",
        )

    @property
    def _files(self) -> SplitNames:
        version = self.version
        layouts = {
            split: (f"{split}-v{version}.json", f"{split}-v{version}*.json", f"{split}.json") for split in SPLITS
        }
        return {split: (*names, *record_files(*FILE_STEMS[split])) for split, names in layouts.items()}

    def splits(self, folder: Path) -> list[str]:
        return dataset_splits(Path(folder)) or splits_in(Path(folder), self._files)

    def read(self, folder: Path, split: str) -> Dataset:
        """Returns the questions; for train only the questions that have a usable answer. Test needs no answers."""
        folder = Path(folder)
        if is_dataset_dict(folder.as_posix()):
            return self._read_records(dataset_split(folder, split), split, ColumnsConfig(id="id"))
        path = find_split_file(folder, self._files, split, f"SQuAD v{self.version}")
        if file_suffix(path) in RECORDS:
            return self._read_records(read_records(path), split, ColumnsConfig(id="id"))
        return self._read_json(path, split)

    def _read_json(self, path: Path, split: str) -> Dataset:
        """Returns the questions of a file in SQuAD's layout."""
        dataset = read(path, self.strict, split != "test", self._allows_impossible(split), self.skips_bad_rows)
        return self._kept(dataset, str(path), split)

    def _read_records(self, records: Records, split: str, names: ColumnsConfig) -> Dataset:
        """Returns the questions of records."""
        records = replace(records, skips_bad_rows=self.skips_bad_rows)
        dataset = read_questions(records, names, split != "test", self.strict, self._allows_impossible(split))
        return self._kept(dataset, records.source, split)

    def _allows_impossible(self, split: str) -> bool:
        """Returns whether a question of a labelled split may have no answer."""
        return self.may_be_impossible

    def _kept(self, dataset: Dataset, path: str, split: str) -> Dataset:
        """Returns the questions, for train only the questions that have a usable answer, with notes on the others."""
        notes = dataset.notes
        examples = dataset.examples
        if dataset.misplaced and dataset.labelled:
            note = f"{path}: {dataset.misplaced_note}"
            if split == "train":
                examples = dataset.trainable
                note = f"{note}; {len(dataset.skipped):,} without another answer are left out"
                if not examples:
                    raise UserError(
                        f"{path}: {dataset.misplaced_note}, and there is no other question: count the characters, not "
                        "the bytes, before an answer"
                    )
            notes += (WarningText(note),)
        if split == "dev" and self.may_be_impossible and self.null_score_diff_threshold is not None:
            notes += (
                f"data.null_score_diff_threshold is set to {self.null_score_diff_threshold}: none is tuned on dev",
            )
        return replace(dataset, examples=examples, notes=notes)

    def features(self, tokenizer: Tokenizer, examples: Dataset, data: TaskDataConfig) -> Windows:
        return make_qa_features(tokenizer, examples.examples, data.max_length, data.doc_stride, data.max_query_length)

    def predict(self, outputs: Outputs, features: Windows, examples: Dataset) -> Answers:
        """Returns the best spans of each question for logits [T, 2] of each window; NaN counts as 0."""
        logits = np.nan_to_num(pad_and_stack(outputs, (0, 2)))
        threshold = (self.null_score_diff_threshold or 0.0) if self.may_be_impossible else None
        return decode_answers(
            examples.examples,
            features,
            logits[..., 0],
            logits[..., 1],
            self.n_best_size,
            self.max_answer_length,
            threshold,
        )

    def score(self, predictions: Answers, examples: Dataset) -> dict[str, float]:
        expected = references(examples.examples)
        scores = metrics.squad_metrics(predictions.texts, expected, v2=self.may_be_impossible)
        if not self.may_be_impossible:
            return scores
        odds = require(predictions.null_odds, "the odds of no answer")
        best = {id: candidate.text for id, candidate in predictions.best.items()}
        return {**scores, **metrics.best_null_threshold(best, odds, expected)}

    def baseline_scores(self, examples: Dataset) -> dict[str, float]:
        """Returns the scores of answering no question, for v2.0."""
        if not self.may_be_impossible:
            return {}
        expected = references(examples.examples)
        scores = metrics.squad_metrics(dict.fromkeys(expected, ""), expected, v2=True)
        return {**scores, "best_f1": scores["f1"], "best_exact": scores["exact"]}

    def bag_of_words(self, train: Dataset, dev: Dataset) -> tuple[str, dict[str, float]] | None:
        """Returns the scores of choosing a sentence or a word of the context, whichever is better; None for v2.0."""
        if self.may_be_impossible:
            return None
        known = [example for example in train.examples if example.answer is not None]
        answers = [("sentence_logistic_regression", best_sentences(known, dev.examples))]
        answers += [("window_logistic_regression", best_words(known, dev.examples, window)) for window in WINDOWS]
        expected = references(dev.examples)
        scored = [(name, metrics.squad_metrics(texts, expected, v2=False)) for name, texts in answers]
        return max(scored, key=lambda named: named[1][self.main_metric])

    def is_degenerate(self, predictions: Answers, examples: Dataset) -> bool:
        """Returns whether no answer shares a word with a reference, or for v2.0 if never answering is as good."""
        reached = self.score(predictions, examples)[self.main_metric]
        return reached <= self.baseline_scores(examples).get(self.main_metric, 0.0) < 100

    def write_predictions(self, folder: Path, split: str, predictions: Answers, examples: Dataset) -> list[Path]:
        """Writes the files for the official scripts to ``folder``, or to a folder of the split for other splits."""
        return write_predictions(folder if split == "dev" else folder / split, predictions)

    def write_details(self, folder: Path, split: str, predictions: Answers, examples: Dataset) -> list[Path]:
        """Writes the questions without an exact match to errors.tsv, the most probable wrong answers first."""
        expected = references(examples.examples)
        exact, f1 = metrics.squad_answer_scores(predictions.texts, expected, self.may_be_impossible)
        errors = [
            (one.id, one.question, answer.answer, " | ".join(dict.fromkeys(expected[one.id])), f1[one.id],
             answer.probability)
            for one in examples.examples
            if exact[one.id] < 1
            for answer in [_answer_prediction(predictions, one.id)]
        ]  # fmt: skip
        columns = ("id", "question", "prediction", "answers", "f1", "probability")
        return [write_errors(folder, split, columns, sorted(errors, key=lambda error: -error[-1]))]

    @property
    def id_columns(self) -> tuple[str, ...]:
        return ("id",)

    def parse_line(self, line: str) -> Any:
        """Parses ``question<TAB>context``, or a JSON object with both, whose context may have several lines."""
        texts = json_input(line, self.input_columns)
        if texts is None:
            return super().parse_line(line)
        if not all(isinstance(text, str) and text.strip() for text in texts.values()):
            raise ValueError("question and context must be texts that are not empty")
        return tuple(texts.values())

    def sample(self, examples: Dataset) -> tuple[str, ...]:
        return next(((example.question, example.context) for example in examples.examples), ())

    def examples_from_inputs(self, inputs: Sequence[Any]) -> Dataset:
        """Accepts a tuple or list of a question and its context per input; both must not be empty."""
        examples = []
        expected = f"{self.name} takes a question and its context: pass a list of pairs, [(question, context)]"
        for index, value in enumerate(inputs, 1):
            question, context = as_texts(value, index, expected, (2,))
            for name, text in (("question", question), ("context", context)):
                if not text.strip():
                    raise UserError(f"input {index} has an empty {name}: pass a text")
            examples.append(Example(str(index), question, context, ()))
        return Dataset(examples, [], labelled=False)

    def format_predictions(
        self, predictions: Answers, examples: Dataset
    ) -> list[AnswerPrediction] | list[list[AnswerPrediction]]:
        """Returns the answer to each question, or the ``num_answers`` most likely answers, best first."""
        ids = [example.id for example in examples.examples]
        if self.num_answers is None:
            return [_answer_prediction(predictions, id) for id in ids]
        return [[_prediction(candidate) for candidate in predictions.ranked(id)[: self.num_answers]] for id in ids]

    def with_answer_settings(self, settings: Mapping[str, Any]) -> Self:
        """Returns the task with the settings of `ANSWER_SETTINGS` that are not None. Raises UserError."""
        super().with_answer_settings({name: settings[name] for name in settings if name not in ANSWER_SETTINGS})
        for name in ("doc_stride", "max_answer_length", "n_best"):
            if settings.get(name) is not None:
                check_count(name, settings[name])
        changes: dict[str, Any] = {}
        if (threshold := settings.get("null_score_diff_threshold")) is not None:
            if isinstance(threshold, bool) or not isinstance(threshold, int | float) or math.isnan(threshold):
                raise UserError(f"null_score_diff_threshold is {threshold!r}: pass a number")
            changes |= {"may_be_impossible": True, "null_score_diff_threshold": float(threshold)}
        if (length := settings.get("max_answer_length")) is not None:
            changes["max_answer_length"] = length
        if (count := settings.get("n_best")) is not None:
            changes |= {"num_answers": count, "n_best_size": max(self.n_best_size, count + 1)}
        return replace(self, **changes)


SPLITS = ("train", "dev", "test")

SUFFIXES = (*RECORD_SUFFIXES, ".json")
"""Suffixes of files of questions; .json is SQuAD's layout."""


def _answer_prediction(predictions: Answers, id: str) -> AnswerPrediction:
    text = predictions.texts[id]
    return _prediction(next(candidate for candidate in predictions.ranked(id) if candidate.text == text))


def _prediction(candidate: Candidate) -> AnswerPrediction:
    start, end = (candidate.start, candidate.end) if candidate.text else (None, None)
    return AnswerPrediction(candidate.text, start, end, candidate.probability)


@dataclass(frozen=True, kw_only=True)
class CustomQuestionAnswering(ColumnFilesTask, QuestionAnsweringTask):
    """Questions in columns of files or data sets. If a training question has no answer, the task follows SQuAD v2.0."""

    name: str = "span"
    version: str = ""
    data_keys = (*KEYS, *QUESTION_KEYS)

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        return ((self.data.columns.question, self.data.columns.context),)

    def splits(self, folder: Path) -> list[str]:
        return split_names(Path(folder), self.data, SUFFIXES)

    def read(self, folder: Path, split: str) -> Dataset:
        folder = Path(folder)
        if type(self).records is ColumnFilesTask.records and not is_dataset_dict(folder.as_posix()):
            path = split_path(folder, split, self.data, SUFFIXES)
            if file_suffix(path) == ".json":
                return self._read_json(path, split)
        return self._read_records(self.records(folder, split), split, self.data.columns)

    def _allows_impossible(self, split: str) -> bool:
        return self.may_be_impossible or split == "train"

    def fit(self, train: Dataset) -> CustomQuestionAnswering:
        return dataclasses.replace(self, may_be_impossible=self.may_be_impossible or train.may_be_impossible)

    def from_config(self, data: TaskDataConfig) -> Self:
        """Returns the task; questions may be impossible if a threshold is set."""
        return dataclasses.replace(
            super().from_config(data), data=data, may_be_impossible=data.null_score_diff_threshold is not None
        )


TASKS = (
    QuestionAnsweringTask(name="squad", version="1.1"),
    QuestionAnsweringTask(name="squad2", version="2.0", may_be_impossible=True),
    CustomQuestionAnswering(),
)
