"""The encoder with one vector for each row: its hidden states, pooled."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num

from bert.config import ModelConfig
from bert.model.array_types import Array
from bert.model.dropout import Dropout
from bert.model.encoder import Bert
from bert.model.execution import LayerExecution
from bert.model.layers import Dtype


class BertForEmbedding(nn.Module):
    """Encoder without pooler, and the embedding of each row (Reimers and Gurevych 2019, section 3).

    Attributes:
        pooling: mean, cls or max, as `bert.interchange.pooling.Pooling` computes them.
    """

    config: ModelConfig
    dtype: Dtype = jnp.float32
    pooling: str = "mean"
    execution: LayerExecution = LayerExecution()

    def setup(self) -> None:
        self.bert = Bert(self.config, self.dtype, add_pooling_layer=False, execution=self.execution)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        token_type_ids: Int[Array, "B T"] | None = None,
        attention_mask: Num[Array, "B T"] | Bool[Array, "B T"] | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> Float[Array, "B D"]:
        """[B, T] -> [B, D] float32; padding is left out."""
        encoded = self.bert(input_ids, token_type_ids, attention_mask, dropout=dropout)
        mask = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
        return pool(encoded.last_hidden_state.astype(jnp.float32), mask, self.pooling)


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
