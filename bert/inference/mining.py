"""Mining of hard negatives: documents that a search returns and that do not answer the query."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bert.config.finetuning import ColumnsConfig
from bert.data.inputs import as_filled_texts, check_count
from bert.data.records import read_records
from bert.errors import Log, UserError, quoted, renamed_argument
from bert.inference.search import blocks_of, find_nearest
from bert.tasks.columns import json_lines
from bert.tasks.text_pairs import read_queries


@renamed_argument("say", "log")
def mine_negatives(
    model: Any,
    rows: Any,
    corpus: Sequence[str] | None = None,
    *,
    scorer: Any = None,
    label: str = "1",
    num_negatives: int = 4,
    top_k: int = 50,
    margin: float = 0.0,
    relative_margin: float = 0.05,
    batch_size: int = 32,
    log: Log = lambda text: None,
) -> list[dict[str, Any]]:
    """Adds hard negatives to rows: documents that a search returns and that are not positives of the query.

    A document with a score close to the positive's may be an unlabelled correct answer. A negative's score is
    therefore lower by at least ``margin`` plus ``relative_margin`` times the absolute value of the positive's score.

    Args:
        rows: dictionaries with ``query`` and ``positive``, a data frame, or the path of a file with these columns.
        corpus: documents; None for the positives of all rows.
        scorer: a cross-encoder (`Pretrained`) whose scores replace the similarity of embeddings.
        label: label, if the scorer is a classifier (see `rank`).
        num_negatives: maximum number of negatives per row. Those with the highest scores are chosen.
        top_k: number of retrieved documents per query besides its positives, from which negatives are chosen.
        margin: minimum difference between the scores.
        relative_margin: minimum difference as a share of the positive's score.
        batch_size: number of texts per batch.
        log: called with the numbers of negatives.

    Returns:
        The rows with ``negatives``, a list of texts, and ``score``, the scores of the positive and each negative.

    Raises:
        UserError: a row has no positive or already has negatives, a document is empty, or the corpus is too small;
            see also `embed` and `rank`.
    """
    if scorer is not None:
        scorer.require_pair_scores(label)
    fields, queries, positives = _read_rows(rows)
    documents: list[Any] = list(dict.fromkeys(as_filled_texts("document", positives if corpus is None else corpus)))
    positives_of: dict[str, set[str]] = {}
    for query, positive in zip(queries, positives, strict=True):
        positives_of.setdefault(query, set()).add(positive)
    known = set(documents)
    max_others = len(documents) - min(len(texts & known) for texts in positives_of.values())
    _check_mining(num_negatives, top_k, max_others, margin=margin, relative_margin=relative_margin)
    found = top_k + max(len(texts & known) for texts in positives_of.values())  # of which the positives are left out
    retrieved = _retrieve(model, queries, positives, documents, found, batch_size)
    mined, num_dropped = [], 0
    for row, query, positive, (own_score, scored) in zip(fields, queries, positives, retrieved, strict=True):
        candidates = [(text, score) for text, score in scored if text not in positives_of[query]][:top_k]
        if scorer is not None:
            texts = [positive, *(text for text, _ in candidates)]
            ranked = scorer.rank(query, texts, label, batch_size)
            own_score = next(score for number, score in ranked if number == 0)
            candidates = [(texts[number], score) for number, score in ranked if number > 0]
        bound = max_negative_score(own_score, margin, relative_margin)
        chosen = [(text, score) for text, score in candidates if score < bound]
        num_dropped += len(candidates) - len(chosen)
        chosen = chosen[:num_negatives]
        mined.append(
            {**row, "negatives": [text for text, _ in chosen], "score": [own_score, *(score for _, score in chosen)]}
        )
    counts = np.array([len(row["negatives"]) for row in mined])
    log(
        f"{len(mined):,} rows: {counts.sum():,} negatives, {np.count_nonzero(counts < num_negatives):,} rows with "
        f"fewer than {num_negatives}, {np.count_nonzero(counts == 0):,} with none; {num_dropped:,} documents were too "
        "close to the positive"
    )
    return mined


def _check_mining(num_negatives: int, top_k: int, max_others: int, **margins: float) -> None:
    """Raises UserError for invalid settings. A query has up to ``max_others`` documents besides its positives."""
    check_count("num_negatives", num_negatives)
    check_count("top_k", top_k)
    for name, value in margins.items():
        if not 0 <= value < np.inf:
            raise UserError(f"{name} is {value}: pass a number of at least 0")
    if num_negatives > top_k:
        raise UserError(f"num_negatives is {num_negatives}, but top_k is {top_k}: raise top_k")
    if num_negatives > max_others:
        raise UserError(
            f"num_negatives is {num_negatives}, but besides its positives a query has at most {max_others} documents "
            "in the corpus: pass a smaller number"
        )


def max_negative_score(positive: float, margin: float, relative_margin: float) -> float:
    """Returns the upper bound for a negative's score. Documents above it may be unlabelled answers."""
    return positive - margin - relative_margin * abs(positive)


def _retrieve(
    model: Any, queries: list[str], positives: list[Any], documents: list[Any], number: int, batch_size: int
) -> Iterator[tuple[float, list[tuple[Any, float]]]]:
    """Yields the similarity of each row's positive, and ``number`` nearest documents with theirs, best first."""
    similarity = model.pooling_or_default.similarity
    distinct = {query: index for index, query in enumerate(dict.fromkeys(queries))}
    vectors = model.embed(list(distinct), batch_size, "query")
    blocks = blocks_of(model.embed(documents, batch_size, "document"))
    nearest = find_nearest(vectors, blocks, min(number, len(documents)), similarity)
    answers = {positive: index for index, positive in enumerate(dict.fromkeys(positives))}
    answer_vectors = model.embed(list(answers), batch_size, "document")
    for query, positive in zip(queries, positives, strict=True):
        index, answer = distinct[query], answers[positive]
        pair = (vectors[index : index + 1], [answer_vectors[answer : answer + 1]])
        score = find_nearest(*pair, 1, similarity).scores[0, 0]
        scored = zip(nearest.indices[index], map(float, nearest.scores[index]), strict=True)
        yield float(score), [(documents[place], score) for place, score in scored]


def _read_rows(rows: Any) -> tuple[list[dict[str, Any]], list[str], list[str]]:
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
