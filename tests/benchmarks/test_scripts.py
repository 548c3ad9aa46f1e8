"""The benchmarks run, at toy sizes, and write down what they measure as they go."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bert
from bert.commands.pretrain import main as pretrain
from bert.tokenizer.vocabulary import load_tokenizer
from tests.conftest import SMALL_RUN

ROOT = Path(__file__).parents[2]


def run(name, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "XLA_FLAGS": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def shared(corpus, pretrained, tmp_path):
    """A folder that holds the corpus and a vocabulary where the benchmarks look for Wikipedia and BERT's own."""
    text, vocabulary = tmp_path / "shared/data/pretrain/enwiki", tmp_path / "shared/data/vocab/bert-base-uncased"
    text.mkdir(parents=True)
    vocabulary.mkdir(parents=True)
    shutil.copy(corpus, text / "train.txt")
    tokens = load_tokenizer(pretrained).get_vocab()
    (vocabulary / "vocab.txt").write_text("".join(f"{token}\n" for token in sorted(tokens, key=tokens.get)))
    return tmp_path / "shared"


def test_gaps_are_told_from_the_streams_of_a_trace(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from gpu_parts import gaps_of

    def named(kind, pid, tid, name):
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

    def span(name, pid, tid, begins, ends):
        return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begins, "dur": ends - begins}

    host = [
        named("process_name", 9, None, "/host:CPU"),
        named("thread_name", 9, 1, "Stream #1 of nothing"),
        span("input", 9, 1, 5.0, 20.0),  # while the device works
        span("input", 9, 1, 35.0, 55.0),
        span("train", 9, 1, 0.0, 100.0),
    ]
    device = [
        named("process_name", 1, None, "/device:GPU:0 NVIDIA H200"),
        named("thread_name", 1, 7, "Stream #7(Compute)"),
        named("thread_name", 1, 8, "Stream #8(Compute,MemcpyD2D)"),
        named("thread_name", 1, 9, "Stream #9(MemcpyH2D)"),
        named("thread_name", 1, 2, "XLA Modules"),
        span("jit_train_step", 1, 2, 0.0, 100.0),  # has no gaps
        span("gemm", 1, 7, 0.0, 40.0),
        span("fusion", 1, 8, 30.0, 50.0),
        span("MemcpyH2D", 1, 9, 53.0, 58.0),  # a step waits for its batch; two of the five are the host's already
        span("gemm", 1, 7, 60.0, 80.0),
        span("gemm", 1, 7, 85.0, 100.0),
    ]
    assert gaps_of(device + host) == pytest.approx({"host_gap": 0.15, "waiting_for_input": 0.08})
    assert gaps_of(host) == {"host_gap": None, "waiting_for_input": None}


@pytest.mark.slow
def test_gpu_measures_every_row_and_goes_on_where_it_was(tmp_path):
    output = tmp_path / "gpu.json"
    assert "0 s has ended" in run("gpu.py", "--small", "--budget", 0, "--output", output)
    printed = run("gpu.py", "--small", "--output", output)
    rows = json.loads(output.read_text())["rows"]
    for name, row in rows.items():
        if "error" in row:
            missing = "cuDNN is not detected" if "cudnn" in name else "ModuleNotFoundError" if "torch" in name else None
            assert missing and missing in row["error"], (name, row)
        else:
            assert row["seconds"] > 0
        assert name in printed
    assert rows["base T16 reference"]["sequences_per_second"] > 0
    assert {name for name in rows if "remat" in name} == {  # what would not fit, if the device were as small
        "base T16 fast, 256 tokens, remat dots",
        "large T32 reference, remat dots",
    }
    cells = {line.split(" | ")[0].lstrip("| "): line.split(" | ") for line in printed.splitlines() if "|" in line}
    if "error" not in rows["base T16 torch best"]:
        assert float(cells["base T16 fast"][5]) > 0
        assert not cells["base T16 fast, 32 tokens"][5]  # the peer has no such batch
    assert f"jaxlib {importlib.metadata.version('jaxlib')}" in printed
    assert f"gpu.py --small --output {output}`, {rows['base T16 fast']['date']}" in printed
    failed = sum("error" in row for row in rows.values())
    assert run("gpu.py", "--small", "--output", output).count('"took"') == failed  # they alone are tried again
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--output", str(output)]
    mixed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert mixed.returncode == 2
    assert "rows of the other sizes" in mixed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("causal", [0, 1])
def test_the_train_step_is_measured_in_turns(tmp_path, causal):
    output = tmp_path / "train_step.json"
    sizes = {"layers": 1, "width": 16, "heads": 2, "vocab_size": 99, "rows": 2, "length": 8, "predicted": 2}
    sizes["causal"] = causal
    sizes = [f"--{name}={value}" for name, value in {**sizes, "steps": 2, "rounds": 2}.items()]
    sides = ["ours float32", "ours bfloat16"]
    printed = run("train_step.py", "--output", output, "--sides", *sides, *sizes)
    results = json.loads(output.read_text())
    assert {name: sum("seconds" in run for run in runs) for name, runs in results["sides"].items()} == dict.fromkeys(
        sides, 2
    )
    assert printed.index("ours bfloat16, 1 of 2") < printed.index("ours float32, 2 of 2")
    assert "of 2:" not in run("train_step.py", "--output", output, "--sides", *sides, *sizes)


@pytest.mark.slow
def test_masking_is_measured_dynamic_and_static():
    printed = run("masking.py")
    for kind in ("single tokens, dynamic", "single tokens, static", "whole words, dynamic", "whole words, static"):
        assert f"{kind}: B 256, T 128" in printed
    assert printed.count("million tokens/s") == 4


@pytest.mark.slow
def test_building_examples_is_measured_beside_three_others(shared):
    pytest.importorskip("transformers")
    printed = run("examples.py", "--shared", shared, "--megabytes", 1, "--rounds", 1, "--workers", 1, 2)
    rows = [line.split() for line in printed.splitlines()[2:]]
    assert [tuple(row[:2]) for row in rows] == [
        (side, workers) for side in ("raw", "ours", "run_mlm") for workers in "12"
    ] + [("google", "1")]
    assert all(float(value) > 0 for row in rows for value in row[2:])


@pytest.mark.slow
def test_a_curve_is_drawn_beside_pytorch_and_not_run_twice(corpus, pretrained, tmp_path):
    pytest.importorskip("torch")
    places = [tmp_path, "--train", corpus, "--eval", corpus, "--tokenizer", pretrained]
    sizes = ["--num_seeds", 1, "--steps", 12, "--eval_every", 6, "--batch_size", 2, "--eval_rows", 8, "--dropout", 0]
    printed = run("curve.py", *places, *sizes)
    assert "ours seed 0: " in printed and "torch seed 0: " in printed
    for line in printed.splitlines()[-2:]:
        assert abs(float(line.split("|")[4])) <= 1e-4  # printed with four digits; nothing is drawn
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert "seed 0" not in run("curve.py", *places, *sizes)


@pytest.fixture(scope="module")
def model_of_128(corpus, tmp_path_factory):
    """A folder of Hugging Face's layout, of a model that reads as many tokens as the benchmarks' recipes take."""
    folder = tmp_path_factory.mktemp("model_of_128")
    sizes = [*SMALL_RUN, "--model.max_position_embeddings=128", "--training.steps=2"]
    assert pretrain([f"--data.train={corpus}", f"--output_dir={folder / 'run'}", *sizes]) == 0
    bert.load(folder / "run").save(folder / "model")
    return folder / "model"


TINY = ["--output", "OUT", "--rounds", 1, "--layers", 1, "--width", 64, "--max_tokens", 5, "--beams", 2]
SIDES, BOTH = ("ours", "ours, all states", "onnxruntime"), ("ours", "transformers")
PRINTED = {
    "filters": ("rensa", ["--corpus", "TEXT", "--evaluation", "TEXT", "--documents", 5, "--texts", 9],
                ["rensa: ", "\nc4: ", " documents are left out", " of 9 paragraphs are English"]),
    "packing": ("", ["--shared", "SHARED", "--sequence_length", 64, "--batch_size", 2, "--rounds", 2],
                ["2 steps of each in turns, B 2", "a packed step takes"]),
    "inference": ("onnxruntime", ["MODEL", "--output", "OUT", "--rounds", 1, "--sentences", 20, "--batch_size", 4,
                                  "--sides", *SIDES], [f"| {side} | 1 |" for side in SIDES]),
    "startup": ("", ["--output", "OUT", "--rounds", 1, "--quickstart", "--data.train=CORPUS", *SMALL_RUN],
                ["| first step, cold | 1 |", "| first step, warm | 1 |"]),
    "lora": ("", ["OUT", "--init", "MODEL", "--glue", "GLUE", "--tasks", "mrpc", "--num_seeds", 2, "--epochs", 1],
             ["| mrpc | full |", "| mrpc | lora |", "(100.00%)"]),
    "finetune_speed": ("torch", ["MODEL", "GLUE", "--output", "OUT", "--rounds", 1, "--tasks", "MRPC"],
                       [f"| MRPC, {side} | 1 |" for side in ("ours cold", "ours warm", "torch", "torch best")]),
    "generation": ("transformers", [*TINY, "--batch_sizes", 1, 3],
                   [*(f"| {side}, {rows} rows | 1 |" for side in BOTH for rows in (1, 3)), "| weights, 1 rows | 1 |",
                    *(f"{rows} rows: the same tokens on all sides" for rows in (1, 3))]),
    "sequence_to_sequence": ("transformers", [*TINY, "--heads", 2, "--vocab_size", 200, "--rows", 4, "--length", 8,
                                              "--texts", 2, "--steps", 1, "--parallel_text", "TEXT", "TEXT",
                                              "--batches", 2],
                             [*(f"| {part}, {side} | 1 |" for part in ("step", "beams") for side in BOTH),
                              "beams: the same tokens on all sides"]),
    "embedding_step": ("", ["MODEL", "PAIRS", "--steps", 2, "--batch_size", 4, "--length", 16],
                       ["in groups: ", "in one piece: ", " GFLOP/s, products "]),
    "seeds_at_once": ("", ["--sizes", "2 x 128", "--rows", 2, "--length", 8, "--rounds", 1],
                      ["| layers x width | 3 steps in turn, ms | one step of 3 seeds, ms | ratio |", "\n| 2 x 128 | "]),
}  # fmt: skip
"""Needed package, arguments, and parts of the output, by script. Words in capitals stand for folders and files."""


@pytest.mark.slow
@pytest.mark.parametrize("script", PRINTED)
def test_sides_are_measured_next_to_each_other(script: str, corpus, mrpc, shared, model_of_128, tmp_path) -> None:
    package, arguments, printed = PRINTED[script]
    if package:
        pytest.importorskip(package)
    (tmp_path / "MRPC").symlink_to(mrpc)
    places = {"SHARED": shared, "MODEL": model_of_128, "OUT": tmp_path / "out", "GLUE": tmp_path}
    places |= {"--data.train=CORPUS": f"--data.train={corpus}", "TEXT": corpus, "PAIRS": tmp_path}
    columns = "\t".join(["0"] * 7)
    lines = [f"{columns}\t{'ba ko ' * (1 + n % 5)}\tri tu\t{n % 6}" for n in range(40)]
    (tmp_path / "train.tsv").write_text("\n".join(["header", *lines]) + "\n")
    output = run(f"{script}.py", *(places.get(argument, argument) for argument in arguments))
    assert [part for part in printed if part not in output] == []


@pytest.mark.slow
def test_scores_after_pretraining_stand_beside_random_weights(model_of_128, sst2, tmp_path):
    glue = tmp_path / "glue"
    shutil.copytree(sst2, glue / "SST-2")
    arguments = [model_of_128, "--glue", glue, "--wnut17", glue, "--squad", glue, "--output", tmp_path / "scores"]
    arguments += ["--tasks", "sst2", "--num_seeds", 1, "--learning_rates", "1e-3"]
    table = run("transfer.py", *arguments)
    header, row = table.splitlines()[0], table.splitlines()[2]
    assert header == "| task | model | random | baselines |"
    assert row.count("1e-3 of 1e-3") == 2
    assert "tf_idf_logistic_regression" in row
    assert run("transfer.py", *arguments) == table, "runs that have ended are not repeated"
    assert "tf_idf" not in run("transfer.py", *arguments, "--frozen"), "a baseline has nothing to freeze"
    assert len(list((tmp_path / "scores" / "frozen" / "sst2").glob("*/1e-3-0/results.json"))) == 2


@pytest.mark.slow
def test_each_layer_is_read_beside_random_weights(model_of_128, sst2, tmp_path):
    shutil.copytree(sst2, tmp_path / "SST-2")
    table = run("layers.py", model_of_128, "--glue", tmp_path, "--tasks", "sst2")
    header, _, trained, random = table.splitlines()
    layers = bert.load(model_of_128).config.num_hidden_layers
    assert header == "| task | encoder | " + " | ".join(map(str, range(layers + 1))) + " |"
    for line, name in ((trained, Path(model_of_128).name), (random, "random")):
        task, encoder, *scores = line.strip("| ").split(" | ")
        assert (task, encoder, len(scores)) == ("sst2, accuracy", name, layers + 1)


@pytest.mark.slow
def test_candidates_are_pretrained_for_the_same_time(corpus, pretrained, tmp_path):
    arguments = [tmp_path, "--train", corpus, "--eval", corpus, "--tokenizer", pretrained, "--minutes", 0.2]
    names = ["bert", "rotary", "hours_narrow_embeddings", "replaced"]
    steps = [tmp_path / "steps", *arguments[1:-2], "--steps", 20, "--candidates", "bert_long_rows", "rotary_decay"]
    assert [line.split(" | ")[1] for line in run("options.py", *steps).splitlines()[2:]] == ["20", "20"]
    arguments += ["--candidates", *names]
    table = run("options.py", *arguments)
    assert [line.split()[1] for line in table.splitlines()[2:]] == names
    assert run("options.py", *arguments) == table, "runs that have ended are not repeated"


@pytest.mark.slow
def test_windows_in_blocks_take_less_memory_than_masked_ones():
    cells = run("windows.py", "--lengths", 512, "--repeats", 1).splitlines()[-1].strip("| ").split(" | ")
    assert cells[0] == "512" and len(cells) == 5
    assert 0 < int(cells[4]) < int(cells[3])


@pytest.mark.slow
def test_retrieval_is_measured_before_and_after_training(model_of_128, tmp_path):
    pytest.importorskip("pytrec_eval")
    for name in ("train-v1.1.head.json", "dev-v1.1.json"):
        paragraphs = [
            {"context": f"{word} is here", "qas": [{"question": f"Where is {word}?"}, {"question": f"Who is {word}?"}]}
            for word in ("one", "two", "three", "four")
        ]
        (tmp_path / name).write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    arguments = [model_of_128, tmp_path, "--output", tmp_path / "retrieval.json", "--steps", 2, "--batch_size", 4]
    arguments += ["--length", 16, "--learning_rate", "1e-2"]
    printed = run("retrieval.py", *arguments, "--side", "ours", "untrained", "--seeds", 1)
    assert "| ours | 1 | " in printed and "| untrained | - | " in printed
    results = json.loads((tmp_path / "retrieval.json").read_text())["sides"]
    assert set(results) == {"untrained", "ours, seed 1"}
    assert all(0 < one["mrr_at_10"] <= one["recall_at_10"] == 1 for [one] in results.values())
    again = run("retrieval.py", *arguments, "--side", "ours", "--seeds", 1)
    assert "1 of 1" not in again and "| ours | 1 | " in again, "what was measured is not measured again"
