"""Hard negatives: the documents of a corpus that a model takes for answers to a query, and that are none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from bert.config.finetuning import ColumnsConfig
from bert.data.inputs import as_filled_texts, check_count
from bert.data.records import read_records
from bert.errors import UserError, quoted
from bert.inference.search import RankedDocument, blocks_of, find_nearest
from bert.tasks.readers.rows import json_lines
from bert.tasks.readers.text_pairs import read_queries


class Searcher(Protocol):
    """A `bert.inference.searchable.SearchableModel`."""

    def embed(
        self, texts: Sequence[str], batch_size: int = 32, prompt: Literal["query", "document"] | None = None
    ) -> np.ndarray:
        """The embeddings of texts."""

    def require_pair_scores(self, label: str) -> Any:
        """Raises UserError unless `rank` can score pairs with that label."""

    def rank(
        self, query: str, documents: Sequence[str], label: str = "1", batch_size: int = 32
    ) -> list[RankedDocument]:
        """The documents in the order of their scores."""


@dataclass(frozen=True)
class Mining:
    """How negatives are chosen.

    Attributes:
        num_negatives: of a row at most.
        top_k: documents that a search finds for each query, among which they are chosen.
        margin: how far the score of a negative is below that of the positive at least.
        relative_margin: the same as a share of the positive's score.
    """

    num_negatives: int = 4
    top_k: int = 50
    margin: float = 0.0
    relative_margin: float = 0.05

    def check(self, documents: int) -> None:
        """Raises UserError for settings that cannot work; no query has more than ``documents`` that are no answer."""
        check_count("num_negatives", self.num_negatives)
        check_count("top_k", self.top_k)
        for name in ("margin", "relative_margin"):
            if not 0 <= getattr(self, name) < np.inf:
                raise UserError(f"{name} is {getattr(self, name)}: pass a number of at least 0")
        if self.num_negatives > self.top_k:
            raise UserError(f"num_negatives is {self.num_negatives}, and top_k is {self.top_k}: raise top_k")
        if self.num_negatives > documents:
            raise UserError(
                f"num_negatives is {self.num_negatives}, and the corpus has at most {documents} documents that are no "
                "positive of a query: pass a smaller number"
            )

    def below(self, positive: float) -> float:
        """The score that those of negatives are below: others may be right answers that nobody has marked."""
        return positive - self.margin - self.relative_margin * abs(positive)


def mine_negatives(
    model: Searcher,
    rows: Any,
    corpus: Sequence[str] | None,
    scorer: Searcher | None,
    label: str,
    settings: Mining,
    batch_size: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """See `SearchableModel.mine_negatives`."""
    if scorer is not None:
        scorer.require_pair_scores(label)
    fields, queries, positives = _read(rows)
    documents: list[Any] = list(dict.fromkeys(as_filled_texts("document", positives if corpus is None else corpus)))
    right: dict[str, set[str]] = {}
    for query, positive in zip(queries, positives, strict=True):
        right.setdefault(query, set()).add(positive)
    settings.check(len(documents) - min(len(texts.intersection(documents)) for texts in right.values()))
    distinct = list(right)
    vectors = model.embed(distinct, batch_size, "query")
    blocks = blocks_of(model.embed(documents, batch_size, "document"))
    found = find_nearest(vectors, blocks, min(settings.top_k, len(documents)))
    of_query = dict(zip(distinct, range(len(distinct)), strict=True))
    answers: dict[str, Any] = dict.fromkeys(positives)
    answers |= zip(answers, model.embed(list(answers), batch_size, "document"), strict=True)
    mined, dropped = [], 0
    for row, query, positive in zip(fields, queries, positives, strict=True):
        place = of_query[query]
        candidates = [
            (documents[number], float(score))
            for number, score in zip(found.indices[place], found.scores[place], strict=True)
            if documents[number] not in right[query]
        ]
        own = _cosine(vectors[place], answers[positive])
        if scorer is not None:
            own, candidates = _scored(scorer, label, query, positive, [text for text, _ in candidates], batch_size)
        chosen = [(text, score) for text, score in candidates if score < settings.below(own)]
        dropped += len(candidates) - len(chosen)
        chosen = chosen[: settings.num_negatives]
        mined.append({**row, "negatives": [text for text, _ in chosen], "score": [own, *(s for _, s in chosen)]})
    counts = np.array([len(row["negatives"]) for row in mined])
    say(
        f"{len(mined):,} rows: {counts.sum():,} negatives, {np.count_nonzero(counts < settings.num_negatives):,} rows "
        f"with fewer than {settings.num_negatives}, {np.count_nonzero(counts == 0):,} with none; {dropped:,} documents "
        "were too close to the positive"
    )
    return mined


def _read(rows: Any) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The fields of each row, its query and its positive. Raises UserError where one is missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        if isinstance(rows, str | os.PathLike):
            records = read_records(Path(rows))
        else:
            path.write_text(json_lines(rows, "rows"), encoding="utf-8")
            records = replace(read_records(path), source="rows", unit="row")
        numbered = list(records.rows)
    for line_number, fields in numbered:
        if "query" not in fields:
            there = quoted(fields)
            raise records.error(line_number, f"no 'query' among {there}: name the columns query and positive")
        for name in ("negatives", "score"):
            if fields.get(name) not in (None, "", []):
                raise records.error(line_number, f"there is a {name!r} already: remove it from the {records.unit}")
    examples = read_queries(replace(records, rows=iter(numbered)), ColumnsConfig(), None)
    return [dict(fields) for _, fields in numbered], examples.queries, examples.documents


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(find_nearest(first[None], [second[None]], 1).scores[0, 0])


def _scored(
    scorer: Searcher, label: str, query: str, positive: str, documents: list[str], batch_size: int
) -> tuple[float, list[tuple[str, float]]]:
    """The scores that a cross-encoder gives to the positive, and to the documents, the best one first."""
    ranked = scorer.rank(query, [positive, *documents], label, batch_size)
    own = next(document.score for document in ranked if document.number == 0)
    return own, [(documents[found.number - 1], found.score) for found in ranked if found.number > 0]
