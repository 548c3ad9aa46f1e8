"""Checkpoints of processes that are killed, have several devices, or are one of several hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bert.runs.checkpoint import Checkpointer
from tests.processes import free_port

KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from bert.runs import checkpoint, checkpoint_directory, checkpoint_storage, orbax_io

folder, place = Path(sys.argv[1]), sys.argv[2]
state = lambda value: {"params": {"w": np.full((64, 64), value, np.float32)}}
def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

saver = checkpoint.Checkpointer(folder, 1, print)
saver.save(2, state(2), wait=True)
if place == "in orbax":
    orbax_io.ocp.CompositeCheckpointHandler.finalize = kill
if place == "in the manifest":
    checkpoint_storage.write_manifest = kill
rename = os.replace
# The second one is between, as saving step 2 again first renames the old one.
if place in ("before the rename", "between the renames"):
    checkpoint_directory.os.replace = lambda a, b: kill() if str(a).endswith(".saving") else rename(a, b)
if place == "in the deletion":
    checkpoint_directory.shutil.rmtree = kill
if "reduction" in place:
    saver.set_best(2)
if place == "in the reduction":
    checkpoint_directory.write_partial_manifest = kill
if place == "between the reduction's renames":
    checkpoint_directory.os.replace = lambda a, b: kill() if str(a).endswith("2.saving") else rename(a, b)
if place == "in the reduction's deletion":
    checkpoint_directory.remove = kill
saver.save(2 if place == "between the renames" else 3, state(3), wait=True)
"""


def run_child(code: str, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, **pipes)


def killed(folder: Path, place: str) -> Path:
    """Returns a folder of checkpoints whose process was killed at a place."""
    with run_child(KILLED, str(folder), place) as child:
        stderr = child.communicate()[1]
    assert child.returncode == -signal.SIGKILL, stderr.decode()
    return folder


PLACES = {"in orbax": 2, "in the manifest": 2, "before the rename": 2, "between the renames": 2, "in the deletion": 3}
"""Places of a kill, and the newest complete step after it."""


@pytest.mark.medium
@pytest.mark.parametrize(("place", "good"), PLACES.items())
def test_a_kill_leaves_a_good_checkpoint(tmp_path, place, good):
    folder, messages = killed(tmp_path / "checkpoints", place), []
    with Checkpointer(folder, 1, messages.append) as checkpointer:
        step, state = checkpointer.restore()
        assert (step, state["params"]["w"][0, 0]) == (good, good)
        assert messages == []
        checkpointer.save(4, state, wait=True)
    assert os.listdir(folder) == ["4"]


@pytest.mark.medium
@pytest.mark.parametrize(
    "place",
    [
        pytest.param("in the reduction", marks=pytest.mark.slow),
        "between the reduction's renames",
        pytest.param("in the reduction's deletion", marks=pytest.mark.slow),
    ],
)
def test_a_kill_while_the_best_is_reduced_to_its_parameters_costs_neither_it_nor_the_newest(tmp_path, place):
    folder, messages = killed(tmp_path / "checkpoints", place), []
    with Checkpointer(folder, 1, messages.append) as checkpointer:
        assert checkpointer.restore()[0] == 3
        for _ in range(2):  # as it was left, and after the next save
            step, params = checkpointer.restore_best_params()
            assert (step, params["w"][0, 0]) == (2, 2)
            checkpointer.save(4, {"params": {"w": np.ones(3)}}, wait=True)
        assert messages == []
    assert sorted(os.listdir(folder)) == ["2", "4", "PROTECTED"]
    assert not list(folder.glob("2/rest"))


SAVING_ON_AND_ON = """
import sys
from pathlib import Path
import numpy as np
from bert.runs.checkpoint import Checkpointer

saver = Checkpointer(Path(sys.argv[1]), 2, print)
restored = saver.restore()
step = restored[0] if restored else 0
while True:
    step += 1
    saver.save(step, {"params": {str(i): np.full((300, 300), step + i) for i in range(20)}})
    sys.stderr.write(".") and sys.stderr.flush()
"""


@pytest.mark.slow
def test_kills_at_random_moments_never_cost_the_last_good_checkpoint(tmp_path):
    folder, messages, newest = tmp_path / "checkpoints", [], 0
    for delay in np.random.default_rng(0).uniform(0, 0.4, 12):
        with run_child(SAVING_ON_AND_ON, str(folder)) as child:
            assert child.stderr.read(3) == b"..."  # the third save begins when the second has ended
            time.sleep(delay)  # a random moment is the point here
            child.kill()
        with Checkpointer(folder, 2, messages.append) as checkpointer:
            step, state = checkpointer.restore()
            assert step >= newest + 2
            assert all(np.all(array == step + int(name)) for name, array in state["params"].items())
            newest = step
    assert messages == []


SEVERAL_DEVICES = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["BERT_NUM_DEVICES"] = ""
from pathlib import Path
import jax, numpy as np
from bert.runs.checkpoint import Checkpointer

assert jax.device_count() == 4
saver = Checkpointer(Path(sys.argv[1]), 2, print)
assert type(saver.restore_params()[1]["w"]) is np.ndarray
saver.save(9, saver.restore()[1], wait=True)
"""


@pytest.mark.medium
def test_the_number_of_devices_does_not_matter(tmp_path):
    folder, weights = tmp_path / "checkpoints", np.random.default_rng(0).random((5, 3))
    with Checkpointer(folder, 2, print) as checkpointer:
        checkpointer.save(1, {"params": {"w": weights}})
    with run_child(SEVERAL_DEVICES, str(folder)) as child:
        stderr = child.communicate()[1]
    assert (child.returncode, stderr.decode()) == (0, "")
    with Checkpointer(folder, 2, print) as checkpointer:
        step, params = checkpointer.restore_params()
    assert (step, params["w"].tobytes()) == (9, weights.tobytes())


ONE_OF_TWO_HOSTS = """
import sys
from pathlib import Path
import jax, numpy as np

folder, host, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", 2, host)
from bert.runs.checkpoint import Checkpointer

assert jax.process_count() == 2
with Checkpointer(folder, 2, print) as saver:
    if host == 0:
        saver.save(1, {"params": {"w": np.ones((3, 3))}})
print("done", flush=True)
sys.stdin.read()
with Checkpointer(folder, 2, print) as saver:
    assert saver.restore()[1]["params"]["w"].sum() == 9
"""


@pytest.mark.slow
def test_one_host_saves_without_waiting_for_the_others(tmp_path):
    port = str(free_port())
    hosts = [run_child(ONE_OF_TWO_HOSTS, str(tmp_path / "checkpoints"), host, port) for host in ("0", "1")]
    for host in hosts:
        assert host.stdout.readline() == b"done\n"
    for host in hosts:
        host.stdin.close()  # now the first one's checkpoint is there for both
    assert [host.wait(60) for host in hosts] == [0, 0]
    for host in hosts:
        host.stdout.close()
        host.stderr.close()
