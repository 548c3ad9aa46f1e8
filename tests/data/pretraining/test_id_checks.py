"""Ids that the embedding has no row for are found before training, shard by shard and row by row."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from bert.commands.finetune import main
from bert.data.features import ChoiceFeatures, Features
from bert.data.pretraining import id_checks
from bert.data.pretraining.builder import open_examples
from bert.data.pretraining.id_checks import check_token_ids, require_known_ids_of_rows, share_of_unknown_pieces
from bert.errors import UserError
from bert.tokenizer.wordpiece import SpecialTokenIds


@pytest.fixture
def examples(pretrained: Path, tmp_path: Path):
    """A copy of the pretraining run's examples, an hour old, in a cache of its own."""
    name = (pretrained / "data.digest").read_text().strip()
    folder = tmp_path / "cache" / name
    shutil.copytree(Path(os.environ["XDG_CACHE_HOME"]) / "bert-jax" / "examples" / name, folder)
    for path in folder.iterdir():
        os.utime(path, (1.6e9, 1.6e9))
    return open_examples(folder)


def test_the_shard_and_the_id_are_named(examples) -> None:
    check_token_ids(examples, examples.vocab_size)
    largest = int(np.flatnonzero(examples.unigram_counts)[-1])
    with pytest.raises(UserError, match=rf"\.arrow holds the token id {largest}, .*ends at {largest - 1} \(model.voca"):
        check_token_ids(examples, largest)


def test_pieces_that_the_vocabulary_does_not_know_are_counted(examples) -> None:
    special = SpecialTokenIds(*range(5))
    counts = np.zeros(examples.vocab_size, np.int64)
    vars(examples)["unigram_counts"] = counts  # what it has read from disk and keeps
    counts[:5], counts[7] = (50, 10, 50, 50, 0), 30
    assert share_of_unknown_pieces(examples, special) == 0.25
    counts[7] = 0
    with pytest.raises(UserError, match=r"knows no piece of data\.train"):
        share_of_unknown_pieces(examples, special)


def test_a_shard_is_read_once(examples, monkeypatch) -> None:
    check_token_ids(examples, examples.vocab_size)
    monkeypatch.setattr(id_checks, "open_rows", lambda paths: pytest.fail(f"{paths} read again"))
    check_token_ids(examples, examples.vocab_size)
    with pytest.raises(UserError, match="holds the token id"):
        check_token_ids(examples, 10)
    os.utime(examples.train[0], (1.7e9, 1.7e9))
    with pytest.raises(pytest.fail.Exception, match="read again"):
        check_token_ids(examples, examples.vocab_size)


@pytest.mark.parametrize("wrong", [50, -1])
def test_the_row_is_named(monkeypatch, wrong: int) -> None:
    monkeypatch.setattr(id_checks, "ROWS_AT_ONCE", 2)
    flat = np.arange(12, dtype=np.int32)
    features = Features(flat, np.array([0, 3, 4, 8, 12]), np.full(4, 3, np.int32), None)
    require_known_ids_of_rows(features, 12, "train")
    flat[5] = wrong
    with pytest.raises(UserError, match=rf"row 3 of train holds the token id {wrong}, .* 12 rows"):
        require_known_ids_of_rows(features, 12, "train")
    with pytest.raises(UserError, match=f"row 2 of dev holds the token id {wrong}"):
        require_known_ids_of_rows(ChoiceFeatures(features, np.array([0, 2, 4]), None), 12, "dev")


def test_a_vocabulary_of_another_model_stops_the_run_before_it_trains(pretrained, sst2, tmp_path, fails) -> None:
    source = tmp_path / "source"
    shutil.copytree(pretrained, source)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["ba"] = 4000
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    arguments = [f"--init={source}", f"--data.dir={sst2}", "--data.max_length=32", f"--output_dir={tmp_path / 'run'}"]
    error = fails(main, "--config=sst2", *arguments)
    assert "4000" in error
    assert not (tmp_path / "run" / "checkpoints").exists()
