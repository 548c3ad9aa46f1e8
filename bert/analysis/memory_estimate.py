"""Rough activation memory by a published formula, for devices that nothing here compiles for. Imports no JAX."""

from __future__ import annotations

from bert.config import ModelConfig


def activation_bytes(
    model: ModelConfig, length: int, itemsize: int = 2, remat: str = "none", stores_scores: bool = True, tensor: int = 1
) -> int:
    """Bytes of activations that one row of all encoder layers keeps on a device for the backward pass.

    Korthikanti et al. 2022 (arXiv 2205.05198), with sequence length s, hidden size h and a heads, per layer and row:
    s h (10 + 24 / t + 5 a s / (h t)) with tensor parallelism t (equation 2), without the last term where attention is
    one kernel, and 2 s h where each layer is computed again from its input. The formula is for 16-bit activations and
    a feed-forward layer of width 4 h; it leaves out embeddings, logits and gradients.

    Args:
        model: sizes.
        length: s.
        itemsize: bytes of an activation; the formula is scaled in proportion.
        remat: none or full, as in ``training.remat``.
        stores_scores: whether attention keeps its s x s matrices.
        tensor: t, the devices along the mesh's last axis.
    """
    if remat == "full":
        per_token = 2.0 * model.hidden_size
    else:
        scores = 5 * model.num_attention_heads * length if stores_scores else 0
        per_token = model.hidden_size * (10 + 24 / tensor) + scores / tensor
    return int(model.num_hidden_layers * length * per_token * itemsize / 2)
