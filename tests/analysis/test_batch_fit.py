"""The most rows that fit, by few compilations."""

import dataclasses

import pytest

from bert.analysis.batch_fit import fit_rows
from bert.analysis.step_memory import StepMemory
from bert.config import ModelConfig
from tests.helpers import recipe

CONFIG = recipe(ModelConfig(64, 16, 2, 4, 32, max_position_embeddings=16), 16, batch_size=64)
STATE, ROW = 10, 10


class OneDevice:
    """Stands in for a mesh of one device."""

    shape = (1, 1, 1)

    def check_batch(self, name: str, batch_size: int) -> None:
        pass


@pytest.fixture
def compilations(monkeypatch) -> list[int]:
    """Rows of each compilation; stands in for the compiler, which refuses more than 32 rows."""
    rows_compiled = []

    def compile_step(config, mesh):
        rows = 64 // config.training.gradient_accumulation_steps
        rows_compiled.append(rows)
        return None if rows > 32 else StepMemory(STATE, ROW * rows)

    monkeypatch.setattr("bert.analysis.batch_fit.compiled_memory", compile_step)
    monkeypatch.setattr("bert.analysis.batch_fit.activation_bytes", lambda *_, **__: 15)
    return rows_compiled


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32])
def test_finds_most_rows_with_few_compilations(compilations, rows) -> None:
    fit = fit_rows(CONFIG, OneDevice(), STATE + ROW * rows, "none")
    assert (fit.rows, fit.micro_batches) == (rows, 64 // rows)
    assert fit.memory == StepMemory(STATE, ROW * rows)
    assert len(compilations) == len(set(compilations)) <= 3


@pytest.mark.parametrize("rows", [1, 4, 144, 4608])
def test_many_divisors_are_bisected(compilations, monkeypatch, rows) -> None:
    training = dataclasses.replace(CONFIG.training, batch_size=4608)
    compiled = []

    def compile_step(config, mesh):
        compiled.append(4608 // config.training.gradient_accumulation_steps)
        return StepMemory(STATE, ROW * compiled[-1])

    monkeypatch.setattr("bert.analysis.batch_fit.compiled_memory", compile_step)
    config = dataclasses.replace(CONFIG, training=training)
    said: list[str] = []
    fit = fit_rows(config, OneDevice(), STATE + ROW * rows, "none", said.append)
    assert fit.rows == rows
    assert len(compiled) == len(set(compiled)) == len(said) <= 5
    monkeypatch.setattr("bert.analysis.batch_fit.activation_bytes", lambda *_, **__: 1)  # far too optimistic
    compiled.clear()
    assert fit_rows(config, OneDevice(), STATE + ROW * rows, "none").rows == rows
    assert len(compiled) == len(set(compiled)) <= 10


def test_long_rows_recomputed_start_from_the_scores_of_one_layer(monkeypatch) -> None:
    heads, length, layers = 12, 8192, 22
    model = ModelConfig(64, 768, layers, heads, 3072, max_position_embeddings=length)
    config = recipe(model, 512, batch_size=72, remat="full", dtype="bfloat16")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=length))
    row, compiled = 5 * heads * length**2, []  # the scores of a layer by the formula, more than all that it keeps

    def compile_step(config, mesh):
        compiled.append(72 // config.training.gradient_accumulation_steps)
        return StepMemory(STATE, row * compiled[-1])

    monkeypatch.setattr("bert.analysis.batch_fit.compiled_memory", compile_step)
    assert fit_rows(config, OneDevice(), STATE + 3 * row, "full").rows == 3
    assert compiled[0] <= 3
    assert len(compiled) <= 3


def test_nothing_fits(compilations) -> None:
    fit = fit_rows(CONFIG, OneDevice(), STATE, "none")
    assert (fit.rows, fit.micro_batches, fit.memory) == (0, 64, StepMemory(STATE, ROW))
