"""`--profile`: the trace is there, and the numbers are those of a run without it."""

import contextlib
import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from bert.commands.pretrain import main as pretrain
from bert.runtime.profiling import TRACED_STEPS, WARMUP_STEPS, profiler
from tests.conftest import SMALL_RUN


def test_the_trace_can_be_opened_and_the_step_gives_its_own(tmp_path):
    said = []
    step = jax.jit(lambda state, batch: (state + batch, state @ batch))
    with profiler(False, tmp_path, said.append) as profiled:
        assert profiled(step) is step
    state = plain = batch = jnp.ones((8, 8))
    with profiler(True, tmp_path, said.append) as profiled:
        traced = profiled(step)
        for _ in range(WARMUP_STEPS + TRACED_STEPS + 1):
            (state, found), (plain, expected) = traced(state, batch), step(plain, batch)
            assert (state == plain).all() and (found == expected).all()
        [sentence] = said
    assert said == [sentence]
    assert sentence.startswith(f"the trace of {TRACED_STEPS} steps is in ")
    assert f"tensorboard --logdir {tmp_path / 'profile'} " in sentence
    assert steps_in(tmp_path, sentence) == TRACED_STEPS


def steps_in(folder, sentence):
    [perfetto] = folder.glob("profile/plugins/profile/*/perfetto_trace.json.gz")
    assert str(perfetto) in sentence
    assert list(perfetto.parent.glob("*.xplane.pb"))
    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    return sum(event.get("name") == "train" for event in events)


@pytest.mark.parametrize("ends", ["another length", "the run", "an error"])
def test_a_trace_that_cannot_be_whole_is_written_all_the_same(tmp_path, ends):
    said, step = [], jax.jit(lambda state, batch: (state + batch.sum(), batch))
    with contextlib.suppress(ZeroDivisionError), profiler(True, tmp_path, said.append) as profiled:
        traced, batch = profiled(step), jnp.ones((8, 8))
        for _ in range(WARMUP_STEPS + 2):
            traced(0.0, batch)
        assert not said
        if ends == "another length":
            for length in (4, 8, 4, 8, 4):
                traced(0.0, jnp.ones((8, length)))
        if ends == "an error":
            raise ZeroDivisionError
    [sentence] = said
    assert sentence.startswith("the trace of 2 steps is in ")
    assert steps_in(tmp_path, sentence) == 2


def test_a_run_that_is_too_short_for_a_trace_says_so(tmp_path):
    said = []
    with profiler(True, tmp_path, said.append) as profiled:
        profiled(lambda state, batch: (state, batch))(0, jnp.ones(2))
    assert said == ["no step was traced: the trace begins after 3 steps of a run"]


@pytest.mark.parametrize(("calls", "traced"), [(WARMUP_STEPS + 1, [1, TRACED_STEPS]), (WARMUP_STEPS, [TRACED_STEPS])])
def test_a_phase_that_ends_within_its_trace_or_before_it_leaves_the_next_one_its_own(tmp_path, calls, traced):
    """Both steps are made, and timed, before the first phase begins, as a run of phases does."""
    said, step = [], jax.jit(lambda state, batch: (state + batch.sum(), batch))
    with profiler(True, tmp_path, said.append) as profiled:
        first, second = profiled(step), profiled(step)
        for one, length in ((first, 8), (second, 16), (first, 8), (second, 16)):
            one(0.0, jnp.ones((4, length)))
        for _ in range(calls - 2):
            first(0.0, jnp.ones((4, 8)))
        for _ in range(WARMUP_STEPS + TRACED_STEPS):
            second(0.0, jnp.ones((4, 16)))
    assert [sentence.split(" is in ")[0].removeprefix("the trace of ") for sentence in said] == [
        f"{steps} step{'s' * (steps > 1)}" for steps in traced
    ]


@pytest.mark.slow
def test_a_run_with_a_trace_is_the_run_without(corpus, tmp_path, capsys):
    runs = {}
    for name, extra in (("plain", []), ("traced", ["--profile=true"])):
        arguments = [f"--data.train={corpus}", f"--output_dir={tmp_path / name}", *SMALL_RUN, "--training.steps=12"]
        assert pretrain([*arguments, *extra]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        runs[name] = [{key: value for key, value in json.loads(line).items() if "second" not in key} for line in lines]
    assert runs["traced"] == runs["plain"]
    assert "the trace of 5 steps is in" in capsys.readouterr().out
    assert list((tmp_path / "traced" / "profile").rglob("*.xplane.pb"))
