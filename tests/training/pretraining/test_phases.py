"""Phases: resolving a list of them, and a run of two phases that may be interrupted anywhere."""

import contextlib
import dataclasses
import io
import itertools
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import yaml

import bert
from bert.commands.corpus import examples_command as examples
from bert.commands.pretrain import main
from bert.config import DataConfig, ModelConfig, OptimizerConfig, PretrainConfig, TrainingConfig
from bert.config.pretraining import PhaseConfig, resolve_phases
from bert.config.yaml_io import dump, load_config
from bert.data.pretraining.loader import PretrainingLoader
from bert.errors import UserError
from bert.training.loop import TrainLoop
from bert.training.optimizer import learning_rate_schedule, make_optimizer
from bert.training.pretraining import run as pretraining_run
from tests.conftest import NSP_RUN, SMALL_MODEL
from tests.helpers import MASKING, NumberedRows, assert_same_but_for_rounding, lines_of, originals, state_of
from tests.messages import has_all

PAPER = [PhaseConfig(share=0.9), PhaseConfig(sequence_length=512)]


def config_of(phases: list[PhaseConfig] | None = None, steps: int = 1_000_000, **sections) -> PretrainConfig:
    return PretrainConfig(
        **{
            "data": DataConfig(train="corpus.txt", max_predictions_per_sequence=20),
            "training": TrainingConfig(steps=steps, batch_size=256),
            "optimizer": OptimizerConfig(warmup_steps=10_000),
            "phases": PAPER if phases is None else phases,
            **sections,
        }
    )


def test_the_papers_two_phases() -> None:
    config = config_of()
    config.check()
    short, long = resolve_phases(config, 1_000_000)
    assert (short.first, short.end, long.first, long.end) == (0, 900_000, 900_000, 1_000_000)
    assert (short.config.data.sequence_length, long.config.data.sequence_length) == (128, 512)
    # 20 of 128 are 80 of 512: at least 15% of a full row in both
    predictions = [phase.config.data.predictions_per_row for phase in (short, long)]
    assert predictions == [20, 80]
    assert long.config.training.batch_size == 256
    assert long.config.phases is None


def test_a_phase_takes_what_it_leaves_out_from_the_rest() -> None:
    phase = PhaseConfig(None, None, 64, 9, 32, 4, 3e-4)
    [alone] = resolve_phases(config_of([phase]), 7)
    assert (alone.number, alone.first, alone.end) == (1, 0, 7)
    data, training = alone.config.data, alone.config.training
    assert (data.sequence_length, data.max_predictions_per_sequence) == (64, 9)
    assert (training.batch_size, training.gradient_accumulation_steps) == (32, 4)
    assert alone.config.optimizer.learning_rate == 3e-4
    expected = config_of([PhaseConfig()])
    [empty] = resolve_phases(expected, 7)
    assert empty.config == dataclasses.replace(expected, phases=None)
    assert resolve_phases(dataclasses.replace(expected, phases=None), 7) == [empty]


@pytest.mark.parametrize("total", [3, 10, 11, 101])
def test_no_step_is_lost_between_shares_and_steps(total: int) -> None:
    third = PhaseConfig(share=1 / 3)
    spans = [(p.first, p.end) for p in resolve_phases(config_of([third, third, PhaseConfig()]), total)]
    assert spans[0][0] == 0
    assert spans[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert all(abs((end - first) - total / 3) <= 1 for first, end in spans)
    mixed = resolve_phases(config_of([PhaseConfig(steps=2), PhaseConfig()]), total)
    assert [(p.first, p.end) for p in mixed] == [(0, 2), (2, total)]
    # Nine tenths of two steps are two by rounding.
    few = config_of([PhaseConfig(0.9), PhaseConfig()])
    assert [phase.end for total in (2, 40) for phase in resolve_phases(few, total)] == [1, 2, 36, 40]


@pytest.mark.parametrize(
    ("phases", "parts"),
    [
        ([], ["phases is an empty list"]),
        ([PhaseConfig(), PhaseConfig()], ["phases.1.share and phases.1.steps are both null"]),
        ([PhaseConfig(0.5, 3), PhaseConfig()], ["phases.1.share and phases.1.steps are both set"]),
        ([PhaseConfig(0.9), PhaseConfig(0.1)], ["phases.2.share is set", "the remaining steps"]),
        ([PhaseConfig(1.0), PhaseConfig()], ["phases.1.share is 1.0", "below 1"]),
        (
            [PhaseConfig(steps=10), PhaseConfig()],
            ["phases.2 has no steps", "10", "training.steps"],
        ),
        ([PhaseConfig(0.01), PhaseConfig()], ["phases.1 has no steps"]),
        ([PhaseConfig(0.9), PhaseConfig(0.25), PhaseConfig()], ["phases have shares of 1.15, which leaves no steps"]),
        (
            [PhaseConfig(0.5), PhaseConfig(steps=5), PhaseConfig()],
            ["shares of 0.5 and 5 of the 10 steps"],
        ),
        ([PhaseConfig(sequence_length=1024)], ["phases.1.sequence_length is 1024", "max_position_embeddings is 512"]),
        ([PhaseConfig(sequence_length=4)], ["phases.1.sequence_length is 4", "at least 8"]),
        (
            [PhaseConfig(max_predictions_per_sequence=128)],
            ["phases.1.max_predictions_per_sequence is 128, but phases.1.sequence_length is 128"],
        ),
        ([PhaseConfig(gradient_accumulation_steps=3)], ["phases.1.batch_size (256) is not divisible by", "(3)"]),
        ([PhaseConfig(learning_rate=0.0)], ["phases.1.learning_rate is 0.0"]),
    ],
)
def test_phases_that_cannot_be(phases: list[PhaseConfig], parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        config_of(phases, steps=10, optimizer=OptimizerConfig()).check()
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_each_phase_is_checked_for_predictions_of_its_own() -> None:
    config = PretrainConfig(
        data=DataConfig(train="corpus.txt", input_format="blocks"),
        model=ModelConfig(causal=True),
        training=TrainingConfig(steps=10, objective="clm"),
        phases=[PhaseConfig(0.5, max_predictions_per_sequence=5), PhaseConfig()],
    )
    with pytest.raises(UserError, match=r"phases\.1\.max_predictions_per_sequence is 5"):
        config.check()


def test_phases_need_steps_rather_than_epochs() -> None:
    with pytest.raises(UserError, match=r"phases are set, but training\.steps is null"):
        config_of(training=TrainingConfig(epochs=3)).check()


def test_one_schedule_over_all_phases_times_each_phases_peak() -> None:
    """The formula of `bert.config.pretraining`, by hand; with one peak it is the paper's schedule."""
    phases = [PhaseConfig(0.9), PhaseConfig(learning_rate=2e-4)]
    config = config_of(phases, steps=1000, optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100))
    short, long = resolve_phases(config, 1000)
    n = np.arange(1000)
    rates = [np.asarray(learning_rate_schedule(phase.config.optimizer, 1000)(n)) for phase in (short, long)]
    peaks = np.where(n < 900, 1e-3, 2e-4)
    expected = peaks * np.minimum(n / 100, (1000 - n) / 900)
    np.testing.assert_allclose(np.where(n < 900, *rates), expected, rtol=1e-4)
    [_, same] = resolve_phases(config_of(steps=1000, optimizer=config.optimizer), 1000)
    assert same.config.optimizer == config.optimizer, "without a peak of its own the paper's schedule continues"


def test_the_optimizers_of_all_phases_share_one_state() -> None:
    params = {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}
    config = config_of([PhaseConfig(0.5), PhaseConfig(learning_rate=1e-5)])
    states = [make_optimizer(p.config.optimizer, 1_000_000).init(params) for p in resolve_phases(config, 1_000_000)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


def test_phases_of_the_same_examples_read_on_where_the_one_before_ended() -> None:
    rows = NumberedRows(96)
    first = PretrainingLoader(rows, MASKING, batch_size=8, seed=1)
    second = PretrainingLoader(rows, MASKING, batch_size=16, seed=1, first_step=4, first_row=32)
    batches = [*map(first.batch, range(4)), *map(second.batch, range(4, 8))]
    seen = np.concatenate([originals(batch)[:, 0] for batch in batches])
    assert sorted(seen) == list(range(5, 101)), "one epoch, each row once"
    masked = [batch["masked_lm_positions"].tobytes() for batch in (first.batch(4), second.batch(4))]
    assert masked[0] == second.batch(4)["masked_lm_positions"][:8].tobytes(), "masks go by the step, not by the phase"
    assert masked[1] != second.batch(5)["masked_lm_positions"].tobytes()


def test_yaml_and_its_dump(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        "data: {train: a.txt}\ntraining: {steps: 1e6}\n"
        "phases:\n- share: 0.9\n- sequence_length: 512\n  batch_size: 32\n"
    )
    config = load_config(PretrainConfig, file)
    assert config.phases == [PhaseConfig(share=0.9), PhaseConfig(sequence_length=512, batch_size=32)]
    file.write_text(dump(config))
    assert load_config(PretrainConfig, file) == config


# A run of two phases: 8 rows of 16 tokens for 6 steps, then 4 rows of 32 for 4.

TWO = [
    *NSP_RUN,
    *SMALL_MODEL,
    "--data.sequence_length=16",
    "--data.max_predictions_per_sequence=3",
    "--data.num_workers=1",
    "--tokenizer.vocab_size=200",
    "--training.steps=10",
    "--training.batch_size=8",
    "--training.log_every=4",
    "--training.eval_every=5",
    "--training.checkpoint_every=4",
    "--training.max_to_keep=9",
    "--optimizer.warmup_steps=2",
    "--optimizer.learning_rate=1e-2",
    "--optimizer.schedule=linear",
    "--phases.1.share=0.6",
    "--phases.2.sequence_length=32",
    "--phases.2.batch_size=4",
    "--phases.2.gradient_accumulation_steps=2",
    "--phases.2.learning_rate=4e-3",
]


class Run(NamedTuple):
    """A finished run: its folder, what it printed, and the row lengths of the steps traced before and in all."""

    folder: Path
    said: str
    before: list[int]
    traced: list[int]


@pytest.fixture(scope="module")
def run_of_two(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("phases") / "whole"
    before: list[int] = []
    traced: list[int] = []
    make, run, said = pretraining_run.make_train_step, TrainLoop.run, io.StringIO()

    def counting(*arguments, **more) -> Callable:
        body = make(*arguments, **more)

        def step(state, batch):
            traced.append(batch["input_ids"].shape[-1])
            return body(state, batch)

        return step

    def running(loop, state):
        if not before:
            before.extend(traced)
        return run(loop, state)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(pretraining_run, "make_train_step", counting)
        patch.setattr(TrainLoop, "run", running)
        assert main([f"--data.train={corpus}", f"--output_dir={folder}", *TWO]) == 0
    return Run(folder, said.getvalue(), before, traced)


@pytest.fixture
def whole(run_of_two: Run) -> Path:
    """The folder of the run that nothing disturbed."""
    return run_of_two.folder


def test_each_line_tells_its_phase_and_each_phase_ends_with_all_three(whole: Path) -> None:
    lines = [(line["step"], line["split"], line["phase"], line["sequence_length"]) for line in lines_of(whole)]
    assert lines == [
        (4, "train", 1, 16),
        (5, "eval", 1, 16),
        (6, "train", 1, 16),
        (6, "eval", 1, 16),
        (8, "train", 2, 32),
        (10, "train", 2, 32),
        (10, "eval", 2, 32),
    ]
    rates = [line["learning_rate"] for line in lines_of(whole) if line["split"] == "train"]
    expected = [1e-2 * 7 / 8, 1e-2 * 5 / 8, 4e-3 * 3 / 8, 4e-3 * 1 / 8]  # of updates 3, 5, 7 and 9
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    assert {path.name for path in (whole / "checkpoints").iterdir() if path.name.isdigit()} == {"4", "6", "8", "10"}
    results = json.loads((whole / "results.json").read_text())
    assert (results["steps"], results["eval"]["sequence_length"]) == (10, 32)
    stored = yaml.safe_load((whole / "config.yaml").read_text())["phases"]
    assert [phase["sequence_length"] for phase in stored] == [None, 32]
    assert len((whole / "data.digest").read_text().split()) == 2
    assert bert.load(whole).fill_mask("Ba [MASK].")


@pytest.mark.slow
def test_config_yaml_repeats_the_run(whole: Path, tmp_path: Path) -> None:
    assert main([f"--config={whole / 'config.yaml'}", f"--output_dir={tmp_path / 'again'}"]) == 0
    assert lines_of(tmp_path / "again") == lines_of(whole)
    jax.tree.map(np.testing.assert_array_equal, state_of(tmp_path / "again"), state_of(whole))


SLOW = pytest.mark.slow


@pytest.mark.medium
@pytest.mark.parametrize("step", [pytest.param(5, marks=SLOW), 6, pytest.param(7, marks=SLOW)])
def test_stopped_before_at_and_after_the_boundary(
    whole: Path, corpus: Path, tmp_path: Path, monkeypatch, step: int
) -> None:
    """SIGTERM while the batch of ``step`` is made, so that the run saves there or one step later."""
    run = tmp_path / "run"
    batch = PretrainingLoader.batch

    def interrupting(loader: PretrainingLoader, number: int) -> dict[str, np.ndarray]:
        if number == step and training:
            signal.raise_signal(signal.SIGTERM)
        return batch(loader, number)

    training: list[bool] = []
    loop = TrainLoop.run
    monkeypatch.setattr(TrainLoop, "run", lambda *arguments: (training.append(True), loop(*arguments))[1])
    monkeypatch.setattr(PretrainingLoader, "batch", interrupting)
    assert main([f"--data.train={corpus}", f"--output_dir={run}", *TWO]) == 143
    monkeypatch.undo()
    assert max(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()) in (step, step + 1)
    assert main([f"--config={run / 'config.yaml'}", f"--output_dir={run}"]) == 0
    assert lines_of(run) == lines_of(whole)
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(whole))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("step", "evaluated"),
    [
        pytest.param(4, True, marks=SLOW),
        pytest.param(6, True, marks=SLOW),
        (6, False),
        pytest.param(8, True, marks=SLOW),
    ],
)
def test_killed_and_resumed_from_each_checkpoint(whole: Path, tmp_path: Path, step: int, evaluated: bool) -> None:
    """Simulates a kill: keeps the checkpoints up to a step, at the boundary with or without its evaluation."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "results.json").unlink()
    for path in (run / "checkpoints").iterdir():
        if path.name.isdigit() and int(path.name) > step:
            shutil.rmtree(path)
    if not evaluated:
        log = run / "metrics.jsonl"
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines[:3]))
    assert main([f"--config={run / 'config.yaml'}", f"--output_dir={run}"]) == 0
    assert lines_of(run) == lines_of(whole)
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(whole))


@pytest.mark.medium
def test_a_phase_resumes_with_other_micro_batches_and_ends_the_same(whole: Path, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "results.json").unlink()
    for step in (8, 10):
        shutil.rmtree(run / "checkpoints" / str(step))
    other = ["--phases.1.gradient_accumulation_steps=4", "--phases.2.gradient_accumulation_steps=1"]
    assert main([f"--data.train={corpus}", f"--output_dir={run}", *TWO, *other]) == 0
    stored = yaml.safe_load((run / "config.yaml").read_text())["phases"]
    assert [phase["gradient_accumulation_steps"] for phase in stored] == [4, 1]
    assert_same_but_for_rounding(run, whole)


def test_a_phase_is_compiled_once_and_before_the_first_step(run_of_two: Run) -> None:
    assert run_of_two.before == [16, 32]
    assert run_of_two.traced == [16, 32]


def test_what_is_said_of_the_phases(run_of_two: Run) -> None:
    said = run_of_two.said
    assert "phase 1            steps 1 to 6: 6 (" in said
    assert has_all(said, "128 (8 x 16)", "3 predicted", "0.01")
    assert has_all(said, "128 (4 x 32)", "6 predicted", "0.004")
    assert "step 4/10 (40%)  phase 1  sequence_length 16" in said
    assert "step 8/10 (80%)  phase 2  sequence_length 32" in said


@pytest.mark.medium
def test_the_data_of_every_phase_is_checked_at_the_start(whole: Path, tmp_path: Path, corpus: Path, fails) -> None:
    for name in (whole / "data.digest").read_text().split():
        run = tmp_path / name
        shutil.copytree(whole, run)
        (run / "data.digest").write_text((run / "data.digest").read_text().replace(name, "0" * 32))
        assert "the data is not what the run" in fails(main, f"--config={run / 'config.yaml'}", f"--output_dir={run}")
    cache = tmp_path / "cache"
    arguments = [f"--data.train={corpus}", f"--data.cache_dir={cache}", f"--output_dir={tmp_path / 'run'}", *TWO]
    assert examples([f"--data.train={corpus}", f"--data.cache_dir={cache}", *TWO]) == 0
    shards = sorted(cache.glob("*/train-00000.arrow"))
    assert len(shards) == 2
    for shard in shards:
        good = shard.read_bytes()
        shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        error = fails(main, *arguments)
        assert str(shard.parent.name) in error
        shard.write_bytes(good)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_other_phases_are_another_run(whole: Path, corpus: Path, fails) -> None:
    arguments = [f"--data.train={corpus}", f"--output_dir={whole}", *TWO]
    assert "its phases.1.share is 0.6, here 0.5" in fails(main, *arguments, "--phases.1.share=0.5")
    without = [argument for argument in arguments if not argument.startswith("--phases")]
    assert "its phases.1.share is 0.6, here None" in fails(main, *without)


def test_a_batch_of_a_phase_that_devices_cannot_share_is_refused(corpus, tmp_path, fails, monkeypatch) -> None:
    monkeypatch.setenv("BERT_NUM_DEVICES", "8")
    error = fails(main, f"--data.train={corpus}", f"--output_dir={tmp_path / 'run'}", *TWO)
    assert "phases.2.batch_size (4) is not divisible by 8 devices" in error
