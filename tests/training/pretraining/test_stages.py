"""Stages: phases with their own masks, corpus, rotary base, window, packing, batch sizes and schedule."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import bert
from bert.commands.pretrain import main
from bert.config import DataConfig, ModelConfig, OptimizerConfig, PretrainConfig, TrainingConfig, UserError
from bert.config.phases import PhaseConfig
from bert.config.pretraining import phase_of_step, resolve_phases
from bert.config.run_file import flatten
from bert.config.yaml_io import dump, load_config
from bert.data.pretraining.loader import PretrainingLoader
from bert.training.optimizer import learning_rate_schedule
from bert.training.run_length import num_equal_steps
from tests.conftest import SMALL_MODEL
from tests.helpers import MASKING, lines_of, state_of


def config_of(phases: list[PhaseConfig], steps: int = 100, **sections) -> PretrainConfig:
    return PretrainConfig(
        **{
            "data": DataConfig(train="a.txt", eval="held_out.txt", input_format="doc_sentences"),
            "model": ModelConfig(position_embedding_type="rotary", attention_window=8, local_rotary_base=500.0),
            "training": TrainingConfig(steps=steps, batch_size=16, gradient_accumulation_steps=2),
            "optimizer": OptimizerConfig(warmup_steps=10, schedule="constant"),
            "phases": phases,
            **sections,
        }
    )


STAGES = [
    PhaseConfig(share=0.5, masked_lm_prob=0.3, mask_share=1.0, random_share=0.0, rotary_base=100.0, attention_window=4),
    PhaseConfig(steps=20, train=["a.txt", "b.txt"], mixture_weights=[3.0, 1.0], packing=True, weight_decay=0.1),
    PhaseConfig(schedule="linear", final_rate=0.5, warmup_steps=2, learning_rate=1e-3),
]


def test_a_stage_overrides_exactly_what_it_sets() -> None:
    config = config_of(STAGES)
    config.check()
    values = [
        flatten(dataclasses.asdict(dataclasses.replace(p.config, phases=None))) for p in resolve_phases(config, 100)
    ]
    run = flatten(dataclasses.asdict(dataclasses.replace(config, phases=None)))
    changed = [{key: one[key] for key in one if one[key] != run[key]} for one in values]
    assert changed == [
        {
            "data.masked_lm_prob": 0.3,
            "data.mask_share": 1.0,
            "data.random_share": 0.0,
            "model.rotary_base": 100.0,
            "model.attention_window": 4,
        },
        {
            "data.train": ["a.txt", "b.txt"],
            "data.mixture_weights": [3.0, 1.0],
            "data.packing": True,
            "optimizer.weight_decay": 0.1,
        },
        {
            "optimizer.schedule": "linear",
            "optimizer.final_rate": 0.5,
            "optimizer.warmup_steps": 2,
            "optimizer.learning_rate": 1e-3,
        },
    ]
    assert [phase_of_step(config, step).model.rotary_base for step in (1, 50, 51, 100)] == [100, 100, 10_000, 10_000]


def test_held_out_rows_have_the_masks_of_the_run() -> None:
    data = DataConfig(train="a.txt", sequence_length=32, max_predictions_per_sequence=4)
    phases = [PhaseConfig(share=0.5, masked_lm_prob=0.3), PhaseConfig(sequence_length=64)]
    first, second = resolve_phases(config_of(phases, data=data), 100)
    assert (first.config.data.predictions_per_row, first.held_out.predictions_per_row) == (10, 4)
    assert (first.held_out.masked_lm_prob, first.held_out.sequence_length) == (0.15, 32)
    assert second.held_out == second.config.data
    assert second.held_out.predictions_per_row == 8


@pytest.mark.medium
def test_a_schedule_of_a_stage_starts_with_it() -> None:
    phases = resolve_phases(config_of(STAGES), 100)
    n = np.arange(100)
    rates = [
        np.asarray(jax.vmap(learning_rate_schedule(p.config.optimizer, p.schedule_steps[1], p.schedule_steps[0]))(n))
        for p in phases
    ]
    by_hand = np.where(n < 70, 1e-4 * np.minimum(n / 10, 1), 0)
    m = n - 70
    by_hand = np.where(n >= 70, np.where(m < 2, 1e-3 * m / 2, 1e-3 * (1 - 0.5 * (m - 2) / 28)), by_hand)
    np.testing.assert_allclose(np.where(n < 50, rates[0], np.where(n < 70, rates[1], rates[2])), by_hand, rtol=1e-5)
    assert rates[2][69] == rates[2][70], "skipped steps do not precede the schedule"


@pytest.mark.medium
def test_one_minus_sqrt_is_the_papers_formula() -> None:
    """Haegele et al. 2024, section 3.1: 1 - sqrt((n - N_decay_start) / N_decay)."""
    optimizer = OptimizerConfig(learning_rate=2e-3, warmup_steps=0, schedule="one_minus_sqrt", final_rate=0.1)
    n = np.arange(40)
    rates = jax.vmap(learning_rate_schedule(optimizer, 40))(n)
    np.testing.assert_allclose(rates, 2e-3 * (0.1 + 0.9 * (1 - np.sqrt(n / 40))), rtol=1e-5)


def test_a_ramp_divides_a_stage() -> None:
    ramp = PhaseConfig(share=0.6, batch_size_ramp=[4, 8], ramp_steps=20)
    config = config_of([ramp, PhaseConfig()])
    config.check()
    phases = resolve_phases(config, 100)
    assert [(p.number, p.first, p.end, p.config.training.batch_size) for p in phases] == [
        (1, 0, 10, 4),
        (1, 10, 20, 8),
        (1, 20, 60, 16),
        (2, 60, 100, 16),
    ]
    assert [p.config.training.gradient_accumulation_steps for p in phases] == [1, 1, 2, 2]
    assert {p.config.training.rows_per_evaluation for p in phases} == {8}
    share = dataclasses.replace(ramp, ramp_steps=None, ramp_share=1 / 3)
    assert [p.end for p in resolve_phases(config_of([share, PhaseConfig()]), 100)] == [10, 20, 60, 100]
    assert [p.end for p in resolve_phases(config_of([share, PhaseConfig()]), 5)] == [1, 3, 5], "too few steps for each"


@pytest.mark.medium
def test_extending_the_last_stage_keeps_the_steps_before() -> None:
    stages = [PhaseConfig(steps=20, schedule="cosine"), PhaseConfig(batch_size_ramp=[8], ramp_steps=5)]
    before, after = config_of(stages, 50), config_of(stages, 80)
    assert num_equal_steps(before, 50, after, 80, 60) == 50
    decaying = [PhaseConfig(steps=20), PhaseConfig(schedule="linear")]
    assert num_equal_steps(config_of(decaying, 50), 50, config_of(decaying, 80), 80, 50) == 21


@pytest.mark.medium
def test_a_ramp_of_few_steps_changes_with_their_number() -> None:
    """Parts of a ramp are left out if it has fewer steps than parts."""
    ramp = [PhaseConfig(batch_size_ramp=[2, 4, 8], ramp_share=0.05)]
    before, after = config_of(ramp, 40), config_of(ramp, 60)
    rows = [
        [p.config.training.batch_size for p in resolve_phases(one, n) for _ in range(p.first, p.end)][:40]
        for one, n in ((before, 40), (after, 60))
    ]
    same = next(step for step in range(40) if rows[0][step] != rows[1][step])
    assert num_equal_steps(before, 40, after, 60, 40) == same


@pytest.mark.parametrize(
    ("phase", "parts"),
    [
        (PhaseConfig(0.5, rotary_base=1.0), None),
        (PhaseConfig(0.5, warmup_steps=3), ["phases.1.warmup_steps", "phases.1.schedule is null"]),
        (PhaseConfig(0.5, schedule="linear", decay_ratio=0.2), ["phases.1: optimizer.decay_ratio is 0.2"]),
        (PhaseConfig(0.5, schedule="linear", warmup_steps=50), ["phases.1: optimizer.warmup_steps (50)", "50 steps"]),
        (PhaseConfig(0.5, mask_share=0.95), ["phases.1: data.mask_share is 0.95", "0.1"]),
        (PhaseConfig(0.5, mask_share=1.5), ["phases.1.mask_share is 1.5"]),
        (PhaseConfig(0.5, mixture_weights=[1, 2]), ["phases.1: data.mixture_weights has 2", "data.train has 1"]),
        (PhaseConfig(0.5, batch_size_ramp=[4]), ["phases.1.batch_size_ramp", "ramp_share or ramp_steps"]),
        (PhaseConfig(0.5, batch_size_ramp=[], ramp_steps=3), ["phases.1.batch_size_ramp is an empty list"]),
        (PhaseConfig(0.5, batch_size_ramp=[4], ramp_steps=50), ["phases.1.ramp_steps is 50", "50 steps"]),
    ],
)
def test_stages_that_cannot_be(phase: PhaseConfig, parts: list[str] | None) -> None:
    config = config_of([phase, PhaseConfig()])
    if parts is None:
        return config.check()
    with pytest.raises(UserError) as error:
        config.check()
    assert all(part in str(error.value) for part in parts), str(error.value)
    return None


def test_what_the_run_must_have() -> None:
    with pytest.raises(UserError, match=r"phases\.2\.rotary_base is set.*model\.rotary_base to 5"):
        config_of([PhaseConfig(0.5), PhaseConfig(rotary_base=5.0)]).check()
    without = DataConfig(train="a.txt")
    with pytest.raises(UserError, match=r"phases\.1\.train is set, but data\.eval is null"):
        config_of([PhaseConfig(0.5, train="b.txt"), PhaseConfig()], data=without).check()


def test_all_masks() -> None:
    """mask_share 1: every prediction is [MASK], also for the largest random number."""
    masking = dataclasses.replace(MASKING, mask_share=1.0, random_share=0.0)
    ids = np.full((4, 16), 50, np.int32)
    words = np.full((4, masking.uint64s_per_row(16)), 2**64 - 1, np.uint64)
    batch = masking(ids, words)
    rows, places = np.nonzero(batch["masked_lm_weights"])
    assert len(rows)
    assert (batch["input_ids"][rows, batch["masked_lm_positions"][rows, places]] == masking.mask_id).all()


def test_yaml_of_stages(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(dump(config_of(STAGES)))
    assert load_config(PretrainConfig, file).phases == STAGES


# A run of four stages of three or four steps. It is saved after each step.


@pytest.fixture(scope="module")
def arguments(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("stages")
    text = corpus.read_text(encoding="utf-8")
    better = folder / "better.txt"
    better.write_text(text[len(text) // 2 :], encoding="utf-8")
    held_out = folder / "held_out.txt"
    held_out.write_text(text[: len(text) // 8], encoding="utf-8")
    return [
        *SMALL_MODEL,
        f"--data.train={corpus}",
        f"--data.eval={held_out}",
        "--transfer=null",
        "--embedding_init=random",
        "--data.input_format=doc_sentences",
        "--data.sequence_length=16",
        "--data.num_workers=1",
        "--tokenizer.vocab_size=200",
        "--model.position_embedding_type=rotary",
        "--model.attention_window=4",
        "--optimizer.warmup_steps=1",
        "--optimizer.learning_rate=1e-2",
        "--optimizer.schedule=constant",
        "--training.batch_size=4",
        "--training.log_every=2",
        "--training.eval_every=9",
        "--training.checkpoint_every=3",
        "--training.max_to_keep=9",
        f"--phases.2.train=[{better}, {corpus}]",
        "--phases.2.mixture_weights=[3, 1]",
        "--phases.1.steps=3",
        "--phases.1.masked_lm_prob=0.3",
        "--phases.1.rotary_base=100",
    ]


TWO = ["--training.steps=6", "--phases.2.packing=true", "--phases.2.schedule=one_minus_sqrt"]
FOUR = [
    "--training.steps=13",
    "--training.log_every=1",
    "--training.checkpoint_every=1",
    "--training.max_to_keep=13",
    "--phases.1.steps=4",
    "--phases.1.batch_size_ramp=2",
    "--phases.1.ramp_steps=3",
    "--phases.2.steps=3",
    "--phases.2.attention_window=2",
    "--phases.3.steps=3",
    "--phases.3.packing=true",
    "--phases.4.sequence_length=32",
    "--phases.4.schedule=one_minus_sqrt",
    "--phases.4.learning_rate=4e-3",
]


def assert_equal_runs(run: Path, whole: Path) -> None:
    assert lines_of(run) == lines_of(whole)
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(whole))


@pytest.mark.slow
def test_interrupted_in_the_second_of_two_stages(arguments: list[str], tmp_path: Path, monkeypatch) -> None:
    whole, run, batch = tmp_path / "whole", tmp_path / "run", PretrainingLoader.batch
    assert main([*arguments, *TWO, f"--output_dir={whole}"]) == 0
    seen: list[int] = []

    def interrupting(loader: PretrainingLoader, step: int) -> dict[str, np.ndarray]:
        seen.append(step)
        if seen[-2:] == [3, 4]:
            signal.raise_signal(signal.SIGTERM)
        return batch(loader, step)

    monkeypatch.setattr(PretrainingLoader, "batch", interrupting)
    assert main([*arguments, *TWO, f"--output_dir={run}"]) == 143
    monkeypatch.undo()
    assert main([*arguments, *TWO, f"--output_dir={run}"]) == 0
    assert_equal_runs(run, whole)
    assert [bert.load(name).config.rotary_base for name in (f"{whole}@3", whole)] == [100, 10_000]
    stored = yaml.safe_load((whole / "config.yaml").read_text())
    assert [phase["rotary_base"] for phase in stored["phases"]] == [100, None]
    assert len((whole / "data.digest").read_text().split()) == 2


KILLED = """
import os, signal, sys
from bert.commands.pretrain import main
from bert.data.pretraining.loader import PretrainingLoader
from bert.training.loop import TrainLoop
run, batch, at = TrainLoop.run, PretrainingLoader.batch, int(sys.argv[1])
def running(loop, state):
    def killing(loader, step):
        if step == at:
            loop.checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(loader, step)
    PretrainingLoader.batch = killing
    return run(loop, state)
TrainLoop.run = running
main(sys.argv[2:])
"""


@pytest.mark.slow
def test_a_run_killed_in_each_of_its_four_stages(arguments: list[str], tmp_path: Path) -> None:
    """The first kill is within the ramp. Each later command resumes in the middle of a stage."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main([*arguments, *FOUR, f"--output_dir={whole}"]) == 0
    assert [line["batch_size"] for line in lines_of(whole) if line["split"] == "train"] == [2, 2, 2] + 10 * [4]
    for step in (2, 6, 9, 12):
        command = [sys.executable, "-c", KILLED, str(step), *arguments, *FOUR, f"--output_dir={run}"]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert max(int(folder.name) for folder in (run / "checkpoints").iterdir() if folder.name.isdigit()) == step - 1
    assert main([*arguments, *FOUR, f"--output_dir={run}"]) == 0
    assert_equal_runs(run, whole)
    # Step 3 has another rotary base than the configuration, with which the branch goes on.
    branch = tmp_path / "branch"
    assert main([*arguments, *FOUR, f"--output_dir={branch}", f"--init={whole}@3", "--init_state=true"]) == 0
    assert bert.load(branch).config.rotary_base == 10_000
    jax.tree.map(np.testing.assert_array_equal, state_of(branch)["params"], state_of(whole)["params"])
