"""One vector a text out of its hidden states, as sentence-transformers folders declare it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bert.config import UserError
from bert.interchange.tensor_files import read_json

MODES = ("mean", "cls", "max")


@dataclass(frozen=True)
class Pooling:
    """How hidden states become embeddings. The default is what sentence-transformers gives a plain BERT.

    Attributes:
        mode: mean of the tokens, the first token (cls), or the largest value of each feature (max).
        normalize: scale each embedding to length 1.
        max_length: longest text in tokens; None for as long as the model reads.
    """

    mode: str = "mean"
    normalize: bool = False
    max_length: int | None = None

    def __call__(self, hidden_states: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """[B, T, D] float32, [B, T] -> [B, D] float32; padding is left out."""
        mask = attention_mask[:, :, None]
        if self.mode == "cls":
            embeddings = hidden_states[:, 0]
        elif self.mode == "max":
            embeddings = np.where(mask > 0, hidden_states, -np.inf).max(axis=1)
        else:
            embeddings = (hidden_states * mask).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
        if self.normalize:
            embeddings = embeddings / np.maximum(np.linalg.norm(embeddings, axis=-1, keepdims=True), 1e-12)
        return embeddings.astype(np.float32)


def read_pooling(folder: Path) -> tuple[Pooling | None, Path]:
    """What modules.json of a sentence-transformers folder declares, and the folder of its encoder.

    Returns:
        None and the folder itself where there is no modules.json.

    Raises:
        UserError: a module or a way of pooling that `Pooling` does not compute, or a path that leaves the folder.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return None, folder
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UserError(f"{file} is no list of modules: copy it again")
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if kinds not in (["Transformer"], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{file} lists {', '.join(kinds)}: Transformer, Pooling and Normalize are read, in this order; remove "
            "modules.json to load the encoder alone"
        )
    places = [_inside(file, module.get("path", "")) for module in modules]
    length = None
    declared = folder / "sentence_bert_config.json"
    for config in (places[0] / "sentence_bert_config.json", declared):
        if config.is_file():
            content = read_json(config)
            length = content.get("max_seq_length") if isinstance(content, dict) else None
            if length is not None and (not isinstance(length, int) or length < 1):
                raise UserError(f"{config}: max_seq_length is {length!r}, mend it to a number of tokens")
            break
    if len(kinds) == 1:
        return Pooling(max_length=length), places[0]
    return Pooling(_mode(places[1] / "config.json"), "Normalize" in kinds, length), places[0]


def declared(pooling: Pooling, hidden_size: int) -> dict[str, Any]:
    """The files of a sentence-transformers folder that declare this pooling: path -> content of its JSON."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if pooling.normalize else [])]
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": places[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    modes = {f"pooling_mode_{'cls_token' if m == 'cls' else m + '_tokens'}": m == pooling.mode for m in MODES}
    files: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": hidden_size, **modes},
    }
    if pooling.max_length is not None:
        files["sentence_bert_config.json"] = {"max_seq_length": pooling.max_length, "do_lower_case": False}
    return files


def _mode(file: Path) -> str:
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} is no JSON object: copy it again")
    chosen = content.get("pooling_mode")
    if chosen is None:
        prefix = "pooling_mode_"
        on = [key.removeprefix(prefix) for key, value in content.items() if key.startswith(prefix) and value]
        chosen = "+".join(name.removesuffix("_tokens").removesuffix("_token") for name in on)
    if chosen not in MODES:
        raise UserError(f"{file} pools by {chosen or 'nothing'}: choose one of {', '.join(MODES)}")
    return chosen


def _inside(file: Path, path: Any) -> Path:
    parts = Path(path).parts if isinstance(path, str) else ("..",)
    if ".." in parts or Path(*parts).is_absolute():
        raise UserError(f"{file} names the path {path!r}, which may lie outside of its folder: name one inside")
    return file.parent / path
