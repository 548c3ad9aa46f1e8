"""metrics.jsonl across kills, what the terminal shows, curves.png and results.json."""

import json
import math
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bert.config import PretrainConfig
from bert.errors import LOGGER, UserError
from bert.metrics import higher_is_better
from bert.runs import report
from bert.runs.checkpoint import require_space
from bert.runs.folder import RunFolder
from bert.runs.metrics_log import MetricsLog, atomic_write, read_metrics, write_results
from bert.runs.plots import Bars, Subject, make_curves, plot_curves
from bert.runs.report import Divergence, Progress, RunReport, format_duration, format_metrics, log_table

pytestmark = pytest.mark.usefixtures("drawn")


def log_steps(folder, start_step, steps):
    with MetricsLog(folder, start_step) as log:
        for step in steps:
            log.write("train", step, {"loss": 10 / step, "learning_rate": 1e-4 * step})
            if step % 20 == 0:
                log.write("eval", step, {"loss": 11 / step, "accuracy": 0.5})


def test_each_line_is_on_disk_at_once(tmp_path):
    log = MetricsLog(tmp_path / "run", 0)
    log.write("train", 10, {"loss": np.float32(0.5), "rows": np.int64(3), "note": "x"})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text == '{"step": 10, "split": "train", "loss": 0.5, "rows": 3, "note": "x"}\n'
    log.close()


def test_resumed_log_is_that_of_a_run_never_interrupted(tmp_path):
    log_steps(tmp_path / "whole", 0, range(10, 61, 10))
    log_steps(tmp_path / "killed", 0, range(10, 51, 10))
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 60, "split": "tr')  # the kill
    log_steps(tmp_path / "killed", 40, range(50, 61, 10))
    whole, killed = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "killed"))
    assert killed == whole
    assert b'"step": 40, "split": "eval"' in killed
    assert [path.name for path in (tmp_path / "killed").iterdir() if path.name.startswith(".")] == []


def test_half_line_at_the_restored_step_vanishes(tmp_path):
    log_steps(tmp_path, 0, [10])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 10, "split": "eval", "loss": 1.\xc3')
    MetricsLog(tmp_path, 10).close()
    assert [line["split"] for line in read_metrics(tmp_path)] == ["train"]
    assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")


def test_run_that_begins_anew_has_a_new_log(tmp_path):
    log_steps(tmp_path, 0, [10, 20])
    log_steps(tmp_path, 0, [10])
    assert [line["step"] for line in read_metrics(tmp_path)] == [10]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        log.write("train", 1, {"loss": float("nan"), "a": np.float32("inf"), "b": float("-inf")})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 1, "split": "train", "loss": None, "a": None, "b": None}


def test_without_the_optional_packages_progress_and_curves_still_work(tmp_path, monkeypatch, capsys):
    for name in ("rich.progress", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    log_steps(tmp_path, 0, [10])
    with Progress(10) as progress:
        progress.update(10, {"loss": 1.0})
    assert "step 10/10 (100%)" in capsys.readouterr().out
    assert plot_curves(tmp_path) is None


def test_progress_without_a_terminal_is_plain_lines(capsys):
    with Progress(5000, 0, "pretraining", every=100) as progress:
        for step in range(1, 301):
            metrics = {"loss": 7.1234, "learning_rate": 1e-4, "tokens_per_second": 12345.4}
            progress.update(step, metrics if step % 50 == 0 else None)
        LOGGER.info("saved [runs/x]")
    lines = capsys.readouterr().out.splitlines()
    steps = ["step 100/5000 (2%)", "step 200/5000 (4%)", "step 300/5000 (6%)"]
    assert [line.split("  ")[0] for line in lines] == [*steps, "saved [runs/x]"]
    assert "  loss 7.123  lr 1.0e-04  12,345 tokens/s  " in lines[0]
    assert lines[0].endswith(" left")


def test_slow_steps_are_reported_between_log_lines(capsys, monkeypatch):
    clock = iter([0.0, 20.0, 40.0, 60.0, 80.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with Progress(5, every=100) as progress:
        for step in range(1, 6):
            progress.update(step)
    assert capsys.readouterr().out == "step 3/5 (60%)  40s left\nstep 5/5 (100%)\n"


def test_the_remaining_time_leaves_out_compilation(capsys, monkeypatch):
    clock, compiled = iter([0.0, 70.0]), iter([5.0, 65.0])  # 60 of the 70 seconds
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with Progress(100, compiled=lambda: next(compiled)) as progress:
        progress.update(1)
        progress.update(11)  # 10 steps in 10 s
    assert capsys.readouterr().out == "step 11/100 (11%)  1m29s left\n"


def test_progress_of_a_resumed_run_counts_only_its_own_time(capsys, monkeypatch):
    clock = iter([100.0, 110.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with Progress(5000, 4000) as progress:
        progress.update(4001)
        progress.update(4101, {"loss": 1.0})  # 100 steps in 10 s, 899 to go
    assert capsys.readouterr().out == "step 4101/5000 (82%)  loss 1.000  1m30s left\n"


def test_parts_of_models_are_reported_with_the_current_work(capsys, monkeypatch):
    clock = iter([0.0, 35.0, 40.0, 69.0, 71.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with Progress(4, unit="model") as progress:
        progress.update(0)
        progress.set_label("tags, pretrained")
        progress.update(0.5)
        progress.log("another line")  # at 40 seconds
        progress.update(1)
        progress.update(1.5)
    assert capsys.readouterr().out.splitlines() == [
        "tags, pretrained  model 0/4 (12%)  4m05s left",
        "another line",
        "tags, pretrained  model 1/4 (37%)  1m58s left",
    ]


def test_metrics_have_the_facts_of_their_phase(tmp_path):
    with RunReport(tmp_path, 1000, 400, 100) as run:
        run.set_phase({"phase": 1, "sequence_length": 16})
        run.metrics(500, "train", {"loss": 1.0})
        run.set_phase({"phase": 2, "sequence_length": 32})
        run.metrics(1000, "train", {"loss": 0.5})
    assert [(line["phase"], line["sequence_length"]) for line in read_metrics(tmp_path)] == [(1, 16), (2, 32)]


def test_progress_on_a_terminal_is_a_bar(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for name, value in {"TERM": "xterm", "FORCE_COLOR": "1", "COLUMNS": "110"}.items():
        monkeypatch.setenv(name, value)
    with Progress(10, 0, "pretraining") as progress:
        progress.update(5, {"loss": 7.5, "tokens_per_second": 1234.0, "learning_rate": 1e-4})
        LOGGER.info("[MASK] is a token")
        progress.update(10)
    text = capsys.readouterr().out
    assert "pretraining" in text
    assert "loss 7.500  1,234 tokens/s" in text
    assert "[MASK] is a token" in text


def test_metrics_on_one_line():
    metrics = {"loss": 2.3456, "f1": 1.0, "rows": np.int32(1200), "grad_norm": 0.00001, "note": "x", "nothing": None}
    text = "eval  step 500  loss 2.346  f1 1.000  rows 1,200  grad_norm 1.0e-05"
    assert format_metrics("eval", 500, metrics) == text
    assert format_metrics("train", 1, {"loss": float("nan")}) == "train  step 1  loss nan"
    assert format_metrics("train", 1, {"loss": np.float32(3)}) == "train  step 1  loss 3.000"
    assert format_metrics("eval", 1, {"loss": 3.0, "mlm_loss": 3.0}) == "eval  step 1  loss 3.000"
    assert format_metrics("eval", 1, {"loss": 3.5, "mlm_loss": 3.0}) == "eval  step 1  loss 3.500  mlm_loss 3.000"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.6, "1m00s"), (190, "3m10s"), (7500, "2h05m"), (86399.9, "1d00h"), (273600, "3d04h")],
)
def test_duration(seconds, text):
    assert format_duration(seconds) == text


def test_startup_table_is_aligned(capsys):
    log_table([("parameters", "4,386,178"), ("devices", "1 x cpu\n2 hosts")])
    assert capsys.readouterr().out == "  parameters  4,386,178\n  devices     1 x cpu\n              2 hosts\n"
    log_table([])


def log_evaluations(folder, **scores):
    with MetricsLog(folder, 0) as log:
        for step in (1, 2, 3):
            log.write("train", step, {"loss": 5 / step, "classification_loss": 5 / step, "learning_rate": 1e-4})
            log.write("eval", step, {"loss": 5 / step, **{name: value / step for name, value in scores.items()}})


def drawn_axes(folder, monkeypatch, subject=None):
    """The axes of the picture, by their label, and its title."""
    from matplotlib.figure import Figure

    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, format: (seen.append(figure), path.touch()))
    plot_curves(folder, subject)
    return {axes.get_ylabel(): axes for axes in seen[0].axes}, seen[0].get_suptitle()


def entries(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_curves_have_each_line_once_and_in_the_legend_and_the_baselines_dashed(tmp_path, monkeypatch):
    log_evaluations(tmp_path, matthews=0.5, accuracy=0.9, total=12)
    subject = Subject("cola, from runs/mini", "majority_class", {"matthews": 0.0, "accuracy": 0.7}, "matthews")
    panels, title = drawn_axes(tmp_path, monkeypatch, subject)
    assert title == "cola, from runs/mini"
    assert set(panels) == {"loss", "score", "learning rate"}
    assert entries(panels["loss"]) == ["loss", "training", "evaluation"]
    assert len(panels["loss"].lines) == 2
    assert entries(panels["score"]) == ["matthews", "accuracy", "evaluation", "majority class"]
    dashed = [line.get_ydata()[0] for line in panels["score"].lines if line.get_linestyle() == "--"]
    assert dashed == [0.0, 0.7]
    for axes in (panels["loss"], panels["score"]):
        colours = {handle.get_color() for handle in axes.get_legend().legend_handles}
        assert {line.get_color() for line in axes.lines} <= colours


@pytest.mark.medium
def test_no_line_crosses_a_legend(tmp_path):
    names = ("mlm_accuracy", "nsp_accuracy", "f1", "precision", "recall")
    log_evaluations(tmp_path, **dict.fromkeys(names, 0.5), mlm_loss=3.0, nsp_loss=1.0)
    levels = {name: place / 20 for place, name in enumerate(names)} | {"mlm_loss": 2.0, "nsp_loss": 4.0}
    scores = {"pretrained": (0.5, 0.1), "bag_of_words": (0.3, None)}
    bars = Bars("fine-tuned", {"packages (accuracy)": scores, "tags (f1)": scores})
    figure = make_curves(
        read_metrics(tmp_path), Subject("a run", "word frequencies, majority class", levels, bars=bars)
    )
    figure.canvas.draw()
    boxes = [axes.get_window_extent() for axes in figure.axes]
    legends = [axes.get_legend().get_window_extent() for axes in figure.axes if axes.get_legend()]
    assert len(legends) == 3
    for place, legend in enumerate(legends):
        assert not any(legend.overlaps(box) for box in [*boxes, *legends[:place]])
        assert figure.bbox.y0 <= legend.y0
    assert min(box.height for box in boxes) > 0.5 * figure.bbox.height


def test_curves_have_more_colours_than_lines(tmp_path, monkeypatch):
    scores = dict.fromkeys(("precision", "recall", "f1", *(f"f1_{number}" for number in range(30))), 0.5)
    log_evaluations(tmp_path, **scores)
    subject = Subject(main_metric="f1", higher_is_better=lambda name: "f1" in name or higher_is_better(name))
    panels, _ = drawn_axes(tmp_path, monkeypatch, subject)
    assert entries(panels["score"]) == ["f1", "precision", "recall", "evaluation"]


def test_curves_have_a_main_metric_of_which_less_is_better(tmp_path, monkeypatch):
    log_evaluations(tmp_path, errors=0.5)
    panels, _ = drawn_axes(tmp_path, monkeypatch, Subject(main_metric="errors", higher_is_better=lambda name: None))
    assert entries(panels["errors"]) == ["errors", "evaluation"]


@pytest.mark.medium
@pytest.mark.parametrize("count", [1, 2, 300])
def test_curves_of_any_length(tmp_path, count):
    with MetricsLog(tmp_path, 0) as log:
        for step in range(1, count + 1):
            log.write("train", step, {"loss": 5 / step, "mlm_loss": 4 / step, "learning_rate": 1e-4})
            if step % 3 == 1:
                log.write("eval", step, {"loss": float("nan"), "mlm_accuracy": 0.3, "f1": 0.5})
    path = plot_curves(tmp_path)
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))


def test_curves_are_drawn_now_and_then_and_at_the_end(tmp_path, monkeypatch):
    picture, now = tmp_path / "curves.png", 100.0
    monkeypatch.setattr(report.time, "monotonic", lambda: now)
    with RunReport(tmp_path, 9, 0, 1) as run:
        run.metrics(1, "eval", {"loss": 5.0})
        assert not picture.exists()
        now += report.PLOT_INTERVAL_SECONDS + 1
        run.metrics(2, "eval", {"loss": 4.0})
        first = picture.read_bytes()
        run.metrics(3, "eval", {"loss": 3.0})
        assert picture.read_bytes() == first
    assert picture.read_bytes() != first


def test_a_picture_that_cannot_be_drawn_hides_no_other_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr(RunReport, "_draw", lambda self: (tmp_path / "none" / "curves.png").write_bytes(b""))
    with pytest.raises(UserError, match="the first"), RunReport(tmp_path, 9, 0, 1):
        raise UserError("the first")
    with pytest.raises(FileNotFoundError), RunReport(tmp_path, 9, 0, 1):
        pass


def test_curves_of_nothing(tmp_path):
    assert plot_curves(tmp_path) is None
    with MetricsLog(tmp_path, 0) as log:
        log.write("train", 1, {"tokens_per_second": 5.0})
    assert plot_curves(tmp_path) is None
    assert not (tmp_path / "curves.png").exists()


def test_results_are_whole_and_valid_json(tmp_path):
    folder = tmp_path / "run"
    write_results(folder, {"f1": np.float32(0.5), "each": np.array([1, 2]), "nan": float("nan"), "at": folder})
    stored = json.loads((folder / "results.json").read_text())
    assert stored == {"f1": 0.5, "each": [1, 2], "nan": None, "at": str(folder)}
    results = {"matrix": [[1, 20], [-3, 4]], "text": "[\n  1,\n  2\n]", "mixed": [1, "a"], "none": []}
    write_results(folder, results)
    assert json.loads((folder / "results.json").read_text()) == results
    assert "    [1, 20],\n    [-3, 4]\n" in (folder / "results.json").read_text()


def test_replaced_file_is_the_old_one_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("old")

    def write_half():
        with atomic_write(path) as temporary:
            temporary.write_text("ha")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("start", "losses", "reported"),
    [
        (6.0, [7.0, 17.0, 5.0], []),
        (6.0, [7.0, 19.0, 2.6e6], [19.0]),
        (6.0, [math.inf, 19.0], [math.inf]),
        (6.0, [math.nan, 5.0], []),
        (0.01, [0.5, 2.5], []),  # a model that is trained further
        (0.01, [3.5], [3.5]),
        (None, [6.0, 7.0, 19.0], []),
    ],
)
def test_a_loss_far_above_its_start_is_reported_once(start, losses, reported) -> None:
    divergence = Divergence([], None)
    if start is not None:
        divergence.start(start)
    result = [loss for step, loss in enumerate(losses, 1) if divergence.update(step, {"loss": loss})]
    assert result == reported


def test_a_resumed_run_compares_with_its_first_line_and_with_token_frequencies() -> None:
    lines = [{"step": 100, "split": "train", "loss": 6.5}]
    assert "started at 6.5" in str(Divergence(lines, None).update(200, {"loss": 20.0}))
    assert Divergence([], ("mlm_loss", 7.0)).update(200, {"loss": 14.0, "mlm_loss": 13.5}) is None
    warning = Divergence([], ("mlm_loss", 7.0)).update(200, {"loss": 16.0, "mlm_loss": 15.0})
    assert "7 with token frequencies" in str(warning)
    diverged = [*lines, {"step": 200, "split": "train", "loss": None}, {"step": 300, "split": "train", "loss": 20.0}]
    resumed = Divergence(diverged, None)  # killed after the warning
    assert "at step 300" in str(resumed.sentence) and resumed.update(400, {"loss": 21.0}) is None
    recovered = Divergence(lines, None)
    recovered.update(200, {"loss": 20.0})
    recovered.update(300, {"loss": 5.0})
    assert recovered.sentence is None


def test_a_disk_without_room_for_a_checkpoint_is_an_error_before_training(tmp_path, monkeypatch):
    run = RunFolder(tmp_path, PretrainConfig(), resumed=False)
    state = {"params": {"w": np.zeros(250_000, np.float32)}, "step": np.int32(0)}  # 1 MB
    messages, disk = [], SimpleNamespace(total=10**9, free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    require_space(run, state, messages.append)
    assert messages == []
    disk.free = 1_500_000
    require_space(run, state, messages.append)
    assert "max_to_keep" in messages.pop()
    disk.free = disk.total = 0  # as some network file systems report
    require_space(run, state, messages.append)
    assert messages == []
    disk.free, disk.total = 500_000, 10**9
    with pytest.raises(UserError, match=r"0\.5 MB of free space, .* needs 1\.0 MB"):
        require_space(run, state, messages.append)
