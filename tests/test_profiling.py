"""`--profile`: the trace is there, and the numbers are those of a run without it."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from bert.commands.pretrain import main as pretrain
from bert.profiling import LEFT_OUT, STEPS, profiled
from tests.conftest import SMALL_RUN


def test_the_trace_can_be_opened_and_the_step_gives_its_own(tmp_path):
    said = []
    step = jax.jit(lambda state, batch: (state + batch, state @ batch))
    traced = profiled(step, True, tmp_path, said.append)
    assert profiled(step, False, tmp_path, said.append) is step
    state = plain = batch = jnp.ones((8, 8))
    for _ in range(LEFT_OUT + STEPS + 1):
        (state, found), (plain, expected) = traced(state, batch), step(plain, batch)
        assert (state == plain).all() and (found == expected).all()
    [sentence] = said
    assert f"tensorboard --logdir {tmp_path / 'profile'} " in sentence
    [perfetto] = tmp_path.glob("profile/plugins/profile/*/perfetto_trace.json.gz")
    assert str(perfetto) in sentence
    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "train" for event in events) == STEPS
    assert list(perfetto.parent.glob("*.xplane.pb"))


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
