"""The embedded corpus, on a made-up environment and on a few packages of the standard library."""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bert.data.corpus import docstrings
from bert.data.corpus.docstrings import Module, docstring_documents, source_state
from bert.data.corpus.documents import corpus_fingerprint, documents
from bert.errors import UserError

FIND = importlib.metadata.distributions
REAL = "docstrings:json,email"


def sentence(*words: str) -> str:
    """A sentence of 30 words that has no five in a row with others."""
    return " ".join(f"{word}{letter}" for word in words for letter in "abcdefghij") + "."


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes an environment of modules with one docstring each: name -> docstring."""

    def make(stdlib: dict[str, str], installed: dict[str, str]) -> None:
        site = tmp_path / "site"
        for root, modules in ((tmp_path / "stdlib", stdlib), (site, installed)):
            for name, text in modules.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f'"""{text}"""\nraise SystemExit("imported")\n')
        info = site / "installed-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in (*installed, "gone.py", "installed/data.txt")))
        monkeypatch.setattr(docstrings.sysconfig, "get_path", lambda name: str(tmp_path / "stdlib"))
        monkeypatch.setattr(importlib.metadata, "distributions", lambda: FIND(path=[str(site)]))
        clear_caches()

    yield make
    monkeypatch.undo()
    clear_caches()


def clear_caches() -> None:
    docstrings._installed.cache_clear()
    docstrings.read_prose.cache_clear()
    docstrings._PARSED.clear()


def test_documents_are_the_modules_of_the_environment(install) -> None:
    texts = {name: sentence(*name.split()) for name in ("a b c", "d e f", "g h i")}
    install({"one.py": texts["a b c"]}, {"pkg/two.py": texts["d e f"], "pkg/sub/three.py": texts["g h i"]})
    in_order = [[texts["a b c"]], [texts["g h i"]], [texts["d e f"]]]
    assert list(docstring_documents("docstrings:")) == in_order
    assert list(docstring_documents("docstrings:stdlib")) == in_order[:1]
    assert list(docstring_documents("docstrings:one")) == in_order[:1]
    assert list(docstring_documents("docstrings:pkg")) == in_order[1:]
    assert "one" not in sys.modules


def test_tests_copies_and_the_package_itself_are_left_out(install) -> None:
    text = sentence("a", "b", "c")
    left_out = ("pkg/tests/x.py", "pkg/test_x.py", "pkg/_vendor/other/x.py", "bert/x.py", "../bin/x.py")
    install({"test/x.py": text, "idlelib/x.py": text, "bert.py": text}, dict.fromkeys(left_out, text))
    with pytest.raises(UserError, match="holds no text"):
        list(documents("docstrings:"))


def test_near_duplicates_count_once(install) -> None:
    first = sentence("a", "b", "c")
    changed = first.replace("bc", "other")  # 5 of 30 runs of words are new
    new = sentence("d", "e", "f")
    install({"one.py": first, "three.py": f"{first.upper()}\n\n{new}", "two.py": changed}, {})
    assert sorted(docstring_documents("docstrings:")) == [[first], [new]]


def test_a_paragraph_of_a_held_out_module_is_in_no_other(install) -> None:
    [held_out] = [name for name in (f"z{number}.py" for number in range(40)) if split_of(name) == "dev"][:1]
    text = sentence("a", "b", "c")
    install({"a.py": text, held_out: text}, {})
    assert split_of("a.py") == "train"
    assert list(docstring_documents("docstrings::train")) == []
    assert list(docstring_documents("docstrings::dev")) == [[text]]


def split_of(name: str) -> str:
    return Module(name, Path(name), is_stdlib=True).split


@pytest.mark.medium
def test_one_module_in_ten_is_held_out() -> None:
    splits = [split_of(f"package/module_{number}.py") for number in range(2000)]
    assert 150 < splits.count("dev") < 250
    whole = list(docstring_documents(REAL))
    parts = [list(docstring_documents(f"{REAL}:{split}")) for split in docstrings.SPLITS]
    assert sorted(parts[0] + parts[1]) == sorted(whole)


def test_a_package_is_read_up_to_its_limit(install, monkeypatch) -> None:
    install({}, {"pkg/a.py": sentence("a", "b", "c"), "pkg/b.py": sentence("d", "e", "f")})
    monkeypatch.setattr(docstrings, "PACKAGE_BYTES", 200)
    assert list(docstring_documents("docstrings:pkg")) == [[sentence("a", "b", "c")]]


@pytest.mark.medium
def test_processes_find_what_one_finds(monkeypatch) -> None:
    alone = list(docstring_documents(REAL))
    monkeypatch.setattr(docstrings, "_PARALLEL_BYTES", 0)
    monkeypatch.setattr(docstrings, "available_cores", lambda: 2)
    clear_caches()
    assert list(docstring_documents(REAL)) == alone


@pytest.mark.medium
def test_prose_is_english_and_has_no_code() -> None:
    documents = list(docstring_documents(REAL))
    text = [paragraph for document in documents for paragraph in document]
    words = " ".join(text).lower().split()
    assert words.count("the") / len(words) > 0.05, "prose in English has one word in twenty 'the'"
    assert not any(paragraph.startswith(">>>") or "\n" in paragraph for paragraph in text)
    assert all(len(" ".join(document).split()) >= 30 for document in documents)


@pytest.mark.medium
def test_it_mixes_with_files(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("mine")
    assert list(documents([str(tmp_path / "a.txt"), REAL])) == [["mine"], *docstring_documents(REAL)]


def test_fingerprint_follows_the_text(install, tmp_path) -> None:
    install({"one.py": sentence("a", "b", "c")}, {})
    before = source_state("docstrings:"), corpus_fingerprint("docstrings:", tmp_path / "cache")
    assert before == (source_state("docstrings:"), corpus_fingerprint("docstrings:", tmp_path / "cache"))
    install({"one.py": sentence("a", "b", "d")}, {})
    assert source_state("docstrings:")[0] != before[0][0]
    assert corpus_fingerprint("docstrings:", tmp_path / "cache") != before[1]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("source", "wrong"),
    [("docstrings:json,nowhere", "'nowhere', which is not installed"), ("docstrings:json:test", "the split 'test'")],
)
def test_unknown_packages_and_splits_are_refused(source: str, wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        list(documents(source))
