"""Token ids equal transformers' on real and on awkward text, and on vocabularies of ten languages that we trained."""

import dataclasses
import unicodedata

import numpy as np
import pytest

import bert
from bert.config import TokenizerConfig
from bert.interchange.writers.hf_files import save_published_tokenizer
from bert.tokenizer.vocabulary import load_tokenizer, save_tokenizer, tokenizer_fingerprint, train_tokenizer
from tests.interchange.hf_folders import CONFIG, random_model
from tests.languages import HARD, PARAGRAPHS, training_texts

pytestmark = pytest.mark.real

transformers = pytest.importorskip("transformers", reason="needs the extra `torch`")


@pytest.mark.parametrize("name", ["bert-base-uncased", "bert-base-cased"])
def test_ids_equal_transformers(shared, name):
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


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "byte_level"])
@pytest.mark.parametrize("language", PARAGRAPHS)
def test_ids_of_a_language_equal_transformers(language, kind, tmp_path):
    ours = train_tokenizer(training_texts(language), TokenizerConfig(kind, None, 900))
    save_published_tokenizer(ours, tmp_path, 512)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [PARAGRAPHS[language], unicodedata.normalize("NFD", PARAGRAPHS[language]), *PARAGRAPHS.values(), *HARD]
    for text, encoding, ids in zip(texts, ours.encode_batch(texts), theirs(texts)["input_ids"], strict=True):
        assert encoding.ids == ids, text
    pair = ours.encode(texts[0], texts[1])
    assert theirs(texts[0], texts[1]).get("token_type_ids", [0] * len(pair.ids)) == pair.type_ids
    again = load_tokenizer(tmp_path)
    assert [encoding.ids for encoding in again.encode_batch(texts)] == theirs(texts)["input_ids"]
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(ours)


@pytest.mark.parametrize("language", ["th", "ko", "vi"])
def test_an_exported_model_reads_the_language(language, tmp_path):
    """The export compares rows and outputs with transformers' as well."""
    save_tokenizer(train_tokenizer(training_texts(language), TokenizerConfig(vocab_size=900)), tmp_path / "vocabulary")
    config = dataclasses.replace(CONFIG, vocab_size=900, max_position_embeddings=96)
    model = random_model(tmp_path / "vocabulary", "BertForMaskedLM", config)
    model.save(tmp_path / "model")
    loaded, theirs = bert.load(tmp_path / "model"), transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = PARAGRAPHS[language][:60]
    assert loaded.tokenizer.encode(text).ids == theirs(text)["input_ids"] == model.tokenizer.encode(text).ids
    np.testing.assert_allclose(loaded.embed([text]), model.embed([text]), rtol=1e-5, atol=1e-6)
