import sys

import pytest

from bert.config import STDLIB_CORPUS
from bert.data.corpus import stdlib
from bert.data.corpus.documents import documents

DOC = """\
frobnicate(x, y=None) -> int

Turn the knob by x degrees, which takes
about per second on a slow machine.

    >>> frobnicate(3)
    3
    >>> frobnicate("")

Options
-------

x -- the angle, measured in degrees from the top
y -- nobody knows what it is, so leave it alone

Name      Meaning       Default
a         first thing   1
b         second        2

    for item in items:
        print(item)

- The first point is made here, and
  goes on in the next line
- The second point is shorter than that.
"""


@pytest.fixture(scope="module")
def harvest():
    return list(stdlib.stdlib_documents())


def test_prose_keeps_sentences_and_drops_code_sessions_tables_and_headings():
    assert stdlib.prose(DOC) == [
        "Turn the knob by x degrees, which takes about per second on a slow machine.",
        "x -- the angle, measured in degrees from the top.",
        "y -- nobody knows what it is, so leave it alone.",
        "The first point is made here, and goes on in the next line.",
        "The second point is shorter than that.",
    ]


def test_a_megabyte_of_english(harvest):
    text = [paragraph for document in harvest for paragraph in document]
    size = sum(map(len, text))
    assert 1_000_000 < size < 4_000_000
    assert len(harvest) > 250
    words = " ".join(text).lower().split()
    assert words.count("the") / len(words) > 0.05, "prose in English has one word in twenty 'the'"
    assert not any(paragraph.startswith(">>>") or "\n" in paragraph for paragraph in text)
    assert all(len(" ".join(document).split()) >= 30 for document in harvest)


def test_it_mixes_with_files(harvest, tmp_path):
    (tmp_path / "a.txt").write_text("mine")
    assert list(documents([str(tmp_path / "a.txt"), STDLIB_CORPUS])) == [["mine"], *harvest]


def test_harvest_is_the_same_twice_and_sorted(harvest, monkeypatch):
    modules = stdlib._modules()
    names = [name for name, _ in modules]
    assert names == sorted(names)
    assert not any(part in name for name in names for part in ("site-packages", "/test/", "idle_test"))
    assert stdlib.source_state() == stdlib.source_state()
    monkeypatch.setattr(stdlib, "_modules", lambda: modules[:60])
    again = stdlib._harvest.__wrapped__()
    assert list(map(list, again)) == harvest[: len(again)]


def test_nothing_is_imported(monkeypatch, tmp_path):
    (tmp_path / "boom.py").write_text('"""' + "A sentence of several plain words. " * 9 + '"""\nraise SystemExit(1)\n')
    (tmp_path / "broken.py").write_text('"""Broken on purpose."""\nprint "old"\n')
    (tmp_path / "nul.py").write_bytes(b'"""Nul."""\n\x00')
    (tmp_path / "short.py").write_text('"""Too short to be a document."""')
    monkeypatch.setattr(stdlib.sysconfig, "get_path", lambda name: str(tmp_path))
    found = stdlib._harvest.__wrapped__()
    assert found == ((("A sentence of several plain words. " * 9).strip(),),)
    assert "boom" not in sys.modules


def test_unreadable_source_is_passed_over(tmp_path):
    assert list(stdlib._docstrings(tmp_path / "gone.py")) == []
