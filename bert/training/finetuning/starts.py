"""Scores of a task by initial weights: a pretrained encoder and random weights, each under several seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert.config import FinetuneConfig
from bert.config.validation import check_unused
from bert.data.windows import row_shape
from bert.errors import Log, UserError, require
from bert.runs.folder import RunFolder
from bert.runtime.interrupts import InterruptHandler
from bert.training.finetuning.data import make_loader
from bert.training.finetuning.kinds import TASK_KINDS, make_evaluators
from bert.training.finetuning.setup import resolve_setup
from bert.training.initialization import load_pretrained_params
from bert.training.optimizer import make_optimizer
from bert.training.run_length import num_train_steps
from bert.training.step import TrainState, make_grad_fn, make_update_fn

PRETRAINED, RANDOM = "pretrained", "random_weights"


def require_supported(config: FinetuneConfig, key: str) -> None:
    """Raises UserError for a fine-tuning that `StartComparison` does not support; ``key`` names what requests it."""
    if config.lora.rank is not None:
        raise UserError(f"{key} trains all weights, but lora.rank is set: set it to null")
    if config.classifier_training == "contrastive":
        raise UserError(f"{key} trains the classifier, but classifier_training is contrastive: remove it")
    scored = f"but {key} scores the weights of the last step: remove it"
    check_unused("", config, scored, ["patience"])
    check_unused("training.", config.training, scored, ["average_checkpoints"])


class StartComparison:
    """Fine-tunes `PRETRAINED` and `RANDOM` weights with one compiled program.

    For a tiny model, compilation takes longer than training. The seed is therefore an input of the program, and all
    starts share it. Nothing is saved. With one seed, both starts have the same head and the same batches.

    Attributes:
        config: the resolved configuration; ``init`` names the pretrained encoder.
        setup: the task, its rows, and the model.
    """

    def __init__(
        self, config: FinetuneConfig, log: Log, on_progress: Callable[[float], None] = lambda share: None
    ) -> None:
        """Reads the rows and the initial model, which are the same for all seeds.

        Args:
            on_progress: called after each step with the completed share of the steps of one seed.

        Raises:
            UserError: the data and the model do not fit each other, or the configuration trains adapters.
        """
        require_supported(config, "transfer")
        folder = RunFolder(Path(require(config.output_dir, "output_dir")), config, resumed=False)
        self.config, self.setup = resolve_setup(folder, log)
        self._kind, self._log, self._on_progress = TASK_KINDS[self.setup.task.kind], log, on_progress
        seeds = range(config.seed, config.seed + config.num_seeds)
        self._loaders = {seed: make_loader(self.setup, dataclasses.replace(self.config, seed=seed)) for seed in seeds}
        self._steps = num_train_steps(config.training, self._loaders[config.seed].steps_per_epoch)
        self._compile()

    def _compile(self) -> None:
        setup, config = self.setup, self.config
        self._optimizer = make_optimizer(config.optimizer, self._steps, setup.frozen)

        def gradients(params: Any, step: jax.Array, seed: jax.Array, batch: dict[str, jax.Array]) -> Any:
            grad_fn = make_grad_fn(setup.loss, seed, config.training.dropout_rng, setup.parallel.axis)
            return grad_fn(params, step, batch)

        update = make_update_fn(self._optimizer, setup.loss.factors)
        self._gradients = setup.parallel.compile(gradients)
        self._update = setup.parallel.compile(update, donate=(0,))
        shape = (*row_shape(setup.train), 8)
        model = self._kind.initializable(setup.model)
        self._draw = jax.jit(lambda key: model.init(key, jnp.zeros(shape, jnp.int32))["params"])
        self._evaluate, _ = make_evaluators(
            setup.task, setup.apply, setup.parallel, config, setup.init_model.output_tokenizer
        )

    def scores(self, start: str) -> Iterator[float]:
        """Yields the main metric on dev after the last step, one seed after the other.

        Raises:
            Interrupted: a signal was received.
        """
        for seed in self._loaders:
            yield self._score(start, seed)

    def _score(self, start: str, seed: int) -> float:
        setup = self.setup
        with InterruptHandler() as interrupts:
            state = setup.parallel.put_state(self._initial_state(start, seed))
            traced_seed = setup.parallel.put_state(np.uint32(seed))
            for step in range(self._steps):
                batch = setup.parallel.shard_batch(
                    self._loaders[seed].batch(step), self.config.training.gradient_accumulation_steps
                )
                state, metrics = self._update(state, *self._gradients(state.params, state.step, traced_seed, batch))
                jax.block_until_ready(metrics)
                self._on_progress((step + 1) / self._steps)
                interrupts.raise_if_signalled(step)
            outputs, _ = self._evaluate(state.params, setup.dev)
            interrupts.raise_if_signalled(self._steps)
        features, examples = setup.dev.features, setup.dev.examples
        task = setup.task.tune(outputs, features, examples)
        return float(task.score(task.predict(outputs, features, examples), examples)[task.main_metric])

    def _initial_state(self, start: str, seed: int) -> TrainState:
        """Returns random weights, for `PRETRAINED` overwritten by the modules of ``init``."""
        params, source = jax.device_get(self._draw(jax.random.key(seed))), self.setup.init_model
        if start == PRETRAINED:
            weights = self._kind.init_params(self.config, require(source.params, "the weights of init"), source.name)
            params = load_pretrained_params(params, weights, source.name, self._kind.init_modules, self._log)
        return jax.tree.map(np.asarray, TrainState.create(params, self._optimizer, self.setup.loss.metrics))
