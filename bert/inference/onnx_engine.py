"""ONNX Runtime as the engine of a model: it runs the model's graph instead of compiled JAX functions.

Does not import JAX, except to write a graph.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import bert
from bert.config import ModelConfig
from bert.data.rows import TokenRows
from bert.errors import Log, UserError, log_message
from bert.files import atomic_directory, user_cache_dir
from bert.inference.forward import BatchedForward, Batches, Encoded
from bert.interchange.bundle import ModelBundle
from bert.interchange.names import EMBEDDING, GRAPH, TOKEN_EMBEDDINGS
from bert.model.parameters import arrays_by_path
from bert.model.pooling import Pooling
from bert.tasks.base import Task

FORMAT = 4
"""Number of the form of graphs, to increase when the graph of a model changes."""

HIDDEN, POOLED = "last_hidden_state", "pooler_output"
"""Outputs of an encoder's graph besides `EMBEDDING`."""

MAX_SIZE = 8 * 2**30
"""Maximum size of the folder of cached graphs in bytes. The least recently used graphs are removed."""


class GraphForward(BatchedForward):
    """Runs ONNX graphs of the encoder and of the task head.

    Graphs read any number of rows and tokens, so rows are padded only to the longest one of their batch.

    Args:
        graph_of: returns the file of the graph with the head, or of the encoder (``Bert``).
    """

    def __init__(self, graph_of: Callable[[str | None], Path], config: ModelConfig, task: Task | None) -> None:
        super().__init__(config, None, task)
        self._graph_of = graph_of

    @property
    def has_pooler(self) -> bool:
        return POOLED in self._encoder_session.outputs

    def _embed_rows(
        self, features: TokenRows, pooling: Pooling, batch_size: int, skipped: np.ndarray | None
    ) -> Batches:
        outputs = self._encoder_session.outputs
        if TOKEN_EMBEDDINGS in outputs:
            for rows, vectors in self._run(_embedder(self._encoder_session, TOKEN_EMBEDDINGS), features, batch_size):
                yield rows, vectors[np.arange(vectors.shape[1]) < features.lengths[rows, None]]
            return
        if pooling.is_lexical or skipped is not None or EMBEDDING not in outputs:
            yield from super()._embed_rows(features, pooling, batch_size, skipped)
            return
        yield from self._run(_embedder(self._encoder_session), features, batch_size)

    def lexical_encoder(self, pooling: Pooling) -> Callable[..., Any]:
        return _embedder(self._masked_lm_session)

    @cached_property
    def encoder(self) -> Callable[..., Any]:
        run = self._encoder_session
        names = [name for name in (HIDDEN, POOLED) if name in run.outputs]

        def encode(params: None, *inputs: np.ndarray) -> Encoded:
            outputs = run(names, *inputs)
            return Encoded(outputs[HIDDEN], outputs.get(POOLED))

        return encode

    @cached_property
    def head(self) -> Callable[..., Any]:
        run = Session(self._graph_of(None))

        def answer(params: None, input_ids: np.ndarray, *inputs: np.ndarray) -> np.ndarray:
            outputs = run(run.outputs, input_ids, *inputs)
            if "start_logits" in outputs:
                return np.stack([outputs["start_logits"], outputs["end_logits"]], axis=-1)
            logits = outputs["logits"]
            return logits.reshape(input_ids.shape[:-1]) if input_ids.ndim > 2 else logits

        return answer

    @cached_property
    def _encoder_session(self) -> Session:
        return Session(self._graph_of("Bert"))

    @cached_property
    def _masked_lm_session(self) -> Session:
        return Session(self._graph_of("BertForMaskedLM"))


def _embedder(session: Session, name: str = EMBEDDING) -> Callable[..., np.ndarray]:
    """Returns the function that maps a batch to the embeddings that the graph computes."""
    return lambda params, *inputs: session([name], *inputs)[name]


class Session:
    """A graph that ONNX Runtime has loaded, with one thread per available core."""

    def __init__(self, graph: Path) -> None:
        onnxruntime = _onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._inputs = {port.name: len(port.shape) for port in self._session.get_inputs()}
        self.outputs = [port.name for port in self._session.get_outputs()]

    def __call__(
        self, outputs: list[str], input_ids: np.ndarray, token_type_ids: np.ndarray, attention_mask: np.ndarray
    ) -> dict[str, Any]:
        """Returns outputs by name. Choices [B, C, T] are flattened for a graph that reads rows [B, T]."""
        arrays = {"input_ids": input_ids, "token_type_ids": token_type_ids, "attention_mask": attention_mask}
        feed = {name: np.asarray(arrays[name], np.int64) for name in self._inputs}
        if input_ids.ndim > self._inputs["input_ids"]:
            feed = {name: array.reshape(-1, array.shape[-1]) for name, array in feed.items()}
        return dict(zip(outputs, self._session.run(outputs, feed), strict=True))


def _onnxruntime() -> Any:
    """Imports ONNX Runtime. Raises UserError if it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install 'bert-jax[onnx]'") from None
    return onnxruntime


def cached_graph(model: ModelBundle, architecture: str | None, log: Log = log_message) -> Path:
    """Returns the graph of a model in the user's cache folder, where it is written and compared on first use.

    Args:
        model: ``dtype`` is float32 or int8.
        architecture: ``Bert`` for the encoder with its pooling, ``BertForMaskedLM`` for the pooling of logits; None for
            the model with its head.

    Raises:
        UserError: the model has no graph, or the extra ``onnx`` is not installed.
        ExportError: the outputs of the graph differ from the model's.
    """
    if architecture is not None:
        model = model.replace(architecture=architecture, labels=(), pooling=model.pooling_or_default)
    if (caches := user_cache_dir()) is None:
        raise UserError("there is no home folder for the graph: set XDG_CACHE_HOME, or use the engine jax")
    folder = caches / "graphs" / _fingerprint(model)
    if not folder.exists():
        _write_graph(model, folder, log)
    os.utime(folder)
    return folder / GRAPH


def _write_graph(model: ModelBundle, folder: Path, log: Log) -> None:
    from bert.interchange.writers import onnx  # imported here because it imports JAX, and most graphs are written

    onnx.check_exportable(model)
    _make_room(folder.parent, sum(array.nbytes for array in arrays_by_path(model.params).values()))
    try:
        with atomic_directory(folder) as draft:
            onnx.write_graph(model, draft, log, quantize=model.dtype == "int8")
    except UserError:
        if not folder.exists():  # otherwise another process has written it in the meantime
            raise


def _fingerprint(model: ModelBundle) -> str:
    """Returns a hash of everything on which a graph depends.

    It includes the checksum of all parameters. For stored parameters, the checksum is found by the content of their
    files (`bert.interchange.weights_records`). A model with other weights therefore never has the same hash.
    """
    digest = hashlib.sha256()
    versions = (FORMAT, bert.__version__, _onnxruntime().__version__)
    pooling = model.pooling
    settings = (model.architecture, model.config, model.labels, pooling, model.dtype, model.params_checksum)
    digest.update(repr((versions, settings)).encode())
    for layer in pooling.dense if pooling is not None else ():  # repr shortens arrays
        digest.update(layer.kernel.tobytes() + (b"" if layer.bias is None else layer.bias.tobytes()))
    return digest.hexdigest()[:32]


def _make_room(folder: Path, size: int) -> None:
    """Removes the least recently used graphs until one of ``size`` bytes fits."""
    graphs = sorted(folder.glob("[!.]*/"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in graphs}
    for path in graphs:
        if sum(sizes.values()) + size <= MAX_SIZE:
            return
        shutil.rmtree(path, ignore_errors=True)
        del sizes[path]
