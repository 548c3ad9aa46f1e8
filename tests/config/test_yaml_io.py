"""Keys of earlier versions, in every place where a key may be written."""

import json
from pathlib import Path

import pytest

from bert.commands.pretrain import main
from bert.config import DataConfig, PretrainConfig, TrainingConfig
from bert.config.run_file import DIGEST_FILE, _digest_of_value, load_run_config, save_run_config
from bert.config.sweep import parse_space, parse_space_options
from bert.config.validation import RENAMED, keys_of, nearest_keys, unknown_key
from bert.config.yaml_io import build_config, load_config, parse_dict
from bert.errors import UserError, warn_once

KEYS = keys_of(PretrainConfig)
OLD_FILE = "data:\n  objective: doc_sentences\n  prediction: replaced\n"


@pytest.fixture(autouse=True)
def every_notice() -> None:
    warn_once.cache_clear()


def settings(config: PretrainConfig) -> tuple[str, str]:
    return config.data.input_format, config.training.objective


def test_a_file_may_have_earlier_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.yaml").write_text(OLD_FILE)
    assert settings(load_config(PretrainConfig, tmp_path / "old.yaml")) == ("doc_sentences", "rtd")
    first, second = capsys.readouterr().err.splitlines()
    assert "line 2: data.objective is now data.input_format" in first
    assert "line 3: data.prediction is now training.objective: write training.objective: rtd" in second


@pytest.mark.parametrize(("old", "new"), RENAMED["data.prediction"].values.items())
def test_every_earlier_value_is_read(old: str, new: str) -> None:
    assert (
        settings(build_config(PretrainConfig, parse_dict({"data": {"prediction": old}}, "overrides", KEYS)))[1] == new
    )
    assert settings(build_config(PretrainConfig, parse_dict({"data.prediction": new}, "overrides", KEYS)))[1] == new


def test_the_command_line_may_have_earlier_keys(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data.prediction=permuted", "--data.objective", "blocks", "--print_config"]
    with pytest.raises(SystemExit):
        main(arguments)
    printed = capsys.readouterr()
    assert "  input_format: blocks\n" in printed.out
    assert "  objective: plm\n" in printed.out
    assert "  prediction:" not in printed.out
    assert "data.prediction is now training.objective: write training.objective" in printed.err


def test_an_override_under_one_name_replaces_a_value_under_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.yaml").write_text(OLD_FILE)
    (tmp_path / "new.yaml").write_text("training:\n  objective: rtd\ndata:\n  input_format: doc_sentences\n")
    for file, key, value in (("old", "training.objective", "plm"), ("new", "data.prediction", "permuted")):
        with pytest.raises(SystemExit):
            main([f"--config={tmp_path / file}.yaml", f"--{key}={value}", "--print_config"])
        assert "  objective: plm\n" in capsys.readouterr().out


def test_both_names_of_a_key_in_one_place_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text("data:\n  prediction: next\ntraining:\n  objective: clm\n")
    with pytest.raises(UserError, match=r"line 4: training\.objective is already set on line 2"):
        load_config(PretrainConfig, tmp_path / "both.yaml")
    with pytest.raises(UserError, match=r"data\.objective, now data\.input_format"):
        parse_dict({"data.input_format": "sop", "data.objective": "sop"}, "overrides", KEYS)
    with pytest.raises(UserError, match=r"command line: training\.objective is already set"):
        main(["--data.prediction=next", "--training.objective=clm"])


def test_the_configuration_of_an_earlier_run_is_read_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PretrainConfig(data=DataConfig(input_format="blocks"), training=TrainingConfig(objective="clm"))
    save_run_config(config, tmp_path)
    text, digests = (tmp_path / "config.yaml").read_text(), json.loads((tmp_path / DIGEST_FILE).read_text())
    text = text.replace("  objective: clm\n", "").replace("  input_format: blocks", "  objective: blocks")
    earlier = text.replace("  objective: blocks\n", "  objective: blocks\n  prediction: next\n")
    digests[-1]["data.objective"] = digests[-1].pop("data.input_format")
    digests[-1]["data.prediction"] = _digest_of_value("next")
    del digests[-1]["training.objective"]
    (tmp_path / "config.yaml").write_text(earlier)
    (tmp_path / DIGEST_FILE).write_text(json.dumps(digests))
    assert load_run_config(tmp_path) == config
    assert "config.yaml, line" in capsys.readouterr().err
    for line, key in (("prediction: masked", "training.objective"), ("objective: nsp", "data.input_format")):
        name = line.partition(":")[0]
        changed = "\n".join(f"  {line}" if row.startswith(f"  {name}:") else row for row in earlier.split("\n"))
        (tmp_path / "config.yaml").write_text(changed)
        with pytest.raises(UserError, match=rf"{key} is not what the run wrote"):
            load_run_config(tmp_path)


def test_a_sweep_may_have_earlier_keys() -> None:
    expected = {"training.objective": ["mlm", "rtd"], "data.input_format": ["doc_sentences"]}
    options = ["data.prediction=masked,replaced", "data.objective=doc_sentences"]
    assert parse_space_options(options, KEYS, "--sweep") == expected
    space = {"data.prediction": ["masked", "replaced"], "data.objective": ["doc_sentences"]}
    assert parse_space(space, KEYS, "space") == expected
    with pytest.raises(UserError, match=r"training\.objective twice"):
        parse_space({**space, "training.objective": ["clm"]}, KEYS, "space")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("data.objectiv", ["data.input_format", "training.objective"]),
        ("data.predicton", ["training.objective"]),
        ("prediction", ["training.objective"]),
        ("training.objectve", ["training.objective"]),
        ("objective", ["training.objective"]),
        ("data.input_forma", ["data.input_format"]),
        ("optimizer.lr", ["optimizer.learning_rate"]),
        ("xyzzy", []),
    ],
)
def test_a_misspelled_key_suggests_current_names(name: str, nearest: list[str]) -> None:
    assert nearest_keys(name, KEYS) == nearest
    message = unknown_key(name, KEYS, prefix="--")
    assert all(f"--{key}" in message for key in nearest) and "data.objective" not in message
