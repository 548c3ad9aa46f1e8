"""Search by similarity of embeddings, exact or in an index, and ranking by a reranker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from bert.data.inputs import Text, as_filled_texts, check_count
from bert.errors import UserError
from bert.interchange.task_adapters import SIMILARITY_TASK
from bert.model.late_interaction import TOKEN_SIMILARITIES
from bert.model.pooling import Pooling
from bert.tasks.base import Task

TEXTS_AT_ONCE = 4096
"""Maximum number of documents and of queries per block, for 64 MiB of similarities."""

BLOCK_SIZE = 64 * 2**20
"""Maximum size of a block of embeddings in bytes, unless one embedding is larger."""

TINY = np.finfo(np.float32).tiny
"""Replacement for the length of a zero vector in divisions."""


class SearchResults(NamedTuple):
    """Results of a search, best first.

    Attributes:
        indices: [Q, K] int64, indices of the documents in the corpus.
        scores: [Q, K] float32, similarities to the query.
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


def similarity(
    model: Any, texts: str | Sequence[Text], others: str | Sequence[Text], batch_size: int = 32
) -> np.ndarray:
    """Returns the similarity of each text with each of the others, [A, B] float32. A string is one text.

    It is the cosine, unless a sentence-transformers folder declares another one (``model.pooling.similarity``). A model
    with an adapter of the task ``text-matching`` uses it. In late interaction, and with separate models for queries and
    documents, ``texts`` are read as queries and ``others`` as documents.

    Raises:
        UserError: see `embed`.
    """
    pooling = model.pooling_or_default
    has_roles = pooling.has_token_vectors or model.query_model is not None
    prompts = ("query", "document") if has_roles else (None, None)
    sides = ([side] if isinstance(side, str) else side for side in (texts, others))
    task = SIMILARITY_TASK if SIMILARITY_TASK in model.task_adapters else None
    embeddings = (model.embed(side, batch_size, prompt, task=task) for side, prompt in zip(sides, prompts, strict=True))
    similarities: np.ndarray = pooling.compare(*embeddings)
    return similarities


def search(
    model: Any,
    queries: str | Sequence[Text],
    corpus: Sequence[Text] | np.ndarray | VectorIndex,
    top_k: int = 10,
    batch_size: int = 32,
) -> SearchResults:
    """Returns the documents with the highest `similarity` to each query.

    The search is exact, except with an approximate index. Documents are embedded and compared in blocks, so the
    embeddings of the whole corpus are never in memory. Queries and documents are prefixed with the model's prompts.

    Args:
        queries: texts. A string is a single query, whose result has no query axis.
        corpus: one of the following.

            - Texts.
            - Embeddings from ``embed(texts, prompt="document")``, for repeated searches: an array [N, D], or the list
              of a model of late interaction. Sparse ones may be an array of ``scipy.sparse`` by rows, such as
              ``csr_array``.
            - A FAISS index of embeddings with the inner product as metric, for cosines of embeddings of length 1. It
              may return fewer than ``top_k`` documents; missing ones have the index -1.
        top_k: number of documents per query, at most the size of the corpus.
        batch_size: number of texts per batch.

    Raises:
        UserError: see `embed`; also if there are no documents, a text is empty, embeddings have another width, or the
            model compares embeddings by a distance and the corpus is an index.
    """
    if isinstance(queries, str):
        indices, scores = search(model, [queries], corpus, top_k, batch_size)
        return SearchResults(indices[0], scores[0])
    check_count("top_k", top_k)
    queries = as_filled_texts("query", queries)
    width, similarity = model.embedding_size, model.pooling_or_default.similarity
    if similarity in TOKEN_SIMILARITIES:
        return _search_tokens(model, queries, corpus, top_k, batch_size)
    if isinstance(corpus, VectorIndex):
        _check_index(corpus, width, model.source, similarity)
        vectors = model.embed(queries, batch_size, "query")
        vectors = _unit(vectors) if similarity == "cosine" else vectors
        scores, indices = corpus.search(vectors, min(top_k, corpus.ntotal))
        return SearchResults(indices.astype(np.int64), scores.astype(np.float32))
    documents: Any = corpus
    if _is_sparse(documents) or (isinstance(documents, np.ndarray) and np.issubdtype(documents.dtype, np.number)):
        if documents.ndim != 2 or documents.shape[1] != width:
            raise UserError(
                f"the corpus has the shape {list(documents.shape)}, but embeddings of {model.source} have {width} "
                f"features: pass an array [N, {width}], or texts"
            )
        blocks: Iterable[np.ndarray] = _finite_blocks(documents)
    else:
        documents = as_filled_texts("document", corpus)
        blocks = (model.embed(documents[block], batch_size, "document") for block in _slices(len(documents), width))
    if not (count := documents.shape[0] if _is_sparse(documents) else len(documents)):
        raise UserError("the corpus has no documents: pass at least one")
    return find_nearest(model.embed(queries, batch_size, "query"), blocks, min(top_k, count), similarity)


def _search_tokens(model: Any, queries: Sequence[Text], corpus: Any, top_k: int, batch_size: int) -> SearchResults:
    """Searches with an embedding per token. Raises UserError as in `search`."""
    pooling = model.pooling_or_default
    documents: Any = _token_embeddings(corpus, model.embedding_size, model.source)
    if documents is not None:
        blocks: Iterable[Any] = blocks_of(documents)
    else:
        documents = as_filled_texts("document", corpus)
        width = model.embedding_size * (pooling.interaction.document_length or model.longest_text)
        blocks = (model.embed(documents[block], batch_size, "document") for block in _slices(len(documents), width))
    if not documents:
        raise UserError("the corpus has no documents: pass at least one")
    vectors = model.embed(queries, batch_size, "query")
    return find_nearest(vectors, blocks, min(top_k, len(documents)), pooling.similarity)


def _token_embeddings(corpus: Any, width: int, source: str) -> list[np.ndarray] | None:
    """Returns a corpus that consists of lists of embeddings [T_i, E]; None for texts.

    Raises:
        UserError: the corpus is an index, a sparse array or a single array, or an array has another width or a value
            that is not finite.
    """
    fix = "pass texts, or the list of arrays that embed returns"
    is_array = isinstance(corpus, np.ndarray) and np.issubdtype(corpus.dtype, np.number) and corpus.ndim < 3
    if is_array or hasattr(corpus, "toarray") or hasattr(corpus, "ntotal"):
        raise UserError(f"{source} has an embedding per token, and the corpus has one per text: {fix}")
    if not isinstance(corpus, Sequence | np.ndarray) or not len(corpus) or not isinstance(corpus[0], np.ndarray):
        return None
    for number, vectors in enumerate(corpus):
        shape: tuple[int, ...] = getattr(vectors, "shape", ())
        if len(shape) != 2 or shape[1] != width:
            raise UserError(
                f"document {number} of the corpus (from 0) has the shape {list(shape)}, but embeddings of {source} "
                f"are [T, {width}]: {fix}"
            )
        if not np.isfinite(vectors).all():
            raise UserError(f"document {number} of the corpus (from 0) holds NaN or infinity: compute it again")
    return list(corpus)


def _is_sparse(corpus: Any) -> bool:
    """Whether the corpus is an array of ``scipy.sparse``, which is not imported for this."""
    return hasattr(corpus, "toarray")


def _check_index(index: VectorIndex, width: int, source: str, similarity: str) -> None:
    """Raises UserError if an index is empty or if its width or metric does not match the queries."""
    if index.d != width:
        raise UserError(
            f"the index has vectors of {index.d} features, but embeddings of {source} have {width}: build the index "
            "from embeddings of this model"
        )
    if index.metric_type != 0:
        raise UserError("the index does not compare by inner product: build it with faiss.METRIC_INNER_PRODUCT")
    if similarity not in ("cosine", "dot"):
        raise UserError(
            f"{source} compares embeddings by their {similarity} distance, and the index by inner product: pass the "
            "embeddings as an array"
        )
    if not index.ntotal:
        raise UserError("the index has no documents: add their embeddings")


def find_nearest(queries: Any, blocks: Iterable[Any], top_k: int, similarity: str = "cosine") -> SearchResults:
    """Returns the ``top_k`` documents with the highest similarity. Ties keep their order.

    Args:
        queries: [Q, D] vectors, or a list of arrays [T_i, D] if there is one vector per token.
        blocks: [n, D] vectors of the documents in order, or lists of arrays [T_i, D].
        top_k: K, at most the number of documents.
        similarity: one of `bert.model.pooling.SIMILARITIES` or `bert.model.late_interaction.TOKEN_SIMILARITIES`.
    """
    if similarity not in TOKEN_SIMILARITIES:
        queries = _unit(queries) if similarity == "cosine" else np.asarray(queries, np.float32)
    indices = np.zeros((len(queries), 0), np.int64)
    scores = np.zeros((len(queries), 0), np.float32)
    start = 0
    for documents in blocks:
        compare = _comparison(documents, similarity)
        numbers = np.arange(start, start + len(documents))
        merged = [
            _merge(indices[rows], scores[rows], numbers, compare(queries[rows]), top_k)
            for rows in _slices(len(queries))
        ]
        indices, scores = (np.concatenate([part[side] for part in merged]) for side in range(2))
        start += len(documents)
    return SearchResults(indices, scores)


def _comparison(documents: Any, similarity: str) -> Callable[[Any], np.ndarray]:
    """Returns the function from queries [q, D], for cosines of length 1, to their similarities with documents."""
    if similarity == "cosine":
        vectors, lengths = _measured(documents)
        return lambda queries: queries @ vectors.T / lengths
    pooling = Pooling(similarity=similarity)
    vectors = documents if similarity in TOKEN_SIMILARITIES else np.asarray(documents, np.float32)
    return lambda queries: np.nan_to_num(pooling.compare(queries, vectors), nan=-np.inf)


def _merge(
    indices: np.ndarray, scores: np.ndarray, numbers: np.ndarray, similarities: np.ndarray, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Merges the best documents so far [q, k] with the similarities of a block [q, n]."""
    candidates = np.concatenate([indices, np.broadcast_to(numbers, similarities.shape)], axis=1)
    similarities = np.concatenate([scores, similarities], axis=1)
    if similarities.shape[1] > top_k:
        # Ties with the lowest kept similarity keep their order; argpartition alone would choose any of them.
        lowest = np.partition(similarities, -top_k, axis=1)[:, -top_k, None]
        above = similarities > lowest
        equal = similarities == lowest
        chosen = above | (equal & (np.cumsum(equal, axis=1) <= top_k - above.sum(axis=1, keepdims=True)))
        candidates, similarities = (
            array[chosen].reshape(len(similarities), top_k) for array in (candidates, similarities)
        )
    order = np.argsort(-similarities, axis=1, kind="stable")
    return np.take_along_axis(candidates, order, axis=1), np.take_along_axis(similarities, order, axis=1)


def _slices(count: int, width: int = 1) -> list[slice]:
    """Splits ``count`` vectors of ``width`` float32 into blocks."""
    step = max(1, min(TEXTS_AT_ONCE, BLOCK_SIZE // (4 * width)))
    return [slice(start, start + step) for start in range(0, max(count, 1), step)]


def _finite_blocks(vectors: Any) -> Iterator[np.ndarray]:
    """Yields vectors [N, D] in dense blocks. Raises UserError with the row if a value is NaN or infinite."""
    for rows in _slices(*vectors.shape):
        block = vectors[rows].toarray() if _is_sparse(vectors) else vectors[rows]
        if not (finite := np.isfinite(block).all(axis=1)).all():
            row = rows.start + int(np.argmin(finite))
            raise UserError(f"row {row} of the corpus (from 0) holds NaN or infinity: compute its embedding again")
        yield block


def blocks_of(vectors: Any) -> list[Any]:
    """Splits vectors [N, D], or a list of N arrays, into blocks."""
    return [vectors[rows] for rows in _slices(len(vectors))]


def rank(
    model: Any, query: str, documents: Sequence[str], label: str = "1", batch_size: int = 32
) -> list[RankedDocument]:
    """Returns the documents sorted by a cross-encoder's score for the pair of query and document.

    A model of late interaction sorts by `similarity`. Documents with equal scores keep their order.

    Args:
        query: a text.
        documents: texts.
        label: label whose probability is the score of a classifier. Rerankers and regression models ignore it.
        batch_size: number of pairs per batch.

    Raises:
        UserError: the model does not classify or score pairs of texts, it lacks the label, or a text is empty.
    """
    is_late = model.pooling_or_default.has_token_vectors and (model.task is None or "embed" in model.task.calls)
    task = None if is_late else model.require_pair_scores(label)
    [text] = as_filled_texts("query", [query])
    texts = as_filled_texts("document", documents)
    if task is None:
        scores = model.similarity([text], texts, batch_size)[0].tolist()
    else:
        answers = model.answers(task.without_limits(), [(text, document) for document in texts], batch_size)
        scores = [task.pair_score(answer, label) for answer in answers]
    ranked = [RankedDocument(number, score) for number, score in enumerate(scores)]
    return sorted(ranked, key=lambda document: -document.score)


def require_pair_scores(model: Any, label: str) -> Task:
    """Returns the task if it scores pairs of texts. Raises UserError as in `rank`."""
    if model.task is None and model.problem_type is None:
        raise UserError(
            f"{model.source} is an encoder without scores for pairs of texts: use a reranker, or use search, which "
            "compares embeddings"
        )
    task: Task = model.require_task()
    if "rank" not in task.calls:
        raise UserError(
            f"{model.source} does not score pairs of texts ({task.name}): use a reranker, or a classifier or "
            "regression model of pairs"
        )
    if task.exclusive_labels and label not in task.exclusive_labels:
        names = ", ".join(map(repr, task.exclusive_labels[:8]))
        raise UserError(f"label is {label!r}, but the labels of {model.source} are {names}: pass one of these")
    return task


def _measured(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns vectors [n, D] in float32, and their lengths [n], by which products are divided.

    Normalizing all vectors instead would take ten times as long as their products with one query.
    """
    vectors = np.asarray(vectors, np.float32)
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    if not np.isfinite(lengths).all():
        return _unit(vectors), np.ones(len(vectors), np.float32)
    return vectors, np.maximum(lengths, TINY)


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Normalizes vectors in float32. Zero vectors are unchanged, and non-finite values become 0."""
    vectors = np.nan_to_num(np.asarray(vectors, np.float32), posinf=0, neginf=0)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), TINY)
