"""Answers to a stream of inputs, as lines of JSON; an input without an answer ends none of the others."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from bert.errors import UserError
from bert.files import atomic_write
from bert.inference.new_inputs import Input
from bert.runtime.streams import is_stdout_closed
from bert.urls import exists, is_url, writable


def write_answers(
    source: str,
    chunks: Iterator[list[Input]],
    answer: Callable[[list[Input]], list[Any]],
    lines_of: Callable[[Input, Any], Iterable[dict[str, Any]]],
    output: str | None,
) -> None:
    """Writes the lines of each input, or one with its error.

    Args:
        source: file of the inputs, - for standard input, for messages.
        chunks: the inputs, of which a list is answered at once.
        answer: answers to some inputs; it raises UserError if one of them does not fit.
        lines_of: what is written of an answer.
        output: file that appears whole or not at all; None for standard output.

    Raises:
        UserError: at the end, if some inputs have no answer.
    """
    count, failed, first = 0, 0, ""
    with open_output(output) as written:
        for inputs in chunks:
            for given, found in zip(inputs, _answers_or_errors(inputs, answer), strict=True):
                count += 1
                if isinstance(found, str):
                    failed, first = failed + 1, first or f"line {given.line}: {found}"
                    lines: Iterable[dict[str, Any]] = [given._replace(error=found).failed()]
                else:
                    lines = lines_of(given, found)
                for line in lines:
                    written.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            written.flush()
    if failed:
        name = "standard input" if source == "-" else source
        raise UserError(f"{name}: {failed} of {count} inputs have no answer, the first on {first}")


def _answers_or_errors(inputs: list[Input], answer: Callable[[list[Input]], list[Any]]) -> list[Any]:
    """An answer for each input, or the error message for it: if one does not fit, each is answered by itself."""
    answers: list[Any] = [given.error for given in inputs]
    indices = [i for i, given in enumerate(inputs) if given.error is None]
    try:
        found = answer([inputs[i] for i in indices])
    except UserError:
        found = [_answer_or_error(inputs[i], answer) for i in indices]
    for i, one in zip(indices, found, strict=True):
        answers[i] = one
    return answers


def _answer_or_error(given: Input, answer: Callable[[list[Input]], list[Any]]) -> Any:
    try:
        return answer([given])[0]
    except UserError as error:
        return str(error)


def check_output(name: str | None) -> None:
    """Raises UserError, before anything is computed, for a file that is there or whose folder is not; None is none."""
    if name is None:
        return
    if exists(name):
        raise UserError(f"{name} exists already: name another --output or remove it")
    if not is_url(name) and not (folder := Path(name).parent).is_dir():
        raise UserError(f"{folder} is not a folder: make it, or name another --output")


@contextlib.contextmanager
def open_output(name: str | None) -> Iterator[IO[bytes]]:
    """Standard output, or a file that appears whole or not at all."""
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
