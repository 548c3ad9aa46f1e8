"""Reads the modules and settings of a sentence-transformers folder as `bert.model.pooling.Pooling`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bert.config import ModelConfig
from bert.config.options import TOKEN_POOLING
from bert.errors import Log, UserError, WarningText, shorten
from bert.files import read_json, read_json_object
from bert.interchange.names import EMBEDDING, TASKS, TOKEN_EMBEDDINGS
from bert.interchange.sentence_transformers import late_interaction
from bert.interchange.sentence_transformers.names import (
    MULTI_VECTOR_MASK,
    NUM_LOG1P,
    PROMPTS,
    SPARSE_ENCODER,
    STATIC_EMBEDDING,
    TEXT_SETTINGS,
    TOKEN_TABLE,
)
from bert.interchange.sentence_transformers.routes import DOCUMENT, ROUTERS, Router, class_name, read_router
from bert.interchange.tensor_files import read_tensors
from bert.model.late_interaction import MAX_SIM, TOKEN_SIMILARITIES, Role
from bert.model.pooling import (
    ACTIVATIONS,
    CONCATENATED,
    LEXICAL_MODES,
    MODES,
    SIMILARITIES,
    TOKEN_WEIGHTS,
    PooledDense,
    Pooling,
    find_activation,
)
from bert.tokenizer.hf_settings import lower_cased, read_model_max_length

KNOWN_SETTINGS = (
    *("model_type", "__version__", "requirements", "prompts", "default_prompt_name", "similarity_fn_name"),
    "truncate_dim",
)
"""Keys of that file that are applied, have no effect, or have a separate message."""

TEXT_SETTINGS_READ: dict[str, Any] = {
    "processing_kwargs": {},
    **dict.fromkeys(late_interaction.LENGTH_KEYS),
}
"""Keys of `TEXT_SETTINGS` with a single supported value. The last ones are applied for an embedding per token."""

TEXT_TASKS = {
    "feature-extraction": ("last_hidden_state", TOKEN_EMBEDDINGS),
    "fill-mask": ("logits", TOKEN_EMBEDDINGS),
    "sequence-classification": ("logits", "scores"),
}
"""Values of ``transformer_task``, the output of transformers' model, and its name in sentence-transformers."""

ORDER = re.compile(
    f"(Transformer Pooling|{STATIC_EMBEDDING})( Dense)*( Normalize)*|Transformer|(MLM)?Transformer SpladePooling"
    f"|{TOKEN_TABLE}"
)
"""Supported sequences of modules."""

LATE_ORDER = re.compile(f"Transformer( Dense)*( {MULTI_VECTOR_MASK}( Normalize)?| Normalize( {MULTI_VECTOR_MASK})?)?")
"""Supported sequences of modules for an embedding per token."""

PYLATE_SIMILARITY = "MaxSim"
"""Name of PyLate's similarity."""

DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names used for the prompt of documents."""

IDENTITY = "torch.nn.modules.linear.Identity"
"""Activation of a layer without one."""

TANH = "torch.nn.modules.activation.Tanh"
"""Default activation of a Dense module."""

FEATURE_KEYS = ("module_input_name", "module_output_name")
"""Keys of a module's config.json with the names of vectors."""


def encoder_folder(folder: Path, route: Role = DOCUMENT) -> Path:
    """Returns the encoder's folder in a sentence-transformers folder; other folders unchanged. Raises UserError.

    Args:
        route: the route of a Router, here and below.
    """
    modules = _modules(folder, route)
    return modules[0][1] if modules else folder


def is_cross_encoder(folder: Path) -> bool:
    """Whether a sentence-transformers folder holds a cross-encoder. Raises UserError."""
    kind = late_interaction.read_prompts(folder).get("model_type")
    return (folder / "modules.json").is_file() and kind == "CrossEncoder"


def is_static(folder: Path, route: Role = DOCUMENT) -> bool:
    """Whether the encoder of a sentence-transformers folder is a table without layers. Raises UserError."""
    return any(name in (STATIC_EMBEDDING, TOKEN_TABLE) for name, _ in _modules(folder, route))


def find_router(folder: Path) -> Router | None:
    """Returns the Router of a sentence-transformers folder; None if there is none. Raises UserError."""
    return next((read_router(place) for name, place in _listed_modules(folder) if name in ROUTERS), None)


def read_pooling(folder: Path, log: Log, route: Role = DOCUMENT, weights: bool = True) -> Pooling | None:
    """Reads the modules of a sentence-transformers folder (modules.json), or a folder of Stanford's ColBERT.

    Args:
        weights: whether to read the weights of dense layers. If not, they are zeros of the configured shapes.

    Returns:
        None if there is no modules.json, or if it belongs to a cross-encoder.

    Raises:
        UserError: a module or pooling mode is not supported by `Pooling`, or a path points outside of the folder.
    """
    modules = _modules(folder, route)
    if not modules:
        return _read_stanford(folder, log, weights) if late_interaction.is_stanford(folder) else None
    folder_of, content = dict(modules), late_interaction.read_prompts(folder)
    is_lexical, is_late = "SpladePooling" in folder_of, late_interaction.is_late(folder_of, content)
    texts_file = find_text_settings(folder, route)
    task, length, lowercase = "fill-mask" if is_lexical else "feature-extraction", None, False
    if texts_file is not None:
        length, lowercase = read_text_settings(texts_file, task, log, late_interaction.LENGTH_KEYS if is_late else ())
    tasks = _declared_tasks(encoder_folder(folder, route))
    settings = _model_settings(folder / PROMPTS, content, is_lexical or TOKEN_TABLE in folder_of, is_late, log, tasks)
    settings["mode"] = TOKEN_WEIGHTS if TOKEN_TABLE in folder_of else Pooling.mode
    settings["include_prompt"] = Pooling.include_prompt
    if "Pooling" in folder_of:
        settings["mode"], settings["include_prompt"] = _pooling_settings(folder_of["Pooling"] / "config.json", log)
    if is_lexical:
        settings["mode"], settings["num_log1p"] = _lexical_settings(folder_of["SpladePooling"] / "config.json", log)
    features: tuple[str, ...] = (EMBEDDING,)
    adds_normalize = False
    if is_late:
        mask_file = folder_of[MULTI_VECTOR_MASK] / "config.json" if MULTI_VECTOR_MASK in folder_of else None
        if mask_file is not None and mask_file.is_file():
            _warn_unknown(mask_file, read_json_object(mask_file), late_interaction.MASK_KEYS, log)
        settings["mode"] = TOKEN_POOLING
        settings["interaction"] = late_interaction.read_interaction(folder / PROMPTS, content, texts_file, mask_file)
        features, adds_normalize = late_interaction.token_features(folder, folder_of, content)
    if "Normalize" in folder_of and not adds_normalize:
        file = folder_of["Normalize"] / "config.json"
        _check_features(file, read_json_object(file) if file.is_file() else {}, features, EMBEDDING)
    return Pooling(
        normalize="Normalize" in folder_of or adds_normalize,
        max_length=length,
        lowercase=lowercase,
        dense=tuple(_read_dense(place, features, weights, log) for name, place in modules if name == "Dense"),
        **settings,
    )


def find_text_settings(folder: Path, route: Role = DOCUMENT) -> Path | None:
    """Returns the file of `TEXT_SETTINGS` for an encoder; None if there is none, and for tables."""
    if is_static(folder, route):
        return None
    places = [encoder_folder(folder, route), *([folder] if find_router(folder) is None else [])]
    files = (place / name for place in places for name in TEXT_SETTINGS)
    return next((file for file in files if file.is_file()), None)


def _read_stanford(folder: Path, log: Log, weights: bool) -> Pooling:
    """Returns the pooling of a folder of Stanford's ColBERT. Raises UserError."""
    content, file = late_interaction.read_settings(folder, log), folder / late_interaction.STANFORD_METADATA
    if weights:
        tensors, source = read_tensors(folder)
        if late_interaction.PROJECTION not in tensors:
            raise UserError(f"{source} lacks {late_interaction.PROJECTION}, the projection of ColBERT: copy it again")
        kernel = np.ascontiguousarray(tensors[late_interaction.PROJECTION].astype(np.float32).T)
    else:
        kernel = np.zeros(late_interaction.stanford_shape(folder), np.float32)
    return Pooling(
        TOKEN_POOLING,
        normalize=True,
        dense=(PooledDense(kernel, None, IDENTITY),),
        interaction=late_interaction.read_interaction(file, content, None, None),
        **_model_settings(file, content, False, True, log),
    )


def _modules(folder: Path, route: Role) -> list[tuple[str, Path]]:
    """Returns the modules of a route: a Router in `_listed_modules` is replaced by its own. Raises UserError."""
    modules: list[tuple[str, Path]] = []
    for name, place in _listed_modules(folder):
        if name in ROUTERS:
            router = read_router(place)
            modules += [(inner, _inside(router.file, path)) for inner, path in router.modules[route]]
        else:
            modules.append((name, place))
    module_types = [name for name, _ in modules]
    is_late = bool(modules) and late_interaction.is_late(module_types, late_interaction.read_prompts(folder))
    if modules and not (LATE_ORDER if is_late else ORDER).fullmatch(" ".join(module_types)):
        order = (
            f"Transformer and Pooling, or {STATIC_EMBEDDING}, then any number of Dense, and Normalize; or with "
            f"MLMTransformer and SpladePooling; or {TOKEN_TABLE}"
        )
        late_order = f"Transformer, any number of Dense, {MULTI_VECTOR_MASK} and Normalize, in this order"
        raise UserError(
            f"{folder / 'modules.json'} lists {', '.join(module_types)}: use a model with "
            f"{late_order if is_late else order}"
        )
    return modules


def _listed_modules(folder: Path) -> list[tuple[str, Path]]:
    """Returns (class, folder) of each module in modules.json; [] for cross-encoders and other folders."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    modules = read_json(file)
    if not isinstance(modules, list) or not modules or not all(isinstance(module, dict) for module in modules):
        raise UserError(f"{file} is not a list of modules: copy it again")
    listed = [(class_name(module.get("type", "")), _inside(file, module.get("path", ""))) for module in modules]
    if not is_cross_encoder(folder):
        return listed
    if listed != [("Transformer", folder)]:
        raise UserError(
            f"{file} lists {', '.join(name for name, _ in listed)}: a cross-encoder needs Transformer alone, in "
            "the same folder: use another model"
        )
    return []


def fit_to_model(pooling: Pooling | None, config: ModelConfig, folder: Path, log: Log) -> Pooling | None:
    """Checks the pooling against the model, and completes its maximum length from tokenizer_config.json.

    Raises:
        UserError: the input width of a dense layer differs from the output width of the previous one.
    """
    if pooling is None:
        return None
    width, positions = pooling.pooled_size(config), config.max_position_embeddings
    for layer in pooling.dense:
        if layer.in_features != width:
            raise UserError(
                f"{folder}: a Dense module reads {layer.in_features} features of a vector of {width}: copy the folder "
                "again"
            )
        width = layer.out_features
    if pooling.max_length is None:
        limit = read_model_max_length(folder)
        if limit is not None and limit < positions:
            return dataclasses.replace(pooling, max_length=limit)
        return pooling
    if pooling.max_length > positions:
        text = f"max_seq_length is {pooling.max_length}, but the model reads {positions} tokens: longer texts are cut"
        log(WarningText(f"{folder}: {text}"))
    return pooling


def lower_case(pooling: Pooling | None, tokenizer: Tokenizer) -> tuple[Pooling | None, Tokenizer]:
    """Returns a tokenizer that lower-cases texts except special tokens, in place of the pooling's ``lowercase``."""
    if pooling is None or not pooling.lowercase:
        return pooling, tokenizer
    return dataclasses.replace(pooling, lowercase=False), lower_cased(tokenizer)


def _declared_tasks(folder: Path) -> tuple[str, ...]:
    """Returns the names of an encoder's tasks, whose prompts are in its config.json."""
    file = folder / "config.json"
    tasks = read_json_object(file).get(TASKS) if file.is_file() else None
    return tuple(map(str, tasks)) if isinstance(tasks, list) else ()


def _model_settings(
    file: Path,
    content: dict[str, Any],
    is_lexical: bool,
    is_late: bool,
    log: Log,
    tasks: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the fields of `Pooling` that apply to the whole model, from the content of `PROMPTS`.

    Args:
        tasks: names of further prompts that are applied.
    """
    similarity = content.get("similarity_fn_name") or ("dot" if is_lexical else Pooling.similarity)
    if is_late and similarity in (*SIMILARITIES, PYLATE_SIMILARITY):
        similarity = MAX_SIM  # of PyLate: the similarity of two tokens
    supported_names = TOKEN_SIMILARITIES if is_late else SIMILARITIES
    if similarity not in supported_names:
        raise UserError(
            f"{file}: similarity_fn_name is {shorten(similarity)}: set it to {', '.join(supported_names)}, or null"
        )
    supported = SPARSE_ENCODER if is_lexical else "SentenceTransformer"
    if (kind := content.get("model_type", supported)) != supported and not is_late:
        log(WarningText(f"{file}: model_type is {kind}, which is not supported: embed returns pooled vectors"))
    _warn_unknown(file, content, (*KNOWN_SETTINGS, *(late_interaction.PYLATE_KEYS if is_late else ())), log)
    prompts = content.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise UserError(f"{file}: prompts is {shorten(prompts)}: set it to an object of names and texts")
    truncate_dim = content.get("truncate_dim")
    if truncate_dim is not None and not late_interaction.is_count(truncate_dim):
        raise UserError(f"{file}: truncate_dim is {shorten(truncate_dim)}: set it to a number of features, or null")
    default = content.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise UserError(
            f"{file}: default_prompt_name is {shorten(default)}, but the prompts are {', '.join(prompts) or 'empty'}: "
            "set it to one of them, or null"
        )
    document_prompts: tuple[str, ...] = DOCUMENT_PROMPTS
    if is_late:
        prompts, document_prompts = late_interaction.prompts_with_prefixes(content), ("document",)
    if is_late and truncate_dim is not None:
        log(WarningText(f"{file}: truncate_dim is {truncate_dim}, which is not applied to one embedding per token"))
        truncate_dim = None
    document = next((name for name in document_prompts if prompts.get(name) is not None), document_prompts[0])
    if document != document_prompts[0] and prompts[document]:
        log(WarningText(f"{file}: the prompt {document} is used for documents, unlike in sentence-transformers"))
    if unused := [name for name in prompts if prompts[name] and name not in ("query", document, default, *tasks)]:
        log(WarningText(f"{file}: the prompts {', '.join(unused)} are not applied: put them before your texts"))
    return {
        "query_prompt": prompts.get("query") or "",
        "document_prompt": prompts.get(document) or "",
        "default_prompt": prompts.get(default) or "",
        "similarity": similarity,
        "truncate_dim": truncate_dim,
    }


def read_text_settings(file: Path, task: str, log: Log, applied: Collection[str] = ()) -> tuple[int | None, bool]:
    """Returns the maximum number of tokens, and whether texts are lower-cased.

    Args:
        task: key of `TEXT_TASKS`.
        applied: keys of `TEXT_SETTINGS_READ` that are applied.
    """
    content = read_json_object(file)
    output, name = TEXT_TASKS[task]
    modality = {"text": {"method": "forward", "method_output_name": output}}
    expected = {"transformer_task": task, "modality_config": modality, "module_output_name": name}
    settings_read = {**TEXT_SETTINGS_READ, **expected}
    length, lowercase = content.get("max_seq_length"), content.get("do_lower_case") or False
    if length is not None and not late_interaction.is_count(length):
        raise UserError(f"{file}: max_seq_length is {shorten(length)}: set it to a number of tokens")
    if not isinstance(lowercase, bool):
        raise UserError(f"{file}: do_lower_case is {shorten(lowercase)}: set it to true or false")
    for key, supported in settings_read.items():
        if key not in applied and content.get(key, supported) not in (supported, None):
            log(WarningText(f"{file}: {key} is {shorten(content[key])}, which is not applied"))
    _warn_unknown(file, content, ("max_seq_length", "do_lower_case", "unpad_inputs", *settings_read), log)
    return length, lowercase


def _pooling_settings(file: Path, log: Log) -> tuple[str, bool]:
    """Returns the mode for `Pooling`, and whether prompt tokens are included in the pooling."""
    content, prefix = read_json_object(file), "pooling_mode_"
    mode_keys = [key for key in content if key.startswith(prefix)]
    chosen = content.get("pooling_mode")
    if chosen is None:
        modes = [key.removeprefix(prefix) for key in mode_keys if content[key]]
        modes = [mode.removesuffix("_tokens").removesuffix("_token") for mode in modes]
        chosen = sorted(modes, key=lambda mode: MODES.index(mode) if mode in MODES else 0) or [Pooling.mode]
    chosen = chosen if isinstance(chosen, list) else [chosen]
    modes = [str(name).removesuffix("_tokens") for name in chosen]
    if not modes or any(mode not in MODES for mode in modes):
        raise UserError(f"{file}: the pooling mode is {'+'.join(modes) or 'missing'}: use one of {', '.join(MODES)}")
    include_prompt = content.get("include_prompt", True)
    if not isinstance(include_prompt, bool):
        raise UserError(f"{file}: include_prompt is {shorten(include_prompt)}: set it to true or false")
    known = ("word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt", *mode_keys)
    _warn_unknown(file, content, known, log)
    return CONCATENATED.join(modes), include_prompt


def _lexical_settings(file: Path, log: Log) -> tuple[str, int]:
    """Returns the mode and the number of logarithms for `Pooling` from the settings of SpladePooling."""
    content = read_json_object(file)
    mode, activation = content.get("pooling_strategy", "max"), content.get("activation_function", "relu")
    for key, value, supported in (
        ("pooling_strategy", mode, LEXICAL_MODES),
        ("activation_function", activation, NUM_LOG1P),
    ):
        if value not in supported:
            raise UserError(f"{file}: {key} is {shorten(value)}: use one of {', '.join(supported)}")
    known = ("pooling_strategy", "activation_function", "word_embedding_dimension", "embedding_dimension", "chunk_size")
    _warn_unknown(file, content, known, log)
    return mode, NUM_LOG1P[activation]


def _inside(file: Path, path: Any) -> Path:
    components = Path(path).parts if isinstance(path, str) else ("..",)
    if ".." in components or Path(*components).is_absolute():
        raise UserError(f"{file} has the path {path!r}, which may be outside of its folder: use a path inside")
    return file.parent / path


def _read_dense(folder: Path, features: tuple[str, ...], weights: bool, log: Log) -> PooledDense:
    """Reads a Dense module.

    Args:
        features: names of the vectors that it may read and write. The first one is the default.
        weights: see `read_pooling`.

    Raises:
        UserError: an activation or setting is not supported by `PooledDense`, or the weights have wrong shapes.
    """
    file = folder / "config.json"
    content = read_json_object(file)
    activation = content.get("activation_function", TANH)
    if find_activation(activation) is None:
        raise UserError(
            f"{file}: activation_function is {str(activation)[:80]!r}: use a model with torch.nn's "
            f"{', '.join(ACTIVATIONS)}"
        )
    if content.get("use_residual") not in (None, False):
        raise UserError(
            f"{file}: use_residual is {shorten(content['use_residual'])}, and only false is supported: use another "
            "model"
        )
    _check_features(file, content, features, features[0])
    known_keys = ("in_features", "out_features", "bias", "activation_function", "use_residual", *FEATURE_KEYS)
    _warn_unknown(file, content, known_keys, log)
    shape: tuple[Any, Any] = (content.get("out_features"), content.get("in_features"))
    if not all(map(late_interaction.is_count, shape)):
        raise UserError(
            f"{file}: out_features and in_features are {list(shape)}: set them to the shape of linear.weight"
        )
    if not weights:
        zeros = np.zeros(shape[::-1], np.float32)
        return PooledDense(zeros, zeros[0] if content.get("bias", True) else None, activation)
    tensors, source = read_tensors(folder)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or set(tensors) - {"linear.weight", "linear.bias"}:
        raise UserError(
            f"{source} holds {', '.join(sorted(tensors))}, but a Dense module has linear.weight and linear.bias: copy "
            "it again"
        )
    if weight.shape != shape or (bias is not None and bias.shape != shape[:1]):
        raise UserError(
            f"{source}: linear.weight is {list(weight.shape)}, but config.json makes it {list(shape)}: copy both again"
        )
    if bool(content.get("bias", True)) != (bias is not None):
        raise UserError(
            f"{source}: linear.bias does not match bias {content.get('bias', True)} in config.json: copy both again"
        )
    kernel = np.ascontiguousarray(weight.T.astype(np.float32))
    return PooledDense(kernel, None if bias is None else bias.astype(np.float32), activation)


def _check_features(file: Path, content: dict[str, Any], features: tuple[str, ...], default: str) -> None:
    """Raises UserError if a module reads or writes vectors except ``features``. By default, it reads ``default``."""
    source = content.get(FEATURE_KEYS[0]) or default
    for key, value in zip(FEATURE_KEYS, (source, content.get(FEATURE_KEYS[1]) or source), strict=True):
        if value not in features:
            raise UserError(
                f"{file}: {key} is {shorten(value)}, and only {features[0]} is supported: use another model"
            )


def _warn_unknown(file: Path, content: dict[str, Any], known: Collection[str], log: Log) -> None:
    """Logs keys of a file that have no effect."""
    if unknown := sorted(content.keys() - set(known)):
        log(WarningText(f"not loaded from {file}: {', '.join(unknown)}"))
