"""The most rows that fit: as few compilations as the estimate allows, and none believed that was not made."""

import pytest

from bert.analysis.batch_fit import fit_rows
from bert.analysis.memory_estimate import AbstractMeshParallel, estimate_step
from bert.analysis.step_memory import StepMemory
from bert.config import ModelConfig
from tests.helpers import recipe

MODEL = ModelConfig(64, 16, 2, 4, 32, max_position_embeddings=16)
CONFIG = recipe(MODEL, 16, batch_size=64)
MESH = AbstractMeshParallel((1, 1, 1), "H100", 1, 256)


@pytest.fixture
def compilations(monkeypatch):
    """Stands in for the compiler: the estimate times ``factor``; above ``refused`` bytes it refuses."""
    made = []

    class Compiler:
        factor, refused = 1.0, None

        def __call__(self, config, mesh):
            made.append(64 // config.training.gradient_accumulation_steps)
            guess = estimate_step(config, mesh)
            found = StepMemory(guess.state, int(guess.working * self.factor))
            return None if self.refused and found.peak > self.refused else found

    compiler = Compiler()
    compiler.made = made
    monkeypatch.setattr("bert.analysis.batch_fit.compiled_memory", compiler)
    return compiler


def memory_of(rows: int, factor: float = 1.0) -> int:
    from dataclasses import replace

    training = replace(CONFIG.training, gradient_accumulation_steps=64 // rows)
    guess = estimate_step(replace(CONFIG, training=training), MESH)
    return guess.state + int(guess.working * factor)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.5])
def test_what_fits_is_compiled_whatever_the_estimate_said(compilations, factor) -> None:
    compilations.factor = factor
    fit = fit_rows(CONFIG, MESH, memory_of(8, factor), "none")
    assert (fit.rows, fit.micro_batches) == (8, 8)
    assert fit.memory.peak == memory_of(8, factor)
    assert len(compilations.made) == len(set(compilations.made)) <= 4
    assert factor != 1.0 or compilations.made == [8]


def test_what_the_compiler_refuses_does_not_fit(compilations) -> None:
    compilations.refused = memory_of(4)
    assert fit_rows(CONFIG, MESH, memory_of(64), "none").rows == 4
    compilations.refused = 1
    nothing = fit_rows(CONFIG, MESH, memory_of(64), "none")
    assert (nothing.rows, nothing.micro_batches, nothing.memory) == (0, 64, None)


def test_an_estimate_has_to_fit_with_its_error_on_top(compilations) -> None:
    assert fit_rows(CONFIG, MESH, 2 * memory_of(8), "none", compiled=False).rows >= 8
    assert fit_rows(CONFIG, MESH, memory_of(8), "none", compiled=False).rows < 8
    assert not compilations.made
