"""Search and ranking."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import bert
from bert.inference import search
from bert.inference.search import blocks_of, find_nearest
from bert.model.heads import HEADS
from bert.model.pretraining import BertForPreTraining
from bert.tasks.sequence_classification import Score
from tests.tiny_models import CONFIG, TASKS, model_of

TEXTS = ["ba ko", "ri", "tu lo mi", "a b c d", "ba", "ko ri", "lo", "mi ba"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bert.Pretrained]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: model_of(folder, HEADS[TASKS[name].kind](CONFIG, TASKS[name].num_labels), TASKS[name])
            for name in ("pairs", "regression", "tagging", "classification")}  # fmt: skip
    return {**made, "encoder": model_of(folder, BertForPreTraining(CONFIG), None)}


@pytest.mark.parametrize("size", [3, 7, 100])
@pytest.mark.parametrize("top_k", [1, 5, 50])
def test_blocks_give_what_sorting_everything_gives(size: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes equal cosines, for which earlier documents come first."""
    monkeypatch.setattr(search, "TEXTS_AT_ONCE", size)
    random = np.random.default_rng(0)
    queries, corpus = random.integers(-1, 2, (20, 3)).astype(np.float32), random.integers(-1, 2, (50, 3))
    unit = [array / np.maximum(np.linalg.norm(array, axis=1, keepdims=True), 1e-9) for array in (queries, corpus)]
    cosines = (unit[0] @ unit[1].T.astype(np.float32)).astype(np.float32)
    expected = np.argsort(-cosines.round(5), axis=1, kind="stable")[:, :top_k]
    indices, scores = find_nearest(queries, blocks_of(corpus.astype(np.float32)), top_k)
    assert (indices.shape, scores.dtype) == ((20, top_k), np.float32)
    np.testing.assert_allclose(scores, np.take_along_axis(cosines, expected, axis=1), atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(cosines, indices, axis=1), scores, atol=1e-6)
    assert all(len(set(row)) == top_k for row in indices.tolist())


def test_of_equal_documents_the_first_ones_are_found() -> None:
    corpus = np.array([[1, 0], [0, 1], [1, 0], [1, 0], [1, 0]], np.float32)
    matches = find_nearest(np.array([[1.0, 0]]), [corpus[:2], corpus[2:4], corpus[4:]], 3)
    assert matches.indices.tolist() == [[0, 2, 3]]
    broken = find_nearest(np.full((1, 2), np.nan), [corpus], 2)
    assert broken.indices.tolist() == [[0, 1]]
    corpus[0], corpus[2], corpus[3] = np.nan, np.inf, 0
    matches = find_nearest(np.array([[1.0, 0]]), [corpus], 5)
    assert matches.indices[0, 0] == 4 and matches.scores[0, 0] == 1
    assert np.isfinite(matches.scores).all()


@pytest.mark.medium
def test_texts_are_searched_as_their_embeddings_are(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, queries = models["encoder"], ["ba ko", "lo mi"]
    whole = model.search(queries, TEXTS, top_k=3)
    cosines = model.similarity(queries, TEXTS)
    np.testing.assert_array_equal(whole.indices, np.argsort(-cosines, axis=1)[:, :3])
    np.testing.assert_allclose(whole.scores, -np.sort(-cosines, axis=1)[:, :3], atol=1e-6)
    assert whole.indices[0, 0] == 0 and whole.scores[0, 0] == pytest.approx(1, abs=1e-5)
    vectors = model.search(queries, model.embed(TEXTS), top_k=3)
    monkeypatch.setattr("bert.inference.search.TEXTS_AT_ONCE", 3)
    for matches in (vectors, model.search(queries, iter(TEXTS), top_k=3)):
        np.testing.assert_array_equal(matches.indices, whole.indices)
        np.testing.assert_allclose(matches.scores, whole.scores, atol=1e-5)
    alone = model.search("ba ko", TEXTS, top_k=100)
    assert alone.indices.shape == alone.scores.shape == (8,)
    assert model.search([], TEXTS).indices.shape == (0, 8)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((["a"], []), "the corpus has no documents"),
        ((["a"], ["b", " "]), "document 2 is empty"),
        (([""], ["b"]), "query 1 is empty"),
        ((["a"], ["b", 3]), "input 2 is 3"),
        ((["a"], ["b"], 0), r"top_k is 0.*least 1"),
        ((["a"], np.zeros((4, 3))), r"\[4, 3\].*made have 8"),
        ((["a"], np.zeros((0, 8))), "the corpus has no documents"),
    ],
)
def test_a_search_without_sense_is_one_sentence(models: dict[str, Any], arguments: Any, told: str) -> None:
    with pytest.raises(bert.UserError, match=told):
        models["encoder"].search(*arguments)


class ExactIndex:
    """An index with the names that FAISS gives, by all scalar products."""

    def __init__(self, vectors: np.ndarray, metric_type: int = 0) -> None:
        self.vectors, self.metric_type = vectors, metric_type
        self.ntotal, self.d = vectors.shape

    def search(self, queries: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        scores = queries @ self.vectors.T
        indices = np.argsort(-scores, axis=1)[:, :top_k]
        return np.take_along_axis(scores, indices, axis=1), indices


@pytest.mark.medium
@pytest.mark.parametrize("library", ["none", "faiss"])
def test_an_index_is_searched_as_its_vectors_are(models: dict[str, Any], library: str) -> None:
    model, queries = models["encoder"], ["ba ko", "lo mi"]
    vectors = model.embed(TEXTS)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    if library == "none":
        index = ExactIndex(unit)
    else:
        faiss = pytest.importorskip("faiss", reason="needs the extra `faiss`")
        index = faiss.IndexHNSWFlat(unit.shape[1], 8, faiss.METRIC_INNER_PRODUCT)
        index.add(unit)
    expected = model.search(queries, vectors, top_k=3)
    matches = model.search(queries, index, top_k=3)
    np.testing.assert_array_equal(matches.indices, expected.indices)
    np.testing.assert_allclose(matches.scores, expected.scores, atol=1e-5)
    assert (matches.indices.dtype, matches.scores.dtype) == (np.int64, np.float32)
    assert model.search("ba ko", index, top_k=100).indices.shape == (8,)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (ExactIndex(np.zeros((4, 3))), "vectors of 3 .* embeddings of made have 8"),
        (ExactIndex(np.zeros((4, 8)), 1), "faiss.METRIC_INNER_PRODUCT"),
        (ExactIndex(np.zeros((0, 8))), "the index has no documents"),
    ],
)
def test_an_index_of_another_kind_is_one_sentence(models: dict[str, Any], index: ExactIndex, told: str) -> None:
    with pytest.raises(bert.UserError, match=told):
        models["encoder"].search(["a"], index)


@pytest.mark.medium
def test_documents_are_ranked_by_the_score_or_the_probability_of_a_label(models: dict[str, Any]) -> None:
    scale = dataclasses.replace(models["regression"].task, lowest=-100.0, highest=100.0)
    wide = dataclasses.replace(models["regression"], task=scale)
    for name, label in (("regression", "1"), ("pairs", "equivalent"), ("pairs", "not_equivalent")):
        whole = wide if name == "regression" else models[name]  # scores beyond the scale keep their order
        answers = whole.predict([("ba", text) for text in TEXTS])
        scores = [answer.score if isinstance(answer, Score) else answer.probabilities[label] for answer in answers]
        ranked = models[name].rank("ba", TEXTS, label)
        assert [document.number for document in ranked] == np.argsort(-np.array(scores), kind="stable").tolist()
        assert [document.score for document in ranked] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    assert models["pairs"].rank("ba", [], "equivalent") == []


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("encoder", ("a", ["b"]), "made is an encoder"),
        ("tagging", ("a", ["b"]), r"made .*pairs.*\(conll2003\)"),
        ("pairs", ("a", ["b"], "good"), "label is 'good', .* made are 'not_equivalent', 'equivalent'"),
        ("classification", ("a", ["b"], "no"), r"pairs.*\(classification\).*reranker"),
        ("pairs", ("a", ["b", ""], "equivalent"), "document 2 is empty"),
        ("pairs", (" ", ["b"], "equivalent"), "query 1 is empty"),
    ],
)
def test_a_ranking_without_sense_is_one_sentence(models: dict[str, Any], name: str, arguments: Any, told: str) -> None:
    with pytest.raises(bert.UserError, match=told):
        models[name].rank(*arguments)
