"""Rows of texts with a vector per token: the expansion of queries, and tokens that are skipped."""

from pathlib import Path

import numpy as np
import pytest

from bert.data.late_interaction import ScoredRows, tokenize_scored
from bert.errors import UserError
from bert.model.late_interaction import LateInteraction, Role
from bert.tokenizer.vocabulary import load_tokenizer
from tests.tiny_models import PIECES

TEXTS = ["a b", "", "a ! c d e"]
CLS, SEP, MASK = (PIECES.index(token) for token in ("[CLS]", "[SEP]", "[MASK]"))
A, B = PIECES.index("a"), PIECES.index("b")


def rows_of(folder: Path, interaction: LateInteraction, role: Role | None, max_length: int = 7) -> ScoredRows:
    (folder / "vocab.txt").write_text("\n".join([*PIECES, "!"]) + "\n")
    return tokenize_scored(load_tokenizer(folder / "vocab.txt"), TEXTS, max_length, interaction, role)


def test_queries_are_extended(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, LateInteraction(expanded_length=6), "query")
    assert rows.lengths.tolist() == [6, 6, 7]
    assert rows.ids[:12].tolist() == [CLS, A, B, SEP, MASK, MASK, CLS, SEP, *[MASK] * 4]
    assert rows.scored.all() and not rows.can_be_packed
    batch = rows.batch(np.array([1, 0, 2]), 8, 4)
    assert batch["attention_mask"].sum(axis=1).tolist() == [2, 4, 7, 0]
    assert batch["input_ids"][1].tolist() == [CLS, A, B, SEP, MASK, MASK, 0, 0]
    assert not batch["token_type_ids"].any()


def test_mask_tokens_may_be_attended_to(tmp_path: Path) -> None:
    interaction = LateInteraction(expanded_length=6, attends_to_expansion=True, expansion_token="b")
    rows = rows_of(tmp_path, interaction, "query")
    assert rows.ids[:6].tolist() == [CLS, A, B, SEP, B, B]
    assert rows.can_be_packed
    assert rows.batch(np.arange(3), 7, 3)["attention_mask"].sum(axis=1).tolist() == [6, 6, 7]


@pytest.mark.parametrize("role", ["document", None])
def test_other_texts_are_not_extended(role: Role | None, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, LateInteraction(expanded_length=6), role)
    assert rows.lengths.tolist() == [4, 2, 7] and rows.can_be_packed


@pytest.mark.parametrize(
    ("roles", "role", "is_skipped"),
    [
        (("document",), "document", True),
        (("document",), None, True),
        (("document",), "query", False),
        (("query",), "query", True),
        (("query",), None, False),
    ],
)
def test_skipped_tokens_have_no_vector(roles: tuple[str, ...], role: Role | None, is_skipped: bool, tmp_path) -> None:
    interaction = LateInteraction(skipped_tokens=("!", "b", "unknown"), skipping_roles=roles)
    rows = rows_of(tmp_path, interaction, role)
    vectors = [rows.vectors_of(row, np.arange(length)).tolist() for row, length in enumerate(rows.lengths)]
    assert vectors == ([[0, 1, 3], [0, 1], [0, 1, 3, 4, 5, 6]] if is_skipped else [[*range(4)], [0, 1], [*range(7)]])


def test_an_unknown_expansion_token_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no token '\[EXTRA\]', by which queries are extended"):
        rows_of(tmp_path, LateInteraction(expanded_length=6, expansion_token="[EXTRA]"), "query")
