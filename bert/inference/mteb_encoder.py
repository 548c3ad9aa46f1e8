"""Adapter from `Pretrained` to the benchmark `mteb`."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert.errors import UserError
from bert.inference.pretrained import Pretrained

SCORING_FUNCTIONS = {"cosine": "COSINE", "dot": "DOT_PRODUCT", "euclidean": "EUCLIDEAN"}
"""Names of ``mteb.models.model_meta.ScoringFunction`` by similarity."""


class MtebEncoder:
    """An embedding model for ``mteb.evaluate`` of mteb 2 (``mteb.EncoderProtocol``).

    Queries and documents are prefixed with the model's prompts, and embedded with its adapters for them. The revision
    in mteb's results is a digest of the weights, so a retrained model does not reuse old results.

    Args:
        name: name in mteb's results, ``organization/model``; None: derived from the model's source.

    Raises:
        UserError: mteb is not installed, the name is invalid, or mteb does not have the model's similarity.
    """

    def __init__(self, model: Pretrained, name: str | None = None) -> None:
        if importlib.util.find_spec("mteb") is None:
            raise UserError("mteb is not installed: pip install 'mteb>=2'")
        self._model = model
        self._name = f"bert-jax/{Path(model.source).name or 'model'}" if name is None else name
        if "/" not in self._name:
            raise UserError(f"name is {self._name!r}: pass organization/model")
        if (similarity := model.pooling_or_default.similarity) not in SCORING_FUNCTIONS:
            raise UserError(
                f"{model.source} compares embeddings by {similarity}: use a model whose similarity is one of "
                f"{', '.join(SCORING_FUNCTIONS)}"
            )

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        prompt_type: Any = None,
        batch_size: int = 32,
        **settings: Any,
    ) -> np.ndarray:
        """Returns the embeddings of all texts, [texts, D] float32.

        Args:
            inputs: batches with a list of texts under "text".
            prompt_type: ``mteb.types.PromptType`` for queries or documents; None for neither.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        return self._model.embed(texts, batch_size, None if prompt_type is None else prompt_type.value)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Returns the model's similarity of all pairs, [A, B]."""
        from mteb.similarity_functions import select_similarity

        return select_similarity(embeddings1, embeddings2, self._scoring_function)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Returns the model's similarity of corresponding pairs, [A]."""
        from mteb.similarity_functions import select_pairwise_similarity

        return select_pairwise_similarity(embeddings1, embeddings2, self._scoring_function)

    @property
    def _scoring_function(self) -> Any:
        from mteb.models.model_meta import ScoringFunction

        return ScoringFunction[SCORING_FUNCTIONS[self._model.pooling_or_default.similarity]]

    @cached_property
    def mteb_model_meta(self) -> Any:
        """Model description for mteb's results, a ``mteb.models.ModelMeta``."""
        from mteb.models import ModelMeta

        model, pooling = self._model, self._model.pooling_or_default
        facts = {
            "name": self._name,
            "revision": self._revision(),
            "n_parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
            "max_tokens": model.longest_text,
            "embed_dim": model.embedding_size,
            "framework": ["JAX"],
            "similarity_fn_name": self._scoring_function,
            "use_instructions": bool(pooling.query_prompt or pooling.document_prompt or pooling.default_prompt),
        }
        return ModelMeta.create_empty(facts)

    def _revision(self) -> str:
        """Returns a digest of the weights and the pooling."""
        digest = hashlib.sha256()
        for model in filter(None, (self._model, self._model.query_model)):
            digest.update(repr((model.config, model.pooling, model.dtype)).encode())
            for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
                digest.update(jax.tree_util.keystr(path).encode())
                digest.update(np.ascontiguousarray(leaf).tobytes())
            for task, each in model.task_adapters.items():
                digest.update(repr((task, each.prompt, each.adapter.settings)).encode())
                for name, array in each.adapter.tensors.items():
                    digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
            for layer in model.pooling_or_default.dense:
                digest.update(layer.kernel.tobytes() + (b"" if layer.bias is None else layer.bias.tobytes()))
        return digest.hexdigest()[:16]
