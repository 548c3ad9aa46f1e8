"""Checks of runs, model folders and data files for damaged, missing, ignored and unsupported files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bert.config import ColumnsConfig, FinetuneConfig, PretrainConfig
from bert.config.run_file import check_vocabulary, load_run_config
from bert.data.corpus.files import read_documents, require_readable_kind
from bert.data.records import RECORDS, Records, read_records
from bert.data.tables import file_suffix
from bert.errors import UserError
from bert.files import is_temporary, read_json
from bert.inference.load import load_run_tokenizer, load_target_tokenizer
from bert.interchange.sentence_transformers.reader import encoder_folder, find_router, is_static, read_pooling
from bert.interchange.sentence_transformers.routes import DOCUMENT
from bert.interchange.tensor_files import PICKLE, SAFETENSORS, read_tensors
from bert.runs.checkpoint_directory import SAVING, CheckpointDirectory, has_params_only, verify_manifest
from bert.runs.environment import read_environment
from bert.runs.folder import (
    BRANCH_FILE,
    ENVIRONMENT_FILE,
    FROZEN_WEIGHTS,
    LOGGER_RUNS_FILE,
    STREAM_FILE,
    TARGET_TOKENIZER,
)
from bert.runs.metrics_log import read_metrics, read_results
from bert.runs.orbax_io import read_frozen_weights
from bert.tasks import question_answering
from bert.tasks.token_classification import conll
from bert.tokenizer.vocabulary import load_tokenizer

DAMAGED, MISSING, IGNORED, UNSUPPORTED = "damaged", "missing", "ignored", "unsupported"

UNREAD_WEIGHTS = ("tf_model.h5", "flax_model.msgpack", "rust_model.ot", "openvino_model.xml")
"""Weights of other libraries in a Hugging Face folder."""

TRAINER_FILES = ("optimizer.pt", "scheduler.pt", "training_args.bin", "trainer_state.json", "rng_state.pth")
"""State of transformers' Trainer, which only transformers can use."""

CONLL_SUFFIXES = (".conll", ".conllu", ".bio", ".iob", ".iob2")

LABEL_VALUES = 20
"""Maximum number of distinct values of a column whose values are listed."""


class Finding(NamedTuple):
    """One problem of a run, a model or a file.

    Attributes:
        state: ``damaged``, ``missing``, ``ignored`` (present but not read) or ``unsupported``.
        problem: the file, the problem, and a fix.
    """

    state: str
    problem: str


def diagnose(source: Path) -> list[Finding]:
    """Checks each part of a run or model folder separately, so that one problem does not hide others.

    Returns:
        The problems; empty if every part can be read. Files that the format does not need may be missing.
    """
    check = _run_findings if (source / "config.yaml").is_file() else _model_findings
    return list(check(source))


def _caught(state: str, read: Callable[..., Any], *arguments: Any) -> Iterator[Finding]:
    """Yields the error that a reader raises as a finding."""
    try:
        read(*arguments)
    except UserError as error:
        yield Finding(state, str(error))


def _run_findings(run: Path) -> Iterator[Finding]:
    config: PretrainConfig | FinetuneConfig | None = None
    try:
        config = load_run_config(run)
    except UserError as error:
        yield Finding(DAMAGED, str(error))
    for file in sorted(run.glob("seed-*/config.yaml")):
        yield from _run_findings(file.parent)
    yield from _vocabulary_findings(run, config)
    yield from _checkpoint_findings(run / "checkpoints")
    yield from _caught(DAMAGED, read_results, run)
    yield from _metrics_findings(run)
    if (run / ENVIRONMENT_FILE).is_file() and not read_environment(run):
        yield Finding(DAMAGED, f"{run / ENVIRONMENT_FILE} is not JSON: remove it; the run does not need it")
    for name in (STREAM_FILE, BRANCH_FILE, LOGGER_RUNS_FILE):
        if (run / name).is_file():
            yield from _caught(DAMAGED, read_json, run / name)
    if isinstance(config, FinetuneConfig) and config.lora.rank is not None:
        state = DAMAGED if (run / FROZEN_WEIGHTS).is_file() else MISSING
        yield from _caught(state, read_frozen_weights, run, config.lora.checksum)
    for path in sorted(run.glob(".*")):
        if is_temporary(path):
            yield Finding(IGNORED, f"{path} is incomplete, its writer was killed: the next start of the run removes it")


def _vocabulary_findings(run: Path, config: PretrainConfig | FinetuneConfig | None) -> Iterator[Finding]:
    has_checkpoint = any(CheckpointDirectory(run / "checkpoints").find())
    if has_checkpoint and not (run / "tokenizer.json").is_file():  # loading then reads vocab.txt
        yield Finding(MISSING, f"{run / 'tokenizer.json'} is missing: copy it from the original run")
    elif has_checkpoint and config is not None:
        yield from _caught(DAMAGED, load_run_tokenizer, run, config)
    elif (run / "tokenizer.json").is_file():
        yield from _caught(DAMAGED, load_tokenizer, run)
        yield from _caught(DAMAGED, check_vocabulary, run)
    if has_checkpoint and config is not None:
        state = DAMAGED if (run / TARGET_TOKENIZER / "tokenizer.json").is_file() else MISSING
        yield from _caught(state, load_target_tokenizer, run, config)


def _checkpoint_findings(folder: Path) -> Iterator[Finding]:
    directory = CheckpointDirectory(folder)
    folders = directory.find()
    problems = {step: verify_manifest(path) for step, path in sorted(folders.items())}
    good = [step for step, faults in problems.items() if not faults and not has_params_only(folders[step])]
    remedy = f"the run continues from step {good[-1]}" if good else f"or remove {folder} to start again"
    for step, faults in problems.items():
        if faults:
            yield Finding(DAMAGED, f"{folders[step]}: {'; '.join(faults)}: copy it from a backup, {remedy}")
    if directory.best_fault:
        yield Finding(DAMAGED, directory.best_fault)
    for path in sorted(folder.glob(f"*{SAVING}*")):
        yield Finding(IGNORED, f"{path} is an incomplete save: the next start of the run removes it")


def _metrics_findings(run: Path) -> Iterator[Finding]:
    file = run / "metrics.jsonl"
    if file.is_file():
        lines = file.read_bytes().count(b"\n")
        whole = len(read_metrics(run))
        if whole < lines:
            yield Finding(
                DAMAGED, f"{file}: {lines - whole} of {lines} lines are not JSON objects with a step and are skipped"
            )


def _model_findings(folder: Path) -> Iterator[Finding]:
    for file in sorted(folder.glob("*.json")):
        yield from _caught(DAMAGED, read_json, file)
    models = {folder: False}
    try:
        router = find_router(folder)
        routes = (DOCUMENT,) if router is None else tuple(router.modules)
        models = {encoder_folder(folder, route): is_static(folder, route) for route in routes}
        for route in routes:
            read_pooling(folder, lambda text: None, route)
    except UserError as error:
        yield Finding(UNSUPPORTED, str(error))
    for model, has_no_config in models.items():
        yield from _encoder_findings(model, has_no_config)


def _encoder_findings(model: Path, has_no_config: bool) -> Iterator[Finding]:
    """Yields the problems of an encoder's folder. Without a config.json, only tables are read."""
    if has_no_config or (model / "config.json").is_file():
        for read, names in ((read_tensors, (SAFETENSORS, PICKLE)), (load_tokenizer, ("tokenizer.json", "vocab."))):
            present = any(path.name.startswith(names) for path in model.iterdir())
            yield from _caught(DAMAGED if present else MISSING, read, model)
    if (model / SAFETENSORS).is_file() and (model / PICKLE).is_file():
        yield Finding(IGNORED, f"{model / PICKLE}: {SAFETENSORS} is read instead")
    for name in (*UNREAD_WEIGHTS, *TRAINER_FILES):
        if (model / name).is_file():
            yield Finding(IGNORED, f"{model / name} is not read; it may be removed")
    for file in sorted(model.glob("*.py")):
        yield Finding(IGNORED, f"{file}: code of a model's folder is never executed")


def diagnose_data(file: Path) -> tuple[dict[str, Any], UserError | None]:
    """Reads a corpus or a file of labelled rows to its end.

    Args:
        file: text, JSONL, Parquet, CSV, TSV, CoNLL columns or SQuAD JSON, plain or compressed.

    Returns:
        Facts: ``kind``; counts of documents, rows, sentences or questions; for a table ``columns``, with the number of
        empty cells and the values of each; and ``problems``, a list of `Finding`. Then the error of the first
        unreadable line, at which the counts end, or None.
    """
    suffix = file_suffix(file)
    facts: dict[str, Any] = {"source": str(file), "kind": _kind(suffix), "problems": []}
    problems: list[Finding] = facts["problems"]
    try:
        if facts["kind"] == "table":
            _read_table(read_records(file), facts)
            names = facts["columns"].keys()
            has_answers = names & {"answers", "answers.text"} or {"answer", "answer_start"} <= names
            if has_answers and {"question", "context"} <= names:
                _count_questions(
                    question_answering.read_questions(read_records(file), ColumnsConfig(), needed=False), facts
                )
        elif facts["kind"] == "tagged words":
            sentences = conll.read(file)
            facts |= {"sentences": len(sentences), "words": sum(map(len, sentences.words))}
            facts["tags"] = dict(Counter(tag for tags in sentences.tags or () for tag in tags).most_common())
            problems += [Finding(IGNORED, note) for note in sentences.notes]
        elif facts["kind"] == "questions":
            _count_questions(question_answering.read(file), facts)
        else:
            _read_corpus(file, facts)
    except UserError as error:
        return facts, error
    return facts, None


def _kind(suffix: str) -> str:
    if suffix in (".csv", ".tsv", *RECORDS):
        return "table"
    return {**dict.fromkeys(CONLL_SUFFIXES, "tagged words"), ".json": "questions"}.get(suffix, "corpus")


def _read_table(records: Records, facts: dict[str, Any]) -> None:
    """Counts rows, and the empty cells and values of each column, up to `LABEL_VALUES` values."""
    facts |= {"rows": 0, "columns": {}}
    try:
        _count_cells(records, facts)
    finally:  # up to the first unreadable line
        _complete_columns(records, facts)
    facts["problems"] += [Finding(IGNORED, note) for note in records.notes]


def _count_questions(dataset: question_answering.Dataset, facts: dict[str, Any]) -> None:
    """Counts questions, and those that can be trained on, and reports answers that are not in their context."""
    facts |= {"questions": len(dataset), "trainable": len(dataset.trainable)}
    if dataset.misplaced:
        facts["problems"].append(Finding(IGNORED, f"{facts['source']}: {dataset.misplaced_note}"))


def _count_cells(records: Records, facts: dict[str, Any]) -> None:
    columns = facts["columns"]
    for _, fields in records.rows:
        facts["rows"] += 1
        for name, value in fields.items():
            column = columns.setdefault(name, {"filled": 0, "values": Counter()})
            if value is not None and str(value).strip():
                column["filled"] += 1
            if column["values"] is not None:
                column["values"][value if isinstance(value, str) else json.dumps(value, default=str)] += 1
                if len(column["values"]) > LABEL_VALUES:
                    column["values"] = None


def _complete_columns(records: Records, facts: dict[str, Any]) -> None:
    """Replaces the number of filled cells by the number of empty cells, and reports columns with empty cells."""
    for name, column in facts["columns"].items():
        column["empty"] = facts["rows"] - column.pop("filled")
        values = column["values"]
        column["values"] = None if values is None else dict(values.most_common())
        if column["empty"] and name:
            cells = "1 row has" if column["empty"] == 1 else f"{column['empty']:,} rows have"
            facts["problems"].append(
                Finding(MISSING, f"{records.source}: {cells} no value in {name!r}: fill it in or remove the rows")
            )


def _read_corpus(file: Path, facts: dict[str, Any]) -> None:
    """Counts the documents of a corpus, their lines and characters."""
    require_readable_kind(str(file))
    facts |= {"documents": 0, "lines": 0, "characters": 0}
    for document in read_documents(str(file)):
        facts["documents"] += 1
        facts["lines"] += len(document)
        facts["characters"] += sum(map(len, document))
    if not facts["documents"]:
        facts["problems"].append(Finding(MISSING, f"{file} holds no text: name a file with some"))
    elif facts["documents"] == 1 and facts["lines"] > 1:
        facts["problems"].append(
            Finding(MISSING, f"{file} is one document of {facts['lines']:,} lines: an empty line ends a document")
        )
