"""The front door: ``bert --help``, ``--version`` and unknown commands, all without JAX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bert
from bert.commands import COMMANDS, command_function, main

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "bert", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, (_, line) in COMMANDS.items():
        assert name in text
        assert line in text
    assert main([]) == 2


def test_version():
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("bert-jax ")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("pretrian", "did you mean pretrain?"),
        ("xyzzy", "choose one of pretrain"),
        ("sweep", "--sweep of bert finetune"),
    ],
)
def test_unknown_command_is_one_sentence(name, fix):
    done = run(name)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: command line: {name} is not a command of bert: ")
    assert fix in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "name",
    ["predict", "embed", "generate", "evaluate", "export", "attention", "inspect", "compare", "glue-zip", "mine"],
)
def test_a_missing_argument_is_one_sentence(name, fails):
    error = fails(main, name)
    assert error.startswith("error: command line: the following arguments are required: ")
    assert error.endswith(f": see bert {name} --help\n")
    output = {"attention": ["--output", "x.png"], "embed": ["--output", "x.npy"]}.get(name, [])
    assert "--helo" in fails(main, name, *["x"] * 2, *output, "--helo")


@pytest.mark.parametrize("name", COMMANDS)
def test_called_from_python_a_command_raises(name, capsys):
    with pytest.raises(bert.UserError, match=r"^command line: "):
        command_function(name)(["x", "x", "--nonsense"])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pretrain", ["--coordinator HOST:PORT", "--num_processes N", "--process_id I"]),
        ("tokenizer", ["--output DIR", "--extend N"]),
        ("examples", ["--show N", "--statistics", "--shard I/N"]),
        ("plan", ["--memory SIZE", "--device KIND"]),
    ],
)
def test_help_lists_a_commands_own_options_among_the_others(name, options, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    general = capsys.readouterr().out.partition("The run:")[0]
    assert all(f"  {option}" in general for option in options)


def test_chosen_command_gets_the_rest(monkeypatch):
    seen = []
    module = type(sys)("stand_in")
    module.main = lambda argv: seen.append(argv) or 7
    monkeypatch.setitem(sys.modules, "stand_in", module)
    monkeypatch.setitem(COMMANDS, "echo", ("stand_in", "stands in"))
    assert main(["echo", "--seed", "1"]) == 7
    assert seen == [["--seed", "1"]]


# Each of these takes a second or more to import; help must not wait for it.
HEAVY = (
    "jax",
    "flax",
    "orbax",
    "tensorflow",
    "torch",
    "datasets",
    "matplotlib",
    "sklearn",
    "pyarrow",
    "tensorboardX",
)


@pytest.mark.parametrize(
    "imports",
    [
        "import bert",
        "from bert.commands import main; assert main(['--help']) == 0",
        *(
            f"import bert.commands as c\ntry: c.command_function({name!r})(['--help'])\nexcept SystemExit: pass"
            for name in ("pretrain", "finetune", "examples", "tokenizer", "inspect", "compare", "attention", "plan")
        ),
        "import bert.training.flops, bert.commands.cli.arguments, bert.runs.report, bert.runs.plots, bert.config",
    ],
)
def test_help_imports_nothing_heavy(imports):
    code = f"{imports}\nimport sys\nprint(sorted(set(sys.modules) & set({HEAVY})), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n"


@pytest.mark.medium
@pytest.mark.parametrize("arguments", [["--help"], ["pretrain", "--help"]])
def test_help_is_there_at_once(arguments):
    def seconds():
        start = os.times()
        assert run(*arguments).returncode == 0
        end = os.times()
        return end.children_user + end.children_system - start.children_user - start.children_system

    assert min(seconds() for _ in range(3)) < 1  # of the processor, which others may use as well
