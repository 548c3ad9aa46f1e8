"""Reads Hugging Face transformers folders: config.json, safetensors and tokenizer files.

Every tensor in a folder is mapped to a parameter by the names of its family (`bert.interchange.families`), skipped by
name, or reported as an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bert.config import ModelConfig
from bert.config.model import MAX_SIZE
from bert.data.long_texts import LongTexts
from bert.errors import Log, UserError, WarningText, require, shorten
from bert.files import read_json_object
from bert.interchange.bundle import (
    PAIR_CLASSIFIERS,
    ModelBundle,
    read_label_thresholds,
    read_long_texts,
    read_task_settings,
)
from bert.interchange.families import FAMILIES, Family, family_of_classes, family_of_type
from bert.interchange.families.base import HEAD_DROPOUT, OPTIONAL
from bert.interchange.families.gte import published_as_jina
from bert.interchange.generation_files import read_decoding, read_end_ids, read_target_tokenizer, warn_unread_decoding
from bert.interchange.names import ARCHITECTURES_WITH_LABELS, TASKS, check_layers
from bert.interchange.readers.peft import is_adapter, read_adapter, tokenizer_folder
from bert.interchange.sentence_transformers import late_interaction
from bert.interchange.sentence_transformers.cross_encoder import read_max_length, read_score_activation
from bert.interchange.sentence_transformers.reader import (
    encoder_folder,
    find_router,
    fit_to_model,
    is_static,
    lower_case,
    read_pooling,
)
from bert.interchange.sentence_transformers.routes import DOCUMENT
from bert.interchange.sentence_transformers.static import read_static
from bert.interchange.stored_params import StoredParams
from bert.interchange.task_adapters import TaskAdapter, read_task_adapters
from bert.interchange.tensor_files import FLOATS, read_tensors, weight_files
from bert.interchange.weights_records import WeightsRecord
from bert.metrics.tagging_schemes import is_span_tag
from bert.model import names
from bert.model.late_interaction import Role
from bert.model.parameters import Params
from bert.tokenizer.hf_settings import SETTINGS, read_settings, set_one_token_type
from bert.tokenizer.library import is_wordpiece, special_ids
from bert.tokenizer.vocabulary import load_tokenizer, require_embedding_rows

POOLER_MODULE = "bert/pooler"
"""Pooler, which only the classifiers of some families have."""

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

SETTINGS_READ = {"is_decoder": False, "add_cross_attention": False}
"""Settings with a single supported value in all families."""

LIMITED = (*PAIR_CLASSIFIERS, "BertForTokenClassification")
"""Architectures whose rows the tokenizer's maximum length limits. Embeddings have it in their pooling."""

MAX_LABELS = 2**20
"""Maximum number of labels. A larger number in config.json means that the file is corrupt."""


def is_hf_folder(folder: Path) -> bool:
    """Whether a folder looks like a transformers folder."""
    return (folder / "config.json").is_file() or (folder / "modules.json").is_file() or is_adapter(folder)


def read_hf_model(
    folder: Path,
    log: Log,
    adapter_folder: Path | None = None,
    known: WeightsRecord | None = None,
    route: Role = DOCUMENT,
) -> ModelBundle:
    """Reads a folder. Logs what was read, what was skipped, and which parts are randomly initialized.

    Args:
        adapter_folder: folder of an adapter in PEFT's format, which is added to the model in ``folder``.
        known: record of the weights. If given, they are read on first use.
        route: which model of a sentence-transformers folder with a Router to read.

    Raises:
        UserError: a file is missing or damaged, the family is not supported, a tensor matches no parameter, a parameter
            has no tensor, or a shape differs from config.json.
    """
    root = folder
    pooling, folder = read_pooling(folder, log, route), encoder_folder(folder, route)
    if is_static(root, route):
        return read_static(folder, require(pooling, "the pooling of a static model"), log)
    place = folder if adapter_folder is None else adapter_folder
    base = None if adapter_folder is None else folder
    adapter, own_pooling = read_adapter(place, log, base) if is_adapter(place) else None, pooling
    if adapter is not None:
        own_pooling = pooling if adapter_folder is None else read_pooling(adapter_folder, log)
        pooling = own_pooling or pooling or read_pooling(adapter.base, log)
    texts = tokenizer_folder(place, base)
    folder = folder if adapter is None else adapter.base
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{file} does not exist: copy it next to the weights")
    family, content = _family(read_json_object(file), file)
    content = content if adapter is None else adapter.config(content, family)
    inferred = _infer_class(content, family, file) if _declared_class(content) is None else None
    content = content if inferred is None else {**content, "architectures": [inferred]}
    architecture = _architecture(content, family, file)
    config = _model_config(content, family, file)
    labels = _labels(content, file) if architecture in ARCHITECTURES_WITH_LABELS else ()
    if adapter is not None and architecture != "Bert":
        pooling = own_pooling  # not the base model's embeddings, which the adapter's task does not have
    pooling = fit_to_model(pooling, config, folder, log)
    task_settings = read_task_settings(content, architecture, file)
    label_thresholds = read_label_thresholds(content, len(labels), file)
    pooling, tokenizer = lower_case(pooling, _tokenizer(texts, folder, config, family, log))
    if pooling is not None and pooling.has_token_vectors:
        pooling = late_interaction.fit_to_tokenizer(pooling, tokenizer, config, root, texts, log)
    target_tokenizer, decoding = None, None
    end_ids: tuple[int, ...] = ()
    if architecture == "BertForCausalLM":
        warn_unread_decoding(folder, log)
        end_ids = read_end_ids(folder, tokenizer)
    if names.has_decoder(architecture):
        target_tokenizer = read_target_tokenizer(folder, config)
        decoding = read_decoding(folder, target_tokenizer or tokenizer, log)
    params: Any
    task_adapters: dict[str, TaskAdapter] = {}
    if known is None:
        stored, source = read_tensors(folder)
        if late_interaction.has_projection(folder) and stored.pop(late_interaction.PROJECTION, None) is not None:
            log(f"{source}: {late_interaction.PROJECTION} is read as a Dense module, or replaced by one")
        if architecture == "Bert":
            stored, task_adapters = read_task_adapters(folder, content, family, stored, log)
        if adapter is not None:
            stored, task_adapters = adapter.merge(stored, family, architecture), {}
        stored = family.from_files(config, content, stored)
        params, config, parts = _to_params(stored, source, config, family, architecture, len(labels), log)
    else:
        params = StoredParams(
            str(root), known.checksum, lambda: read_hf_model(root, lambda text: None, route=route).params
        )
        config, parts = dataclasses.replace(config, tie_word_embeddings=known.tie_word_embeddings), known.parts
    _check_prediction_act(parts, config, content, family, file)
    if inferred is not None:
        log(WarningText(f"{file}: architectures is missing, and inferred to be {inferred} from the tensor names"))
    if missing := [part for part in names.parts_of(architecture, config) if part not in parts]:
        log(f"not in {weight_files(folder)[0]}, randomly initialized: {', '.join(missing)}")
    activation, long_texts = None, read_long_texts(content, file)
    if not parts & {names.CLASSIFIER, names.QA_OUTPUTS}:
        is_whole = architecture == "BertForMaskedLM" and not missing  # its head may have no parameters
        architecture = architecture if is_whole else names.pretraining_architecture(parts, config)
        labels = ()
        task_settings = {"classifier_dropout": task_settings["classifier_dropout"]}
    elif architecture == "BertForSequenceClassification":
        activation = read_score_activation(folder, content, len(labels), log)
    if long_texts is None and (architecture in LIMITED or (architecture == "Bert" and pooling is None)):
        length = read_max_length(folder, texts, log)
        if length is not None and length < config.max_position_embeddings:
            long_texts = LongTexts(length)
    if pooling is not None and pooling.is_lexical and architecture != "BertForMaskedLM":
        raise UserError(
            f"{root}: SpladePooling reads masked-LM logits, which {architecture} does not compute: use another model"
        )
    return ModelBundle(
        config=config,
        params=params,
        tokenizer=tokenizer,
        architecture=architecture,
        labels=labels,
        label_thresholds=label_thresholds if labels else (),
        score_activation=activation,
        pooling=pooling,
        task_adapters=task_adapters,
        long_texts=long_texts,
        target_tokenizer=target_tokenizer,
        decoding=decoding,
        end_ids=end_ids,
        **task_settings,
    )


def read_hf_settings(folder: Path, log: Log) -> tuple[ModelConfig, str, dict[str, tuple[int, ...]], Tokenizer]:
    """Reads a folder without its weights. Returns configuration, architecture, shapes of parameters and vocabulary.

    Raises UserError like `read_hf_model`, except for the weights.
    """
    if find_router(folder) is not None:
        read_pooling(folder, log, "query", weights=False)
        queries = encoder_folder(folder, "query")
        if queries != encoder_folder(folder) and not is_static(folder, "query"):
            _read_declared(queries, log)
    pooling, root = read_pooling(folder, log, weights=False), folder
    if is_static(folder):
        raise UserError(f"{folder} has its sizes in its weights, which are not here yet: load it with bert.load first")
    folder = encoder_folder(folder)
    config, family, architecture, labels = _read_declared(folder, log)
    fitted = fit_to_model(pooling, config, folder, log)
    pooling, tokenizer = lower_case(fitted, _tokenizer(folder, folder, config, family, log))
    shapes = _stored_shapes(config, family, architecture, labels)
    if pooling is not None:
        shapes |= pooling.shapes
        if pooling.has_token_vectors:
            late_interaction.fit_to_tokenizer(pooling, tokenizer, config, root, folder, log)
    return config, architecture, shapes, tokenizer


def _read_declared(folder: Path, log: Log) -> tuple[ModelConfig, Family, str, int]:
    """Returns what config.json declares: configuration, family, architecture and number of labels."""
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{file} does not exist: name a model that has one")
    family, content = _family(read_json_object(file), file)
    architecture = _architecture(content, family, file)
    config = _model_config(content, family, file)
    labels = len(_labels(content, file)) if architecture in ARCHITECTURES_WITH_LABELS else 0
    _check_prediction_act(names.ARCHITECTURES[architecture], config, content, family, file)
    read_task_settings(content, architecture, file)
    read_label_thresholds(content, labels, file)
    read_long_texts(content, file)
    log(f"{file}: a {family.classes[architecture]} would be read as {architecture}; its weights are not here yet")
    if tasks := content.get(TASKS):
        log(f"{file}: adapters of {', '.join(map(str, tasks))}")
    return config, family, architecture, labels


def _check_prediction_act(
    parts: Collection[str], config: ModelConfig, content: dict[str, Any], family: Family, file: Path
) -> None:
    """Raises UserError if the model has an MLM head with another activation than its layers."""
    if names.PREDICTIONS in parts and family.prediction_act not in (None, config.hidden_act):
        raise UserError(
            f"{file}: hidden_act is {content[family.keys['hidden_act']]}, but the MLM head of {family.model_type} has "
            f"{family.prediction_act}: use another model"
        )


def _stored_shapes(
    config: ModelConfig, family: Family, architecture: str, num_labels: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters that the files of a family hold."""
    from bert.interchange.shapes import expected_shapes  # imported here because it imports JAX

    parts = {names.ENCODER, *names.parts_of(architecture, config)}
    pooler = family.names.modules.get(POOLER_MODULE, "")
    if architecture == "Bert" and not pooler.startswith(f"{family.prefix}."):
        parts -= {names.POOLER}
    shapes = expected_shapes(config, architecture, num_labels)
    return {path: shape for path, shape in shapes.items() if names.part_of(path) in parts}


def _to_params(
    stored: dict[str, np.ndarray],
    source: Path,
    config: ModelConfig,
    family: Family,
    architecture: str,
    num_labels: int,
    log: Log,
) -> tuple[Params, ModelConfig, frozenset[str]]:
    """Returns the parameters, the configuration as the tensors require it, and the parts that have parameters."""
    # Imported here because JAX is slow to import, and not needed if the weights are not read.
    from flax import traverse_util

    from bert.interchange.shapes import check_tensors

    arrays, config = _rename_tensors(stored, source, config, family, architecture, log)
    parts = check_tensors(family.names, arrays, source, config, architecture, num_labels)
    size = sum(array.size for array in arrays.values())
    log(f"read {source}: {', '.join(sorted(parts))} ({len(arrays)} tensors, {size:,} parameters)")
    config, arrays = family.share(config, arrays)
    return traverse_util.unflatten_dict(arrays, sep="/"), config, frozenset(parts)


def _family(content: dict[str, Any], file: Path) -> tuple[Family, dict[str, Any]]:
    """Returns the family, and the settings with nested ones moved to the top level."""
    content = published_as_jina(content)
    model_type = content.get("model_type")
    family = family_of_type(model_type) if model_type else family_of_classes(str(_declared_class(content)))
    if family is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise UserError(f"{file}: model_type is {shorten(model_type)}: use a model of one of the types {known}")
    if _declared_class(content) == late_interaction.STANFORD:
        content = {**content, "architectures": [family.classes["Bert"]]}
    try:
        content = family.flatten(content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    key = family.head_dropout_key(str(_declared_class(content)))
    return family, content if content.get(key) is None else {HEAD_DROPOUT: content[key], **content}


def _declared_class(content: dict[str, Any]) -> Any:
    declared = content.get("architectures") or []
    return declared[0] if isinstance(declared, list) and declared else declared or None


def _architecture(content: dict[str, Any], family: Family, file: Path) -> str:
    """Returns the architecture, which is the name of a class in `bert.model`."""
    declared = _declared_class(content)
    architecture = next(iter(family.classes)) if declared is None else family.architecture_of(str(declared))
    for key, value in {**SETTINGS_READ, **family.fixed, **family.settings.get(architecture or "", {})}.items():
        if content.get(key, value) not in (value, None):
            raise UserError(
                f"{file}: {key} is {shorten(content[key])}, and only {value!r} is supported: use another model"
            )
    if architecture is None:
        choice = ", ".join(family.classes[name] for name in names.ARCHITECTURES if name in family.classes)
        raise UserError(
            f"{file}: the architecture is {shorten(declared)}: use a model with one of {choice}, or set architectures "
            "to the class that has these tensors"
        )
    return architecture


def _infer_class(content: dict[str, Any], family: Family, file: Path) -> str | None:
    """Infers the transformers class from tensor names, for a config.json without one; None if there is no known head.

    A sequence classifier has a pooler, and a token classifier has none. Old files of token classifiers may have one,
    but then their labels are tags.
    """
    stored = {family.current_name(name) for name in read_tensors(file.parent)[0]}

    def tensors_of(architecture: str, *parts: str) -> set[str]:
        return {tensor.name for tensor in family.names.tensors(0, architecture) if tensor.part in parts}

    candidates = [
        name
        for name in ("BertForQuestionAnswering", *ARCHITECTURES_WITH_LABELS, "BertForMultipleChoice")
        if name in family.classes
        and (head := tensors_of(name, names.CLASSIFIER, names.QA_OUTPUTS) & stored)
        and any(tensor.endswith(".weight") for tensor in head)
    ]
    with_pooler = [name for name in candidates if names.POOLER in names.ARCHITECTURES[name]]
    tokens = [name for name in candidates if name not in with_pooler]
    pooled = [name for name in with_pooler if tensors_of(name, names.POOLER) <= stored]
    if "BertForTokenClassification" in tokens and all(map(is_span_tag, _labels(content, file))):
        pooled = []
    return next((family.classes[name] for name in (*pooled, *tokens)), None)


def _model_config(content: dict[str, Any], family: Family, file: Path) -> ModelConfig:
    fields = {**family.keys} | {key: key for key in family.more_sizes}
    if missing := [key for name, key in fields.items() if key not in content and name not in OPTIONAL]:
        raise UserError(f"{file} lacks {', '.join(missing)}: copy it again from the source of the weights")
    for name, key in fields.items():
        value = content.get(key, 0)
        types = (str,) if name == "hidden_act" else (int, float) if name in OPTIONAL else (int,)
        large = types == (int,) and isinstance(value, int) and value > MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, types) or large:
            raise UserError(f"{file}: {key} is {shorten(value)}: copy the file again from the source of the weights")
    values = {name: content[key] for name, key in family.keys.items() if key in content}
    tied = content.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        raise UserError(f"{file}: tie_word_embeddings is {shorten(tied)}: set it to true or false")
    if values["hidden_act"] not in ACTIVATIONS:
        raise UserError(
            f"{file}: {family.keys['hidden_act']} is {values['hidden_act']!r}: use a model with one of "
            f"{', '.join(ACTIVATIONS)}"
        )
    values["hidden_act"] = ACTIVATIONS[values["hidden_act"]]
    values = {
        **{key: limit.value for key, limit in family.limits.items()},
        "pooler_dropout": family.pooler_dropout,
        **family.defaults,
        **values,
        "tie_word_embeddings": tied,
    }
    try:
        config = ModelConfig(**{**values, **family.read_config(content)})
        if config.known_vocab_size < 1:
            raise UserError("model.vocab_size is below 1: set it to the number of tokens")
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
        raise UserError(f"{file}: id2label does not number its labels 0, 1, ...: correct the numbers")
    if bad := [label for label in known.values() if not isinstance(label, str | int | float)]:
        raise UserError(f"{file}: id2label holds {shorten(bad[0])}, which is not a name: set it to a text")
    labels = tuple(str(known[str(label)]) for label in range(len(known)))
    if len(set(labels)) < len(labels):
        raise UserError(f"{file}: id2label has two labels with the same name: rename one of them")
    return labels


def _tokenizer(texts: Path, folder: Path, config: ModelConfig, family: Family, log: Log) -> Tokenizer:
    """Reads the tokenizer in ``texts``, for a model in ``folder``. Raises UserError if they do not match."""
    settings = read_settings(texts)
    tokenizer_class = settings.reader or ""
    if family.own_tokenizer is not None and (not tokenizer_class or tokenizer_class.startswith(family.title)):
        raise UserError(
            f"{folder / SETTINGS} has no tokenizer_class except transformers' tokenizer of {family.title}, which "
            f"{family.own_tokenizer}: set it to BertTokenizer if the model was trained with that"
        )
    tokenizer = load_tokenizer(texts, log=log, settings=settings)
    if is_wordpiece(tokenizer) and config.type_vocab_size > 1 and not settings.has_token_types:
        set_one_token_type(tokenizer)
    # transformers gives tokens with the padding id the position of padding.
    counted_from, padding = config.position_offset - 1, special_ids(tokenizer).find("pad")
    if config.position_offset and padding != counted_from:
        raise UserError(
            f"{folder / 'config.json'}: {family.title} counts positions from the padding id {counted_from}, but the "
            f"padding id of the tokenizer is {padding}: copy config.json and the tokenizer of one model"
        )
    require_embedding_rows(tokenizer, config.known_vocab_size, folder)
    return tokenizer


def _rename_tensors(
    stored: dict[str, np.ndarray], source: Path, config: ModelConfig, family: Family, architecture: str, log: Log
) -> tuple[dict[str, np.ndarray], ModelConfig]:
    """Maps tensors to parameter paths, as float32, and updates the configuration if the decoder is untied."""
    layers = (config.num_distinct_layers, config.decoder.num_distinct_layers)
    check_layers(max(layers), len(stored), source, "config.json")
    table = {tensor.name: tensor for tensor in family.names.tensors(layers[0], architecture, layers[1])}
    left_out: set[str] = set()
    stored_name: dict[str, str] = {}  # by the current name
    for name in stored:
        if re.search(family.constants, name):
            continue
        current = family.current_name(name)
        if current in stored_name:
            raise UserError(f"{source} holds {stored_name[current]} and {name}, which are one tensor: copy it again")
        stored_name[current] = name
    pooler = family.names.modules.get(names.POOLER)
    if pooler is not None and names.POOLER in family.names.heads.get(architecture, {}):
        # A pooler from pretraining. This architecture has none, except the first layer of its classifier.
        left_out |= {stored_name.pop(f"{pooler}.{end}", "") for end in ("weight", "bias")} - {""}

    def name_of(path: str) -> str:
        return next((name for name, tensor in table.items() if path in tensor.paths), "")

    decoder, word = name_of("predictions/decoder"), name_of(names.word_embeddings(architecture))
    if decoder in stored_name and config.tie_word_embeddings:
        if word not in stored_name:  # safetensors keeps one name of a tensor
            stored_name[word] = stored_name.pop(decoder)
        elif np.array_equal(stored[stored_name[decoder]], stored[stored_name[word]]):
            del stored_name[decoder]
        else:
            log(f"{source}: the MLM decoder differs from the word embeddings, and stays untied")
            config = dataclasses.replace(config, tie_word_embeddings=False)
    second_bias = stored_name.pop(family.decoder_bias or "", None)
    if second_bias is not None:
        bias = name_of("predictions/bias")
        first_bias = stored_name.get(bias)
        if first_bias is not None and not np.array_equal(stored[second_bias], stored[first_bias]):
            left_out.add(first_bias)  # transformers adds the bias in the decoder
        stored_name[bias] = second_bias
    if unknown := sorted(stored_name[name] for name in set(stored_name) - set(table)):
        _raise_unknown(unknown, stored, source, set(table), family, architecture, config)
    arrays: dict[str, np.ndarray] = {}
    for current, name in stored_name.items():
        array = stored[name]
        if array.dtype.name not in FLOATS:
            raise UserError(
                f"{source}: {name} is {array.dtype.name}: convert it to one of the types {', '.join(FLOATS)}"
            )
        arrays |= table[current].split(array)
    if converted := sorted({stored[name].dtype.name for name in stored_name.values()} - {"float32"}):
        log(f"{source}: {' and '.join(converted)} is converted to float32, and exported as float32")
    if left_out:
        log(f"not loaded from {source}: {', '.join(sorted(left_out))}")
    return arrays, config


def _raise_unknown(
    unknown: list[str],
    stored: Iterable[str],
    source: Path,
    known: set[str],
    family: Family,
    architecture: str,
    config: ModelConfig,
) -> None:
    """Raises UserError for tensors that match no parameter."""
    if (prefix := _foreign_prefix(stored, known, family)) is not None:
        raise UserError(
            f"{source}: the names of all tensors begin with {prefix!r}, which a {family.classes[architecture]} lacks: "
            "remove it from the names"
        )
    more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
    raise UserError(
        f"{source} holds {', '.join(unknown[:4])}{more}, which a {family.classes[architecture]} of "
        f"{config.num_hidden_layers} layers lacks: correct architectures and num_hidden_layers in config.json"
    )


def _foreign_prefix(stored: Iterable[str], known: set[str], family: Family) -> str | None:
    """Returns the shortest prefix of all names whose removal makes some of them known; None if there is none."""
    in_order = zip(*(name.split(".") for name in stored), strict=False)
    shared = [components[0] for components in takewhile(lambda components: len(set(components)) == 1, in_order)]
    starts = [".".join(shared[: count + 1]) + "." for count in range(len(shared))]
    return next(
        (start for start in starts if any(family.current_name(name.removeprefix(start)) in known for name in stored)),
        None,
    )
