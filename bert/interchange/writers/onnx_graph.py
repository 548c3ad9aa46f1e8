"""Builds ONNX graphs from operators and layers.

The operators are of set 17 (LayerNormalization), which servers from 2022 on support.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from bert.interchange.writers.signature import Signature

if TYPE_CHECKING:
    import onnx


OPSET, IR_VERSION = 17, 8
DOMAIN = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""


class Graph:
    """Nodes in the order of their creation, and the constants that they read.

    Attributes:
        fused: whether the graph may have operators of ONNX Runtime that other runtimes lack.
    """

    def __init__(self, weights: dict[str, np.ndarray], fused: bool = False) -> None:
        self.fused = fused
        self._weights = weights
        self._constants: dict[str, np.ndarray] = {}
        self._nodes: list[onnx.NodeProto] = []

    def node(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Adds an operator and returns the name of its only output."""
        return self.nodes(kind, *inputs, outputs=[output or f"{kind}_{len(self._nodes)}"], **attributes)[0]

    def nodes(self, kind: str, *inputs: str, outputs: int | list[str], **attributes: Any) -> list[str]:
        """Adds an operator and returns the names of its outputs."""
        from onnx import helper

        name = f"{kind}_{len(self._nodes)}"
        named = outputs if isinstance(outputs, list) else [f"{name}_{number}" for number in range(outputs)]
        self._nodes.append(helper.make_node(kind, inputs, named, name=name, **attributes))
        return named

    def weight(self, path: str) -> str:
        """Adds a parameter and returns its name."""
        self._constants[path] = self._weights[path]
        return path

    def array(self, name: str, array: np.ndarray) -> str:
        """Adds a constant with a new name and returns the name."""
        self._constants[name] = array
        return name

    def constant(self, value: float | list[int]) -> str:
        """Adds a float32 scalar or an int64 vector [n] and returns its name."""
        array = np.asarray(value, np.int64 if isinstance(value, list) else np.float32)
        name = f"constant_{array.dtype}_{'_'.join(map(str, array.reshape(-1)))}"
        self._constants[name] = array
        return name

    def integer(self, value: int) -> str:
        """Adds an int64 scalar and returns its name."""
        return self.array(f"integer_{value}", np.asarray(value, np.int64))

    def cast(self, x: str, kind: str) -> str:
        """Casts to ``BOOL``, ``FLOAT``, ``INT32`` or ``INT64``."""
        from onnx import TensorProto

        return self.node("Cast", x, to=getattr(TensorProto, kind))

    def dense(self, x: str, path: str) -> str:
        """Applies the dense layer at ``path``, with kernel [D, F] and maybe a bias [F]: [..., D] -> [..., F].

        The kernel of a convolution [K, D, F] becomes [K * D, F].
        """
        kernel = self._weights[f"{path}/kernel"]
        product = self.node("MatMul", x, self.array(f"{path}/kernel", kernel.reshape(-1, kernel.shape[-1])))
        bias = f"{path}/bias"
        return self.node("Add", product, self.weight(bias)) if bias in self._weights else product

    def norm(self, x: str, path: str, epsilon: float, kind: str) -> str:
        """Applies LayerNorm (``layer``) or RMSNorm (other kinds) over the last axis, with or without a bias."""
        parameters = [self.weight(f"{path}/{name}") for name in ("scale", "bias") if f"{path}/{name}" in self._weights]
        if kind == "layer":
            return self.node("LayerNormalization", x, *parameters, axis=-1, epsilon=epsilon)
        mean = self.node("ReduceMean", self.node("Mul", x, x), axes=[-1])
        x = self.node("Div", x, self.node("Sqrt", self.node("Add", mean, self.constant(epsilon))))
        scale = parameters[0]
        if kind == "rms_plus_one":
            scale = self.node("Add", scale, self.constant(1.0))
        x = self.node("Mul", x, scale)
        return self.node("Add", x, parameters[1]) if len(parameters) > 1 else x

    def standardized(self, x: str, width: int, epsilon: float) -> str:
        """Applies LayerNorm without parameters over the last axis of size ``width``."""
        scale = self.array("ones", np.ones(width, np.float32))
        return self.node("LayerNormalization", x, scale, axis=-1, epsilon=epsilon)

    def activation(self, x: str, name: str) -> str:
        """Applies a `bert.config.model.Activation`. Both forms of gelu are written out, because opset 17 has none."""
        if name == "silu":
            return self.node("Mul", x, self.node("Sigmoid", x))
        if name in ("relu", "elu", "tanh"):
            return self.node(name.capitalize(), x)
        if name == "gelu":
            inner = self.node("Erf", self.node("Div", x, self.constant(math.sqrt(2))))
        else:
            cube = self.node("Mul", x, self.node("Mul", x, x))
            total = self.node("Add", x, self.node("Mul", cube, self.constant(0.044715)))
            inner = self.node("Tanh", self.node("Mul", total, self.constant(math.sqrt(2 / math.pi))))
        gate = self.node("Add", inner, self.constant(1.0))
        return self.node("Mul", self.node("Mul", x, gate), self.constant(0.5))

    def soft_cap(self, x: str, limit: float) -> str:
        """Limits numbers to the range of -limit to limit (`bert.model.linear.soft_cap`)."""
        bound = self.constant(limit)
        return self.node("Mul", self.node("Tanh", self.node("Div", x, bound)), bound)

    def attention(self, query: str, key: str, value: str, padding: str, heads: int) -> str:
        """Computes attention with ONNX Runtime's operator: three [B, T, D] and int32 padding [B, T] -> [B, T, D]."""
        lowest = float(np.finfo(np.float32).min)
        inputs = (query, key, value, "", padding)
        return self.node("MultiHeadAttention", *inputs, num_heads=heads, mask_filter_value=lowest, domain=DOMAIN)

    def slice(self, x: str, start: int, end: str | int, axis: int) -> str:
        """Selects ``start`` to ``end`` along an axis; ``end`` is a number or the name of a vector [1]."""
        stop = end if isinstance(end, str) else self.constant([end])
        return self.node("Slice", x, self.constant([start]), stop, self.constant([axis]))

    def first_token(self, x: str) -> str:
        """Selects the first token, [B, T, D] -> [B, D]."""
        return self.node("Gather", x, self.integer(0), axis=1)

    def token_at(self, x: str, positions: str) -> str:
        """Selects one token per row, [B, T, D] and positions [B, 1] -> [B, D]."""
        return self.node("GatherND", x, positions, batch_dims=1)

    def last_token(self, x: str, mask: str) -> str:
        """Selects the last token of the mask [B, T], [B, T, D] -> [B, D]."""
        return self.token_at(x, self.node("ArgMax", mask, axis=1, keepdims=1, select_last_index=1))

    def token_sum(self, x: str, weights: str) -> tuple[str, str]:
        """Returns the weighted sum of the tokens and the sum of the weights, at least 1.

        [B, T, D] and [B, T, 1] float32 -> [B, D] and [B, 1].
        """
        tokens = self.constant([1])
        total = self.node("ReduceSum", self.node("Mul", x, weights), tokens, keepdims=0)
        return total, self.node("Max", self.node("ReduceSum", weights, tokens, keepdims=0), self.constant(1.0))

    def proto(self, ports: Signature) -> onnx.ModelProto:
        """Returns the graph as a protocol buffer."""
        from onnx import TensorProto, helper, numpy_helper

        graph = helper.make_graph(
            self._nodes,
            "bert",
            [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in ports.inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ports.outputs.items()],
            [numpy_helper.from_array(array, name) for name, array in self._constants.items()],
        )
        opsets = [helper.make_opsetid("", OPSET), *([helper.make_opsetid(DOMAIN, 1)] if self.fused else [])]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="bert-jax")
