"""Late interaction: folders of sentence-transformers, PyLate and Stanford's ColBERT, read by both libraries."""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bert
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
    assert_equal(native(encoder, tmp_path / "theirs", **NATIVE[kind]), tmp_path, library, runs_graph=runs_graph)


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
