"""Configurations from files and command lines, and the error message for each kind of mistake."""

import dataclasses
import re
from pathlib import Path

import pytest

from bert.commands.cli.arguments import parse
from bert.commands.cli.config_help import COMMON_KEYS
from bert.config import FinetuneConfig, PretrainConfig
from bert.config.pretraining import PhaseConfig
from bert.config.validation import keys_of
from bert.config.yaml_io import dump, load_config
from bert.errors import UTF8_HINT
from tests.commands.cli.parsing import finetune_yaml, pretrain, pretrain_yaml, sentence

pytestmark = pytest.mark.usefixtures("recipes")


ENOUGH = ["--data.train", "a.txt", "--training.steps", "10"]


def test_command_line_overrides_the_recipe_wherever_it_stands():
    config, name = pretrain("--model.num_hidden_layers=3", "--config", "base", "--data.train", "b.txt")
    assert name == "base"
    assert (config.model.hidden_size, config.model.num_hidden_layers) == (768, 3)
    assert config.data.train == "b.txt"
    assert config.training.steps == 1_000_000


def test_recipe_is_the_default_one_a_name_or_a_path():
    assert pretrain(default_recipe="tiny")[1] == "tiny"
    assert pretrain("--config", "base", default_recipe="tiny")[1] == "base"
    assert pretrain("--config", "configs/tiny.yaml")[1] == "tiny"
    assert pretrain(*ENOUGH)[1] is None


@pytest.mark.parametrize("text", ["1e6", "1_000_000", "1000000", "1E6", "1.0e+6"])
def test_count_is_written_as_people_write_it(text):
    assert pretrain(*ENOUGH, "--training.steps", text)[0].training.steps == 1_000_000
    steps = pretrain_yaml(f"data: {{train: a}}\ntraining: {{steps: {text}}}").training.steps
    assert steps == 1_000_000
    assert isinstance(steps, int)


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("3", 3.0), ("2.5e-05", 2.5e-5), (".5", 0.5)])
def test_float_is_written_as_people_write_it(text, value):
    for config in (
        pretrain(*ENOUGH, f"--optimizer.learning_rate={text}")[0],
        pretrain_yaml(f"data.train: a\ntraining.steps: 5\noptimizer:\n  learning_rate: {text}"),
    ):
        assert config.optimizer.learning_rate == value
        assert isinstance(config.optimizer.learning_rate, float)


@pytest.mark.parametrize(
    ("argv", "train"),
    [
        (["a/*.txt"], "a/*.txt"),
        (["*.txt"], "*.txt"),
        (["docstrings:"], "docstrings:"),
        (["[a.txt,b.txt]"], ["a.txt", "b.txt"]),
        (["a.txt", "b.txt"], ["a.txt", "b.txt"]),
        (["[ab].txt"], "[ab].txt"),
        (["{a,b}.txt"], "{a,b}.txt"),
        (["2024"], "2024"),
        (["2023", "2024"], ["2023", "2024"]),
    ],
)
def test_corpus_is_one_text_or_several(argv, train):
    assert pretrain("--training.steps", "5", "--data.train", *argv)[0].data.train == train


def test_corpus_in_yaml_is_one_text_or_several():
    assert pretrain_yaml("training.steps: 5\ndata:\n  train: [a.txt, '*.txt', 2024]").data.train == [
        "a.txt",
        "*.txt",
        "2024",
    ]
    assert pretrain_yaml("training.steps: 5\ndata:\n  train:\n  - a.txt\n").data.train == ["a.txt"]
    assert pretrain_yaml("training.steps: 5\ndata:\n  train: a.txt\n").data.train == "a.txt"


@pytest.mark.parametrize("argv", [["wandb,mlflow"], ["wandb", "mlflow"], ["[wandb, mlflow]"]])
def test_list_of_choices_has_commas_or_spaces(argv):
    assert pretrain(*ENOUGH, "--loggers", *argv)[0].loggers == ["wandb", "mlflow"]


def test_list_of_numbers_may_have_one():
    argv = ["--init", "none", "--data.dir", "d", "--training.epochs", "3", "--data.buckets"]
    for more, expected in ((["64"], [64]), (["64", "128"], [64, 128]), (["[32, 64]"], [32, 64])):
        config, *_ = parse(FinetuneConfig, argv + more, prog="p", description="", default_recipe=None)
        assert config.data.buckets == expected


PHASES = "data.train: a\ntraining.steps: 1e3\nphases:\n- share: 0.9\n- sequence_length: 512\n  batch_size: 16\n"


def test_a_list_of_sections_and_its_values_on_the_command_line():
    assert pretrain_yaml(PHASES).phases == [PhaseConfig(0.9), PhaseConfig(sequence_length=512, batch_size=16)]
    one = pretrain_yaml(PHASES, "--phases.2.batch_size", "8", "--phases.1.learning_rate=1e-3").phases
    assert one == [PhaseConfig(0.9, learning_rate=1e-3), PhaseConfig(sequence_length=512, batch_size=8)]
    assert isinstance(pretrain_yaml(PHASES.replace("share: 0.9", "steps: 9e2")).phases[0].steps, int)
    assert pretrain_yaml(PHASES, "--phases", "null").phases is None
    assert pretrain(*ENOUGH, "--phases.1.share=0.5", "--phases.2.batch_size=4")[0].phases == [
        PhaseConfig(0.5),
        PhaseConfig(batch_size=4),
    ]
    for empty in ("phases:\n", "phases: null\n"):
        assert pretrain_yaml(f"data.train: a\ntraining.steps: 5\n{empty}").phases is None
    assert pretrain_yaml("data.train: a\ntraining.steps: 5\nphases: [{}]\n").phases == [PhaseConfig()]


def test_texts_stay_texts_and_null_clears():
    config = pretrain_yaml(
        "output_dir: 1e6\ndata: {language: no, train: a, cache_dir: 2024-01-01}\ntraining: {epochs: 2, steps: 9}",
        "--training.epochs",
        "null",
    )
    assert config.output_dir == "1e6"
    assert config.data.language == "no"  # Norwegian, which YAML takes for false
    assert config.data.cache_dir == "2024-01-01"
    assert config.training.epochs is None
    assert pretrain(*ENOUGH, "--output_dir", "true")[0].output_dir == "true"


def test_empty_file_and_empty_section_mean_the_defaults():
    assert pretrain_yaml("# nothing yet\n", *ENOUGH) == pretrain(*ENOUGH)[0]
    for section in ("model:\n  # hidden_size: 64\n", "model: {}\n"):
        assert pretrain_yaml(section, *ENOUGH) == pretrain(*ENOUGH)[0]


@pytest.mark.parametrize(
    "argv",
    [
        ENOUGH,
        ["--data.train", "a", "b b", "[c", "--training.epochs", "1.5"],
        [*ENOUGH, "--output_dir", "1e6", "--data.language", "no", "--tokenizer.path", "a: b #c"],
        [*ENOUGH, "--tokenizer.strip_accents", "false", "--optimizer.epsilon", "1e-12", "--init", "Œuvre/ü"],
        [*ENOUGH, "--training.steps", "1e5", "--optimizer.warmup_steps", "1e4", "--output_dir", "yes"],
        [*ENOUGH, "--phases.1.steps", "5", "--phases.1.learning_rate", "1e-5", "--phases.2.sequence_length", "64"],
    ],
)
def test_dumped_configuration_loads_equal(argv):
    config, _ = pretrain(*argv)
    Path("config.yaml").write_text(dump(config), encoding="utf-8")
    assert load_config(PretrainConfig, "config.yaml") == config
    again, name = pretrain("--config", "config.yaml", "--output_dir", "runs/AGAIN")
    assert name == "config"
    assert again == dataclasses.replace(config, output_dir="runs/AGAIN")


def test_dump_of_both_configurations_is_plain_yaml():
    for config in (PretrainConfig(), FinetuneConfig()):
        assert "!!" not in dump(config)
        Path("config.yaml").write_text(dump(config))
        assert load_config(type(config), "config.yaml") == config


# Each mistake with all that its sentence has to name.
@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--model.hiden_size", "3"], ["unknown key --model.hiden_size", "mean --model.hidden_size?"]),
        (["--hidden_size=3"], ["unknown key --hidden_size", "mean --model.hidden_size?"]),
        (["--steps", "3"], ["mean --training.steps?"]),
        (["--training.learning_rate", "3"], ["mean --optimizer.learning_rate?"]),
        (["--output-dir", "x"], ["mean --output_dir?"]),
        (["--xyzzy", "1"], ["unknown key --xyzzy", "--help=all lists all keys"]),
        (["--training.steps", "abc"], ["--training.steps abc", "a whole number", "is expected"]),
        (["--training.steps", "1.5"], ["--training.steps 1.5", "a whole number"]),
        (["--training.steps", "true"], ["--training.steps true", "a whole number"]),
        (["--training.steps", "nan"], ["--training.steps nan", "a whole number"]),
        (["--training.steps", "1e999"], ["--training.steps 1e999", "a whole number"]),
        (["--training.batch_size", "true"], ["--training.batch_size true", "a whole number"]),
        (["--training.batch_size", "null"], ["--training.batch_size null", "a whole number"]),
        (["--training.batch_size", "8.5"], ["--training.batch_size 8.5", "a whole number"]),
        (["--optimizer.learning_rate", "abc"], ["--optimizer.learning_rate abc", "a number"]),
        (["--optimizer.learning_rate", "true"], ["--optimizer.learning_rate true", "a number"]),
        (["--tokenizer.lowercase", "1"], ["--tokenizer.lowercase 1", "true or false"]),
        (["--seed"], ["--seed needs a value", "--seed VALUE"]),
        (["--seed", "1", "2"], ["--seed takes one value", "2 follows 1", "quote"]),
        (["foo"], ["foo does not follow a key", "--KEY VALUE"]),
        (["--print_config", "foo"], ["foo does not follow a key"]),
        (["--print_config=yes"], ["--print_config takes no value"]),
        (["--model", "x.yaml"], ["--model is a section", "--model.vocab_size"]),
        (["--config"], ["--config needs a value"]),
        (["--config", "tny"], ["--config tny", "no such file or recipe", "mean tiny?", "bert recipes"]),
        (["--config", "elsewhere/bas.yaml"], ["elsewhere/bas.yaml", "mean base?"]),
        (["--config", "zzz"], ["--config zzz", "bert recipes"]),
        (["--config", "configs"], ["--config configs", "folder", "name a YAML file"]),
        (["--phases.2.batch_siz", "3"], ["unknown key --phases.2.batch_siz", "mean --phases.2.batch_size?"]),
        (["--phases.2", "3"], ["--phases.2 is a section", "--phases.2.share"]),
        (["--phases", "3"], ["--phases 3", "a list of sections in a file or null is expected"]),
        (["--phases.1.batch_size", "a"], ["--phases.1.batch_size a", "a whole number (1000 or 1e3) or null"]),
        (["--phases.1.share", "0.5", "--phases", "null"], ["phases.1.share is set", "phases is null"]),
        ([*ENOUGH, "--phases.1.sequence_length", "9999"], ["phases.1.sequence_length is 9999, but model.max"]),
        ([*ENOUGH, "--loggers", "wandb,comet"], ["--loggers wandb,comet", "use some of tensorboard, wandb, mlflow"]),
        (
            [*ENOUGH, "--optimizer.name", "sgd"],
            ["--optimizer.name sgd", "use one of adamw, lamb, lion, adafactor, muon, stable_adamw"],
        ),
    ],
)
def test_mistakes_on_the_command_line(argv, parts):
    text = sentence(pretrain, *argv)
    assert text.startswith("command line: ")
    for part in parts:
        assert part in text


def test_a_similar_recipe_is_one_of_the_same_command():
    options = {"prog": "bert", "description": "D.", "default_recipe": None}
    assert "did you mean sst2?" in sentence(parse, FinetuneConfig, ["--config", "sst"], **options)
    assert "did you mean" not in sentence(pretrain, "--config", "sst")


@pytest.mark.parametrize(
    ("yaml", "line", "parts"),
    [
        (
            "seed: 1\nmodel:\n  hiden_size: 3\n",
            3,
            ["unknown key model.hiden_size", "mean model.hidden_size?"],
        ),
        ("modle:\n  hidden_size: 3\n", 2, ["unknown key modle.hidden_size", "mean model.hidden_size?"]),
        ("hidden_size: 3\n", 1, ["unknown key hidden_size", "mean model.hidden_size?"]),
        ("seed: 1\ntraining:\n  steps: abc\n", 3, ["training.steps: abc", "a whole number"]),
        ("training:\n  batch_size: true\n", 2, ["training.batch_size: true", "a whole number"]),
        ("seed:\n", 1, ["seed: null", "a whole number"]),
        ("seed: {a: 1}\n", 1, ["seed: {a: 1}", "a whole number"]),
        ("output_dir: [a, b]\n", 1, ["output_dir: [a, b]", "a text or null"]),
        ("data:\n  train:\n  - [a]\n", 2, ["data.train: - [a]", "a list of texts or a text is expected"]),
        ("training: 5\n", 1, ["training is a section: set its keys one by one, for example training.objective"]),
        ("training: [5]\n", 1, ["training is a section"]),
        ("model:\n  hidden_size: 3\n  hidden_size: 4\n", 3, ["model.hidden_size", "line 2", "remove one"]),
        ("model.hidden_size: 3\nmodel: {hidden_size: 4}\n", 2, ["model.hidden_size is already set on line 1"]),
        ("modle: {}\n", 1, ["unknown key modle"]),
        ("modle:\n", 1, ["unknown key modle"]),
        ("# head\n- a\n- b\n", 2, ["not a mapping", "KEY: VALUE"]),
        ("hello\n", 1, ["'hello' is not a mapping"]),
        ("seed: 1\nphases:\n- share: 0.5\n- shar: 1\n", 4, ["unknown key phases.2.shar", "mean phases.2.share?"]),
        ("phases:\n- share: a\n", 2, ["phases.1.share: a", "a number"]),
        ("phases:\n- share: 0.5\n  share: 0.6\n", 3, ["phases.1.share is already set on line 2"]),
        ("phases: 5\n", 1, ["phases: 5", "a list of sections in a file or null"]),
        ("phases: {share: 0.5}\n", 1, ["phases: {share: 0.5}", "a list of sections"]),
        ("phases:\n- {}\n- 5\n", 3, ["phases.2 is a section: set its keys one by one, for example phases.2.share"]),
        (
            "data.train: a\ntraining.steps: 5\nphases:\n- share: 0.5\n- sequence_length: 9999\n",
            5,
            ["phases.2.sequence_length is 9999, but model.max_position_embeddings is 512"],
        ),
        ("seed: 1\nmodel: {hidden_size: 3\n", 3, ["not valid YAML", "check indentation"]),
        ("model:\n\thidden_size: 3\n", 2, ["not valid YAML", "check indentation"]),
        ("seed: 1\n---\nseed: 2\n", 2, ["not valid YAML"]),
        (
            "data.train: a\ntraining:\n  steps: 5\n  dtype: float16\n",
            4,
            ["training.dtype: float16", "use one of float32, bfloat16"],
        ),
    ],
)
def test_mistakes_in_the_file(yaml, line, parts):
    text = sentence(pretrain_yaml, yaml)
    assert text.startswith(f"x.yaml, line {line}: ")
    for part in parts:
        assert part in text


@pytest.mark.medium
def test_lists_that_are_nested_too_deeply():
    assert "nested too deeply: remove" in sentence(pretrain_yaml, "model: " + "[" * 2000)


def test_unreadable_files():
    Path("x.yaml").write_bytes(b"seed: \xff\n")
    assert sentence(pretrain, "--config", "x.yaml") == f"x.yaml: not UTF-8: {UTF8_HINT}"
    assert sentence(pretrain_yaml, "seed: \x01\n").startswith("x.yaml: not valid YAML (special characters")
    assert sentence(load_config, PretrainConfig, "none.yaml").startswith("none.yaml cannot be read (No such file")


def test_null_labels_in_quotes_are_texts():
    assert finetune_yaml("data.labels: ['null', other]\ntraining.epochs: 1").data.labels == ["null", "other"]
    assert finetune_yaml("training.epochs: 1", "--data.labels", "null").data.labels is None


def test_recipe_in_an_error_is_named_by_its_path():
    assert sentence(pretrain, "--config", "sst2").startswith("configs/sst2.yaml, line 1: unknown key task: ")


def test_recipe_of_another_command_is_said_to_be_one():
    assert sentence(pretrain, "--config", "sst2").endswith(" (sst2 is a recipe of bert finetune)")
    Path("configs/long.yaml").write_text("phases: null\n")
    error = sentence(parse, FinetuneConfig, ["--config", "long"], prog="", description="", default_recipe=None)
    assert error.endswith(" (long is a recipe of bert pretrain)")
    Path("own.yaml").write_text("task: sst2\n")
    assert sentence(pretrain, "--config", "own.yaml").endswith("--help=all lists all keys")


def test_folder_of_a_run_points_at_its_configuration():
    Path("run").mkdir()
    Path("run/config.yaml").write_text("seed: 1\n")
    assert sentence(pretrain, "--config", "run").endswith("did you mean run/config.yaml?")


def test_contradiction_names_both_places():
    text = sentence(pretrain, "--config", "tiny", "--optimizer.warmup_steps", "1e3")
    assert text.startswith("command line and configs/tiny.yaml, line 4: optimizer.warmup_steps (1000) is not below")


def test_missing_value_blames_no_place():
    assert sentence(pretrain, "--training.steps", "5").startswith("data.train is not set")


def test_a_file_overridden_on_the_command_line_need_not_be_right():
    assert pretrain_yaml("data.train: a\ntraining: {steps: abc}", "--training.steps", "7").training.steps == 7


def test_print_config_prints_what_loads(capsys):
    with pytest.raises(SystemExit) as ended:
        pretrain("--config", "tiny", "--seed", "7", "--print_config")
    assert ended.value.code == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert pretrain("--config", "printed.yaml")[0] == pretrain("--config", "tiny", "--seed", "7")[0]


def help_text(config_class, capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        parse(config_class, argv, prog="bert x", description="What it does.", default_recipe=None)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("config_class", [PretrainConfig, FinetuneConfig])
def test_help_of_all_explains_every_key_with_its_default(config_class, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    text = help_text(config_class, capsys, "--help=all")
    words = " ".join(text.split())
    assert text.startswith("usage: bert x [--config FILE ...] [--KEY VALUE ...]\n\nWhat it does.\n")
    assert f"Recipes: {'base, tiny' if config_class is PretrainConfig else 'sst2'}." in words
    for key in keys_of(config_class):
        assert f"--{key} " in words
    assert ("--phases.K.share X Share of training.steps" in words) == (config_class is PretrainConfig)
    assert "Decay rate of the first moment. (default: 0.9)" in words
    assert "Lower-case all text. For kinds wordpiece and unigram. (default: true)" in words
    assert "--training.remat none|dots|full " in words
    assert "--optimizer.name adamw|lamb|lion|adafactor|muon|stable_adamw " in words
    assert "--loggers tensorboard|wandb|mlflow,... " in words
    assert "null" in words
    assert "None" not in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("config_class", [PretrainConfig, FinetuneConfig])
def test_help_explains_the_common_keys(config_class, capsys):
    assert set(COMMON_KEYS[config_class]) <= keys_of(config_class).keys()
    assert 18 <= len(COMMON_KEYS[config_class]) <= 24
    text = help_text(config_class, capsys, "-h")
    options = set(re.findall(r"^  --([a-z][\w.]*)", text, re.MULTILINE))
    assert options == {"help", "config", "print_config", *COMMON_KEYS[config_class]}
    last = f"bert x --help=all lists all {len(keys_of(config_class))} keys; bert recipes lists the recipes."
    assert " ".join(text.split()).endswith(last)


def test_help_has_the_values_of_the_recipe_in_use(capsys):
    Path("mine.yaml").write_text("phases: [{share: 0.5}, {}]\ntraining.batch_size: 64\n")
    words = " ".join(
        help_text(PretrainConfig, capsys, "--config", "tiny", "--config", "mine.yaml", "--help=all").split()
    )
    assert "(tiny, mine: 1000)" in words
    assert "over all devices. (tiny, mine: 64)" in words
    assert "(tiny, mine: 2 of them)" in words
    assert "Peak learning rate" in words


def test_help_takes_no_other_value():
    assert sentence(pretrain, "--help=some") == "command line: --help takes no value: remove =some"
