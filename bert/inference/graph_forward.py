"""An exported ONNX graph in place of the compiled functions of a model, so that the same code scores it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bert.inference.forward import BatchedForward
from bert.model.encoder import EncoderOutput


class GraphForward(BatchedForward):
    """The encoder, or the head of the task, as ONNX Runtime computes it; a graph has one of the two."""

    packs_texts = False

    def __init__(self, graph: Path, *arguments: Any) -> None:
        from onnxruntime import InferenceSession

        super().__init__(*arguments)
        self._session = InferenceSession(graph, providers=["CPUExecutionProvider"])
        self._inputs = {port.name: len(port.shape) for port in self._session.get_inputs()}
        self._outputs = [port.name for port in self._session.get_outputs()]

    @cached_property
    def encoder(self) -> Callable[..., Any]:
        def encode(params: Any, *inputs: np.ndarray) -> EncoderOutput:
            outputs = self._run_graph(*inputs)
            return EncoderOutput(outputs["last_hidden_state"], outputs.get("pooler_output"))

        return encode

    @cached_property
    def head(self) -> Callable[..., Any]:
        def answer(params: Any, input_ids: np.ndarray, *inputs: np.ndarray) -> np.ndarray:
            outputs = self._run_graph(input_ids, *inputs)
            if "start_logits" in outputs:
                return np.stack([outputs["start_logits"], outputs["end_logits"]], axis=-1)
            logits = outputs["logits"]
            return logits.reshape(input_ids.shape[:-1]) if input_ids.ndim > 2 else logits

        return answer

    def _run_graph(
        self, input_ids: np.ndarray, token_type_ids: np.ndarray, attention_mask: np.ndarray
    ) -> dict[str, Any]:
        """The outputs by name. Choices [B, C, T] are rows of their own to a graph that reads rows [B, T]."""
        given = {"input_ids": input_ids, "token_type_ids": token_type_ids, "attention_mask": attention_mask}
        feed = {name: np.asarray(given[name], np.int64) for name in self._inputs}
        if input_ids.ndim > self._inputs["input_ids"]:
            feed = {name: array.reshape(-1, array.shape[-1]) for name, array in feed.items()}
        return dict(zip(self._outputs, self._session.run(None, feed), strict=True))
