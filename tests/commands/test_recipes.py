"""`bert recipes`: every recipe in a list, and the headers of those that are named."""

import pytest

from bert.commands.recipes import main
from bert.config import recipe_names
from bert.errors import UserError


def test_every_recipe_is_listed_once_below_its_command(capsys):
    assert main([]) == 0
    pretraining, finetuning, last = capsys.readouterr().out.split("\n\n")
    names = [line.split()[0] for group in (pretraining, finetuning) for line in group.splitlines()[1:]]
    assert sorted(names) == recipe_names()
    assert pretraining.startswith("bert pretrain --config NAME\n")
    assert finetuning.startswith("bert finetune --config NAME\n")
    assert "  mrpc            MRPC of GLUE, from its original TSV files.\n" in finetuning
    assert "bert recipes NAME" in last


def test_a_named_recipe_has_its_whole_header(capsys):
    assert main(["mrpc", "tiny"]) == 0
    mrpc, tiny = capsys.readouterr().out.split("\n\n")
    assert mrpc.startswith("mrpc (")
    for line in ("  python finetune.py --config mrpc --init runs/X ", "  Hardware: any device.", "  Score: paper: "):
        assert f"\n{line}" in mrpc
    assert "task: mrpc" not in mrpc
    assert "  BERT-tiny: 2 layers" in tiny


def test_an_unknown_name_is_one_sentence():
    with pytest.raises(UserError, match=r"^command line: mprc is not a recipe: use one of aeslc, "):
        main(["mprc"])
