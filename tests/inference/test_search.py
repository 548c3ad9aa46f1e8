"""Search, ranking and mining of hard negatives."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.commands.predictions import mine_command as main
from bert.inference import search
from bert.inference.search import RankedDocument, blocks_of, find_nearest, max_negative_score
from bert.model.heads import HEADS
from bert.model.pooling import Pooling
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


CORPUS = ["ba ko", "ri", "tu lo mi", "a b c d", "ba", "ko ri", "lo", "mi ba"]
ROWS = [
    {"query": "ba ri", "positive": "ba", "id": 7},
    {"query": "tu", "positive": "lo"},
    {"query": "ba ri", "positive": "ko ri"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bert.Pretrained:
    return model_of(tmp_path_factory.mktemp("model"), BertForPreTraining(CONFIG), None)


class Scorer:
    """A cross-encoder that scores a document by its place in the corpus."""

    def require_pair_scores(self, label: str) -> None:
        if label != "relevant":
            raise bert.UserError(f"no label {label}")

    def rank(self, query: str, documents: list[str], label: str, batch_size: int) -> list[RankedDocument]:
        assert label == "relevant"
        scores = [float(-CORPUS.index(text)) for text in documents]
        return [RankedDocument(int(i), scores[i]) for i in np.argsort(-np.array(scores), kind="stable")]


@pytest.mark.medium
def test_negatives_are_the_nearest_documents_below_the_margin(model: bert.Pretrained) -> None:
    """By sorting all cosines; the positives of other rows of the query are none."""
    said: list[str] = []
    settings = {"margin": 0.01, "relative_margin": 0.02, "num_negatives": 3, "log": said.append}
    rows = model.mine_negatives(ROWS, CORPUS, **settings)
    left_out = 0
    for row, mined in zip(ROWS, rows, strict=True):
        cosines = model.similarity(row["query"], CORPUS)[0]
        own = cosines[CORPUS.index(row["positive"])]
        right = {other["positive"] for other in ROWS if other["query"] == row["query"]}
        order = [i for i in np.argsort(-cosines) if CORPUS[i] not in right]
        kept = [i for i in order if cosines[i] < own - 0.01 - 0.02 * abs(own)]
        left_out += len(order) - len(kept)
        assert mined == {**row, "negatives": [CORPUS[i] for i in kept[:3]], "score": mined["score"]}
        assert mined["score"] == pytest.approx([own, *cosines[kept[:3]]], abs=1e-5)
    assert left_out > 0, "the margin does something"
    assert said[0].endswith(f"{left_out} documents were too close to the positive")
    assert [row["negatives"] for row in model.mine_negatives(ROWS, CORPUS, margin=9)] == [[], [], []]
    own = model.mine_negatives([{"query": q, "positive": q} for q in CORPUS], None, num_negatives=2)
    assert {text for row in own for text in row["negatives"]} <= set(CORPUS)


def test_a_cross_encoder_scores_in_place_of_the_cosine(model: bert.Pretrained) -> None:
    scored: Any = {"scorer": Scorer(), "label": "relevant", "num_negatives": 1}
    [_, row, _] = model.mine_negatives(ROWS, CORPUS, **scored, relative_margin=0)
    assert (row["negatives"], row["score"]) == (["mi ba"], [-6, -7])
    [_, row, _] = model.mine_negatives(ROWS, CORPUS, **scored, margin=1)
    assert row["negatives"] == []


def test_a_scorer_is_checked_before_the_corpus_is_embedded(model: bert.Pretrained, monkeypatch) -> None:
    monkeypatch.setattr(bert.Pretrained, "embed", lambda *_: pytest.fail("it was embedded"))
    with pytest.raises(bert.UserError, match="no label 1"):
        model.mine_negatives(ROWS, CORPUS, scorer=Scorer())
    with pytest.raises(bert.UserError, match="is an encoder"):
        model.mine_negatives(ROWS, CORPUS, scorer=model)


def test_prompts_are_those_of_the_model(model: bert.Pretrained) -> None:
    prompted = dataclasses.replace(model, pooling=Pooling(query_prompt="a ", document_prompt="b "))
    np.testing.assert_allclose(prompted.embed(["ko"], prompt="query"), model.embed(["a ko"]), atol=1e-6)
    np.testing.assert_allclose(prompted.embed("ko", prompt="document"), model.embed("b ko"), atol=1e-6)
    np.testing.assert_array_equal(prompted.embed("ko"), model.embed("ko"))
    np.testing.assert_array_equal(model.embed("ko", prompt="query"), model.embed("ko"))
    matches = prompted.search("ko", CORPUS, top_k=3)
    expected = model.search("a ko", [f"b {text}" for text in CORPUS], top_k=3)
    np.testing.assert_array_equal(matches.indices, expected.indices)
    mined = prompted.mine_negatives([{"query": "ko", "positive": "ri"}], CORPUS, relative_margin=0)[0]
    assert mined["score"][0] == pytest.approx(model.similarity("a ko", "b ri")[0, 0], abs=1e-5)
    with pytest.raises(bert.UserError, match="prompt is 'passage'"):
        prompted.embed("ko", prompt="passage")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "corpus", "settings", "told"),
    [
        ([{"query": "a"}], CORPUS, {}, "row 1: the query has no 'positive'"),
        (
            [*ROWS, {"positive": "a"}],
            CORPUS,
            {},
            "row 4: no 'query' among 'positive'",
        ),
        (
            [{**ROWS[0], "negatives": ["a"]}],
            CORPUS,
            {},
            r"row 1.*'negatives'",
        ),
        (ROWS, [*CORPUS, " "], {}, "document 9 is empty"),
        (ROWS, None, {}, "num_negatives is 4, .* at most 2 documents"),
        (ROWS, CORPUS, {"num_negatives": 0}, r"num_negatives is 0.*least 1"),
        (ROWS, CORPUS, {"top_k": 3}, "num_negatives is 4, but top_k is 3: raise top_k"),
        (ROWS, CORPUS, {"margin": -1}, r"margin is -1.*least 0"),
        ([], CORPUS, {}, "rows has no rows"),
    ],
)
def test_wrong_input_is_one_sentence(
    model: bert.Pretrained, rows: Any, corpus: Any, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(bert.UserError, match=told) as caught:
        model.mine_negatives(rows, corpus, **settings)
    assert "\n" not in str(caught.value)


def test_the_command_writes_rows(model: bert.Pretrained, bucket, tmp_path: Path, monkeypatch, fails) -> None:
    monkeypatch.setattr("bert.inference.load.load", lambda name, log, **adapter: model)
    rows, corpus = tmp_path / "rows.jsonl", tmp_path / "corpus.txt"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    corpus.write_text("".join(f"{text}\n" for text in CORPUS))
    arguments = ["made", str(rows), "--corpus", str(corpus), "--num_negatives", "2"]
    assert main([*arguments, "--output", str(tmp_path / "out.jsonl")]) == 0
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written == model.mine_negatives(ROWS, CORPUS, num_negatives=2)
    table = tmp_path / "corpus.jsonl"
    table.write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS))
    assert main([*arguments[:2], "--corpus", str(table), "--num_negatives=2", "--output", str(tmp_path / "same")]) == 0
    assert (tmp_path / "same").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    for file in (rows, corpus):
        bucket.pipe(f"/b/{file.name}", file.read_bytes())
    remote = ["made", "memory://b/rows.jsonl", "--corpus", "memory://b/corpus.txt", "--num_negatives=2"]
    assert main([*remote, "--output", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("bert.inference.load.load", None)  # a missing folder is reported before mining starts
        assert "none is not a folder" in fails(main, *arguments, "--output", str(tmp_path / "none" / "out.jsonl"))
    assert "exists already" in fails(main, *arguments, "--output", str(tmp_path / "out.jsonl"))
    corpus.write_text("ba\n\nko\n")
    assert "corpus.txt, line 2: the document is empty" in fails(main, *arguments)
    table.write_text('{"title": "a"}\n')
    unnamed = fails(main, *arguments[:2], "--corpus", str(table))
    assert "line 1: no 'text' among 'title'" in unnamed
    assert "does not exist" in fails(main, *arguments[:2], "--corpus", str(tmp_path / "none"))


def test_the_margin_of_negative_scores_is_below_them() -> None:
    assert max_negative_score(-10, margin=1, relative_margin=0.1) == -12
    assert max_negative_score(10, margin=1, relative_margin=0.1) == 8
