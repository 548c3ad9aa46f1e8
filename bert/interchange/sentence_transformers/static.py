"""Reads the modules StaticEmbedding and SparseStaticEmbedding of sentence-transformers, which are tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from tokenizers.processors import TemplateProcessing

from bert.config import ModelConfig
from bert.config.model import MAX_SIZE
from bert.errors import Log, UserError, shorten
from bert.files import read_json_object
from bert.interchange.bundle import ModelBundle
from bert.interchange.sentence_transformers.names import STATIC_EMBEDDING, TOKEN_TABLE
from bert.interchange.sentence_transformers.reader import fit_to_model
from bert.interchange.tensor_files import FLOATS, read_tensors
from bert.model.pooling import TOKEN_WEIGHTS, Pooling
from bert.tokenizer.hf_settings import TokenizerSettings
from bert.tokenizer.vocabulary import load_tokenizer, require_embedding_rows

VECTORS, WEIGHTS = "embedding.weight", "weight"
"""Names of the tables of StaticEmbedding and of SparseStaticEmbedding."""

MODEL2VEC = ("embeddings", "mapping", "weights")
"""Names in files of model2vec: distinct vectors, the number of each token's vector, and a factor per token."""

NO_SPECIAL_TOKENS = {"single": "$A:0", "pair": "$A:0 $B:0", "special_tokens": []}
"""Template of the rows of a table: texts without special tokens."""


def read_static(folder: Path, pooling: Pooling, log: Log) -> ModelBundle:
    """Reads the module in a folder as a model without layers, whose word embeddings are the table.

    Texts have no special tokens. StaticEmbedding reads texts of any length, unless tokenizer.json truncates them.

    Raises:
        UserError: the weights or the tokenizer are missing or damaged, or do not match.
    """
    stored, source = read_tensors(folder)
    has_weights = pooling.mode == TOKEN_WEIGHTS
    table = _weights(folder, stored, source) if has_weights else _vectors(stored, source)
    config = ModelConfig(
        vocab_size=len(table),
        hidden_size=table.shape[1],
        num_hidden_layers=0,
        num_attention_heads=1,
        intermediate_size=1,
        max_position_embeddings=MAX_SIZE,
        type_vocab_size=0,
        position_embedding_type="none",
        embedding_norm=False,
    )
    # sentence-transformers reads only tokenizer.json for StaticEmbedding, and a whole tokenizer for weights.
    place, settings = (folder, None) if has_weights else (folder / "tokenizer.json", TokenizerSettings())
    tokenizer = load_tokenizer(place, log=log, settings=settings)
    tokenizer.post_processor = TemplateProcessing(**NO_SPECIAL_TOKENS)
    require_embedding_rows(tokenizer, len(table), folder)
    log(f"read {source}: a table of {len(table):,} tokens ({table.size:,} parameters)")
    fitted = fit_to_model(pooling, config, folder, log)
    if fitted is not None and not has_weights:
        fitted = dataclasses.replace(fitted, max_length=_truncated_length(folder / "tokenizer.json"))
    params = {"bert": {"embeddings": {"word": {"embedding": table}}}}
    return ModelBundle(config=config, params=params, tokenizer=tokenizer, architecture="Bert", pooling=fitted)


def _vectors(stored: dict[str, np.ndarray], source: Path) -> np.ndarray:
    """Returns the vectors of the tokens, [V, E] float32."""
    if set(stored) == {VECTORS}:
        return _as_table(stored[VECTORS], VECTORS, 2, source)
    if MODEL2VEC[0] not in stored or set(stored) - set(MODEL2VEC):
        raise UserError(
            f"{source} holds {', '.join(sorted(stored))}, but {STATIC_EMBEDDING} has {VECTORS}, or {MODEL2VEC[0]}: "
            "copy it again"
        )
    table = _as_table(stored[MODEL2VEC[0]], MODEL2VEC[0], 2, source)
    numbers, factors = (stored.get(name) for name in MODEL2VEC[1:])
    if numbers is not None:
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or not np.isin(numbers, np.arange(len(table))).all():
            raise UserError(f"{source}: mapping does not number the {len(table)} vectors: copy it again")
        table = table[numbers]
    if factors is not None:
        factors = _as_table(factors, MODEL2VEC[2], 1, source)
        if len(factors) != len(table):
            raise UserError(f"{source}: there are {len(factors)} weights for {len(table)} tokens: copy it again")
        table = table * factors[:, None]
    return table


def _weights(folder: Path, stored: dict[str, np.ndarray], source: Path) -> np.ndarray:
    """Returns the weights of the tokens as a table, [V, 1] float32."""
    file = folder / "config.json"
    content = read_json_object(file) if file.is_file() else {}
    if content.get("path") is not None:
        raise UserError(
            f"{file}: path is {shorten(content['path'])}, and only weights in model.safetensors are read: save the "
            "model again with sentence-transformers"
        )
    if set(stored) != {WEIGHTS}:
        raise UserError(f"{source} holds {', '.join(sorted(stored))}, but {TOKEN_TABLE} has {WEIGHTS}: copy it again")
    return _as_table(stored[WEIGHTS], WEIGHTS, 1, source)[:, None]


def _as_table(array: np.ndarray, name: str, axes: int, source: Path) -> np.ndarray:
    """Returns an array with this number of axes in float32. Raises UserError for another shape or type."""
    if array.ndim != axes or not array.size or array.dtype.name not in FLOATS:
        raise UserError(
            f"{source}: {name} is {list(array.shape)} {array.dtype.name}, but a table has {axes} axes and the type "
            f"{' or '.join(FLOATS)}: copy it again or convert it"
        )
    return array.astype(np.float32)


def _truncated_length(file: Path) -> int | None:
    """Returns the number of tokens to which a tokenizer.json truncates texts; None for any number."""
    settings = read_json_object(file).get("truncation")
    length = settings.get("max_length") if isinstance(settings, dict) else None
    return length if type(length) is int and 1 <= length < MAX_SIZE else None
