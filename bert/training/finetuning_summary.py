"""The table of sizes that a fine-tuning run logs before its first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flax import traverse_util

from bert.config import FinetuneConfig
from bert.model.lora import FrozenWeights
from bert.runs import progress
from bert.tasks.splits import cut_facts, label_facts
from bert.training.finetuning_setup import Setup
from bert.training.initialization import Params
from bert.training.loop import count_parameters
from bert.training.optimizer import ParameterPath, describe_decay


class ParameterCounts(NamedTuple):
    """Parameters of the model, and those that are trained, adapters included."""

    total: int
    trained: int

    @classmethod
    def of(cls, params: Params, frozen: FrozenWeights, setup: Setup) -> ParameterCounts:
        """The counts of a run; ``params`` are those of its state."""
        trained = count_parameters(_trained(params, setup.frozen))
        return cls(count_parameters(frozen.merge(params)), trained)

    def __str__(self) -> str:
        if self.trained == self.total:
            return f"{self.total:,}"
        return f"{self.total:,}, of which {self.trained:,} ({self.trained / self.total:.2%}) are trained"


def log_summary(params: Params, counts: ParameterCounts, setup: Setup) -> None:
    """Logs the table."""
    task, config, total_steps = setup.task, setup.run.config, setup.total_steps
    examples = {name: split.examples for name, split in setup.splits.items()}
    rows = {name: split.features for name, split in setup.splits.items()}
    longest = config.model.max_position_embeddings
    progress.log_table(
        [
            ("task", f"{task.name}: {len(setup.train):,} training rows, {len(setup.dev.features):,} dev"),
            *label_facts(task, examples, config.data),
            *cut_facts(task, setup.init_model.tokenizer, examples, rows, config.data, longest),
            ("parameters", str(counts)),
            ("devices", setup.parallel.describe()),
            ("tokens per step", _tokens_per_step(config)),
            ("steps", f"{total_steps:,} ({total_steps / len(setup.batches):.1f} epochs)"),
            ("optimizer", describe_decay(_trained(params, setup.frozen), config.optimizer)),
        ]
    )


def _tokens_per_step(config: FinetuneConfig) -> str:
    """A cell of that table."""
    training, length = config.training, config.data.max_length
    if training.tokens_per_batch is not None:
        return f"up to {training.tokens_per_batch:,}, in as many rows as fit"
    return f"up to {training.batch_size * length:,} ({training.batch_size} x {length}, padded to buckets)"


def _trained(params: Params, frozen: Callable[[ParameterPath], bool] | None) -> Params:
    flat = traverse_util.flatten_dict(params)
    kept = {path: leaf for path, leaf in flat.items() if frozen is None or not frozen(path)}
    return traverse_util.unflatten_dict(kept)
