"""Search by cosine similarity, exact or in an index, and mining of hard negatives."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from bert.config.finetuning import ColumnsConfig
from bert.data.inputs import Text, as_filled_texts, check_count
from bert.data.records import read_records
from bert.errors import UserError, quoted
from bert.tasks.base import Task
from bert.tasks.columns import json_lines
from bert.tasks.text_pairs import read_queries

TEXTS_AT_ONCE = 4096
"""Maximum number of documents and of queries per block, for 64 MiB of similarities."""


class SearchResults(NamedTuple):
    """Results of a search, best first.

    Attributes:
        indices: [Q, K] int64, indices of the documents in the corpus.
        scores: [Q, K] float32, cosine similarities to the query.
    """

    indices: np.ndarray
    scores: np.ndarray


class RankedDocument(NamedTuple):
    """A document's index and its score for a query."""

    number: int
    score: float


@runtime_checkable
class VectorIndex(Protocol):
    """Protocol of ``faiss.Index``.

    Attributes:
        d: D, width of the vectors.
        ntotal: N, number of vectors.
        metric_type: 0 for the inner product.
    """

    d: int
    ntotal: int
    metric_type: int

    def search(self, vectors: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Maps queries [Q, D] to scores [Q, K] and indices [Q, K], best first."""


def check_index(index: VectorIndex, width: int, source: str) -> None:
    """Raises UserError if an index is empty or if its width or metric does not match the queries."""
    if index.d != width:
        raise UserError(
            f"the index has vectors of {index.d} numbers, but embeddings of {source} have {width}: build it from these"
        )
    if index.metric_type != 0:
        raise UserError("the index compares by a distance: build it with faiss.METRIC_INNER_PRODUCT")
    if not index.ntotal:
        raise UserError("the index has no documents: add their embeddings")


def find_in_index(queries: np.ndarray, index: VectorIndex, top_k: int) -> SearchResults:
    """Searches an index of unit vectors for queries [Q, D]. K is at most the size of the index."""
    scores, indices = index.search(_unit(queries), min(top_k, index.ntotal))
    return SearchResults(indices.astype(np.int64), scores.astype(np.float32))


def find_nearest(queries: np.ndarray, blocks: Iterable[np.ndarray], top_k: int) -> SearchResults:
    """Returns the ``top_k`` documents with the highest cosine similarity. Ties keep their order.

    Args:
        queries: [Q, D] vectors.
        blocks: [n, D] vectors of the documents in order.
        top_k: K, at most the number of documents.
    """
    queries = _unit(queries)
    indices = np.zeros((len(queries), 0), np.int64)
    scores = np.zeros((len(queries), 0), np.float32)
    start = 0
    for documents in blocks:
        documents, lengths = _measured(documents)
        numbers = np.arange(start, start + len(documents))
        found = [_merge(indices[rows], scores[rows], numbers, queries[rows] @ documents.T / lengths, top_k)
                 for rows in _slices(len(queries))]  # fmt: skip
        indices, scores = (np.concatenate([part[side] for part in found]) for side in range(2))
        start += len(documents)
    return SearchResults(indices, scores)


def search_corpus(
    embed: Callable[[Sequence[Text], Literal["query", "document"]], np.ndarray],
    queries: Sequence[Text],
    corpus: Sequence[Text] | np.ndarray | VectorIndex,
    top_k: int,
    width: int,
    source: str,
) -> SearchResults:
    """Returns the ``top_k`` documents with the highest cosine similarity to each query (see `Pretrained.search`).

    Args:
        embed: computes the embeddings [N, width] of queries or documents.
        width: number of features of an embedding.
        source: name of the model, for messages.
    """
    check_count("top_k", top_k)
    queries = as_filled_texts("query", queries)
    if isinstance(corpus, VectorIndex):
        check_index(corpus, width, source)
        return find_in_index(embed(queries, "query"), corpus, top_k)
    if isinstance(corpus, np.ndarray) and np.issubdtype(corpus.dtype, np.number):
        if corpus.ndim != 2 or corpus.shape[1] != width:
            raise UserError(
                f"the corpus has the shape {list(corpus.shape)}, but embeddings of {source} have {width} numbers: pass "
                f"[N, {width}], or texts"
            )
        documents: Any = corpus
        blocks: Iterable[np.ndarray] = finite_blocks(corpus)
    else:
        documents = as_filled_texts("document", corpus)
        blocks = (embed(documents[block], "document") for block in _slices(len(documents)))
    if not len(documents):
        raise UserError("the corpus has no documents: pass at least one")
    return find_nearest(embed(queries, "query"), blocks, min(top_k, len(documents)))


def _merge(
    indices: np.ndarray, scores: np.ndarray, numbers: np.ndarray, cosines: np.ndarray, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Merges the best documents so far [q, k] with the similarities of a block [q, n]."""
    candidates = np.concatenate([indices, np.broadcast_to(numbers, cosines.shape)], axis=1)
    cosines = np.concatenate([scores, cosines], axis=1)
    if cosines.shape[1] > top_k:
        # Ties with the lowest kept similarity keep their order; argpartition alone would choose any of them.
        least = np.partition(cosines, -top_k, axis=1)[:, -top_k, None]
        above = cosines > least
        equal = cosines == least
        chosen = above | (equal & (np.cumsum(equal, axis=1) <= top_k - above.sum(axis=1, keepdims=True)))
        candidates, cosines = (array[chosen].reshape(len(cosines), top_k) for array in (candidates, cosines))
    order = np.argsort(-cosines, axis=1, kind="stable")
    return np.take_along_axis(candidates, order, axis=1), np.take_along_axis(cosines, order, axis=1)


def _slices(count: int) -> list[slice]:
    return [slice(start, start + TEXTS_AT_ONCE) for start in range(0, max(count, 1), TEXTS_AT_ONCE)]


def finite_blocks(vectors: np.ndarray) -> Iterator[np.ndarray]:
    """Yields vectors [N, D] in blocks. Raises UserError with the row if a value is NaN or infinite."""
    for start, block in zip(range(0, len(vectors), TEXTS_AT_ONCE), blocks_of(vectors), strict=False):
        if not (finite := np.isfinite(block).all(axis=1)).all():
            row = start + int(np.argmin(finite))
            raise UserError(f"row {row} of the corpus (from 0) holds NaN or infinity: compute its embedding again")
        yield block


def blocks_of(vectors: np.ndarray) -> list[np.ndarray]:
    """Splits vectors [N, D] into blocks."""
    return [vectors[rows] for rows in _slices(len(vectors))]


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Computes cosine similarities, [A, D], [B, D] -> [A, B]; 0 for zero vectors."""
    norms = np.linalg.norm(first, axis=1)[:, None] * np.linalg.norm(second, axis=1)[None, :]
    return first @ second.T / np.maximum(norms, np.finfo(np.float32).tiny)


def rank_documents(
    answers: Callable[[Task, Sequence[Any], int], list[Any]],
    task: Task,
    query: str,
    documents: Sequence[str],
    label: str,
    batch_size: int,
) -> list[RankedDocument]:
    """Returns the documents sorted by a cross-encoder's score. Ties keep their order (see `Pretrained.rank`).

    Args:
        answers: function that returns the task's answers, given a list of inputs and a batch size.
    """
    [text] = as_filled_texts("query", [query])
    pairs = [(text, document) for document in as_filled_texts("document", documents)]
    scores = [task.pair_score(answer, label) for answer in answers(task.without_limits(), pairs, batch_size)]
    ranked = [RankedDocument(number, score) for number, score in enumerate(scores)]
    return sorted(ranked, key=lambda document: -document.score)


def require_scores_of_pairs(task: Task, label: str, source: str) -> Task:
    """Returns the task if it scores pairs of texts. Raises UserError otherwise, or if a classifier lacks the label."""
    if "rank" not in task.calls:
        raise UserError(
            f"{source} gives pairs of texts no score ({task.name}): use a reranker, classifier or regression of pairs"
        )
    if task.exclusive_labels and label not in task.exclusive_labels:
        names = ", ".join(map(repr, task.exclusive_labels[:8]))
        raise UserError(f"label is {label!r}, but the labels of {source} are {names}: pass one of these")
    return task


def _measured(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns vectors [n, D] in float32, and their lengths [n], by which products are divided.

    Normalizing all vectors instead would take ten times as long as their products with one query.
    """
    vectors = np.asarray(vectors, np.float32)
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    if not np.isfinite(lengths).all():
        return _unit(vectors), np.ones(len(vectors), np.float32)
    return vectors, np.maximum(lengths, np.finfo(np.float32).tiny)


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Normalizes vectors in float32. Zero vectors are unchanged, and non-finite values become 0."""
    vectors = np.nan_to_num(np.asarray(vectors, np.float32), posinf=0, neginf=0)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)


class Searcher(Protocol):
    """The methods of `bert.Pretrained` that mining uses."""

    def embed(
        self, texts: Sequence[str], batch_size: int = 32, prompt: Literal["query", "document"] | None = None
    ) -> np.ndarray:
        """Returns the embeddings of texts."""

    def require_pair_scores(self, label: str) -> Any:
        """Raises UserError unless `rank` supports pairs and that label."""

    def rank(
        self, query: str, documents: Sequence[str], label: str = "1", batch_size: int = 32
    ) -> list[RankedDocument]:
        """Returns the documents sorted by score."""


@dataclass(frozen=True)
class Mining:
    """Settings for choosing negatives.

    Attributes:
        num_negatives: maximum number of negatives per row.
        top_k: number of retrieved documents per query, from which negatives are chosen.
        margin: minimum difference between the scores of the positive and a negative.
        relative_margin: minimum difference as a share of the positive's score.
    """

    num_negatives: int = 4
    top_k: int = 50
    margin: float = 0.0
    relative_margin: float = 0.05

    def check(self, documents: int) -> None:
        """Raises UserError for invalid settings. A query has up to ``documents`` documents besides positives."""
        check_count("num_negatives", self.num_negatives)
        check_count("top_k", self.top_k)
        for name in ("margin", "relative_margin"):
            if not 0 <= getattr(self, name) < np.inf:
                raise UserError(f"{name} is {getattr(self, name)}: pass a number of at least 0")
        if self.num_negatives > self.top_k:
            raise UserError(f"num_negatives is {self.num_negatives}, but top_k is {self.top_k}: raise top_k")
        if self.num_negatives > documents:
            raise UserError(
                f"num_negatives is {self.num_negatives}, but the corpus has at most {documents} documents that are no "
                "positive of a query: pass a smaller number"
            )

    def below(self, positive: float) -> float:
        """Returns the upper bound for a negative's score. Documents above it may be unlabelled answers."""
        return positive - self.margin - self.relative_margin * abs(positive)


def mine_negatives(
    model: Searcher,
    rows: Any,
    corpus: Sequence[str] | None,
    scorer: Searcher | None,
    label: str,
    settings: Mining,
    batch_size: int,
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Adds negatives to rows (see `Pretrained.mine_negatives`)."""
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
        index = of_query[query]
        candidates = [
            (documents[number], float(score))
            for number, score in zip(found.indices[index], found.scores[index], strict=True)
            if documents[number] not in right[query]
        ]
        own = _cosine(vectors[index], answers[positive])
        if scorer is not None:
            own, candidates = _scored(scorer, label, query, positive, [text for text, _ in candidates], batch_size)
        chosen = [(text, score) for text, score in candidates if score < settings.below(own)]
        dropped += len(candidates) - len(chosen)
        chosen = chosen[: settings.num_negatives]
        mined.append({**row, "negatives": [text for text, _ in chosen], "score": [own, *(s for _, s in chosen)]})
    counts = np.array([len(row["negatives"]) for row in mined])
    log(
        f"{len(mined):,} rows: {counts.sum():,} negatives, {np.count_nonzero(counts < settings.num_negatives):,} rows "
        f"with fewer than {settings.num_negatives}, {np.count_nonzero(counts == 0):,} with none; {dropped:,} documents "
        "were too close to the positive"
    )
    return mined


def _read(rows: Any) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Returns the fields, query and positive of each row. Raises UserError if one is missing."""
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
            raise records.error(line_number, f"no 'query' among {quoted(fields)}: name the columns query and positive")
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
    """Returns a cross-encoder's scores for the positive and for the documents, best document first."""
    ranked = scorer.rank(query, [positive, *documents], label, batch_size)
    own = next(document.score for document in ranked if document.number == 0)
    return own, [(documents[found.number - 1], found.score) for found in ranked if found.number > 0]
