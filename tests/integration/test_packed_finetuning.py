"""`data.packing` in runs of fine-tuning: interrupted, on eight devices, and what it does not support."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bert.commands.finetune import main
from bert.data.rows import TokenRows
from tests.conftest import SMALL_MODEL
from tests.helpers import (
    assert_interrupted_run_ends_the_same,
    assert_same_but_for_rounding,
    results_of,
    run,
)


@pytest.mark.medium
def test_a_run_scores_every_row_once_and_an_interrupted_one_ends_the_same(
    pretrained: Path, sst2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(folder: Path) -> int:
        return run(folder, sst2, f"--init={pretrained}", "--data.packing=true", "--training.eval_batch_size=5")

    assert train(tmp_path / "whole") == 0
    assert results_of(tmp_path / "whole")["steps"] == 15, "40 rows in batches of 8, three epochs"
    predictions = (tmp_path / "whole" / "predictions" / "dev.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in predictions[1:]] == [str(row) for row in range(17)]
    assert_interrupted_run_ends_the_same(train, tmp_path / "run", tmp_path / "whole", TokenRows, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--training.mesh=2x2x2"], ["--training.gradient_accumulation_steps=2"]])
def test_devices_and_micro_batches_do_not_matter(pretrained, sst2, tmp_path, monkeypatch, more) -> None:
    options = [
        f"--init={pretrained}",
        "--data.packing=true",
        "--training.batch_size=16",
        "--training.eval_batch_size=8",
    ]
    for devices, arguments in (("1", []), ("8" if not more or "mesh" in more[0] else "4", more)):
        monkeypatch.setenv("BERT_NUM_DEVICES", devices)
        assert run(tmp_path / devices, sst2, *options, *arguments) == 0
    assert_same_but_for_rounding(tmp_path / devices, tmp_path / "1")


def test_batches_that_cannot_be_packed_are_rejected(sst2: Path, tmp_path: Path, fails) -> None:
    def rejected(*arguments: str) -> str:
        folders = [f"--data.dir={sst2}", f"--output_dir={tmp_path / 'run'}", "--init=none", "--data.packing=true"]
        return fails(main, "--config=sst2", *folders, *SMALL_MODEL, "--data.max_length=32", *arguments)

    assert "set training.batch_size instead" in rejected("--training.tokens_per_batch=512")
    assert "data.packing" in (windows := rejected("--data.long_texts=windows")) and "data.long_texts" in windows
    local = ["--model.attention_window=4", "--model.global_attention_sep_id=3"]
    assert "remove data.packing, because global tokens" in rejected(*local)
    assert not (tmp_path / "run").exists()


def test_choices_decoders_and_weights_of_words_are_rejected(tmp_path: Path, fails) -> None:
    row = {"query": "red cat", "positive": "a cat is red", "negatives": ["a dog"]}
    row |= {"source": "red cat", "target": "cat red"}
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    options = [f"--data.dir={tmp_path}", f"--output_dir={tmp_path / 'run'}", "--init=none", "--data.packing=true"]
    options += [*SMALL_MODEL, "--data.max_length=32", "--tokenizer.vocab_size=300", "--tokenizer.min_frequency=1"]
    assert "the task reranker has rows of several choices" in fails(main, "--config=reranker", *options)
    translation = ["--config=translation", "--training.tokens_per_batch=null"]
    assert "the task translation has a decoder" in fails(main, *translation, *options)
    for pooling in ("splade", "tokens"):
        error = fails(main, "--config=embedding", *options, f"--embedding.pooling={pooling}")
        assert "remove data.packing, which supports one vector per text" in error
    assert not (tmp_path / "run" / "config.yaml").exists()
