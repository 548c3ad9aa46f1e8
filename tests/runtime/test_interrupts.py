"""SIGINT, SIGTERM and notices of preemption, with processes and real signals."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bert.runtime.interrupts import EvaluationInterrupted, Interrupted, InterruptHandler

REPOSITORY = Path(__file__).parents[2]


def test_the_first_signal_is_a_flag_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with InterruptHandler() as stop:
        stop.raise_if_requested()
        assert not stop.should_stop(1)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal_number == signal.SIGTERM
        assert stop.should_stop(2)
        with pytest.raises(EvaluationInterrupted):
            stop.raise_if_requested()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_a_closed_terminal_stops_a_run_except_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup themselves
    try:
        with InterruptHandler() as stop:
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(Interrupted) as stopped:
                stop.raise_if_signalled(3)
        assert stopped.value.status == 129
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with InterruptHandler() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.should_stop(1)
    finally:
        signal.signal(signal.SIGHUP, before)


SAVING = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from bert.runs import checkpoint, checkpoint_storage
from bert.runtime.interrupts import InterruptHandler

checkpoint_storage.write_manifest = lambda *_: time.sleep(60)  # a save that takes its time
with InterruptHandler(), checkpoint.Checkpointer(Path(sys.argv[1]), 2, print) as saver:
    saver.save(1, {"params": {"w": np.ones(3)}})
    os.kill(os.getpid(), signal.SIGINT)
    print("first", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


def run_child(code: str, *arguments: str, **environment: str) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY), **environment}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, text=True, **pipes)


@pytest.mark.medium
def test_a_second_ctrl_c_does_not_wait_for_the_save(tmp_path: Path) -> None:
    with run_child(SAVING, str(tmp_path)) as child:
        out, error = child.communicate(timeout=50)  # the save alone takes 60 s
    assert (child.returncode, out) == (130, "first\n")
    assert error.strip() == "ended at once; what had been saved before is still there"


PREEMPTED = """
import sys
import jax

jax.distributed.initialize("localhost:" + sys.argv[1], 1, 0)
from bert.commands.pretrain import main

status = main(sys.argv[2:])
jax.distributed.shutdown()
sys.exit(status)
"""


@pytest.mark.slow
def test_a_notice_of_preemption_saves_and_the_run_goes_on_elsewhere(corpus: Path, tmp_path: Path) -> None:
    """SIGTERM is the notice that JAX's preemption service listens for where hosts work together: here it is one."""
    from bert.commands.pretrain import main
    from tests.conftest import SMALL_RUN
    from tests.helpers import lines_of

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    run = tmp_path / "run"
    arguments = [f"--data.train={corpus}", *SMALL_RUN, "--training.steps=3000", "--training.checkpoint_every=3000"]
    arguments += ["--training.eval_every=1500", "--training.log_every=50", f"--output_dir={run}"]
    with run_child(PREEMPTED, port, *arguments, XLA_FLAGS="", PYTHONUNBUFFERED="1") as child:
        output = ""
        for line in child.stdout:
            output += line
            if line.startswith("step "):
                child.send_signal(signal.SIGTERM)
                first = int(line.split()[1].partition("/")[0])
                break
        output += child.communicate(timeout=120)[0]
    assert child.returncode == 143, output
    assert "interrupted and saved at step" in output
    saved = max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    assert first <= saved < 3000
    last = lines_of(run)[-1]["step"]
    assert last <= saved
    short = ["--training.eval_every=3000", "--training.log_every=3000"]
    assert main([*arguments, *short]) == 0
