"""Training batches of a fine-tuning run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from bert.config import FinetuneConfig
from bert.data.batching import FinetuningLoader, make_batches
from bert.runs.folder import TARGET_TOKENIZER, RunFolder
from bert.tokenizer.vocabulary import save_tokenizer
from bert.training.finetuning.distillation import save_targets
from bert.training.finetuning.kinds import groups_by_length
from bert.training.finetuning.setup import Setup
from bert.training.initialization import Log
from bert.training.run_length import check_extension, num_train_steps


@dataclass(frozen=True)
class FinetuningData:
    """The training batches of a run."""

    loader: FinetuningLoader
    steps_per_epoch: int
    total_steps: int


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
    batches = make_batches(train, config, setup.parallel.row_shares, groups_by_length(setup.task, config))
    steps_per_epoch = len(batches)
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
    loader = FinetuningLoader(train, config, setup.parallel.process, batches)
    return run, FinetuningData(loader, steps_per_epoch, num_train_steps(config.training, steps_per_epoch))
