"""``bert COMMAND ...``: imports the module of one command and calls its function."""

from __future__ import annotations

import difflib
import importlib

import bert
from bert.commands.cli.arguments import Command, run_command, run_program
from bert.errors import UserError

COMMANDS = {
    "pretrain": ("bert.commands.pretrain", "pretrain a model on a corpus"),
    "finetune": ("bert.commands.finetune", "fine-tune a model on labelled data"),
    "recipes": ("bert.commands.recipes", "list the recipes for --config"),
    "config": ("bert.commands.recipes", "print the JSON schema of configuration files, for editors"),
    "plan": ("bert.commands.plan", "report the device memory and time of a pretraining run"),
    "tokenizer": ("bert.commands.corpus", "train a vocabulary on a corpus, or extend one"),
    "examples": ("bert.commands.corpus", "build the examples of a corpus in advance, and show them"),
    "predict": ("bert.commands.predictions", "predict new inputs with a fine-tuned model"),
    "embed": ("bert.commands.predictions", "write the embeddings of texts to a file"),
    "mine": ("bert.commands.predictions", "find hard negatives for pairs of a query and its answer"),
    "generate": ("bert.commands.language_models", "continue texts with a language model"),
    "evaluate": (
        "bert.commands.language_models",
        "score a fine-tuned model on labelled data, or a language model on a text",
    ),
    "inspect": ("bert.commands.reports", "print parameters, FLOPs, vocabulary and origin of a run or model"),
    "compare": ("bert.commands.reports", "show curves, settings and scores of several runs side by side"),
    "attention": ("bert.commands.reports", "show the attention weights of a model over a text"),
    "demo": ("bert.commands.demo", "serve a web page for trying a model"),
    "serve": ("bert.commands.serve", "serve models over HTTP, for clients of OpenAI and text-embeddings-inference"),
    "export": ("bert.commands.export", "write a model as a Hugging Face folder, StableHLO or ONNX"),
    "benchmark": ("bert.commands.benchmark", "fine-tune on all of GLUE, or score embeddings on MTEB or NanoBEIR"),
    "glue-zip": ("bert.commands.benchmark", "collect test predictions for gluebenchmark.com in one zip"),
}
"""Module and summary of each command. A module of several commands has a function ``NAME_command`` for each of them, a
module of one command has ``main``."""


OPTIONS = {
    "sweep": "use the option --sweep of bert finetune or bert pretrain",
    "train": "use bert pretrain or bert finetune",
    "eval": "use bert evaluate RUN DATA",
    "test": "use bert predict RUN test",
}
"""Replacements for names that are often mistaken for commands."""


@run_program
@run_command
def main(argv: list[str]) -> int:
    """Runs one command as a program: prints a UserError as one sentence, and returns the exit status.

    The function of one command, such as `bert.commands.finetune.main`, raises the UserError.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"bert-jax {bert.__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        if name in OPTIONS:
            raise UserError(f"command line: {name} is not a command of bert: {OPTIONS[name]}")
        fix = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"
        raise UserError(f"command line: {name} is not a command of bert: {fix}")
    return command_function(name)(rest)


def command_function(name: str) -> Command:
    """Imports the module of a command and returns its function."""
    module = importlib.import_module(COMMANDS[name][0])
    command: Command = getattr(module, f"{name.replace('-', '_')}_command", None) or module.main
    return command


def _help() -> str:
    lines = [f"  {name:11}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: bert COMMAND ...",
            "",
            "Pretrains and fine-tunes BERT in JAX, from raw text to a scored model.",
            "",
            "Commands:",
            *lines,
            "",
            "bert COMMAND --help describes a command; bert --version prints the version.",
        ]
    )
