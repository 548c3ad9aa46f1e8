"""Damaged and hostile files of a configuration or a run are one error: a guarantee of SECURITY.md."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import bert
from bert.commands.export import main as export
from bert.commands.finetune import main as finetune
from bert.commands.predictions import predict_command as predict
from bert.commands.reports import compare_command as compare
from bert.commands.reports import inspect_command as inspect
from bert.config import PretrainConfig
from bert.config.run_file import CONFIG_FILE, FREE_KEYS, check_vocabulary, load_run_config, save_run_config
from bert.config.validation import keys_of
from bert.config.yaml_io import dump, parse_dict, parse_yaml
from bert.errors import UserError
from bert.runs.checkpoint import Checkpointer
from bert.runs.environment import read_environment
from bert.runs.folder import config_class_of_run, open_run
from bert.runs.metrics_log import read_metrics, read_results
from bert.runs.mirror import _describe, _other, machine_name
from bert.tokenizer.vocabulary import load_tokenizer


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


DEEP, LONG = "[" * 100_000, "9" * 5_000


@pytest.mark.parametrize(
    "text",
    [
        "data: &a {x: *a}\n",
        "&a [*a]\n",
        "? &a [*a]\n: 1\n",
        'output_dir: "\\ud800"\n',
        'output_dir: "\\UFFFFFFFF"\n',
        f"%YAML 1.{LONG}\n---\nseed: 1\n",
        f"seed: {LONG}\n",
        f"seed: 1:{LONG}:1\n",
        "seed: !!int abc\n",
        "seed: !!timestamp abc\n",
        "seed: 2024-99-99\n",
        pytest.param(DEEP, marks=pytest.mark.medium),
        "{a: " * 3_000,
        "",
    ],
    ids=lambda text: text[:20],
)
def test_hostile_yaml_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml"):
        load_run_config(tmp_path)
    with contextlib.suppress(UserError):
        config_class_of_run(tmp_path)
    with contextlib.suppress(UserError):
        parse_yaml(text, "x.yaml", keys_of(PretrainConfig))


def test_a_key_of_repeated_aliases_is_one_error_at_once() -> None:
    lists = ", ".join(f"&a{i + 1} [{', '.join([f'*a{i}'] * 10)}]" for i in range(9))
    with pytest.raises(UserError, match="line 1: a key is a list"):
        parse_yaml(f"? [&a0 [x], {lists}]\n: 1\n", "x.yaml", keys_of(PretrainConfig))


def test_a_dictionary_that_contains_itself_is_one_error() -> None:
    values: dict[str, Any] = {}
    values["data"] = values
    with pytest.raises(UserError, match="contains itself"):
        parse_dict(values, "overrides", keys_of(PretrainConfig))


@pytest.mark.parametrize("content", [DEEP.encode(), LONG.encode(), b"\xff\xfe", b"[]", b'{"step": 1}', b"null"])
def test_hostile_side_files_of_a_run_are_one_error_or_passed_over(tmp_path: Path, content: bytes) -> None:
    for name in ("metrics.jsonl", "results.json", "environment.json", ".machine"):
        (tmp_path / name).write_bytes(content)
    assert read_metrics(tmp_path) == []
    with contextlib.suppress(UserError):
        read_results(tmp_path)
    assert read_environment(tmp_path) == []
    name = machine_name(tmp_path / ".machine")
    assert machine_name(tmp_path / ".machine") == name, "a damaged name is replaced"
    assert _other(content, "me") is not None
    assert _describe(content) == "another process"


@pytest.mark.medium
def test_a_config_that_was_cut_off_is_an_error(tmp_path: Path) -> None:
    """Includes configurations of older versions, which have no digests and may lack newer keys."""
    config = PretrainConfig(output_dir="run", seed=3)
    save_run_config(config, tmp_path)
    text = (tmp_path / "config.yaml").read_text()
    assert load_run_config(tmp_path) == config
    lines = text.splitlines(keepends=True)
    for has_digests in (True, False):
        if not has_digests:
            (tmp_path / "config.digest").unlink()
        for end in range(len(lines)):
            (tmp_path / "config.yaml").write_text("".join(lines[:end]))
            with contextlib.suppress(UserError):
                assert load_run_config(tmp_path) == config, end
                assert has_digests, "the end is missing"
    older = [line for line in lines if line.strip() not in ("bias_correction: true", "prediction: masked")]
    (tmp_path / "config.yaml").write_text("".join(older))
    assert load_run_config(tmp_path).seed == 3


def test_a_changed_value_is_an_error_and_a_moved_path_is_none(tmp_path: Path) -> None:
    config = PretrainConfig(output_dir="run", init="a")
    save_run_config(config, tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(dump(dataclasses.replace(config, init="b")))
    assert load_run_config(tmp_path).init == "b"
    file.write_text(dump(dataclasses.replace(config, seed=1)))
    with pytest.raises(UserError, match=r"seed is not what.*wrote.*config\.digest"):
        load_run_config(tmp_path)
    file.write_text(dump(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    save_run_config(config, tmp_path)
    check_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ ")
    with pytest.raises(UserError, match=r"tokenizer\.json is not what"):
        check_vocabulary(tmp_path)


def test_a_kill_between_config_and_digest_leaves_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = PretrainConfig(output_dir="run"), PretrainConfig(output_dir="run", seed=1)
    save_run_config(first, tmp_path)
    before = (tmp_path / "config.yaml").read_text()
    save_run_config(second, tmp_path)
    assert load_run_config(tmp_path) == second
    (tmp_path / "config.yaml").write_text(before)
    assert load_run_config(tmp_path) == first


Read = Callable[[Path], Any]


def read_model(run: Path) -> Any:
    model = bert.load(run)
    params = jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), model.params)
    return model.step, params, model.config, model.tokenizer.to_str(), model.task, model.labels, model.data


def resume(run: Path) -> Any:
    """Files that a resumed run reads before it trains."""
    config = dataclasses.replace(load_run_config(run), output_dir=str(run))
    with open_run(config) as opened, Checkpointer(run / "checkpoints", 3, logging.getLogger("bert").warning) as saved:
        assert opened.resumed
        restored = saved.restore()
        assert restored is not None
        state = jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), restored[1])
        return dataclasses.replace(opened.config, output_dir=None), restored[0], state, load_tokenizer(run).to_str()


def printed(main: Callable[[list[str]], int], *arguments: str) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        return main(list(arguments)), out.getvalue()


def exported(run: Path) -> Any:
    out = run.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    bert.load(run).save(out, format="hf")
    return {name: (out / name).read_bytes() for name in files_below(out) if name != "README.md"}


def damages(content: bytes, draw: random.Random, cuts: int | None, flips: int) -> Iterator[bytes]:
    """The content cut at the end of lines, all or some of them, and with a bit flipped."""
    ends = [0, *(index + 1 for index, byte in enumerate(content[:-1]) if byte == 10)]
    for end in ends if cuts is None else draw.sample(ends, min(cuts, len(ends))):
        yield content[:end]
    for place in [draw.randrange(len(content)) for _ in range(flips if content else 0)]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        yield bytes(flipped)


def changes_free_keys_alone(content: bytes, damaged: bytes) -> bool:
    """Returns whether a config.yaml differs only in values without a digest, some of which commands print."""
    names = {key.rpartition(".")[2].encode() for key in FREE_KEYS}
    differing = [pair for pair in zip_longest(content.split(b"\n"), damaged.split(b"\n")) if pair[0] != pair[1]]
    keys = [{(line or b"").partition(b":")[0].strip() for line in pair} for pair in differing]
    return all(len(pair) == 1 and pair <= names for pair in keys)


def check_damages(source: Path, tmp_path: Path, readers: list[Read], cuts: int | None, flips: int, every: int) -> None:
    """Damages one file after the other: each reader raises UserError, warns, or returns what it should."""
    run, draw, warnings = tmp_path / "run", random.Random(0), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bert").addHandler(handler)
    try:
        shutil.copytree(source, run)
        right = [read(run) for read in readers]
        unprotected = ("curves.png", ".lock", "metrics.jsonl", "results.json", "environment.json")
        names = [name for name in sorted(files_below(source)) if name not in unprotected and "/events." not in name]
        for name in [*names[::every], *(name for name in names if "/" not in name)]:
            content = (source / name).read_bytes()
            for damaged in damages(content, draw, cuts, flips):
                for read, expected in zip(readers, right, strict=True):
                    (run / name).write_bytes(damaged)
                    warnings.clear()
                    try:
                        actual = read(run)
                    except UserError:
                        continue
                    finally:
                        shutil.rmtree(run)
                        shutil.copytree(source, run)
                    is_reported = warnings or (isinstance(actual, tuple) and "damaged" in str(actual[-1]))
                    is_free = name == CONFIG_FILE and changes_free_keys_alone(content, damaged)
                    assert actual == expected or is_reported or is_free, (name, read, damaged[:300])
    finally:
        logging.getLogger("bert").removeHandler(handler)


@pytest.mark.medium
def test_a_damaged_run_is_an_error_or_reads_right(finetuned: Path, tmp_path: Path) -> None:
    check_damages(finetuned, tmp_path, [read_model, resume], cuts=1, flips=2, every=12)


@pytest.mark.medium
def test_missing_metrics_of_a_run_are_a_warning(finetuned: Path, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(finetuned, run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])["step"]
    for kept in ([], lines[:1], [lines[0][:9] + "\n", *lines[1:]]):
        (run / "metrics.jsonl").write_text("".join(kept))
        assert compare([str(run), str(finetuned), f"--output={tmp_path / 'x.png'}"]) == 0
        warning = capsys.readouterr().err
        assert str(run / "metrics.jsonl") in warning
        assert ("line 1 is damaged" if len(kept) > 1 else f"of {last}") in warning


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pretrained", "finetuned"])
def test_any_damage_of_a_run_is_an_error_or_reads_right(kind: str, request: Any, tmp_path: Path) -> None:
    source = request.getfixturevalue(kind)
    commands: list[Read] = [
        exported,
        lambda run: printed(inspect, str(run)),
        lambda run: printed(compare, str(run), str(source), f"--output={run.parent / 'x.png'}"),
    ]
    for name, readers, cuts, every in (("a", [read_model, resume], None, 5), ("b", commands, 8, 10)):
        (tmp_path / name).mkdir()
        check_damages(source, tmp_path / name, readers, cuts, flips=10, every=every)


@pytest.mark.medium
def test_a_damaged_newest_checkpoint_is_a_warning(
    pretrained: Path, sst2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(pretrained, run)
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    (newest / "params" / "_METADATA").write_text("{")
    (tmp_path / "texts.txt").write_text("ba ko\n")
    options = ["--config=sst2", f"--init={run}", f"--data.dir={sst2}", f"--output_dir={tmp_path / 'fine'}"]
    short = ["--data.max_length=32", "--data.buckets=32", "--training.epochs=1"]
    calls: list[Callable[[], Any]] = [
        lambda: bert.load(run),
        lambda: export([str(run), str(tmp_path / "out"), "--format=hf"]),
        lambda: predict([str(run), str(tmp_path / "texts.txt")]),
        lambda: finetune([*options, *short]),
    ]
    for call in calls:
        capsys.readouterr()
        with contextlib.suppress(UserError):
            call()
        assert f"checkpoint {newest} is damaged" in capsys.readouterr().err
