"""Runs that are extended, shortened or continued with another schedule, bit for bit as if planned so."""

import dataclasses
import json
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import bert
from bert.commands.pretrain import main
from bert.config import EmbeddingConfig, FinetuneConfig, OptimizerConfig, PretrainConfig, TrainingConfig
from bert.config.pretraining import PhaseConfig
from bert.config.run_file import RESUMABLE, SCHEDULE_KEYS
from bert.config.validation import keys_of
from bert.data.pretraining.loader import Batch, PretrainingLoader
from bert.runs.folder import BUDGET_FILE, RunFolder
from bert.training import run_length
from bert.training.run_length import StepCosts, TimeBudget, num_equal_steps, timed
from tests.conftest import SMALL_RUN
from tests.helpers import lines_of, state_of

LONG = 1_000_000


def config_of(schedule: str = "constant", phases: list[PhaseConfig] | None = None, **optimizer) -> PretrainConfig:
    optimizer = {"warmup_steps": 10, "schedule": schedule, **optimizer}
    return PretrainConfig(
        phases=phases, optimizer=OptimizerConfig(**optimizer), training=TrainingConfig(steps=100, batch_size=8)
    )


@pytest.mark.medium
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (config_of(), config_of(), 100),
        (config_of("inverse_sqrt"), config_of("inverse_sqrt"), 100),
        (config_of("warmup_stable_decay"), config_of("warmup_stable_decay"), 91),
        (config_of("warmup_stable_decay", decay_ratio=0.3), config_of("warmup_stable_decay"), 71),
        (config_of(), config_of("warmup_stable_decay"), 100),
        (config_of("linear"), config_of("linear"), 11),
        (config_of("cosine"), config_of("cosine"), 11),
        (config_of(warmup_steps=None), config_of(warmup_steps=None), 1),
        (config_of(warmup_steps=None), config_of(warmup_steps=10), 100),
        (config_of(learning_rate=1e-3), config_of(), 1),
        (config_of(phases=[PhaseConfig(0.9), PhaseConfig()]), config_of(phases=[PhaseConfig(0.9), PhaseConfig()]), 90),
        (
            config_of(phases=[PhaseConfig(steps=9), PhaseConfig()]),
            config_of(phases=[PhaseConfig(steps=9), PhaseConfig()]),
            100,
        ),
    ],
)
def test_steps_are_equal_up_to_the_first_other_rate_or_phase(before, after, expected) -> None:
    assert num_equal_steps(before, 100, after, LONG, 100) == expected
    assert num_equal_steps(after, LONG, before, 100, 100) == expected


@pytest.mark.medium
def test_steps_of_a_sparse_encoder_are_equal_before_the_weight_of_its_regularizer_differs() -> None:
    """The weight grows over a third of the steps; it is 0 in the first step and whole from the third or fifth on."""
    lexical, dense = (FinetuneConfig(embedding=EmbeddingConfig(pooling=pooling)) for pooling in ("splade", "mean"))
    lexical, dense = (
        dataclasses.replace(config, optimizer=OptimizerConfig(schedule="constant", warmup_steps=0))
        for config in (lexical, dense)
    )
    assert num_equal_steps(dense, 6, dense, 12, 6) == 6
    assert num_equal_steps(lexical, 6, lexical, 12, 6) == num_equal_steps(lexical, 12, lexical, 6, 6) == 1
    assert num_equal_steps(lexical, 12, lexical, 13, 12) == 12, "a third of both, rounded, is 4"


def test_resumable_keys_exist_and_each_has_a_reason() -> None:
    keys = {**keys_of(PretrainConfig), **keys_of(FinetuneConfig)}
    for entry in RESUMABLE:
        assert entry.reason, entry.key
        assert entry.key in keys or entry.key.startswith("phases."), entry.key
    assert "training.steps" in SCHEDULE_KEYS


CONSTANT = ["--optimizer.schedule=constant", "--training.checkpoint_every=4", "--training.max_to_keep=9"]


@pytest.fixture(scope="module")
def pretrain(corpus):
    """Runs or resumes a run of some steps in a folder."""

    def run(folder: Path, steps: int, *more: str) -> Path:
        assert (
            main([f"--data.train={corpus}", f"--output_dir={folder}", *SMALL_RUN, f"--training.steps={steps}", *more])
            == 0
        )
        return folder

    return run


def assert_same_runs(run: Path, other: Path) -> None:
    assert lines_of(run) == lines_of(other)
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(other))
    actual, expected = (json.loads((path / "results.json").read_text()) for path in (run, other))
    assert actual.pop("seconds") > 0 < expected.pop("seconds")
    assert actual.pop("timing") and expected.pop("timing")
    assert actual == expected


@pytest.mark.medium
def test_a_finished_run_extended_equals_a_run_planned_with_as_many_steps(pretrain, tmp_path) -> None:
    """It ends between two log lines, evaluations and checkpoints; then it is extended twice."""
    planned = pretrain(tmp_path / "planned", 12, *CONSTANT)
    run = pretrain(tmp_path / "run", 5, *CONSTANT)
    assert json.loads((run / "results.json").read_text())["steps"] == 5
    for steps in (7, 12):
        pretrain(run, steps, *CONSTANT)
    assert_same_runs(run, planned)
    assert "steps: 12" in (run / "config.yaml").read_text()


@pytest.mark.medium
def test_a_run_shortened_to_its_newest_step_equals_a_run_planned_so(pretrain, tmp_path) -> None:
    planned = pretrain(tmp_path / "planned", 5, *CONSTANT)
    run = pretrain(tmp_path / "run", 12, *CONSTANT, "--training.checkpoint_every=5")
    for step in (10, 12):
        shutil.rmtree(run / "checkpoints" / str(step))
    pretrain(run, 5, *CONSTANT)
    assert_same_runs(run, planned)


@pytest.mark.slow
def test_a_constant_rate_may_decay_from_now_on(pretrain, tmp_path) -> None:
    decay = ["--training.checkpoint_every=4", "--optimizer.schedule=warmup_stable_decay", "--optimizer.decay_ratio=0.5"]
    planned = pretrain(tmp_path / "planned", 12, *decay, "--training.max_to_keep=9")
    run = pretrain(tmp_path / "run", 6, *CONSTANT)
    pretrain(run, 12, *decay)
    assert_same_runs(run, planned)


@pytest.mark.medium
def test_a_schedule_that_has_fallen_is_not_extended_and_the_folder_stays_as_it_is(corpus, pretrained, fails, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(pretrained, run)
    before = {path: path.read_bytes() for path in run.glob("[!.]*.*") if path.name != "environment.json"}
    for steps, part in (("12", f"--init {run}@6 --init_state true"), ("3", "at step 6: set it to at least 6")):
        error = fails(main, f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, f"--training.steps={steps}")
        assert part in error
    error = fails(main, f"--data.train={corpus}", f"--output_dir={run}", *SMALL_RUN, "--training.batch_size=4")
    assert "training.batch_size is 8, here 4" in error and "training.log_every" in error and "@STEP" in error
    assert before == {path: path.read_bytes() for path in before}


@pytest.fixture(scope="module")
def source(pretrain, tmp_path_factory) -> Path:
    """A run of twelve steps with its checkpoints at 4, 8 and 12."""
    return pretrain(tmp_path_factory.mktemp("source") / "run", 12, *CONSTANT)


@pytest.mark.medium
def test_a_branch_with_the_same_keys_makes_the_next_steps_of_its_source(pretrain, source, tmp_path) -> None:
    own = tmp_path / "source"
    shutil.copytree(source, own)
    branch = ["--init_state=true", f"--init={own}@8", *CONSTANT]
    run = pretrain(tmp_path / "run", 12, *branch)
    assert [line for line in lines_of(run) if line["step"] > 8] == [
        line for line in lines_of(source) if line["step"] > 8
    ]
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(source))
    assert f"init: {own}@8" in (run / "config.yaml").read_text()
    shutil.rmtree(own)  # the branch saves its state at its start
    shutil.rmtree(run / "checkpoints" / "12")
    pretrain(run, 12, *branch)
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(source))


@pytest.mark.medium
def test_a_branch_with_other_batches_reads_the_rows_after_those_of_its_source(pretrain, source, tmp_path, monkeypatch):
    """And so does a branch of this branch. The source's batches have 8 rows."""
    firsts: dict[int, list[int]] = {}
    batch = PretrainingLoader.batch

    def recorded(loader: PretrainingLoader, step: int) -> Batch:
        row = loader.first_row + (step - loader.first_step) * loader.batch_size
        firsts.setdefault(loader.batch_size, []).append(row)
        return batch(loader, step)

    monkeypatch.setattr(PretrainingLoader, "batch", recorded)
    init, steps = source, 8
    for rows, expected in ((4, [64, 68]), (16, [72])):
        options = ["--init_state=true", f"--init={init}@{steps}", f"--training.batch_size={rows}", *CONSTANT]
        steps += len(expected)
        init = pretrain(tmp_path / f"run{rows}", steps, *options)
        assert sorted(set(firsts[rows]))[: len(expected)] == expected


@pytest.mark.slow
def test_a_branch_may_decay_with_other_batches_and_another_corpus(pretrain, source, tmp_path) -> None:
    decay = ["--optimizer.schedule=warmup_stable_decay", "--optimizer.decay_ratio=0.4", "--training.batch_size=4"]
    other = ["--data.train=docstrings:json,email", "--seed=3"]
    run = pretrain(tmp_path / "run", 10, "--init_state=true", f"--init={source}@8", *decay, *other)
    lines = [line for line in lines_of(run) if line["split"] == "train"]
    assert [line["step"] for line in lines] == [10]
    assert lines[0]["learning_rate"] == pytest.approx(3e-3 / 4)
    # The corpus and its seed are others, so that its first row is read in step 9.
    recorded = json.loads((run / "branch.json").read_text())
    assert recorded["step"] == 8 and list(recorded["rows"].values()) == [64], "of the source's corpus"
    moments, before = (state_of(path)["opt_state"]["1"]["mu"] for path in (run, source))
    assert jax.tree.structure(moments) == jax.tree.structure(before)
    back = pretrain(tmp_path / "back", 11, "--init_state=true", f"--init={run}@10", *CONSTANT)
    again = json.loads((back / "branch.json").read_text())["rows"]
    assert again.items() > recorded["rows"].items() and sorted(again.values()) == [8, 64]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--init={}"], "name the checkpoint of a pretraining run"),
        ([], "init_state is true, but init is null"),
        (["--init={}@7"], "has no checkpoint of step 7"),
        (["--init={}@12"], "training.steps is 12"),
        (["--init={}@8", "--optimizer.name=lion"], "optimizer.name"),
        (["--init={}@8", "--optimizer.max_grad_norm=0"], "optimizer.max_grad_norm"),
        (["--init={}@8", "--data.input_format=full_sentences"], "data.input_format"),
    ],
)
def test_a_state_that_cannot_be_continued_is_one_sentence(corpus, source, tmp_path, fails, arguments, part) -> None:
    options = [argument.format(source) for argument in arguments]
    run = [f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *SMALL_RUN, "--training.steps=12"]
    assert part in fails(main, *run, "--init_state=true", *options)


@pytest.mark.medium
def test_fine_tuning_and_pretraining_start_from_the_weights_of_a_step(pretrain, source, tmp_path) -> None:
    still = ["--optimizer.learning_rate=1e-12", "--optimizer.warmup_steps=0"]
    run = pretrain(tmp_path / "run", 1, f"--init={source}@4", *still)
    actual, expected = bert.load(run).params, bert.load(source, step=4).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), actual, expected)


class Clock:
    """A clock that a simulated run moves on."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def budget_of(folder: Path, clock: Clock, minutes: float, schedule: str) -> TimeBudget:
    config = config_of(schedule, decay_ratio=0.2) if schedule == "warmup_stable_decay" else config_of(schedule)
    training = dataclasses.replace(config.training, steps=LONG, max_minutes=minutes, log_every=10)
    folder.mkdir(exist_ok=True)
    run = RunFolder(folder, dataclasses.replace(config, training=training), resumed=False)
    return TimeBudget(run, clock(), lambda text: None, clock)


def simulate(
    budget: TimeBudget, clock: Clock, seconds: float, first: int = 0, kill_at: int = LONG, log_every: int = 10
):
    """Runs steps until the budget decides; returns the step and the steps decided on."""
    costs = StepCosts(((LONG, 1.0),), evaluations=((LONG, 50, 3.0),))
    clock.now += 20  # preparation
    budget.start(LONG, first, costs, 5.0, np.zeros(10))
    for step in range(first, kill_at):
        if step % 10 == 0 and (steps := budget.decide(step)) is not None:
            return step, steps
        clock.now += seconds + 3 * seconds * (step % 50 == 49)
    return kill_at, None


@pytest.mark.medium
@pytest.mark.parametrize("seconds", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("schedule", ["warmup_stable_decay", "constant", "inverse_sqrt"])
def test_the_steps_of_a_budget_end_in_time_and_use_it(tmp_path, schedule, seconds) -> None:
    clock, minutes = Clock(), 20.0
    budget = budget_of(tmp_path / "run", clock, minutes, schedule)
    step, steps = simulate(budget, clock, seconds)
    decided = budget.save(steps).config.training
    assert (decided.steps, decided.max_minutes) == (steps, None)
    total = clock.now - 1000 + (steps - step) * seconds + steps // 50 * 3 * seconds - step // 50 * 3 * seconds
    assert 0.9 * 60 * minutes < total < 60 * minutes
    decay = round(0.2 * steps) if schedule == "warmup_stable_decay" else 0
    assert step <= steps - decay <= step + 10 + 1
    config = config_of(schedule, decay_ratio=0.2) if decay else config_of(schedule)
    assert num_equal_steps(config, LONG, config, steps, step) == step


def test_the_time_of_an_interrupted_session_counts(tmp_path) -> None:
    clock = Clock()
    with budget_of(tmp_path / "run", clock, 20.0, "constant") as budget:
        assert simulate(budget, clock, 1.0, kill_at=500) == (500, None)
    clock.now += 1e6  # between the sessions
    _, steps = simulate(budget_of(tmp_path / "run", clock, 20.0, "constant"), clock, 1.0, first=500)
    assert 1000 < steps < 1200
    assert json.loads((tmp_path / "run" / BUDGET_FILE).read_text())["seconds"] > 1000


def test_a_budget_that_is_used_up_decays_at_once(tmp_path) -> None:
    clock = Clock()
    budget = budget_of(tmp_path / "run", clock, 5.0, "warmup_stable_decay")
    clock.now += 290
    assert simulate(budget, clock, 1.0, first=400) == (400, 500)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["optimizer.schedule", "warmup_stable_decay"]),
        (["--optimizer.schedule=constant", "--optimizer.warmup_steps=null"], ["optimizer.warmup_steps"]),
        (["--config=mini"], ["optimizer.schedule", "optimizer.warmup_steps", "phases"]),
    ],
)
def test_a_budget_needs_a_schedule_that_does_not_depend_on_the_steps(fails, arguments, parts) -> None:
    run = ["--data.train=corpus.txt", *([] if "--config=mini" in arguments else SMALL_RUN)]
    error = fails(main, *run, *arguments, "--training.max_minutes=5")
    assert all(part in error for part in parts)


BUDGET = ["--training.max_minutes=60", "--training.checkpoint_every=4", "--training.max_to_keep=9"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["warmup_stable_decay", "constant"])
def test_a_run_within_a_budget_equals_a_run_planned_with_its_steps(pretrain, tmp_path, monkeypatch, schedule) -> None:
    """The steps are decided on at step 6. The same command then finds the run as it is, also from an earlier step."""
    options = [f"--optimizer.schedule={schedule}"]
    options += ["--optimizer.decay_ratio=0.3"] if schedule == "warmup_stable_decay" else []
    steps = 10 if schedule == "warmup_stable_decay" else 6
    monkeypatch.setattr(TimeBudget, "_decide", lambda budget, step: steps if step >= 6 else None)
    planned = pretrain(tmp_path / "planned", steps, *options, "--training.checkpoint_every=4")
    run = pretrain(tmp_path / "run", 100, *options, *BUDGET)
    assert_same_runs(run, planned)
    assert json.loads((run / BUDGET_FILE).read_text())["steps"] == steps
    for step in {steps, 8}:
        shutil.rmtree(run / "checkpoints" / str(step), ignore_errors=True)
    pretrain(run, 100, *options, *BUDGET)
    assert_same_runs(run, planned)
    again = tmp_path / "again"
    assert main([f"--config={run / 'config.yaml'}", f"--output_dir={again}"]) == 0
    assert_same_runs(again, planned)


@pytest.mark.slow
def test_a_budget_of_two_minutes_ends_in_time(pretrain, tmp_path) -> None:
    options = ["--optimizer.schedule=warmup_stable_decay", "--optimizer.decay_ratio=0.2", "--training.log_every=50"]
    start = time.monotonic()
    run = pretrain(tmp_path / "run", LONG, *options, "--training.max_minutes=2", "--training.eval_every=1000")
    assert time.monotonic() - start < 122
    lines = [line for line in lines_of(run) if line["split"] == "train"]
    steps = json.loads((run / BUDGET_FILE).read_text())["steps"]
    assert lines[-1]["step"] == steps and lines[-1]["learning_rate"] < lines[0]["learning_rate"] / 5


def test_costs_of_steps_include_each_evaluation() -> None:
    costs = StepCosts(((100, 0.5), (150, 2.0)), evaluations=((100, 30, 4.0), (150, 20, 1.0)))
    assert costs.cost(0, 150) == 50 + 100 + 4 * 4 + 3 * 1  # steps 30, 60, 90 and 100; 120, 140 and 150
    assert costs.cost(0, 1) == 0.5
    assert costs.cost(29, 30) == 4.5
    assert costs.cost(90, 100) == 5 + 4
    assert costs.cost(149, 150) == 2 + 1
    assert costs.cost(95, 95) == 0


@pytest.mark.parametrize(
    ("clock", "calls", "expected"),
    [
        ([0.0, 4.0, 5.0, 5.0, 5.5, 6.5], 2, (3.5, 1.5)),
        ([0.0, 4.0, 5.0, 5.0, 5.1, 5.25, 6.0, 6.1, 6.5], 4, (4.75, 0.25)),  # two more calls
        ([0.0, 4.0, 5.0, 5.0, 5.0, 5.0, 6.0, 6.4, 6.8], 10, (4.9, 0.1)),
        ([0.0, 4.0, 30.0], 1, (4.0, 26.0)),  # a long call is not repeated: what follows its compilation is timed
    ],
)
def test_the_first_call_is_timed_apart(
    monkeypatch, clock: list[float], calls: int, expected: tuple[float, float]
) -> None:
    times, made = iter(clock), []
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    measured = timed(lambda: made.append(0))
    assert len(made) == calls, "short calls are started without waiting for each"
    assert (measured.compilation, measured.call) == pytest.approx(expected)


def test_every_host_makes_as_many_calls_as_the_main_process_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts measure different times, and a host with an extra call would wait for the others forever."""

    def calls_if_the_main_process_says(*answers: int) -> int:
        said, calls = iter(answers), []
        monkeypatch.setattr(run_length, "broadcast_from_main", lambda make: next(said))
        timed(lambda: calls.append(1))
        return len(calls)

    assert calls_if_the_main_process_says(False, 5) == 2 + 5
    assert calls_if_the_main_process_says(True) == 1, "the call was long there"
