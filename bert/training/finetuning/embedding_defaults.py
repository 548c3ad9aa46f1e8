"""Defaults of ``embedding`` that depend on the initial model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from tokenizers import Tokenizer

from bert.config import EmbeddingConfig, FinetuneConfig
from bert.config.options import LEXICAL_POOLING, TOKEN_POOLING, PoolingMode
from bert.data.late_interaction import expansion_id
from bert.errors import Log, UserError, WarningText
from bert.interchange.sentence_transformers.late_interaction import STANFORD_PREFIXES, add_prefixes
from bert.model.late_interaction import COLBERT, MAX_SIM
from bert.model.pooling import Pooling
from bert.tasks.embedding import make_interaction, pooling_name

POOLING_KEYS = ("normalize", "lowercase", "query_prompt", "document_prompt")
"""Keys of ``embedding`` that have the same name in `Pooling`."""

TRAINED_POOLING_MODES: tuple[str, ...] = get_args(PoolingMode)
"""Values of ``embedding.pooling``."""


def resolve_pooling(
    config: FinetuneConfig, declared: Pooling | None, tokenizer: Tokenizer, name: str, log: Log
) -> FinetuneConfig:
    """Replaces null in ``embedding`` by the pooling that the initial model declares.

    Raises:
        UserError: ``embedding.pooling`` is null and the declared mode cannot be trained, or a key does not fit it.
    """
    settings: EmbeddingConfig = config.embedding
    pooling = Pooling(normalize=True) if declared is None else declared
    mode = settings.pooling or pooling_name(pooling)
    if mode not in TRAINED_POOLING_MODES:
        pooled = f"the {pooling.mode} of masked-LM logits" if pooling.is_lexical else pooling.mode
        raise UserError(
            f"{name} pools by {pooled}, which is not trained: set embedding.pooling to one of "
            f"{', '.join(TRAINED_POOLING_MODES)}"
        )
    similarity = {LEXICAL_POOLING: "dot", TOKEN_POOLING: MAX_SIM}.get(mode, "cosine")
    left_out = {
        "its Dense modules": pooling.dense and not (mode == TOKEN_POOLING and pooling.projection is not None),
        "vectors that are not scaled": mode == TOKEN_POOLING and pooling.has_token_vectors and not pooling.normalize,
        f"truncate_dim {pooling.truncate_dim}": pooling.truncate_dim,
        "include_prompt false": not pooling.include_prompt,
        f"default prompt {pooling.default_prompt!r}": pooling.default_prompt,
        f"similarity {pooling.similarity} (the losses compare by {similarity})": pooling.similarity
        not in (similarity, Pooling.similarity),
    }
    if names := [part for part, is_declared in left_out.items() if is_declared]:
        log(WarningText(f"{name}: {', '.join(names)}: not part of the model that is trained"))
    defaults = {"pooling": mode, **{key: getattr(pooling, key) for key in POOLING_KEYS}}
    defaults["normalize"] = mode == TOKEN_POOLING or (pooling.normalize and mode != LEXICAL_POOLING)
    if mode == TOKEN_POOLING:
        settings = _resolve_late_interaction(settings, pooling, config.data.max_length, tokenizer, name)
    settings = _with_defaults(settings, defaults)
    settings = _with_defaults(settings, {"temperature": settings.divisor})
    if mode == TOKEN_POOLING:
        add_prefixes(tokenizer, filter(None, (settings.query_prompt, settings.document_prompt)))
    settings.check()
    return dataclasses.replace(config, embedding=settings)


def _with_defaults(settings: Any, defaults: Mapping[str, Any]) -> Any:
    """Returns a section of the configuration with these values in place of null."""
    return dataclasses.replace(settings, **{key: v for key, v in defaults.items() if getattr(settings, key) is None})


def _resolve_late_interaction(
    settings: EmbeddingConfig, pooling: Pooling, max_length: int, tokenizer: Tokenizer, name: str
) -> EmbeddingConfig:
    """Returns the settings with the late interaction that the initial model declares, or ColBERT's.

    Raises:
        UserError: the vectors have another width than the projection of the initial model, or the vocabulary lacks a
            token.
    """
    for token in settings.late_interaction.skipped_tokens or ():
        if tokenizer.token_to_id(token) is None:
            raise UserError(
                f"embedding.late_interaction.skipped_tokens has {token!r}, which the vocabulary lacks: remove it"
            )
    declared = pooling.interaction if pooling.has_token_vectors else COLBERT
    length = settings.late_interaction.query_length or declared.query_length
    if length is None or declared is COLBERT:
        length = min(length or max_length, max_length)
    expanded = declared.expanded_length or 0
    if settings.late_interaction.query_length is not None or declared is COLBERT:
        expanded = length if expanded else 0
    defaults = {
        "query_length": length,
        "expanded_length": expanded,
        "attends_to_expansion": declared.attends_to_expansion,
        "expansion_token": declared.expansion_token,
        "skipped_tokens": [token for token in declared.skipped_tokens if tokenizer.token_to_id(token) is not None],
        "skipping_roles": list(declared.skipping_roles),
    }
    interaction = _with_defaults(settings.late_interaction, defaults)
    expansion_id(tokenizer, make_interaction(interaction))  # raises UserError
    if (kernel := pooling.projection) is not None and settings.dimensions not in (None, kernel.shape[1]):
        raise UserError(
            f"embedding.dimensions is {settings.dimensions}, but {name} projects hidden states to {kernel.shape[1]} "
            "features: leave it out, the width comes with the weights"
        )
    width = settings.token_dimensions if kernel is None else kernel.shape[1]
    settings = dataclasses.replace(settings, dimensions=width, late_interaction=interaction)
    query, document = (marker for _, marker in STANFORD_PREFIXES.values())
    has_prompt = settings.query_prompt is not None or settings.document_prompt is not None
    if has_prompt or pooling.has_token_vectors or pooling.query_prompt or pooling.document_prompt:
        return settings
    if any(tokenizer.token_to_id(marker) is None for marker in (query, document)):
        return settings
    return dataclasses.replace(settings, query_prompt=f"{query} ", document_prompt=f"{document} ")
