"""Output and exit status of a program."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bert.commands.cli.arguments import run_command, run_program
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


@pytest.mark.medium
def test_ctrl_c_that_the_garbage_collector_drops_is_raised_again(capsys):
    class Dropping:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def main(argv):
        made = Dropping()
        del made
        time.sleep(4)
        return 0

    assert run_program(main)([]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_modules_are_imported_ends_the_program(tmp_path: Path):
    (tmp_path / "slow.py").write_text("import signal, time; signal.raise_signal(signal.SIGINT); time.sleep(60)")
    code = """
import sys
from bert.commands.cli.arguments import run_program
def main(argv):
    try:
        import slow
    except KeyboardInterrupt:  # as extension modules do
        raise ImportError from None
sys.exit(run_program(main)([]))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=30)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_other_errors_keep_their_trace():
    def broken(argv):
        raise ValueError("a bug of ours")

    with pytest.raises(ValueError, match="a bug of ours"):
        run_command(broken)([])


@pytest.mark.skipif(os.name != "posix", reason="shell pipes")
def test_closed_pipe_is_quiet():
    code = """
import sys
from bert.commands.cli.arguments import run_command, run_program
@run_program
@run_command
def main(argv):
    for _ in range(100_000):
        print("x" * 80)
    return 0
sys.exit(main([]))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141
