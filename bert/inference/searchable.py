"""What `bert.load` returns, as far as texts are compared: cosines, search, and the scores of a cross-encoder."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bert.data.inputs import Text, as_filled_texts, check_count
from bert.errors import UserError
from bert.inference.export import ExportableModel
from bert.inference.search import (
    TEXTS_AT_ONCE,
    Mining,
    RankedDocument,
    SearchResults,
    VectorIndex,
    check_index,
    find_in_index,
    find_nearest,
    finite_blocks,
    mine_negatives,
    rank_by_score,
)
from bert.tasks.base import Task
from bert.tasks.reranker import RerankerTask
from bert.tasks.sequence_classification import ClassificationTask, RegressionTask

PromptName = Literal["query", "document"]
"""What a text is to a search."""

LABELS_SHOWN = 8
"""Labels that a message or the summary of a model lists."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SearchableModel(ExportableModel):
    """A model whose embeddings, or scores of pairs, are compared."""

    @abstractmethod
    def embed(self, texts: str | Sequence[Text], batch_size: int = 32, prompt: PromptName | None = None) -> np.ndarray:
        """The embeddings of texts."""

    @abstractmethod
    def answers(self, task: Task, inputs: Sequence[Any], batch_size: int) -> list[Any]:
        """The answers of the task, or of one that reads the same head in another way."""

    task: Task | None = None

    @abstractmethod
    def require_task(self) -> Task:
        """The task that `predict` answers. Raises UserError."""

    def similarity(self, texts: str | Sequence[Text], others: str | Sequence[Text], batch_size: int = 32) -> np.ndarray:
        """The cosine of the embeddings of each text with those of the others, [A, B] float32; a string is one text.

        Raises:
            UserError: as `embed`.
        """
        first, second = (
            self.embed([given] if isinstance(given, str) else given, batch_size) for given in (texts, others)
        )
        norms = np.linalg.norm(first, axis=1)[:, None] * np.linalg.norm(second, axis=1)[None, :]
        return first @ second.T / np.maximum(norms, np.finfo(np.float32).tiny)

    def search(
        self,
        queries: str | Sequence[Text],
        corpus: Sequence[Text] | np.ndarray | VectorIndex,
        top_k: int = 10,
        batch_size: int = 32,
    ) -> SearchResults:
        """The documents whose embeddings have the highest cosine with that of each query, found exactly, or as the
        index of an approximate search finds them.

        Documents are embedded and compared in blocks, so that a corpus of texts takes no memory for its embeddings.
        Queries and documents begin with the prompts of the model, if it has some.

        Args:
            queries: texts. A string is one query, and its result has no axis of queries.
            corpus: texts, or their embeddings [N, D] if they are searched more than once: those that
                ``embed(texts, prompt="document")`` gives; or a FAISS index of these, by the inner product and of
                length 1, whose results are approximate. An index may find fewer documents than ``top_k``; the number
                of one that is missing is -1.
            top_k: documents of each query; all of a smaller corpus.
            batch_size: texts embedded at once.

        Raises:
            UserError: as `embed`; or there is no document, a text is empty, or the embeddings have another width.
        """
        if isinstance(queries, str):
            indices, scores = self.search([queries], corpus, top_k, batch_size)
            return SearchResults(indices[0], scores[0])
        check_count("top_k", top_k)
        queries = as_filled_texts("query", queries)
        if isinstance(corpus, VectorIndex):
            check_index(corpus, self.embedding_size, self.source)
            return find_in_index(self.embed(queries, batch_size, "query"), corpus, top_k)
        if isinstance(corpus, np.ndarray) and np.issubdtype(corpus.dtype, np.number):
            if corpus.ndim != 2 or corpus.shape[1] != self.embedding_size:
                raise UserError(
                    f"the corpus has the shape {list(corpus.shape)}, and embeddings of {self.source} have "
                    f"{self.embedding_size} numbers: pass [N, {self.embedding_size}], or texts"
                )
            documents: Any = corpus
            blocks: Iterable[np.ndarray] = finite_blocks(corpus)
        else:
            documents = as_filled_texts("document", corpus)
            starts = range(0, len(documents), TEXTS_AT_ONCE)
            blocks = (self.embed(documents[start : start + TEXTS_AT_ONCE], batch_size, "document") for start in starts)
        if not len(documents):
            raise UserError("the corpus has no documents: pass at least one")
        return find_nearest(self.embed(queries, batch_size, "query"), blocks, min(top_k, len(documents)))

    def mine_negatives(
        self,
        rows: Any,
        corpus: Sequence[str] | None = None,
        *,
        scorer: SearchableModel | None = None,
        label: str = "1",
        num_negatives: int = 4,
        top_k: int = 50,
        margin: float = 0.0,
        relative_margin: float = 0.05,
        batch_size: int = 32,
        say: Callable[[str], None] = lambda text: None,
    ) -> list[dict[str, Any]]:
        """The rows with hard negatives: documents that a search finds for the query, and that are none of its
        positives.

        A document whose score is close to that of the positive may be a right answer that nobody has marked. It is a
        negative only if its score is below that of the positive by ``margin`` and by ``relative_margin`` times the size
        of the positive's score.

        Args:
            rows: dictionaries with ``query`` and ``positive``, a data frame, or the path of a file with these columns.
            corpus: documents; None for the positives of all rows.
            scorer: a cross-encoder, which scores the documents found, and the positive, in place of the cosine.
            label: of a scorer that classifies: as of `rank`.
            num_negatives: of a row at most, those of the highest score.
            top_k: documents that are found for each query, among which they are chosen.
            margin: of scores.
            relative_margin: as a share of the positive's score.
            batch_size: texts at once.
            say: logs the numbers of negatives.

        Returns:
            The rows with ``negatives``, a list of texts, and ``score``, a list with the score of the positive and of
            each negative.

        Raises:
            UserError: a row has no positive, or negatives already; a document is empty; the corpus has too few of them;
                or as `embed` and `rank`.
        """
        settings = Mining(num_negatives, top_k, margin, relative_margin)
        return mine_negatives(self, rows, corpus, scorer, label, settings, batch_size, say)

    def rank(
        self, query: str, documents: Sequence[str], label: str = "1", batch_size: int = 32
    ) -> list[RankedDocument]:
        """The documents in the order in which a cross-encoder, which reads a query together with a document, scores
        them: a `RankedDocument` each, the best one first.

        Args:
            query: a text.
            documents: texts.
            label: of a classifier: whose probability is the score. A reranker or regression needs none.
            batch_size: pairs at once.

        Raises:
            UserError: the model neither classifies nor scores pairs of texts, or has no such label; or a text is empty.
        """
        task = self.require_pair_scores(label)
        [text] = as_filled_texts("query", [query])
        pairs = [(text, document) for document in as_filled_texts("document", documents)]
        if isinstance(task, RegressionTask):  # with scores beyond the scale, which answers are cut to
            task = dataclasses.replace(task, lowest=-math.inf, highest=math.inf)
        answers = self.answers(task, pairs, batch_size)
        is_classifier = isinstance(task, ClassificationTask)
        return rank_by_score(answer.probabilities[label] if is_classifier else answer.score for answer in answers)

    def require_pair_scores(self, label: str) -> ClassificationTask | RegressionTask | RerankerTask:
        """The task, which scores pairs of texts. Raises UserError as `rank`."""
        if self.task is None and self.problem_type is None:
            raise UserError(
                f"{self.source} is an encoder, which gives pairs of texts no score: use a reranker, or search, which "
                "compares embeddings"
            )
        task = self.require_task()
        reads_pairs = any(len(columns) == 2 for columns in task.table_columns)
        if not (reads_pairs and isinstance(task, (ClassificationTask, RegressionTask, RerankerTask))):
            raise UserError(
                f"{self.source} gives pairs of texts no score ({task.name}): use a reranker, classifier or regression "
                "of pairs"
            )
        if isinstance(task, ClassificationTask) and label not in task.label_names:
            names = ", ".join(map(repr, task.label_names[:LABELS_SHOWN]))
            raise UserError(f"label is {label!r}, and the labels of {self.source} are {names}: pass one of these")
        return task
