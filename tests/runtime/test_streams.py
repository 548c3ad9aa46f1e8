"""Standard streams that the shell has closed, and names that are not UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READ = """
import sys
from bert.runtime.process import is_stdout_closed, prepare_streams
prepare_streams()
print("for people", file=sys.stderr)
print("an answer", ascii(sys.stdin.read()), is_stdout_closed())
"""


def run(redirection: str, program: str = READ, **variables: str) -> tuple[str, str]:
    """What a program writes to standard output and standard error; the shell's redirections come last."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, program]
    ended = subprocess.run(command, input=b"typed", capture_output=True, check=True, env=environment, cwd=ROOT)
    return ended.stdout.decode(), ended.stderr.decode()


@pytest.mark.parametrize(
    ("redirection", "printed", "said"),
    [
        ("", "an answer 'typed' False\n", "for people\n"),
        ("<&-", "an answer '' False\n", "for people\n"),
        (">&-", "", "for people\n"),
        ("2>&-", "an answer 'typed' False\n", ""),
        ("<&- >&- 2>&-", "", ""),
    ],
)
def test_closed_streams_are_empty_and_mix_nothing(redirection: str, printed: str, said: str) -> None:
    assert run(redirection) == (printed, said)


def test_names_that_are_not_utf_8_are_printed() -> None:
    program = "from bert.runtime.process import prepare_streams; prepare_streams(); print('caf\\udce9')"
    assert run("", program, PYTHONIOENCODING="utf-8:strict")[0] == "caf\\udce9\n"


@pytest.mark.medium
def test_answers_without_an_output_are_one_sentence(tmp_path: Path) -> None:
    program = """
import contextlib, sys
from bert.commands.cli.answers import open_output
from bert.errors import UserError
from bert.runtime.process import prepare_streams
prepare_streams()
try:
    with open_output(None):
        pass
except UserError as error:
    print(error, file=sys.stderr)
"""
    assert "standard output is closed" in run(">&-", program)[1]
