"""Runs the forward functions of a model in batches of rows with similar lengths. Does not import JAX.

The functions are compiled by JAX (`bert.inference.compiled`) or run by ONNX Runtime (`bert.inference.onnx_engine`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert.config import ModelConfig
from bert.data.batching import bucket_length, evaluation_batches
from bert.data.inputs import check_count
from bert.data.late_interaction import ScoredRows
from bert.data.pretraining.packing import assign_packs, packing_arrays
from bert.data.rows import QueryDocumentRows, Rows, TokenRows
from bert.data.windows import WindowedRows, outputs_of_texts
from bert.errors import UserError
from bert.model.pooling import Pooling
from bert.parallel.devices import require_no_fork
from bert.tasks.base import Outputs, Task

LENGTH = 128
"""Length of packed rows, unless a text is longer. Attention stays cheap, and rows are nearly full."""

TEXTS_PER_ROW = 8
"""Ratio of the batch size to the number of packed rows per batch.

32 texts fill four rows of 128 tokens, whose activations fit into a core's cache.
"""

MIN_BATCHES = 8
"""Minimum number of batches for packing. Fewer are fast anyway, and `Pretrained.warm_up` compiles padded rows."""


class PackedRows(NamedTuple):
    """Assignment of texts to packed rows: T, B, and the indices of the texts in each row."""

    length: int
    num_rows: int
    packs: list[list[int]]


def packed_batches(rows: PackedRows, features: TokenRows) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yields (indices of the texts, in the order of their tokens; batch).

    A batch has ``input_ids``, ``token_type_ids``, ``example_ids`` and ``position_ids``, [B, T] int32. For the last two,
    see `bert.model.mask.Packing`.
    """
    for start in range(0, len(rows.packs), rows.num_rows):
        packs = rows.packs[start : start + rows.num_rows]
        texts = np.concatenate([np.array(pack, np.int64) for pack in packs])
        sizes = np.zeros((rows.num_rows, 1), np.int64)
        sizes[: len(packs), 0] = list(map(len, packs))
        taken = np.arange(sizes.max()) < sizes
        lengths, first_lengths = np.zeros(taken.shape, np.int64), np.zeros(taken.shape, np.int64)
        lengths[taken], first_lengths[taken] = features.lengths[texts], features.segment_a_lengths[texts]
        arrays = packing_arrays(lengths, first_lengths, rows.length)
        input_ids = np.full((rows.num_rows, rows.length), features.pad_token_id, np.int32)
        input_ids[arrays["example_ids"] > 0] = np.concatenate(
            [features.ids[features.offsets[text] : features.offsets[text + 1]] for text in texts.tolist()]
        )
        names = ("token_type_ids", "example_ids", "position_ids")
        yield texts, {"input_ids": input_ids, **{name: arrays[name] for name in names}}


def pack_if_shorter(
    features: TokenRows, config: ModelConfig, batch_size: int, buckets: tuple[int, ...]
) -> PackedRows | None:
    """Returns packed rows, or None if there are few texts or if padded rows cost less.

    Args:
        batch_size: number of texts per padded batch. Padded lengths are ``buckets``.
    """
    if len(features) < MIN_BATCHES * batch_size or features.lengths.min() < 1:
        return None
    positions = config.max_position_embeddings
    length = bucket_length(max(int(features.lengths.max()), min(LENGTH, positions)), buckets, positions)
    num_rows = max(1, batch_size // TEXTS_PER_ROW)
    packs = assign_packs(features.lengths, length, length)
    packed = -(-len(packs) // num_rows) * num_rows * length
    padded = [
        bucket_length(int(features.lengths[rows].max()), buckets, positions)
        for rows in evaluation_batches(features.lengths, batch_size)
    ]

    def cost(tokens: int, row: int) -> int:
        """Estimates the FLOPs of a layer up to a factor: projections, feed-forward, and attention."""
        return tokens * (2 * config.hidden_size + config.intermediate_size + row)

    is_shorter = cost(packed, length) < sum(cost(batch_size * row, row) for row in padded)
    return PackedRows(length, num_rows, packs) if is_shorter else None


BUCKETS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144)
"""Lengths to which inputs are padded. One program is compiled per length and number of rows."""


class EncodeOutput(NamedTuple):
    """Result of `Pretrained.encode`; T is the length of the longest text in tokens.

    Attributes:
        last_hidden_state: [B, T, D] float32, zero at padding.
        pooled_output: [B, D] float32; None without a pooler.
        attention_mask: [B, T] int32, 1 for tokens and 0 for padding.
        embeddings: [B, E] float32, pooled as configured by the model (`Pretrained.pooling`); a list of arrays [T_i, E]
            if a text has an embedding per token.
    """

    last_hidden_state: np.ndarray
    pooled_output: np.ndarray | None
    attention_mask: np.ndarray
    embeddings: Any


Batches = Iterator[tuple[np.ndarray, Any]]
"""(row indices, outputs as NumPy arrays) per batch."""


def check_inputs(ids: np.ndarray, vocab_size: int) -> None:
    """Raises UserError for ids outside of the embedding, which JAX clips, and in forked children, where JAX hangs."""
    require_no_fork()
    if ids.size and (wrong := ids[(ids < 0) | (ids >= vocab_size)]).size:
        raise UserError(
            f"the tokenizer returns the id {wrong[0]}, but the model's embedding has {vocab_size} rows (vocab_size): "
            "use the tokenizer and the model of one source"
        )


def check_finite(
    numbers: Sequence[int] | np.ndarray, outputs: Any, lengths: Sequence[int] | np.ndarray | None = None
) -> None:
    """Raises UserError if the output of an input is NaN or infinite, and names the input.

    All outputs are checked, because softmax and argmax would hide a NaN.

    Args:
        numbers: [R] index of each row's input.
        outputs: an array, or a tuple of arrays and None. The first R rows of each array are checked.
        lengths: [R] tokens per row. Arrays [B, T, ...] are checked up to this length; None checks all.
    """
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [np.asarray(part)[: len(numbers)] for part in parts if part is not None]
    with np.errstate(all="ignore"):  # a finite sum proves that all are finite; an overflow proves nothing
        if all(math.isfinite(leaf.sum()) for leaf in leaves):
            return
    for row, number in enumerate(numbers):
        length = None if lengths is None else lengths[row]
        if not all(np.isfinite(leaf[row, :length] if leaf.ndim > 2 else leaf[row]).all() for leaf in leaves):
            raise UserError(
                f"input {number + 1}: the model's output is NaN or infinite, so its weights are damaged or its "
                "training diverged: use an earlier checkpoint or copy the model again"
            )


class Encoded(NamedTuple):
    """Outputs of an encoder for a batch.

    Attributes:
        last_hidden_state: [B, T, D].
        pooled_output: [B, D]; None without a pooler.
    """

    last_hidden_state: Any
    pooled_output: Any | None


class BatchedForward(ABC):
    """The encoder and the task head of a model, applied to batches of rows.

    Args:
        params: first argument of `encoder` and `head`; None for functions that hold the parameters.
        task: the task whose head `apply_head` applies; None for an encoder.
    """

    def __init__(self, config: ModelConfig, params: dict[str, Any] | None, task: Task | None) -> None:
        self._config, self._params, self._task = config, params, task

    @property
    @abstractmethod
    def has_pooler(self) -> bool:
        """Whether the encoder returns pooled outputs."""

    @property
    @abstractmethod
    def encoder(self) -> Callable[..., Any]:
        """Maps (params, token ids, segment ids, mask) of a batch to `Encoded`."""

    @property
    @abstractmethod
    def head(self) -> Callable[..., Any]:
        """Maps (params, token ids, segment ids, mask) of a batch to the outputs of the task head."""

    @abstractmethod
    def lexical_encoder(self, pooling: Pooling) -> Callable[..., Any]:
        """Maps (params, token ids, segment ids, mask) of a batch to embeddings [B, V] that pool masked-LM logits."""

    def encode(self, features: Rows, batch_size: int) -> Batches:
        """Yields hidden states and pooled outputs."""
        return self._run(self.encoder, features, batch_size)

    def embed(
        self,
        features: TokenRows | WindowedRows,
        pooling: Pooling,
        batch_size: int,
        skipped: np.ndarray | None = None,
    ) -> Any:
        """Computes the embeddings of rows, [R, E] float32, or a list of arrays [T_i, E] of their scored tokens.

        The embedding of a text with several windows is the mean or maximum of their embeddings, scaled to length 1
        if ``pooling`` normalizes.

        Args:
            skipped: [R] number of leading tokens of each row to leave out of the pooling; None for 0.
        """
        check_count("batch_size", batch_size)
        if isinstance(features, ScoredRows):
            return self._embed_tokens(features, pooling, batch_size)
        if isinstance(features, WindowedRows):
            of_windows = None
            if skipped is not None:  # a prompt is in the first window
                of_windows = np.zeros(len(features.windows), np.int64)
                of_windows[features.offsets[:-1]] = skipped
            vectors = features.pool(list(self.embed(features.windows, pooling, batch_size, of_windows)))
            return pooling.scaled(np.array(vectors), features.counts > 1)
        embeddings = np.zeros((len(features), pooling.embedding_size(self._config)), np.float32)
        for rows, vectors in self._embed_rows(features, pooling, batch_size, skipped):
            embeddings[rows] = vectors
        return embeddings

    def _embed_rows(
        self, features: TokenRows, pooling: Pooling, batch_size: int, skipped: np.ndarray | None
    ) -> Batches:
        """Yields the embeddings of each batch."""
        if pooling.is_lexical:
            for rows, vectors in self._run(self.lexical_encoder(pooling), features, batch_size):
                yield rows, vectors[: len(rows)]
            return
        for rows, output in self.encode(features, batch_size):
            states = output.last_hidden_state[: len(rows)]
            mask = (np.arange(states.shape[1]) < features.lengths[rows, None]).astype(np.int32)
            yield rows, pooling(states, mask, None if skipped is None else skipped[rows])

    def _embed_tokens(self, features: ScoredRows, pooling: Pooling, batch_size: int) -> list[np.ndarray]:
        """Computes the embeddings of the scored tokens of each row, R arrays [T_i, E] float32."""
        embeddings = [np.zeros((0, pooling.embedding_size(self._config)), np.float32)] * len(features)
        for rows, vectors in self._embed_rows(features, pooling, batch_size, None):
            check_finite(np.repeat(features.input_numbers[rows], features.lengths[rows]), vectors)
            ends = np.cumsum(features.lengths[rows])
            for row, start, end in zip(rows.tolist(), ends - features.lengths[rows], ends, strict=True):
                embeddings[row] = features.vectors_of(row, vectors[start:end])
        return embeddings

    def embed_groups(self, groups: QueryDocumentRows, pooling: Pooling, batch_size: int) -> Outputs:
        """Computes the embeddings of each row's query and documents, joined (`QueryDocumentRows.join`)."""
        return outputs_of_texts(groups, lambda rows: list(self.embed(rows, pooling, batch_size)), pooling.normalize)

    def encode_all(self, features: TokenRows | ScoredRows, pooling: Pooling, batch_size: int) -> EncodeOutput:
        """Computes hidden states, pooled outputs and embeddings of all rows, padded to the longest row."""
        count, max_length, width = len(features), int(features.lengths.max(initial=0)), self._config.hidden_size
        hidden = np.zeros((count, max_length, width), np.float32)
        pooled = np.zeros((count, width), np.float32)
        embeddings: Any = np.zeros((count, pooling.embedding_size(self._config)), np.float32)
        if isinstance(features, ScoredRows) or pooling.has_word_weights:
            embeddings = self.embed(features, pooling, batch_size)
        mask = (np.arange(max_length) < features.lengths[:, None]).astype(np.int32)
        for rows, output in self.encode(features, batch_size):
            states = output.last_hidden_state[: len(rows), :max_length]
            token_mask = mask[rows, : states.shape[1]]
            hidden[rows, : states.shape[1]] = states * token_mask[:, :, None]
            if not (pooling.has_word_weights or pooling.has_token_vectors):
                embeddings[rows] = pooling(states, token_mask)
            if output.pooled_output is not None:
                pooled[rows] = output.pooled_output[: len(rows)]
        if not pooling.has_token_vectors:
            check_finite(range(count), embeddings)
        return EncodeOutput(hidden, pooled if self.has_pooler else None, mask, embeddings)

    def apply_head(self, features: Rows, batch_size: int) -> Outputs:
        """Returns the outputs of the task head, one array per row (see `bert.tasks.base.Outputs`).

        A text with several windows has the mean or maximum of the outputs of its windows.
        """
        if isinstance(features, WindowedRows):
            return outputs_of_texts(features, lambda rows: self.apply_head(rows, batch_size))
        outputs: list[np.ndarray] = [np.zeros(0)] * len(features)
        for rows, batch in self._run(self.head, features, batch_size):
            for row, output in zip(rows, batch, strict=False):
                outputs[row] = output[: features.lengths[row]] if output.ndim == 2 else output
        return outputs

    def warm_up(self, num_rows: int, length: int) -> None:
        """Runs the head, or the encoder if there is no task, for a number of rows and a length."""
        offsets = length * np.arange(num_rows + 1, dtype=np.int64)
        blank = TokenRows(np.zeros(num_rows * length, np.int32), offsets, np.full(num_rows, length, np.int32), None)
        rows = blank if self._task is None else self._task.blank_rows(blank)
        for _ in self._run(self.encoder if self._task is None else self.head, rows, max(num_rows, 32)):
            pass

    def _run(self, forward: Callable[..., Any], features: Rows, batch_size: int) -> Batches:
        """Applies a function to all rows, and yields its outputs for each batch.

        Raises:
            UserError: a token id is outside of the embedding, or an output is not finite.
        """
        check_count("batch_size", batch_size)
        batch_size = min(batch_size, 1 << max(len(features) - 1, 0).bit_length())

        def dispatched() -> Batches:
            for texts in evaluation_batches(features.lengths, batch_size):
                length, num_rows = self._padded_size(features.lengths[texts], batch_size)
                for start in range(0, len(texts), num_rows):
                    rows = texts[start : start + num_rows]
                    batch = features.batch(rows, length, num_rows)
                    check_inputs(batch["input_ids"], self._config.known_vocab_size)
                    inputs = (batch["input_ids"], batch["token_type_ids"], batch["attention_mask"])
                    yield rows, forward(self._params, *inputs)

        numbers = getattr(features, "input_numbers", np.arange(len(features)))
        for rows, outputs in self._fetched(dispatched()):
            check_finite(numbers[rows], outputs, features.lengths[rows])
            yield rows, outputs

    def _padded_size(self, lengths: np.ndarray, batch_size: int) -> tuple[int, int]:
        """Returns T and B of the arrays for rows of the given lengths. More than B rows become several batches."""
        return int(lengths.max()), len(lengths)

    def _fetched(self, batches: Batches) -> Batches:
        """Yields (key, outputs as NumPy arrays)."""
        return batches
