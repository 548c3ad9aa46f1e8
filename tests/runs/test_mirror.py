"""Runs in an object store: the copy of the local folder, and the lease that keeps others out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import bert
from bert.errors import UserError
from bert.remote import ObjectStore
from bert.runs import mirror as leases
from bert.runs.checkpoint_directory import MANIFEST, verify_manifest, write_manifest
from bert.runs.loggers import Callback, RunStart
from bert.runs.metrics_log import read_metrics
from bert.runs.mirror import LEASE, Lease, Mirror, local_folder

SMALL = {
    "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "model.max_position_embeddings": 32,
    "data": {"sequence_length": 32, "max_predictions_per_sequence": 5, "num_workers": 1, "eval_fraction": 0.05},
    "tokenizer.vocab_size": 200,
    "transfer": None,
    "training": {"steps": 6, "batch_size": 8, "log_every": 1, "eval_every": 3, "checkpoint_every": 2},
    "optimizer.warmup_steps": 1,
}
URL = "memory://bucket/runs/a"


@pytest.fixture
def mirror(bucket, tmp_path: Path) -> Mirror:
    folder = tmp_path / "run"
    folder.mkdir()
    return Mirror(folder, URL)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def pretrain(corpus: Path, url: str = URL, **arguments: Any) -> bert.Run:
    return bert.pretrain("quickstart", output_dir=url, overrides={**SMALL, "data.train": str(corpus)}, **arguments)


class Start(Callback):
    """Remembers the step that a run starts at."""

    def on_start(self, start: RunStart) -> None:
        self.step = start.start_step


def without_times(results: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in results.items() if name not in ("seconds", "timing")}


def test_manifests_are_written_last_and_removed_first(mirror, bucket, monkeypatch) -> None:
    calls: list[str] = []
    for method in ("write", "remove"):
        original = getattr(ObjectStore, method)

        def record(
            store: ObjectStore, name: str, *content: bytes, method: str = method, original: Any = original
        ) -> None:
            calls.append(f"{method} {name}")
            original(store, name, *content)

        monkeypatch.setattr(ObjectStore, method, record)
    with mirror.claim():
        calls.clear()
        write(mirror.folder, config="", **{"checkpoints__1__MANIFEST.json": "", "checkpoints__1__params__a": "1"})
        write(mirror.folder, **{"checkpoints__2.saving__params__a": "half", "checkpoints__BEST": "1"})
        mirror.push()
        names = ["checkpoints/1/params/a", "checkpoints/BEST", "config", "checkpoints/1/MANIFEST.json"]
        assert calls == [f"write {name}" for name in names]
        calls.clear()
        mirror.push()
        assert not calls
        shutil.rmtree(mirror.folder / "checkpoints")
        write(mirror.folder, config="changed")
        mirror.push()
        assert calls[:2] == ["write config", "remove checkpoints/1/MANIFEST.json"]
        assert sorted(bucket.find("/bucket/runs/a")) == [f"/bucket/runs/a/{name}" for name in (LEASE, "config")]
    assert bucket.find("/bucket/runs/a") == ["/bucket/runs/a/config"]


def test_the_first_host_completes_a_checkpoint_by_the_parts_of_the_others(mirror, bucket, tmp_path: Path) -> None:
    at = "/bucket/runs/a/checkpoints/2"
    bucket.pipe({"/bucket/runs/a/config.yaml": b"", f"{at}/{MANIFEST}": b"", f"{at}/params/manifest.ocdbt": b"old"})
    checkpoint, draft = mirror.folder / "checkpoints/2", mirror.folder / "checkpoints/2.saving"
    other = Mirror(tmp_path / "other", URL)
    other_draft = other.folder / "checkpoints/2.saving"

    def names() -> set[str]:
        return {name.removeprefix(f"{at}/") for name in bucket.find(at)}

    with mirror.claim():
        write(draft, params___METADATA="same", params__w__0="first", rest__w__0="first")
        mirror.withdraw(checkpoint)
        assert names() == set()
        write(other_draft, params___METADATA="same", params__w__1="second", rest__w__1="second")
        other.send_parts(other_draft, other.folder / "checkpoints/2")
        assert names() == {"params/w/1", "rest/w/1"}
        mirror.fetch_parts(draft, checkpoint)
        write_manifest(draft, 2)
        shutil.rmtree(checkpoint)
        draft.rename(checkpoint)
        mirror.push()
        assert names() == {"params/w/0", "params/w/1", "rest/w/0", "rest/w/1", "params/_METADATA", MANIFEST}
        assert bucket.cat(f"{at}/params/w/0") == b"first"
        assert bucket.cat(f"{at}/params/w/1") == b"second"
    with mirror.claim():
        assert verify_manifest(checkpoint) == []
        shutil.rmtree(checkpoint)
        mirror.push()
        assert names() == set()


def test_incomplete_checkpoints_are_not_copied_back_and_are_removed(mirror, bucket) -> None:
    checkpoints = {"checkpoints/1/MANIFEST.json", "checkpoints/1/params/a", "seed-0/checkpoints/4/MANIFEST.json"}
    whole = {*checkpoints, "config.yaml"}
    half = {"checkpoints/2/params/a", "seed-0/checkpoints/5/params/a"}
    bucket.pipe({f"/bucket/runs/a/{name}": name.encode() for name in whole | half})
    write(mirror.folder, outdated="")
    with mirror.claim():
        local = {path.relative_to(mirror.folder).as_posix() for path in mirror.folder.rglob("*") if path.is_file()}
        assert local == whole
    assert set(bucket.find("/bucket/runs/a")) == {f"/bucket/runs/a/{name}" for name in whole}


def test_a_checkpoint_that_was_being_reduced_to_its_parameters_is_one_of_them(mirror, bucket, tmp_path: Path) -> None:
    whole, reduced = tmp_path / "whole", tmp_path / "reduced"
    write(whole, params__a="1", rest__b="2")
    write_manifest(whole, 3)
    write(reduced, params__a="1", PARAMS_ONLY="")
    write_manifest(reduced, 3)
    at = "/bucket/runs/a/checkpoints/3"
    for last in (whole, reduced):  # killed before and after the manifest was replaced
        bucket.put(f"{whole}/", f"{at}/", recursive=True)
        bucket.put_file(str(reduced / "PARAMS_ONLY"), f"{at}/PARAMS_ONLY")
        bucket.put_file(str(last / MANIFEST), f"{at}/{MANIFEST}")
        bucket.pipe("/bucket/runs/a/config.yaml", b"")
        with mirror.claim():
            assert verify_manifest(mirror.folder / "checkpoints/3") == []
        names = {path.relative_to(last).as_posix() for path in last.rglob("*") if path.is_file()}
        assert {name.removeprefix(f"{at}/") for name in bucket.find(at)} == names


def test_a_folder_of_something_else_stays_as_it_is(mirror, bucket) -> None:
    bucket.pipe("/bucket/runs/a/corpus.txt", b"text")
    with (
        pytest.raises(UserError, match=r"a is not empty.*\(no config\.yaml\)"),
        mirror.claim(),
    ):
        pass
    assert bucket.find("/bucket/runs/a") == ["/bucket/runs/a/corpus.txt"]


@pytest.mark.medium
def test_a_lease_keeps_others_out_until_it_expires(bucket, quick_leases, monkeypatch) -> None:
    store = ObjectStore(URL)
    with Lease(store, "first"):
        with pytest.raises(UserError, match="a is in use"):
            Lease(store, "second").__enter__()
        with Lease(store, "first"):  # this machine's, whose process is dead: its local lock was free
            pass
    assert store.read(LEASE) is None
    store.write(LEASE, json.dumps({"holder": "dead", "process": "process 1 on h"}).encode())
    with Lease(store, "second") as lease:
        lease.check()
        assert json.loads(store.read(LEASE) or b"")["holder"] == "second"
    store.write(LEASE, b"\xff")
    with Lease(store, "second") as lease:
        store.write(LEASE, json.dumps({"holder": "third", "process": "process 3 on h"}).encode())
        with pytest.raises(UserError, match="a was taken over by process 3"):
            lease.check()
    assert json.loads(store.read(LEASE) or b"")["holder"] == "third"


def test_a_holder_that_cannot_renew_its_lease_stops_writing(bucket, quick_leases, monkeypatch) -> None:
    store = ObjectStore(URL)
    with Lease(store, "first") as lease:
        lease._ended.set()
        lease._thread.join()
        lease._renewed -= leases.EXPIRY
        with pytest.raises(UserError, match=r"could not be reached for 0\.5 seconds"):
            lease.check()


@pytest.mark.medium
def test_a_run_in_a_store_equals_a_local_one(bucket, corpus: Path, tmp_path: Path, monkeypatch) -> None:
    local = pretrain(corpus, str(tmp_path / "run"))
    remote = pretrain(corpus)
    assert not Path("memory:").exists()
    assert remote.metrics and losses(remote.metrics) == losses(local.metrics)
    names = {name.removeprefix("/bucket/runs/a/") for name in bucket.find("/bucket/runs/a")}
    assert {"config.yaml", "metrics.jsonl", "results.json", "tokenizer.json", "checkpoints/6/MANIFEST.json"} <= names
    assert LEASE not in names and ".lock" not in names
    assert remote.config.output_dir == URL
    assert without_times(pretrain(corpus).results) == without_times(remote.results) == without_times(local.results)
    assert (bert.load(URL).embed("one text") == bert.load(local).embed("one text")).all()


@pytest.mark.slow
def test_another_machine_resumes_from_the_newest_checkpoint(bucket, corpus: Path, tmp_path: Path, monkeypatch) -> None:
    local = pretrain(corpus, str(tmp_path / "run"))
    write_once = ObjectStore.write

    def fail_at_step_4(store: ObjectStore, name: str, content: bytes) -> None:
        if name == "checkpoints/4/MANIFEST.json":
            raise UserError("the network is down")
        write_once(store, name, content)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="the network is down"):
        patch.setattr(ObjectStore, "write", fail_at_step_4)
        pretrain(corpus)
    shutil.rmtree(local_folder(URL))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    start = Start()
    resumed = pretrain(corpus, callbacks=[start])
    assert start.step == 2
    assert losses(resumed.metrics) == losses(local.metrics)


def losses(lines: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.slow
def test_seeds_in_a_store_are_those_of_a_folder(bucket, pretrained: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{word} text", "label": label} for word, label in [("good", "yes"), ("bad", "no")] * 8]
    overrides = {"training.epochs": 1, "training.batch_size": 4, "data.max_length": 16, "num_seeds": 2}

    def finetune(url: str) -> bert.Run:
        data = {"train": rows, "dev": rows[:4]}
        return bert.finetune("classification", init=str(pretrained), **data, output_dir=url, overrides=overrides)

    local, remote = finetune(str(tmp_path / "run")), finetune(URL)
    for seed in ("seed-0", "seed-1"):
        assert losses(read_metrics(remote.path / seed)) == losses(read_metrics(local.path / seed))
    names = {name.removeprefix("/bucket/runs/a/") for name in bucket.find("/bucket/runs/a")}
    assert {"results.json", "seed-1/results.json", "rows/train.jsonl"} <= names
    assert f"output_dir: {URL}/seed-1" in bucket.cat_file("/bucket/runs/a/seed-1/config.yaml").decode()
    shutil.rmtree(remote.path)
    assert finetune(URL).results["best_seed"] == local.results["best_seed"]


def test_what_tells_whose_a_folder_is_comes_first_and_what_vanishes_is_left_out(mirror, bucket, monkeypatch) -> None:
    """A first copy that ends early leaves a run that another process may go on with."""
    written, original = [], ObjectStore.write

    def record(store: ObjectStore, name: str, content: bytes) -> None:
        (mirror.folder / "gone").unlink(missing_ok=True)
        written.append(name)
        original(store, name, content)

    with mirror.claim():
        write(mirror.folder, **{"config.yaml": "task: x", "checkpoints__PROTECTED": "1", "gone": "1"})
        (mirror.folder / "link").symlink_to("nothing")
        monkeypatch.setattr(ObjectStore, "write", record)
        mirror.push()
    assert [name for name in written if name != LEASE] == ["config.yaml", "checkpoints/PROTECTED"]


def test_a_lost_connection_is_tried_again(monkeypatch) -> None:
    """Includes botocore's own exceptions, which are not subclasses of OSError."""
    from bert import remote

    module = {"__module__": "botocore.exceptions"}
    lost = type("EndpointConnectionError", (type("ConnectionError", (Exception,), module),), module)
    answers = iter([lost(), lost(), None])

    def call() -> str:
        if (error := next(answers)) is not None:
            raise error
        return "answer"

    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    assert remote.retry(call) == "answer"
    refused = type("ClientError", (Exception,), module)
    with pytest.raises(refused):
        remote.retry(lambda: (_ for _ in ()).throw(refused()))
