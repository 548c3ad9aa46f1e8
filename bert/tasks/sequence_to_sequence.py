"""Sequence to sequence: a decoder writes a target text for a source text, as in translation and summarization."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from tokenizers import Tokenizer

from bert.config import TaskDataConfig
from bert.data.inputs import as_texts
from bert.data.records import Records
from bert.data.sequence_pairs import SequencePairs, tokenize_pairs
from bert.errors import UserError, require, without_surrogates
from bert.metrics import text as text_metrics
from bert.tasks.base import Outputs
from bert.tasks.column_files import ColumnFilesTask
from bert.tasks.readers.columns import KEYS, read_columns
from bert.tasks.readers.parallel_texts import one_line, parallel_splits, read_parallel
from bert.tokenizer.detokenization import detokenize, lowercases

HEAD = "sequence_to_sequence"

METRICS = ("bleu", "chrf", *text_metrics.ROUGE, "exact_match")


@dataclass(frozen=True)
class TextPairs:
    """Sources, and for each the targets that are right: the first is trained on, all are references of the metrics."""

    sources: Sequence[str]
    references: Sequence[Sequence[str]] | None
    ids: Sequence[str]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def labelled(self) -> bool:
        """Whether the targets are known."""
        return self.references is not None

    @property
    def targets(self) -> list[str] | None:
        """The first target of each source."""
        return None if self.references is None else [first for first, *_ in self.references]

    @property
    def groups(self) -> Sequence[str]:
        """The sources: rows with the same one stay together."""
        return self.sources

    def take(self, rows: Sequence[int]) -> Self:
        """The rows of these numbers."""
        return dataclasses.replace(
            self,
            sources=[self.sources[row] for row in rows],
            references=None if self.references is None else [self.references[row] for row in rows],
            ids=[self.ids[row] for row in rows],
        )

    def sentences(self) -> Iterator[str]:
        """All sources, then all targets: both sides of one vocabulary."""
        yield from self.sources
        yield from self.targets or []


class Written(NamedTuple):
    """What a decoder has written: a text for each source, and whether the vocabulary has lower case alone."""

    texts: list[str]
    lowercase: bool


class TargetText(NamedTuple):
    """An answer: the text that was written for a source."""

    target: str


@dataclass(frozen=True, kw_only=True)
class SequenceToSequenceTask(ColumnFilesTask):
    """Texts for texts. The head is the decoder of `bert.model.encoder_decoder`, whose outputs are token ids."""

    name: str
    metrics: tuple[str, ...]
    """The first one chooses the best checkpoint."""
    target_tokenizer: Tokenizer | None = None
    """Vocabulary of the targets; None for that of the sources."""
    head: str = HEAD
    loss: str = "sequence"
    baseline: str = ""
    data_keys: ClassVar[tuple[str, ...]] = (*KEYS, "metrics", "source", "target", "max_target_length")

    @property
    def main_metric(self) -> str:  # type: ignore[override]  # follows from the metrics
        """The first of the metrics."""
        return self.metrics[0]

    @property
    def num_labels(self) -> int:
        return 0

    @property
    def input_columns(self) -> tuple[str, ...]:
        return ("source",)

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        return ((self.data.columns.source,),)

    def from_config(self, data: TaskDataConfig) -> Self:
        metrics = tuple(data.metrics or self.metrics)
        for name in metrics:
            if name not in METRICS:
                raise UserError(f"data.metrics has {name!r}: {self.name} is measured by {', '.join(METRICS)}")
        return dataclasses.replace(self, data=data, metrics=metrics)

    def fit(self, train: TextPairs) -> SequenceToSequenceTask:
        text_metrics.require_libraries(name for name in self.metrics if name != "exact_match")
        if set(self.metrics) & set(text_metrics.ROUGE):
            text_metrics.require_latin(train.targets or ())
        return self

    def splits(self, folder: Path) -> list[str]:
        if self.data.source is not None:
            return parallel_splits(Path(folder), self.data)
        return super().splits(folder)

    def read(self, folder: Path, split: str) -> TextPairs:
        if self.data.source is not None:
            sources, targets = read_parallel(Path(folder), split, self.data)
            references = None if targets is None else [[target] for target in targets]
            return TextPairs(sources, references, [str(row) for row in range(len(sources))])
        try:
            records = self.records(folder, split)
        except UserError as error:
            raise UserError(f"{error}, or data.source and data.target to the ends of parallel files") from None
        columns, names = self.data.columns, "data.columns"
        wanted = {columns.target: f"{names}.target"}
        if columns.references is not None and split != "train":
            wanted[columns.references] = f"{names}.references"
        found = read_columns(
            records,
            {columns.source: f"{names}.source"},
            wanted,
            None if columns.id is None else (columns.id, f"{names}.id"),
            needed=split != "test",
            leave_out=True,
        )
        references = None
        if found.labels is not None:
            rows = zip(found.line_numbers, *found.labels, strict=True)
            references = records.read_each(rows, _references)
        return TextPairs(found.texts[0], references, found.ids, found.notes)

    def features(self, tokenizer: Tokenizer, examples: TextPairs, data: TaskDataConfig) -> SequencePairs:
        lengths = (data.max_length, min(data.max_target_length or data.max_length, data.max_length))
        return tokenize_pairs(
            (tokenizer, self.target_tokenizer or tokenizer), examples.sources, examples.targets, lengths
        )

    def predict(self, outputs: Outputs, features: SequencePairs, examples: TextPairs) -> Written:
        """The token ids of each row, end token included, -> texts on one line each."""
        texts = [detokenize(features.tokenizer, ids.tolist()) for ids in outputs]
        return Written(list(one_line(texts)), lowercases(features.tokenizer))

    def score(self, predictions: Written, examples: TextPairs) -> dict[str, float]:
        return {name: score for name, (score, _) in self._scores(predictions, examples).items()}

    def details(self, predictions: Written, examples: TextPairs) -> dict[str, Any]:
        """sacreBLEU's settings and version of each of its scores."""
        signatures = {name: signature for name, (_, signature) in self._scores(predictions, examples).items()}
        return {"signatures": found} if (found := {k: v for k, v in signatures.items() if v is not None}) else {}

    def _scores(self, predictions: Written, examples: TextPairs) -> dict[str, tuple[float, str | None]]:
        """Each metric in percent, with its signature where it has one; of a vocabulary in lower case without case."""
        texts, references = predictions.texts, require(examples.references, "the targets")
        rouge = text_metrics.rouge(texts, references) if set(self.metrics) & set(text_metrics.ROUGE) else {}
        scores: dict[str, tuple[float, str | None]] = {}
        for name in self.metrics:
            if name == "exact_match":
                scores[name] = (exact_match(texts, references, predictions.lowercase), None)
            elif name in rouge:
                scores[name] = (rouge[name], None)
            else:
                score = {"bleu": text_metrics.bleu, "chrf": text_metrics.chrf}[name]
                found = score(texts, references, predictions.lowercase)
                scores[name] = (found.score, found.signature)
        return scores

    def is_degenerate(self, predictions: Written, examples: TextPairs) -> bool:
        """One text for every source."""
        return len(set(predictions.texts)) == 1 < len(set(examples.targets or []))

    def write_predictions(self, folder: Path, split: str, predictions: Written, examples: TextPairs) -> list[Path]:
        if len(examples) != len(predictions.texts):
            raise ValueError(f"{len(examples)} rows, {len(predictions.texts)} predictions")
        path = folder / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{text}\n" for text in predictions.texts), encoding="utf-8", newline="\n")
        return [path]

    def examples_from_inputs(self, inputs: Sequence[Any]) -> TextPairs:
        wanted = f"{self.name} takes a single text: pass a string"
        texts = [as_texts(given, index, wanted)[0] for index, given in enumerate(inputs, 1)]
        if self.data.source is not None:  # the lines of parallel files have no white space around them
            texts = [text.strip() for text in texts]
        return TextPairs(texts, None, [str(row) for row in range(len(texts))])

    def format_predictions(self, predictions: Written, examples: Any) -> list[TargetText]:
        return [TargetText(text) for text in predictions.texts]


def exact_match(texts: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool) -> float:
    """Percent of texts that equal one of their references, but for spaces, and for case if ``lowercase``."""

    def plain(text: str) -> str:
        return "".join(text.split()).lower() if lowercase else "".join(text.split())

    hits = [plain(text) in map(plain, right) for text, right in zip(texts, references, strict=True)]
    return 100 * float(np.mean(hits))


def _references(records: Records, line_number: int, target: Any, more: Any = None) -> list[str]:
    """The target of a row, and the further ones that it may have. Raises UserError."""
    texts = [target, *(more if isinstance(more, list) else [] if more is None else [more])]
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            wrong = repr(text)[:40]
            raise records.error(line_number, f"the target {wrong} is no text: write one, or remove the {records.unit}")
    return [without_surrogates(text) for text in texts]


TASKS = (
    SequenceToSequenceTask(name="translation", metrics=("bleu", "chrf")),
    SequenceToSequenceTask(name="summarization", metrics=("rouge2", "rouge1", "rougeL")),
    SequenceToSequenceTask(name="multi30k", metrics=("bleu", "chrf")),
    SequenceToSequenceTask(name="aeslc", metrics=("rouge1", "rouge2", "rougeL")),
)
