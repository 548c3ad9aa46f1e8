"""Settings of the cross-encoders of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bert.errors import WarningText
from bert.files import read_json
from bert.interchange.sentence_transformers.names import CROSS_ENCODER, PROMPTS
from bert.model.pooling import find_activation


def read_score_activation(
    folder: Path, content: Mapping[str, Any], num_labels: int, log: Callable[[str], None]
) -> str | None:
    """Returns the PyTorch class that a sentence-transformers cross-encoder applies to its score; None for none.

    Args:
        num_labels: number of outputs. The activation is read only if it is 1.
    """
    file, declared = folder / "config.json", content.get("sbert_ce_default_activation_function")
    if isinstance(nested := content.get(CROSS_ENCODER), dict):
        declared = nested.get("activation_fn", declared)
    settings = read_json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
    if isinstance(settings, dict) and settings.get("model_type") == "CrossEncoder" and settings.get("activation_fn"):
        file, declared = folder / PROMPTS, settings["activation_fn"]
    if declared is None or str(declared).endswith(".Identity"):
        return None
    if num_labels == 1 and find_activation(declared) is not None:
        return str(declared)
    log(WarningText(f"{file}: activation_fn is {str(declared)[:80]}, which is not applied"))
    return None
