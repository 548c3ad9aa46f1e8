"""`--profile` writes a trace and changes no numbers."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from bert.commands.pretrain import main as pretrain
from bert.runs.environment import TRACED_STEPS, WARMUP_STEPS, StepProfiler
from tests.conftest import SMALL_RUN


def take_steps(profiler: StepProfiler, count: int) -> None:
    step = jax.jit(lambda state, batch: state + batch.sum())
    state = jnp.zeros(())
    for number in range(count):
        profiler.before_step(state)
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            state = step(state, jnp.ones((8, 8)))


@pytest.mark.medium
@pytest.mark.parametrize(("steps", "traced"), [(WARMUP_STEPS + TRACED_STEPS + 2, TRACED_STEPS), (WARMUP_STEPS + 2, 2)])
def test_the_trace_has_a_few_steps_also_of_a_run_that_ends_within_it(tmp_path, steps, traced):
    messages = []
    with StepProfiler(tmp_path, messages.append) as profiler:
        take_steps(profiler, steps)
    [perfetto] = tmp_path.glob("profile/plugins/profile/*/perfetto_trace.json.gz")
    assert list(perfetto.parent.glob("*.xplane.pb"))
    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "train" for event in events) == traced
    [sentence] = messages
    assert f"tensorboard --logdir {tmp_path / 'profile'} " in sentence
    assert str(perfetto) in sentence


def test_a_run_that_is_too_short_for_a_trace_says_so(tmp_path):
    messages = []
    with StepProfiler(tmp_path, messages.append) as profiler:
        take_steps(profiler, 1)
    assert messages == [f"no step was traced: the trace starts after {WARMUP_STEPS} steps"]


@pytest.mark.slow
def test_a_run_with_a_trace_is_the_run_without(corpus, tmp_path, capsys):
    runs = {}
    for name, extra in (("plain", []), ("traced", ["--profile=true"])):
        arguments = [f"--data.train={corpus}", f"--output_dir={tmp_path / name}", *SMALL_RUN, "--training.steps=12"]
        assert pretrain([*arguments, *extra]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        runs[name] = [{key: value for key, value in json.loads(line).items() if "second" not in key} for line in lines]
    assert runs["traced"] == runs["plain"]
    assert "the trace is in" in capsys.readouterr().out
    assert list((tmp_path / "traced" / "profile").rglob("*.xplane.pb"))
