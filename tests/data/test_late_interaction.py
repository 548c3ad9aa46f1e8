"""Rows of texts with a vector per token: the expansion of queries, and tokens that are skipped."""

from pathlib import Path

import numpy as np
import pytest

from bert.data.batching import LengthGroups
from bert.data.late_interaction import ScoredRows, tokenize_scored, tokenize_scored_queries
from bert.data.rows import SCORE_MASK
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


def test_batches_mark_tokens_with_vectors(tmp_path: Path) -> None:
    """Groups of a batch have the masks of their rows; what fills a batch has one token."""
    interaction = LateInteraction(query_length=6, expanded_length=6, skipped_tokens=("!", "b"))
    (tmp_path / "vocab.txt").write_text("\n".join([*PIECES, "!"]) + "\n")
    documents = [["a ! c"], ["b b", "c"], ["d"]]
    rows = tokenize_scored_queries(
        load_tokenizer(tmp_path / "vocab.txt"), ["a b", "", "c d e a b"], documents, None, 8, interaction
    )
    assert rows.queries.lengths.tolist() == [6, 6, 6] and rows.documents.sequences.lengths.tolist() == [5, 4, 3, 3]
    batch = rows.batch(np.arange(3), 8, 4)
    assert batch[SCORE_MASK].shape == batch["attention_mask"].shape == (4, 3, 8)
    assert batch[SCORE_MASK].sum(axis=-1).tolist() == [[6, 4, 4], [6, 2, 3], [6, 3, 3], [0, 4, 4]]
    assert batch["attention_mask"].sum(axis=-1).tolist() == [[4, 5, 5], [2, 4, 3], [6, 3, 3], [0, 5, 5]]
    groups = LengthGroups([3, 4, 6], 8, 1, False, (0,) * 3).divide_sequences(batch)
    lengths = dict.fromkeys(range(12), 1) | {0: 6, 3: 6, 6: 6, 1: 5, 4: 4, 5: 3, 7: 3}
    for group in range(3):
        for place, number in enumerate(groups[f"sequences_{group}"].tolist()):
            for name in ("attention_mask", SCORE_MASK):
                full = batch[name].reshape(12, 8)[number] * (np.arange(8) < lengths[number])
                padded = groups[f"{name}_{group}"][place]
                expected = full[: len(padded)]
                if name == "attention_mask":
                    expected[0] = 1
                assert padded.tolist() == expected.tolist() and not full[len(padded) :].any()
    vectors = [np.ones((length, 2)) for length in (6, 5, 4)]
    joined = rows.join(vectors, [np.full((length, 2), 2.0) for length in (4, 2, 3, 3)])
    assert [array.shape for array in joined] == [(2, 6, 2), (3, 5, 2), (2, 4, 2)]
    assert joined[1][:, :, 0].sum(axis=1).tolist() == [5, 4, 6]


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
