"""Near-duplicates: planted and similar copies are found by the threshold, and their count is logged."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from bert.commands import main as command
from bert.config import DataConfig
from bert.data.corpus.document_store import NearDuplicateFilter
from bert.data.pretraining.build import build_examples
from bert.errors import UserError
from bert.tokenizer.library import SPECIAL_TOKENS
from bert.tokenizer.vocabulary import load_tokenizer
from tests.messages import has_all

pytest.importorskip("datasketch")

DRAW = random.Random(0)
WORDS = [f"word{number}" for number in range(500)]


def document(length: int = 200) -> list[str]:
    return [" ".join(DRAW.choices(WORDS, k=20)) for _ in range(length // 20)]


def kept(documents: list[list[str]], threshold: float) -> tuple[list[int], int]:
    """Numbers of the documents that pass, and the count of the others."""
    new_only = NearDuplicateFilter(threshold)
    return [number for number, _ in new_only(enumerate(documents))], new_only.count


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


def test_the_examples_have_no_near_duplicates(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *WORDS]))
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    documents = [document(60) for _ in range(20)]
    for name, texts in (("once", documents), ("twice", [*documents, *(changed(text, 0.02) for text in documents)])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join("\n".join(text) for text in texts))
    options = {"sequence_length": 32, "input_format": "full_sentences", "num_workers": 1, "near_duplicates": 0.7}

    def counts(name: str, **changes: float | None) -> dict[str, int]:
        config = DataConfig(train=str(tmp_path / f"{name}.txt"), **{**options, **changes})
        return build_examples(config, tokenizer, tmp_path / "cache").counts

    assert counts("twice").pop("near_duplicates") == 20
    assert {**counts("twice"), "near_duplicates": 0} == counts("once")
    assert counts("twice", near_duplicates=None)["train_documents"] > counts("once")["train_documents"]


def test_a_missing_library_is_one_sentence(monkeypatch, fails) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"data\.near_duplicates needs datasketch"):
        NearDuplicateFilter(0.8)
    assert has_all(
        fails(command, "pretrain", "--data.near_duplicates=1.5", "--output_dir=run"),
        "data.near_duplicates is 1.5",
        "above 0",
        "most 1",
    )
