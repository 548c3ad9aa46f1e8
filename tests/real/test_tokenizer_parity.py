"""Token ids equal transformers' BertTokenizer on real and on awkward text."""

import pytest

from bert.config import TokenizerConfig
from bert.interchange.writers.hf_files import save_published_tokenizer
from bert.tokenizer.vocabulary import load_tokenizer, save_tokenizer, train_tokenizer
from tests.languages import HARD

pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", ["bert-base-uncased", "bert-base-cased"])
def test_ids_equal_transformers(shared, name):
    transformers = pytest.importorskip("transformers", reason="pip install bert-jax[torch]")
    folder, lowercase = shared / "data/vocab" / name, name.endswith("uncased")
    theirs = transformers.BertTokenizer.from_pretrained(str(folder), do_lower_case=lowercase)
    ours = load_tokenizer(folder, TokenizerConfig(lowercase=lowercase))
    with open(shared / "data/pretrain/enwiki/valid.txt", encoding="utf-8", newline="\n") as file:
        lines = HARD + file.read().split("\n")
    assert len(lines) > 2500
    expected = theirs(lines)["input_ids"]
    for line, encoding, ids in zip(lines, ours.encode_batch(lines), expected, strict=True):
        assert encoding.ids == ids, line
    pairs = list(zip(HARD, reversed(HARD), strict=True))
    expected = theirs([a for a, _ in pairs], [b for _, b in pairs], return_token_type_ids=True)
    for i, encoding in enumerate(ours.encode_batch(pairs)):
        assert encoding.ids == expected["input_ids"][i], pairs[i]
        assert encoding.type_ids == expected["token_type_ids"][i], pairs[i]
    assert ours.decode(expected["input_ids"][2]) == theirs.decode(expected["input_ids"][2], skip_special_tokens=True)


def test_real_tokenizer_json_loses_its_truncation(shared):
    ours = load_tokenizer(shared / "models/all-MiniLM-L6-v2")
    plain = load_tokenizer(shared / "data/vocab/bert-base-uncased")
    text = "A long text about nothing. " * 100
    assert ours.encode(text).ids == plain.encode(text).ids
    assert ours.encode("short").ids == plain.encode("short").ids


@pytest.mark.parametrize("way", ["PreTrainedTokenizerFast", "AutoTokenizer"])
def test_ids_of_a_trained_byte_level_vocabulary_equal_transformers(way, shared, tmp_path):
    """From the run's tokenizer.json alone, and from the files of an exported model."""
    transformers = pytest.importorskip("transformers", reason="pip install bert-jax[torch]")
    with open(shared / "data/pretrain/enwiki/valid.txt", encoding="utf-8", newline="\n") as file:
        lines = file.read().split("\n")[:2000]
    ours = train_tokenizer(iter(lines), TokenizerConfig(kind="byte_level", vocab_size=3000))
    if way == "AutoTokenizer":
        save_published_tokenizer(ours, tmp_path, 512)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    else:
        save_tokenizer(ours, tmp_path)
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    texts = [*HARD, "a <mask> b<mask>c </s><s> <pad> <unk> Ġ Ċ", *lines]
    for text, encoding, ids in zip(texts, ours.encode_batch(texts), theirs(texts)["input_ids"], strict=True):
        assert encoding.ids == ids, text
    pairs = list(zip(HARD, reversed(HARD), strict=True))
    expected = theirs([a for a, _ in pairs], [b for _, b in pairs])["input_ids"]
    assert [encoding.ids for encoding in ours.encode_batch(pairs)] == expected
    for text in (*HARD, *lines):
        plain = ours.encode(text, add_special_tokens=False).ids
        assert ours.decode(plain, skip_special_tokens=False) == text
        assert theirs.decode(plain, clean_up_tokenization_spaces=False) == text
