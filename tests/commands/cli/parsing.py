"""Configurations from arguments and from YAML texts."""

from pathlib import Path

import pytest

from bert.commands.cli.arguments import parse
from bert.config import FinetuneConfig, PretrainConfig
from bert.errors import UserError


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


def finetune_yaml(text, *argv):
    Path("f.yaml").write_text(f"init: none\ndata.dir: d\n{text}")
    argv = ["--config", "f.yaml", *argv]
    return parse(FinetuneConfig, argv, prog="bert finetune", description="D.", default_recipe=None)[0]
