"""Sequence to sequence: files of pairs, their rows and batches, texts from token ids, scores and bad input."""

import dataclasses
import itertools
import json
from pathlib import Path

import datasets
import numpy as np
import pytest

from bert.config import ColumnsConfig, FinetuneConfig, ModelConfig, TaskDataConfig, TokenizerConfig, UserError
from bert.config.training import TrainingConfig
from bert.data.encoding import target_boundaries
from bert.data.rows import IGNORE_INDEX
from bert.tasks import TASKS, make_task
from bert.tasks.sequence_to_sequence import SequenceToSequenceTask, Written
from bert.tokenizer.byte_level import train_byte_level
from bert.tokenizer.vocabulary import train_tokenizer

SOURCES, TARGETS = "rot blau\nblau\nrot rot rot\n", "red blue\nblue\nred red red\n"
PARALLEL = TaskDataConfig(dir="data", source="de", target="en", max_length=8)


def task_of(data: TaskDataConfig, name: str = "translation") -> SequenceToSequenceTask:
    return TASKS[name].from_config(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"train.de": SOURCES, "train.en": TARGETS, "val.de": "rot\n", "val.en": "red\n",
             "test_2016.de": "blau\n", "test_2016.en": "blue\n", "test_new.de": "rot\nblau\n"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter([SOURCES, TARGETS]), TokenizerConfig(vocab_size=60, min_frequency=1))


def test_parallel_files_are_read_by_their_ends(folder: Path) -> None:
    task = task_of(PARALLEL)
    assert task.splits(folder) == ["train", "dev", "test_2016", "test_new"]
    train, new = task.read(folder, "train"), task.read(folder, "test_new")
    assert list(train.sources) == ["rot blau", "blau", "rot rot rot"]
    assert train.references == [["red blue"], ["blue"], ["red red red"]]
    assert list(train.sentences()) == [*train.sources, *train.targets]
    assert (new.labelled, list(new.sources)) == (False, ["rot", "blau"])
    other = task_of(TaskDataConfig(dir="data", source="en", target="de"))
    assert other.read(folder, "dev").references == [["rot"]]


def test_rows_of_a_column_are_scored_by_a_model_of_parallel_files(folder: Path) -> None:
    examples = task_of(PARALLEL).labelled_examples([{"source": "rot", "target": "red"}])
    assert (list(examples.sources), examples.references) == (["rot"], [["red"]])


def test_rouge_is_refused_before_training_on_other_letters(folder: Path) -> None:
    (folder / "train.en").write_text("красный синий\nсиний\nred\n")
    task = task_of(PARALLEL, "summarization")
    with pytest.raises(UserError, match="ROUGE"):
        task.fit(task.read(folder, "train"))
    other = task_of(dataclasses.replace(PARALLEL, metrics=["chrf"]), "summarization")
    assert other.fit(other.read(folder, "train")).main_metric == "chrf"


def test_columns_have_further_references(tmp_path: Path) -> None:
    rows = [{"text": "a b", "summary": "a", "more": ["b", "c"]}, {"text": "c", "summary": "c", "more": None}]
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "train.tsv").write_text("text\tsummary\na b\ta\n")
    columns = ColumnsConfig(source="text", target="summary", references="more")
    task = task_of(TaskDataConfig(dir="data", columns=columns), "summarization")
    assert task.splits(tmp_path) == ["train", "dev"]
    assert task.read(tmp_path, "train").references == [["a"]]
    assert task.read(tmp_path, "dev").references == [["a", "b", "c"], ["c"]]


def test_the_decoder_reads_what_it_predicts_one_place_later(folder: Path, tokenizer) -> None:
    task = task_of(PARALLEL)
    examples = task.read(folder, "train")
    rows = task.features(tokenizer, examples, PARALLEL)
    cls, sep = target_boundaries(tokenizer)
    batch = rows.batch(np.array([0, 1]), 8, 3)
    red, blue = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("red", "blue"))
    count = len(red) + len(blue) + 1
    assert batch["target_ids"][0, :count].tolist() == [cls, *red, *blue]
    assert batch["labels"][0, :count].tolist() == [*red, *blue, sep]
    assert (batch["labels"][0, count:] == IGNORE_INDEX).all() and (batch["labels"][2] == IGNORE_INDEX).all()
    assert batch["weights"].tolist() == [1, 1, 0]
    assert batch["input_ids"].shape == batch["target_ids"].shape, "one length for both sides"
    assert rows.lengths[0] == max(len(tokenizer.encode("rot blau").ids), count)
    cut = TaskDataConfig(dir="data", source="de", target="en", max_length=8, max_target_length=2)
    short = task.features(tokenizer, examples, cut)
    assert short.targets.lengths.tolist() == [3, 3, 3]
    batch = short.batch(np.array([0]), 8, 1)
    assert batch["input_ids"].shape == (1, 8), "no place is computed that no target has"
    assert batch["target_ids"].tolist() == [[cls, *red, *blue][:2]]
    assert batch["labels"].tolist() == [[red[0], sep]]


def test_predictions_are_texts_on_lines_with_scores(folder: Path, tokenizer, tmp_path: Path) -> None:
    task = TASKS["translation"].from_config(TaskDataConfig(dir="data", metrics=["exact_match", "bleu", "chrf"]))
    examples = task_of(PARALLEL).read(folder, "train")
    rows = task.features(tokenizer, examples, PARALLEL)
    outputs = [rows.targets.ids[start + 1 : end] for start, end in itertools.pairwise(rows.targets.offsets)]
    right = task.predict(outputs, rows, examples)
    assert right == Written(["red blue", "blue", "red red red"], lowercase=True)
    assert task.score(right, examples)["exact_match"] == 100
    assert task.score(right, examples)["chrf"] == pytest.approx(100)
    assert "case:lc" in task.details(right, examples)["signatures"]["bleu"]
    [path] = task.write_predictions(tmp_path, "dev", right, examples)
    assert (path.name, path.read_text()) == ("dev.txt", TARGETS)
    assert task.is_degenerate(Written(["blue"] * 3, lowercase=True), examples)
    assert [answer.target for answer in task.format_predictions(right, examples)] == right.texts


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({"train.en": "red\n"}, r"train\.de has 3 lines and .*train\.en 1"),
        ({"train.de": "rot\n\nrot\n"}, r"train\.de, line 2: an empty line"),
        ({"train.de": ""}, r"train\.de has no lines"),
        ({"train.en": None}, r"has no train\.en: set data\.dir"),
    ],
)
def test_files_that_do_not_fit_are_refused(folder: Path, files: dict[str, str | None], wrong: str) -> None:
    for name, text in files.items():
        (folder / name).unlink() if text is None else (folder / name).write_text(text)
    with pytest.raises(UserError, match=wrong):
        task_of(PARALLEL).read(folder, "train")


def test_a_folder_of_parallel_files_needs_their_ends(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data\.source and data\.target"):
        task_of(TaskDataConfig(dir="data")).read(folder, "train")


def test_a_target_vocabulary_needs_an_end(tokenizer) -> None:
    from tokenizers import Tokenizer, models

    with pytest.raises(UserError, match="the target vocabulary has no start token"):
        target_boundaries(Tokenizer(models.BPE({"a": 0}, [])))
    byte_level = train_byte_level(iter(["a b"]), TokenizerConfig(kind="byte_level", vocab_size=261))
    assert len(set(target_boundaries(byte_level))) == 2


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"task": "sst2", "decoder_init": "none"}, "decoder_init is none"),
        ({"task": "sst2", "model": ModelConfig(decoder_layers=1)}, r"model\.decoder_layers is 1"),
        ({"classifier_dropout": 0.1}, r"classifier_dropout is 0.1"),
        ({"num_feature_layers": 1}, "num_feature_layers is 1"),
        ({"head_init": "none"}, "head_init is none"),
        ({"model": ModelConfig(causal=True)}, r"model\.causal is true"),
    ],
)
def test_settings_of_other_tasks_are_refused(changes: dict, wrong: str) -> None:
    data = TaskDataConfig(dir="data") if "task" in changes else PARALLEL
    settings = {"task": "translation", "init": "none", "data": data, "training": TrainingConfig(steps=1), **changes}
    with pytest.raises(UserError, match=wrong):
        make_task(FinetuneConfig(**settings))


def test_new_inputs_are_read_as_the_lines_of_parallel_files(folder: Path) -> None:
    (folder / "val.de").write_text("  rot \n")
    parallel = task_of(PARALLEL)
    assert parallel.read(folder, "dev").sources == parallel.examples_from_inputs(["  rot "]).sources == ["rot"]
    assert task_of(TaskDataConfig(dir="data")).examples_from_inputs(["  rot "]).sources == ["  rot "], "of columns"


def test_parquet_has_a_column_for_each_language(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"de": ["rot", "blau"], "en": ["red", "blue"]}).to_parquet(tmp_path / "train.parquet")
    task = task_of(PARALLEL)
    assert task.splits(tmp_path) == ["train"]
    train = task.read(tmp_path, "train")
    assert (list(train.sources), train.references) == (["rot", "blau"], [["red"], ["blue"]])
