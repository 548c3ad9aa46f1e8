"""environment.json: software and devices of each session, and nothing personal."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bert
from bert.commands.reports import inspect_command as main
from bert.config import PretrainConfig
from bert.runs.environment import describe_environment, read_environment, record_environment
from bert.runs.folder import RunFolder, open_run


def test_a_session_names_software_devices_command_and_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("SECRET", "a secret")
    monkeypatch.setattr(sys, "argv", ["/home/somebody/bin/bert", "pretrain", "--output_dir=/home/somebody/runs/x"])
    monkeypatch.chdir(tmp_path)
    session = describe_environment()
    assert session["command"] == ["~/bin/bert", "pretrain", "--output_dir=~/runs/x"]
    assert set(session["versions"]) == {"bert-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"}
    assert session["devices"] == {"platform": "cpu", "kind": "cpu", "count": 1, "processes": 1}
    assert session["git"] is None
    text = json.dumps(session)
    assert "somebody" not in text
    assert "secret" not in text


def test_the_commit_of_the_working_tree(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        return subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)

    git("init", "-q")
    monkeypatch.chdir(tmp_path)
    assert describe_environment()["git"] is None, "there is no commit yet"
    (tmp_path / "file").write_text("1")
    (tmp_path / "sub").mkdir()
    git("add", "file")
    git("commit", "-qm", "one")
    git("worktree", "add", "-q", "-b", "branch", "other")
    commit = git("rev-parse", "HEAD").stdout.strip()
    for change in ([], ["pack-refs", "--all"], ["checkout", "-q", "--detach"]):
        if change:
            git(*change)
        for folder in (".", "sub", "other"):
            monkeypatch.chdir(tmp_path / folder)
            assert describe_environment()["git"] == {"commit": commit}, (change, folder)


def test_each_start_adds_a_session_and_a_damaged_file_is_begun_again(tmp_path):
    run = RunFolder(tmp_path, PretrainConfig(), resumed=False)
    record_environment(run)
    record_environment(run)
    first, second = read_environment(tmp_path)
    assert first["started"] <= second["started"]
    (tmp_path / "environment.json").write_text('[{"started": ')
    record_environment(run)
    assert len(read_environment(tmp_path)) == 1
    record_environment(RunFolder(tmp_path, PretrainConfig(), resumed=False, is_writer=False))
    assert len(read_environment(tmp_path)) == 1


def test_a_changed_configuration_leaves_nothing_of_a_run_that_has_not_trained(tmp_path):
    config = PretrainConfig(output_dir=str(tmp_path / "run"))
    with open_run(config) as run:
        run.save_rows({"train.jsonl": "{}\n"})
        record_environment(run)
    with open_run(replace(config, seed=1)) as run:  # and ends before it has written anything
        assert not run.resumed
        assert {path.name for path in run.path.iterdir()} <= {".lock", "config.yaml"}
    with open_run(replace(config, seed=2)) as run:
        assert not run.resumed, "nor is the folder refused"


def test_inspect_shows_the_sessions_of_a_run(pretrained, capsys):
    assert main([str(pretrained)]) == 0
    [session] = read_environment(Path(pretrained))
    lines = capsys.readouterr().out.partition("sessions:\n")[2].splitlines()
    assert lines[0].startswith(f"  {session['started']}  bert-jax {bert.__version__}, jax ")
    assert "1 x cpu" in lines[0]


def test_public_names_are_listed():
    assert {"Run", "pretrain", "finetune", "load", "Callback", "__version__"} <= set(dir(bert))
    assert all(hasattr(bert, name) for name in dir(bert))


def test_rows_of_a_run_that_was_begun_without_declared_labels_are_the_same(tmp_path):
    rows, labels = {"train.jsonl": "{}\n"}, {"train.jsonl.declared_labels.json": '{"label": ["b", "a"]}\n'}
    with open_run(PretrainConfig(output_dir=str(tmp_path / "run"))) as run:
        run.save_rows(rows)
        run.save_rows({**rows, **labels})  # has not trained: the order of labels may change
        assert len(list((run.path / "rows").iterdir())) == 2
        run.save_rows(rows)
        (run.path / "checkpoints" / "1").mkdir(parents=True)
        run.save_rows({**rows, **labels})
        assert [file.name for file in (run.path / "rows").iterdir()] == ["train.jsonl"]
