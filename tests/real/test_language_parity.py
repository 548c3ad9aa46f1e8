"""Vocabularies of ten languages: equal ids in transformers, from the files of an exported model."""

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


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "byte_level"])
@pytest.mark.parametrize("language", PARAGRAPHS)
def test_ids_equal_transformers(language, kind, tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install bert-jax[torch]")
    ours = train_tokenizer(training_texts(language), TokenizerConfig(kind, None, 900))
    save_published_tokenizer(ours, tmp_path, 512)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [PARAGRAPHS[language], unicodedata.normalize("NFD", PARAGRAPHS[language]), *PARAGRAPHS.values(), *HARD]
    for text, encoding, ids in zip(texts, ours.encode_batch(texts), theirs(texts)["input_ids"], strict=True):
        assert encoding.ids == ids, text
    again = load_tokenizer(tmp_path)
    assert [encoding.ids for encoding in again.encode_batch(texts)] == theirs(texts)["input_ids"]
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(ours)


@pytest.mark.parametrize("language", ["th", "ko", "vi"])
def test_an_exported_model_reads_the_language(language, tmp_path):
    """The export compares rows and outputs with transformers' as well."""
    transformers = pytest.importorskip("transformers", reason="pip install bert-jax[torch]")
    save_tokenizer(train_tokenizer(training_texts(language), TokenizerConfig(vocab_size=900)), tmp_path / "vocabulary")
    config = dataclasses.replace(CONFIG, vocab_size=900, max_position_embeddings=96)
    model = random_model(tmp_path / "vocabulary", "BertForMaskedLM", config)
    model.save(tmp_path / "model")
    loaded, theirs = bert.load(tmp_path / "model"), transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = PARAGRAPHS[language][:60]
    assert loaded.tokenizer.encode(text).ids == theirs(text)["input_ids"] == model.tokenizer.encode(text).ids
    np.testing.assert_allclose(loaded.embed([text]), model.embed([text]), rtol=1e-5, atol=1e-6)
