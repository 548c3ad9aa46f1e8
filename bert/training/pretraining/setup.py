"""A pretraining run before its data is read: configuration, devices, initial model and teacher."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert.config import PretrainConfig
from bert.config.pretraining import phase_configs
from bert.errors import UserError, require
from bert.inference.load import fetch_model, load
from bert.inference.pretrained import Pretrained
from bert.model.execution import LayerExecution
from bert.parallel import multihost
from bert.parallel.backends import Parallelism, make_parallelism
from bert.runs.checkpoint_directory import CheckpointDirectory
from bert.runs.folder import RunFolder, config_class_of_run
from bert.tokenizer.extension import decompose_new_tokens
from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer
from bert.training.initialization import Log, model_config_from_source
from bert.training.pretraining.data import check_readers
from bert.training.pretraining.distillation import Teacher, check_student, load_teacher
from bert.training.pretraining.initialization import (
    extend_embeddings,
)
from bert.training.pretraining.results import (
    check_transfer,
)

DEFAULT_MAX_TO_KEEP = 3
"""Checkpoints that stay if training.max_to_keep is null."""


@dataclass(frozen=True)
class Setup:
    """A run before its data is read.

    Attributes:
        run: its configuration without null, but for ``model.vocab_size``.
        parallel: its devices.
        init_model: the model of ``init``; None for random weights.
        teacher: the model to learn from; None for none.
    """

    run: RunFolder[PretrainConfig]
    parallel: Parallelism
    init_model: Pretrained | None
    teacher: Teacher | None


def resolve_setup(run: RunFolder[PretrainConfig], say: Log) -> Setup:
    """Fills in the defaults, takes the model's sizes from ``init``, and checks all of it before data is read.

    Raises:
        UserError: the devices cannot run it, or ``init`` does not fit.
    """
    config = _resolve_defaults(run.config)
    parallel = make_parallelism(config.training, config.model)
    LayerExecution.from_config(config.training)
    for name, rows, micro_batches in config.batches():
        parallel.check_batch(name, rows, micro_batches)
    check_readers(config.data, parallel.process[1])
    for number, phase in enumerate(phase_configs(config), 1):
        own = config.phases is not None and config.phases[number - 1].max_predictions_per_sequence is not None
        if (note := phase.capped_predictions(f"phases.{number}" if own else "data")) is not None:
            say(note)
    init_model = None if config.init is None or has_begun(run) else _load_init_model(run, say)
    if init_model is not None:
        model = model_config_from_source(config.model, init_model.config, init_model.source)
        config = dataclasses.replace(config, model=model)
        config.check()
        config.check_model()
    if config.transfer is not None:
        check_transfer(config)  # before hours of training
    LayerExecution.from_config(config.training, config.model)
    teacher = load_teacher(config.distillation, say)
    if teacher is not None:
        check_student(config, teacher)
        config = dataclasses.replace(
            config, distillation=dataclasses.replace(config.distillation, checksum=teacher.checksum)
        )
    # A resumed run has its config.yaml; whether a new schedule fits its steps is known once the data is.
    run = dataclasses.replace(run, config=config) if run.resumed else run.save_config(config, vocabulary=False)
    return Setup(run, parallel, init_model, teacher)


def has_begun(run: RunFolder[Any]) -> bool:
    """Whether a run has a checkpoint and its vocabulary, and no longer needs the model that it started from."""

    def has_files() -> bool:
        return bool(CheckpointDirectory(run.checkpoints).steps()) and (run.path / "tokenizer.json").is_file()

    return run.resumed and bool(multihost.broadcast_from_main(has_files))


def _resolve_defaults(config: PretrainConfig) -> PretrainConfig:
    training = config.training
    training = dataclasses.replace(
        training,
        eval_every=training.eval_every or training.checkpoint_every,
        max_to_keep=training.max_to_keep or DEFAULT_MAX_TO_KEEP,
    )
    return dataclasses.replace(config, training=training)


def _load_init_model(run: RunFolder[PretrainConfig], say: Log) -> Pretrained:
    """The model of ``init``, with embedding rows for the words that ``tokenizer.path`` adds to its vocabulary."""
    config = run.config
    source = require(config.init, "init")
    if config.init_state:
        find_branch_source(config)
    model = load(source, say)
    path = run.path if (run.path / "tokenizer.json").is_file() else config.tokenizer.path
    if path is None:
        return model
    tokenizer = load_tokenizer(path, config.tokenizer)
    rows = decompose_new_tokens(model.tokenizer, tokenizer, model.source, str(path))
    if not rows:
        return dataclasses.replace(model, tokenizer=tokenizer)
    size = max(model.config.known_vocab_size, embedding_rows(tokenizer))
    if not run.resumed:
        say(
            f"{len(rows):,} new rows seeded from the mean of their old tokens, "
            f"the first for {tokenizer.id_to_token(next(iter(rows)))!r}; the embedding has {size:,} rows"
        )
    return dataclasses.replace(
        model,
        config=dataclasses.replace(model.config, vocab_size=size),
        params=extend_embeddings(model.params, rows, size),
        tokenizer=tokenizer,
    )


def find_branch_source(config: PretrainConfig) -> tuple[Path, int]:
    """Folder and step of the pretraining run whose state is continued. Raises UserError if there is none."""
    init = require(config.init, "init")
    folder, step = fetch_model(init)
    if step is None or not (folder / "config.yaml").is_file() or config_class_of_run(folder) is not PretrainConfig:
        raise UserError(
            f"init is {init}, and init_state needs the checkpoint of a pretraining run: name it as RUN@STEP, such as "
            "runs/mini@1000, or remove init_state"
        )
    return folder, step
