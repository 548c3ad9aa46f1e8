"""Examples and vocabularies cached in a bucket: built once, and loaded by machines with empty disks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert.commands.corpus import examples_command as main
from bert.config import DataConfig, TokenizerConfig
from bert.data.cache import WORK, CacheCopy
from bert.data.corpus.vocabulary import corpus_vocabulary
from bert.data.pretraining import build
from bert.data.pretraining.build import build_examples, build_shard_subset
from bert.errors import UserError
from bert.remote import ObjectStore
from tests.data.pretraining.conftest import text_of
from tests.helpers import config_of, digest
from tests.messages import has_all

URL = "memory://bucket/examples"
VOCABULARY = TokenizerConfig(vocab_size=90)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text(text_of(range(60)), encoding="utf-8")
    return tmp_path


@pytest.fixture
def on_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Continues with the disk of another machine."""
    return lambda name: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))


def config(place: Path, **changes: Any) -> DataConfig:
    return config_of(place, cache_dir=URL, **changes)


def test_a_second_machine_finds_what_the_first_has_made(place, bucket, on_machine, tmp_path, monkeypatch) -> None:
    on_machine("first")
    tokenizer = corpus_vocabulary(config(place), VOCABULARY, print)
    made = digest(build_examples(config(place), tokenizer))
    local = build_examples(config(place), tokenizer, tmp_path / "local")
    assert made == digest(local)
    on_machine("second")
    for name in ("bert.tokenizer.vocabulary.train_tokenizer", "bert.data.pretraining.build._shard_tasks"):
        monkeypatch.setattr(name, None)
    again = corpus_vocabulary(config(place), VOCABULARY, print)
    assert again.to_str() == tokenizer.to_str()
    example_set = build_examples(config(place), again)
    assert digest(example_set) == made
    assert example_set.folder.is_relative_to(tmp_path / "second")
    store = ObjectStore(URL)
    assert {name.split("/")[0] for name in store.files()} == {"vocabularies", local.folder.name}


def test_the_last_file_is_copied_last_and_a_set_without_it_is_built(place, bucket, on_machine, monkeypatch) -> None:
    on_machine("first")
    tokenizer = corpus_vocabulary(config(place), VOCABULARY, print)
    sent: list[str] = []
    upload = ObjectStore.upload

    def stop(store: ObjectStore, path: Path, name: str) -> None:
        if name == "index.json":
            raise KeyboardInterrupt
        sent.append(name)
        upload(store, path, name)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ObjectStore, "upload", stop)
        build_examples(config(place), tokenizer)
    assert {"train-00000.arrow", "unigram_counts.npy"} <= set(sent)
    on_machine("second")
    second = digest(build_examples(config(place), tokenizer))
    on_machine("third")
    monkeypatch.setattr(build, "_shard_tasks", None)
    assert digest(build_examples(config(place), tokenizer)) == second


def test_a_vocabulary_whose_copy_was_interrupted_is_copied_by_the_next_start(
    place, bucket, on_machine, monkeypatch
) -> None:
    on_machine("first")

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ObjectStore, "upload", stop)
        corpus_vocabulary(config(place), VOCABULARY, print)
    tokenizer = corpus_vocabulary(config(place), VOCABULARY, print)
    on_machine("second")
    monkeypatch.setattr("bert.tokenizer.vocabulary.train_tokenizer", None)
    assert corpus_vocabulary(config(place), VOCABULARY, print).to_str() == tokenizer.to_str()


@pytest.mark.medium
def test_machines_build_shards_of_one_set_through_the_bucket(
    place, bucket, on_machine, tmp_path, monkeypatch, capsys
) -> None:
    """By the command, on three machines, of which one starts after all is done."""
    monkeypatch.setattr(build, "SHARD_BYTES", 8000)
    arguments = [f"--data.train={place / 'corpus.txt'}", "--tokenizer.vocab_size=90", "--data.sequence_length=32"]
    arguments += [f"--data.cache_dir={URL}", "--data.num_workers=1"]
    on_machine("first")
    assert main([*arguments, "--shard=1/2"]) == 0
    assert "1/2 is done" in capsys.readouterr().out
    on_machine("second")
    assert main([*arguments, "--shard=2/2"]) == 0
    assert "rows" in capsys.readouterr().out
    assert not [name for name in ObjectStore(URL).files() if f"/{WORK}/" in name]
    on_machine("first")
    assert main([*arguments, "--shard=1/2"]) == 0
    on_machine("third")
    monkeypatch.setattr(build, "_shard_tasks", None)
    assert main(arguments) == 0
    folders = [tmp_path / name for name in ("first", "second", "third")]
    made = [{path.name: path.read_bytes() for path in folder.rglob("*.arrow")} for folder in folders]
    assert made[0] == made[1] == made[2] and len(made[0]) > 4


def test_a_machine_that_merges_at_the_same_time_is_waited_for(place, bucket, on_machine, monkeypatch) -> None:
    """The parts vanish while they are copied, since another machine has completed the set."""
    monkeypatch.setattr(build, "SHARD_BYTES", 8000)
    on_machine("first")
    tokenizer = corpus_vocabulary(config(place), VOCABULARY, print)
    build_shard_subset(config(place), tokenizer, (1, 2))
    on_machine("second")
    receive = CacheCopy.receive

    def lose(copy: CacheCopy, names: Any) -> None:
        if f"{WORK}/" in str(names := list(names)):
            monkeypatch.undo()
            monkeypatch.setattr(build, "SHARD_BYTES", 8000)
            on_machine("third")
            build_examples(config(place), tokenizer)
            on_machine("second")
        receive(copy, names)

    monkeypatch.setattr(CacheCopy, "receive", lose)
    example_set = build_shard_subset(config(place), tokenizer, (2, 2))
    assert example_set is not None
    on_machine("fourth")
    assert digest(build_examples(config(place), tokenizer)) == digest(example_set)


def test_what_cannot_be_is_one_sentence(place, fails, monkeypatch) -> None:
    assert has_all(
        fails(main, f"--data.train={place / 'corpus.txt'}", "--data.cache_dir=https://host/examples"),
        "data.cache_dir is read-only",
        "URL of gs:// or s3://",
    )
    monkeypatch.setattr("bert.data.cache.user_cache_dir", lambda: None)
    with pytest.raises(UserError, match=f"data.cache_dir is {URL}.*set XDG_CACHE_HOME"):
        corpus_vocabulary(config(place), VOCABULARY, print)
