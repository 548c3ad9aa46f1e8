"""A tokenizer.json on which the library fails or panics raises a UserError at load or for the text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bert.data.encoding import plain_ids, tokenize
from bert.errors import UserError
from bert.tokenizer.library import decode, encode_batch, library_errors
from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer

VOCABULARY = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])}
CLS = {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}}


def template(special: dict[str, Any], *parts: Any) -> dict[str, Any]:
    """A TemplateProcessing of ``parts``: the name of a special token, or the token type of the text."""
    single = [
        {"SpecialToken": {"id": part, "type_id": 0}}
        if isinstance(part, str)
        else {"Sequence": {"id": "A", "type_id": part}}
        for part in parts
    ]
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def file_of(folder: Path, **changes: Any) -> Path:
    content = {
        "version": "1.0",
        "model": {"type": "WordPiece", "vocab": VOCABULARY, "unk_token": "[UNK]", "continuing_subword_prefix": "##"},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    }
    content["model"]["max_input_chars_per_word"] = 100
    content |= {"added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None}
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**content, "truncation": None, "padding": None, **changes}))
    return file


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"post_processor": template({}, "[CLS]", 0)}, "post_processor fails"),
        ({"post_processor": template({"[CLS]": CLS["[CLS]"] | {"ids": [4_000_000_000]}}, "[CLS]", 0)}, "4000000000"),
        ({"post_processor": template({"[CLS]": CLS["[CLS]"] | {"ids": [7]}}, "[CLS]", 0)}, "the id 7"),
        ({"post_processor": template(CLS, "[CLS]", 4_000_000_000)}, "types"),
        ({"post_processor": template(CLS, "[CLS]", 7)}, "types"),
        ({"post_processor": template(CLS, 1, "[CLS]")}, "types"),
        ({"post_processor": template(CLS, "[CLS]")}, "exactly once"),
        ({"post_processor": template(CLS, "[CLS]", 0, 0)}, "exactly once"),
        ({"post_processor": template({})}, "exactly once"),
        ({"post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 99]}}, "the id 99"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAD/////"}}, "not a complete"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(a"}, "content": ""}}, "not a complete"),
    ],
)
def test_a_damaged_tokenizer_is_rejected_at_load(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load_tokenizer(file_of(tmp_path, **changes))
    assert "tokenizer.json" in str(caught.value)


BACKTRACKS = {"Regex": "(a+)+$"}
"""A pattern that exceeds the library's limit of steps on many letters `a` before another letter."""

REPLACES = {"type": "Replace", "pattern": BACKTRACKS, "content": ""}
SPLITS = {"type": "Split", "pattern": BACKTRACKS, "behavior": "Removed", "invert": False}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"normalizer": REPLACES}, marks=pytest.mark.medium),
        pytest.param({"pre_tokenizer": SPLITS}, marks=pytest.mark.medium),
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAEAAAAB"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    ],
)
def test_a_text_on_which_the_library_panics_is_quoted(tmp_path: Path, changes: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(file_of(tmp_path, **changes))
    bad = "a" * 40 + "b"
    for call in (
        lambda: tokenize(tokenizer, ["", bad], 16),
        lambda: tokenize(tokenizer, [("", bad)], 16),
        lambda: plain_ids(tokenizer, ["", bad]),
        lambda: plain_ids(tokenizer, ["", bad], literal=True),
        lambda: encode_batch(tokenizer, ["", bad], offsets=True),
    ):
        with pytest.raises(UserError, match=r"fails on .*aab'"):
            call()


def test_a_decoder_that_fails_gives_no_text() -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("no text")

    with pytest.raises(UserError, match=r"cannot decode \[5\] \(no text\)"):
        decode(SimpleNamespace(decode=fail), [5])  # type: ignore[arg-type]


def test_special_tokens_that_fill_the_row_are_rejected(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(file_of(tmp_path, post_processor=template(CLS, *["[CLS]"] * 20, 0)))
    with pytest.raises(UserError, match="max_length is 16"):
        tokenize(tokenizer, ["a"], 16)
    assert tokenize(tokenizer, ["a"], 21).lengths.tolist() == [21]


def test_an_id_that_no_embedding_has_is_rejected(tmp_path: Path) -> None:
    model = {"type": "WordPiece", "vocab": VOCABULARY | {"c": 4_294_967_295}, "unk_token": "[UNK]"}
    model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    with pytest.raises(UserError, match="4294967295"):
        embedding_rows(load_tokenizer(file_of(tmp_path, model=model)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_interrupts_pass_through(error: type[BaseException]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    with pytest.raises(error), library_errors("", ""):
        fail()
    with pytest.raises(error):
        encode_batch(SimpleNamespace(encode_batch_fast=fail), ["a"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"\ud800": 7}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "\udfff"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "c"}}}),
        ("added_tokens.json", {"c": 10**400}),
    ],
)
def test_added_tokens_that_cannot_be_are_rejected(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    file = file_of(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=str(tmp_path)):
        load_tokenizer(file)
