"""Runs in a bucket of a real S3 server that fails one request in ten: kills, empty disks, hosts with a disk each."""

from __future__ import annotations

import contextlib
import functools
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

import jax
import numpy as np
import pytest

from bert.runs.checkpoint_directory import verify_manifest
from tests.conftest import SMALL_RUN
from tests.helpers import REPOSITORY, assert_same_losses, assert_same_sweep, lines_of, results_of, state_of
from tests.processes import finish, host_options, launch, read_to_step

pytestmark = pytest.mark.slow

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class Server:
    """A running server with an empty bucket.

    Attributes:
        environment: of processes that use it.
        store: its file system.
        log: file with its requests, one a line.
    """

    environment: dict[str, str]
    store: Any
    log: Path

    def requests(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    s3fs = pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    pytest.importorskip("moto.server", reason="moto is not installed")
    log = tmp_path / "requests.log"
    command = [sys.executable, str(REPOSITORY / "tests" / "s3_server.py"), str(log)]
    with Popen(command, stdout=PIPE, stderr=DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": process.stdout.readline().strip()}
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            store = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
            store.mkdir("bucket")
            yield Server(environment, store, log)
        finally:
            process.kill()


def start(cache: Path, run: str, corpus: Path, *options: str) -> Popen[str]:
    """Starts a run on a machine, whose disk is a folder."""
    arguments = [f"--output_dir={run}", f"--data.train={corpus}", *SMALL_RUN, *options]
    return launch("pretrain.py", *arguments, XDG_CACHE_HOME=str(cache))


def manifests(requests: list[str]) -> int:
    return sum(bool(re.fullmatch(r"PUT .*/checkpoints/\d+/MANIFEST.json", line)) for line in requests)


def kill_in_an_upload(server: Server, process: Popen[str], complete: int, delay: float) -> None:
    """Kills a run that has uploaded some more checkpoints, after it has begun with the next one."""
    seen = len(server.requests())
    while process.poll() is None:
        new = server.requests()[seen:]
        last = max((number for number, line in enumerate(new) if manifests([line])), default=-1)
        if manifests(new) >= complete and any("PUT" in line and "/checkpoints/" in line for line in new[last + 1 :]):
            break
        time.sleep(0.005)
    time.sleep(delay)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"


def half_uploaded(server: Server) -> bool:
    names = server.store.find("bucket/run")
    folders = {match[0] for name in names if (match := re.match(r".*/checkpoints/\d+/", name))}
    return any(f"{folder}MANIFEST.json" not in names for folder in folders)


def test_a_run_killed_twenty_times_in_uploads_equals_a_local_one(server: Server, corpus: Path, tmp_path: Path) -> None:
    options = ["--training.steps=160", "--training.checkpoint_every=4", "--training.eval_every=20"]
    local, cache, draw = tmp_path / "run", tmp_path / "cache", random.Random(0)
    finish(start(cache, str(local), corpus, *options))
    halves = 0
    for number in range(20):
        process = start(cache, "s3://bucket/run", corpus, *options)
        kill_in_an_upload(server, process, complete=number % 2 + 1, delay=draw.uniform(0, 0.1))
        halves += half_uploaded(server)
        if number % 3 == 0:  # an empty disk, except for the examples
            shutil.rmtree(next(path for path in (cache / "bert-jax" / "runs").iterdir() if path.is_dir()))
    print(f"{halves} of 20 kills left half a checkpoint")
    assert halves >= 5
    [output] = finish(start(cache, "s3://bucket/run", corpus, *options))
    assert "resumes at step" in output
    copy = tmp_path / "copy"
    server.store.get("bucket/run", str(copy), recursive=True)
    assert lines_of(copy) == lines_of(local)
    jax.tree.map(np.testing.assert_array_equal, state_of(copy), state_of(local))
    of_copy, of_local = (results_of(run) for run in (copy, local))
    assert {**of_copy, "seconds": 0, "timing": 0} == {**of_local, "seconds": 0, "timing": 0}
    assert {path.name for path in copy.iterdir()} == {path.name for path in local.iterdir()} - {".lock"}


def test_a_second_machine_waits_for_the_lease_and_resumes(server: Server, corpus: Path, tmp_path: Path) -> None:
    options = ["--training.steps=40", "--training.checkpoint_every=4"]
    first = start(tmp_path / "one", "s3://bucket/run", corpus, *options, "--training.steps=4000")
    while not manifests(server.requests()):
        time.sleep(0.05)
    refused = start(tmp_path / "two", "s3://bucket/run", corpus, *options, "--training.steps=4000")
    assert f"s3://bucket/run is in use by process {first.pid} on" in finish(refused, status=2)[0]
    first.kill()
    first.communicate()
    second = start(tmp_path / "two", "s3://bucket/run", corpus, "--training.steps=4000", *options[1:])
    output = []
    assert second.stdout is not None
    for line in second.stdout:
        output.append(line)
        if "resumes at step" in line:
            break
    second.kill()
    second.communicate()
    assert any("waiting up to 60 seconds" in line for line in output)
    assert "resumes at step" in output[-1]


def test_a_sweep_is_killed_and_another_machine_ends_it_as_a_local_one(
    server: Server, corpus: Path, tmp_path: Path
) -> None:
    """A second machine fails while the first one runs, and later resumes in the trial in which the first was killed."""
    options = ["--training.steps=80", "--training.checkpoint_every=4", "--sweep=optimizer.weight_decay=0,0.1"]
    local, url, copy = tmp_path / "sweep", "s3://bucket/sweep", tmp_path / "copy"
    finish(start(tmp_path / "cache", str(local), corpus, *options))
    first = start(tmp_path / "one", url, corpus, *options)
    while not manifests(server.requests()):
        time.sleep(0.05)
    [refused] = finish(start(tmp_path / "two", url, corpus, *options), status=2)
    assert f"{url} is in use by process {first.pid} on" in refused
    while not any("/bucket/sweep/weight_decay=0.1/checkpoints/" in line for line in server.requests()):
        time.sleep(0.05)
    kill_in_an_upload(server, first, complete=2, delay=0.05)
    [output] = finish(start(tmp_path / "two", url, corpus, *options))
    assert "waiting up to 60 seconds" in output
    assert f"{url}/weight_decay=0.0 has ended before" in output and "resumes at step" in output
    assert f"all trials: {url}/sweep.json" in output
    server.store.get("bucket/sweep", str(copy), recursive=True)
    assert_same_sweep(copy, local)
    assert {path.name for path in copy.iterdir()} == {path.name for path in local.iterdir()} - {".lock"}


EXAMPLES = ["-m", "bert", "examples", "--tokenizer.vocab_size=200", "--data.sequence_length=32"]
EXAMPLES += ["--data.input_format=nsp", "--data.dupe_factor=6", "--data.num_workers=1"]


def build(disk: Path, cache_dir: str, corpus: Path) -> Popen[str]:
    options = [f"--data.train={corpus}", f"--data.cache_dir={cache_dir}"]
    return launch(*EXAMPLES, *options, XDG_CACHE_HOME=str(disk))


def uploads(server: Server) -> int:
    return sum(line.startswith("PUT /bucket/examples/") for line in server.requests())


def test_examples_whose_upload_is_killed_ten_times_are_those_of_a_local_cache(
    server: Server, corpus: Path, tmp_path: Path
) -> None:
    """The next process, on the same machine or on one with an empty disk, completes what was copied."""
    local, draw = tmp_path / "local", random.Random(0)
    finish(build(tmp_path / "disk", str(local), corpus))
    names = [path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()]
    of_sets = [name for name in names if not name.endswith(".lock") and name != "fingerprints.json"]
    expected = {name: (local / name).read_bytes() for name in of_sets}
    halves = 0
    for number in range(10):
        seen, last = uploads(server), draw.randrange(1, len(expected))
        killed = build(tmp_path / f"disk{number}", "s3://bucket/examples", corpus)
        while uploads(server) - seen < last and killed.poll() is None:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.03))
        killed.kill()
        killed.communicate()
        present = {name.removeprefix("bucket/examples/") for name in server.store.find("bucket/examples")}
        copied = any(name.endswith("/index.json") for name in present)
        halves += not copied and bool(present)
        assert not copied or present == expected.keys()
        same_machine = number % 2 == 0
        [output] = finish(
            build(tmp_path / f"disk{number}{'' if same_machine else '-'}", "s3://bucket/examples", corpus)
        )
        if not same_machine:
            assert ("building examples" in output) == (not copied)
        copy = {name.removeprefix("bucket/examples/"): server.store.cat(name) for name in server.store.find("bucket")}
        assert copy == expected
        server.store.rm("bucket/examples", recursive=True)
    print(f"{halves} of 10 kills left a part of the files")
    assert halves >= 5


def start_hosts(disks: Path, count: int, run: str, corpus: Path, *options: str) -> list[Popen[str]]:
    """Hosts with an empty disk each."""
    return [
        start(disks / f"host{number}", run, corpus, *options, *place)
        for number, place in enumerate(host_options(count))
    ]


def assert_same_as_local(server: Server, run: str, copy: Path, local: Path) -> None:
    server.store.get(run, str(copy), recursive=True)
    assert_same_losses(copy, local)


@pytest.mark.parametrize("mesh", ["2x1x1", "1x2x1"], ids=["copies", "parts"])
def test_two_hosts_without_a_shared_disk_train_as_one(server: Server, corpus: Path, tmp_path: Path, mesh: str) -> None:
    options = ["--training.steps=12", "--training.checkpoint_every=4"]
    one = tmp_path / "run"
    finish(start(tmp_path / "cache", str(one), corpus, *options))
    finish(*start_hosts(tmp_path, 2, "s3://bucket/run", corpus, *options, f"--training.mesh={mesh}"))
    copy = tmp_path / "copy"
    assert_same_as_local(server, "bucket/run", copy, one)
    assert verify_manifest(copy / "checkpoints" / "12") == []
    parts = list(copy.glob("checkpoints/12/params/bert.encoder.layer_0.attention.query.kernel/c/*/*"))
    assert len(parts) == (2 if mesh == "1x2x1" else 0)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, state_of(copy), state_of(one))


def test_a_full_disk_of_one_host_ends_both_and_they_resume(server: Server, corpus: Path, tmp_path: Path) -> None:
    """Simulates a full disk by limiting the file size."""
    options = ["--training.steps=12", "--training.checkpoint_every=4", "--data.cache_dir=s3://bucket/examples"]
    options += ["--model.hidden_size=64", "--model.intermediate_size=64"]
    one, run = tmp_path / "run", "s3://bucket/run"
    finish(start(tmp_path / "cache", str(one), corpus, *options))
    options.append("--training.mesh=1x2x1")
    hosts = start_hosts(tmp_path, 2, run, corpus, *options)
    read_to_step(hosts[0], 6)
    resource.prlimit(hosts[1].pid, resource.RLIMIT_FSIZE, (4_000, 4_000))
    first, second = finish(*hosts, status=2)
    sentence = "the checkpoint of step 8 could not be saved in "
    assert f"error: {sentence}" in second and "File too large" in second
    assert f"error: host 1 has failed: {sentence}" in first
    output, _ = finish(*start_hosts(tmp_path, 2, run, corpus, *options))
    assert "resumes at step 4" in output
    assert_same_as_local(server, "bucket/run", tmp_path / "copy", one)


@contextlib.contextmanager
def slowed(process: Popen[str]) -> Iterator[None]:
    """Stops a process again and again, for most of the time."""
    ended = threading.Event()

    def slow() -> None:
        while not ended.wait(0.1) and process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            ended.wait(0.4)
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("mesh", ["{}x1x1", "1x{}x1"], ids=["copies", "parts"])
def test_four_hosts_are_stopped_and_killed_and_two_or_eight_complete_the_run(
    server: Server, corpus: Path, tmp_path: Path, mesh: str
) -> None:
    """One host is slow, one gets SIGTERM and one is killed. All share one bucket and start with empty disks.

    Each host has a copy of the state, or its shard of it.
    """
    options = ["--model.num_hidden_layers=2", "--model.hidden_size=32", "--training.steps=24"]
    options += ["--training.checkpoint_every=4", "--training.eval_every=8", "--training.log_every=1"]
    one, run = tmp_path / "run", "s3://bucket/run"
    finish(start(tmp_path / "one", str(one), corpus, *options))
    options += ["--data.cache_dir=s3://bucket/examples"]

    of_four = f"--training.mesh={mesh.format(4)}"
    stopped = start_hosts(tmp_path / "stopped", 4, run, corpus, *options, of_four)
    read_to_step(stopped[0], 2)
    with slowed(stopped[3]):
        read_to_step(stopped[0], 6)
        stopped[1].terminate()
        output, *_ = finish(*stopped, status=143)
    assert "interrupted and saved at step" in output
    step = int(output.split("saved at step ")[1].split(";")[0])

    killed = start_hosts(tmp_path / "killed", 4, run, corpus, *options, of_four)
    assert f"resumes at step {step}" in read_to_step(killed[0], step + 2)
    with slowed(killed[3]):
        read_to_step(killed[0], step + 5)
        killed[2].kill()
        for process in killed:  # as the launcher does if they are still waiting for it
            with contextlib.suppress(TimeoutExpired):
                process.wait(timeout=20)
            process.kill()
            process.communicate()
            assert process.returncode != 0

    server.store.copy("bucket/run", "bucket/run8", recursive=True)
    for count, name in ((2, "run"), (8, "run8")):
        of_count = f"--training.mesh={mesh.format(count)}"
        hosts = start_hosts(tmp_path / name, count, f"s3://bucket/{name}", corpus, *options, of_count)
        output, *_ = finish(*hosts)
        assert f"{count} x cpu on {count} hosts" in output
        assert "resumes at step" in output
        assert "building examples" not in output
        assert_same_as_local(server, f"bucket/{name}", tmp_path / f"copy{count}", one)


def test_wrong_credentials_are_one_sentence(server: Server, corpus: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:1")
    [output] = finish(start(tmp_path / "cache", "s3://bucket/run", corpus), status=2)
    assert "s3://bucket/run cannot be used" in output
    assert "Traceback" not in output
