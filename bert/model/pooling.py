"""Embeddings of texts, as configured by a sentence-transformers folder. Does not import JAX.

`Pooling` accepts arrays of NumPy or JAX. Shapes as in `bert.model.encoder`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bert.config import ModelConfig
from bert.config.options import TOKEN_POOLING
from bert.errors import require
from bert.model.late_interaction import MEAN_MAX_SIM, TOKEN_SIMILARITIES, LateInteraction, max_sim
from bert.model.names import PROJECTION

MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")
"""Pooling modes, in the order in which sentence-transformers concatenates the modes enabled in older files."""

LEXICAL_MODES = ("max", "sum")
"""Pooling modes of masked-LM logits."""

TOKEN_WEIGHTS = "weights"
"""Mode of a table with one weight per token."""

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
"""Similarities of embeddings: the last two are negative distances."""

DENSE = "dense"
"""Name of the dense layers in `Pooling.shapes`, unless they are the projection of late interaction."""

CONCATENATED = "+"
"""Separator between the names of concatenated modes."""


@dataclass(frozen=True)
class Pooling:
    """How hidden states or masked-LM logits become embeddings. Defaults match sentence-transformers for a plain BERT.

    Attributes:
        mode: one of `MODES`, or several joined by ``+``, whose vectors are concatenated; one of `LEXICAL_MODES` for
            logits:

            - cls: the first token.
            - max: the maximum of each feature.
            - mean: the mean of the tokens.
            - mean_sqrt_len: their sum divided by the square root of their number.
            - weightedmean: their mean weighted by position, counted from 1.
            - lasttoken: the last token.
            - sum: the sum of the tokens, of logits.
            - tokens: one embedding per token, for late interaction.
            - weights: the weight of each token that is in the text, as a vector [V]; from a table without layers.
        normalize: whether to scale embeddings to length 1.
        max_length: maximum number of tokens of a text; None for the model's maximum.
        lowercase: whether to lower-case texts before tokenization, even if the tokenizer is cased.
        query_prompt: prefix of queries.
        document_prompt: prefix of documents.
        default_prompt: prefix of texts that are neither queries nor documents.
        include_prompt: whether to include the tokens of a prompt in the pooling.
        truncate_dim: number of leading features to keep after scaling; None for all.
        dense: layers applied to the pooled vector, in order.
        similarity: one of `SIMILARITIES`, by which embeddings are compared; of lists of embeddings per token one of
            `bert.model.late_interaction.TOKEN_SIMILARITIES`.
        num_log1p: how often log(1 + x) is applied to the positive masked-LM logits that are pooled in place of hidden
            states. Embeddings then weight the words of the vocabulary, and most weights are 0: SPLADE, with 1 (Formal
            et al. 2021, equation 1). 0 pools hidden states.
        interaction: which tokens have embeddings in the mode ``tokens``.
    """

    mode: str = "mean"
    normalize: bool = False
    max_length: int | None = None
    lowercase: bool = False
    query_prompt: str = ""
    document_prompt: str = ""
    include_prompt: bool = True
    truncate_dim: int | None = None
    dense: tuple[PooledDense, ...] = ()
    default_prompt: str = ""
    similarity: str = "cosine"
    num_log1p: int = 0
    interaction: LateInteraction = field(default_factory=LateInteraction)

    @property
    def has_token_vectors(self) -> bool:
        """Whether a text has an embedding per token."""
        return self.mode == TOKEN_POOLING

    @property
    def projection(self) -> np.ndarray | None:
        """The product of the dense layers [D, E] of vectors of tokens; None without layers, or if one is not linear."""
        if not self.has_token_vectors or not self.dense or not all(layer.is_linear for layer in self.dense):
            return None
        kernel: np.ndarray = functools.reduce(np.matmul, [layer.kernel for layer in self.dense])
        return kernel

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of the dense layers, with paths like parameters of a model."""
        part = PROJECTION if self.has_token_vectors else DENSE
        return {
            f"{part}/{index}/{name}": array.shape
            for index, layer in enumerate(self.dense)
            for name, array in (("kernel", layer.kernel), ("bias", layer.bias))
            if array is not None
        }

    @property
    def is_lexical(self) -> bool:
        """Whether masked-LM logits are pooled."""
        return self.num_log1p > 0

    @property
    def has_word_weights(self) -> bool:
        """Whether an embedding has a weight for each token of the vocabulary, [V]."""
        return self.is_lexical or self.mode == TOKEN_WEIGHTS

    @property
    def modes(self) -> list[str]:
        """The modes to concatenate."""
        return self.mode.split(CONCATENATED)

    def pooled_size(self, config: ModelConfig) -> int:
        """Width of the pooled vector, before the dense layers."""
        return config.known_vocab_size if self.has_word_weights else config.hidden_size * len(self.modes)

    def embedding_size(self, config: ModelConfig) -> int:
        """Width of an embedding."""
        width = self.dense[-1].out_features if self.dense else self.pooled_size(config)
        return min(width, self.truncate_dim or width)

    def __call__(self, hidden_states: Any, attention_mask: Any, skipped: np.ndarray | None = None) -> Any:
        """Computes embeddings of padded rows.

        Args:
            hidden_states: [B, T, D] float32, an array of NumPy or JAX; masked-LM logits [B, T, V] if `is_lexical`.
            attention_mask: [B, T], 1 for a token and 0 for padding, which is at the end of each row.
            skipped: [B], number of leading tokens of each row to leave out; None for none.

        Returns:
            [B, E] float32; E is the `embedding_size`. With the mode ``tokens``, [tokens, E] for the tokens of all rows.
        """
        if skipped is not None:
            skipped = np.minimum(skipped, attention_mask.sum(axis=1) - 1)
            attention_mask = attention_mask * (np.arange(attention_mask.shape[1]) >= skipped[:, None])
        if self.is_lexical:
            xp = hidden_states.__array_namespace__()
            hidden_states = xp.maximum(hidden_states, 0)
            for _ in range(self.num_log1p):
                hidden_states = xp.log1p(hidden_states)
        return self.finish([_pool_rows(mode, hidden_states, attention_mask) for mode in self.modes])

    def of_sequences(
        self, hidden_states: np.ndarray, lengths: np.ndarray, skipped: np.ndarray | None = None
    ) -> np.ndarray:
        """Computes embeddings of sequences that are concatenated without padding.

        Args:
            hidden_states: [tokens, D] float32.
            lengths: [B], number of tokens of each sequence, at least 1.
            skipped: see `__call__`.

        Returns:
            [B, E] float32; [tokens, E] with the mode ``tokens``.
        """
        positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if skipped is not None:
            skipped = np.minimum(skipped, lengths - 1)
            kept = positions >= np.repeat(skipped, lengths)
            hidden_states, positions, lengths = hidden_states[kept], positions[kept], lengths - skipped
        return self.finish([_pool_sequences(mode, hidden_states, lengths, positions) for mode in self.modes])

    def compare(self, embeddings: Any, others: Any) -> np.ndarray:
        """Returns the similarity of each embedding [A, E] with each of the others [B, E], [A, B] float32.

        The sides are lists of arrays [T_i, E] if a text has an embedding per token.
        """
        if self.similarity in TOKEN_SIMILARITIES:
            return max_sim(embeddings, others, mean=self.similarity == MEAN_MAX_SIM)
        if self.similarity in ("cosine", "dot"):
            products: np.ndarray = embeddings @ others.T
            if self.similarity == "dot":
                return products
            lengths = (np.linalg.norm(side, axis=1) for side in (embeddings, others))
            return products / np.maximum(np.multiply.outer(*lengths), np.finfo(np.float32).tiny)
        from scipy.spatial.distance import cdist  # imported here because it is slow, and few models need it

        metric = "cityblock" if self.similarity == "manhattan" else "euclidean"
        return -cdist(embeddings, others, metric).astype(np.float32)

    def compare_pairs(self, embeddings: Any, others: Any) -> np.ndarray:
        """Returns the similarity of each row of both sides [R, E], [R] float32.

        The sides are sequences of R arrays [T_i, E] if a text has an embedding per token.
        """
        if self.similarity in TOKEN_SIMILARITIES:
            pairs = zip(embeddings, others, strict=True)
            return np.array([self.compare([one], [other])[0, 0] for one, other in pairs], np.float32)
        if self.similarity in ("cosine", "dot"):
            products: np.ndarray = np.einsum("re,re->r", embeddings, others)
            if self.similarity == "dot":
                return products
            lengths = np.linalg.norm(embeddings, axis=1) * np.linalg.norm(others, axis=1)
            return products / np.maximum(lengths, np.finfo(np.float32).tiny)
        difference = embeddings - others
        return -np.linalg.norm(difference, ord=1 if self.similarity == "manhattan" else 2, axis=1)

    def scaled(self, embeddings: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Returns embeddings [B, E] of which ``rows`` [B] bool are scaled to length 1, if the model normalizes."""
        if self.normalize:
            lengths = np.linalg.norm(embeddings[rows], axis=-1, keepdims=True)
            embeddings[rows] /= np.maximum(lengths, 1e-12)
        return embeddings

    def finish(self, parts: list[Any]) -> Any:
        """Concatenates the pooled vectors [B, D], then applies dense layers, normalization and truncation."""
        xp = parts[0].__array_namespace__()
        embeddings = xp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        for layer in self.dense:
            embeddings = layer(embeddings)
        if self.normalize:
            embeddings = embeddings / xp.maximum(xp.linalg.norm(embeddings, axis=-1, keepdims=True), 1e-12)
        return embeddings[:, : self.truncate_dim].astype(np.float32)


def _pool_rows(mode: str, hidden_states: Any, attention_mask: Any) -> Any:
    """Pools padded rows, [B, T, D] -> [B, D]. A row without tokens gives zeros, except for cls."""
    xp = hidden_states.__array_namespace__()
    if mode == TOKEN_POOLING:
        return hidden_states[attention_mask > 0]
    rows, mask = xp.arange(hidden_states.shape[0]), attention_mask[:, :, None]
    if mode == "cls":
        return hidden_states[rows, attention_mask.argmax(axis=1)]
    if mode == "lasttoken":
        last = attention_mask.shape[1] - 1 - attention_mask[:, ::-1].argmax(axis=1)
        return xp.where(attention_mask[rows, last, None] > 0, hidden_states[rows, last], 0)
    if mode == "max":
        largest = xp.where(mask > 0, hidden_states, -xp.inf).max(axis=1)
        return xp.where(attention_mask.max(axis=1)[:, None] > 0, largest, 0)
    if mode == "weightedmean":
        mask = mask * xp.arange(1, mask.shape[1] + 1, dtype=xp.float32)[:, None]
    if mode == "sum":
        return (hidden_states * mask).sum(axis=1)
    count = xp.maximum(mask.sum(axis=1), 1)
    return (hidden_states * mask).sum(axis=1) / (xp.sqrt(count) if mode == "mean_sqrt_len" else count)


def _pool_sequences(mode: str, hidden_states: np.ndarray, lengths: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Pools concatenated sequences, [tokens, D] -> [B, D], given the position of each token in its sequence."""
    if mode == TOKEN_POOLING:
        return hidden_states
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


@dataclass(frozen=True, eq=False)
class PooledDense:
    """The sentence-transformers module Dense: activation(x W + b) of a pooled vector.

    Attributes:
        kernel: W [in_features, out_features] float32.
        bias: b [out_features] float32; None for none.
        activation: qualified name of a ``torch.nn`` class.
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

    @property
    def is_linear(self) -> bool:
        """Whether the layer is a matrix product."""
        return self.bias is None and self.activation.rsplit(".", 1)[-1] == "Identity"

    def __call__(self, vectors: Any) -> Any:
        """[B, in_features] -> [B, out_features], for arrays of NumPy or JAX."""
        product = vectors @ self.kernel
        activation = require(find_activation(self.activation), "an activation that is read")
        return activation(product if self.bias is None else product + self.bias)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PooledDense) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[Any, ...]:
        bias = None if self.bias is None else self.bias.tobytes()
        return self.kernel.shape, self.kernel.tobytes(), bias, self.activation


Activation = Callable[[Any], Any]


def _special(x: Any) -> Any:
    """Returns the module with the special functions of NumPy or JAX."""
    # Imported here because both are slow, and few models need them.
    if not isinstance(x, np.ndarray):
        import jax.scipy.special

        return jax.scipy.special
    import scipy.special

    return scipy.special


ACTIVATIONS: dict[str, Activation] = {
    "Tanh": lambda x: x.__array_namespace__().tanh(x),
    "Identity": lambda x: x,
    "ReLU": lambda x: x.__array_namespace__().maximum(x, 0),
    "GELU": lambda x: 0.5 * x * (1 + _special(x).erf(x / np.float32(np.sqrt(2)))),
    "Sigmoid": lambda x: _special(x).expit(x),
    "SiLU": lambda x: x * _special(x).expit(x),
}
"""Supported ``torch.nn`` activation classes."""


def find_activation(name: Any) -> Activation | None:
    """Returns the activation for the qualified name of a ``torch.nn`` class; None if it is not supported."""
    return ACTIVATIONS.get(name.rsplit(".", 1)[-1]) if isinstance(name, str) and name.startswith("torch.nn.") else None
