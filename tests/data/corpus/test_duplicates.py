"""Duplicates and contaminated documents: planted ones are found, and nothing else."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert.commands import main as command
from bert.config import DataConfig
from bert.data.corpus.duplicates import Contamination, ExactDuplicates, NearDuplicates
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import PretrainingDataset
from bert.errors import UserError
from bert.tokenizer.library import SPECIAL_TOKENS
from bert.tokenizer.vocabulary import load_tokenizer
from tests.messages import has_all

pytest.importorskip("rensa")

DRAW = random.Random(0)
WORDS = [f"word{number}" for number in range(500)]


def document(length: int = 200) -> list[str]:
    return [" ".join(DRAW.choices(WORDS, k=20)) for _ in range(length // 20)]


def kept(documents: list[list[str]], threshold: float) -> tuple[list[int], int]:
    """Numbers of the documents that pass, and the count of the others."""
    similar = NearDuplicates(threshold)
    numbers = [number for number, text in enumerate(documents) if similar(0, text).document is not None]
    return numbers, len(documents) - len(numbers)


def changed(original: list[str], share: float) -> list[str]:
    """The document with a stretch of its words replaced: of its runs of five words, about this share."""
    words = " ".join(original).split()
    count = round(share * len(words))
    return [" ".join([*(f"other{number}" for number in range(count)), *words[count:]])]


def test_planted_duplicates_are_left_out_and_nothing_else() -> None:
    documents = [document() for _ in range(100)]
    planted = {30: 3, 50: 7, 80: 60}
    for place, original in planted.items():
        documents[place] = changed(documents[original], 0.04)
    documents[90] = [line.upper() for line in documents[1]]
    documents[91] = [word for line in documents[2] for word in line.split()]
    numbers, count = kept(documents, 0.8)
    assert set(range(100)) - set(numbers) == {*planted, 90, 91}
    assert count == 5


def test_the_threshold_decides() -> None:
    """A share x of other runs in both: Jaccard (1 - x) / (1 + x), 0.82 at x = 0.1 and 0.33 at x = 0.5."""
    original = document(2000)
    for share, threshold, duplicate in ((0.1, 0.6, True), (0.5, 0.6, False), (0.5, 0.2, True), (0.0, 1.0, True)):
        assert (kept([original, changed(original, share)], threshold)[1] == 1) == duplicate, (share, threshold)


def test_short_documents_are_compared_whole() -> None:
    assert kept([["one two"], ["one three"], ["One", "two"], ["one two three four five six"]], 0.8) == ([0, 1, 3], 1)


def test_a_pair_at_the_threshold_is_found_as_often_as_the_estimate_allows() -> None:
    """By the binomial distribution of 128 hashes, a pair of similarity 0.9 is below 0.8 with probability 1e-4."""
    originals = [document(400) for _ in range(40)]
    copies = [changed(text, 0.9**-1 - 1) for text in originals]  # Jaccard (1 - x) / (1 + x) = 0.8 at x = 0.11
    assert kept([*originals, *copies], 0.6)[1] == 40
    assert kept([*originals, *copies], 0.95)[1] == 0


@pytest.mark.medium
def test_the_same_documents_are_left_out_in_each_process() -> None:
    program = "from bert.data.corpus.duplicates import NearDuplicates as N\nfilter = N(0.5)\n"
    program += "texts = [[' '.join(f'w{n}' if n >= i else f'x{i}.{n}' for n in range(200))] for i in range(99)]\n"
    program += "print([filter(0, text).document is None for text in texts])"
    outputs = {
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
                       stdout=subprocess.PIPE, check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1
    assert "True" in outputs.pop()


def test_text_without_spaces_is_compared_by_characters() -> None:
    text = "".join(DRAW.choices("一二三四五六七八九十百千万年月日天地人", k=300))
    assert kept([[text], [text[:290] + "山川草木"], [text[::-1]]], 0.8) == ([0, 2], 1)


def test_exact_duplicates_are_equal_line_by_line() -> None:
    exact = ExactDuplicates()
    texts = [["a", "b"], ["a b"], ["a", "b"], ["A", "b"]]
    assert [exact(0, text).document is None for text in texts] == [False, False, True, False]


def parquet(columns: dict[str, list[Any]]) -> bytes:
    """The bytes of a Parquet file."""
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


SENTENCE = "The quick brown fox jumps over the lazy dog while seven old owls watch in silence tonight."


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dev.tsv", f"0\tno overlap at all here\n1\t{SENTENCE}\n"),
        ("dev.csv", f'label,text\n1,"{SENTENCE}"\n'),
        ("lines.csv", 'text;label\n"' + SENTENCE.replace(" ", "\n") + '";1\n'),
        ("lines.tsv", 'text\tlabel\n"' + SENTENCE.replace(" ", "\n") + '"\t1\n'),
        ("long.csv", f'text,label\n"{"long " * 30_000}",1\n"{SENTENCE}",1\n'),
        ("dev.json", json.dumps({"data": [{"paragraphs": [{"context": SENTENCE, "qas": [3, None]}]}]})),
        ("dev.jsonl", json.dumps({"text": SENTENCE}) + "\n\n"),
        ("dev.txt", SENTENCE),
        ("dev.conll", "an O\n\n" + "".join(f"{word}\tO\n" for word in SENTENCE.split())),
        ("dev.ndjson", json.dumps({"words": SENTENCE.split(), "tags": ["O"] * 17}) + "\n"),
        ("dev.parquet", parquet({"label": [0, 1], "text": [None, SENTENCE]})),
        ("words.parquet", parquet({"words": [["a"], SENTENCE.split()], "tags": [[0], [0] * 17]})),
    ],
)
def test_thirteen_words_of_an_evaluation_set_are_found(tmp_path: Path, name: str, content: str | bytes) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    contamination = Contamination(str(tmp_path / "*.*"))
    words = SENTENCE.split()

    def found(*text: str) -> bool:
        return contamination(0, ["First line.", " ".join(text)]).document is None

    assert found("before", *words[2:15], "after")
    assert found(*(word.upper() + "," for word in words))  # case and punctuation are ignored
    assert not found(*words[2:14], "other", *words[15:])
    [(reason, _)] = contamination(0, [SENTENCE]).removed
    assert reason == f"shares 13 words with {tmp_path / name}"


def test_a_short_evaluation_text_is_compared_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "dev.tsv").write_text("only seven words are in this one\nhere we have eight words in this sentence\n")
    contamination = Contamination([str(tmp_path / "dev.tsv")])
    assert contamination(0, ["only seven words are in this one"]).document is not None
    assert contamination(0, ["well, here we have eight words in this sentence."]).document is None
    assert not caplog.messages
    (tmp_path / "dev.txt").write_text("seven\nwords\non\nlines\nof\ntheir\nown\n")
    Contamination([str(tmp_path / "dev.txt")])
    assert "dev.txt has no text of 8 words, and removes nothing" in caplog.text


@pytest.mark.parametrize(
    "text",
    ["今天天气很好，我们去公园，看到很多花，还有小鸟。", "วันนี้อากาศดีมาก เราไปสวน", "昨日は雨が、降っていました。"],
    ids=["zh", "th", "ja"],
)
def test_evaluation_texts_without_spaces_are_found_by_characters(text: str, tmp_path: Path) -> None:
    (tmp_path / "dev.txt").write_text(text)
    contamination = Contamination([str(tmp_path / "dev.txt")])
    assert contamination(0, ["before", f"Some English words and {text}"]).document is None
    assert contamination(0, ["before", text[:9] + "x" + text[10:12]]).document is not None


def test_a_missing_or_damaged_evaluation_set_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.decontaminate: no file matches nowhere/\*\.tsv"):
        Contamination("nowhere/*.tsv")
    (tmp_path / "dev.jsonl").write_text('{"text": "a"}\n{')
    with pytest.raises(UserError, match=r"dev\.jsonl, line 2: not JSON"):
        Contamination(str(tmp_path / "dev.jsonl"))
    (tmp_path / "dev.parquet").write_bytes(parquet({"text": ["a"]})[:-9])
    with pytest.raises(UserError, match=r"dev\.parquet is cut short or damaged"):
        Contamination(str(tmp_path / "dev.parquet"))


def test_the_examples_have_no_near_duplicates(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]))
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    documents = [document(60) for _ in range(20)]
    for name, texts in (("once", documents), ("twice", [*documents, *(changed(text, 0.02) for text in documents)])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join("\n".join(text) for text in texts))
    options = {"sequence_length": 32, "input_format": "full_sentences", "num_workers": 1, "near_duplicates": 0.7}

    def build(name: str, **changes: float | None) -> PretrainingDataset:
        config = DataConfig(train=str(tmp_path / f"{name}.txt"), **{**options, **changes})
        return build_examples(config, tokenizer, tmp_path / "cache")

    assert build("twice").filtered["near_duplicates"]["documents"] == 20
    assert build("twice").counts == build("once").counts
    kept = build("twice", near_duplicates=None)
    assert kept.counts["train_documents"] > build("once").counts["train_documents"]
    assert kept.filtered == {}


def test_a_missing_library_is_one_sentence(monkeypatch, fails) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"data\.near_duplicates needs rensa"):
        NearDuplicates(0.8)
    assert has_all(
        fails(command, "pretrain", "--data.near_duplicates=1.5", "--output_dir=run"),
        "data.near_duplicates is 1.5",
        "above 0",
        "most 1",
    )
