"""`bert recipes`: every recipe in a list, and the headers of those that are named."""

import os
import re

import pytest

from bert.commands.cli.config_help import without_paths
from bert.commands.finetune import main as finetune
from bert.commands.pretrain import main as pretrain
from bert.commands.recipes import GROUPS
from bert.commands.recipes import recipes_command as main
from bert.config import recipe_names
from bert.errors import UserError

PATH = re.compile(r"\b(docs|benchmarks|notebooks|configs)/|\b(pretrain|finetune)\.py\b")
"""Paths of the repository that an installed package does not have."""


def test_every_recipe_is_listed_once_in_a_group_of_its_command(capsys) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    pretraining, finetuning = re.split(r"^bert finetune --config NAME$", text, flags=re.MULTILINE)
    assert pretraining.startswith("bert pretrain --config NAME\n")
    for part, for_task in ((pretraining, False), (finetuning, True)):
        assert sorted(re.findall(r"^    (\w+) +\S", part, re.MULTILINE)) == recipe_names(for_task)
    assert "\n\n  GLUE:\n    cola " in finetuning
    assert "    mrpc            MRPC of GLUE, from its original TSV files.\n" in finetuning
    assert text.endswith("bert recipes NAME prints command, hardware, time and score of a recipe.\n")
    assert not PATH.search(text)


def test_groups_name_recipes_once() -> None:
    for command, groups in GROUPS.items():
        names = [name for _, members in groups for name in members]
        assert len(names) == len(set(names))
        assert set(names) <= set(recipe_names(command == "finetune"))


def test_a_terminal_has_no_longer_lines(capsys, monkeypatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((80, 24)))
    assert main([]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_named_recipe_has_its_whole_header(capsys) -> None:
    assert main(["mrpc", "tiny"]) == 0
    mrpc, tiny = capsys.readouterr().out.split("\n\n")
    assert mrpc.startswith("mrpc (")
    for line in ("  bert finetune --config mrpc --init runs/X ", "  Hardware: any device.", "  Score: paper: "):
        assert f"\n{line}" in mrpc
    assert "task: mrpc" not in mrpc
    assert "  BERT-tiny: 2 layers" in tiny


@pytest.mark.parametrize("name", recipe_names())
def test_a_header_names_no_path_of_the_repository(name, capsys) -> None:
    assert main([name]) == 0
    first, *header = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{name} (")
    assert not PATH.search("\n".join(header))
    assert not any("$schema" in line for line in header)


def test_paths_become_names() -> None:
    assert without_paths("see docs/own_task.md.") == "see the guide own task."
    assert without_paths("0.5: benchmarks/RESULTS.md#the-quickstart.") == '0.5: see "the quickstart" in the results.'
    assert without_paths("(benchmarks/RESULTS.md)") == "(the results)"


@pytest.mark.parametrize(("command", "for_task"), [(pretrain, False), (finetune, True)])
def test_help_lists_the_recipes_of_its_command(command, for_task, capsys) -> None:
    with pytest.raises(SystemExit):
        command(["--help=all"])
    text = capsys.readouterr().out
    listed = re.search(r"Recipes:([\w,\s]+)\.", text)[1]
    assert listed.replace(",", " ").split() == recipe_names(for_task)
    assert not PATH.search(text.replace("configs/", ""))


def test_an_unknown_name_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"^command line: mprc is not a recipe: did you mean mrpc\?"):
        main(["mprc"])
