"""Time of a run by activity, and the use of the devices."""

import json
from pathlib import Path

import pytest

from bert.analysis.inspection import summarize
from bert.commands.pretrain import main as pretrain
from bert.parallel.devices import FIGURES, figures_of_device
from bert.training import timing
from bert.training.timing import ACTIVITIES, RunTimes, compilation_seconds, describe_times
from tests.conftest import SMALL_MODEL, SMALL_RUN
from tests.helpers import results_of
from tests.helpers import run as finetune

PEAK = 1e8
"""FLOPs per second of the devices; unknown for CPUs."""


class Clock:
    """A clock that tests set, for the time and for the seconds of compilation."""

    def __init__(self) -> None:
        self.now, self.compiled = 100.0, 5.0

    def pass_time(self, seconds: float, compiled: float = 0.0) -> None:
        self.now, self.compiled = self.now + seconds, self.compiled + compiled


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def times(clock: Clock) -> RunTimes:
    return RunTimes(98.0, 1e6, clock=lambda: clock.now, compiled=lambda: clock.compiled)


def test_each_second_counts_once(times: RunTimes, clock: Clock) -> None:
    clock.pass_time(1)
    with times.measure("training"):
        clock.pass_time(10, compiled=4)
        with times.measure("evaluation"):
            clock.pass_time(3, compiled=1)
            with times.measure("saving"):
                clock.pass_time(2)
            clock.pass_time(1)
        clock.pass_time(5)
        times.add_work(600, 1000.0)
        times.add_work(600, 2000.0)
        times._switch("training")
        times.move("input", 3.0)
    clock.pass_time(0.5)
    results = times.results()
    assert results == {
        "seconds": {"training": 8, "input": 3, "compilation": 5, "evaluation": 3, "saving": 2, "other": 3.5},
        "tokens_per_second": pytest.approx(1200 / 11, abs=0.1),
        "mfu": pytest.approx(1.8e6 / 11 / 1e6, abs=1e-4),
    }
    assert sum(results["seconds"].values()) == clock.now - 98
    assert tuple(results["seconds"]) == ACTIVITIES
    line = describe_times(results)
    assert "training 8.0 s (33%)" in line
    assert "MFU 16.4%" in line


def test_an_error_ends_its_activity(times: RunTimes, clock: Clock) -> None:
    with pytest.raises(ZeroDivisionError), times.measure("saving"):
        clock.pass_time(2)
        raise ZeroDivisionError
    clock.pass_time(1)
    assert times.results() == {"seconds": dict.fromkeys(ACTIVITIES, 0) | {"saving": 2, "other": 3}}


def test_compilation_is_measured() -> None:
    import jax

    before = compilation_seconds()
    jax.jit(lambda x: x * 3 + 1)(2.0).block_until_ready()
    assert 0 < compilation_seconds() - before < 60


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("cpu", None),
    ],
)
def test_peaks_of_devices(name: str, kind: str | None) -> None:
    assert figures_of_device(name) == FIGURES.get(kind or "")


def test_the_peak_is_that_of_the_devices_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "figures_of_device", lambda kind: FIGURES["h100"])
    assert timing.peak_flops_of_devices("float32") is None
    for count in (2, 8):
        monkeypatch.setenv("BERT_NUM_DEVICES", str(count))
        assert timing.peak_flops_of_devices("bfloat16") == count * FIGURES["h100"].peak_tflops * 1e12


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "length"),
    # Rows of SST-2 have 5 to 8 tokens, and one has 32: 267 tokens in 40 rows.
    [("pretraining", None), ("finetuning", 7)],
)
def test_a_run_reports_its_mfu_and_its_time_by_activity(
    kind: str, length: int | None, corpus: Path, sst2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(f"bert.training.{kind}.run.peak_flops_of_devices", lambda dtype: PEAK)
    folder = tmp_path / "run"
    if kind == "pretraining":
        assert pretrain([f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN]) == 0
    else:
        start = ["--init=none", *SMALL_MODEL, "--tokenizer.vocab_size=100", "--tokenizer.min_frequency=1"]
        assert finetune(folder, sst2, *start, "--training.epochs=1", "--training.log_every=2") == 0
    out = capsys.readouterr().out
    flops = summarize(folder, length)["flops_per_token"]["training"]

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in train] == ([2, 4, 6] if kind == "pretraining" else [2, 4, 5])
    for line in train:
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * flops / PEAK)
    progress = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(progress) == 3 and all("  mfu " in line for line in progress)

    results = results_of(folder)
    timing = results["timing"]
    assert timing["mfu"] == pytest.approx(timing["tokens_per_second"] * flops / PEAK, rel=1e-3, abs=1e-4)
    assert set(timing["seconds"]) == set(ACTIVITIES)
    assert all(timing["seconds"][name] > 0 for name in ACTIVITIES if name != "input")
    assert sum(timing["seconds"].values()) == pytest.approx(results["seconds"], rel=0.03, abs=0.1)
    assert f"{describe_times(timing)}\n" in out
