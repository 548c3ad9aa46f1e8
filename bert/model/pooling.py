"""One vector for each row: pooled in the model by JAX, and as sentence-transformers declares it by NumPy.

Shapes as in `bert.model.encoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from bert.errors import require
from bert.model.array_types import Array


def at_positions(hidden_states: Float[Array, "B T D"], positions: Int[Array, "B P"]) -> Float[Array, "B P D"]:
    """[B, T, D] at [B, P] -> [B, P, D]."""
    return jnp.take_along_axis(hidden_states, positions[:, :, None], axis=1)


def mean_over(
    hidden_states: Float[Array, "B T D"], tokens: Num[Array, "B K T"] | Bool[Array, "B K T"]
) -> Float[Array, "B K D"]:
    """[B, T, D] -> the means [B, K, D] over K sets of tokens [B, K, T]; 0 over none. Sums are in float32."""
    weights = tokens.astype(jnp.float32)
    sums = jnp.einsum("BKT,BTD->BKD", weights, hidden_states.astype(jnp.float32))
    return (sums / jnp.maximum(weights.sum(-1, keepdims=True), 1)).astype(hidden_states.dtype)


def pool(
    hidden_states: Float[Array, "B T D"], attention_mask: Num[Array, "B T"] | Bool[Array, "B T"], mode: str
) -> Float[Array, "B D"]:
    """[B, T, D] -> [B, D]: the mean of the tokens, the first one (cls), or the largest value of each feature (max)."""
    mask = attention_mask[:, :, None] > 0
    if mode == "cls":
        return hidden_states[:, 0]
    if mode == "max":
        return jnp.max(jnp.where(mask, hidden_states, jnp.finfo(hidden_states.dtype).min), axis=1)
    return jnp.sum(jnp.where(mask, hidden_states, 0), axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)


Activation = Callable[[np.ndarray], np.ndarray]


ACTIVATIONS: dict[str, Activation] = {
    "Tanh": np.tanh,
    "Identity": lambda x: x,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: 0.5 * x * (1 + _special().erf(x / np.sqrt(2))),
    "Sigmoid": lambda x: _special().expit(x),
    "SiLU": lambda x: x * _special().expit(x),
}
"""The classes of ``torch.nn`` that are read as activations."""


def _special() -> Any:
    import scipy.special  # which no training needs

    return scipy.special


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense layer: activation(x W + b).

    Attributes:
        kernel: W [in_features, out_features] float32.
        bias: b [out_features] float32; None for none.
        activation: the class of PyTorch, by its full name.
    """

    kernel: np.ndarray
    bias: np.ndarray | None
    activation: str

    @property
    def in_features(self) -> int:
        return int(self.kernel.shape[0])

    @property
    def out_features(self) -> int:
        return int(self.kernel.shape[1])

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """[B, in_features] -> [B, out_features]."""
        product = vectors @ self.kernel
        activation = require(find_activation(self.activation), "an activation that is read")
        return activation(product if self.bias is None else product + self.bias)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dense) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[Any, ...]:
        bias = None if self.bias is None else self.bias.tobytes()
        return self.kernel.shape, self.kernel.tobytes(), bias, self.activation


def find_activation(name: Any) -> Activation | None:
    """The activation of a class of ``torch.nn`` by its full name; None for any other name."""
    return ACTIVATIONS.get(name.rsplit(".", 1)[-1]) if isinstance(name, str) and name.startswith("torch.nn.") else None


MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")
"""Ways of pooling, in the order in which sentence-transformers concatenates those that its older files switch on."""


CONCATENATED = "+"
"""Separator of the names of several modes, whose vectors are concatenated."""


@dataclass(frozen=True)
class Pooling:
    """How hidden states become embeddings. The default is what sentence-transformers gives a plain BERT.

    Attributes:
        mode: one of `MODES`, or several joined by ``+``, whose vectors are concatenated: the first token (cls), the
            largest value of each feature (max), the mean of the tokens, their sum divided by the square root of their
            number (mean_sqrt_len), their mean weighted by the position from 1 on (weightedmean), or the last token.
        normalize: scale each embedding to length 1.
        max_length: longest text in tokens; None for as long as the model reads.
        lowercase: lower-case texts before they are tokenized, whatever the vocabulary does.
        query_prompt: what queries begin with.
        document_prompt: what documents begin with.
        include_prompt: whether the tokens of a prompt are pooled too.
        truncate_dim: number of leading features that are kept, after the scaling; None keeps all.
        dense: layers applied to the pooled vector, in order.
    """

    mode: str = "mean"
    normalize: bool = False
    max_length: int | None = None
    lowercase: bool = False
    query_prompt: str = ""
    document_prompt: str = ""
    include_prompt: bool = True
    truncate_dim: int | None = None
    dense: tuple[Dense, ...] = ()

    @property
    def modes(self) -> list[str]:
        """The modes whose vectors are concatenated."""
        return self.mode.split(CONCATENATED)

    def pooled_size(self, hidden_size: int) -> int:
        """Width of the pooled vector, before the dense layers."""
        return hidden_size * len(self.modes)

    def embedding_size(self, hidden_size: int) -> int:
        """Width of an embedding."""
        width = self.dense[-1].out_features if self.dense else self.pooled_size(hidden_size)
        return min(width, self.truncate_dim or width)

    def __call__(
        self, hidden_states: np.ndarray, attention_mask: np.ndarray, skipped: np.ndarray | None = None
    ) -> np.ndarray:
        """Computes embeddings of padded rows.

        Args:
            hidden_states: [B, T, D] float32.
            attention_mask: [B, T], 1 for a token and 0 for the padding behind them.
            skipped: [B] leading tokens of each row that are not pooled; None pools all.

        Returns:
            [B, E] float32, with E as `embedding_size`.
        """
        if skipped is not None:
            skipped = np.minimum(skipped, attention_mask.sum(axis=1) - 1)
            attention_mask = attention_mask * (np.arange(attention_mask.shape[1]) >= skipped[:, None])
        parts = [_pool_rows(mode, hidden_states, attention_mask) for mode in self.modes]
        return self._finished(np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0])

    def of_sequences(
        self, hidden_states: np.ndarray, lengths: np.ndarray, skipped: np.ndarray | None = None
    ) -> np.ndarray:
        """Computes embeddings of sequences that follow each other without padding.

        Args:
            hidden_states: [tokens, D] float32.
            lengths: [B] tokens of each sequence, at least 1.
            skipped: as of `__call__`.

        Returns:
            [B, E] float32.
        """
        positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if skipped is not None:
            skipped = np.minimum(skipped, lengths - 1)
            kept = positions >= np.repeat(skipped, lengths)
            hidden_states, positions, lengths = hidden_states[kept], positions[kept], lengths - skipped
        parts = [_pool_sequences(mode, hidden_states, lengths, positions) for mode in self.modes]
        return self._finished(np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0])

    def _finished(self, embeddings: np.ndarray) -> np.ndarray:
        """[B, pooled size] -> [B, E] float32: dense layers, length 1 and the leading features, as configured."""
        for layer in self.dense:
            embeddings = layer(embeddings)
        if self.normalize:
            embeddings = embeddings / np.maximum(np.linalg.norm(embeddings, axis=-1, keepdims=True), 1e-12)
        return embeddings[:, : self.truncate_dim].astype(np.float32)


def _pool_rows(mode: str, hidden_states: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
    """[B, T, D], [B, T] -> [B, D]."""
    rows, mask = np.arange(len(hidden_states)), attention_mask[:, :, None]
    if mode == "cls":
        return hidden_states[rows, attention_mask.argmax(axis=1)]
    if mode == "lasttoken":
        return hidden_states[rows, attention_mask.shape[1] - 1 - attention_mask[:, ::-1].argmax(axis=1)]
    if mode == "max":
        return np.where(mask > 0, hidden_states, -np.inf).max(axis=1)
    if mode == "weightedmean":
        mask = mask * np.arange(1, mask.shape[1] + 1, dtype=np.float32)[:, None]
    count = np.maximum(mask.sum(axis=1), 1)
    return (hidden_states * mask).sum(axis=1) / (np.sqrt(count) if mode == "mean_sqrt_len" else count)


def _pool_sequences(mode: str, hidden_states: np.ndarray, lengths: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[tokens, D], [B], [tokens] places of the tokens in their sequences -> [B, D]."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if mode in ("cls", "lasttoken"):
        return hidden_states[starts if mode == "cls" else ends - 1]
    if mode == "max":
        return np.maximum.reduceat(hidden_states, starts)
    count = lengths[:, None]
    if mode == "weightedmean":
        weights = (positions[:, None] + 1).astype(np.float32)
        hidden_states, count = hidden_states * weights, np.add.reduceat(weights, starts)
    return np.add.reduceat(hidden_states, starts) / (np.sqrt(count) if mode == "mean_sqrt_len" else count)
