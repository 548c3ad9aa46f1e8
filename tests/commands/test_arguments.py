"""What a file and a command line say, what comes of it, and each sentence on what is wrong with them."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bert.commands.arguments import parse, run_command, run_program
from bert.config import FinetuneConfig, PretrainConfig
from bert.config.phases import PhaseConfig
from bert.config.yaml_io import dump, load_config
from bert.errors import UTF8_HINT, UserError

ENOUGH = ["--data.train", "a.txt", "--training.steps", "10"]


@pytest.fixture(autouse=True)
def recipes(tmp_path, monkeypatch):
    """A folder with three recipes, and a working directory of its own."""
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "tiny.yaml").write_text("data:\n  train: 'docstrings:'\ntraining:\n  steps: 1e3\n")
    (folder / "base.yaml").write_text("data: {train: x.txt}\nmodel: {hidden_size: 768}\ntraining: {steps: 1_000_000}\n")
    (folder / "sst2.yaml").write_text("task: sst2\n")
    monkeypatch.setattr("bert.config.recipe_folder", lambda: folder)
    monkeypatch.setattr("bert.commands.arguments.recipe_folder", lambda: folder)
    monkeypatch.chdir(tmp_path)


def pretrain(*argv, default_recipe=None):
    return parse(PretrainConfig, list(argv), prog="bert pretrain", description="D.", default_recipe=default_recipe)[:2]


def pretrain_yaml(text, *argv):
    Path("x.yaml").write_text(text)
    return pretrain("--config", "x.yaml", *argv)[0]


def sentence(function, *arguments, **named):
    with pytest.raises(UserError) as caught:
        function(*arguments, **named)
    text = str(caught.value)
    assert "\n" not in text
    return text


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
        (["--xyzzy", "1"], ["unknown key --xyzzy", "--help lists all keys"]),
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
        (["foo"], ["foo belongs to no key", "--KEY VALUE"]),
        (["--print_config", "foo"], ["foo belongs to no key"]),
        (["--print_config=yes"], ["--print_config takes no value"]),
        (["--model", "x.yaml"], ["--model is a section", "--model.vocab_size"]),
        (["--config"], ["--config needs a value"]),
        (["--config", "tny"], ["--config tny", "no such file or recipe", "mean tiny?", "base, sst2, tiny"]),
        (["--config", "elsewhere/bas.yaml"], ["elsewhere/bas.yaml", "mean base?"]),
        (["--config", "zzz"], ["--config zzz", "base, sst2, tiny"]),
        (["--config", "configs"], ["--config configs", "folder", "name a YAML file"]),
        (["--phases.2.batch_siz", "3"], ["unknown key --phases.2.batch_siz", "mean --phases.2.batch_size?"]),
        (["--phases.2", "3"], ["--phases.2 is a section", "--phases.2.share"]),
        (["--phases", "3"], ["--phases 3", "a list of sections in a file or null is expected"]),
        (["--phases.1.batch_size", "a"], ["--phases.1.batch_size a", "a whole number (1000 or 1e3) or null"]),
        (["--phases.1.share", "0.5", "--phases", "null"], ["phases.1.share is set", "phases is null"]),
        ([*ENOUGH, "--phases.1.sequence_length", "9999"], ["phases.1.sequence_length (9999) is over model.max"]),
        ([*ENOUGH, "--optimizer.name", "sgd"], ["--optimizer.name sgd", "use one of adamw, lamb"]),
    ],
)
def test_mistakes_on_the_command_line(argv, parts):
    text = sentence(pretrain, *argv)
    assert text.startswith("command line: ")
    for part in parts:
        assert part in text


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
        ("training: 5\n", 1, ["training is a section: set its keys one by one, for example training.steps"]),
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
            ["phases.2.sequence_length (9999) is over model.max_position_embeddings (512)"],
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


def test_lists_that_are_nested_too_deeply():
    assert "nested too deeply: remove" in sentence(pretrain_yaml, "model: " + "[" * 2000)


def test_unreadable_files():
    Path("x.yaml").write_bytes(b"seed: \xff\n")
    assert sentence(pretrain, "--config", "x.yaml") == f"x.yaml: not UTF-8: {UTF8_HINT}"
    assert sentence(pretrain_yaml, "seed: \x01\n").startswith("x.yaml: not valid YAML (special characters")
    assert sentence(load_config, PretrainConfig, "none.yaml").startswith("none.yaml cannot be read (No such file")


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
    config, *_ = parse(PretrainConfig, argv, "bert pretrain", "D.", "measured", say=said.append)
    assert config.transfer == transfer
    expected = (
        "the recipe measured has transfer packages for its own corpus: left out, since data.train is another one "
        "(--transfer packages runs it)"
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
    assert sentence(pretrain, "--config", "own.yaml").endswith("--help lists all keys")


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


@pytest.mark.parametrize("config_class", [PretrainConfig, FinetuneConfig])
def test_help_explains_every_key_with_its_default(config_class, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit) as ended:
        parse(config_class, ["-h"], prog="bert x", description="What it does.", default_recipe="tiny")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert text.startswith("usage: bert x [--config FILE ...] [--KEY VALUE ...]\n\nWhat it does.\n")
    assert "Recipes: base, sst2, tiny. (default: tiny)" in words
    for section, value in vars(config_class()).items():
        for name in vars(value) if dataclasses.is_dataclass(value) else [None]:
            inner = getattr(value, name) if name else None
            for key in vars(inner) if dataclasses.is_dataclass(inner) else [None]:
                assert f"--{'.'.join(filter(None, (section, name, key)))} " in words
    assert ("--phases.K.share X Share of training.steps" in words) == (config_class is PretrainConfig)
    assert "Peak learning rate. (default: 0.0001)" in words
    assert "Lower-case all text. (default: true)" in words
    assert "--training.remat none|dots|full " in words
    assert "--optimizer.name adamw|lamb " in words
    assert "null" in words
    assert "None" not in text
    assert max(map(len, text.splitlines())) <= 110


def test_user_error_is_one_line_and_status_2(capsys):
    @run_command
    def main(argv):
        raise UserError(f"{argv[0]}: two\nlines")

    with pytest.raises(UserError, match=r"^a: two\nlines$"):
        main(["a"])
    assert capsys.readouterr() == ("", "")
    assert run_program(main)(["a"]) == 2
    assert capsys.readouterr() == ("", "error: a: two lines\n")


def test_interrupt_and_success_have_their_status(capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    assert run_program(run_command(interrupt))([]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert run_program(run_command(lambda argv: len(argv)))(["a"]) == 1


def test_other_errors_keep_their_trace():
    def broken(argv):
        raise ValueError("a bug of ours")

    with pytest.raises(ValueError, match="a bug of ours"):
        run_command(broken)([])


@pytest.mark.skipif(os.name != "posix", reason="shell pipes")
def test_closed_pipe_is_quiet():
    code = """
import sys
from bert.commands.arguments import run_command, run_program
@run_program
@run_command
def main(argv):
    for _ in range(100_000):
        print("x" * 80)
    return 0
sys.exit(main([]))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def finetune_yaml(text, *argv):
    Path("f.yaml").write_text(f"init: none\ndata.dir: d\n{text}")
    argv = ["--config", "f.yaml", *argv]
    return parse(FinetuneConfig, argv, prog="bert finetune", description="D.", default_recipe=None)[0]


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


def test_predictions_of_a_recipe_fit_shorter_rows():
    text = "data: {train: a, sequence_length: 512, max_predictions_per_sequence: 77}\ntraining.steps: 5\n"

    def predictions(*argv):
        return pretrain_yaml(text, *argv).data.max_predictions_per_sequence

    length = "--data.sequence_length"
    assert [predictions(length, tokens) for tokens in ("64", "128", "256")] == [10, 77, 77]
    assert "is not below" in sentence(predictions, length, "64", "--data.max_predictions_per_sequence", "64")


def test_a_warm_up_as_long_as_the_run_is_refused_with_the_configuration():
    text = "data.train: a\ntraining.steps: 100\noptimizer.warmup_steps: 50"
    assert pretrain_yaml(text).optimizer.warmup_steps == 50
    found = sentence(pretrain_yaml, text, "--training.steps", "40")
    assert found.startswith("x.yaml, line 3 and command line: optimizer.warmup_steps (50) is not below the 40 steps")
    assert "--optimizer.warmup_ratio 0.1" in found
    pretrain_yaml(text, "--training.steps", "40", "--optimizer.warmup_ratio", "0.1")
    assert "warmup_steps (50)" in sentence(finetune_yaml, "training.steps: 9\noptimizer.warmup_steps: 50")
