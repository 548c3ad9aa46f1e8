"""Any input and any arguments of a command: exit 0, or 2 with one sentence, and never a stack trace.

Training and compiling for a plan are left out: arguments that are accepted end there.
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import huggingface_hub.constants
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bert.commands import COMMANDS, main
from bert.errors import UserError

FAST = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LONG = settings(FAST, max_examples=120, derandomize=False)

WORDS = st.sampled_from(
    [
        "ba ri",
        "ko",
        "{",
        '{"sentence": "ba"}',
        '{"question": "ba", "context": "ko"}',
        "\t",
        "ba\tri",
        '{"sentence": "\\ud800"}',
        "\ufeff",
        "\r",
        "\u2028",
        "[MASK]",
        "[SEP] ba",
        '{"sentence": 1}',
        '{"sentence": null, "index": NaN}',
        '"',
        '"ba", "ri',
        "[" * 2000,
        "9" * 5000,
    ]
)
LINES = st.lists(
    st.one_of(
        WORDS.map(str.encode),
        st.binary(max_size=20),
        st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass")),
    ),
    min_size=1,
    max_size=8,
)

VALUES = [
    *[
        "1",
        "-1",
        "0",
        "1e99",
        "nan",
        "null",
        "[]",
        "{}",
        "true",
        "=",
        "a/b/c",
        ".",
        "/",
        "..",
        "~",
        "-",
        "--",
        "none",
        "hub:x",
        "s3://a/b",
        "https://a",
        "[1,[2]]",
        "{a:1}",
        "sst2",
        "dev",
        "test",
    ],
    *[
        "missing.txt",
        "corpus.txt",
        "labels.csv",
        "run",
        "table.tsv",
        "broken.yaml",
        "empty",
        "page.html",
        "page.png",
        "onnx",
        "hf",
        "stablehlo",
        "-h=1",
    ],
    *("", "\x00", "\udcff", "é" * 300, "!!python/name:os.system"),
]
NAMES = [
    "--" + name
    for name in [
        "config",
        "output_dir",
        "data",
        "data.train",
        "data.dir",
        "init",
        "seed",
        "training.steps",
        "task",
        "tokenizer.path",
        "tokenizer.vocab_size",
        "phases",
        "model.hidden_size",
        "training.batch_size",
        "data.columns",
        "data.columns.text_a",
        "data.sequence_length",
        "training.mesh",
        "output",
        "format",
        "json",
        "show",
        "shard",
        "memory",
        "device",
        "length",
        "batch_size",
        "optimizer.learning_rate",
        "extend",
        "statistics",
        "x",
    ]
]
TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
ARGUMENTS = st.lists(
    st.one_of(
        st.sampled_from(VALUES),
        TEXT,
        st.builds("{}={}".format, st.sampled_from(NAMES), st.one_of(st.sampled_from(VALUES), TEXT)),
        st.sampled_from(NAMES),
    ),
    max_size=6,
)


def call(*arguments: str, stdin: bytes = b"") -> tuple[int, list[str], str]:
    """Runs a command in this process: (exit status, lines of standard output, standard error)."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            try:
                status = main(list(arguments))
            except SystemExit as ended:  # of --help
                status = ended.code or 0
            out.flush()
            err.flush()
    finally:
        sys.stdin = before
    return status, out.buffer.getvalue().decode().split("\n")[:-1], err.buffer.getvalue().decode()


def check(status: int, error: str) -> None:
    assert status in (0, 2), error
    if status == 2:
        last = [line for line in error.split("\n") if line.startswith("error: ")]
        assert len(last) == 1, error
        assert error.endswith(f"{last[0]}\n"), "the sentence is the last line"
    assert "Traceback" not in error


CORPUS = ["--data.train=corpus.txt", "--data.input_format=nsp", "--data.num_workers=1", "--tokenizer.vocab_size=80"]
FIRST = {
    "pretrain": CORPUS,
    "tokenizer": CORPUS,
    "examples": [*CORPUS, "--data.cache_dir=cache"],
    "finetune": ["--config=sst2"],
}


def accepted(*_: object, **__: object) -> None:
    """Stands for what takes long."""
    raise UserError("accepted: stop here")


@pytest.fixture
def place(tmp_path: Path, finetuned: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus, tables, broken files and a run."""
    for name in ("training.launch.run_pretraining", "training.launch.run_finetuning", "training.launch.finetune_seeds",
                 "analysis.memory.fit_rows"):  # fmt: skip
        monkeypatch.setattr(f"bert.{name}", accepted)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus.txt").write_text("ba ri. tu ko.\n\nlo sa. mi ne.\n")
    (tmp_path / "labels.csv").write_text("text,label\nba,x\nko,y\n")
    (tmp_path / "table.tsv").write_bytes(b"sentence\nba\n\xff\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "empty").mkdir()
    os.symlink(finetuned, tmp_path / "run")
    return tmp_path


def any_bytes(finetuned: Path, lines: list[bytes]) -> None:
    content = b"\n".join(lines)
    status, out, error = call("predict", str(finetuned), "-", stdin=content)
    check(status, error)
    inputs = content.count(b"\n") + (not content.endswith(b"\n")) if content else 0
    assert len(out) == inputs
    for line in out:
        answer = json.loads(line)
        assert ("error" in answer) != ("label" in answer)
    assert (status == 2) == (not inputs or any("error" in json.loads(line) for line in out))


@pytest.mark.medium
@FAST
@given(LINES)
def test_predict_answers_any_bytes(finetuned: Path, lines: list[bytes]) -> None:
    any_bytes(finetuned, lines)


@pytest.mark.slow
@LONG
@given(LINES)
def test_predict_answers_any_bytes_for_long(finetuned: Path, lines: list[bytes]) -> None:
    any_bytes(finetuned, lines)


def any_table(finetuned: Path, place: Path, lines: list[bytes], kind: str) -> None:
    heads = {".jsonl": b'{"sentence": "ba"}', ".txt": b"ba"}
    (place / f"table{kind}").write_bytes(b"\n".join([heads.get(kind, b"sentence"), *lines]))
    status, out, error = call("predict", str(finetuned), str(place / f"table{kind}"))
    check(status, error)
    assert all(("error" in answer) != ("label" in answer) for answer in map(json.loads, out))
    if kind == ".txt":
        assert len(out) == (place / "table.txt").read_bytes().removesuffix(b"\n").count(b"\n") + 1


@pytest.mark.medium
@FAST
@given(LINES, st.sampled_from([".csv", ".tsv", ".jsonl", ".txt"]))
def test_predict_answers_any_table(finetuned: Path, place: Path, lines: list[bytes], kind: str) -> None:
    any_table(finetuned, place, lines, kind)


@pytest.mark.slow
@LONG
@given(LINES, st.sampled_from([".csv", ".tsv", ".jsonl", ".txt"]))
def test_predict_answers_any_table_for_long(finetuned: Path, place: Path, lines: list[bytes], kind: str) -> None:
    any_table(finetuned, place, lines, kind)


def any_arguments(place: Path, command: str, arguments: list[str], first: int) -> None:
    begins = FIRST.get(command, [[]])
    with chdir(place):
        status, _, error = call(command, *begins[first % len(begins)], *arguments)
    check(status, error)


@pytest.mark.parametrize("command", COMMANDS)
@FAST
@given(ARGUMENTS, st.integers(0, 2))
def test_a_command_takes_or_refuses_any_arguments(place: Path, command: str, arguments: list[str], first: int) -> None:
    any_arguments(place, command, arguments, first)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@LONG
@given(ARGUMENTS, st.integers(0, 2))
def test_a_command_takes_or_refuses_any_arguments_for_long(
    place: Path, command: str, arguments: list[str], first: int
) -> None:
    any_arguments(place, command, arguments, first)


def any_corpus(place: Path, lines: list[bytes], kind: str) -> None:
    (place / f"any{kind}").write_bytes(b"\n".join(lines))
    output = place / f"out{len(list(place.iterdir()))}"
    arguments = [f"--data.train={place / f'any{kind}'}", "--tokenizer.vocab_size=80", "--data.num_workers=1"]
    status, _, error = call("tokenizer", *arguments, f"--output={output}")
    check(status, error)


@FAST
@given(LINES, st.sampled_from([".txt", ".jsonl", ".txt.gz", ".parquet"]))
def test_a_vocabulary_of_any_corpus(place: Path, lines: list[bytes], kind: str) -> None:
    any_corpus(place, lines, kind)


@pytest.mark.slow
@LONG
@given(LINES, st.sampled_from([".txt", ".jsonl", ".txt.gz", ".parquet"]))
def test_a_vocabulary_of_any_corpus_for_long(place: Path, lines: list[bytes], kind: str) -> None:
    any_corpus(place, lines, kind)
