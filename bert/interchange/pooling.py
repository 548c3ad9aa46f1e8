"""One vector a text out of its hidden states, as sentence-transformers folders declare it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert.errors import UserError
from bert.interchange.tensor_files import read_json

MODES = ("mean", "cls", "max")

TEXT_SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files that say how long texts may be and whether they are lower-cased, all but the first one of older versions."""

PROMPTS = "config_sentence_transformers.json"
"""The file that has the prompts, and whether the folder is one of embeddings."""

DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names that the prompt of documents goes by."""


@dataclass(frozen=True)
class Pooling:
    """How hidden states become embeddings. The default is what sentence-transformers gives a plain BERT.

    Attributes:
        mode: mean of the tokens, the first token (cls), or the largest value of each feature (max).
        normalize: scale each embedding to length 1.
        max_length: longest text in tokens; None for as long as the model reads.
        lowercase: lower-case texts before they are tokenized, whatever the vocabulary does.
        query_prompt: what queries begin with.
        document_prompt: what documents begin with.
    """

    mode: str = "mean"
    normalize: bool = False
    max_length: int | None = None
    lowercase: bool = False
    query_prompt: str = ""
    document_prompt: str = ""

    def __call__(self, hidden_states: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """[B, T, D] float32, [B, T] -> [B, D] float32; padding is left out."""
        mask = attention_mask[:, :, None]
        if self.mode == "cls":
            embeddings = hidden_states[:, 0]
        elif self.mode == "max":
            embeddings = np.where(mask > 0, hidden_states, -np.inf).max(axis=1)
        else:
            embeddings = (hidden_states * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
        return self._scaled(embeddings)

    def of_sequences(self, hidden_states: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """[tokens, D] float32 of sequences one after the other, [B] tokens of each, at least 1 -> [B, D] float32."""
        starts = np.cumsum(lengths) - lengths
        if self.mode == "cls":
            return self._scaled(hidden_states[starts])
        if self.mode == "max":
            return self._scaled(np.maximum.reduceat(hidden_states, starts))
        return self._scaled(np.add.reduceat(hidden_states, starts) / lengths[:, None])

    def _scaled(self, embeddings: np.ndarray) -> np.ndarray:
        """[B, D] -> [B, D] float32, of length 1 if they are to be."""
        if self.normalize:
            embeddings = embeddings / np.maximum(np.linalg.norm(embeddings, axis=-1, keepdims=True), 1e-12)
        return embeddings.astype(np.float32)


def read_pooling(folder: Path, say: Callable[[str], None]) -> tuple[Pooling | None, Path]:
    """What modules.json of a sentence-transformers folder declares, and the folder of its encoder.

    Args:
        folder: the sentence-transformers folder, or any other.
        say: called with what is declared and not done here.

    Returns:
        None and the folder itself where there is no modules.json, or that of a cross-encoder.

    Raises:
        UserError: a module or a way of pooling that `Pooling` does not compute, or a path that leaves the folder.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return None, folder
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UserError(f"{file} is not a list of modules: copy it again")
    if (folder / PROMPTS).is_file() and _settings(folder / PROMPTS).get("model_type") == "CrossEncoder":
        return None, folder
    module_types = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if module_types not in (["Transformer"], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{file} lists {', '.join(module_types)}: Transformer, Pooling and Normalize are read, in this order; "
            "remove modules.json to load the encoder alone"
        )
    module_folders = [_inside(file, module.get("path", "")) for module in modules]
    settings_files = [module_folder / name for module_folder in (module_folders[0], folder) for name in TEXT_SETTINGS]
    length, lowercase = next((_text_settings(file) for file in settings_files if file.is_file()), (None, False))
    query_prompt, document_prompt = _prompts(folder / PROMPTS, say)
    mode = _mode(module_folders[1] / "config.json") if len(module_types) > 1 else Pooling().mode
    if (query_prompt or document_prompt) and len(module_types) > 1:
        file = module_folders[1] / "config.json"
        if read_json(file).get("include_prompt") is False:
            say(f"{file}: include_prompt is false, which is not read: embeddings include the tokens of a prompt")
    pooling = Pooling(mode, "Normalize" in module_types, length, lowercase, query_prompt, document_prompt)
    return pooling, module_folders[0]


def pooling_config_files(pooling: Pooling, hidden_size: int) -> dict[str, Any]:
    """The files of a sentence-transformers folder that declare this pooling: path -> content of its JSON.

    The first versions of text-embeddings-inference do not start without ``pooling_mode_mean_sqrt_len_tokens``.
    """
    module_types = ["Transformer", "Pooling", *(["Normalize"] if pooling.normalize else [])]
    module_folders = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": module_folders[module_type],
            "type": f"sentence_transformers.models.{module_type}",
        }
        for i, module_type in enumerate(module_types)
    ]
    modes = {f"pooling_mode_{'cls_token' if m == 'cls' else m + '_tokens'}": m == pooling.mode for m in MODES}
    files: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {
            "word_embedding_dimension": hidden_size,
            **modes,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    }
    if pooling.max_length is not None or pooling.lowercase:
        files[TEXT_SETTINGS[0]] = {"max_seq_length": pooling.max_length, "do_lower_case": pooling.lowercase}
    if pooling.query_prompt or pooling.document_prompt:
        prompts = {"query": pooling.query_prompt, "document": pooling.document_prompt}
        files[PROMPTS] = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    return files


def _prompts(file: Path, say: Callable[[str], None]) -> tuple[str, str]:
    """The prompts of queries and of documents; "" for none."""
    content = _settings(file) if file.is_file() else {}
    if content.get("default_prompt_name"):
        say(f"{file}: default_prompt_name is not used: put the prompt before the texts yourself")
    if (similarity := content.get("similarity_fn_name")) not in (None, "cosine"):
        say(f"{file}: similarity_fn_name is {similarity}, which is not used: searches compare by cosine")
    prompts = content.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise UserError(f"{file}: prompts is {str(prompts)[:40]!r}: map names to texts")
    document = next((prompts[name] for name in DOCUMENT_PROMPTS if name in prompts), "")
    return prompts.get("query", ""), document


def _text_settings(file: Path) -> tuple[int | None, bool]:
    """Most tokens of a text, and whether texts are lower-cased."""
    content = _settings(file)
    length, lowercase = content.get("max_seq_length"), content.get("do_lower_case") or False
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise UserError(f"{file}: max_seq_length is {length!r}: set it to a number of tokens")
    if not isinstance(lowercase, bool):
        raise UserError(f"{file}: do_lower_case is {lowercase!r}: set it to true or false")
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


def _mode(file: Path) -> str:
    content = _settings(file)
    chosen = content.get("pooling_mode")
    if chosen is None:
        prefix = "pooling_mode_"
        on = [key.removeprefix(prefix) for key, value in content.items() if key.startswith(prefix) and value]
        chosen = "+".join(name.removesuffix("_tokens").removesuffix("_token") for name in on)
    if chosen not in MODES:
        raise UserError(f"{file} pools by {chosen or 'nothing'}: choose one of {', '.join(MODES)}")
    return chosen


def _inside(file: Path, path: Any) -> Path:
    components = Path(path).parts if isinstance(path, str) else ("..",)
    if ".." in components or Path(*components).is_absolute():
        raise UserError(f"{file} names the path {path!r}, which may lie outside of its folder: name one inside")
    return file.parent / path
