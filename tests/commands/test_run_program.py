"""What a program prints and its exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bert.commands.arguments import run_command, run_program
from bert.errors import UserError


def test_user_error_is_one_line_and_status_2(capsys):
    @run_command
    def main(argv):
        raise UserError(f"{argv[0]}: two\nlines")

    with pytest.raises(UserError, match=r"^a: two\nlines$"):
        main(["a"])
    assert capsys.readouterr() == ("", "")
    assert run_program(main)(["a"]) == 2
    assert capsys.readouterr() == ("", "error: a: two lines\n")


def test_interrupt_and_success_have_their_status(capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    assert run_program(run_command(interrupt))([]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert run_program(run_command(lambda argv: len(argv)))(["a"]) == 1


def test_other_errors_keep_their_trace():
    def broken(argv):
        raise ValueError("a bug of ours")

    with pytest.raises(ValueError, match="a bug of ours"):
        run_command(broken)([])


@pytest.mark.skipif(os.name != "posix", reason="shell pipes")
def test_closed_pipe_is_quiet():
    code = """
import sys
from bert.commands.arguments import run_command, run_program
@run_program
@run_command
def main(argv):
    for _ in range(100_000):
        print("x" * 80)
    return 0
sys.exit(main([]))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141
