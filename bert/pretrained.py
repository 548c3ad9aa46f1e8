"""What `bert.load` returns: a model that reads texts and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tokenizers import Tokenizer

from bert.checkpoint import Checkpointer
from bert.config import FinetuneConfig, ModelConfig, PretrainConfig, UserError
from bert.config_file import load as load_config
from bert.data.batches import bucket, evaluation_batches
from bert.data.features import Features, tokenize
from bert.data.tasks import find_task
from bert.data.tasks.glue import ClassificationTask
from bert.heads import BertForMaskedLM, BertForSequenceClassification
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


class Answer(NamedTuple):
    """A classifier's answer: the likeliest label, and the probability of each."""

    label: str
    probabilities: dict[str, float]


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
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    task: ClassificationTask | None
    step: int
    source: str

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
            probabilities = _softmax(logits[0, place, : vocabulary_size(self.tokenizer)])
            best = np.argsort(-probabilities, kind="stable")[:top_k]
            answers.append(
                [FilledMask(self.tokenizer.id_to_token(int(i)), float(probabilities[i]), int(i)) for i in best]
            )
        return answers

    def predict(self, texts: Sequence[Text], batch_size: int = 32) -> list[Answer]:
        """The fine-tuned task's answers, in the order of ``texts``.

        Raises:
            UserError: the model was not fine-tuned; or a pair is needed and a single text given, or the reverse.
        """
        if self.task is None:
            raise UserError(f"{self.source} is not fine-tuned for a task: fine-tune it first (finetune.py --init)")
        parts = len(self.task.text_columns)
        for number, text in enumerate(texts, 1):
            if (1 if isinstance(text, str) else len(text)) != parts:
                wanted = "a pair of texts" if parts == 2 else "a single text"
                raise UserError(f"text {number} does not fit: {self.task.name} takes {wanted}")
        names = self.task.label_names
        probabilities = _softmax(self.classify(self._features(texts), batch_size))
        return [
            Answer(names[int(row.argmax())], dict(zip(names, map(float, row), strict=True))) for row in probabilities
        ]

    def classify(self, features: Features, batch_size: int = 32) -> np.ndarray:
        """Logits [R, L] of tokenized rows, in their order."""
        logits = np.zeros((len(features), len(self.task.labels)), np.float32)
        for rows, output in self._run(self._classifier, features, batch_size):
            logits[rows] = output[: len(rows)]
        return logits

    def _features(self, texts: Sequence[Text]) -> Features:
        return tokenize(self.tokenizer, list(texts), self.config.max_position_embeddings)

    def _run(
        self, forward: Callable[..., Any], features: Features, batch_size: int
    ) -> Iterator[tuple[np.ndarray, Any]]:
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
        model, heads = BertForMaskedLM(self.config), ("bert", "predictions")
        return jax.jit(
            lambda params, *inputs: model.apply({"params": {k: params[k] for k in heads}}, *inputs).prediction_logits
        )

    @cached_property
    def _classifier(self) -> Callable[..., Any]:
        model = BertForSequenceClassification(self.config, len(self.task.labels))
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
    with Checkpointer(path / "checkpoints", config.training.keep_checkpoints, say) as checkpoints:
        restored = checkpoints.restore_best_params() if kind is FinetuneConfig else checkpoints.restore_params()
    if restored is None:
        raise UserError(f"{path} has no checkpoint yet: let the run reach its first one")
    step, params = restored
    return Pretrained(
        config=config.model,
        params=params,
        tokenizer=load_tokenizer(path),
        task=find_task(config.task) if isinstance(config, FinetuneConfig) else None,
        step=step,
        source=str(path),
    )


def _softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(axis=-1, keepdims=True)
    exponentials = np.exp(logits.astype(np.float64))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
