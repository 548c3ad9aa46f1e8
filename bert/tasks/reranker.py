"""Rerankers: models that read a query together with a document and return a score."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from tokenizers import Tokenizer

from bert.config import FinetuneConfig, RerankerConfig, TaskDataConfig
from bert.data import encoding
from bert.data.inputs import as_texts
from bert.data.records import Records
from bert.data.rows import ChoiceRows, TokenRows
from bert.errors import UserError, WarningText, require
from bert.files import write_tsv
from bert.metrics import retrieval
from bert.tasks.base import Outputs
from bert.tasks.columns import KEYS, ColumnFilesTask
from bert.tasks.sequence_classification.classification import Score
from bert.tasks.splits import ExampleColumns
from bert.tasks.text_pairs import TextExamples, check_num_negatives, read_queries, read_scored_pairs


@dataclass(frozen=True)
class RankedExamples(ExampleColumns):
    """R queries with their documents."""

    queries: list[str]
    documents: list[list[str]]
    relevance: list[np.ndarray] | None
    """The relevance of each query's documents, float32 from 0 to 1; None if it is unknown."""
    ids: list[str]
    notes: tuple[str, ...] = ()
    columns: ClassVar[tuple[str, ...]] = ("queries", "documents", "relevance", "ids")

    @property
    def labelled(self) -> bool:
        """Whether the relevance is known."""
        return self.relevance is not None

    @property
    def known_relevance(self) -> list[np.ndarray]:
        """``relevance`` of a labelled split."""
        return require(self.relevance, "the relevance")

    def sentences(self) -> Iterator[str]:
        """Yields all queries, then all documents."""
        yield from self.queries
        for texts in self.documents:
            yield from texts


@dataclass(frozen=True, kw_only=True)
class RerankerTask(ColumnFilesTask):
    """One score for a query and a document. A row is a query with all of its documents."""

    name: str = "reranker"
    settings: RerankerConfig = field(default_factory=RerankerConfig)
    kind: ClassVar[str] = "reranker"
    architecture: ClassVar[str] = "BertForSequenceClassification"  # the only output is the score of a pair
    answer_type: ClassVar[type] = Score
    main_metric: str = retrieval.NAMES[0]
    baseline: str = "chance"
    data_keys: ClassVar[tuple[str, ...]] = (*KEYS, "score_range")
    num_labels = 1
    problem_type = "regression"
    input_columns = ("query", "document")

    def from_config(self, data: TaskDataConfig) -> Self:
        return dataclasses.replace(self, data=data)

    @property
    def calls(self) -> frozenset[str]:
        return super().calls | {"rank"}

    @property
    def bundle_fields(self) -> dict[str, Any]:
        return {"texts_per_input": 2}

    def with_settings(self, config: FinetuneConfig) -> Self:
        return dataclasses.replace(self, settings=config.reranker)

    # Files

    def read(self, folder: Path, split: str) -> RankedExamples:
        """Groups the rows by query. The first row determines whether rows have a positive or a score."""
        records, names = self.checked_records(folder, split), self.data.columns
        rows = list(records.rows)
        records = dataclasses.replace(records, rows=iter(rows))
        has_scores = bool(rows) and names.positive not in rows[0][1] and self._document_column in rows[0][1]
        if has_scores:
            lowest, highest = self.data.score_range or (0.0, 1.0)
            pairs = read_scored_pairs(records, names, self._document_column, (lowest, highest), needed=split != "test")
            scores = None if pairs.scores is None else (pairs.scores - lowest) / (highest - lowest)
            documents = [[text] for text in pairs.documents]
            relevance = None if scores is None else [np.array([score]) for score in scores]
        else:
            hint = f"; pairs with a score have {self._document_column!r} and {names.label!r} in its place"
            max_negatives = self.settings.num_negatives if split == "train" else None
            pairs = read_queries(records, names, max_negatives, hint)
            if split == "train":
                check_num_negatives(records, pairs.negatives, max_negatives, "reranker.num_negatives")
            documents = [[positive, *more] for positive, more in zip(pairs.documents, pairs.negatives, strict=True)]
            relevance = [np.arange(len(texts)) == 0 for texts in documents]
        return self._checked(records, split, _grouped(pairs, documents, relevance))

    @property
    def _document_column(self) -> str:
        """The column of documents in pairs with a score."""
        return self.data.columns.text_b or "document"

    def _checked(self, records: Records, split: str, examples: RankedExamples) -> RankedExamples:
        """Removes training queries without a loss. Raises UserError if none is left."""
        if examples.relevance is None:
            return examples
        fix = "add negatives, for instance with bert mine"
        if not any(relevance.any() for relevance in examples.relevance):
            raise UserError(f"{records.source} has no relevant document (a score above the lowest one): add some")
        if split == "train" and self.settings.loss != "binary":
            usable = [row for row, relevance in enumerate(examples.relevance) if np.ptp(relevance) > 0]
            if not usable:
                raise UserError(f"{records.source} has no query with documents of different relevance: {fix}")
            if skipped := len(examples) - len(usable):
                note = WarningText(f"{skipped:,} training queries whose documents are equally relevant are left out")
                examples = dataclasses.replace(examples.take(usable), notes=(*examples.notes, note))
        elif split == "train" and np.ptp(np.concatenate(examples.known_relevance)) == 0:
            raise UserError(f"all documents of {records.source} are equally relevant: {fix}")
        return examples

    def features(self, tokenizer: Tokenizer, examples: RankedExamples, data: TaskDataConfig) -> ChoiceRows:
        pairs = [
            (query, document)
            for query, documents in zip(examples.queries, examples.documents, strict=True)
            for document in documents
        ]
        offsets = np.cumsum([0, *map(len, examples.documents)], dtype=np.int64)
        labels = None if examples.relevance is None else np.concatenate(examples.relevance)
        rows = encoding.tokenize(tokenizer, pairs, data.max_length, pair_truncation=data.pair_truncation)
        return ChoiceRows(rows, offsets, labels)

    # Predictions

    def predict(self, outputs: Outputs, features: Any, examples: RankedExamples) -> list[np.ndarray]:
        """Returns the scores of the documents of each query for outputs [C]; NaN counts as 0."""
        pairs = zip(outputs, examples.documents, strict=True)
        return [np.nan_to_num(scores[: len(documents)]) for scores, documents in pairs]

    def score(self, predictions: list[np.ndarray], examples: RankedExamples) -> dict[str, float]:
        """Returns nDCG and MRR over the documents of each query."""
        return retrieval.reranking_scores(predictions, examples.known_relevance)

    def baseline_scores(self, examples: RankedExamples) -> dict[str, float]:
        """Returns the scores of documents in random order."""
        return retrieval.random_reranking_scores(examples.known_relevance)

    def is_degenerate(self, predictions: list[np.ndarray], examples: RankedExamples) -> bool:
        """Returns whether the main metric is no better than chance."""
        scores, baseline = self.score(predictions, examples), self.baseline_scores(examples)
        return scores[self.main_metric] <= baseline[self.main_metric] < 1

    def write_predictions(
        self, folder: Path, split: str, predictions: list[np.ndarray], examples: RankedExamples
    ) -> list[Path]:
        """Writes SPLIT.tsv: the query's id, and number, score, relevance and rank of each of its documents."""
        if list(map(len, examples.documents)) != list(map(len, predictions)):
            raise ValueError(f"{len(examples)} queries, {len(predictions)} predictions, or other documents")
        known = ["relevance"] if examples.labelled else []
        rows = [[self.data.columns.id or "index", "document", "score", *known, "rank"]]
        for query, scores in enumerate(predictions):
            ranks = np.argsort(np.argsort(-scores, kind="stable"), kind="stable") + 1
            for number, (score, rank) in enumerate(zip(scores, ranks, strict=True)):
                right = [f"{examples.known_relevance[query][number]:g}"] if known else []
                rows.append([examples.ids[query], str(number), f"{score:.6f}", *right, str(rank)])
        return [write_tsv(folder / f"{split}.tsv", rows)]

    # New inputs

    def pair_score(self, answer: Score, label: str) -> float:
        return answer.score

    def blank_rows(self, rows: TokenRows) -> ChoiceRows:
        return ChoiceRows(rows, np.arange(len(rows) + 1), None)

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        names, document = self.data.columns, self._document_column
        return ((names.query, document), (names.text_a, document), ("text_a", "text_b"))

    def sample(self, examples: RankedExamples) -> tuple[str, ...]:
        return next(((query, texts[0]) for query, texts in zip(examples.queries, examples.documents, strict=True)), ())

    def examples_from_inputs(self, inputs: Sequence[Any]) -> RankedExamples:
        """Accepts a tuple or list of a query and a document per input."""
        expected = f"{self.name} takes a query and a document: pass a list of pairs, [(query, document)]"
        pairs = [as_texts(value, index, expected, (2,)) for index, value in enumerate(inputs, 1)]
        ids = [str(row) for row in range(len(pairs))]
        return RankedExamples([query for query, _ in pairs], [[document] for _, document in pairs], None, ids)

    def format_predictions(self, predictions: list[np.ndarray], examples: RankedExamples) -> list[Score]:
        return [Score(float(scores[0])) for scores in predictions]


def _grouped(
    pairs: TextExamples, documents: Sequence[Sequence[str]], relevance: Sequence[np.ndarray] | None
) -> RankedExamples:
    """Returns unique queries with the documents of all of their rows; repeated documents have the highest relevance."""
    relevance_of: dict[str, dict[str, float]] = {}
    ids: dict[str, str] = {}
    changed = 0
    for row, query in enumerate(pairs.queries):
        own = relevance_of.setdefault(query, {})
        ids.setdefault(query, pairs.ids[row])
        for place, document in enumerate(documents[row]):
            value = 0.0 if relevance is None else float(relevance[row][place])
            changed += document in own and own[document] != value
            own[document] = max(value, own.get(document, 0.0))
    note = f"{changed:,} documents have a lower relevance for the same query elsewhere: the highest one counts"
    return RankedExamples(
        list(relevance_of),
        [list(own) for own in relevance_of.values()],
        None if relevance is None else [np.array(list(own.values()), np.float32) for own in relevance_of.values()],
        list(ids.values()),
        (*pairs.notes, *([note] if changed else [])),
    )


TASKS = (RerankerTask(),)
