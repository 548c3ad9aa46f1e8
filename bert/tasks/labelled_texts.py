"""Embeddings of texts with a label: those with the same one are near each other."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bert.config import TaskDataConfig
from bert.data import features
from bert.data.features import Features
from bert.data.text_groups import number_texts
from bert.errors import UserError
from bert.metrics import retrieval
from bert.tasks.base import Outputs
from bert.tasks.embedding import Cosines, EmbeddingTask
from bert.tasks.readers.columns import label_text, read_columns
from bert.tasks.readers.text_pairs import TextExamples


@dataclass(frozen=True, kw_only=True)
class LabelledTextsTask(EmbeddingTask):
    """One vector a text; a row is a text. The scores of its examples are the numbers of labels."""

    @property
    def main_metric(self) -> str:  # type: ignore[override]  # as of EmbeddingTask
        """The share of texts whose nearest other one has the same label."""
        return "accuracy"

    def read(self, folder: Path, split: str) -> TextExamples:
        records, names = self.records(Path(folder), split), self.data.columns
        found = read_columns(
            records,
            {names.text_a: "data.columns.text_a"},
            {names.label: "data.columns.label"},
            None if names.id is None else (names.id, "data.columns.id"),
            needed=split != "test",
            leave_out=True,
        )
        [texts] = found.texts
        labels = None
        if found.labels is not None:
            cells = zip(found.line_numbers, itertools.repeat(names.label), found.labels[0], strict=False)
            labels = number_texts([word.strip() for word in records.read_each(cells, label_text)])
            if split == "train" and len(np.unique(labels)) in (1, len(labels)):
                wrong = "all rows have the same" if not labels.any() else "no two rows have the same"
                raise UserError(
                    f"{records.source}: {wrong} {names.label}: add texts of several labels, two or more of each"
                )
        none: list[list[str]] = [[] for _ in texts]
        return TextExamples(texts, None, none, labels, found.ids, labels is not None, found.notes)

    def features(self, tokenizer: Tokenizer, examples: TextExamples, data: TaskDataConfig) -> Features:
        texts = self._cased(examples.queries, self.settings.query_prompt or "")
        if examples.scores is None:
            return features.tokenize(tokenizer, texts, data.max_length)
        labels = np.stack([examples.scores, number_texts(examples.queries)], axis=1)
        return features.tokenize(tokenizer, texts, data.max_length, labels)

    def predict(self, outputs: Outputs, features: Any, examples: TextExamples) -> Outputs:
        """The embeddings as they are."""
        return outputs

    def score(self, predictions: Any, examples: TextExamples) -> dict[str, float]:
        """The share of texts whose nearest other one has the same label; of a text alone 0."""
        labels = examples.known_scores
        if len(labels) < 2:
            return {"accuracy": 0.0}
        return {"accuracy": float(np.mean(labels[_nearest(predictions).first] == labels))}

    def baseline_scores(self, examples: TextExamples) -> dict[str, float]:
        """Of another text at random."""
        counts = np.bincount(examples.known_scores)
        return {"accuracy": float(np.sum(counts * (counts - 1)) / max(len(examples) * (len(examples) - 1), 1))}

    def write_predictions(self, folder: Path, split: str, predictions: Any, examples: TextExamples) -> list[Path]:
        """SPLIT.tsv: the nearest other text of each by its id, and the cosine."""
        return super().write_predictions(folder, split, _nearest(predictions), examples)

    def write_details(self, folder: Path, split: str, predictions: Any, examples: TextExamples) -> list[Path]:
        return []

    @property
    def table_columns(self) -> tuple[tuple[str, ...], ...]:
        return (("text",), (self.data.columns.text_a,))


def _nearest(embeddings: Outputs) -> Cosines:
    cosines, others = retrieval.find_nearest_others(retrieval.normalized(np.reshape(embeddings, (len(embeddings), -1))))
    return Cosines(cosines, None, others)
