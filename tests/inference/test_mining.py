"""Mining of hard negatives."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bert
from bert.commands.predictions import mine_command as main
from bert.inference.mining import max_negative_score
from bert.inference.search import RankedDocument
from bert.model.pooling import Pooling
from bert.model.pretraining import BertForPreTraining
from tests.tiny_models import CONFIG, model_of

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
    own = model.mine_negatives(
        [{"query": q, "positive": q} for q in CORPUS], None, num_negatives=2, top_k=2, relative_margin=0
    )
    assert [len(row["negatives"]) for row in own] == [2] * len(CORPUS)  # the positive is none of the two
    own = model.mine_negatives([{"query": q, "positive": q} for q in CORPUS], None, num_negatives=2)
    assert {text for row in own for text in row["negatives"]} <= set(CORPUS)


@pytest.mark.medium
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


@pytest.mark.medium
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
