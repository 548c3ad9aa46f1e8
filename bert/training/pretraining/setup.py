"""Setup of a pretraining run: resolves and checks the configuration, loads the models, saves the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bert.config import DataConfig, PretrainConfig
from bert.config.phases import OVERRIDES, PhaseConfig
from bert.config.pretraining import phase_configs
from bert.config.run_file import load_run_config
from bert.errors import Log, UserError
from bert.inference.load import load_for_training
from bert.inference.pretrained import Pretrained
from bert.model.layers import LayerExecution
from bert.parallel import multihost
from bert.parallel.backends import Parallelism, make_parallelism
from bert.runs.checkpoint_directory import CheckpointDirectory
from bert.runs.folder import RunFolder
from bert.tokenizer.extension import decompose_new_tokens
from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer
from bert.training.initialization import model_config_from_source
from bert.training.pretraining.branches import find_branch_source
from bert.training.pretraining.distillation import Teacher, check_student, load_teacher
from bert.training.pretraining.initialization import extend_embeddings
from bert.training.pretraining.transfer import check_transfer

DEFAULT_MAX_TO_KEEP = 3
"""Number of checkpoints to keep if training.max_to_keep is null."""


@dataclass(frozen=True)
class Setup:
    """Devices and loaded models of a run.

    Attributes:
        init_model: the model of ``init``; None for random weights and for a run that has begun.
        teacher: the model to distill; None without distillation.
    """

    parallel: Parallelism
    init_model: Pretrained | None
    teacher: Teacher | None


def resolve_setup(run: RunFolder[PretrainConfig], log: Log) -> tuple[PretrainConfig, Setup]:
    """Fills in the defaults, checks the configuration and loads the models that it names.

    This writes nothing, and reads no data except to check ``transfer``.

    Returns:
        The configuration without null keys, except ``model.vocab_size``, and the devices and models.

    Raises:
        UserError: the devices cannot run the configuration, or a model does not fit it.
    """
    config = _resolve_defaults(run.config)
    parallel = check_devices(config)
    for note in _notes_on_predictions(config):
        log(note)
    config, init_model = _load_init_model(run, config, log)
    if config.transfer is not None:
        check_transfer(config)  # fails before hours of training
    LayerExecution.from_config(config.training, config.model)
    config, teacher = _load_teacher(config, log)
    return config, Setup(parallel, init_model, teacher)


def check_devices(config: PretrainConfig) -> Parallelism:
    """Returns the devices of a run. Raises UserError if they cannot run its batches or its readers."""
    parallel = make_parallelism(config.training, config.model)
    LayerExecution.from_config(config.training)
    for name, rows, micro_batches in config.batches():
        parallel.check_batch(name, rows, micro_batches)
    check_readers(config.data, parallel.process[1])
    return parallel


def check_readers(data: DataConfig, hosts: int) -> None:
    """Raises UserError if the hosts cannot share the readers."""
    if data.streaming and data.stream_readers % hosts:
        raise UserError(
            f"data.stream_readers is {data.stream_readers}, which {hosts} hosts cannot share: use a multiple of the "
            "number of hosts"
        )


def _notes_on_predictions(config: PretrainConfig) -> Iterator[str]:
    """Yields a note for each phase whose predictions per row are limited."""
    for number, phase in enumerate(phase_configs(config), 1):
        entry = PhaseConfig() if config.phases is None else config.phases[number - 1]
        own = entry.max_predictions_per_sequence is not None or entry.masked_lm_prob is not None
        if (note := phase.capped_predictions(f"phases.{number}" if own else "data")) is not None:
            yield note


def has_begun(run: RunFolder[Any]) -> bool:
    """Returns whether a run has a checkpoint and its vocabulary, and therefore no longer needs its initial model."""

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


def _load_init_model(
    run: RunFolder[PretrainConfig], config: PretrainConfig, log: Log
) -> tuple[PretrainConfig, Pretrained | None]:
    """Returns the configuration with the sizes of the ``init`` model, and this model if the run starts from it."""
    if config.init is None or has_begun(run):
        return config, None
    model = _with_new_tokens(load_for_training(config.init, log), run, config, log)
    if config.init_state:
        # The checkpoint may belong to a phase with other values than the run that it is continued as.
        final = load_run_config(find_branch_source(config)[0]).model
        values = {key: getattr(final, key) for key in OVERRIDES["model"]}
        model = dataclasses.replace(model, config=dataclasses.replace(model.config, **values))
    replaced = (*OVERRIDES["model"], "memory_length")
    sizes = model_config_from_source(config.model, model.config, model.source, replaced)
    for key in replaced:
        if (value := getattr(sizes, key)) != getattr(config.model, key):
            log(f"model.{key} is {value}, as in {config.init}")
    config = dataclasses.replace(config, model=sizes)
    config.check()
    config.check_model()
    return config, model


def _with_new_tokens(model: Pretrained, run: RunFolder[PretrainConfig], config: PretrainConfig, log: Log) -> Pretrained:
    """Returns the model with embedding rows for the tokens that ``tokenizer.path`` adds to its vocabulary."""
    path = run.path if (run.path / "tokenizer.json").is_file() else config.tokenizer.path
    if path is None:
        return model
    tokenizer = load_tokenizer(path, config.tokenizer)
    rows = decompose_new_tokens(model.tokenizer, tokenizer, model.source, str(path))
    if not rows:
        return dataclasses.replace(model, tokenizer=tokenizer)
    size = max(model.config.known_vocab_size, embedding_rows(tokenizer))
    if not run.resumed:
        log(
            f"{len(rows):,} new rows seeded from the mean of their old tokens, "
            f"the first for {tokenizer.id_to_token(next(iter(rows)))!r}; the embedding has {size:,} rows"
        )
    return dataclasses.replace(
        model,
        config=dataclasses.replace(model.config, vocab_size=size),
        params=extend_embeddings(model.params, rows, size),
        tokenizer=tokenizer,
    )


def _load_teacher(config: PretrainConfig, log: Log) -> tuple[PretrainConfig, Teacher | None]:
    """Returns the configuration with the teacher's checksum, and the teacher of ``distillation`` if there is one."""
    teacher = load_teacher(config.distillation, log)
    if teacher is None:
        return config, None
    check_student(config, teacher)
    distillation = dataclasses.replace(config.distillation, checksum=teacher.checksum)
    return dataclasses.replace(config, distillation=distillation), teacher
