"""Embeddings: queries with their documents, or pairs of texts with a score, whose cosines are trained."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from tokenizers import Tokenizer

from bert import metrics
from bert.config import EmbeddingConfig, FinetuneConfig, TaskDataConfig
from bert.data import features
from bert.data.features import Features, Rows
from bert.data.inputs import as_texts
from bert.data.records import Records
from bert.data.text_groups import number_texts, tokenize_groups
from bert.errors import UserError, require, without_surrogates
from bert.files import write_tsv
from bert.metrics import retrieval
from bert.tasks.base import Outputs
from bert.tasks.column_files import ColumnFilesTask
from bert.tasks.readers.columns import KEYS, read_columns
from bert.tasks.sequence import file_prefix

HEAD = "embedding"


@dataclass(frozen=True)
class TextExamples:
    """R queries, each with the document that is right for it; or pairs of texts; or texts alone."""

    queries: list[str]
    positives: list[str] | None
    """The documents, or the second texts of pairs; None for texts alone."""
    negatives: list[list[str]]
    scores: np.ndarray | None
    """[R] float32 of pairs; None where there are none."""
    ids: list[str]
    labelled: bool
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def groups(self) -> Sequence[str]:
        """The queries: rows with the same one stay together."""
        return self.queries

    def take(self, rows: Sequence[int]) -> Self:
        """The rows of these numbers."""
        return dataclasses.replace(
            self,
            queries=[self.queries[row] for row in rows],
            positives=None if self.positives is None else [self.positives[row] for row in rows],
            negatives=[self.negatives[row] for row in rows],
            scores=None if self.scores is None else self.scores[list(rows)],
            ids=[self.ids[row] for row in rows],
        )

    def sentences(self) -> Iterator[str]:
        """All queries, then all documents."""
        yield from self.queries
        yield from self.positives or []
        for texts in self.negatives:
            yield from texts

    @property
    def documents(self) -> list[str]:
        """The documents, or second texts, of the rows."""
        return require(self.positives, "the documents")

    @property
    def known_scores(self) -> np.ndarray:
        """The scores of pairs that have them."""
        return require(self.scores, "the scores")


class Cosines(NamedTuple):
    """The cosine of each row [R]; and of a search the rank of its document, and the row of the document found first."""

    cosines: np.ndarray
    ranks: np.ndarray | None = None
    first: np.ndarray | None = None


class Embedding(NamedTuple):
    """An answer: the embedding of a text."""

    embedding: list[float]


@dataclass(frozen=True, kw_only=True)
class EmbeddingTask(ColumnFilesTask):
    """One vector a text. The head pools the encoder's hidden states as `bert.interchange.pooling.Pooling`."""

    name: str = "embedding"
    settings: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    head: str = HEAD
    loss: str = HEAD
    baseline: str = "chance"
    data_keys: ClassVar[tuple[str, ...]] = (*KEYS, "score_range")

    @property
    def main_metric(self) -> str:  # type: ignore[override]  # follows from the rows
        """Spearman's correlation of pairs with scores, else nDCG@10."""
        return "spearman" if self.settings.has_scores else retrieval.NAMES[0]

    @property
    def num_labels(self) -> int:
        return 0

    @property
    def input_columns(self) -> tuple[str, ...]:
        return ("text",)

    def from_config(self, data: TaskDataConfig) -> Self:
        return dataclasses.replace(self, data=data)

    def with_settings(self, config: FinetuneConfig) -> Self:
        """The task with the settings of a run. Raises UserError for those that do not fit."""
        if not config.embedding.has_scores and config.data.score_range is not None:
            raise UserError("data.score_range is set, but embedding.loss is in_batch, which has no scores: remove it")
        if config.training.tokens_per_batch is not None:
            raise UserError(
                f"training.tokens_per_batch is {config.training.tokens_per_batch}, but the negatives of {self.name} "
                "would depend on the lengths of texts: set training.batch_size in its place"
            )
        return dataclasses.replace(self, settings=config.embedding)

    # Files

    def read(self, folder: Path, split: str) -> TextExamples:
        records = self.records(Path(folder), split)
        return self._read_pairs(records, split) if self.settings.has_scores else self._read_queries(records, split)

    def _read_queries(self, records: Records, split: str) -> TextExamples:
        """Queries with their documents, and negatives where there are some. Raises UserError."""
        names = self.data.columns
        rows = list(records.rows)
        for line_number, fields in rows:
            if names.query in fields and fields.get(names.positive) in (None, ""):
                raise records.error(
                    line_number,
                    f"the query has no {names.positive!r}: write the document that answers it, or remove the "
                    f"{records.unit}; of pairs with scores set embedding.loss to cosent",
                )
        found = read_columns(
            dataclasses.replace(records, rows=iter(rows)),
            {names.query: "data.columns.query", names.positive: "data.columns.positive"},
            {},
            None if names.id is None else (names.id, "data.columns.id"),
        )
        queries, positives = found.texts
        negatives = [
            _negatives(records, line_number, fields.get(names.negatives), names.negatives, positive)
            for (line_number, fields), positive in zip(rows, positives, strict=True)
        ]
        most = max(map(len, negatives))
        if (wanted := self.settings.num_negatives) is not None and split == "train" and wanted > most:
            raise UserError(
                f"embedding.num_negatives is {wanted}, and no row of {records.source} has more than {most} negatives: "
                "set it to at most as many, or remove it"
            )
        negatives = [texts[:wanted] for texts in negatives]
        return TextExamples(queries, positives, negatives, None, found.ids, True, found.notes)

    def _read_pairs(self, records: Records, split: str) -> TextExamples:
        """Pairs of texts with a score, which only a split to predict may lack. Raises UserError."""
        names = self.data.columns
        if names.text_b is None:
            raise UserError(
                f"data.columns.text_b is not set, and embedding.loss {self.settings.loss} compares two texts: set it "
                "to the column of the second one"
            )
        found = read_columns(
            records,
            {names.text_a: "data.columns.text_a", names.text_b: "data.columns.text_b"},
            {names.label: "data.columns.label"},
            None if names.id is None else (names.id, "data.columns.id"),
            needed=split != "test",
        )
        scores = None
        if found.labels is not None:
            cells = zip(found.line_numbers, found.labels[0], strict=True)
            scores = np.array([self._score(records, line_number, cell) for line_number, cell in cells], np.float32)
        texts_a, texts_b = found.texts
        none: list[list[str]] = [[] for _ in texts_a]
        return TextExamples(texts_a, texts_b, none, scores, found.ids, scores is not None, found.notes)

    @property
    def _range(self) -> tuple[float, float]:
        """Least and greatest score: without ``data.score_range`` any number, for a regression on cosines 0 to 1."""
        if self.data.score_range is not None:
            return self.data.score_range[0], self.data.score_range[1]
        return (0.0, 1.0) if self.settings.loss == "cosine" else (-math.inf, math.inf)

    def _score(self, records: Records, line_number: int, cell: Any) -> float:
        lowest, highest = self._range
        described = f"{self.data.columns.label} is {str(cell)[:40]!r}"
        try:
            score = float(str(cell))
        except ValueError:
            raise records.error(line_number, f"{described}: it must be a number: fix it") from None
        if not (math.isfinite(score) and lowest <= score <= highest):
            limits = "finite" if math.isinf(highest) else f"from {lowest:g} to {highest:g}"
            raise records.error(line_number, f"{described}: it must be {limits}: fix it, or set data.score_range")
        return score

    def features(self, tokenizer: Tokenizer, examples: TextExamples, data: TaskDataConfig) -> Rows:
        """Texts alone are rows of their own; else each row is a query with its documents."""
        queries = self._cased(examples.queries)
        if examples.positives is None:
            return features.tokenize(tokenizer, queries, data.max_length)
        documents = [
            self._cased([positive, *negatives])
            for positive, negatives in zip(examples.positives, examples.negatives, strict=True)
        ]
        scores = examples.scores
        if scores is not None and self.settings.loss == "cosine":
            lowest, highest = self._range
            scores = ((scores - lowest) / (highest - lowest)).astype(np.float32)
        return tokenize_groups(
            tokenizer, queries, documents, scores, data.max_length, data.buckets, has_loss=examples.labelled
        )

    def _cased(self, texts: Sequence[str]) -> list[str]:
        return [text.lower() for text in texts] if self.settings.lowercase else list(texts)

    # Predictions

    def predict(self, outputs: Outputs, features: Any, examples: TextExamples) -> Any:
        """[texts * D] of each row, or [D] of texts alone -> `Cosines`, or the embeddings of texts alone as they are."""
        if isinstance(features, Features):
            return outputs
        texts = 1 + int(features.documents.choices.max())
        vectors = np.reshape(outputs, (len(outputs), texts, -1))[:, :2]
        queries, documents = (retrieval.normalized(vectors[:, side]) for side in range(2))
        cosines = np.einsum("rd,rd->r", queries, documents)
        if self.settings.has_scores:
            return Cosines(cosines)
        positives = number_texts(examples.documents)
        _, rows = np.unique(positives, return_index=True)
        ranks, first = retrieval.find_ranks(queries, documents[rows], positives, number_texts(examples.queries))
        return Cosines(cosines, ranks, rows[first])

    def score(self, predictions: Cosines, examples: TextExamples) -> dict[str, float]:
        """nDCG, MRR and recall of the queries among the documents of the split; or correlations with the scores."""
        if predictions.ranks is None:
            return metrics.compute_metrics(("spearman", "pearson"), predictions.cosines, examples.known_scores)
        positives, queries = number_texts(examples.documents), number_texts(examples.queries)
        return retrieval.retrieval_scores(predictions.ranks, positives, queries)

    def baseline_scores(self, examples: TextExamples) -> dict[str, float]:
        """Of documents in random order; correlations are 0."""
        if self.settings.has_scores:
            return {"spearman": 0.0, "pearson": 0.0}
        counts = Counter(query for query, _ in set(zip(examples.queries, examples.documents, strict=True)))
        return retrieval.chance_scores(list(counts.values()), len(set(examples.documents)))

    def is_degenerate(self, predictions: Cosines, examples: TextExamples) -> bool:
        """No better than chance."""
        ours, theirs = self.score(predictions, examples), self.baseline_scores(examples)
        return ours[self.main_metric] <= theirs[self.main_metric] < 1

    def write_predictions(self, folder: Path, split: str, predictions: Cosines, examples: TextExamples) -> list[Path]:
        """SPLIT.tsv: the cosine of each row, with its score; or with the rank of its document, and the id of the row
        whose document is found first."""
        if len(examples) != len(predictions.cosines):
            raise ValueError(f"{len(examples)} rows, {len(predictions.cosines)} predictions")
        columns = {self.data.columns.id or "index": examples.ids}
        columns["cosine"] = [f"{cosine:.6f}" for cosine in predictions.cosines]
        if examples.scores is not None:
            columns["score"] = [np.format_float_positional(score, trim="-") for score in examples.scores]
        if predictions.ranks is not None:
            columns["rank"] = list(map(str, predictions.ranks.tolist()))
            columns["first"] = [examples.ids[row] for row in require(predictions.first, "the first documents")]
        return [write_tsv(folder / f"{split}.tsv", [list(columns), *zip(*columns.values(), strict=True)])]

    def write_details(self, folder: Path, split: str, predictions: Cosines, examples: TextExamples) -> list[Path]:
        """Of a search errors.tsv, ``SPLIT_errors.tsv`` of splits other than dev: the queries whose document is not
        found first, the worst ranks first, with that which is."""
        if predictions.ranks is None:
            return []
        rows: list[tuple[str, ...]] = [("query", "positive", "first", "rank")]
        for row in np.argsort(-predictions.ranks, kind="stable"):
            if predictions.ranks[row] > 1:
                first = examples.documents[require(predictions.first, "the first documents")[row]]
                texts = (examples.queries[row], examples.documents[row], first)
                rows.append((*(" ".join(text.split()) for text in texts), str(predictions.ranks[row])))
        return [write_tsv(folder / f"{file_prefix(split)}errors.tsv", rows)]

    # New inputs

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        columns = self.data.columns
        return (("text",), (columns.text_a if self.settings.has_scores else columns.query,))

    def input_of_row(self, fields: Mapping[str, Any]) -> Any:
        [name] = self.columns_among(fields)
        return self.text_of(name, fields[name])

    def examples_from_inputs(self, inputs: Sequence[Any]) -> TextExamples:
        wanted = f"{self.name} takes a single text: pass a string"
        texts = [as_texts(given, index, wanted)[0] for index, given in enumerate(inputs, 1)]
        return TextExamples(texts, None, [[] for _ in texts], None, [str(row) for row in range(len(texts))], False)

    def format_predictions(self, predictions: Outputs, examples: Any) -> list[Embedding]:
        return [Embedding(list(map(float, vector))) for vector in predictions]


def _negatives(records: Records, line_number: int, cell: Any, name: str, positive: str) -> list[str]:
    """The negatives of a row: none, a text, or a list of texts. Raises UserError."""
    texts = cell if isinstance(cell, list) else [] if cell in (None, "") else [cell]
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            wrong = repr(text)[:40]
            raise records.error(
                line_number, f"{name} has {wrong}, which is no text: write one, or remove it from the {records.unit}"
            )
        if text == positive:
            raise records.error(
                line_number, f"{name} has the positive itself ({text[:40]!r}): remove it from the {records.unit}"
            )
    return [without_surrogates(text) for text in texts]


TASKS = (EmbeddingTask(),)
