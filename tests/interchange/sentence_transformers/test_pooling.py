"""How hidden states become embeddings, by hand, and the folders of sentence-transformers that declare it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

import bert
from bert.config import ModelConfig
from bert.errors import UserError
from bert.inference.search import find_nearest
from bert.interchange.sentence_transformers.names import SIGMOID
from bert.interchange.sentence_transformers.reader import TANH, read_pooling
from bert.interchange.sentence_transformers.writer import write_pooling_files
from bert.model.pooling import MODES, PooledDense, Pooling
from tests.interchange.hf_folders import CONFIG, edit

IDENTITY = "torch.nn.modules.linear.Identity"
HIDDEN = np.array([[[1, 8], [3, 2], [5, 5], [9, 9]]], np.float32)
MASK = np.array([[1, 1, 1, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("cls", [1, 8]),
        ("max", [5, 8]),
        ("mean", [3, 5]),
        ("mean_sqrt_len", [9 / 3**0.5, 15 / 3**0.5]),
        ("weightedmean", [(1 + 6 + 15) / 6, (8 + 4 + 15) / 6]),
        ("lasttoken", [5, 5]),
        ("mean+cls", [3, 5, 1, 8]),
    ],
)
def test_each_mode_by_hand(mode: str, expected: list[float]) -> None:
    pooling = Pooling(mode)
    for actual in (pooling(HIDDEN, MASK), pooling.of_sequences(HIDDEN[0, :3], np.array([3]))):
        np.testing.assert_allclose(actual, [expected], rtol=1e-6)
    assert pooling.embedding_size(ModelConfig(hidden_size=2, num_attention_heads=1)) == len(expected)


@pytest.mark.parametrize("mode", ["max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"])
def test_a_text_without_tokens_has_zeros(mode: str) -> None:
    np.testing.assert_array_equal(Pooling(mode)(HIDDEN, 0 * MASK), [[0, 0]])


@pytest.mark.parametrize("mode", MODES)
def test_tokens_of_a_prompt_are_left_out(mode: str) -> None:
    skipped, pooling = np.array([1]), Pooling(mode)
    expected = {"cls": [3, 2], "max": [5, 5], "mean": [4, 3.5], "lasttoken": [5, 5]}
    expected |= {"mean_sqrt_len": [8 / 2**0.5, 7 / 2**0.5], "weightedmean": [(6 + 15) / 5, (4 + 15) / 5]}
    np.testing.assert_allclose(pooling(HIDDEN, MASK, skipped), [expected[mode]], rtol=1e-6)
    np.testing.assert_allclose(pooling.of_sequences(HIDDEN[0, :3], np.array([3]), skipped), [expected[mode]], rtol=1e-6)
    assert np.isfinite(pooling(HIDDEN, MASK, np.array([9]))).all(), "a row with nothing but a prompt"


def test_layers_scaling_and_truncation_are_applied_in_this_order() -> None:
    layer = PooledDense(np.eye(2, 3, dtype=np.float32), np.array([0, 0, 4], np.float32), IDENTITY)
    result = Pooling("cls", normalize=True, dense=(layer,), truncate_dim=2)(HIDDEN, MASK)
    np.testing.assert_allclose(result, [[1 / 9, 8 / 9]], rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "num_log1p", "expected"),
    [
        ("max", 1, [np.log(6), 0, np.log(3)]),
        ("sum", 1, [np.log(2) + np.log(6), 0, np.log(3)]),
        ("max", 2, [np.log1p(np.log(6)), 0, np.log1p(np.log(3))]),
    ],
)
def test_words_are_weighted_by_hand(mode: str, num_log1p: int, expected: list[float]) -> None:
    logits = np.array([[[1, -8, 2], [-3, -2, -1], [5, -5, 0], [9, 9, 9]]], np.float32)
    pooling = Pooling(mode, num_log1p=num_log1p)
    np.testing.assert_allclose(pooling(logits, MASK), [expected], rtol=1e-6)
    assert pooling.embedding_size(ModelConfig(vocab_size=3)) == 3


LEXICAL = Pooling("sum", num_log1p=2, max_length=9, query_prompt="a ", similarity="dot")


@pytest.mark.medium
def test_a_folder_with_word_weights(made, tmp_path: Path) -> None:
    model = made("BertForMaskedLM", pooling=LEXICAL)
    model.save(tmp_path / "out")
    said: list[str] = []
    again = bert.load(tmp_path / "out", said.append)
    assert again.pooling == LEXICAL
    assert len(said) == 1, "no key is reported as not applied"
    texts = ["a b c", "d", "c b"]
    embeddings = model.embed(texts)
    assert embeddings.shape == (3, model.config.vocab_size)
    np.testing.assert_array_equal(again.embed(texts), embeddings)
    np.testing.assert_array_equal(model.encode(texts).embeddings, embeddings)
    found = model.search(["b", "d"], texts)
    for corpus in (model.embed(texts, prompt="document"), csr_array(model.embed(texts, prompt="document"))):
        for ours, theirs in zip(model.search(["b", "d"], corpus), found, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(model.similarity(texts, texts), embeddings @ embeddings.T, rtol=1e-6)
    long_text = ["a b c d " * 20]
    windows = model.embed(long_text, long_texts="windows_max")
    assert (windows >= model.embed(long_text) - 1e-4).all(), "the maximum over windows, of which one is the cut text"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"pooling_strategy": "mean"}, "pooling_strategy is 'mean': use one of max, sum"),
        ({"activation_function": "gelu"}, "activation_function is 'gelu': use one of relu, log1p_relu"),
    ],
)
def test_wrong_settings_of_word_weights_are_errors(content: dict[str, str], match: str, made, tmp_path: Path) -> None:
    made("BertForMaskedLM", pooling=LEXICAL).save(tmp_path / "out")
    edit(tmp_path / "out/1_SpladePooling", **content)
    with pytest.raises(UserError, match=match):
        bert.load(tmp_path / "out")


def test_word_weights_need_a_masked_lm_head(made, tmp_path: Path) -> None:
    made().save(tmp_path / "out")
    write_pooling_files(LEXICAL, CONFIG, tmp_path / "out")
    with pytest.raises(UserError, match="SpladePooling reads masked-LM logits, which Bert does not compute"):
        bert.load(tmp_path / "out")


ALL = Pooling(
    "weightedmean+cls",
    normalize=True,
    max_length=9,
    query_prompt="a b ",
    include_prompt=False,
    truncate_dim=5,
    dense=(
        PooledDense(np.random.default_rng(0).normal(size=(24, 7)).astype(np.float32), np.ones(7, np.float32), TANH),
        PooledDense(np.random.default_rng(1).normal(size=(7, 6)).astype(np.float32), None, IDENTITY),
    ),
    similarity="manhattan",
)


def test_a_folder_keeps_all_settings(made, tmp_path: Path) -> None:
    made(pooling=ALL).save(tmp_path / "out")
    said: list[str] = []
    assert bert.load(tmp_path / "out", said.append).pooling == ALL
    assert read_pooling(tmp_path / "out", said.append) == ALL
    assert len(said) == 1, "no key is reported as not applied"
    assert json.loads((tmp_path / "out/config_sentence_transformers.json").read_text())["truncate_dim"] == 5


@pytest.mark.medium
@pytest.mark.parametrize("prompts", [("a b ", ""), ("a b ", "a b "), ("", "c "), ("", "")], ids=repr)
def test_a_default_prompt_is_kept(prompts: tuple[str, str], made, tmp_path: Path) -> None:
    query, default = prompts
    pooling = Pooling(query_prompt=query, default_prompt=default)
    made(pooling=pooling).save(tmp_path / "out")
    model = bert.load(tmp_path / "out")
    assert model.pooling == pooling
    np.testing.assert_array_equal(model.embed("a"), bert.load(tmp_path / "out").embed(f"{default}a", prompt="document"))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"default_prompt_name": "page", "prompts": {"query": "a "}}, "default_prompt_name is 'page', but the prompts"),
        ({"default_prompt_name": 3}, "default_prompt_name is 3, but the prompts are empty"),
        ({"similarity_fn_name": "hamming"}, "similarity_fn_name is 'hamming': set it to cosine, dot"),
    ],
)
def test_wrong_settings_of_a_model_are_errors(content: dict[str, object], match: str, made, tmp_path: Path) -> None:
    made(pooling=Pooling()).save(tmp_path / "out")
    (tmp_path / "out/config_sentence_transformers.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=match):
        bert.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("similarity", "expected"),
    [
        ("cosine", [0.6, 1, 0.8]),
        ("dot", [15, 50, 4]),
        ("euclidean", [-(20**0.5), -5, -(18**0.5)]),
        ("manhattan", [-6, -7, -6]),
    ],
)
def test_each_similarity_by_hand(similarity: str, expected: list[float]) -> None:
    query, documents = np.array([[3, 4]], np.float32), np.array([[5, 0], [6, 8], [0, 1]], np.float32)
    np.testing.assert_allclose(Pooling(similarity=similarity).compare(query, documents), [expected], rtol=1e-6)
    pairs = Pooling(similarity=similarity).compare_pairs(np.repeat(query, 3, axis=0), documents)
    np.testing.assert_allclose(pairs, expected, rtol=1e-6)
    nearest = find_nearest(query, [documents[:1], documents[1:]], 3, similarity)
    order = np.argsort(-np.array(expected), kind="stable")
    np.testing.assert_array_equal(nearest.indices, [order])
    np.testing.assert_allclose(nearest.scores, [np.array(expected)[order]], rtol=1e-6)


@pytest.mark.medium
def test_embeddings_of_every_method_have_the_declared_width(made) -> None:
    model = made(pooling=ALL)
    texts = ["a b c", "d"]
    embeddings = model.embed(texts)
    assert embeddings.shape == model.encode(texts).embeddings.shape == (2, 5)
    assert model.similarity(texts, texts).shape == (2, 2)
    assert model.search("a", texts).indices.shape == model.search("a", embeddings).indices.shape == (2,)
    with pytest.raises(UserError, match=r"\[1, 12\], .* \[N, 5\]"):
        model.search("a", np.zeros((1, 12)))
    query = model.embed(["c"], prompt="query")
    included = dataclasses.replace(model, pooling=dataclasses.replace(ALL, include_prompt=True))
    assert np.abs(included.embed(["c"], prompt="query") - query).max() > 1e-3
    np.testing.assert_array_equal(model.embed(["c"]), included.embed(["c"]))
    packed = model.embed(["c"] * 300, 4, "query")
    np.testing.assert_allclose(packed, np.repeat(query, 300, axis=0), atol=1e-6)


def test_older_keys_are_read_in_the_order_of_sentence_transformers(made, tmp_path: Path) -> None:
    made(pooling=Pooling()).save(tmp_path / "out")
    file = tmp_path / "out/1_Pooling/config.json"
    for content, mode in (
        ({"pooling_mode_weightedmean_tokens": True, "pooling_mode_cls_token": True}, "cls+weightedmean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True, "pooling_mode_mean_tokens": True}, "mean+mean_sqrt_len"),
        ({"pooling_mode_mean_tokens": False}, "mean"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len"),
        ({"pooling_mode": ["lasttoken", "max"]}, "lasttoken+max"),
        ({}, "mean"),
    ):
        file.write_text(json.dumps(content))
        pooling = read_pooling(tmp_path / "out", pytest.fail)
        assert pooling is not None and pooling.mode == mode


@pytest.mark.parametrize(
    ("module", "values", "match"),
    [
        ("2_Dense", {"activation_function": "os.system"}, "activation_function is 'os.system'"),
        ("2_Dense", {"use_residual": True}, "use_residual is True"),
        ("2_Dense", {"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
        ("2_Dense", {"out_features": 8}, r"linear.weight is \[7, 24\]"),
        ("2_Dense", {"bias": False}, "linear.bias does not match bias False"),
        ("1_Pooling", {"pooling_mode": ["mean", "median"]}, "pooling mode is mean.median"),
        ("1_Pooling", {"pooling_mode": ["mean"]}, "reads 24 features of a vector of 12"),
        ("1_Pooling", {"include_prompt": "no"}, "include_prompt is 'no'"),
    ],
)
def test_a_module_that_is_not_computed_is_an_error(made, tmp_path: Path, module, values, match) -> None:
    made(pooling=dataclasses.replace(ALL, normalize=False)).save(tmp_path / "out")
    edit(tmp_path / "out" / module, **values)
    with pytest.raises(UserError, match=match):
        bert.load(tmp_path / "out")


@pytest.mark.parametrize("truncate_dim", [0, "8", True])
def test_a_bad_truncate_dim_is_an_error(made, tmp_path: Path, truncate_dim) -> None:
    made(pooling=Pooling()).save(tmp_path / "out")
    (tmp_path / "out/config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": truncate_dim}))
    with pytest.raises(UserError, match="truncate_dim is"):
        bert.load(tmp_path / "out")


@pytest.mark.medium
@pytest.mark.parametrize(
    "place", ["config.json", "config.json of version 3", "config_sentence_transformers.json", "undeclared"]
)
def test_the_activation_of_a_cross_encoder_is_applied(place: str, made, tmp_path: Path) -> None:
    model = made("BertForSequenceClassification")
    classifier = {name: array[..., :1] for name, array in model.params["classifier"].items()}
    dataclasses.replace(model, labels=("LABEL_0",), params={**model.params, "classifier": classifier}).save(
        tmp_path / "out"
    )
    pair = ("a b", "c")
    [plain] = bert.load(tmp_path / "out").predict([pair])
    if place == "config.json":
        edit(tmp_path / "out", sentence_transformers={"activation_fn": SIGMOID})
    elif place == "config.json of version 3":
        edit(tmp_path / "out", sbert_ce_default_activation_function=SIGMOID)
    elif place == "undeclared":
        edit(tmp_path / "out", sentence_transformers={"version": "5.0.0"})
    else:
        settings = {"model_type": "CrossEncoder", "activation_fn": SIGMOID}
        (tmp_path / "out" / place).write_text(json.dumps(settings))
    again = bert.load(tmp_path / "out")
    [score] = again.predict([pair])
    assert score.score == pytest.approx(1 / (1 + np.exp(-plain.score)), rel=1e-5)
    assert again.rank(*pair[:1], [pair[1]])[0].score == score.score
    again.save(tmp_path / "two")
    assert bert.load(tmp_path / "two").score_activation == SIGMOID


def test_another_activation_is_reported(made, tmp_path: Path) -> None:
    made("BertForSequenceClassification").save(tmp_path / "out")
    for activation, is_reported in ((SIGMOID, True), ("mine.Softplus", True), (IDENTITY, False)):
        edit(tmp_path / "out", sentence_transformers={"activation_fn": activation})
        said: list[str] = []
        bert.load(tmp_path / "out", said.append)
        assert is_reported == any("activation_fn" in line for line in said)
