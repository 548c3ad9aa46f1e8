"""A fine-tuning run before its first step: task, splits, initial model, loss and optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import optax
from tokenizers import Tokenizer

from bert.config import FinetuneConfig, ModelConfig
from bert.config.model import PairTruncation
from bert.data.batching import TrainingBatches, make_batches
from bert.data.corpus.vocabulary import report_size
from bert.data.rows import Rows
from bert.errors import UserError, require
from bert.inference.load import load
from bert.inference.pretrained import Params
from bert.model.execution import LayerExecution
from bert.model.pooling import Pooling
from bert.parallel import multihost
from bert.parallel.backends import Parallelism, make_parallelism
from bert.runs.checkpoint_directory import CheckpointDirectory
from bert.runs.folder import TARGET_TOKENIZER, RunFolder
from bert.tasks import find_task, make_task
from bert.tasks.base import Examples, Task
from bert.tasks.splits import read_splits
from bert.tokenizer.byte_level import separate_pairs
from bert.tokenizer.vocabulary import (
    embedding_rows,
    load_tokenizer,
    require_embedding_rows,
    save_tokenizer,
    train_tokenizer,
)
from bert.training.finetuning.data import Split, make_target_tokenizer, source_texts, warn_of_losses_in_training_texts
from bert.training.finetuning.evaluation import Evaluator
from bert.training.finetuning.initialization import Head
from bert.training.finetuning.kinds import (
    TASK_KINDS,
    build_model_and_loss,
    make_evaluators,
    task_loss,
)
from bert.training.initialization import Log, model_config_from_source, with_vocab_size
from bert.training.losses import Loss
from bert.training.optimizer import ParameterPath, make_frozen_predicate, make_optimizer
from bert.training.run_length import check_extension, num_train_steps


class InitialModel(NamedTuple):
    """What the model starts as: sizes, vocabulary, and weights (None for random ones).

    Attributes:
        target_tokenizer: of the targets of a decoder; None if they have that of the sources.
        pooling: that the model declares; None for a model that declares none.
        head: the head that the weights belong to; None for random weights.
        pair_truncation: how its rows of pairs are cut; None for the tokenizer's own way.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    params: Params | None
    name: str
    target_tokenizer: Tokenizer | None = None
    pooling: Pooling | None = None
    head: Head | None = None
    pair_truncation: PairTruncation | None = "google"


@dataclass(frozen=True)
class Setup:
    """A run before its first step.

    Attributes:
        run: its configuration without null.
        parallel: its devices.
        task: with what its training examples tell.
        splits: as rows for the model, ``train`` and ``dev`` among them.
        init_model: sizes, vocabulary and weights.
        model: the encoder with the task's head, as it is trained.
        frozen: path of a parameter -> whether it is not trained; None if all are.
        evaluator: outputs of a split, in training.
        final_evaluator: outputs of a split by the best checkpoint.
        batches: of the training rows.
    """

    run: RunFolder[FinetuneConfig]
    parallel: Parallelism
    task: Task
    splits: dict[str, Split]
    init_model: InitialModel
    model: nn.Module
    frozen: Callable[[ParameterPath], bool] | None
    loss: Loss
    optimizer: optax.GradientTransformation
    evaluator: Evaluator
    final_evaluator: Evaluator
    batches: TrainingBatches
    total_steps: int

    @property
    def train(self) -> Rows:
        return self.splits["train"].features

    @property
    def dev(self) -> Split:
        return self.splits["dev"]


def resolve_setup(run: RunFolder[FinetuneConfig], say: Log) -> Setup:
    """Reads the data and the initial model, fills in the defaults, and writes the run's first files.

    Raises:
        UserError: the devices, the data and the model do not fit each other.
    """
    LayerExecution.from_config(run.config.training)  # before data is read
    task, examples, data, notes = read_splits(make_task(run.config), run.config)
    _ = task.higher_main_is_better  # raises UserError unless the task declares it
    for note in notes:
        say(note)
    init_model = _load_init_model(run, examples["train"], say)
    require_embedding_rows(init_model.tokenizer, init_model.config.known_vocab_size, init_model.name)
    resolved = TASK_KINDS[task.kind].resolve(run.config, init_model.pooling, init_model.name, say)
    task = task.with_settings(resolved).with_target_tokenizer(init_model.target_tokenizer)
    data = task.to_config(data)
    if data.pair_truncation is None and not run.resumed:  # null in an older run is longest_first
        data = dataclasses.replace(data, pair_truncation=init_model.pair_truncation or "longest_first")
    config = dataclasses.replace(resolved, data=data, model=init_model.config)
    config.check_model()
    splits = {name: Split(split, task.features(init_model.tokenizer, split, data)) for name, split in examples.items()}
    train = splits["train"].features
    frozen = make_frozen_predicate(config.num_frozen_layers, config.num_feature_layers)
    parallel = make_parallelism(config.training, config.model)
    model, apply, loss = build_model_and_loss(task, config, frozen, parallel.axis)
    tokenizer = init_model.target_tokenizer or init_model.tokenizer
    for name, rows, micro_batches in config.batches():
        parallel.check_batch(name, rows, micro_batches)
    by_length = task_loss(task, config).by_length and not config.language_model_weight
    batches = make_batches(train, config, parallel.row_shares, by_length)
    config = _resolve_defaults(config, len(batches))
    run = check_extension(dataclasses.replace(run, config=config), len(batches), say)
    # Before other files: a folder without config.yaml belongs to no run.
    run = run.save_config(config, vocabulary=False)
    run.check_data(train.digest(), splits["dev"].features.digest())
    if run.is_writer:
        save_tokenizer(init_model.tokenizer, run.path)
        if init_model.target_tokenizer is not None:
            save_tokenizer(init_model.target_tokenizer, run.path / TARGET_TOKENIZER)
    run = run.save_config(config)
    total_steps = num_train_steps(config.training, len(batches))
    return Setup(
        run,
        parallel,
        task,
        splits,
        init_model,
        model,
        frozen,
        loss,
        make_optimizer(config.optimizer, total_steps, frozen),
        *make_evaluators(task, apply, parallel, config, tokenizer),
        batches,
        total_steps,
    )


def _resolve_defaults(config: FinetuneConfig, steps_per_epoch: int) -> FinetuneConfig:
    training = config.training
    training = dataclasses.replace(
        training,
        eval_every=training.eval_every or steps_per_epoch,
        max_to_keep=training.max_to_keep or 1,
    )
    return dataclasses.replace(config, training=training)


def _load_init_model(run: RunFolder[FinetuneConfig], train: Examples, say: Log) -> InitialModel:
    """Sizes, vocabulary and weights: of the run if begun, else of ``init``, ``architecture_from`` or the config.

    Of a vocabulary without tokens for a classifier's rows, as GPT-2's, the texts of a pair are separated.
    """
    given = _given_init_model(run, train, say)
    warn_of_losses_in_training_texts(given.tokenizer, source_texts(run.config, train))
    separate_pairs(given.tokenizer)
    if not run.config.has_target_tokenizer:
        return given
    folder = run.path / TARGET_TOKENIZER
    begun = run.resumed and multihost.broadcast_from_main(folder.is_dir)
    tokenizer = load_tokenizer(folder) if begun else make_target_tokenizer(run.config.target_tokenizer, train)
    rows = embedding_rows(tokenizer)
    if (requested := given.config.decoder_vocab_size) is not None and requested < rows:
        raise UserError(
            f"model.decoder_vocab_size ({requested}) is smaller than the vocabulary of the targets ({rows} tokens): "
            "remove it, or enlarge it"
        )
    config = dataclasses.replace(given.config, decoder_vocab_size=requested or rows)
    return given._replace(config=config, target_tokenizer=tokenizer)


def _given_init_model(run: RunFolder[FinetuneConfig], train: Any, say: Log) -> InitialModel:
    config, init = run.config, require(run.config.init, "init")
    if run.resumed and multihost.broadcast_from_main(CheckpointDirectory(run.checkpoints).steps):
        return InitialModel(config.model, load_tokenizer(run.path), None, init)
    if init != "none":
        source = load(init, say)
        model = task_model_config(config, source.config, source.source)
        head = Head(source.architecture, source.problem_type, source.labels, (), source.num_feature_layers)
        return InitialModel(
            model,
            source.tokenizer,
            source.params,
            source.origin,
            pooling=source.pooling,
            head=head,
            pair_truncation=source.pair_truncation,
        )
    if config.architecture_from is not None:
        source = load(config.architecture_from, say)
        model = task_model_config(config, source.config, source.source)
        return InitialModel(model, source.tokenizer, None, "none", pair_truncation=source.pair_truncation)
    if config.tokenizer.path is not None:
        tokenizer = load_tokenizer(config.tokenizer.path, config.tokenizer)
    else:
        tokenizer = train_tokenizer(iter(source_texts(config, train)), config.tokenizer)
        report_size(tokenizer, config.tokenizer, "data.dir")
    return InitialModel(with_vocab_size(config.model, embedding_rows(tokenizer)), tokenizer, None, "none")


def task_model_config(config: FinetuneConfig, source: ModelConfig, name: str) -> ModelConfig:
    """The source's sizes; of its decoder, for a task that has one. Raises UserError."""
    model = model_config_from_source(config.model, source, name)
    if not TASK_KINDS[find_task(config.task).kind].has_decoder or model.decoder_layers is not None:
        return model
    return dataclasses.replace(model, decoder_layers=source.decoder_layers)
