"""Adds the pooling of sentence encoders to an ONNX graph. Shapes as in `bert.model.encoder`; E embedding size."""

from __future__ import annotations

import numpy as np

from bert.interchange.writers.onnx_graph import Graph
from bert.model.pooling import PooledDense, Pooling

MASK = "attention_mask"
"""Name of the graph's input [B, T]."""

ACTIVATIONS = {"Tanh": "Tanh", "ReLU": "Relu", "Sigmoid": "Sigmoid"}
"""Operators of `bert.model.pooling.ACTIVATIONS` that are one operator."""


def sentence_embedding(graph: Graph, pooling: Pooling, hidden: str) -> str:
    """Computes `Pooling`, hidden states [B, T, D] or logits [B, T, V] -> [B, E]."""
    node = graph.node
    if pooling.is_lexical:
        hidden = node("Relu", hidden)
    for _ in range(pooling.num_log1p):
        hidden = node("Log", node("Add", hidden, graph.constant(1.0)))
    parts = [_pool(graph, mode, hidden) for mode in pooling.modes]
    x = _finish(graph, pooling, parts[0] if len(parts) == 1 else node("Concat", *parts, axis=-1))
    return x if pooling.truncate_dim is None else graph.slice(x, 0, pooling.truncate_dim, axis=1)


def token_embeddings(graph: Graph, pooling: Pooling, hidden: str) -> str:
    """Computes the vectors of all tokens, [B, T, D] -> [B, T, E]."""
    return _finish(graph, pooling, hidden)


def token_mask(graph: Graph, is_scored: np.ndarray) -> str:
    """Returns 1 for the tokens [B, T] that are attended to and whose id is marked in ``is_scored`` [V], otherwise 0."""
    marks = graph.node("Gather", graph.array("pooling/is_scored", is_scored), "input_ids")
    return graph.node("Mul", marks, graph.cast(MASK, "FLOAT"))


def _finish(graph: Graph, pooling: Pooling, x: str) -> str:
    """Applies dense layers and normalization."""
    for number, layer in enumerate(pooling.dense):
        x = _dense(graph, layer, x, f"pooling/dense_{number}")
    if not pooling.normalize:
        return x
    length = graph.node("Max", graph.node("ReduceL2", x, axes=[-1]), graph.constant(1e-12))
    return graph.node("Div", x, length)


def mean(graph: Graph, hidden: str, mask: str) -> str:
    """Returns the mean of the tokens of each row, [B, T, D] and mask [B, T] -> [B, D]; 0 for empty rows."""
    return graph.node("Div", *graph.token_sum(hidden, _columns(graph, mask)))


def _columns(graph: Graph, mask: str) -> str:
    """Casts a mask to float32, [B, T] -> [B, T, 1]."""
    return graph.node("Unsqueeze", graph.cast(mask, "FLOAT"), graph.constant([2]))


def _pool(graph: Graph, mode: str, hidden: str) -> str:
    """Applies one of `bert.model.pooling.MODES`, [B, T, D] -> [B, D]."""
    node = graph.node
    if mode == "cls":
        return graph.token_at(hidden, node("ArgMax", MASK, axis=1, keepdims=1))
    if mode == "lasttoken":
        return graph.last_token(hidden, MASK)
    if mode == "mean":
        return mean(graph, hidden, MASK)
    weights = _columns(graph, MASK)
    if mode == "max":
        visible = graph.cast(weights, "BOOL")
        return node("ReduceMax", node("Where", visible, hidden, graph.constant(float("-inf"))), axes=[1], keepdims=0)
    if mode == "weightedmean":
        positions = node("CumSum", weights, graph.integer(1))  # from 1, because padding is at the end of rows
        return node("Div", *graph.token_sum(hidden, node("Mul", weights, positions)))
    total, count = graph.token_sum(hidden, weights)
    if mode == "sum":
        return total
    return node("Div", total, node("Sqrt", count))


def _dense(graph: Graph, layer: PooledDense, x: str, path: str) -> str:
    """Applies a dense layer and its activation, [..., in_features] -> [..., out_features]."""
    x = graph.node("MatMul", x, graph.array(f"{path}/kernel", layer.kernel))
    if layer.bias is not None:
        x = graph.node("Add", x, graph.array(f"{path}/bias", layer.bias))
    name = layer.activation.rsplit(".", 1)[-1]
    if name in ACTIVATIONS:
        return graph.node(ACTIVATIONS[name], x)
    return x if name == "Identity" else graph.activation(x, name.lower())
