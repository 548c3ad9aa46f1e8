"""Embeddings, trained on queries with documents, pairs of texts with a score, or labelled texts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from tokenizers import Tokenizer

from bert import metrics
from bert.config import EmbeddingConfig, FinetuneConfig, TaskDataConfig
from bert.config.options import LEXICAL_POOLING, TEACHER_LOSSES, LateInteractionConfig
from bert.data.inputs import as_texts
from bert.data.late_interaction import tokenize_scored, tokenize_scored_queries
from bert.data.long_texts import LONG_TEXT_KEYS, LongTexts, encode_texts, tokenize_queries
from bert.data.records import Records
from bert.data.rows import QueryDocumentRows, Rows, TokenRows, number_texts
from bert.data.windows import WindowedRows
from bert.errors import UserError, require
from bert.files import write_tsv
from bert.metrics import retrieval
from bert.model.late_interaction import MAX_SIM, LateInteraction
from bert.model.pooling import Pooling
from bert.tasks.base import Outputs
from bert.tasks.columns import KEYS, ColumnFilesTask, label_text, read_columns
from bert.tasks.error_files import file_prefix
from bert.tasks.text_pairs import TextExamples, check_num_negatives, read_queries, read_scored_pairs, with_negatives


def make_pooling(settings: EmbeddingConfig, max_length: int) -> Pooling:
    """Returns the pooling of a model that is trained with these settings."""
    more: dict[str, Any] = {"mode": "max", "num_log1p": 1, "similarity": "dot"} if settings.is_lexical else {}
    if settings.has_token_vectors:
        more = {"similarity": MAX_SIM, "interaction": make_interaction(settings.late_interaction)}
    return Pooling(
        **{"mode": settings.pooling or "mean", **more},
        normalize=bool(settings.normalize),
        max_length=max_length,
        lowercase=bool(settings.lowercase),
        query_prompt=settings.query_prompt or "",
        document_prompt=settings.document_prompt or "",
    )


def make_interaction(settings: LateInteractionConfig) -> LateInteraction:
    """Returns the late interaction of a model that is trained with these settings."""
    return LateInteraction(
        query_length=settings.query_length,
        expanded_length=settings.expanded_length or None,
        attends_to_expansion=bool(settings.attends_to_expansion),
        expansion_token=settings.expansion_token,
        skipped_tokens=tuple(settings.skipped_tokens or ()),
        skipping_roles=("document",) if settings.skipping_roles is None else tuple(settings.skipping_roles),
    )


def pooling_name(pooling: Pooling) -> str | None:
    """Returns the value of ``embedding.pooling`` for a pooling; None for weights of words by another formula."""
    if not pooling.is_lexical:
        return pooling.mode
    return LEXICAL_POOLING if (pooling.mode, pooling.num_log1p) == ("max", 1) else None


class Similarities(NamedTuple):
    """The similarity of each row [R]; for queries also the rank of the positive, and the row of the first document."""

    similarities: np.ndarray
    ranks: np.ndarray | None = None
    first: np.ndarray | None = None


class Embedding(NamedTuple):
    """An answer: the embedding of a text, or the embeddings of its tokens."""

    embedding: list[Any]


@dataclass(frozen=True, kw_only=True)
class EmbeddingTask(ColumnFilesTask):
    """One vector per text or per token, made from the hidden states of the encoder (`bert.model.pooling.Pooling`).

    Attributes:
        similarity: one of `bert.model.pooling.SIMILARITIES`, by which embeddings are compared, or of
            `bert.model.late_interaction.TOKEN_SIMILARITIES`.
        interaction: which tokens have a vector; None for one vector per text.
    """

    name: str = "embedding"
    settings: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    similarity: str = "cosine"
    interaction: LateInteraction | None = None
    kind: ClassVar[str] = "embedding"
    answer_type: ClassVar[type] = Embedding
    baseline: str = "chance"
    data_keys: ClassVar[tuple[str, ...]] = (*KEYS, *LONG_TEXT_KEYS, "score_range")
    num_labels = 0
    input_columns = ("text",)

    @property
    def architecture(self) -> str:  # type: ignore[override]  # follows from the pooling
        """The encoder, with the MLM head if it computes the weights of words."""
        return "BertForMaskedLM" if self.settings.is_lexical else "Bert"

    @property
    def main_metric(self) -> str:  # type: ignore[override]  # follows from the rows
        """Spearman's correlation for pairs with scores, otherwise nDCG@10."""
        return "spearman" if self.settings.has_scores else retrieval.NAMES[0]

    @property
    def calls(self) -> frozenset[str]:
        return super().calls | {"embed"}

    def from_config(self, data: TaskDataConfig) -> Self:
        return dataclasses.replace(self, data=data)

    def with_settings(self, config: FinetuneConfig) -> EmbeddingTask:
        """Returns the task with the section ``embedding``. Raises UserError for keys that do not fit it."""
        if not config.embedding.has_scores and config.data.score_range is not None:
            raise UserError(
                f"data.score_range is set, but embedding.loss is {config.embedding.loss}, whose rows have no scores in "
                "a range: remove it"
            )
        if config.training.tokens_per_batch is not None:
            raise UserError(
                f"training.tokens_per_batch is {config.training.tokens_per_batch}, but the negatives of {self.name} "
                "would depend on the lengths of texts: set training.batch_size in its place"
            )
        similarity = "dot" if config.embedding.is_lexical else "cosine"
        if config.embedding.loss == "same_label":
            return LabelledTextsTask(name=self.name, data=self.data, settings=config.embedding, similarity=similarity)
        if not config.embedding.has_token_vectors:
            return dataclasses.replace(self, settings=config.embedding, similarity=similarity, interaction=None)
        if config.data.long_texts != "cut":
            raise UserError(
                f"data.long_texts is {config.data.long_texts}, but embedding.pooling is tokens, with which texts are "
                "cut: remove it, and split long texts"
            )
        interaction = make_interaction(config.embedding.late_interaction)
        if (length := max(interaction.query_length or 0, interaction.expanded_length or 0)) > config.data.max_length:
            raise UserError(
                f"queries have up to {length} tokens (embedding.late_interaction), but data.max_length is "
                f"{config.data.max_length}: raise it, or lower embedding.late_interaction.query_length"
            )
        return dataclasses.replace(self, settings=config.embedding, similarity=MAX_SIM, interaction=interaction)

    # Files

    def read(self, folder: Path, split: str) -> TextExamples:
        names, settings = self.data.columns, self.settings
        records = self._for_this_loss(self.checked_records(folder, split))
        if not settings.has_scores:
            hint = "; of pairs with scores set embedding.loss to cosent"
            has_teacher = settings.loss in TEACHER_LOSSES and split != "test"
            examples = read_queries(records, names, settings.num_negatives, hint, has_teacher)
            if split == "train" and settings.loss != "in_batch":
                examples = with_negatives(records, examples, f"embedding.loss {settings.loss}")
            if split == "train":
                check_num_negatives(records, examples.negatives, settings.num_negatives, "embedding.num_negatives")
            return examples
        if names.text_b is None:
            raise UserError(
                f"data.columns.text_b is not set, and embedding.loss {settings.loss} compares two texts: set it "
                "to the column of the second one"
            )
        return read_scored_pairs(records, names, names.text_b, self._range, needed=split != "test")

    def _for_this_loss(self, records: Records) -> Records:
        """Returns the rows. Raises UserError if the first row has columns for another kind of loss."""
        first, names, loss = next(records.rows, None), self.data.columns, self.settings.loss
        if first is None:
            return records
        line_number, fields = first
        are_queries = {names.query, names.positive} <= fields.keys()
        are_pairs = {names.text_a, names.text_b, names.label} <= fields.keys()
        if self.settings.has_scores and are_queries and not are_pairs:
            raise records.error(
                line_number,
                f"a query with a document, and embedding.loss {loss} reads pairs with scores: set it to in_batch",
            )
        if not self.settings.has_scores and are_pairs and not are_queries:
            raise records.error(
                line_number,
                f"a pair with a score, and embedding.loss {loss} reads queries with documents: set it to cosent",
            )
        return dataclasses.replace(records, rows=itertools.chain([first], records.rows))

    @property
    def _range(self) -> tuple[float, float]:
        """Lowest and highest score. Without ``data.score_range``: 0 and 1 for the loss cosine, otherwise any number."""
        if self.data.score_range is not None:
            return self.data.score_range[0], self.data.score_range[1]
        return (0.0, 1.0) if self.settings.loss == "cosine" else (-math.inf, math.inf)

    def features(self, tokenizer: Tokenizer, examples: TextExamples, data: TaskDataConfig) -> Rows:
        """Returns a row per text for single texts, otherwise a row per query with its documents."""
        queries = self._cased(examples.queries, self.settings.query_prompt or "")
        if examples.positives is None and self.interaction is not None:
            length = self.interaction.max_length("query") or data.max_length
            return tokenize_scored(tokenizer, queries, length, self.interaction, "query")
        if examples.positives is None:
            return encode_texts(tokenizer, queries, LongTexts.from_config(data))
        documents = [
            self._cased([positive, *negatives], self.settings.document_prompt or "")
            for positive, negatives in zip(examples.positives, examples.negatives, strict=True)
        ]
        scores = examples.scores
        if scores is not None and self.settings.loss == "cosine":
            lowest, highest = self._range
            scores = ((scores - lowest) / (highest - lowest)).astype(np.float32)
        if scores is not None and scores.ndim == 2:
            scores = scores[:, : max(map(len, documents))]
        has_loss = examples.labelled and (scores is not None or self.settings.loss not in TEACHER_LOSSES)
        if self.interaction is not None:
            settings = (data.max_length, self.interaction, has_loss)
            return tokenize_scored_queries(tokenizer, queries, documents, scores, *settings)
        return tokenize_queries(tokenizer, queries, documents, scores, LongTexts.from_config(data), has_loss)

    def _cased(self, texts: Sequence[str], prompt: str = "") -> list[str]:
        texts = [prompt + text for text in texts]
        return [text.lower() for text in texts] if self.settings.lowercase else texts

    # Predictions

    def predict(self, outputs: Outputs, features: Any, examples: TextExamples) -> Any:
        """Returns `Similarities` for rows of several texts [texts * D]; embeddings [D] of single texts unchanged.

        With a vector per token, rows are [texts, T, E], and the embeddings of single texts [T, E].
        """
        if not isinstance(features, QueryDocumentRows):
            return outputs
        if self.interaction is None:
            texts = 1 + int(features.documents.choices.max())
            vectors = np.reshape(outputs, (len(outputs), texts, -1))[:, :2]
            queries, documents = (self._comparable(vectors[:, side]) for side in range(2))
        else:
            queries, documents = (_as_objects([_vectors(row[side]) for row in outputs]) for side in range(2))
        similarities = self._compared.compare_pairs(queries, documents)
        if self.settings.has_scores:
            return Similarities(similarities)
        positives = number_texts(examples.documents)
        _, rows = np.unique(positives, return_index=True)
        numbers = number_texts(examples.queries)
        ranks, first = retrieval.find_ranks(queries, documents[rows], positives, numbers, self._compared.compare)
        return Similarities(similarities, ranks, rows[first])

    def _comparable(self, vectors: np.ndarray) -> np.ndarray:
        """Returns vectors [R, D] for `_compared`, of length 1 for cosines."""
        return retrieval.normalized(vectors) if self.similarity == "cosine" else vectors

    @property
    def _compared(self) -> Pooling:
        """The pooling whose `compare` is for vectors of `_comparable`."""
        return Pooling(similarity="dot" if self.similarity == "cosine" else self.similarity)

    def score(self, predictions: Similarities, examples: TextExamples) -> dict[str, float]:
        """Returns nDCG, MRR and recall among the documents of the split, or correlations with the scores."""
        if predictions.ranks is None:
            return metrics.compute_metrics(("spearman", "pearson"), predictions.similarities, examples.known_scores)
        positives, queries = number_texts(examples.documents), number_texts(examples.queries)
        return retrieval.retrieval_scores(predictions.ranks, positives, queries)

    def baseline_scores(self, examples: TextExamples) -> dict[str, float]:
        """Returns the scores of documents in random order; correlations are 0."""
        if self.settings.has_scores:
            return {"spearman": 0.0, "pearson": 0.0}
        counts = Counter(query for query, _ in set(zip(examples.queries, examples.documents, strict=True)))
        return retrieval.chance_scores(list(counts.values()), len(set(examples.documents)))

    def is_degenerate(self, predictions: Similarities, examples: TextExamples) -> bool:
        """Returns whether the main metric is no better than chance."""
        scores, baseline = self.score(predictions, examples), self.baseline_scores(examples)
        return scores[self.main_metric] <= baseline[self.main_metric] < 1

    def write_predictions(
        self, folder: Path, split: str, predictions: Similarities, examples: TextExamples
    ) -> list[Path]:
        """Writes SPLIT.tsv: the similarity of each row, and its score, or its rank and the id of the first document."""
        if len(examples) != len(predictions.similarities):
            raise ValueError(f"{len(examples)} rows, {len(predictions.similarities)} predictions")
        columns = {self.data.columns.id or "index": examples.ids}
        columns[self.similarity] = [f"{value:.6f}" for value in predictions.similarities]
        if self.settings.has_scores and examples.scores is not None:
            columns["score"] = [np.format_float_positional(score, trim="-") for score in examples.scores]
        if predictions.ranks is not None:
            columns["rank"] = list(map(str, predictions.ranks.tolist()))
        if predictions.first is not None:
            columns["first"] = [examples.ids[row] for row in predictions.first]
        return [write_tsv(folder / f"{split}.tsv", [list(columns), *zip(*columns.values(), strict=True)])]

    def write_details(self, folder: Path, split: str, predictions: Similarities, examples: TextExamples) -> list[Path]:
        """Writes the queries whose positive document is not ranked first, worst ranks first, to errors.tsv."""
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
        expected = f"{self.name} takes a single text: pass a string"
        texts = [as_texts(value, index, expected)[0] for index, value in enumerate(inputs, 1)]
        return TextExamples(texts, None, [[] for _ in texts], None, [str(row) for row in range(len(texts))], False)

    def format_predictions(self, predictions: Outputs, examples: Any) -> list[Embedding]:
        return [Embedding(vector.tolist()) for vector in predictions]


def _vectors(tokens: np.ndarray) -> np.ndarray:
    """Returns the vectors [T_i, E] of a text among vectors [T, E], which are zero for tokens without one."""
    vectors: np.ndarray = tokens[tokens.any(axis=-1)]
    return vectors


def _as_objects(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns an array [R] whose elements are arrays, which may have any shapes."""
    objects = np.empty(len(arrays), object)
    for row, array in enumerate(arrays):
        objects[row] = array
    return objects


@dataclass(frozen=True, kw_only=True)
class LabelledTextsTask(EmbeddingTask):
    """One vector per text; a row is a text. The scores of the examples are label indices."""

    main_metric = "accuracy"
    """Share of texts whose nearest other text has the same label."""

    def read(self, folder: Path, split: str) -> TextExamples:
        records, names = self.checked_records(folder, split), self.data.columns
        columns = read_columns(
            records,
            {names.text_a: "data.columns.text_a"},
            {names.label: "data.columns.label"},
            None if names.id is None else (names.id, "data.columns.id"),
            needed=split != "test",
            leave_out=True,
        )
        [texts] = columns.texts
        labels = None
        if columns.labels is not None:
            cells = zip(columns.line_numbers, itertools.repeat(names.label), columns.labels[0], strict=False)
            labels = number_texts([word.strip() for word in records.read_each(cells, label_text)])
            if split == "train" and len(np.unique(labels)) in (1, len(labels)):
                wrong = "all rows have the same" if not labels.any() else "no two rows have the same"
                raise UserError(
                    f"{records.source}: {wrong} {names.label}: add texts of several labels, two or more of each"
                )
        none: list[list[str]] = [[] for _ in texts]
        return TextExamples(texts, None, none, labels, columns.ids, labels is not None, columns.notes)

    def features(self, tokenizer: Tokenizer, examples: TextExamples, data: TaskDataConfig) -> TokenRows | WindowedRows:
        texts = self._cased(examples.queries, self.settings.query_prompt or "")
        if examples.scores is None:
            return encode_texts(tokenizer, texts, LongTexts.from_config(data))
        labels = np.stack([examples.scores, number_texts(examples.queries)], axis=1)
        return encode_texts(tokenizer, texts, LongTexts.from_config(data), labels)

    def predict(self, outputs: Outputs, features: Any, examples: TextExamples) -> Outputs:
        """Returns the embeddings unchanged."""
        return outputs

    def score(self, predictions: Any, examples: TextExamples) -> dict[str, float]:
        """Returns the share of texts whose nearest other text has the same label; 0 for a single text."""
        return {"accuracy": float(np.mean(self.nearest_has_label(predictions, examples)))}

    def nearest_has_label(self, predictions: Any, examples: TextExamples) -> np.ndarray:
        """Returns whether the nearest other text of each text has the same label, [R]; False for a single text."""
        labels = examples.known_scores
        if len(labels) < 2:
            return np.zeros(len(labels), bool)
        same: np.ndarray = labels[self._nearest(predictions).first] == labels
        return same

    def baseline_scores(self, examples: TextExamples) -> dict[str, float]:
        """Returns the expected accuracy of a random other text."""
        counts = np.bincount(examples.known_scores)
        return {"accuracy": float(np.sum(counts * (counts - 1)) / max(len(examples) * (len(examples) - 1), 1))}

    def write_predictions(self, folder: Path, split: str, predictions: Any, examples: TextExamples) -> list[Path]:
        """Writes SPLIT.tsv: the id of the nearest other text, and the similarity."""
        return super().write_predictions(folder, split, self._nearest(predictions), examples)

    def write_details(self, folder: Path, split: str, predictions: Any, examples: TextExamples) -> list[Path]:
        return []

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        return (("text",), (self.data.columns.text_a,))

    def _nearest(self, embeddings: Outputs) -> Similarities:
        vectors = self._comparable(np.reshape(embeddings, (len(embeddings), -1)))
        similarities, others = retrieval.find_nearest_others(vectors, self._compared.compare)
        return Similarities(similarities, None, others)


TASKS = (EmbeddingTask(),)
