"""Loggers: what TensorBoard, Weights & Biases and MLflow get of a run that stops and resumes, and that they never end
one."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

import bert
from bert.config import FinetuneConfig
from bert.errors import UserError
from bert.runs.loggers import LOGGERS, Logger, MlflowLogger, RunStart, TensorBoardLogger, WandbLogger, make_loggers

RESULTS = {
    "task": "sst2",
    "dev": {"accuracy": 0.75, "loss": float("nan")},
    "collapsed": False,
    "details": {"dev": {"a label": 1}},
    "seconds": 2.5,
}
SCORES = {"final/dev.accuracy": 0.75, "final/seconds": 2.5}


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def log_sessions(make_logger, folder):
    """A run that is interrupted after step 20, resumed at step 10 with another config, and ends."""
    config = FinetuneConfig(task="sst2", init="none")
    folder.mkdir()
    for first, last, results in ((0, 20, None), (10, 30, RESULTS)):
        logger = make_logger()
        logger.on_start(RunStart(folder, config, first, 30))
        for step in range(first + 10, last + 1, 10):
            logger.on_metrics(step, "train", {"loss": 10 / step, "note": "x"})
        logger.on_metrics(last, "eval", {"loss": 11 / last, "accuracy": float("nan")})
        logger.on_end(results)


class Failing(Logger):
    """Fails at one of its methods."""

    def __init__(self, method):
        self._method, self.calls = method, []

    def _call(self, method):
        self.calls.append(method)
        if method == self._method:
            raise ConnectionError("the server\nis gone")

    def start(self, start):
        self._call("start")

    def log(self, step, numbers):
        self._call("log")

    def end(self, scores):
        self._call("end")


@pytest.mark.parametrize(
    ("method", "calls"),
    [("start", ["start"]), ("log", ["start", "log"]), ("end", ["start", "log", "log", "log", "end"])],
)
def test_logger_that_fails_warns_once_and_is_not_called_again(tmp_path, capsys, method, calls):
    logger = Failing(method)
    logger.on_start(RunStart(tmp_path, FinetuneConfig(), 0, 30))
    for step in (10, 20, 30):
        assert logger.on_metrics(step, "train", {"loss": 1.0}) is None
    logger.on_end(RESULTS)
    logger.on_end(None)
    assert logger.calls == calls
    assert capsys.readouterr().err == "Failing failed, and the run continues without it: the server is gone\n"


def test_run_that_ends_before_it_starts_is_not_logged():
    logger = Failing("end")
    logger.on_end(None)
    assert logger.calls == []


def test_loggers_by_name_need_their_library(monkeypatch):
    assert [type(logger) for logger in make_loggers(None)] == [TensorBoardLogger]
    assert [type(logger) for logger in make_loggers(["tensorboard", "tensorboard"])] == [TensorBoardLogger]
    assert make_loggers([]) == []
    for name, package in (("wandb", "'bert-jax[wandb]'"), ("mlflow", "'bert-jax[mlflow]'"), ("tensorboard", None)):
        module = LOGGERS[name].module
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError) as error:
            make_loggers([name])
        fix = f"pip install {package or module}"
        assert f"loggers has {name}" in str(error.value) and fix in str(error.value)
    assert make_loggers(None) == []


def test_missing_library_is_refused_before_the_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"^loggers has mlflow"):
        bert.pretrain(output_dir=tmp_path / "run", overrides={"loggers": "tensorboard,mlflow"})
    assert not (tmp_path / "run").exists()


def scalars_of(folder):
    """(step, value) by tag, from TensorBoard's own reader."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_each_metric_of_a_resumed_run_once(tmp_path):
    def log_steps(folder, start_step, steps):
        logger = TensorBoardLogger()
        logger.on_start(RunStart(folder, FinetuneConfig(), start_step, 30))
        for step in steps:
            logger.on_metrics(step, "train", {"loss": 10 / step})
        logger.on_end(RESULTS)

    log_steps(tmp_path / "whole", 0, [10, 20, 30])
    killed = tmp_path / "killed"
    log_steps(killed, 0, [10, 20])
    [file] = (killed / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-7])  # the kill
    log_steps(killed, 10, [20, 30])
    assert scalars_of(killed) == scalars_of(tmp_path / "whole")
    assert scalars_of(killed)["train/loss"] == [(10, 1.0), (20, 0.5), (30, pytest.approx(1 / 3))]
    log_steps(killed, 0, [10])
    assert [step for step, _ in scalars_of(killed)["train/loss"]] == [10]


def read_offline_run(file):
    """The records of a .wandb file, which is a log of LevelDB: blocks of checksum, length, type and content."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, content = file.read_bytes(), 7, b""
    while place + 7 <= len(data) and data[place + 6]:  # what is not written yet is zeros, or not there
        if 32768 - place % 32768 < 7:  # the end of a block is filled up
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if place + 7 + length > len(data):
            return
        content += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(content)
            content = b""


def read_when_written(file):
    """All records, which a process of wandb still writes when the run has ended."""
    for _ in range(600):
        records = list(read_offline_run(file))
        if records and records[-1].WhichOneof("record_type") in ("exit", "footer"):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


@pytest.mark.medium
@needs("wandb")
def test_wandb_run_is_continued_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_sessions(lambda: WandbLogger(tags=["mine"]), tmp_path / "seed-1")
    files = sorted((tmp_path / "seed-1" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    runs, history, summary = [], [], {}
    for file in files:
        for record in read_when_written(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                runs.append(record.run)
            elif kind == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                values = {name: value for name, value in items.items() if not name.startswith("_")}
                history.append((record.history.step.num, values))
            elif kind == "summary":
                for item in record.summary.update:
                    summary[item.key or item.nested_key[0]] = json.loads(item.value_json)
    assert {run.run_id for run in runs} == {json.loads((tmp_path / "seed-1" / "loggers.json").read_text())["wandb"]}
    names = {(run.project, run.display_name, *run.tags) for run in runs}
    assert names == {("bert-jax", f"{tmp_path.name}/seed-1", "mine")}
    assert history == [
        (10, {"train/loss": 1.0}),
        (20, {"train/loss": 0.5, "eval/loss": 0.55}),
        (20, {"train/loss": 0.5}),
        (30, {"train/loss": pytest.approx(1 / 3), "eval/loss": pytest.approx(11 / 30)}),
    ]
    assert SCORES.items() <= summary.items()


def check_mlflow_run(uri, folder):
    """Two sessions are one run with the configuration, each metric and the scores."""
    from mlflow import MlflowClient

    log_sessions(lambda: MlflowLogger(tracking_uri=uri), folder)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("bert-jax")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (folder.name, "FINISHED")
    assert run.data.tags["run_folder"] == str(folder)
    assert (run.data.params["task"], run.data.params["optimizer.learning_rate"]) == ("sst2", "0.0001")
    assert len(run.data.params) > 100
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert {(metric.step, metric.value) for metric in losses} == {(10, 1.0), (20, 0.5), (30, 10 / 30)}
    assert SCORES.items() <= run.data.metrics.items()
    assert not any("accuracy" in name for name in run.data.metrics if name.startswith("eval/"))


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_run_is_continued_in_a_database(tmp_path):
    check_mlflow_run(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "run")


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_run_is_continued_at_a_server_and_outlives_it(tmp_path, capsys, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri, store = f"http://127.0.0.1:{port}", f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--backend-store-uri", store]
    server = subprocess.Popen(
        [*command, "--artifacts-destination", str(tmp_path / "artifacts"), "--workers", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(f"{uri}/health", server)
        check_mlflow_run(uri, tmp_path / "run")
        logger = MlflowLogger(tracking_uri=uri)
        logger.on_start(RunStart(tmp_path / "run", FinetuneConfig(), 30, 40))
    finally:
        os.killpg(server.pid, 9)
        server.wait()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for step in (31, 32):
        logger.on_metrics(step, "train", {"loss": 1.0})
    logger.on_end(RESULTS)
    assert capsys.readouterr().err.count("MlflowLogger failed, and the run continues without it: API request") == 1


def wait_for(url, server):
    """Waits until a server answers."""
    for _ in range(600):
        assert server.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no answer from {url}")
