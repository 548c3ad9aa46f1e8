"""Every kind of file and data set yields the same documents. Errors name damaged files."""

import bz2
import gzip
import json
import lzma
import os
import re

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert.config import DataConfig
from bert.data.corpus import document_store
from bert.data.corpus.documents import (
    corpus_fingerprint,
    documents,
    numbered_documents,
    resolve_sources,
    split_sentences,
)
from bert.data.pretraining import tokenization
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import open_rows
from bert.errors import UserError
from bert.tokenizer.library import SPECIAL_TOKENS
from bert.tokenizer.vocabulary import load_tokenizer

TEXTS = ["First line.\n\n Second line. \n", " ", "Other document."]
EXPECTED = [["First line.", "Second line."], ["Other document."]]


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def parquet(path, texts, rows=2, **columns) -> str:
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts, **columns}), path, row_group_size=rows)
    return str(path)


@pytest.mark.parametrize("packed", PACK)
def test_compressed_text_and_jsonl(tmp_path, packed) -> None:
    text = tmp_path / f"a.txt{packed}"
    text.write_bytes(PACK[packed](b"First line.\nSecond line.\n\n") + PACK[packed](b"Other document.\n"))
    assert list(documents(str(text))) == EXPECTED, "two compressed parts one after the other are one file"
    lines = tmp_path / f"b.jsonl{packed}"
    lines.write_bytes(PACK[packed]("\n".join(json.dumps({"text": text}) for text in TEXTS).encode()))
    assert list(documents(str(lines))) == EXPECTED
    assert len(list(documents(str(tmp_path)))) == 4, "a folder holds both"


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_compressed_file_that_is_cut_short_is_named(tmp_path, packed, damage) -> None:
    data = PACK[packed](os.urandom(300_000).hex().encode() + b"\n\nx\n")
    path = tmp_path / f"a.txt{packed}"
    path.write_bytes(data[:-20_000] if damage == "cut" else b"plain text")
    with pytest.raises(UserError, match=rf"a\.txt\{packed} is cut short.*line 0") as raised:
        list(documents(str(path)))
    assert "\n" not in str(raised.value)


def test_parquet(tmp_path) -> None:
    path = parquet(tmp_path / "a.parquet", [TEXTS[0], None, *TEXTS[1:]])
    assert list(documents(path)) == EXPECTED
    large = pa.table({"text": pa.array(TEXTS, pa.large_string())})
    pq.write_table(large, tmp_path / "b.parquet")
    assert list(documents(str(tmp_path / "*.parquet"))) == EXPECTED * 2


def test_faults_of_parquet_are_named(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, [os.urandom(50_000).hex() for _ in range(8)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(UserError, match=r"a\.parquet is cut short.*row 0"):
        list(documents(str(path)))
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), path)
    with pytest.raises(UserError, match=r'a\.parquet has no column "text"'):
        list(documents(str(path)))
    pq.write_table(pa.table({"text": [3]}), path)
    with pytest.raises(UserError, match=r'a\.parquet, row 1: "text" is int'):
        list(documents(str(path)))
    ends, content = pa.array([0, 6], pa.int32()).buffers()[1], pa.py_buffer(b"abc\xff\xfed")
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 1, [None, ends, content])}), path)
    with pytest.raises(UserError, match=r"a\.parquet is cut short.*row 0"):
        list(documents(str(path)))


NULLS = ["One.", None, "", " \n", "\u200b", "Two."]


@pytest.fixture(params=["jsonl", "jsonl.gz", "parquet", "dataset"])
def with_nulls(request, tmp_path) -> str:
    """A corpus with empty rows."""
    titles = ["first", "second", None, "", "fifth", None]
    lines = "".join(
        json.dumps({"text": text, "title": title}) + "\n" for text, title in zip(NULLS, titles, strict=True)
    )
    path = tmp_path / f"corpus.{request.param}"
    if request.param == "parquet":
        return parquet(path, NULLS, title=titles)
    if request.param == "dataset":
        datasets.Dataset.from_dict({"text": NULLS, "title": titles}).save_to_disk(path)
    else:
        path.write_bytes(PACK[".gz" if path.suffix == ".gz" else ""](lines.encode()))
    return str(path)


def test_null_and_empty_rows_are_skipped_and_counted(with_nulls, capsys) -> None:
    assert list(documents(with_nulls)) == [["One."], ["Two."]]
    warning = capsys.readouterr().err
    assert "4 documents without text are skipped" in warning
    assert re.search(rf"{re.escape(with_nulls)}, (line|row) 2", warning)


def test_columns_of_text_are_named_and_joined(with_nulls) -> None:
    assert list(documents(with_nulls, text_field="title")) == [["first"], ["second"], ["fifth"]]
    joined = [["first", "One."], ["second"], ["fifth", "\u200b"], ["Two."]]
    assert list(documents(with_nulls, text_field=["title", "text"])) == joined
    with pytest.raises(UserError, match=r'corpus.* "body".*data\.text_field'):
        list(documents(with_nulls, text_field="body"))


def test_files_without_text_are_skipped_with_a_warning(tmp_path, capsys) -> None:
    for name, text in {"a.txt": "Text.", "b.txt": "", "c.txt": "\n \n"}.items():
        (tmp_path / name).write_text(text)
    assert list(documents(str(tmp_path))) == [["Text."]]
    assert "b.txt and 1 more" in capsys.readouterr().err


DIVIDED = [["One.", "More."], ["Two."], ["Three."]]
INVISIBLE = ("\u200b", " \u200b\u2060", "\ufeff", "\x07")
JOINED_LINES = "".join(f'\ufeff{{"text": "{text}"}}\n' for text in ("One.", "Two."))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("nan_of_pandas.jsonl", '{"text": "One."}\n{"text": NaN}\n', [["One."]]),
        ("joined_at_byte_order_marks.txt", "\ufeffOne.\nMore.\n\ufeffTwo.\n", [["One.", "More."], ["Two."]]),
        ("joined_at_byte_order_marks.jsonl", JOINED_LINES, [["One."], ["Two."]]),
        ("in_any.TXT", "Text.", [["Text."]]),
        ("in_any.JSONL.GZ", '{"text": "Lines."}', [["Lines."]]),
        ("other.ndjson", '{"text": "More."}', [["More."]]),
        *(("invisible.txt", f"{line}\nOne.\nMore.\n{line}\nTwo.\n{line}\n\nThree.", DIVIDED) for line in INVISIBLE),
    ],
)
def test_a_file_is_read_by_its_name_and_content(tmp_path, name, content, expected) -> None:
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.lower().endswith(".gz") else data)
    assert list(documents(str(tmp_path))) == expected


def test_each_line_is_a_document_on_request(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("One.\nTwo.\n\n\u200b\n Three. \n")
    assert list(documents(str(tmp_path), document_per_line=True)) == [["One."], ["Two."], ["Three."]]


@pytest.mark.parametrize("name", ["wiki_00", "a.txt", "a.txt.gz"])
@pytest.mark.parametrize("content", ['\n{"url": "x", "text": "One."}\n', '\ufeff[{"text": "One."}]'])
@pytest.mark.parametrize("verbatim", [False, True])
def test_json_under_the_name_of_plain_text_is_an_error(tmp_path, name, content, verbatim) -> None:
    (tmp_path / name).write_bytes(PACK[".gz" if name.endswith(".gz") else ""](content.encode()))
    with pytest.raises(UserError, match=rf'{name} holds JSON with a "text".*\.jsonl'):
        list(documents(str(tmp_path / "*"), verbatim=verbatim))


@pytest.mark.parametrize(
    ("content", "warning"),
    [
        ('{"content": "One."}\n', "hold JSON with content, .*data.text_field"),
        ('{\n  "text": "One."\n}\n', "begin like JSON"),
        ('<doc id="1">\nOne.\n</doc>\n', "begin with <doc : tags are read as text"),
        ("{One} is a set.\n", None),
        ("[1] is a note.\n", None),
    ],
)
def test_other_json_and_markup_under_the_name_of_plain_text_is_a_warning(tmp_path, capsys, content, warning) -> None:
    (tmp_path / "a.txt").write_text(content)
    assert list(documents(str(tmp_path))) == [content.strip().split("\n")] or warning
    output = capsys.readouterr().err
    assert re.search(warning, output) if warning else not output


def test_a_file_that_disappears_is_named(tmp_path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text\n\n")
    file = documents(str(tmp_path))
    next(file)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UserError, match=r"b\.txt has disappeared"):
        list(file)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("utf_16.txt", "One line.\n".encode("utf-16-le"), ", line 1: NUL characters"),
        *((f"empty.txt{packed}", b"", " is cut short or damaged") for packed in PACK if packed),
    ],
)
def test_a_damaged_file_among_others_is_named(tmp_path, name, content, message) -> None:
    (tmp_path / "whole.txt").write_text("Text.")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{name}{message}")):
        list(documents(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("c4.json.gz", "may be one value of JSON"),
        ("a.JSON", "may be one value of JSON"),
        ("a.csv.gz", "has an unsupported format"),
        ("a.tsv", "has an unsupported format"),
        ("a.jsonl.zstd", "has an unsupported format"),
        ("a.tar.gz", "has an unsupported format"),
        ("a.parquet.gz", "has an unsupported format"),
    ],
)
def test_what_is_no_text_is_not_read_as_text(tmp_path, name, message) -> None:
    (tmp_path / name).write_bytes(b'{"text": "Hello"}')
    for source in (tmp_path / name, tmp_path / "*"):
        with pytest.raises(UserError, match=f"{re.escape(name)} {message}"):
            list(documents(str(source)))


def test_saved_data_sets_below_a_folder_or_matched_by_a_glob(tmp_path) -> None:
    (tmp_path / "x.txt").write_text("Text.")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "below" / "saved")
    assert list(documents(str(tmp_path))) == [*EXPECTED, ["Text."]]
    assert list(documents(str(tmp_path / "below" / "*"))) == EXPECTED


def test_saved_data_sets(tmp_path) -> None:
    whole = datasets.Dataset.from_dict({"text": TEXTS, "id": [1, 2, 3]})
    whole.save_to_disk(tmp_path / "one", num_shards=2)
    assert list(documents(str(tmp_path / "one"))) == EXPECTED
    fingerprint = corpus_fingerprint(str(tmp_path / "one"))
    whole.save_to_disk(tmp_path / "again", num_shards=2)
    assert corpus_fingerprint(str(tmp_path / "again")) == fingerprint
    datasets.Dataset.from_dict({"text": TEXTS[:1]}).save_to_disk(tmp_path / "other")
    assert corpus_fingerprint(str(tmp_path / "other")) != fingerprint
    datasets.DatasetDict(train=whole, test=whole).save_to_disk(tmp_path / "dict")
    for above in (tmp_path / "dict", tmp_path):  # else its test split would be trained on
        with pytest.raises(UserError, match=r"dict is a data.*\(test, train\).*dict/SPLIT$"):
            list(documents(str(above)))
    assert list(documents(str(tmp_path / "dict" / "train"))) == EXPECTED
    whole.remove_columns("text").save_to_disk(tmp_path / "no-text")
    with pytest.raises(UserError, match='no-text has no column "text"'):
        list(documents(str(tmp_path / "no-text")))
    (shard,) = (tmp_path / "other").glob("*.arrow")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match="other is cut short or damaged"):
        list(documents(str(tmp_path / "other")))


def test_hub_names(tmp_path, monkeypatch) -> None:
    asked = []
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "cached")

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        if name == "org/gone":
            raise FileNotFoundError("Dataset 'org/gone' doesn't exist on the Hub\nor cannot be accessed")
        return datasets.load_from_disk(tmp_path / "cached")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(documents("hub:org/name")) == EXPECTED
    assert list(documents(["hub:org/name:20231101.en", "hub:org/name::validation", "hub:a/b:c:train[:10%]"]))
    assert asked == [
        ("org/name", None, "train"),
        ("org/name", "20231101.en", "train"),
        ("org/name", None, "validation"),
        ("a/b", "c", "train[:10%]"),
    ]
    assert corpus_fingerprint("hub:org/name") != corpus_fingerprint("hub:org/name::train[:10%]")
    with pytest.raises(UserError, match=r"hub:org/gone cannot be loaded \(Dataset 'org/gone' doesn't exist"):
        list(documents("hub:org/gone"))


def test_a_file_belongs_to_the_first_entry_that_names_it(tmp_path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    source = [str(tmp_path / "b.txt"), str(tmp_path)]
    assert resolve_sources(source) == [[str(tmp_path / "b.txt")], [str(tmp_path / "a.txt")]]
    assert list(numbered_documents(source)) == [(0, ["b.txt"]), (1, ["a.txt"])]


def store_of(folder, counts, size=100) -> document_store.DocumentStore:
    texts = [(source, ["x" * size]) for source, count in enumerate(counts) for _ in range(count)]
    return document_store.write_store(texts, folder, lambda number: None)


@pytest.mark.parametrize("weights", [[0.5, 0.5], [1.0, 9.0], [3.0, 1.0], [30.0, 0.1]])
def test_a_mixture_has_the_shares_asked_for_and_every_document(tmp_path, weights) -> None:
    store = store_of(tmp_path, [300, 100])
    order = store.mixture_order(store.order(1), weights, 1)
    sources = store.sources()[order]
    share = weights[0] / sum(weights)
    assert (sources == 0).mean() == pytest.approx(share, abs=0.005)
    times = np.bincount(order, minlength=400)
    assert times.min() == 1
    for source in (0, 1):
        mine = times[store.sources() == source]
        assert mine.max() - mine.min() <= 1, "no document is repeated twice more often than another of its source"
    np.testing.assert_array_equal(order, store.mixture_order(store.order(1), weights, 1))


@pytest.mark.parametrize(
    ("counts", "weights", "message"),
    [
        ([10, 0], [0.5, 0.5], r"data\.mixture_weights: entry 2 of data\.train has no document"),
        ([100, 100], [1.0, 0.0001], r"entry 1 of data\.train would be read 10,000 times.*1,000"),
    ],
)
def test_mixtures_that_cannot_be_made(tmp_path, counts, weights, message) -> None:
    store = store_of(tmp_path, counts)
    with pytest.raises(UserError, match=message):
        store.mixture_order(store.order(1), weights, 1)


def test_of_a_large_document_a_mixture_has_what_is_nearer_to_its_share(tmp_path) -> None:
    texts = [(0, ["x" * 1000]), *[(1, ["y" * 100])] * 19]
    store = document_store.write_store(texts, tmp_path, lambda number: None)
    order = store.mixture_order(store.order(1), [0.5, 0.5], 1)
    assert (store.sources()[order] == 0).sum() == 2, "1.9 passes are two, not one"


def test_a_repeated_document_is_never_its_own_random_partner(tmp_path) -> None:
    """Checks four documents that a mixture repeats until they make up half of the text."""
    words = {name: [f"{name}{number}" for number in range(4 if name == "a" else 100)] for name in "ab"}
    for name, documents_ in words.items():
        text = "\n\n".join("\n".join([f"{word} {word} {word}"] * 12) for word in documents_)
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words["a"], *words["b"]]))
    config = DataConfig(
        train=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")],
        eval=str(tmp_path / "b.txt"),
        mixture_weights=[0.5, 0.5],
        sequence_length=16,
        one_sentence_per_line=True,
        num_workers=1,
    )
    example_set = build_examples(config, load_tokenizer(tmp_path / "vocab.txt"), tmp_path / "cache")
    rows = open_rows(example_set.train).take(np.arange(example_set.counts["train_rows"]))
    a = rows["input_ids"][:, 1]
    b = rows["input_ids"][np.arange(len(a)), rows["segment_a_length"]]
    assert ((a < 9) & (rows["next_sentence_label"] == 1)).sum() > 100
    np.testing.assert_array_equal(a == b, rows["next_sentence_label"] == 0)


@pytest.fixture
def two_languages(tmp_path):
    """German and English with different sentence ends: "z. B." and "e.g." do not end a sentence."""
    german = "Das ist z. B. gut. Es geht bzw. es steht."
    english = "This is good, e.g. for Dr. Smith. It stands."
    for name, text in (("de", german), ("en", english)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join([text] * 20))
    words = sorted(set(re.findall(r"\w+|[.,]", f"{german} {english}".lower())))
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words]))
    return tmp_path


def test_languages_differ_in_where_sentences_end() -> None:
    german = ["Es geht bzw. es steht. Am 3. Mai kam er."]
    assert split_sentences(german, "de") == ["Es geht bzw. es steht.", "Am 3. Mai kam er."]
    assert len(split_sentences(german, "en")) == 4


@pytest.mark.parametrize("language", ["german", "DE", "de_DE", ""])
def test_a_language_is_given_by_its_code(language) -> None:
    with pytest.raises(UserError, match=rf"data\.language is '{language}'"):
        DataConfig(train="a.txt", language=language).check()


def test_sentences_end_by_the_language_of_their_source(two_languages, monkeypatch) -> None:
    seen = {}
    split = tokenization.split_sentences
    monkeypatch.setattr(
        tokenization,
        "split_sentences",
        lambda paragraphs, language, *rest: (
            seen.setdefault(paragraphs[0][:4], language) and split(paragraphs, language, *rest)
        ),
    )
    config = DataConfig(
        train=[str(two_languages / "de.txt"), str(two_languages / "en.txt")],
        language=["de", "en"],
        mixture_weights=[0.75, 0.25],
        eval_fraction=0.2,
        num_workers=1,
    )
    example_set = build_examples(config, load_tokenizer(two_languages / "vocab.txt"), two_languages / "cache")
    assert seen == {"Das ": "de", "This": "en"}
    assert len(open_rows(example_set.train))
    other = DataConfig(**{**vars(config), "mixture_weights": None})
    third = DataConfig(**{**vars(config), "language": ["en", "en"]})
    tokenizer = load_tokenizer(two_languages / "vocab.txt")
    folders = {build_examples(c, tokenizer, two_languages / "cache").folder for c in (config, other, third)}
    assert len(folders) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture_weights": [1.0]}, r"data\.mixture_weights has 1 values.* data\.train has 2"),
        ({"language": ["de"]}, r"data\.language has 1 values.* data\.train has 2"),
        ({"language": ["de", "en"], "eval": "x.txt"}, r"data\.language has 2 values.* data\.eval has 1"),
        ({"mixture_weights": [1.0, 0.0]}, ": it must be above 0"),
        ({"mixture_weights": [1.0, float("nan")]}, ": it must be above 0"),
    ],
)
def test_as_many_weights_and_languages_as_entries(changes, message) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(train=["a.txt", "b.txt"], **changes).check()
