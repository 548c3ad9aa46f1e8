"""Lists and long texts in messages."""

from __future__ import annotations

from bert.errors import cut_at_word, quoted


def test_lists_in_messages_end_after_a_whole_name():
    assert quoted(["a", 1]) == "'a', 1"
    shown, more = quoted(f"label {number}" for number in range(50)).split(" and ")
    assert shown.endswith("'") and len(shown) <= 200
    assert more == f"{50 - shown.count('label')} more"
    assert quoted(["x" * 100, "b"]) == "'" + "x" * 55 + "...', 'b'"


def test_texts_of_other_programs_are_cut_after_a_word():
    text = cut_at_word("no connection to the hub\n" * 20)
    assert text.endswith("hub ...") or text.split(" ...")[0].split()[-1] in ("no", "connection", "to", "the")
    assert len(text) <= 200
