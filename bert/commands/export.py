"""`bert export`: a run, or anything else `bert.load` takes, in a form that others read."""

from __future__ import annotations

import argparse
import sys

from bert.commands.arguments import run_command

DESCRIPTION = """Hands a model to others. hf: a folder that Hugging Face transformers reads (config.json, safetensors,
tokenizer files, a model card with the recipe and the scores), read back and compared before it is called done."""

FORMATS = ("hf",)


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="bert export", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="a run, a Hugging Face folder or a hub name")
    parser.add_argument("out", metavar="OUT", help="new folder to write")
    parser.add_argument("--format", choices=FORMATS, default="hf", help="form to write (default: hf)")
    arguments = parser.parse_args(argv)

    from bert.pretrained import load

    model = load(arguments.run, lambda text: print(text, file=sys.stderr))
    model.save(arguments.out, arguments.format, print)
    return 0
