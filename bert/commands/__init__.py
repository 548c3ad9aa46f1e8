"""``bert COMMAND ...``: finds the command's module, loads it only then, and calls its ``main``."""

from __future__ import annotations

import difflib
import importlib

import bert
from bert.commands.cli.arguments import run_command, run_program
from bert.errors import UserError

COMMANDS = {
    "pretrain": ("bert.commands.pretrain", "trains an encoder on a corpus"),
    "finetune": ("bert.commands.finetune", "trains a task's head and the encoder on labelled data"),
    "recipes": ("bert.commands.recipes", "lists the recipes that --config takes"),
    "plan": ("bert.commands.plan", "reports the device memory that a pretraining run needs"),
    "tokenizer": ("bert.commands.tokenizer", "trains a vocabulary on a corpus, or extends one"),
    "examples": ("bert.commands.examples", "builds the examples of a corpus in advance, and shows them"),
    "predict": ("bert.commands.predict", "predicts for new inputs with a fine-tuned model"),
    "mine": ("bert.commands.mine", "finds hard negatives for queries whose answers are known"),
    "generate": ("bert.commands.generate", "continues texts with a left-to-right language model"),
    "evaluate": ("bert.commands.evaluate", "measures how well a left-to-right language model predicts a text"),
    "inspect": ("bert.commands.inspect", "prints parameters, FLOPs, vocabulary and origin of a run or model"),
    "compare": ("bert.commands.compare", "shows the curves, settings and scores of several runs side by side"),
    "attention": ("bert.commands.attention", "shows the attention weights of a model over a text"),
    "demo": ("bert.commands.demo", "serves a page in the browser on which a model can be tried"),
    "export": ("bert.commands.export", "writes a model as a Hugging Face folder, StableHLO or ONNX"),
    "glue-zip": ("bert.commands.glue_zip", "puts test predictions into one zip for gluebenchmark.com"),
}


OPTIONS = {
    "sweep": "use the option --sweep of bert finetune or bert pretrain",
    "train": "use bert pretrain or bert finetune",
    "eval": "use bert evaluate for a language model; the scores of a fine-tuned run are in its results.json",
    "test": "use bert predict RUN test",
}
"""Replacements for names that are often mistaken for commands."""


@run_program
@run_command
def main(argv: list[str]) -> int:
    """Runs one command as a program: prints a UserError as one sentence, and returns the exit status.

    The ``main`` of a command's own module, such as `bert.commands.finetune.main`, raises the UserError.
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
    return importlib.import_module(COMMANDS[name][0]).main(rest)


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
            "bert COMMAND --help explains a command, bert --version prints the version.",
        ]
    )
