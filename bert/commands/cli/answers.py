"""Reads the inputs of `bert predict` and `bert generate`, and writes their answers."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from bert.data.input_files import Input, parse_text, read_input_file
from bert.errors import UserError
from bert.files import atomic_write
from bert.remote import exists, is_url, writable
from bert.runtime.process import is_stdout_closed

if TYPE_CHECKING:
    from bert.tasks.base import Task


LINES_AT_ONCE = 1024
READ_AT_ONCE = 1 << 20


def read_inputs(name: str, task: Task) -> Iterator[list[Input]]:
    """Reads the inputs of a file, or of standard input (``-``) as they arrive, in lists.

    Raises:
      UserError: the file is unsupported, damaged or empty, or a table lacks columns of the task.
    """
    if name == "-":
        return read_standard_input(task.parse_line)
    inputs = read_input_file(Path(name), task)
    return _not_empty(iter(lambda: list(itertools.islice(inputs, LINES_AT_ONCE)), []), name)


def read_standard_input(parse: Callable[[str], Any]) -> Iterator[list[Input]]:
    """Reads one input per line of standard input, in lists as they arrive.

    Args:
      parse: converts a line to an input; raises ValueError with a message.

    Raises:
      UserError: there is no line.
    """
    chunks = _decode_lines(lines_as_they_come(cast(io.BufferedReader, sys.stdin.buffer)))
    return _not_empty(([parse_text(*line, parse) for line in chunk] for chunk in chunks), "standard input")


def lines_as_they_come(file: io.BufferedReader) -> Iterator[list[bytes]]:
    """Yields up to LINES_AT_ONCE available lines without waiting, so that clients can wait for each answer."""
    rest = b""
    while data := file.read1(READ_AT_ONCE):
        *lines, rest = (rest + data).split(b"\n")
        for start in range(0, len(lines), LINES_AT_ONCE):
            yield lines[start : start + LINES_AT_ONCE]
    if rest:
        yield [rest]


def _decode_lines(chunks: Iterator[list[bytes]]) -> Iterator[list[tuple[int, str]]]:
    line_number = 0
    for chunk in chunks:
        chunk[0] = chunk[0].removeprefix(b"" if line_number else b"\xef\xbb\xbf")
        lines = [raw.decode(errors="surrogateescape").rstrip("\r\n") for raw in chunk]
        yield list(enumerate(lines, start=line_number + 1))
        line_number += len(chunk)


def _not_empty(chunks: Iterator[list[Input]], name: str) -> Iterator[list[Input]]:
    first = next(chunks, None)
    if first is None:
        raise UserError(f"{name} holds no input: write one on each line")
    yield first
    yield from chunks


def write_answers(
    source: str,
    chunks: Iterator[list[Input]],
    answer: Callable[[list[Input]], list[Any]],
    lines_of: Callable[[Input, Any], Iterable[dict[str, Any]]],
    output: str | None,
) -> None:
    """Writes the answers of each input, or one line with its error.

    Args:
        source: file of the inputs, or - for standard input, for messages.
        chunks: lists of inputs that are answered together.
        answer: returns the answers of some inputs; raises UserError if one is invalid.
        lines_of: returns the JSON objects of an answer.
        output: file, written atomically; None for standard output.

    Raises:
        UserError: an input was invalid; raised at the end.
    """
    count, failed, first = 0, 0, ""
    with open_output(output) as written:
        for inputs in chunks:
            for item, result in zip(inputs, _answers_or_errors(inputs, answer), strict=True):
                count += 1
                if isinstance(result, str):
                    failed, first = failed + 1, first or f"line {item.line}: {result}"
                    lines: Iterable[dict[str, Any]] = [item._replace(error=result).failed()]
                else:
                    lines = lines_of(item, result)
                for line in lines:
                    written.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            written.flush()
    if failed:
        name = "standard input" if source == "-" else source
        raise UserError(f"{name}: {failed} of {count} inputs have no answer, the first on {first}")


def _answers_or_errors(inputs: list[Input], answer: Callable[[list[Input]], list[Any]]) -> list[Any]:
    """Returns the answer or error message of each input. If an input is invalid, each is answered separately."""
    answers: list[Any] = [item.error for item in inputs]
    indices = [i for i, item in enumerate(inputs) if item.error is None]
    try:
        results = answer([inputs[i] for i in indices])
    except UserError:
        results = [_answer_or_error(inputs[i], answer) for i in indices]
    for i, one in zip(indices, results, strict=True):
        answers[i] = one
    return answers


def _answer_or_error(item: Input, answer: Callable[[list[Input]], list[Any]]) -> Any:
    try:
        return answer([item])[0]
    except UserError as error:
        return str(error)


def check_output(name: str | None) -> None:
    """Raises UserError if the file exists or its folder does not, before anything is computed."""
    if name is None:
        return
    if exists(name):
        raise UserError(f"{name} exists already: name another --output or remove it")
    if not is_url(name) and not (folder := Path(name).parent).is_dir():
        raise UserError(f"{folder} is not a folder: make it, or name another --output")


@contextlib.contextmanager
def open_output(name: str | None) -> Iterator[IO[bytes]]:
    """Opens standard output, or a file that is written atomically."""
    if name is None:
        if is_stdout_closed():
            raise UserError("standard output is closed: open it, or name a file with --output")
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with writable(name) as path, atomic_write(path) as partial, partial.open("wb") as file:
            yield file
    except OSError as error:
        raise UserError(f"{name} cannot be written ({error.strerror}): name another --output") from None
