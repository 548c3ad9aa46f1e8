"""Two hosts of two devices each, as processes of this machine: the run of one process."""

import json
import shutil
import time
from pathlib import Path
from subprocess import Popen

import jax
import numpy as np
import pytest

from tests.conftest import NEXT, SMALL_RUN, STREAMED, translation_options
from tests.helpers import assert_same_losses, lines_of, state_of, words
from tests.processes import finish, free_port, host_options, launch, read_to_step

COPIES_AND_PARTS = pytest.mark.parametrize("mesh", ["4x1x1", "1x4x1"], ids=["copies", "parts"])
"""Each host has all of the state, or a part of it."""


def pretraining(run: Path, corpus: Path, *options: str) -> list[str]:
    """Eight rows a batch over up to four devices; dropout on."""
    return ["pretrain.py", f"--output_dir={run}", f"--data.train={corpus}", *SMALL_RUN, *options]


def start_hosts(arguments: list[str]) -> list[Popen[str]]:
    return [launch(*arguments, *place, devices=2) for place in host_options(2)]


def start_programs(*programs: str, more: tuple[object, ...] = ()) -> list[Popen[str]]:
    """Starts two hosts with code that reads the address, the number of the host and more from its arguments."""
    address = f"localhost:{free_port()}"
    return [
        launch("-c", program, address, str(number), *map(str, more), devices=2)
        for number, program in enumerate(programs)
    ]


def leaves(run: Path) -> list[np.ndarray]:
    return jax.tree.leaves(state_of(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "mesh"),
    [
        pytest.param([], "1x4x1", id="masked-parts", marks=pytest.mark.slice),
        pytest.param([], "2x2x1", id="masked-copies"),
        pytest.param(NEXT, "1x4x1", id="next-parts"),
        pytest.param(NEXT, "2x2x1", id="next-copies"),
    ],
)
def test_two_hosts_give_the_losses_of_one_and_each_takes_over_from_the_other(
    more: list[str], mesh: str, corpus: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    finish(launch(*pretraining(one, corpus, *more)))
    first, second = finish(*start_hosts(pretraining(two, corpus, *more, f"--training.mesh={mesh}")))
    assert "4 x cpu on 2 hosts, mesh data {} x fsdp {} x tensor {}".format(*mesh.split("x")) in first
    assert "after 6 steps" in first
    assert "step" not in second  # one host logs
    assert_same_losses(two, one)
    for of_two, of_one in zip(leaves(two), leaves(one), strict=True):
        np.testing.assert_allclose(of_two, of_one, rtol=1e-3, atol=1e-5)
    # One process, without a mesh, continues from the first checkpoint.
    shutil.rmtree(two / "checkpoints" / "6")
    finish(launch(*pretraining(two, corpus, *more)))
    assert_same_losses(two, one)


@pytest.mark.slow
def test_two_hosts_share_a_stream_and_one_takes_over(corpus: Path, tmp_path: Path) -> None:
    """Each host has one of the readers."""
    one, two = tmp_path / "one", tmp_path / "two"
    streamed = [f"--data.eval={corpus}", *STREAMED]
    finish(launch(*pretraining(one, corpus, *streamed)))
    finish(*start_hosts(pretraining(two, corpus, *streamed)))
    assert_same_losses(two, one)
    assert (two / "stream.json").read_text() == (one / "stream.json").read_text()
    shutil.rmtree(two / "checkpoints" / "6")
    finish(launch(*pretraining(two, corpus, *streamed)))
    assert_same_losses(two, one)


@pytest.mark.slow
@COPIES_AND_PARTS
def test_a_killed_host_ends_the_run_and_both_go_on_from_the_checkpoint(mesh: str, corpus: Path, tmp_path: Path) -> None:
    long = ["--training.steps=60", "--training.checkpoint_every=10", "--training.eval_every=30"]
    long.append(f"--training.mesh={mesh}")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(*start_hosts(pretraining(whole, corpus, *long)))
    hosts = start_hosts(pretraining(killed, corpus, *long))
    read_to_step(hosts[0], 12)
    for host in hosts:
        host.kill()
        host.communicate()
    finish(*start_hosts(pretraining(killed, corpus, *long)))
    assert lines_of(killed) == lines_of(whole)
    for of_killed, of_whole in zip(leaves(killed), leaves(whole), strict=True):
        np.testing.assert_array_equal(of_killed, of_whole)


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
    for text in finish(*start_programs(PARTS, PARTS, more=(tmp_path / "saved",))):
        printed = [line for line in text.splitlines() if line.startswith(("PARTS", "WHOLE"))]
        assert printed == ["PARTS pinned_host 128", "PARTS pinned_host 128", "WHOLE True"]  # of 256 bytes


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
    program = FAILS.replace("FAILING", repr(str(failing)))
    hosts = start_programs(program, program)
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
    script, *options = pretraining(tmp_path / "run", corpus, f"--training.mesh={mesh}")
    hosts = [
        launch(*program, *place, *options, devices=2)
        for program, place in zip(([script], ["-c", WITHOUT_DATA]), host_options(2), strict=True)
    ]
    first, second = finish(*hosts, status=2, timeout=240)
    assert first.endswith("error: host 1 has failed: a part of data.train is gone\n")
    assert "data.train is gone" in second


@pytest.mark.slow
def test_a_notice_to_one_host_stops_both_after_the_same_step(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    long = ("--training.steps=100000", "--training.checkpoint_every=50000", "--training.eval_every=100000")
    hosts = start_hosts(pretraining(run, corpus, *long))
    read_to_step(hosts[0], 0)
    time.sleep(1)
    hosts[1].terminate()
    first, _ = finish(*hosts, status=143)
    step = int(first.split("interrupted and saved at step ")[1].split(";")[0].replace(",", ""))
    assert (run / "checkpoints" / str(step)).is_dir()


@pytest.mark.slow
def test_a_mistake_ends_both_hosts_with_one_message(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a run")
    for text in finish(*start_hosts(pretraining(tmp_path, corpus)), status=2):
        assert f"{tmp_path} is not empty" in text
        assert "Traceback" not in text


@pytest.mark.slow
@COPIES_AND_PARTS
def test_fine_tuning_on_two_hosts_gives_the_scores_and_files_of_one(
    mesh: str, pretrained: Path, sst2: Path, tmp_path: Path
) -> None:
    options = ["--config=sst2", f"--init={pretrained}", f"--data.dir={sst2}", "--data.max_length=32", "--patience=2"]
    options += ["--data.buckets=32", "--training.batch_size=8", "--num_seeds=2", "--training.log_every=1"]
    one, two = tmp_path / "one", tmp_path / "two"
    finish(launch("finetune.py", f"--output_dir={one}", *options))
    first, second = finish(*start_hosts(["finetune.py", f"--output_dir={two}", *options, f"--training.mesh={mesh}"]))
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
            is_same = (two / seed / "predictions" / file.name).read_bytes() == file.read_bytes()
            assert file.name == "dev.jsonl" or is_same
    # One process continues: nothing remains to be done.
    [again] = finish(launch("finetune.py", f"--output_dir={two}", *options))
    assert "seed 0 has ended before" in again


@pytest.mark.slow
def test_translation_on_two_hosts_gives_the_losses_and_lines_of_one(tmp_path: Path) -> None:
    options = [*translation_options(tmp_path), "--training.epochs=8", "--training.log_every=10"]
    options += ["--training.average_checkpoints=2", "--optimizer.learning_rate=5e-3"]
    one, two = tmp_path / "one", tmp_path / "two"
    finish(launch("finetune.py", f"--output_dir={one}", *options))
    first, _ = finish(*start_hosts(["finetune.py", f"--output_dir={two}", *options]))
    assert "4 x cpu on 2 hosts" in first
    assert_same_losses(two, one, end=250)
    for file in ("dev.txt", "test_a.txt"):
        assert (two / "predictions" / file).read_text() == (one / "predictions" / file).read_text()
    assert len(set((one / "predictions" / "dev.txt").read_text().splitlines())) > 1, "the model has learned something"


@pytest.mark.slow
def test_embeddings_on_two_hosts_are_those_of_one(pretrained: Path, tmp_path: Path) -> None:
    """Texts of 1 to 12 words in groups of similar lengths, whose negatives are on both hosts."""
    rows = [{"query": " ".join(words(n, 1 + n % 12)), "positive": " ".join(words(n + 1, 1 + n % 7))} for n in range(40)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--config=embedding", f"--init={pretrained}", f"--data.train={file}", f"--data.dev={file}"]
    options += ["--data.max_length=16", "--training.batch_size=16", "--training.gradient_accumulation_steps=2"]
    options += ["--training.log_every=1", "--training.epochs=4", "--training.eval_every=3"]
    one, two = tmp_path / "one", tmp_path / "two"
    finish(launch("finetune.py", f"--output_dir={one}", *options))
    first, _ = finish(*start_hosts(["finetune.py", f"--output_dir={two}", *options]))
    assert "4 x cpu on 2 hosts" in first
    assert_same_losses(two, one)
