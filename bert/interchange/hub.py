"""Models of the Hugging Face hub, fetched only where a name of one is given."""

from __future__ import annotations

import re
from pathlib import Path

from bert.config import UserError
from bert.interchange import first_line

FILES = [
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "modules.json",
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
]
PICKLES = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"]


def is_hub_name(source: str | Path) -> bool:
    """Whether this is ``organisation/name`` and cannot be a mistyped path: no folder of the first part is here."""
    name = str(source)
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name)) and not Path(name.split("/")[0]).exists()


def download(name: str) -> Path:
    """The folder of a hub's model in the hub's own cache, downloaded where it is not there yet.

    Raises:
        UserError: no such model, no access, no network.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=FILES))
        if (folder / "config.json").is_file() and not any(folder.glob("model*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*FILES, *PICKLES]))
    except Exception as error:  # the client raises its own, httpx's and the system's
        raise UserError(
            f"{name} is not a folder here and cannot be had from the Hugging Face hub ({first_line(error)}): "
            "name an existing folder, or mend the name or the network"
        ) from None
    return folder
