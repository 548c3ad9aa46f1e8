"""Labelled data as rows with named fields: three kinds of files, compressed files, data sets, and errors."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
from pathlib import Path

import datasets
import pandas
import pytest

from bert.data.records import (
    dataset_records,
    declared_labels_file,
    is_dataset_dict,
    open_splits,
    read_records,
    read_texts,
)
from bert.errors import UserError


def made(folder: Path, name: str, content: str | bytes) -> Path:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder / name


def error_of(path: Path, header: list[str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        list(read_records(path, header).rows)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_quotes_are_characters_in_tsv_and_quotes_in_csv(tmp_path: Path) -> None:
    tsv = read_records(made(tmp_path, "a.tsv", '\ufefftext\tlabel\r\n"so, \x85 so\t1\r\n\n'))
    assert tsv.names == ("text", "label")
    assert list(tsv.rows) == [(2, {"text": '"so, \x85 so', "label": "1"})]
    csv = read_records(made(tmp_path, "a.csv", 'text,label\r\n"so, ""so""\r\non",1\r\n\r\nfine,0\r\n'))
    assert list(csv.rows) == [(2, {"text": 'so, "so"\r\non', "label": "1"}), (5, {"text": "fine", "label": "0"})]
    jsonl = read_records(made(tmp_path, "a.jsonl", '{"text": "so\\tso", "label": 1}\n\n{"text": "x", "more": [1]}\n'))
    assert jsonl.names is None
    assert list(jsonl.rows) == [(1, {"text": "so\tso", "label": 1}), (3, {"text": "x", "more": [1]})]


def test_texts_are_not_read_from_other_kinds_of_files(tmp_path: Path) -> None:
    assert read_texts(made(tmp_path, "a.ndjson", '{"text": "so"}\n'), "document") == ["so"]
    for name, words in (
        ("a.json", "does not hold"),
        ("a.xlsx", "does not hold"),
        ("a.parquet", "is not a Parquet file"),
    ):
        with pytest.raises(UserError, match=f"{name} {words}"):
            read_texts(made(tmp_path, name, '{"text": "so"}\n'), "document")


def test_parquet_has_the_rows_and_labels_of_datasets_and_pandas(tmp_path: Path) -> None:
    features = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["ham", "spam"])}
    answers = {"text": datasets.List(datasets.Value("string"))}
    rows = {"text": ["a", None], "label": [1, -1], "answers": [{"text": ["x"]}, {"text": []}]}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features({**features, "answers": answers}))
    table.to_parquet(tmp_path / "a.parquet")
    records = read_records(tmp_path / "a.parquet")
    assert (records.names, records.unit) == (("text", "label", "answers.text"), "row")
    assert records.declared_labels == {"label": ("ham", "spam")}
    assert list(records.rows) == [
        (1, {"text": "a", "label": "spam", "answers.text": ["x"]}),
        (2, {"text": None, "label": None, "answers.text": []}),
    ]
    frame = pandas.DataFrame({"text": ["so", "no"], "label": pandas.Categorical(["x", "y"]), "count": [1, 2]})
    frame.to_parquet(tmp_path / "b.parquet")
    assert list(read_records(tmp_path / "b.parquet").rows) == [
        (1, {"text": "so", "label": "x", "count": 1}),
        (2, {"text": "no", "label": "y", "count": 2}),
    ]
    assert read_texts(tmp_path / "b.parquet", "document") == ["so", "no"]


def test_columns_without_a_header_line_are_named(tmp_path: Path) -> None:
    for name, line in (("a.tsv", "1\tfine"), ("a.csv", '1,"fine"')):
        records = read_records(made(tmp_path, name, line + "\n"), ["label", "text"])
        assert list(records.rows) == [(1, {"label": "1", "text": "fine"})]
        named = made(tmp_path, name, line.replace("1", "label").replace("fine", "text") + f"\n{line}\n")
        assert list(read_records(named, ["label", "text"]).rows) == [(2, {"label": "1", "text": "fine"})]


def test_packed_files_are_read_as_plain_ones(tmp_path: Path) -> None:
    content = b'text,label\n"a\nb",1\n'
    for name, pack in (("a.csv.gz", gzip.compress), ("a.csv.bz2", bz2.compress)):
        assert list(read_records(made(tmp_path, name, pack(content))).rows) == [(2, {"text": "a\nb", "label": "1"})]
    damaged = made(tmp_path, "b.csv.gz", gzip.compress(content)[:-9])
    assert "is cut short or damaged" in error_of(damaged)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.tsv", "text\tlabel\na\t1\nb\n", "line 3: 1 column where the header has 2"),
        ("a.csv", "text,label\na,b,1\n", ", line 2: 3 columns where the header has 2"),
        ("a.csv", 'text,label\n"a,1\nb,0\n', "line 2: not CSV"),
        ("a.csv", 'text,label\nx,1\n"a" b,1\n', ", line 3: not CSV"),
        ("a.csv", "text,label\na\rb,1\n", "line 2: a carriage return within"),
        ("a.tsv", "text\tlabel\n\na\t1\n", "line 2: the line is empty"),
        ("a.tsv", "text\tlabel\na\0\t1\n", ", line 2: a NUL character"),
        ("a.tsv", b"text\tlabel\ncaf\xe9\t1\n", ", line 2: not UTF-8"),
        ("a.tsv", "text\ttext\na\t1\n", "line 1: the columns are 'text', 'text'"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "line 2: not JSON"),
        ("a.jsonl", '["text"]\n', "line 1: not an object"),
        ("a.csv", "", " is empty: it needs a line for each row"),
        ("a.xlsx", "PK", " has an unsupported format: name a file of .tsv, .txt, .csv, .jsonl"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_file_and_line(tmp_path: Path, name, content, words) -> None:
    assert words in error_of(made(tmp_path, name, content))


def test_a_given_header_is_what_columns_are_counted_by(tmp_path: Path) -> None:
    message = error_of(made(tmp_path, "a.tsv", "a\tb\tc\n"), ["label", "text"])
    assert ", line 1: 3 columns where data.column_names has 2" in message
    assert "does not exist" in error_of(tmp_path / "b.csv")


def test_class_labels_of_data_sets_become_their_names(tmp_path: Path) -> None:
    names = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names, "tags": datasets.List(names)})
    rows = {"text": ["a", "b"], "label": [1, -1], "tags": [[0, 1], []]}
    table = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "saved"))
    assert is_dataset_dict(str(tmp_path / "saved"))
    assert not is_dataset_dict(str(tmp_path))
    records = dataset_records("saved", open_splits(str(tmp_path / "saved")), "train")
    assert list(records.rows) == [
        (1, {"text": "a", "label": "yes", "tags": ["no", "yes"]}),
        (2, {"text": "b", "label": None, "tags": []}),
    ]
    with pytest.raises(UserError, match="saved has no split 'dev'"):
        dataset_records("saved", {"train": table}, "dev")


def test_a_data_set_that_cannot_be_loaded_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str | None) -> None:
        raise ConnectionError(f"no {name} in {config}\nTraceback")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        UserError, match=r"^hub:a/b:c cannot be loaded \(no a/b in c\): name hub:ORG/NAME or .*:CONFIG$"
    ):
        open_splits("hub:a/b:c", "d")
    with pytest.raises(UserError, match=r"^hub:a/b cannot be loaded \(no a/b in d\)"):
        open_splits("hub:a/b", "d")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    with pytest.raises(UserError, match=r"cannot be loaded .*: save it again"):
        open_splits(str(tmp_path))


@pytest.mark.parametrize(("delimiter", "word"), [("\t", "tabs"), (";", "semicolons")])
def test_the_delimiter_of_csv_is_that_of_its_first_row(tmp_path: Path, delimiter: str, word: str) -> None:
    path = made(tmp_path, "a.csv", f"text{delimiter}label\nso, so{delimiter}1\n")
    records = read_records(path)
    assert list(records.rows) == [(2, {"text": "so, so", "label": "1"})]
    assert records.notes == [f"{path}: read as columns between {word}"]
    unnamed = read_records(made(tmp_path, "b.csv", f"so, so, so{delimiter}1\n"), ["text", "label"])
    assert list(unnamed.rows) == [(1, {"text": "so, so, so", "label": "1"})]
    assert read_records(made(tmp_path, "c.csv", "text,label\na;b\tc,1\n")).notes == []
    assert list(read_records(made(tmp_path, "d.csv", "text\na, b\n")).names) == ["text"]
    for names in (("text", "label (0,1)"), ("text", "label", "note, extra"), ("text", "one, two, three")):
        row = delimiter.join("ab"[: len(names)] + "c" * (len(names) - 2))
        records = read_records(made(tmp_path, "e.csv", delimiter.join(names) + f"\n{row}\n"))
        assert (records.names, len(list(records.rows))) == (names, 1)


@pytest.mark.parametrize("start", ["\n", "\n\r\n"])
def test_empty_lines_before_the_header_hide_no_delimiter(start: str, tmp_path: Path) -> None:
    records = read_records(made(tmp_path, "a.csv", f"{start}text;label\nso, so;b\n"))
    assert (records.names, [row for _, row in records.rows]) == (("text", "label"), [{"text": "so, so", "label": "b"}])


def test_line_ends_in_cells_are_kept(tmp_path: Path) -> None:
    """Offsets of answers count them."""
    records = read_records(made(tmp_path, "a.csv", '\ufefftext,label\r\n"a\r\nb\nc",1\r\n\r\nd,2'))
    assert list(records.rows) == [(2, {"text": "a\r\nb\nc", "label": "1"}), (6, {"text": "d", "label": "2"})]


def test_blanks_around_the_names_of_columns_do_not_count(tmp_path: Path) -> None:
    assert read_records(made(tmp_path, "a.csv", " text , label \na,1\n")).names == ("text", "label")


def test_a_table_in_utf_16_is_read_by_its_byte_order_mark(tmp_path: Path) -> None:
    for encoding, mark in (("utf-16-le", b"\xff\xfe"), ("utf-16-be", b"\xfe\xff")):
        content = "text\tlabel\r\ncafé \u010a\t1\r\n".encode(encoding)
        path = made(tmp_path, "a.txt", mark + content)
        assert list(read_records(path).rows) == [(2, {"text": "café \u010a", "label": "1"})]
        packed = made(tmp_path, "a.tsv.gz", gzip.compress(mark + content))
        assert list(read_records(packed).rows) == [(2, {"text": "café \u010a", "label": "1"})]
        assert "after line 1" in error_of(made(tmp_path, "a.txt", (mark + content)[:-1]))


def test_a_cell_of_csv_may_be_long(tmp_path: Path) -> None:
    text = "ba " * 50_000
    [(_, fields)] = read_records(made(tmp_path, "a.csv", f'text,label\n"{text}",1\n')).rows
    assert fields == {"text": text, "label": "1"}


SAYINGS = ["plain", 'he said "no"', "a\ttab", "two\nlines", "re\rturn", '"', '"all"', "", "a, b", "3"]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("name", ["a.tsv", "a.txt", "a.csv"])
def test_tsv_that_a_csv_writer_wrote_is_read_as_it_was(tmp_path: Path, name: str, quoting: int) -> None:
    with (tmp_path / name).open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", quoting=quoting)
        writer.writerows([["text", "label"], *([saying, number] for number, saying in enumerate(SAYINGS))])
    records = read_records(tmp_path / name)
    assert [fields["text"] for _, fields in records.rows] == SAYINGS
    assert "the quotes around cells are removed" in records.notes[-1]


@pytest.mark.parametrize(
    "rows",
    [
        ['he said "no"\t1', '"he said ""no"""\t1'],  # a quote within a cell that is not quoted
        ['"Yes" he said\t1'],
        ['"Yes, sir"\t1'],  # no CSV writer for tabs needs these quotes
        ['"a ""b"" c"\t1', '"Yes"\t1'],
        ['"I like it\t1', 'it was bad"\t0'],
        ['"\t1', '""""\t0', '"open\t1'],
    ],
)
def test_quotes_of_no_csv_writer_stay_in_tsv(tmp_path: Path, rows: list[str]) -> None:
    records = read_records(made(tmp_path, "a.tsv", "\n".join(["text\tlabel", *rows])))
    assert ["\t".join(fields.values()) for _, fields in records.rows] == rows
    assert not records.notes


@pytest.mark.parametrize("kind", ["numpy", "pandas", "arrow"])
def test_a_data_set_is_read_alike_whatever_its_format_and_lists_of_labels_may_be_null(
    tmp_path: Path, kind: str
) -> None:
    names = datasets.ClassLabel(names=["x", "y"])
    features = datasets.Features(text=datasets.Value("string"), label=names, tags=datasets.List(names))
    rows = {"text": ["a", "b"], "label": [1, 0], "tags": [[0, 1], None]}
    made = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)})
    made.set_format(kind)
    made.save_to_disk(tmp_path)
    records = dataset_records("d", open_splits(str(tmp_path)), "train")
    expected = [{"text": "a", "label": "y", "tags": ["x", "y"]}, {"text": "b", "label": "x", "tags": None}]
    assert [row for _, row in records.rows] == expected


@pytest.mark.parametrize("content", ["[" * 10**5, "[1]", '{"label": 5}', '{"label": [1]}'])
def test_damaged_declared_labels_are_an_error(tmp_path, content):
    file = tmp_path / "train.jsonl"
    file.write_text('{"label": "a"}\n')
    declared_labels_file(file).write_text(content)
    with pytest.raises(UserError, match=r"train\.jsonl\.declared_labels\.json"):
        read_records(file)
