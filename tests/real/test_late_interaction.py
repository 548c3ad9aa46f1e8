"""Late interaction: folders of sentence-transformers, PyLate and Stanford's ColBERT, read by both libraries."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bert
from bert.config import EmbeddingConfig
from bert.config.options import LateInteractionConfig
from bert.data.late_interaction import tokenize_scored_queries
from bert.data.rows import token_arrays
from bert.model.heads import BertForEmbedding
from bert.training.finetuning.ranking_losses import embedding_loss
from tests.real.family_cases import CASES
from tests.real.hf_models import drawn, torch, transformers

pytestmark = pytest.mark.real

PUNCTUATION = list(string.punctuation)
TEXTS = [
    "",
    "a",
    "hello, world!",
    "!!! ... ,",
    "  Someone   makes Music ",
    "ünïcödé, 中文 😀",
    "[Q] [D] [q] [unused0] [MASK] [SEP] x",
    "The shares fell by 2%. " * 60,
]


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")


@pytest.fixture(scope="module")
def encoder(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT whose vocabulary ends with "[Q] " and "[D] ", as PyLate adds them."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared / "models" / "all-MiniLM-L6-v2")
    tokenizer.add_tokens(["[Q] ", "[D] "])
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        initializer_range=0.1, max_position_embeddings=128,
    )  # fmt: skip
    for part in (transformers.BertModel(config), tokenizer):
        part.save_pretrained(folder)
    return folder


def native(encoder: Path, folder: Path, **settings: Any) -> Path:
    """A folder of MultiVectorEncoder. ``mask`` and ``normalize`` may be None for none."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.base.modules.dense import Dense
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    torch.manual_seed(1)
    reads_tokens = {"module_input_name": "token_embeddings"}
    transformer = Transformer(str(encoder), **settings.pop("texts", {}))
    width = transformer.get_embedding_dimension()
    dense = {
        0: [],
        1: [Dense(width, 16, bias=False, activation_function=torch.nn.Identity(), **reads_tokens)],
        2: [Dense(width, 24, **reads_tokens), Dense(24, 16, bias=False, **reads_tokens)],
    }[settings.pop("num_dense", 1)]
    mask = settings.pop("mask", {"skiplist_words": PUNCTUATION})
    after = [] if mask is None else [MultiVectorMask(**mask)]
    after += [Normalize(**reads_tokens)] if settings.pop("normalize", True) else []
    MultiVectorEncoder(modules=[transformer, *dense, *after], device="cpu", **settings).save_pretrained(str(folder))
    return folder


FIXED = {"strategy": "fixed", "length": 32}
MARKERS = {"query": "[Q] ", "document": "[D] "}
NATIVE: dict[str, dict[str, Any]] = {
    "classic": {"texts": {"query_expansion": FIXED, "document_length": 20}, "prompts": MARKERS},
    "attended": {"texts": {"query_expansion": {**FIXED, "attend": True, "token": "the"}}},
    "at least": {
        "texts": {"query_expansion": {"strategy": "min", "length": 9}, "query_length": 12},
        "prompts": {"query": "find: ", "passage": "unused", "extra": "page: "},
        "default_prompt_name": "extra",
    },
    "at least, of any length": {"texts": {"query_expansion": {"strategy": "min", "length": 9, "attend": True}}},
    "not extended": {"texts": {"query_length": 6}, "num_dense": 2, "similarity_fn_name": "meanmaxsim"},
    "both roles": {"mask": {"skiplist_words": [",", "hello", "[MASK]"], "skiplist_tasks": ["query", "document"]},
                   "texts": {"query_expansion": FIXED}},
    "no mask": {"mask": None, "texts": {"query_expansion": FIXED}, "normalize": False},
    "no mask, attended": {"mask": None, "texts": {"query_expansion": {**FIXED, "attend": True}}},
    "encoder alone": {"mask": None, "num_dense": 0},
}  # fmt: skip


def assert_equal(folder: Path, tmp_path: Path, library: Any, notes: int = 2, runs_graph: bool = False) -> None:
    """Embeddings and similarities agree, also after our export; ``notes`` lines are logged."""
    said: list[str] = []
    ours = bert.load(folder, said.append)
    assert len(said) == notes, "no setting is reported as not applied"
    ours.save(tmp_path / "ours")
    models = [ours, *([bert.load(folder, engine="onnxruntime")] if runs_graph else [])]
    for place in (folder, tmp_path / "ours"):
        theirs = library.MultiVectorEncoder(str(place), device="cpu")
        sides = {}
        for prompt, encode in (
            ("query", theirs.encode_query),
            ("document", theirs.encode_document),
            (None, theirs.encode),
        ):
            sides[prompt] = encode(TEXTS, convert_to_numpy=True)
            for model in models:
                embeddings = model.embed(TEXTS, prompt=prompt)
                assert [each.shape for each in embeddings] == [each.shape for each in sides[prompt]]
                for actual, expected in zip(embeddings, sides[prompt], strict=True):
                    np.testing.assert_allclose(actual, expected, atol=1e-5)
        expected = theirs.similarity(sides["query"], sides["document"]).numpy()
        np.testing.assert_allclose(ours.similarity(TEXTS, TEXTS), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(theirs.encode_query("a", convert_to_numpy=True), ours.embed("a", prompt="query"),
                                   atol=1e-5)  # fmt: skip
    for actual, again in zip(bert.load(tmp_path / "ours").embed(TEXTS), ours.embed(TEXTS), strict=True):
        np.testing.assert_array_equal(actual, again)


@pytest.mark.parametrize("kind", NATIVE)
def test_folders_of_sentence_transformers(kind: str, encoder: Path, library: Any, tmp_path: Path) -> None:
    runs_graph = kind in ("classic", "attended")
    notes = 3 if kind == "at least" else 2  # one about the unused prompt
    assert_equal(native(encoder, tmp_path / "theirs", **NATIVE[kind]), tmp_path, library, notes, runs_graph=runs_graph)


@pytest.mark.parametrize(("family", "notes"), [("modernbert", 3), ("roberta", 2)])
def test_folders_of_other_families(family: str, notes: int, library: Any, tmp_path: Path) -> None:
    """Short queries are extended by tokens whose window in ModernBERT's local layers has no token of the query."""
    drawn(tmp_path / "encoder", "Bert", family, **CASES[family].settings)
    texts = {"query_expansion": {**FIXED, "length": 24}, "document_length": 20, "max_seq_length": 38}
    folder = native(tmp_path / "encoder", tmp_path / "theirs", texts=texts, prompts={"query": "find: "})
    assert_equal(folder, tmp_path, library, notes, runs_graph=True)


def pylate(encoder: Path, folder: Path, dense: Path, **settings: Any) -> Path:
    """A folder in the layout of PyLate: two modules, and the settings of both roles in one file."""
    shutil.copytree(encoder, folder)
    shutil.copytree(dense, folder / "1_Dense")
    listed = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    files = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": name} for i, (path, name) in enumerate(listed)
        ],
        "1_Dense/config.json": {
            "in_features": 32,
            "out_features": 16,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        },
        "sentence_bert_config.json": {"max_seq_length": 31, "do_lower_case": False},
        "config_sentence_transformers.json": settings,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


PREFIXES = {"query_prefix": "[Q] ", "document_prefix": "[D] "}
PYLATE: dict[str, dict[str, Any]] = {
    "classic": {
        **PREFIXES,
        "query_length": 32,
        "document_length": 20,
        "attend_to_expansion_tokens": False,
        "skiplist_words": [*PUNCTUATION, "hello"],
        "similarity_fn_name": "MaxSim",
        "prompts": {},
        "default_prompt_name": None,
    },
    "defaults": {**PREFIXES, "query_length": None, "document_length": None, "similarity_fn_name": "cosine"},
    "of the third version": {**PREFIXES, "model_type": "ColBERT", "attend_to_expansion_tokens": True},
    "without a prefix": {"model_type": "ColBERT", "query_length": 16, "skiplist_words": []},
    "not extended": {**PREFIXES, "do_query_expansion": False, "query_length": 8, "document_length": 12},
    "with prompts": {**PREFIXES, "query_length": 24, "prompts": {"query": "[Q] find: ", "document": "page: "}},
    "of words": {"query_prefix": "[unused0]", "document_prefix": "document: ", "query_length": 12},
}


@pytest.mark.parametrize("kind", PYLATE)
def test_folders_of_pylate(kind: str, encoder: Path, library: Any, tmp_path: Path) -> None:
    dense = native(encoder, tmp_path / "native") / "1_Dense"
    assert_equal(pylate(encoder, tmp_path / "theirs", dense, **PYLATE[kind]), tmp_path, library)


STANFORD: dict[str, dict[str, Any] | None] = {
    "classic": {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_maxlen": 32,
        "doc_maxlen": 24,
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
        "similarity": "cosine",
        "dim": 16,
    },
    "attended": {"attend_to_mask_tokens": True, "mask_punctuation": False, "query_maxlen": 12},
    "without metadata": None,
}


@pytest.mark.parametrize("kind", STANFORD)
def test_folders_of_stanford(kind: str, encoder: Path, library: Any, tmp_path: Path) -> None:
    shutil.copytree(encoder, tmp_path / "theirs")
    file, metadata = tmp_path / "theirs" / "model.safetensors", STANFORD[kind]
    tensors = {f"bert.{name}": array for name, array in load_file(file).items()}
    projection = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    save_file({**tensors, "linear.weight": projection}, file, {"format": "pt"})
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    if metadata is not None:
        (tmp_path / "theirs/artifact.metadata").write_text(json.dumps(metadata))
    assert_equal(tmp_path / "theirs", tmp_path, library, notes=3 + (metadata is None))


QUERIES = ["who makes music?", "shares, fell", "a", "the number 3"]
COLUMNS = [
    ["Someone makes music.", "The shares fell by 2%.", "b", "It is 3, not 4!"],
    ["Nobody, nowhere.", "The sun rose", "c d e f g", "It is 4."],
]


def loss_and_gradients(folder: Path, loss: str, scores: np.ndarray | None, temperature: float) -> tuple[float, Any]:
    """Returns our loss of the texts, and its gradients by tensor name."""
    model = bert.load(folder)
    pooling = model.pooling
    rows = [[pooling.document_prompt + text for text in texts] for texts in zip(*COLUMNS, strict=True)]
    queries = [pooling.query_prompt + text for text in QUERIES]
    encoded = tokenize_scored_queries(model.tokenizer, queries, rows, scores, 31, pooling.interaction)
    batch = encoded.batch(np.arange(4), 32, 4)
    width = pooling.projection.shape[1]
    module = BertForEmbedding(model.config, pooling="tokens", dimensions=width)
    length = LateInteractionConfig(query_length=pooling.interaction.query_length)
    settings = EmbeddingConfig(loss, temperature, pooling="tokens", dimensions=width, late_interaction=length)

    def total(params: Any) -> Any:
        flat = [batch[name].reshape(-1, 32) for name in token_arrays(batch)]
        vectors = module.apply({"params": params}, *flat)
        sums = embedding_loss(settings, None).sums(vectors.reshape(4, -1), batch)[0]
        return sums[0] / sums[1]

    params = {"bert": model.params["bert"], "projection": {"kernel": pooling.projection}}
    value, gradients = jax.jit(jax.value_and_grad(total))(params)
    layer = gradients["bert"]["encoder"]["layer_0"]
    return float(value), {
        "projection": gradients["projection"]["kernel"].T,
        "word": gradients["bert"]["embeddings"]["word"]["embedding"],
        "layer": layer["attention"]["value"]["kernel"].T,
    }


def assert_same_loss(folder: Path, loss: str, scores: Any, temperature: float, theirs: Any, parts: Any) -> None:
    """Compares the value and gradients. ``parts`` are the encoder of the library and its projection."""
    encoder, projection = parts
    theirs.backward()
    parameters = dict(encoder.named_parameters())
    expected = {
        "projection": projection.grad,
        "word": parameters["embeddings.word_embeddings.weight"].grad,
        "layer": parameters["encoder.layer.0.attention.self.value.weight"].grad,
    }
    value, gradients = loss_and_gradients(folder, loss, scores, temperature)
    assert value == pytest.approx(theirs.item(), rel=1e-5)
    for name, gradient in gradients.items():
        difference = np.linalg.norm(gradient - expected[name].numpy())
        assert difference <= 1e-5 * np.linalg.norm(gradient), name


@pytest.mark.parametrize(
    ("kind", "loss"),
    [("classic", "in_batch"), ("attended", "in_batch"), ("classic", "margin_mse"), ("classic", "kl_divergence")],
)
def test_the_loss_is_that_of_sentence_transformers(
    kind: str, loss: str, encoder: Path, library: Any, tmp_path: Path
) -> None:
    from sentence_transformers.multi_vector_encoder import losses

    settings = {**NATIVE[kind], "texts": {**NATIVE[kind]["texts"], "max_seq_length": 31}}
    folder = native(encoder, tmp_path / "theirs", **settings)
    model = library.MultiVectorEncoder(str(folder), device="cpu").eval()
    scores = None
    features = [model.preprocess(QUERIES, prompt=settings.get("prompts", {}).get("query"), task="query")]
    prompt = settings.get("prompts", {}).get("document")
    features += [model.preprocess(texts, prompt=prompt, task="document") for texts in COLUMNS]
    for part, task in zip(features, ("query", "document", "document"), strict=True):
        part["task"] = task
    if loss == "in_batch":
        value = losses.MultiVectorMultipleNegativesRankingLoss(model, scale=0.5)(features)
    else:
        scores = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
        theirs = {
            "margin_mse": losses.MultiVectorMarginMSELoss,
            "kl_divergence": losses.MultiVectorDistillKLDivLoss,
        }
        value = theirs[loss](model)(features, torch.tensor(scores))
    parts = model[0].auto_model, model[1].linear.weight
    assert_same_loss(folder, loss, scores, 2.0 if loss == "in_batch" else 1.0, value, parts)


def test_the_loss_is_that_of_pylate(encoder: Path, library: Any, tmp_path: Path) -> None:
    """Needs a version of sentence-transformers that PyLate supports, which others lack."""
    pylate_library = pytest.importorskip("pylate", reason="pylate is not installed")
    if hasattr(library, "MultiVectorEncoder"):
        pytest.skip("this version of sentence-transformers is newer than pylate supports")
    from pylate import losses

    (tmp_path / "dense").mkdir()
    kernel = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    save_file({"linear.weight": kernel}, tmp_path / "dense" / "model.safetensors")
    folder = pylate(encoder, tmp_path / "theirs", tmp_path / "dense", **PYLATE["classic"])
    model = pylate_library.models.ColBERT(str(folder), device="cpu").eval()
    features = [model.tokenize(QUERIES, is_query=True, pad=True)]
    features += [model.tokenize(texts, is_query=False, pad=True) for texts in COLUMNS]
    value = losses.Contrastive(model, temperature=2.0)(features)
    parts = model[0].auto_model, model[1].linear.weight
    assert_same_loss(folder, "in_batch", None, 2.0, value, parts)


def test_a_trained_model_has_the_same_vectors(encoder: Path, library: Any, tmp_path: Path) -> None:
    """From a published folder, whose settings and projection are kept, and from a plain BERT with unused tokens."""
    rows = [{"query": f"number {n}", "positive": f"the digits, {n} of a number!"} for n in range(16)]
    overrides = {"training.batch_size": 8, "training.steps": 4, "training.epochs": None, "data.max_length": 40,
                 "optimizer.learning_rate": 1e-2, "embedding.pooling": "tokens"}  # fmt: skip
    published = native(encoder, tmp_path / "theirs", **NATIVE["classic"])
    for name, init in (("published", published), ("plain", encoder)):
        run = bert.finetune("embedding", init=init, train=rows, output_dir=tmp_path / name, overrides=overrides)
        model = run.model
        if name == "published":
            before = bert.load(published)
            kept = (model.pooling.query_prompt, model.pooling.interaction.skipped_tokens, model.embedding_size)
            assert kept == (before.pooling.query_prompt, before.pooling.interaction.skipped_tokens, 16)
            assert 0 < np.abs(model.pooling.projection - before.pooling.projection).max() < 0.1
        else:
            assert (model.pooling.document_prompt, model.embedding_size) == ("[unused1] ", 128)
        model.save(tmp_path / f"{name} out")
        theirs = library.MultiVectorEncoder(str(tmp_path / f"{name} out"), device="cpu")
        for prompt, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
            pairs = zip(model.embed(TEXTS, prompt=prompt), encode(TEXTS, convert_to_numpy=True), strict=True)
            for actual, expected in pairs:
                np.testing.assert_allclose(actual, expected, atol=1e-5)
