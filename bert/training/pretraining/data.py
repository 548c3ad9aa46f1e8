"""Data of a pretraining run: vocabulary, training rows, loaders and held-out batches of its phases."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bert.config import DataConfig, PretrainConfig, TokenizerConfig
from bert.config.pretraining import Phase, corpus_keys, phase_configs, resolve_phases
from bert.data.corpus.document_stream import ReadPosition, stream_files
from bert.data.corpus.documents import corpus_files
from bert.data.corpus.vocabulary import corpus_vocabulary, measure_losses, sample_texts, warn_of_losses
from bert.data.pretraining import build
from bert.data.pretraining.build import build_examples
from bert.data.pretraining.dataset import PretrainingDataset, open_rows
from bert.data.pretraining.loader import (
    Batch,
    HeldOutMemory,
    PretrainingLoader,
    RowSource,
    SegmentLoader,
    held_out_batches,
    make_predictions,
    num_held_out_batches,
)
from bert.data.pretraining.masking import Predictions
from bert.data.pretraining.row_stream import RowReader, Start, StreamedRows, StreamLoader, StreamSpec, buffer_chunks
from bert.errors import LOGGER, Log, UserError, require
from bert.files import load_json, write_atomic
from bert.parallel import multihost
from bert.parallel.multihost import broadcast_from_main, gather_rows, is_multihost
from bert.runs.folder import STREAM_FILE, RunFolder
from bert.runs.report import progress_lines
from bert.tokenizer.byte_level import token_byte_counts
from bert.tokenizer.library import special_ids, vocabulary_kind
from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer, require_embedding_rows, save_tokenizer
from bert.training.initialization import with_vocab_size
from bert.training.pretraining.branches import BEGINNING, BranchStart, branch_start, rows_read
from bert.training.pretraining.setup import Setup, has_begun
from bert.training.run_length import check_extension, num_train_steps


@dataclass(frozen=True)
class PhaseData:
    """A phase with its rows.

    Attributes:
        phase: its steps and its configuration.
        examples: examples of its length.
        loader: loader of its training batches.
        eval_rows: its held-out rows.
        held_out_predictions: selects the predicted tokens of the held-out rows.
        tokens_per_byte: predicted tokens of the held-out rows per byte of the text that they stand for; None if
            unknown, because not every token is predicted or the vocabulary alters texts.
    """

    phase: Phase
    examples: PretrainingDataset
    loader: PretrainingLoader
    eval_rows: RowSource
    held_out_predictions: Predictions
    tokens_per_byte: float | None = None

    @property
    def is_streamed(self) -> bool:
        """True if the training rows come from a stream; the examples are then built from its first documents."""
        return isinstance(self.loader, StreamLoader)

    @property
    def num_eval_batches(self) -> int:
        return num_held_out_batches(
            len(self.eval_rows), self.phase.config.training.rows_per_evaluation, self._held_out_memory
        )

    @property
    def _held_out_memory(self) -> HeldOutMemory | None:
        """The memory of held-out rows; None for a model without one.

        Each layer reads the rows in the memory, whose states depend on their own memory in the layer below.
        """
        model = self.phase.config.model
        if model.memory_length is None:
            return None
        rows_in_memory = -(-model.memory_length // self.phase.config.data.sequence_length)
        return HeldOutMemory(model.memory_length, model.num_hidden_layers * rows_in_memory)

    def record_position(self, run: RunFolder[PretrainConfig], step: int) -> None:
        """Records in stream.json where a stream continues after ``step``, before the checkpoint of the step is saved.

        The position only makes a resume faster. Without it, the run reads the stream from the start, with the same
        result. It may therefore be recorded before its checkpoint exists, and remain after the checkpoint is deleted.
        """
        # When one host handles an error, the other hosts do not call this function.
        if not isinstance(self.loader, StreamLoader) or (is_multihost() and sys.exception() is not None):
            return
        starts = self.loader.rows.starts(self.loader.first_reader_row(step))
        groups = len(self.phase.config.data.mixture_weights or [1])
        everywhere = gather_rows(np.array([_to_integers(start, groups) for start in starts], np.int64)).tolist()
        if run.is_writer:
            path = run.path / STREAM_FILE
            known = _read(path)
            of_name = known.setdefault(self.examples.folder.name, [])
            if everywhere not in of_name:
                of_name.append(everywhere)
                write_atomic(path, json.dumps(known))

    def eval_batches(self, process: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """Returns every held-out row once, or this host's share of each batch; the masks are the same each time."""
        rows = self.phase.config.training.rows_per_evaluation
        return held_out_batches(self.eval_rows, self.held_out_predictions, rows, process, self._held_out_memory)


@dataclass(frozen=True)
class PretrainingData:
    """Vocabulary of a run and data of its phases."""

    tokenizer: Tokenizer
    phases: Sequence[PhaseData]

    @property
    def total_steps(self) -> int:
        return self.phases[-1].phase.end

    def with_steps(self, config: PretrainConfig) -> PretrainingData:
        """Returns the same data for a configuration with another number of steps at the end of the last phase."""
        phases = resolve_phases(config, require(config.training.steps, "training.steps"))
        changed = [dataclasses.replace(data, phase=phase) for data, phase in zip(self.phases, phases, strict=True)]
        return dataclasses.replace(self, phases=changed)

    def __enter__(self) -> PretrainingData:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes that read a stream."""
        for phase in self.phases:
            if isinstance(phase.loader, StreamLoader):
                phase.loader.rows.close()


def build_data(
    run: RunFolder[PretrainConfig], setup: Setup, log: Log
) -> tuple[RunFolder[PretrainConfig], PretrainingData]:
    """Chooses the vocabulary, and builds or loads the examples of each phase; the main process does so first.

    Returns:
        The run with its final, saved configuration, and its data.

    Raises:
        UserError: the corpus or the vocabulary cannot be used, or the run began with other data.
    """
    config = run.config
    warn, process = multihost.main_process_only(LOGGER.warning), setup.parallel.process
    with multihost.main_process_first():
        if config.data.eval is not None:  # a mistyped name is reported before a vocabulary is trained
            for phase in phase_configs(config):
                _warn_of_trained_files(corpus_files(config.data.eval), phase.data, warn)
        tokenizer = _choose_tokenizer(run, setup, log)
        if setup.init_model is None:
            config = dataclasses.replace(config, model=with_vocab_size(config.model, embedding_rows(tokenizer)))
        else:
            source = config.tokenizer.path or setup.init_model.source
            require_embedding_rows(tokenizer, config.model.known_vocab_size, source)
        on_progress = progress_lines(log)
        datasets = [build_examples(phase.data, tokenizer, progress=on_progress) for phase in phase_configs(config)]
        run.check_data(*dict.fromkeys(examples.folder.name for examples in datasets))
        corpora = dict(zip(corpus_keys(config), zip(phase_configs(config), datasets, strict=True), strict=True))
        for key, (phase, examples) in corpora.items():
            _warn_of_losses(examples, tokenizer, phase.data, warn, key)
        for warning in datasets[0].pair_warnings():
            warn(warning)
        if run.is_writer:
            save_tokenizer(tokenizer, run.path)
    run = check_extension(dataclasses.replace(run, config=config), _steps_per_epoch(config, datasets[0]), log)
    run = run.save_config(config)
    names = [examples.folder.name for examples in datasets]
    start = branch_start(run, tokenizer, names, has_begun(run), on_progress)
    streams = _open_streams(run, tokenizer, datasets, process, log) if config.data.streaming else None
    return run, PretrainingData(tokenizer, open_phases(config, tokenizer, datasets, process, streams, start))


def check_data_of_completed(run: RunFolder[PretrainConfig], log: Log) -> None:
    """Raises UserError if a completed run was trained on other data. Builds and reads no examples."""
    tokenizer, on_progress = load_tokenizer(run.path), progress_lines(log)
    names = [build.examples_name(phase.data, tokenizer, on_progress) for phase in phase_configs(run.config)]
    run.check_data(*dict.fromkeys(names))


def _open_streams(
    run: RunFolder[PretrainConfig],
    tokenizer: Tokenizer,
    datasets: Sequence[PretrainingDataset],
    process: tuple[int, int],
    log: Log,
) -> list[RowSource]:
    """Returns the rows of each phase; phases with the same examples share a stream."""
    starts = read_starts(run)
    streams: dict[str, RowSource] = {}
    for phase, examples in zip(phase_configs(run.config), datasets, strict=True):
        name = examples.folder.name
        if name not in streams:
            streams[name] = make_rows(phase.data, tokenizer, starts.get(name, ()), process, log)
    return [streams[examples.folder.name] for examples in datasets]


def open_phases(
    config: PretrainConfig,
    tokenizer: Tokenizer,
    datasets: Sequence[PretrainingDataset],
    process: tuple[int, int],
    streams: Sequence[RowSource] | None = None,
    start: BranchStart = BEGINNING,
) -> list[PhaseData]:
    """Returns the phases with their data. Phases with the same examples continue where the previous phase ended.

    Args:
        datasets: the examples of each of `phase_configs`.
        streams: their training rows if they are streamed instead of built.
        start: where a branch starts.
    """
    phases: list[PhaseData] = []
    train_rows = [open_rows(examples.train) for examples in datasets] if streams is None else streams
    make_loader: Callable[..., PretrainingLoader] = PretrainingLoader if streams is None else StreamLoader
    if (memory_length := config.model.memory_length) is not None:
        make_loader = partial(SegmentLoader, memory_length=memory_length)
    names = [examples.folder.name for examples in datasets]
    spans = resolve_phases(config, num_train_steps(config.training, _steps_per_epoch(config, datasets[0])))
    for phase in spans:
        examples, rows = datasets[phase.number - 1], train_rows[phase.number - 1]
        first_step = max(phase.first, start.step)
        loader = make_loader(
            rows,
            make_predictions(phase.config.data, tokenizer, phase.config.training.objective),
            phase.config.training.batch_size,
            phase.config.seed,
            process,
            static_masking=phase.config.data.static_masking,
            first_step=first_step,
            first_row=rows_read(spans, names, first_step, start)[examples.folder.name],
        )
        held_out = make_predictions(phase.held_out, tokenizer, phase.config.training.objective)
        data = PhaseData(phase, examples, loader, open_rows(examples.eval), held_out)
        if (byte_counts := token_byte_counts(tokenizer)) is not None and phase.config.training.objective == "clm":
            data = dataclasses.replace(data, tokens_per_byte=_tokens_per_byte(data, byte_counts))
        phases.append(data)
    return phases


def _steps_per_epoch(config: PretrainConfig, examples: PretrainingDataset) -> float:
    """Returns the steps of one pass over the training rows; a batch may extend into the next epoch."""
    return len(open_rows(examples.train)) / config.training.batch_size


def _tokens_per_byte(data: PhaseData, byte_counts: np.ndarray) -> float | None:
    """Returns predicted held-out tokens per byte of text; None if there is no text."""
    tokens, size = 0, 0
    for batch in data.eval_batches():
        predicted = batch["next_token_ids"][batch["next_token_weights"] > 0]
        tokens, size = tokens + len(predicted), size + int(byte_counts[predicted].sum())
    return tokens / size if size else None


def predictable_counts(examples: PretrainingDataset, tokenizer: Tokenizer, special_tokens: bool) -> np.ndarray:
    """Returns the [V] counts of each token in the training rows; 0 for special tokens unless they are predicted."""
    counts = examples.unigram_counts.copy()
    if not special_tokens:
        counts[list(special_ids(tokenizer).all)] = 0
    return counts


def _choose_tokenizer(run: RunFolder[PretrainConfig], setup: Setup, log: Log) -> Tokenizer:
    """Returns the vocabulary of a run.

    It is the first available of: the run's saved vocabulary, the vocabulary of ``init``, ``tokenizer.path``, the
    teacher's vocabulary, and a newly trained one.

    Raises:
        UserError: the vocabulary differs from the teacher's, or is not of ``tokenizer.kind``.
    """
    config, init_model, teacher = run.config, setup.init_model, setup.teacher
    if (run.path / "tokenizer.json").is_file():
        source, tokenizer = str(run.path), load_tokenizer(run.path)
    elif init_model is not None:
        source, tokenizer = init_model.source, init_model.tokenizer
    elif config.tokenizer.path is not None:
        source, tokenizer = config.tokenizer.path, load_tokenizer(config.tokenizer.path, config.tokenizer)
        expected, kind = config.tokenizer.kind, vocabulary_kind(tokenizer)
        if expected not in (TokenizerConfig.kind, kind):
            raise UserError(
                f"tokenizer.kind is {expected}, and {source} is a {kind} vocabulary: name another, or set "
                f"tokenizer.kind to {kind}"
            )
    else:
        return corpus_vocabulary(config.data, config.tokenizer, log) if teacher is None else teacher.tokenizer
    if teacher is not None:
        teacher.check_vocabulary(tokenizer, source)
    return tokenizer


def _warn_of_trained_files(held_out: Sequence[str], config: DataConfig, warn: Log) -> None:
    """Warns of held-out files that are also training text, for example if a glob of ``data.train`` matches them."""
    train = [file.source for file in stream_files(config.train)] if config.streaming else corpus_files(config.train)
    trained = {os.path.realpath(path) for path in train}
    if both := [path for path in held_out if os.path.realpath(path) in trained]:
        are = "is" if len(both) == 1 else f"and {len(both) - 1} more of data.eval are"
        warn(f"warning: {both[0]} {are} in data.train as well: held-out scores are of text that was trained on")


def _warn_of_losses(
    examples: PretrainingDataset, tokenizer: Tokenizer, config: DataConfig, warn: Log, key: str
) -> None:
    """Warns of unknown and removed characters in a sample, and of unknown tokens in the whole text of a key."""
    losses = measure_losses(tokenizer, sample_texts(config))
    unknown_rate = examples.unknown_rate(special_ids(tokenizer))
    warn_of_losses(losses._replace(unknown=max(losses.unknown, unknown_rate)), tokenizer, warn, key)


Starts = Mapping[str, Sequence[Sequence[Start]]]
"""For each name and checkpoint, the start of each reader."""


def read_starts(run: RunFolder[Any]) -> Starts:
    """Reads the positions of checkpoints on the main process. Without the file, readers start at the beginning."""
    known = broadcast_from_main(lambda: _read(run.path / STREAM_FILE))
    return {name: [[_to_start(one) for one in checkpoint] for checkpoint in of_name] for name, of_name in known.items()}


def _read(path: Path) -> dict[str, list[list[list[int]]]]:
    if not path.is_file():
        return {}
    try:
        return dict(load_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise UserError(f"{path} is damaged, which has the place in the stream: put back a copy") from None


def _to_integers(start: Start, groups: int) -> list[int]:
    """Returns a start as integers, the same number for every start; the first start has no file positions yet."""
    places = start.state or [astuple(ReadPosition())] * groups
    return [start.chunk, start.block, start.first_row, *itertools.chain.from_iterable(places)]


def _to_start(integers: Sequence[int]) -> Start:
    chunk, block, first_row, *rest = integers
    size = len(astuple(ReadPosition()))
    places = zip(*(rest[field::size] for field in range(size)), strict=True)
    return Start(chunk, block, first_row, tuple(places))


def make_rows(
    data: DataConfig, tokenizer: Tokenizer, starts: Sequence[Sequence[Start]], process: tuple[int, int], log: Log
) -> StreamedRows:
    """Returns the rows of this host's readers; ``starts`` has the start of every reader of all hosts, by checkpoint."""
    files, text = tuple(stream_files(data.train)), tokenizer.to_str()
    window = buffer_chunks(data, build.SHARD_BYTES)
    index, count = process
    share = data.stream_readers // count
    readers = []
    for number in range(index * share, (index + 1) * share):
        spec = StreamSpec(files, data, number, build.SHARD_BYTES, window)
        readers.append(RowReader(spec, text, [one[number] for one in starts]))
    return StreamedRows(readers, log)
