"""What a pretraining run reads: its vocabulary, and the training and evaluation rows of each phase."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bert.config import DataConfig, PretrainConfig, TokenizerConfig
from bert.config.pretraining import Phase, phase_configs, resolve_phases
from bert.data.corpus.documents import corpus_files
from bert.data.corpus.streaming import stream_files
from bert.data.corpus.vocabulary import corpus_vocabulary, measure_losses, sample_texts, warn_of_losses
from bert.data.pretraining.builder import build_examples
from bert.data.pretraining.dataset import PretrainingDataset
from bert.data.pretraining.loader import Batch, PretrainingLoader, RowSource, held_out_batches, make_predictions
from bert.data.pretraining.shards import open_rows
from bert.data.pretraining.stream_readers import StreamLoader
from bert.errors import UserError, require
from bert.inference.pretrained import Pretrained
from bert.messages import LOGGER
from bert.parallel import multihost
from bert.runs import progress
from bert.runs.folder import RunFolder
from bert.tokenizer.byte_level import token_byte_counts
from bert.tokenizer.special_tokens import special_ids
from bert.tokenizer.vocabulary import (
    embedding_rows,
    load_tokenizer,
    require_embedding_rows,
    save_tokenizer,
    vocabulary_kind,
)
from bert.training.distillation import Teacher
from bert.training.initialization import Log, with_vocab_size
from bert.training.loop import CheckpointWriter
from bert.training.run_length import check_extension, num_train_steps
from bert.training.streaming import StreamCheckpoints, make_rows, read_starts


@dataclass(frozen=True)
class PhaseData:
    """A phase with its rows.

    Attributes:
        phase: its steps and its configuration.
        examples: of its length.
        loader: of its training batches.
        eval_rows: its held-out rows.
        tokens_per_byte: predicted tokens of the held-out rows for each byte of text that they stand for; None if that
            is not known, since not every token is predicted or the vocabulary alters texts.
    """

    phase: Phase
    examples: PretrainingDataset
    loader: PretrainingLoader
    eval_rows: RowSource
    tokens_per_byte: float | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the training rows come from a stream; the examples are then those of its head."""
        return isinstance(self.loader, StreamLoader)

    @property
    def num_eval_batches(self) -> int:
        return -(-len(self.eval_rows) // self.phase.config.training.rows_per_evaluation)

    def checkpoints(self, writer: CheckpointWriter, run: RunFolder[PretrainConfig]) -> CheckpointWriter:
        """The run's checkpoints, which record the place in a stream."""
        if not isinstance(self.loader, StreamLoader):
            return writer
        return StreamCheckpoints(writer, run, self.examples.folder.name, self.loader)

    def eval_batches(self, process: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """Every held-out row once, or this host's share of each batch; masked the same way each time."""
        rows = self.phase.config.training.rows_per_evaluation
        return held_out_batches(self.eval_rows, self.loader.predictions, rows, process)


@dataclass(frozen=True)
class PretrainingData:
    """The vocabulary of a run and the data of its phases."""

    tokenizer: Tokenizer
    phases: Sequence[PhaseData]

    @property
    def total_steps(self) -> int:
        return self.phases[-1].phase.end

    def with_steps(self, config: PretrainConfig) -> PretrainingData:
        """The same data for a configuration with another number of steps, at the end of the last phase."""
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


def prepare_data(
    run: RunFolder[PretrainConfig],
    init_model: Pretrained | None,
    teacher: Teacher | None,
    process: tuple[int, int],
    say: Log,
) -> tuple[RunFolder[PretrainConfig], PretrainingData]:
    """Chooses the vocabulary, and builds or finds the examples of each phase; the main process does so first.

    Returns:
        The run with ``model.vocab_size`` resolved, and its data.

    Raises:
        UserError: the corpus or the vocabulary cannot be used, or the run began with other data.
    """
    config = run.config
    warn = multihost.main_process_only(LOGGER.warning)
    with multihost.main_process_first():
        if config.data.eval is not None:  # a mistyped name ends the run before a vocabulary is trained
            _warn_of_trained_files(corpus_files(config.data.eval), config.data, warn)
        tokenizer = _choose_tokenizer(run, init_model, teacher, say)
        if init_model is None:
            config = dataclasses.replace(config, model=with_vocab_size(config.model, embedding_rows(tokenizer)))
        else:
            source = config.tokenizer.path or init_model.source
            require_embedding_rows(tokenizer, config.model.known_vocab_size, source)
        on_progress = progress.progress_lines(say)
        datasets = [build_examples(phase.data, tokenizer, progress=on_progress) for phase in phase_configs(config)]
        run.check_data(*dict.fromkeys(examples.folder.name for examples in datasets))
        _warn_of_losses(datasets[0], tokenizer, config.data, warn)
        for warning in datasets[0].pair_warnings():
            warn(warning)
        if run.is_writer:
            save_tokenizer(tokenizer, run.path)
    run = check_extension(dataclasses.replace(run, config=config), _steps_per_epoch(config, datasets[0]), say)
    run = run.save_config(config)
    streams = _open_streams(run, tokenizer, datasets, process, say) if config.data.streaming else None
    return run, PretrainingData(tokenizer, open_phases(config, tokenizer, datasets, process, streams))


def _open_streams(
    run: RunFolder[PretrainConfig],
    tokenizer: Tokenizer,
    datasets: Sequence[PretrainingDataset],
    process: tuple[int, int],
    say: Log,
) -> list[RowSource]:
    """The rows of each phase; phases with the same examples share a stream."""
    starts = read_starts(run)
    streams: dict[str, RowSource] = {}
    for phase, examples in zip(phase_configs(run.config), datasets, strict=True):
        name = examples.folder.name
        if name not in streams:
            streams[name] = make_rows(phase.data, tokenizer, starts.get(name, ()), process, say)
    return [streams[examples.folder.name] for examples in datasets]


def open_phases(
    config: PretrainConfig,
    tokenizer: Tokenizer,
    datasets: Sequence[PretrainingDataset],
    process: tuple[int, int],
    streams: Sequence[RowSource] | None = None,
) -> list[PhaseData]:
    """The phases with their data. Phases that read the same examples continue where the phase before ended.

    ``streams`` has the training rows of each phase in place of those that were built.
    """
    phases: list[PhaseData] = []
    train_rows = [open_rows(examples.train) for examples in datasets] if streams is None else streams
    loader_class: type[PretrainingLoader] = PretrainingLoader if streams is None else StreamLoader
    num_rows_read: Counter[Path] = Counter()
    spans = resolve_phases(config, num_train_steps(config.training, _steps_per_epoch(config, datasets[0])))
    for phase, examples, rows in zip(spans, datasets, train_rows, strict=True):
        batch_size = phase.config.training.batch_size
        loader = loader_class(
            rows,
            make_predictions(phase.config.data, tokenizer),
            batch_size,
            phase.config.seed,
            process,
            static_masking=phase.config.data.static_masking,
            first_step=phase.first,
            first_row=num_rows_read[examples.folder],
        )
        num_rows_read[examples.folder] += (phase.end - phase.first) * batch_size
        data = PhaseData(phase, examples, loader, open_rows(examples.eval))
        if (byte_counts := token_byte_counts(tokenizer)) is not None and phase.config.data.prediction == "next":
            data = dataclasses.replace(data, tokens_per_byte=_tokens_per_byte(data, byte_counts))
        phases.append(data)
    return phases


def _steps_per_epoch(config: PretrainConfig, examples: PretrainingDataset) -> float:
    """Steps of a pass over the training rows; a batch may read on into the next epoch."""
    return len(open_rows(examples.train)) / config.training.batch_size


def _tokens_per_byte(data: PhaseData, byte_counts: np.ndarray) -> float | None:
    """Of the held-out tokens that are predicted; None if they stand for no text."""
    tokens, size = 0, 0
    for batch in data.eval_batches():
        predicted = batch["next_token_ids"][batch["next_token_weights"] > 0]
        tokens, size = tokens + len(predicted), size + int(byte_counts[predicted].sum())
    return tokens / size if size else None


def predictable_counts(examples: PretrainingDataset, tokenizer: Tokenizer, special_tokens: bool) -> np.ndarray:
    """[V] occurrences of each token in the training rows; 0 for special tokens unless these are predicted as well."""
    counts = examples.unigram_counts.copy()
    if not special_tokens:
        counts[list(special_ids(tokenizer).all)] = 0
    return counts


def _choose_tokenizer(
    run: RunFolder[PretrainConfig], init_model: Pretrained | None, teacher: Teacher | None, say: Log
) -> Tokenizer:
    """The run's vocabulary if it has one, else that of ``init``, else of ``tokenizer.path``, else the teacher's, else a
    trained one.

    Raises:
        UserError: it is not the teacher's, or not of ``tokenizer.kind``.
    """
    config = run.config
    if (run.path / "tokenizer.json").is_file():
        source, tokenizer = str(run.path), load_tokenizer(run.path)
    elif init_model is not None:
        source, tokenizer = init_model.source, init_model.tokenizer
    elif config.tokenizer.path is not None:
        source, tokenizer = config.tokenizer.path, load_tokenizer(config.tokenizer.path, config.tokenizer)
        asked, kind = config.tokenizer.kind, vocabulary_kind(tokenizer)
        if asked not in (TokenizerConfig.kind, kind):
            raise UserError(
                f"tokenizer.kind is {asked}, and {source} is a {kind} vocabulary: name another, or set tokenizer.kind "
                f"to {kind}"
            )
    else:
        return corpus_vocabulary(config.data, config.tokenizer, say) if teacher is None else teacher.tokenizer
    if teacher is not None:
        teacher.check_vocabulary(tokenizer, source)
    return tokenizer


def _warn_of_trained_files(held_out: Sequence[str], config: DataConfig, say: Log) -> None:
    """Says which held-out files are training text as well, as one is that a glob of ``data.train`` takes in."""
    train = [file.source for file in stream_files(config.train)] if config.streaming else corpus_files(config.train)
    trained = {os.path.realpath(path) for path in train}
    if both := [path for path in held_out if os.path.realpath(path) in trained]:
        are = "is" if len(both) == 1 else f"and {len(both) - 1} more of data.eval are"
        say(f"warning: {both[0]} {are} in data.train as well: held-out scores are of text that was trained on")


def _warn_of_losses(examples: PretrainingDataset, tokenizer: Tokenizer, config: DataConfig, warn: Log) -> None:
    """Reports unknown and removed characters of a sample, and unknown tokens of all the text."""
    losses = measure_losses(tokenizer, sample_texts(config))
    unknown_rate = examples.unknown_rate(special_ids(tokenizer))
    warn_of_losses(losses._replace(unknown=max(losses.unknown, unknown_rate)), tokenizer, warn)
