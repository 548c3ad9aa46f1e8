"""Setup of a fine-tuning run: resolves and checks the configuration, loads rows and models, saves the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
from tokenizers import Tokenizer

from bert.config import FinetuneConfig, ModelConfig, TokenizerConfig
from bert.config.model import PairTruncation
from bert.data.corpus.vocabulary import first_texts, measure_losses, report_size, warn_of_losses
from bert.data.rows import Rows
from bert.data.windows import row_shape
from bert.errors import LOGGER, Log, UserError, require
from bert.inference.load import load_for_training
from bert.model.layers import LayerExecution
from bert.model.parameters import Params
from bert.model.pooling import Pooling
from bert.parallel import multihost
from bert.parallel.backends import Parallelism, make_parallelism
from bert.runs.checkpoint_directory import CheckpointDirectory
from bert.runs.folder import TARGET_TOKENIZER, RunFolder
from bert.tasks import find_task, make_task
from bert.tasks.base import Task
from bert.tasks.splits import Examples, has_dev, read_splits
from bert.tasks.teaching import TaughtRows
from bert.tokenizer.byte_level import separate_pairs
from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer, require_embedding_rows, train_tokenizer
from bert.training.finetuning.contrastive import check_rows_per_label
from bert.training.finetuning.distillation import teach
from bert.training.finetuning.evaluation import Split
from bert.training.finetuning.initialization import Head, with_projection
from bert.training.finetuning.kinds import TASK_KINDS, build_model_and_loss, has_groups_of_rows
from bert.training.initialization import model_config_from_source, with_fewer_layers, with_vocab_size
from bert.training.length_groups import over_groups
from bert.training.losses import Apply, Loss
from bert.training.optimizer import ParameterPath, make_frozen_predicate

DEFAULT_MAX_TO_KEEP = 1
"""Number of checkpoints to keep if training.max_to_keep is null."""

NEVER = 10**9
"""Steps between evaluations and checkpoints: only the last step has them, so that the evaluated rows choose nothing."""


class InitialModel(NamedTuple):
    """The initial model: sizes, vocabulary, and weights (None for random weights).

    Attributes:
        target_tokenizer: vocabulary of a decoder's targets; None if sources and targets share one.
        pooling: the pooling that the model declares, if any.
        head: the head that the weights belong to; None for random weights.
        pair_truncation: truncation of pairs; None for the tokenizer's default.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    params: Params | None
    name: str
    target_tokenizer: Tokenizer | None = None
    pooling: Pooling | None = None
    head: Head | None = None
    pair_truncation: PairTruncation | None = "google"

    @property
    def output_tokenizer(self) -> Tokenizer:
        """The vocabulary of generated texts."""
        return self.target_tokenizer or self.tokenizer


@dataclass(frozen=True)
class Setup:
    """Devices, rows and model of a run.

    Attributes:
        task: the task, with labels and settings determined by the training examples.
        splits: the splits by name, including ``train`` and ``dev``.
        apply: (params, batch, dropout) -> the outputs of the task.
        frozen: path of a parameter -> whether it is not trained; None if all are.
        taught: the training rows and rows without labels, with the outputs of a teacher; None without a teacher.
    """

    parallel: Parallelism
    task: Task
    splits: dict[str, Split]
    init_model: InitialModel
    model: nn.Module
    apply: Apply
    loss: Loss
    frozen: Callable[[ParameterPath], bool] | None
    taught: TaughtRows | None = None

    @property
    def train(self) -> Rows:
        """The rows that are trained on."""
        return self.splits["train"].features if self.taught is None else self.taught

    @property
    def dev(self) -> Split:
        """The rows that are evaluated: the training rows if there are no dev rows."""
        return self.splits["dev"]

    @property
    def has_dev(self) -> bool:
        """Whether there are dev rows."""
        return has_dev({name: split.examples for name, split in self.splits.items()})


def resolve_setup(run: RunFolder[FinetuneConfig], log: Log) -> tuple[FinetuneConfig, Setup]:
    """Fills in the defaults, checks the configuration, and loads the splits and the initial model.

    This writes nothing.

    Returns:
        The configuration without null keys, except ``training.eval_every``, and the devices, rows and model.

    Raises:
        UserError: the devices, the data and the model do not fit each other.
    """
    config = _resolve_defaults(run.config)
    LayerExecution.from_config(config.training)  # fails before data is read
    is_new = not _has_checkpoint(run)
    task, examples, data, notes = read_splits(make_task(config), config, is_new)
    _ = task.higher_main_is_better  # raises UserError if the task does not declare it
    for note in notes:
        log(note)
    if config.classifier_training == "contrastive":
        check_rows_per_label(task, examples["train"])
    init_model = _load_init_model(run, examples["train"], log)
    require_embedding_rows(init_model.tokenizer, init_model.config.known_vocab_size, init_model.name)
    parts = (init_model.pooling, init_model.tokenizer, init_model.name)
    config = TASK_KINDS[task.kind].resolve(config, *parts, log)
    task = task.with_settings(config).with_target_tokenizer(init_model.target_tokenizer)
    data = task.to_config(data)
    if data.pair_truncation is None and is_new:  # null in an older run is longest_first
        data = dataclasses.replace(data, pair_truncation=init_model.pair_truncation or "longest_first")
    training = config.training if has_dev(examples) else dataclasses.replace(config.training, eval_every=NEVER)
    config = dataclasses.replace(config, data=data, model=init_model.config, training=training)
    config.check_model()
    parallel = check_devices(config)
    frozen = make_frozen_predicate(config.num_frozen_layers, config.num_feature_layers)
    model, apply, loss = build_model_and_loss(task, config, frozen, parallel.axis)
    if has_groups_of_rows(task, config, loss):
        loss = over_groups(loss)
    splits = {name: Split(split, task.features(init_model.tokenizer, split, data)) for name, split in examples.items()}
    if config.data.packing:
        _check_packing(config.task, TASK_KINDS[task.kind].has_decoder, loss, splits["train"].features)
    taught = None
    if config.distillation.is_used:
        config, taught = teach(run.path, config, task, splits["train"], init_model.tokenizer, log)
    return config, Setup(parallel, task, splits, init_model, model, apply, loss, frozen, taught)


def _check_packing(name: str, has_decoder: bool, loss: Loss, rows: Rows) -> None:
    """Raises UserError if the encoder reads more than one text per row, or if it may also be the decoder."""
    has_choices = not loss.over_micro_batches and len(row_shape(rows)) > 1
    if has_decoder or has_choices:
        problem = "has a decoder" if has_decoder else "has rows of several choices"
        raise UserError(f"data.packing is true, but the task {name} {problem}: remove it")


def check_devices(config: FinetuneConfig) -> Parallelism:
    """Returns the devices of a run. Raises UserError if they cannot run its batches."""
    parallel = make_parallelism(config.training, config.model)
    for name, rows, micro_batches in config.batches():
        parallel.check_batch(name, rows, micro_batches)
    return parallel


def _resolve_defaults(config: FinetuneConfig) -> FinetuneConfig:
    training = dataclasses.replace(config.training, max_to_keep=config.training.max_to_keep or DEFAULT_MAX_TO_KEEP)
    return dataclasses.replace(config, training=training)


def _load_init_model(run: RunFolder[FinetuneConfig], train: Examples, log: Log) -> InitialModel:
    """Loads sizes, vocabulary and weights of the initial model.

    They come from the run if it has begun, else from ``init``, ``architecture_from`` or the configuration. Vocabularies
    without [CLS] and [SEP], such as GPT-2's, get a separator for pairs.
    """
    model = _load_source_model(run, train, log)
    losses = measure_losses(model.tokenizer, first_texts(_source_texts(run.config, train)))
    warn_of_losses(losses, model.tokenizer, multihost.main_process_only(LOGGER.warning), "the training texts")
    separate_pairs(model.tokenizer)
    if not run.config.has_target_tokenizer:
        return model
    folder = run.path / TARGET_TOKENIZER
    begun = run.resumed and multihost.broadcast_from_main(folder.is_dir)
    tokenizer = load_tokenizer(folder) if begun else _make_target_tokenizer(run.config.target_tokenizer, train)
    rows = embedding_rows(tokenizer)
    if (requested := model.config.decoder_vocab_size) is not None and requested < rows:
        raise UserError(
            f"model.decoder_vocab_size ({requested}) is smaller than the vocabulary of the targets ({rows} tokens): "
            "remove it, or enlarge it"
        )
    config = dataclasses.replace(model.config, decoder_vocab_size=requested or rows)
    return model._replace(config=config, target_tokenizer=tokenizer)


def _has_checkpoint(run: RunFolder[FinetuneConfig]) -> bool:
    return run.resumed and bool(multihost.broadcast_from_main(CheckpointDirectory(run.checkpoints).steps))


def _load_source_model(run: RunFolder[FinetuneConfig], train: Any, log: Log) -> InitialModel:
    config, init = run.config, require(run.config.init, "init")
    if _has_checkpoint(run):
        return InitialModel(config.model, load_tokenizer(run.path), None, init)
    if init != "none":
        source = load_for_training(init, log)
        if config.num_init_layers is not None:
            sizes, params = with_fewer_layers(source.config, source.params, config.num_init_layers, source.source)
            source = dataclasses.replace(source, config=sizes, params=params)
        model = task_model_config(config, source.config, source.source, source.pooling)
        head = Head(source.architecture, source.problem_type, source.labels, (), source.num_feature_layers)
        return InitialModel(
            model,
            source.tokenizer,
            with_projection(source.params, source.pooling),
            source.origin,
            pooling=source.pooling,
            head=head,
            pair_truncation=source.pair_truncation,
        )
    if config.architecture_from is not None:
        source = load_for_training(config.architecture_from, log)
        model = task_model_config(config, source.config, source.source)
        return InitialModel(model, source.tokenizer, None, "none", pair_truncation=source.pair_truncation)
    if config.tokenizer.path is not None:
        tokenizer = load_tokenizer(config.tokenizer.path, config.tokenizer)
    else:
        tokenizer = train_tokenizer(iter(_source_texts(config, train)), config.tokenizer)
        report_size(tokenizer, config.tokenizer, "data.dir")
    return InitialModel(with_vocab_size(config.model, embedding_rows(tokenizer)), tokenizer, None, "none")


def _make_target_tokenizer(config: TokenizerConfig, train: Any) -> Tokenizer:
    """Returns the vocabulary of the targets: read from a file, or trained on the targets of the training rows."""
    if config.path is not None:
        return load_tokenizer(config.path, config)
    tokenizer = train_tokenizer(iter(train.targets), config)
    report_size(tokenizer, config, "data.dir", "target_tokenizer")
    return tokenizer


def _source_texts(config: FinetuneConfig, train: Any) -> Iterable[str]:
    return train.sources if config.has_target_tokenizer else train.sentences()


def task_model_config(
    config: FinetuneConfig, source: ModelConfig, name: str, pooling: Pooling | None = None
) -> ModelConfig:
    """Returns the source's sizes, with its decoder's if the task has a decoder, and with the pooler of the task.

    Args:
        pooling: the pooling that the source declares, if any.

    Raises:
        UserError: the source does not fit the configuration.
    """
    pooler = _task_pooler(config, source, pooling)
    requested = config.model
    if requested.vocab_size is not None:
        requested = dataclasses.replace(requested, **{key: getattr(source, key) for key in pooler})
    model = dataclasses.replace(model_config_from_source(requested, source, name), **pooler)
    if not TASK_KINDS[find_task(config.task).kind].has_decoder or model.decoder_layers is not None:
        return model
    return dataclasses.replace(model, decoder_layers=source.decoder_layers)


def _task_pooler(config: FinetuneConfig, source: ModelConfig, pooling: Pooling | None) -> dict[str, Any]:
    """Returns the fields of the model that ``classifier_pooling`` sets; {} for the pooler of the source.

    A configuration with the sizes of its model, such as the config.yaml of a run, has been resolved before and is not
    changed.
    """
    task, choice = find_task(config.task), config.classifier_pooling
    if not TASK_KINDS[task.kind].classifies_rows or source.causal:
        return {}
    if config.model.vocab_size is not None:
        return {key: getattr(config.model, key) for key in ("pooler_type", "pooler_input")}
    if choice == "mean" or (
        choice == "init" and task.pools_as_declared and pooling is not None and pooling.modes == ["mean"]
    ):
        return {"pooler_type": "norm", "pooler_input": "mean"}
    if choice == "first" and source.pooler_type == "norm":
        return {"pooler_type": "dense", "pooler_input": "first"}
    return {}
