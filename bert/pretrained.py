"""What `bert.load` returns: a model that reads texts and answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tokenizers import Tokenizer

from bert.checkpoint import Checkpointer
from bert.config import FinetuneConfig, ModelConfig, PretrainConfig, TaskDataConfig, UserError
from bert.config_file import load as load_config
from bert.data.batches import bucket, evaluation_batches
from bert.data.features import Features, tokenize
from bert.data.tasks import task_of
from bert.data.tasks.task import Outputs, Rows, Task
from bert.heads import HEADS, BertForPreTraining
from bert.metrics import softmax
from bert.model import Bert
from bert.run import kind_of
from bert.tokenizer import load_tokenizer, special_ids, vocabulary_size

Text = str | tuple[str, str]
Params = dict[str, Any]

BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Lengths that inputs are padded to; each is compiled once."""


class Encoded(NamedTuple):
    """What `Pretrained.encode` returns; T is the longest text's, in tokens.

    Attributes:
        last_hidden_state: [B, T, D] float32, zero at padding.
        pooled_output: [B, D] float32.
        attention_mask: [B, T] int32, 1 for a token and 0 for padding.
    """

    last_hidden_state: np.ndarray
    pooled_output: np.ndarray
    attention_mask: np.ndarray


class FilledMask(NamedTuple):
    """One proposal for a [MASK]: the piece, its probability, its id."""

    token: str
    probability: float
    token_id: int


@dataclass(frozen=True)
class Pretrained:
    """A model with its vocabulary, ready to be asked.

    Attributes:
        config: sizes of the encoder.
        params: nested dict of float32 arrays, of the encoder (``bert``) and of its heads.
        tokenizer: a `tokenizers.Tokenizer`.
        task: the task it was fine-tuned for, or None.
        step: the checkpoint it was read from.
        source: the folder it was read from.
        data: how the task's rows were made.
        feature_layers: of a head over a frozen encoder: how many last layers it reads; else None.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    task: Task | None
    step: int
    source: str
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    feature_layers: int | None = None

    def encode(self, texts: Sequence[Text], batch_size: int = 32) -> Encoded:
        """Hidden states of texts, and of pairs of texts given as tuples; longer ones than the model's are cut."""
        features = self._features(texts)
        longest = int(features.lengths.max(initial=0))
        hidden = np.zeros((len(texts), longest, self.config.hidden_size), np.float32)
        pooled = np.zeros((len(texts), self.config.hidden_size), np.float32)
        mask = (np.arange(longest) < features.lengths[:, None]).astype(np.int32)
        for rows, output in self._run(self._encoder, features, batch_size):
            length = min(longest, output.last_hidden_state.shape[1])
            hidden[rows, :length] = output.last_hidden_state[: len(rows), :length]
            pooled[rows] = output.pooled_output[: len(rows)]
        return Encoded(hidden * mask[:, :, None], pooled, mask)

    def fill_mask(self, text: Text, top_k: int = 5) -> list[list[FilledMask]]:
        """The ``top_k`` likeliest pieces for each [MASK] of a text, masks in order, likeliest first.

        Raises:
            UserError: no [MASK] in the text, or a model without the MLM head (a fine-tuned one).
        """
        if "predictions" not in self.params:
            raise UserError(f"{self.source} has no masked-LM head to fill masks with: load a pretraining run")
        features = self._features([text])
        places = np.flatnonzero(features.ids == special_ids(self.tokenizer).mask)
        if not len(places):
            raise UserError(f"no [MASK] in {text!r}: put one where a word is to be guessed")
        [(_, logits)] = self._run(self._masked_lm, features, 1)
        answers = []
        for place in places:
            probabilities = softmax(logits[0, place, : vocabulary_size(self.tokenizer)])
            best = np.argsort(-probabilities, kind="stable")[:top_k]
            answers.append(
                [FilledMask(self.tokenizer.id_to_token(int(i)), float(probabilities[i]), int(i)) for i in best]
            )
        return answers

    def predict(self, inputs: Sequence[Any], batch_size: int = 32) -> list[Any]:
        """The fine-tuned task's answers, in the order of ``inputs``: named tuples, as the task has them.

        Args:
            inputs: texts, or what else the task takes (pairs of texts, a question with its context, ...).
            batch_size: rows at once.

        Raises:
            UserError: the model was not fine-tuned; or an input is not what the task takes.
        """
        if self.task is None:
            raise UserError(f"{self.source} is not fine-tuned for a task: fine-tune it first (finetune.py --init)")
        examples = self.task.asked(inputs)
        length = self.data.max_length if self.task.windows else self.config.max_position_embeddings
        features = self.task.features(self.tokenizer, examples, dataclasses.replace(self.data, max_length=length))
        predictions = self.task.predict(self.outputs(features, batch_size), features, examples)
        return self.task.answers(predictions, examples)

    def outputs(self, features: Rows, batch_size: int = 32) -> Outputs:
        """What the task's head says of each row, in the order of the rows: see `bert.data.tasks.task.Outputs`."""
        outputs: list[np.ndarray] = [np.zeros(0)] * len(features)
        for rows, batch in self._run(self._head, features, batch_size):
            for row, output in zip(rows, batch, strict=False):
                outputs[row] = output[: features.lengths[row]] if output.ndim == 2 else output
        return outputs

    def _features(self, texts: Sequence[Text]) -> Features:
        return tokenize(self.tokenizer, list(texts), self.config.max_position_embeddings)

    def _run(self, forward: Callable[..., Any], features: Rows, batch_size: int) -> Iterator[tuple[np.ndarray, Any]]:
        """Batches of like lengths through a compiled function: (row numbers, outputs as NumPy arrays)."""
        batch_size = min(batch_size, 1 << max(len(features) - 1, 0).bit_length())
        for rows in evaluation_batches(features.lengths, batch_size):
            longest = int(features.lengths[rows].max())
            length = bucket(longest, BUCKETS, self.config.max_position_embeddings)
            batch = features.batch(rows, length, batch_size)
            inputs = (batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
            yield rows, jax.device_get(forward(self._device_params, *inputs))

    @cached_property
    def _device_params(self) -> Params:
        return jax.device_put(self.params)

    @cached_property
    def _encoder(self) -> Callable[..., Any]:
        model = Bert(self.config)
        return jax.jit(lambda params, *inputs: model.apply({"params": params["bert"]}, *inputs))

    @cached_property
    def _masked_lm(self) -> Callable[..., Any]:
        model = BertForPreTraining(self.config)
        return jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs).prediction_logits)

    @cached_property
    def _head(self) -> Callable[..., Any]:
        task = self.task
        model = HEADS[task.head](self.config, task.num_labels, feature_layers=self.feature_layers)
        return jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs))


def load(source: str | Path, say: Callable[[str], None] = lambda text: None) -> Pretrained:
    """Reads a run's newest good checkpoint; of a fine-tuning run the best one.

    Args:
        source: folder of a run.
        say: told of damaged checkpoints that were passed over.

    Raises:
        UserError: no run there, no checkpoint yet, or none that is whole.
    """
    path = Path(source)
    if not path.exists():
        raise UserError(f"{path} does not exist: name the folder of a run")
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} holds no run (no config.yaml): name the folder of a run")
    kind = kind_of(path)
    config: PretrainConfig | FinetuneConfig = load_config(kind, path / "config.yaml")
    if isinstance(config, FinetuneConfig) and config.seeds > 1:
        raise UserError(
            f"{path} holds the runs of {config.seeds} seeds: name one of them, for example "
            f"{path / f'seed-{config.seed}'} (results.json tells the best one)"
        )
    with Checkpointer(path / "checkpoints", config.training.keep_checkpoints, say) as checkpoints:
        restored = checkpoints.restore_best_params() if kind is FinetuneConfig else checkpoints.restore_params()
    if restored is None:
        raise UserError(f"{path} has no checkpoint yet: let the run reach its first one")
    step, params = restored
    own = isinstance(config, FinetuneConfig)
    return Pretrained(
        config=config.model,
        params=params,
        tokenizer=load_tokenizer(path),
        task=task_of(config) if own else None,
        step=step,
        source=str(path),
        **({"data": config.data, "feature_layers": config.feature_layers} if own else {}),
    )
