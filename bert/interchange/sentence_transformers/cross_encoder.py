"""Settings of the cross-encoders of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert.errors import Log, WarningText
from bert.files import read_json
from bert.interchange.sentence_transformers import late_interaction
from bert.interchange.sentence_transformers.names import CROSS_ENCODER, PROMPTS, SIGMOID
from bert.interchange.sentence_transformers.reader import find_text_settings, is_cross_encoder, read_text_settings
from bert.model.pooling import find_activation
from bert.tokenizer.hf_settings import read_model_max_length


def read_max_length(folder: Path, texts: Path, log: Log) -> int | None:
    """Returns the maximum number of tokens of a row; None for the model's. Logs settings that are not applied.

    Args:
        texts: folder of the tokenizer.
    """
    length = read_model_max_length(texts)
    if not is_cross_encoder(folder):
        return length
    content = late_interaction.read_prompts(folder)
    prompts, name = content.get("prompts"), content.get("default_prompt_name")
    if isinstance(prompts, dict) and isinstance(name, str) and prompts.get(name):
        text = f"the prompt {name} is not applied: put it before the first text of a pair"
        log(WarningText(f"{folder / PROMPTS}: {text}"))
    file = find_text_settings(folder)
    if file is None:
        return length
    declared, lowercase = read_text_settings(file, "sequence-classification", log)
    if lowercase:
        log(WarningText(f"{file}: do_lower_case is true, which is not applied"))
    return declared or length


def read_score_activation(folder: Path, content: Mapping[str, Any], num_labels: int, log: Log) -> str | None:
    """Returns the PyTorch class that a sentence-transformers cross-encoder applies to its score; None for other models.

    Without a declaration, a cross-encoder applies a sigmoid to a single output.

    Args:
        num_labels: number of outputs. The activation is read only if it is 1.
    """
    file, declared = folder / "config.json", content.get("sbert_ce_default_activation_function")
    if isinstance(nested := content.get(CROSS_ENCODER), dict):
        declared = nested.get("activation_fn", declared)
    settings = read_json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
    if isinstance(settings, dict) and settings.get("model_type") == "CrossEncoder" and settings.get("activation_fn"):
        file, declared = folder / PROMPTS, settings["activation_fn"]
    if declared is None and num_labels == 1 and (isinstance(nested, dict) or is_cross_encoder(folder)):
        return SIGMOID
    if declared is None or (num_labels != 1 and str(declared).endswith(".Identity")):
        return None
    if num_labels == 1 and find_activation(declared) is not None:
        return str(declared)
    log(WarningText(f"{file}: activation_fn is {str(declared)[:80]}, which is not applied"))
    return None
