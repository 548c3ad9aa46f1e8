"""Embeddings of models that are a table with a vector or a weight per token (`ModelConfig.is_static`), in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from bert.config import ModelConfig
from bert.data.rows import TokenRows
from bert.errors import UserError
from bert.inference.forward import BatchedForward, Batches, Encoded, check_finite, check_inputs
from bert.model.pooling import TOKEN_WEIGHTS, Pooling


class TableForward(BatchedForward):
    """Looks up the tokens of texts in a table, and pools their vectors.

    Args:
        table: [V, D] float32; [V, 1] for weights.
    """

    def __init__(self, config: ModelConfig, table: np.ndarray) -> None:
        super().__init__(config, None, None)
        self._table = table

    @property
    def has_pooler(self) -> bool:
        return False

    @property
    def encoder(self) -> Callable[..., Encoded]:
        return lambda params, input_ids, *inputs: Encoded(self._table[input_ids], None)

    @property
    def head(self) -> NoReturn:
        raise UserError("a table of static embeddings has no task head: use embed")

    def lexical_encoder(self, pooling: Pooling) -> NoReturn:
        raise UserError("a table of static embeddings has no masked-LM logits: use embed")

    def warm_up(self, num_rows: int, length: int) -> None:
        """Does nothing, because nothing is compiled."""

    def _embed_rows(
        self, features: TokenRows, pooling: Pooling, batch_size: int, skipped: np.ndarray | None
    ) -> Batches:
        """Yields the embeddings of each batch. All tokens are pooled, since tables have no ``include_prompt``.

        The mean is the product of a sparse matrix of counts and the table, which holds no vector per token in memory.
        A text without tokens has the embedding 0.
        """
        from scipy.sparse import csr_array  # imported here because it is slow, and few models need it

        rows_in_table = self._config.known_vocab_size
        for start in range(0, len(features), batch_size):
            rows = np.arange(start, min(start + batch_size, len(features)))
            offsets = features.offsets[start : rows[-1] + 2]
            ids, counts = features.ids[offsets[0] : offsets[-1]], np.diff(offsets)
            check_inputs(ids, rows_in_table)
            if pooling.mode == TOKEN_WEIGHTS:
                vectors = np.zeros((len(rows), rows_in_table), np.float32)
                vectors[np.repeat(np.arange(len(rows)), counts), ids] = self._table[ids, 0]
            else:
                ones = np.ones(len(ids), np.float32)
                sums = csr_array((ones, ids, offsets - offsets[0]), (len(rows), rows_in_table)) @ self._table
                vectors = sums / np.maximum(counts, 1).astype(np.float32)[:, None]
            vectors = pooling.finish([vectors])
            check_finite(features.input_numbers[rows], vectors)
            yield rows, vectors
