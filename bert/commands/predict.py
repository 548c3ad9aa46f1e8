"""`bert predict`: a fine-tuned run's answers for new texts."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from bert.commands.arguments import MODEL, Arguments, run_command
from bert.config import UserError
from bert.files import replacing
from bert.values import CONVERT

DESCRIPTION = """Answers for new inputs, one JSON object a line: a label and the probability of each, a score, the
answer to a question and its characters in the context, the entities of a text, or the likeliest choice. INPUT holds one
text a line; a pair of texts, a question and its context, or a question and its choices have tabs between; the latter
two may also be JSON objects ("question", "context" or "choices"); - is standard input. Inputs longer than a row are
read in several. A model of others that does not say whether it takes pairs is given each line as it is."""

LINES_AT_ONCE = 1024


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = Arguments("bert predict", DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help=f"{MODEL} It must be fine-tuned.")
    parser.add_argument("input", metavar="INPUT", help="File of texts, or - for standard input.")
    parser.add_argument("--output", metavar="FILE", help="Write the answers here, not to standard output.")
    parser.add_argument("--batch_size", type=int, default=32, metavar="N", help="Texts at once. (default: 32)")
    arguments = parser.parse_args(argv)
    if arguments.batch_size < 1:
        raise UserError(f"command line: --batch_size is {arguments.batch_size}: it must be at least 1")
    if arguments.input != "-" and not Path(arguments.input).is_file():
        raise UserError(
            f"{arguments.input} does not exist or is not a file: name a file of texts, or - for standard input"
        )
    if arguments.output and Path(arguments.output).exists():
        raise UserError(f"{arguments.output} exists already: name another --output or remove it")

    from bert.pretrained import load

    model = load(arguments.run, lambda text: print(text, file=sys.stderr))
    task = model.answering()
    with _input(arguments.input) as lines, _output(arguments.output) as output:
        for inputs in _chunks(_inputs(lines, arguments.input, task.input_of)):
            for given, answer in zip(inputs, model.predict(inputs, arguments.batch_size), strict=True):
                line = {**task.shown(given), **answer._asdict()}
                output.write(json.dumps(line, ensure_ascii=False) + "\n")
            output.flush()
    return 0


def _inputs(lines: IO[bytes], name: str, input_of: Callable[[str], Any]) -> Iterator[Any]:
    """The inputs of a file. An empty line is an error rather than a silent shift of answers against lines."""
    name = "standard input" if name == "-" else name
    empty = True
    for number, raw in enumerate(lines, 1):
        empty = False
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UserError(f"{name}, line {number}: not UTF-8: {CONVERT}") from None
        try:
            yield input_of(line)
        except ValueError as error:
            raise UserError(f"{name}, line {number}: {error}") from None
    if empty:
        raise UserError(f"{name} is empty: put one input a line")


def _chunks(inputs: Iterator[Any]) -> Iterator[list[Any]]:
    while chunk := list(itertools.islice(inputs, LINES_AT_ONCE)):
        yield chunk


@contextlib.contextmanager
def _input(name: str) -> Iterator[IO[bytes]]:
    if name == "-":
        yield sys.stdin.buffer
        return
    with Path(name).open("rb") as file:
        yield file


@contextlib.contextmanager
def _output(name: str | None) -> Iterator[IO[str]]:
    """Standard output, or a file that appears whole or not at all."""
    if name is None:
        yield sys.stdout
        return
    try:
        with replacing(Path(name)) as partial, partial.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise UserError(f"{name} cannot be written ({error.strerror}): name another --output") from None
