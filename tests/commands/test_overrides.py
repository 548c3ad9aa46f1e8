"""Files, recipes and the command line: what overrides, rescales or leaves out what."""

from pathlib import Path

import pytest

from bert.commands.cli.arguments import parse
from bert.config import PretrainConfig
from bert.config.phases import PhaseConfig
from tests.commands.parsing import finetune_yaml, pretrain, pretrain_yaml, sentence

pytestmark = pytest.mark.usefixtures("recipes")


@pytest.mark.parametrize(
    ("argv", "transfer", "is_said"),
    [
        ([], "packages", False),
        (["--data.train=x.txt"], None, True),
        (["--data.train=x.txt", "--transfer=packages"], "packages", False),
        (["--config=measured", "--config=mine.yaml"], None, True),
        (["--config=measured", "--config=mine.yaml", "--transfer=null"], None, False),
        (["--config=configs/measured.yaml", "--training.steps=9"], "packages", False),
        (["--config=run.yaml", "--data.train=x.txt"], "packages", False),
    ],
)
def test_a_recipes_transfer_belongs_to_its_own_corpus(recipes, argv, transfer, is_said):
    recipe = "data: {train: 'docstrings:'}\ntraining: {steps: 5}\ntransfer: packages\n"
    for file in ("configs/measured.yaml", "run.yaml"):
        Path(file).write_text(recipe)
    Path("mine.yaml").write_text("data: {train: x.txt}\n")
    said = []
    config, *_ = parse(PretrainConfig, argv, "bert pretrain", "D.", "measured", log=said.append)
    assert config.transfer == transfer
    expected = (
        "transfer packages of the recipe measured is left out, since data.train is set: "
        "pass --transfer packages to run it"
    )
    assert said == [expected] * is_said


def test_a_recipes_sizes_give_way_to_those_of_init(recipes, tmp_path):
    wide = tmp_path / "configs" / "wide.yaml"
    wide.write_text("data: {train: x.txt}\nmodel: {hidden_size: 96, hidden_dropout_prob: 0.3}\ntraining: {steps: 9}\n")

    def model(*argv):
        return pretrain(*argv)[0].model

    assert model("--config=wide").hidden_size == model("--config=wide", "--init=null").hidden_size == 96
    from_init = model("--config=wide", "--init=runs/x")
    assert (from_init.hidden_size, from_init.hidden_dropout_prob) == (PretrainConfig().model.hidden_size, 0.3)
    assert model("--config=wide", "--init=runs/x", "--model.hidden_size=48").hidden_size == 48
    mine = f"--config={wide}"  # a file that the user names by its path says what the user wants
    assert model(mine, "--init=runs/x").hidden_size == 96


def test_later_files_override_earlier_ones():
    Path("a.yaml").write_text("data: {train: a}\n")
    Path("b.yaml").write_text("training: {epochs: 2, batch_size: 8}\nphases: null\n")
    files = ["--config", "a.yaml", "--config", "tiny", "--config", "b.yaml"]
    config, name = pretrain(*files, "--seed", "3")
    assert name == "b"
    assert (config.data.train, config.training.epochs, config.training.steps) == ("docstrings:", 2.0, None)
    assert (config.training.batch_size, config.seed) == (8, 3)
    Path("c.yaml").write_text("training: {steps: 50}\nphases: [{share: 0.5}, {batch_size: 4}]\n")
    two = ["--config", "tiny", "--config", "c.yaml"]
    assert pretrain(*two)[0].phases == [PhaseConfig(0.5), PhaseConfig(batch_size=4)]
    assert pretrain(*two, "--config", "b.yaml")[0].phases is None
    Path("d.yaml").write_text("phases: [{share: 0.25}, {}]\n")
    assert pretrain(*two, "--config", "d.yaml")[0].phases == [PhaseConfig(0.25), PhaseConfig()]
    assert pretrain(*files, "--phases.1.share", "0.5", "--phases.2.batch_size", "4", "--training.steps", "9")[0].phases


def test_a_later_file_rescales_and_is_named_in_errors():
    Path("a.yaml").write_text("data.train: a\ntraining: {steps: 5, batch_size: 64, gradient_accumulation_steps: 8}\n")
    Path("b.yaml").write_text("training:\n  batch_size: 16\n")
    assert pretrain("--config=a.yaml", "--config=b.yaml")[0].training.gradient_accumulation_steps == 2
    Path("b.yaml").write_text("seed: 0\ntraining:\n  batch_size: many\n")
    text = sentence(pretrain, "--config=a.yaml", "--config=b.yaml")
    assert text.startswith("b.yaml, line 3: training.batch_size: many: a whole number")


def test_command_line_replaces_the_other_way_of_the_recipe():
    training = finetune_yaml("training.epochs: 3", "--training.steps", "2").training
    assert (training.steps, training.epochs) == (2, None)
    training = finetune_yaml("training.steps: 100", "--training.epochs", "1.5").training
    assert (training.steps, training.epochs) == (None, 1.5)
    text = "data.train: a\ntraining.steps: 100\noptimizer.warmup_steps: 50\nphases: [{share: 0.9}, {}]"
    config = pretrain_yaml(text, "--optimizer.warmup_ratio", "0.2", "--phases.1.steps", "30")
    assert (config.optimizer.warmup_steps, config.optimizer.warmup_ratio) == (None, 0.2)
    assert (config.phases[0].steps, config.phases[0].share) == (30, None)


def test_both_ways_on_the_command_line_or_in_the_file_are_an_error():
    both = "training.steps and training.epochs are both set"
    assert both in sentence(finetune_yaml, "training.epochs: 3", "--training.steps", "2", "--training.epochs", "1")
    assert both in sentence(finetune_yaml, "training.epochs: 3\ntraining.steps: 2")
    assert "are both null" in sentence(finetune_yaml, "training.epochs: 3", "--training.epochs", "null")


def test_micro_batches_of_a_recipe_follow_the_batch_size():
    text = "data.train: a\ntraining: {steps: 5, batch_size: 2048, gradient_accumulation_steps: 128}"

    def parts(*argv):
        return pretrain_yaml(text, *argv).training.gradient_accumulation_steps

    size = "--training.batch_size"
    assert [parts(size, rows) for rows in ("16", "8", "64", "24", "4096", "31")] == [1, 1, 4, 2, 256, 31]
    assert parts(size, "64", "--training.gradient_accumulation_steps", "2") == 2
    assert pretrain_yaml("data.train: a\ntraining: {steps: 5, batch_size: 8}", size, "64").training.batch_size == 64
    assert pretrain_yaml("data.train: a\ntraining.steps: 5", size, "64").training.gradient_accumulation_steps == 1


def test_phases_set_to_null_leave_nothing_to_rescale():
    text = (
        "data.train: a\ntraining: {steps: 9, batch_size: 64}\nphases: [{share: 0.5}, {gradient_accumulation_steps: 8}]"
    )
    assert pretrain_yaml(text, "--phases", "null", "--training.batch_size", "16").phases is None
    assert pretrain_yaml(text, "--training.batch_size", "16").phases[1].gradient_accumulation_steps == 2
    written_out = text.replace("share: 0.5", "share: 0.5, gradient_accumulation_steps: null")
    written_out = written_out.replace("steps: 8", "steps: 8, batch_size: null")
    assert pretrain_yaml(written_out, "--training.batch_size", "16").phases[1].gradient_accumulation_steps == 2


def test_predictions_of_a_recipe_fit_shorter_rows():
    text = "data: {train: a, sequence_length: 512, max_predictions_per_sequence: 77}\ntraining.steps: 5\n"
    text += "model.max_position_embeddings: 1024\n"

    def predictions(*argv):
        return pretrain_yaml(text, *argv).data.max_predictions_per_sequence

    length = "--data.sequence_length"
    assert [predictions(length, tokens) for tokens in ("64", "128", "256", "1024")] == [10, 77, 77, 154]
    share = "--data.masked_lm_prob"
    assert [predictions(share, value) for value in ("0.05", "0.15", "0.3", "0.4")] == [77, 77, 154, 205]
    assert predictions(length, "1024", share, "0.3") == 308
    assert predictions(share, "0.3", "--data.max_predictions_per_sequence", "80") == 80
    assert predictions(length, "128", share, "0.3") == 77, "enough, and below the length"
    assert predictions(share, "0.99", length, "32") == 31
    assert "data.masked_lm_prob is nan" in sentence(predictions, share, "nan")
    longest = text.replace("512", "128").replace("77", "20")
    for written in (f"{longest}data.masked_lm_prob: 0.05\n", longest):  # as of a run that was made with another share
        assert pretrain_yaml(written, share, "0.15").data.max_predictions_per_sequence == 20
    blocks = text + "training.objective: clm\ndata.input_format: blocks\nmodel.causal: true\n"
    blocks = blocks.replace("max_predictions_per_sequence: 77", "max_predictions_per_sequence: 20")
    assert pretrain_yaml(blocks, length, "1024").data.max_predictions_per_sequence == 20
    short = text + "phases: [{share: 0.5}, {sequence_length: 512, max_predictions_per_sequence: 77}]\n"
    assert pretrain_yaml(short, "--phases.2.sequence_length", "64").phases[1].max_predictions_per_sequence == 10
    phased = text + "phases: [{share: 0.5}, {max_predictions_per_sequence: 20}]\n"
    assert pretrain_yaml(phased, share, "0.3").phases[1].max_predictions_per_sequence == 40
    assert "is not below" in sentence(predictions, length, "64", "--data.max_predictions_per_sequence", "64")


def test_a_warm_up_as_long_as_the_run_is_refused_with_the_configuration():
    text = "data.train: a\ntraining.steps: 100\noptimizer.warmup_steps: 50"
    assert pretrain_yaml(text).optimizer.warmup_steps == 50
    found = sentence(pretrain_yaml, text, "--training.steps", "40")
    assert found.startswith("x.yaml, line 3 and command line: optimizer.warmup_steps (50) is not below the 40 steps")
    assert "--optimizer.warmup_ratio 0.1" in found
    pretrain_yaml(text, "--training.steps", "40", "--optimizer.warmup_ratio", "0.1")
    assert "warmup_steps (50)" in sentence(finetune_yaml, "training.steps: 9\noptimizer.warmup_steps: 50")
