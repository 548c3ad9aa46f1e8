"""Generation files of a Hugging Face folder: generation_config.json, and a target vocabulary in a subfolder."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bert.config import Decoding, ModelConfig
from bert.data.encoding import target_boundaries
from bert.errors import Log, UserError, WarningText, shorten
from bert.files import read_json, read_json_object
from bert.interchange.bundle import ModelBundle
from bert.tokenizer.library import special_ids
from bert.tokenizer.vocabulary import embedding_rows, load_tokenizer, require_embedding_rows

GENERATION_CONFIG, EOS = "generation_config.json", "eos_token_id"

TARGET_TOKENIZER = "target_tokenizer"
"""Subfolder for the tokenizer of a separate target vocabulary. transformers defines no name for it."""

KEYS = {
    "num_beams": "beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "num_return_sequences": "num_samples",
}
"""Keys of generation_config.json, and the fields of `Decoding` with the same values."""

CONTROL_KEYS = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
"""Further keys, which are written only if they differ from the defaults."""

SAMPLING_KEYS = ("temperature", "top_k", "top_p")
"""Further keys, with the same name on both sides. transformers applies them only with ``do_sample``."""

TRANSFORMERS_TOP_K, TRANSFORMERS_MAX_TOKENS = 50, 20
"""transformers' defaults of ``top_k`` and of the number of new tokens."""

NOT_APPLIED = {
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "diversity_penalty"), 0),
    **dict.fromkeys(("num_beam_groups", "encoder_repetition_penalty", "typical_p", "guidance_scale"), 1),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("min_p", "top_h", "penalty_alpha")),
}
"""Keys that change the output only in transformers, and their neutral values."""

PLAIN_DECODING = {
    **{"num_beams": 1, "length_penalty": 1.0, "do_sample": False, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
    **{"min_length": 0, "min_new_tokens": None, "max_length": 20, "max_new_tokens": None, "stop_strings": None},
}
"""Keys of generation_config.json, and transformers' defaults."""


def read_target_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    """Reads the target vocabulary; None if source and target share one. Raises UserError."""
    place = folder / TARGET_TOKENIZER
    if place.is_dir():
        tokenizer = load_tokenizer(place)
        require_embedding_rows(tokenizer, config.decoder.known_vocab_size, place)
        return tokenizer
    if config.decoder_vocab_size is not None:
        raise UserError(
            f"{place} does not exist, but the decoder has {config.decoder_vocab_size} tokens and the encoder "
            f"{config.vocab_size}: put the files of the decoder's tokenizer there"
        )
    return None


def read_decoding(folder: Path, tokenizer: Tokenizer, log: Log) -> Decoding:
    """Reads generation settings from generation_config.json or, in older folders, from config.json.

    Raises:
        UserError: a value is invalid, or the start or end token differs from the tokenizer's.
    """
    file = folder / GENERATION_CONFIG
    file = file if file.is_file() else folder / "config.json"
    content = read_json_object(file)
    for key, expected in zip(("decoder_start_token_id", EOS), target_boundaries(tokenizer), strict=True):
        if (value := content.get(key, expected)) not in (expected, [expected], None):
            raise UserError(
                f"{file}: {key} is {value!r}, but the tokenizer of targets has {tokenizer.id_to_token(expected)} "
                f"({expected}): use another model"
            )
    for key, value in NOT_APPLIED.items():
        if content.get(key, value) not in (value, None):
            log(WarningText(f"{file}: {key} {content[key]} is not applied"))
    names = {**KEYS, **CONTROL_KEYS}
    values = {names[key]: content[key] for key in names if content.get(key) is not None}
    shortest, fewest = content.get("min_length"), values.get("min_tokens", 0)
    if isinstance(shortest, int) and isinstance(fewest, int) and shortest > 1:  # includes the start token
        values["min_tokens"] = max(fewest, shortest - 1)
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if values.get("early_stopping") == "never":
        log(WarningText(f"{file}: early_stopping never is not applied, and read as false"))
        values["early_stopping"] = False
    if content.get("do_sample") is True:
        values |= {"temperature": 1.0} | {key: content[key] for key in SAMPLING_KEYS if content.get(key) is not None}
        values["top_k"] = values.get("top_k", TRANSFORMERS_TOP_K) or None
    return _checked({**values, **_max_tokens(content, file)}, file)


def _max_tokens(content: dict[str, Any], file: Path) -> dict[str, int]:
    """Returns the maximum number of new tokens. transformers includes the start token in ``max_length``."""
    for key, more in {"max_new_tokens": 0, "max_length": 1}.items():
        if (value := content.get(key)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value <= more:
                raise UserError(f"{file}: {key} is {value!r}: set it to a whole number of at least {more + 1}")
            return {"max_tokens": value - more}
    return {"max_tokens": TRANSFORMERS_MAX_TOKENS}


def _checked(values: dict[str, Any], file: Path) -> Decoding:
    decoding = Decoding(**values)
    try:
        decoding.check()
    except UserError as error:
        message = str(error)
        for key, field in {**KEYS, **CONTROL_KEYS}.items():
            message = re.sub(rf"\b{field}\b", key, message)
        raise UserError(f"{file}: {message}") from None
    return dataclasses.replace(
        decoding,
        length_penalty=float(decoding.length_penalty),
        temperature=float(decoding.temperature),
        top_p=float(decoding.top_p),
        repetition_penalty=float(decoding.repetition_penalty),
    )


def read_end_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Reads the tokens with which a causal model ends a text; () if it is only the tokenizer's end token.

    Raises:
        UserError: eos_token_id is neither the id of a token nor a list of such ids.
    """
    files = [file for name in (GENERATION_CONFIG, "config.json") if (file := folder / name).is_file()]
    file, ids = next(
        ((file, ids) for file in files if (ids := read_json_object(file).get(EOS)) is not None), (folder, [])
    )
    end_ids, size = tuple(ids if isinstance(ids, list) else [ids]), embedding_rows(tokenizer)
    if any(type(each) is not int or not 0 <= each < size for each in end_ids):
        raise UserError(f"{file}: {EOS} is {shorten(ids)}: set it to ids from 0 to {size - 1}, or remove it")
    return () if end_ids == (special_ids(tokenizer).end,) else end_ids


def warn_unread_decoding(folder: Path, log: Log) -> None:
    """Logs settings in generation_config.json of a causal model, which `generate` does not read."""
    file = folder / GENERATION_CONFIG
    content = read_json(file) if file.is_file() else {}
    plain = {**NOT_APPLIED, **PLAIN_DECODING}
    if isinstance(content, dict):
        unread = [key for key, value in plain.items() if content.get(key, value) not in (value, None)]
        if unread:
            log(WarningText(f"{file}: {', '.join(unread)}: not applied, pass them to generate"))


def generation_config(model: ModelBundle) -> dict[str, Any]:
    """Returns the content of generation_config.json."""
    tokenizer, decoding = model.target_tokenizer or model.tokenizer, model.decoding
    start, end = target_boundaries(tokenizer)
    content: dict[str, Any] = {
        "decoder_start_token_id": start,
        "bos_token_id": start,
        EOS: end,
        "pad_token_id": special_ids(tokenizer).padding,
    }
    if decoding is None:
        return content
    content["max_length"] = decoding.max_tokens + 1  # includes the start token
    if decoding.beams > 1:
        content |= {key: getattr(decoding, field) for key, field in KEYS.items()}
    if decoding.temperature > 0:
        content |= {"do_sample": True, "num_return_sequences": decoding.num_samples}
        content |= {**{key: getattr(decoding, key) for key in SAMPLING_KEYS}, "top_k": decoding.top_k or 0}
    default = Decoding()
    for key, field in CONTROL_KEYS.items():
        if (value := getattr(decoding, field)) not in (getattr(default, field), []):
            content[key] = value
    return content


def unexpressed_decoding(decoding: Decoding | None) -> str | None:
    """Returns a sentence on settings that generation_config.json cannot express; None if there are none."""
    if decoding is None or decoding.beams == 1 or decoding.length_norm == "length" or not decoding.length_penalty:
        return None
    return (
        f"{GENERATION_CONFIG} cannot express decoding.length_norm {decoding.length_norm}: transformers divides by the "
        f"number of tokens to the power of length_penalty {decoding.length_penalty}"
    )
