import gzip
import json
import os

import pytest

from bert.data.corpus import documents as corpus
from bert.data.corpus import files
from bert.data.corpus.documents import corpus_files, corpus_fingerprint, documents, split_sentences
from bert.errors import UserError

TWO = "First line.\nSecond line.\n\n\n  \nOther document.\n"
EXPECTED = [["First line.", "Second line."], ["Other document."]]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return str(path)


@pytest.mark.parametrize(
    "content",
    [
        TWO,
        TWO.rstrip("\n"),
        "\n\n" + TWO,
        TWO.replace("\n", "\r\n"),
        b"\xef\xbb\xbf" + TWO.encode(),
        b"\xef\xbb\xbf" + TWO.replace("\n", "\r\n").encode(),
    ],
    ids=["plain", "no last line end", "empty lines first", "CRLF", "BOM", "BOM and CRLF"],
)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a"])
def test_text(tmp_path, content, name):
    assert list(documents(write(tmp_path / name, content))) == EXPECTED


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_jsonl(tmp_path, name):
    rows = [{"id": 1, "text": "First line.\n\n Second line. \r\n"}, {"text": " "}, {"text": "Other document."}]
    content = "\r\n".join(json.dumps(row) for row in rows) + "\n\n"
    assert list(documents(write(tmp_path / name, b"\xef\xbb\xbf" + content.encode()))) == EXPECTED


def test_half_a_surrogate_pair_in_json_can_still_be_written_as_utf_8(tmp_path):
    (document,) = documents(write(tmp_path / "a.jsonl", '{"text": "odd \\ud83d end"}'))
    assert document[0].encode("utf-8")


def test_files_globs_and_folders_each_file_once_and_sorted(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.jsonl.gz", "deep/.hidden.txt", "deep/readme.md"):
        write(tmp_path / name, '{"text": "x"}' if "json" in name else name)
    names = [os.path.relpath(path, tmp_path) for path in corpus_files(str(tmp_path))]
    assert names == ["a.txt", "b.txt", "deep/c.jsonl.gz"]
    glob = corpus_files([str(tmp_path / "b.txt"), str(tmp_path / "*.txt"), str(tmp_path)])
    assert [os.path.relpath(path, tmp_path) for path in glob] == ["b.txt", "a.txt", "deep/c.jsonl.gz"]
    assert corpus_files(str(tmp_path / "**" / "*.jsonl.gz")) == [str(tmp_path / "deep/c.jsonl.gz")]
    odd = write(tmp_path / "x[1].txt", "odd name")
    assert corpus_files(odd) == [odd], "a file that exists is a file, whatever its name looks like"


def test_hidden_folders_are_left_out_and_linked_ones_read_once(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("corpus/a.txt", "corpus/.ipynb_checkpoints/a-checkpoint.txt", "elsewhere/b.txt"):
        write(tmp_path / name, name)
    (tmp_path / "corpus" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "corpus")
    names = [os.path.relpath(path, tmp_path / "corpus") for path in corpus_files(str(tmp_path / "corpus"))]
    assert names == ["a.txt", "linked/b.txt"]


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "corpus" / "a.txt", "text")
    assert corpus_files("~/corpus") == [str(tmp_path / "corpus" / "a.txt")]


BAD = {
    "Latin-1": ("a.txt", b"fine\ncaf\xe9\n", r"a\.txt, line 2: not UTF-8"),
    "UTF-16": ("a.txt", "fine".encode("utf-16"), r"a\.txt, line 1: not UTF-8: .* -f UTF-16 -t UTF-8"),
    "Latin-1 JSON": ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', r"a\.jsonl, line 2: not UTF-8"),
    "bad JSON": ("a.jsonl", '{"text": "x"}\n\n{"text": \n', r"a\.jsonl, line 3: not JSON"),
    "deep JSON": ("a.jsonl", "[" * 100_000, r"a\.jsonl, line 1: "),
    "no text": ("a.jsonl", '{"body": "x"}\n', r'a\.jsonl, line 1: no string "text"'),
    "text is a number": ("a.jsonl", '{"text": "x"}\n{"text": 1}\n', r'a\.jsonl, line 2: no string "text"'),
    "not an object": ("a.jsonl", "3\n", r'a\.jsonl, line 1: no string "text"'),
    "empty": ("a.txt", "", r"a\.txt holds no text"),
    "invisible": ("a.txt", "\u200b\n\n\x07\ufeff\n", r"a\.txt holds no text"),
    "blank": ("a.txt", " \n\n\t\n", r"a\.txt holds no text"),
    "other kind": ("a.zip", "PK", r"a\.zip has an unsupported format"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_with_their_line(tmp_path, case):
    name, content, message = BAD[case]
    with pytest.raises(UserError, match=message) as raised:
        list(documents(write(tmp_path / name, content)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip"])
def test_damaged_gzip_is_named(tmp_path, damage):
    data = bytearray(gzip.compress(os.urandom(30_000).hex().encode() + b"\n\nx\n"))
    if damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    (tmp_path / "a.txt.gz").write_bytes({"cut": data[:-4000], "not gzip": b"plain"}.get(damage, data))
    with pytest.raises(UserError, match=r"a\.txt\.gz is cut short or damaged"):
        list(documents(str(tmp_path / "a.txt.gz")))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gone.txt", r"gone\.txt does not exist"),
        ("*.txt", r"no file matches .*\*\.txt"),
        ("only", r"the folder .*only holds no corpus file: it needs \*\.txt"),
        (None, "empty list"),
    ],
)
def test_places_where_nothing_is(tmp_path, source, message):
    write(tmp_path / "only" / "notes.md", "x")
    with pytest.raises(UserError, match=message):
        list(documents([] if source is None else str(tmp_path / source)))


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "text")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "_open", refuse)
    with pytest.raises(UserError, match=r"a\.txt cannot be read \(Permission denied\)"):
        list(documents(path))


def test_a_document_without_end_stops_before_memory_does(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 1000)
    for content in ("a line\n" * 500, "one endless line " * 100):
        with pytest.raises(UserError, match="separate documents with an empty line"):
            list(documents(write(tmp_path / "a.txt", content)))


def test_fingerprint_is_of_content_and_order(tmp_path):
    first, second = write(tmp_path / "a.txt", "one"), write(tmp_path / "b.txt", "two")
    print_of = corpus_fingerprint([first, second])
    assert corpus_fingerprint([second, first]) != print_of
    assert corpus_fingerprint(str(tmp_path)) == print_of
    moved = [write(tmp_path / "m" / name, text) for name, text in (("z.txt", "one"), ("y.txt", "two"))]
    assert corpus_fingerprint(moved) == print_of
    write(tmp_path / "b.txt", "too")
    assert corpus_fingerprint([first, second]) != print_of


def test_fingerprint_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    path, cache = write(tmp_path / "a.txt", "one"), tmp_path / "cache"
    os.utime(path, ns=(10**18, 10**18))
    read = []
    digest = corpus._digest_of_file
    monkeypatch.setattr(corpus, "_digest_of_file", lambda path: read.append(path) or digest(path))
    first = corpus_fingerprint(path, cache)
    assert corpus_fingerprint(path, cache) == first
    assert len(read) == 1
    write(tmp_path / "a.txt", "two")
    assert corpus_fingerprint(path, cache) != first
    corpus_fingerprint(path, cache)
    assert len(read) == 3, "a file that changed a moment ago is not remembered: it may change within the tick"
    (cache / "fingerprints.json").write_text("[broken")
    os.utime(path, ns=(10**18, 10**18))
    assert corpus_fingerprint(path, cache) != first


def test_fingerprint_of_an_edit_that_keeps_size_and_time(tmp_path):
    path, cache = write(tmp_path / "a.txt", "one"), tmp_path / "cache"
    os.utime(path, ns=(10**18, 10**18))
    first = corpus_fingerprint(path, cache)
    for edit in (lambda file: file.write_text("two"), lambda file: (file.unlink(), file.write_text("six"))):
        edit(tmp_path / "a.txt")
        os.utime(path, ns=(10**18, 10**18))
        assert corpus_fingerprint(path, cache) != first


@pytest.mark.medium
def test_fingerprint_of_the_standard_library():
    assert corpus_fingerprint("docstrings:json") == corpus_fingerprint(["docstrings:json"])


def test_sentences():
    paragraphs = ['Dr. Smith (b. 1950) left. "Why?" asked Ann.', "An open “quote. Or two", "Next paragraph."]
    sentences = split_sentences(paragraphs, "en")
    assert sentences[:2] == ["Dr. Smith (b. 1950) left.", '"Why?" asked Ann.']
    assert sentences[-1] == "Next paragraph."
    assert split_sentences(["你好。我很好。"], "zh") == ["你好。", "我很好。"]
    assert split_sentences([" One. Two. ", " "], "en", one_sentence_per_line=True) == ["One. Two."]


@pytest.mark.parametrize("space", ["\u00a0", "\u202f", "\u3000"], ids=ascii)
def test_a_wide_space_before_a_full_stop_is_no_crash(space: str) -> None:
    """sentencex panics at these."""
    text = f"See part B{space}. Then go on. So I{space}.{space}.{space}. did not know."
    sentences = split_sentences([text], "en")
    assert " ".join(sentences) == text
    assert "Then go on." in sentences
    long = split_sentences([f"{text} " * 200], "fr")
    assert " ".join(long) == " ".join([text] * 200)


def test_a_book_on_one_line_keeps_its_text_and_its_sentences():
    """A stray quotation mark pairs with another a chapter later and swallows what lies between."""
    sentences = [f"This is number {i} of many short sentences." for i in range(5000)]
    sentences[10] = 'The man said "this and never stopped.'
    sentences[4000] = 'He stopped" and went home.'
    result = split_sentences([" ".join(sentences)], "en")
    assert " ".join(result) == " ".join(sentences)
    assert len(result) > 4000
    endless = "no end " * 5000
    assert " ".join(split_sentences([endless], "en")) == endless.strip()
    assert "".join(split_sentences(["x" * 25_000], "en")) == "x" * 25_000


UNSPACED = {
    "Chinese": ("zh", "今天天气很好。我们去公园！他说：“好。走吧。”（真的。）"),
    "Chinese as English": ("en", "今天天气很好。我们去公园？"),
    "dialogue": ("zh", "“今天很好。我们去。”“好！”"),
    "Japanese": ("ja", "今日は天気がいい。「公園に行くよ。」と言った！"),
    "Burmese": ("my", "မြန်မာစာကောင်းသည်။"),
    "Hindi": ("hi", "आजमौसमअच्छाहै।"),
    "address": ("zh", "请看http://example.org/a?b=c和“链接”。谢谢你！"),
}


@pytest.mark.parametrize("name", UNSPACED)
def test_text_without_spaces_is_searched_in_short_stretches(monkeypatch, name):
    """The time for a sentence end grows with the distance to the last white space."""
    language, text = UNSPACED[name]
    paragraph = text * (9000 // len(text))
    whole, stretches = corpus._segment(paragraph, language), []
    segment = corpus._segment
    monkeypatch.setattr(corpus, "_segment", lambda *text: stretches.append(len(text[0])) or segment(*text))
    assert split_sentences([paragraph], language) == whole
    assert max(stretches) < 2 * corpus.UNSPACED


@pytest.mark.parametrize("text", ["วันนี้อากาศดีมากเราไปสวนกันเถอะ", "今日は天気がいい公園に行きます", "“今天很好"])
def test_text_without_a_sentence_end_is_kept(text):
    assert "".join(split_sentences([text * 1000], "th")) == text * 1000


def test_a_quotation_mark_that_is_never_closed_is_passed_over():
    stretches = list(corpus._cut_unspaced("“" + "今天天气很好。" * 2000))
    assert "".join(stretches) == "“" + "今天天气很好。" * 2000
    assert max(map(len, stretches)) < corpus.MAX_QUOTATION + 2 * corpus.UNSPACED


def test_text_with_spaces_is_not_cut():
    paragraph = "Сегодня хорошая погода. Мы идём в парк! Это 今天天气很好。 " * 100
    assert list(corpus._cut_unspaced(paragraph)) == [paragraph]
