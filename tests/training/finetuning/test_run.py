"""`bert finetune` and `bert predict` as a user runs them."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import bert
from benchmarks import latency
from bert.commands.cli.answers import LINES_AT_ONCE, lines_as_they_come
from bert.commands.finetune import COLLAPSED, _show, main
from bert.commands.predictions import predict_command as predict
from tests.conftest import SMALL_MODEL
from tests.helpers import assert_same_but_for_rounding, lines_of, run, state_of


def test_a_run_leaves_scores_predictions_and_its_best_checkpoint(finetuned: Path, pretrained: Path) -> None:
    results = json.loads((finetuned / "results.json").read_text())
    assert results["init"] == str(pretrained)
    assert results["steps"] == 15  # 40 rows in batches of 8, three epochs
    scores = {line["step"]: line["accuracy"] for line in lines_of(finetuned) if line["split"] == "eval"}
    assert list(scores) == [5, 10, 15]
    assert results["dev"]["accuracy"] == max(scores.values())
    assert results["best_step"] == max(scores, key=scores.get)
    assert results["majority_class"]["accuracy"] == pytest.approx(11 / 17)
    kept = {path.name for path in (finetuned / "checkpoints").iterdir() if path.is_dir()}
    assert kept == {str(results["best_step"]), "15"}, "the best one's parameters and the newest state"
    assert {path.parent.name for path in (finetuned / "checkpoints").glob("*/rest")} == {"15"}
    dev = (finetuned / "predictions" / "dev.tsv").read_text().splitlines()
    assert dev[0] == "index\tprediction\tlabel\tprobability"
    hits = [line.split("\t")[1] == line.split("\t")[2] for line in dev[1:]]
    assert len(hits) == 17
    assert np.mean(hits) == pytest.approx(results["dev"]["accuracy"])
    test = (finetuned / "predictions" / "SST-2.tsv").read_text().splitlines()
    assert test[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in test[1:]] == list("01234")


@pytest.mark.medium
def test_it_says_what_came_from_where(pretrained: Path, sst2: Path, tmp_path: Path, capsys) -> None:
    assert run(tmp_path / "run", sst2, f"--init={pretrained}", "--training.epochs=1") == 0
    text = capsys.readouterr().out
    assert f"from {pretrained}, step 6: bert (" in text
    assert "randomly initialized: classifier\nnot loaded: predictions, seq_relationship" in text


def test_the_encoder_starts_as_pretrained_and_the_head_afresh(pretrained: Path) -> None:
    import jax

    from bert.errors import UserError
    from bert.training.initialization import load_pretrained_params

    source = bert.load(pretrained)
    fresh = {"bert": jax.tree.map(np.zeros_like, source.params["bert"]), "classifier": {"kernel": np.ones((16, 2))}}
    params = load_pretrained_params(fresh, source.params, "X", ("bert",), lambda text: None)
    jax.tree.map(np.testing.assert_array_equal, params["bert"], source.params["bert"])
    np.testing.assert_array_equal(params["classifier"]["kernel"], 1)
    said: list[str] = []
    pooler = fresh["bert"].pop("pooler")
    assert "pooler" not in load_pretrained_params(fresh, source.params, "X", ("bert",), said.append)["bert"]
    assert "not loaded: bert/pooler, predictions, seq_relationship" in said
    fresh["bert"]["pooler"] = pooler
    headless = {"bert": {name: part for name, part in source.params["bert"].items() if name != "pooler"}}
    assert load_pretrained_params(fresh, headless, "X", ("bert",), said.append)["bert"]["pooler"] is pooler
    assert said[-1] == "randomly initialized: bert/pooler, classifier"
    del fresh["bert"]["embeddings"]["norm"]
    with pytest.raises(UserError, match=r"X does not fit.*bert/embeddings/norm/bias,"):
        load_pretrained_params(fresh, source.params, "X", ("bert",), lambda text: None)


@pytest.mark.medium
@pytest.mark.parametrize("like", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_random_weights_are_the_control(pretrained: Path, sst2: Path, tmp_path: Path, capsys, like: bool) -> None:
    arguments = [f"--architecture_from={pretrained}"] if like else [*SMALL_MODEL, "--tokenizer.vocab_size=100"]
    assert run(tmp_path / "run", sst2, "--init=none", *arguments, "--training.epochs=1") == 0
    assert "starts from random weights" in capsys.readouterr().out
    vocabulary = (tmp_path / "run" / "vocab.txt").read_bytes()
    assert (vocabulary == (pretrained / "vocab.txt").read_bytes()) == like


@pytest.mark.medium
def test_a_run_started_again_goes_on_where_it_was(finetuned: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finetuned, folder)
    assert main([f"--config={folder / 'config.yaml'}", f"--output_dir={folder}"]) == 0
    assert "resumes at step 15" in capsys.readouterr().out
    assert lines_of(folder) == lines_of(finetuned)
    for name in ("dev.tsv", "SST-2.tsv"):
        assert (folder / "predictions" / name).read_bytes() == (finetuned / "predictions" / name).read_bytes()


@pytest.mark.medium
def test_the_same_command_in_the_same_folder_goes_on(finetuned: Path, pretrained: Path, sst2: Path, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finetuned, folder)
    assert run(folder, sst2, f"--init={pretrained}") == 0
    assert "resumes at step 15" in capsys.readouterr().out
    assert json.loads((folder / "results.json").read_text())["init"] == str(pretrained)


@pytest.mark.medium
def test_dropout_is_the_runs_own(pretrained: Path, sst2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(folder, sst2, f"--init={pretrained}", "--model.hidden_dropout_prob=0.3", "--training.epochs=1") == 0
    assert bert.load(folder).config.hidden_dropout_prob == 0.3
    assert bert.load(folder).config.hidden_size == 16


def test_a_damaged_best_checkpoint_is_said_and_the_newest_used(finetuned: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finetuned, folder)
    best = (folder / "checkpoints" / "PROTECTED").read_text().strip()
    newest = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    if int(best) == newest:  # then the previous one remains
        assert len(list((folder / "checkpoints").iterdir())) > 2
    (tmp_path / "texts.txt").write_text("ba ri\n")
    victim = max((folder / "checkpoints" / best / "params").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    victim.write_bytes(victim.read_bytes()[:-1])
    assert predict([str(folder), str(tmp_path / "texts.txt")]) == 0
    assert "newest good checkpoint is used instead" in capsys.readouterr().err


@pytest.mark.medium
def test_an_interrupted_run_ends_the_same(finetuned, pretrained, sst2, tmp_path, monkeypatch, capsys) -> None:
    import signal

    from bert.data.rows import TokenRows

    batch, calls = TokenRows.batch, []

    def interrupt(self, *arguments):
        calls.append(1)
        if len(calls) == 9:  # in the second epoch
            signal.raise_signal(signal.SIGTERM)
        return batch(self, *arguments)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TokenRows, "batch", interrupt)
        assert run(folder, sst2, f"--init={pretrained}") == 143
    assert "resume with: bert finetune --config" in capsys.readouterr().out
    assert main([f"--config={folder / 'config.yaml'}"]) == 0
    assert lines_of(folder) == lines_of(finetuned)
    assert (folder / "predictions" / "dev.tsv").read_bytes() == (finetuned / "predictions" / "dev.tsv").read_bytes()


TOKENS_AND_MEAN = [
    "--config=sst2", "--data.max_length=32", "--training.tokens_per_batch=256", "--training.epochs=2",
    "--training.eval_every=3", "--training.average_checkpoints=2",
]  # fmt: skip


@pytest.mark.medium
def test_a_run_in_token_batches_keeps_a_mean_of_checkpoints(pretrained, sst2, tmp_path, capsys) -> None:
    import jax

    arguments = [*TOKENS_AND_MEAN, f"--init={pretrained}", f"--data.dir={sst2}", "--data.buckets=32"]
    assert main([*arguments, f"--output_dir={tmp_path / 'run'}", "--training.epochs=1"]) == 0
    assert "up to 256" in capsys.readouterr().out
    assert [line["step"] for line in lines_of(tmp_path / "run") if line["split"] == "eval"] == [3, 5]
    state = state_of(tmp_path / "run")
    assert state["steps"].tolist() == [3, 0], "a longer run would not evaluate step 5"
    both = (state["window"]["0"], state["trained"]["params"])
    mean = jax.tree.map(lambda a, b: ((a.astype(float) + b) / 2).astype(np.float32), *both)
    jax.tree.map(np.testing.assert_array_equal, state["params"], mean)


@pytest.mark.slow
def test_token_batches_and_a_mean_of_checkpoints_survive_an_interruption(
    pretrained, sst2, tmp_path, monkeypatch
) -> None:
    """Interrupted within an epoch and within the window of the mean, the run ends as if it had not been."""
    import signal

    import jax

    from bert.data.batching import FinetuningLoader

    arguments = [*TOKENS_AND_MEAN, f"--init={pretrained}", f"--data.dir={sst2}", "--data.buckets=[8,32]"]
    arguments.append("--training.tokens_per_batch=64")
    assert main([*arguments, f"--output_dir={tmp_path / 'whole'}"]) == 0
    batch = FinetuningLoader.batch

    def interrupt(self, step):
        if step == 5:
            signal.raise_signal(signal.SIGTERM)
        return batch(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(FinetuningLoader, "batch", interrupt)
        assert main([*arguments, f"--output_dir={tmp_path / 'run'}"]) == 143
    assert main([*arguments, f"--output_dir={tmp_path / 'run'}"]) == 0
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, *(state_of(tmp_path / name) for name in ("run", "whole")))
    parameters_alone = list((tmp_path / "run" / "checkpoints").glob("*/PARAMS_ONLY"))
    assert len(parameters_alone) <= 1, "the window takes no checkpoints of its own"


@pytest.mark.medium
def test_scores_do_not_depend_on_the_evaluation_batch(finetuned: Path, pretrained: Path, sst2: Path, tmp_path) -> None:
    assert run(tmp_path / "run", sst2, f"--init={pretrained}", "--training.eval_batch_size=5") == 0
    for actual, expected in zip(lines_of(tmp_path / "run"), lines_of(finetuned), strict=True):
        assert actual.pop("split") == expected.pop("split")
        assert actual == pytest.approx(expected, rel=1e-4)


@pytest.mark.medium
def test_predict_answers_files_pairs_and_standard_input(finetuned, pretrained, mrpc, tmp_path, capsys, monkeypatch):
    texts = tmp_path / "texts.txt"
    texts.write_text("\ufeff" + "ba ri tu\nko ri\n" * 3, encoding="utf-8")
    assert predict([str(finetuned), str(texts), "--output", str(tmp_path / "answers.jsonl")]) == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["text"] for answer in answers] == ["ba ri tu", "ko ri"] * 3
    for answer in answers:
        assert set(answer["probabilities"]) == {"negative", "positive"}
        assert sum(answer["probabilities"].values()) == pytest.approx(1)
        assert answer["label"] == max(answer["probabilities"], key=answer["probabilities"].get)
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ba ri tu\n")))
    assert predict([str(finetuned), "-"]) == 0
    [piped] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert piped["probabilities"] == pytest.approx(answers[0]["probabilities"], rel=1e-4)

    pairs = tmp_path / "mrpc"
    assert run(pairs, mrpc, f"--init={pretrained}", "--training.epochs=1", config="mrpc") == 0
    texts.write_text("ba ri\tko ba\n")
    capsys.readouterr()
    assert predict([str(pairs), str(texts)]) == 0
    assert set(json.loads(capsys.readouterr().out)["probabilities"]) == {"not_equivalent", "equivalent"}
    results = json.loads((pairs / "results.json").read_text())
    assert set(results["dev"]) == {"loss", "accuracy", "f1"}


@pytest.mark.medium
def test_a_head_is_drawn_as_if_the_encoder_were_drawn_too(pretrained: Path) -> None:
    """Skips drawing the source's weights. The weights that are drawn have the same bits."""
    import jax
    import jax.numpy as jnp
    import optax

    from bert.model.heads import HEADS
    from bert.training.initialization import initialize_state

    source, said = bert.load(pretrained), []
    model = HEADS["sequence_classification"](source.config, 3)
    for source_params in (("X", source.params), None):
        state = initialize_state(
            model, optax.adam(1e-3), ("loss",), 7, lambda like: None, source_params, ("bert",), said.append
        )
        whole = jax.jit(model.init)(jax.random.key(7), jnp.zeros((1, 8), jnp.int32))["params"]
        expected = {**whole, "bert": source.params["bert"]} if source_params else whole
        jax.tree.map(np.testing.assert_array_equal, state.params, expected)


@pytest.mark.skipif(os.name == "nt", reason="printf and a pipe are POSIX's")
def test_what_is_suggested_next_works_as_it_stands(finetuned: Path, capsys, monkeypatch) -> None:
    results = json.loads((finetuned / "results.json").read_text())
    assert results["sample_input"] == ["ko ri "]
    _show({**results, "collapsed": True, "test": {"loss": 0.5}}, str(finetuned))
    lines = capsys.readouterr().out.splitlines()
    assert lines.index(f"  {COLLAPSED}") < lines.index("test:"), "it is about dev"
    first, second = lines[lines.index("next:") + 1 :]
    text, command = first.split(" | ")
    output = subprocess.run(["sh", "-c", text], capture_output=True, check=True).stdout
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(output)))
    assert predict(shlex.split(command)[2:]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "ko ri"
    assert shlex.split(second) == ["bert", "inspect", str(finetuned)]


def test_lines_are_handed_on_as_they_come() -> None:
    out, into = os.pipe()
    with os.fdopen(out, "rb") as file:
        chunks = lines_as_they_come(file)
        os.write(into, b"one\n")
        assert next(chunks) == [b"one"], "without waiting for a second line"
        os.write(into, b"two\nthree\nfo")
        assert next(chunks) == [b"two", b"three"]
        os.write(into, b"ur\n" + b"x\n" * (LINES_AT_ONCE + 1) + b"last")
        os.close(into)
        assert [len(chunk) for chunk in chunks] == [LINES_AT_ONCE, 2, 1]


@pytest.mark.slow
def test_who_waits_for_an_answer_before_the_next_question_gets_it(finetuned: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "bert", "predict", str(finetuned), "-"], **pipes) as asked:
        for text in ("ba ri tu", "ko ri", "ba"):
            asked.stdin.write(text + "\n")
            asked.stdin.flush()
            assert json.loads(asked.stdout.readline())["text"] == text
        asked.stdin.close()
        assert asked.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sst2", "ner", "squad", "multiple_choice"])
def test_a_short_text_is_answered_in_under_20_ms(name) -> None:
    """A resident model of the recipe tiny, 30,522 tokens. In processor time: others may be at work."""
    model = latency.tiny(name)
    times = []
    for _ in range(40):
        start = time.process_time()
        model.predict([latency.INPUTS[name]])
        times.append(time.process_time() - start)
    assert sorted(times[1:])[20] < 0.020


def test_predictions_equal_those_of_the_run(finetuned: Path, sst2: Path) -> None:
    sentences = [line.split("\t")[0] for line in (sst2 / "dev.tsv").read_text().splitlines()[1:]]
    answers = bert.load(finetuned).predict(sentences)
    written = [line.split("\t") for line in (finetuned / "predictions" / "dev.tsv").read_text().splitlines()[1:]]
    for answer, (_, prediction, _, probability) in zip(answers, written, strict=True):
        assert answer.label == ("negative", "positive")[int(prediction)]
        assert answer.probabilities[answer.label] == pytest.approx(float(probability), abs=1e-5)


def test_errors_of_predict(finetuned: Path, pretrained: Path, tmp_path: Path, fails) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_bytes(b"")
    assert "holds no input" in fails(predict, str(finetuned), str(texts))
    assert "does not exist" in fails(predict, str(finetuned), str(tmp_path / "nothing.txt"))
    texts.write_bytes(b"ba\n")
    assert "not fine-tuned" in fails(predict, str(pretrained), str(texts))
    assert "does not exist" in fails(predict, str(tmp_path / "nowhere"), str(texts))
    assert "holds neither a run" in fails(predict, str(tmp_path), str(texts))
    assert "exists already" in fails(predict, str(finetuned), str(texts), "--output", str(texts))
    assert texts.read_bytes() == b"ba\n"


def test_errors_of_data_and_start(pretrained: Path, finetuned: Path, sst2: Path, tmp_path: Path, fails) -> None:
    def fine(data: Path, *arguments: str, folder: Path | None = None) -> str:
        folder = folder or tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        return fails(main, "--config=sst2", f"--data.dir={data}", f"--output_dir={folder}", *arguments)

    other = shutil.copytree(pretrained, tmp_path / "pretrained")
    assert "init is not set" in fine(sst2)
    assert "does not exist" in fine(sst2, "--init=nowhere")
    assert "missing is not a folder" in fine(tmp_path / "missing", f"--init={pretrained}")
    assert "was trained with 16: leave it out" in fine(sst2, f"--init={pretrained}", "--model.hidden_size=256")
    assert "but the vocabulary comes with init" in fine(sst2, f"--init={pretrained}", "--tokenizer.path=x")
    assert "holds a pretraining run" in fine(sst2, f"--init={pretrained}", folder=other)
    assert "data.max_length is 64, but model.max_position_embeddings" in fine(
        sst2, f"--init={pretrained}", "--data.max_length=64"
    )
    too_few = fine(sst2, f"--init={pretrained}", "--data.max_length=32", "--training.tokens_per_batch=31")
    assert "training.tokens_per_batch is 31, but data.max_length is 32" in too_few
    assert "choose one of sst2, mrpc" in fine(sst2, f"--init={pretrained}", "--task=xyz")
    bad = tmp_path / "bad"
    shutil.copytree(sst2, bad)
    lines = (sst2 / "train.tsv").read_text().splitlines()
    for line, words in (("ba ri\t7", ("line 4", "'7'", "'0', '1'")), ("ba ri", ("line 4", "column"))):
        (bad / "train.tsv").write_text("\n".join([*lines[:3], line, *lines[4:]]) + "\n")
        error = fine(bad, f"--init={pretrained}")
        for word in (*words, str(bad / "train.tsv")):
            assert word in error
    (bad / "train.tsv").write_bytes(b"sentence\tlabel\nba\t1\ncaf\xe9\t0\n")
    assert "line 3" in fine(bad, f"--init={pretrained}")


def test_vocabulary_larger_than_the_embedding_stops_the_run(pretrained, sst2, tmp_path, fails) -> None:
    source = tmp_path / "source"
    shutil.copytree(pretrained, source)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["ba"] = 4000
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    arguments = [f"--init={source}", f"--data.dir={sst2}", "--data.max_length=32", f"--output_dir={tmp_path / 'run'}"]
    assert "the vocabulary needs 4001 rows" in fails(main, "--config=sst2", *arguments)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--training.gradient_accumulation_steps=2", "--training.mesh=2x2x2"])
def test_token_batches_and_a_mean_do_not_depend_on_devices(pretrained, sst2, tmp_path, monkeypatch, more) -> None:
    options = [*TOKENS_AND_MEAN, f"--init={pretrained}", f"--data.dir={sst2}", "--data.buckets=[8,32]"]
    options += ["--training.tokens_per_batch=64", "--training.eval_batch_size=8"]
    for devices, arguments in (("1", []), ("8", [more])):
        monkeypatch.setenv("BERT_NUM_DEVICES", devices)
        assert main([*options, f"--output_dir={tmp_path / devices}", *arguments]) == 0
    assert_same_but_for_rounding(tmp_path / "8", tmp_path / "1")


@pytest.mark.slow
def test_a_mesh_gives_the_run_of_one_device(
    finetuned: Path, pretrained: Path, sst2: Path, tmp_path, monkeypatch
) -> None:

    monkeypatch.setenv("BERT_NUM_DEVICES", "8")
    folder = tmp_path / "mesh"
    arguments = ["--training.mesh=2x2x2", "--training.remat=full", "--training.scan_layers=true"]
    assert run(folder, sst2, f"--init={pretrained}", *arguments) == 0
    for actual, expected in zip(lines_of(folder), lines_of(finetuned), strict=True):
        assert actual.pop("split") == expected.pop("split")
        assert actual == pytest.approx(expected, rel=1e-3), expected["step"]
    actual, expected = (
        [line.split("\t")[:3] for line in (path / "predictions" / "dev.tsv").read_text().splitlines()]
        for path in (folder, finetuned)
    )
    assert actual == expected


@pytest.mark.medium
def test_largest_batch_runs_before_the_first_step_and_changes_no_result(
    pretrained: Path, sst2: Path, tmp_path: Path, monkeypatch
) -> None:
    import jax

    from bert.training.finetuning import run as finetuning_run

    compile_step, calls = finetuning_run.compile_bucketed_train_step, []

    def compile_recorded_step(*arguments):
        train_step = compile_step(*arguments)

        def recorded_step(state, batch):
            calls.append((int(np.max(state.step)), batch["input_ids"].shape[-1]))
            return train_step(state, batch)

        return recorded_step

    options = [f"--init={pretrained}", "--data.buckets", "16", "32", "--training.epochs=1"]
    monkeypatch.setattr(finetuning_run, "compile_bucketed_train_step", compile_recorded_step)
    assert run(tmp_path / "run", sst2, *options) == 0
    (first_step, first_length), *steps = calls
    lengths = [length for _, length in steps]
    assert (first_step, first_length) == (0, max(lengths))
    assert first_length > lengths[0], "the first step's batch is short"
    assert [step for step, _ in steps] == list(range(5))

    monkeypatch.setattr(finetuning_run, "_run_largest_batch", lambda *arguments: None)
    assert run(tmp_path / "without", sst2, *options) == 0
    jax.tree.map(
        np.testing.assert_array_equal, bert.load(tmp_path / "run").params, bert.load(tmp_path / "without").params
    )


@pytest.mark.medium
def test_batch_that_does_not_fit_in_memory_fails_before_the_first_step(
    pretrained: Path, sst2: Path, tmp_path: Path, monkeypatch
) -> None:
    from bert.training.finetuning import run as finetuning_run

    compile_step, done = finetuning_run.compile_bucketed_train_step, []

    def compile_step_with_little_memory(*arguments):
        train_step = compile_step(*arguments)

        def step(state, batch):
            if batch["input_ids"].shape[-1] > 16:
                raise MemoryError
            done.append(int(np.max(state.step)))
            return train_step(state, batch)

        return step

    monkeypatch.setattr(finetuning_run, "compile_bucketed_train_step", compile_step_with_little_memory)
    with pytest.raises(MemoryError):
        run(tmp_path / "run", sst2, f"--init={pretrained}", "--data.buckets", "16", "32", "--training.epochs=1")
    assert done == []
