"""`bert pretrain` as a user runs it: files, resume, bad input."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import bert
from bert.commands.pretrain import main
from tests.conftest import SMALL_RUN
from tests.helpers import REPOSITORY, assert_same_but_for_rounding, lines_of, state_of
from tests.messages import has_all


def test_a_run_leaves_what_the_design_promises(pretrained: Path) -> None:
    names = {path.name for path in pretrained.iterdir()}
    assert names >= {"config.yaml", "tokenizer.json", "vocab.txt", "checkpoints", "metrics.jsonl", "curves.png"}
    assert {path.name for path in (pretrained / "checkpoints").iterdir()} >= {"3", "6"}
    lines = lines_of(pretrained)
    assert [(line["step"], line["split"]) for line in lines] == [
        (2, "train"), (3, "eval"), (4, "train"), (6, "train"), (6, "eval"),
    ]  # fmt: skip
    assert set(lines[0]) >= {"loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "learning_rate"}
    results = json.loads((pretrained / "results.json").read_text())
    assert results["eval"]["perplexity"] == pytest.approx(np.exp(results["eval"]["mlm_loss"]))
    assert results["baselines"]["unigram"]["perplexity"] > 1
    assert results["corpus"]["train_tokens"] > 0 and len(results["corpus"]["fingerprint"]) == 64
    assert 0.5 <= results["baselines"]["nsp_majority_accuracy"] < 1
    config = yaml.safe_load((pretrained / "config.yaml").read_text())
    assert config["model"]["vocab_size"] == len((pretrained / "vocab.txt").read_text().splitlines())
    assert (pretrained / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_training_starts_at_the_unigram_baseline_unless_the_bias_starts_at_zeros(corpus, tmp_path) -> None:
    """A learning rate near zero and an encoder without noise make the first loss the unigram loss."""
    first = {}
    for bias in ("unigram", "zeros"):
        run = tmp_path / bias
        still = ["--training.steps=1", "--optimizer.warmup_steps=0"]
        still += ["--optimizer.learning_rate=1e-9", "--model.initializer_range=1e-6"]
        assert (
            main([f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, *still, f"--mlm_bias_init={bias}"]) == 0
        )
        first[bias] = json.loads((run / "results.json").read_text())
    unigram = first["unigram"]["baselines"]["unigram"]
    # 1e-3: LayerNorm brings the tiny weights' signal back, and a [V, D] decoder of 1e-6 takes it away again
    assert first["unigram"]["eval"]["mlm_loss"] == pytest.approx(unigram["loss"], abs=1e-3)
    vocabulary = len((tmp_path / "zeros" / "vocab.txt").read_text().splitlines())
    assert first["zeros"]["eval"]["mlm_loss"] == pytest.approx(np.log(vocabulary), abs=1e-3)


def test_an_unknown_output_bias_is_one_sentence(fails, tmp_path) -> None:
    assert "--mlm_bias_init ones: use" in fails(main, "--mlm_bias_init=ones")


@pytest.mark.medium
def test_the_summary_names_model_baselines_and_what_to_type_next(corpus, tmp_path, capsys) -> None:
    assert main([f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN, "--training.steps=2"]) == 0
    text = capsys.readouterr().out
    for part in (
        "parameters",
        "fingerprint",
        "tokens per step",
        "MLM accuracy",
        "unigram",
        "NSP accuracy",
        "majority",
        "next:",
    ):
        assert part in text
    lines = text.splitlines()
    attention, inspect, _, fill_mask = lines[lines.index("next:") + 1 :]
    [filled, *_] = json.loads((tmp_path / "run" / "results.json").read_text())["filled_masks"]
    where, code = fill_mask.split(": ", 1)
    assert (where.strip(), repr(filled["text"]) in code) == ("in Python", True)
    [candidates] = eval(code, {"bert": bert})
    assert filled["guesses"][0]["token"] in [candidate.token for candidate in candidates]
    assert shlex.split(attention)[2:4] == [str(tmp_path / "run"), filled["text"]]
    assert shlex.split(inspect) == ["bert", "inspect", str(tmp_path / "run")]
    assert "*" not in "".join(lines[lines.index("next:") :])


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "metric"), [("sop", "sop"), ("doc_sentences", None)])
def test_other_objectives_have_their_own_loss_or_none(corpus, pretrained, tmp_path, capsys, objective, metric) -> None:
    run = tmp_path / objective
    arguments = [f"--data.train={corpus}", *SMALL_RUN, f"--data.input_format={objective}"]
    assert main([*arguments, f"--output_dir={run}"]) == 0
    said = capsys.readouterr().out
    results = json.loads((run / "results.json").read_text())
    names = {name for line in lines_of(run) for name in line} | set(results["eval"]) | set(results["baselines"])
    assert {name.split("_")[0] for name in names if "accuracy" in name} == {"mlm", metric} - {None}
    assert "NSP" not in said
    assert ("SOP accuracy" in said) == (metric == "sop")
    assert ("seq_relationship" in bert.load(run).params) == (metric is not None)
    assert len(bert.load(run).fill_mask("Ba [MASK].")[0]) == 5
    # From a run with the head to one without it, and back.
    assert main([*arguments, f"--output_dir={tmp_path / 'more'}", f"--init={pretrained}"]) == 0
    said = capsys.readouterr().out
    assert ("not loaded: bert/pooler, seq_relationship" in said) == (metric is None)
    assert main([f"--data.train={corpus}", *SMALL_RUN, f"--output_dir={tmp_path / 'back'}", f"--init={run}"]) == 0
    assert ("randomly initialized: bert/pooler, seq_relationship" in capsys.readouterr().out) == (metric is None)


@pytest.mark.medium
def test_config_yaml_repeats_the_run_bit_for_bit(pretrained: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert main([f"--config={pretrained / 'config.yaml'}", f"--output_dir={again}"]) == 0
    assert lines_of(again) == lines_of(pretrained)
    jax.tree.map(np.testing.assert_array_equal, state_of(again), state_of(pretrained))


@pytest.mark.slow
def test_accumulation_is_one_larger_batch(pretrained: Path, corpus: Path, tmp_path: Path) -> None:
    arguments = [*SMALL_RUN, "--training.gradient_accumulation_steps=4"]
    assert main([f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *arguments]) == 0
    for actual, expected in zip(lines_of(tmp_path / "run"), lines_of(pretrained), strict=True):
        assert actual.pop("split") == expected.pop("split")
        assert actual == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_run_resumes_with_the_remedies_for_out_of_memory_and_ends_the_same(pretrained, corpus, tmp_path) -> None:
    """From the checkpoint in the middle: smaller micro-batches, activations computed again, a mesh of two devices."""
    run = tmp_path / "run"
    shutil.copytree(pretrained, run)
    shutil.rmtree(run / "checkpoints" / "6")
    (run / "results.json").unlink()
    smaller = ["--training.gradient_accumulation_steps=4", "--training.remat=full", "--training.mesh=1x2x1"]
    smaller += ["--training.eval_batch_size=2", "--training.scan_layers=true"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BERT_NUM_DEVICES", "2")
        assert main([f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, *smaller]) == 0
    stored = yaml.safe_load((run / "config.yaml").read_text())["training"]
    assert (stored["gradient_accumulation_steps"], stored["remat"], stored["mesh"]) == (4, "full", "1x2x1")
    assert_same_but_for_rounding(run, pretrained)


@pytest.mark.medium
def test_a_mended_mistake_does_not_find_the_folder_taken(corpus: Path, tmp_path: Path, fails) -> None:
    folder = f"--output_dir={tmp_path / 'run'}"
    assert "nope.txt does not exist" in fails(main, "--data.train=nope.txt", folder, *SMALL_RUN)
    assert "not below the 6 steps" in fails(
        main, f"--data.train={corpus}", folder, *SMALL_RUN, "--optimizer.warmup_steps=6"
    )
    assert main([f"--data.train={corpus}", folder, *SMALL_RUN, "--training.steps=2"]) == 0


@pytest.mark.medium
def test_a_run_does_not_go_on_with_another_corpus_unnoticed(
    pretrained: Path, corpus: Path, tmp_path: Path, fails
) -> None:
    run, text = tmp_path / "run", tmp_path / "corpus.txt"
    text.write_text(corpus.read_text())
    arguments = [f"--data.train={text}", f"--output_dir={run}", *SMALL_RUN]
    assert main([*arguments, "--training.steps=4"]) == 0
    text.write_text(corpus.read_text() + "\nOne more. And another.\n")
    assert f"the data is not what the run in {run}" in fails(main, *arguments, "--training.steps=4")


@pytest.mark.slow
def test_a_run_that_diverges_still_ends_with_its_files(corpus: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    wild = ["--optimizer.learning_rate=1e17", "--optimizer.max_grad_norm=0"]
    assert main([f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, *wild]) == 0
    assert "nan" in capsys.readouterr().out
    assert json.loads((run / "results.json").read_text())["eval"]["mlm_loss"] is None


@pytest.mark.slow
def test_commands_use_all_devices_with_the_same_result(
    pretrained: Path, corpus: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("BERT_NUM_DEVICES", "4")
    assert main([f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN]) == 0
    for actual, expected in zip(lines_of(tmp_path / "run"), lines_of(pretrained), strict=True):
        assert actual.pop("split") == expected.pop("split")
        assert actual == pytest.approx(expected, rel=1e-4)


def test_a_finished_run_started_again_changes_nothing(pretrained: Path, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(pretrained, run)
    before = lines_of(run)
    assert main([f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN]) == 0
    assert lines_of(run) == before


@pytest.mark.medium
@pytest.mark.parametrize("damage", ["flip", pytest.param("truncate", marks=pytest.mark.slow), "no manifest"])
def test_a_damaged_checkpoint_falls_back_and_the_run_ends_the_same(pretrained, tmp_path, capsys, damage) -> None:
    run = tmp_path / "run"
    shutil.copytree(pretrained, run)
    newest = run / "checkpoints" / "6"
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    if damage == "flip":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-10])
    else:
        (newest / "MANIFEST.json").unlink()
    assert main([f"--config={run / 'config.yaml'}", f"--output_dir={run}"]) == 0
    said = capsys.readouterr().out
    assert "checkpoints/6" in said
    assert "step 3" in said
    assert lines_of(run) == lines_of(pretrained)
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(pretrained))


@pytest.mark.slow
def test_compiled_as_users_compile_it_the_losses_are_those_of_the_other_tests(pretrained, corpus, tmp_path) -> None:
    command = [sys.executable, "pretrain.py", f"--output_dir={tmp_path}", f"--data.train={corpus}", *SMALL_RUN]
    subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "XLA_FLAGS": ""}, check=True, capture_output=True)
    for actual, expected in zip(lines_of(tmp_path), lines_of(pretrained), strict=True):
        assert (actual["step"], actual["split"]) == (expected["step"], expected["split"])
        # Other kernels add in another order.
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_says_how_to_go_on_and_the_run_ends_the_same(corpus, tmp_path, number) -> None:
    run = tmp_path / "run"
    # Long enough that a signal at its first line comes before its end; the steps take milliseconds.
    arguments = [f"--data.train={corpus}", *SMALL_RUN, "--training.steps=1000", "--training.checkpoint_every=1000"]
    arguments += ["--training.eval_every=500", "--training.log_every=100"]
    command = [sys.executable, "pretrain.py", f"--output_dir={run}", *arguments]
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("step "):
            process.send_signal(number)
            break
    output += process.communicate()[0]
    assert process.returncode == 128 + number, output
    assert f"resume with: python pretrain.py --config {run / 'config.yaml'}" in output
    assert main([f"--config={run / 'config.yaml'}", f"--output_dir={run}"]) == 0
    assert main([f"--output_dir={tmp_path / 'whole'}", *arguments]) == 0
    assert lines_of(run) == lines_of(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(tmp_path / "whole"))


@pytest.mark.medium
def test_continued_pretraining_takes_weights_and_vocabulary(pretrained, corpus, tmp_path, capsys) -> None:
    run = tmp_path / "more"
    more = [f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, "--optimizer.learning_rate=1e-9"]
    assert main([f"--init={pretrained}", *more]) == 0
    assert f"from {pretrained}, step 6: bert, predictions, seq_relationship" in capsys.readouterr().out
    assert (run / "vocab.txt").read_bytes() == (pretrained / "vocab.txt").read_bytes()
    moved, source = bert.load(run).params, bert.load(pretrained).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), moved, source)  # six steps of 1e-9
    assert main([f"--init={pretrained}", *more]) == 0


@pytest.mark.medium
def test_heads_that_a_source_does_not_have_start_afresh(finetuned, corpus, tmp_path, capsys) -> None:
    assert main([f"--init={finetuned}", f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN]) == 0
    said = capsys.readouterr().out
    assert "randomly initialized: predictions, seq_relationship\nnot loaded: classifier" in said


@pytest.mark.medium
def test_load_encodes_and_fills_masks(pretrained: Path) -> None:
    model = bert.load(pretrained)
    encoded = model.encode(["Ba ko ri.", ("Ba ko.", "Ri tu ne lo sa mi ba ko ri.")])
    assert encoded.last_hidden_state.shape == (2, encoded.attention_mask.shape[1], 16)
    assert encoded.pooled_output.shape == (2, 16)
    alone = model.encode(["Ba ko ri."])
    length = int(alone.attention_mask.sum())
    np.testing.assert_allclose(encoded.last_hidden_state[0, :length], alone.last_hidden_state[0], atol=1e-5)
    assert not encoded.last_hidden_state[0, length:].any()
    [first, second] = model.fill_mask("Ba [MASK] ri [MASK].", top_k=3)
    assert len(first) == len(second) == 3
    assert first[0].probability >= first[1].probability >= first[2].probability
    everything = model.fill_mask("Ba [MASK].", top_k=10_000)[0]
    assert sum(filled.probability for filled in everything) == pytest.approx(1)
    with pytest.raises(bert.config.UserError, match=r"no \[MASK\] in"):
        model.fill_mask("Ba ko.")
    with pytest.raises(bert.config.UserError, match="not fine-tuned"):
        model.predict(["Ba ko."])
    assert model.encode([]).pooled_output.shape == (0, 16)


@pytest.mark.medium
def test_embeddings_alone_are_those_of_encode(pretrained: Path) -> None:
    model = bert.load(pretrained)
    texts = ["Ba ko ri. " * count for count in (3, 1, 6, 2, 5, 1, 4)]
    np.testing.assert_allclose(model.embed(texts, batch_size=2), model.encode(texts).embeddings, atol=1e-6)
    assert model.embed([]).shape == (0, 16)


def test_batches_by_tokens_and_a_mean_of_checkpoints_are_for_fine_tuning(corpus, tmp_path: Path, fails) -> None:
    arguments = [f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}"]
    batches = fails(main, *arguments, "--training.tokens_per_batch=4096")
    assert has_all(batches, "training.tokens_per_batch is 4096", "training.batch_size")
    mean = fails(main, *arguments, "--training.average_checkpoints=2")
    assert "training.average_checkpoints is 2" in mean


def test_errors_of_the_corpus(tmp_path: Path, fails) -> None:
    def run(name: str, content: bytes | None, *more: str) -> str:
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)
        return fails(main, f"--data.train={file}", f"--output_dir={tmp_path / f'run-{name}'}", *SMALL_RUN, *more)

    assert "missing.txt does not exist" in run("missing.txt", None)
    assert "holds no text" in run("empty.txt", b"")
    assert "line 3" in run("latin.txt", b"One.\n\nTwo caf\xe9.\n")
    assert "holds 1 document: at least 4 are needed" in run(
        "one.txt", b"One sentence here. Another one there. And a third one.\n" * 3
    )
    assert "line 2" in run("bad.jsonl", b'{"text": "a b."}\n{"text": 3}\n')


def test_a_missing_held_out_corpus_is_said_before_a_vocabulary_is_trained(corpus, tmp_path, monkeypatch, fails) -> None:
    monkeypatch.setattr("bert.training.pretraining.data.corpus_vocabulary", lambda *_: pytest.fail("it was trained"))
    arguments = [f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN]
    assert "held.txt does not exist" in fails(main, *arguments, f"--data.eval={tmp_path / 'held.txt'}")


def test_errors_of_sizes_and_folders(tmp_path: Path, corpus: Path, pretrained: Path, finetuned: Path, fails) -> None:
    # Copies, as another process may open the shared folders at this moment.
    other = shutil.copytree(pretrained, tmp_path / "pretrained")
    tuned = shutil.copytree(finetuned, tmp_path / "finetuned")

    def run(*arguments: str, folder: Path = tmp_path / "run") -> str:
        return fails(main, f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, *arguments)

    assert "max_position_embeddings" in run("--data.sequence_length=64")
    assert "num_attention_heads" in run("--model.hidden_size=17")
    assert not (tmp_path / "run").exists()
    assert "vocabulary" in run("--model.vocab_size=50", folder=tmp_path / "small")
    assert "holds another run: its model.hidden_size is 16" in run("--model.hidden_size=32", folder=other)
    assert "holds a fine-tuning run" in run(folder=tuned)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.doc").write_text("mine")
    assert "is not empty" in run(folder=tmp_path / "full")
    (tmp_path / "file").write_text("mine")
    assert "is a file" in run(folder=tmp_path / "file")
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nba\n")
    error = run(f"--tokenizer.path={vocabulary}", folder=tmp_path / "no-mask")
    assert "[MASK]" in error
    assert str(vocabulary) in error
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nba\n")
    error = run(f"--tokenizer.path={vocabulary}", "--tokenizer.kind=byte_level", folder=tmp_path / "kind")
    assert "tokenizer.kind to wordpiece" in error
    assert "does not exist" in run("--init=nowhere", folder=tmp_path / "nowhere")


@pytest.mark.parametrize("phase", ["", "--phases.1.share=0.5 --phases.2.sequence_length=70000"])
def test_rows_that_masks_or_dropout_cannot_count_are_refused(tmp_path: Path, fails, phase: str) -> None:
    sizes = [
        "--model.max_position_embeddings=100000",
        "--training.steps=10",
        "--optimizer.warmup_steps=1",
        f"--output_dir={tmp_path / 'run'}",
    ]
    length = [] if phase else ["--data.sequence_length=70000"]
    error = fails(main, *sizes, *length, *phase.split(), "--training.epochs=null")
    assert has_all(error, f"{('phases.2' if phase else 'data')}.sequence_length is 70000", "most 65,535")
    if not phase:
        error = fails(main, *sizes, "--data.sequence_length=60000", "--model.attention_probs_dropout_prob=0.1")
        assert "7,200,000,000 attention weights" in error
    assert not list(tmp_path.iterdir())


def test_a_batch_that_devices_cannot_share_is_refused(tmp_path: Path, corpus: Path, fails, monkeypatch) -> None:
    monkeypatch.setenv("BERT_NUM_DEVICES", "8")
    arguments = [f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN, "--training.batch_size=12"]
    assert "training.batch_size (12) is not divisible by 8 devices" in fails(main, *arguments)


@pytest.mark.medium
def test_a_run_that_diverged_says_so_once_and_is_not_recommended(corpus, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    wild = ["--optimizer.learning_rate=30", "--training.log_every=1", "--training.steps=12"]
    assert main([f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, *wild]) == 0
    said = capsys.readouterr()
    assert said.err.count("diverged") == 1
    results = json.loads((run / "results.json").read_text())
    assert "diverged" in results["remarks"][0] and "nothing was learned" in results["remarks"][1]
    assert "nothing was learned" in said.out and "--init" not in said.out
    assert not re.search(r"\d{20}", said.out)
