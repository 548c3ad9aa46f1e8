"""Tags that mark entities: what counts as one, which scheme it is, one scheme as another."""

from __future__ import annotations

import itertools

import pytest

from bert.metrics.tagging_schemes import (
    SCHEMES,
    convert,
    detect_scheme,
    extract_entities,
    find_spelling,
    first_invalid_tag,
    is_span_tag,
)

CASES = [
    ("B-A I-A O B-B", [("A", 0, 2), ("B", 3, 4)]),
    ("B-A B-A", [("A", 0, 1), ("A", 1, 2)]),  # touching
    ("B-A I-A B-A I-A", [("A", 0, 2), ("A", 2, 4)]),
    ("I-A I-A O", [("A", 0, 2)]),  # no B
    ("O I-A", [("A", 1, 2)]),
    ("B-A I-B", [("A", 0, 1), ("B", 1, 2)]),  # the type changes
    ("I-A I-B I-A", [("A", 0, 1), ("B", 1, 2), ("A", 2, 3)]),
    ("S-A S-A B-A E-A", [("A", 0, 1), ("A", 1, 2), ("A", 2, 4)]),
    ("B-A I-A E-A I-A", [("A", 0, 3), ("A", 3, 4)]),
    ("E-A E-A S-A E-A", [("A", 0, 1), ("A", 1, 2), ("A", 2, 3), ("A", 3, 4)]),
    ("B-creative-work I-creative-work", [("creative-work", 0, 2)]),
    ("B I O B", [("", 0, 2), ("", 3, 4)]),  # no types
    ("O O", []),
    ("", []),
]


@pytest.mark.parametrize(("tags", "expected"), CASES)
def test_entities(tags, expected):
    assert extract_entities(tags.split()) == expected


def test_every_sequence_keeps_its_entities_in_every_scheme():
    tags = ["O", *(f"{prefix}-{type}" for prefix in "BIES" for type in "AB")]
    for length in range(4):
        for sequence in itertools.product(tags, repeat=length):
            for scheme in SCHEMES:
                written = convert(sequence, scheme)
                assert extract_entities(written) == extract_entities(sequence)
                assert first_invalid_tag(written, scheme) is None
                assert convert(written, scheme) == written


def test_schemes_by_hand():
    tags = ["O", "B-A", "I-A", "B-A", "B-B", "O", "B-A"]
    assert convert(tags, "IOB1") == ["O", "I-A", "I-A", "B-A", "I-B", "O", "I-A"]
    assert convert(tags, "BIOES") == ["O", "B-A", "E-A", "S-A", "S-B", "O", "S-A"]
    assert convert(["B", "I", "O"], "BIOES") == ["B", "E", "O"]


@pytest.mark.parametrize(
    ("tags", "scheme", "place"),
    [
        ("O I-A", "BIO", 1),
        ("B-A I-B", "BIO", 1),
        ("I-A", "BIO", 0),
        ("B-A E-A", "BIO", 1),
        ("O B-A", "IOB1", 1),
        ("I-A B-B", "IOB1", 1),
        ("I-A B-A I-B", "IOB1", None),
        ("B-A I-A O", "BIOES", 2),
        ("O B-A", "BIOES", 1),  # never ended
        ("E-A", "BIOES", 0),
        ("S-A E-A", "BIOES", 1),
        ("B-A E-B", "BIOES", 1),
        ("B-A I-A E-A S-A", "BIOES", None),
    ],
)
def test_faults(tags, scheme, place):
    assert first_invalid_tag(tags.split(), scheme) == place


@pytest.mark.parametrize(
    ("sentences", "scheme"),
    [
        (["B-A I-A O B-A"], "BIO"),
        (["I-A I-A O I-B"], "IOB1"),
        (["I-A B-A O", "I-B"], "IOB1"),
        (["B-A O", "B-A", "I-A"], "BIO"),  # one broken sentence
        (["I-A O", "I-A", "B-A"], "IOB1"),
        (["B-A E-A", "O"], "BIOES"),
        (["S-A"], "BIOES"),
        (["O O"], "BIO"),
        ([], "BIO"),
    ],
)
def test_schemes_are_recognised(sentences, scheme):
    assert detect_scheme(sentence.split() for sentence in sentences) == scheme


def test_which_tags_mark_entities():
    assert all(map(is_span_tag, ["O", "B-A", "I-A", "E-A", "S-A", "B", "I", "B-a-b"]))
    assert not any(map(is_span_tag, ["NN", "A", "b-A", "B-", "", "L-A", "O-A", "-"]))


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("U-A O B-B I-B L-B", "S-A O B-B I-B E-B"),
        ("U-A O", "S-A O"),
        ("S-A O B-B M-B E-B", "S-A O B-B I-B E-B"),
        ("W-A O B-B M-B E-B", "S-A O B-B I-B E-B"),
        ("A-B A-I O", "B-A I-A O"),
        ("B_A I_A O", "B-A I-A O"),
        ("b-a i-a o", "B-a I-a O"),
        ("b-a O", "B-a O"),
        ("B-A I-A O", "B-A I-A O"),
        ("A-b-B A-b-I O", "B-A-b I-A-b O"),
    ],
)
def test_other_spellings_of_tags(tags, expected):
    spelling = find_spelling(tags.split())
    assert [spelling.read(tag) for tag in tags.split()] == expected.split()
    assert [spelling.write(tag) for tag in expected.split()] == tags.split()


def test_types_alone_are_tags_if_they_are_known():
    assert find_spelling(["O", "A"]) is None
    assert find_spelling(["O", "A"], ()).read("A") == "I-A"
    assert find_spelling(["A"], ["A", "B"]).write("B-A") == "A"
    assert find_spelling(["NN", "VB"], ()) is None
    assert find_spelling(["O", "C"], ["A"]) is None
    assert find_spelling(["O", "B-A", "Borg"], ()) is None
