"""Files, recipes and the command line: which values override others, and which are left out."""

from pathlib import Path

import pytest

from bert.commands.cli.arguments import parse
from bert.config import PretrainConfig
from bert.config.pretraining import PhaseConfig, phase_configs
from tests.commands.cli.parsing import finetune_yaml, pretrain, pretrain_yaml, sentence

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


def test_a_later_file_is_named_in_errors():
    Path("a.yaml").write_text("data.train: a\ntraining: {steps: 5, batch_size: 64}\n")
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


def test_no_option_changes_another_key():
    text = "data: {train: a, sequence_length: 128, max_predictions_per_sequence: 20}\n"
    text += "training: {steps: 5, batch_size: 64, gradient_accumulation_steps: 8}\n"
    changes = ["--training.batch_size=16", "--data.masked_lm_prob=0.3", "--data.sequence_length=64"]
    config = pretrain_yaml(text, *changes)
    assert (config.training.gradient_accumulation_steps, config.data.max_predictions_per_sequence) == (8, 20)
    assert "is not divisible" in sentence(pretrain_yaml, text, "--training.batch_size=4")
    assert "_per_sequence is 20, but data.sequence_length is 20" in sentence(
        pretrain_yaml, text, "--data.sequence_length=20"
    )


@pytest.mark.medium
def test_micro_batches_have_at_most_the_rows_of_micro_batch_size():
    text = "data.train: a\ntraining: {steps: 5, batch_size: 2048, micro_batch_size: 16}"

    def parts(*argv):
        training = pretrain_yaml(text, *argv).training
        assert training.micro_batch_size is None, "config.yaml has the number of micro-batches"
        return training.gradient_accumulation_steps

    size = "--training.batch_size"
    assert [parts(size, rows) for rows in ("2048", "16", "8", "64", "24", "4096", "31")] == [128, 1, 1, 4, 2, 256, 31]
    assert parts(size, "64", "--training.gradient_accumulation_steps", "2") == 2
    assert parts("--training.micro_batch_size", "32") == 64
    counted = text.replace("micro_batch_size: 16", "gradient_accumulation_steps: 2")
    assert pretrain_yaml(counted, "--training.micro_batch_size=8").training.gradient_accumulation_steps == 256
    both = ["--training.micro_batch_size=8", "--training.gradient_accumulation_steps=4"]
    assert "training.gradient_accumulation_steps are both set" in sentence(pretrain_yaml, text, *both)


def test_micro_batches_of_phases():
    text = "data.train: a\ntraining: {steps: 9, batch_size: 64, micro_batch_size: 32}\n"
    text += "phases: [{share: 0.3}, {share: 0.3, batch_size: 96}, {micro_batch_size: 8}]\n"

    def parts(*argv):
        config = pretrain_yaml(text, *argv)
        return [phase.training.gradient_accumulation_steps for phase in phase_configs(config)]

    assert parts() == [2, 3, 8]
    assert parts("--training.batch_size=16") == [1, 3, 2]
    assert parts("--phases.3.gradient_accumulation_steps=4") == [2, 3, 4]
    assert parts("--phases=null") == [2]
    both = text.replace("{micro_batch_size: 8}", "{micro_batch_size: 8, gradient_accumulation_steps: 2}")
    assert "phases.3.gradient_accumulation_steps are both set" in sentence(pretrain_yaml, both)


@pytest.mark.medium
def test_predictions_per_row_follow_from_the_share_and_the_length():
    text = "data: {train: a, sequence_length: 512}\ntraining.steps: 5\nmodel.max_position_embeddings: 1024\n"

    def predictions(*argv):
        config = pretrain_yaml(text, *argv)
        return [phase.data.predictions_per_row for phase in phase_configs(config)]

    length, share = "--data.sequence_length", "--data.masked_lm_prob"
    assert [predictions(length, tokens)[0] for tokens in ("20", "64", "128", "1024")] == [3, 10, 20, 154]
    assert [predictions(share, value)[0] for value in ("0.05", "0.3", "0.4")] == [26, 154, 205]
    assert predictions(share, "0.99", length, "32") == [31]
    assert "data.masked_lm_prob is nan" in sentence(predictions, share, "nan")
    assert predictions(share, "0.3", "--data.max_predictions_per_sequence", "80") == [80]
    text += "phases: [{share: 0.5, sequence_length: 128}, {share: 0.2}, {max_predictions_per_sequence: 5}]\n"
    assert predictions() == [20, 77, 5]
    assert predictions("--data.max_predictions_per_sequence=60") == [15, 60, 5], "in proportion to the lengths"


def test_a_warm_up_as_long_as_the_run_is_refused_with_the_configuration():
    text = "data.train: a\ntraining.steps: 100\noptimizer.warmup_steps: 50"
    assert pretrain_yaml(text).optimizer.warmup_steps == 50
    result = sentence(pretrain_yaml, text, "--training.steps", "40")
    assert result.startswith("x.yaml, line 3 and command line: optimizer.warmup_steps (50) is not below the 40 steps")
    assert "--optimizer.warmup_ratio 0.1" in result
    pretrain_yaml(text, "--training.steps", "40", "--optimizer.warmup_ratio", "0.1")
    assert "warmup_steps (50)" in sentence(finetune_yaml, "training.steps: 9\noptimizer.warmup_steps: 50")
