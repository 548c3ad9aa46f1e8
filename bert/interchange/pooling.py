"""One vector a text out of its hidden states, as sentence-transformers folders declare it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert.errors import UserError, WarningText
from bert.files import read_json
from bert.interchange.dense import Dense, check_names, read_dense, warn_unknown

MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")
"""Ways of pooling, in the order in which sentence-transformers concatenates those that its older files switch on."""

CONCATENATED = "+"
"""Separator of the names of several modes, whose vectors are concatenated."""

TEXT_SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files that say how long texts may be and whether they are lower-cased, all but the first one of older versions."""

PROMPTS = "config_sentence_transformers.json"
"""The file that has the prompts, and whether the folder is one of embeddings."""

KNOWN_SETTINGS = (
    *("model_type", "__version__", "requirements", "prompts", "default_prompt_name", "similarity_fn_name"),
    "truncate_dim",
)
"""Keys of that file that are applied, change nothing, or have a message of their own."""

TEXT_SETTINGS_READ = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "processing_kwargs": {},
    "query_length": None,
    "document_length": None,
    "query_expansion": None,
}
"""Keys of `TEXT_SETTINGS` of which one value is read."""

ORDER = re.compile("Transformer( Pooling( Dense)*( Normalize)?)?")
"""Modules that are read."""

WRITTEN = ("mean", "cls", "max", "mean_sqrt_len")
"""Modes whose keys are written even if they are off."""

KEY_OF_MODE = {"cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}
"""Keys of 1_Pooling/config.json that do not end in ``_tokens``."""

DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names that the prompt of documents goes by."""


@dataclass(frozen=True)
class Pooling:
    """How hidden states become embeddings. The default is what sentence-transformers gives a plain BERT.

    Attributes:
        mode: one of `MODES`, or several joined by ``+``, whose vectors are concatenated: the first token (cls), the
            largest value of each feature (max), the mean of the tokens, their sum divided by the square root of their
            number (mean_sqrt_len), their mean weighted by the position from 1 on (weightedmean), or the last token.
        normalize: scale each embedding to length 1.
        max_length: longest text in tokens; None for as long as the model reads.
        lowercase: lower-case texts before they are tokenized, whatever the vocabulary does.
        query_prompt: what queries begin with.
        document_prompt: what documents begin with.
        include_prompt: whether the tokens of a prompt are pooled too.
        truncate_dim: number of leading features that are kept, after the scaling; None keeps all.
        dense: layers applied to the pooled vector, in order.
    """

    mode: str = "mean"
    normalize: bool = False
    max_length: int | None = None
    lowercase: bool = False
    query_prompt: str = ""
    document_prompt: str = ""
    include_prompt: bool = True
    truncate_dim: int | None = None
    dense: tuple[Dense, ...] = ()

    @property
    def modes(self) -> list[str]:
        """The modes whose vectors are concatenated."""
        return self.mode.split(CONCATENATED)

    def pooled_size(self, hidden_size: int) -> int:
        """Width of the pooled vector, before the dense layers."""
        return hidden_size * len(self.modes)

    def embedding_size(self, hidden_size: int) -> int:
        """Width of an embedding."""
        width = self.dense[-1].out_features if self.dense else self.pooled_size(hidden_size)
        return min(width, self.truncate_dim or width)

    def __call__(
        self, hidden_states: np.ndarray, attention_mask: np.ndarray, skipped: np.ndarray | None = None
    ) -> np.ndarray:
        """Computes embeddings of padded rows.

        Args:
            hidden_states: [B, T, D] float32.
            attention_mask: [B, T], 1 for a token and 0 for the padding behind them.
            skipped: [B] leading tokens of each row that are not pooled; None pools all.

        Returns:
            [B, E] float32, with E as `embedding_size`.
        """
        if skipped is not None:
            skipped = np.minimum(skipped, attention_mask.sum(axis=1) - 1)
            attention_mask = attention_mask * (np.arange(attention_mask.shape[1]) >= skipped[:, None])
        parts = [_pool_rows(mode, hidden_states, attention_mask) for mode in self.modes]
        return self._finished(np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0])

    def of_sequences(
        self, hidden_states: np.ndarray, lengths: np.ndarray, skipped: np.ndarray | None = None
    ) -> np.ndarray:
        """Computes embeddings of sequences that follow each other without padding.

        Args:
            hidden_states: [tokens, D] float32.
            lengths: [B] tokens of each sequence, at least 1.
            skipped: as of `__call__`.

        Returns:
            [B, E] float32.
        """
        positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if skipped is not None:
            skipped = np.minimum(skipped, lengths - 1)
            kept = positions >= np.repeat(skipped, lengths)
            hidden_states, positions, lengths = hidden_states[kept], positions[kept], lengths - skipped
        parts = [_pool_sequences(mode, hidden_states, lengths, positions) for mode in self.modes]
        return self._finished(np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0])

    def _finished(self, embeddings: np.ndarray) -> np.ndarray:
        """[B, pooled size] -> [B, E] float32: dense layers, length 1 and the leading features, as configured."""
        for layer in self.dense:
            embeddings = layer(embeddings)
        if self.normalize:
            embeddings = embeddings / np.maximum(np.linalg.norm(embeddings, axis=-1, keepdims=True), 1e-12)
        return embeddings[:, : self.truncate_dim].astype(np.float32)


def _pool_rows(mode: str, hidden_states: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
    """[B, T, D], [B, T] -> [B, D]."""
    rows, mask = np.arange(len(hidden_states)), attention_mask[:, :, None]
    if mode == "cls":
        return hidden_states[rows, attention_mask.argmax(axis=1)]
    if mode == "lasttoken":
        return hidden_states[rows, attention_mask.shape[1] - 1 - attention_mask[:, ::-1].argmax(axis=1)]
    if mode == "max":
        return np.where(mask > 0, hidden_states, -np.inf).max(axis=1)
    if mode == "weightedmean":
        mask = mask * np.arange(1, mask.shape[1] + 1, dtype=np.float32)[:, None]
    count = np.maximum(mask.sum(axis=1), 1)
    return (hidden_states * mask).sum(axis=1) / (np.sqrt(count) if mode == "mean_sqrt_len" else count)


def _pool_sequences(mode: str, hidden_states: np.ndarray, lengths: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[tokens, D], [B], [tokens] places of the tokens in their sequences -> [B, D]."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if mode in ("cls", "lasttoken"):
        return hidden_states[starts if mode == "cls" else ends - 1]
    if mode == "max":
        return np.maximum.reduceat(hidden_states, starts)
    count = lengths[:, None]
    if mode == "weightedmean":
        weights = (positions[:, None] + 1).astype(np.float32)
        hidden_states, count = hidden_states * weights, np.add.reduceat(weights, starts)
    return np.add.reduceat(hidden_states, starts) / (np.sqrt(count) if mode == "mean_sqrt_len" else count)


def encoder_folder(folder: Path) -> Path:
    """The folder of the encoder of a sentence-transformers folder; any other folder as it is. Raises UserError."""
    modules = _modules(folder)
    return modules[0][1] if modules else folder


def read_pooling(folder: Path, say: Callable[[str], None]) -> Pooling | None:
    """Reads what modules.json of a sentence-transformers folder declares.

    Args:
        folder: the sentence-transformers folder, or any other.
        say: called with what is declared and not applied here.

    Returns:
        None if there is no modules.json, or if it is a cross-encoder's.

    Raises:
        UserError: a module or a way of pooling that `Pooling` does not compute, or a path that leaves the folder.
    """
    modules = _modules(folder)
    if not modules:
        return None
    folder_of = dict(modules)
    settings_files = [place / name for place in (modules[0][1], folder) for name in TEXT_SETTINGS]
    length, lowercase = next((_text_settings(file, say) for file in settings_files if file.is_file()), (None, False))
    query_prompt, document_prompt, truncate_dim = _model_settings(folder / PROMPTS, say)
    mode, include_prompt = Pooling.mode, Pooling.include_prompt
    if "Pooling" in folder_of:
        mode, include_prompt = _pooling_settings(folder_of["Pooling"] / "config.json", say)
    if "Normalize" in folder_of and (file := folder_of["Normalize"] / "config.json").is_file():
        check_names(file, _settings(file))
    return Pooling(
        mode=mode,
        normalize="Normalize" in folder_of,
        max_length=length,
        lowercase=lowercase,
        query_prompt=query_prompt,
        document_prompt=document_prompt,
        include_prompt=include_prompt,
        truncate_dim=truncate_dim,
        dense=tuple(
            read_dense(place, _settings(place / "config.json"), say) for name, place in modules if name == "Dense"
        ),
    )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(class, folder) of each module of a sentence-transformers folder; [] for any other folder and a cross-encoder."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UserError(f"{file} is not a list of modules: copy it again")
    module_types = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if (folder / PROMPTS).is_file() and _settings(folder / PROMPTS).get("model_type") == "CrossEncoder":
        return []
    if not ORDER.fullmatch(" ".join(module_types)):
        raise UserError(
            f"{file} lists {', '.join(module_types)}: Transformer, Pooling, any number of Dense, and Normalize are "
            "read, in this order; name another model, as its embeddings need all modules"
        )
    places = [_inside(file, module.get("path", "")) for module in modules]
    return list(zip(module_types, places, strict=True))


def check_dense_widths(pooling: Pooling, hidden_size: int, source: Path) -> None:
    """Raises UserError if a dense layer reads vectors of another width than the one before it writes."""
    width = pooling.pooled_size(hidden_size)
    for layer in pooling.dense:
        if layer.in_features != width:
            raise UserError(
                f"{source}: a Dense module reads {layer.in_features} features of a vector of {width}: copy the folder "
                "again"
            )
        width = layer.out_features


def pooling_config_files(pooling: Pooling, hidden_size: int) -> dict[str, Any]:
    """The files of a sentence-transformers folder that declare this pooling: path -> content of its JSON.

    The first versions of text-embeddings-inference do not start without ``pooling_mode_mean_sqrt_len_tokens``.
    """
    module_types = ["Transformer", "Pooling", *["Dense"] * len(pooling.dense)]
    module_types += ["Normalize"] if pooling.normalize else []
    paths = ["", *(f"{number}_{module_type}" for number, module_type in enumerate(module_types) if number)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{module_type}"}
        for i, (path, module_type) in enumerate(zip(paths, module_types, strict=True))
    ]
    modes = pooling.modes
    keys = {mode: KEY_OF_MODE.get(mode, f"pooling_mode_{mode}_tokens") for mode in WRITTEN}
    keys |= {mode: KEY_OF_MODE.get(mode, f"pooling_mode_{mode}_tokens") for mode in modes}
    declared: dict[str, Any] = {
        "word_embedding_dimension": hidden_size,
        **{key: mode in modes for mode, key in keys.items()},
    }
    if len(modes) > 1:  # in an order that the keys above cannot express
        declared["pooling_mode"] = [f"{mode}_tokens" if mode == "mean_sqrt_len" else mode for mode in modes]
    if not pooling.include_prompt:
        declared["include_prompt"] = False
    files: dict[str, Any] = {"modules.json": modules, "1_Pooling/config.json": declared}
    for number, layer in enumerate(pooling.dense, 2):
        files[f"{number}_Dense/config.json"] = layer.config
    if pooling.max_length is not None or pooling.lowercase:
        files[TEXT_SETTINGS[0]] = {"max_seq_length": pooling.max_length, "do_lower_case": pooling.lowercase}
    if pooling.query_prompt or pooling.document_prompt or pooling.truncate_dim is not None:
        prompts = {"query": pooling.query_prompt, "document": pooling.document_prompt}
        files[PROMPTS] = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        if pooling.truncate_dim is not None:
            files[PROMPTS]["truncate_dim"] = pooling.truncate_dim
    return files


def _model_settings(file: Path, say: Callable[[str], None]) -> tuple[str, str, int | None]:
    """The prompts of queries and of documents, "" for none, and the number of features that are kept."""
    content = _settings(file) if file.is_file() else {}
    if content.get("default_prompt_name"):
        say(WarningText(f"{file}: default_prompt_name is not used: put the prompt before the texts yourself"))
    if (similarity := content.get("similarity_fn_name")) not in (None, "cosine"):
        say(WarningText(f"{file}: similarity_fn_name is {similarity}, which is not used: searches compare by cosine"))
    if (kind := content.get("model_type", "SentenceTransformer")) != "SentenceTransformer":
        say(WarningText(f"{file}: model_type is {kind}, whose vectors are not read: embed gives pooled ones"))
    warn_unknown(file, content, KNOWN_SETTINGS, say)
    prompts = content.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise UserError(f"{file}: prompts is {str(prompts)[:40]!r}: map names to texts")
    truncate_dim = content.get("truncate_dim")
    if truncate_dim is not None and (type(truncate_dim) is not int or truncate_dim < 1):
        raise UserError(f"{file}: truncate_dim is {str(truncate_dim)[:40]}: set it to a number of features, or null")
    document = next((prompts[name] for name in DOCUMENT_PROMPTS if prompts.get(name) is not None), "")
    return prompts.get("query") or "", document, truncate_dim


def _text_settings(file: Path, say: Callable[[str], None]) -> tuple[int | None, bool]:
    """Most tokens of a text, and whether texts are lower-cased."""
    content = _settings(file)
    length, lowercase = content.get("max_seq_length"), content.get("do_lower_case") or False
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise UserError(f"{file}: max_seq_length is {length!r}: set it to a number of tokens")
    if not isinstance(lowercase, bool):
        raise UserError(f"{file}: do_lower_case is {lowercase!r}: set it to true or false")
    for key, plain in TEXT_SETTINGS_READ.items():
        if content.get(key, plain) not in (plain, None):
            say(WarningText(f"{file}: {key} is {str(content[key])[:80]}, which is not applied"))
    warn_unknown(file, content, ("max_seq_length", "do_lower_case", "unpad_inputs", *TEXT_SETTINGS_READ), say)
    return length, lowercase


def read_model_max_length(folder: Path, longest: int) -> int:
    """Most tokens of a text where `TEXT_SETTINGS` do not tell: what the tokenizer lets through, or ``longest``."""
    file = folder / "tokenizer_config.json"
    length = _settings(file).get("model_max_length") if file.is_file() else None
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length < longest:
        return longest
    return length


def _settings(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object: copy it again")
    return content


def _pooling_settings(file: Path, say: Callable[[str], None]) -> tuple[str, bool]:
    """The mode, as `Pooling` has it, and whether the tokens of a prompt are pooled."""
    content = _settings(file)
    chosen, prefix = content.get("pooling_mode"), "pooling_mode_"
    if chosen is None:
        on = [key.removeprefix(prefix) for key, value in content.items() if key.startswith(prefix) and value]
        on = [name.removesuffix("_tokens").removesuffix("_token") for name in on]
        chosen = sorted(on, key=lambda mode: MODES.index(mode) if mode in MODES else 0) or [Pooling.mode]
    chosen = chosen if isinstance(chosen, list) else [chosen]
    modes = [name.removesuffix("_tokens") if isinstance(name, str) else str(name) for name in chosen]
    if not modes or any(mode not in MODES for mode in modes):
        raise UserError(f"{file} pools by {'+'.join(modes) or 'nothing'}: choose of {', '.join(MODES)}")
    include_prompt = content.get("include_prompt", True)
    if not isinstance(include_prompt, bool):
        raise UserError(f"{file}: include_prompt is {include_prompt!r}: set it to true or false")
    known = {key for key in content if key.startswith(prefix)}
    warn_unknown(
        file,
        content,
        {"word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt", *known},
        say,
    )
    return CONCATENATED.join(modes), include_prompt


def _inside(file: Path, path: Any) -> Path:
    components = Path(path).parts if isinstance(path, str) else ("..",)
    if ".." in components or Path(*components).is_absolute():
        raise UserError(f"{file} names the path {path!r}, which may lie outside of its folder: name one inside")
    return file.parent / path
