"""Settings of late interaction in folders of sentence-transformers, PyLate and Stanford's ColBERT.

PyLate stores its settings in `PROMPTS`, and Stanford's ColBERT in artifact.metadata.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard, get_args

from tokenizers import AddedToken, Tokenizer

from bert.config import ModelConfig
from bert.data.late_interaction import expansion_id
from bert.errors import Log, UserError, WarningText, shorten
from bert.files import read_json_object
from bert.interchange.names import EMBEDDING, TOKEN_EMBEDDINGS
from bert.interchange.sentence_transformers.names import (
    MULTI_VECTOR_ENCODER,
    MULTI_VECTOR_MASK,
    PROMPTS,
)
from bert.model.late_interaction import LateInteraction, Role
from bert.model.pooling import Pooling
from bert.tokenizer.hf_settings import SETTINGS

PYLATE = "ColBERT"
"""Model type of the folders of newer versions of PyLate. Older ones have the type of sentence-transformers."""

PYLATE_KEYS = (
    *("query_prefix", "document_prefix", "query_length", "document_length", "query_expansion", "skiplist_words"),
    *("do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens"),
)
"""Keys of PyLate in `PROMPTS`."""

PREFIX_KEYS = {"query": "query_prefix", "document": "document_prefix"}
"""Keys of PyLate with the text before queries and documents."""

LENGTH_KEYS = ("query_length", "document_length", "query_expansion")
"""Keys that PyLate stores in `PROMPTS`, and sentence-transformers with the settings of texts."""

STANFORD = "HF_ColBERT"
"""Architecture in config.json of Stanford's ColBERT."""

STANFORD_METADATA = "artifact.metadata"
STANFORD_PREFIXES = {"query": ("query_token_id", "[unused0]"), "document": ("doc_token_id", "[unused1]")}
"""Key of `STANFORD_METADATA` with the token before a text, and its default."""

STANFORD_DIM = 128
"""Default of ``dim``, the width E of an embedding."""

PROJECTION = "linear.weight"
"""Tensor with the projection of Stanford's ColBERT."""

EXPANDED_LENGTH = 32
"""Default of ``query_length`` in PyLate and of ``query_maxlen`` in Stanford's ColBERT."""


def is_late(module_types: Collection[str], settings: Mapping[str, Any]) -> bool:
    """Returns whether a folder has an embedding per token, by its modules and by the content of `PROMPTS`."""
    if settings.get("model_type") in (MULTI_VECTOR_ENCODER, PYLATE) or MULTI_VECTOR_MASK in module_types:
        return True
    return not settings.keys().isdisjoint(PYLATE_KEYS) and not any(name.endswith("Pooling") for name in module_types)


def is_stanford(folder: Path) -> bool:
    """Returns whether a folder is a checkpoint of Stanford's ColBERT without the files of sentence-transformers."""
    return not (folder / "modules.json").is_file() and has_projection(folder)


def has_projection(folder: Path) -> bool:
    """Returns whether the weights in a folder include the `PROJECTION` of Stanford's ColBERT."""
    file = folder / "config.json"
    return file.is_file() and read_json_object(file).get("architectures") == [STANFORD]


def read_stanford_metadata(folder: Path, log: Log) -> dict[str, Any]:
    """Returns the content of `STANFORD_METADATA` as keys of PyLate. Raises UserError."""
    file = folder / STANFORD_METADATA
    if not file.is_file():
        log(WarningText(f"{file} does not exist: defaults of ColBERT are used"))
    content = read_json_object(file) if file.is_file() else {}
    if (similarity := content.get("similarity", "cosine")) != "cosine":
        log(WarningText(f"{file}: similarity is {shorten(similarity)}, which is not applied: scores are cosines"))
    values: dict[str, Any] = {
        f"{role}_prefix": f"{content.get(key) or default} " for role, (key, default) in STANFORD_PREFIXES.items()
    }
    return {
        **values,
        "query_length": content.get("query_maxlen"),
        "document_length": content.get("doc_maxlen"),
        "attend_to_expansion_tokens": content.get("attend_to_mask_tokens"),
        "skiplist_words": list(string.punctuation) if content.get("mask_punctuation", True) else [],
    }


def stanford_shape(folder: Path) -> tuple[int, int]:
    """Returns the shape [D, E] of the projection that the settings of Stanford's ColBERT declare. Raises UserError."""
    metadata = folder / STANFORD_METADATA
    width = read_json_object(folder / "config.json").get("hidden_size")
    dim = read_json_object(metadata).get("dim", STANFORD_DIM) if metadata.is_file() else STANFORD_DIM
    if not is_count(width) or not is_count(dim):
        raise UserError(f"{folder}: hidden_size is {shorten(width)} and dim {shorten(dim)}: use numbers of features")
    return width, dim


def read_settings(folder: Path, log: Log) -> dict[str, Any]:
    """Returns the content of `PROMPTS`, or of `STANFORD_METADATA` in its form; {} without both. Raises UserError."""
    return read_stanford_metadata(folder, log) if is_stanford(folder) else read_prompts(folder)


def read_prompts(folder: Path) -> dict[str, Any]:
    """Returns the content of `PROMPTS`; {} if there is no such file. Raises UserError."""
    return read_json_object(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}


def token_features(
    folder: Path, module_types: Collection[str], settings: Mapping[str, Any]
) -> tuple[tuple[str, ...], bool]:
    """Returns the names of the vectors that Dense modules may read, and whether vectors are normalized in any case.

    Folders of PyLate lack the modules MultiVectorMask and Normalize. Older ones have the type of sentence-transformers,
    whose default is to read the embedding of the text.

    Raises:
        UserError: a folder of PyLate has no Dense module.
    """
    if settings.get("model_type") == MULTI_VECTOR_ENCODER:
        return (TOKEN_EMBEDDINGS,), False
    if settings.get("model_type") == PYLATE:
        return (TOKEN_EMBEDDINGS,), True
    if "Dense" not in module_types:
        raise UserError(
            f"{folder / 'modules.json'} lists no Dense, which embeddings of tokens need: use a trained model"
        )
    return (TOKEN_EMBEDDINGS, EMBEDDING), True


def prompts_with_prefixes(settings: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns the prompts in the content of `PROMPTS`, with the prefixes of PyLate."""
    prompts = dict(settings.get("prompts") or {})
    for role, prefix in _prefixes(settings).items():
        prompts[role] = prefix + (prompts.get(role) or "").removeprefix(prefix)
    return prompts


def _prefixes(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the prefix of each role that has one. Raises UserError."""
    prefixes = {role: settings[key] or "" for role, key in PREFIX_KEYS.items() if key in settings}
    for role, prefix in prefixes.items():
        if not isinstance(prefix, str):
            raise UserError(f"{PROMPTS}: {PREFIX_KEYS[role]} is {shorten(prefix)}: set it to a text, or null")
    return prefixes


def read_interaction(
    file: Path,
    settings: Mapping[str, Any],
    texts_file: Path | None,
    mask_file: Path | None,
) -> LateInteraction:
    """Returns the settings of late interaction.

    Args:
        file: file with ``settings``, for messages.
        settings: content of `PROMPTS`.
        texts_file: file with the settings of texts, which replace keys of PyLate; None for none.
        mask_file: config.json of the module MultiVectorMask; None without this module.

    Raises:
        UserError: a value is invalid or not supported.
    """
    texts = {} if texts_file is None else read_json_object(texts_file)
    values = {**_pylate_lengths(settings), **texts}
    sources = {key: texts_file if texts_file is not None and key in texts else file for key in LENGTH_KEYS}
    lengths: dict[str, Any] = {key: values.get(key) for key in ("query_length", "document_length")}
    for key, length in lengths.items():
        if length is not None and not is_count(length):
            raise UserError(f"{sources[key]}: {key} is {shorten(length)}: set it to a number of tokens, or null")
    expansion = values.get("query_expansion")
    interaction = _with_expansion(LateInteraction(**lengths), expansion, sources["query_expansion"])
    if mask_file is not None:
        return _with_mask(interaction, mask_file)
    if settings.get("model_type") == MULTI_VECTOR_ENCODER:
        # Without the module, mask tokens have a vector only if they are attended to.
        scored = interaction.expanded_length if interaction.attends_to_expansion else None
        return dataclasses.replace(interaction, expanded_length=scored)
    words = settings.get("skiplist_words")
    if words is None and (settings.get("model_type") == PYLATE or _prefixes(settings)):
        words = list(string.punctuation)
    return dataclasses.replace(interaction, skipped_tokens=_tokens(words, "skiplist_words", file))


def _pylate_lengths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `LENGTH_KEYS` for the content of `PROMPTS` as PyLate writes it.

    PyLate extends queries unless ``do_query_expansion`` is false. Its ``query_length`` is then the number of tokens to
    which they are extended.
    """
    values = {key: settings[key] for key in LENGTH_KEYS if key in settings and settings[key] is not None}
    if "query_expansion" in settings or settings.keys().isdisjoint(PYLATE_KEYS):
        return values
    if settings.get("do_query_expansion") is False:
        return values
    attends = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
    length = values.pop("query_length", None) or EXPANDED_LENGTH
    return {**values, "query_expansion": {"strategy": "fixed", "attend": bool(attends), "length": length}}


def _with_expansion(interaction: LateInteraction, expansion: Any, file: Path) -> LateInteraction:
    """Adds the settings of ``query_expansion``. Raises UserError."""
    if expansion is None:
        return interaction
    known = ("strategy", "attend", "token", "length")
    if (
        not isinstance(expansion, dict)
        or set(expansion) - set(known)
        or expansion.get("strategy") not in ("fixed", "min")
    ):
        raise UserError(
            f"{file}: query_expansion is {shorten(expansion)}: set it to null, or to an object of {', '.join(known)} "
            "with the strategy fixed or min"
        )
    length, attends, token = expansion.get("length"), expansion.get("attend", False), expansion.get("token")
    if length is None or not is_count(length) or not isinstance(attends, bool) or not isinstance(token, str | None):
        raise UserError(
            f"{file}: query_expansion is {shorten(expansion)}: set length to a number of tokens, attend to true or "
            "false, and token to a token or null"
        )
    limit = interaction.query_length
    if limit is not None and limit < length:
        raise UserError(
            f"{file}: query_length is {limit}, below query_expansion's length {length}: remove query_length"
        )
    return dataclasses.replace(
        interaction,
        query_length=length if expansion["strategy"] == "fixed" else limit,
        expanded_length=length,
        attends_to_expansion=attends,
        expansion_token=token,
    )


def _with_mask(interaction: LateInteraction, file: Path) -> LateInteraction:
    """Adds the settings of the module MultiVectorMask. Raises UserError."""
    content = read_json_object(file) if file.is_file() else {}
    if content.get("keep_only_token_ids"):
        raise UserError(f"{file}: keep_only_token_ids is set, which is not supported: use another model")
    roles = content.get("skiplist_tasks")
    roles = ["document"] if roles is None else [roles] if isinstance(roles, str) else roles
    if not isinstance(roles, list) or not set(map(str, roles)) <= {*get_args(Role)}:
        raise UserError(f"{file}: skiplist_tasks is {shorten(roles)}: set it to a list of query and document")
    words = _tokens(content.get("skiplist_words"), "skiplist_words", file)
    return dataclasses.replace(interaction, skipped_tokens=words, skipping_roles=tuple(roles))


MASK_KEYS = ("skiplist_words", "skiplist_tasks", "keep_only_token_ids")
"""Keys of config.json of the module MultiVectorMask."""


def _tokens(words: Any, key: str, file: Path) -> tuple[str, ...]:
    if words is not None and (not isinstance(words, list) or not all(isinstance(word, str) for word in words)):
        raise UserError(f"{file}: {key} is {shorten(words)}: set it to a list of tokens")
    return tuple(words or ())


def is_count(value: object) -> TypeGuard[int]:
    """Returns whether a value of a JSON file is a positive integer."""
    return type(value) is int and value >= 1


def fit_to_tokenizer(
    pooling: Pooling,
    tokenizer: Tokenizer,
    config: ModelConfig,
    folder: Path,
    texts: Path,
    log: Log,
) -> Pooling:
    """Checks late interaction against the vocabulary and the model, and makes prefixes of PyLate special tokens.

    Args:
        tokenizer: is changed.
        folder: folder of sentence-transformers.
        texts: folder of the tokenizer.

    Raises:
        UserError: the expansion of queries exceeds the model, its token is unknown, or the settings of the tokenizer do
            not fit it.
    """
    add_prefixes(tokenizer, _prefixes(read_settings(folder, lambda text: None)).values())
    interaction, positions = pooling.interaction, config.max_position_embeddings
    if interaction.expanded_length is not None:
        expansion_id(tokenizer, interaction)  # raises UserError
        if interaction.expanded_length > positions:
            raise UserError(
                f"{folder}: queries are extended to {interaction.expanded_length} tokens, but the model reads "
                f"{positions}: lower the length of query_expansion"
            )
        file = texts / SETTINGS
        if file.is_file() and read_json_object(file).get("padding_side") == "left":
            raise UserError(
                f"{file}: padding_side is left, where queries are not extended by mask tokens: use another model"
            )
    for key, length in (("query_length", interaction.query_length), ("document_length", interaction.document_length)):
        if length is not None and length > positions:
            text = f"{key} is {length}, but the model reads {positions} tokens: longer texts are cut"
            log(WarningText(f"{folder}: {text}"))
            interaction = dataclasses.replace(interaction, **{key: positions})  # type: ignore[arg-type]
    pooling = dataclasses.replace(pooling, interaction=interaction)
    log(_describe(pooling, config, folder))
    if unknown := [token for token in interaction.skipped_tokens if tokenizer.token_to_id(token) is None]:
        log(WarningText(f"{folder}: skiplist_words has no effect for {' '.join(unknown)}: the vocabulary lacks them"))
    return pooling


def _describe(pooling: Pooling, config: ModelConfig, folder: Path) -> str:
    """Returns a line about the embeddings of a model."""
    interaction = pooling.interaction
    parts = [f"{pooling.embedding_size(config)} features per token", f"compared by {pooling.similarity}"]
    if interaction.expanded_length is not None:
        parts.append(f"queries extended to {interaction.expanded_length} tokens")
    if interaction.skipped_tokens:
        parts.append(f"none for {len(interaction.skipped_tokens)} tokens such as {interaction.skipped_tokens[0]}")
    return f"{folder}: embeddings of {', '.join(parts)}"


def add_prefixes(tokenizer: Tokenizer, prefixes: Iterable[str]) -> None:
    """Makes special tokens of prefixes that are in the vocabulary as a whole, or of their first word.

    PyLate and Stanford's ColBERT insert them as ids. A tokenizer might split them, or find them in texts only after
    lower-casing.
    """
    for prefix in prefixes:
        names = (prefix, *prefix.split()[:1])
        name = next((name for name in names if name.strip() and tokenizer.token_to_id(name) is not None), None)
        if name is not None and tokenizer.encode(name, add_special_tokens=False).tokens != [name]:
            tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True)])


def mask_settings(interaction: LateInteraction) -> dict[str, Any]:
    """Returns config.json of the module MultiVectorMask."""
    return {
        "skiplist_words": list(interaction.skipped_tokens),
        "skiplist_tasks": list(interaction.skipping_roles),
        "keep_only_token_ids": None,
    }


def length_settings(interaction: LateInteraction) -> dict[str, Any]:
    """Returns `LENGTH_KEYS` for the file with the settings of texts."""
    length = interaction.expanded_length
    settings = {"query_length": interaction.query_length, "document_length": interaction.document_length}
    if length is None:
        return settings
    expansion = {
        "strategy": "fixed" if interaction.query_length == length else "min",
        "attend": interaction.attends_to_expansion,
        "token": interaction.expansion_token,
        "length": length,
    }
    return {**settings, "query_expansion": expansion}
