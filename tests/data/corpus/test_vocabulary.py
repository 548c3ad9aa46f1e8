"""The vocabulary of a corpus: what it is trained on, and what is checked before."""

import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from bert.config import DataConfig, TokenizerConfig
from bert.data.corpus import vocabulary
from bert.data.corpus.vocabulary import corpus_vocabulary, measure_tokens
from bert.errors import UserError
from bert.tokenizer.byte_level import build_byte_level


@pytest.mark.parametrize(
    ("input_format", "held_out", "text", "message"),
    [
        ("nsp", False, "One.\nTwo.\n", "data.train holds 1 document: at least 4 .*data.document_per_line"),
        ("full_sentences", False, "One.\nTwo.\n", "data.train holds 1 document: at least 2 .*data.document_per_line"),
        ("nsp", True, "One.\n\nTwo.\n", "data.eval holds 1 document: at least 2 .*data.document_per_line"),
    ],
)
def test_documents_are_counted_before_a_vocabulary_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, input_format: str, held_out: bool, text: str, message: str
) -> None:
    monkeypatch.setattr(vocabulary, "train_vocabulary", lambda *arguments: pytest.fail("trained"))
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "eval.txt").write_text("One line.")
    data = DataConfig(
        train=str(tmp_path / "train.txt"),
        eval=str(tmp_path / "eval.txt") if held_out else None,
        input_format=input_format,
        cache_dir=str(tmp_path / "cache"),
    )
    with pytest.raises(UserError, match=message):
        corpus_vocabulary(data, TokenizerConfig(vocab_size=100), print)


def test_tokens_are_measured_in_characters_and_bytes() -> None:
    """A byte-level vocabulary without merges has a token for each byte; [CLS] in a text is ordinary text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = build_byte_level({byte: number for number, byte in enumerate([*alphabet, "[CLS]"])}, [])
    size = measure_tokens(tokenizer, ["Zürich [CLS]", "", "東京"])
    assert size == pytest.approx((14 / 19, 1.0))


def test_other_fields_and_lines_as_documents_have_other_vocabularies(tmp_path: Path) -> None:
    rows = [{"text": "aaa aaa", "title": "bbb bbb"}] * 5
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(tmp_path / "a.jsonl"), "cache_dir": str(tmp_path / "cache")}
    config = TokenizerConfig(vocab_size=100)
    for changes, token in (({}, "aaa"), ({"text_field": "title"}, "bbb"), ({"document_per_line": True}, "aaa")):
        tokenizer = corpus_vocabulary(DataConfig(**data, **changes), config, lambda line: None)
        assert [token for token in ("aaa", "bbb") if tokenizer.token_to_id(token) is not None] == [token]
    assert len(list((tmp_path / "cache" / "vocabularies").glob("*/tokenizer.json"))) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_field": ""}, "data.text_field is ''"),
        ({"text_field": ["a", "a"]}, "data.text_field is .* different"),
        (
            {"document_per_line": True, "verbatim": True, "input_format": "blocks"},
            "_per_line is true, but data.verbatim",
        ),
        (
            {"document_per_line": True, "one_sentence_per_line": True},
            "_per_line is true, but data.one_sentence_per",
        ),
    ],
)
def test_contradictory_ways_to_read_are_named(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(train="a.txt", **changes).check()
