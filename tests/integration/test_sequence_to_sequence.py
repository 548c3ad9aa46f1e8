"""Sequence to sequence from parallel files to predictions: from scratch, from a BERT, resumed, on several devices."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

import bert
from bert.analysis.inspection import summarize
from bert.commands.finetune import main
from bert.commands.language_models import generate_command as generate
from bert.commands.predictions import predict_command as predict
from tests.helpers import assert_same_but_for_rounding, lines_of, results_of
from tests.processes import finish, launch

WORDS = dict(
    zip(["eins", "zwei", "drei", "vier", "fünf", "sechs"], ["one", "two", "three", "four", "five", "six"], strict=True)
)
DATA = ["--data.source=de", "--data.target=en", "--data.max_length=12", "--data.buckets=12", "--task=translation",
        "--data.metrics", "exact_match", "bleu"]  # fmt: skip
FAST = ["--training.tokens_per_batch=null", "--training.batch_size=16", "--training.steps=4",
        "--training.epochs=null", "--training.eval_every=2",
        "--training.checkpoint_every=2", "--optimizer.learning_rate=1e-2", "--decoding.max_tokens=8",
        "--training.label_smoothing=0.1"]  # fmt: skip
SCRATCH = ["--init=none", "--model.hidden_size=32", "--model.num_hidden_layers=1", "--model.num_attention_heads=2",
           "--model.intermediate_size=64", "--model.max_position_embeddings=32", "--tokenizer.vocab_size=120",
           "--tokenizer.min_frequency=1", "--model.share_decoder=embeddings"]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Up to four words and their translations in reverse order: 500 pairs, 16 of dev, 5 of test."""
    folder, stream = tmp_path_factory.mktemp("pairs"), random.Random(0)
    for split, count in (("train", 500), ("val", 16), ("test_a", 5)):
        rows = [stream.choices(list(WORDS), k=stream.randint(1, 4)) for _ in range(count)]
        (folder / f"{split}.de").write_text("".join(f"{' '.join(row)}\n" for row in rows), encoding="utf-8")
        targets = [[WORDS[word] for word in reversed(row)] for row in rows]
        (folder / f"{split}.en").write_text("".join(f"{' '.join(row)}\n" for row in targets))
    return folder


def run(folder: Path, data: Path, *arguments: str) -> Path:
    """A run of the recipe with few steps, unless other arguments follow."""
    assert (
        main(
            ["--config=multi30k", f"--data.dir={data}", f"--output_dir={folder}", *last_of([*DATA, *FAST, *arguments])]
        )
        == 0
    )
    return folder


def last_of(arguments: list[str]) -> list[str]:
    """The options, of which the last one of a name counts."""
    last = {argument.partition("=")[0]: place for place, argument in enumerate(arguments) if "=" in argument}
    return [a for place, a in enumerate(arguments) if "=" not in a or last[a.partition("=")[0]] == place]


@pytest.fixture(scope="module")
def scratch(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "scratch", data, *SCRATCH, "--decoding.beams=1")


@pytest.mark.medium
def test_a_run_leaves_scores_and_a_text_for_each_source(scratch: Path, data: Path, capsys) -> None:
    results = results_of(scratch)
    assert results["main_metric"] == "exact_match"
    assert {"loss", "nll", "accuracy", "perplexity", "exact_match", "bleu"} <= set(results["dev"])
    assert results["dev"]["perplexity"] == pytest.approx(np.exp(results["dev"]["nll"]))
    assert results["dev"]["nll"] < results["dev"]["loss"], "which is of smoothed labels"
    assert "case:lc" in results["details"]["test_a"]["signatures"]["bleu"]
    logged = [line for line in lines_of(scratch) if line["split"] == "train"][-1]
    assert {"sequence_loss", "nll", "accuracy"} <= set(logged)
    texts = (scratch / "predictions/test_a.txt").read_text().splitlines()
    model = bert.load(scratch)
    sources = (data / "test_a.de").read_text(encoding="utf-8").splitlines()
    assert [answer.target for answer in model.predict(sources)] == texts == model.generate(sources)
    capsys.readouterr()
    assert predict([str(scratch), "test_a"]) == 0
    assert capsys.readouterr().out.splitlines() == texts


@pytest.mark.medium
def test_a_loaded_run_gives_several_targets_with_scores(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = bert.load(scratch)
    [targets] = model.generate(["eins zwei"], beams=3, num_samples=3, details=True)
    assert [answer.score for answer in targets] == sorted((answer.score for answer in targets), reverse=True)
    assert len({answer.token_ids for answer in targets}) == 3
    with pytest.raises(bert.UserError, match=r"reads at most \d+"):
        model.generate("eins " * 100)
    with pytest.raises(bert.UserError, match="no split 'eins'"):
        model.score("eins")
    with pytest.raises(bert.UserError, match="has no masked-LM head: use generate"):
        model.fill_mask("eins [MASK]")
    with pytest.raises(bert.UserError, match="compiles for each length of the generated texts"):
        model.warm_up()
    assert generate([str(scratch), "eins zwei", "--beams=3", "--max_tokens=8"]) == 0
    assert capsys.readouterr().out == targets[0].text + "\n"
    assert model.embed(["eins"]).shape == (1, 32)
    facts = summarize(scratch)
    assert facts["architecture"] == "BertForSequenceToSequence"
    decoder = next(part for part in facts["parts"] if part["part"] == "decoder")
    sizes = model.config.decoder
    assert decoder["flops_per_token"] == sizes.num_hidden_layers * (
        16 * 32**2 + 8 * 12 * 32 + 4 * 32 * sizes.intermediate_size
    )


@pytest.mark.medium
def test_data_that_does_not_fit_is_one_sentence(data: Path, tmp_path: Path, fails) -> None:
    def message(*arguments: str) -> str:
        options = [f"--data.dir={data}", f"--output_dir={tmp_path / 'bad'}", *DATA, *FAST, *SCRATCH, *arguments]
        return fails(main, "--config=multi30k", *last_of(options))

    assert "data.max_length is 40, but" in message("--data.max_length=40", "--model.max_position_embeddings=32")
    assert "has no train.fr: set data.dir" in message("--data.source=fr")
    assert "data.metrics has 'accuracy'" in message(
        "--data.dev_fraction=0.1", "--data.target=en", "--data.metrics", "accuracy"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "more"),
    [("none", []), ("embeddings", []), ("all", []), ("none", ["--lora.rank=2"]), ("all", ["--lora.rank=2"])],
)
def test_a_bert_becomes_encoder_and_decoder(
    share: str, more: list[str], pretrained: Path, data: Path, tmp_path: Path, capsys
) -> None:
    arguments = [f"--init={pretrained}", f"--model.share_decoder={share}", "--training.steps=1", "--decoding.beams=1",
                 "--optimizer.learning_rate=1e-9", "--training.eval_every=1"]  # fmt: skip
    config = tmp_path / "task.yaml"
    config.write_text("optimizer: {warmup_ratio: 0.0}\n")
    options = [f"--data.dir={data}", f"--output_dir={tmp_path / 'run'}", *DATA, *FAST, *arguments, *more]
    assert main([f"--config={config}", *last_of(options)]) == 0
    said = capsys.readouterr().out
    assert "randomly initialized: cross-attention" in said
    source, trained = bert.load(pretrained).params, bert.load(tmp_path / "run").params
    word = ("embeddings", "word", "embedding")
    layer = ("encoder", "layer_0", "attention", "query", "kernel")

    def leaf(params: dict, *path: str) -> np.ndarray:
        for name in path:
            params = params[name]
        return np.asarray(params)

    same = np.testing.assert_array_equal if more else partial(np.testing.assert_allclose, atol=1e-6)
    same(leaf(trained, "bert", *word), leaf(source, "bert", *word))
    np.testing.assert_allclose(
        leaf(trained, "predictions", "transform", "kernel"),
        leaf(source, "predictions", "transform", "kernel"),
        atol=1e-6,
    )
    stack = "bert" if share == "all" else "decoder"
    np.testing.assert_allclose(leaf(trained, stack, *layer), leaf(source, "bert", *layer), atol=1e-6)
    assert "cross_attention" in trained[stack]["encoder"]["layer_0"]
    assert ("embeddings" in trained.get("decoder", {})) == (share == "none")


@pytest.mark.slow
def test_two_vocabularies_and_a_decoder_of_its_own(pretrained: Path, data: Path, tmp_path: Path) -> None:
    """BERT2Rnd: an encoder of one language, a decoder of another."""
    config = tmp_path / "task.yaml"
    config.write_text("task: translation\n")
    options = [f"--data.dir={data}", f"--output_dir={tmp_path / 'run'}", *DATA, *FAST, f"--init={pretrained}"]
    own = ["--decoder_init=none", "--target_tokenizer.vocab_size=40", "--target_tokenizer.min_frequency=1"]
    assert main([f"--config={config}", *options, *own, "--model.decoder_layers=1"]) == 0
    model = bert.load(tmp_path / "run")
    assert model.target_tokenizer.get_vocab_size() == model.config.decoder_vocab_size <= 40
    assert model.params["decoder"]["embeddings"]["word"]["embedding"].shape[0] == model.config.decoder_vocab_size
    assert (
        set(model.params["decoder"]["encoder"]) >= {"layer_0"} and "layer_1" not in model.params["decoder"]["encoder"]
    )
    texts = (tmp_path / "run/predictions/test_a.txt").read_text().splitlines()
    sources = (data / "test_a.de").read_text(encoding="utf-8").splitlines()
    assert [answer.target for answer in model.predict(sources)] == texts
    assert (tmp_path / "run/target_tokenizer/tokenizer.json").is_file()


@pytest.mark.slow
def test_eight_devices_are_as_one(scratch: Path, data: Path, tmp_path: Path) -> None:
    options = last_of([*DATA, *FAST, *SCRATCH, "--decoding.beams=1"])
    where = ["--config=multi30k", f"--data.dir={data}", f"--output_dir={tmp_path / 'run'}"]
    finish(launch("finetune.py", *where, *options, devices=8))
    assert_same_but_for_rounding(tmp_path / "run", scratch)
    for name in ("dev.txt", "test_a.txt"):
        of_eight, of_one = ((folder / "predictions" / name).read_text() for folder in (tmp_path / "run", scratch))
        assert of_eight == of_one


@pytest.mark.slow
def test_reversed_translations_are_learned(data: Path, tmp_path: Path) -> None:
    more = ["--training.steps=500", "--training.eval_every=250", "--training.batch_size=32", "--decoding.beams=4",
            "--model.hidden_dropout_prob=0", "--model.attention_probs_dropout_prob=0",
            "--optimizer.learning_rate=5e-3"]  # fmt: skip
    folder = run(tmp_path / "run", data, *SCRATCH, *more)
    results = results_of(folder)
    assert results["dev"]["exact_match"] >= 80
    assert bert.load(folder).generate("drei eins") == "one three"
    assert yaml.safe_load((folder / "config.yaml").read_text())["decoding"]["beams"] == 4
