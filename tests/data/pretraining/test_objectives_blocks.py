"""Rows of exactly T tokens as they come, and documents that are read verbatim."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from bert.config import DataConfig, ModelConfig, PretrainConfig, TokenizerConfig, TrainingConfig
from bert.data.corpus import files
from bert.data.corpus.documents import documents
from bert.data.pretraining import build, tokenization
from bert.data.pretraining.build import build_examples, build_shard_subset
from bert.data.pretraining.dataset import PretrainingDataset
from bert.errors import UserError
from bert.tokenizer.byte_level import TRAINED_SPECIAL_TOKENS, build_byte_level, train_byte_level
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import literal_tokenizer
from tests.data.pretraining.conftest import DOCUMENTS, FIRST, PAD, SENTENCES, SEP, WORDS, T
from tests.helpers import all_rows, config_of, digest

HOSTILE = (
    "\ufeff\n\n  A  first\tline \r\n\n\n\n\u200b caf\u00e9 e\u0301 \U0001f600\u00a0x\n" + " " * 70 + "\nlast</s>\n\n"
)
END, BYTES_PAD = (TRAINED_SPECIAL_TOKENS.index(name) for name in ("</s>", "<pad>"))


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """Bytes, and some merges of them."""
    return train_byte_level(
        ["the first line of a café", "lines and the last line"] * 3, TokenizerConfig(vocab_size=280)
    )


def blocks(place: Path, tokenizer: Tokenizer, cache: Path, **changes) -> PretrainingDataset:
    return build_examples(blocks_config(place, **changes), tokenizer, cache)


def blocks_config(place: Path, **changes) -> DataConfig:
    return config_of(place, **{"input_format": "blocks", "one_sentence_per_line": False, **changes})


def text_of(result: PretrainingDataset, split: str, tokenizer: Tokenizer) -> str:
    rows = all_rows(getattr(result, split))
    present = np.arange(rows["input_ids"].shape[1]) < rows["length"][:, None]
    return tokenizer.decode(rows["input_ids"][present].tolist(), skip_special_tokens=False)


def test_rows_are_full_and_follow_one_another(place, tokenizer, tmp_path) -> None:
    built = blocks(place, tokenizer, tmp_path)
    rows = all_rows(built.train)
    assert set(rows) == {"input_ids", "length", "segment_a_length", "next_id"}
    ids, length = rows["input_ids"], rows["length"]
    assert (length[:-1] == T).all()
    assert (ids[-1, length[-1] :] == PAD).all()
    np.testing.assert_array_equal(rows["segment_a_length"], length)
    assert rows["next_id"].tolist() == [*ids[1:, 0].tolist(), -1]
    tokens = ids.ravel()[: (len(ids) - 1) * T + length[-1]]
    ends = np.flatnonzero(tokens == SEP)
    assert len(ends) == built.counts["train_documents"] - 1
    for document in np.split(tokens, ends):
        document = document[document != SEP]
        assert len(document) == SENTENCES * WORDS
        assert (document[0] - FIRST) % (SENTENCES * WORDS) == 0
        assert (np.diff(document) == 1).all()
    assert built.counts["train_tokens"] == len(tokens) == built.unigram_counts.sum()
    assert built.counts["train_unused_tokens"] == built.counts["train_sentences"] == 0
    assert built.counts["train_documents"] + built.counts["eval_documents"] == DOCUMENTS


@pytest.mark.medium
def test_a_set_does_not_depend_on_workers_or_processes(place, tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build, "SHARD_BYTES", 8000)
    one = blocks(place, tokenizer, tmp_path / "one")
    assert len(one.train) > 3
    assert digest(blocks(place, tokenizer, tmp_path / "two", num_workers=2)) == digest(one)
    config = blocks_config(place)
    assert build_shard_subset(config, tokenizer, (2, 2), tmp_path / "parts") is None
    assert digest(build_shard_subset(config, tokenizer, (1, 2), tmp_path / "parts")) == digest(one)
    for path in one.train:
        assert all_rows([path])["next_id"][-1] == -1


def test_a_killed_build_continues(place, tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build, "SHARD_BYTES", 8000)
    whole = blocks(place, tokenizer, tmp_path / "whole")

    def stop(stage: str, done: int, total: int | None) -> None:
        if stage == "building examples" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_examples(blocks_config(place), tokenizer, tmp_path / "cut", stop)
    assert digest(blocks(place, tokenizer, tmp_path / "cut")) == digest(whole)


def test_verbatim_text_is_there_byte_by_byte(byte_level, tmp_path) -> None:
    (tmp_path / "train.txt").write_bytes(HOSTILE.encode())
    with gzip.open(tmp_path / "eval.txt.gz", "wb") as file:
        file.write(b"\n\r\n held out \n\n\n")
    settings = {"train": str(tmp_path / "train.txt"), "eval": str(tmp_path / "eval.txt.gz"), "verbatim": True}
    rows = blocks(tmp_path, byte_level, tmp_path / "cache", **settings)
    assert text_of(rows, "train", byte_level) == HOSTILE
    assert END not in all_rows(rows.train)["input_ids"]  # a "</s>" of the text is text
    assert text_of(rows, "eval", byte_level) == "\n\r\n held out \n\n\n"
    assert (rows.counts["train_documents"], rows.counts["eval_documents"]) == (1, 1)


def test_verbatim_documents_of_other_files(byte_level, tmp_path) -> None:
    texts = [HOSTILE, "two\n\nlines", " \n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        read = ["\n".join(document) for document in documents(str(tmp_path / name), verbatim=True)]
        assert read == texts[:2]
    rows = blocks(tmp_path, byte_level, tmp_path / "cache", train=str(tmp_path), verbatim=True, eval_fraction=0.25)
    assert all_rows(rows.train)["input_ids"].ravel().tolist().count(END) == rows.counts["train_documents"] - 1 == 2


def test_other_documents_are_their_lines(byte_level, tmp_path) -> None:
    (tmp_path / "corpus.txt").write_text(" one \n two\n\n\nthree\n")
    rows = blocks(tmp_path, byte_level, tmp_path / "cache")
    assert {text_of(rows, "train", byte_level), text_of(rows, "eval", byte_level)} == {"one\ntwo", "three"}


def test_long_documents_have_the_tokens_of_the_whole(byte_level, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(tokenization, "STRETCH", 30)
    draw = random.Random(0)
    words = ["a", "the", "line's", "caf\u00e9", "e\u0301", "x1", "\u200b", "\x1c", "don't", "</s>", "\U0001f600"]
    spaces = [" ", " ", "\n", "  ", "\n\n", " \n", "\t", "\u00a0", "\r\n", ""]
    cuts = 0
    for _ in range(100):
        text = "".join(draw.choice(words) + draw.choice(spaces) for _ in range(80))
        parts = list(tokenization._stretches(text))
        assert "".join(parts) == text
        assert max(map(len, parts)) <= 60
        if any(tokenization.BEFORE_WORD.match(" " + part[:2]) is None and part[:1] not in " \n" for part in parts[1:]):
            continue  # there was no place to cut
        cuts += len(parts) - 1
        for one in map(literal_tokenizer, (byte_level, tokenizer)):
            ids = [one.encode(part, add_special_tokens=False).ids for part in parts]
            assert list(itertools.chain(*ids)) == one.encode(text, add_special_tokens=False).ids
    assert cuts > 200


def test_a_text_without_spaces_is_cut_all_the_same(byte_level, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tokenization, "STRETCH", 8)
    (tmp_path / "train.txt").write_text("\u8a9e" * 50 + "\n\n" + "\u8a00" * 50)
    rows = blocks(tmp_path, byte_level, tmp_path / "cache", train=str(tmp_path / "train.txt"))
    assert text_of(rows, "train", byte_level) in ("\u8a9e" * 50, "\u8a00" * 50)


def test_a_vocabulary_of_one_special_token(tmp_path) -> None:
    """GPT-2's, which pads with the end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    gpt2 = build_byte_level({token: i for i, token in enumerate(["<|endoftext|>", *alphabet])}, [])
    (tmp_path / "corpus.txt").write_text("\n\n".join(["one line"] * 12))
    built = blocks(tmp_path, gpt2, tmp_path / "cache")
    rows = all_rows(built.train)
    assert (rows["input_ids"][-1, rows["length"][-1] :] == 0).all()
    assert text_of(built, "train", gpt2) == "<|endoftext|>".join(["one line"] * 11)


def test_one_verbatim_file_alone_needs_another(byte_level, tmp_path) -> None:
    (tmp_path / "corpus.txt").write_text("a\n\nb")
    with pytest.raises(UserError, match=r"data\.verbatim each.*data\.eval"):
        blocks(tmp_path, byte_level, tmp_path / "cache", verbatim=True)


def test_a_document_over_the_limit_is_one_sentence(byte_level, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 20)
    (tmp_path / "corpus.txt").write_text("0123456789\n" * 3)
    with pytest.raises(UserError, match=r"corpus.txt, line 2:.*data\.verbatim"):
        list(documents(str(tmp_path / "corpus.txt"), verbatim=True))
    (tmp_path / "corpus.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(UserError, match=r"corpus.txt, line 2: not UTF-8"):
        list(documents(str(tmp_path / "corpus.txt"), verbatim=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": True}, "data.packing is true, but data.input_format is blocks"),
        ({"one_sentence_per_line": True}, "data.one_sentence_per_line is true, but data.input_format blocks"),
        ({"short_seq_prob": 0.5}, "data.short_seq_prob is 0.5, but the rows of data.input_format blocks have no pairs"),
        ({"language": "de"}, "data.language is de, but data.input_format blocks"),
        ({"input_format": "nsp", "verbatim": True}, "set data.input_format to blocks, or remove data.verbatim"),
        ({"input_format": "nsp"}, "set data.input_format to blocks, full_sentences or doc_sentences"),
        ({"masked_lm_prob": 0.3}, "data.masked_lm_prob is 0.3, but training.objective clm"),
        ({"static_masking": True}, "data.static_masking is true, but training.objective clm"),
        ({"static_masking": True, "dupe_factor": 2}, "training.objective clm"),
    ],
)
def test_settings_without_effect_are_one_sentence(changes, message) -> None:
    with pytest.raises(UserError) as raised:
        data = DataConfig(**{"train": "corpus.txt", "input_format": "blocks", **changes})
        training = TrainingConfig(steps=10, objective="clm")
        PretrainConfig(data=data, model=ModelConfig(causal=True), training=training).check()
    assert message in str(raised.value)


def test_a_mixture_repeats_the_smaller_source(place, byte_level, tmp_path) -> None:
    for name, count in (("large", 40), ("small", 10)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name} {number}" for number in range(count)))
    settings = {"train": [str(tmp_path / "large.txt"), str(tmp_path / "small.txt")], "mixture_weights": [0.5, 0.5]}
    rows = blocks(place, byte_level, tmp_path / "cache", **settings, eval_fraction=0.2)
    text = text_of(rows, "train", byte_level)
    assert text.count("small") == pytest.approx(text.count("large"), rel=0.15)


def test_the_end_token_of_each_kind_of_vocabulary(tokenizer, byte_level) -> None:
    assert (special_ids(tokenizer).end, special_ids(tokenizer).padding) == (SEP, PAD)
    assert (special_ids(byte_level).end, special_ids(byte_level).padding) == (END, BYTES_PAD)
