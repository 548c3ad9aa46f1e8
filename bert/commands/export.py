"""`bert export`: writes a model in the format of another library."""

from __future__ import annotations

from pathlib import Path

from bert.commands.cli.arguments import (
    MODEL,
    CommandParser,
    add_adapter_option,
    add_task_option,
    log_to_stderr,
    run_command,
)
from bert.errors import UserError
from bert.interchange import FORMATS
from bert.remote import fetch, readable_path, writable_path

DESCRIPTION = """Writes a model for other programs. hf: a folder for Hugging Face transformers (config.json,
safetensors, tokenizer files, a model card with the recipe and the scores). stablehlo: one function for CPU, CUDA and
TPU that needs only JAX, with its weights in a file. onnx: a graph for ONNX Runtime and others, for any number of rows
and tokens (pip install 'bert-jax[onnx]'). peft: only the adapters and the head of a run with lora.rank, for PEFT. The
export is read back, executed and compared with the model. --quantize int8 stores the weights of an ONNX graph in 8
bits; nothing is written if the score on dev falls by more than --tolerance times the float score. For an embedding
model without a task, the score is the mean cosine of the embeddings of both graphs."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert export", DESCRIPTION)
    parser.add_argument("run", type=readable_path, metavar="RUN", help=MODEL)
    add_adapter_option(parser)
    add_task_option(parser, "Write the model of one task, with its adapter and its prompt")
    parser.add_argument("out", type=writable_path, metavar="OUT", help="New folder to write.")
    parser.add_argument("--format", choices=FORMATS, default="hf", help="Format to write. (default: hf)")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--length", type=int, metavar="T", help="For stablehlo: tokens of the inputs. (default: the model's maximum)"
    )
    lengths.add_argument(
        "--dynamic_length", action="store_true", help="For stablehlo: inputs of any length up to the model's maximum."
    )
    parser.add_argument(
        "--generator", action="store_true", help="Write the generator of a run with training.objective rtd."
    )
    parser.add_argument(
        "--base",
        metavar="NAME",
        help="For peft: hub name or folder of the base model, which the export names. (default: init of the run)",
    )
    parser.add_argument("--quantize", choices=("int8",), help="For onnx: weights in 8 bits.")
    parser.add_argument(
        "--dev",
        type=readable_path,
        metavar="PATH",
        help="For --quantize: a labelled file; the folder of a task that reads its own files; or, for an embedding "
        "model without a task, a file with one text per line. (default: the dev rows of the run)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="For --quantize: share of the float score that int8 may lose. (default: 0.01)",
    )
    arguments = parser.parse_arguments(argv)
    if arguments.format != "stablehlo" and (arguments.length is not None or arguments.dynamic_length):
        raise UserError(
            f"command line: --length and --dynamic_length are for stablehlo: leave them out with {arguments.format}"
        )
    if arguments.quantize is None and (arguments.dev is not None or arguments.tolerance is not None):
        raise UserError("command line: --dev and --tolerance are for --quantize: pass it as well, or leave them out")
    if arguments.quantize is not None and arguments.format != "onnx":
        raise UserError(f"command line: --quantize is for onnx: leave it out with {arguments.format}")
    if arguments.dev is not None:
        arguments.dev = fetch(arguments.dev)
        if not Path(arguments.dev).exists():
            raise UserError(f"{arguments.dev} does not exist: pass a file or a folder as --dev")
    if arguments.base is not None and arguments.format != "peft":
        raise UserError(f"command line: --base is for peft: leave it out with {arguments.format}")
    int8 = {name: getattr(arguments, name) for name in ("quantize", "dev", "tolerance")}

    from bert.inference.load import load

    model = load(arguments.run, log_to_stderr, adapter=arguments.adapter)
    if arguments.generator:
        model = model.generator
    if arguments.task is not None:
        model = model.for_task(arguments.task)
    shape = {"length": arguments.length, "dynamic_length": arguments.dynamic_length}
    quantization = {name: value for name, value in int8.items() if value is not None}
    model.save(arguments.out, arguments.format, print, base=arguments.base, **shape, **quantization)
    return 0
