"""Two hosts of two devices each, as processes of this machine: the run of one process."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bert.commands.cli.cluster import parse_hosts
from bert.errors import UserError
from tests.conftest import NEXT, SMALL_RUN, STREAMED, translation_options
from tests.helpers import REPOSITORY, lines_of, state_of


def start(run: Path, corpus: Path, *options: str, devices: int = 2) -> subprocess.Popen:
    # Eight rows a batch over up to four devices; dropout on.
    return process_of("pretrain.py", run, f"--data.train={corpus}", *SMALL_RUN, *options, devices=devices)


def process_of(script: str, run: Path, *options: str, devices: int = 2) -> subprocess.Popen:
    command = [sys.executable, script, f"--output_dir={run}", *options]
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        command, cwd=REPOSITORY, env={**os.environ, "XLA_FLAGS": flags, "BERT_NUM_DEVICES": ""},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def start_hosts(run: Path, corpus: Path, *options: str) -> list[subprocess.Popen]:
    return [start(run, corpus, *place, *options) for place in places()]


def places() -> list[list[str]]:
    """The options of two hosts."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [[f"--coordinator=localhost:{port}", "--num_processes=2", f"--process_id={number}"] for number in range(2)]


def outputs(processes: list[subprocess.Popen], status: int = 0) -> list[str]:
    texts = [process.communicate(timeout=900)[0] for process in processes]
    assert [process.returncode for process in processes] == [status] * len(processes), "\n".join(texts)
    return texts


def assert_same_losses(run: Path, expected: Path, end: float = math.inf) -> None:
    """Up to a step: rounding, which differs, grows with the steps."""
    ours, theirs = ([line for line in lines_of(path) if line["step"] <= end] for path in (run, expected))
    assert [(line["step"], line["split"]) for line in ours] == [(line["step"], line["split"]) for line in theirs]
    for line, other in zip(ours, theirs, strict=True):
        del line["split"], other["split"]
        assert line == pytest.approx(other, rel=1e-5), line["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [pytest.param("2x2x1", id="copies"), pytest.param("1x4x1", id="parts", marks=pytest.mark.slice)]
)
@pytest.mark.parametrize("more", [[], NEXT], ids=["masked", "next"])
def test_two_hosts_give_the_losses_of_one_and_each_takes_over_from_the_other(
    more: list[str], mesh: str, corpus: Path, tmp_path: Path
) -> None:
    """Each host has all of the state, or a part of it that it writes."""
    one, two = tmp_path / "one", tmp_path / "two"
    outputs([start(one, corpus, *more, devices=1)])
    first, second = outputs(start_hosts(two, corpus, *more, f"--training.mesh={mesh}"))
    assert "4 x cpu on 2 hosts, mesh data {} x fsdp {} x tensor {}".format(*mesh.split("x")) in first
    assert "held-out text after 6 steps" in first
    assert "step" not in second  # one host speaks
    assert_same_losses(two, one)
    for ours, theirs in zip(leaves(two), leaves(one), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    # Gone on with by one process, without a mesh, from the first checkpoint: and the same again.
    for folder in (two / "checkpoints").iterdir():
        if folder.name == "6":
            subprocess.run(["rm", "-r", folder], check=True)
    outputs([start(two, corpus, *more, devices=1)])
    assert_same_losses(two, one)


@pytest.mark.slow
def test_two_hosts_share_a_stream_and_one_takes_over(corpus: Path, tmp_path: Path) -> None:
    """Each host has one of the readers."""
    one, two = tmp_path / "one", tmp_path / "two"
    streamed = [f"--data.eval={corpus}", *STREAMED]
    outputs([start(one, corpus, *streamed, devices=1)])
    outputs(start_hosts(two, corpus, *streamed))
    assert_same_losses(two, one)
    assert (two / "stream.json").read_text() == (one / "stream.json").read_text()
    subprocess.run(["rm", "-r", two / "checkpoints" / "6"], check=True)
    outputs([start(two, corpus, *streamed, devices=1)])
    assert_same_losses(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["4x1x1", "1x4x1"], ids=["copies", "parts"])
def test_a_killed_host_ends_the_run_and_both_go_on_from_the_checkpoint(mesh: str, corpus: Path, tmp_path: Path) -> None:
    long = ("--training.steps=60", "--training.checkpoint_every=10", "--training.eval_every=30")
    long += (f"--training.mesh={mesh}",)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    outputs(start_hosts(whole, corpus, *long))
    processes = start_hosts(killed, corpus, *long)
    for line in processes[0].stdout:
        if line.startswith("step ") and int(line.split()[1].split("/")[0]) >= 12:
            break
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    outputs(start_hosts(killed, corpus, *long))
    assert lines_of(killed) == lines_of(whole)
    for ours, theirs in zip(leaves(killed), leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)


PARTS = """
import sys
from pathlib import Path
import jax, numpy as np
coordinator, process, folder = sys.argv[1:]
jax.distributed.initialize(coordinator, 2, int(process))
from bert.parallel.backends import MeshParallel
from bert.runs.orbax_io import PARAMS, load_items, save_parts
mesh = MeshParallel((1, 4, 1))
state = {PARAMS: {"kernel": np.arange(64, dtype=np.float32).reshape(16, 4)}}
taken = mesh.take_state(mesh.put_state(state))
save_parts(Path(folder), taken, is_shared=True)
restored = load_items(Path(folder), (PARAMS,), mesh.host_sharding)
for tree in (taken, restored):
    kernel = tree[PARAMS]["kernel"]
    print("PARTS", kernel.sharding.memory_kind, sum(part.data.nbytes for part in kernel.addressable_shards))
whole = mesh.to_host(mesh.put_state(restored))
print("WHOLE", np.array_equal(whole[PARAMS]["kernel"], state[PARAMS]["kernel"]))
"""


@pytest.mark.slow
def test_a_host_takes_saves_and_reads_its_half_of_an_array(tmp_path: Path) -> None:
    coordinator = places()[0][0].removeprefix("--coordinator=")
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", PARTS, coordinator, str(process), str(tmp_path / "saved")],
            cwd=REPOSITORY, env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    for text in outputs(hosts):
        said = [line for line in text.splitlines() if line.startswith(("PARTS", "WHOLE"))]
        assert said == ["PARTS pinned_host 128", "PARTS pinned_host 128", "WHOLE True"]  # of 256 bytes


FAILS = """
import sys
import jax
from bert.commands.cli.cluster import ending_together
from bert.errors import UserError
from bert.parallel.multihost import sync_hosts
coordinator, process = sys.argv[1:]
jax.distributed.initialize(coordinator, 2, int(process))
with ending_together():
    if process == FAILING:
        raise UserError("the disk of\\nthis host is full")
    sync_hosts("never")
"""


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_host_ends_the_other_that_waits_for_it(failing: int) -> None:
    coordinator = places()[0][0].removeprefix("--coordinator=")
    program = FAILS.replace("FAILING", repr(str(failing)))
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", program, coordinator, str(process)],
            cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    texts = [host.communicate(timeout=120)[0] for host in hosts]
    assert "UserError: the disk of\nthis host is full" in texts[failing]
    assert texts[1 - failing].endswith(f"error: host {failing} has failed: the disk of this host is full\n")
    assert hosts[1 - failing].returncode == 2


WITHOUT_DATA = """
import runpy
import sys
from bert.data.pretraining.loader import PretrainingLoader
from bert.errors import UserError
batch = PretrainingLoader.batch

def fail(self, step):
    if step == 3:
        raise UserError("a part of data.train is gone")
    return batch(self, step)

PretrainingLoader.batch = fail
runpy.run_path("pretrain.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x2x1", "1x4x1"], ids=["copies", "parts"])
def test_data_that_one_host_cannot_read_is_the_error_of_both(mesh: str, corpus: Path, tmp_path: Path) -> None:
    """Soon: the parts of the other host, which this one would wait for to save the state, never come."""
    options = [f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN, f"--training.mesh={mesh}"]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "BERT_NUM_DEVICES": ""}
    hosts = [
        subprocess.Popen(
            [sys.executable, *program, *place, *options],
            cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for program, place in zip((["pretrain.py"], ["-c", WITHOUT_DATA]), places(), strict=True)
    ]  # fmt: skip
    texts = [host.communicate(timeout=240)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [2, 2], texts
    assert texts[0].endswith("error: host 1 has failed: a part of data.train is gone\n")
    assert "error: a part of data.train is gone\n" in texts[1]


@pytest.mark.slow
def test_a_notice_to_one_host_stops_both_after_the_same_step(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    long = ("--training.steps=100000", "--training.checkpoint_every=50000", "--training.eval_every=100000")
    processes = start_hosts(run, corpus, *long)
    for line in processes[0].stdout:
        if line.startswith("step "):
            break
    time.sleep(1)
    processes[1].terminate()
    first, _ = outputs(processes, 143)
    assert "interrupted and saved at step" in first
    step = int(first.split("saved at step ")[1].split(";")[0].replace(",", ""))
    assert (run / "checkpoints" / str(step)).is_dir()


@pytest.mark.slow
def test_a_mistake_ends_both_hosts_with_one_sentence(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a run")
    for text in outputs(start_hosts(tmp_path, corpus), 2):
        assert "is not empty and holds no run" in text
        assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["4x1x1", "1x4x1"], ids=["copies", "parts"])
def test_fine_tuning_on_two_hosts_gives_the_scores_and_files_of_one(
    mesh: str, pretrained: Path, sst2: Path, tmp_path: Path
) -> None:
    options = ["--config=sst2", f"--init={pretrained}", f"--data.dir={sst2}", "--data.max_length=32", "--patience=2"]
    options += ["--data.buckets=32", "--training.batch_size=8", "--num_seeds=2", "--training.log_every=1"]
    one, two = tmp_path / "one", tmp_path / "two"
    outputs([process_of("finetune.py", one, *options, devices=1)])
    of_two = f"--training.mesh={mesh}"
    first, second = outputs([process_of("finetune.py", two, *options, of_two, *place) for place in places()])
    assert "4 x cpu on 2 hosts" in first
    assert "step" not in second
    left_out = {"checkpoints", "tensorboard"}  # named by step and by time
    names = {path.relative_to(one) for path in one.rglob("*") if path.is_file() and not left_out & set(path.parts)}
    assert names >= {Path("seed-1/predictions/SST-2.tsv"), Path("seed-0/curves.png"), Path("results.json")}
    for name in names:
        assert (two / name).is_file(), name
    for seed in ("seed-0", "seed-1"):
        assert_same_losses(two / seed, one / seed)
        for file in (one / seed / "predictions").iterdir():
            assert (
                file.name == "dev.jsonl" or (two / seed / "predictions" / file.name).read_bytes() == file.read_bytes()
            )
    # Gone on with by one process: nothing is left to do.
    [again] = outputs([process_of("finetune.py", two, *options, devices=1)])
    assert "seed 0 has ended before" in again


@pytest.mark.slow
def test_translation_on_two_hosts_gives_the_losses_and_lines_of_one(tmp_path: Path) -> None:
    options = [*translation_options(tmp_path), "--training.epochs=8", "--training.log_every=10"]
    options += ["--training.average_checkpoints=2", "--optimizer.learning_rate=5e-3"]
    one, two = tmp_path / "one", tmp_path / "two"
    outputs([process_of("finetune.py", one, *options, devices=1)])
    first, _ = outputs([process_of("finetune.py", two, *options, *place) for place in places()])
    assert "4 x cpu on 2 hosts" in first
    assert_same_losses(two, one, end=250)
    for file in ("dev.txt", "test_a.txt"):
        assert (two / "predictions" / file).read_text() == (one / "predictions" / file).read_text()
    assert len(set((one / "predictions" / "dev.txt").read_text().splitlines())) > 1, "the model has learned something"


def test_how_hosts_are_named() -> None:
    assert parse_hosts({"coordinator": "a:1", "num_processes": "4", "process_id": "3"}) == ("a:1", 4, 3)
    assert parse_hosts({"coordinator": "auto"}) == (None, None, None)
    assert parse_hosts({}) is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--coordinator=a:1"], "--num_processes, --process_id"),
        (["--process_id=0", "--num_processes=2"], "--coordinator"),
        (["--coordinator=a:1", "--num_processes=2", "--process_id=2"], "they count from 0 to 1"),
        (["--coordinator=a:1", "--num_processes=two", "--process_id=0"], "--num_processes two is not a whole number"),
        (["--coordinator=a", "--num_processes=2", "--process_id=0"], "--coordinator a .*HOST:PORT"),
    ],
)
def test_hosts_that_cannot_meet_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_hosts(dict(word.removeprefix("--").split("=") for word in words))


def leaves(run: Path) -> list[np.ndarray]:
    import jax

    return jax.tree.leaves(state_of(run))
