"""Arbitrary file contents: either all rows are read or one error message explains why not. Never a stack trace."""

import contextlib
import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert.config import FinetuneConfig, PretrainConfig, TaskDataConfig
from bert.config.yaml_io import dump, load_config
from bert.data.corpus import files as formats
from bert.errors import UserError
from bert.tasks import find_task, make_task, multiple_choice, question_answering
from bert.tasks.token_classification import conll
from tests.helpers import thoroughly

WORDS = ["ba", "ko ri", "Ein Satz.", "文", "e\u0301", *"\u200b\u2028\x85\x0c\x1f\xa0 -01"]


def pieces_of(*fragments: str) -> st.SearchStrategy[bytes]:
    """Files that are nearly right: fragments of the format, words, any text and any bytes, in any order."""
    fragment = st.sampled_from([*fragments, *fragments, *WORDS, "\n", "\n", "\r\n", "\ufeff", "\0", "\t"])
    text = st.one_of(fragment, fragment, fragment, st.text(max_size=5)).map(
        lambda part: part.encode("utf-8", "replace")
    )
    part = st.one_of(text, text, text, text, text, text, text, text, text, st.binary(max_size=3))
    return st.lists(part, max_size=30).map(b"".join)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(), max_size=6)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
DEEP, LONG = "[" * 100_000, "9" * 5_000
"""JSON that is deeper than Python's stack, and a number of more digits than Python converts."""


def mutated(value: Any) -> st.SearchStrategy[Any]:
    """A JSON value, mostly as it is; any part of it may be something else, or missing."""
    same = {
        dict: lambda: (
            st.fixed_dictionaries({}, optional={key: mutated(item) for key, item in value.items()})
            | st.fixed_dictionaries({key: mutated(item) for key, item in value.items()})
        ),
        list: lambda: st.tuples(*(mutated(item) for item in value)).map(list),
    }.get(type(value), lambda: st.just(value))()
    # Not one_of(*[same] * 12, JSON), which hypothesis takes for one_of(same, JSON).
    return st.sampled_from(range(13)).flatmap(lambda number: same if number < 12 else JSON)


def dumped(value: Any, draw: Callable[[Any], Any]) -> str:
    return draw(st.sampled_from([json.dumps(value), json.dumps(value, ensure_ascii=False)]))


@st.composite
def json_lines(draw: Callable, *entries: Any) -> bytes:
    lines = draw(st.lists(st.one_of(*(mutated(entry) for entry in entries)), max_size=4))
    texts = [dumped(line, draw) for line in lines]
    texts += draw(st.lists(st.sampled_from(["", " ", DEEP, LONG, "{", '{"text": "\\ud800"}', "\ufeff"]), max_size=1))
    return "\n".join(draw(st.permutations(texts))).encode("utf-8", "surrogatepass")


@st.composite
def json_file(draw: Callable, entry: Any) -> bytes:
    text = draw(st.one_of(*[mutated(entry).map(json.dumps)] * 9, st.sampled_from([DEEP, LONG, "", "\ufeff{}", "[]"])))
    return text.encode("utf-8", "surrogatepass")


@st.composite
def csv_file(draw: Callable) -> bytes:
    cell = st.one_of(st.sampled_from(["sent1", "0", "1", "", "a, b", 'a "b"', "two\nlines"]), st.text(max_size=4))
    row = st.one_of(*[st.tuples(cell, cell, cell, cell, st.sampled_from("01"))] * 9, st.lists(cell, max_size=6))
    rows = [("sent1", "sent2", "ending0", "ending1", "label"), *draw(st.lists(row, max_size=4))]
    out = io.StringIO(newline="")
    csv.writer(out).writerows(rows)
    return out.getvalue().encode("utf-8", "replace") + draw(st.sampled_from([b"", b"", b"", b'"', b"\xff", b"\0"]))


# What should come back, counted in another way.


def lines_of(content: bytes) -> list[str]:
    text = content.decode("utf-8").removeprefix("\ufeff")
    return text.split("\n")


def count_blocks(content: bytes) -> int:
    """Documents end at empty lines, before a byte order mark within the file, and at invisible lines after text."""
    ends, has_text, in_document = 0, False, False
    for line in lines_of(content):
        text, is_text = line.strip(), not formats.is_blank(line)
        if in_document and (line.startswith("\ufeff") or not (is_text if has_text else text)):
            ends += 1
            has_text = in_document = False
            text = text if is_text else ""
        in_document |= bool(text)
        has_text |= is_text
    return ends + in_document


def count_texts(content: bytes) -> int:
    """Null and invisible texts are skipped; lone surrogates are replaced and visible."""
    lines = [line.removeprefix("\ufeff") for line in lines_of(content) if not formats.is_blank(line)]
    texts = [json.loads(line)["text"] or "" for line in lines]
    return sum(not formats.is_blank(text.encode("utf-8", "replace").decode()) for text in texts)


def count_rows(content: bytes) -> int:
    return sum(bool(line.removesuffix("\r")) for line in lines_of(content)) - 1


def count_words(content: bytes) -> int:
    lines = [line.removesuffix("\r") for line in lines_of(content)]
    return sum(bool(line.strip(" \t")) and not line.startswith("-DOCSTART-") for line in lines)


def count_questions(content: bytes) -> int:
    data = json.loads(content.decode("utf-8-sig"))["data"]
    return sum(len(paragraph["qas"]) for article in data for paragraph in article["paragraphs"])


def count_lines(content: bytes) -> int:
    return sum(bool(line.strip()) for line in lines_of(content))


def count_csv(content: bytes) -> int:
    return sum(map(bool, csv.reader(io.StringIO(content.decode("utf-8-sig"), newline="")))) - 1


# Readers: file -> every text of every row.


def read_documents(path: Path) -> Iterator[list[str]]:
    return formats.read_documents(str(path))


def read_sentences(path: Path) -> Iterator[list[str]]:
    examples = find_task("sst2").read(path.parent, "train")
    assert len(examples.labels) == len(examples.texts_a)
    return ([text] for text in examples.texts_a)


def read_words(path: Path) -> Iterator[list[str]]:
    sentences = conll.read(path, reading="count")
    return ([word] for words in sentences.words for word in words)


def read_questions(path: Path) -> Iterator[list[str]]:
    examples = question_answering.read(path).examples
    return ([example.id, example.question, example.context] for example in examples)


def read_choices(path: Path) -> Iterator[list[str]]:
    examples = multiple_choice.read(path)
    return ([a, *b, *c] for a, b, c in zip(examples.contexts, examples.choices, examples.names, strict=True))


# Readers of custom tasks, whose columns the configuration names.


def custom(task: str, path: Path) -> Any:
    config = FinetuneConfig(task=task, data=TaskDataConfig(dir=str(path.parent), train=path.name))
    return make_task(config).read(path.parent, "train")


def read_labelled(path: Path) -> Iterator[list[str]]:
    examples = custom("classification", path)
    assert len(examples.labels) == len(examples.texts_a)
    return ([text, examples.label_words[label]] for text, label in zip(examples.texts_a, examples.labels, strict=True))


def read_scored(path: Path) -> Iterator[list[str]]:
    return ([text] for text in custom("regression", path).texts_a)


def read_tagged(path: Path) -> Iterator[list[str]]:
    sentences = custom("tagging", path)
    return ([*words, *tags] for words, tags in zip(sentences.words, sentences.tags, strict=True))


def read_answered(path: Path) -> Iterator[list[str]]:
    examples = custom("span", path).examples
    return ([example.question, example.context, *(text for text, _ in example.answers)] for example in examples)


class Reader(NamedTuple):
    name: str
    files: st.SearchStrategy[bytes]
    read: Callable[[Path], Iterator[list[str]]]
    count: Callable[[bytes], int]


SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "ba ko ri",
                    "qas": [{"id": "1", "question": "ko?", "answers": [{"text": "ko", "answer_start": 3}]}],
                }
            ]
        }
    ]
}
CHOICE = {
    "id": "1",
    "question": {"stem": "ba", "choices": [{"label": "A", "text": "ko"}, {"label": "B", "text": "ri"}]},
    "answerKey": "A",
}
LABELLED = {"text": "ba \ud83d ko", "label": "\udc00"}
ANSWERED = {"question": "ko \ud800?", "context": "ba \ud83d ri", "answer": "\ud83d ri", "answer_start": 3}
TAGGED = {"words": ["ba", "\ud83d"], "tags": ["O", "B-X"]}
READERS = [
    Reader("corpus.txt", pieces_of("\n\n", "\n \n"), read_documents, count_blocks),
    Reader("corpus.jsonl", json_lines({"text": "ba\nko"}, {"text": "\ud800"}), read_documents, count_texts),
    Reader("train.tsv", pieces_of("sentence\tlabel\n", "ba\t1\n", "\t0\n", '"'), read_sentences, count_rows),
    Reader("train.conll", pieces_of("ba\tB-X\n", "ko I-X\n", "ri O\n", "-DOCSTART- O\n", "O"), read_words, count_words),
    Reader("train.json", json_file(SQUAD), read_questions, count_questions),
    Reader("train.jsonl", json_lines(CHOICE), read_choices, count_lines),
    Reader("train.csv", csv_file(), read_choices, count_csv),
    Reader("labelled.jsonl", json_lines(LABELLED), read_labelled, count_lines),
    Reader("scored.jsonl", json_lines({"text": "ba", "label": 1.5}), read_scored, count_lines),
    Reader("tagged.jsonl", json_lines(TAGGED), read_tagged, count_lines),
    Reader("answered.jsonl", json_lines(ANSWERED), read_answered, count_lines),
]
SIZES = [25, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.medium
@pytest.mark.parametrize("examples", SIZES)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_rows_come_back_or_a_sentence_does(tmp_path: Path, reader: Reader, examples: int) -> None:
    path = tmp_path / reader.name

    @thoroughly(examples)
    @given(reader.files)
    def run(content: bytes) -> None:
        path.write_bytes(content)
        try:
            rows = list(reader.read(path))
        except UserError as error:
            assert reader.name in str(error)
            return
        assert len(rows) == reader.count(content)
        for row in rows:
            for text in row:
                text.encode("utf-8")  # half a surrogate pair would stop the tokenizer later

    run()


@pytest.mark.parametrize(
    ("reader", "entry", "texts"),
    [
        (read_labelled, LABELLED, ["ba ? ko", "?"]),
        (read_tagged, TAGGED, ["ba", "?", "O", "B-X"]),
        (read_answered, ANSWERED, ["ko ??", "ba ? ri", "? ri"]),
        (read_choices, {**CHOICE, "question": {**CHOICE["question"], "stem": "\ud83d"}}, ["?", "ko", "ri", "A", "B"]),
    ],
    ids=["classification", "tagging", "span", "multiple choice"],
)
def test_half_a_surrogate_pair_is_a_question_mark(tmp_path: Path, reader, entry: Any, texts: list[str]) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(entry) + "\n")
    assert list(reader(path)) == [texts]
    path.write_text(json.dumps(entry).replace("\\ud83d", "\\ud83d\\ude00") + "\n")  # a whole pair stays
    [again] = reader(path)
    assert ("\U0001f600" in "".join(again)) == ("ud83d" in json.dumps(entry))


KEYS = ["seed", "output_dir", "training", "steps", "batch_size", "model", "hidden_size", "data", "train", "weights"]
VALUES = ["1", "1e3", "-1", ".inf", "nan", "1e400", "null", "~", "[a, b]", "[1", "{a: b}", "&a [*a]", "*b", "'", '"']
VALUES += ["!!x y", "no", "2024-01-01", "0x10", "1_000", "@file", "${x}", "|", ">", "%", "`", "a: b", "\t"]
VALUES += ["[" * 5_000, LONG]


@st.composite
def yaml_file(draw: Callable) -> bytes:
    line = st.tuples(
        st.sampled_from(["", "", "  ", "    ", "\t", "- "]),
        st.one_of(*[st.sampled_from(KEYS)] * 9, st.text(max_size=4), st.just("[a]"), st.just("<<")),
        st.sampled_from([": ", ": ", ": ", ":", " "]),
        st.one_of(*[st.sampled_from(VALUES)] * 5, st.text(max_size=6), st.integers().map(str), st.floats().map(str)),
    )
    lines = draw(st.lists(line.map("".join), max_size=6))
    text = "\n".join(lines).encode("utf-8", "replace")
    return text + draw(st.sampled_from([b"", b"", b"", b"\xff", b"\0", b"\n---\n"]))


@pytest.mark.medium
@pytest.mark.parametrize("examples", [10, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [PretrainConfig, FinetuneConfig])
def test_a_configuration_comes_back_or_a_sentence_does(tmp_path: Path, kind: type, examples: int) -> None:
    path, again = tmp_path / "mine.yaml", tmp_path / "again.yaml"

    @thoroughly(examples)
    @given(yaml_file())
    def run(content: bytes) -> None:
        path.write_bytes(content)
        try:
            config = load_config(kind, path)
        except UserError as error:
            assert "mine.yaml" in str(error)
            return
        again.write_text(dump(config), encoding="utf-8")
        read = load_config(kind, again)
        assert read == config or repr(read) == repr(config)  # NaN is not equal to itself
        with contextlib.suppress(UserError):
            config.check()

    run()
