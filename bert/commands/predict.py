"""`bert predict`: a fine-tuned run's answers for new texts."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from bert.commands.arguments import MODEL, Arguments, run_command
from bert.config import UserError
from bert.config.checks import local_path
from bert.files import replacing
from bert.values import CONVERT

DESCRIPTION = """Answers for new inputs, one JSON object a line: a label and the probability of each, a score, the
answer to a question and its characters in the context, the entities of a text, or the likeliest choice. INPUT holds one
text a line; a pair of texts, a question and its context, or a question and its choices have tabs between; the latter
two may also be JSON objects ("question", "context" or "choices"); - is standard input, whose lines are answered as they
come. Long inputs are read as those of dev were. A model of others that does not say whether it takes pairs is given
each line as it is."""

LINES_AT_ONCE = 1024
READ_AT_ONCE = 1 << 20


@run_command
def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = Arguments("bert predict", DESCRIPTION)
    parser.add_argument("run", type=local_path, metavar="RUN", help=f"{MODEL} It must be fine-tuned.")
    parser.add_argument("input", type=local_path, metavar="INPUT", help="File of texts, or - for standard input.")
    parser.add_argument(
        "--output", type=local_path, metavar="FILE", help="Write the answers here, not to standard output."
    )
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
        for inputs in _inputs(lines_as_they_come(lines), arguments.input, task.input_of):
            for given, answer in zip(inputs, model.predict(inputs, arguments.batch_size), strict=True):
                line = {**task.shown(given), **answer._asdict()}
                output.write(json.dumps(line, ensure_ascii=False) + "\n")
            output.flush()
    return 0


def _inputs(chunks: Iterator[list[bytes]], name: str, input_of: Callable[[str], Any]) -> Iterator[list[Any]]:
    """The inputs of a file, chunk by chunk. An empty line is an error, not a silent shift of answers against lines."""
    name = "standard input" if name == "-" else name
    number = 0
    for chunk in chunks:
        inputs = []
        for raw in chunk:
            number += 1
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise UserError(f"{name}, line {number}: not UTF-8: {CONVERT}") from None
            try:
                inputs.append(input_of(line))
            except ValueError as error:
                raise UserError(f"{name}, line {number}: {error}") from None
        yield inputs
    if not number:
        raise UserError(f"{name} is empty: put one input a line")


def lines_as_they_come(file: io.BufferedReader) -> Iterator[list[bytes]]:
    """The lines that are there, at most LINES_AT_ONCE: whoever waits for an answer before he goes on gets it."""
    rest = b""
    while data := file.read1(READ_AT_ONCE):
        *lines, rest = (rest + data).split(b"\n")
        for start in range(0, len(lines), LINES_AT_ONCE):
            yield lines[start : start + LINES_AT_ONCE]
    if rest:
        yield [rest]


@contextlib.contextmanager
def _input(name: str) -> Iterator[io.BufferedReader]:
    if name == "-":
        yield cast(io.BufferedReader, sys.stdin.buffer)
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
