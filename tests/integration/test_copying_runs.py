"""Runs that copy from the source: predictions, resume, export, and the same gradients on any devices."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import bert
from bert.analysis.inspection import summarize
from bert.commands.finetune import main
from bert.commands.language_models import generate_command as generate
from bert.data.rows import SourceTargetRows
from bert.model.decoders import BertForSequenceToSequence
from bert.model.dropout import Dropout
from bert.parallel.backends import MeshParallel, PmapParallelism
from bert.training.finetuning.kinds import TASK_KINDS
from bert.training.losses import make_task_loss
from bert.training.step import compute_gradients
from bert.training.token_losses import sequence_loss
from tests.helpers import interrupted_at, lines_of, state_of
from tests.tiny_training import CONFIG, V, assert_same_gradients, batch_of

COPYING = dataclasses.replace(CONFIG, copy_attention=True, share_decoder="embeddings")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names among other words, and the names alone: 64 rows, 8 of dev, 4 of test."""
    folder, stream = tmp_path_factory.mktemp("names"), random.Random(0)
    for split, count in (("train", 64), ("dev", 8), ("test", 4)):
        names = ["".join(stream.choices("abcdefgh", k=4)) for _ in range(count)]
        rows = [{"document": f"a mail to {name} on the meeting", "summary": f"to {name}"} for name in names]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run of six steps, and its arguments."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    arguments = [
        *("--config=summarization", "--init=none", "--model.copy_attention=true", f"--data.dir={data}"),
        *("--data.max_length=24", "--data.buckets=24", "--data.metrics", "exact_match", "--decoding.max_tokens=6"),
        *("--tokenizer.vocab_size=60", "--tokenizer.min_frequency=1", "--model.hidden_size=16"),
        *("--model.num_hidden_layers=1", "--model.num_attention_heads=2", "--model.intermediate_size=32"),
        *("--training.steps=6", "--training.epochs=null", "--training.batch_size=8", "--training.eval_every=3"),
        *("--training.checkpoint_every=3", "--training.log_every=1", "--optimizer.learning_rate=1e-2"),
    ]
    assert main([*arguments, f"--output_dir={folder}"]) == 0
    return folder, arguments


@pytest.mark.medium
def test_a_run_predicts_what_it_generates_and_has_no_other_format(
    whole: tuple[Path, list[str]], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = bert.load(whole[0])
    assert model.config.copy_attention and set(model.params["copy_attention"]) == {"query", "gate"}
    texts = (whole[0] / "predictions/test.txt").read_text().splitlines()
    sources = [json.loads(line)["document"] for line in (data / "test.jsonl").read_text().splitlines()]
    assert [answer.target for answer in model.predict(sources)] == texts == model.generate(sources)
    capsys.readouterr()
    assert generate([str(whole[0]), sources[0]]) == 0
    assert capsys.readouterr().out.splitlines() == texts[:1]
    [copies] = (part for part in summarize(whole[0])["parts"] if part["part"] == "copy_attention")
    assert copies == {
        "part": "copy_attention",
        "parameters": 16 * 17 + 33,
        "flops_per_token": 2 * 16 * (16 + 2 * 24 + 2),
    }
    with pytest.raises(bert.UserError, match=r"has model\.copy_attention true, which .* cannot express"):
        model.save(tmp_path / "hf", format="hf")
    with pytest.raises(bert.UserError, match="is an encoder-decoder, which the ONNX graph lacks"):
        model.save(tmp_path / "onnx", format="onnx")


@pytest.mark.slow
def test_an_interrupted_run_ends_the_same(
    whole: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, arguments = whole
    train = functools.partial(main, [*arguments, f"--output_dir={tmp_path / 'run'}"])
    assert interrupted_at(3, SourceTargetRows, monkeypatch, train) == 143
    assert train() == 0
    assert lines_of(tmp_path / "run") == lines_of(folder)
    jax.tree.map(np.testing.assert_array_equal, state_of(tmp_path / "run"), state_of(folder))


@pytest.mark.slow
def test_a_run_is_exported_as_a_program(whole: tuple[Path, list[str]], tmp_path: Path) -> None:
    said: list[str] = []
    bert.load(whole[0]).save(tmp_path / "graph", format="stablehlo", log=said.append)
    assert said[0].startswith("verified")


@pytest.mark.medium
def test_copies_need_one_vocabulary(data: Path, tmp_path: Path, fails: Any) -> None:
    options = ["--config=translation", f"--data.dir={data}", f"--output_dir={tmp_path}", "--model.copy_attention=true"]
    more = ["--model.share_decoder=none", "--target_tokenizer.vocab_size=99"]
    assert "target_tokenizer is set, but model.copy_attention is true" in fails(main, *options, *more)
    message = fails(main, *options, "--model.share_decoder=none", "--model.decoder_vocab_size=99")
    assert "model.copy_attention is true, but model.decoder_vocab_size is 99" in message
    message = fails(main, "--config=sst2", "--init=x", f"--data.dir={data}", "--model.copy_attention=true")
    assert "model.copy_attention is true, but it is for translation" in message


@functools.cache
def gradients(devices: int, micro_batches: int, mesh: tuple[int, int, int] | None = None) -> Any:
    """Gradients with dropout and smoothed labels, for rows of uneven lengths."""
    model = BertForSequenceToSequence(COPYING)
    params = jax.jit(model.init)(jax.random.key(0), *[np.zeros((1, 4), np.int32)] * 2)["params"]
    kind = TASK_KINDS["sequence_to_sequence"]
    loss = make_task_loss(
        sequence_loss(0.1, V), lambda params, batch, dropout: kind.forward(model, {"params": params}, batch, dropout)
    )
    parallel = PmapParallelism(jax.devices()[:devices]) if mesh is None else MeshParallel(mesh, jax.devices()[:devices])
    compiled = parallel.compile(
        lambda params, batch: compute_gradients(
            params, batch, loss, lambda rows: Dropout.for_step(3, 5, rows), parallel.axis
        )
    )
    batch = {name: array for name, array in batch_of(0).items() if name in ("input_ids", "attention_mask", "rows")}
    ids, mask = batch["input_ids"][:, :6], batch["attention_mask"][:, :6]
    batch |= {"target_ids": ids, "labels": np.where(mask > 0, ids[:, ::-1], -1)}
    placed = parallel.shard_batch(batch, micro_batches)
    return parallel.to_host(compiled(parallel.put_state(params), placed))


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "micro_batches", "mesh"), [(8, 1, None), (1, 4, None), (8, 1, (2, 2, 2))])
def test_devices_and_micro_batches_do_not_matter(devices: int, micro_batches: int, mesh: Any) -> None:
    expected, expected_sums = gradients(1, 1)
    grads, sums = gradients(devices, micro_batches, mesh)
    assert_same_gradients(grads, expected)
    for name, pair in expected_sums.items():
        np.testing.assert_allclose(sums[name], pair, rtol=2e-6, err_msg=name)
