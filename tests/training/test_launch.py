"""`bert.pretrain` and `bert.finetune`: the same runs as the commands, and error messages for mistakes."""

import asyncio
import dataclasses
import inspect
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import bert
from bert.config import FinetuneConfig, PretrainConfig
from bert.runs.checkpoint import Checkpointer
from bert.runs.checkpoint_directory import BEST
from bert.runs.environment import read_environment
from bert.runs.loggers import Logger
from bert.runtime.interrupts import Interrupted
from bert.training.arguments import ARGUMENTS
from bert.training.launch import as_library_call, prepare_pretraining
from bert.training.loop import TrainLoop
from bert.training.sweep import PREPARE
from tests.conftest import SMALL_RUN
from tests.helpers import lines_of, state_of

NO_KEYS = {"config", "overrides", "callbacks", "unknown"}
"""Parameters that set no key of the configuration."""

OVERRIDES = {"data": {"max_length": 32, "buckets": [32]}, "training.batch_size": np.int64(8)}


class GoneLogger(Logger):
    """The server of this logger is gone."""

    num_calls = 0

    def start(self, start):
        self.num_calls += 1
        raise ConnectionError

    log = end = start


def assert_same_run(run: bert.Run, folder: Path) -> None:
    actual, expected = run.results, bert.Run(folder).results
    assert actual.pop("seconds") > 0 < expected.pop("seconds")
    assert actual.pop("timing") and expected.pop("timing")
    assert actual == expected
    assert lines_of(run.path) == lines_of(folder)
    jax.tree.map(np.testing.assert_array_equal, state_of(run.path)["params"], state_of(folder)["params"])


@pytest.mark.medium
def test_pretrain_is_the_command(tmp_path, corpus, pretrained):
    values = dict(argument.removeprefix("--").split("=") for argument in SMALL_RUN)  # texts are values, too
    values |= {"data.train": corpus, "transfer": None, "training.steps": 6, "optimizer.learning_rate": 3e-3}
    logger = GoneLogger()
    run = bert.pretrain(output_dir=tmp_path / "run", overrides={**values, "loggers": []}, callbacks=[logger])
    assert_same_run(run, pretrained)
    assert logger.num_calls == 1 and not (run.path / "tensorboard").exists()
    assert (run.config.training.steps, run.metrics[-1]["step"], run.model.step) == (6, 6, 6)


@pytest.mark.slow
def test_finetune_is_the_command_also_interrupted_in_an_event_loop_and_resumed_in_a_thread(
    tmp_path, monkeypatch, pretrained, finetuned, sst2
):
    folder, result = tmp_path / "run", []

    def call():
        return bert.finetune("sst2", init=bert.Run(pretrained), output_dir=folder, overrides=overrides)

    async def call_in_a_loop():
        return call()

    overrides = {**OVERRIDES, "data.dir": sst2}
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        log = TrainLoop._log
        patch.setattr(TrainLoop, "_log", lambda loop: (log(loop), signal.raise_signal(signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt, match=r"^saved at.*resume$"):
            asyncio.run(call_in_a_loop())
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(bert.UserError, match=r"has no results\.json, .*: resume it"):
        _ = bert.Run(folder).results
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    thread.join()
    assert result == [bert.Run(folder)]
    assert_same_run(result[0], finetuned)
    assert len(read_environment(folder)) == 2
    again = bert.finetune(replace(result[0].config, profile=False))  # a configuration is a configuration
    assert again.results["dev"] == result[0].results["dev"]


def test_a_sigterm_reaches_its_own_handler_once_the_state_is_saved(monkeypatch, capsys):
    monkeypatch.setenv("BERT_COMPILATION_CACHE", "off")
    caught = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    try:
        with (
            pytest.raises(KeyboardInterrupt, match="at step 1,000"),
            as_library_call(),
        ):
            raise Interrupted(1000, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [signal.SIGTERM]
    assert capsys.readouterr().out == "saved at step 1,000: make the same call again to resume\n"


class Recorder(bert.Callback):
    """Notes every call; stops or fails at the first metrics from a step on."""

    def __init__(self, stop_at=None, fail_at=None):
        self.stop_at, self.fail_at, self.calls = stop_at or 99, fail_at or 99, []

    def on_start(self, start):
        self.calls.append(("start", start.start_step, start.total_steps))

    def on_metrics(self, step, split, metrics):
        self.calls.append((split, step))
        assert metrics["loss"] > 0
        if step >= self.fail_at:
            raise ZeroDivisionError
        return step >= self.stop_at

    def on_end(self, results):
        self.calls.append(("end", results and results["steps"]))


@pytest.mark.medium
def test_callbacks_stop_and_fail_and_the_run_resumes(tmp_path, pretrained, sst2):
    def call(*callbacks):
        overrides = {**OVERRIDES, "data.dir": sst2, "training.log_every": 2}
        return bert.finetune(
            "sst2", init=pretrained, output_dir=tmp_path / "run", overrides=overrides, callbacks=callbacks
        )

    stopping, silent = Recorder(stop_at=2), Recorder()
    run = call(stopping, silent)
    assert stopping.calls == silent.calls == [("start", 0, 15), ("train", 2), ("eval", 2), ("end", 2)]
    assert (run.results["steps"], run.results["stopped_early"], run.model.step) == (2, True, 2)
    failing = Recorder(fail_at=6)
    with pytest.raises(ZeroDivisionError):
        call(failing, silent)
    middle = [("train", 4), ("eval", 5), ("train", 6)]
    assert failing.calls == [("start", 2, 15), *middle, ("end", None)]
    assert silent.calls[4:] == [("start", 2, 15), *middle[:2], ("end", None)]
    last = Recorder()
    assert call(last).results["steps"] == 15
    assert (last.calls[0], last.calls[-1]) == (("start", 6, 15), ("end", 15))


@pytest.mark.medium
def test_a_run_resumes_with_its_best_step_its_dev_rows_and_after_a_signal_at_its_end(
    tmp_path, pretrained, sst2, monkeypatch
):
    data, folder = shutil.copytree(sst2, tmp_path / "data"), tmp_path / "run"

    def call(*callbacks):
        overrides = {**OVERRIDES, "data.dir": data, "training.log_every": 2}
        return bert.finetune("sst2", init=pretrained, output_dir=folder, overrides=overrides, callbacks=callbacks)

    call(Recorder(stop_at=6))
    (folder / "checkpoints" / BEST).write_text("7\n")  # its checkpoint was being written when the process was killed
    labels = str.maketrans("01", "10")
    (data / "dev.tsv").write_text((sst2 / "dev.tsv").read_text().translate(labels))
    with pytest.raises(bert.UserError, match="the data is not what the run"):
        call()
    shutil.copy(sst2 / "dev.tsv", data)
    with monkeypatch.context() as patch:
        thin_out = Checkpointer.thin_out
        patch.setattr(Checkpointer, "thin_out", lambda self: (thin_out(self), signal.raise_signal(signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt, match=r"^saved at step 15.*resume$"):
            call()
    run = call()
    scores = {line["step"]: line["accuracy"] for line in run.metrics if line["split"] == "eval"}
    assert run.results["best_step"] == max(scores, key=scores.get)
    assert run.results["dev"]["accuracy"] == max(scores.values())
    assert (folder / "checkpoints" / str(run.results["best_step"])).is_dir()


@pytest.mark.medium
def test_before_the_first_checkpoint_several_mistakes_are_corrected(tmp_path, pretrained, sst2, monkeypatch):
    data, folder = shutil.copytree(sst2, tmp_path / "data"), tmp_path / "run"

    class KilledError(Exception):
        """In place of kill -9."""

    def kill(*_):
        raise KilledError

    def call(max_length=32):
        overrides = {"data": {"dir": data, "max_length": max_length, "buckets": [max_length]}}
        return bert.finetune("sst2", init=pretrained, output_dir=folder, overrides=overrides)

    monkeypatch.setattr(TrainLoop, "run", kill)
    with pytest.raises(KilledError):
        call()
    with pytest.raises(bert.UserError, match=r"data\.max_length is 64, but model\.max_position_embeddings"):
        call(max_length=64)
    with pytest.raises(KilledError):
        call()
    (data / "train.tsv").write_text("sentence\tlabel\nba ri\t1\nko ri\t0\n")
    with pytest.raises(bert.UserError, match=r"remove .*run.*no checkpoint"):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not(optimizer, tmp_path, corpus):
    values = dict(argument.removeprefix("--").split("=") for argument in SMALL_RUN)
    values |= {"data.train": corpus, "transfer": None, "optimizer.name": optimizer}
    values |= {"optimizer.schedule": "warmup_stable_decay", "training.log_every": 1}
    whole = bert.pretrain(output_dir=tmp_path / "whole", overrides=values)
    bert.pretrain(output_dir=tmp_path / "run", overrides=values, callbacks=[Recorder(stop_at=4)])
    resumed = bert.pretrain(output_dir=tmp_path / "run", overrides=values)
    jax.tree.map(np.testing.assert_array_equal, state_of(resumed.path), state_of(whole.path))
    assert lines_of(resumed.path)[-1] == lines_of(whole.path)[-1]


@pytest.mark.slow
def test_a_stopped_phase_is_the_last_one(tmp_path, corpus):
    values = dict(argument.removeprefix("--").split("=") for argument in SMALL_RUN)
    values |= {"data.train": corpus, "phases": [{"share": 0.5}, {"batch_size": 4}]}
    run = bert.pretrain(output_dir=tmp_path / "run", overrides=values, callbacks=[Recorder(stop_at=2)])
    assert (run.results["steps"], [line["step"] for line in run.metrics]) == (2, [2, 2])
    values["phases"] = [{"share": 0.5}, {"sequence_length": 16}]
    longer = bert.pretrain(output_dir=tmp_path / "longer", overrides=values, callbacks=[Recorder(stop_at=2)])
    values = {**values, "phases": None, "training.steps": 2}
    whole = bert.pretrain(output_dir=tmp_path / "whole", overrides=values)
    assert longer.results["corpus"] == whole.results["corpus"], "of the phase that was reached"


def rows_of(sst2):
    lines = (sst2 / "train.tsv").read_text().splitlines()[1:]
    return [dict(zip(("text", "label"), line.split("\t"), strict=True)) for line in lines]


@pytest.mark.medium
def test_rows_in_memory_are_kept_with_the_run_and_others_are_refused(tmp_path, pretrained, sst2, monkeypatch):
    folder, rows = tmp_path / "run", rows_of(sst2)

    def call(rows, **more):
        return bert.finetune(
            "classification", init=pretrained, train=rows, output_dir=folder, overrides=OVERRIDES | more
        )

    with pytest.raises(bert.UserError, match=r"^argument train, row 41: .*'label'"):
        call([*rows, {"text": "ba"}])
    with pytest.raises(bert.UserError, match=r"run/rows/no\.jsonl does not exist"):
        call(rows, **{"data.test": "no.jsonl"})
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("bert.training.finetuning.setup.make_task", lambda config: 1 / 0)
        call(rows, **{"training.steps": 2})
    run = call(rows, **{"training.steps": 2})
    assert (run.config.data.dir, run.config.data.dev_fraction) == (str(folder / "rows"), 0.1)
    assert run.config.data.stratify_dev, "no step of the failed call was trained, so that the run is new"
    assert run.predict(["ba ri"]) == run.model.predict(["ba ri"])
    with pytest.raises(bert.UserError, match=r"other rows of train \(40, now 39\)"):
        call(rows[:-1], **{"training.steps": 2})
    with pytest.raises(bert.UserError, match=r"is at step 2, and with 4 steps instead of 2 .* another --output_dir"):
        call(rows, **{"training.steps": 4})
    assert call(rows, **{"training.steps": 2}).results["dev"] == run.results["dev"]
    with pytest.raises(bert.UserError, match=r"data\.dir no does not exist"):
        bert.finetune("mrpc", init=pretrained, output_dir=folder, overrides={"data.dir": "no"})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"train": 5}, "train is 5: pass a path, a list of dictionaries, a pandas.DataFrame or a datasets.Dataset"),
        ({"train": [{"text": "a"}, "b"]}, "train, row 2 is 'b': pass a dictionary of columns for each row"),
        ({"dev": [{"text": "a"}]}, "dev is given as rows, and train is not given: pass both"),
        ({"train": []}, "train has no rows: pass at least one"),
        ({"train": "no.csv"}, "no.csv does not exist or is not a file: set data.train to the file of train"),
        ({"train": [{"a": 1}], "overrides": {"data.dir": "d"}}, "data.dir is set by an argument and by the overrides"),
        ({"config": "mrpc", "train": [{"a": 1}]}, "train is given as rows, and the task mrpc reads its own files"),
    ],
)
def test_wrong_rows_are_one_sentence(tmp_path, arguments, sentence):
    with pytest.raises(bert.UserError) as caught:
        bert.finetune(**{"config": "classification", "init": "none", "output_dir": tmp_path / "run"} | arguments)
    assert sentence in str(caught.value)


def test_pretrain_starts_from_what_finetune_starts_from(tmp_path):
    for init in (tmp_path, str(tmp_path), "organisation/name"):
        request = prepare_pretraining("domain", init=init, output_dir=tmp_path, overrides={"data.train": "*.txt"})
        assert request.config.init == str(init)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"optimizer.learning_rat": 1}, "overrides: unknown key optimizer.learning_rat: did you mean optimizer.learni"),
        ({"optimizer.lr": 1}, "overrides: unknown key optimizer.lr: did you mean optimizer.learning_rate?"),
        ({"training.bs": 1}, "overrides: unknown key training.bs: did you mean training.batch_size?"),
        ({"wd": 1}, "overrides: unknown key wd: did you mean optimizer.weight_decay?"),
        ({"optimizer.schedule": "wsd"}, "overrides: optimizer.schedule: wsd: did you mean warmup_stable_decay?"),
        ({"init": "X"}, "init is set by an argument and by the overrides: remove one of the two"),
        ({"optimizer": 1}, "overrides: optimizer is a section: set its keys one by one, for example optimizer.name"),
        ({"training": {"steps": 1.5}}, "overrides: training.steps: 1.5: a whole number (1000 or 1e3) or null is exp"),
        ({"training.steps": True}, "overrides: training.steps: true: a whole number"),
        ({"training.steps": object}, "<class 'object'> is no value of a configuration: pass a number, a text, a list"),
        ({"training.steps": 5, "training": {"steps": 5}}, "overrides: training.steps is already set: remove one"),
        ({"training.batch_size": 0}, "overrides: training.batch_size is 0: "),
        ({"output_dir": "there"}, "output_dir is set by an argument and by the overrides: remove one of the two"),
        ([("training.steps", 5)], "overrides is [('training.steps', 5)]: pass a dictionary of keys and values"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, values, sentence):
    with pytest.raises(bert.UserError) as caught:
        bert.pretrain(init=tmp_path if "init" in values else None, output_dir=tmp_path / "run", overrides=values)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("mrpcs", "config mrpcs: no such file or recipe: did you mean mrpc?"),
        ("tiny", "configs/tiny.yaml, line "),
        (PretrainConfig(), "config is a PretrainConfig: pass it to bert.pretrain"),
        (5, "config is 5: pass the name of a recipe, a path or a FinetuneConfig"),
        (FinetuneConfig(init="none"), "config: data.dir is not set"),
        (Path("no.yaml"), "config no.yaml: no such file or recipe"),
    ],
)
def test_wrong_configurations_are_one_sentence(config, sentence):
    with pytest.raises(bert.UserError) as caught:
        bert.finetune(config)
    assert sentence in str(caught.value)


def test_a_corpus_may_be_several_paths(tmp_path):
    for train in (["a.txt", tmp_path / "b.txt"], ("a.txt", tmp_path / "b.txt")):
        config = prepare_pretraining("gpt_mini", train=train, eval=Path("c.txt"), output_dir=tmp_path).config
        assert config.data.train == ["a.txt", str(tmp_path / "b.txt")]
        assert config.data.eval == "c.txt"
    with pytest.raises(bert.UserError, match="eval is 5, which is not a path"):
        prepare_pretraining("gpt_mini", train="a.txt", eval=5, output_dir=tmp_path)


@pytest.mark.parametrize("function", [bert.pretrain, bert.finetune])
def test_each_argument_sets_its_key(function, tmp_path):
    config_class, prepare = PREPARE[function]
    assert {*ARGUMENTS[config_class]} == {*inspect.signature(function).parameters} - NO_KEYS
    assert len(ARGUMENTS[config_class]) == 12
    inputs = {"train": str(tmp_path / "train.tsv"), "dev": str(tmp_path / "dev.tsv"), "eval": ["eval.txt"]}
    inputs |= {"init": None, "output_dir": tmp_path / "run", "epochs": 1.5, "batch_size": np.int64(6), "seed": 7}
    inputs |= {"learning_rate": np.float32(0.5), "dtype": "bfloat16", "sequence_length": 64, "vocab_size": 300}
    inputs |= {"max_length": 48, "num_seeds": 2, "patience": 3, "steps": None}
    inputs |= {"init": "none"} if function is bert.finetune else {}
    arguments = {name: inputs[name] for name in ARGUMENTS[config_class]}
    recipe = "classification" if function is bert.finetune else "gpt_mini"
    config = dataclasses.asdict(prepare(recipe, **arguments).config)
    for name, key in ARGUMENTS[config_class].items():
        value = config
        for part in key.split("."):
            value = value[part]
        assert value == (str(inputs[name]) if name == "output_dir" else inputs[name]), name


@pytest.mark.parametrize(
    ("function", "arguments", "sentence"),
    [
        (bert.finetune, {"lerning_rate": 1}, "bert.finetune has no argument lerning_rate: did you mean learning_rate?"),
        (bert.finetune, {"lr": 1}, "bert.finetune has no argument lr: did you mean learning_rate?"),
        (bert.finetune, {"num_train_epochs": 3}, "bert.finetune has no argument num_train_epochs: did you mean epochs"),
        (bert.finetune, {"per_device_train_batch_size": 3}, "did you mean batch_size?"),
        (bert.finetune, {"max_seq_length": 3}, "did you mean max_length?"),
        (bert.finetune, {"rank": 8}, "has no argument rank: use overrides={'lora.rank': ...}"),
        (bert.finetune, {"weight_deca": 0.1}, "use overrides={'optimizer.weight_decay': ...}"),
        (bert.finetune, {"xyzzy": 0.1}, "the arguments are train, dev, init, output_dir, epochs, "),
        (
            bert.pretrain,
            {"sequence_lenght": 8},
            "bert.pretrain has no argument sequence_lenght: did you mean sequence_",
        ),
        (bert.pretrain, {"max_length": 8}, "bert.pretrain has no argument max_length: "),
        (bert.pretrain, {"hidden_size": 8}, "use overrides={'model.hidden_size': ...}"),
        (bert.pretrain, {"steps": "many"}, "argument steps: training.steps: many: a whole number"),
        (bert.pretrain, {"batch_size": 0}, "argument batch_size: training.batch_size is 0: "),
        (bert.pretrain, {"steps": 5, "overrides": {"training.steps": 5}}, "training.steps is set by an argument and"),
        (bert.pretrain, {"steps": 5, "epochs": 5}, "training.steps and training.epochs are both set"),
    ],
)
def test_a_wrong_argument_is_one_sentence(function, arguments, sentence, tmp_path):
    recipe = {bert.finetune: "classification", bert.pretrain: "quickstart"}[function]
    with pytest.raises(bert.UserError) as caught:
        function(recipe, output_dir=tmp_path / "run", **arguments)
    assert sentence in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_sweep_accepts_the_arguments_of_its_function(tmp_path):
    space = {"optimizer.learning_rate": [1e-4, 1e-3]}
    for arguments, sentence in (
        ({"epoch": 3}, "bert.finetune has no argument epoch: did you mean epochs?"),
        ({"learning_rate": 3}, "optimizer.learning_rate is set and swept: remove one of the two"),
    ):
        with pytest.raises(bert.UserError) as caught:
            bert.sweep(bert.finetune, "classification", space, init="none", output_dir=tmp_path / "sweep", **arguments)
        assert sentence in str(caught.value)


def test_without_a_device_nothing_is_written(tmp_path, monkeypatch):
    def fail():
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(bert.UserError, match=r"JAX finds no device \(no backend\): "):
        bert.finetune("sst2", init="none", output_dir=tmp_path / "run", overrides={"data.dir": tmp_path})
    assert not (tmp_path / "run").exists()


def test_a_configuration_without_a_folder_needs_one(tmp_path):
    with pytest.raises(bert.UserError, match="output_dir is not set: pass output_dir"):
        bert.finetune(replace(FinetuneConfig(), init="none"), overrides={"data.dir": "d", "training.epochs": 1})
    with pytest.raises(bert.UserError, match="holds no run"):
        bert.Run(tmp_path)


@pytest.mark.parametrize(("collapsed", "warned"), [(True, True), ([1], True), (False, False), ([], False)])
def test_a_collapsed_model_is_a_warning(collapsed, warned, monkeypatch, tmp_path, capsys):
    ended = SimpleNamespace(results={"collapsed": collapsed})
    monkeypatch.setattr("bert.training.launch.start_or_resume", lambda *_: ended)
    assert bert.finetune("sst2", init="run", output_dir=tmp_path, overrides={"data.dir": str(tmp_path)}) is ended
    assert capsys.readouterr().err.startswith("collapsed: on dev the model gives the same answer") == warned


@pytest.mark.slow
def test_rows_in_memory_are_swept_and_all_seeds_are_scored_on_the_same_of_them(pretrained, tmp_path):
    rows = [
        {"text": f"{text} {row}", "label": label} for row in range(10) for text, label in (("ba", "x"), ("ko", "y"))
    ]
    overrides = {"data.max_length": 16, "data.buckets": [16], "training.epochs": 1, "training.batch_size": 4}
    arguments = {"init": pretrained, "train": rows, "output_dir": tmp_path / "sweep", "overrides": overrides}
    runs = bert.sweep(bert.finetune, "classification", {"seed": [3, 4]}, **arguments)
    assert sorted((run.config.seed, run.config.data.sample_seed) for run in runs) == [(3, 0), (4, 0)]
    own = tmp_path / "sweep" / "seed=4" / "config.yaml"  # as of a sweep that began without it
    own.write_text(own.read_text().replace("sample_seed: 0", "sample_seed: null"))
    own.with_name("config.digest").unlink()
    again = bert.sweep(bert.finetune, "classification", {"seed": [4]}, **arguments)
    assert again[0].config.data.sample_seed is None, "it resumes, whichever the first seed is"
    ids = [[line.split("\t")[0] for line in (run.path / "predictions" / "dev.tsv").open()] for run in runs]
    assert ids[0] == ids[1]
    for key, values in (("data.sample_seed", [1, 2]), ("data.dev_fraction", [0.1, 0.2]), ("data.dev", ["a", "b"])):
        with pytest.raises(bert.UserError, match=f"{key} cannot be swept"):
            bert.sweep(bert.finetune, "classification", {key: values}, init=pretrained, train=rows)
    for key, values in (("data.seed", [1, 2]), ("data.eval", ["a", "b"]), ("data.eval_fraction", [0.1, 0.2])):
        with pytest.raises(bert.UserError, match=f"{key} cannot be swept"):
            bert.sweep(bert.pretrain, "tiny", {key: values})
