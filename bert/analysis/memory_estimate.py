"""Rough activation memory by a published formula, for devices that nothing here compiles for. Imports no JAX."""

from __future__ import annotations

from bert.config import ModelConfig


def activation_bytes(
    model: ModelConfig, length: int, itemsize: int = 2, remat: str = "none", stores_scores: bool = True, tensor: int = 1
) -> int:
    """Bytes of activations that one row of all encoder layers keeps on a device for the backward pass.

    Korthikanti et al. 2022 (arXiv 2205.05198), with sequence length s, hidden size h and a heads, per layer and row:
    s h (10 + 24 / t + 5 a s / (h t)) with tensor parallelism t (equation 2), without the last term where attention is
    one kernel. Where each layer is computed again from its input, a layer keeps 2 s h, and the one that is computed at
    the time all of it. The formula is for 16-bit activations and a feed-forward layer of width 4 h; it leaves out
    embeddings, logits and gradients.

    Args:
        model: sizes.
        length: s.
        itemsize: bytes of an activation; the formula is scaled in proportion.
        remat: as ``training.remat`` has it; dots is taken for none.
        stores_scores: whether attention keeps its s x s matrices.
        tensor: t, the devices along the mesh's last axis.
    """
    scores = 5 * model.num_attention_heads * length if stores_scores else 0
    of_layer = model.hidden_size * (10 + 24 / tensor) + scores / tensor
    layers = model.num_hidden_layers
    per_token = layers * 2 * model.hidden_size + of_layer if remat == "full" else layers * of_layer
    return int(length * per_token * itemsize / 2)
