"""Models with an embedding per token: embed, similarity, search, rank and mining of negatives."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.stats import spearmanr
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import BertPreTokenizer

import bert
from bert.config import EmbeddingConfig, FinetuneConfig
from bert.config.options import LateInteractionConfig
from bert.inference import search
from bert.model.late_interaction import LateInteraction
from bert.model.pooling import PooledDense, Pooling
from bert.model.pretraining import BertForPreTraining
from bert.training.finetuning.kinds import TASK_KINDS
from tests.tiny_models import CONFIG, model_of

NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", "a", "!"]
TEXTS = ["ba ko", "ri", "tu lo mi", "a b c d", "ba", "ko ri", "lo", "mi ba"]
PROJECTION = PooledDense(
    np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), None, "torch.nn.modules.linear.Identity"
)
POOLING = Pooling(
    "tokens",
    normalize=True,
    query_prompt="x ",
    document_prompt="y ",
    dense=(PROJECTION,),
    similarity="maxsim",
    interaction=LateInteraction(query_length=8, document_length=6, expanded_length=8, skipped_tokens=("b", "##a")),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bert.Pretrained:
    return model_of(tmp_path_factory.mktemp("model"), BertForPreTraining(CONFIG), None, pooling=POOLING)


def written_out(query: np.ndarray, document: np.ndarray) -> float:
    return sum(max(float(token @ other) for other in document) for token in query)


@pytest.mark.medium
def test_embeddings_are_scaled_projections_of_hidden_states(model: bert.Pretrained) -> None:
    text = "y ba k"  # "y ba ko" cut to the six tokens of a document
    pieces = [model.tokenizer.id_to_token(token) for token in model.tokenize(text)["input_ids"][0].tolist()]
    assert pieces == ["[CLS]", "y", "b", "##a", "k", "[SEP]"]
    expected = model.encode(text).last_hidden_state[0] @ PROJECTION.kernel
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(model.embed("ba ko", prompt="document"), expected[[0, 1, 4, 5]], atol=1e-5)
    np.testing.assert_allclose(model.embed(text), expected[[0, 1, 4, 5]], atol=1e-5)


@pytest.mark.medium
def test_mask_tokens_see_the_query_and_not_each_other(model: bert.Pretrained) -> None:
    """The query's own vectors are those without expansion. A mask token's vector depends on its position alone."""
    query = model.embed("ba", prompt="query")
    assert query.shape == (8, 4)
    interaction = LateInteraction(query_length=8)
    without = dataclasses.replace(model, pooling=dataclasses.replace(POOLING, interaction=interaction))
    np.testing.assert_allclose(query[:5], without.embed("ba", prompt="query"), atol=1e-6)
    shorter = dataclasses.replace(interaction, expanded_length=6)
    six = dataclasses.replace(model, pooling=dataclasses.replace(POOLING, interaction=shorter))
    np.testing.assert_allclose(query[:6], six.embed("ba", prompt="query"), atol=1e-6)
    attends = dataclasses.replace(POOLING.interaction, attends_to_expansion=True)
    attending = dataclasses.replace(model, pooling=dataclasses.replace(POOLING, interaction=attends))
    assert np.abs(query[:5] - attending.embed("ba", prompt="query")[:5]).max() > 1e-3


@pytest.mark.medium
@pytest.mark.parametrize("prompt", ["query", "document", None])
def test_a_batch_changes_nothing(model: bert.Pretrained, prompt: Any) -> None:
    """Padded rows, rows of one text, and packed rows (many short texts)."""
    texts = TEXTS * 40
    together = model.embed(texts, 4, prompt)
    assert len(together) == len(texts)
    for text, embeddings in zip(TEXTS, together[-8:], strict=True):
        assert embeddings.dtype == np.float32
        np.testing.assert_allclose(model.embed(text, prompt=prompt), embeddings, atol=1e-5)
    assert model.embed([], prompt=prompt) == []


@pytest.mark.medium
def test_encode_returns_the_embeddings_without_a_role(model: bert.Pretrained) -> None:
    output = model.encode(TEXTS)
    assert output.last_hidden_state.shape[:2] == output.attention_mask.shape
    for actual, expected in zip(output.embeddings, model.embed(TEXTS), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.medium
def test_queries_and_documents_are_compared_by_max_sim(model: bert.Pretrained, monkeypatch) -> None:
    queries = ["ba ko", "lo mi"]
    sides = model.embed(queries, prompt="query"), model.embed(TEXTS, prompt="document")
    scores = np.array([[written_out(query, document) for document in sides[1]] for query in sides[0]])
    np.testing.assert_allclose(model.similarity(queries, TEXTS), scores, rtol=1e-4)
    assert model.similarity("ba", TEXTS[0]).shape == (1, 1)
    order = np.argsort(-scores, axis=1)[:, :3]
    stacked = np.stack([document[:3] for document in sides[1]])
    for size in (4096, 3):
        monkeypatch.setattr(search, "TEXTS_AT_ONCE", size)
        for corpus in (TEXTS, iter(TEXTS), sides[1], tuple(sides[1])):
            found = model.search(queries, corpus, top_k=3)
            np.testing.assert_array_equal(found.indices, order)
            np.testing.assert_allclose(found.scores, np.take_along_axis(scores, order, axis=1), rtol=1e-4)
        np.testing.assert_array_equal(
            model.search(queries, stacked).indices, model.search(queries, list(stacked)).indices
        )
    ranked = model.rank(queries[0], TEXTS)
    assert [document.number for document in ranked[:3]] == order[0].tolist()
    assert ranked[0].score == pytest.approx(scores[0].max(), rel=1e-4)


def test_equal_documents_keep_their_order(model: bert.Pretrained) -> None:
    documents = ["ba", "ri", "ba", "ba"]
    first = sorted(range(4), key=lambda number: -model.similarity("ba", documents)[0, number])
    assert model.search("ba", documents).indices.tolist() == first
    assert [document.number for document in model.rank("ba", documents)] == first
    assert model.search("ba", model.embed(documents, prompt="document"), top_k=2).indices.tolist() == first[:2]


@pytest.mark.medium
def test_negatives_are_mined(model: bert.Pretrained) -> None:
    rows = [{"query": text, "positive": text} for text in TEXTS]
    mined = model.mine_negatives(rows, num_negatives=2, top_k=7, relative_margin=0.0)
    for row in mined:
        scores = model.similarity(row["query"], [row["positive"], *row["negatives"]])[0]
        np.testing.assert_allclose(row["score"], scores, rtol=1e-4)
        assert (scores[1:] < scores[0]).all()


@pytest.mark.parametrize(
    ("corpus", "told"),
    [
        (np.zeros((3, 4), np.float32), "the corpus has one per text: pass texts, or the list of arrays"),
        (csr_array(np.zeros((3, 4))), "the corpus has one per text"),
        (SimpleNamespace(d=4, ntotal=3, metric_type=0, search=None), "the corpus has one per text"),
        ([np.zeros((3, 4)), np.zeros((3, 5))], r"document 1 of the corpus .* shape \[3, 5\], .* \[T, 4\]"),
        ([np.zeros((3, 4)), np.zeros(4)], r"document 1 .* shape \[4\]"),
        ([np.full((3, 4), np.nan)], "document 0 of the corpus .* NaN or infinity"),
        ([], "the corpus has no documents"),
        (["ba", ""], "document 2 is empty"),
    ],
)
def test_a_corpus_that_cannot_be_compared_is_an_error(model: bert.Pretrained, corpus: Any, told: str) -> None:
    with pytest.raises(bert.UserError, match=told):
        model.search("ba", corpus)


@pytest.mark.medium
def test_evaluation_compares_by_max_sim(model: bert.Pretrained) -> None:
    """Ranks among the documents of all rows, and the order of pairs with scores; other models are compared with it."""
    rows = [{"query": text, "positive": other} for text, other in itertools.pairwise(TEXTS)]
    scores = model.similarity([row["query"] for row in rows], [row["positive"] for row in rows])
    ranks = 1 + np.sum(scores >= np.diag(scores)[:, None], axis=1) - 1
    found = model.evaluate(rows, compare=model)
    assert found.metrics["mrr_at_10"] == pytest.approx(np.mean(1 / ranks))
    assert found.comparison.metrics == found.metrics
    pairs = [{"text_a": text, "text_b": TEXTS[0], "score": number} for number, text in enumerate(TEXTS)]
    expected = spearmanr(model.similarity(TEXTS, TEXTS[:1])[:, 0], np.arange(len(TEXTS))).statistic
    assert model.evaluate(pairs).metrics["spearman"] == pytest.approx(expected)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("format", "pooling"),
    [
        ("onnx", POOLING),
        ("stablehlo", dataclasses.replace(POOLING, normalize=False, similarity="meanmaxsim", dense=(
            PooledDense(PROJECTION.kernel, np.ones(4, np.float32), "torch.nn.modules.activation.Tanh"),),
            interaction=LateInteraction(expanded_length=6, attends_to_expansion=True, expansion_token="a",
                                        skipped_tokens=("b",), skipping_roles=("query",)))),
    ],
)  # fmt: skip
def test_a_graph_returns_the_vectors(
    format: str, pooling: Pooling, model: bert.Pretrained, tmp_path: Path, monkeypatch
) -> None:
    """Runs the code of its README.md."""
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
    model = model.replace(architecture="Bert", pooling=pooling)
    model.save(tmp_path / "out", format, lambda text: None)
    monkeypatch.chdir(tmp_path / "out")
    code = "".join(block.split("```")[0] for block in Path("README.md").read_text().split("```python\n")[1:])
    code = code.replace('"one text"', '"ba ko", "lo"').replace('"another text"', '"ri", "a b c d tu lo mi"')
    result: dict[str, Any] = {}
    exec(code, result)
    for name, texts in (("query", ["ba ko", "lo"]), ("document", ["ri", "a b c d tu lo mi"])):
        found = result[{"query": "queries", "document": "documents"}[name]]
        for actual, expected in zip(found, model.embed(texts, prompt=name), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5)
    signature = json.loads(Path("signature.json").read_text())
    assert [port["name"] for port in signature["outputs"]][-2:] == ["token_embeddings", "token_mask"]
    assert signature["pooling"]["interaction"]["expanded_length"] == pooling.interaction.expanded_length


@pytest.mark.medium
def test_a_graph_of_8_bits_is_compared(model: bert.Pretrained, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    said: list[str] = []
    model.replace(architecture="Bert").save(
        tmp_path / "out", "onnx", said.append, quantize="int8", dev=TEXTS, tolerance=0.5
    )
    assert any("| cosine with the float model | 1.0000 |" in text for text in said)


def test_methods_without_an_equivalent_are_errors(model: bert.Pretrained, monkeypatch) -> None:
    with pytest.raises(bert.UserError, match="made compares queries with documents, and the data has the columns text"):
        model.evaluate([{"text": "a", "label": "b"}, {"text": "b", "label": "b"}])
    with pytest.raises(bert.UserError, match="long_texts is windows, but made has an embedding per token"):
        model.embed(["ba"], long_texts="windows")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    with pytest.raises(bert.UserError, match="made compares embeddings by maxsim: use a model whose similarity is"):
        bert.MtebEncoder(model)


def resolved(declared: Pooling | None, tokenizer: Any, log: Any = pytest.fail, **settings: Any) -> EmbeddingConfig:
    config = FinetuneConfig(task="embedding", embedding=EmbeddingConfig(**settings))
    return TASK_KINDS["embedding"].resolve(config, declared, tokenizer, "made", log).embedding


def test_another_pooling_is_trained_without_the_projection(model: bert.Pretrained) -> None:
    said: list[str] = []
    assert resolved(POOLING, model.tokenizer, said.append, pooling="mean").query_prompt == "x "
    [warned] = said
    assert "its Dense modules" in warned and "similarity maxsim" in warned


def test_settings_are_those_of_the_initial_model(model: bert.Pretrained) -> None:
    settings = resolved(POOLING, model.tokenizer)
    assert (settings.pooling, settings.normalize, settings.dimensions) == ("tokens", True, 4)
    assert (settings.query_prompt, settings.document_prompt) == ("x ", "y ")
    assert settings.late_interaction == LateInteractionConfig(8, 8, False, None, ["b", "##a"], ["document"])
    shorter = resolved(POOLING, model.tokenizer, late_interaction=LateInteractionConfig(query_length=5))
    assert (shorter.late_interaction.query_length, shorter.late_interaction.expanded_length) == (5, 5)
    with pytest.raises(bert.UserError, match=r"embedding\.dimensions is 5, but made projects hidden states to 4"):
        resolved(POOLING, model.tokenizer, dimensions=5)
    said: list[str] = []
    layer = PooledDense(PROJECTION.kernel, np.ones(4, np.float32), PROJECTION.activation)
    other = dataclasses.replace(POOLING, dense=(layer,), normalize=False, similarity="meanmaxsim")
    assert resolved(other, model.tokenizer, said.append).dimensions == 128
    assert all(part in said[0] for part in ("Dense modules", "vectors that are not scaled", "similarity meanmaxsim"))
    square = PooledDense(np.eye(4, dtype=np.float32) * 2, None, PROJECTION.activation)
    both = dataclasses.replace(POOLING, dense=(PROJECTION, square))
    np.testing.assert_array_equal(both.projection, 2 * PROJECTION.kernel)


def test_a_plain_encoder_has_the_settings_of_colbert() -> None:
    """Prefixes are the unused tokens of the vocabulary, which become special tokens."""
    tokenizer = Tokenizer(WordLevel({name: row for row, name in enumerate(NAMES)}, "[UNK]"))
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.add_special_tokens(NAMES[:5])
    settings = resolved(None, tokenizer, pooling="tokens")
    assert settings.late_interaction == LateInteractionConfig(32, 32, False, None, ["!"], ["document"])
    assert (settings.dimensions, settings.query_prompt, settings.document_prompt) == (128, "[unused0] ", "[unused1] ")
    assert tokenizer.encode("[unused0] a!", add_special_tokens=False).tokens == ["[unused0]", "a", "!"]
    plain = resolved(None, tokenizer, pooling="tokens", query_prompt="", late_interaction=LateInteractionConfig(
        expanded_length=0, skipped_tokens=[]))  # fmt: skip
    assert (plain.query_prompt, plain.document_prompt, plain.late_interaction.skipped_tokens) == ("", "", [])
    assert plain.late_interaction.expanded_length == 0
    for name, value in (("skipped_tokens", ["?"]), ("expansion_token", "?")):
        with pytest.raises(bert.UserError, match=r"the vocabulary (lacks|has no token '\?')"):
            resolved(None, tokenizer, pooling="tokens", late_interaction=LateInteractionConfig(**{name: value}))


def test_weights_that_are_not_finite_are_an_error(model: bert.Pretrained) -> None:
    broken = PooledDense(np.full((8, 4), np.nan, np.float32), None, PROJECTION.activation)
    damaged = dataclasses.replace(model, pooling=dataclasses.replace(POOLING, dense=(broken,)))
    with pytest.raises(bert.UserError, match="input 1: the model's output is NaN or infinite"):
        damaged.embed(["ba"])
