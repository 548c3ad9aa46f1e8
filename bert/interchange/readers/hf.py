"""Reads Hugging Face transformers folders: config.json, safetensors and tokenizer files.

Every tensor in a folder is mapped to a parameter by the names of its family (`bert.interchange.families`), skipped by
name, or reported as an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import numpy as np
from flax import traverse_util
from tokenizers import Tokenizer

from bert.config import ModelConfig
from bert.config.model import MAX_SIZE, PairTruncation
from bert.errors import UserError, WarningText, shorten
from bert.files import read_json
from bert.interchange.bundle import ModelBundle
from bert.interchange.families import FAMILIES, Family, family_of_classes, family_of_type
from bert.interchange.generation_files import read_decoding, read_target_tokenizer, warn_unread_decoding
from bert.interchange.names import ARCHITECTURES_WITH_LABELS, Tensor, check_layers, expected_shapes
from bert.interchange.pooling import (
    PROMPTS,
    check_dense_widths,
    encoder_folder,
    read_model_max_length,
    read_pooling,
    read_score_activation,
)
from bert.interchange.readers.peft import is_adapter, read_adapter
from bert.interchange.tensor_files import read_tensors
from bert.metrics.tagging_schemes import is_span_tag
from bert.model import names
from bert.tokenizer.hf_settings import SETTINGS, read_settings, set_one_token_type
from bert.tokenizer.library import is_wordpiece, special_ids
from bert.tokenizer.vocabulary import load_tokenizer, require_embedding_rows

Log = Callable[[str], None]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "elu": "elu",
    "tanh": "tanh",
}
"""Maps Hugging Face's ``hidden_act`` to this package's names."""

OPTIONAL = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "layer_norm_eps")
"""Fields of `ModelConfig` that are optional in config.json."""

SETTINGS_READ = {"is_decoder": False, "add_cross_attention": False}
"""Settings with a single supported value in all families."""

FLOATS = ("float16", "bfloat16", "float32", "float64")

MULTI_LABEL = "multi_label_classification"
PROBLEM_TYPES = (None, "regression", "single_label_classification", MULTI_LABEL)

NULL_THRESHOLD = "null_score_diff_threshold"
"""Key of config.json that only this package uses, for models that may return no answer. transformers keeps it."""

LABEL_THRESHOLDS = "label_thresholds"
"""Like `NULL_THRESHOLD`: the probability from which each label is predicted, for multi-label models."""

TEXTS_PER_INPUT = "texts_per_input"
"""Like `NULL_THRESHOLD`: 1 for classifiers of single texts, 2 for classifiers of pairs."""

CLITICS = "clitics"
"""Like `NULL_THRESHOLD`: word endings that a tagger treats as separate words."""

PAIR_TRUNCATION = "pair_truncation"
"""Like `NULL_THRESHOLD`: how pairs are truncated, for `PAIR_CLASSIFIERS`."""

PAIR_CLASSIFIERS = ("BertForSequenceClassification", "BertForMultipleChoice")

MAX_LABELS = 2**20
"""Maximum number of labels. A larger number in config.json means that the file is corrupt."""


def is_hf_folder(folder: Path) -> bool:
    """Whether a folder looks like a transformers folder."""
    return (folder / "config.json").is_file() or (folder / "modules.json").is_file() or is_adapter(folder)


def read_hf_model(folder: Path, log: Log) -> ModelBundle:
    """Reads a folder. Logs what was read, what was skipped, and which parts are randomly initialized.

    Raises:
        UserError: a file is missing or damaged, the family is not supported, a tensor matches no parameter, a parameter
            has no tensor, or a shape differs from config.json.
    """
    pooling, folder = read_pooling(folder, log), encoder_folder(folder)
    adapter = read_adapter(folder, log) if is_adapter(folder) else None
    texts = folder if adapter is None else adapter.tokenizer_folder
    folder = folder if adapter is None else adapter.base
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{file} does not exist: copy it next to the weights")
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON object: copy it again")
    family, content = _family(content, file)
    content = content if adapter is None else adapter.config(content, family)
    inferred = _architectures_of_tensors(content, family, file) if _declared_class(content) is None else []
    content = {**content, "architectures": inferred} if inferred else content
    architecture = _architecture(content, family, file)
    config = _model_config(content, family, file)
    labels = _labels(content, file) if architecture in ARCHITECTURES_WITH_LABELS else ()
    longest = config.max_position_embeddings
    if (
        pooling is not None
        and pooling.max_length is None
        and (limit := read_model_max_length(folder, longest)) < longest
    ):
        pooling = dataclasses.replace(pooling, max_length=limit)
    if pooling is not None:
        check_dense_widths(pooling, config.hidden_size, folder)
    if pooling is not None and (pooling.max_length or 0) > longest:
        text = f"max_seq_length is {pooling.max_length}, but the model reads {longest} tokens: longer are cut"
        log(WarningText(f"{folder}: {text}"))
    classifier_dropout = _classifier_dropout(content, file)
    problem_type = _problem_type(content, file) if labels else None
    label_thresholds = _label_thresholds(content, len(labels), file)
    texts_per_input = _texts_per_input(content, file) if architecture == "BertForSequenceClassification" else None
    settings = read_settings(texts)
    tokenizer_class = settings.reader or ""
    if family.own_tokenizer is not None and (not tokenizer_class or tokenizer_class.startswith(family.title)):
        raise UserError(
            f"{folder / SETTINGS} names no other tokenizer_class than transformers' own for {family.title}, which "
            f"{family.own_tokenizer}: set it to BertTokenizer if the model was trained with that"
        )
    tokenizer = load_tokenizer(texts, log=log, settings=settings)
    has_types = settings.model_input_names is None or "token_type_ids" in settings.model_input_names
    if is_wordpiece(tokenizer) and config.type_vocab_size > 1 and not has_types:
        set_one_token_type(tokenizer)
    _check_padding(config, family, tokenizer, file)
    require_embedding_rows(tokenizer, config.known_vocab_size, folder)
    target_tokenizer, decoding = None, None
    if architecture == "BertForCausalLM":
        warn_unread_decoding(folder, log)
    if names.has_decoder(architecture):
        target_tokenizer = read_target_tokenizer(folder, config)
        decoding = read_decoding(folder, target_tokenizer or tokenizer, log)
    stored, source = read_tensors(folder)
    stored = stored if adapter is None else adapter.merge(stored, family)
    arrays, config = _rename_tensors(stored, source, config, family, architecture, log)
    parts = _check_tensors(arrays, source, config, family, architecture, labels)
    if names.PREDICTIONS in parts and family.prediction_act not in (None, config.hidden_act):
        raise UserError(
            f"{file}: hidden_act is {content[family.keys['hidden_act']]}, and the MLM head of {family.model_type} has "
            f"{family.prediction_act}: name another model"
        )
    size = sum(array.size for array in arrays.values())
    log(f"read {source}: {', '.join(sorted(parts))} ({len(arrays)} tensors, {size:,} parameters)")
    if inferred:
        log(WarningText(f"{file}: architectures is missing: read as {inferred[0]}, by the names of the tensors"))
    if fresh := [part for part in names.parts_of(architecture, config) if part not in parts]:
        log(f"not in {source}, randomly initialized: {', '.join(fresh)}")
    if not parts & {names.CLASSIFIER, names.QA_OUTPUTS}:
        architecture, labels = names.pretraining_architecture(parts, config), ()
    config, arrays = family.share(config, arrays)
    return ModelBundle(
        config=config,
        params=traverse_util.unflatten_dict(arrays, sep="/"),
        tokenizer=tokenizer,
        architecture=architecture,
        labels=labels,
        problem_type=problem_type if labels else None,
        classifier_dropout=classifier_dropout,
        null_score_diff_threshold=_number(content, NULL_THRESHOLD, file)
        if architecture == "BertForQuestionAnswering"
        else None,
        label_thresholds=label_thresholds if labels else (),
        score_activation=read_score_activation(folder, content, PROMPTS, len(labels), log)
        if labels and architecture == "BertForSequenceClassification"
        else None,
        texts_per_input=texts_per_input if labels else None,
        pair_truncation=_pair_truncation(content, file) if architecture in PAIR_CLASSIFIERS else None,
        clitics=_clitics(content, file) if architecture == "BertForTokenClassification" else None,
        pooling=pooling,
        target_tokenizer=target_tokenizer,
        decoding=decoding,
    )


def _family(content: dict[str, Any], file: Path) -> tuple[Family, dict[str, Any]]:
    """Returns the family, and the settings with nested ones moved to the top level."""
    model_type = content.get("model_type")
    family = family_of_type(model_type) if model_type else family_of_classes(str(_declared_class(content)))
    if family is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise UserError(f"{file}: model_type is {shorten(model_type)}, and {known} are read: name another model")
    try:
        return family, family.flatten(content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _declared_class(content: dict[str, Any]) -> Any:
    declared = content.get("architectures") or []
    return declared[0] if isinstance(declared, list) and declared else declared or None


def _architecture(content: dict[str, Any], family: Family, file: Path) -> str:
    """Returns the architecture, which is the name of a class in `bert.model`."""
    declared = _declared_class(content)
    architecture = next(iter(family.classes)) if declared is None else family.architecture_of(str(declared))
    for key, plain in {**SETTINGS_READ, **family.fixed, **family.settings.get(architecture or "", {})}.items():
        if content.get(key, plain) not in (plain, None):
            raise UserError(f"{file}: {key} is {shorten(content[key])}, and only {plain!r} is read: name another model")
    if architecture is None:
        choice = ", ".join(family.classes[name] for name in names.ARCHITECTURES if name in family.classes)
        raise UserError(
            f"{file}: the architecture is {shorten(declared)}: one of {choice} is read: name another "
            "model, or set architectures to the class that has these tensors"
        )
    return architecture


def _architectures_of_tensors(content: dict[str, Any], family: Family, file: Path) -> list[str]:
    """Infers the transformers class from tensor names, for a config.json without one; [] if there is no known head.

    A sequence classifier has a pooler, and a token classifier has none. Old files of token classifiers may have one,
    but then their labels are tags.
    """
    stored = {family.current_name(name) for name in read_tensors(file.parent)[0]}

    def tensors_of(architecture: str, *parts: str) -> set[str]:
        return {tensor.theirs for tensor in family.names.tensors(0, architecture) if tensor.part in parts}

    found = [
        name
        for name in ("BertForQuestionAnswering", *ARCHITECTURES_WITH_LABELS, "BertForMultipleChoice")
        if name in family.classes
        and (head := tensors_of(name, names.CLASSIFIER, names.QA_OUTPUTS) & stored)
        and any(theirs.endswith(".weight") for theirs in head)
    ]
    pooled = [name for name in found if names.POOLER in names.ARCHITECTURES[name]]
    pooled = [name for name in pooled if tensors_of(name, names.POOLER) <= stored]
    tokens = [name for name in found if name not in pooled and names.POOLER not in names.ARCHITECTURES[name]]
    if "BertForTokenClassification" in tokens and all(map(is_span_tag, _labels(content, file))):
        pooled = []
    if not (chosen := [*pooled, *tokens]):
        return []
    return [family.classes[chosen[0]]]


def _model_config(content: dict[str, Any], family: Family, file: Path) -> ModelConfig:
    fields = {**family.keys} | {key: key for key in family.more_sizes}
    if missing := [key for name, key in fields.items() if key not in content and name not in OPTIONAL]:
        raise UserError(f"{file} lacks {', '.join(missing)}: copy it again from where the weights are from")
    for name, key in fields.items():
        value = content.get(key, 0)
        types = (str,) if name == "hidden_act" else (int, float) if name in OPTIONAL else (int,)
        large = types == (int,) and isinstance(value, int) and value > MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, types) or large:
            raise UserError(f"{file}: {key} is {shorten(value)}: copy the file again from where the weights are from")
    values = {name: content[key] for name, key in family.keys.items() if key in content}
    tied = content.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        raise UserError(f"{file}: tie_word_embeddings is {shorten(tied)}, set it to true or false")
    if values["hidden_act"] not in ACTIVATIONS:
        raise UserError(
            f"{file}: {family.keys['hidden_act']} is {values['hidden_act']!r}: one of {', '.join(ACTIVATIONS)} is "
            "read: name another model"
        )
    values["hidden_act"] = ACTIVATIONS[values["hidden_act"]]
    try:
        config = ModelConfig(**{**values, **family.read_config(content), "tie_word_embeddings": tied})
        if config.known_vocab_size < 1:
            raise UserError("model.vocab_size is below 1: fix it")
        config.check()
    except UserError as error:
        raise UserError(f"{file}: {str(error).replace('model.', '')}") from None
    rates: dict[str, Any] = {name: float(getattr(config, name)) for name in OPTIONAL}
    return dataclasses.replace(config, **rates)


def _labels(content: dict[str, Any], file: Path) -> tuple[str, ...]:
    known = content.get("id2label")
    if known is None:
        count = content.get("num_labels")
        count = 2 if count is None else count
        if type(count) is not int or not 1 <= count <= MAX_LABELS:
            raise UserError(f"{file}: num_labels is {shorten(count)}: set it to the number of labels, or remove it")
        known = {str(label): f"LABEL_{label}" for label in range(count)}
    if not isinstance(known, dict) or sorted(known) != sorted(map(str, range(len(known)))) or not known:
        raise UserError(f"{file}: id2label does not number its labels 0, 1, ...: fix it")
    if bad := [label for label in known.values() if not isinstance(label, str | int | float)]:
        raise UserError(f"{file}: id2label holds {shorten(bad[0])}, which is not the name of a label: fix it")
    labels = tuple(str(known[str(label)]) for label in range(len(known)))
    if len(set(labels)) < len(labels):
        raise UserError(f"{file}: id2label gives two labels the same name: fix it")
    return labels


def _classifier_dropout(content: dict[str, Any], file: Path) -> float | None:
    rate = _number(content, "classifier_dropout", file)
    if rate is not None and not 0 <= rate < 1:
        raise UserError(f"{file}: classifier_dropout is {shorten(rate)}: set it to a number from 0 to below 1, or null")
    return rate


def _number(content: dict[str, Any], key: str, file: Path) -> float | None:
    value = content.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UserError(f"{file}: {key} is {shorten(value)}: set it to a number, or null")
    return value


def _label_thresholds(content: dict[str, Any], num_labels: int, file: Path) -> tuple[float, ...]:
    thresholds = content.get(LABEL_THRESHOLDS) or []
    if content.get("problem_type") != MULTI_LABEL or not num_labels:
        return ()
    numbers = isinstance(thresholds, list) and all(type(number) in (int, float) for number in thresholds)
    if not numbers or len(thresholds) not in (0, num_labels) or not all(0 <= number <= 1 for number in thresholds):
        raise UserError(
            f"{file}: {LABEL_THRESHOLDS} is {str(thresholds)[:40]}: set it to a number from 0 to 1 for each of the "
            f"{num_labels} labels, or remove it"
        )
    return tuple(map(float, thresholds))


def _pair_truncation(content: dict[str, Any], file: Path) -> PairTruncation | None:
    way = content.get(PAIR_TRUNCATION)
    if way is None or way in get_args(PairTruncation):
        return way
    raise UserError(f"{file}: {PAIR_TRUNCATION} is {str(way)[:40]}: set it to google or longest_first, or remove it")


def _clitics(content: dict[str, Any], file: Path) -> tuple[str, ...] | None:
    clitics = content.get(CLITICS)
    if clitics is None or (isinstance(clitics, list) and all(isinstance(clitic, str) and clitic for clitic in clitics)):
        return None if clitics is None else tuple(clitics)
    raise UserError(f"{file}: {CLITICS} must be a list of word endings: fix it, or remove it")


def _texts_per_input(content: dict[str, Any], file: Path) -> int | None:
    count = content.get(TEXTS_PER_INPUT)
    if count is not None and (type(count) is not int or count not in (1, 2)):
        raise UserError(f"{file}: {TEXTS_PER_INPUT} is {str(count)[:40]}: set it to 1, or to 2 for pairs, or remove it")
    return count


def _check_padding(config: ModelConfig, family: Family, tokenizer: Tokenizer, file: Path) -> None:
    """Raises UserError if positions are counted from another id than the tokenizer's padding id.

    transformers gives tokens with that id the position of padding.
    """
    counted_from, padding = config.position_offset - 1, special_ids(tokenizer).find("pad")
    if config.position_offset and padding != counted_from:
        raise UserError(
            f"{file}: {family.title} counts positions from the padding id {counted_from}, and the tokenizer's padding "
            f"has the id {padding}: copy config.json and the tokenizer of one model"
        )


def _problem_type(content: dict[str, Any], file: Path) -> str | None:
    problem_type = content.get("problem_type")
    if problem_type not in PROBLEM_TYPES:
        known = ", ".join(filter(None, PROBLEM_TYPES))
        raise UserError(f"{file}: problem_type is {shorten(problem_type)}: set it to one of {known}, or null")
    return problem_type


def _rename_tensors(
    stored: dict[str, np.ndarray], source: Path, config: ModelConfig, family: Family, architecture: str, log: Log
) -> tuple[dict[str, np.ndarray], ModelConfig]:
    """Maps tensors to parameter paths, as float32, and updates the configuration if the decoder is untied."""
    layers = (config.num_distinct_layers, config.decoder.num_distinct_layers)
    check_layers(max(layers), len(stored), source, "config.json")
    table = {tensor.theirs: tensor for tensor in family.names.tensors(layers[0], architecture, layers[1])}
    left_out: set[str] = set()
    by_name: dict[str, str] = {}
    for name in stored:
        if re.search(family.constants, name):
            continue
        plain = family.current_name(name)
        if plain in by_name:
            raise UserError(f"{source} holds {by_name[plain]} and {name}, which are one tensor: copy it again")
        by_name[plain] = name
    pooler = family.names.modules.get(names.POOLER)
    if pooler is not None and names.POOLER in family.names.heads.get(architecture, {}):
        # Left over from pretraining: this architecture has no pooler, only the first layer of its classifier.
        left_out |= {by_name.pop(f"{pooler}.{end}", "") for end in ("weight", "bias")} - {""}

    def of(path: str) -> np.ndarray | None:
        return stored.get(by_name.get(_their_name(table, path), ""))

    decoder, word = of("predictions/decoder"), of(names.word_embeddings(architecture))
    if decoder is not None and word is None and config.tie_word_embeddings:  # safetensors keeps one name of a tensor
        name = by_name.pop(_their_name(table, "predictions/decoder"))
        by_name[_their_name(table, names.word_embeddings(architecture))] = name
        decoder = None
    if decoder is not None and config.tie_word_embeddings:
        if word is not None and np.array_equal(decoder, word):
            del by_name[_their_name(table, "predictions/decoder")]
        else:
            log(f"{source}: the MLM decoder differs from the word embeddings, and stays untied")
            config = dataclasses.replace(config, tie_word_embeddings=False)
    second = by_name.pop(family.decoder_bias or "", None)
    if second is not None:
        first = by_name.get(_their_name(table, "predictions/bias"))
        if first is not None and not np.array_equal(stored[second], stored[first]):
            left_out.add(first)  # transformers adds the bias in the decoder
        by_name[_their_name(table, "predictions/bias")] = second
    if unexplained := sorted(by_name[name] for name in set(by_name) - set(table)):
        if (prefix := _foreign_prefix(stored, set(table), family)) is not None:
            raise UserError(
                f"{source}: the names of all tensors begin with {prefix!r}, which a {family.classes[architecture]} "
                "lacks: remove it from the names"
            )
        more = f" and {len(unexplained) - 4} more" if len(unexplained) > 4 else ""
        raise UserError(
            f"{source} holds {', '.join(unexplained[:4])}{more}, which a {family.classes[architecture]} "
            f"of {config.num_hidden_layers} layers lacks: fix architectures and num_hidden_layers in config.json"
        )
    arrays: dict[str, np.ndarray] = {}
    for theirs, name in by_name.items():
        array = stored[name]
        if array.dtype.name not in FLOATS:
            raise UserError(f"{source}: {name} is {array.dtype.name}, and {', '.join(FLOATS)} are read: convert it")
        arrays |= table[theirs].split(array)
    if halves := sorted({stored[name].dtype.name for name in by_name.values()} - {"float32"}):
        log(f"{source}: {' and '.join(halves)} becomes float32, and is written as float32")
    if left_out:
        log(f"not loaded from {source}: {', '.join(sorted(left_out))}")
    return arrays, config


def _check_tensors(
    arrays: dict[str, np.ndarray],
    source: Path,
    config: ModelConfig,
    family: Family,
    architecture: str,
    labels: tuple[str, ...],
) -> set[str]:
    """Returns the parts in the file. Raises UserError if a part is incomplete or its shapes differ from config.json."""
    table = family.names.tensors(config.num_distinct_layers, architecture, config.decoder.num_distinct_layers)
    parts = {tensor.part for tensor in table if tensor.paths[0] in arrays}
    needed = {names.ENCODER, *parts, *(names.ARCHITECTURES[architecture] if names.has_decoder(architecture) else ())}
    pooled = names.POOLER in names.parts_of(architecture, config)
    if names.SEQ_RELATIONSHIP in parts or (not {names.CLASSIFIER, names.QA_OUTPUTS}.isdisjoint(parts) and pooled):
        needed.add(names.POOLER)
    shapes = expected_shapes(config, architecture, len(labels))
    lacking = set(shapes) - set(arrays)
    missing = [tensor.theirs for tensor in table if tensor.part in needed and tensor.paths[0] in lacking]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise UserError(f"{source} lacks {', '.join(missing[:4])}{more}: copy it again, or fix config.json")
    for tensor in table:
        if tensor.paths[0] not in arrays:
            continue
        if tensor.paths[0] not in shapes:
            raise UserError(f"{source} holds {tensor.theirs}, which config.json has no place for: copy both again")
        if any(arrays[path].shape != shapes[path] for path in tensor.paths):
            theirs = tensor.join(arrays).shape
            ours = tensor.join({path: np.broadcast_to(np.float32(0), shapes[path]) for path in tensor.paths}).shape
            raise UserError(
                f"{source}: {tensor.theirs} is {list(theirs)}, but config.json makes it {list(ours)}: copy both from "
                "one source"
            )
    return parts


def _foreign_prefix(stored: Iterable[str], known: set[str], family: Family) -> str | None:
    """Returns the shortest prefix of all names whose removal makes some of them known; None if there is none."""
    in_order = zip(*(name.split(".") for name in stored), strict=False)
    shared = [components[0] for components in takewhile(lambda components: len(set(components)) == 1, in_order)]
    starts = [".".join(shared[: count + 1]) + "." for count in range(len(shared))]
    return next(
        (start for start in starts if any(family.current_name(name.removeprefix(start)) in known for name in stored)),
        None,
    )


def _their_name(table: dict[str, Tensor], ours: str) -> str:
    return next((theirs for theirs, tensor in table.items() if ours in tensor.paths), "")
