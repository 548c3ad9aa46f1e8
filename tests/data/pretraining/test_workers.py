"""Processes that share only a folder build one set between them; what they built is verified when it is opened."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bert.commands.corpus import examples_command as main
from bert.data.pretraining import build, shards
from bert.data.pretraining.build import build_examples, build_shard_subset
from bert.data.pretraining.dataset import open_rows
from bert.errors import UserError
from tests.conftest import NSP_RUN
from tests.data.pretraining.conftest import sentence_of, text_of
from tests.helpers import config_of, digest
from tests.messages import has_all

SHARD = """
import sys
from bert.commands.corpus import examples_command as main
from bert.data.pretraining import build as examples

examples.SHARD_BYTES = 8000
status = main(sys.argv[1:])
assert "jax" not in sys.modules
sys.exit(status)
"""


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(build, "SHARD_BYTES", 8000)


def arguments_of(place, cache, length=32):
    """Options of `bert examples` for rows of this length."""
    files = [f"--data.train={place / 'corpus.txt'}", f"--tokenizer.path={place / 'vocab.txt'}"]
    return [*files, f"--data.sequence_length={length}", "--data.num_workers=1", f"--data.cache_dir={cache}", *NSP_RUN]


def run_parts(arguments, count):
    """Output of processes that build one part of the examples each."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    commands = [[sys.executable, "-c", SHARD, *arguments, f"--shard={part}/{count}"] for part in range(1, count + 1)]
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True, env=environment) for one in commands]
    outputs = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * count, outputs
    return outputs


@pytest.mark.medium
def test_parts_in_any_order_merge_to_the_same_set(place, tokenizer, tmp_path):
    whole = build_examples(config_of(place, dupe_factor=2), tokenizer, tmp_path / "whole")
    config = config_of(place, dupe_factor=2)
    for part in ((2, 3), (3, 3), (2, 3)):
        assert build_shard_subset(config, tokenizer, part, tmp_path / "parts") is None
    example_set = build_shard_subset(config, tokenizer, (1, 3), tmp_path / "parts")
    assert digest(example_set) == digest(whole)
    assert build_shard_subset(config, tokenizer, (2, 3), tmp_path / "parts") == example_set
    assert build_shard_subset(config, tokenizer, (1, 4), tmp_path / "rest") is None
    assert digest(build_examples(config, tokenizer, tmp_path / "rest")) == digest(whole), "training builds the rest"


@pytest.mark.medium
def test_four_processes_that_share_only_a_folder(place, tokenizer, tmp_path):
    outputs = run_parts([*arguments_of(place, tmp_path / "shared"), "--data.one_sentence_per_line=true"], 4)
    assert any("examples in" in output for output in outputs)
    stages = []
    config = config_of(place)
    again = build_examples(config, tokenizer, tmp_path / "shared", lambda *stage: stages.append(stage[0]))
    assert "building examples" not in stages
    assert digest(again) == digest(build_examples(config, tokenizer, tmp_path / "whole"))


@pytest.mark.parametrize("name", ["train-00001.arrow", "unigram_counts.npy"])
def test_a_flipped_byte_is_found_when_the_set_is_opened(place, tokenizer, tmp_path, name):
    file = build_examples(config_of(place), tokenizer, tmp_path).folder / name
    data = bytearray(file.read_bytes())
    data[-len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=rf"{name} is damaged \(its checksum has changed"):
        build_examples(config_of(place), tokenizer, tmp_path)


def test_the_order_of_documents_that_others_read_is_left_alone(place, tokenizer, tmp_path):
    build_shard_subset(config_of(place), tokenizer, (1, 3), tmp_path)
    [order] = tmp_path.rglob("train-order.npy")
    before = order.stat()
    build_shard_subset(config_of(place), tokenizer, (2, 3), tmp_path)
    assert (order.stat().st_ino, order.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_process_that_comes_late_does_not_replace_what_others_read(place, tokenizer, tmp_path, monkeypatch):
    merged = []
    write = shards._write

    def late(file, columns):
        if not merged:  # the whole set is built, and read, before this one's first shard is written
            merged.append(None)
            example_set = build_examples(config_of(place), tokenizer, tmp_path / "cache")
            merged[0] = rows = open_rows([*example_set.train, *example_set.eval])
            rows.take(np.arange(len(rows)))
        return write(file, columns)

    monkeypatch.setattr(shards, "_write", late)
    build_shard_subset(config_of(place), tokenizer, (1, 2), tmp_path / "cache")
    merged[0].take(np.arange(len(merged[0])))


@pytest.mark.medium
def test_parts_train_one_vocabulary_between_them(place, tmp_path):
    arguments = [f"--data.train={place / 'corpus.txt'}", f"--data.cache_dir={tmp_path}", "--tokenizer.vocab_size=200"]
    outputs = run_parts([*arguments, "--data.num_workers=1"], 2)
    assert "".join(outputs).count("training a vocabulary") == 1


def test_a_file_system_without_locks_is_named(place, tokenizer, tmp_path, monkeypatch):
    def no_locks(descriptor, blocking=True):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("filelock.lock_descriptor", no_locks)
    with pytest.raises(UserError, match=rf"{tmp_path}.* has no locks.*data\.cache_dir"):
        build_examples(config_of(place), tokenizer, tmp_path)


@pytest.mark.medium
def test_examples_are_shown_and_counted(place, tmp_path, capsys):
    arguments = arguments_of(place, tmp_path)
    arguments += ["--data.max_predictions_per_sequence=5", "--show", "3", "--statistics"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert output.count("[CLS]") == 3
    assert "[MASK]{d" in output
    assert "B follows A" in output or "B is from another document" in output
    for fact in ("documents  57", "unknown tokens", "padding", "percentile", "% consecutive"):
        assert fact in output
    assert main([*arguments, "--data.input_format=doc_sentences"]) == 0
    assert "no label" in capsys.readouterr().out
    of_teacher = [argument for argument in arguments if "tokenizer.path" not in argument]
    with pytest.raises(UserError, match="teacher does not exist"):  # whose vocabulary a student reads
        main([*of_teacher, f"--teacher={tmp_path / 'teacher'}"])


def test_few_consecutive_pairs_are_a_warning(place, tmp_path, capsys):
    texts = [sentence_of(document, 0) for document in range(50)] + [text_of([50]), text_of([51])]
    (tmp_path / "corpus.txt").write_text("\n\n".join(texts))
    arguments = [*arguments_of(place, tmp_path / "cache"), f"--data.train={tmp_path / 'corpus.txt'}", "--data.seed=3"]
    assert main([*arguments, "--data.one_sentence_per_line=true"]) == 0
    assert has_all(capsys.readouterr().err, "%", "data.train are consecutive")


def test_on_a_terminal_segments_and_predicted_tokens_are_told_by_colour(place, tmp_path, capsys, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "500"}.items():
        monkeypatch.setenv(name, value)
    assert main([*arguments_of(place, tmp_path), "--show=3"]) == 0
    output = capsys.readouterr().out
    tokens = re.findall(r"(?:\x1b\[([\d;]+)m)?([^\s\x1b]+)(?:\x1b\[0m)? ", output[output.index("row 0") :])
    styles = {style for style, token in tokens if "{" in token}
    assert styles == {"1;7", "1;7;36"}, "predicted tokens of both segments"
    assert {style for style, token in tokens if token in ("[CLS]", "[SEP]")} == {"2"}
    assert {style for style, token in tokens if re.fullmatch(r"d\d+s\d+w\d+", token)} == {"", "36"}


def test_packed_rows_are_shown_by_example_and_counted_before_and_after(place, tmp_path, capsys):
    arguments = arguments_of(place, tmp_path, length=64)
    arguments += ["--data.packing=true", "--data.short_seq_prob=0.9", "--data.max_predictions_per_sequence=9"]
    assert main([*arguments, "--show", "4", "--statistics"]) == 0
    output = capsys.readouterr().out
    shown = re.findall(r"row (\d+), example (\d): (\d+) of 64 tokens, (\d+) predicted; B", output)
    assert len({row for row, *_ in shown}) == 4
    assert len(shown) == output.count("[CLS]") > 4
    assert all(int(predicted) == max(1, int((int(tokens) - 3) * 0.15 + 0.5)) for *_, tokens, predicted in shown)
    for row in {row for row, *_ in shown}:
        assert sum(int(tokens) for other, _, tokens, _ in shown if other == row) <= 64
    after, before = map(float, re.search(r"train: padding +([\d.]+)% of all .* a row ([\d.]+)%", output).groups())
    assert after < before / 2
    assert re.search(r"train: rows .* of up to 64 tokens and \d examples, \d+ in all", output)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--shard=5/4", "--shard 5/4 is not I/N"),
        ("--shard=x", "--shard x is not I/N"),
        ("--show=many", "--show many is not a number"),
        ("--shw=1", "unknown key --shw"),
    ],
)
def test_mistakes_of_the_command_are_one_sentence(option, message, fails):
    assert message in fails(main, option)
