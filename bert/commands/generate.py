"""`bert generate`: continues prompts, or generates targets with an encoder-decoder."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from bert.commands.cli.answers import Input, check_output, open_output, read_standard_input, write_answers
from bert.commands.cli.arguments import COMMAND_LINE, MODEL, CommandParser, log_to_stderr, run_command
from bert.commands.cli.config_help import PLACEHOLDERS
from bert.config import Decoding
from bert.config.validation import check_fields
from bert.config.yaml_io import help_texts
from bert.errors import UserError, without_surrogates
from bert.remote import readable_path, writable_path

DESCRIPTION = """Continues a text with a left-to-right language model, or generates the target of a source with an
encoder-decoder. Decoding is greedy, by sampling (--temperature) or by beam search (--beams). The continuation is
printed without the prompt, up to the end token or --max_tokens. For several continuations (--num_samples), or lines of
standard input (PROMPT is -), each continuation is one JSON object: "prompt", "text" and "score", the sum of the
log-probabilities of its tokens, with --beams divided by the length norm (--length_penalty). An empty prompt is the
start of a text. An invalid line gives {"line", "text", "error"}, and the exit status is then 2. Samples depend on
--seed, not on --batch_size. An encoder-decoder defaults to the settings that it was evaluated with."""


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = CommandParser("bert generate", DESCRIPTION)
    parser.add_argument("run", type=readable_path, metavar="RUN", help=f"{MODEL} It must be a language model.")
    parser.add_argument("prompt", metavar="PROMPT", help="A text to continue, or - for the lines of standard input.")
    texts, names = help_texts(Decoding), [field.name for field in fields(Decoding)]
    for field in fields(Decoding):
        kind = int if field.default is None else type(field.default)
        value: dict[str, Any] = {"type": kind, "metavar": PLACEHOLDERS.get(kind, "NAME")}
        default = "" if field.default in (None, False) else f" (default: {field.default})"
        value = {"action": "store_true"} if kind is bool else value
        value = {"action": "append", "metavar": "TEXT"} if field.name == "stop" else value
        # Missing options stay unset, because an encoder-decoder has its own defaults.
        parser.add_argument(f"--{field.name}", default=argparse.SUPPRESS, help=texts[field.name] + default, **value)
    parser.add_argument(
        "--output", type=writable_path, metavar="PATH", help="Write to this file instead of standard output."
    )
    size = "Number of samples, or of texts with all their beams, per batch. (default: 16)"
    parser.add_argument("--batch_size", type=int, default=16, metavar="N", help=size)
    arguments = parser.parse_arguments(argv)
    given = {name: getattr(arguments, name) for name in names if name in arguments}
    check_fields(f"{COMMAND_LINE}: --", Decoding(**given))
    if arguments.batch_size < 1:
        raise UserError(f"command line: --batch_size is {arguments.batch_size}: it must be at least 1")
    if arguments.prompt != without_surrogates(arguments.prompt):
        raise UserError("command line: the prompt is not UTF-8: pass it as UTF-8")
    check_output(arguments.output)

    from bert.inference.load import load

    model = load(arguments.run, log_to_stderr)
    model.require_generation()
    settings = model.complete_decoding(given)
    decoding = Decoding(**settings)
    try:
        decoding.check("--")
    except UserError as error:
        raise UserError(f"{COMMAND_LINE}: {error}") from None

    def answer(inputs: list[Input]) -> list[list[Any]]:
        prompts, numbers = [item.value for item in inputs], [item.line - 1 for item in inputs]
        options = {"batch_size": arguments.batch_size, "numbers": numbers, "details": True}
        found = model.generate(prompts, **options, **settings)
        return found if decoding.num_samples > 1 else [[one] for one in found]

    if arguments.prompt == "-":
        write_answers("-", read_standard_input(str), answer, _lines, arguments.output)
        return 0
    prompt = Input(1, arguments.prompt, arguments.prompt)
    if decoding.num_samples > 1:
        write_answers("the prompt", iter([[prompt]]), answer, _lines, arguments.output)
        return 0
    [[continuation]] = answer([prompt])
    with open_output(arguments.output) as written:
        written.write(continuation.text.encode("utf-8", "replace") + b"\n")
    return 0


def _lines(item: Input, continuations: list[Any]) -> list[dict[str, Any]]:
    return [{"prompt": item.value, "text": one.text, "score": one.score} for one in continuations]
