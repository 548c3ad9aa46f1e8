"""Training batches of a fine-tuning run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax

from bert.config import FinetuneConfig, TaskDataConfig
from bert.data.batching import FinetuningLoader, LengthGroups, bucket_length, make_batches
from bert.data.packed_batches import PackedTexts
from bert.errors import Log
from bert.runs.folder import TARGET_TOKENIZER, RunFolder
from bert.tokenizer.vocabulary import save_tokenizer
from bert.training.finetuning.distillation import save_targets
from bert.training.finetuning.kinds import has_groups_of_rows, sorts_by_length
from bert.training.finetuning.setup import Setup
from bert.training.run_length import check_extension, num_flops_ramp_steps, num_train_steps

NUM_GROUPS = 4
"""Maximum number of groups of a batch on a CPU. Other devices need more tokens at once, and have two."""

PACKED_LENGTH = 128
"""Length of packed rows, unless a text is longer. Attention stays cheap, and rows are nearly full."""


@dataclass(frozen=True)
class FinetuningData:
    """The training batches of a run."""

    loader: FinetuningLoader
    total_steps: int


def make_loader(setup: Setup, config: FinetuneConfig) -> FinetuningLoader:
    """Returns the training batches of a configuration."""
    task, parallel, data = setup.task, setup.parallel, config.data
    groups: LengthGroups | None = None
    batches = make_batches(setup.train, config, parallel.row_shares, sorts_by_length(task, config))
    by_rows = has_groups_of_rows(task, config, setup.loss)
    multiple = parallel.row_shares * config.training.gradient_accumulation_steps
    if data.packing:
        groups = _packed_rows(setup, data, multiple)
    elif by_rows or setup.loss.over_micro_batches:
        count = NUM_GROUPS if jax.default_backend() == "cpu" else 2
        groups = LengthGroups(data.buckets, data.max_length, multiple, by_rows, (0,) * count)
    ramp = num_flops_ramp_steps(config, num_train_steps(config.training, len(batches)))
    return FinetuningLoader(setup.train, config, parallel.process, batches, groups, ramp)


def _packed_rows(setup: Setup, data: TaskDataConfig, shares: int) -> PackedTexts:
    longest = max(int(setup.train.lengths.max()), min(PACKED_LENGTH, data.max_length))
    length = bucket_length(longest, data.buckets, data.max_length)
    return PackedTexts(data.buckets, data.max_length, shares, not setup.loss.over_micro_batches, (0,), length)


def build_data(
    run: RunFolder[FinetuneConfig], setup: Setup, log: Log
) -> tuple[RunFolder[FinetuneConfig], FinetuningData]:
    """Divides the training rows into batches, and saves the vocabularies and the final configuration.

    Returns:
        The run with its final configuration, and its data.

    Raises:
        UserError: the run began with other data, or the changed schedule does not fit the steps that are done.
    """
    config, train = run.config, setup.train
    loader = make_loader(setup, config)
    steps_per_epoch = loader.steps_per_epoch
    training = dataclasses.replace(config.training, eval_every=config.training.eval_every or steps_per_epoch)
    config = dataclasses.replace(config, training=training)
    run = check_extension(dataclasses.replace(run, config=config), steps_per_epoch, log)
    run.check_data(train.digest(), setup.dev.features.digest())
    if run.is_writer:
        if setup.taught is not None:
            save_targets(run.path, setup.taught)
        save_tokenizer(setup.init_model.tokenizer, run.path)
        if setup.init_model.target_tokenizer is not None:
            save_tokenizer(setup.init_model.target_tokenizer, run.path / TARGET_TOKENIZER)
    run = run.save_config(config)
    return run, FinetuningData(loader, num_train_steps(config.training, steps_per_epoch))
