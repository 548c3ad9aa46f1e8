"""`bert export`: a run, or anything else `bert.load` takes, in a form that others read."""

from __future__ import annotations

import sys

from bert.commands.arguments import MODEL, CommandParser, run_command
from bert.errors import UserError
from bert.interchange import FORMATS
from bert.urls import readable_path, writable_path

DESCRIPTION = """Writes a model for other programs. hf: a folder that Hugging Face transformers reads (config.json,
safetensors, tokenizer files, a model card with the recipe and the scores). stablehlo: one function for CPU, CUDA and
TPU that JAX calls without this package, with its weights in a file. onnx: a graph for ONNX Runtime and others, of any
number of rows and tokens (pip install 'bert-jax[onnx]'). Each is read back, run and compared before the command
ends."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert export", DESCRIPTION)
    parser.add_argument("run", type=readable_path, metavar="RUN", help=MODEL)
    parser.add_argument("out", type=writable_path, metavar="OUT", help="New folder to write.")
    parser.add_argument("--format", choices=FORMATS, default="hf", help="Form to write. (default: hf)")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--length", type=int, metavar="T", help="Tokens of stablehlo's inputs. (default: the most that the model reads)"
    )
    lengths.add_argument(
        "--dynamic_length", action="store_true", help="For stablehlo: inputs of any length up to that."
    )
    parser.add_argument(
        "--generator", action="store_true", help="Write the generator of a run with data.prediction replaced."
    )
    arguments = parser.parse_arguments(argv)
    if arguments.format != "stablehlo" and (arguments.length is not None or arguments.dynamic_length):
        raise UserError(
            f"command line: --length and --dynamic_length are for stablehlo: leave them out with {arguments.format}"
        )

    from bert.inference.loading import load

    model = load(arguments.run, lambda text: print(text, file=sys.stderr))
    if arguments.generator:
        model = model.generator
    model.save(arguments.out, arguments.format, print, length=arguments.length, dynamic_length=arguments.dynamic_length)
    return 0
