"""ALBERT, XLM-RoBERTa and CamemBERT against transformers: every class in and out, logits, ids of hostile text."""

import json

import numpy as np
import pytest

import bert
from bert.config import TokenizerConfig
from bert.interchange import families
from bert.interchange.families.base import Family
from bert.tokenizer.unigram import TRAINED_SPECIAL_TOKENS
from bert.tokenizer.vocabulary import load_tokenizer, train_tokenizer
from tests.helpers import REPOSITORY
from tests.real.hf_models import HOSTILE, PIECES, answers, assert_alike, drawn, inputs, our_answers, real_inputs

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch", reason="needs the extra `torch`")
transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")

TEXTS = ["The tokens of a row", "it trains", "Words, numbers: 3.14 and more of both.", "ein langer Text für alle"]
ALBERT = {"embedding_size": 32, "num_hidden_groups": 1, "hidden_act": "gelu_new", "classifier_dropout_prob": 0.2}
CAMEMBERT = {"pad_token_id": 1, "bos_token_id": 5, "eos_token_id": 6, "type_vocab_size": 1}
XLM = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}


@pytest.fixture(scope="module")
def pieces() -> list[tuple[str, float]]:
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    vocabulary = train_tokenizer(lines, TokenizerConfig(kind="unigram", vocab_size=500, lowercase=False))
    pairs = json.loads(vocabulary.to_str())["model"]["vocab"]
    return [(token, score) for token, score in pairs if token not in TRAINED_SPECIAL_TOKENS]


def save_vocabulary(folder, family: Family, pieces: list[tuple[str, float]]) -> None:
    """Saves the vocabulary in the published layout: the tokenizer class of the family, and its tokenizer.json."""
    if family is families.ALBERT:
        special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer = transformers.AlbertTokenizer(vocab=[*((name, 0.0) for name in special), *pieces])
    elif family is families.CAMEMBERT:
        special = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"]
        tokenizer = transformers.CamembertTokenizer(
            vocab=[*((name, 0.0) for name in special), *pieces, ("<mask>", 0.0)]
        )
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        tokenizer = transformers.XLMRobertaTokenizer(
            vocab=[*((name, 0.0) for name in special), *pieces, ("<mask>", 0.0)]
        )
    (folder / "vocab.txt").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


CASES = [
    *((families.ALBERT, architecture, ALBERT) for architecture in families.ALBERT.classes),
    (families.ALBERT, "BertForMaskedLM", {**ALBERT, "num_hidden_groups": 5, "hidden_act": "relu"}),
    *((families.XLM_ROBERTA, architecture, XLM) for architecture in families.XLM_ROBERTA.classes),
    *((families.CAMEMBERT, architecture, CAMEMBERT) for architecture in families.CAMEMBERT.classes),
]


@pytest.mark.parametrize(("family", "architecture", "settings"), CASES)
def test_in_and_out(family: Family, architecture: str, settings: dict, tmp_path, pieces) -> None:
    folder, offset = tmp_path / "theirs", 0 if family is families.ALBERT else 2
    reference = drawn(folder, architecture, family.model_type, **settings)
    save_vocabulary(folder, family, pieces)
    model = bert.load(folder)
    assert model.architecture == architecture
    assert (model.config.position_offset, model.config.layer_groups) == (offset, settings.get("num_hidden_groups"))
    segments = settings.get("type_vocab_size", 3)
    batches = [inputs(architecture, padded, segments, offset) for padded in (False, True)]
    batches.append(real_inputs(folder, model, TEXTS, architecture))
    batches.append(real_inputs(folder, model, [*zip(TEXTS, reversed(TEXTS), strict=True)], architecture))
    for batch in batches:
        assert_alike(our_answers(model, batch), answers(reference, batch), batch["attention_mask"])
    said: list[str] = []
    model.save(tmp_path / "ours", log=said.append)
    assert "logits within" in said[0] and said[0].endswith("token ids equal"), said[0]
    again = type(reference).from_pretrained(tmp_path / "ours")
    for name, tensor in reference.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name].numpy(), tensor.numpy())


@pytest.mark.parametrize("family", [families.ALBERT, families.XLM_ROBERTA, families.CAMEMBERT])
def test_ids_of_hostile_text(family: Family, tmp_path, pieces) -> None:
    save_vocabulary(tmp_path, family, pieces)
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family.model_type}"}}')
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for first, second in zip(HOSTILE, [*HOSTILE[:0:-1], "x"], strict=True):
        assert ours.encode(first).ids == theirs(first)["input_ids"]
        assert ours.encode(first, second).ids == theirs(first, second)["input_ids"]
    assert len(ours.get_vocab()) <= PIECES
